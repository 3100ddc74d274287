"""Rows of global memory, wherever they lie, into a swizzled tile of shared memory: cp.async, 16 bytes a lane.

A warp's lanes know where rows lie, 32 at a time; neighbouring lanes then copy neighbouring 16 bytes of a row, with its
place by shuffle.  These are writes of the generic proxy: who multiplies the tile must fence first.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from .layout import panel_width


def place(row, chunk, rows: int, tile: int):
    """Offset in bytes of 16-byte chunk `chunk` of row `row` in a tile of `rows` rows and `tile` features."""
    width = panel_width(tile)
    each = width // 8  # chunks of a panel's row
    inner = chunk % each
    swizzled = inner ^ (row & 7) if width == 64 else inner ^ ((row >> 1) & 3)
    return (chunk // each) * (rows * width * 2) + row * (width * 2) + swizzled * 16


@cute.jit
def copy_rows(
    rows: cutlass.Constexpr,
    tile: cutlass.Constexpr,
    width: cutlass.Constexpr,
    target: Int32,
    source,
    units,
    valid: Int32,
):
    """Rows 0 … rows - 1 of `width` features (16 bits each) to a tile of `tile` features at shared address `target`.
    `units[k]`: where row 32 k + lane lies after the address `source`, in 16 bytes, unsigned; rows from `valid` on and
    features from `width` on become zeros, unread."""
    lane = cute.arch.lane_idx()
    chunks = tile // 8
    for k in cutlass.range_constexpr((rows + 31) // 32):
        # eight rows at a time, after which the swizzle repeats
        for eight in cutlass.range(min(rows - 32 * k, 32) // 8, unroll=2):
            for n in cutlass.range_constexpr(chunks // 4):
                row, chunk = (32 * n + lane) // chunks, (32 * n + lane) % chunks
                at = cutlass.Uint32(cute.arch.shuffle_sync(units[k], 8 * eight + row))
                exists = 32 * k + 8 * eight + row < valid
                if const_expr(width < tile):
                    exists = exists & (chunk * 8 < width)
                to = target + (32 * k + 8 * eight) * (panel_width(tile) * 2) + place(row, chunk, rows, tile)
                cute.arch.inline_ptx(
                    "cp.async.cg.shared.global.L2::128B [{$r0}], [{$r1}], 16, {$r2};",
                    read_only_args=[
                        to, source + Int64(chunk) * 16 + Int64(at) * 16, cutlass.select_(exists, Int32(16), Int32(0))
                    ],
                )  # fmt: skip


def announce(barrier) -> None:
    """This lane's copies so far count as one arrival when they have landed."""
    cute.arch.inline_ptx("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [{$r0}];", read_only_args=[barrier.toint()])
