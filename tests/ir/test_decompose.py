from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ir.evaluate import Evaluator
from ir.strategies import SCALARS, TENSORS

from attncc.diagnostics import Source
from attncc.frontend import load
from attncc.ir.decompose import LOG2E, Logits, decompose, sign
from attncc.ir.nodes import (
    F32,
    I32,
    SIZES,
    SLOT_DEFAULTS,
    Const,
    Expr,
    Leaf,
    Load,
    Op,
    Param,
    Scan,
    Variant,
    leaves,
    make,
    walk,
)
from attncc.ir.rewrite import Levels, level, simplify, specialize
from attncc.ir.verify import verify_expr

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
FILES = [HERE / "language.attn", *sorted((ROOT / "examples").glob("*.attn"))]
VARIANTS = {f"{p.stem}:{v.name}": v for p in FILES for v in load(Source.read(p))}
LANES = 64


def evaluator(v: Variant, seed: int) -> Evaluator:
    """Random positions, scores, parameters and tensors for `v`; s is scale * dot."""
    rng = np.random.default_rng(seed)
    values: dict[str, Any] = {name: rng.integers(0, 500, LANES) for name in ("i", "iq", "j", "i0")}
    values |= {name: rng.integers(0, 4, LANES) for name in ("b", "h", "g")}
    values |= {name: np.full(LANES, n) for name, n in zip(SIZES, (500, 500, 128, 128, 4, 8, 2), strict=True)}
    values["dot"] = rng.normal(0, 40, LANES)
    for p in v.scalars:
        drawn: Any = {"i32": rng.integers(1, 9), "f32": rng.uniform(0.5, 2.0), "bool": True}[p.type.elem]
        values[p.name] = np.full(LANES, drawn)
    tensors = {}
    for t in v.tensors:
        shape = tuple(d if isinstance(d, int) else 7 for d in t.dims)
        tensors[t.name] = rng.normal(0, 1, shape) if "f" in t.dtype else rng.integers(0, 7, shape)
    ev = Evaluator(values, tensors, LANES, chain=True)
    ev.values = {**values, "s": ev(v.scale) * values["dot"]}
    return ev


def keyed(ev: Evaluator, key: Expr) -> Evaluator:
    """The same, with the dot product of a key multiplied by its factor."""
    return Evaluator({**ev.values, "dot": ev.values["dot"] * ev(key)}, ev.tensors, ev.lanes, chain=True)


def check(v: Variant, seed: int, tolerance: float = 1e-11) -> Logits:
    """The parts of `v` are of the levels they should be, and their sum is the logit."""
    parts = decompose(v)
    assert level(parts.unit) in (("call", "head", "row") if parts.score == Leaf("dot") else ("call", "head"))
    assert level(parts.shift) in ("call", "head", "row")
    assert not leaves(parts.score) & {"s", "l", "lse"} and not leaves(parts.shift) & {"s", "dot", "j"}
    key = Const(1.0, F32) if parts.key is None else parts.key
    assert parts.key is None or (level(key) == "col" and not leaves(key) & {"i0"})
    for e in (parts.unit, parts.score, parts.shift, key):
        assert e.type == F32
        verify_expr(e, v, "f_logits", frozenset(("b", "h", "g", "i", "iq", "j", "dot", "i0")))
    ev = evaluator(v, seed)
    factor = 1.0 if v.scan.kind == "none" else math.log2(math.e)
    with np.errstate(all="ignore"):
        want, by_dot = ev(v.f_logits) * factor, keyed(ev, key)
        weighed, shift = by_dot(parts.unit) * by_dot(parts.score), by_dot(parts.shift)
        got, size = weighed + shift, 1.0 + np.abs(weighed) + np.abs(shift)
    where = np.isfinite(want)
    assert np.all(np.abs(got[where] - want[where]) <= tolerance * size[where])
    assert not parts.unit_positive or np.all(ev(parts.unit) >= 0)
    return parts


@pytest.mark.parametrize("name", VARIANTS)
def test_examples(name: str) -> None:
    v = VARIANTS[name]
    const = {p.name: 1 for p in v.scalars if p.const and p.default is None}
    done = specialize(v, const=const, head_dim_qk=128, head_dim_vo=128)
    for seed in range(3):
        check(done, seed)
        check(simplify(done), seed)


