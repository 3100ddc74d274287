"""A domain's lines of bits, one a row: as the walk over blocks of keys asks them, and as scores do.

Bit n of a row's line: is its block n of `block_keys` keys listed?  listing.py writes the lines before attention runs.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32
from cutlass._mlir.dialects import llvm

from .functors import block_keys, line_of, prefix


class Lines(NamedTuple):
    """The lines of a tile: of rows first … first + count - 1; of packed rows where query heads have lists of their own
    and tiles are packed."""

    first: Any
    count: Any


def line_at(p, fn, env, n):
    """The address of one of them.  Rows of served batches count through all requests."""
    if p.layout == "dense":
        return line_of(fn, env, n)
    h, row = env.h, n
    if p.lists_by == "h":
        row = n // env.group_size
        h = env.g * env.group_size + (n - row * env.group_size)
    return line_of(fn, env._replace(h=h, q_start=Int32(0)), row)


def line_word(address, ok):
    """32 bits at an address where ok, else 0: a load that LLVM may share, move and drop.  The kernel before may have
    written them while this one began, so it is no load of what is constant (.nc)."""
    asm = "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0; @p ld.global.b32 $0, [$1]; }"
    arguments = [Int64(address).ir_value(), Int32(ok).ir_value()]
    return Int32(llvm.inline_asm(Int32.mlir_type, arguments, asm, "=r,l,r", has_side_effects=False))


def redux(op: str, word):
    """A word of all lanes together."""
    return cute.arch.inline_ptx(
        f"redux.sync.{op}.b32 {{$w0}}, {{$r0}}, 0xffffffff;", write_only_types=[Int32], read_only_args=[word]
    )


@cute.jit
def asked(p: cutlass.Constexpr, fn: cutlass.Constexpr, walk, start: Int32, stop: Int32, j0: Int32, j1: Int32):
    """(does any row of the tile list a block that this lane's keys j0 … j1 lie in, do all rows list all of them).  The
    lanes' keys together are start … stop - 1; all of these are positions."""
    size, lane = block_keys(fn, walk.env), cute.arch.lane_idx()
    first, last = Int32(Uint32(j0) // size), Int32(Uint32(j1) // size)
    some, every = Boolean(False), Boolean(True)
    for w in cutlass.range(Int32(Uint32(start) // size) >> 5, (Int32(Uint32(stop - 1) // size) >> 5) + 1, unroll=1):
        union, common = Int32(0), Int32(-1)
        for k in cutlass.range((walk.lines.count + 31) // 32, unroll=1):  # a lane a row
            n = walk.lines.first + cutlass.min(32 * k + lane, walk.lines.count - 1)
            word = line_word(line_at(p, fn, walk.env, n) + Int64(w) * 4, True)
            union, common = union | word, common & word
        union, common = redux("or", union), redux("and", common)
        low, high = cutlass.max(first - 32 * w, 0), cutlass.min(last - 32 * w, 31)
        mine = cutlass.select_(low <= high, ((Int32(2) << (high & 31)) - 1) & -(Int32(1) << (low & 31)), Int32(0))
        some = some | ((union & mine) != 0)
        every = every & ((common & mine) == mine)
    return some, every


# ------------------------------------------------------------------------------------- scores
def with_lists(p, fn, tile, col0, masked):
    """The tile, with what a thread must know of its rows' lists for one block of keys.  Asked before scores are waited
    for, so that the words are on their way meanwhile."""
    if not p.list_block:
        return tile
    return tile._replace(chosen=tuple(listed_columns(p, row, col0, masked, tile.stop) for row in tile.rows))


def listed_columns(p, row, col0, masked, stop):
    """Which of a thread's columns of a block lie in listed blocks, as bits like those of `prefix`; anything where the
    mask doesn't run."""
    size, ok = p.list_block, Boolean(masked)
    first = Int32(Uint32(col0) // size)
    word = first >> 5
    bits = word_now(row.line + Int64(word) * 4, ok & (col0 < stop))
    count = touched(p)
    if count > 1:
        more = word_now(row.line + Int64(word + 1) * 4, ok & ((word + 1) * (32 * size) < stop))
        both = (Int64(more) << 32) | Int64(Uint32(bits))
        bits = Int32(both >> Int64(first & 31))
    else:
        bits = bits >> (first & 31)
    found, before = Int32(0), Int32(0)
    for k in range(count):
        upto = below(p, first, col0, k)
        found = found | cutlass.select_(((bits >> k) & 1) != 0, upto & ~before, Int32(0))
        before = upto
    return found


def in_step(p) -> bool:
    """Does every block of keys start where a listed one does, or at the same place in one?"""
    size, tile = p.list_block, p.tile_kv
    return p.layout == "dense" and (size % tile == 0 or (tile % size == 0 and size % 8 == 0))


def touched(p) -> int:
    """How many listed blocks a block of keys may lie in."""
    size, tile = p.list_block, p.tile_kv
    return max(tile // size, 1) if in_step(p) else (tile + size - 2) // size + 1


def below(p, first, col0, k: int):
    """A thread's columns below the end of the listed block `first` + k."""
    if k == touched(p) - 1:
        return Int32(-1)
    if in_step(p):
        bits = sum(1 << n for n in range(2 * (p.list_block // 8) * (k + 1)))
        return Int32(bits - (1 << 32) if bits >> 31 else bits)
    return prefix((first + (k + 1)) * p.list_block - col0)


def word_now(address, ok):
    """32 bits at an address where ok, else 0; the load stays where it is written."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.b32 p, {$r1}, 0; mov.b32 {$w0}, 0; @p ld.global.b32 {$w0}, [{$r0}]; }",
        write_only_types=[Int32], read_only_args=[address, Int32(ok)],
    )  # fmt: skip
