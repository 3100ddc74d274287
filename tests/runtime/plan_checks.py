"""What must hold of any plan, checked record by record in plain Python; and what CTAs would make of it."""

from __future__ import annotations

import heapq
from collections import defaultdict
from itertools import pairwise

import numpy as np

from attncc.runtime.plan import (
    BEGIN,
    DELTA,
    END,
    HEAD,
    KEYS,
    OFFSET,
    Q_START,
    REQUEST,
    ROW0,
    ROWS,
    TABLE,
    TARGET0,
    TARGETS,
    Batch,
    Plan,
    Shape,
    capacity,
)


def make_shape(**changes) -> Shape:
    usual = dict(
        num_qo_heads=4, num_kv_heads=2, head_dim_vo=64, tile_q=128, tile_kv=64, page_size=16, sm_count=8,
        max_batch_size=64, max_qo_rows=4096, partial_rows=4096, kv_bytes=256,
    )  # fmt: skip
    return Shape(**{**usual, **changes})


def make_batch(qo_len, kv_len, page_size: int = 16) -> Batch:
    qo_len, kv_len = np.asarray(qo_len, np.int64), np.asarray(kv_len, np.int64)
    pages = -(-kv_len // page_size)
    return Batch(np.append(0, qo_len.cumsum()), pages.cumsum() - pages, kv_len)


def causal(i0, i1, qo_len, kv_len):
    return np.zeros_like(i0), i1 + 1


def window(size: int):
    return lambda i0, i1, qo_len, kv_len: (i0 - size + 1, i1 + 1)


def tickets_of(p: Plan) -> list[tuple[int, int]]:
    """(record, kv head) of every ticket."""
    count, lanes = p.header[:2].tolist()
    return [(t // lanes, int(p.items[t // lanes, HEAD]) + t % lanes) for t in range(count)]


def check_sizes(shape: Shape, p: Plan) -> None:
    most = capacity(shape)
    assert p.items.size <= most["items"] and p.targets.size <= most["targets"] and p.sources.size <= most["sources"]
    assert p.partial_rows <= shape.partial_rows
    assert p.header[0] == len(p.items) * p.header[1]
    for array in (p.header, p.items, p.targets, p.sources):
        assert array.dtype == np.int32 and array.flags.c_contiguous


def check_states(shape: Shape, p: Plan) -> dict[tuple[int, int], list[int]]:
    """Who owes which result.  Returns the records that make up each (packed row, kv head), in the order of merging."""
    owners: dict[tuple[int, int], list[int]] = defaultdict(list)
    slots: dict[tuple[int, int], int] = {}  # (partial row, kv head) -> record
    at: dict[tuple[int, int, int], int] = {}  # (delta, packed row, kv head) -> record
    for record, head in tickets_of(p):
        row = p.items[record].tolist()
        assert 0 <= head < shape.num_kv_heads and 1 <= row[ROWS] <= shape.tile_q
        for packed in range(row[ROW0], row[ROW0] + row[ROWS]):
            if row[TARGETS] == 0:
                assert (packed, head) not in owners
                owners[packed, head].append(record)
            else:
                slot = row[DELTA] + packed
                assert 0 <= slot < p.partial_rows and (slot, head) not in slots
                slots[slot, head] = record
                at[row[DELTA], packed, head] = record
    assert len({s for s, _ in slots}) == p.partial_rows
    arrivals = np.zeros((len(p.targets), shape.num_kv_heads), int)
    for record, head in tickets_of(p):
        first, count = p.items[record, [TARGET0, TARGETS]].tolist()
        arrivals[first : first + count, head] += 1
        covered = [x for t in p.targets[first : first + count].tolist() for x in range(t[1], t[1] + t[2])]
        row0, rows = p.items[record, [ROW0, ROWS]].tolist()
        assert count == 0 or covered == list(range(row0, row0 + rows))
    for number, (_, row0, rows, source0, sources, *_) in enumerate(p.targets.tolist()):
        heads = np.flatnonzero(arrivals[number]).tolist()  # all, where these see the same keys
        assert 1 <= rows <= 64 and heads and (arrivals[number, heads] == sources).all()
        assert source0 + sources <= len(p.sources)
        for head in heads:
            for packed in range(row0, row0 + rows):
                assert (packed, head) not in owners
                deltas = p.sources[source0 : source0 + sources].tolist()
                owners[packed, head] = [at[delta, packed, head] for delta in deltas]
    return owners


def check(shape: Shape, batch: Batch, p: Plan, visible=None) -> None:
    """Every (row, kv head, visible key) exactly once, and no key outside whole blocks of what the tile can see."""
    check_sizes(shape, p)
    owners = check_states(shape, p)
    group = shape.group_size
    assert len(owners) == batch.qo_indptr[-1] * group * shape.num_kv_heads
    qo_len = np.diff(batch.qo_indptr)
    for (packed, _), records in owners.items():
        r = packed // group
        b = int(np.searchsorted(batch.qo_indptr, r, "right")) - 1
        start, keys = int(batch.qo_indptr[b]), int(batch.kv_len[b])
        ends = []
        for record in records:
            row = p.items[record].tolist()
            assert row[REQUEST] == b and row[KEYS] == keys and row[OFFSET] == 0 and row[TABLE] == batch.kv_start[b]
            assert row[Q_START : Q_START + 3] == [start, qo_len[b], keys]
            assert row[BEGIN] % shape.tile_kv == 0 and (row[END] % shape.tile_kv == 0 or row[END] == keys)
            assert 0 <= row[BEGIN] <= row[END] <= keys
            ends.append((row[BEGIN], row[END]))
        assert all(a[1] == b[0] for a, b in pairwise(ends))  # ascending, nothing twice
        lo, hi = 0, keys
        if visible is not None:
            i = np.array([r - start + keys - qo_len[b]])
            lo, hi = (int(np.clip(x[0], 0, keys)) for x in visible(i, i, qo_len[b : b + 1], batch.kv_len[b : b + 1]))
        assert lo >= hi or (ends[0][0] <= lo and hi <= ends[-1][1])


def record_costs(shape: Shape, p: Plan) -> np.ndarray:
    """Keys of every record, in blocks, without the cost of starting."""
    return -(-(p.items[:, END] - p.items[:, BEGIN]).astype(np.int64) // shape.tile_kv)


def deal(costs, workers: int) -> float:
    """When the last of `workers` ends that take the costs in order, each when it is idle: what the device does."""
    idle = [0.0] * workers
    for c in costs:
        heapq.heapreplace(idle, idle[0] + float(c))
    return max(idle)


def makespan(shape: Shape, p: Plan, startup: int = 0) -> float:
    return deal((record_costs(shape, p) + startup).repeat(int(p.header[1])), shape.sm_count)