def one(body: str, header: str = "") -> Variant:
    text = f"attention one({header}):\n" + "".join(f"    {line}\n" for line in body.splitlines())
    (v,) = load(Source.of(text))
    return simplify(specialize(v, const={}, head_dim_qk=64, head_dim_vo=64))


TABLE = "tensor slope[h]: f32\ntensor bias[h, 32]: f32\ntensor scales[j, g]: f32\ntensor decay[b, h, pos]: f32\n"
FACTORS = {
    "L": LOG2E, "L/8": LOG2E / 8, "L/4": LOG2E / 4, "2L": 2 * LOG2E, "30L": 30 * LOG2E, "-L": -LOG2E,
    "1/240": (1 / 30) * 0.125,
}  # fmt: skip


@pytest.mark.parametrize(
    ("body", "unit", "positive", "score", "shift"),
    [
        ("f_logits = s", "{L/8}", True, "dot", "0.0"),
        ("f_logits = dot", "{L}", True, "dot", "0.0"),
        ("scale = -0.5", "mul", False, "dot", "0.0"),
        ("scale = slope[h]", "mul(slope[h], {L})", False, "dot", "0.0"),
        ("scale = exp(slope[h])", "mul(exp(slope[h]), {L})", True, "dot", "0.0"),
        ("f_logits = softcap(s, 30.0)", "{30L}", True, "tanh(mul(dot, {1/240}))", "0.0"),
        ("f_logits = 2.0 * s / 2.0 * 2.0", "{L/4}", True, "dot", "0.0"),
        ("f_logits = s * scales[j, g]", "{L/8}", True, "dot", "0.0"),
        ("f_logits = s * decay[b, h, i]", "mul", False, "dot", "0.0"),
        ("f_logits = decay[b, h, i] * s + f32(j)", None, True, None, None),
        (
            "f_logits = s + slope[h] * (j - i)", "1.0", True,
            "add(mul(dot, {L/8}), mul(f32(sub(j, i0)), mul(slope[h], {L})))",
            "mul(f32(sub(i0, i)), mul(slope[h], {L}))",
        ),
        (
            "f_logits = s + slope[h] * (f32(j) - f32(i))", "1.0", True,
            "add(mul(dot, {L/8}), mul(f32(sub(j, i0)), mul(slope[h], {L})))",
            "mul(f32(sub(i0, i)), mul(slope[h], {L}))",
        ),
        (
            "f_logits = s - slope[h] * (i - j)", "1.0", True,
            "add(mul(dot, {L/8}), mul(f32(sub(j, i0)), mul(slope[h], {L})))",
            None,
        ),
        (
            "f_logits = s + 2.0 * (j - i)", "1.0", True,
            "add(mul(dot, {L/8}), mul(f32(sub(j, i0)), {2L}))", "mul(f32(sub(i0, i)), {2L})",
        ),
        (
            "f_logits = s + (decay[b, h, i] - decay[b, h, j])", "1.0", True,
            "add(mul(dot, {L/8}), mul(decay[b, h, j], {-L}))", "mul(decay[b, h, i], {L})",
        ),
        ("f_logits = s + slope[h]", "{L/8}", True, "dot", "mul(slope[h], {L})"),
        (
            "f_logits = s + bias[h, abs(j - i) % 32]", "{L}", True,
            "add(mul(dot, 0.125), bias[h, mod(abs(sub(j, i)), 32)])", "0.0",
        ),
        ("f_logits = slope[h] * i", "1.0", True, "0.0", "mul(f32(i), mul(slope[h], {L}))"),
        ("f_logits = s * 0.0 + 1.0 if j < i else s", "{L}", True, None, "0.0"),
        (
            "f_logits = sigmoid(s + slope[h])\nscan = none", "1.0", True,
            "sigmoid(add(mul(dot, 0.125), slope[h]))", "0.0",
        ),
        ("f_logits = s + slope[h] * (j - i)\nscan = none", "1.0", True, None, "0.0"),
        ("f_logits = s / 0.0", None, True, None, "0.0"),
    ],
)  # fmt: skip
def test_parts(body: str, unit: str | None, positive: bool, score: str | None, shift: str | None) -> None:
    v = one(TABLE + body)
    parts = check(v, 0)
    assert parts.unit_positive == positive
    for found, wanted in ((parts.unit, unit), (parts.score, score), (parts.shift, shift)):
        if wanted is not None and wanted != "mul":
            for name, value in FACTORS.items():
                wanted = wanted.replace("{" + name + "}", repr(value))
            assert repr(found) == wanted


