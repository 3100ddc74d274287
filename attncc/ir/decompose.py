"""A logit in base-2 units, split into what a kernel evaluates once a head, a row, a column and a cell.

    log2(e) * f_logits(scale * dot) = unit * score(key * dot) + shift

The softmax of a row needs only `score` (and `unit`, which its exp2 takes in one FMA with the row's maximum); `shift`
moves a whole row and matters only to lse and sink; `key` is a factor that every use of dot shares.  The split is an
identity over the reals: f32 products and quotients by head-level factors are re-associated, so that such factors meet
once a head and not once a cell; sums of cell-level terms keep their order.  Index arithmetic that reaches a logit
linearly is taken not to overflow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from attncc.ir.nodes import (
    F32,
    I32,
    INDICES,
    SIZES,
    Const,
    Expr,
    Leaf,
    Op,
    Variant,
    children,
    leaves,
    make,
    objects,
    rebuild,
    transform,
)
from attncc.ir.rewrite import Levels, simplify_expr

LOG2E = math.log2(math.e)
MAX_TERMS = 32  # a longer sum is left as it is written
DOT, KEY, FIRST_ROW = Leaf("dot"), Leaf("j"), Leaf("i0")
ONE, ZERO = Const(1.0, F32), Const(0.0, F32)


@dataclass(frozen=True)
class Logits:
    """log2(e) * f_logits = unit * score + shift; with scan none f_logits = score, unit 1 and shift 0.

    `unit`: f32, level call or head, or row where the score is dot itself; `unit_positive`: it is provably > 0, so a
    maximum of scores is one of logits.
    `score`: f32, any level, over Leaf dot (unscaled, times `key`) and i0, the first row position of the tile.
    `shift`: f32, at most row level, over i0 too.
    `key`: f32, level col, without i0; None: 1."""

    unit: Expr
    unit_positive: bool
    score: Expr
    shift: Expr
    key: Expr | None = None


@dataclass(frozen=True)
class Factor:
    """const * num / den, num and den head-level (None: 1)."""

    const: float = 1.0
    num: Expr | None = None
    den: Expr | None = None

    def scaled(self, by: float) -> Factor:
        return replace(self, const=self.const * by)

    def __mul__(self, other: Factor) -> Factor:
        return Factor(self.const * other.const, _product(self.num, other.num), _product(self.den, other.den))

    def inverse(self) -> Factor:
        """1 / self, whose literal is not 0."""
        return Factor(1.0 / self.const, self.den, self.num)

    def __add__(self, other: Factor) -> Factor:
        if (self.num, self.den) == (other.num, other.den):
            return replace(self, const=self.const + other.const)
        return Factor(num=make("add", self.expr(), other.expr()))

    def expr(self) -> Expr:
        """As an expression: one product of literals, then the rest."""
        top = Const(self.const, F32) if self.num is None else self.num
        if self.den is not None:
            top = make("div", top, self.den)
        return top if self.num is None or self.const == 1.0 else make("mul", top, Const(self.const, F32))


Sum = dict[Expr, Factor]  # core: its factor; the terms of a sum.  ONE is the core of what is head-level


def _product(a: Expr | None, b: Expr | None) -> Expr | None:
    return a if b is None else b if a is None else make("mul", a, b)


def decompose(v: Variant) -> Logits:
    """The split of `v`'s logit (see Logits).  `v` may, but need not, be simplified."""
    logit, by_row, key = _common_factors(simplify_expr(v.f_logits))
    if by_row is not None:
        parts = None if v.scan.kind == "none" else _split(v, logit, key)
        if parts is not None and parts.score == DOT:
            unit = simplify_expr(make("mul", parts.unit, by_row))
            return replace(parts, unit=unit, unit_positive=sign(unit) == 1)
        logit = _put(logit, by_row)
    return _split(v, logit, key)


