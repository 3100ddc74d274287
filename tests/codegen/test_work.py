"""What planners are told of a mask: the same as tile ranges say, in JSON, and never that a visible key is hidden."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from gpu.cases import Case, example_cases, odd_cases
from hypothesis import given, settings
from hypothesis import strategies as st
from ir.mask_tiles import HUGE, dense, variant

from attncc import compiler
from attncc.codegen.config import ranges_of
from attncc.codegen.work import LEAVES, MAX_NODES, OPS, bound, nodes, visible
from attncc.ir.nodes import I32, Expr, Leaf, Load, Param, Variant, make, walk
from attncc.ir.ranges_eval import evaluate

CASES = [*example_cases(), *odd_cases()]
UNARY: dict[str, Any] = {"neg": np.negative, "abs": np.abs, "not": np.logical_not}
BINARY: dict[str, Any] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "min": np.minimum, "max": np.maximum,
    "floordiv": np.floor_divide, "mod": np.mod, "lt": np.less, "le": np.less_equal, "eq": np.equal, "ne": np.not_equal,
    "and": np.logical_and, "or": np.logical_or,
}  # fmt: skip


def number(x: Any) -> np.ndarray:
    x = np.asarray(x)
    return np.atleast_1d(x if x.dtype == bool else x.astype(np.int32))  # arrays of int32 wrap


def value(e: list, leaves: dict[str, Any], scalars: dict[str, Any]) -> np.ndarray:
    """A planner's own evaluator."""
    match e:
        case ["const", x]:
            return number(x)
        case ["leaf", name]:
            assert name in LEAVES
            return number(leaves[name])
        case ["param", name]:
            return number(scalars[name])
    assert e[0] in OPS
    args = [value(a, leaves, scalars) for a in e[1:]]
    with np.errstate(all="ignore"):
        return np.where(*args) if e[0] == "select" else (UNARY if len(args) == 1 else BINARY)[e[0]](*args)


def special(case: Case) -> Variant:
    options = compiler._options(
        case.head_dim, case.head_dim_vo, case.dtype, dict(case.const), "dense", None, "sm_90a"
    )  # fmt: skip
    return compiler.specialized(case.load(), options)


def params(e: list | None) -> set[str]:
    if e is None or e[0] in ("const", "leaf"):
        return set()
    return {e[1]} if e[0] == "param" else set().union(*map(params, e[1:]))


NUMBERS = st.one_of(st.integers(-3, 300), st.sampled_from([-HUGE - 1, -HUGE, -(2**30), 2**28, 2**30, HUGE]))


@settings(max_examples=50, deadline=None)
@given(data=st.data(), case=st.sampled_from(CASES))
def test_json_says_what_tile_ranges_say(data: st.DataObject, case: Case) -> None:
    v = special(case)
    told, ranges = visible(v), ranges_of(v)
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    qo_len, kv_len = np.array(data.draw(st.lists(st.integers(1, 500), min_size=2, max_size=2)))
    i0 = np.array(data.draw(st.lists(st.integers(0, int(qo_len) - 1), min_size=1, max_size=5))) + kv_len - qo_len
    i1 = np.minimum(i0 + data.draw(st.integers(0, 200)), kv_len - 1)
    leaves = {"i0": i0, "i1": i1, "qo_len": qo_len, "kv_len": kv_len}
    scalars = {p.name: data.draw(st.booleans() if p.type.elem == "bool" else NUMBERS) for p in v.scalars if not p.const}
    for name, e in (("lo", ranges.lo), ("hi", ranges.hi)):
        if not any(isinstance(x, Load) for x in walk(e)):
            want = evaluate(e, leaves, scalars)
            assert (np.broadcast_to(value(told[name] or [], leaves, scalars), want.shape) == want).all()
            weak = told[f"{name}_any"]
            if weak is not None:
                weak = value(weak, leaves, {})
                assert (weak <= want if name == "lo" else weak >= want).all()


MASKS = [
    variant("w < j <= i", "w: i32"), variant("i - w < j <= i", "w: i32"),
    variant("i - w <= j < i + x", "w: i32, x: i32"),
    variant("first[b] <= j <= min(i, last[b])", "", "first[b]: i32", "last[b]: i32"),
    variant("j <= i and (j >= i - w or j < x)", "w: i32, x: i32"), variant("j // 3 == i // 3 and j < w", "w: i32"),
    variant("j <= max(i, first[b])", "", "first[b]: i32"), variant("j < w + x", "w: i32, x: i32"),
    variant("j <= i if flag else j >= i - w", "flag: bool, w: i32"), variant("j < h + 2 or j == i", ""),
    variant("j <= i32(f32(i) * 0.7)", ""), variant("j - w * 2 <= iq", "w: i32"),
]  # fmt: skip


