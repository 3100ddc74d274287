"""Attention over a planned batch for Hopper: decode, verification, chunked and whole prefill in one launch.

One persistent CTA an SM = a producer warpgroup (three warps that load, a schedule warp) + two consumer warpgroups of 64
packed rows each.  Work comes as items (packed.py): a tile of packed rows of one kv head, and a run of its keys.  Where
a tile has at most 64 rows the two warpgroups take its blocks of keys in turn and merge their states at the end, so that
few rows cost no more time than their keys take to arrive; else each has its own rows and sees every block.

The arithmetic is that of forward.py; unlike there, an item ends before the next one begins.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

from .emits import finished, store_emits
from .epilogue import normalise, store_packed_lse, store_rows, totals
from .factors import allocate_shelf, factor_barriers, give_back_factors, wait_factors
from .features import fill_features
from .few import attend_few, meet
from .forward import issue_scores, issue_values, weights
from .functors import Block
from .gather import place
from .keys import Keys, barriers, open_ready, ready_of, transform_share
from .kv_pages import TEAM, Cache, stream_boxes, stream_queries, stream_rows, writers
from .layout import allocate_tiles, by_row, cols_layout, element, mma_scores, mma_values, rows_layout, values_of
from .lists import with_lists
from .merge import (
    BAR_FREE,
    BAR_STORED,
    BAR_TAKEN,
    SUMS,
    arrive,
    few_rows,
    hand_over,
    in_lots,
    merge_emits,
    merge_few,
    merge_in_lots,
    merge_pieces,
    receive,
    store_partial,
)
from .packed import (
    FEW,
    ITEM_STAGES,
    ITEM_WORDS,
    TARGET_WORDS,
    Lists,
    Owner,
    Sizes,
    Work,
    block_of,
    launch_env,
    open_packed,
    peek,
)  # fmt: skip
from .ring import is_lead, open_ring, own_thread, release, release_for, ring_place, rings_of, wait_block, warp_uniform
from .rope import allocate_tables, features_of, fill_turnings
from .rows import transform_queries
from .schedule import allocate_marks, mark_stages
from .softmax import new_state, rescale, reset, settle
from .staged import finish_staged
from .tickets import deal_tickets
from .vectors import finish_rows

NUM_SIZES = 9  # i32 parameters before the variant's own
BAR_TAIL = 10  # ... 11: one a warpgroup


@cute.jit
def clear_tail(p: cutlass.Constexpr, base: Int32, left: Int32, t: Int32, w: Int32):
    """Zero the rows of V from `left` on: their weights are 0, but they may hold anything, NaN too.  Where both
    warpgroups see the block, both do, each before its own product: zeros over zeros."""
    chunks = p.tile_vo // 8
    for k in cutlass.range(((p.tile_kv - left) * chunks + 127) // 128, unroll=1):
        at = k * 128 + t
        row = left + at // chunks
        if row < p.tile_kv:
            cute.arch.inline_ptx(
                "st.shared.v4.b32 [{$r0}], {{$r1}, {$r1}, {$r1}, {$r1}};",
                read_only_args=[base + place(row, at % chunks, p.tile_kv, p.tile_vo), Int32(0)],
            )
    cute.arch.fence_view_async_shared()
    cute.arch.barrier(barrier_id=BAR_TAIL + w, number_of_threads=128)


def landed(p) -> None:
    """What cp.async wrote, wgmma may read."""
    if not p.chunk:
        cute.arch.fence_view_async_shared()


@cute.jit
def transform_own(
    p: cutlass.Constexpr, fn: cutlass.Constexpr, what: cutlass.Constexpr, turnings: cutlass.Constexpr, tiles, ready,
    slot: Int32, tile, split, block, last: cutlass.Constexpr, lead, c_in: Int32,
):  # fmt: skip
    """This warp's part of f_k or f_v of a block that has landed, where the variant has it.  `last`: it may reach past
    the last key."""
    if const_expr(p.f_k if what == "k" else p.f_v):
        row = tile.rows[0]
        keys = Keys(row.env, block.col0[0] - c_in, tile.stop if last else None)
        transform_share(p, fn, what, turnings, tiles, ready_of(p, ready, what), slot, keys, split, lead)


@cute.jit
def wait_transformed(p: cutlass.Constexpr, what: cutlass.Constexpr, ready, ring: cutlass.Constexpr, at: Int32):
    """... and until all of it is done."""
    if const_expr(p.f_k if what == "k" else p.f_v):
        slot, phase = ring_place(ring.stages, at)
        cute.arch.mbarrier_wait(ready_of(p, ready, what) + slot, phase)


@cute.jit
def attend(
    p: cutlass.Constexpr, fn: cutlass.Constexpr, turnings: cutlass.Constexpr, frags: cutlass.Constexpr, state, tile,
    item, tags, ready, shelf: cutlass.Constexpr, k_ring: cutlass.Constexpr, v_ring: cutlass.Constexpr, q_slot: Int32,
    at: Int32, number: Int32, lead, zero: Int32, t: Int32, w: Int32,
):  # fmt: skip
    """This warpgroup's blocks of an item: every one or every other one from the `number`-th, the CTA's `at`-th."""
    acc_s, acc_o, S, O, P, Pn, rQ, rK, rV, rP, k_base, v_base = frags
    c_in = (t % 4) * 2
    stride = 1 + item.split
    n = item.end - 1 - number
    steps = warp_uniform((item.end - item.begin - number + item.split) >> item.split)
    at = warp_uniform(at)
    # ---- first block
    ks = wait_block(k_ring, at)
    if const_expr(p.f_k):
        block = block_of(p, tags, ks, item, n, c_in)
        transform_own(p, fn, "k", turnings, k_base, ready, ks, tile, item.split, block, True, lead, c_in)
        wait_transformed(p, "k", ready, k_ring, at)
    landed(p)
    issue_scores(p, acc_s, rQ[None, None, None, q_slot], rK[None, None, None, ks])
    block = block_of(p, tags, ks, item, n, c_in)
    first_tile = with_lists(p, fn, tile, block.col0, True)
    warpgroup.wait_group(0)
    release_for(k_ring, ks, lead, stride)
    slot, phase = ring_place(p.v_stages, at)
    factors_at = wait_factors(p, shelf, slot, phase, Int32(0))
    weights(p, fn, S, P, state, first_tile, Block(block.col0, Boolean(True)) if p.mask else block, factors_at, True)
    give_back_factors(p, shelf, slot, lead, stride)
    if const_expr(p.chunk):
        left = item.offset + item.keys - (block.col0[0] - c_in)
        if left < p.tile_kv:
            vs = wait_block(v_ring, at)
            clear_tail(p, v_base + vs * (p.tile_kv * p.tile_vo * 2), left, t, w)
    if const_expr(p.f_v):
        transform_own(
            p, fn, "v", turnings, v_base, ready, wait_block(v_ring, at), tile, item.split, block, True, lead, c_in
        )
    # ---- the others: scores of this block beside the product of the last one
    for _ in cutlass.range(1, steps, unroll=1):
        nxt = at + stride
        n = n - stride
        ks = wait_block(k_ring, nxt)
        block = block_of(p, tags, ks, item, n, c_in)
        here = with_lists(p, fn, tile, block.col0, block.masked)
        vs = wait_block(v_ring, at)
        if const_expr(p.f_k):
            transform_own(p, fn, "k", turnings, k_base, ready, ks, tile, item.split, block, False, lead, c_in)
            wait_transformed(p, "k", ready, k_ring, nxt)
        wait_transformed(p, "v", ready, v_ring, at)
        landed(p)
        issue_scores(p, acc_s, rQ[None, None, None, q_slot], rK[None, None, None, ks])
        issue_values(p, acc_o, rP, rV[None, None, None, vs])
        warpgroup.wait_group(1)
        release_for(k_ring, ks, lead, stride)
        # without a mask only the tail of the keys is cut, and that is the first block
        ahead = block if p.mask else Block(block.col0, Boolean(False))
        slot, phase = ring_place(p.v_stages, nxt)
        factors_at = wait_factors(p, shelf, slot, phase, Int32(0))
        stale = weights(p, fn, S, Pn, state, here, ahead, factors_at, False)
        give_back_factors(p, shelf, slot, lead, stride)
        warpgroup.wait_group(0)
        release_for(v_ring, vs, lead, stride)
        if stale:
            rescale(O, p.head_dim_vo, state.grow)
        settle(P, Pn, zero)
        at = nxt
        if const_expr(p.f_v):
            transform_own(
                p, fn, "v", turnings, v_base, ready, wait_block(v_ring, at), tile, item.split, block, False, lead, c_in
            )
    vs = wait_block(v_ring, at)
    wait_transformed(p, "v", ready, v_ring, at)
    landed(p)
    issue_values(p, acc_o, rP, rV[None, None, None, vs])
    warpgroup.wait_group(0)
    release_for(v_ring, vs, lead, stride)


@cute.jit
def conclude(
    p: cutlass.Constexpr, fn: cutlass.Constexpr, turnings: cutlass.Constexpr, O, acc_o, sO, state, tile, items,
    slot: Int32, item, lists, sizes, out, lse, flags, lses, t: Int32, w: Int32, local: Int32,
):  # fmt: skip
    """A finished item, which lies in a slot of `items`: its rows to the output, or its state to memory and, where that
    was the last piece missing, the merged rows to the output.  `local`: this warpgroup's first row in the tile."""
    r_in, c_in = (t // 32) * 16 + (t % 32) // 4, (t % 4) * 2
    whole = item.targets == 0
    base, total = totals(p, fn, state, tile)
    found = finished(p, fn, state, tile)
    first = item.row0 + local
    rows = cutlass.max(cutlass.min(item.rows - local, 64), 0)
    wgs = 2 - item.split
    barrier = BAR_STORED + item.split  # not one for both: the second warpgroup may already be at its next item
    if not whole:
        store_partial(p, fn, O, base, total, found, tile, item, local + r_in, c_in, lists, sizes)
        cute.arch.barrier(barrier_id=barrier, number_of_threads=128 * wgs)
    row_lse = cute.make_rmem_tensor((2,), cutlass.Float32)
    for c in cutlass.range(cutlass.max((item.targets + 31) // 32, 1), unroll=1):
        todo, turn = Int32(1), w
        if not whole:
            todo = arrive(lists, sizes, item, c * 32, flags, t, w, 128 * wgs, barrier)
            turn = Int32(0)
        while todo != 0:
            bit = cute.arch.popc((todo & -todo) - 1)
            todo, number = todo & (todo - 1), item.target0 + c * 32 + bit
            if turn == w:
                if not whole:
                    target = target_of(lists, number)
                    tile = open_packed(
                        p, fn, owner_of(target), item.g, target.row0, target.rows, r_in, item.offset, item.table,
                        item.keys, item.i0, lists, sizes,
                    )  # fmt: skip
                    stage = sO.iterator.toint() + w * (64 * p.stage_vo * 2)
                    if const_expr(in_lots(p)):
                        base, total = merge_in_lots(p, O, target, item.g, r_in, c_in, stage, lists, sizes, t, w)
                    elif target.rows <= few_rows(p):
                        base, total = merge_few(p, O, target, item.g, r_in, c_in, stage, lists, sizes, t, w)
                    else:
                        base, total = merge_pieces(p, O, target, item.g, r_in, c_in, lists, sizes)
                    if const_expr(p.emits):
                        merge_emits(p, fn, found, tile, target, item.g, r_in, c_in, lists, sizes)
                    first, rows = target.row0, target.rows
                row_lse.fill(0.0)
                if const_expr(p.scan == "softmax"):
                    normalise(p, fn, O, base, total, tile, row_lse)
                    store_packed_lse(lse, row_lse, tile, r_in, rows, c_in)
                store_emits(p, fn, found, tile, (r_in, r_in + 8), rows, c_in)
                if const_expr(p.staged):
                    finish_afresh(
                        p, fn, turnings, O, row_lse, lses, items, slot, number, local, lists, sizes, sO, out, t, w
                    )
                else:
                    if const_expr(p.epilogue):
                        finish_rows(p, fn, turnings, O, tile, row_lse, t)
                    store_rows(p, sO, acc_o, t, w, first, rows, item.g, out, sizes)
            turn = (turn + 1) % wgs


@cute.jit
def finish_afresh(
    p: cutlass.Constexpr, fn: cutlass.Constexpr, turnings: cutlass.Constexpr, O, row_lse, lses, items, slot: Int32,
    number: Int32, local: Int32, lists, sizes, sO, out, t: Int32, w: Int32,
):  # fmt: skip
    """finish_staged for an item or, where it was cut, a target.  Which rows these are is read again: it is not kept in
    registers through a merge."""
    item = peek(Work, items, slot)
    owner, first, rows = owner_of(item), item.row0 + local, cutlass.max(cutlass.min(item.rows - local, 64), 0)
    if item.targets != 0:
        target = target_of(lists, number)
        owner, first, rows = owner_of(target), target.row0, target.rows
    finish_staged(p, fn, turnings, O, row_lse, lses, owner, item, first, rows, lists, sizes, sO, out, t, w)


class Target:
    """A run of rows whose pieces are merged together."""

    def __init__(self, at):
        self.request, self.row0, self.rows, self.source0, self.sources, self.q_start, self.qo_len, self.kv_len = (
            warp_uniform(at[k]) for k in range(TARGET_WORDS)
        )


def target_of(lists, number) -> Target:
    return Target(cute.make_tensor(lists.targets + TARGET_WORDS * number, cute.make_layout(TARGET_WORDS)))


def owner_of(x) -> Owner:
    """... the rows of an item or a target."""
    return Owner(x.request, x.q_start, x.qo_len, x.kv_len)


def open_item(p, fn, item, row, lists, sizes):
    return open_packed(
        p, fn, owner_of(item), item.g, item.row0, item.rows, row, item.offset, item.table, item.keys, item.i0, lists,
        sizes,
    )  # fmt: skip


def row_of(item, few, t, w):
    """The first of this thread's two rows in an item's tile."""
    row = (t % 32) // 4
    return cutlass.select_(few, row, 64 * w * (1 - item.split) + (t // 32) * 16 + row)


def side_of(item, start):
    """Which warpgroup has which slots of the rings, for an item whose first block is the CTA's `start`-th: 0: both have
    all; 1, 2: every other one; 4: both have all, and the first one alone concludes."""
    return cutlass.select_(item.rows <= FEW, Int32(4), item.split * (1 + (start & 1)))


def own_place():
    """(thread of its warpgroup, consumer warpgroup), read afresh from the hardware."""
    t = own_thread()
    return t % 128, warp_uniform(t // 128) - 1


def next_item(ring, items, turn):
    """The `turn`-th item; its slot is not given back."""
    slot, phase = ring_place(ring.stages, turn)
    cute.arch.mbarrier_wait(ring.full + slot, phase)
    return peek(Work, items, slot)


@cute.jit
def consume(
    p: cutlass.Constexpr, fn: cutlass.Constexpr, turnings: cutlass.Constexpr, sQ, sK, sV, sO, sums, flags, lses,
    rings: cutlass.Constexpr, ready, shelf: cutlass.Constexpr, items, tags, lists, sizes, out, lse, t: Int32, w: Int32,
):  # fmt: skip
    q_ring, k_ring, v_ring, item_ring = rings
    lead = is_lead()
    r_in = (t // 32) * 16 + (t % 32) // 4
    mqk, mpv = mma_scores(p), mma_values(p)
    tqk, tpv = mqk.get_slice(t), mpv.get_slice(t)
    acc_s = tqk.make_fragment_C(tqk.partition_shape_C((64, p.tile_kv)))
    acc_o = tpv.make_fragment_C(tpv.partition_shape_C((64, p.head_dim_vo)))
    S, O = by_row(acc_s, p.tile_kv), by_row(acc_o, p.head_dim_vo)
    # words of two weights: [2 n8 + row], this block's and the next one's
    P = cute.make_rmem_tensor((p.tile_kv // 4,), Int32)
    Pn = cute.make_rmem_tensor((p.tile_kv // 4,), Int32)
    rP = cute.make_tensor(
        cute.recast_ptr(P.iterator, dtype=element(p)), cute.make_layout(((2, 2, 2), 1, p.tile_kv // 16))
    )
    rQ, rK = tqk.make_fragment_A(tqk.partition_A(sQ)), tqk.make_fragment_B(tqk.partition_B(sK))
    rV = values_of(p, sV, t)
    frags = acc_s, acc_o, S, O, P, Pn, rQ, rK, rV, rP, sK.iterator.toint(), sV.iterator.toint()
    exchange = cute.recast_ptr(sO.iterator, swizzle_=cute.make_swizzle(0, 4, 3), dtype=cutlass.Float32)
    state = new_state(p)
    zero = sizes.num_qo_heads >> 31  # 0, but only we know
    fill_turnings(p, fn, turnings, launch_env(sizes), t, w)

    cute.arch.griddepcontrol_wait()
    fill_features(p, fn, features_of(p, turnings), launch_env(sizes), t, w)
    turn, start = Int32(0), Int32(0)  # items and blocks so far
    owed = Int32(0)  # the second warpgroup has handed over, and not yet seen that it was read: the item's side
    item = next_item(item_ring, items, turn)
    live = item.live != 0
    while live:
        few = item.rows <= FEW
        tile = open_item(p, fn, item, row_of(item, few, t, w), lists, sizes)
        if item.split > w + Int32(few):
            cute.arch.barrier_arrive(barrier_id=BAR_FREE, number_of_threads=256)
        # A barrier tells phases apart by parity alone: before it waits for a slot that the other warpgroup used, this
        # one must know that its use is over.  (The first knows when it has received.)
        side = side_of(item, start)
        if owed * (owed ^ side) != 0:  # one comparison, for the sake of ptxas
            cute.arch.barrier(barrier_id=BAR_TAKEN, number_of_threads=256)
            owed = Int32(0)
        reset(p, state, tile)
        acc_o.fill(0.0)
        q_slot, q_phase = ring_place(p.q_stages, turn)
        q_slot = q_slot * p.warpgroups + w
        cute.arch.mbarrier_wait(q_ring.full + q_slot, q_phase)
        if const_expr(not p.f_q):
            cute.arch.fence_view_async_shared()
        count = item.end - item.begin
        if count > 0:
            q_base = sQ.iterator.toint() + q_slot * (64 * p.tile_qk * 2)
            if const_expr(p.f_q):
                rows = item.rows - cutlass.select_(few, Int32(0), 64 * w * (1 - item.split))
                transform_queries(p, fn, turnings, q_base, tile, rows, t, w)
            if few:
                attend_few(
                    p, fn, turnings, acc_o, O, state, tile, item, tags, ready, shelf, k_ring, v_ring, q_base,
                    sK.iterator.toint(), sV.iterator.toint(), start, lead, warp_uniform(4 * w + t // 32),
                )  # fmt: skip
            else:
                number = item.split * w
                attend(
                    p, fn, turnings, frags, state, tile, item, tags, ready, shelf, k_ring, v_ring, q_slot,
                    start + number, number, lead, zero, t, w,
                )  # fmt: skip
        # read and opened again: these are not kept in registers through the loop
        t, w = own_place()
        release(q_ring, ring_place(p.q_stages, turn)[0] * p.warpgroups + w, lead)
        r_in = (t // 32) * 16 + (t % 32) // 4
        item = peek(Work, items, turn & (ITEM_STAGES - 1))
        few = item.rows <= FEW
        tile = open_item(p, fn, item, row_of(item, few, t, w), lists, sizes)
        used = r_in < item.rows
        if owed != 0:
            cute.arch.barrier(barrier_id=BAR_TAKEN, number_of_threads=256)
        owed = w * side_of(item, start)
        start = start + (item.end - item.begin)
        if few:
            stage = sO.iterator.toint()
            meet(p, O, state, tile, stage, sums.toint(), item.rows, warp_uniform(4 * w + t // 32), t, w)
        elif item.split != 0:
            if w == 1:
                hand_over(p, acc_o, state, exchange, sums, used, t)
            else:
                receive(p, acc_o, state, tile, exchange, sums, used, t)
        if owed == 0:
            local = 64 * w * (1 - item.split)
            slot = turn & (ITEM_STAGES - 1)
            conclude(
                p, fn, turnings, O, acc_o, sO, state, tile, items, slot, item, lists, sizes, out, lse, flags, lses, t,
                w, local,
            )  # fmt: skip
        release(item_ring, turn & (ITEM_STAGES - 1), lead)
        turn = turn + 1
        item = next_item(item_ring, items, turn)
        live = item.live != 0
    if owed != 0:
        cute.arch.barrier(barrier_id=BAR_TAKEN, number_of_threads=256)


@cute.kernel
def kernel(atom_k, atom_v, q, out, lse, lists, values, p: cutlass.Constexpr, fn: cutlass.Constexpr):
    """atom_k, atom_v: TMA atoms, or Cache tuples for the gather; lists: a tuple of pointers."""
    t, _, _ = cute.arch.thread_idx()
    wg = warp_uniform(t // 128)
    warp = warp_uniform(cute.arch.warp_idx())
    lists = Lists(*lists)
    sizes = Sizes(*values[:NUM_SIZES], values[NUM_SIZES:])

    smem = SmemAllocator()
    stages = p.k_stages, p.v_stages, ITEM_STAGES, p.q_stages * p.warpgroups
    others = barriers(p) + factor_barriers(p)
    bars = smem.allocate_array(Int64, 2 * (sum(stages) + mark_stages(p)) + others)
    items = smem.allocate_array(Int32, ITEM_WORDS * ITEM_STAGES)
    tags = smem.allocate_array(Int32, p.k_stages)
    flags = smem.allocate_array(Int32, 2)
    wanted = smem.allocate_array(Int64, 1)
    k_ring, v_ring, item_ring, q_ring = rings_of(bars, stages)  # slot of Q: stage * warpgroups + warpgroup
    ready = bars + 2 * sum(stages)
    marks = allocate_marks(p, smem, ready + others)
    sQ, sK, sV, sO = allocate_tiles(p, smem)
    sums = smem.allocate_array(cutlass.Float32, SUMS)
    lses = smem.allocate_array(cutlass.Float32, p.staged_lses) if p.staged_lses else sums  # then nobody asks
    turnings = allocate_tables(p, smem)
    shelf = allocate_shelf(p, smem, ready + barriers(p))
    if t == 0:
        open_ring(k_ring, 4 * p.warpgroups, writers(p))
        open_ring(v_ring, 4 * p.warpgroups, writers(p))
        open_ring(item_ring, 4 * p.warpgroups + 3)
        open_ring(q_ring, 4, 32 if p.chunk else 32 * TEAM)
        cute.arch.mbarrier_init(wanted, 1)
        open_ready(p, ready)
        open_ring(shelf.ring, 4 * p.warpgroups)
        open_ring(marks.ring, 2 if p.chunk else TEAM)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()

    # the next kernel may take this CTA's place when it ends: it waits by itself for what all of them write
    cute.arch.griddepcontrol_launch_dependents()
    rings = q_ring, k_ring, v_ring, item_ring
    if wg == 0:
        cute.arch.setmaxregister_decrease(p.registers[0])
        if const_expr(p.chunk):
            if warp == 0:
                stream_boxes(p, fn, "k", atom_k, sK, k_ring, item_ring, marks, items, tags, wanted, lists, sizes)
            if warp == 1:
                stream_boxes(p, fn, "v", atom_v, sV, v_ring, item_ring, marks, items, tags, wanted, lists, sizes)
            if warp == 2:
                stream_queries(p, q, sQ, q_ring, item_ring, items, sizes)
        else:
            if warp < TEAM:
                stream_rows(p, fn, warp, atom_k, atom_v, q, sQ, sK, sV, rings, marks, items, tags, wanted, lists, sizes)
        if warp == 3:
            deal_tickets(p, fn, item_ring, shelf, marks, items, wanted, lists, sizes)
    else:
        cute.arch.setmaxregister_increase(p.registers[1])
        consume(
            p, fn, turnings, sQ, sK, sV, sO, sums, flags, lses, rings, ready, shelf, items, tags, lists, sizes, out,
            lse, t % 128, wg - 1,
        )  # fmt: skip


@cute.jit
def host_boxes(
    k: cute.Tensor, v: cute.Tensor, q: cute.Pointer, out: cute.Pointer, lse: cute.Pointer, lists, values, blocks: Int32,
    stream: cuda.CUstream, p: cutlass.Constexpr, fn: cutlass.Constexpr,
):  # fmt: skip
    """k: (row, d, head, page); v: (d, row, head, page).  Only builds the copy atoms; never run."""
    load = cpasync.CopyBulkTensorTileG2SOp()
    lk, lv = rows_layout(p, p.chunk, p.tile_qk), cols_layout(p, p.tile_vo, p.chunk)
    ak, _ = cpasync.make_tiled_tma_atom(load, k, lk, (p.chunk, p.tile_qk))
    av, _ = cpasync.make_tiled_tma_atom(load, v, lv, (p.tile_vo, p.chunk))
    kernel(ak, av, q, out, lse, lists, values, p, fn).launch(
        grid=(blocks, 1, 1), block=(p.threads, 1, 1), stream=stream, min_blocks_per_mp=1
    )


@cute.jit
def host_rows(
    k, v, q: cute.Pointer, out: cute.Pointer, lse: cute.Pointer, lists, values, blocks: Int32, stream: cuda.CUstream,
    p: cutlass.Constexpr, fn: cutlass.Constexpr,
):  # fmt: skip
    """k, v: (address, strides of page, row and head in 16 bytes)."""
    kernel(Cache(*k), Cache(*v), q, out, lse, lists, values, p, fn).launch(
        grid=(blocks, 1, 1), block=(p.threads, 1, 1), stream=stream, min_blocks_per_mp=1
    )
