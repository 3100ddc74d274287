"""Attention forward for Hopper: warp-specialised, TMA and wgmma (after FlashAttention-3, arXiv 2407.08608).

One CTA = a producer warpgroup (K warp, V warp, schedule warp) + `warpgroups` consumers of 64 query rows each.
A consumer's work is one stream of (tile, block) steps.  Each step: the scores S of a block are ready -> softmax
makes P -> issue Q Kᵀ of the next block (also when that one belongs to the next tile, so that the tensor cores have
work during the epilogue) and P V of this one.  Two warpgroups take turns to issue: the softmax of one runs under
the products of the other.

Parts, each replaceable: schedule.py (which tiles, which blocks), kv_source.py (what fills the rings), functors.py
(the variant), softmax.py, epilogue.py.  `p` is a codegen.config.KernelConfig, `fn` the generated functor module.
"""

from functools import reduce
from operator import or_

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

from .ahead import Ahead, first_lot, multiply_ahead, multiply_first
from .emits import finished, observe, store_emits
from .epilogue import normalise, store_lse, store_tile, totals
from .factors import allocate_shelf, factor_barriers, give_back_factors, wait_factors
from .features import fill_features
from .functors import Block, Env, Grid, open_tile
from .heads import own_rows, packs, rows_there
from .keys import Keys, barriers, open_ready, ready_of, transform_share
from .kv_source import stream
from .layout import allocate_tiles, by_row, cols_layout, element, mma_scores, mma_values, rows_layout, values_of
from .lists import with_lists
from .ring import advance, is_lead, open_ring, release, rings_of, warp_uniform
from .rope import allocate_tables, features_of, fill_turnings
from .rows import transform_queries
from .schedule import ITEM_STAGES, ITEM_WORDS, allocate_marks, deal, mark_stages, positions, take
from .softmax import new_state, rescale, reset, settle, soften, weigh
from .vectors import finish_rows

BAR_TURN = 1  # named barriers 1.. : turns of the consumer warpgroups


@cute.jit
def my_turn(p: cutlass.Constexpr, w: Int32):
    if const_expr(p.turns):
        cute.arch.barrier(barrier_id=BAR_TURN + w, number_of_threads=256)


@cute.jit
def pass_turn(p: cutlass.Constexpr, w: Int32):
    if const_expr(p.turns):
        nxt = cutlass.select_(w == p.warpgroups - 1, Int32(0), w + 1)
        cute.arch.barrier_arrive(barrier_id=BAR_TURN + nxt, number_of_threads=256)


def issue_scores(p, S, rQ, rK):
    """S = Q Kᵀ, one committed group."""
    warpgroup.fence()
    mma = mma_scores(p)  # made here: an atom changed inside a run-time loop must not outlive it
    for k in range(cute.size(rQ, mode=[2])):
        mma.set(warpgroup.Field.ACCUMULATE, k != 0)
        cute.gemm(mma, S, rQ[None, None, k], rK[None, None, k], S)
    warpgroup.commit_group()


def issue_values(p, O, rP, rV):
    """O += P V, one committed group."""
    warpgroup.fence()
    mma = mma_values(p)
    mma.set(warpgroup.Field.ACCUMULATE, True)
    for k in range(cute.size(rP, mode=[2])):
        cute.gemm(mma, O, rP[None, None, k], rV[None, None, k], O)
    warpgroup.commit_group()


@cute.jit
def weights(
    p: cutlass.Constexpr, fn: cutlass.Constexpr, S, P, state, tile, block, factors_at, first: cutlass.Constexpr
):  # fmt: skip
    """P from S, and what emits reduce; `factors_at`: where the factors of the block's keys lie.  True if O must be
    rescaled by state.grow."""
    observe(p, fn, S, state, tile, block.col0, block.masked)
    stale = Boolean(False)
    if const_expr(p.scan == "none"):
        weigh(p, fn, S, P, tile, block.col0, factors_at, block.masked)
    else:
        stale = soften(p, fn, S, P, state, tile, block.col0, factors_at, block.masked, first)
    return stale