@pytest.mark.parametrize(
    ("body", "ops"),
    [
        ("f_logits = s", 0),
        ("f_logits = softcap(s, 30.0)", 2),
        ("f_logits = s + slope[h] * (j - i)", 2),
        ("f_logits = softcap(s, 30.0) + slope[h] * (j - i)", 3),
        ("f_logits = (s + slope[h] * (j - i)) * 0.5 / slope[h]", 2),
        ("f_logits = s * scales[j, g] * 2.0", 0),
        ("f_logits = s * scales[j, g] + s", 2),
        ("f_logits = s * decay[b, h, i] * scales[j, g]", 0),
    ],
)
def test_what_is_left_to_a_cell(body: str, ops: int) -> None:
    """Ops of cell level in the score: head-level factors are multiplied together elsewhere."""
    parts = check(one(TABLE + body), 1)
    levels = Levels()
    assert sum(isinstance(x, Op) and levels(x) == "cell" for x in walk(parts.score)) == ops


@pytest.mark.parametrize(
    ("body", "key", "unit"),
    [
        ("f_logits = s * scales[j, g]", "scales[j, g]", "{L/8}"),
        ("f_logits = 2.0 * (s / scales[j, g])", "mul(div(1.0, scales[j, g]), 2.0)", "{L/8}"),
        ("f_logits = softcap(dot * scales[j, g], 1.0) - dot * scales[j, g]", "scales[j, g]", "{L}"),
        ("f_logits = s * decay[b, h, i] * scales[j, g]", "scales[j, g]", "mul(decay[b, h, i], {L/8})"),
        ("f_logits = s * scales[j, g] * decay[b, h, i]", "scales[j, g]", "mul(decay[b, h, i], {L/8})"),
        ("f_logits = s * decay[b, h, i - j]", None, "{L/8}"),
        ("f_logits = s * scales[j, g] + dot", None, None),
        ("f_logits = scales[j, g] / s", None, None),
        ("f_logits = s * s", None, None),
        ("f_logits = s * scales[j, g] if s > 0.0 else 0.0", None, None),
        ("f_logits = tanh(s * decay[b, h, i] * scales[j, g])", "scales[j, g]", None),
        ("f_logits = sigmoid(s * scales[j, g] * slope[h])\nscan = none", "mul(slope[h], scales[j, g])", "1.0"),
        ("f_logits = s * decay[b, h, i] * scales[j, g]\nscan = none", "scales[j, g]", "1.0"),
    ],
)
def test_factors_that_all_scores_share(body: str, key: str | None, unit: str | None) -> None:
    parts = check(one(TABLE + body), 2)
    assert (None if parts.key is None else repr(parts.key)) == key
    if unit is not None:
        for name, value in FACTORS.items():
            unit = unit.replace("{" + name + "}", repr(value))
        assert repr(parts.unit) == unit


def test_f32_precision_far_from_the_origin() -> None:
    """ALiBi at positions near 2**20: relative to the tile's first row, f32 loses nothing that matters."""
    v = one("tensor slope[h]: f32\nf_logits = s + slope[h] * (j - i)")
    parts = decompose(v)
    rng = np.random.default_rng(0)
    row = 2**20 - 128 + np.arange(LANES)
    values = {"h": np.zeros(LANES, int), "i": row, "j": row - rng.integers(0, 64, LANES), "i0": np.full(LANES, row[0])}
    values["dot"] = rng.normal(0, 8, LANES).astype(np.float32)
    tensors = {"slope": np.array([0.7], np.float32)}
    exact = LOG2E * (values["dot"].astype(float) / 8 + tensors["slope"][0].astype(float) * (values["j"] - values["i"]))
    ev = Evaluator(values, tensors, LANES, np.float32)
    got = ev(parts.unit) * ev(parts.score) + ev(parts.shift)
    assert got.dtype == np.float32 and np.abs(got - exact).max() < 2e-5


# Random combinations: head-level factors of all kinds over sums of dot, positions, tables and softcaps.

