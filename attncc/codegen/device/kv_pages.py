"""What fills the Q, K and V rings of served batches.

Boxes: TMA copies of `chunk` rows, each within one page (ragged keys: one box a block).  Rows: every row by itself,
gathered by cp.async, for pages of any size.  A lane looks up the page of its box, or the addresses of its rows, one
block ahead of the copies.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from .gather import announce, copy_rows
from .layout import coords
from .packed import Holes, Load, Owner, env_of, peek, word
from .ring import advance, is_lead, release
from .schedule import Walk, first_chunk, next_block


class Cache(NamedTuple):
    """K or V in memory, for the gather: address of the first element, strides in units of 16 bytes.  The last of 2^32
    such units ends 64 GiB from the first element."""

    base: Any
    page: Any
    row: Any
    head: Any


GATHER_WRITERS = 33  # arrivals that fill a slot: the copies of 32 lanes, and the lane that tags it


@cute.jit
def locate(local, exists, table, lists, sizes):
    """(page, row in the page) of a local key."""
    index = local // sizes.page_size
    page = Int32(0)
    if exists:
        page = word(lists.kv_indices, table + index)
    return page, local - index * sizes.page_size


def look_up(p, cache, item, n, lists, sizes):
    """Where block n lies, as this lane must know it: (page, box) of its box, or its rows in units of 16 bytes."""
    lane = cute.arch.lane_idx()
    if p.layout == "ragged":
        return (n,)
    if p.chunk:
        local = n * p.tile_kv + lane * p.chunk
        page, row = locate(local, (lane < p.tile_kv // p.chunk) & (local < item.keys), item.table, lists, sizes)
        return page, row // p.chunk
    found = ()
    for k in range((p.tile_kv + 31) // 32):
        local = n * p.tile_kv + 32 * k + lane
        page, row = locate(local, local < item.keys, item.table, lists, sizes)
        found = (*found, page * cache.page + row * cache.row + item.g * cache.head)
    return found


class Boxes:
    """Smem boxes and gmem coordinates of one item's blocks, for TMA."""

    def __init__(self, p, what: str, atom, sB, item):
        tile = p.tile_qk if what == "k" else p.tile_vo
        shape = (p.chunk, tile) if what == "k" else (tile, p.chunk)
        every = coords(tile, what == "v")
        if p.layout == "ragged":
            here = cute.domain_offset((item.table, 0) if what == "k" else (0, item.table), every[None, None, item.g, 0])
            gB = cute.local_tile(here, shape, (None, 0) if what == "k" else (0, None))
        else:
            at = (None, 0, None) if what == "k" else (0, None, None)
            gB = cute.local_tile(every[None, None, item.g, None], shape, at)
        divided = cute.zipped_divide(sB, shape)  # ((box), (boxes, slots))
        self.dst, self.src = cpasync.tma_partition(atom, 0, cute.make_layout(1), divided, cute.group_modes(gB, 0, 2))
        self.what, self.nbytes = what, p.chunk * tile * 2


def box_place(what: str, c: int, slot):
    return (c, 0, slot) if what == "k" else (0, c, slot)


