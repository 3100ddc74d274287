"""A finished tile: normalise, log-sum-exp, and out through shared memory."""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync, warp

from .functors import NEG_INF, shift_of, sink_of
from .gather import place
from .heads import box_of
from .layout import element, mma_values, quad, rounds_of, row_elems
from .vectors import plus

LN2 = math.log(2.0)
BAR_STORE = 8  # named barriers 8.. : one a consumer warpgroup


def totals(p, fn, state, tile):
    """(base, sum) of each row: its weights sum to sum * 2^base."""
    scale = [row.unit if p.unit_positive else Float32(1.0) for row in tile.rows]
    base = [state.top[i] * scale[i] + shift_of(fn, tile, i) for i in range(2)]
    return tuple(base), tuple(quad(plus, state.total[i]) for i in range(2))


def close_row(p, fn, tile, i: int, base, total, sink: bool):
    """(factor of O, log2 of the row's sum or -inf), with the sink's share where `sink`."""
    new, factor, whole = base, Float32(1.0), total
    if sink:
        k = sink_of(fn, tile, i)
        new = cute.arch.fmax(base, k)
        factor = cute.math.exp2(base - new, fastmath=True)
        whole = total * factor + cute.math.exp2(k - new, fastmath=True)
    # a base of -inf: so are all logits of the row, which weigh nothing
    empty = (total == 0.0) | (base == NEG_INF)
    inv = cutlass.select_(empty, Float32(0.0), cute.arch.rcp_approx(whole) * factor)
    return inv, cutlass.select_(whole == 0.0, -Float32.inf, new + cute.math.log2(whole, fastmath=True))


@cute.jit
def normalise(p: cutlass.Constexpr, fn: cutlass.Constexpr, O, base, total, tile, lse):
    """O becomes the attention output; lse the natural log-sum-exp of each row (-inf: it saw no key)."""
    for i in cutlass.range_constexpr(2):
        inv, log2 = close_row(p, fn, tile, i, base[i], total[i], p.sink)
        for e in row_elems(i, p.head_dim_vo):
            O[e] = O[e] * inv
        lse[i] = LN2 * log2


@cute.jit
def store_lse(lse: cute.Pointer, values, tile, rows, c_in: Int32):
    """[B, qo_len, num_qo_heads], where the caller wants it."""
    if lse.toint() != 0:
        for i in cutlass.range_constexpr(2):
            env = tile.rows[i].env
            if (c_in == 0) & (rows[i] < env.qo_len):
                at = (cutlass.Int64(env.b) * env.qo_len + rows[i]) * env.num_qo_heads + env.h
                cute.make_tensor(lse + at, cute.make_layout(1))[0] = values[i]


class Staging:
    """The way of a warpgroup's accumulator to its part of the store buffer, as many features at a time as it holds."""

    def __init__(self, p, sO, acc_o, t):
        self.cols = p.stage_vo
        piece = mma_values(p, self.cols)
        lanes = piece.get_slice(t)
        layout = lanes.make_fragment_C(lanes.partition_shape_C((64, self.cols))).layout
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), element(p))
        self.put = cute.make_tiled_copy_C(atom, piece).get_slice(t)
        out = cute.make_rmem_tensor(layout, element(p))
        self.src, self.dst = self.put.retile(out), self.put.partition_D(sO)
        self.slim = out.iterator
        self.acc = acc_o


def fill_stage(p, st: Staging, r: int, w) -> None:
    """Features of round r, by stmatrix."""
    eights = rounds_of(p)[r]
    for k in range(-(-len(eights) // 2)):
        held = min(8, 4 * len(eights) - 8 * k)
        wide, slim = (
            cute.make_tensor(x, cute.make_layout(held))
            for x in (st.acc.iterator + (4 * eights[0] + 8 * k), st.slim + 8 * k)
        )
        slim.store(wide.load().to(element(p)))
        cute.copy(st.put, st.src[(None, k), None, None], st.dst[(None, k), None, None, w])


@cute.jit
def store_tile(p: cutlass.Constexpr, atom_o, sO, acc_o, t: Int32, w: Int32, m: Int32, env):
    """Registers to shared memory, on by TMA."""
    st = Staging(p, sO, acc_o, t)
    gO, own = box_of(p, env, m, w, p.stage_vo, p.tile_vo)
    sOp, gOp = cpasync.tma_partition(
        atom_o, 0, cute.make_layout(1), cute.group_modes(sO, 0, 2), cute.group_modes(gO, 0, 2)
    )
    for r, _ in enumerate(rounds_of(p)):
        # the previous store of this warpgroup must have left the buffer
        if t < 32:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.barrier(barrier_id=BAR_STORE + w, number_of_threads=128)
        fill_stage(p, st, r, w)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=BAR_STORE + w, number_of_threads=128)
        if t < 32:
            cute.copy(atom_o, sOp[None, w], gOp[None, own, r])
            cute.arch.cp_async_bulk_commit_group()


@cute.jit
def store_rows(
    p: cutlass.Constexpr, sO, acc_o, t: Int32, w: Int32, row0: Int32, rows: Int32, g: Int32, out: cute.Pointer, sizes
):
    """Packed rows row0 … row0 + rows - 1 (64 at most) of kv head g, wherever they lie: through shared memory, 16 bytes
    a lane, neighbouring lanes along a row."""
    st = Staging(p, sO, acc_o, t)
    chunks = p.stage_vo // 8
    base = sO.iterator.toint() + w * (64 * p.stage_vo * 2)
    for r, _ in enumerate(rounds_of(p)):
        cute.arch.barrier(barrier_id=BAR_STORE + w, number_of_threads=128)
        fill_stage(p, st, r, w)
        cute.arch.barrier(barrier_id=BAR_STORE + w, number_of_threads=128)
        for k in cutlass.range((rows * chunks + 127) // 128, unroll=1):
            at = k * 128 + t
            row, chunk = at // chunks, at % chunks
            if (row < rows) & (r * p.stage_vo + chunk * 8 < p.head_dim_vo):
                packed = row0 + row
                q = packed // sizes.group_size
                h = g * sizes.group_size + (packed - q * sizes.group_size)
                here = cutlass.Int64(q) * sizes.out_row + h * sizes.out_head + (r * p.stage_vo + chunk * 8)
                words = cute.arch.inline_ptx(
                    "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
                    write_only_types=[Int32] * 4,
                    read_only_args=[base + place(row, chunk, 64, p.stage_vo)],
                )
                cute.arch.inline_ptx(
                    "st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
                    read_only_args=[out.toint() + here * 2, *words],
                )


@cute.jit
def store_packed_lse(lse: cute.Pointer, values, tile, row: Int32, rows: Int32, c_in: Int32):
    """[nnz_qo, num_qo_heads], natural log, where the caller wants it."""
    if lse.toint() != 0:
        for i in cutlass.range_constexpr(2):
            if (c_in == 0) & (row + 8 * i < rows):
                here = tile.rows[i]
                at = cutlass.Int64(here.env.q_start + here.iq) * here.env.num_qo_heads + here.env.h
                cute.make_tensor(lse + at, cute.make_layout(1))[0] = values[i]