@settings(max_examples=50, deadline=None)
@given(data=st.data(), v=st.sampled_from(MASKS))
def test_no_visible_key_is_outside(data: st.DataObject, v: Variant) -> None:
    """Both ends, with the scalars and without, whatever tensors hold."""
    qo_len, kv_len = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    few = st.one_of(st.integers(-3, 12), st.sampled_from([-HUGE - 1, HUGE]))
    scalars = {p.name: data.draw(st.booleans() if p.type.elem == "bool" else few) for p in v.scalars}
    tensors = {t.name: np.array([data.draw(few)]) for t in v.tensors}
    rows, keys = np.nonzero(dense(v, qo_len, kv_len, scalars | tensors))
    i0 = np.arange(qo_len) + kv_len - qo_len
    for length in range(1, qo_len + 1):
        leaves = {"i0": i0, "i1": np.minimum(i0 + length - 1, kv_len - 1), "qo_len": qo_len, "kv_len": kv_len}
        for name, e in visible(v).items():
            if e is None:
                continue
            end = np.broadcast_to(value(e, leaves, {} if name.endswith("_any") else scalars), i0.shape)
            for first in range(qo_len):
                seen = keys[(rows >= first) & (rows < first + length)]
                assert (seen >= end[first] if name.startswith("lo") else seen < end[first]).all(), name


AFTER_I1 = ["add", ["leaf", "i1"], ["const", 1]]
NEAR = ["sub", ["leaf", "i0"], ["const", 6]]
FIRST = ("", "first[b]: i32")


@pytest.mark.parametrize(
    "mask, declared, lo, hi, lo_any, hi_any",
    [("true", (), 0, ["leaf", "kv_len"], 0, ["leaf", "kv_len"]), ("j <= i", (), 0, AFTER_I1, 0, AFTER_I1),
     ("j <= i or j < h", (), 0, None, 0, None), ("j <= min(i, h)", (), 0, AFTER_I1, 0, AFTER_I1),
     ("j <= i and j < first[b]", FIRST, 0, AFTER_I1, 0, AFTER_I1),
     ("j <= first[b]", FIRST, 0, None, 0, None),
     ("i - 7 < j and h < j", (), NEAR, ["leaf", "kv_len"], NEAR, ["leaf", "kv_len"])],
)  # fmt: skip
def test_what_is_told(mask: str, declared: tuple[str, ...], lo: Any, hi: Any, lo_any: Any, hi_any: Any) -> None:
    told = visible(variant(mask, *declared))
    wanted = {"lo": lo, "hi": hi, "lo_any": lo_any, "hi_any": hi_any}
    assert told == {name: ["const", x] if isinstance(x, int) else x for name, x in wanted.items()}


def test_a_window_is_told_with_its_scalar_and_without() -> None:
    told = visible(variant("i - w < j <= i", "w: i32"))
    leaves = {"i0": 40, "i1": 43, "qo_len": 4, "kv_len": 44}
    assert [int(value(told[name] or [], leaves, {"w": 10})[0]) for name in ("lo", "hi")] == [31, 44]
    assert [int(value(told[name] or [], leaves, {"w": 0})[0]) for name in ("lo", "hi")] == [41, 0]  # nothing is seen
    assert told["lo_any"] is None and int(value(told["hi_any"] or [], leaves, {})[0]) == 44


def test_what_a_planner_does_not_know_is_not_told() -> None:
    for case in CASES:
        for x in visible(special(case)).values():
            assert x is None or value(x, dict.fromkeys(LEAVES, 5), dict.fromkeys(params(x), 3)).dtype == np.int32
    assert visible(variant("j <= h"))["hi"] is None


def test_an_expression_too_long_to_write_out_is_not_told() -> None:
    """Sharing doubles it at every step."""
    e: Expr = make("sub", Leaf("i1"), Param("w", I32))
    for _ in range(60):
        found = bound(make("add", e, Leaf("i0")), True, True)
        assert (found is None) == (nodes(e) + 2 > MAX_NODES)
        e = make("mul", e, e)
