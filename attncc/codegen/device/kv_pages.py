"""What fills the Q, K and V rings of served batches.

Boxes: TMA copies of `chunk` rows, each within one page (ragged keys: one box a block), by a warp for K and one for V,
while a third one gathers Q.  Rows: for pages of any size every row by itself, gathered by cp.async; the three warps
share every tile, since one alone is too slow.  A lane looks up the page of its box, or where its rows lie, one block
ahead of the copies.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from .factors import compute_factors, put_factors
from .gather import announce, copy_rows, own_row, shares
from .layout import box_place, coords
from .packed import Holes, Keyed, Load, Owner, env_of, kept_word, lines_of, peek
from .ring import advance, is_lead, release
from .schedule import Walk, first_chunk, next_block, next_mark, read_mark


class Cache(NamedTuple):
    """K or V in memory, for the gather: address of the first element, strides in units of 16 bytes.  The last of 2^32
    such units ends 64 GiB from the first element."""

    base: Any
    page: Any
    row: Any
    head: Any


TEAM = 3  # warps that gather together
LEAD = 4  # blocks before the end of an item at which the next one is asked for: three trips to memory


def locate(local, exists, table, lists, sizes):
    """(page, row in the page) of a local key."""
    index = local // sizes.page_size
    return kept_word(lists.kv_indices, table + index, exists), local - index * sizes.page_size


def look_up_box(p, item, n, lists, sizes):
    """Where block n lies, as this lane must know it: (page, box in the page) of one of its boxes."""
    if p.layout == "ragged":
        return (n,)
    lane = cute.arch.lane_idx()
    local = n * p.tile_kv + lane * p.chunk
    page, row = locate(local, (lane < p.tile_kv // p.chunk) & (local < item.keys), item.table, lists, sizes)
    return page, row // p.chunk


def look_up_rows(p, item, n, who, lists, sizes):
    """Where this lane's rows of block n lie: pages, and rows in them.  Nothing is computed from the pages yet: a warp
    waits where it first uses what it loads."""
    found = ()
    for at in range(shares(p.tile_kv, TEAM)):
        local = n * p.tile_kv + own_row(at, who, TEAM)
        found = (*found, *locate(local, local < item.keys, item.table, lists, sizes))
    return found


def units_of(cache: Cache, places, g):
    """Those rows of K or V in units of 16 bytes."""
    pairs = zip(places[::2], places[1::2], strict=True)
    return tuple(page * cache.page + row * cache.row + g * cache.head for page, row in pairs)


class Boxes:
    """Smem boxes and gmem coordinates of one item's blocks, for TMA."""

    def __init__(self, p, what: str, atom, sB, item, sizes):
        tile = p.tile_qk if what == "k" else p.tile_vo
        shape = (p.chunk, tile) if what == "k" else (tile, p.chunk)
        every = coords(tile, what == "v")
        if p.layout in ("ragged", "blocks"):
            first = item.table if p.layout == "ragged" else 0
            here = cute.domain_offset((first, 0) if what == "k" else (0, first), every[None, None, item.g, 0])
            gB = cute.local_tile(here, shape, (None, 0) if what == "k" else (0, None))
        else:
            at = (None, 0, None) if what == "k" else (0, None, None)
            gB = cute.local_tile(every[None, None, item.g, None], shape, at)
        divided = cute.zipped_divide(sB, shape)  # ((box), (boxes, slots))
        self.dst, self.src = cpasync.tma_partition(atom, 0, cute.make_layout(1), divided, cute.group_modes(gB, 0, 2))
        self.what, self.nbytes = what, p.chunk * tile * 2
        self.a_page = sizes.page_size // p.chunk


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
            # pages of their own, or all in one
            at = (row + page * boxes.a_page,) if const_expr(p.layout == "blocks") else (row, page)
            if c < count:
                cute.copy(
                    atom, boxes.src[(None, *at)], boxes.dst[None, box_place(boxes.what, c, slot)],
                    tma_bar_ptr=ring.full + slot,
                )  # fmt: skip


