"""Tile ranges against every rectangle of a mask written out cell by cell: sound always, exact for known masks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from mask_tiles import HUGE, SIZES, check, dense, variant

from attncc import frontend
from attncc.diagnostics import Source
from attncc.ir.nodes import I32, Const, Leaf, Param, make, objects
from attncc.ir.ranges import tile_ranges
from attncc.ir.ranges_eval import EMPTY, FULL, PARTIAL, evaluate, tile_map


@dataclass(frozen=True)
class Known:
    """A mask by its formula and by numpy: of i, j and the scalars by name."""

    mask: str
    formula: Callable[..., Any]
    scalars: str = ""
    values: tuple[dict[str, int], ...] = ({},)
    contiguous: bool = False
    runs: bool = False  # lo and hi, clear_lo and clear_hi say it all


def each(name: str, *values: int) -> tuple[dict[str, int], ...]:
    return tuple({name: x} for x in values)


def window(i, j, w):
    return (i - w < j) & (j <= i)


WINDOWS = (-1, 0, 1, 2, 3, 5, 8, 20)
PAIRS = tuple({"m": x, "n": y} for x in (-1, 0, 1, 2, 4, 30) for y in (-2, 0, 1, 3, 30))
CHUNKS = (1, 2, 3, 4, 7, 100)
KNOWN = {
    "causal": Known("j <= i", lambda i, j: j <= i, contiguous=True, runs=True),
    "strictly causal": Known("j < i", lambda i, j: j < i, contiguous=True, runs=True),
    "all": Known("true", lambda i, j: j >= 0, contiguous=True, runs=True),
    "none": Known("j < 0", lambda i, j: j < 0, contiguous=True, runs=True),
    "window": Known("i - w < j <= i", window, "w: i32", each("w", *WINDOWS), True, True),
    "window by distance": Known("0 <= i - j < w", window, "w: i32", each("w", *WINDOWS), True, True),
    "window from j": Known("j <= i and j + w > i", window, "w: i32", each("w", *WINDOWS), False, True),
    "window of 3": Known("i - 3 < j <= i", lambda i, j: window(i, j, 3), contiguous=True, runs=True),
    "window of rows": Known("iq - 2 < j <= i", None, contiguous=True, runs=True),
    "two-sided window": Known(
        "i - m <= j <= i + n", lambda i, j, m, n: (i - m <= j) & (j <= i + n), "m: i32, n: i32", PAIRS, True, True),
    "band": Known("abs(i - j) <= w", lambda i, j, w: abs(i - j) <= w, "w: i32", each("w", *WINDOWS), True, True),
    "sink and window": Known(
        "j <= i and (j < m or i - n < j)", lambda i, j, m, n: (j <= i) & ((j < m) | (i - n < j)),
        "m: i32, n: i32", PAIRS),
    "chunks": Known("i // c == j // c", lambda i, j, c: i // c == j // c, "c: i32", each("c", *CHUNKS), False, True),
    "causal chunks": Known(
        "j <= i and i // c == j // c", lambda i, j, c: (j <= i) & (i // c == j // c), "c: i32",
        each("c", *CHUNKS), False, True),
    "chunks of 4": Known("i // 4 == j // 4", lambda i, j: i // 4 == j // 4, contiguous=True, runs=True),
    "causal chunks of 3": Known(
        "j <= i and i // 3 == j // 3", lambda i, j: (j <= i) & (i // 3 == j // 3), contiguous=True, runs=True),
    "block-causal": Known(
        "j // c <= i // c", lambda i, j, c: j // c <= i // c, "c: i32", each("c", *CHUNKS), runs=True),
    "block-causal by 4": Known("j // 4 <= i // 4", lambda i, j: j // 4 <= i // 4, contiguous=True, runs=True),
    "blocks nearby": Known("abs(i // 3 - j // 3) <= 1", lambda i, j: abs(i // 3 - j // 3) <= 1, contiguous=True),
    "prefix": Known("j < p or j <= i", lambda i, j, p: (j < p) | (j <= i), "p: i32", each("p", -3, 0, 1, 4, 99), True,
                    True),
    "bidirectional prefix": Known(
        "j <= i or i < p and j < p", lambda i, j, p: (j <= i) | (i < p) & (j < p), "p: i32",
        each("p", -3, 0, 1, 4, 99), True, True),
    "dilated": Known(
        "0 <= i - j < m and (i - j) % n == 0", lambda i, j, m, n: (i - j >= 0) & (i - j < m) & ((i - j) % n == 0),
        "m: i32, n: i32", tuple({"m": x, "n": y} for x in (0, 1, 3, 7, 50) for y in (1, 2, 3, 20))),
    "dilated by 3": Known("j <= i and (i - j) % 3 == 0", lambda i, j: (j <= i) & ((i - j) % 3 == 0)),
    "dilated, residue": Known("j <= i and (i - j) % 3 == 2", lambda i, j: (j <= i) & ((i - j) % 3 == 2)),
    "dilated, ahead": Known(
        "j <= i + n and (j - i) % 3 == 0", lambda i, j, n: (j <= i + n) & ((j - i) % 3 == 0), "n: i32",
        each("n", -4, -1, 0, 1, 2, 3, 7)),
    "causal without even rows' own keys": Known(
        "j <= i and not (i == j and i % 2 == 0)", lambda i, j: (j <= i) & ~((i == j) & (i % 2 == 0))),
    "same residue": Known("i % 3 == j % 3", lambda i, j: i % 3 == j % 3),
    "global and window": Known(
        "j < m or i < m or abs(i - j) <= n", lambda i, j, m, n: (j < m) | (i < m) | (abs(i - j) <= n),
        "m: i32, n: i32", PAIRS),
    "compressed": Known("4 * j + 3 <= i", lambda i, j: 4 * j + 3 <= i, contiguous=True, runs=True),
    "strided": Known("j <= i and (i - j < 4 or j % 4 == 3)", lambda i, j: (j <= i) & ((i - j < 4) | (j % 4 == 3))),
    "shifted chunks": Known(
        "(i + m) // n == (j + m) // n", lambda i, j, m, n: (i + m) // n == (j + m) // n, "m: i32, n: i32",
        tuple({"m": x, "n": y} for x in (-7, -1, 0, 1, 5, 900) for y in (1, 2, 5, 30)), False, True),
    "away from the end": Known("j < kv_len - 2", None, contiguous=True, runs=True),
    "by row": Known("i >= p and j <= i", lambda i, j, p: (i >= p) & (j <= i), "p: i32", each("p", -2, 0, 3, 50), True,
                    True),
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_exact(name):
    k = KNOWN[name]
    v = variant(k.mask, k.scalars)
    r = tile_ranges(v)
    assert not r.unknown
    assert r.contiguous == k.contiguous
    assert (r.may is None and r.must is None) == k.runs or not k.runs
    for values in k.values:
        for qo_len, kv_len in SIZES:
            cells = dense(v, qo_len, kv_len, values)
            if k.formula:
                i, j = np.arange(qo_len)[:, None] + kv_len - qo_len, np.arange(kv_len)[None, :]
                assert (cells == np.broadcast_to(k.formula(i, j, **values), cells.shape)).all()
            check(v, r, cells, values, exact=True)


EXTREMES = (-HUGE - 1, -HUGE, -5, 0, 3, 2**28, HUGE)
WITH_ANY_SCALARS = (
    "i - w < j <= i",
    "i - w < j",
    "i - w <= j <= i + y",
    "i + w > j",
    "j + w > i and j - y <= i",
    "abs(i - j) <= w",
    "j - i + w >= 0",
    "i + w < j + y",
    "j < w or i >= y",
    "j - w < 0",
    "w < j and j <= y",
    "j <= i and (j < w or i - y < j)",
    "i // w == j // w",
    "i // w <= j // y",
    "(i // w + 1) * w > j",
    "i % w == j % w",
    "j % w < y",
    "(i - j) % w == y",
    "j * w <= i + y",
    "max(i, w) < min(j, y)",
    "abs(i - w) < j + y",
    "(i if j < w else y) < j",
    "(i + w) // 3 == (j + w) // 3",
    "(i + w) // y <= (j + w) // y",
    "i // 2 * w <= j",
    "(i - j + w) % 4 == y",
)


@pytest.mark.parametrize("mask", WITH_ANY_SCALARS)
def test_sound_for_any_scalar(mask):
    """Sums with a scalar wrap; a row's range follows them exactly where it is called contiguous."""
    v = variant(mask, "w: i32, y: i32" if "y" in mask else "w: i32")
    r = tile_ranges(v)
    divides = "//" in mask or "%" in mask
    for w in EXTREMES:
        for y in EXTREMES if "y" in mask else (1,):
            if not divides or (w and y):
                values = {"w": w, "y": y}
                for sizes in ((4, 6), (6, 3)):
                    check(v, r, dense(v, *sizes, values), values, exact=False)


