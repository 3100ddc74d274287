"""The plan of a batch: which piece of which tile is taken after which, as int32 records that a kernel reads.

A tile is up to tile_q packed rows (query row · group_size + head of the group) of one request; a piece is a tile's
range of keys; a record is a piece for `lanes` consecutive kv heads, a ticket one of these.  The CTAs of the one
persistent launch take tickets in order, so the next piece goes to the CTA that is idle first: the device itself is the
min-heap of algorithm 1 in arXiv 2501.01005.  What is left to plan is where tiles are cut, and in which order the
pieces stand (plan_pieces.py).

The pieces of a cut tile leave partial states, which whoever arrives last merges in the order of `sources`.  numpy only:
a plan is made on the host between two steps of a model, so its time counts (B = 128: below 200 µs).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from attncc.runtime.plan_pieces import MOST_PIECES, Pieces, Tiles, divide, most_units, tickets

ITEM, TARGET, MERGE_ROWS = 16, 8, 64
# columns of an item
REQUEST, HEAD, ROW0, ROWS, BEGIN, END, KEYS, OFFSET, TABLE, TARGET0, TARGETS, DELTA, Q_START, QO_LEN, KV_LEN = range(15)
# columns of a target, beside REQUEST; its last three are a request's Q_START, QO_LEN, KV_LEN
T_ROW0, T_ROWS, T_SOURCE0, T_SOURCES, T_Q_START = range(1, 6)
# the columns of an item that a target of its tile takes over; of its sources nothing is said there
OF_TILE = np.array([REQUEST, ROW0, ROWS, REQUEST, REQUEST, Q_START, QO_LEN, KV_LEN])
ONE = np.array(1)  # numpy takes it in half the time that an int takes
NO_TARGETS, NO_SOURCES = np.empty((0, TARGET), np.int32), np.empty(0, np.int32)

# (first and last position of a tile's rows, qo_len, kv_len) -> positions [lo, hi) that any of the rows can see, which
# may lie outside of the keys; None: an end that isn't known
Visible = Callable[
    [np.ndarray, np.ndarray, np.ndarray, np.ndarray], tuple[np.ndarray | None, np.ndarray | None]
]  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """What all plans of one object have in common.  All counts; `page_size` 0 is ragged; `kv_bytes` is the size of K
    and V of one key and kv head; `partial_rows` how many rows of partial states the workspace holds a kv head."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim_vo: int
    tile_q: int
    tile_kv: int
    page_size: int
    sm_count: int
    max_batch_size: int
    max_qo_rows: int
    partial_rows: int
    batch_invariant: bool = False
    kv_bytes: int = 512
    max_levels: int = 4

    @property
    def group_size(self) -> int:
        return self.num_qo_heads // self.num_kv_heads


class Batch(NamedTuple):
    """int64 arrays.  `kv_start`: a request's first entry in kv_indices (paged), or its first row in k, v (ragged)."""

    qo_indptr: np.ndarray  # [B + 1]
    kv_start: np.ndarray  # [B]
    kv_len: np.ndarray  # [B] keys


class Plan(NamedTuple):
    """int32 arrays in C order, ready to be copied; `partial_rows` is how many the plan uses."""

    header: np.ndarray  # [4]: tickets, lanes, rows, and how many `requests` a pre-pass may ask
    items: np.ndarray  # [n, 16]
    targets: np.ndarray  # [n, 8]
    sources: np.ndarray  # [n]
    partial_rows: int
    row_request: np.ndarray | None = None  # [rows]; with `requests` only where some item has REQUEST -1
    requests: np.ndarray | None = None  # [B, 4]; of ragged keys that go through a pre-pass, too


