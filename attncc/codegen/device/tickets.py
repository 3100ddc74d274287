"""The schedule warp of served batches: CTAs take records of the plan from an atomic counter.

So the device is the min-heap of algorithm 1 (arXiv 2501.01005): the next piece of work goes to whoever is idle.  The
plan only says in which order, and how the work is cut; the bits of a result do not depend on who computes it.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from .functors import tile_bounds
from .kv_pages import shelve, show
from .lists import Trail, count_listed
from .packed import FEW, ITEM_WORDS, RECORD_WORDS, WORDS, Owner, env_of, kept_word, lines_of, row_env
from .ring import advance
from .schedule import Walk, count_blocks

FAR = 1 << 28  # past every position


def lanes_reduce(op, x):
    """The same over the 32 lanes of a warp."""
    for k in range(5):
        x = op(x, cute.arch.shuffle_sync_bfly(x, offset=1 << k))
    return x


@cute.jit
def listed_before(x, kv_len, keys, table, lists, sizes):
    """How many of an item's listed keys, whose blocks are in order, stand before position x: a search by 32 lanes."""
    x = cutlass.max(cutlass.min(x, kv_len), 0)
    block = x // sizes.page_size
    begin, end = Int32(0), (keys + sizes.page_size - 1) // sizes.page_size
    total = end
    while begin < end:  # blocks before `begin` are before x's, from `end` on they are not
        step = (end - begin + 31) // 32
        last = begin + (cute.arch.lane_idx() + 1) * step - 1
        before = Boolean((last < end) & (kept_word(lists.kv_indices, table + last, last < end) < block))
        begin = begin + cute.arch.popc(cute.arch.vote_ballot_sync(before)) * step
        end = cutlass.min(begin + step - 1, end)
    found = begin * sizes.page_size
    if begin < total:
        if kept_word(lists.kv_indices, table + begin, True) == block:
            found = found + (x - block * sizes.page_size)
    return cutlass.min(found, keys)