@pytest.mark.parametrize("mask", ["i - w < j <= i", "0 <= i - j <= w", "abs(i - j) <= w"])
def test_endless_window(mask):
    """The largest window there is shows all that it may, and needs no mask code but at the diagonal."""
    v = variant(mask, "w: i32")
    check(v, tile_ranges(v), dense(v, 9, 9, {"w": HUGE}), {"w": HUGE}, exact=True)


# -------------------------------------------------------------------------------------------------- look-ups
def sorted_runs(n: int, values: int = 3):
    """Every non-decreasing sequence of n of the first `values` integers."""
    for cuts in itertools.combinations_with_replacement(range(n + 1), values - 1):
        yield np.searchsorted(cuts, np.arange(n), side="right")


@pytest.mark.parametrize(
    "mask",
    [
        "j <= i and doc[b, i] == doc[b, j]",
        "doc[b, i] == doc[b, j] and j <= i",
        "doc[b, j] <= doc[b, i]",
        "doc[b, j] <= doc[b, i] or j <= i",
    ],
)
def test_sorted_documents(mask):
    v = variant(mask, "", "doc[b, pos]: i32 sorted")
    r = tile_ranges(v)
    assert not r.unknown
    guarded = mask.startswith("j <= i")
    for qo_len, kv_len in [(1, 1), (6, 6), (3, 7), (1, 5), *([(7, 3)] if guarded else [])]:
        for doc in sorted_runs(kv_len):
            values = {"doc": doc[None]}
            check(v, r, dense(v, qo_len, kv_len, values), values, exact=True)


