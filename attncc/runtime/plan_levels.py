"""Plans of cascades: requests that share keys, read once for a whole group of rows.

Every level cuts the same packed rows into groups, and the groups into tiles of its own; a row's result is the merge of
its states in all levels.  A target is therefore a range of rows inside one tile of every level and one request, and its
sources are the pieces of these tiles, outermost level first.  Levels count keys on: local key 0 of a level stands at
the position after the last key of the level before.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from attncc.runtime import plan as p
from attncc.runtime.plan_pieces import Pieces, Tiles, cost, divide


class NotEnoughPartialRows(ValueError):
    """A cascade whose partial states don't fit."""


class _Rows(NamedTuple):
    """The requests, and where every query row belongs."""

    request: np.ndarray  # [rows] of a row
    table: np.ndarray  # int64 [B, 4]: Q_START, QO_LEN, KV_LEN (keys of all levels), 0
    offset: np.ndarray  # [levels, B]: keys of the levels before


class _Tiles(NamedTuple):
    """The tiles of all levels, outermost first; those of a level follow one another through all packed rows."""

    first: list[int]  # by level, and the end of the last
    row0: np.ndarray
    rows: np.ndarray
    siblings: np.ndarray | None
    group: np.ndarray  # counted through all levels
    keys: np.ndarray
    offset: np.ndarray
    base: np.ndarray  # int32 [tiles, 16]


class _Ranges(NamedTuple):
    """Row ranges inside one tile of every level and one request, of at most MERGE_ROWS packed rows."""

    row0: np.ndarray
    rows: np.ndarray
    request: np.ndarray
    tile: np.ndarray  # [levels, ranges]: the tile of each level, counted through all levels


def plan_levels(shape: p.Shape, levels: Sequence[p.Batch], visible: p.Visible | None = None) -> p.Plan:
    """The plan of a cascade.  `levels`: outermost first, a group of rows in the place of a request; the groups of the
    last one are the requests.

    ValueError where levels don't nest, are more than max_levels, or go beyond the declared maxima;
    NotEnoughPartialRows where even with no tile cut the states of the levels don't fit.
    """
    _check(shape, levels)
    rows = _rows(levels)
    found = _tiles(shape, levels, rows)
    ranges = _ranges(shape, found, rows)
    kept, tiles, base = _kept(found, ranges, *_ends(shape, found, ranges, rows, visible))
    level = [int(np.count_nonzero(kept[:n] >= 0)) for n in found.first]
    coarser = 1
    while True:
        pieces = _divide(shape, tiles, level, coarser)
        records, targets, sources, used = _merges(base, pieces, kept, ranges, rows)
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
        if len(levels[-1].kv_len) and not len(level.kv_len):
            raise ValueError(f"levels[{n}].qo_indptr: expected groups that take in the requests, found none")
        if n and level.qo_indptr[-1] != levels[0].qo_indptr[-1]:
            raise ValueError(
                f"levels[{n}].qo_indptr: expected {levels[0].qo_indptr[-1]} rows in all as in levels[0], "
                f"found {level.qo_indptr[-1]}"
            )
        if n:
            outer = levels[n - 1].qo_indptr
            lost = level.qo_indptr.take(level.qo_indptr.searchsorted(outer), mode="clip") != outer
            if np.count_nonzero(lost):
                raise ValueError(
                    f"levels[{n}].qo_indptr: expected groups that lie inside those of levels[{n - 1}], found one that "
                    f"crosses row {outer[int(lost.argmax())]}"
                )


def _rows(levels: Sequence[p.Batch]) -> _Rows:
    indptr = levels[-1].qo_indptr
    start, qo_len = indptr[:-1], indptr[1:] - indptr[:-1]
    offset = np.zeros((len(levels) + 1, len(start)), np.int64)
    for n, level in enumerate(levels[:-1]):
        # of a request without rows, which may stand at the end, some group
        group = level.qo_indptr[1:-1].searchsorted(start, "right")
        np.add(offset[n], level.kv_len[group], out=offset[n + 1])
    np.add(offset[-2], levels[-1].kv_len, out=offset[-1])
    if offset[-1].max(initial=0) > np.iinfo(np.int32).max:
        raise ValueError(f"levels: expected fewer than 2³¹ keys of a request in all, found {offset[-1].max()}")
    table = np.stack((start, qo_len, offset[-1], np.zeros_like(start)), axis=1)
    return _Rows(np.arange(len(start)).repeat(qo_len), table, offset[:-1])


