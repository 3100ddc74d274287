"""Plans of cascades: requests that share keys, read once for a whole group of rows.

Every level cuts the same packed rows into groups, and the groups into tiles of its own; a row's result is the merge of
its states in all levels.  A target is therefore a range of rows inside one tile of every level and one request, and its
sources are the pieces of these tiles, outermost level first.  Levels count keys on: local key 0 of a level stands at
the position after the last key of the level before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from attncc.runtime import plan as p
from attncc.runtime.plan_pieces import Pieces, Tiles, divide


class NotEnoughPartialRows(ValueError):
    """A cascade whose partial states don't fit."""


class _Rows(NamedTuple):
    """The requests, and where every query row belongs."""

    request: np.ndarray  # [rows] of a row
    table: np.ndarray  # int64 [B, 4]: Q_START, QO_LEN, KV_LEN (keys of all levels), 0
    group: list[np.ndarray]  # by level, [B]: the group of a request (of one that has rows)
    offset: list[np.ndarray]  # by level, [B]: keys of the levels before


class _Level(NamedTuple):
    """The tiles of a level: they follow one another through all packed rows."""

    row0: np.ndarray
    rows: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    siblings: np.ndarray | None
    group: np.ndarray
    base: np.ndarray  # int32 [tiles, 16]


class _Ranges(NamedTuple):
    """Row ranges inside one tile of every level and one request, of at most MERGE_ROWS packed rows."""

    row0: np.ndarray
    rows: np.ndarray
    tile: np.ndarray  # [levels, ranges]: the tile of each level, counted through all levels


def plan_levels(shape: p.Shape, levels: Sequence[p.Batch], visible: p.Visible | None = None) -> p.Plan:
    """The plan of a cascade.  `levels`: outermost first, a group of rows in the place of a request; the groups of the
    last one are the requests.

    ValueError where levels don't nest, are more than max_levels, or go beyond the declared maxima;
    NotEnoughPartialRows where even with no tile cut the states of the levels don't fit.
    """
    _check(shape, levels)
    rows = _rows(levels)
    found = [_level(shape, level, n, rows, visible) for n, level in enumerate(levels)]
    ranges = _ranges(shape, found, rows)
    kept, tiles, base = _kept(found, ranges)
    coarser = 1
    while True:
        pieces = divide(shape, tiles, coarser)
        records, targets, sources, used = _merges(base, pieces, kept, ranges, rows, shape)
        if used <= shape.partial_rows:
            break
        if shape.batch_invariant or len(pieces.tile) == len(tiles.rows):
            raise NotEnoughPartialRows(f"partial_rows: expected at least {used}, found {shape.partial_rows}")
        coarser *= 2
    shared = bool((records[:, p.REQUEST] < 0).any())
    lookup = (rows.request.astype(np.int32), rows.table.astype(np.int32)) if shared else (None, None)
    return p.assemble(shape, tiles, pieces, records, targets, sources, used, *lookup)


def _check(shape: p.Shape, levels: Sequence[p.Batch]) -> None:
    if not 1 <= len(levels) <= shape.max_levels:
        raise ValueError(f"levels: expected 1 to {shape.max_levels}, found {len(levels)}")
    for n, level in enumerate(levels):
        p.check_maxima(shape, level.qo_indptr)
        if n and level.qo_indptr[-1] != levels[0].qo_indptr[-1]:
            raise ValueError(
                f"levels[{n}].qo_indptr: expected {levels[0].qo_indptr[-1]} rows in all as in levels[0], "
                f"found {level.qo_indptr[-1]}"
            )
        lost = ~np.isin(levels[n - 1].qo_indptr, level.qo_indptr) if n else np.zeros(1, bool)
        if lost.any():
            raise ValueError(
                f"levels[{n}].qo_indptr: expected groups that lie inside those of levels[{n - 1}], found one that "
                f"crosses row {levels[n - 1].qo_indptr[int(lost.argmax())]}"
            )


def _rows(levels: Sequence[p.Batch]) -> _Rows:
    indptr = levels[-1].qo_indptr
    start, qo_len = indptr[:-1], np.diff(indptr)
    group = [np.maximum(level.qo_indptr.searchsorted(start, "right") - 1, 0) for level in levels[:-1]]
    group = [np.minimum(g, len(level.kv_len) - 1) for g, level in zip(group, levels[:-1], strict=True)]
    group.append(np.arange(len(start)))
    keys = [level.kv_len[g] for g, level in zip(group, levels, strict=True)]
    offset = [np.zeros(len(start), np.int64)]
    for k in keys:
        offset.append(offset[-1] + k)
    table = np.stack((start, qo_len, offset.pop(), np.zeros_like(start)), axis=1)
    return _Rows(np.arange(len(start)).repeat(qo_len), table, group, offset)


def _level(shape: p.Shape, level: p.Batch, n: int, rows: _Rows, visible: p.Visible | None) -> _Level:
    of, row0, count, siblings = p.cut_rows(level.qo_indptr, shape)
    first, last = row0 // shape.group_size, (row0 + count - 1) // shape.group_size
    request = rows.request[first]
    alone = request == rows.request[last]
    keys, offset = level.kv_len[of], rows.offset[n][request]
    begin, end = np.zeros(len(of), np.int64), keys
    if visible is not None and len(of):
        lo, hi = _seen(first, last, rows, visible, offset, keys)
        begin, end = p.outward(lo - offset, hi - offset, keys, shape.tile_kv)
    base = np.zeros((len(of), p.ITEM), np.int32)
    for column, value in (
        (p.REQUEST, np.where(alone, request, -1)), (p.ROW0, row0), (p.ROWS, count), (p.KEYS, keys),
        (p.OFFSET, offset), (p.TABLE, level.kv_start[of]),
    ):  # fmt: skip
        base[:, column] = value
    base[:, p.Q_START : p.KV_LEN + 1] = np.where(alone[:, None], rows.table[request, :3], 0)
    return _Level(row0, count, begin, end, siblings, of, base)