@cute.jit
def position_range(
    p: cutlass.Constexpr, fn: cutlass.Constexpr, owner, g, row0, rows, offset, keys, table, lists, sizes
):
    """(lo, hi, clear_lo, clear_hi, i0, i1, may the mask be asked about blocks of rows i0 … i1) of a packed tile."""
    together = Boolean(owner.request >= 0)
    if const_expr(p.ranges_by_row and p.layout != "blocks"):
        together = Boolean(False)
    lo, hi, clear_lo, clear_hi = Int32(FAR), Int32(-FAR), Int32(-FAR), Int32(FAR)
    i0, i1 = offset, offset
    if together:
        first = row0 // sizes.group_size - owner.q_start
        last = (row0 + rows - 1) // sizes.group_size - owner.q_start
        i0, i1 = first + owner.kv_len - owner.qo_len, last + owner.kv_len - owner.qo_len
        env = env_of(owner, g * sizes.group_size, g, offset, keys, table, lists, sizes)
        if const_expr(p.layout != "blocks"):
            lo, hi, clear_lo, clear_hi = tile_bounds(fn, env, i0, i1)
        elif const_expr(not p.mask or p.ranges_by_row):
            lo, hi, clear_lo, clear_hi = Int32(0), keys, Int32(0), Int32(0) if p.mask else keys
        else:
            lo, hi, clear_lo, clear_hi = (
                listed_before(x, owner.kv_len, keys, table, lists, sizes) for x in tile_bounds(fn, env, i0, i1)
            )  # fmt: skip
    else:
        # of several requests, or of heads that see other keys: what any row sees, and what all do
        for k in cutlass.range((rows + 31) // 32, unroll=1):
            packed = row0 + cutlass.min(k * 32 + cute.arch.lane_idx(), rows - 1)
            env, iq = row_env(owner, packed, g, offset, keys, table, lists, sizes)
            i = iq + env.kv_len - env.qo_len
            a, b, c, d = tile_bounds(fn, env, i, i)
            some = b > a
            lo = cutlass.min(lo, cutlass.select_(some, a, Int32(FAR)))
            hi = cutlass.max(hi, cutlass.select_(some, b, Int32(-FAR)))
            clear_lo, clear_hi = cutlass.max(clear_lo, c), cutlass.min(clear_hi, d)
        lo, hi = lanes_reduce(cutlass.min, lo), lanes_reduce(cutlass.max, hi)
        clear_lo, clear_hi = lanes_reduce(cutlass.max, clear_lo), lanes_reduce(cutlass.min, clear_hi)
    return lo, hi, clear_lo, clear_hi, i0, i1, together


def no_trail(p):
    return Trail(*(Int32(0) for _ in Trail._fields)) if p.walks_lists else None


@cute.jit
def added_words(p: cutlass.Constexpr, fn: cutlass.Constexpr, r, g, lists, sizes):
    """(the words that the schedule warp adds to record `r` of kv head g, in the order of ADDED, the trail that a walk
    over its lists begins with)."""
    owner = Owner(r[WORDS["request"]], r[WORDS["q_start"]], r[WORDS["qo_len"]], r[WORDS["kv_len"]])
    rows, keys, offset, table = (r[WORDS[n]] for n in ("rows", "keys", "offset", "table"))
    lo, hi, clear_lo, clear_hi, i0, i1, together = position_range(
        p, fn, owner, g, r[WORDS["row0"]], rows, offset, keys, table, lists, sizes
    )
    lo = cutlass.max(lo - offset, r[WORDS["key_begin"]])
    hi = cutlass.min(hi - offset, r[WORDS["key_end"]])
    clear_lo, clear_hi = cutlass.max(clear_lo - offset, 0), cutlass.max(cutlass.min(clear_hi - offset, keys), 0)
    begin, end, clear_begin, clear_count = Int32(0), Int32(0), Int32(0), Int32(0)
    trail = no_trail(p)
    if hi > lo:
        if const_expr(p.counted):
            begin, end = lo // p.tile_kv, (hi + p.tile_kv - 1) // p.tile_kv
            clear_begin = (clear_lo + p.tile_kv - 1) // p.tile_kv
            clear_count = cutlass.max(clear_hi // p.tile_kv - clear_begin, 0)
        else:
            env = env_of(owner, g * sizes.group_size, g, offset, keys, table, lists, sizes)
            lines = lines_of(p, r[WORDS["row0"]], rows, sizes)
            walk = Walk(env, i0, i1, lo, hi, clear_lo, clear_hi, offset, keys, together, lines)
            if const_expr(p.walks_lists):
                end, trail = count_listed(p, fn, walk)
            else:
                end = count_blocks(p, fn, walk)
    split = Int32((rows <= FEW) | ((rows <= 64) & (end - begin >= 2)))
    added = begin, end, clear_begin, clear_count, split, lo, hi, clear_lo, clear_hi, i0, i1, Int32(together)
    return added, trail


@cute.jit
def deal_tickets(
    p: cutlass.Constexpr, fn: cutlass.Constexpr, ring: cutlass.Constexpr, shelf: cutlass.Constexpr,
    marks: cutlass.Constexpr, items, wanted, lists, sizes,
):  # fmt: skip
    """Posts items, and the marks and factors of their keys; the first dead item ends the CTA.  tickets: two zeroed
    counters; the last CTA to run dry zeroes them again."""
    lane = cute.arch.lane_idx()
    bx, _, _ = cute.arch.block_idx()
    gx, _, _ = cute.arch.grid_dim()
    # most often this is the first record: on its way while the header tells
    guess = lists.items + (bx // sizes.num_kv_heads) * RECORD_WORDS
    cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[guess.toint()])
    total, heads, rows = (kept_word(lists.header, k, True) for k in range(3))
    # a graph that captured a run with fewer rows than the plan it is replayed with must not write past them
    total = cutlass.select_(rows <= sizes.rows, total, Int32(0))
    slot, phase, asked = Int32(0), Int32(1), Int32(0)
    place, place_phase = Int32(0), Int32(1)  # on the shelf
    mark, mark_phase = Int32(0), Int32(1)
    ticket = bx
    live = Boolean(True)
    while live:
        live = ticket < total
        cute.arch.mbarrier_wait(ring.empty + slot, phase)
        at = cute.make_tensor(items + ITEM_WORDS * slot, cute.make_layout(ITEM_WORDS))
        g = Int32(0)
        added, trail = tuple(Int32(0) for _ in range(12)), no_trail(p)
        record = ticket // heads
        if lane < RECORD_WORDS:
            at[lane] = kept_word(lists.items, record * RECORD_WORDS + lane, live)
        cute.arch.sync_warp()
        # no kernel writes a plan, so that was read early; anything else the kernel before may still be writing
        cute.arch.griddepcontrol_wait()
        if live:
            g = at[WORDS["head"]] + (ticket - record * heads)
            added, trail = added_words(p, fn, at, g, lists, sizes)
        if lane == 0:
            for k, x in enumerate((g, Int32(live), *added)):
                at[RECORD_WORDS + k] = x
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(ring.full + slot)
        if const_expr(p.walks_lists):
            if live:
                mark, mark_phase, place, place_phase = show(
                    p, fn, marks, mark, mark_phase, shelf, place, place_phase, items, slot, trail, lists, sizes
                )
        elif const_expr(p.shelved):
            if live:
                place, place_phase = shelve(p, fn, shelf, place, place_phase, items, slot, lists, sizes)
        slot, phase = advance(ring.stages, slot, phase)
        if live:
            cute.arch.mbarrier_wait(wanted, asked)
            asked = asked ^ 1
            if lane == 0:
                ticket = gx + cute.arch.atomic_add(lists.tickets, Int32(1), sem="relaxed", scope="gpu")
            ticket = cute.arch.shuffle_sync(ticket, 0)
    if lane == 0:
        if cute.arch.atomic_add(lists.tickets + 1, Int32(1), sem="acq_rel", scope="gpu") == gx - 1:
            cute.arch.atomic_exch(lists.tickets, Int32(0), sem="relaxed", scope="gpu")
            cute.arch.atomic_exch(lists.tickets + 1, Int32(0), sem="relaxed", scope="gpu")
