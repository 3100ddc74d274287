"""Rows of global memory, wherever they lie, into a swizzled tile of shared memory: cp.async, 16 bytes a lane.

A warp's lanes know where rows lie, 32 at a time; as many lanes as a panel's row has chunks, eight or four, then copy
128 or 64 bytes of a row, with its place by shuffle, so that a line of memory is asked for at once.  These are writes of
the generic proxy: who multiplies the tile must fence first.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from .layout import panel_width


def turn_of(row, width: int):
    """What the swizzle of panels of `width` features adds, without carry, to the number of a chunk of a row."""
    return row & 7 if width == 64 else (row >> 1) & 3


def place(row, chunk, rows: int, tile: int):
    """Offset in bytes of 16-byte chunk `chunk` of row `row` in a tile of `rows` rows and `tile` features."""
    width = panel_width(tile)
    each = width // 8  # chunks of a panel's row
    inner = chunk % each
    swizzled = inner ^ turn_of(row, width)
    return (chunk // each) * (rows * width * 2) + row * (width * 2) + swizzled * 16


def shares(rows: int, team: int) -> int:
    """How many words a lane needs for its warp's share of `rows` rows: 32 rows a word."""
    return (-(-rows // (8 * team)) + 3) // 4


def own_row(k: int, who, team: int):
    """The row of the tile that word k of this lane is about: a warp has every `team`-th eight rows, from the
    `who`-th."""
    mine = 32 * k + cute.arch.lane_idx()
    return ((mine // 8) * team + who) * 8 + mine % 8


@cute.jit
def copy_rows(
    rows: cutlass.Constexpr, tile: cutlass.Constexpr, width: cutlass.Constexpr, target: Int32, source, units,
    valid: Int32, who: Int32, team: cutlass.Constexpr,
):  # fmt: skip
    """This warp's share of rows 0 … rows - 1, of `width` features (16 bits), to a tile of `tile` features at shared
    address `target`.  `units[k]`: where row own_row(k, …) lies after the address `source`, in 16 bytes, unsigned; rows
    from `valid` on and features from `width` on become zeros, unread."""
    each = panel_width(tile) // 8  # lanes a row, with 16 bytes each
    row, part = cute.arch.lane_idx() // each, cute.arch.lane_idx() % each
    here = source + Int64(part) * 16
    pitch = 8 * panel_width(tile) * 2
    lots = range(each // 4)  # of 32 / each rows, which make eight: after these the swizzle repeats
    places = [target + who * pitch + place(32 // each * n + row, part, rows, tile) for n in lots]
    for m in cutlass.range_constexpr(-(-rows // (8 * team))):
        first = (who + m * team) * 8
        if first < rows:
            for n in cutlass.range_constexpr(each // 4):
                mine = 32 // each * n + row
                at = cutlass.Uint32(cute.arch.shuffle_sync(units[m // 4], 8 * (m % 4) + mine))
                line = here + Int64(at) * 16
                exists = first + mine < valid
                for j in cutlass.range_constexpr(tile // panel_width(tile)):
                    inside = exists
                    if const_expr((j + 1) * panel_width(tile) > width):
                        inside = exists & (j * panel_width(tile) + 8 * part < width)
                    to = places[n] + j * (rows * panel_width(tile) * 2) + m * team * pitch
                    cute.arch.inline_ptx(
                        "cp.async.cg.shared.global.L2::128B [{$r0}], [{$r1}], 16, {$r2};",
                        read_only_args=[
                            to, line + j * (panel_width(tile) * 2), cutlass.select_(inside, Int32(16), Int32(0))
                        ],
                    )  # fmt: skip


def announce(barrier) -> None:
    """This lane's copies so far count as one arrival when they have landed."""
    cute.arch.inline_ptx("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [{$r0}];", read_only_args=[barrier.toint()])
