"""Keys and values times their factors, by spare warps of the kernel that reads them.

Where f_k and f_v are nothing but a factor of each key, a long prefill would pay for it at every score.  So warps that
have nothing else to do - one that is spare, and the schedule warp while it waits - multiply the rows, once each, into
memory of their own, a little ahead of the warps that stream them: while the tensor cores work, memory has little to do.
What counts is that each of these takes instructions from the consumers on its scheduler: two warps share the lots, and
a lot whose rows are all there is made in few instructions.  The first lots are made by the consumers, too.

A lot is a few rows of one (request, kv head); a counter deals lots to whichever CTA asks, in the order in which tiles
will want them.  Nobody who holds a lot waits for anybody, so every lot that was dealt gets done, however few CTAs run
at a time.  A word counts the lots of a block of keys, and another those of its values, which are done; a stream waits
until all are before it copies the block.  Makers release the word after a proxy fence, since TMA reads what they wrote;
readers acquire it and fence once more.  Whoever leaves last zeroes the words for the next launch.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr

from ..prepass import AHEAD_PARAMS
from .functors import Env, head_of
from .prepass import Side, read_chunk, side_of
from .ring import has_passed, warp_uniform
from .rows import unpack
from .softmax import opaque, pack

LINE = 128  # bytes that L2 fetches
BAR_MADE = 3  # a named barrier: the consumers' lots are done
MAKERS = 2  # warps beside the consumers: a spare one, and the schedule warp
FIRST = 2  # words before those of blocks: the next lot, and how many warps have left

Ahead = NamedTuple("Ahead", [(name, Any) for name, _ in AHEAD_PARAMS])


class Lot(NamedTuple):
    """`rows_of(p)` rows from `row` on of a (request, kv head); `block`: the number of their block among all."""

    b: Any
    g: Any
    row: Any
    block: Any


def helpers(p) -> int:
    """Consumer warps, which make a lot each before there is anything to consume."""
    return 4 * p.warpgroups


def flight(p) -> int:
    """Copies of a lane that are on their way at once: as many as registers hold."""
    easy = p.dtype == "bf16" and all(32 % (p.key_dims[name] // 8) == 0 for name in p.ahead)
    return (8 if easy else 4) // (1 if p.registers[0] >= 56 else 2)


def rows_of(p) -> int:
    """Of a lot."""
    return 32 if p.tile_kv % 32 == 0 else 16


def parts_of(p) -> int:
    """Lots of a block."""
    return p.tile_kv // rows_of(p)


def blocks_of(p, env):
    """Of a (request, kv head)."""
    return (env.kv_len + p.tile_kv - 1) // p.tile_kv


def word_of(p, x: Ahead, block, side: int):
    """The address of the word of a block's keys or values."""
    return x.made + Int64(block * len(p.ahead) + (FIRST + side)) * 4