def block_of(p, tags, slot, item, step, c_in) -> Block:
    """The block of keys that a step of an item visits; its scores lie in `slot`."""
    if p.counted:
        n = item.end - 1 - step
        # one unsigned comparison: two joined by `or` make ptxas call the loop divergent
        return Block((n * p.tile_kv + c_in,), Uint32(n - item.clear_begin) >= Uint32(item.clear_count))
    parts = cute.make_tensor(tags + slot * p.parts, cute.make_layout(p.parts))
    words = [warp_uniform(parts[k]) for k in range(p.parts)]
    return Block(tuple((tag >> 1) * p.part_kv + c_in for tag in words), (reduce(or_, words) & 1) != 0)


def env_of(item, outer) -> Env:
    return Env(item.b, item.h, item.h // outer.group_size, *outer[3:])


@cute.jit
def transform_block(
    p: cutlass.Constexpr, fn: cutlass.Constexpr, what: cutlass.Constexpr, turnings: cutlass.Constexpr, tiles, ready,
    slot: Int32, item, outer, block, last: cutlass.Constexpr, lead, c_in: Int32,
):  # fmt: skip
    """This warp's part of f_k or f_v of a block of an item that has landed, where the variant has it.  `last`: it may
    reach past the last key."""
    if const_expr(p.f_k if what == "k" else p.f_v):
        env = env_of(item, outer)
        keys = Keys(env, block.col0[0] - c_in, env.kv_len if last else None)
        transform_share(p, fn, what, turnings, tiles, ready_of(p, ready, what), slot, keys, Int32(0), lead)


@cute.jit
def wait_transformed(p: cutlass.Constexpr, what: cutlass.Constexpr, ready, slot: Int32, phase: Int32):
    """... and until all of it is done."""
    if const_expr(p.f_k if what == "k" else p.f_v):
        cute.arch.mbarrier_wait(ready_of(p, ready, what) + slot, phase)


def query_tile(p, fn, item, outer, w, r_in):
    """(environment, this thread's rows, its tile) of a warpgroup's share of an item."""
    env = env_of(item, outer)
    i0, _ = positions(p, env, item.m)
    envs, rows = own_rows(p, env, item.m, w, r_in)
    return env, rows, open_tile(p, fn, envs, i0, rows)


@cute.jit
def prepare_queries(
    p: cutlass.Constexpr, fn: cutlass.Constexpr, turnings: cutlass.Constexpr, sQ, slot: Int32, item, outer, t: Int32,
    w: Int32, r_in: Int32,
):  # fmt: skip
    """What must be done to the queries of an item, which have landed in `slot`, before they are multiplied."""
    if const_expr(p.f_q):
        env, _, tile = query_tile(p, fn, item, outer, w, r_in)
        base = sQ.iterator.toint() + slot * (64 * p.tile_qk * 2)
        transform_queries(p, fn, turnings, base, tile, rows_there(p, env, item.m, w), t, w)


@cute.jit
def consume(
    p: cutlass.Constexpr,
    fn: cutlass.Constexpr,
    atom_o,
    lse,
    sQ,
    sK,
    sV,
    sO,
    turnings: cutlass.Constexpr,
    rings: cutlass.Constexpr,
    ready,
    shelf: cutlass.Constexpr,
    items,
    tags,
    t: Int32,
    w: Int32,
    outer,
):
    q_ring, k_ring, v_ring, item_ring = rings
    k_base, v_base = sK.iterator.toint(), sV.iterator.toint()
    lead = is_lead()
    r_in = (t // 32) * 16 + (t % 32) // 4
    c_in = (t % 4) * 2
    mqk, mpv = mma_scores(p), mma_values(p)
    tqk, tpv = mqk.get_slice(t), mpv.get_slice(t)
    rQ = tqk.make_fragment_A(tqk.partition_A(sQ))
    rK = tqk.make_fragment_B(tqk.partition_B(sK))
    rV = values_of(p, sV, t)
    acc_s = tqk.make_fragment_C(tqk.partition_shape_C((64, p.tile_kv)))
    acc_o = tpv.make_fragment_C(tpv.partition_shape_C((64, p.head_dim_vo)))
    S, O = by_row(acc_s, p.tile_kv), by_row(acc_o, p.head_dim_vo)
    # words of two weights: [2 n8 + row], this block's and the next one's
    P = cute.make_rmem_tensor((p.tile_kv // 4,), Int32)
    Pn = cute.make_rmem_tensor((p.tile_kv // 4,), Int32)
    rP = cute.make_tensor(
        cute.recast_ptr(P.iterator, dtype=element(p)), cute.make_layout(((2, 2, 2), 1, p.tile_kv // 16))
    )
    state = new_state(p)
    row_lse = cute.make_rmem_tensor((2,), Float32)
    zero = outer.num_qo_heads >> 31  # 0, but only we know
    fill_turnings(p, fn, turnings, outer, t, w)
    fill_features(p, fn, features_of(p, turnings), outer, t, w)

    ks, kph, vs, vph, qs, qph, it, iph = (Int32(0) for _ in range(8))
    item = take(item_ring, items, it, iph, lead)
    live = item.live
    if const_expr(p.turns):
        if w == p.warpgroups - 1:
            pass_turn(p, w)
    # a CTA has at least one tile: its first scores
    cute.arch.mbarrier_wait(q_ring.full + w, 0)
    prepare_queries(p, fn, turnings, sQ, w, item, outer, t, w, r_in)
    cute.arch.mbarrier_wait(k_ring.full, 0)
    if const_expr(p.f_k):
        opening = block_of(p, tags, ks, item, 0, c_in)
        transform_block(p, fn, "k", turnings, k_base, ready, ks, item, outer, opening, True, lead, c_in)
        wait_transformed(p, "k", ready, ks, kph)
    my_turn(p, w)
    issue_scores(p, acc_s, rQ[None, None, None, w], rK[None, None, None, 0])
    pass_turn(p, w)
    while live:
        following = item
        if const_expr(p.early_item):
            it, iph = advance(item_ring.stages, it, iph)
            following = take(item_ring, items, it, iph, lead)
        env, rows, tile = query_tile(p, fn, item, outer, w, r_in)
        reset(p, state, tile)
        acc_o.fill(0.0)
        # ---- first block: its scores are on their way
        block = block_of(p, tags, ks, item, 0, c_in)
        first_tile = with_lists(p, fn, tile, block.col0, True)
        warpgroup.wait_group(0)
        release(k_ring, ks, lead)
        ks, kph = advance(p.k_stages, ks, kph)
        # a mask always runs on the first block: a branch here would make ptxas call the loop divergent
        first = Block(block.col0, Boolean(True)) if p.mask else block
        factors_at = wait_factors(p, shelf, vs, vph, Int32(0))
        weights(p, fn, S, P, state, first_tile, first, factors_at, True)
        give_back_factors(p, shelf, vs, lead)
        if const_expr(p.f_v):
            cute.arch.mbarrier_wait(v_ring.full + vs, vph)
            transform_block(p, fn, "v", turnings, v_base, ready, vs, item, outer, block, True, lead, c_in)
        # ---- the others: scores of this block beside the product of the last one
        for step in cutlass.range(1, item.end - item.begin, unroll=1):
            cute.arch.mbarrier_wait(k_ring.full + ks, kph)
            block = block_of(p, tags, ks, item, step, c_in)
            here = with_lists(p, fn, tile, block.col0, block.masked)
            cute.arch.mbarrier_wait(v_ring.full + vs, vph)
            if const_expr(p.f_k):
                transform_block(p, fn, "k", turnings, k_base, ready, ks, item, outer, block, False, lead, c_in)
                wait_transformed(p, "k", ready, ks, kph)
            wait_transformed(p, "v", ready, vs, vph)
            my_turn(p, w)
            issue_scores(p, acc_s, rQ[None, None, None, qs * p.warpgroups + w], rK[None, None, None, ks])
            issue_values(p, acc_o, rP, rV[None, None, None, vs])
            pass_turn(p, w)
            warpgroup.wait_group(1)
            release(k_ring, ks, lead)
            ks, kph = advance(p.k_stages, ks, kph)
            # without a mask only the tail of the keys is cut, and that is the first block
            ahead = block if p.mask else Block(block.col0, Boolean(False))
            nxt, nxt_phase = advance(p.v_stages, vs, vph)
            factors_at = wait_factors(p, shelf, nxt, nxt_phase, Int32(0))
            stale = weights(p, fn, S, Pn, state, here, ahead, factors_at, False)
            give_back_factors(p, shelf, nxt, lead)
            warpgroup.wait_group(0)
            release(v_ring, vs, lead)
            vs, vph = advance(p.v_stages, vs, vph)
            if stale:
                rescale(O, p.head_dim_vo, state.grow)
            settle(P, Pn, zero)
            if const_expr(p.f_v):
                cute.arch.mbarrier_wait(v_ring.full + vs, vph)
                transform_block(p, fn, "v", turnings, v_base, ready, vs, item, outer, block, False, lead, c_in)
        # ---- the last product, and the first scores of the next tile
        if const_expr(not p.early_item):
            it, iph = advance(item_ring.stages, it, iph)
            following = take(item_ring, items, it, iph, lead)
        release(q_ring, qs * p.warpgroups + w, lead)
        qs, qph = advance(p.q_stages, qs, qph)
        cute.arch.mbarrier_wait(v_ring.full + vs, vph)
        if following.live:
            cute.arch.mbarrier_wait(q_ring.full + (qs * p.warpgroups + w), qph)
            prepare_queries(p, fn, turnings, sQ, qs * p.warpgroups + w, following, outer, t, w, r_in)
            cute.arch.mbarrier_wait(k_ring.full + ks, kph)
            if const_expr(p.f_k):
                its_first = block_of(p, tags, ks, following, 0, c_in)
                transform_block(p, fn, "k", turnings, k_base, ready, ks, following, outer, its_first, True, lead, c_in)
                wait_transformed(p, "k", ready, ks, kph)
        wait_transformed(p, "v", ready, vs, vph)
        if const_expr(p.f_q):
            # the first product takes S as an operand, though it doesn't use it: else S is kept through the transform
            acc_s.fill(0.0)
        my_turn(p, w)
        issue_values(p, acc_o, rP, rV[None, None, None, vs])
        # past the last tile this multiplies stale data that nobody reads
        issue_scores(p, acc_s, rQ[None, None, None, qs * p.warpgroups + w], rK[None, None, None, ks])
        pass_turn(p, w)
        warpgroup.wait_group(1)
        release(v_ring, vs, lead)
        vs, vph = advance(p.v_stages, vs, vph)
        row_lse.fill(0.0)
        if const_expr(p.scan == "softmax"):
            base, total = totals(p, fn, state, tile)
            normalise(p, fn, O, base, total, tile, row_lse)
            store_lse(lse, row_lse, tile, rows, c_in)
        store_emits(p, fn, finished(p, fn, state, tile), tile, rows, env.qo_len, c_in)
        if const_expr(p.epilogue):
            finish_rows(p, fn, turnings, O, tile, row_lse, t)
        store_tile(p, atom_o, sO, acc_o, t, w, item.m, env)
        item = following
        live = following.live
    warpgroup.wait_group(0)
    if const_expr(p.turns):
        if w == 0:
            my_turn(p, w)  # takes the turn nobody used
    cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.kernel
def kernel(
    atom_q: cute.CopyAtom,
    atom_k: cute.CopyAtom,
    atom_v: cute.CopyAtom,
    atom_o: cute.CopyAtom,
    lse: cute.Pointer,
    tickets: cute.Pointer,
    values,
    p: cutlass.Constexpr,
    fn: cutlass.Constexpr,
):
    t, _, _ = cute.arch.thread_idx()
    wg = warp_uniform(t // 128)
    warp = warp_uniform(cute.arch.warp_idx())
    fixed = 9 + packs(p)
    own = fixed + (len(Ahead._fields) if p.ahead else 0)
    env = Env(Int32(0), Int32(0), Int32(0), *values[:5], values[own:], shift=values[9] if packs(p) else None)
    grid = Grid(*values[5:9])
    ahead = Ahead(*values[fixed:own]) if p.ahead else None

    smem = SmemAllocator()
    stages = p.k_stages, p.v_stages, ITEM_STAGES, p.q_stages * p.warpgroups
    others = barriers(p) + factor_barriers(p)
    bars = smem.allocate_array(Int64, 2 * (sum(stages) + mark_stages(p)) + others)
    items = smem.allocate_array(Int32, ITEM_WORDS * ITEM_STAGES)
    tags = smem.allocate_array(Int32, p.k_stages * p.parts)
    lot = smem.allocate_array(Int32, 1) if p.ahead else None
    k_ring, v_ring, item_ring, q_ring = rings_of(bars, stages)  # slot of Q: stage * warpgroups + warpgroup
    ready = bars + 2 * sum(stages)
    marks = allocate_marks(p, smem, ready + others)
    sQ, sK, sV, sO = allocate_tiles(p, smem)
    turnings = allocate_tables(p, smem)
    shelf = allocate_shelf(p, smem, ready + barriers(p))
    if t == 0:
        open_ring(k_ring, 4 * p.warpgroups)
        open_ring(v_ring, 4 * p.warpgroups)
        open_ring(item_ring, 4 * p.warpgroups + 2)
        open_ring(q_ring, 4)
        open_ready(p, ready)
        open_ring(shelf.ring, 4 * p.warpgroups)
        open_ring(marks.ring, 2)
    first_lot(p, ahead, t, lot)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()

    rings = q_ring, k_ring, v_ring, item_ring
    if wg == 0:
        cute.arch.setmaxregister_decrease(p.registers[0])
        if warp == 0:
            stream(
                p, fn, "k", atom_q, atom_k, sQ, sK, q_ring, k_ring, item_ring, shelf, marks, items, tags, env, grid,
                ahead,
            )  # fmt: skip
        if warp == 1:
            stream(
                p, fn, "v", atom_q, atom_v, sQ, sV, q_ring, v_ring, item_ring, shelf, marks, items, tags, env, grid,
                ahead,
            )  # fmt: skip
        if warp == 2:
            deal(p, fn, item_ring, marks, items, tickets, env, grid, ahead)
        if const_expr(p.ahead):
            if warp == 3:
                multiply_ahead(p, fn, ahead, env, grid, lot)
    else:
        cute.arch.setmaxregister_increase(p.registers[1])
        multiply_first(p, fn, ahead, env, grid, lot)
        consume(p, fn, atom_o, lse, sQ, sK, sV, sO, turnings, rings, ready, shelf, items, tags, t % 128, wg - 1, env)


@cute.jit
def host(
    q: cute.Tensor,
    k: cute.Tensor,
    v: cute.Tensor,
    o: cute.Tensor,
    lse: cute.Pointer,
    tickets: cute.Pointer,
    values,
    blocks: Int32,
    stream: cuda.CUstream,
    p: cutlass.Constexpr,
    fn: cutlass.Constexpr,
):
    """q, k, o: (s, d, h, b); v: (d, s, h, b).  Only builds the copy atoms; never run."""
    load, save = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
    aq, _ = cpasync.make_tiled_tma_atom(load, q, rows_layout(p, 64, p.tile_qk), (64, p.tile_qk))
    ak, _ = cpasync.make_tiled_tma_atom(load, k, rows_layout(p, p.part_kv, p.tile_qk), (p.part_kv, p.tile_qk))
    av, _ = cpasync.make_tiled_tma_atom(load, v, cols_layout(p, p.tile_vo, p.part_kv), (p.tile_vo, p.part_kv))
    ao, _ = cpasync.make_tiled_tma_atom(save, o, rows_layout(p, 64, p.stage_vo), (64, p.stage_vo))
    kernel(aq, ak, av, ao, lse, tickets, values, p, fn).launch(
        grid=(blocks, 1, 1), block=(p.threads, 1, 1), stream=stream, min_blocks_per_mp=1
    )
