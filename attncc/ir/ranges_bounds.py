"""From a comparison to what it says of a row or a key alone: i or j at least, or at most, some expression.

Two kinds of arithmetic meet here.  The mask's own wraps at 32 bits; bounds must not.  So a side of a comparison that
may wrap keeps its form (`Bound.wraps`), or is trusted only where its scalars are small (a bound of ±LIMIT else), and a
value without limit that stands alone is clipped, which changes no comparison with a position.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce

from attncc.ir.nodes import I32, Expr, Leaf, Load, Op, leaves, transform
from attncc.ir.ranges_clauses import AtMost, Reads
from attncc.ir.ranges_exprs import (
    LIMIT,
    POSITION,
    TRUE,
    ZERO,
    Linear,
    both,
    choose,
    clip,
    floordiv,
    invariant,
    least,
    linear,
    lt,
    make,
    mod,
    most,
    multiple,
    number,
    rebuilt,
    span,
    sub,
    times,
    total,
)

ROW, KEY = Leaf("i"), Leaf("j")
SMALL = 2**29  # sums of two such values do not wrap


@dataclass(frozen=True)
class Bound:
    """`of` (i or j) >= limit, or <= limit where `upper`.  A limit of j may depend on i, and then moves one way with it
    (`direction` +1, -1; 0 where it does not).  `exact` False: the comparison may say more."""

    of: Leaf
    upper: bool
    limit: Expr
    direction: int
    wraps: bool = False  # the limit is i plus an invariant, and may wrap
    strict: bool = False  # ... and is itself excluded
    exact: bool = True

    @property
    def offset(self) -> Expr | None:
        """What is added to i, where the limit is i plus an invariant and cannot wrap."""
        rest = linear(self.limit) - linear(ROW)
        offset = total(rest)
        return offset if not self.wraps and invariant(offset) else None


def solve(c: AtMost, reads: Reads) -> Bound | None:
    """The bound that x <= y is, or one that follows from it; None where there is none."""
    if not all(map(reads.anywhere, (c.x, c.y))):
        return None
    wrapping = _wrapping(c, reads)
    if wrapping:
        return wrapping
    guard, x, y = tame(c.x, c.y)
    slack = (linear(y) - linear(x)).plus(-1 if c.strict else 0)
    if not (linear(x).exact and linear(y).exact and slack.within(2 * SMALL)):
        return None
    bound = _isolate(slack, reads)
    if bound is None:
        return None
    bound = replace(bound, limit=_readable(bound.limit, reads))
    if guard == TRUE:
        return bound
    nothing = number(LIMIT if bound.upper else -LIMIT)
    if bound.offset is not None:
        limit = total(linear(choose(guard, bound.offset, nothing)) + linear(ROW))
    else:
        limit = choose(guard, bound.limit, nothing)
    return replace(bound, limit=limit, exact=False)


def _readable(limit: Expr, reads: Reads) -> Expr:
    """With look-ups by position that stay in range where i is negative: such a row reads nothing."""

    def at_zero(x: Expr) -> Expr:
        if isinstance(x, Load) and reads.in_range(x) and ROW in x.index:
            return replace(x, index=tuple(most(n, ZERO) if n == ROW else n for n in x.index))
        return x

    return transform(limit, at_zero)


def _wrapping(c: AtMost, reads: Reads) -> Bound | None:
    """i + invariant against j, where the sum may wrap: `i - window < j` with any window."""
    for side, other, upper in ((c.x, c.y, False), (c.y, c.x, True)):
        form = linear(side)
        if (
            linear(other) == linear(KEY)
            and not form.exact
            and form.of(ROW) == 1
            and invariant(total(form - linear(ROW)))
        ):
            return Bound(KEY, upper, total(form), 1, wraps=True, strict=c.strict)
    return None


# ------------------------------------------------------------------------------------------------------ taming
def tame(x: Expr, y: Expr) -> tuple[Expr, Expr, Expr]:
    """(condition, x', y'): where it holds, x' and y' compare as x and y do.  No part of them wraps that could be kept
    from it, and run-time divisors are above 0."""
    guards: list[Expr] = []
    sides = [_tame_divisors(side, guards) for side in (x, y)]
    for a, b in ((0, 1), (1, 0)):
        if linear(sides[a]).single and linear(sides[b]).within(SMALL // 2):
            sides[a] = clip(sides[a], SMALL)  # still beyond the other
    sides = [_tame_sum(linear(side), SMALL, guards) for side in sides]
    return both(*guards), sides[0], sides[1]


def _tame_sum(form: Linear, room: int, guards: list[Expr]) -> Expr:
    """With the free scalars of a sum clipped such that together they stay within `room`."""
    free = [t for t, _ in form.terms if not _small(t, 2 * SMALL)]
    if form.single or form.within(SMALL) or not all(map(invariant, free)):
        return total(form)
    result = Linear((), form.constant)
    room //= max(1, sum(abs(form.of(t)) for t in free))
    for t, c in form.terms:
        safe = clip(t, room) if t in free else t
        guards += [make("eq", safe, t)] if t in free else []
        result = result + linear(safe).times(c)
    return total(result)


def _tame_divisors(e: Expr, guards: list[Expr]) -> Expr:
    """With every run-time divisor of a position in 1..LIMIT; a quotient is then what it was for a divisor above 0,
    a remainder for one in 1..LIMIT."""

    def tamed(n: Expr) -> Expr:
        if not isinstance(n, Op) or n.op not in ("floordiv", "mod", "mul") or not invariant(n.args[-1]) or invariant(n):
            return rebuilt(n)
        x, y = n.args
        safe = y if span(y)[0] > 0 and span(y)[1] <= LIMIT else most(least(y, number(LIMIT)), number(1))
        if n.op == "mul":
            return times(x, safe) if isinstance(x, Op) and x.op == "floordiv" and x.args[1] == safe else rebuilt(n)
        x = _tame_sum(linear(x), LIMIT - POSITION, guards)
        if safe != y and _small(x, LIMIT):
            guards.append(lt(ZERO, y) if n.op == "floordiv" else make("eq", safe, y))
            return (floordiv if n.op == "floordiv" else mod)(x, safe)
        return (floordiv if n.op == "floordiv" else mod)(x, y)

    return transform(e, tamed)


def _small(x: Expr, bound: int) -> bool:
    return -bound <= span(x)[0] and span(x)[1] <= bound


# ------------------------------------------------------------------------------------------------------ solving
def _isolate(slack: Linear, reads: Reads) -> Bound | None:
    """The bound that slack >= 0 is; slack does not wrap."""
    of = KEY if any(not invariant(t) and "j" in leaves(t) for t, _ in slack.terms) else ROW
    having = [(t, c) for t, c in slack.terms if leaves(t) & ({"j"} if of == KEY else {"i", "iq"})]
    if len(having) != 1:
        return None
    (term, c) = having[0]
    rest = slack - Linear(((term, c),))
    if not rest.within(2 * SMALL):
        return None
    # c · term >= -rest
    limit = total(-rest) if c == 1 else total(rest) if c == -1 else None
    if limit is None:
        limit = total(-linear(floordiv(total(rest), number(c)))) if c > 0 else floordiv(total(rest), number(-c))
    upper = c < 0
    if term == of:
        way = direction(limit, reads) if _small(limit, 2 * SMALL) else None
        return None if way is None else Bound(of, upper, limit, way)
    inner = _unfold(term, limit, upper)
    return None if inner is None or not inner.exact or not inner.within(2 * SMALL) else _isolate(inner, reads)


def _unfold(term: Expr, limit: Expr, upper: bool) -> Linear | None:
    """x // n <= limit, or >= limit, or the same of x // n · n: as a slack of x."""
    below = multiple(term)
    if below is not None:  # n times the quotient that the next case is of
        n = below[1]
        limit = floordiv(limit, n) if upper else sub(ZERO, floordiv(sub(ZERO, limit), n))
        term = floordiv(*below)
    match term:
        case Op("floordiv", (x, n)) if invariant(n) and span(n)[0] > 0 and linear(x).exact:
            edge = linear(times(limit, n))
            return edge + linear(n).plus(-1) - linear(x) if upper else linear(x) - edge
    return None


def direction(e: Expr, reads: Reads) -> int | None:
    """+1 where e rises with i (or j), -1 where it falls, 0 where it does not depend on it; None: unknown."""
    if invariant(e):
        return 0
    if isinstance(e, Leaf):
        return 1
    if isinstance(e, Load):
        return direction(e.index[-1], reads) if reads.rising(e) else None
    if not isinstance(e, Op) or e.type != I32:
        return None
    form = linear(e)
    if not form.single:
        return _common([_signed(direction(t, reads), c) for t, c in form.terms]) if form.exact else None
    x, n = multiple(e) or (e.args[0], e.args[-1])
    if (e.op == "floordiv" or multiple(e)) and invariant(n) and span(n)[0] > 0:
        return direction(x, reads)
    if e.op in ("min", "max"):
        return _common([direction(a, reads) for a in e.args])
    if e.op == "select" and invariant(e.args[0]):
        return _common([direction(a, reads) for a in e.args[1:]])
    return None


def _signed(way: int | None, c: int) -> int | None:
    return way if way is None or c > 0 else -way


def _common(ways: list[int | None]) -> int | None:
    return reduce(lambda x, y: x if y == 0 else y if x in (0, y) else None, ways, 0)