def capacity(shape: Shape) -> dict[str, int]:
    """Elements of every slice that a plan fills or a launch needs: no plan within the maxima takes more."""
    heads, levels, batch = shape.num_kv_heads, shape.max_levels, shape.max_batch_size
    rows = shape.max_qo_rows * shape.group_size
    tiles = levels * (batch + rows // shape.tile_q)
    cuts = min(_most_cuts(shape), shape.partial_rows)
    targets = min(tiles + batch + rows // MERGE_ROWS, shape.partial_rows)  # each has a partial row of its own,
    return {
        "header": 4,
        "items": heads * (tiles + cuts) * ITEM,
        "targets": targets * TARGET,
        "sources": shape.partial_rows,  # and so has each of its sources
        "row_request": shape.max_qo_rows,
        "requests": 4 * batch,
        "part_o": shape.partial_rows * heads * shape.head_dim_vo,
        "part_lse": shape.partial_rows * heads,
        "counters": targets * heads,
    }


def owners(qo_indptr: np.ndarray, kv_len: np.ndarray) -> dict[str, np.ndarray]:
    """row_request and requests of a batch: whose every row is, and what a request has."""
    lengths = np.diff(qo_indptr)
    table = np.stack([qo_indptr[:-1], lengths, kv_len, np.zeros_like(kv_len)], axis=1)
    return {
        "row_request": np.repeat(np.arange(len(lengths), dtype=np.int32), lengths),
        "requests": table.astype(np.int32).reshape(-1),
    }


def ample_partial_rows(shape: Shape) -> int:
    """Partial rows that cutting can ask for, whatever the batch (cascades aside); `shape.partial_rows` is not read."""
    rows = shape.max_qo_rows * shape.group_size
    if shape.batch_invariant:  # a request has at most MOST_PIECES pieces, or one a tile and then no partial rows
        return MOST_PIECES * min(rows, shape.max_batch_size * shape.tile_q)
    return 2 * (most_units(shape.sm_count, shape.num_kv_heads) - 1) * min(shape.tile_q, rows)


def _most_cuts(shape: Shape) -> int:
    """Cuts of a plan: every level is cut by itself."""
    if shape.batch_invariant:
        return shape.max_levels * shape.max_batch_size * (MOST_PIECES - 1)
    return shape.max_levels * (most_units(shape.sm_count, shape.num_kv_heads) - 1)


def plan(shape: Shape, batch: Batch, visible: Visible | None = None) -> Plan:
    """The plan of a batch of requests.  Same lengths, same plan.

    ValueError where the batch is beyond the declared maxima, or, with batch_invariant (which may not cut less), needs
    more partial rows than there are; the message has the number needed.
    """
    check_maxima(shape, batch.qo_indptr)
    tiles, base = _tiles(shape, batch, visible)
    coarser = 1
    while True:
        pieces = divide(shape, tiles, coarser)
        records, targets, sources, used = _merges(base, pieces)
        if used <= shape.partial_rows:
            return assemble(shape, tiles, pieces, records, targets, sources, used)
        if shape.batch_invariant:
            raise ValueError(f"partial_rows: expected at least {used}, found {shape.partial_rows}")
        coarser *= 2


def reads(shape: Shape, batch: Batch, visible: Visible | None = None) -> int:
    """Keys of all kv heads that the tiles of a batch read."""
    tiles, _ = _tiles(shape, batch, visible)
    return int((tiles.end - tiles.begin).sum()) * shape.num_kv_heads


def with_requests(made: Plan, batch: Batch) -> Plan:
    """The plan, with what a pre-pass over ragged keys must know: Q_START, QO_LEN, KV_LEN, first row of each request."""
    made.header[3] = len(batch.kv_len)
    columns = (batch.qo_indptr[:-1], np.diff(batch.qo_indptr), batch.kv_len, batch.kv_start)
    return made._replace(requests=np.ascontiguousarray(np.stack(columns, 1), np.int32))


def check_maxima(shape: Shape, qo_indptr: np.ndarray) -> None:
    if len(qo_indptr) - 1 > shape.max_batch_size:
        raise ValueError(
            f"qo_indptr: expected at most max_batch_size = {shape.max_batch_size} requests, found {len(qo_indptr) - 1}"
        )
    if qo_indptr[-1] > shape.max_qo_rows:
        raise ValueError(
            f"qo_indptr: expected at most max_qo_rows = {shape.max_qo_rows} query rows, found {qo_indptr[-1]}"
        )


def cut_rows(indptr: np.ndarray, shape: Shape) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
    """Row groups cut into tiles: (group, first packed row, packed rows, tiles of its group) of every tile; the last is
    None where it is 1 everywhere."""
    first = indptr * np.array(shape.group_size)
    packed = first[1:] - first[:-1]
    of = packed.nonzero()[0]
    row0, rows = first[of], packed[of]
    size = shape.tile_q
    if np.maximum.reduce(rows, initial=0) <= size:
        return of, row0, rows, None
    count = (rows + (size - 1)) // size
    group = np.arange(len(of)).repeat(count)
    within = (np.arange(len(group)) - (count.cumsum() - count)[group]) * size
    return of[group], row0[group] + within, np.minimum(rows[group] - within, size), count[group]


class _Rows(NamedTuple):
    """Tiles as far as query rows tell."""

    request: np.ndarray
    row0: np.ndarray  # packed
    rows: np.ndarray
    siblings: np.ndarray | None  # as of Tiles
    start: np.ndarray  # Q_START
    qo_len: np.ndarray


def _rows(indptr: np.ndarray, shape: Shape) -> tuple[_Rows, np.ndarray]:
    """(the tiles of these rows, their part of the records: int32 [tiles, 16])."""
    count = len(indptr) - 1
    if indptr.item(-1) == count and shape.group_size <= shape.tile_q:  # decode, as most plans are
        rows, base, known = _one_row_each(shape.group_size, count)
        if np.count_nonzero(indptr == known) > count:
            return rows, base.copy()
    of, row0, size, siblings = cut_rows(indptr, shape)
    start = indptr[of]
    rows = _Rows(of, row0, size, siblings, start, indptr[1:][of] - start)
    return rows, _of_rows(rows)


def _of_rows(rows: _Rows) -> np.ndarray:
    base = np.zeros((len(rows.request), ITEM), np.int32)
    for column, value in (
        (REQUEST, rows.request), (ROW0, rows.row0), (ROWS, rows.rows), (Q_START, rows.start), (QO_LEN, rows.qo_len),
    ):  # fmt: skip
        base[:, column] = value
    return base


@lru_cache(maxsize=64)
def _one_row_each(group_size: int, count: int) -> tuple[_Rows, np.ndarray, np.ndarray]:
    """(tiles, their part of the records, qo_indptr) of so many requests of one row each."""
    indptr, ones = np.arange(count + 1), np.ones(count, np.int64)
    of = indptr[:-1]
    rows = _Rows(of, of * group_size, ones * group_size, None, of, ones)
    known = rows, _of_rows(rows), indptr
    for x in (*rows, *known[1:]):
        if x is not None:
            x.setflags(write=False)  # every plan is made of them
    return known


def _tiles(shape: Shape, batch: Batch, visible: Visible | None) -> tuple[Tiles, np.ndarray]:
    """The tiles of a batch, and the part of their records that does not depend on cuts: int32 [tiles, 16]."""
    (of, row0, rows, siblings, start, qo_len), base = _rows(batch.qo_indptr, shape)
    kv_len, kv_start = batch.kv_len, batch.kv_start
    if siblings is not None or len(of) < len(kv_len):  # else every request is one tile
        kv_len, kv_start = kv_len[of], kv_start[of]
    lo = hi = None
    if visible is not None:
        shift = kv_len - qo_len
        if siblings is None:
            i0, i1 = shift, kv_len - ONE
        else:
            shift -= start
            i0, i1 = row0 // shape.group_size + shift, (row0 + rows - 1) // shape.group_size + shift
        lo, hi = visible(i0, i1, qo_len, kv_len)
    begin, end = outward(lo, hi, kv_len, shape.tile_kv)
    base[:, KEYS], base[:, TABLE], base[:, KV_LEN] = kv_len, kv_start, kv_len
    return Tiles(rows, begin, end, siblings, kv_len, of), base


def outward(
    lo: np.ndarray | None, hi: np.ndarray | None, keys: np.ndarray, tile_kv: int
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Visible keys [lo, hi) of so many (None: from the first, to the last) as [begin, end) in whole blocks; 0, 0 where
    there are none.  `lo` and `hi` may lie anywhere."""
    end = keys
    if hi is not None and np.count_nonzero(hi < keys):
        hi = np.minimum(hi, keys)
        end = np.minimum((np.maximum(hi, 0) + (tile_kv - 1)) // tile_kv * tile_kv, keys)
    else:
        hi = keys
    if lo is None:
        return np.zeros(len(keys), np.int64), end
    lo = np.maximum(lo, 0)
    some = lo < hi
    return lo // tile_kv * tile_kv * some, end * some


def _merges(base: np.ndarray, pieces: Pieces) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """(records of the pieces, targets, sources, partial rows); `base` itself becomes the records where none is cut."""
    if not len(pieces.onward):
        base[:, BEGIN], base[:, END] = pieces.begin, pieces.end
        return base, NO_TARGETS, NO_SOURCES, 0
    records = base.take(pieces.tile, axis=0)
    records[:, BEGIN], records[:, END] = pieces.begin, pieces.end
    onward = np.zeros(len(records) + 1, bool)
    onward[pieces.onward] = True
    member = (onward[1:] | onward[:-1]).nonzero()[0]  # the pieces of cut tiles
    cut, lead = records.take(member, axis=0), ~onward[member]
    first, mine = lead.nonzero()[0], np.add.accumulate(lead, dtype=np.int64) - ONE  # mine: the how manieth cut tile
    rows = cut[:, ROWS]
    total = np.add.accumulate(rows, dtype=np.int64)
    cut[:, DELTA] = total - rows - cut[:, ROW0]
    tile, count = cut.take(first, axis=0), np.bincount(mine)
    if np.maximum.reduce(rows) <= MERGE_ROWS:
        cut[:, TARGET0], cut[:, TARGETS] = mine, 1
        targets = tile.take(OF_TILE, axis=1)
        targets[:, T_SOURCE0], targets[:, T_SOURCES] = first, count
    else:  # the halves of a tile share their sources
        parts = (tile[:, ROWS] + (MERGE_ROWS - 1)) // MERGE_ROWS
        target0 = parts.cumsum() - parts
        cut[:, TARGET0], cut[:, TARGETS] = target0[mine], parts[mine]
        of = np.arange(len(parts)).repeat(parts)
        within = (np.arange(len(of)) - target0[of]) * MERGE_ROWS
        targets = tile[of].take(OF_TILE, axis=1)
        targets[:, T_ROW0] += within
        targets[:, T_ROWS] = np.minimum(targets[:, T_ROWS] - within, MERGE_ROWS)
        targets[:, T_SOURCE0], targets[:, T_SOURCES] = first[of], count[of]
    records[member] = cut
    return records, targets, cut[:, DELTA].copy(), total.item(-1)


def assemble(
    shape: Shape, tiles: Tiles, pieces: Pieces, records: np.ndarray, targets: np.ndarray, sources: np.ndarray,
    partial_rows: int, row_request: np.ndarray | None = None, requests: np.ndarray | None = None,
) -> Plan:  # fmt: skip
    """The plan whose pieces have `records`, put in order and repeated for every section of heads."""
    order, head, lanes = tickets(shape, tiles, pieces)
    items = records.take(order, axis=0)
    if head is not None:
        items[:, HEAD] = head
    header = np.array([len(items) * lanes, lanes, 0, 0], np.int32)
    return Plan(header, items, targets, sources, partial_rows, row_request, requests)
