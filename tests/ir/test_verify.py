from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from ir.strategies import SCALARS, TENSORS, variants

from attncc.ir.nodes import (
    BOOL,
    F32,
    I32,
    SLOT_DEFAULTS,
    Const,
    Domain,
    Emit,
    Expr,
    Leaf,
    Load,
    Op,
    Param,
    Rope,
    ScalarParam,
    Scan,
    TensorParam,
    Type,
    Variant,
    make,
)
from attncc.ir.verify import VerifyError, verify

GOOD = Variant("good", None, SCALARS, TENSORS, **SLOT_DEFAULTS, scan=Scan("softmax"))
I, J, S, Q, O = map(Leaf, "ijsqo")  # noqa: E741
LOGIT = Leaf("l")
TRUE = Const(True, BOOL)
WINDOW_POWER = make("lt", make("pow", I, Param("window", I32)), J)
VEC_D, VEC_E = Type("f32", "d"), Type("f32", "e")
ONE, ZERO = Const(1, I32), Const(0, I32)


def slot(name: str, e: Expr) -> Callable[[Variant], Variant]:
    return lambda v: replace(v, **{name: e})


def biased(tensor: str, *index: Expr, type_: Type = F32) -> Callable[[Variant], Variant]:
    return slot("f_logits", make("add", S, Load(tensor, index, type_)))


def rope(**changes) -> Callable[[Variant], Variant]:
    return slot("f_q", replace(Rope(Q, I, Const(1e4, F32), None, "neox"), **changes))


def domain(*index: Expr | None, tensor: str = "chosen", size: Expr = ONE) -> Callable[[Variant], Variant]:
    return lambda v: replace(v, domain=Domain(tensor, index, size))


def emit(index: tuple[str, ...] = (), reduce: str = "max", value: Expr = LOGIT) -> Callable[[Variant], Variant]:
    return lambda v: replace(v, emits=(Emit("peak", index, reduce, value),))


def scan(kind: str, sink: Expr | None = None) -> Callable[[Variant], Variant]:
    return lambda v: replace(v, scan=Scan(kind, sink))


def both(f, g) -> Callable[[Variant], Variant]:
    return lambda v: g(f(v))


