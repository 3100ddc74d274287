"""From scores to weights, without a running maximum.

Softmax needs a base near each row's maximum only to keep 2^x in range; any base gives the same result after the
final division.  So a row keeps the base it has, a block's exponentials start at once, and their sum - needed anyway
- tells whether the base is still good: when a thread's part exceeds GUARD (or overflows), its warp recomputes this
block from the scores with a fresh maximum and rescales.  Random data never does after the first block; the worst
case costs what ordinary online softmax costs, plus one wasted pass.

`top` is a row's base in units of what S holds when the maximum is taken: score units where the unit is known to be
positive, base-2 units else.  The slow pass subtracts before it multiplies: the greatest logit has weight exactly 1
however large it is.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from .factors import Factors
from .functors import NEG_INF, columns, ramp_of, score_of, visible
from .layout import quad, row_elems

FLOOR = -1.0e30  # base of a row that has seen no key: finite, so no -inf guards are needed
GUARD = 2.0**12
IDENTITY = {"max": -Float32.inf, "min": Float32.inf, "sum": 0.0}  # of what emits reduce


def pack(p, lo, hi):
    """Two fp32 to one word of p.dtype.  Opaque to LLVM, which would otherwise sink the conversions of two branches
    below their join and keep twice the registers alive."""
    kind = {"bf16": "bf16x2", "f16": "f16x2"}[p.dtype]
    return cute.arch.inline_ptx(
        "cvt.rn." + kind + ".f32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[hi, lo]
    )


def settle(P, Pn, zero):
    """P = Pn, by an operation the compiler cannot see through: the registers that a running product reads must
    not be the ones the next block's softmax writes, or ptxas serialises the products (C7513)."""
    for i in range(cute.size(P)):
        P[i] = Pn[i] | zero


def chains(op, vals, k: int):
    """Reduce with k independent chains."""
    acc = list(vals[:k])
    for j, v in enumerate(vals[k:]):
        acc[j % k] = op(acc[j % k], v)
    while len(acc) > 1:
        acc = [op(a, b) for a, b in zip(acc[::2], acc[1::2], strict=False)] + ([acc[-1]] if len(acc) % 2 else [])
    return acc[0]


def opaque(x):
    """x, as a value of its own: what is computed from it is computed again, not kept in registers from before."""
    if isinstance(x, tuple):
        return tuple(map(opaque, x))
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[x])


class State(NamedTuple):
    """Of a thread's two rows: base, running sum of its own columns, the factor by which O is to be rescaled, and what
    is reduced for every emit (emits.py)."""

    top: Any
    total: Any
    grow: Any
    emits: tuple


def new_state(p) -> State:
    pairs = [cute.make_rmem_tensor((2,), Float32) for _ in range(3 + len(p.emits))]
    return State(*pairs[:3], tuple(pairs[3:]))


def reset(p, state: State, tile) -> None:
    for i in range(2):
        floor = Float32(FLOOR)
        if p.unit_positive:  # times a large unit it must stay finite
            floor = floor * cute.arch.rcp_approx(cute.arch.fmax(tile.rows[i].unit, Float32(1.0)))
        state.top[i] = floor
    state.total.fill(0.0)
    state.grow.fill(1.0)
    for reduce, found in zip(p.emits, state.emits, strict=True):
        found.fill(IDENTITY[reduce])


def hidden_already(p) -> bool:
    """Has emits.observe hidden the scores of keys that do not exist?  Their factors would come too late."""
    return bool(p.emits) and p.scan == "softmax" and p.score != "any" and not p.key_factor


def late(p) -> bool:
    """Is a cut block never good enough for the first pass?  Where the mask comes after the functor, or the factors are
    in its scores already."""
    return p.score == "any" or p.key_factor == "unit"