def _split(v: Variant, logit: Expr, key: Expr | None) -> Logits:
    split = _Splitter(v.scale)
    terms = split(logit)
    if v.scan.kind == "none":
        return Logits(ONE, True, simplify_expr(split.rebuilt(logit)), ZERO, key)
    row = {core: f for core, f in terms.items() if split.levels(core) in ("call", "head", "row")}
    unit, score = _take_unit(split, {core: f for core, f in terms.items() if core not in row})
    unit_expr = simplify_expr(unit.expr())
    shift = split.expr(_scaled(row, LOG2E))
    return Logits(unit_expr, sign(unit_expr) == 1, simplify_expr(split.expr(score)), simplify_expr(shift), key)


def _is_score(x: Expr) -> bool:
    return isinstance(x, Leaf) and x.name in ("s", "dot")


def _put(e: Expr, factor: Expr) -> Expr:
    return transform(e, lambda x: make("mul", x, factor) if _is_score(x) else x)


def _common_factors(logit: Expr) -> tuple[Expr, Expr | None, Expr | None]:
    """(e, a, c): `logit` is `e` with s * a * c for s, and the same of dot; a of level row, c of level col, each None
    where there is none, and either with what is known of the head."""
    e, levels = logit, Levels()
    found: dict[str, Expr | None] = dict.fromkeys(("head", "row", "col"))
    while True:
        users = {id(x): x for x in objects(e) if any(map(_is_score, children(x)))}
        factors = {_factor_at(x) for x in users.values()}
        factor = factors.pop() if len(factors) == 1 else None
        if factor is None or levels(factor) == "cell":
            break
        level = "head" if levels(factor) == "call" else levels(factor)
        found[level] = _product(found[level], factor)
        e = transform(e, lambda x, users=users: next(filter(_is_score, children(x))) if id(x) in users else x)
    row, key = found["row"], found["col"]
    if key is not None:
        return e, row, simplify_expr(_product(found["head"], key) or key)
    return (logit, None, None) if row is None else (e, simplify_expr(_product(found["head"], row) or row), None)


def _factor_at(x: Expr) -> Expr | None:
    """f where `x` is s * f, f * s or s / f, or the same of dot, and f knows nothing of either."""
    if not isinstance(x, Op) or x.op not in ("mul", "div") or not any(map(_is_score, x.args)):
        return None
    a, b = x.args
    f = b if _is_score(a) else a
    if leaves(f) & {"s", "dot"} or (x.op == "div" and f is a):
        return None
    return make("div", ONE, f) if x.op == "div" else f


def _take_unit(split: _Splitter, terms: Sum) -> tuple[Factor, Sum]:
    """What to take out of log2(e) * `terms`, and the terms left: the whole factor where there is one term; nothing
    where dot meets column-level terms only, whose own factors are paid once a column; else a literal that spares
    cell-level terms a product each."""
    if len(terms) == 1:
        ((core, f),) = terms.items()
        return f.scaled(LOG2E), {core: Factor()}
    cells = [f for core, f in terms.items() if core != DOT and split.levels(core) == "cell"]
    literals = [abs(f.const) for f in cells if f.num is None and f.den is None and f.const]
    if literals:
        return Factor(literals[0] * LOG2E), _scaled(terms, 1.0 / literals[0])
    return Factor(), _scaled(terms, LOG2E)


def _scaled(terms: Sum, by: float) -> Sum:
    return {core: f.scaled(by) for core, f in terms.items()}


def _added(a: Sum, b: Sum) -> Sum:
    return a | {core: a[core] + f if core in a else f for core, f in b.items()}


