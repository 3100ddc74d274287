"""A finished tile: normalise, log-sum-exp, the variant's epilogue, and out through shared memory by TMA."""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warp

from .functors import NEG_INF, feature_of, shift_of, sink_of
from .layout import coords, element, mma_values, quad, row_elems
from .softmax import chains

LN2 = math.log(2.0)
BAR_STORE = 8  # named barriers 8.. : one a consumer warpgroup


def plus(a, b):
    return a + b


@cute.jit
def normalise(p: cutlass.Constexpr, fn: cutlass.Constexpr, O, state, tile, lse):
    """O becomes the attention output; lse the natural log-sum-exp of each row (-inf: it saw no key)."""
    for i in cutlass.range_constexpr(2):
        s = quad(plus, state.total[i])
        base = state.top[i] * (tile.unit if p.unit_positive else Float32(1.0)) + shift_of(fn, tile, i)
        new, factor, whole = base, Float32(1.0), s
        if const_expr(p.sink):
            k = sink_of(fn, tile, i)
            new = cute.arch.fmax(base, k)
            factor = cute.math.exp2(base - new, fastmath=True)
            whole = s * factor + cute.math.exp2(k - new, fastmath=True)
        # a base of -inf: so are all logits of the row, which weigh nothing
        empty = (s == 0.0) | (base == NEG_INF)
        inv = cutlass.select_(empty, Float32(0.0), cute.arch.rcp_approx(whole) * factor)
        for e in row_elems(i, p.tile_vo):
            O[e] = O[e] * inv
        lse[i] = cutlass.select_(whole == 0.0, -Float32.inf, LN2 * (new + cute.math.log2(whole, fastmath=True)))


@cute.jit
def finish_rows(p: cutlass.Constexpr, fn: cutlass.Constexpr, O, tile, lse, c_in: Int32):
    """The variant's epilogue, feature by feature.  Sums over features run first, one after another."""
    for i in cutlass.range_constexpr(2):
        sums = ()
        for k in cutlass.range_constexpr(p.epilogue_sums):
            terms = []
            for e in row_elems(i, p.tile_vo):
                col = c_in + (8 * e[2] + e[1])
                term = feature_of(fn, f"partial_{k}", tile, i, lse[i], O[e], col, sums)
                terms.append(cutlass.select_(col < p.head_dim_vo, term, type(term)(0)))  # f32 or i32
            sums = (*sums, quad(plus, chains(plus, terms, 1)))
        for e in row_elems(i, p.tile_vo):
            O[e] = feature_of(fn, "epilogue", tile, i, lse[i], O[e], c_in + (8 * e[2] + e[1]), sums)


@cute.jit
def store_lse(lse: cute.Pointer, values, env, row0: Int32, c_in: Int32):
    """[B, qo_len, num_qo_heads], where the caller wants it."""
    if lse.toint() != 0:
        for i in cutlass.range_constexpr(2):
            r = row0 + 8 * i
            if (c_in == 0) & (r < env.qo_len):
                at = (cutlass.Int64(env.b) * env.qo_len + r) * env.num_qo_heads + env.h
                cute.make_tensor(lse + at, cute.make_layout(1))[0] = values[i]


@cute.jit
def store_tile(p: cutlass.Constexpr, atom_o, sO, acc_o, t: Int32, w: Int32, m: Int32, env):
    """As many features at a time as the buffer holds: registers to shared memory by stmatrix, on by TMA."""
    cols = p.stage_vo
    piece = mma_values(p, cols)
    lanes = piece.get_slice(t)
    layout = lanes.make_fragment_C(lanes.partition_shape_C((64, cols))).layout
    put = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), element(p)), piece).get_slice(t)
    out = cute.make_rmem_tensor(layout, element(p))
    src, dst = put.retile(out), put.partition_D(sO)
    slim = cute.make_tensor(out.iterator, cute.make_layout((8, cols // 16)))
    gO = cute.local_tile(coords(p.tile_vo)[None, None, env.h, env.b], (64, cols), (None, None))
    sOp, gOp = cpasync.tma_partition(
        atom_o, 0, cute.make_layout(1), cute.group_modes(sO, 0, 2), cute.group_modes(gO, 0, 2)
    )
    for r in cutlass.range_constexpr(p.tile_vo // cols):
        wide = cute.make_tensor(acc_o.iterator + r * (cols // 2), cute.make_layout((8, cols // 16)))
        # the previous store of this warpgroup must have left the buffer
        if t < 32:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.barrier(barrier_id=BAR_STORE + w, number_of_threads=128)
        for k in cutlass.range_constexpr(cols // 16):
            slim[None, k].store(wide[None, k].load().to(element(p)))
            cute.copy(put, src[(None, k), None, None], dst[(None, k), None, None, w])
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=BAR_STORE + w, number_of_threads=128)
        if t < 32:
            cute.copy(atom_o, sOp[None, w], gOp[None, m * p.warpgroups + w, r])
            cute.arch.cp_async_bulk_commit_group()