def test_documents_in_a_window_are_sound_and_mostly_exact():
    v = variant("i - w < j <= i and doc[b, i] == doc[b, j]", "w: i32", "doc[b, pos]: i32 sorted")
    r = tile_ranges(v)
    for w in (0, 1, 2, 4, HUGE):
        for doc in sorted_runs(6):
            values = {"w": w, "doc": doc[None]}
            check(v, r, dense(v, 6, 6, values), values, exact=w in (0, 1, HUGE))


def test_rows_that_start_where_a_tensor_says():
    """Packed documents by the start of each: a run of keys for each row."""
    v = variant("start[b, i] <= j <= i", "", "start[b, pos]: i32 sorted")
    r = tile_ranges(v)
    assert r.contiguous and r.may is None and r.must is None
    for start in sorted_runs(6, 4):
        for values in ({"start": start[None]}, {"start": 2 * start[None] - 1}):
            cells = dense(v, 6, 6, values)
            check(v, r, cells, values, exact=bool((np.diff(start) <= 1).all() and cells.any(1).all()))


def test_order_of_a_tensor_that_is_not_sorted_is_unknown():
    v = variant("j <= i and doc[b, i] == doc[b, j]", "", "doc[b, pos]: i32")
    r = tile_ranges(v)
    assert [str(e) for e in r.unknown] == ["eq(doc[b, i], doc[b, j])"]
    assert r.may is None and r.must is None  # causal is all that is known
    for doc in itertools.product(range(2), repeat=4):
        values = {"doc": np.array(doc)[None]}
        check(v, r, dense(v, 4, 4, values), values, exact=False)


def test_what_may_hold_anywhere_is_no_run_of_keys():
    """Division by 0 has no value: a tile may have cells with any, and a row's keys are not called a run."""
    nothing = make("mul", make("floordiv", Leaf("i"), Const(0, I32)), Const(0, I32))
    r = tile_ranges(replace(variant("true", "w: i32"), mask=make("lt", Param("w", I32), nothing)))
    assert r.may is None and r.must is None and r.hi == Leaf("kv_len") and r.clear_hi == Const(0, I32)
    assert not r.contiguous


def test_sorted_words_are_not_sorted_integers():
    """A u32 reads as an i32 of the same bits: large ones are negative."""
    assert tile_ranges(variant("word[j] <= 5", "", "word[j]: u32 sorted")).unknown
    assert not tile_ranges(variant("word[j] <= 5", "", "word[j]: i32 sorted")).unknown


@pytest.mark.parametrize("prefix", [-7, 0, 2, 5, 9, -HUGE - 1, HUGE])
def test_prefix_of_the_request(prefix):
    v = variant("j < prefix[b] or j <= i", "", "prefix[b]: i32")
    r = tile_ranges(v)
    assert r.contiguous and r.may is None and r.must is None
    for sizes in SIZES:
        values = {"prefix": np.array([prefix])}
        check(v, r, dense(v, *sizes, values), values, exact=True)