class _Splitter:
    """The terms of expressions that hold s, dot or j, worked out bottom-up, each node once."""

    def __init__(self, scale: Expr):
        self.levels = Levels()
        self.terms: dict[int, Sum] = {}  # of f32 nodes, by id
        self.slopes: dict[int, Expr | None] = {}  # of i32 nodes: head-level a with node = a * j + (no j); or None
        self.scored: dict[int, bool] = {}  # does the node hold s or dot?
        self.other: dict[int, Expr] = {}  # nodes of other types that hold s or dot, rebuilt
        self.alive: list[Expr] = []
        self.scale = self(simplify_expr(scale)).get(ONE, Factor())

    def __call__(self, e: Expr) -> Sum:
        """The terms of the f32 expression `e`."""
        self.alive.append(e)
        for x in objects(e):
            if id(x) not in self.scored:
                names = isinstance(x, Leaf) and x.name in ("s", "dot")
                self.scored[id(x)] = names or any(self.scored[id(k)] for k in children(x))
                if x.type == F32:
                    found = self.split(x)
                    fits = len(found) <= MAX_TERMS and all(math.isfinite(f.const) for f in found.values())
                    self.terms[id(x)] = found if fits else self.whole(x)
                elif x.type == I32:
                    self.slopes[id(x)] = self.slope(x)
                if x.type != F32 and self.scored[id(x)]:
                    self.other[id(x)] = rebuild(x, tuple(map(self.rebuilt, children(x))))
        return self.terms[id(e)]

    def is_head(self, x: Expr) -> bool:
        return self.levels(x) in ("call", "head")

    def rebuilt(self, x: Expr) -> Expr:
        """`x` with its factors of dot grouped."""
        if not self.scored[id(x)]:
            return x
        return self.expr(self.terms[id(x)]) if x.type == F32 else self.other[id(x)]

    def whole(self, x: Expr) -> Sum:
        """`x` as one term, or as a head-level factor."""
        if self.is_head(x):
            return {ONE: Factor(num=x)}
        return {rebuild(x, tuple(map(self.rebuilt, children(x)))) if self.scored[id(x)] else x: Factor()}

    def split(self, x: Expr) -> Sum:
        if isinstance(x, Const) and math.isfinite(x.value):
            return {ONE: Factor(x.value)}
        if isinstance(x, Leaf) and x.name in ("s", "dot"):
            return {DOT: self.scale if x.name == "s" else Factor()}
        if not isinstance(x, Op):
            return self.whole(x)
        parts = [self.terms.get(id(a), {}) for a in x.args]
        if x.op == "neg":
            return _scaled(parts[0], -1.0)
        if x.op in ("add", "sub") and not self.is_head(x):
            return self.sum_of(x, parts)
        if x.op == "mul":
            return self.product(x, parts)
        if x.op == "div":
            return self.quotient(x, parts)
        return self.cast(x) if x.op == "f32" else self.whole(x)

    def sum_of(self, x: Op, parts: list[Sum]) -> Sum:
        a, b = x.args
        if all(isinstance(y, Op) and y.op == "f32" and _is_position(y.args[0]) for y in x.args):
            return self(make("f32", simplify_expr(make(x.op, a.args[0], b.args[0]))))  # type: ignore[union-attr]
        return _added(parts[0], parts[1] if x.op == "add" else _scaled(parts[1], -1.0))

    def product(self, x: Op, parts: list[Sum]) -> Sum:
        for by, (a, b) in ((x.args[0], parts), (x.args[1], parts[::-1])):
            if self.is_head(by):
                return {core: f * a[ONE] for core, f in b.items()}
        if self.scored[id(x)] and all(len(p) == 1 for p in parts):
            ((a, f), (b, g)) = (next(iter(p.items())) for p in parts)
            return {make("mul", a, b): f * g}
        return self.whole(x)

    def quotient(self, x: Op, parts: list[Sum]) -> Sum:
        if self.is_head(x.args[1]):
            by = parts[1][ONE]
            return {core: f * by.inverse() for core, f in parts[0].items()} if by.const else self.whole(x)
        if self.scored[id(x)] and len(parts[0]) == 1:
            ((core, f),) = parts[0].items()
            by = self.rebuilt(x.args[1])
            if self.levels(by) == "cell":
                return {make("div", core, by): f}
            return {make("mul", core, make("div", ONE, by)): f}  # one division a row or a column
        return self.whole(x)

    def cast(self, x: Op) -> Sum:
        """f32(a * j + r) = a * f32(j - i0) + f32(a * i0 + r): both arguments are small where it matters, near the
        diagonal, and exact; the first is shared by all rows of a tile, the second by all keys."""
        (n,) = x.args
        slope = self.slopes[id(n)]
        slope = None if slope is None else simplify_expr(slope)
        if slope is None or (isinstance(slope, Const) and slope.value == 0):
            return self.whole(x)
        f = Factor(float(slope.value)) if isinstance(slope, Const) else Factor(num=make("f32", slope))
        near = make("f32", make("sub", KEY, FIRST_ROW))
        row = make("f32", simplify_expr(transform(n, lambda y: FIRST_ROW if y == KEY else y)))
        return _added({near: f}, {ONE: Factor(num=row)} if self.is_head(row) else {row: Factor()})

    def slope(self, n: Expr) -> Expr | None:
        if self.levels(n) in ("call", "head", "row"):
            return Const(0, I32)
        if n == KEY:
            return Const(1, I32)
        if not isinstance(n, Op) or n.op not in ("add", "sub", "neg", "mul"):
            return None
        slopes = [self.slopes[id(a)] for a in n.args]
        if n.op == "mul":
            for by, of in ((n.args[0], slopes[1]), (n.args[1], slopes[0])):
                if self.is_head(by) and of is not None:
                    return make("mul", of, by)
            return None
        return None if None in slopes else make(n.op, *slopes)  # type: ignore[arg-type]

    def expr(self, terms: Sum) -> Expr:
        """The sum of `terms`: dot first, so that it takes its factor and the next summand in one FMA; then what is
        shared by columns, by nothing, by rows, each summed by itself first."""
        groups: dict[str, Expr] = {}
        for core, f in terms.items():
            term = f.expr() if core == ONE else core if f == Factor() else make("mul", core, f.expr())
            level = self.levels(core)
            group = "dot" if core == DOT else level if level in ("col", "cell") else "row"
            groups[group] = make("add", groups[group], term) if group in groups else term
        parts = [groups[g] for g in ("dot", "col", "cell", "row") if g in groups]
        total = parts[0] if parts else ZERO
        for part in parts[1:]:
            total = make("add", total, part)
        return total