def over(a, b):
    """a // b of numbers that are not negative."""
    return Int32(Uint32(a) // Uint32(b))


def lot_of(p, env, grid, ticket) -> Lot:
    """Pairs come in sections whose tiles run together (schedule.py), in a section all last blocks first."""
    blocks, parts = blocks_of(p, env), parts_of(p)
    pairs = grid.num_heads_batch // env.group_size
    wide = cutlass.max(grid.section // env.group_size, 1)
    s = over(ticket, wide * blocks * parts)
    rest = ticket - s * (wide * blocks * parts)
    width = cutlass.min(wide, pairs - s * wide)
    step = over(rest, width * parts)
    rest = rest - step * (width * parts)
    pair, n = s * wide + rest // parts, blocks - 1 - step
    b = over(pair, env.num_kv_heads)
    row = n * p.tile_kv + rest % parts * rows_of(p)
    return Lot(b, pair - b * env.num_kv_heads, row, pair * blocks + n)


@cute.jit
def first_lot(p: cutlass.Constexpr, x, t: Int32, word):
    """CTAs take as many lots as they have warps to make them, all at once; thread 0 leaves the first one's number in
    `word`, which the barrier that opens the kernel shows to all."""
    if const_expr(p.ahead):
        if t == 0:
            cute.make_tensor(word, cute.make_layout(1))[0] = count_on("relaxed", x.made, helpers(p) + 2)


@cute.jit
def multiply_first(p: cutlass.Constexpr, fn: cutlass.Constexpr, x, outer, grid, word):
    """A consumer warp's lot, while there is nothing to consume yet."""
    if const_expr(p.ahead):
        number = cute.make_tensor(word, cute.make_layout(1))[0] + warp_uniform(cute.arch.warp_idx()) - 4
        if number < lots_of(p, outer, grid):
            lot, found = prepare(p, fn, x, outer, grid, number)
            multiply_lot(p, x, outer, lot, found)
        cute.arch.barrier_arrive(barrier_id=BAR_MADE, number_of_threads=32 * (helpers(p) + 1))


@cute.jit
def multiply_ahead(p: cutlass.Constexpr, fn: cutlass.Constexpr, x, outer, grid, word):
    """The spare warp's work: lots, as long as there are any."""
    first = cute.make_tensor(word, cute.make_layout(1))[0] + helpers(p)
    if first < lots_of(p, outer, grid):
        multiply_from(p, fn, x, outer, grid, first)
    cute.arch.barrier(barrier_id=BAR_MADE, number_of_threads=32 * (helpers(p) + 1))
    leave(p, x, outer, grid)


@cute.jit
def multiply_from(p: cutlass.Constexpr, fn: cutlass.Constexpr, x, outer, grid, now: Int32):
    """Lots now, now + 1, and those that the counter deals.  The next one's rows are asked for before one is done."""
    total, following = lots_of(p, outer, grid), now + 1
    lot, found = prepare(p, fn, x, outer, grid, now)
    while now < total:
        after = Int32(0)
        if cute.arch.lane_idx() == 0:
            after = count_on("relaxed", x.made, 1)
        later, nxt = prepare(p, fn, x, outer, grid, cutlass.min(following, total - 1))
        multiply_lot(p, x, outer, lot, found)
        now, following, lot, found = following, cute.arch.shuffle_sync(after, 0), later, nxt


@cute.jit
def multiply_meanwhile(
    p: cutlass.Constexpr, fn: cutlass.Constexpr, x, outer, grid, barrier: cutlass.Constexpr, at: Int32, phase: Int32,
    more,
):  # fmt: skip
    """Lots, as long as a phase of the barrier `at` places after `barrier` is to be waited for.  `more`: there may be
    some left; so there may be afterwards."""
    if const_expr(p.ahead):
        total = lots_of(p, outer, grid)
        passed = has_passed(barrier + at, phase)
        while more & ~passed:
            number = Int32(0)
            if cute.arch.lane_idx() == 0:
                number = count_on("relaxed", x.made, 1)
            number = cute.arch.shuffle_sync(number, 0)
            more = Boolean(number < total)
            if more:
                lot, found = prepare(p, fn, x, outer, grid, number)
                multiply_lot(p, x, outer, lot, found)
            passed = has_passed(barrier + at, phase)
    return more


def count_on(order: str, address, count: int):
    """Add to a word; what it was."""
    return cute.arch.inline_ptx(
        f"atom.{order}.gpu.global.add.u32 {{$w0}}, [{{$r0}}], {{$r1}};", write_only_types=[Int32],
        read_only_args=[address, Int32(count)],
    )  # fmt: skip


def lots_of(p, env, grid):
    """Of all keys."""
    return grid.num_heads_batch // env.group_size * blocks_of(p, env) * parts_of(p)


def prepare(p, fn, x, outer, grid, number):
    """A lot, whose rows are asked for, so that they wait in L2, and its factors: a lane has those of one row."""
    lot = lot_of(p, outer, grid, number)
    row = lot.row + cute.arch.lane_idx() % rows_of(p)
    last = cutlass.min(row, outer.kv_len - 1)
    for side in (side_of(p, name, x) for name in p.ahead):
        at = place_of(side, lot, last) * 16
        for k in range(-(-side.used * 2 // LINE)):
            cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[at + k * LINE])
    env = Env(lot.b, lot.g * outer.group_size, lot.g, *outer[3:])
    return lot, fn.ahead(env, head_of(fn, env), last, row < outer.kv_len)


def place_of(side: Side, lot: Lot, row):
    """The address of a row, in 16 bytes."""
    at = Int64(lot.b) * side.batch + Int64(lot.g) * side.head + Int64(row) * Int64(side.row)
    return (side.source >> 4) + at


@cute.jit
def multiply_lot(p: cutlass.Constexpr, x, env, lot, found):
    """`found`: the factors of `prepare`."""
    for side in cutlass.range_constexpr(len(p.ahead)):
        multiply_side(p, side, x, env, lot, as_factor(p, found[side]))


@cute.jit
def multiply_side(p: cutlass.Constexpr, side: cutlass.Constexpr, x, env, lot, factor):
    """The rows of a lot; says so when they are done.  `factor`: of the row that is this lane's number."""
    here = side_of(p, p.ahead[side], x)
    copies, whole = rows_of(p) * here.used // 8, Boolean(False)
    if const_expr(in_step(p, here)):
        whole = lot.row + rows_of(p) <= env.kv_len
        if whole:
            multiply_whole(p, here, env, lot, factor)
    if ~whole:
        for k in cutlass.range(-(-copies // (32 * flight(p))), unroll=1):
            multiply_some(p, here, env, lot, opaque(k * (32 * flight(p)) + cute.arch.lane_idx()), factor)
    cute.arch.inline_ptx("fence.proxy.async.global;")
    cute.arch.sync_warp()
    if cute.arch.lane_idx() == 0:
        cute.arch.inline_ptx(
            "red.release.gpu.global.add.u32 [{$r0}], {$r1};", read_only_args=[word_of(p, x, lot.block, side), Int32(1)]
        )


def in_step(p, side: Side) -> bool:
    """Do the lanes of a copy have whole rows, and no more than a lot has?"""
    each = side.used // 8
    return 32 % each == 0 and 32 // each <= rows_of(p)


def multiply_whole(p, side: Side, env, lot: Lot, factor) -> None:
    """A lot all of whose rows are there: the copies of a lane lie evenly apart."""
    each = side.used // 8
    rows = 32 // each  # of a copy
    lane = cute.arch.lane_idx()
    own, chunk = lane // each, lane % each
    source = (place_of(side, lot, lot.row + own) + chunk) * 16
    step = Int64(side.row) * (16 * rows)
    target = side.target + (target_of(env, lot) * each + lane) * 16
    total = rows_of(p) // rows
    for first in range(0, total, flight(p)):
        found, mine = [], range(first, min(first + flight(p), total))
        for _ in mine:
            found.append(read_chunk(source))
            source = source + step
        for f, words in zip(mine, found, strict=True):
            made = times(p, words, cute.arch.shuffle_sync(factor, own + f * rows))
            store = f"st.global.v4.b32 [{{$r0}} + {512 * f}], {{{{$r1}}, {{$r2}}, {{$r3}}, {{$r4}}}};"
            cute.arch.inline_ptx(store, read_only_args=[target, *made])


def target_of(env, lot: Lot):
    """The number of a lot's first row among those that are made, which lie kv head by kv head."""
    return (Int64(lot.b) * env.num_kv_heads + lot.g) * env.kv_len + lot.row


def multiply_some(p, side: Side, env, lot: Lot, first, factor) -> None:
    """Copies of 16 bytes of a lane, from number `first` on.  Past the last key the last row is read again, and
    nothing is written."""
    found, left = [], cutlass.min(env.kv_len - lot.row, rows_of(p))
    source = place_of(side, lot, lot.row)
    for own, chunk in copies_of(p, side, first):
        at = (source + Int64(cutlass.min(own, left - 1)) * Int64(side.row) + chunk) * 16
        found.append(read_chunk(at))
    each = side.used // 8
    target = (side.target >> 4) + target_of(env, lot) * each
    for (own, chunk), words in zip(copies_of(p, side, opaque(first)), found, strict=True):
        made = times(p, words, cute.arch.shuffle_sync(factor, own))
        at = (target + (own * each + chunk)) * 16
        cute.arch.inline_ptx(
            "st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
            read_only_args=[at, *made], predicate=Boolean(own < left),
        )  # fmt: skip


def copies_of(p, side: Side, first):
    """(row of the lot, 16 bytes of it) of each."""
    each = side.used // 8
    if 32 % each:
        return [((first + 32 * f) // each, (first + 32 * f) % each) for f in range(flight(p))]
    return [(first // each + f * (32 // each), first % each) for f in range(flight(p))]


# ------------------------------------------------------------------------------------- two elements at a time
def as_factor(p, c):
    """A factor as `times` takes it: for bf16 a word of the factor in bf16, and of what that lacks."""
    if p.dtype != "bf16":
        return c
    short, _ = unpack(p, pack(p, c, c))
    rest = c - short
    return pack(p, c, cutlass.select_(rest == rest, rest, Float32(0.0)))  # none, where c is infinite


def times(p, words, factor):
    """Elements times a factor, rounded once; bf16 by two packed operations a word, whose error before it is below
    2⁻¹⁶ of the product."""
    if p.dtype != "bf16":
        return [pack(p, *(y * factor for y in unpack(p, word))) for word in words]
    near, rest = (
        cute.arch.inline_ptx(
            f"prmt.b32 {{$w0}}, {{$r0}}, {{$r0}}, {pattern};", write_only_types=[Int32], read_only_args=[factor]
        )
        for pattern in ("0x1010", "0x3232")
    )
    asm = "{ .reg .b32 t; mul.rn.bf16x2 t, {$r0}, {$r2}; fma.rn.bf16x2 {$w0}, {$r0}, {$r1}, t; }"
    return [cute.arch.inline_ptx(asm, write_only_types=[Int32], read_only_args=[w, near, rest]) for w in words]


# ------------------------------------------------------------------------------------- those who read
@cute.jit
def wait_made(p: cutlass.Constexpr, what: cutlass.Constexpr, x, env, n: Int32):
    """... until block n of this request's kv head is there, where it is made."""
    if const_expr(what in p.ahead):
        pair = env.b * env.num_kv_heads + env.g
        at = word_of(p, x, pair * blocks_of(p, env) + n, p.ahead.index(what))
        # where there are no keys a block is visited, too
        count, whole = Int32(0), cutlass.select_(n * p.tile_kv < env.kv_len, Int32(parts_of(p)), Int32(0))
        while count < whole:
            count = cute.arch.inline_ptx(
                "ld.acquire.gpu.global.u32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[at]
            )
        cute.arch.inline_ptx("fence.proxy.async.global;")


@cute.jit
def leave(p: cutlass.Constexpr, x, env, grid):
    """This warp, a maker or a stream, asks for no word any more; the last of all zeroes them."""
    lane = cute.arch.lane_idx()
    gx, _, _ = cute.arch.grid_dim()
    before = Int32(0)
    if lane == 0:
        before = count_on("acq_rel", x.made + 4, 1)
    cute.arch.sync_warp()
    if cute.arch.shuffle_sync(before, 0) == (MAKERS + len(p.ahead)) * gx - 1:
        words = FIRST + lots_of(p, env, grid) // parts_of(p) * len(p.ahead)
        for n in cutlass.range(lane, words, 32, unroll=1):
            cute.arch.inline_ptx("st.global.b32 [{$r0}], {$r1};", read_only_args=[x.made + Int64(n) * 4, Int32(0)])
