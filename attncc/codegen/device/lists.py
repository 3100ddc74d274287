"""A domain's lines of bits, one a row: as the walk over blocks of keys asks them, and as scores do.

Bit n of a row's line: is its block n of `block_keys` keys listed?  listing.py writes the lines before attention runs.
"""

from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, const_expr
from cutlass._mlir.dialects import llvm

from .functors import block_keys, classify_tile, highest_bit, line_of, part_bits, prefix


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


class Trail(NamedTuple):
    """How far a walk over lists has come.  Units of keys (parts of blocks) below `below` are still to come; of words
    base … base + 31 of a tile's lines, a lane a word: what any row lists, and what all do."""

    below: Any
    base: Any
    union: Any
    common: Any


def upto(n):
    """Bits 0 … n of a word; none where n < 0, all from 31 on."""
    bits = (Int32(2) << cutlass.min(cutlass.max(n, 0), 31)) - 1
    return cutlass.select_(n < 0, Int32(0), bits)


def ends(p, walk):
    """Units of keys [first, last) that a walk may visit."""
    lo, hi = (cutlass.max(cutlass.min(x, walk.keys), 0) for x in (walk.lo, walk.hi))
    return lo // p.part_kv, (hi + p.part_kv - 1) // p.part_kv


def begin_listed(p, fn, walk) -> Trail:
    """Before the highest unit; no words yet."""
    _, below = ends(p, walk)
    return Trail(below, Int32(FAR), Int32(0), Int32(0))


FAR = 1 << 26  # past every word of a line