def _is_position(e: Expr) -> bool:
    """A position, a size or a small literal: sums of two such do not overflow."""
    return (isinstance(e, Leaf) and e.name in (*INDICES, *SIZES)) or (isinstance(e, Const) and abs(e.value) <= 2**24)


POSITIVE = ("group_size", "num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo")
NOT_NEGATIVE = ("b", "h", "g", "qo_len", "kv_len")


def sign(e: Expr) -> float:
    """What is known of the sign of scalar `e`: 1 where it is > 0 (or underflows to 0), 0 where >= 0, nan where
    nothing is.  nan operands aside; i32 sums are taken not to overflow."""
    known: dict[int, float] = {}
    for x in objects(e):
        of = [known[id(k)] for k in children(x)]
        known[id(x)] = _sign(x, of)
    return known[id(e)]


def _sign(x: Expr, of: list[float]) -> float:
    if isinstance(x, Const):
        return math.nan if x.value < 0 or x.value != x.value else float(x.value > 0)
    if isinstance(x, Leaf):
        return 1.0 if x.name in POSITIVE else 0.0 if x.name in NOT_NEGATIVE else math.nan
    if not isinstance(x, Op):
        return math.nan
    lowest = min(of) if not any(map(math.isnan, of)) else math.nan
    highest = max((s for s in of if s >= 0), default=math.nan)
    if x.op in ("exp", "exp2", "sigmoid", "softplus", "rsqrt"):
        return 1.0
    if x.op in ("sqrt", "abs"):
        return max(highest, 0.0) if highest >= 0 else 0.0
    if x.op == "mul" and x.args[0] == x.args[1]:
        return max(lowest, 0.0) if lowest >= 0 else 0.0
    if x.op == "max" or (x.op == "add" and lowest >= 0):
        return highest
    if x.op == "pow":
        return of[0]
    if x.op in ("floordiv", "mod", "floor", "log1p", "i32"):
        return min(lowest, 0.0)
    if x.op == "select":
        return min(of[1:]) if not any(map(math.isnan, of[1:])) else math.nan
    return lowest if x.op in ("mul", "div", "min", "f32") else math.nan
