"""Every rectangle of a mask written out cell by cell, and what tile ranges say of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from attncc import frontend
from attncc.diagnostics import Source
from attncc.ir.nodes import Variant
from attncc.ir.ranges import TileRanges
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