@cute.jit
def issue_boxes(p: cutlass.Constexpr, boxes: cutlass.Constexpr, atom, ring: cutlass.Constexpr, slot, places, count):
    """The first `count` boxes of a block; the slot's transaction count has been announced."""
    if const_expr(p.layout == "ragged"):
        cute.copy(
            atom, boxes.src[None, places[0]], boxes.dst[None, box_place(boxes.what, 0, slot)],
            tma_bar_ptr=ring.full + slot,
        )  # fmt: skip
    else:
        for c in cutlass.range_constexpr(p.tile_kv // p.chunk):
            page, row = cute.arch.shuffle_sync(places[0], c), cute.arch.shuffle_sync(places[1], c)
            if c < count:
                cute.copy(
                    atom, boxes.src[None, row, page], boxes.dst[None, box_place(boxes.what, c, slot)],
                    tma_bar_ptr=ring.full + slot,
                )  # fmt: skip


@cute.jit
def fill_block(
    p: cutlass.Constexpr, what: cutlass.Constexpr, boxes: cutlass.Constexpr, source, base: Int32,
    ring: cutlass.Constexpr, slot: Int32, phase: Int32, places, left: Int32, tags, tag: Int32,
):  # fmt: skip
    """Wait for the slot, then copy a block of which `left` keys exist."""
    cute.arch.mbarrier_wait(ring.empty + slot, phase)
    if const_expr(what == "k" and not p.counted):
        if cute.arch.lane_idx() == 0:
            cute.make_tensor(tags + slot, cute.make_layout(1))[0] = tag
    if const_expr(p.chunk):
        count = cutlass.min((left + p.chunk - 1) // p.chunk, p.tile_kv // p.chunk)
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(ring.full + slot, count * boxes.nbytes)
        cute.arch.sync_warp()
        issue_boxes(p, boxes, source, ring, slot, places, count)
    else:
        tile, width = (p.tile_qk, p.head_dim_qk) if what == "k" else (p.tile_vo, p.head_dim_vo)
        copy_rows(p.tile_kv, tile, width, base + slot * (p.tile_kv * tile * 2), source.base, places, left)
        announce(ring.full + slot)
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(ring.full + slot)


@cute.jit
def stream_keys(
    p: cutlass.Constexpr, fn: cutlass.Constexpr, what: cutlass.Constexpr, source, sB, ring: cutlass.Constexpr,
    item_ring: cutlass.Constexpr, items, tags, wanted, lists, sizes,
):  # fmt: skip
    """One warp streams K, another V, block by block from the last to the first.  K asks for the next item (`wanted`)
    when it comes to the last block of this one: a CTA that took its tickets earlier would sit on work of others."""
    if const_expr(p.chunk):
        cpasync.prefetch_descriptor(source)
    lead = is_lead()
    base = sB.iterator.toint()
    slot, phase, it, it_phase = Int32(0), Int32(1), Int32(0), Int32(0)
    live = True
    while live:
        cute.arch.mbarrier_wait(item_ring.full + it, it_phase)
        item = peek(Load, items, it)
        live = item.live != 0
        count = item.end - item.begin
        n, masked, chunk, seen, clear = item.end - 1, Int32(0), Int32(0), Int32(0), Int32(0)
        walk = None
        if const_expr(not p.counted):
            walk = walk_of_item(peek(Holes, items, it), item, lists, sizes)
            chunk = first_chunk(p, walk)
            if count > 0:
                n, masked, chunk, seen, clear = next_block(p, fn, walk, chunk, seen, clear)
        release(item_ring, it, lead)
        it, it_phase = advance(item_ring.stages, it, it_phase)
        if count > 0:
            boxes = Boxes(p, what, source, sB, item) if p.chunk else None
            places = look_up(p, source, item, n, lists, sizes)
            for k in cutlass.range(count, unroll=1):
                now, tag, here = n, 2 * n + masked, places
                if const_expr(p.counted):
                    n = cutlass.max(n - 1, 0)
                else:
                    n, masked, chunk, seen, clear = next_block(p, fn, walk, chunk, seen, clear)
                places = look_up(p, source, item, n, lists, sizes)
                if const_expr(what == "k"):
                    if k == count - 1:
                        want(wanted, lead)
                fill_block(
                    p, what, boxes, source, base, ring, slot, phase, here, item.keys - now * p.tile_kv, tags, tag
                )
                slot, phase = advance(ring.stages, slot, phase)
        elif const_expr(what == "k"):
            want(wanted, lead)


@cute.jit
def want(wanted: cute.Pointer, lead):
    if lead:
        cute.arch.mbarrier_arrive(wanted)


def walk_of_item(holes, item, lists, sizes) -> Walk:
    owner = Owner(holes.request, holes.q_start, holes.qo_len, holes.kv_len)
    env = env_of(owner, item.g * sizes.group_size, item.g, holes.offset, item.keys, item.table, lists, sizes)
    return Walk(
        env, holes.i0, holes.i1, holes.lo, holes.hi, holes.clear_lo, holes.clear_hi, holes.offset, item.keys,
        holes.classify != 0,
    )  # fmt: skip


@cute.jit
def stream_queries(
    p: cutlass.Constexpr, q, sQ, ring: cutlass.Constexpr, item_ring: cutlass.Constexpr, items, lists, sizes
):
    """One warp gathers the packed rows of every tile; the two warpgroups of a small one get the same rows."""
    lead, lane = is_lead(), cute.arch.lane_idx()
    base, nbytes = sQ.iterator.toint(), 64 * p.tile_qk * 2
    stage, phase, it, it_phase = Int32(0), Int32(1), Int32(0), Int32(0)
    live = True
    while live:
        cute.arch.mbarrier_wait(item_ring.full + it, it_phase)
        item = peek(Load, items, it)
        live = item.live != 0
        release(item_ring, it, lead)
        it, it_phase = advance(item_ring.stages, it, it_phase)
        if live:
            for w in cutlass.range_constexpr(p.warpgroups):
                first = cutlass.select_(item.split != 0, Int32(0), Int32(64 * w))
                units = ()
                for k in cutlass.range_constexpr(2):
                    packed = item.row0 + cutlass.min(first + 32 * k + lane, item.rows - 1)
                    row = packed // sizes.group_size
                    h = item.g * sizes.group_size + (packed - row * sizes.group_size)
                    units = (*units, row * (sizes.q_row >> 3) + h * (sizes.q_head >> 3))
                slot = stage * p.warpgroups + w
                cute.arch.mbarrier_wait(ring.empty + slot, phase)
                copy_rows(64, p.tile_qk, p.head_dim_qk, base + slot * nbytes, q.toint(), units, item.rows - first)
                announce(ring.full + slot)
            stage, phase = advance(p.q_stages, stage, phase)
