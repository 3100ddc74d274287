"""Shared prefixes: found where page lists start alike, taken where they pay, and what is read stays the same."""

from __future__ import annotations

import itertools
import timeit
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_checks import causal, check_states, make_shape, window

from attncc.runtime import prefix
from attncc.runtime.plan import BEGIN, END, OFFSET, TABLE, Batch, Plan, Shape
from attncc.runtime.plan_levels import plan_levels

PAGE = 16
# keys of so many bytes that short prefixes pay
SHAPE = make_shape(num_qo_heads=8, partial_rows=1 << 14, sm_count=33, kv_bytes=1 << 12)


def paged(lists, last, qo_len=None) -> tuple[Batch, np.ndarray]:
    """Requests by their page lists and the keys in the last page of each."""
    pages = np.array([len(x) for x in lists], np.int64)
    kv_len = np.maximum(0, (pages - 1) * PAGE + np.asarray(last, np.int64) * (pages > 0))
    qo = np.append(0, np.cumsum([1] * len(lists) if qo_len is None else qo_len)).astype(np.int64)
    return Batch(qo, pages.cumsum() - pages, kv_len), np.array(list(itertools.chain(*lists)), np.int64)


def shared(*runs: tuple[int, int, int]) -> tuple[Batch, np.ndarray]:
    """Runs of (requests, pages they share, own pages), all pages full."""
    fresh = itertools.count()
    lists = []
    for requests, common, own in runs:
        head = [next(fresh) for _ in range(common)]
        lists += [head + [next(fresh) for _ in range(own)] for _ in range(requests)]
    return paged(lists, [PAGE] * len(lists))