@pytest.mark.parametrize("mask", ["i >= 2 and i - span[b] < j", "i <= 3 and j <= i + span[b]"])
@pytest.mark.parametrize("span", [-HUGE - 1, -HUGE + 2, -1, 3, HUGE - 2, HUGE])
def test_window_of_the_request(mask, span):
    v = variant(mask, "", "span[b]: i32")
    r = tile_ranges(v)
    assert r.contiguous
    for sizes in SIZES:
        values = {"span": np.array([span])}
        check(v, r, dense(v, *sizes, values), values, exact=abs(span) < 9)


TREE = "t < 0 or bit(ancestors[iq, t // 32], t % 32)"


@pytest.mark.parametrize("prefix", [0, 3, 5, 8])
def test_tree_verify(prefix):
    """The committed prefix is full; of the draft's own keys nothing is known."""
    v = variant(TREE.replace("t", "(j - prefix[b])", 1).replace(" t ", " (j - prefix[b]) "), "", "prefix[b]: i32",
                "ancestors[iq, w]: u32")  # fmt: skip
    r = tile_ranges(v)
    assert r.may is None and r.must is None
    for qo_len, kv_len in ((3, 8), (5, 5), (1, 6)):
        words = np.arange(qo_len * 2).reshape(qo_len, 2) * 2654435761 % 2**32
        values = {"prefix": np.array([min(prefix, kv_len)]), "ancestors": words}
        cells = dense(v, qo_len, kv_len, values)
        check(v, r, cells, values, exact=False)
        sizes = {"i0": kv_len - qo_len, "i1": kv_len - 1, "b": 0, "kv_len": kv_len}
        assert evaluate(r.clear_hi, sizes, values) == min(prefix, kv_len)


# ------------------------------------------------------------------------------------------------------ the whole
GUARDED_READS = (
    "i >= 2 and i < 6 and table[i - 2] <= j",
    "j <= i and block[j // 2] <= block[i // 2]",
    "i < 0 or block[i // 2] == 0",
    "(i < 0 or block[i // 2] == 0) and (j > 5 or (i + j) % 2 == 0)",  # some cell has a guard that is no bound
    "i % 100 < 4 and table[i] <= j",  # the guard is no bound
    "i % 100 < 50 and start[i] <= start[j]",
    "4 * j + 3 <= i and table[(i - 3) // 2] <= j",  # a bound of keys, not of rows
    "0 <= i < 3 and j <= i and j < 2 and table[i + j] <= j",
    "flag and table[w] <= j",
    "w >= 0 and w < 4 and j <= table[w]",
    "i >= 5 and start[i] <= j",  # no such row in a short tile
    "j <= i and start[i] <= j",  # no such row where it is negative
    "j <= i and start[i] // w == start[j] // w",
    "i >= 0 and block[i // 2 - i // 3] <= j",  # the ends of the index are no row's
    "0 <= i - j < 4 and table[i - j] <= j",
    "0 <= j and table[min(j, 3)] <= i + w",
    "i >= 0 and (flag if j < w else table[i % 4] == j)",
)


@pytest.mark.parametrize("mask", GUARDED_READS)
def test_reads_are_guarded(mask):
    """What only guarded cells may read is read for those alone, whatever the tile."""
    v = variant(mask, "w: i32, flag: bool", "table[4]: i32 sorted", "block[n]: i32 sorted", "start[pos]: i32 sorted")
    r, checked = tile_ranges(v), 0
    for w, flag in ((1, True), (3, True), (7, False), (-2, False)):
        for sizes in ((6, 6), (7, 3), (2, 5)):
            start = np.array([0, 0, 1, 3, 3, 4, 4])[: sizes[1]]
            values = {"w": w, "flag": flag, "table": np.array([0, 1, 1, 3]), "block": np.array([0, 0, 1, 2])}
            values["start"] = start
            try:
                cells = dense(v, *sizes, values)
            except IndexError:  # the mask itself reads out of range
                continue
            check(v, r, cells, values, exact=False)
            checked += 1
    assert checked >= 4


