"""Integer expressions that simplify as they are built, and what can be proved of them, for tile analysis.

All arithmetic is i32 and wraps.  Positions, sizes and indices lie within ±POSITION; of anything else (scalars,
tensor elements) nothing is assumed, so a sum that holds one may wrap.  `span` says between which values an
expression lies; only where no wrap is possible may two sides of a comparison be brought together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache, partial, reduce

from attncc.ir import nodes
from attncc.ir.nodes import BOOL, I32, INDICES, SIZES, TILE, Const, Expr, Leaf, Op, leaves, transform

POSITION = 2**27  # |i|, j, sizes, b, h, g stay below
LIMIT = 2**28  # beyond any position and any distance: a bound of ±LIMIT says nothing
MIN, MAX = -(2**31), 2**31 - 1

TRUE, FALSE = Const(True, BOOL), Const(False, BOOL)
Span = tuple[int, int]
Fact = tuple[Expr, Expr]  # (x, y): x <= y is known


make = lru_cache(2**14)(nodes.make)  # equal nodes become one object, which compares fast


@cache
def number(value: int) -> Const:
    return Const(value, I32)


ZERO = number(0)


def wrap(value: int) -> int:
    return (value - MIN) % 2**32 + MIN


# ------------------------------------------------------------------------------------------------- linear form
@dataclass(frozen=True)
class Linear:
    """Σ coefficient · term + constant: the value of an i32 expression modulo 2**32."""

    terms: tuple[tuple[Expr, int], ...]  # in order of appearance, no coefficient 0
    constant: int = 0

    def __add__(self, other: Linear) -> Linear:
        sums = dict(self.terms)
        for t, c in other.terms:
            sums[t] = sums.get(t, 0) + c
        return Linear(tuple((t, c) for t, c in sums.items() if c), self.constant + other.constant)

    def __sub__(self, other: Linear) -> Linear:
        return self + other.times(-1)

    def __neg__(self) -> Linear:
        return self.times(-1)

    def times(self, factor: int) -> Linear:
        return Linear(tuple((t, c * factor) for t, c in self.terms) if factor else (), self.constant * factor)

    def plus(self, value: int) -> Linear:
        return Linear(self.terms, self.constant + value)

    @cached_property
    def coefficients(self) -> dict[Expr, int]:
        return dict(self.terms)

    def of(self, term: Expr) -> int:
        return self.coefficients.get(term, 0)

    @property
    def single(self) -> bool:
        """Is it one term as it stands: a value that no arithmetic here can wrap?"""
        return self.constant == 0 and len(self.terms) == 1 and self.terms[0][1] == 1

    @cached_property
    def span(self) -> Span:
        """Between which integers the sum lies, before any wrap."""
        low = high = self.constant
        for t, c in self.terms:
            ends = sorted((c * span(t)[0], c * span(t)[1]))
            low, high = low + ends[0], high + ends[1]
        return low, high

    def within(self, bound: int) -> bool:
        return -bound <= self.span[0] and self.span[1] <= bound

    @property
    def exact(self) -> bool:
        """Can the sum not wrap?"""
        return self.span[0] >= MIN and self.span[1] <= MAX


@cache
def linear(e: Expr) -> Linear:
    if isinstance(e, Const):
        return Linear((), int(e.value))
    if isinstance(e, Leaf) and e.name == "iq":
        return Linear(((Leaf("i"), 1), (Leaf("qo_len"), 1), (Leaf("kv_len"), -1)))
    if isinstance(e, Op):
        if e.op in ("add", "sub"):
            x, y = map(linear, e.args)
            return x + y if e.op == "add" else x - y
        if e.op == "neg":
            return -linear(e.args[0])
        if e.op == "mul":
            x, y = map(linear, e.args)
            if not x.terms or not y.terms:
                return y.times(x.constant) if not x.terms else x.times(y.constant)
    return Linear(((e, 1),))


def total(x: Linear) -> Expr:
    """The expression of a linear form: positive terms, then negative ones, then the constant."""
    result: Expr | None = None
    for t, c in sorted(x.terms, key=lambda tc: tc[1] < 0):
        size = wrap(abs(c))
        part = t if size == 1 else make("mul", t, number(size))
        if result is None:
            result = make("neg", part) if c < 0 else part
        else:
            result = make("sub" if c < 0 else "add", result, part)
    constant = wrap(x.constant)
    if result is None:
        return number(constant)
    if constant == 0:
        return result
    if isinstance(result, Op) and result.op == "neg":
        return make("sub", number(constant), result.args[0])
    return make("sub", result, number(-constant)) if MIN < constant < 0 else make("add", result, number(constant))


# -------------------------------------------------------------------------------------------------- smart building
def add(*xs: Expr) -> Expr:
    return total(reduce(Linear.__add__, map(linear, xs)))


def sub(x: Expr, y: Expr) -> Expr:
    return total(linear(x) - linear(y))


def shift(x: Expr, by: int) -> Expr:
    return total(linear(x).plus(by))


def floordiv(x: Expr, y: Expr) -> Expr:
    if isinstance(y, Const) and y.value == 1:
        return x
    if isinstance(x, Const) and isinstance(y, Const) and y.value:
        return number(wrap(int(x.value // y.value)))
    return make("floordiv", x, y)


def mod(x: Expr, y: Expr) -> Expr:
    if isinstance(x, Const) and isinstance(y, Const) and y.value:
        return number(int(x.value % y.value))
    if isinstance(y, Const) and y.value == 1:
        return ZERO
    return make("mod", x, y)


def times(x: Expr, y: Expr) -> Expr:
    """x · y, with (a // y + n) · y as a // y · y + n · y, so that what is known of multiples of y applies."""
    if isinstance(x, Const) or isinstance(y, Const):
        a, b = linear(x), linear(y)
        return total(a.times(b.constant) if isinstance(y, Const) else b.times(a.constant))
    a = linear(x)
    parts = [Linear(((make("mul", t, y), c),)) for t, c in a.terms]
    return total(reduce(Linear.__add__, parts, linear(y).times(a.constant)))


def pick(op: str, xs: Iterable[Expr], facts: Sequence[Fact] = ()) -> Expr:
    """min or max of one or more, without those that another one makes needless."""
    kept: list[Expr] = []
    for x in xs:
        if any(_beats(op, k, x, facts) for k in kept):
            continue
        kept = [k for k in kept if not _beats(op, x, k, facts)] + [x]
    return reduce(partial(make, op), kept)


def _beats(op: str, x: Expr, y: Expr, facts: Sequence[Fact]) -> bool:
    return proved(x, y, facts) if op == "min" else proved(y, x, facts)


def least(*xs: Expr, facts: Sequence[Fact] = ()) -> Expr:
    return pick("min", xs, facts)


def most(*xs: Expr, facts: Sequence[Fact] = ()) -> Expr:
    return pick("max", xs, facts)


def clip(x: Expr, bound: int) -> Expr:
    return least(most(x, number(-bound)), number(bound))


def le(x: Expr, y: Expr, facts: Sequence[Fact] = ()) -> Expr:
    """x <= y of i32, decided where it can be."""
    if proved(x, y, facts):
        return TRUE
    return FALSE if proved(y, x, facts, by=1) else make("le", x, y)


def lt(x: Expr, y: Expr, facts: Sequence[Fact] = ()) -> Expr:
    return negate(le(y, x, facts))


def negate(c: Expr) -> Expr:
    if isinstance(c, Const):
        return FALSE if c.value else TRUE
    if isinstance(c, Op):
        if c.op == "not":
            return c.args[0]
        if c.op in ("and", "or"):
            return (either if c.op == "and" else both)(*map(negate, c.args))
        if c.op in ("eq", "ne"):
            return make("ne" if c.op == "eq" else "eq", *c.args)
        if c.op in ("lt", "le") and c.args[0].type == I32:  # an f32 may be nan
            return make("le" if c.op == "lt" else "lt", c.args[1], c.args[0])
    return make("not", c)


def _join(op: str, neutral: Const, cs: Iterable[Expr]) -> Expr:
    kept: list[Expr] = []
    for c in cs:
        if isinstance(c, Const) and c.value != neutral.value:
            return c
        if c != neutral and c not in kept:
            kept.append(c)
    return reduce(partial(make, op), kept) if kept else neutral


def both(*cs: Expr) -> Expr:
    """Conjunction; what stands left guards what stands right."""
    return _join("and", TRUE, cs)


def either(*cs: Expr) -> Expr:
    return _join("or", FALSE, cs)


def choose(c: Expr, x: Expr, y: Expr) -> Expr:
    if isinstance(c, Const):
        return x if c.value else y
    return x if x == y else make("select", c, x, y)


def invariant(e: Expr) -> bool:
    """Does it depend on neither row nor key?"""
    return not leaves(e) & {"i", "iq", "j", *TILE}


def multiple(e: Expr) -> tuple[Expr, Expr] | None:
    """(x, n) where `e` is x // n · n: for n > 0 the multiple of n at or below x."""
    match e:
        case Op("mul", (Op("floordiv", (x, n)), m)) if m == n:
            return x, n
    return None


# ----------------------------------------------------------------------------------------------------- what is known
ANY = (MIN, MAX)


@cache
def span(e: Expr) -> Span:
    """Values between which an i32 expression lies, whatever scalars and tensors hold."""
    if isinstance(e, Const):
        return int(e.value), int(e.value)
    if isinstance(e, Leaf):
        low = -POSITION if e.name in ("i", "i0", "i1") else 0
        return (low, POSITION) if e.name in INDICES + SIZES + TILE else ANY
    if not isinstance(e, Op):
        return ANY
    if e.op in ("add", "sub", "neg", "mul"):
        form = linear(e)
        if not (len(form.terms) == 1 and form.terms[0][0] == e):
            return form.span if form.exact else ANY
        if (below := multiple(e)) and span(below[1])[0] > 0:
            x, n = map(span, below)
            return x[0] - n[1] + 1, x[1]
        corners = [p * q for p in span(e.args[0]) for q in span(e.args[1])]
        return (min(corners), max(corners)) if min(corners) >= MIN and max(corners) <= MAX else ANY
    if e.op in ("min", "max"):
        (a, b), (c, d) = map(span, e.args)
        f = min if e.op == "min" else max
        return f(a, c), f(b, d)
    return _span_of(e.op, [span(a) for a in e.args if a.type == I32])


def _span_of(op: str, args: list[Span]) -> Span:
    if op == "select":
        (a, b), (c, d) = args
        return min(a, c), max(b, d)
    if op == "abs" and args[0][0] > MIN:
        low, high = args[0]
        return max(low, -high, 0), max(-low, high)
    if op == "floordiv":
        (a, b), (c, d) = args
        if c > 0:
            corners = [p // q for p in (a, b) for q in (c, d)]
            return min(corners), max(corners)
    if op == "mod" and args[1][0] > 0:
        return 0, args[1][1] - 1
    return ANY


I0, I1, J0, J1, KV = (Leaf(n) for n in ("i0", "i1", "j0", "j1", "kv_len"))
LAST = shift(KV, -1)
ORDER = [
    linear(y) - linear(x) for x, y in ((I0, I1), (J0, J1), (I1, LAST), (J1, LAST), (Leaf("i"), LAST), (Leaf("j"), LAST))
]


def proved(x: Expr, y: Expr, facts: Sequence[Fact] = (), by: int = 0) -> bool:
    """Is x + by <= y certain, from spans, the order of tile ends, multiples and `facts`?"""
    if x == y:
        return by <= 0
    a, b = linear(x), linear(y)
    if not (a.exact and b.exact):
        return False
    d = (b - a).plus(-by)
    return d.span[1] >= 0 and _Proof([*ORDER, *(linear(v) - linear(u) for u, v in facts)]).nonnegative(d, 4)


class _Proof:
    """A search, given up after some steps, for why a linear form is not below 0."""

    def __init__(self, known: Sequence[Linear]):
        self.known = known  # none of them is below 0
        self.steps = 40

    def nonnegative(self, d: Linear, depth: int) -> bool:
        if d.span[0] >= 0:
            return True
        self.steps -= 1
        if depth == 0 or not d.terms or self.steps < 0:
            return False
        if any(all(self.nonnegative(w, depth - 1) for w in weaker) for weaker in _weaken(d)):
            return True
        helpful = (k for k in self.known if any(d.of(t) * c > 0 for t, c in k.terms))
        return any(self.nonnegative(d - k, depth - 1) for k in helpful)


def _weaken(d: Linear) -> Iterator[tuple[Linear, ...]]:
    """Sets of linear forms, one of which is never above d."""
    for t, c in d.terms:
        rest = d - Linear(((t, c),))
        match t:
            case Op("min" | "max", (x, y)):
                options = rest + linear(x).times(c), rest + linear(y).times(c)
                if (t.op == "min") == (c > 0):
                    yield options
                else:
                    yield from ((o,) for o in options)
            case Op("select", (condition, _, _)):
                yield _under(d, condition, 1), _under(d, condition, 2)
            case Op("floordiv", (x, Const(n))) if n > 0 and c % n == 0:
                yield (rest + _multiple(x, number(int(n)), c // int(n)),)
        if (below := multiple(t)) and span(below[1])[0] > 0:
            yield (rest + _multiple(*below, c),)


def _under(d: Linear, condition: Expr, branch: int) -> Linear:
    """d where every select by this condition takes one branch."""
    result = Linear((), d.constant)
    for t, c in d.terms:
        here = t.args[branch] if isinstance(t, Op) and t.op == "select" and t.args[0] == condition else t
        result = result + linear(here).times(c)
    return result


def _multiple(x: Expr, n: Expr, c: int) -> Linear:
    """A bound from below of c · (x // n · n), for n > 0: x // n · n lies in (x - n, x]."""
    return linear(x).times(c) if c < 0 else (linear(x) - linear(n)).plus(1).times(c)


def rebuilt(e: Expr) -> Expr:
    """The node as the smart constructors above make it of its children."""
    if not isinstance(e, Op):
        return e
    args = e.args
    if e.type == I32 and e.op in ("add", "sub", "neg"):
        return total(linear(e))
    if e.type == I32 and e.op == "mul":
        return times(*args)
    if args[0].type == I32 and e.op in _BUILDERS:
        return _BUILDERS[e.op](*args)
    return _LOGIC[e.op](*args) if e.op in _LOGIC else make(e.op, *args)


_BUILDERS = {"floordiv": floordiv, "mod": mod, "min": least, "max": most, "le": le, "lt": lt}
_LOGIC = {"and": both, "or": either, "not": negate, "select": choose}


def substitute(e: Expr, values: dict[str, Expr]) -> Expr:
    """`e` with leaves replaced, built anew."""
    return transform(e, lambda x: values.get(x.name, x) if isinstance(x, Leaf) else rebuilt(x))
