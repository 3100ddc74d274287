"""shared_prefix="auto": requests whose page lists start alike, and whether reading those pages once pays.

Only neighbours can share, since a tile is made of consecutive rows.  The pages that neighbours have in common give a
tree of runs (a longer run shares fewer pages); of this the runs are chosen that save most, and what is left of their
requests is searched again for a level inside.  A page is shared where it is full in every request.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from attncc.runtime.plan import Batch, Plan, Shape, Visible, plan
from attncc.runtime.plan_levels import NotEnoughPartialRows, plan_levels
from attncc.runtime.plan_pieces import STARTUP

# Measured on a H200 (132 SMs, bf16, 32 query and 8 kv heads of 128, page 16; µs a layer, flat -> with a level):
# B64, 8192 keys shared + 256 own 286 -> 62; B128, 2048 + 512 196 -> 115; B16, 32768 + 512 273 -> 60; B32, 1024 + 1024
# 54.5 -> 55.  A flat plan meets shared keys again in L2, at 7.8 TB/s.  At that rate the levels save 267, 133, 258 and
# 17 µs, of which 224, 81, 213 and -1 are gained: a level costs 43, 52, 45 and 18 µs.  A prefix may be left that would
# gain a little, but none is taken that loses.
L2_RATE = 59_000  # bytes a µs and SM that are read again
LEVEL_TIME = 50  # µs that a level takes, whatever it reads: states wait for one another, and are merged
LEVELS = 3  # beyond these, what a level saves is little
COMPARED = 1 << 16  # page ids that are compared at first


class _Group(NamedTuple):
    """A run of requests [first, last) that share `pages`."""

    first: int
    last: int
    pages: int


def auto(shape: Shape, batch: Batch, kv_indices: np.ndarray, visible: Visible | None = None) -> Plan:
    """The plan of a paged batch, with prefixes that requests share read once where that pays.

    kv_indices: int array on the host, as `batch.kv_start` counts in it.  With batch_invariant nothing is shared, since
    a request's bits would depend on its neighbours.  ValueError as `plan`.
    """
    levels = None if shape.batch_invariant else find_shared(shape, batch, kv_indices, visible)
    if levels is not None:
        try:
            return plan_levels(shape, levels, visible)
        except NotEnoughPartialRows:  # then as if nothing were shared
            pass
    return plan(shape, batch, visible)


def find_shared(
    shape: Shape, batch: Batch, kv_indices: np.ndarray, visible: Visible | None = None
) -> list[Batch] | None:
    """The levels that batch becomes when prefixes that pay are split off, for `plan_levels`; None where none pays."""
    live = np.diff(batch.qo_indptr).nonzero()[0]
    if len(live) < 2 or shape.page_size == 0 or not len(kv_indices):
        return None
    start, pages = batch.kv_start[live], batch.kv_len[live] // shape.page_size
    most = np.minimum(pages[:-1], pages[1:])
    first = kv_indices.take(start, mode="clip")  # a request without pages may start at the end
    alike = ((first[:-1] == first[1:]) & (most > 0)).nonzero()[0]
    if not len(alike):
        return None
    cost = _Cost(shape, batch, live)
    if cost.most(int(most[alike].sum())) <= cost.level:
        return None
    common = _common(start, most, alike, kv_indices)
    levels: list[Batch] = []
    while len(levels) < min(LEVELS, shape.max_levels) - 1:
        groups, saved = _groups(common, cost)
        if not levels and saved > cost.level and cost.hide(batch, live, visible):
            groups, saved = _groups(common, cost)
        if saved <= cost.level:
            break
        levels.append(_level(shape, batch, live, start + cost.done, groups))
        left = np.zeros_like(common)  # neighbours in different groups differ from now on
        for g in groups:
            left[g.first : g.last - 1] = common[g.first : g.last - 1] - g.pages
            cost.done[g.first : g.last] += g.pages
        common = left
    if not levels:
        return None
    done = np.zeros_like(batch.kv_len)
    done[live] = cost.done
    return [*levels, Batch(batch.qo_indptr, batch.kv_start + done, batch.kv_len - done * shape.page_size)]


def _common(start: np.ndarray, most: np.ndarray, alike: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Pages that each request has in common with the next, from its first on and `most` at most: [requests - 1].
    `alike`: the requests whose first page is that of the next."""
    ids, common, at = np.ascontiguousarray(ids), np.zeros_like(most), 0
    one, two, left = start[alike], start[alike + 1], most[alike]
    stride = max(1, COMPARED // len(alike))
    while len(alike):  # in strides that grow with what was found alike: little is compared for nothing
        width = min(stride, int(left.max()) - at)
        differ = _windows(ids, one + at, width) != _windows(ids, two + at, width)
        ran = differ.argmax(axis=1)
        same = (ran == 0) & ~differ[:, 0]
        ran[same] = width
        ran += at
        common[alike] = np.minimum(ran, left)
        at += width
        more = (same & (left > at)).nonzero()[0]
        alike, one, two, left = alike[more], one[more], two[more], left[more]
        stride *= 8
    return common


def _windows(ids: np.ndarray, at: np.ndarray, width: int) -> np.ndarray:
    """ids[a : a + width] for every a: [len(at), width].  What would lie beyond the end is anything."""
    last = len(ids) - width
    every = np.ndarray((last + 1, width), ids.dtype, ids, strides=2 * ids.strides)  # copies rows, not single ids
    found = every[np.minimum(at, last)]
    for n in (at > last).nonzero()[0].tolist():
        found[n, : len(ids) - at[n]] = ids[at[n] :]
    return found


class _Cost:
    """What a shared prefix saves, in bytes a kv head that are read again from L2."""

    def __init__(self, shape: Shape, batch: Batch, live: np.ndarray):
        indptr = batch.qo_indptr
        packed = (indptr[1:] - indptr[:-1])[live] * shape.group_size
        self._shape = shape
        self._tiles = -(-packed // shape.tile_q)
        self._rows_before = [0, *packed.cumsum().tolist()]
        self._tiles_before = [0, *self._tiles.cumsum().tolist()]
        self._seen: tuple[np.ndarray, np.ndarray] | None = None  # None: everything
        self.done = np.zeros(len(live), np.int64)  # pages of every request that outer levels take
        self.level = LEVEL_TIME * L2_RATE * shape.sm_count // shape.num_kv_heads

    def hide(self, batch: Batch, live: np.ndarray, visible: Visible | None) -> bool:
        """From now on only keys count that some row of their request can see; whether there are others."""
        if visible is None:
            return False
        keys = batch.kv_len[live]
        qo_len = (batch.qo_indptr[1:] - batch.qo_indptr[:-1])[live]
        lo, hi = visible(keys - qo_len, keys - 1, qo_len, keys)
        if (lo is None or not (lo > 0).any()) and (hi is None or not (hi < keys).any()):
            return False
        lo, hi = (0 if lo is None else lo), (keys if hi is None else hi)
        self._seen = np.broadcast_to(lo, keys.shape), np.broadcast_to(hi, keys.shape)
        return True

    def most(self, pages: int) -> int:
        """What can be saved at most where neighbours share so many pages, all pairs of them taken together."""
        return pages * int(self._tiles.max()) * self._shape.page_size * self._shape.kv_bytes

    def saved(self, g: _Group, skip: int = 0) -> int:
        """Keys read once a tile of the group instead of once a tile of each request, less a state of every row more to
        write and to read, in both levels, and the start of the group's tiles.  `skip`: pages of the prefix that a level
        outside it takes."""
        shape = self._shape
        rows = self._rows_before[g.last] - self._rows_before[g.first]
        tiles = -(-rows // shape.tile_q)
        cost = 2 * 2 * rows * 4 * (shape.head_dim_vo + 1) + tiles * STARTUP * shape.tile_kv * shape.kv_bytes
        fewer = self._tiles_before[g.last] - self._tiles_before[g.first] - tiles
        most = (g.pages - skip) * shape.page_size * fewer * shape.kv_bytes - cost  # where all is seen
        if self._seen is None or most <= 0:
            return most
        run, base = slice(g.first, g.last), int(self.done[g.first])
        lo = np.maximum(self._seen[0][run], (base + skip) * shape.page_size)
        end = np.minimum(self._seen[1][run], (base + g.pages) * shape.page_size)
        apart = int((np.maximum(end - lo, 0) * self._tiles[run]).sum())
        once = tiles * max(0, int(end.max() - lo.min()))
        return (apart - once) * shape.kv_bytes - cost


def _groups(common: np.ndarray, cost: _Cost) -> tuple[list[_Group], int]:
    """Disjoint runs of neighbours that together save most, and what they save.

    Runs are the intervals of the tree that `common` spans: the widest run that shares p pages, for every p.  They close
    children first, so a run, with what lies inside it as a level of its own, is weighed against that alone.
    """
    best: list[_Group] = []
    total = 0
    open_runs: list[tuple[int, int, int, list[_Group]]] = []  # pages, first, saved inside, groups inside
    changes = np.append(0, (common[1:] != common[:-1]).nonzero()[0] + 1)
    for at, pages in zip([*changes.tolist(), len(common)], [*common[changes].tolist(), 0], strict=True):
        first, saved, inside = at, 0, []
        while open_runs and open_runs[-1][0] > pages:
            depth, first, sum_inside, groups = open_runs.pop()
            group = _Group(first, at + 1, depth)
            sum_inside, groups = sum_inside + saved, groups + inside
            nested = sum([max(0, cost.saved(g, skip=depth)) for g in groups]) - cost.level
            whole = cost.saved(group) + max(0, nested)
            saved, inside = (whole, [group]) if whole > max(0, sum_inside) else (sum_inside, groups)
        if pages == 0:
            best += inside
            total += saved
        elif open_runs and open_runs[-1][0] == pages:
            _, before, sum_inside, groups = open_runs[-1]
            open_runs[-1] = (pages, before, sum_inside + saved, groups + inside)
        else:
            open_runs.append((pages, first, saved, inside))
    return best, total


def _level(shape: Shape, batch: Batch, live: np.ndarray, start: np.ndarray, groups: list[_Group]) -> Batch:
    """The groups as a level of the cascade; requests outside of them are groups without keys.  `start`: the first page
    of the level, of every live request."""
    keys, lead = np.zeros_like(live), np.ones(len(live), bool)
    for g in groups:
        lead[g.first + 1 : g.last] = False
        keys[g.first] = g.pages * shape.page_size
    indptr = np.append(batch.qo_indptr[live[lead]], batch.qo_indptr[-1])
    return Batch(indptr, start[lead], keys[lead])
