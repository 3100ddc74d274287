from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ir.evaluate import Evaluator
from ir.strategies import SCALARS, TENSORS, slot_expressions, variants

from attncc.diagnostics import Source, Span
from attncc.frontend import load
from attncc.ir.nodes import (
    BOOL,
    F32,
    I32,
    LEAVES,
    SLOT_DEFAULTS,
    Const,
    Expr,
    Leaf,
    Load,
    Param,
    ScalarParam,
    Scan,
    Variant,
    make,
    objects,
    walk,
)
from attncc.ir.rewrite import Levels, drop_row_constants, level, simplify, simplify_expr, specialize
from attncc.ir.text import print_variant
from attncc.ir.verify import VerifyError, verify

I, J, S, H = map(Leaf, "ijsh")  # noqa: E741
PLAIN = Variant("plain", None, SCALARS, TENSORS, **SLOT_DEFAULTS, scan=Scan("softmax"))


def integer(n: int) -> Const:
    return Const(n, I32)


def real(x: float) -> Const:
    return Const(x, F32)


def one(body: str, header: str = "") -> Variant:
    (v,) = load(Source.of(f"attention one({header}):\n" + "".join(f"    {line}\n" for line in body.splitlines())))
    return v


def evaluator(seed: int) -> Evaluator:
    """Random values for all that the strategies name: small integers and dyadic reals, so that sums are exact."""
    rng = np.random.default_rng(seed)
    lanes, features = 8, 4

    def values(elem: str, shape: tuple[int, ...]) -> np.ndarray:
        if elem == "bool":
            return rng.integers(0, 2, shape).astype(bool)
        whole = rng.integers(-6, 7, shape)
        return whole if elem == "i32" else whole / 4

    known = {
        name: values(t.elem, (lanes,) if t.space is None else (lanes, features))
        for name, t in LEAVES.items() if name not in ("d", "e")
    }  # fmt: skip
    known |= {name: np.tile(np.arange(features), (lanes, 1)) for name in ("d", "e")}
    known |= {p.name: values(p.type.elem, (lanes,)) for p in SCALARS}
    elems = {"f32": "f32", "bf16": "f32", "f16": "f32", "i32": "i32", "u32": "i32", "bool": "bool"}
    shapes = {t.name: tuple(d if isinstance(d, int) else 3 + n for n, d in enumerate(t.dims)) for t in TENSORS}
    tensors = {t.name: values(elems[t.dtype], shapes[t.name]) for t in TENSORS}
    return Evaluator(known, tensors, lanes, chain=True)


@given(st.sampled_from(["f_q", "f_logits", "mask", "epilogue"]).flatmap(slot_expressions), st.integers(0, 99))
@settings(max_examples=150, deadline=None)
def test_simplified_expressions_have_the_same_values_and_read_no_more(e: Expr, seed: int) -> None:
    simple = simplify_expr(e)
    before, after = evaluator(seed), evaluator(seed)
    was, now = before(e), after(simple)
    assert simple.type == e.type
    np.testing.assert_array_equal(now, was, f"{e} -> {simple}")
    assert after.reads <= before.reads
    assert simplify_expr(simple) == simple


@given(variants())
@settings(max_examples=50, deadline=None)
def test_simplify_keeps_variants_well_formed_and_shares_across_slots(v: Variant) -> None:
    simple = simplify(v)
    verify(simple)
    assert simplify(simple) == simple
    nodes: dict[Expr, int] = {}
    for _, e in simple.expressions():
        for x in objects(e):
            assert nodes.setdefault(x, id(x)) == id(x), "equal nodes are one object"


