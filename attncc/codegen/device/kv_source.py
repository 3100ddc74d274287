"""What fills the Q, K and V rings: here one TMA a block of contiguous rows."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from .ahead import leave, wait_made
from .factors import compute_factors, put_factors
from .functors import Env
from .layout import coords
from .ring import advance, fill, fill_tagged, is_lead
from .schedule import first_chunk, next_block, take, walk_of


def factors_of(p, fn, env, n) -> tuple:
    """Of block n's keys."""
    return compute_factors(p, fn, env, n * p.tile_kv, env.kv_len)


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
    item = take(item_ring, items, it, it_phase, lead)
    live = item.live
    while live:
        it, it_phase = advance(item_ring.stages, it, it_phase)
        m, h, b, begin, end = item.m, item.h, item.b, item.begin, item.end
        g = h // env.group_size
        here = Env(b, h, g, *env[3:])
        if const_expr(what == "k"):
            gQ = cute.local_tile(coords(p.tile_qk)[None, None, h, b], (64, p.tile_qk), (None, 0))
            sQp, gQp = cpasync.tma_partition(atom_q, 0, one, cute.group_modes(sQ, 0, 2), cute.group_modes(gQ, 0, 2))
            for w in cutlass.range_constexpr(p.warpgroups):
                fill(
                    q_ring,
                    q_slot * p.warpgroups + w,
                    q_phase,
                    64 * p.tile_qk * 2,
                    atom_q,
                    gQp[None, m * p.warpgroups + w],
                    sQp[None, q_slot * p.warpgroups + w],
                )
            q_slot, q_phase = advance(p.q_stages, q_slot, q_phase)
            gB = cute.local_tile(coords(p.tile_qk)[None, None, g, b], (p.tile_kv, p.tile_qk), (None, 0))
        else:
            gB = cute.local_tile(coords(p.tile_vo, True)[None, None, g, b], (p.tile_vo, p.tile_kv), (0, None))
        sBp, gBp = cpasync.tma_partition(atom, 0, one, cute.group_modes(sB, 0, 2), cute.group_modes(gB, 0, 2))
        nbytes = p.tile_kv * (p.tile_qk if what == "k" else p.tile_vo) * 2
        if const_expr(p.counted):
            for j in cutlass.range(end - begin, unroll=1):
                n = end - 1 - j
                wait_made(p, what, ahead, here, n)
                if const_expr(what == "v"):
                    put_factors(p, shelf, slot, phase, factors_of(p, fn, here, n))
                fill(ring, slot, phase, nbytes, atom, gBp[None, n], sBp[None, slot])
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
