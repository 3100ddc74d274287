"""Who computes which tile, and which blocks of keys it visits.

One warp deals work items into a ring in shared memory; the producers and consumers read them.  An item is eight
words: query tile, head, request, live, then the blocks of keys to visit [begin, end), the first of those that need no
mask, and how many there are of these.  Where the mask leaves holes, the blocks are chosen one by one (`next_block`) and
the item carries only their number, as [0, count).  Where rows list blocks the schedule warp chooses, a few blocks ahead
of the producers (`Marks`).
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from .ahead import leave, multiply_meanwhile
from .functors import Env, classify_tile, highest_bit, tile_bounds
from .heads import first_head, of_packs, positions_of
from .lists import Lines, count_listed, next_listed
from .ring import Ring, advance, release, warp_uniform

ITEM_STAGES = 2
ITEM_WORDS = 8


def locate(tile, num_tiles_q, num_heads_batch, section, late_tiles, num_qo_heads):
    """Heads come in sections of `section` (request, head) pairs whose K/V share the L2 cache; inside a section the
    last query tiles (the longest, when causal) come first.  The first `late_tiles` query tiles of all heads (the
    shortest) are kept for the end, where they even out the CTAs."""
    early_tiles = num_tiles_q - late_tiles
    late = tile >= num_heads_batch * early_tiles
    rows = cutlass.select_(late, late_tiles, early_tiles)
    wide = cutlass.select_(late, num_heads_batch, section)
    r = cutlass.select_(late, tile - num_heads_batch * early_tiles, tile)
    s = r // (wide * rows)
    r = r - s * wide * rows
    width = cutlass.min(wide, num_heads_batch - s * wide)
    step = r // width
    hb = s * wide + (r - step * width)
    b = hb // num_qo_heads
    return cutlass.select_(late, late_tiles, num_tiles_q) - 1 - step, hb - b * num_qo_heads, b


def positions(p, env, m):
    """First and last query position of query tile m."""
    rows = positions_of(p, env, p.tile_q)
    i0 = m * rows + env.kv_len - env.qo_len
    return i0, cutlass.min((m + 1) * rows, env.qo_len) - 1 + env.kv_len - env.qo_len


def counted_blocks(p, fn, env, m):
    """Blocks to visit and, of those, the clear ones.  At least one block is visited: an empty row still owes its
    output, and the mask hides the rest."""
    i0, i1 = positions(p, env, m)
    lo, hi, clear_lo, clear_hi = tile_bounds(fn, env, i0, i1)
    lo, clear_lo = cutlass.max(lo, 0), cutlass.max(clear_lo, 0)
    hi, clear_hi = cutlass.min(hi, env.kv_len), cutlass.min(clear_hi, env.kv_len)
    some = hi > lo
    begin = cutlass.select_(some, lo // p.tile_kv, Int32(0))
    end = cutlass.select_(some, (hi + p.tile_kv - 1) // p.tile_kv, Int32(1))
    clear_begin = (clear_lo + p.tile_kv - 1) // p.tile_kv
    return begin, end, clear_begin, cutlass.max(cutlass.max(clear_hi, 0) // p.tile_kv - clear_begin, 0)


# ------------------------------------------------------------------------------------- masks with holes
class Walk(NamedTuple):
    """Blocks of keys 0 … keys - 1 as the rows i0 … i1 see them: none outside [lo, hi), and without a mask those inside
    [clear_lo, clear_hi).  Key 0 is at position `offset`.  `classify`: the mask is asked about each block, too."""

    env: Any
    i0: Any
    i1: Any
    lo: Any
    hi: Any
    clear_lo: Any
    clear_hi: Any
    offset: Any
    keys: Any
    classify: Any
    lines: Any = None  # of a domain whose lists are asked about each block, too


def walk_of(p, fn, env, m) -> Walk:
    i0, i1 = positions(p, env, m)
    lines = Lines(m * positions_of(p, env, p.tile_q), i1 - i0 + 1) if p.walks_lists else None
    return Walk(env, i0, i1, *tile_bounds(fn, env, i0, i1), Int32(0), env.kv_len, Boolean(True), lines)


def ballots(p, fn, walk, chunk):
    """One block a lane: which of blocks 32 chunk … 32 chunk + 31 are visible at all, and which without a mask."""
    start = (chunk * 32 + cute.arch.lane_idx()) * p.tile_kv
    # blocks past the keys count as their last key: what is asked of a block may read memory
    j0 = cutlass.min(start, walk.keys - 1)
    j1 = cutlass.min(start + p.tile_kv, walk.keys) - 1
    may, must = classify_tile(fn, walk.env, walk.i0, walk.i1, j0 + walk.offset, j1 + walk.offset)
    inside = (start < walk.keys) & (j0 < walk.hi) & (j1 >= walk.lo)
    clear = ((j0 >= walk.clear_lo) & (j1 < walk.clear_hi)) | (must & walk.classify)
    seen = Boolean(inside & (may | ~walk.classify))
    return cute.arch.vote_ballot_sync(seen), cute.arch.vote_ballot_sync(seen & clear & (start + p.tile_kv <= walk.keys))


@cute.jit
def count_blocks(p: cutlass.Constexpr, fn: cutlass.Constexpr, walk):
    count = Int32(0)
    for c in cutlass.range(first_chunk(p, walk), unroll=1):
        seen, _ = ballots(p, fn, walk, c)
        count = count + cute.arch.popc(seen)
    return count


@cute.jit
def next_block(p: cutlass.Constexpr, fn: cutlass.Constexpr, walk, chunk: Int32, seen: Int32, clear: Int32):
    """The highest block not yet visited; (block, masked, chunk, seen, clear).  Past the last one: block 0, masked."""
    while (seen == 0) & (chunk > 0):
        chunk = chunk - 1
        seen, clear = ballots(p, fn, walk, chunk)
    top = cutlass.select_(seen == 0, Int32(0), highest_bit(seen))
    masked = ((clear >> top) & 1) ^ 1
    return chunk * 32 + top, masked, chunk, seen & ~(1 << top), clear


def first_chunk(p, walk):
    """The walk begins before this chunk."""
    return (walk.keys + 32 * p.tile_kv - 1) // (32 * p.tile_kv)


# ------------------------------------------------------------------------------------- walks over lists
class Marks(NamedTuple):
    """What the schedule warp finds on a walk over lists, for those who fill the rings: of every block of keys the units
    that it is made of, as words 2 unit + masked."""

    ring: Ring
    words: Any


def mark_stages(p) -> int:
    """How far ahead the schedule warp walks: past the end of an item, so that the next one is found meanwhile."""
    return (4 if p.served else 8) if p.walks_lists else 0


def allocate_marks(p, smem, barriers) -> Marks:
    stages = mark_stages(p)
    return Marks(Ring(barriers, stages), smem.allocate_array(Int32, stages * p.parts) if stages else None)


def units_at(p, marks, slot):
    return cute.make_tensor(marks.words + slot * p.parts, cute.make_layout(p.parts))


@cute.jit
def next_mark(
    p: cutlass.Constexpr, fn: cutlass.Constexpr, marks: cutlass.Constexpr, slot: Int32, phase: Int32, walk, trail
):  # fmt: skip
    """The units of the next block become a mark: (the first of them, where the mark after it goes, trail).  Where none
    is left, the first is unit 0, and others are past the last key; all are masked."""
    n, masked, trail = next_listed(p, fn, walk, trail)
    first = cutlass.max(n, 0)
    found = (2 * first + masked,)
    for _ in cutlass.range_constexpr(p.parts - 1):
        n, masked, trail = next_listed(p, fn, walk, trail)
        past = (walk.keys + p.part_kv - 1) // p.part_kv
        found = (*found, 2 * cutlass.select_(n < 0, past, n) + masked)
    cute.arch.mbarrier_wait(marks.ring.empty + slot, phase)
    if cute.arch.lane_idx() == 0:
        to = units_at(p, marks, slot)
        for k in cutlass.range_constexpr(p.parts):
            to[k] = found[k]
        cute.arch.mbarrier_arrive(marks.ring.full + slot)
    slot, phase = advance(marks.ring.stages, slot, phase)
    return first, slot, phase, trail


@cute.jit
def read_mark(p: cutlass.Constexpr, marks: cutlass.Constexpr, slot: Int32, phase: Int32, lead):
    """(the words of the next mark, where the one after it is)."""
    cute.arch.mbarrier_wait(marks.ring.full + slot, phase)
    at = units_at(p, marks, slot)
    found = tuple(warp_uniform(at[k]) for k in range(p.parts))
    release(marks.ring, slot, lead)
    slot, phase = advance(marks.ring.stages, slot, phase)
    return found, slot, phase


# ------------------------------------------------------------------------------------- dealing
@cute.jit
def deal(
    p: cutlass.Constexpr, fn: cutlass.Constexpr, ring: cutlass.Constexpr, marks: cutlass.Constexpr, items, tickets, env,
    grid, ahead,
):  # fmt: skip
    """The schedule warp: posts items, and marks; the first dead item ends the CTA.  Equal tiles are dealt back and
    forth; where a mask makes them unequal an atomic counter deals the next tile to whoever is idle.
    tickets: two zeroed counters; the last CTA to run dry zeroes them again."""
    lane = cute.arch.lane_idx()
    bx, _, _ = cute.arch.block_idx()
    gx, _, _ = cute.arch.grid_dim()
    num_items = of_packs(p, env, grid.num_heads_batch)
    num_tiles = grid.num_tiles_q * num_items
    slot, phase, turn = Int32(0), Int32(1), Int32(0)
    mark, mark_phase = Int32(0), Int32(1)
    tile = bx
    live, more = Boolean(True), Boolean(True)
    while live:
        live = tile < num_tiles
        # past the last tile nothing is used, but bounds may read memory: stay inside
        m, h, b = locate(
            cutlass.min(tile, num_tiles - 1),
            grid.num_tiles_q,
            num_items,
            of_packs(p, env, grid.section),
            grid.late_tiles,
            of_packs(p, env, env.num_qo_heads),
        )
        h = first_head(p, env, h)
        here = Env(b, h, h // env.group_size, *env[3:])
        begin, end, clear_begin, clear_count = Int32(0), Int32(1), Int32(0), Int32(0)
        if const_expr(p.counted):
            begin, end, clear_begin, clear_count = counted_blocks(p, fn, here, m)
        elif const_expr(p.walks_lists):
            walk = walk_of(p, fn, here, m)
            count, trail = count_listed(p, fn, walk)
            end = cutlass.max((count + p.parts - 1) // p.parts, 1)
        else:
            end = cutlass.max(count_blocks(p, fn, walk_of(p, fn, here, m)), 1)
        more = multiply_meanwhile(p, fn, ahead, env, grid, ring.empty, slot, phase, more)
        cute.arch.mbarrier_wait(ring.empty + slot, phase)
        if lane == 0:
            at = cute.make_tensor(items + ITEM_WORDS * slot, cute.make_layout(ITEM_WORDS))
            at[0], at[1], at[2], at[3] = m, h, b, Int32(live)
            at[4], at[5], at[6], at[7] = begin, end, clear_begin, clear_count
            cute.arch.mbarrier_arrive(ring.full + slot)
        slot, phase = advance(ring.stages, slot, phase)
        if const_expr(p.walks_lists):
            if live:
                for _ in cutlass.range(end, unroll=1):
                    _n, mark, mark_phase, trail = next_mark(p, fn, marks, mark, mark_phase, walk, trail)
        if const_expr(p.dynamic):
            if live:
                if lane == 0:
                    tile = gx + cute.arch.atomic_add(tickets, Int32(1), sem="relaxed", scope="gpu")
                tile = cute.arch.shuffle_sync(tile, 0)
        else:
            turn = turn + 1
            tile = turn * gx + cutlass.select_(turn % 2 == 1, gx - 1 - bx, bx)
    if const_expr(p.dynamic):
        if lane == 0:
            if cute.arch.atomic_add(tickets + 1, Int32(1), sem="acq_rel", scope="gpu") == gx - 1:
                cute.arch.atomic_exch(tickets, Int32(0), sem="relaxed", scope="gpu")
                cute.arch.atomic_exch(tickets + 1, Int32(0), sem="relaxed", scope="gpu")
    if const_expr(p.ahead):
        leave(p, ahead, env, grid)


class Item(NamedTuple):
    m: Any
    h: Any
    b: Any
    live: Any
    begin: Any
    end: Any
    clear_begin: Any
    clear_count: Any


def take(ring, items, slot, phase, lead) -> Item:
    """Read the next item and give its slot back."""
    cute.arch.mbarrier_wait(ring.full + slot, phase)
    at = cute.make_tensor(items + ITEM_WORDS * slot, cute.make_layout(ITEM_WORDS))
    words = [warp_uniform(at[i]) for i in range(ITEM_WORDS)]
    release(ring, slot, lead)
    return Item(*words[:3], words[3] != 0, *words[4:])