def reads(shape: Shape, p: Plan, ids: np.ndarray) -> dict[int, np.ndarray]:
    """Query row -> (position, page id, slot) of every key that it meets, in order; [keys, 3]."""
    result = {}
    for (packed, head), records in check_states(shape, p).items():
        if packed % shape.group_size == 0 and head == 0:
            local = [np.arange(p.items[n, BEGIN], p.items[n, END]) for n in records]
            keys = [(x + p.items[n, OFFSET], ids[p.items[n, TABLE] + x // PAGE], x % PAGE)
                    for n, x in zip(records, local, strict=True)]  # fmt: skip
            result[packed // shape.group_size] = np.concatenate([np.stack(x, axis=1) for x in keys])
    return result


def traffic(p: Plan) -> int:
    return int((p.items[:, END] - p.items[:, BEGIN]).sum())


@st.composite
def batches(draw):
    """Lists that fork off one another at random, so that prefixes nest."""
    fresh = itertools.count(100)
    lists: list[list[int]] = [[]]
    for _ in range(draw(st.integers(1, 10))):
        keep = draw(st.integers(0, len(lists[-1])))
        lists.append(lists[-1][:keep] + [next(fresh) for _ in range(draw(st.integers(0, 30)))])
    count = len(lists)
    last = draw(st.lists(st.integers(1, PAGE), min_size=count, max_size=count))
    qo_len = draw(st.lists(st.sampled_from([0, 1, 1, 3, 20]), min_size=count, max_size=count))
    return paged(lists, last, qo_len)


@settings(max_examples=50, deadline=None)
@given(batches(), st.booleans())
def test_every_row_meets_the_keys_of_its_own_list(given_batch, free):
    batch, ids = given_batch
    p = prefix.auto(replace(SHAPE, kv_bytes=1 << 40) if free else SHAPE, batch, ids)  # where reading is all, all pay
    for row, keys in reads(SHAPE, p, ids).items():
        b = int(np.searchsorted(batch.qo_indptr, row, "right")) - 1
        j = np.arange(int(batch.kv_len[b]))
        np.testing.assert_array_equal(keys, np.stack((j, ids[batch.kv_start[b] + j // PAGE], j % PAGE), axis=1))


def test_a_long_prefix_is_split_off():
    batch, ids = shared((32, 256, 4))
    levels = prefix.find_shared(SHAPE, batch, ids)
    assert levels is not None and len(levels) == 2
    assert levels[0].qo_indptr.tolist() == [0, 32] and levels[0].kv_len.tolist() == [4096]
    assert (levels[1].kv_len == 64).all() and (levels[1].kv_start == batch.kv_start + 256).all()
    assert traffic(prefix.auto(SHAPE, batch, ids)) == 4096 + 32 * 64


def test_runs_apart_and_requests_alone():
    batch, ids = shared((8, 128, 4), (1, 40, 0), (8, 256, 0))
    levels = prefix.find_shared(SHAPE, batch, ids)
    assert levels is not None
    assert levels[0].qo_indptr.tolist() == [0, 8, 9, 17] and levels[0].kv_len.tolist() == [2048, 0, 4096]
    assert levels[1].kv_len.tolist() == [64] * 8 + [640] + [0] * 8


def test_prefixes_nest():
    head, tails = list(range(512)), [list(range(1000 * n, 1000 * n + 256)) for n in (1, 2)]
    lists = [head + tails[n // 16] + [5000 + n] for n in range(32)]
    batch, ids = paged(lists, [3] * 32)
    shape = replace(SHAPE, kv_bytes=1 << 14)
    levels = prefix.find_shared(shape, batch, ids)
    assert levels is not None and [x.kv_len.tolist() for x in levels[:2]] == [[8192], [4096, 4096]]
    assert levels[1].qo_indptr.tolist() == [0, 16, 32] and (levels[2].kv_len == 3).all()
    assert traffic(plan_levels(shape, levels)) == 8192 + 2 * 4096 + 32 * 3

    levels = prefix.find_shared(SHAPE, batch, ids)  # reading the head once instead of twice is worth no level
    assert levels is not None and [x.kv_len.tolist() for x in levels] == [[12288, 12288], [3] * 32]


@pytest.mark.parametrize(
    "given_batch",
    [shared((1, 100, 0)), shared((2, 1, 100)), shared((32, 0, 50)), paged([[]] * 4, [1] * 4), shared()],
    ids=["alone", "one page", "nothing in common", "no keys", "no requests"],
)
def test_what_does_not_pay_is_left(given_batch):
    batch, ids = given_batch
    assert prefix.find_shared(SHAPE, batch, ids) is None


def test_prefill_reads_a_prefix_through_full_tiles_anyway():
    batch, ids = shared((4, 64, 64))
    batch = batch._replace(qo_indptr=np.arange(5) * 1024)
    assert prefix.find_shared(replace(SHAPE, max_qo_rows=1 << 13), batch, ids) is None


def test_pages_that_are_not_full_are_not_shared():
    batch, ids = paged([list(range(200))] * 16, [16] * 8 + [5] * 8)
    levels = prefix.find_shared(SHAPE, batch, ids)
    assert levels is not None and levels[0].kv_len[0] <= 199 * PAGE
    assert levels[1].kv_len[-1] == 5


def test_a_window_that_hides_the_prefix():
    batch, ids = shared((32, 256, 40))
    assert prefix.find_shared(SHAPE, batch, ids, window(500)) is None
    assert prefix.find_shared(SHAPE, batch, ids, causal) is not None


def test_nothing_is_shared_with_batch_invariant():
    batch, ids = shared((32, 256, 4))
    p = prefix.auto(replace(SHAPE, batch_invariant=True), batch, ids)
    assert traffic(p) == 32 * 260 * PAGE


def test_no_room_for_states():
    batch, ids = shared((32, 256, 4))
    assert traffic(prefix.auto(replace(SHAPE, partial_rows=50), batch, ids)) == 32 * 260 * PAGE


def test_a_long_chain_of_ever_shorter_prefixes():
    lists = [[*range(2000 - n), 10_000 + n] for n in range(1200)]
    batch, ids = paged(lists, [PAGE] * 1200)
    shape = replace(SHAPE, max_batch_size=2048, partial_rows=1 << 15)
    levels = prefix.find_shared(shape, batch, ids)
    assert levels is not None and levels[0].kv_len.sum() > 0


@pytest.mark.parametrize(
    ("requests", "common", "own", "pays"),
    [(64, 8192, 256, True), (128, 2048, 512, True), (16, 32768, 512, True), (32, 1024, 1024, False),
     (32, 256, 1024, False)],
)  # fmt: skip
def test_levels_are_chosen_where_they_were_measured_to_pay(requests, common, own, pays):
    shape = Shape(32, 8, 128, 128, 128, PAGE, sm_count=132, max_batch_size=128, max_qo_rows=128, partial_rows=1 << 13)
    batch, ids = shared((requests, common // PAGE, own // PAGE))
    for visible in (None, causal):
        assert (prefix.find_shared(shape, batch, ids, visible) is not None) == pays
        assert (traffic(prefix.auto(shape, batch, ids, visible)) < requests * (common + own)) == pays


def test_what_a_window_hides_of_a_prefix_saves_nothing():
    batch, ids = shared((32, 256, 4))
    assert prefix.find_shared(SHAPE, batch, ids, window(4160)) is not None
    assert prefix.find_shared(SHAPE, batch, ids, window(400)) is None


def common(batch: Batch, ids: np.ndarray) -> list[int]:
    pages = batch.kv_len // PAGE
    most = np.minimum(pages[:-1], pages[1:])
    lists = [ids[s : s + n].tolist() for s, n in zip(batch.kv_start.tolist(), pages.tolist(), strict=True)]
    alike = [n for n, (a, b) in enumerate(pairwise(lists)) if a and b and a[0] == b[0]]
    return prefix._common(batch.kv_start, most, np.array(alike, np.int64), ids).tolist() if alike else [0] * len(most)


@settings(max_examples=50, deadline=None)
@given(batches(), st.integers(1, 100))
def test_pages_in_common(given_batch, compared):
    batch, ids = given_batch
    lists = [ids[s : s + n // PAGE].tolist() for s, n in zip(batch.kv_start, batch.kv_len, strict=True)]
    kept = prefix.COMPARED
    prefix.COMPARED = compared
    try:
        found = common(batch, ids)
    finally:
        prefix.COMPARED = kept
    assert found == [sum(itertools.takewhile(bool, map(int.__eq__, a, b))) for a, b in pairwise(lists)]


@pytest.mark.parametrize("pages", [1, 63, 64, 65, 511, 577, 40000])
@pytest.mark.parametrize("own", [0, 1, 70])
def test_long_lists_in_common(pages, own):
    batch, ids = shared((5, pages, own), (1, 3, 0), (2, 2 * pages, 0))
    for given_ids in (ids, ids.astype(np.int32), np.repeat(ids, 2)[::2]):
        assert common(batch, given_ids) == [pages] * 4 + [0, 0, 2 * pages]


def test_searching_takes_little():
    batch, ids = shared((128, 0, 512))
    assert min(timeit.repeat(lambda: prefix.find_shared(SHAPE, batch, ids), number=10, repeat=10)) / 10 < 1e-4
    batch, ids = shared((64, 512, 16))
    assert min(timeit.repeat(lambda: prefix.find_shared(SHAPE, batch, ids), number=10, repeat=10)) / 10 < 1e-3
