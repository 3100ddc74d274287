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

MARGIN = 1.5  # a level must save this many times what it costs: merging also takes time that bytes don't show
LEVELS = 3  # beyond these, what a level saves is little


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
    live = np.flatnonzero(np.diff(batch.qo_indptr))
    if len(live) < 2 or shape.page_size == 0:
        return None
    start, kv_len, done = batch.kv_start.copy(), batch.kv_len.copy(), np.zeros(len(batch.kv_len), np.int64)
    seen = _seen(batch, visible)
    apart = np.zeros(len(live) - 1, bool)  # neighbours that differ in a level before
    levels: list[Batch] = []
    while len(levels) < min(LEVELS, shape.max_levels) - 1:
        common = _common(start[live], kv_len[live] // shape.page_size, kv_indices)
        common[apart] = 0
        groups = _groups(common, _Cost(shape, batch, live, done, seen))
        if not groups:
            break
        levels.append(_level(shape, batch, live, start, groups))
        apart[:] = True
        for g in groups:
            inside = live[g.first : g.last]
            start[inside] += g.pages
            kv_len[inside] -= g.pages * shape.page_size
            done[inside] += g.pages * shape.page_size
            apart[g.first : g.last - 1] = False
    return [*levels, Batch(batch.qo_indptr, start, kv_len)] if levels else None


def _seen(batch: Batch, visible: Visible | None) -> tuple[np.ndarray, np.ndarray]:
    """Positions [lo, hi) that any row of a request can see."""
    qo_len = np.diff(batch.qo_indptr)
    lo = hi = None
    if visible is not None:
        lo, hi = visible(batch.kv_len - qo_len, batch.kv_len - 1, qo_len, batch.kv_len)
    lo, hi = (0 if lo is None else lo), (batch.kv_len if hi is None else hi)
    return np.broadcast_to(lo, qo_len.shape), np.broadcast_to(hi, qo_len.shape)


def _common(start: np.ndarray, pages: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Full pages that each request has in common with the next, from its first on: [requests - 1]."""
    most = np.minimum(pages[:-1], pages[1:])
    common = np.zeros_like(most)
    alive, width = np.flatnonzero(most), 4
    while len(alive):  # in strides that grow, so that neighbours that differ at once cost little
        at = common[alive, None] + np.arange(width)
        inside = at < most[alive, None]
        one, two = (np.where(inside, x[alive, None] + at, 0) for x in (start[:-1], start[1:]))
        same = inside & (ids[one] == ids[two])
        ran = np.where(same.all(axis=1), width, same.argmin(axis=1))
        common[alive] += ran
        alive = alive[(ran == width) & (common[alive] < most[alive])]
        width = min(4 * width, 1024)
    return common


class _Cost:
    """What a shared prefix saves, in bytes of memory traffic a kv head."""

    def __init__(self, shape: Shape, batch: Batch, live: np.ndarray, done: np.ndarray, seen):
        packed = np.diff(batch.qo_indptr)[live] * shape.group_size
        self._shape = shape
        self._rows = np.append(0, packed.cumsum())
        self._tiles = -(-packed // shape.tile_q)
        self._done, self._lo, self._hi = done[live], seen[0][live], seen[1][live]

    def saved(self, g: _Group, skip: int = 0) -> float:
        """Keys read once a tile of the group instead of once a tile of each request, less what the level costs: a
        state of every row more to write and to read, in both levels, and the start of its tiles.  `skip`: pages of the
        prefix that a level outside it takes."""
        shape, run = self._shape, slice(g.first, g.last)
        base = int(self._done[g.first])
        end = np.minimum(self._hi[run], base + g.pages * shape.page_size)
        lo = np.maximum(self._lo[run], base + skip * shape.page_size)
        keys = np.maximum(end - lo, 0)
        rows = int(self._rows[g.last] - self._rows[g.first])
        tiles = -(-rows // shape.tile_q)
        once = tiles * max(0, int(end.max() - lo.min()))
        cost = 2 * 2 * rows * 4 * (shape.head_dim_vo + 1) + tiles * STARTUP * shape.tile_kv * shape.kv_bytes
        return (int((keys * self._tiles[run]).sum()) - once) * shape.kv_bytes - MARGIN * cost


def _groups(common: np.ndarray, cost: _Cost) -> list[_Group]:
    """Disjoint runs of neighbours that together save most.

    Runs are the intervals of the tree that `common` spans: the widest run that shares p pages, for every p.  They close
    children first, so a run, with what lies inside it as a level of its own, is weighed against that alone.
    """
    best: list[_Group] = []
    open_runs: list[tuple[int, int, float, list[_Group]]] = []  # pages, first, saved inside, groups inside
    for at, pages in enumerate([*common.tolist(), 0]):
        first, saved, inside = at, 0.0, []
        while open_runs and open_runs[-1][0] > pages:
            depth, first, sum_inside, groups = open_runs.pop()
            group = _Group(first, at + 1, depth)
            sum_inside, groups = sum_inside + saved, groups + inside
            whole = cost.saved(group) + sum(max(0.0, cost.saved(g, skip=depth)) for g in groups)
            saved, inside = (whole, [group]) if whole > max(0.0, sum_inside) else (sum_inside, groups)
        if pages == 0:
            best += inside
        elif open_runs and open_runs[-1][0] == pages:
            _, before, sum_inside, groups = open_runs[-1]
            open_runs[-1] = (pages, before, sum_inside + saved, groups + inside)
        else:
            open_runs.append((pages, first, saved, inside))
    return best


def _level(shape: Shape, batch: Batch, live: np.ndarray, start: np.ndarray, groups: list[_Group]) -> Batch:
    """The groups as a level of the cascade; requests outside of them are groups without keys."""
    first = np.arange(len(live))
    kv_start, keys = start[live].copy(), np.zeros(len(live), np.int64)
    lead = np.ones(len(live), bool)
    for g in groups:
        lead[g.first + 1 : g.last] = False
        keys[g.first] = g.pages * shape.page_size
    first = first[lead]
    indptr = np.append(batch.qo_indptr[live[first]], batch.qo_indptr[-1])
    return Batch(indptr, kv_start[first], keys[first])