def test_domain_is_not_ignored():
    v = frontend.load(Source("topk.attn", """attention topk():
    tensor sel[iq, n]: i32
    domain = blocks(sel[iq, :], size = 16)
    mask = j <= i
"""))[0]  # fmt: skip
    r = tile_ranges(v)
    assert [str(e) for e in r.unknown] == ["sel[iq, floordiv(j, 16)]"]
    assert r.hi == tile_ranges(replace(v, domain=None)).hi
    assert not r.contiguous and r.must is None
    at = {"i0": 0, "i1": 63, "kv_len": 64}
    assert evaluate(r.clear_lo, at, {}) >= evaluate(r.clear_hi, at, {})


def test_large_masks_stay_small():
    """Cases within cases are cut off; what is left is sound."""
    many = " or ".join(f"(i + {n} < j and j % {n + 2} == 1)" for n in range(20))
    deep = "max(i, min(j, max(i - 1, min(j + 2, max(i - 3, min(j + 4, max(i - 5, abs(i - j))))))))"
    for mask in (many, f"not ({many})", f"{deep} < {deep.replace('i, ', 'j, ')}"):
        v = variant(mask)
        r = tile_ranges(v)
        for e in (r.may, r.must):
            assert e is None or sum(1 for _ in objects(e)) < 400
        check(v, r, dense(v, 7, 7, {}), {}, exact=False)
    r = tile_ranges(variant(f"j <= i and ({many})"))
    assert r.unknown and str(r.hi) == "add(i1, 1)"


def test_the_code_for_common_masks_is_short():
    def code(mask: str, scalars: str = "", *tensors: str) -> list[str | None]:
        r = tile_ranges(variant(mask, scalars, *tensors))
        return [None if e is None else repr(e) for e in (r.lo, r.hi, r.clear_lo, r.clear_hi, r.may, r.must)]

    assert code("j <= i") == ["0", "add(i1, 1)", "0", "add(i0, 1)", None, None]
    assert code("i - 512 < j <= i") == ["sub(i0, 511)", "add(i1, 1)", "sub(i1, 511)", "add(i0, 1)", None, None]
    assert code("j <= i and i // 64 == j // 64") == [
        "mul(floordiv(i0, 64), 64)", "add(i1, 1)", "mul(floordiv(i1, 64), 64)",
        "add(i0, 1)", None, None]  # fmt: skip
    assert code("j <= i and doc[b, i] == doc[b, j]", "", "doc[b, pos]: i32 sorted")[4:] == [
        "and(le(j0, i1), le(doc[b, max(i0, j0)], doc[b, min(j1, i1)]))",
        "and(lt(j1, add(i0, 1)), le(doc[b, i1], doc[b, j0]))"]  # fmt: skip


def test_map_of_tiles():
    v = variant("i - w < j <= i", "w: i32")
    assert tile_map(v, 8, 8, 2, 2, {"w": 4}).tolist() == [
        [PARTIAL, EMPTY, EMPTY, EMPTY],
        [FULL, PARTIAL, EMPTY, EMPTY],
        [PARTIAL, FULL, PARTIAL, EMPTY],
        [EMPTY, PARTIAL, FULL, PARTIAL],
    ]
    assert tile_map(v, 5, 7, 4, 3, {"w": 100}).tolist() == [[FULL, PARTIAL, EMPTY], [FULL, FULL, FULL]]
    with pytest.raises(ValueError, match="w: expected a value"):
        tile_map(v, 8, 8, 2, 2, {})


def test_map_without_a_tensor():
    """What depends on a tensor that is not given is partial; the rest of the mask still counts."""
    v = variant("j <= i and doc[b, i] == doc[b, j]", "", "doc[b, pos]: i32 sorted")
    assert tile_map(v, 4, 4, 2, 2, {}).tolist() == [[PARTIAL, EMPTY], [PARTIAL, PARTIAL]]
    assert tile_map(v, 4, 4, 2, 2, {"doc": [[0, 0, 1, 1]]}).tolist() == [[PARTIAL, EMPTY], [EMPTY, PARTIAL]]
    assert tile_map(v, 4, 4, 1, 1, {"doc": [[0, 0, 1, 1]]})[1].tolist() == [FULL, FULL, EMPTY, EMPTY]
    with pytest.raises(ValueError, match="doc: index"):
        tile_map(v, 4, 4, 2, 2, {"doc": [[0, 0, 1]]})
    prefix = variant("j < prefix[b] or j <= i", "", "prefix[b]: i32")
    assert tile_map(prefix, 4, 4, 2, 2, {}).tolist() == [[PARTIAL, PARTIAL], [FULL, PARTIAL]]
