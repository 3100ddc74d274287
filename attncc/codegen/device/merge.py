"""Attention states of parts of the keys: across the two warpgroups of a CTA, and across CTAs.

A state is (o, lse) of a set of keys; states of disjoint sets merge exactly (arXiv 2501.01005, section 2.2).  A small
tile's blocks go to the two warpgroups in turn, and the second hands its state to the first.  A piece of a tile that the
plan has cut leaves its state in device memory; whoever arrives last at a target merges all of its pieces, in the order
of the plan, so that the bits do not depend on who that is.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from .emits import OPS, add_parts, in_fours, store_parts
from .epilogue import BAR_STORE, close_row
from .functors import NEG_INF
from .layout import quad, rounds_of
from .packed import SOURCES, TARGET_WORDS, word
from .softmax import IDENTITY
from .vectors import plus

BAR_FREE, BAR_READY, BAR_TAKEN = 1, 2, 3  # the exchange buffer: may be written, has been written, has been read
BAR_STORED = 4  # the partial rows of an item, and who merges them; 5: of one that the first warpgroup ends alone


def exchange_slice(exchange, k: int, t):
    return cute.make_tensor(exchange + (k * 512 + t * 4), cute.make_layout(4))


def quarter(acc, k: int):
    """Elements 4 k … 4 k + 3 of an accumulator: two of row 0, two of row 1."""
    return cute.make_tensor(acc.iterator + 4 * k, cute.make_layout(4))


SUMS = 256  # words for the bases and sums of rows: of 64 rows of one warpgroup, or of FEW rows of every warp


@cute.jit
def hand_over(p: cutlass.Constexpr, acc_o, state, exchange, sums, used, t: Int32):
    """The second warpgroup's state, through shared memory: the store buffer of both, free once the first one has come
    to this item.  Nobody may write there again before BAR_TAKEN."""
    own = [quad(plus, state.total[i]) for i in range(2)]
    for r, eights in enumerate(rounds_of(p)):
        cute.arch.barrier(barrier_id=BAR_FREE, number_of_threads=256)
        if used:
            if const_expr(r == 0):
                if t % 4 == 0:
                    mine = pack4(state.top[0], state.top[1], own[0], own[1]).load()
                    cute.make_tensor(sums + t, cute.make_layout(4)).store(mine)
            for k, n in enumerate(eights):
                cute.autovec_copy(quarter(acc_o, n), exchange_slice(exchange, k, t))
        cute.arch.barrier_arrive(barrier_id=BAR_READY, number_of_threads=256)
    if const_expr(p.emits):
        cute.arch.barrier(barrier_id=BAR_FREE, number_of_threads=256)
        if used:
            for k, four in enumerate(in_fours(state.emits)):
                exchange_slice(exchange, k, t).store(pack4(*(pair[i] for pair, i in four)).load())
        cute.arch.barrier_arrive(barrier_id=BAR_READY, number_of_threads=256)


def pack4(*values):
    packed = cute.make_rmem_tensor((4,), Float32)
    for k, x in enumerate(values):
        packed[k] = x
    return packed


@cute.jit
def receive(p: cutlass.Constexpr, acc_o, state, tile, exchange, sums, used, t: Int32):
    """The first warpgroup's state becomes that of both."""
    mine, theirs = cute.make_rmem_tensor((2,), Float32), cute.make_rmem_tensor((2,), Float32)
    mine.fill(1.0)
    theirs.fill(1.0)
    other = cute.make_rmem_tensor((4,), Float32)
    for r, eights in enumerate(rounds_of(p)):
        cute.arch.barrier(barrier_id=BAR_READY, number_of_threads=256)
        if used:
            if const_expr(r == 0 and p.scan == "softmax"):
                cute.autovec_copy(cute.make_tensor(sums + t // 4 * 4, cute.make_layout(4)), other)
                first = t % 4 == 0  # the lanes of a quad are added up later
                other[2], other[3] = (cutlass.select_(first, other[k], Float32(0.0)) for k in (2, 3))
                for i in cutlass.range_constexpr(2):
                    scale = tile.rows[i].unit if p.unit_positive else Float32(1.0)
                    new = cute.arch.fmax(state.top[i], other[i])
                    mine[i] = cute.math.exp2((state.top[i] - new) * scale, fastmath=True)
                    theirs[i] = cute.math.exp2((other[i] - new) * scale, fastmath=True)
                    state.top[i] = new
                    state.total[i] = state.total[i] * mine[i] + other[2 + i] * theirs[i]
            for k, n in enumerate(eights):
                cute.autovec_copy(exchange_slice(exchange, k, t), other)
                here = quarter(acc_o, n)
                for e in cutlass.range_constexpr(4):
                    here[e] = here[e] * mine[e // 2] + other[e] * theirs[e // 2]
        last = r + 1 == len(rounds_of(p)) and not p.emits
        cute.arch.barrier_arrive(barrier_id=BAR_TAKEN if last else BAR_FREE, number_of_threads=256)
    if const_expr(p.emits):
        cute.arch.barrier(barrier_id=BAR_READY, number_of_threads=256)
        if used:
            for k, four in enumerate(in_fours(state.emits)):
                cute.autovec_copy(exchange_slice(exchange, k, t), other)
                for e, (pair, i) in enumerate(four):
                    op = OPS[p.emits[(4 * k + e) // 2]]
                    pair[i] = op(pair[i], other[e])
        cute.arch.barrier_arrive(barrier_id=BAR_TAKEN, number_of_threads=256)


# ------------------------------------------------------------------------------------- across CTAs
def partial_row(sizes, row, g):
    return Int64(row) * sizes.num_kv_heads + g


@cute.jit
def store_partial(
    p: cutlass.Constexpr, fn: cutlass.Constexpr, O, base, total, found, tile, item, row: Int32, c_in: Int32, lists,
    sizes,
):  # fmt: skip
    """This thread's share of the piece's state: o normalised, lse in base 2, without the sink; and what it `found`."""
    for i in cutlass.range_constexpr(2):
        if row + 8 * i < item.rows:
            at = partial_row(sizes, item.delta + item.row0 + row + 8 * i, item.g)
            inv = Float32(1.0)
            if const_expr(p.scan == "softmax"):
                inv, log2 = close_row(p, fn, tile, i, base[i], total[i], False)
                if c_in == 0:
                    cute.make_tensor(lists.part_lse + at, cute.make_layout(1))[0] = log2
            if const_expr(p.emits):
                if c_in == 0:
                    store_parts(p, fn, found, tile, i, at)
            here = lists.part_o.toint() + (at * p.head_dim_vo + c_in) * 4
            for n in cutlass.range_constexpr(p.head_dim_vo // 8):
                cute.arch.inline_ptx(
                    "st.global.v2.f32 [{$r0}], {{$r1}, {$r2}};",
                    read_only_args=[here + 32 * n, O[i, 0, n] * inv, O[i, 1, n] * inv],
                )


@cute.jit
def arrive(lists, sizes, item, first: Int32, flags, t: Int32, w: Int32, threads: Int32, barrier: Int32):
    """Which of targets first … first + 31 of an item lack no piece any more, as a word, for all `threads` threads:
    these merge them.  A lane a target: a hundred requests that share a prefix must not wait for one another."""
    flag = cute.make_tensor(flags + ((first >> 5) & 1), cute.make_layout(1))
    if (t < 32) & (w == 0):
        complete = Boolean(False)
        if first + t < item.targets:
            number = item.target0 + first + t
            sources = word(lists.targets, number * TARGET_WORDS + SOURCES)
            counter = lists.counters + (number * sizes.num_kv_heads + item.g)
            cute.arch.fence_acq_rel_gpu()
            seen = cute.arch.atomic_add(counter, Int32(1), sem="acq_rel", scope="gpu")
            complete = Boolean(seen == sources - 1)
            if complete:
                cute.arch.atomic_exch(counter, Int32(0), sem="relaxed", scope="gpu")
            cute.arch.fence_acq_rel_gpu()
        found = cute.arch.vote_ballot_sync(complete)
        if t == 0:
            flag[0] = found
    cute.arch.barrier(barrier_id=barrier, number_of_threads=threads)
    return flag[0]


@cute.jit
def merge_pieces(p: cutlass.Constexpr, O, target, g: Int32, row: Int32, c_in: Int32, lists, sizes):
    """O becomes the sum of the pieces' outputs, each with the weight of its keys; (base, sum) of each row."""
    O.fill(0.0)
    base, total = cute.make_rmem_tensor((2,), Float32), cute.make_rmem_tensor((2,), Float32)
    base.fill(NEG_INF)
    total.fill(0.0)
    packed = [target.row0 + cutlass.min(row + 8 * i, target.rows - 1) for i in range(2)]
    for s in cutlass.range(target.sources, unroll=1):
        delta = word(lists.sources, target.source0 + s)
        for i in cutlass.range_constexpr(2):
            at = partial_row(sizes, delta + packed[i], g)
            keep, weight = Float32(1.0), Float32(1.0)
            if const_expr(p.scan == "softmax"):
                log2 = cute.arch.load(lists.part_lse + at, Float32, cop="cg")
                new = cute.arch.fmax(base[i], log2)
                safe = cutlass.select_(new == NEG_INF, Float32(0.0), new)
                keep = cute.math.exp2(base[i] - safe, fastmath=True)
                weight = cute.math.exp2(log2 - safe, fastmath=True)
                total[i] = total[i] * keep + weight
                base[i] = new
            here = lists.part_o.toint() + (at * p.head_dim_vo + c_in) * 4
            for n in cutlass.range_constexpr(p.head_dim_vo // 8):
                x, y = cute.arch.inline_ptx(
                    "ld.global.cg.v2.f32 {{$w0}, {$w1}}, [{$r0}];",
                    write_only_types=[Float32] * 2,
                    read_only_args=[here + 32 * n],
                )
                O[i, 0, n] = O[i, 0, n] * keep + x * weight
                O[i, 1, n] = O[i, 1, n] * keep + y * weight
    return (base[0], base[1]), (total[0], total[1])


@cute.jit
def merge_emits(
    p: cutlass.Constexpr, fn: cutlass.Constexpr, found, tile, target, g: Int32, row: Int32, c_in: Int32, lists, sizes
):  # fmt: skip
    """What all pieces found for each row: a lane of its four takes every fourth piece, in the order of the plan."""
    for i in cutlass.range_constexpr(2):
        packed = target.row0 + cutlass.min(row + 8 * i, target.rows - 1)
        for reduce, pair in zip(p.emits, found, strict=True):
            pair[i] = Float32(IDENTITY[reduce])
        for s in cutlass.range(c_in // 2, target.sources, 4, unroll=1):
            delta = word(lists.sources, target.source0 + s)
            add_parts(p, fn, found, tile, i, partial_row(sizes, delta + packed, g))
        for reduce, pair in zip(p.emits, found, strict=True):
            pair[i] = quad(OPS[reduce], pair[i])


BATCH = 8  # pieces whose loads are on their way together


def few_rows(p) -> int:
    """Rows that merge_few can take: their sums fit the warpgroup's part of the store buffer."""
    return min(16, 64 * p.stage_vo * 2 // (p.head_dim_vo * 4 + 8))


def load_pieces(p, target, first, row, part, g, lists, sizes):
    """(log2, four features from 4 `part` on) of a row in BATCH pieces from the first-th on; the last one repeats."""
    sources = [lists.sources + (target.source0 + cutlass.min(first + u, target.sources - 1)) for u in range(BATCH)]
    rows = [partial_row(sizes, word(s, 0) + target.row0 + row, g) for s in sources]
    log2 = [Float32(0.0)] * BATCH
    if p.scan == "softmax":
        log2 = [cute.arch.load(lists.part_lse + at, Float32, cop="cg") for at in rows]
    load = "ld.global.cg.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];"
    places = [lists.part_o.toint() + (at * p.head_dim_vo + part * 4) * 4 for at in rows]
    return log2, [cute.arch.inline_ptx(load, write_only_types=[Float32] * 4, read_only_args=[at]) for at in places]


def add_pieces(p, target, first, log2, values, base, total, acc):
    """(base, total, acc) with the pieces added."""
    new = base
    for x in log2:
        new = cute.arch.fmax(new, x)
    safe = cutlass.select_(new == NEG_INF, Float32(0.0), new)
    keep = cute.math.exp2(base - safe, fastmath=True) if p.scan == "softmax" else Float32(1.0)
    total, acc = total * keep, [a * keep for a in acc]
    for u in range(BATCH):
        weight = cute.math.exp2(log2[u] - safe, fastmath=True)
        weight = cutlass.select_(first + u < target.sources, weight, Float32(0.0))
        total = total + weight
        acc = [a + x * weight for a, x in zip(acc, values[u], strict=True)]
    return new, total, tuple(acc)


@cute.jit
def sum_pieces(
    p: cutlass.Constexpr, target, first, rows: Int32, g: Int32, stage: Int32, lists, sizes, t: Int32, w: Int32
):
    """Into shared memory: the pieces' sum of `rows` rows from the first-th on, few_rows(p) at most, and then (base,
    sum) of each.  A thread takes four features of a row, where most threads of the fragment would idle.  `stage`:
    address of the warpgroup's part of the store buffer."""
    chunks, few = p.head_dim_vo // 4, few_rows(p)
    sums = stage + few * p.head_dim_vo * 4
    cute.arch.barrier(barrier_id=BAR_STORE + w, number_of_threads=128)  # the last store has read the buffer
    for k in cutlass.range((rows * chunks + 127) // 128, unroll=1):
        at = k * 128 + t
        if at < rows * chunks:
            here, part = at // chunks, at % chunks
            base, total = Float32(NEG_INF), Float32(0.0)
            acc = (Float32(0.0), Float32(0.0), Float32(0.0), Float32(0.0))
            for s in cutlass.range(0, target.sources, BATCH, unroll=1):
                log2, values = load_pieces(p, target, s, first + here, part, g, lists, sizes)
                base, total, acc = add_pieces(p, target, s, log2, values, base, total, acc)
            store = "st.shared.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};"
            cute.arch.inline_ptx(store, read_only_args=[stage + (here * p.head_dim_vo + part * 4) * 4, *acc])
            if part == 0:
                cute.arch.inline_ptx(
                    "st.shared.v2.f32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[sums + here * 8, base, total]
                )
    cute.arch.barrier(barrier_id=BAR_STORE + w, number_of_threads=128)


def summed(p, O, i: int, row, c_in, stage):
    """Row `row` of those that sum_pieces left: its features to row i of the fragment; (base, sum)."""
    load = "ld.shared.v2.f32 {{$w0}, {$w1}}, [{$r0}];"
    sums = stage + few_rows(p) * p.head_dim_vo * 4
    found = cute.arch.inline_ptx(load, write_only_types=[Float32] * 2, read_only_args=[sums + row * 8])
    for n in range(p.head_dim_vo // 8):
        at = stage + (row * p.head_dim_vo + c_in + 8 * n) * 4
        O[i, 0, n], O[i, 1, n] = cute.arch.inline_ptx(load, write_only_types=[Float32] * 2, read_only_args=[at])
    return found


@cute.jit
def merge_few(
    p: cutlass.Constexpr, O, target, g: Int32, row: Int32, c_in: Int32, stage: Int32, lists, sizes, t: Int32, w: Int32
):
    """merge_pieces for at most few_rows(p) rows."""
    sum_pieces(p, target, 0, target.rows, g, stage, lists, sizes, t, w)
    bases, totals = (), ()
    for i in cutlass.range_constexpr(2):
        base, total = summed(p, O, i, cutlass.min(row + 8 * i, target.rows - 1), c_in, stage)
        bases, totals = (*bases, base), (*totals, total)
    return bases, totals


def in_lots(p) -> bool:
    """Does a fragment of so many features ask for merge_in_lots?"""
    return p.head_dim_vo != p.tile_vo or (p.staged and p.head_dim_vo & (p.head_dim_vo - 1) != 0)


@cute.jit
def merge_in_lots(
    p: cutlass.Constexpr, O, target, g: Int32, row: Int32, c_in: Int32, stage: Int32, lists, sizes, t: Int32, w: Int32
):
    """merge_pieces, a few rows after the other: slower for many, but nothing is added up in the fragment, and so ptxas
    finds registers for one that is no power of two."""
    lot = const_expr(8 if few_rows(p) < 16 else 16)
    bases, totals = cute.make_rmem_tensor((2,), Float32), cute.make_rmem_tensor((2,), Float32)
    bases.fill(NEG_INF)
    totals.fill(0.0)
    for first in cutlass.range(0, target.rows, lot, unroll=1):
        sum_pieces(p, target, first, cutlass.min(target.rows - first, lot), g, stage, lists, sizes, t, w)
        for i in cutlass.range_constexpr(2):
            mine = row + 8 * i - first
            if (mine >= 0) & (mine < lot):
                bases[i], totals[i] = summed(p, O, i, cutlass.min(mine, target.rows - 1 - first), c_in, stage)
    return (bases[0], bases[1]), (totals[0], totals[1])
