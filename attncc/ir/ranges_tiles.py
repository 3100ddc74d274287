"""What one clause says of a tile: the keys it may hold for, and conditions on the tile as a whole.

The bounds of a clause on i, j and j - i close over each other exactly (difference constraints, Dill 1989): rows
a..b, keys p..q and distances u..v that take part in some cell.  What is no bound (a remainder, a sorted look-up on
both sides) is weighed at the ends of these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from attncc.ir.nodes import BOOL, I32, Const, Expr, Leaf, Load, Op, objects
from attncc.ir.ranges_bounds import KEY, ROW, Bound, direction, solve, tame
from attncc.ir.ranges_clauses import AtMost, Clause, Literal, Reads, Residue, Test, joined, parts
from attncc.ir.ranges_exprs import (
    FALSE,
    I0,
    I1,
    J0,
    J1,
    LIMIT,
    TRUE,
    ZERO,
    Fact,
    Linear,
    add,
    both,
    choose,
    either,
    floordiv,
    invariant,
    le,
    least,
    linear,
    lt,
    make,
    mod,
    most,
    multiple,
    negate,
    number,
    shift,
    sub,
    substitute,
    times,
    total,
)

ONE = number(1)
IQ_SHIFT = sub(Leaf("qo_len"), Leaf("kv_len"))


def at_row(e: Expr, row: Expr) -> Expr:
    return substitute(e, {"i": row, "iq": add(row, IQ_SHIFT)})


@dataclass(frozen=True)
class Ends:
    """Lowest and highest value over a tile; only where `valid`."""

    low: Expr
    high: Expr
    valid: Expr = TRUE


@dataclass
class Region:
    """One clause over a tile.  The cells where it holds have keys >= every `low` and <= every `high` (neither knows
    of j0, j1); there are none unless `when` (free of j0, j1 too) and each of `rest`."""

    clause: Clause
    bounds: list[Bound]
    reads: Reads
    used: Clause = ()  # what of it is known
    tests: list[Expr] = field(default_factory=list)  # invariant conditions
    rest: list[Expr] = field(default_factory=list)
    unknown: list[Expr] = field(default_factory=list)
    facts: list[Fact] = field(default_factory=list)

    # ------------------------------------------------------------------------------------------------- bounds
    def _of(self, key: Leaf, upper: bool) -> list[Bound]:
        return [b for b in self.bounds if b.of == key and b.upper == upper]

    @cached_property
    def rows(self) -> tuple[Expr, Expr]:
        """Rows that the bounds on i alone leave."""
        lows, highs = ([b.limit for b in self._of(ROW, upper)] for upper in (False, True))
        return most(I0, *lows), least(I1, *highs)

    def value(self, b: Bound, row: Expr) -> Expr:
        """The limit of key j at `row`, itself included; ±LIMIT where it wraps between the rows of the tile."""
        x = at_row(b.limit, row)
        if not b.wraps:
            return x
        first, last = (at_row(b.limit, r) for r in self.rows)
        # among rows in a row the sum wraps at most once, and then falls
        if b.upper:
            x = shift(most(x, number(-LIMIT)), -1) if b.strict else least(x, number(LIMIT))
        elif b.strict:
            x = shift(least(x, number(LIMIT)), 1)
        return choose(le(first, last), x, number(LIMIT if b.upper else -LIMIT))

    def extreme(self, b: Bound) -> Expr:
        """The weakest limit of j over the rows."""
        reads = any(isinstance(x, Load) and not invariant(x) for x in objects(b.limit))
        ends = (I0, I1) if reads else self.rows  # a row that bounds on i leave need not be there
        return self.value(b, ends[(b.direction >= 0) == b.upper])

    @cached_property
    def lows(self) -> list[tuple[Bound, Expr]]:
        return [(b, self.extreme(b)) for b in self._of(KEY, False)]

    @cached_property
    def highs(self) -> list[tuple[Bound, Expr]]:
        return [(b, self.extreme(b)) for b in self._of(KEY, True)]

    @cached_property
    def lowest(self) -> Expr | None:
        return most(*(x for _, x in self.lows)) if self.lows else None

    @cached_property
    def highest(self) -> Expr | None:
        return least(*(y for _, y in self.highs)) if self.highs else None

    @cached_property
    def when(self) -> Expr:
        lows, highs = ([b.limit for b in self._of(ROW, upper)] for upper in (False, True))
        some_row = [le(x, I1) for x in lows] + [le(I0, y) for y in highs] + [le(x, y) for x in lows for y in highs]
        return both(*self.tests, *some_row, *self._some_key())

    def _some_key(self) -> Iterator[Expr]:
        for a, low in self.lows:
            for b, high in self.highs:
                if a.offset is not None and b.offset is not None:  # parallel: alike at every row
                    yield le(a.offset, b.offset)
                elif all(x.wraps or x.offset is not None for x in (a, b)):
                    yield le(self.value(a, self.rows[0]), self.value(b, self.rows[0]))
                else:
                    yield le(low, high)

    def holds(self, implied: Sequence[Expr | None] = ()) -> Expr:
        """Can it hold in a cell of the tile?  Of the ends `implied` it is known that keys j0..j1 reach them."""
        if any(isinstance(x, Load) for e in self.rest for x in objects(e)):
            implied = ()  # a condition that guards a read must stand before it
        lows, highs = ([x for _, x in xs if x not in implied] for xs in (self.lows, self.highs))
        reach = [le(most(*lows), J1, self.facts)] if lows else []
        reach += [le(J0, least(*highs), self.facts)] if highs else []
        return both(self.when, *reach, *self.rest)

    @property
    def exact(self) -> bool:
        """Do bounds and invariant conditions say all that the clause does?"""
        return len(self.bounds) + len(self.tests) == len(self.clause) and all(b.exact for b in self.bounds)

    # ---------------------------------------------------------------------------------------------- closure
    @cached_property
    def closure(self) -> tuple[Ends, Ends, Ends]:
        """Rows, keys and distances j - i of the cells."""
        (a, b), known = self.rows, self.known
        p, q = most(J0, *_flat(self.lows), facts=known), least(J1, *_flat(self.highs), facts=known)
        u, v = _offsets(self.lows), _offsets(self.highs)
        rows = Ends(most(a, *(sub(p, y) for y in v), facts=known), least(b, *(sub(q, x) for x in u), facts=known))
        keys = Ends(
            most(J0, *(x for _, x in self.lows), facts=known), least(J1, *(y for _, y in self.highs), facts=known)
        )
        u += [sub(most(x, number(-LIMIT)), a) for b_, x in self.lows if b_.wraps]
        v += [sub(least(y, number(LIMIT)), b) for b_, y in self.highs if b_.wraps]
        return rows, keys, Ends(most(sub(p, b), *u), least(sub(q, a), *v))

    @cached_property
    def known(self) -> list[Fact]:
        """What holds where `rest` is looked at."""
        pairs = [(x, J1) for _, x in self.lows] + [(J0, y) for _, y in self.highs]
        pairs += [(I0, b.limit) if b.upper else (b.limit, I1) for b in self.bounds if b.of == ROW]
        return [(x, y) for x, y in pairs if linear(x).exact and linear(y).exact] + self.facts

    @property
    def tight(self) -> bool:
        """Is every row, key and distance of the closure one of a cell that the bounds hold for?"""
        return all(b.exact and (b.of == ROW or b.offset is not None or invariant(b.limit)) for b in self.bounds)

    # ------------------------------------------------------------------------------------- everything else
    def ends(self, e: Expr) -> Ends | None:
        """Between which values `e` lies over the cells."""
        if invariant(e):
            return Ends(e, e)
        if isinstance(e, Load):
            return self._load_ends(e)
        if e.type != I32:
            return None
        form = linear(e)
        return self._sum_ends(e) if not form.single or form.terms[0][0] in (ROW, KEY) else self._op_ends(e)

    def _sum_ends(self, e: Expr) -> Ends | None:
        form = linear(e)
        if not form.exact:
            return None
        rows, keys, distances = self.closure
        ri, ci = form.of(ROW), form.of(KEY)
        pieces: list[tuple[Ends | None, int]] = [(distances, ci)] if ri == -ci else [(rows, ri), (keys, ci)]
        pieces += [(self.ends(t), c) for t, c in form.terms if t not in (ROW, KEY)]
        low = high = Linear((), form.constant)
        for x, c in pieces:
            if x is None:
                return None
            low += linear(x.low if c > 0 else x.high).times(c)
            high += linear(x.high if c > 0 else x.low).times(c)
        return Ends(total(low), total(high), both(*(x.valid for x, c in pieces if x and c)))

    def _op_ends(self, e: Expr) -> Ends | None:
        if not isinstance(e, Op):
            return None
        below = multiple(e)
        if below and invariant(below[1]):
            x = self.ends(e.args[0])
            return x and Ends(times(x.low, below[1]), times(x.high, below[1]), x.valid)
        if e.op in ("min", "max"):
            x, y = map(self.ends, e.args)
            f = least if e.op == "min" else most
            return x and y and Ends(f(x.low, y.low), f(x.high, y.high), both(x.valid, y.valid))
        if e.op not in ("floordiv", "mod") or not invariant(e.args[1]):
            return None
        x, n = self.ends(e.args[0]), e.args[1]
        if x is None:
            return None
        valid = both(lt(ZERO, n), x.valid)
        first, last = floordiv(x.low, n), floordiv(x.high, n)
        if e.op == "floordiv":
            return Ends(first, last, valid)
        turns = lt(first, last)
        return Ends(choose(turns, ZERO, mod(x.low, n)), choose(turns, shift(n, -1), mod(x.high, n)), valid)

    def _load_ends(self, e: Load) -> Ends | None:
        """At the ends of its index, which are indices of cells: where difference constraints allow two cells, they
        allow the one of the lower row and the lower key, and that of the higher ones."""
        if not self.reads.rising(e) or direction(e.index[-1], self.reads) is None:
            return None
        x = self.ends(e.index[-1])
        if x is None or x.valid != TRUE:
            return None
        ends = x.low, x.high
        if e.index[-1] == ROW and self.reads.in_range(e):
            ends = tuple(most(row, ZERO, facts=self.known) for row in ends)
        low, high = (Load(e.tensor, (*e.index[:-1], i), e.type, e.span) for i in ends)
        return Ends(low, high)

    def at_most(self, x: Expr, y: Expr, strict: bool) -> Expr:
        """x <= y of two ends, by what is known of their indices too."""
        if isinstance(x, Load) and isinstance(y, Load) and (x.tensor, x.index[:-1]) == (y.tensor, y.index[:-1]):
            i, j = x.index[-1], y.index[-1]
            if not strict and le(i, j, self.known) == TRUE:
                return TRUE
            if strict and le(j, i, self.known) == TRUE:
                return FALSE
        if x.type == I32:
            return (lt if strict else le)(x, y, self.known)
        return make("lt" if strict else "le", x, y)

    def weigh(self, literal: Literal) -> Expr | None:
        """Can it hold in a cell of the tile?  None: unknown."""
        if isinstance(literal, AtMost):
            guard, x, y = tame(literal.x, literal.y)
            x, y = self.ends(x), self.ends(y)
            if x is None or y is None:
                return None
            return either(negate(both(guard, x.valid, y.valid)), self.at_most(x.low, y.high, literal.strict))
        if isinstance(literal, Residue):
            return self._weigh_residue(literal)
        return self._weigh_test(literal) if isinstance(literal, Test) else None

    def _weigh_residue(self, c: Residue) -> Expr | None:
        x, form = self.ends(c.x), linear(c.x)
        if x is None or not form.exact or not form.within(LIMIT):
            return None
        unsure = either(negate(x.valid), le(c.m, ZERO))
        if not c.equal:
            several = FALSE if c.m == ONE else TRUE if isinstance(c.m, Const) else make("ne", c.m, ONE)
            return either(unsure, both(lt(x.low, x.high), several), make("ne", mod(x.low, c.m), c.r))
        if c.r == ZERO:
            return either(unsure, le(mod(x.high, c.m), sub(x.high, x.low)))
        back = mod(sub(mod(x.high, c.m), c.r), c.m)  # from x.high down to the nearest of this residue
        return either(unsure, both(le(ZERO, c.r), lt(c.r, c.m), le(back, sub(x.high, x.low))))

    def _weigh_test(self, t: Test) -> Expr | None:
        if invariant(t.source):
            return t.source if t.holds else negate(t.source)
        if isinstance(t.source, Load) and t.source.type == BOOL:
            x = self._load_ends(t.source)
            return x and (x.high if t.holds else negate(x.low))
        if not isinstance(t.source, Op) or t.source.op not in ("lt", "le", "eq", "ne"):
            return None
        x, y = map(self.ends, t.source.args)
        if x is None or y is None or t.source.args[0].type == BOOL:
            return None
        if t.source.op in ("lt", "le"):
            strict = t.source.op == "lt"
            return self.at_most(x.low, y.high, strict) if t.holds else negate(self.at_most(x.high, y.low, strict))
        if (t.source.op == "eq") == t.holds:
            return both(self.at_most(x.low, y.high, False), self.at_most(y.low, x.high, False))
        return negate(both(make("eq", x.low, y.high), make("eq", x.high, y.low)))


def _flat(limits: list[tuple[Bound, Expr]]) -> list[Expr]:
    return [x for b, x in limits if b.offset is None]


def _offsets(limits: list[tuple[Bound, Expr]]) -> list[Expr]:
    return [b.offset for b, _ in limits if b.offset is not None]


def region(clause: Clause, reads: Reads, facts: Sequence[Fact] = ()) -> Region | None:
    """The clause over a tile, where `facts` hold; None where it can't hold."""
    solved = [(x, solve(x, reads) if isinstance(x, AtMost) else None) for x in clause]
    r = Region(clause, [b for _, b in solved if b is not None], reads, facts=list(facts))
    # do the literals so far, and what guards the mask, hold in the cells whose ends are looked at?
    settled = r.tight and not reads.guarded
    for x, bound in solved:
        safe = all(map(reads.anywhere, parts(x)))
        known = all(map(reads.known, parts(x)))
        if bound is not None:
            found = TRUE
        elif isinstance(x, Test) and invariant(x.source) and safe:
            found = TRUE
            r.tests.append(x.source if x.holds else negate(x.source))
        else:
            found = r.weigh(x) if known and (safe or settled) else None
            settled = settled and found is not None and all(map(invariant, parts(x)))
        if found is None:
            r.unknown.append(x.source)
        else:
            r.used += (x,)
            r.rest += [] if found == TRUE else [found]
    return None if FALSE in (r.when, *r.rest) else r


def regions(clauses: Sequence[Clause], reads: Reads) -> tuple[list[Region], list[Expr]]:
    """The clauses that can hold, over a tile, and what of them is unknown."""
    found = [r for c in clauses if (r := region(c, reads)) is not None]
    unknown = [e for r in found for e in r.unknown]
    if unknown:
        used = [r.used for r in found]
        if all(reads.anywhere(e) for c in used for x in c for e in parts(x)):
            used = joined(used)
        found = [r for c in used if (r := region(c, reads)) is not None]
    return found, unknown