def _seen(first, last, rows: _Rows, visible: p.Visible, offset, keys) -> tuple[np.ndarray, np.ndarray]:
    """Positions [lo, hi) of a level's keys that any row of a tile can see, tiles being rows first..last of possibly
    several requests."""
    many = rows.request[last] - rows.request[first] + 1
    tile = np.arange(len(first)).repeat(many)
    head = many.cumsum() - many
    request = rows.request[first][tile] + np.arange(len(tile)) - head[tile]
    start, qo_len, kv_len = rows.table[request, :3].T
    shift = kv_len - qo_len - start
    r0, r1 = np.maximum(first[tile], start), np.minimum(last[tile], start + qo_len - 1)
    lo, hi = visible(r0 + shift, r1 + shift, qo_len, kv_len)
    lo = offset[tile] if lo is None else np.maximum(lo, offset[tile])
    hi = (offset + keys)[tile] if hi is None else np.minimum(hi, (offset + keys)[tile])
    some = (r0 <= r1) & (lo < hi)
    far = np.iinfo(np.int64).max
    return np.minimum.reduceat(np.where(some, lo, far), head), np.maximum.reduceat(np.where(some, hi, -1), head)


def _ranges(shape: p.Shape, found: Sequence[_Level], rows: _Rows) -> _Ranges:
    total = len(rows.request) * shape.group_size
    start = np.unique(np.concatenate([level.row0 for level in found] + [rows.table[:, 0] * shape.group_size]))
    start = start[start < total]
    length = np.diff(np.append(start, total))
    parts = -(-length // p.MERGE_ROWS)
    of = np.arange(len(start)).repeat(parts)
    within = (np.arange(len(of)) - (parts.cumsum() - parts)[of]) * p.MERGE_ROWS
    row0 = start[of] + within
    before = np.cumsum([0] + [len(level.row0) for level in found])
    tile = [level.row0.searchsorted(row0, "right") - 1 + n for level, n in zip(found, before, strict=False)]
    return _Ranges(row0, np.minimum(length[of] - within, p.MERGE_ROWS), np.stack(tile))


def _kept(found: Sequence[_Level], ranges: _Ranges) -> tuple[np.ndarray, Tiles, np.ndarray]:
    """The tiles that have keys, and of the innermost those without whose rows would else have no result: (place of
    every tile among these or -1, the tiles, their part of the records)."""
    begin, end = (np.concatenate([getattr(level, name) for level in found]) for name in ("begin", "end"))
    keep = begin < end
    lost = ranges.tile[-1][~keep[ranges.tile].any(axis=0)]
    keep[lost] = True
    place = np.where(keep, keep.cumsum() - 1, -1)
    groups = np.cumsum([0] + [int(level.group[-1]) + 1 if len(level.group) else 0 for level in found])
    group = np.concatenate([level.group + n for level, n in zip(found, groups, strict=False)])
    rows = np.concatenate([level.rows for level in found])
    siblings = np.concatenate(
        [np.ones_like(level.rows) if level.siblings is None else level.siblings for level in found]
    )
    base = np.concatenate([level.base for level in found])[keep]
    keys = base[:, p.KEYS].astype(np.int64)
    return place, Tiles(rows[keep], begin[keep], end[keep], siblings[keep], keys, group[keep]), base


def _merges(
    base: np.ndarray, pieces: Pieces, kept: np.ndarray, ranges: _Ranges, rows: _Rows, shape: p.Shape
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """(records of the pieces, targets, sources, partial rows)."""
    records = base[pieces.tile]
    records[:, p.BEGIN], records[:, p.END] = pieces.begin, pieces.end
    count = np.bincount(pieces.tile, minlength=len(base))
    place = kept[ranges.tile]  # [levels, ranges]
    sources = np.where(place < 0, 0, np.append(count, 0)[place])
    partial = np.zeros(len(base) + 1, bool)  # tiles of which some row has another state; the last element: no tile
    partial[place[:, sources.sum(axis=0) > 1]] = True
    partial[-1] = False
    merged = partial[place].any(axis=0)
    place, sources = place[:, merged].T, sources[:, merged].T  # [targets, levels]
    row0, size = ranges.row0[merged], ranges.rows[merged]

    member = np.flatnonzero(partial[pieces.tile])
    item = records[member]
    length = item[:, p.ROWS].astype(np.int64)
    records[member, p.DELTA] = length.cumsum() - length - item[:, p.ROW0]
    records[member, p.TARGET0] = row0.searchsorted(item[:, p.ROW0])
    records[member, p.TARGETS] = row0.searchsorted(item[:, p.ROW0] + length) - records[member, p.TARGET0]

    first = count.cumsum() - count
    flat, many = np.where(place < 0, 0, place).ravel(), sources.ravel()
    piece = (first[flat] - (many.cumsum() - many)).repeat(many) + np.arange(int(many.sum()))
    request = rows.request[row0 // shape.group_size]
    total = sources.sum(axis=1)
    targets = np.empty((len(row0), p.TARGET), np.int32)
    targets[:, p.REQUEST], targets[:, p.T_ROW0], targets[:, p.T_ROWS] = request, row0, size
    targets[:, p.T_SOURCE0], targets[:, p.T_SOURCES] = total.cumsum() - total, total
    targets[:, p.T_Q_START :] = rows.table[request, :3]
    return records, targets, np.ascontiguousarray(records[piece, p.DELTA]), int(length.sum())