@pytest.mark.parametrize(
    ("e", "simple"),
    [
        (make("sub", make("add", integer(3), I), make("add", J, integer(1))), "add(sub(i, j), 2)"),
        (make("div", S, real(64.0)), "mul(s, 0.015625)"),
        (make("div", S, real(3.0)), "div(s, 3.0)"),
        (make("floordiv", I, integer(0)), "floordiv(i, 0)"),
        (make("not", make("lt", I, J)), "le(j, i)"),
        (make("not", make("lt", S, S)), "true"),
        (make("not", make("lt", S, real(1.0))), "not(lt(s, 1.0))"),
        (make("mul", S, real(0.0)), "mul(s, 0.0)"),
        (make("sub", S, S), "sub(s, s)"),
        (make("pow", S, real(3.0)), "mul(s, mul(s, s))"),
        (make("pow", S, real(0.5)), "pow(s, 0.5)"),
        (make("rsqrt", make("f32", integer(64))), "0.125"),
        (make("i32", make("f32", make("mod", J, integer(32)))), "mod(j, 32)"),
        (make("i32", make("f32", J)), "i32(f32(j))"),
        (make("add", make("add", S, real(1.0)), real(2.0)), "add(add(s, 1.0), 2.0)"),
        (make("select", make("lt", integer(1), integer(2)), S, real(0.0)), "s"),
        (make("select", make("le", J, I), Const(True, BOOL), Const(False, BOOL)), "le(j, i)"),
        (make("min", make("max", I, integer(9)), integer(4)), "4"),
        (make("mul", Leaf("q"), real(1.0)), "q"),
        (make("sub", Leaf("d"), Leaf("d")), "sub(d, d)"),  # a vector does not become a scalar
    ],
)  # fmt: skip
def test_what_becomes_of(e: Expr, simple: str) -> None:
    assert repr(simplify_expr(e)) == simple


def test_new_nodes_keep_the_position_of_what_they_replace() -> None:
    at = Span(4, 9, 14)
    found = simplify_expr(make("sub", J, integer(5), span=at))
    assert found == make("add", J, integer(-5)) and found.span == at


def test_a_division_that_specialisation_made_one_by_zero_is_refused() -> None:
    v = one("mask = j // C < i", "C: const i32")
    verify(v)
    with pytest.raises(VerifyError, match=r"one: mask: integer division by zero in floordiv\(j, 0\)"):
        simplify(specialize(v, const={"C": 0}, head_dim_qk=64, head_dim_vo=64))


def test_simplify_is_linear_and_takes_any_depth() -> None:
    e: Expr = S
    for _ in range(200):
        e = make("add", e, e)
    for _ in range(2000):
        e = make("add", make("mul", e, real(1.0)), make("sub", S, real(0.0)))
    start = time.perf_counter()
    assert len(list(walk(simplify_expr(e)))) == 2201
    assert time.perf_counter() - start < 5.0


# specialize


def test_specialize_puts_in_constants_and_head_dims() -> None:
    body = "scale = rsqrt(f32(head_dim_qk + head_dim_vo))\nf_logits = softcap(s, cap) + w"
    v = one(body, "w: f32, cap: const f32 = 50.0")
    done = specialize(v, const={"cap": 30}, head_dim_qk=192, head_dim_vo=128)
    assert done.scalars == (ScalarParam("w", F32, None, False), ScalarParam("cap", F32, 30.0, True))
    assert {x.name for _, e in done.expressions() for x in walk(e) if isinstance(x, Param)} == {"w"}
    simple = simplify(done)
    assert simple.scale == real(320**-0.5)
    assert repr(simple.f_logits) == "add(mul(tanh(div(s, 30.0)), 30.0), w)"
    assert specialize(v, const={}, head_dim_qk=64, head_dim_vo=64).scalars[1].default == 50.0


@pytest.mark.parametrize(
    ("const", "error", "words"),
    [
        ({"kap": 1.0}, ValueError, "'kap' is no parameter of one; its const parameters: cap, n, flag"),
        ({"w": 1.0}, ValueError, "'w' is a run-time parameter of one"),
        ({"cap": 1.0}, ValueError, "'n' has no default: a value of type i32 is needed"),
        ({"cap": "1", "n": 1}, TypeError, "'cap' is f32, found '1'"),
        ({"cap": True, "n": 1}, TypeError, "'cap' is f32, found True"),
        ({"n": 1.0}, TypeError, "'n' is i32, found 1.0"),
        ({"n": True}, TypeError, "'n' is i32, found True"),
        ({"n": 2**31}, ValueError, "'n' is i32, found 2147483648"),
        ({"n": 1, "flag": 1}, TypeError, "'flag' is bool, found 1"),
    ],
)
def test_specialize_refuses(const: dict, error: type[Exception], words: str) -> None:
    header = "w: f32, cap: const f32 = 50.0, n: const i32, flag: const bool = true"
    v = one("mask = j < n and flag\nf_logits = softcap(s, cap) + w", header)
    with pytest.raises(error, match=words):
        specialize(v, const=const, head_dim_qk=64, head_dim_vo=64)