def _tiles(shape: p.Shape, levels: Sequence[p.Batch], rows: _Rows) -> _Tiles:
    of, row0s, counts, siblings = zip(*[p.cut_rows(level.qo_indptr, shape) for level in levels], strict=True)
    row0, count = np.concatenate(row0s), np.concatenate(counts)
    first = [0, *accumulate(map(len, of))]
    groups = accumulate([len(level.kv_len) for level in levels], initial=0)
    group = np.concatenate([tiles + n for tiles, n in zip(of, groups, strict=False)])
    request = rows.request[row0 // shape.group_size]
    alone = request == rows.request[(row0 + count - 1) // shape.group_size]
    keys = np.concatenate([level.kv_len for level in levels])[group]
    table = np.concatenate([level.kv_start for level in levels])[group]
    offset = rows.offset[np.arange(len(levels)).repeat([len(tiles) for tiles in of]), request]
    base = np.zeros((len(row0), p.ITEM), np.int32)
    for column, value in (
        (p.REQUEST, np.where(alone, request, -1)), (p.ROW0, row0), (p.ROWS, count), (p.KEYS, keys),
        (p.OFFSET, offset), (p.TABLE, table),
    ):  # fmt: skip
        base[:, column] = value
    np.multiply(rows.table.take(request, axis=0), alone[:, None], out=base[:, p.Q_START :], casting="same_kind")
    if all(x is None for x in siblings):
        together = None
    else:
        together = np.concatenate([np.ones_like(r) if x is None else x for x, r in zip(siblings, counts, strict=True)])
    return _Tiles(first, row0, count, together, group, keys, offset, base)


def _ranges(shape: p.Shape, found: _Tiles, rows: _Rows) -> _Ranges:
    row0 = np.sort(found.row0)  # with the first row of every request: tiles of the last level have one each
    if len(row0):
        row0 = row0[np.append(True, row0[1:] != row0[:-1])]
    size = np.append(row0[1:], len(rows.request) * shape.group_size) - row0
    if size.max(initial=0) > p.MERGE_ROWS:
        parts = -(-size // p.MERGE_ROWS)
        of = np.arange(len(row0)).repeat(parts)
        within = (np.arange(len(of)) - (parts.cumsum() - parts)[of]) * p.MERGE_ROWS
        row0, size = row0[of] + within, np.minimum(size[of] - within, p.MERGE_ROWS)
    tile = np.stack([found.row0[i:j].searchsorted(row0, "right") + (i - 1) for i, j in pairwise(found.first)])
    return _Ranges(row0, size, rows.request[row0 // shape.group_size], tile)


def _ends(
    shape: p.Shape, found: _Tiles, ranges: _Ranges, rows: _Rows, visible: p.Visible | None
) -> tuple[np.ndarray, np.ndarray]:
    """Keys [begin, end) of every tile that any of its rows can see: what its ranges see, together."""
    lo = hi = None
    if visible is not None and len(found.row0):
        start, qo_len, kv_len, _ = rows.table.take(ranges.request, axis=0).T
        shift = kv_len - qo_len - start
        last = (ranges.row0 + ranges.rows - 1) // shape.group_size
        lo, hi = visible(ranges.row0 // shape.group_size + shift, last + shift, qo_len, kv_len)
        if lo is not None:
            lo = np.maximum(lo, found.offset[ranges.tile])
        if hi is not None:
            hi = np.minimum(hi, (found.offset + found.keys)[ranges.tile])
        if lo is not None and hi is not None:  # a range that sees nothing widens nothing
            some = lo < hi
            lo, hi = np.where(some, lo, np.iinfo(np.int64).max), np.where(some, hi, -1)
        tile = ranges.tile.ravel()  # ascending
        head = np.append(0, (tile[1:] != tile[:-1]).nonzero()[0] + 1)
        lo = None if lo is None else np.minimum.reduceat(lo.ravel(), head) - found.offset
        hi = None if hi is None else np.maximum.reduceat(hi.ravel(), head) - found.offset
    return p.outward(lo, hi, found.keys, shape.tile_kv)


def _kept(found: _Tiles, ranges: _Ranges, begin: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, Tiles, np.ndarray]:
    """The tiles that have keys, and of the innermost those without whose rows would else have no result: (place of
    every tile among these or -1, the tiles, their part of the records)."""
    keep = begin < end
    some = keep[ranges.tile].any(axis=0)
    keep[ranges.tile[-1, ~some]] = True
    place = np.where(keep, keep.cumsum() - 1, -1)
    siblings = None if found.siblings is None else found.siblings[keep]
    tiles = Tiles(found.rows[keep], begin[keep], end[keep], siblings, found.keys[keep], found.group[keep])
    return place, tiles, found.base[keep]


def _divide(shape: p.Shape, tiles: Tiles, level: Sequence[int], coarser: int) -> Pieces:
    """Every level cut by itself, and outer levels taken first.

    Rows are merged by whoever ends last.  A shared tile ends for many requests at once: its CTA would merge them one
    after another (2 µs each), while those that end the requests' own keys do so side by side.
    """
    parts = [_between(tiles, i, j) for i, j in pairwise(level)]
    works = [max(1, int(cost(part.begin, part.end, shape.tile_kv).sum())) for part in parts]
    done = np.append(0, np.cumsum(works)) / sum(works)
    found = [divide(shape, part, coarser) for part in parts]
    count = accumulate([len(pieces.tile) for pieces in found], initial=0)
    whole = [np.zeros(len(x.tile), bool) if x.whole is None else x.whole for x in found]
    return Pieces(
        np.concatenate([pieces.tile + n for pieces, n in zip(found, level, strict=False)]),
        np.concatenate([pieces.begin for pieces in found]),
        np.concatenate([pieces.end for pieces in found]),
        np.concatenate([x.start * (b - a) + a for x, (a, b) in zip(found, pairwise(done), strict=True)]),
        np.concatenate(whole) if any(x.whole is not None for x in found) else None,
        np.concatenate([pieces.onward + n for pieces, n in zip(found, count, strict=False)]),
    )


def _between(tiles: Tiles, i: int, j: int) -> Tiles:
    siblings = None if tiles.siblings is None else tiles.siblings[i:j]
    return Tiles(tiles.rows[i:j], tiles.begin[i:j], tiles.end[i:j], siblings, tiles.keys[i:j], tiles.request[i:j])


def _merges(
    base: np.ndarray, pieces: Pieces, kept: np.ndarray, ranges: _Ranges, rows: _Rows
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """(records of the pieces, targets, sources, partial rows)."""
    records = base.take(pieces.tile, axis=0)
    records[:, p.BEGIN], records[:, p.END] = pieces.begin, pieces.end
    count = np.bincount(pieces.tile, minlength=len(base) + 1)  # pieces of a tile; the last element: no tile
    place = kept[ranges.tile]  # [levels, ranges]
    sources = count[place]
    partial = np.zeros(len(count), bool)  # tiles of which some row has another state
    partial[place[:, sources.sum(axis=0) > 1]] = True
    partial[-1] = False
    merged = partial[place].any(axis=0).nonzero()[0]
    place, sources = place.T.take(merged, axis=0), sources.T.take(merged, axis=0)  # [targets, levels]
    row0, size, request = ranges.row0[merged], ranges.rows[merged], ranges.request[merged]

    member = partial[pieces.tile].nonzero()[0]
    begun, length = records[member, p.ROW0].astype(np.int64), records[member, p.ROWS].astype(np.int64)
    records[member, p.DELTA] = length.cumsum() - length - begun
    target0 = row0.searchsorted(begun)
    records[member, p.TARGET0] = target0
    records[member, p.TARGETS] = row0.searchsorted(begun + length) - target0

    first = count.cumsum() - count  # piece of a tile
    flat, many = place.ravel(), sources.ravel()
    piece = (first[flat] - (many.cumsum() - many)).repeat(many) + np.arange(int(many.sum()))
    total = sources.sum(axis=1)
    targets = np.empty((len(row0), p.TARGET), np.int32)
    targets[:, p.REQUEST], targets[:, p.T_ROW0], targets[:, p.T_ROWS] = request, row0, size
    targets[:, p.T_SOURCE0], targets[:, p.T_SOURCES] = total.cumsum() - total, total
    targets[:, p.T_Q_START :] = rows.table.take(request, axis=0)[:, :3]
    return records, targets, np.ascontiguousarray(records[piece, p.DELTA]), int(length.sum())