def multiply(p, fn, S, tile, col0, factors_at, done=False):
    """Dot products by the factors of their keys, unless that is `done`.  (No branch: beside the one that hides scores
    it would make ptxas call the loop divergent.)"""
    by = Factors(p, fn, tile, col0, factors_at)
    for n in range(p.tile_kv // 8):
        for c in range(2):
            for i in range(2):
                factor = by.of(0, i, 8 * n + c)
                S[i, c, n] = S[i, c, n] * (factor if done is False else cutlass.select_(done, Float32(1.0), factor))


def hide(p, fn, S, tile, col0):
    """Scores of keys that do not exist become what the unit makes -inf."""
    cls = columns(p, fn, tile, col0)
    for i in range(2):
        hidden = Float32(NEG_INF)
        if not p.unit_positive:
            hidden = cutlass.select_(tile.rows[i].unit < 0.0, -hidden, hidden)
        for e in row_elems(i, p.tile_kv):
            seen = visible(p, fn, tile, i, cls[i][e[2], e[1]], col0, 8 * e[2] + e[1])
            S[e] = cutlass.select_(seen, S[e], hidden)


def touch(p, fn, S, tile, col0, units, masked: bool):
    """The functor, in place, and after it the mask."""
    cls = columns(p, fn, tile, col0)
    for i in range(2):
        for e in row_elems(i, p.tile_kv):
            cl, off = cls[i][e[2], e[1]], 8 * e[2] + e[1]
            seen = visible(p, fn, tile, i, cl, col0, off) if masked else True
            y = score_of(p, fn, tile, i, cl, S[e], col0, off, seen) * units[i]
            S[e] = cutlass.select_(seen, y, Float32(NEG_INF)) if masked else y


def exponentials(p, S, P, part, by, exponent):
    """P = 2^exponent(S), times the keys' factors, as words of p.dtype; part = this thread's sums of 2^exponent(S), two
    a row.  S stays."""
    for n in range(p.tile_kv // 8):
        for i in range(2):
            x = [cute.math.exp2(exponent(S[i, c, n], i, c, n), fastmath=True) for c in range(2)]
            for c in range(2):
                part[2 * i + c] = x[c] if n == 0 else part[2 * i + c] + x[c]
            if p.weight_factor:
                x = [x[c] * by.of(1, i, 8 * n + c) for c in range(2)]
            P[2 * n + i] = pack(p, x[0], x[1])


def drop_hidden(p, S, P):
    """Weights of keys that do not exist are 0, whatever their factors."""
    for n in range(p.tile_kv // 8):
        for i in range(2):
            keep = Int32(0)
            for c, half in enumerate((0xFFFF, -0x10000)):
                keep = keep | cutlass.select_(S[i, c, n] == NEG_INF, Int32(0), Int32(half))
            P[2 * n + i] = P[2 * n + i] & keep


@cute.jit
def optimistic(p: cutlass.Constexpr, fn: cutlass.Constexpr, S, P, state, tile, col0, factors_at, spoilt):
    """The block with the base it finds; True if that was not good enough."""
    part = cute.make_rmem_tensor((4,), Float32)
    unit = [row.unit for row in tile.rows]
    base = [state.top[i] * (unit[i] if p.unit_positive else Float32(1.0)) for i in range(2)]
    by = Factors(p, fn, tile, col0, factors_at)
    if const_expr(p.key_factor == "unit"):
        exponentials(p, S, P, part, by, lambda s, i, c, n: s * by.of(0, i, 8 * n + c) - base[i])
    elif const_expr(p.score == "dot"):
        exponentials(p, S, P, part, by, lambda s, i, c, n: s * unit[i] - base[i])
    elif const_expr(p.ramp):  # two FMAs a score
        lines, begin = [], []
        for first in col0:
            lines.append([[x * u for x in r] for r, u in zip(ramp_of(p, fn, tile, first), unit, strict=False)])
            begin.append([lines[-1][i][1] - base[i] for i in range(2)])
        exponentials(p, S, P, part, by, lambda s, i, c, n: on_ramp(p, lines, begin, s, i, 8 * n + c))
    else:
        cls = columns(p, fn, tile, col0)
        may_read = ~spoilt if p.score_loads else True
        score = lambda s, i, c, n: score_of(p, fn, tile, i, cls[i][n, c], s, col0, 8 * n + c, may_read)  # noqa: E731
        exponentials(p, S, P, part, by, lambda s, i, c, n: score(s, i, c, n) * unit[i] - base[i])
    s0, s1 = part[0] + part[1], part[2] + part[3]
    worst = cute.arch.fmax(s0, s1)
    if const_expr(late(p)):  # a sum, not `or`: that can make ptxas call the loop divergent
        worst = worst + cutlass.select_(spoilt, Float32.inf, Float32(0.0))
    stale = cute.arch.vote_any_sync(~(worst <= GUARD))  # NaN is no good either: a hidden key's factor may be anything
    if not stale:
        state.total[0] = state.total[0] + s0
        state.total[1] = state.total[1] + s1
    return stale


def on_ramp(p, lines, begin, s, i: int, off: int):
    k, off = divmod(off, p.part_kv)
    return s * lines[k][i][0] + (lines[k][i][2] * float(off) + begin[k][i])


@cute.jit
def rescore(p: cutlass.Constexpr, fn: cutlass.Constexpr, S, tile, col0, factors_at, masked):
    """S becomes what the maximum is taken of: scores where the unit is positive, base-2 logits else."""
    if const_expr(p.key_factor == "unit"):
        multiply(p, fn, S, tile, col0, factors_at, masked)
    elif const_expr(p.score != "dot" or not p.unit_positive):
        here = opaque(col0)
        units = [Float32(1.0) if p.unit_positive else row.unit for row in tile.rows]
        if const_expr(p.score == "any"):
            if masked:
                touch(p, fn, S, tile, here, units, True)
            else:
                touch(p, fn, S, tile, here, units, False)
        else:
            touch(p, fn, S, tile, here, units, False)


@cute.jit
def soften(
    p: cutlass.Constexpr, fn: cutlass.Constexpr, S, P, state, tile, col0, factors_at, masked,
    first: cutlass.Constexpr,
):  # fmt: skip
    """P and the running sums from one block of scores.  True if a row's base moved: then O must be multiplied by
    `grow`, once the product that still adds to O is done."""
    part = cute.make_rmem_tensor((4,), Float32)
    stale = Boolean(True)
    if const_expr(p.key_factor == "dot"):
        multiply(p, fn, S, tile, col0, factors_at)
    if const_expr(p.score != "any" and not hidden_already(p)):
        if masked:
            if const_expr(p.key_factor == "unit"):
                multiply(p, fn, S, tile, col0, factors_at)
            hide(p, fn, S, tile, col0)
    if const_expr(not first):
        # a branch around this pass instead would cost the loop its uniform registers
        spoilt = Boolean(masked) if const_expr(late(p)) else Boolean(False)
        stale = optimistic(p, fn, S, P, state, tile, col0, factors_at, spoilt)
    if stale:
        rescore(p, fn, S, tile, col0, factors_at, masked)
        scale = [row.unit if p.unit_positive else Float32(1.0) for row in tile.rows]
        for i in cutlass.range_constexpr(2):
            peak = quad(cute.arch.fmax, chains(cute.arch.fmax, [S[e] for e in row_elems(i, p.tile_kv)], 4))
            new = cute.arch.fmax(state.top[i], peak)
            state.grow[i] = cute.math.exp2((state.top[i] - new) * scale[i], fastmath=True)
            state.top[i] = new
        # subtracted first, so that the greatest weighs exactly 1; a second loop with one FMA a score for bases that
        # are not large was slower in all (plain 3 %, ALiBi 2 %)
        by = Factors(p, fn, tile, col0, factors_at)
        exponentials(p, S, P, part, by, lambda s, i, c, n: (s - state.top[i]) * scale[i])
        for i in cutlass.range_constexpr(2):
            state.total[i] = state.total[i] * state.grow[i] + (part[2 * i] + part[2 * i + 1])
    if const_expr(p.weight_factor):
        if masked:
            drop_hidden(p, S, P)
    return stale


@cute.jit
def weigh(p: cutlass.Constexpr, fn: cutlass.Constexpr, S, P, tile, col0, factors_at, masked):
    """scan = none: the weights are the logits themselves."""
    if const_expr(p.key_factor):
        multiply(p, fn, S, tile, col0, factors_at)
    if masked:
        put_weights(p, fn, S, P, tile, col0, factors_at, True)
    else:
        put_weights(p, fn, S, P, tile, opaque(col0), factors_at, False)


def put_weights(p, fn, S, P, tile, col0, factors_at, masked: bool):
    cls = columns(p, fn, tile, col0)
    by = Factors(p, fn, tile, col0, factors_at)
    for n in range(p.tile_kv // 8):
        for i in range(2):
            w = []
            for c in range(2):
                cl, off = cls[i][n, c], 8 * n + c
                seen = visible(p, fn, tile, i, cl, col0, off) if masked else True
                y = score_of(p, fn, tile, i, cl, S[i, c, n], col0, off, seen)
                if p.weight_factor:
                    y = y * by.of(1, i, off)
                w.append(cutlass.select_(seen, y, Float32(0.0)) if masked else y)
            P[2 * n + i] = pack(p, w[0], w[1])


@cute.jit
def rescale(O, cols: cutlass.Constexpr, grow):
    for i in cutlass.range_constexpr(2):
        for e in row_elems(i, cols):
            O[e] = O[e] * grow[i]