@cute.jit
def tag_slot(p: cutlass.Constexpr, tags, slot: Int32, tag: Int32):
    """Where the mask has holes, say which block of keys a slot holds."""
    if const_expr(not p.counted):
        cute.make_tensor(tags + slot, cute.make_layout(1))[0] = tag


@cute.jit
def fill_boxes(
    p: cutlass.Constexpr, boxes: cutlass.Constexpr, atom, ring: cutlass.Constexpr, slot: Int32, phase: Int32, places,
    left: Int32, tags, tag: Int32,
):  # fmt: skip
    """Wait for the slot, then copy a block of which `left` keys exist."""
    cute.arch.mbarrier_wait(ring.empty + slot, phase)
    count = cutlass.min((left + p.chunk - 1) // p.chunk, p.tile_kv // p.chunk)
    if cute.arch.lane_idx() == 0:
        if const_expr(boxes.what == "k"):
            tag_slot(p, tags, slot, tag)
        cute.arch.mbarrier_arrive_and_expect_tx(ring.full + slot, count * boxes.nbytes)
    cute.arch.sync_warp()
    issue_boxes(p, boxes, atom, ring, slot, places, count)


@cute.jit
def fill_rows(
    p: cutlass.Constexpr, what: cutlass.Constexpr, base: Int32, source, ring: cutlass.Constexpr, slot: Int32,
    phase: Int32, places, g: Int32, left: Int32, tags, tag: Int32, who: Int32,
):  # fmt: skip
    """Wait for the slot, then copy this warp's share of a block of which `left` keys exist."""
    cute.arch.mbarrier_wait(ring.empty + slot, phase)
    tile, width = (p.tile_qk, p.head_dim_qk) if what == "k" else (p.tile_vo, p.head_dim_vo)
    target, units = base + slot * (p.tile_kv * tile * 2), units_of(source, places, g)
    copy_rows(p.tile_kv, tile, width, target, source.base, units, left, who, TEAM)
    announce(ring.full + slot)
    if cute.arch.lane_idx() == 0:
        if const_expr(what == "k"):
            if who == 0:
                tag_slot(p, tags, slot, tag)
        cute.arch.mbarrier_arrive(ring.full + slot)


def writers(p) -> int:
    """Arrivals that fill a slot of keys: one, or of every gathering warp those of its copies and one for the tag."""
    return 1 if p.chunk else 33 * TEAM


@cute.jit
def want(wanted: cute.Pointer, lead):
    """Ask the schedule warp for the next item.  Earlier than it is needed soon would be wrong: a CTA would sit on work
    that others could do."""
    if lead:
        cute.arch.mbarrier_arrive(wanted)


@cute.jit
def stream_boxes(
    p: cutlass.Constexpr, fn: cutlass.Constexpr, what: cutlass.Constexpr, atom, sB, ring: cutlass.Constexpr,
    item_ring: cutlass.Constexpr, marks: cutlass.Constexpr, items, tags, wanted, lists, sizes,
):  # fmt: skip
    """One warp streams K, another V, block by block from the last to the first."""
    cpasync.prefetch_descriptor(atom)
    lead = is_lead()
    slot, phase, it, it_phase = Int32(0), Int32(1), Int32(0), Int32(0)
    mark = next_place(p)
    live = True
    while live:
        item, live, count, walk, first, mark = take_load(
            p, fn, item_ring, items, it, it_phase, marks, mark, lead, lists, sizes
        )  # fmt: skip
        n, masked, chunk, seen, clear = first
        it, it_phase = advance(item_ring.stages, it, it_phase)
        if count > 0:
            boxes = Boxes(p, what, atom, sB, item, sizes)
            places = look_up_box(p, item, n, lists, sizes)
            for k in cutlass.range(count, unroll=1):
                now, tag, here = n, 2 * n + masked, places
                n, masked, chunk, seen, clear, mark = following_block(
                    p, fn, walk, n, masked, chunk, seen, clear, marks, mark, k + 1 < count, lead
                )  # fmt: skip
                places = look_up_box(p, item, n, lists, sizes)
                if const_expr(what == "k"):
                    if k == cutlass.max(count - LEAD, 0):
                        want(wanted, lead)
                fill_boxes(p, boxes, atom, ring, slot, phase, here, item.keys - now * p.tile_kv, tags, tag)
                slot, phase = advance(ring.stages, slot, phase)
        elif const_expr(what == "k"):
            want(wanted, lead)


@cute.jit
def stream_rows(
    p: cutlass.Constexpr, fn: cutlass.Constexpr, who: Int32, k: Cache, v: Cache, q, sQ, sK, sV,
    rings: cutlass.Constexpr, marks: cutlass.Constexpr, items, tags, wanted, lists, sizes,
):  # fmt: skip
    """One of the warps that gather Q, K and V together.  A block of K is copied before the block of V that comes before
    it: so the consumers free the slots."""
    q_ring, k_ring, v_ring, item_ring = rings
    lead = is_lead()
    k_base, v_base = sK.iterator.toint(), sV.iterator.toint()
    ks, kph, vs, vph, qs, qph, it, it_phase = (Int32(x) for x in (0, 1, 0, 1, 0, 1, 0, 0))
    mark = next_place(p)
    live = True
    while live:
        item, live, count, walk, first, mark = take_load(
            p, fn, item_ring, items, it, it_phase, marks, mark, lead, lists, sizes
        )  # fmt: skip
        n, masked, chunk, seen, clear = first
        it, it_phase = advance(item_ring.stages, it, it_phase)
        places = look_up_rows(p, item, n, who, lists, sizes)
        if count > 0:
            left, tag = item.keys - n * p.tile_kv, 2 * n + masked
            fill_rows(p, "k", k_base, k, k_ring, ks, kph, places, item.g, left, tags, tag, who)
            ks, kph = advance(k_ring.stages, ks, kph)
        last, last_places = n, places
        n, masked, chunk, seen, clear, mark = following_block(
            p, fn, walk, n, masked, chunk, seen, clear, marks, mark, count > 1, lead
        )  # fmt: skip
        places = look_up_rows(p, item, n, who, lists, sizes)
        if live:
            gather_queries(p, q, sQ, q_ring, qs, qph, item, sizes, who, TEAM)
            qs, qph = advance(p.q_stages, qs, qph)
        for j in cutlass.range(count, unroll=1):
            if j + 1 < count:
                left, tag = item.keys - n * p.tile_kv, 2 * n + masked
                fill_rows(p, "k", k_base, k, k_ring, ks, kph, places, item.g, left, tags, tag, who)
                ks, kph = advance(k_ring.stages, ks, kph)
            if (who == 0) & (j == cutlass.max(count - LEAD, 0)):
                want(wanted, lead)
            now, now_places = last, last_places
            last, last_places = n, places
            n, masked, chunk, seen, clear, mark = following_block(
                p, fn, walk, n, masked, chunk, seen, clear, marks, mark, j + 2 < count, lead
            )  # fmt: skip
            places = look_up_rows(p, item, n, who, lists, sizes)
            left = item.keys - now * p.tile_kv
            fill_rows(p, "v", v_base, v, v_ring, vs, vph, now_places, item.g, left, tags, Int32(0), who)
            vs, vph = advance(v_ring.stages, vs, vph)
        if (count == 0) & (who == 0):
            want(wanted, lead)


def walk_of_item(p, items, it, item, lists, sizes) -> Walk | None:
    """Where the mask has holes, how to go through the blocks of an item."""
    if p.counted:
        return None
    holes = peek(Holes, items, it)
    owner = Owner(holes.request, holes.q_start, holes.qo_len, holes.kv_len)
    env = env_of(owner, item.g * sizes.group_size, item.g, holes.offset, item.keys, item.table, lists, sizes)
    return Walk(
        env, holes.i0, holes.i1, holes.lo, holes.hi, holes.clear_lo, holes.clear_hi, holes.offset, item.keys,
        holes.classify != 0, lines_of(p, item.row0, item.rows, sizes),
    )  # fmt: skip


def key_env(items, it, item, lists, sizes):
    """What factors of keys are computed from: nothing of a request, nor of a query head."""
    more = peek(Keyed, items, it)
    nobody = Owner(Int32(0), Int32(0), Int32(0), more.kv_len)  # which checks listed keys' positions
    return env_of(nobody, Int32(0), item.g, more.offset, item.keys, item.table, lists, sizes)


@cute.jit
def shelve(
    p: cutlass.Constexpr, fn: cutlass.Constexpr, shelf: cutlass.Constexpr, slot: Int32, phase: Int32, items, it: Int32,
    lists, sizes,
):  # fmt: skip
    """The factors of all blocks of an item, in the order in which they are visited; (slot, phase) of what follows."""
    item = peek(Load, items, it)
    env, walk = key_env(items, it, item, lists, sizes), walk_of_item(p, items, it, item, lists, sizes)
    n, masked, chunk, seen, clear, _ = first_block(p, fn, walk, item, None, None, None)
    for _ in cutlass.range(item.end - item.begin, unroll=1):
        found = compute_factors(p, fn, env, (env.key_offset + n * p.tile_kv,), env.key_stop)
        put_factors(p, shelf, slot, phase, found)
        slot, phase = advance(shelf.ring.stages, slot, phase)
        n, masked, chunk, seen, clear, _ = following_block(
            p, fn, walk, n, masked, chunk, seen, clear, None, None, None, None
        )  # fmt: skip
    return slot, phase


@cute.jit
def show(
    p: cutlass.Constexpr, fn: cutlass.Constexpr, marks: cutlass.Constexpr, mark: Int32, mark_phase: Int32,
    shelf: cutlass.Constexpr, slot: Int32, phase: Int32, items, it: Int32, trail, lists, sizes,
):  # fmt: skip
    """The marks of an item whose rows list blocks, and the factors of the keys there: these come behind the mark after
    them, since what a block's page is somebody looks up one block ahead.  Where the next marks and factors go."""
    item = peek(Load, items, it)
    walk, n = walk_of_item(p, items, it, item, lists, sizes), Int32(0)
    for k in cutlass.range(item.end + p.shelved, unroll=1):
        last = n
        if k < item.end:
            n, mark, mark_phase, trail = next_mark(p, fn, marks, mark, mark_phase, walk, trail)
        if const_expr(p.shelved):
            if k > 0:
                env = key_env(items, it, item, lists, sizes)
                found = compute_factors(p, fn, env, (env.key_offset + last * p.tile_kv,), env.key_stop)
                put_factors(p, shelf, slot, phase, found)
                slot, phase = advance(shelf.ring.stages, slot, phase)
    return mark, mark_phase, slot, phase


class NextMark(NamedTuple):
    """Where a warp that fills rings finds the next mark."""

    slot: Any
    phase: Any


def next_place(p):
    return NextMark(Int32(0), Int32(0)) if p.walks_lists else None


def take_load(p, fn, item_ring, items, it, it_phase, marks, mark, lead, lists, sizes):
    """Wait for the next item: what to load, is there one, its blocks, how to go through them, and where that begins."""
    cute.arch.mbarrier_wait(item_ring.full + it, it_phase)
    cute.arch.griddepcontrol_wait()  # the schedule warp has waited already; this makes it true of this warp's copies
    item = peek(Load, items, it)
    live, count = item.live != 0, item.end - item.begin
    walk = None if p.walks_lists else walk_of_item(p, items, it, item, lists, sizes)
    *first, mark = first_block(p, fn, walk, item, marks, mark, lead)
    release(item_ring, it, lead)
    return item, live, count, walk, first, mark


@cute.jit
def first_block(p: cutlass.Constexpr, fn: cutlass.Constexpr, walk, item, marks: cutlass.Constexpr, mark, lead):
    """(block, masked, the walk's state, the next mark) of an item's last block."""
    n, masked, chunk, seen, clear = cutlass.max(item.end - 1, 0), Int32(0), Int32(0), Int32(0), Int32(0)
    if const_expr(p.walks_lists):
        if item.end > 0:
            n, masked, mark = marked(p, marks, mark, lead)
    elif const_expr(not p.counted):
        if item.end > 0:
            n, masked, chunk, seen, clear = next_block(p, fn, walk, first_chunk(p, walk), seen, clear)
    return n, masked, chunk, seen, clear, mark


@cute.jit
def following_block(
    p: cutlass.Constexpr, fn: cutlass.Constexpr, walk, n, masked, chunk, seen, clear, marks: cutlass.Constexpr, mark,
    more, lead,
):  # fmt: skip
    """`more`: there is one; else what comes is nobody's."""
    if const_expr(p.counted):
        n = cutlass.max(n - 1, 0)
    elif const_expr(p.walks_lists):
        if more:
            n, masked, mark = marked(p, marks, mark, lead)
    else:
        n, masked, chunk, seen, clear = next_block(p, fn, walk, chunk, seen, clear)
    return n, masked, chunk, seen, clear, mark


@cute.jit
def marked(p: cutlass.Constexpr, marks: cutlass.Constexpr, mark, lead):
    (word,), slot, phase = read_mark(p, marks, mark.slot, mark.phase, lead)
    return word >> 1, word & 1, NextMark(slot, phase)


@cute.jit
def gather_queries(
    p: cutlass.Constexpr, q, sQ, ring: cutlass.Constexpr, stage: Int32, phase: Int32, item, sizes, who: Int32,
    team: cutlass.Constexpr,
):  # fmt: skip
    """A warp's share of the packed rows of a tile; the two warpgroups of a small one get the same rows."""
    for w in cutlass.range_constexpr(p.warpgroups):
        first = cutlass.select_(item.split != 0, Int32(0), Int32(64 * w))
        units = ()
        for k in cutlass.range_constexpr(shares(64, team)):
            packed = item.row0 + cutlass.min(first + own_row(k, who, team), item.rows - 1)
            row = packed // sizes.group_size
            h = item.g * sizes.group_size + (packed - row * sizes.group_size)
            units = (*units, row * (sizes.q_row >> 3) + h * (sizes.q_head >> 3))
        slot = stage * p.warpgroups + w
        target = sQ.iterator.toint() + slot * (64 * p.tile_qk * 2)
        cute.arch.mbarrier_wait(ring.empty + slot, phase)
        copy_rows(64, p.tile_qk, p.head_dim_qk, target, q.toint(), units, item.rows - first, who, team)
        announce(ring.full + slot)


@cute.jit
def stream_queries(
    p: cutlass.Constexpr, q, sQ, ring: cutlass.Constexpr, item_ring: cutlass.Constexpr, items, sizes
):  # fmt: skip
    """The warp that gathers the packed rows of every tile."""
    lead = is_lead()
    stage, phase, it, it_phase = Int32(0), Int32(1), Int32(0), Int32(0)
    live = True
    while live:
        cute.arch.mbarrier_wait(item_ring.full + it, it_phase)
        cute.arch.griddepcontrol_wait()
        item = peek(Load, items, it)
        live = item.live != 0
        release(item_ring, it, lead)
        it, it_phase = advance(item_ring.stages, it, it_phase)
        if live:
            gather_queries(p, q, sQ, ring, stage, phase, item, sizes, Int32(0), 1)
            stage, phase = advance(p.q_stages, stage, phase)
