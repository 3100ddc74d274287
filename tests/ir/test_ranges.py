"""Tile ranges against every rectangle of a mask written out cell by cell: sound always, exact for known masks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from attncc import frontend
from attncc.diagnostics import Source
from attncc.ir.nodes import Variant
from attncc.ir.ranges import TileRanges, tile_ranges
from attncc.ir.ranges_eval import evaluate

HUGE = 2**31 - 1
SIZES = [(1, 1), (5, 5), (9, 9), (4, 9), (9, 4), (1, 7), (7, 1)]


def variant(mask: str, scalars: str = "", *tensors: str) -> Variant:
    lines = [f"attention under_test({scalars}):", *(f"    tensor {t}" for t in tensors), f"    mask = {mask}", ""]
    return frontend.load(Source("test.attn", "\n".join(lines)))[0]


def rectangles(n: int) -> tuple[np.ndarray, np.ndarray]:
    """First and last index of every run of 0..n-1."""
    first, last = np.triu_indices(n)
    return first, last


def dense(v: Variant, qo_len: int, kv_len: int, values: Mapping[str, Any]) -> np.ndarray:
    """The mask, cell by cell."""
    i = np.arange(qo_len)[:, None] + kv_len - qo_len
    at = {"i": i, "iq": np.arange(qo_len)[:, None], "j": np.arange(kv_len)[None, :], "b": 0, "h": 0, "g": 0}
    cells = evaluate(v.mask, {**at, "qo_len": qo_len, "kv_len": kv_len}, values)
    return np.broadcast_to(cells, (qo_len, kv_len))


def check(v: Variant, r: TileRanges, cells: np.ndarray, values: Mapping[str, Any], exact: bool) -> None:
    """Every rectangle of rows and keys."""
    qo_len, kv_len = cells.shape
    sums = np.zeros((qo_len + 1, kv_len + 1), int)
    sums[1:, 1:] = cells.cumsum(0).cumsum(1)
    (r0, r1), (j0, j1) = (x[:, None] for x in rectangles(qo_len)), (x[None, :] for x in rectangles(kv_len))
    visible = sums[r1 + 1, j1 + 1] - sums[r0, j1 + 1] - sums[r1 + 1, j0] + sums[r0, j0]
    size = (r1 - r0 + 1) * (j1 - j0 + 1)
    shift = kv_len - qo_len
    at = {"i0": r0 + shift, "i1": r1 + shift, "j0": j0, "j1": j1, "b": 0, "h": 0, "g": 0}
    at |= {"qo_len": qo_len, "kv_len": kv_len}
    lo, hi, clear_lo, clear_hi = (evaluate(e, at, values) for e in (r.lo, r.hi, r.clear_lo, r.clear_hi))
    empty = (lo >= hi) | (j1 < lo) | (j0 >= hi)
    full = (j0 >= clear_lo) & (j1 < clear_hi)
    if r.may is not None:
        empty |= ~evaluate(r.may, at, values)
    if r.must is not None:
        full |= evaluate(r.must, at, values)
    assert not (empty & (visible > 0)).any(), "a visible cell in a tile called empty"
    assert not (full & (visible < size)).any(), "a hidden cell in a tile called full"
    if exact:
        assert empty[visible == 0].all(), "an empty tile is not called so"
        assert full[visible == size].all(), "a full tile is not called so"
    if r.contiguous:
        check_rows(r, cells, values)


def check_rows(r: TileRanges, cells: np.ndarray, values: Mapping[str, Any]) -> None:
    qo_len, kv_len = cells.shape
    row = {"i": np.arange(qo_len)[:, None] + kv_len - qo_len, "j": np.arange(kv_len)[None, :]}
    row |= {"b": 0, "h": 0, "g": 0, "qo_len": qo_len, "kv_len": kv_len}
    lo, hi = (evaluate(e, row, values) for e in r.row())
    assert (((lo <= row["j"]) & (row["j"] < hi)) == cells).all(), "a row's keys are not its range"


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
    "same residue": Known("i % 3 == j % 3", lambda i, j: i % 3 == j % 3),
    "global and window": Known(
        "j < m or i < m or abs(i - j) <= n", lambda i, j, m, n: (j < m) | (i < m) | (abs(i - j) <= n),
        "m: i32, n: i32", PAIRS),
    "compressed": Known("4 * j + 3 <= i", lambda i, j: 4 * j + 3 <= i, contiguous=True, runs=True),
    "strided": Known("j <= i and (i - j < 4 or j % 4 == 3)", lambda i, j: (j <= i) & ((i - j < 4) | (j % 4 == 3))),
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
