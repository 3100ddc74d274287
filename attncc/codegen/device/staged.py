"""The epilogue of heads of many features, by way of shared memory.

Beside an accumulator of more than 128 features a served kernel has no registers for an epilogue.  So its rows leave the
fragment as they are, in float32, a few at a time, for the warpgroup's part of the store buffer; several quads of lanes
finish each, part by part, and round it on its way out.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from .epilogue import BAR_STORE
from .functors import open_row
from .packed import row_env
from .rows import Line, transform_row
from .softmax import pack


class Wide(Line):
    """A row of float32, all of which is kept.  Eights of features are swizzled, so that the eight rows of a warp's
    fragment meet no bank twice."""

    __slots__ = ()

    def place(self, n, lane):
        return self.base + place(self.width, self.row, n) + lane * 8

    def get(self, p, address):
        load = "ld.shared.v2.f32 {{$w0}, {$w1}}, [{$r0}];"
        return cute.arch.inline_ptx(load, write_only_types=[Float32] * 2, read_only_args=[address])

    def put(self, p, address, a, b, given) -> None:
        cute.arch.inline_ptx("st.shared.v2.f32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[address, a, b], **given)


def place(width: int, row, n):
    """Offset in bytes of eight n of a row, among rows of `width` features."""
    return row * (width * 4) + (n ^ (row & 7)) * 32


def rows_at_once(p) -> int:
    """... that a warpgroup's part of the store buffer holds."""
    return 16 if 64 * p.stage_vo * 2 >= 16 * p.tile_vo * 4 else 8


@cute.jit
def finish_staged(
    p: cutlass.Constexpr, fn: cutlass.Constexpr, turnings: cutlass.Constexpr, O, row_lse, lses, owner, item,
    first: Int32, rows: Int32, lists, sizes, sO, out: cute.Pointer, t: Int32, w: Int32,
):  # fmt: skip
    """The epilogue of packed rows first … first + rows - 1, 64 at most, of a normalised accumulator, and their way out.
    `lses`: words of shared memory for those of rows, where the epilogue asks."""
    stage, kept = sO.iterator.toint() + w * (64 * p.stage_vo * 2), lses.toint() + w * (16 * 4)
    for turn in cutlass.range((rows + 15) // 16, unroll=1):
        for halves in cutlass.range_constexpr(16 // rows_at_once(p)):
            start = turn * 16 + 8 * halves
            if start < rows:
                cute.arch.barrier(barrier_id=BAR_STORE + w, number_of_threads=128)
                if t // 32 == turn:
                    for i in cutlass.range_constexpr(rows_at_once(p) // 8):
                        put_row(p, O, row_lse, halves + i, i, stage, kept, t)
                cute.arch.barrier(barrier_id=BAR_STORE + w, number_of_threads=128)
                finish_row(p, fn, turnings, owner, item, first, start, rows, lists, sizes, stage, kept, out, t)


def put_row(p, O, row_lse, i: int, local: int, stage, kept, t) -> None:
    """Row i of a thread's two becomes row `local` of its two in shared memory."""
    row = (t % 32) // 4 + 8 * local
    blocks = range(p.head_dim_vo // 8)
    Wide(stage, row, rows_at_once(p), p.tile_vo).store(p, blocks, [O[i, c, n] for n in blocks for c in range(2)], t)
    if p.epilogue_lse:
        store, given = "st.shared.f32 [{$r0}], {$r1};", {"predicate": Boolean(t % 4 == 0)}
        cute.arch.inline_ptx(store, read_only_args=[kept + row * 4, row_lse[i]], **given)


@cute.jit
def finish_row(
    p: cutlass.Constexpr, fn: cutlass.Constexpr, turnings: cutlass.Constexpr, owner, item, first: Int32, start: Int32,
    rows: Int32, lists, sizes, stage: Int32, kept: Int32, out: cute.Pointer, t: Int32,
):  # fmt: skip
    """This thread's share of one of the rows from the start-th on."""
    lanes = const_expr(128 // rows_at_once(p))
    local, lane = t // lanes, t % lanes
    packed = first + cutlass.min(start + local, rows - 1)
    env, iq = row_env(owner, packed, item.g, item.offset, item.keys, item.table, lists, sizes)
    row = open_row(p, fn, env, fn.head(env), iq, item.offset + item.keys)
    lse = Float32(0.0)
    if const_expr(p.epilogue_lse):
        load = "ld.shared.f32 {$w0}, [{$r0}];"
        lse = cute.arch.inline_ptx(load, write_only_types=[Float32], read_only_args=[kept + local * 4])
    at = row.env, row.hd, row.i, row.iq, lse
    line = Wide(stage, local, rows_at_once(p), p.tile_vo)
    transform_row(p, fn, "epilogue", turnings, at, line, p.head_dim_vo, t, False, lanes // 4)
    cute.arch.sync_warp()
    here = Int64(env.q_start + iq) * sizes.out_row + env.h * sizes.out_head
    for k in cutlass.range_constexpr(-(-(p.head_dim_vo // 8) // lanes)):
        n = k * lanes + lane
        if (start + local < rows) & (n < p.head_dim_vo // 8):
            source = stage + place(p.tile_vo, local, n)
            found = [
                cute.arch.inline_ptx(
                    f"ld.shared.v4.f32 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, [{{$r0}} + {16 * half}];",
                    write_only_types=[Float32] * 4, read_only_args=[source],
                )
                for half in range(2)
            ]  # fmt: skip
            words = [pack(p, four[c], four[c + 1]) for four in found for c in (0, 2)]
            cute.arch.inline_ptx(
                "st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
                read_only_args=[out.toint() + (here + n * 8) * 2, *words],
            )
