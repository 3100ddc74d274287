"""What fills the Q, K and V rings: here one TMA a block of contiguous rows."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from .ahead import leave, wait_made
from .factors import compute_factors, put_factors
from .functors import Env
from .heads import box_of
from .layout import box_place, coords
from .ring import advance, fill, fill_tagged, is_lead
from .schedule import first_chunk, next_block, read_mark, take, walk_of


def factors_of(p, fn, env, *units) -> tuple:
    """Of the keys of a block of these units."""
    return compute_factors(p, fn, env, tuple(n * p.part_kv for n in units), env.kv_len)


@cute.jit
def fill_parts(
    p: cutlass.Constexpr, what: cutlass.Constexpr, ring: cutlass.Constexpr, slot: Int32, phase: Int32,
    nbytes: cutlass.Constexpr, atom, src, dst, mark, tags,
):  # fmt: skip
    """Wait for the slot, announce the bytes of all parts, copy one after the other; `mark`: as of read_mark."""
    cute.arch.mbarrier_wait(ring.empty + slot, phase)
    with cute.arch.elect_one():
        if const_expr(what == "k"):
            to = cute.make_tensor(tags + slot * p.parts, cute.make_layout(p.parts))
            for k in cutlass.range_constexpr(p.parts):
                to[k] = mark[k]
        cute.arch.mbarrier_arrive_and_expect_tx(ring.full + slot, nbytes)
    for k in cutlass.range_constexpr(p.parts):
        cute.copy(
            atom, src[None, mark[k] >> 1], dst[None, box_place(what, k, slot)], tma_bar_ptr=ring.full + slot
        )  # fmt: skip


@cute.jit
def stream(
    p: cutlass.Constexpr,
    fn: cutlass.Constexpr,
    what: cutlass.Constexpr,
    atom_q,
    atom,
    sQ,
    sB,
    q_ring: cutlass.Constexpr,
    ring: cutlass.Constexpr,
    item_ring: cutlass.Constexpr,
    shelf: cutlass.Constexpr,
    marks: cutlass.Constexpr,
    items,
    tags,
    env,
    grid,
    ahead,
):
    """One warp streams K (with Q), another V, block by block from the last to the first."""
    one = cute.make_layout(1)
    cpasync.prefetch_descriptor(atom)
    if const_expr(what == "k"):
        cpasync.prefetch_descriptor(atom_q)
    lead = is_lead()
    slot, phase, q_slot, q_phase, it, it_phase = Int32(0), Int32(1), Int32(0), Int32(1), Int32(0), Int32(0)
    mark, mark_phase = Int32(0), Int32(0)
    item = take(item_ring, items, it, it_phase, lead)
    live = item.live
    while live:
        it, it_phase = advance(item_ring.stages, it, it_phase)
        m, h, b, begin, end = item.m, item.h, item.b, item.begin, item.end
        g = h // env.group_size
        here = Env(b, h, g, *env[3:])
        if const_expr(what == "k"):
            for w in cutlass.range_constexpr(p.warpgroups):
                gQ, own = box_of(p, here, m, w, p.tile_qk, p.tile_qk)
                sQp, gQp = cpasync.tma_partition(atom_q, 0, one, cute.group_modes(sQ, 0, 2), cute.group_modes(gQ, 0, 2))
                fill(
                    q_ring,
                    q_slot * p.warpgroups + w,
                    q_phase,
                    64 * p.tile_qk * 2,
                    atom_q,
                    gQp[None, own, 0],
                    sQp[None, q_slot * p.warpgroups + w],
                )
            q_slot, q_phase = advance(p.q_stages, q_slot, q_phase)
            gB = cute.local_tile(coords(p.tile_qk)[None, None, g, b], (p.part_kv, p.tile_qk), (None, 0))
        else:
            gB = cute.local_tile(coords(p.tile_vo, True)[None, None, g, b], (p.tile_vo, p.part_kv), (0, None))
        boxes = cute.group_modes(sB, 0, 2)
        if const_expr(p.walks_lists):
            boxes = cute.zipped_divide(sB, (p.part_kv, p.tile_qk) if what == "k" else (p.tile_vo, p.part_kv))
        sBp, gBp = cpasync.tma_partition(atom, 0, one, boxes, cute.group_modes(gB, 0, 2))
        nbytes = p.tile_kv * (p.tile_qk if what == "k" else p.tile_vo) * 2
        if const_expr(p.counted):
            for j in cutlass.range(end - begin, unroll=1):
                n = end - 1 - j
                wait_made(p, what, ahead, here, n)
                if const_expr(what == "v"):
                    put_factors(p, shelf, slot, phase, factors_of(p, fn, here, n))
                fill(ring, slot, phase, nbytes, atom, gBp[None, n], sBp[None, slot])
                slot, phase = advance(ring.stages, slot, phase)
        elif const_expr(p.walks_lists):
            for _j in cutlass.range(end, unroll=1):
                found, mark, mark_phase = read_mark(p, marks, mark, mark_phase, lead)
                for k in cutlass.range_constexpr(p.parts):
                    wait_made(p, what, ahead, here, (found[k] >> 1) * p.part_kv // p.tile_kv)
                if const_expr(what == "v"):
                    put_factors(p, shelf, slot, phase, factors_of(p, fn, here, *(x >> 1 for x in found)))
                fill_parts(p, what, ring, slot, phase, nbytes, atom, gBp, sBp, found, tags)
                slot, phase = advance(ring.stages, slot, phase)
        else:
            walk = walk_of(p, fn, here, m)
            chunk, seen, clear = first_chunk(p, walk), Int32(0), Int32(0)
            for _j in cutlass.range(end, unroll=1):
                n, masked, chunk, seen, clear = next_block(p, fn, walk, chunk, seen, clear)
                wait_made(p, what, ahead, here, n)
                if const_expr(what == "k"):
                    fill_tagged(ring, slot, phase, nbytes, atom, gBp[None, n], sBp[None, slot], tags, 2 * n + masked)
                else:
                    put_factors(p, shelf, slot, phase, factors_of(p, fn, here, n))
                    fill(ring, slot, phase, nbytes, atom, gBp[None, n], sBp[None, slot])
                slot, phase = advance(ring.stages, slot, phase)
        item = take(item_ring, items, it, it_phase, lead)
        live = item.live
    if const_expr(what in p.ahead):
        leave(p, ahead, env, grid)
