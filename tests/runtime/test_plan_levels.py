"""Cascades: every row meets every visible key of all its levels once, in order, whatever the levels look like."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_checks import causal, check_sizes, check_states, make_shape, window

from attncc.runtime.plan import (
    BEGIN,
    END,
    KEYS,
    KV_LEN,
    OFFSET,
    Q_START,
    REQUEST,
    TABLE,
    TARGETS,
    Batch,
    Plan,
    Shape,
    plan,
)
from attncc.runtime.plan_levels import NotEnoughPartialRows, plan_levels

VISIBLE = {"all": None, "causal": causal, "window": window(100), "wide window": window(3000)}


def level(indptr, kv_len) -> Batch:
    kv_len = np.asarray(kv_len, np.int64)
    pages = -(-kv_len // 16)
    return Batch(np.asarray(indptr, np.int64), pages.cumsum() - pages, kv_len)


def check_levels(shape: Shape, levels: list[Batch], p: Plan, visible=None) -> None:
    check_sizes(shape, p)
    owners = check_states(shape, p)
    inner = levels[-1].qo_indptr
    assert len(owners) == inner[-1] * shape.num_qo_heads
    for (packed, _), records in owners.items():
        r = packed // shape.group_size
        chain = [(x, int(np.searchsorted(x.qo_indptr, r, "right")) - 1) for x in levels]
        b = chain[-1][1]
        start, qo_len, kv_len = int(inner[b]), int(inner[b + 1] - inner[b]), sum(int(x.kv_len[g]) for x, g in chain)
        known = {}  # offset, keys, table of a level that has keys -> pieces
        for record in records:
            row = p.items[record].tolist()
            if row[REQUEST] >= 0:
                assert row[REQUEST] == b and row[Q_START : KV_LEN + 1] == [start, qo_len, kv_len]
            else:
                assert p.row_request is not None and p.requests is not None
                assert p.row_request[r] == b and p.requests[b].tolist() == [start, qo_len, kv_len, 0]
            known.setdefault((row[OFFSET], row[KEYS], row[TABLE]), []).append((row[BEGIN], row[END]))
        lo, hi = 0, kv_len
        if visible is not None:
            i = np.array([r - start + kv_len - qo_len])
            lo, hi = (int(x[0]) for x in visible(i, i, np.array([qo_len]), np.array([kv_len])))
        offset, expected = 0, []
        for x, g in chain:
            keys = int(x.kv_len[g])
            name = (offset, keys, int(x.kv_start[g]))
            first, last = max(lo - offset, 0), min(hi - offset, keys)
            pieces = known.get(name, [])
            if first < last:
                assert pieces[0][0] <= first and last <= pieces[-1][1]
            for (_, end), (begin, _) in pairwise(pieces):
                assert end == begin
            expected += [name] * bool(pieces)
            offset += keys
        assert list(known) == list(dict.fromkeys(expected))  # outermost first


@st.composite
def cascades(draw):
    sizes = draw(st.lists(st.sampled_from([0, 1, 1, 2, 5, 30, 100]), min_size=1, max_size=12))
    indptr = [0, *np.cumsum(sizes).tolist()]
    lens = st.sampled_from([0, 0, 1, 64, 200, 900, 5000])
    levels = [level(indptr, [draw(lens) for _ in sizes])]
    for _ in range(draw(st.integers(0, 2))):
        indptr = [0, *sorted(x for x in indptr[1:-1] if draw(st.booleans())), indptr[-1]]
        levels.insert(0, level(indptr, [draw(lens) for _ in indptr[1:]]))
    return levels


@settings(max_examples=50, deadline=None)
@given(cascades(), st.sampled_from(sorted(VISIBLE)), st.booleans(), st.sampled_from([4, 33]))
def test_every_row_meets_every_visible_key_once(levels, visible, invariant, sm_count):
    shape = make_shape(batch_invariant=invariant, sm_count=sm_count, partial_rows=1 << 15)
    check_levels(shape, levels, plan_levels(shape, levels, VISIBLE[visible]), VISIBLE[visible])


@settings(max_examples=25, deadline=None)
@given(cascades(), st.integers(0, 600))
def test_within_the_partial_rows_or_refused(levels, rows):
    shape = make_shape(partial_rows=rows, sm_count=33)
    try:
        made = plan_levels(shape, levels)
    except NotEnoughPartialRows as e:
        assert f"found {rows}" in str(e)
        return
    check_levels(shape, levels, made)


@pytest.mark.parametrize("visible", sorted(VISIBLE))
def test_one_level_is_a_plain_plan(visible):
    shape = make_shape(sm_count=33)
    batch = level([0, 1, 2, 100, 100, 400], [5000, 0, 3000, 70, 300])
    one, two = plan(shape, batch, VISIBLE[visible]), plan_levels(shape, [batch], VISIBLE[visible])
    assert one.partial_rows == two.partial_rows
    np.testing.assert_array_equal(one.header, two.header)
    np.testing.assert_array_equal(one.items, two.items)
    np.testing.assert_array_equal(one.targets[:, :3], two.targets[:, :3])


def test_a_prefix_is_read_once_through_wide_tiles():
    shape = make_shape(num_qo_heads=8)  # 4 packed rows a request
    levels = [level([0, 32], [4096]), level(range(33), [100] * 32)]
    p = plan_levels(shape, levels)
    prefix = p.items[p.items[:, OFFSET] == 0]
    assert (prefix[:, REQUEST] == -1).all() and (prefix[:, END] - prefix[:, BEGIN]).sum() == 4096
    assert (p.items[:, TARGETS] > 0).all()


def test_rows_whose_levels_have_nothing_are_written_by_the_innermost():
    shape = make_shape()
    p = plan_levels(shape, [level([0, 2, 4], [64, 0]), level([0, 1, 2, 3, 4], [0, 10, 0, 20])])
    empty = p.items[p.items[:, BEGIN] == p.items[:, END]]
    assert empty[:, REQUEST].tolist() == [2] and empty[:, TARGETS].tolist() == [0]
    assert sorted(p.targets[:, 4:5].ravel().tolist()) == [1, 2]  # request 0 has the prefix alone


def test_levels_that_do_not_nest():
    shape = make_shape()
    inner = level([0, 2, 4], [5, 5])
    with pytest.raises(ValueError, match=r"levels\[1\].qo_indptr: expected groups that lie inside .* crosses row 3"):
        plan_levels(shape, [level([0, 3, 4], [5, 5]), inner])
    with pytest.raises(ValueError, match=r"levels\[1\].qo_indptr: expected 5 rows in all as in levels\[0\], found 4"):
        plan_levels(shape, [level([0, 5], [5]), inner])
    with pytest.raises(ValueError, match="levels: expected 1 to 4, found 5"):
        plan_levels(shape, [inner] * 5)
    with pytest.raises(ValueError, match="levels: expected 1 to 4, found 0"):
        plan_levels(shape, [])


@pytest.mark.parametrize("heads", [(8, 1), (16, 2), (32, 8)])
@pytest.mark.parametrize("batch", [1, 4, 8])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_levels_that_are_all_cut_fit_their_slices(heads, batch, count):
    """Every level is cut as often as a plan without levels."""
    qo, kv = heads
    shape = make_shape(
        num_qo_heads=qo, num_kv_heads=kv, max_batch_size=batch, max_qo_rows=batch, partial_rows=1 << 20, sm_count=132
    )
    outer = [level([0, batch], [40_000])] * (count - 1)
    levels = [*outer, level(range(batch + 1), [9000] * batch)]
    check_levels(shape, levels, plan_levels(shape, levels))


def test_levels_without_groups_and_of_too_many_keys_are_refused():
    shape = make_shape(max_batch_size=4, max_qo_rows=8)
    with pytest.raises(ValueError, match=r"levels\[0\].qo_indptr: expected groups that take in the requests"):
        plan_levels(shape, [level([0], []), level([0, 0], [16])])
    with pytest.raises(ValueError, match="expected fewer than 2³¹ keys of a request in all"):
        plan_levels(shape, [level([0, 1], [1 << 30]), level([0, 1], [1 << 30])])