BAD: dict[str, tuple[Callable[[Variant], Variant], str, str]] = {
    # leaves
    "j in scale": (slot("scale", make("f32", J)), "scale", "'j' has no meaning here in j"),
    "s in the mask": (slot("mask", make("lt", S, S)), "mask", "'s' has no meaning here"),
    "i in f_k": (slot("f_k", make("mul", Leaf("k"), make("f32", I))), "f_k", "'i' has no meaning here"),
    "h in f_v": (slot("f_v", make("mul", Leaf("v"), make("f32", Leaf("h")))), "f_v", "'h' has no meaning here"),
    "j in the epilogue": (slot("epilogue", make("mul", O, make("f32", J))), "epilogue", "'j' has no meaning here"),
    "a tile's corner": (slot("f_logits", make("f32", Leaf("i0"))), "f_logits", "'i0' has no meaning here"),
    "l in f_logits": (slot("f_logits", Leaf("l")), "f_logits", "'l' has no meaning here"),
    "o in an emit": (emit(value=make("sum", O)), "emit peak", "'o' has no meaning here"),
    "lse without softmax": (
        both(scan("none"), slot("epilogue", make("mul", O, Leaf("lse")))), "epilogue", "no lse where scan is none"),
    # types of slots
    "mask of i32": (slot("mask", I), "mask", "expected bool, found i32 in i"),
    "scale of i32": (slot("scale", ONE), "scale", "expected f32, found i32 in 1"),
    "scalar f_q": (slot("f_q", make("sum", Q)), "f_q", "expected f32[d], found f32 in sum(q)"),
    "sink of i32": (scan("softmax", ONE), "sink", "expected f32, found i32"),
    "emit of i32": (emit(value=J), "emit peak", "expected f32, found i32"),
    # ops
    "wrong element": (slot("f_logits", Op("add", (S, I), F32)), "f_logits", "add of f32, i32 in add(s, i)"),
    "wrong result": (slot("f_logits", Op("add", (S, S), I32)), "f_logits", "the node says i32, its arguments f32"),
    "wrong arity": (slot("f_logits", Op("add", (S,), F32)), "f_logits", "add takes 2 arguments, found 1"),
    "unknown op": (slot("f_logits", Op("gelu", (S,), F32)), "f_logits", "unknown op 'gelu' in gelu(s)"),
    "order of bools": (slot("mask", Op("lt", (TRUE, TRUE), BOOL)), "mask", "lt of bool, bool"),
    "feature of q in the epilogue": (
        slot("epilogue", Op("add", (O, Load("gain", (Leaf("d"),), VEC_D)), VEC_E)), "epilogue", "'d' has no meaning"),
    "vector of another space": (slot("epilogue", Op("neg", (O,), VEC_D)), "epilogue", "its arguments f32[e]"),
    "negative power": (slot("mask", make("lt", make("pow", I, Const(-1, I32)), J)), "mask", "a negative exponent"),
    "power of a row": (slot("mask", make("lt", make("pow", I, J), J)), "mask", "exponent of an i32 is not constant"),
    "power of a run-time scalar": (slot("mask", WINDOW_POWER), "mask", "exponent of an i32 is not constant"),
    "division by zero": (slot("mask", make("lt", make("floordiv", I, ZERO), J)), "mask", "integer division by zero"),
    "rest of zero": (slot("mask", make("lt", make("mod", I, ZERO), J)), "mask", "integer division by zero"),
    # literals and parameters
    "an int in f32": (slot("f_logits", Const(1, F32)), "f_logits", "1 is no literal of type f32"),
    "a bool in i32": (slot("mask", make("lt", Const(True, I32), J)), "mask", "True is no literal of type i32"),
    "33 bits": (slot("mask", make("lt", Const(2**31, I32), J)), "mask", "more than 32 bits"),
    "undeclared": (slot("f_logits", Param("kap", F32)), "f_logits", "no scalar 'kap' of type f32 is declared"),
    "declared otherwise": (slot("f_logits", Param("window", F32)), "f_logits", "no scalar 'window' of type f32"),
    # loads
    "no tensor": (biased("slopes", Leaf("h")), "f_logits", "no tensor 'slopes' is declared"),
    "rank": (biased("slope", Leaf("h"), J), "f_logits", "slope has 1 dimensions, the index 2"),
    "index of f32": (biased("slope", S), "f_logits", "an index of type f32"),
    "dtype": (biased("start", Leaf("b")), "f_logits", "the node says f32, start and its index i32"),
    "space lost": (slot("f_q", Load("gain", (Leaf("d"),), F32)), "f_q", "the node says f32, gain and its index f32[d]"),
    "wrong feature": (
        slot("epilogue", make("add", O, Load("gain", (Leaf("e"),), VEC_E))), "epilogue", "dimension d is indexed"),
    # rope
    "rope of a scalar": (rope(x=make("sum", Q)), "f_q", "rope of f32"),
    "rope at f32": (rope(pos=Const(1.0, F32)), "f_q", "rope at f32"),
    "odd rope": (rope(dims=3), "f_q", "3 rotated features"),
    "rope style": (rope(style="gptj"), "f_q", "unknown style 'gptj'"),
    "rope scaling": (rope(scaling=("llama31", Const(8.0, F32))), "f_q", "scaling 'llama31' with 1 arguments"),
    "cos alone": (rope(cos="cosines"), "f_q", "cos without sin"),
    "cos of i32": (rope(cos="words", sin="words"), "f_q", "'words' is no table"),
    # declarations
    "taken": (lambda v: replace(v, scalars=(*SCALARS, ScalarParam("slope", F32, None, False))), "slope", "is taken"),
    "reserved": (lambda v: replace(v, scalars=(ScalarParam("kv_len", I32, None, False),)), "kv_len", "is taken"),
    "default": (lambda v: replace(v, scalars=(ScalarParam("a", I32, 1.0, False),)), "a", "1.0 is no literal"),
    "f64": (lambda v: replace(v, tensors=(TensorParam("a", ("h",), "f64"),)), "a", "unknown dtype 'f64'"),
    "empty": (lambda v: replace(v, tensors=(TensorParam("a", ("h", 0), "f32"),)), "a", "a dimension of no length"),
    "b beside iq": (lambda v: replace(v, tensors=(TensorParam("a", ("b", "iq"), "f32"),)), "a", "no b beside them"),
    # scan, domain, emit
    "scan": (scan("topk"), "scan", "a 'topk' scan"),
    "sink without softmax": (scan("none", Const(0.0, F32)), "scan", "a 'none' scan with a sink"),
    "domain without :": (domain(Leaf("iq"), Leaf("g"), ZERO), "domain", "0 of the indices are `:`, not one"),
    "domain of two :": (domain(Leaf("iq"), None, None), "domain", "2 of the indices are `:`, not one"),
    "domain rank": (domain(Leaf("iq"), None), "domain", "chosen has 3 dimensions, the index 2"),
    "domain of floats": (domain(None, tensor="slope"), "domain", "slope holds f32, not block numbers"),
    "domain by key": (domain(J, Leaf("g"), None), "domain", "'j' has no meaning here"),
    "block size by row": (domain(Leaf("iq"), Leaf("g"), None, size=I), "domain size", "'i' has no meaning here"),
    "emit index": (emit(("i",)), "emit peak", "index [i]"),
    "emit index twice": (emit(("h", "h")), "emit peak", "index [h, h]"),
    "emit b beside iq": (emit(("b", "iq")), "emit peak", "no b beside them"),
    "emit mean": (emit(reduce="mean"), "emit peak", "unknown reduction 'mean'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_refuses(name: str) -> None:
    change, where, words = BAD[name]
    with pytest.raises(VerifyError) as found:
        verify(change(GOOD))
    assert str(found.value).startswith(f"good: {where}: ")
    assert words in str(found.value)
    assert found.value.slot == where and isinstance(found.value, ValueError)


GOOD_CHANGES: dict[str, Callable[[Variant], Variant]] = {
    "nothing": lambda v: v,
    "power of a const parameter": slot("mask", make("lt", make("pow", I, Param("size", I32)), J)),
    "scalar load of a feature": slot("f_logits", make("add", S, Load("gain", (ZERO,), F32))),
    "vector and scalar": slot("epilogue", make("mul", O, Load("slope", (Leaf("h"),), F32))),
    "lse in the epilogue": slot("epilogue", make("mul", O, Leaf("lse"))),
    "rope with tables": rope(dims=2, cos="cosines", sin="sines"),
    "yarn": rope(scaling=("yarn", *[Const(1.0, F32)] * 4, None)),
    "domain": domain(Leaf("iq"), Leaf("g"), None, size=Param("size", I32)),
    "emits": emit(("iq", "h")),
    "a parameter named like a tile's corner": lambda v: replace(v, scalars=(ScalarParam("i0", I32, None, False),)),
}


@pytest.mark.parametrize("name", GOOD_CHANGES)
def test_accepts(name: str) -> None:
    verify(GOOD_CHANGES[name](GOOD))


@given(variants())
@settings(max_examples=60, deadline=None)
def test_accepts_random_variants(v: Variant) -> None:
    verify(v)


def test_is_linear_in_distinct_nodes_and_takes_any_depth() -> None:
    e: Expr = S
    for _ in range(200):
        e = make("add", e, e)
    for _ in range(5000):
        e = make("neg", e)
    start = time.perf_counter()
    verify(replace(GOOD, f_logits=e))
    assert time.perf_counter() - start < 2.0