NUMBERS = st.sampled_from([0.5, -1.0, 2.0, 3.0, -0.25, 0.1]).map(lambda x: Const(x, F32))
HEAD = st.one_of(
    NUMBERS,
    st.sampled_from([
        Load("slope", (Leaf("h"),), F32), Param("cap", F32), make("f32", make("add", Leaf("h"), Const(1, I32))),
        make("exp", Load("slope", (Leaf("h"),), F32)), make("rsqrt", make("f32", Leaf("group_size"))),
    ]),
)  # fmt: skip
POSITIONS = st.sampled_from([
    make("sub", Leaf("j"), Leaf("i")), make("sub", Leaf("i"), Leaf("j")), Leaf("i"), Leaf("j"), Leaf("kv_len"),
    make("mul", make("sub", Leaf("j"), Leaf("iq")), Const(3, I32)), make("abs", make("sub", Leaf("j"), Leaf("i"))),
    make("sub", make("mul", Leaf("j"), Param("window", I32)), Load("start", (Leaf("b"),), I32)),
])  # fmt: skip
TERMS = st.one_of(
    st.sampled_from([Leaf("s"), Leaf("dot")]),
    POSITIONS.map(lambda n: make("f32", n)),
    st.sampled_from([Load("table", (Leaf("h"), Leaf("j")), F32), Load("table", (Leaf("h"), Leaf("i")), F32)]),
    HEAD,
)


def grown(inner: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    scaled = st.tuples(st.sampled_from(["mul", "div"]), inner, HEAD).map(lambda t: make(*t))
    return st.one_of(
        st.tuples(st.sampled_from(["add", "sub"]), inner, inner).map(lambda t: make(*t)),
        scaled,
        st.tuples(HEAD, inner).map(lambda t: make("mul", *t)),
        inner.map(lambda e: make("neg", e)),
        inner.map(lambda e: make("tanh", make("mul", e, Const(1e-3, F32)))),
        st.tuples(inner, inner).map(lambda t: make("mul", make("sigmoid", t[0]), t[1])),
    )


COMBINATIONS = st.recursive(TERMS, grown, max_leaves=8)


@given(COMBINATIONS, HEAD, st.sampled_from(["softmax", "none"]), st.integers(0, 99))
@settings(max_examples=200, deadline=None)
def test_random_combinations(logit: Expr, scale: Expr, scan: str, seed: int) -> None:
    slots = {**SLOT_DEFAULTS, "scale": scale, "f_logits": logit}
    check(Variant("random", None, SCALARS, TENSORS, **slots, scan=Scan(scan)), seed, tolerance=1e-9)


def test_long_and_shared_sums_are_no_trouble() -> None:
    v = one("f_logits = s")
    e: Expr = make("add", Leaf("s"), make("f32", Leaf("j")))
    for _ in range(40):
        e = make("add", e, e)
    check(replace(v, f_logits=e), 0)
    table = Load("table", (Leaf("h"), Leaf("j")), F32)
    e = Leaf("s")
    for n in range(800):
        e = make("add", e, make("tanh", make("add", table, Const(float(n), F32))))
    check(replace(v, f_logits=e, tensors=TENSORS), 0)
    for _ in range(800):
        e = make("tanh", make("mul", e, Const(0.5, F32)))
    check(replace(v, f_logits=e, tensors=TENSORS), 0)


@pytest.mark.parametrize(
    ("e", "known"),
    [
        (Const(2.0, F32), 1), (Const(0.0, F32), 0), (Const(-1.0, F32), None), (Param("cap", F32), None),
        (make("f32", Leaf("head_dim_qk")), 1), (make("f32", Leaf("h")), 0),
        (make("f32", make("add", Leaf("h"), Const(1, I32))), 1), (make("exp", Leaf("s")), 1),
        (make("mul", Leaf("s"), Leaf("s")), 0), (make("mul", Leaf("s"), Const(2.0, F32)), None),
        (make("abs", Leaf("s")), 0), (make("max", Leaf("s"), Const(1.0, F32)), 1),
        (make("min", Leaf("s"), Const(1.0, F32)), None), (make("sub", Const(2.0, F32), Const(1.0, F32)), None),
        (make("pow", Const(2.0, F32), Leaf("s")), 1), (make("pow", Leaf("s"), Const(2.0, F32)), None),
        (make("select", make("lt", Leaf("i"), Leaf("j")), Const(1.0, F32), Const(0.0, F32)), 0),
        (make("div", Const(1.0, F32), make("sqrt", make("f32", Leaf("kv_len")))), 0),
        (make("add", make("abs", Leaf("s")), Const(1.0, F32)), 1), (make("log", Const(2.0, F32)), None),
    ],
)  # fmt: skip
def test_signs(e: Expr, known: int | None) -> None:
    found = sign(e)
    assert math.isnan(found) if known is None else found == known