# level


@pytest.mark.parametrize(
    ("e", "expected"),
    [
        (real(1.0), "call"),
        (Param("cap", F32), "call"),
        (Leaf("kv_len"), "call"),
        (Load("table", (integer(0), integer(1)), F32), "call"),
        (Load("slope", (H,), F32), "head"),
        (make("sub", Leaf("i0"), Leaf("j1")), "head"),
        (make("add", I, H), "row"),
        (Leaf("iq"), "row"),
        (Load("k_scale", (J, Leaf("g")), F32), "col"),
        (make("sub", J, Leaf("i0")), "col"),
        (make("le", J, I), "cell"),
        (make("add", make("mul", S, real(0.0)), real(1.0)), "cell"),
        (Leaf("dot"), "cell"),
        (Leaf("l"), "cell"),
        (Leaf("lse"), "cell"),
    ],
)
def test_levels(e: Expr, expected: str) -> None:
    assert level(e) == expected


def test_levels_of_a_deep_and_shared_expression() -> None:
    e: Expr = make("f32", J)
    for _ in range(200):
        e = make("add", e, e)
    for _ in range(5000):
        e = make("neg", e)
    levels = Levels()
    assert levels(e) == "col" and levels(make("mul", e, make("f32", I))) == "cell"


# drop_row_constants

BIAS = "tensor slope[h]: f32\ntensor bias[iq, h]: f32\ntensor col[j]: f32\n"


@pytest.mark.parametrize(
    ("logit", "left"),
    [
        ("s + bias[iq, h]", "s"),
        ("s - bias[iq, h] + col[j]", "add(s, col[j])"),
        ("bias[iq, h] - s", "neg(s)"),
        ("(s + bias[iq, h]) * slope[h] / 2.0", "div(mul(s, slope[h]), 2.0)"),
        ("-(bias[iq, h] + s)", "neg(s)"),
        ("s + slope[h] * f32(j - i)", "add(s, mul(slope[h], f32(sub(j, i))))"),
        ("tanh(s + bias[iq, h])", "tanh(add(s, bias[iq, h]))"),
        ("max(s + slope[h], 0.0) + slope[h]", "max(add(s, slope[h]), 0.0)"),
        ("1.0 / (s + slope[h])", "div(1.0, add(s, slope[h]))"),
        ("bias[iq, h]", "0.0"),
    ],
)
def test_terms_of_a_row_are_dropped(logit: str, left: str) -> None:
    v = one(f"{BIAS}f_logits = {logit}")
    assert repr(drop_row_constants(v, keeps_lse=False).f_logits) == left
    assert drop_row_constants(v, keeps_lse=True) is v


@pytest.mark.parametrize(
    "more",
    [
        "scan = none",
        "scan = softmax(sink = slope[h])",
        "epilogue = o * lse",
        "emit peak[iq, h] = max(l)",
    ],
)
def test_nothing_is_dropped_that_something_else_sees(more: str) -> None:
    v = one(f"{BIAS}f_logits = s + bias[iq, h]\n{more}")
    assert drop_row_constants(v, keeps_lse=False) is v


@given(slot_expressions("f_logits"), st.integers(0, 99))
@settings(max_examples=80, deadline=None)
def test_what_is_dropped_is_the_same_for_a_whole_row(e: Expr, seed: int) -> None:
    left = drop_row_constants(replace(PLAIN, f_logits=e), keeps_lse=False).f_logits
    ev = evaluator(seed)
    # all lanes in one row
    row = {name: np.repeat(x[:1], ev.lanes, axis=0) for name, x in ev.values.items() if name not in ("j", "s", "dot")}
    ev.values = {**ev.values, **row}
    with np.errstate(all="ignore"):
        gap = ev(e) - ev(left)
    gap = gap[np.isfinite(gap)]
    assert gap.size == 0 or np.allclose(gap, gap[0], rtol=1e-9, atol=1e-6 * np.abs(gap).max())


def test_language_examples(golden) -> None:
    """What is left of the language page's variants at head dims 128."""
    source = Path(__file__).with_name("language.attn").read_text(encoding="utf-8")
    for v in load(Source("language.attn", source)):
        done = simplify(specialize(v, const={}, head_dim_qk=128, head_dim_vo=128))
        golden(f"golden_simplified/{v.name}.ir", print_variant(done))
