"""A mask as a disjunction of clauses, each a conjunction of comparisons that tile analysis can weigh.

`Clauses(v).of(mask, True)` are the ways to be visible, `of(mask, False)` the ways to be hidden.  Every case that
holds is among them: a part that is too large to spread out is left out of its clause, which then says less.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TypeGuard

from attncc.ir.nodes import BOOL, I32, Const, Domain, Expr, Leaf, Load, Op, Variant, children, objects, transform
from attncc.ir.ranges_exprs import (
    FALSE,
    TRUE,
    ZERO,
    Linear,
    floordiv,
    invariant,
    le,
    linear,
    lt,
    make,
    rebuilt,
    sub,
    total,
)

MOST_CLAUSES = 12  # of one mask: each is evaluated for each tile
MOST_STEPS = 400


@dataclass(frozen=True)
class AtMost:
    """x <= y, or x < y where `strict`; of i32; out of `source`, a comparison of the mask."""

    x: Expr
    y: Expr
    strict: bool
    source: Expr = field(compare=False)


@dataclass(frozen=True)
class Residue:
    """x % m == r, or != where not `equal`."""

    x: Expr
    m: Expr
    r: Expr
    equal: bool
    source: Expr = field(compare=False)


@dataclass(frozen=True)
class Test:
    """A bool expression, or its negation."""

    source: Expr
    holds: bool


@dataclass(frozen=True)
class Opaque:
    """What is left out: something about `source`."""

    source: Expr


Literal = AtMost | Residue | Test | Opaque
Clause = tuple[Literal, ...]


def parts(x: Literal) -> tuple[Expr, ...]:
    if isinstance(x, AtMost):
        return x.x, x.y
    return (x.x, x.m, x.r) if isinstance(x, Residue) else (x.source,)


def negated(x: Literal) -> Literal | None:
    if isinstance(x, AtMost):
        return AtMost(x.y, x.x, not x.strict, x.source)
    if isinstance(x, Residue):
        return replace(x, equal=not x.equal)
    return Test(x.source, not x.holds) if isinstance(x, Test) else None


# ------------------------------------------------------------------------------------------------ where to read
class Reads:
    """Which loads may be evaluated where: a load under a guard may read out of range where the guard says no."""

    def __init__(self, v: Variant, mask: Expr, without: Collection[str] = (), guarded: bool = False):
        self.tensors = {t.name: t for t in v.tensors}
        self.always = set() if guarded else set(_unguarded(mask))  # read for every row and key there is
        self.without = without  # tensors that nothing may be asked of
        self.guarded = guarded  # something that isn't known hides keys beside the mask

    def known(self, e: Expr) -> bool:
        return not self.without or not any(isinstance(x, Load) and x.tensor in self.without for x in objects(e))

    def rising(self, load: Load) -> bool:
        """Do the values rise along the last index, all else fixed?"""
        t = self.tensors[load.tensor]
        return t.sorted and t.dtype != "u32" and all(map(invariant, load.index[:-1]))  # a u32 reads as i32

    def in_range(self, load: Load) -> bool:
        """Is every index right by its kind, once one by position is not below 0?"""
        return all(map(_fits, load.index, self.tensors[load.tensor].dims))

    def anywhere(self, e: Expr) -> bool:
        """May every load of `e` be evaluated for any row and key of a tile?"""
        loads = [x for x in objects(e) if isinstance(x, Load)]
        return all(x.tensor not in self.without and (x in self.always or self.in_range(x)) for x in loads)


def _fits(index: Expr, dim: str | int) -> bool:
    if isinstance(index, Const):
        return isinstance(dim, int) and 0 <= index.value < dim
    return isinstance(index, Leaf) and (index.name == dim or (dim == "pos" and index.name in ("i", "j")))


def _unguarded(e: Expr) -> Iterator[Load]:
    todo = [e]
    while todo:
        x = todo.pop()
        if isinstance(x, Load):
            yield x
        guards = isinstance(x, Op) and x.op in ("and", "or", "select")
        todo += children(x)[:1] if guards else children(x)


# ---------------------------------------------------------------------------------------------------- clauses
def whole_mask(v: Variant) -> Expr:
    """The mask, and with a `domain` its blocks too: as a look-up that nothing is known of."""
    return v.mask if v.domain is None else make("and", v.mask, _selected(v.domain))


def _selected(d: Domain) -> Load:
    blocks = (floordiv(Leaf("j"), d.size) if x is None else x for x in d.index)
    return Load(d.tensor, tuple(blocks), BOOL, d.span)


class Clauses:
    def __init__(self, reads: Reads):
        self.reads = reads
        self.known: dict[tuple[Expr, bool], list[Clause]] = {}
        self.steps = 0  # comparisons looked at: cases within cases may double at every step

    def of(self, e: Expr, want: bool) -> list[Clause]:
        """Clauses that cover every case in which `e` is `want`."""
        if (e, want) not in self.known:
            self.known[e, want] = self.clauses(e, want)
        return self.known[e, want]

    def clauses(self, e: Expr, want: bool) -> list[Clause]:
        if isinstance(e, Const):
            return [()] if e.value == want else []
        if not isinstance(e, Op) or (invariant(e) and self.reads.anywhere(e)):
            return [(Test(e, want),)]
        if e.op == "not":
            return self.of(e.args[0], not want)
        if e.op in ("and", "or"):
            return self.conjunction(e, want) if (e.op == "and") == want else self.disjunction(e, want)
        if e.op == "select":
            c, x, y = e.args
            return union(cross(self.of(c, True), self.of(x, want), x), cross(self.of(c, False), self.of(y, want), y), e)
        if e.op in ("eq", "ne") and e.args[0].type == BOOL:
            (x, y), equal = e.args, (e.op == "eq") == want
            yes, no = (cross(self.of(x, b), self.of(y, b == equal), y) for b in (True, False))
            return union(yes, no, e)
        if e.op in ("lt", "le", "eq", "ne") and e.args[0].type == I32:
            return self.comparison(e, want)
        return [(Test(e, want),)]

    def conjunction(self, e: Op, want: bool) -> list[Clause]:
        x, y = e.args
        return cross(self.of(x, want), self.of(y, want), y)

    def disjunction(self, e: Op, want: bool) -> list[Clause]:
        x, y = e.args
        second = self.of(y, want)
        if not self.reads.anywhere(y):  # read only where the first one does not hold
            second = cross(self.of(x, not want), second, y)
        return union(self.of(x, want), second, e)

    def comparison(self, e: Op, want: bool) -> list[Clause]:
        x, y = e.args
        if e.op in ("lt", "le"):
            return self.at_most(AtMost(x, y, e.op == "lt", e) if want else AtMost(y, x, e.op == "le", e))
        equal = (e.op == "eq") == want
        residue = as_residue(x, y, equal, e) or as_residue(y, x, equal, e)
        if residue:
            return [(residue,)]
        up, down = (self.at_most(AtMost(a, b, not equal, e)) for a, b in ((x, y), (y, x)))
        return cross(up, down, e) if equal else union(up, down, e)

    def at_most(self, c: AtMost) -> list[Clause]:
        """x <= y with min, max, abs and select taken apart."""
        self.steps += 1
        if self.steps > MOST_STEPS:
            return [(Opaque(c.source),)]
        for side, whole in ((c.x, "max"), (c.y, "min")):  # max(a, b) <= y: both are; min(a, b) <= y: one is
            if not isinstance(side, Op) or side.op not in ("min", "max", "abs") or invariant(side):
                continue
            ends = side.args if side.op != "abs" else (side.args[0], sub(ZERO, side.args[0]))
            first, second = (self.at_most(replace(c, x=a) if whole == "max" else replace(c, y=a)) for a in ends)
            join = cross if whole == ("max" if side.op == "abs" else side.op) else union
            return join(first, second, c.source)
        inner = next((n for s in (c.x, c.y) for n in objects(s) if _splits(n)), None)
        if inner is None:
            truth = (lt if c.strict else le)(c.x, c.y)
            return [()] if truth == TRUE else [] if truth == FALSE else [(c,)]
        every: list[Clause] = []
        for condition, value in _cases(inner):
            one = self.at_most(replace(c, x=_put(c.x, inner, value), y=_put(c.y, inner, value)))
            every = union(every, cross(self.of(condition, True), one, c.source), c.source)
        return every


def cross(xs: list[Clause], ys: list[Clause], second: Expr) -> list[Clause]:
    """Every pair; where they are too many, without what `second`, which `ys` stands for, says."""
    found = _absorb([_merge(x, y) for x, y in product(xs, ys)])
    return found if len(found) <= MOST_CLAUSES else [_merge(x, (Opaque(second),)) for x in xs]


def union(xs: list[Clause], ys: list[Clause], e: Expr) -> list[Clause]:
    """Both; where they are too many, nothing is known of `e`."""
    found = _absorb(xs + ys)
    return found if len(found) <= MOST_CLAUSES else [(Opaque(e),)]


def _splits(n: Expr) -> TypeGuard[Op]:
    return isinstance(n, Op) and n.type == I32 and n.op in ("min", "max", "abs", "select") and not invariant(n)


def _cases(n: Op) -> list[tuple[Expr, Expr]]:
    """(condition, value) of a select, min, max or abs."""
    if n.op == "select":
        c, x, y = n.args
        return [(c, x), (make("not", c), y)]
    if n.op == "abs":
        x = n.args[0]
        return [(make("le", ZERO, x), x), (make("lt", x, ZERO), sub(ZERO, x))]
    x, y = n.args
    first, other = (x, y) if n.op == "min" else (y, x)
    return [(make("le", x, y), first), (make("lt", y, x), other)]


def _put(e: Expr, old: Expr, new: Expr) -> Expr:
    return transform(e, lambda x: new if x == old else rebuilt(x))


def as_residue(x: Expr, y: Expr, equal: bool, source: Expr) -> Residue | None:
    """x == y as a % m == r, where it is one: x a remainder, y invariant or a remainder by the same m."""
    if not isinstance(x, Op) or x.op != "mod" or invariant(x) or not invariant(x.args[1]):
        return None
    a, m = x.args
    if invariant(y):
        return Residue(a, m, y, equal, source)
    if isinstance(y, Op) and y.op == "mod" and y.args[1] == m:
        difference: Linear = linear(a) - linear(y.args[0])
        if linear(a).exact and linear(y.args[0]).exact and difference.exact:
            return Residue(total(difference), m, ZERO, equal, source)
    return None


def _merge(x: Clause, y: Clause) -> Clause:
    return x + tuple(literal for literal in y if literal not in x)


def _absorb(clauses: list[Clause]) -> list[Clause]:
    """Without those that contradict themselves or that a shorter one covers."""
    kept: list[Clause] = []
    for c in clauses:
        have = set(c)
        if any(negated(x) in have for x in c) or any(set(k) <= have for k in kept):
            continue
        kept = [k for k in kept if not have <= set(k)] + [c]
    return kept


def joined(clauses: list[Clause]) -> list[Clause]:
    """With `x and …` and `not x and …` made one."""
    todo, done = list(clauses), []
    while todo:
        c = todo.pop(0)
        for k in done:
            odd = set(c) ^ set(k)
            if len(odd) == 2 and negated(odd.pop()) in odd:
                done.remove(k)
                todo.append(tuple(x for x in c if x in k))
                break
        else:
            done.append(c)
    return _absorb(done)
