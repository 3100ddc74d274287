"""Rows of global memory, wherever they lie, into a swizzled tile of shared memory: cp.async, 16 bytes a lane.

A warp's lanes hold the addresses of rows, 32 at a time; neighbouring lanes then copy neighbouring 16 bytes of a row,
with its address by shuffle.  These are writes of the generic proxy: who multiplies the tile must fence first.
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from .layout import panel_width


def shuffle64(x, lane):
    low = cute.arch.shuffle_sync(Int32(x), lane)
    high = cute.arch.shuffle_sync(Int32(x >> 32), lane)
    return (Int64(high) << 32) | (Int64(low) & 0xFFFFFFFF)


def place(row, chunk, rows: int, tile: int):
    """Offset in bytes of 16-byte chunk `chunk` of row `row` in a tile of `rows` rows and `tile` features."""
    width = panel_width(tile)
    each = width // 8  # chunks of a panel's row
    inner = chunk % each
    swizzled = inner ^ (row & 7) if width == 64 else inner ^ ((row >> 1) & 3)
    return (chunk // each) * (rows * width * 2) + row * (width * 2) + swizzled * 16


def copy_rows(rows: int, tile: int, width: int, base, addresses, valid):
    """Rows 0 … rows - 1 of `width` features (16 bits each) to a tile of `tile` features at shared address `base`.
    `addresses[k]`: of row 32 k + lane; rows from `valid` on and features from `width` on become zeros, unread."""
    lane = cute.arch.lane_idx()
    chunks = tile // 8
    period = math.lcm(32, chunks) // 32  # copies after which the pattern of rows and chunks repeats
    step = period * 32 // chunks
    places = [((32 * k + lane) // chunks, (32 * k + lane) % chunks) for k in range(period)]
    for n in range(rows * chunks // 32):
        first = n // period * step
        row, chunk = first + places[n % period][0], places[n % period][1]
        source = shuffle64(addresses[first // 32], row & 31) + Int64(chunk) * 16
        size = cutlass.select_((row < valid) & (chunk * 8 < width), Int32(16), Int32(0))
        target = base + place(row, chunk, rows, tile)
        cute.arch.inline_ptx(
            "cp.async.cg.shared.global.L2::128B [{$r0}], [{$r1}], 16, {$r2};",
            read_only_args=[target, source, size],
        )


def announce(barrier) -> None:
    """This lane's copies so far count as one arrival when they have landed."""
    cute.arch.inline_ptx("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [{$r0}];", read_only_args=[barrier.toint()])