@cute.jit
def hold(p: cutlass.Constexpr, fn: cutlass.Constexpr, walk, low: Int32, high: Int32):
    """(base, union, common) of words up to `high`, and down to `low` or as far as lanes reach.  Where they are few,
    lanes of the same word share the rows out."""
    lane, low = cute.arch.lane_idx(), cutlass.max(high - 31, low)
    count = high - low + 1
    shift = highest_bit(2 * count - 1)
    team, mine = Int32(32) >> shift, lane & ((1 << shift) - 1)
    at = Int64(low + cutlass.min(mine, count - 1)) * 4
    union, common = Int32(0), Int32(-1)
    for k in cutlass.range((walk.lines.count + team - 1) // team, unroll=8):
        n = walk.lines.first + cutlass.min(k * team + (lane >> shift), walk.lines.count - 1)
        word = line_word(line_at(p, fn, walk.env, n) + at, True)
        union, common = union | word, common & word
    for n in cutlass.range_constexpr(5):
        apart = n >= shift  # 1 << n lanes further stands the same word
        others = [cute.arch.shuffle_sync_bfly(x, offset=1 << n) for x in (union, common)]
        union = union | cutlass.select_(apart, others[0], Int32(0))
        common = common & cutlass.select_(apart, others[1], Int32(-1))
    return low, cutlass.select_(lane < count, union, Int32(0)), common


@cute.jit
def next_listed(p: cutlass.Constexpr, fn: cutlass.Constexpr, walk, trail):
    """The highest unit of keys still to come in which some row lists a block; (unit, masked, trail).  It is -1 where
    there is none.  What is not listed costs nothing: a step is one look at the words that are held."""
    size, lane = block_keys(fn, walk.env), cute.arch.lane_idx()
    first, _ = ends(p, walk)
    bottom = Int32(Uint32(walk.offset + first * p.part_kv) // size) >> 5
    below, base, union, common = trail
    n, masked = Int32(-1), Int32(1)
    looking = Boolean(below > first)
    while looking:
        top = walk.offset + cutlass.min(below * p.part_kv, walk.keys) - 1
        last = Int32(Uint32(top) // size)
        mine = union & upto(last - 32 * (base + lane))
        lanes = cute.arch.vote_ballot_sync(mine != 0)
        if lanes == 0:
            looking = Boolean(base > bottom)
            if looking:
                base, union, common = hold(p, fn, walk, bottom, cutlass.min(base - 1, last >> 5))
        else:
            which = highest_bit(lanes)
            block = 32 * (base + which) + highest_bit(cute.arch.shuffle_sync(mine, which))
            end = Int32(cutlass.min(Uint32(block) * size + (size - 1), Uint32(top))) - walk.offset
            found = Boolean(end >= first * p.part_kv)  # else it ends before the walk does
            below = cutlass.select_(found, Int32(Uint32(cutlass.max(end, 0)) // p.part_kv), first)
            j0 = below * p.part_kv
            j1 = cutlass.min(j0 + p.part_kv, walk.keys) - 1
            may, must = classify_tile(fn, walk.env, walk.i0, walk.i1, j0 + walk.offset, j1 + walk.offset)
            seen = Boolean(found & (may | ~walk.classify))
            looking = Boolean(found & ~seen & (below > first))  # before the first key there is no block to look at
            begun, ended = (Int32(Uint32(j + walk.offset) // size) for j in (j0, j1))
            inside = upto(ended - 32 * (base + lane)) & ~upto(begun - 1 - 32 * (base + lane))
            every = cute.arch.vote_ballot_sync((common & inside) != inside) == 0
            clear = ((j0 >= walk.clear_lo) & (j1 < walk.clear_hi)) | (must & walk.classify)
            clear = clear & every & (begun >= 32 * base) & (j0 + p.part_kv <= walk.keys)
            if seen:
                n, masked = below, cutlass.select_(clear, Int32(0), Int32(1))
    return n, masked, Trail(below, base, union, common)


@cute.jit
def count_listed(p: cutlass.Constexpr, fn: cutlass.Constexpr, walk):
    """(how many units of keys a walk visits, the trail that it begins with)."""
    count, stepwise, begin = Int32(0), Boolean(True), begin_listed(p, fn, walk)
    if const_expr(p.list_block > 0 and p.list_block % p.part_kv == 0 and not p.asks):
        # a listed block is so many units of keys: bits are counted
        stepwise = Boolean(walk.offset % p.part_kv != 0)
        lo, hi = (cutlass.max(cutlass.min(x, walk.keys), 0) for x in (walk.lo, walk.hi))
        if (hi > lo) & ~stepwise:
            count, begin = count_bits(p, fn, walk, begin, walk.offset + lo, walk.offset + hi - 1)
    if stepwise:
        n, _, trail = next_listed(p, fn, walk, begin)
        while n >= 0:
            count = count + 1
            n, _, trail = next_listed(p, fn, walk, trail)
    return count, begin


@cute.jit
def count_bits(p: cutlass.Constexpr, fn: cutlass.Constexpr, walk, begin, bottom: Int32, top: Int32):
    """(units of keys between two positions in which some row lists one, `begin` with the highest words)."""
    lane, size = cute.arch.lane_idx(), p.list_block
    first, last = bottom // size, top // size
    total, high = Int32(0), last >> 5
    while high >= first >> 5:
        base, union, common = hold(p, fn, walk, first >> 5, high)
        at = 32 * (base + lane)
        mine = union & upto(last - at) & ~upto(first - 1 - at)
        count = cute.arch.popc(mine) * (size // p.part_kv)
        # of the lowest and the highest one, perhaps a part
        for block, spare in (
            (first, (bottom - first * size) // p.part_kv), (last, (size - 1 - (top - last * size)) // p.part_kv)
        ):  # fmt: skip
            there = (Uint32(block - at) < 32) & (((mine >> ((block - at) & 31)) & 1) != 0)
            count = count - cutlass.select_(there, spare, Int32(0))
        total = total + cute.arch.inline_ptx(
            "redux.sync.add.s32 {$w0}, {$r0}, 0xffffffff;", write_only_types=[Int32], read_only_args=[count]
        )
        fresh = Boolean(high == last >> 5)
        held = (cutlass.select_(fresh, x, y) for x, y in zip((base, union, common), begin[1:], strict=True))
        begin = Trail(begin.below, *held)
        high = base - 1
    return total, begin


# ------------------------------------------------------------------------------------- scores
def with_lists(p, fn, tile, col0, masked):
    """The tile, with what a thread must know of its rows' lists for one block of keys.  Asked before scores are waited
    for, so that the words are on their way meanwhile."""
    if not p.list_block:
        return tile
    found = []
    for row in tile.rows:
        bits = [listed_columns(p, row, first, masked, tile.stop) for first in col0]
        if p.parts > 1:
            bits = [(x & (1 << part_bits(p)) - 1) << k * part_bits(p) for k, x in enumerate(bits)]
        found.append(reduce(or_, bits))
    return tile._replace(chosen=tuple(found))


def listed_columns(p, row, col0, masked, stop):
    """Which of a thread's columns of a part of a block lie in listed blocks, as bits like those of `prefix`; anything
    where the mask doesn't run, and from the part's last column on."""
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
    """Does every part of a block of keys start where a listed one does, or at the same place in one?"""
    size, tile = p.list_block, p.part_kv
    return p.layout == "dense" and (size % tile == 0 or (tile % size == 0 and size % 8 == 0))


def touched(p) -> int:
    """How many listed blocks a part of a block of keys may lie in."""
    size, tile = p.list_block, p.part_kv
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
