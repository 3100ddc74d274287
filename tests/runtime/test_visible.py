"""Visible ranges: every tile of the examples' masks as the compiler's own evaluator sees it; what stays unknown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attncc import frontend
from attncc.diagnostics import Source
from attncc.ir.nodes import BOOL, Const, Expr, Leaf, Load, Op, Param
from attncc.ir.ranges import tile_ranges
from attncc.ir.ranges_eval import evaluate
from attncc.runtime.visible import Visible

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.attn"))


def as_json(e: Expr) -> list[Any]:
    if isinstance(e, Const):
        return ["const", e.value]
    if isinstance(e, Leaf):
        return ["leaf", e.name]
    if isinstance(e, Param):
        return ["param", e.name]
    if isinstance(e, Op):
        return [e.op, *map(as_json, e.args)]
    assert isinstance(e, Load)
    return ["load", e.tensor, *map(as_json, e.index)]


def tiles(qo_len: int, kv_len: int, rows: int) -> tuple[np.ndarray, ...]:
    i0 = np.arange(0, qo_len, rows) + kv_len - qo_len
    i1 = np.minimum(i0 + rows, kv_len) - 1
    return i0, i1, np.full_like(i0, qo_len), np.full_like(i0, kv_len)


def clipped(found, kv_len: np.ndarray) -> list[np.ndarray]:
    """Ends within the keys, those that aren't known at theirs."""
    unknown = (np.zeros_like(kv_len), kv_len)
    return [np.clip(u if x is None else x, 0, kv_len) for x, u in zip(found, unknown, strict=True)]


TILES = [tiles(*x) for x in ((1, 1, 1), (1, 777, 1), (300, 300, 128), (64, 5000, 16), (200, 50, 32))]


def ranges_of(source: Path | Source):
    loaded = Source.read(source) if isinstance(source, Path) else source
    for variant in frontend.load(loaded):
        yield variant, tile_ranges(variant, without=[t.name for t in variant.tensors])


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_examples_against_the_evaluator(path):
    for variant, r in ranges_of(path):
        visible = Visible({"lo": as_json(r.lo), "hi": as_json(r.hi)})
        for size in (-3, 1, 7, 100, 2**31 - 1):
            scalars = {p.name: size if p.type.elem == "i32" else p.type == BOOL for p in variant.scalars}
            bounds = visible.bind(scalars)
            assert bounds is not None
            for i0, i1, qo_len, kv_len in TILES:
                at = {"i0": i0, "i1": i1, "qo_len": qo_len, "kv_len": kv_len}
                expected = [np.clip(evaluate(e, at, scalars), 0, kv_len) for e in (r.lo, r.hi)]
                np.testing.assert_array_equal(clipped(bounds(i0, i1, qo_len, kv_len), kv_len), expected)


WINDOW = {
    "lo": ["max", ["const", 0], ["add", ["sub", ["leaf", "i0"], ["param", "window"]], ["const", 1]]],
    "hi": ["add", ["leaf", "i1"], ["const", 1]],
}


def ends(spec, scalars=None):
    i0, i1, qo_len, kv_len = tiles(256, 1000, 128)
    bounds = Visible(spec).bind(scalars or {})
    return None if bounds is None else [x.tolist() for x in clipped(bounds(i0, i1, qo_len, kv_len), kv_len)]


def test_a_window():
    assert ends(WINDOW, {"window": 100}) == [[645, 773], [872, 1000]]
    assert ends(WINDOW, {"window": np.int64(100)}) == [[645, 773], [872, 1000]]


@pytest.mark.parametrize("scalars", [{}, {"window": 4.0}, {"window": 2**31}, {"window": None}], ids=repr)
def test_a_scalar_not_given_leaves_that_end_unknown(scalars):
    assert ends(WINDOW, scalars) == [[0, 0], [872, 1000]]


@pytest.mark.parametrize(
    "end",
    [None, ["load", "doc", ["leaf", "i0"]], ["add", ["leaf", "i0"], ["exp", ["leaf", "i1"]]], ["leaf", "h"],
     ["const", 0.5], ["min", ["leaf", "i0"], ["i32", ["const", 1.5]]], ["add", ["leaf", "i0"]]],
    ids=repr,
)  # fmt: skip
def test_what_is_not_understood_is_unknown(end):
    assert ends({"lo": end, "hi": WINDOW["hi"]}) == [[0, 0], [872, 1000]]
    assert ends({"lo": end, "hi": end}) is None


def test_from_the_first_key_on_is_not_worth_a_word():
    bounds = Visible({"lo": ["const", 0], "hi": WINDOW["hi"]}).bind({})
    assert bounds is not None and bounds(*tiles(256, 1000, 128))[0] is None
    assert Visible({"lo": ["const", -5], "hi": None}).bind({}) is None
    assert ends({"lo": ["const", 5], "hi": None}) == [[5, 5], [1000, 1000]]


def test_leaves_that_all_tiles_share():
    assert ends({"lo": None, "hi": ["mul", ["leaf", "group_size"], ["const", 10]]}, {"group_size": 4}) == [
        [0, 0],
        [40, 40],
    ]


def test_weaker_ends_where_a_scalar_is_not_given():
    spec = {**WINDOW, "lo_any": ["sub", ["leaf", "i0"], ["const", 700]], "hi_any": None}
    assert ends(spec) == [[44, 172], [872, 1000]]
    assert ends(spec, {"window": 100}) == [[645, 773], [872, 1000]]


def test_division_by_zero_where_it_is_not_taken():
    lo = ["select", ["lt", ["const", 0], ["param", "n"]], ["floordiv", ["leaf", "i0"], ["param", "n"]], ["const", 7]]
    assert ends({"lo": lo, "hi": None}, {"n": 0})[0] == [7, 7]
    assert ends({"lo": lo, "hi": None}, {"n": 2})[0] == [372, 436]


def test_sums_wrap_as_the_kernels_do():
    lo = ["add", ["param", "x"], ["leaf", "i0"]]
    assert ends({"lo": lo, "hi": None}, {"x": 2**31 - 1})[0] == [0, 0]  # wrapped below zero


def test_scalars_that_an_answer_depends_on():
    """Those of weaker ends, too; none of leaves."""
    spec = {"lo": ["sub", ["leaf", "i0"], ["param", "window"]], "lo_any": None, "hi": ["const", 5]}
    assert Visible(spec).asks() == {"window"}
    assert Visible({**spec, "hi_any": ["param", "n"]}).asks() == {"window", "n"}
    assert Visible({"hi": ["leaf", "i1"]}).asks() == Visible({}).asks() == set()
