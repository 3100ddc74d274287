"""What the language means in IR."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from frontend_helpers import shown, variant

from attncc.diagnostics import NOWHERE, Source, Span
from attncc.frontend import load
from attncc.ir.nodes import (
    BOOL,
    F32,
    I32,
    SLOT_DEFAULTS,
    Const,
    Leaf,
    Load,
    Op,
    ScalarParam,
    Scan,
    TensorParam,
    Type,
    objects,
)
from attncc.ir.text import parse_variant, print_variant
from attncc.ir.verify import verify

EXAMPLES = Path(__file__).parents[2] / "examples"
LANGUAGE = Path(__file__).with_name("language.attn")


@pytest.fixture(scope="module")
def language() -> dict[str, Any]:
    return {v.name: v for v in load(Source.read(LANGUAGE))}


# -- the contract's own examples


def test_defaults() -> None:
    v = variant("mask = true")
    for slot, expected in SLOT_DEFAULTS.items():
        assert getattr(v, slot) == expected
    assert shown(v.scale) == "rsqrt(f32(head_dim_qk))"
    assert (v.name, v.doc, v.scalars, v.tensors, v.scan, v.domain, v.emits) == (
        "t",
        None,
        (),
        (),
        Scan("softmax"),
        None,
        (),
    )


def test_gemma2_local(language: dict[str, Any]) -> None:
    v = language["gemma2_local"]
    assert v.scalars == (
        ScalarParam("window", I32, None, False, v.scalars[0].span),
        ScalarParam("cap", F32, 50.0, True, v.scalars[1].span),
    )
    assert shown(v.scale) == "rsqrt(256.0)"
    assert shown(v.f_logits) == "mul(cap, tanh(div(s, cap)))"
    assert shown(v.mask) == "and(lt(sub(i, window), j), le(j, i))"
    i_minus_window, j_below = v.mask.args[0].args[0], v.mask.args[1].args[0]
    assert (i_minus_window.type, v.mask.type, v.f_logits.type) == (I32, BOOL, F32)
    assert v.mask.args[0].args[1] is j_below, "the middle of a chain is one node"
    assert v.span_of("mask") == Span(7, 5, 9) and v.span_of("f_q") == NOWHERE
    assert v.mask.span == Span(7, 16, 35)


def test_gpt_oss(language: dict[str, Any]) -> None:
    v = language["gpt_oss"]
    assert v.tensors == (TensorParam("sink", ("h",), "f32", grad=True, span=v.tensors[0].span),)
    assert v.scan.kind == "softmax" and shown(v.scan.sink) == "sink[h]"


def test_alibi(language: dict[str, Any]) -> None:
    assert shown(language["alibi"].f_logits) == "add(s, mul(slope[h], f32(sub(j, i))))"


def test_qwen3_gated(language: dict[str, Any]) -> None:
    v = language["qwen3_gated"]
    norm = "mul(mul({x}, rsqrt(add(div(sum(mul({x}, {x})), f32(head_dim_qk)), eps))), {w}[d])"
    rope = "rope({x}, {pos}, theta, None, neox, ())"
    assert shown(v.f_q) == rope.format(x=norm.format(x="q", w="wq"), pos="i")
    assert shown(v.f_k) == rope.format(x=norm.format(x="k", w="wk"), pos="j")
    assert shown(v.epilogue) == "mul(o, sigmoid(gate[iq, h, e]))"
    assert (v.f_q.type, v.epilogue.type) == (Type("f32", "d"), Type("f32", "e"))
    gate = next(x for x in objects(v.epilogue) if isinstance(x, Load))
    assert gate.type == Type("f32", "e")
    assert [t.dtype for t in v.tensors] == ["f32", "f32", "bf16"] and all(t.grad for t in v.tensors)


def test_tree_verify(language: dict[str, Any]) -> None:
    v = language["tree_verify"]
    t = "sub(j, prefix[b])"
    assert shown(v.mask) == f"or(lt({t}, 0), bit(ancestors[iq, floordiv({t}, 32)], mod({t}, 32)))"
    assert len({id(x) for x in objects(v.mask) if isinstance(x, Op) and x.op == "sub"}) == 1, "a let is one node"
    assert v.tensors[1].dims == ("iq", "w")
    assert next(x for x in objects(v.mask) if isinstance(x, Load) and x.tensor == "ancestors").type == I32


def test_packed_documents(language: dict[str, Any]) -> None:
    v = language["packed_documents"]
    assert shown(v.mask) == "and(le(j, i), eq(doc[b, i], doc[b, j]))"
    assert v.tensors[0].sorted and not v.tensors[0].grad


def test_flash_sigmoid(language: dict[str, Any]) -> None:
    v = language["flash_sigmoid"]
    assert shown(v.f_logits) == "sigmoid(add(s, bias))" and v.scan == Scan("none")


def test_t5_bias(language: dict[str, Any]) -> None:
    v = language["t5_bias"]
    far = "min(add(8, i32(mul(div(log(div(f32(abs(sub(j, i))), 8.0)), log(16.0)), 8.0))), 15)"
    bucket = f"add(select(lt(0, sub(j, i)), 16, 0), select(lt(abs(sub(j, i)), 8), abs(sub(j, i)), {far}))"
    assert shown(v.f_logits) == f"add(s, table[h, {bucket}])"
    assert v.tensors[0].dims == ("h", 32)


@pytest.mark.parametrize("path", [LANGUAGE, *sorted(EXAMPLES.glob("*.attn"))], ids=lambda p: p.stem)
def test_files_lower_and_round_trip(path: Path) -> None:
    variants = load(Source.read(path))
    assert variants
    for v in variants:
        verify(v)
        assert parse_variant(print_variant(v)) == v


# -- expressions, in a slot where all of their names are in scope

LOGITS = {
    # arithmetic and its conversions
    "s + 1": "add(s, f32(1))",
    "i + 1": "f32(add(i, 1))",
    "i / 2": "div(f32(i), f32(2))",
    "i // 2 - i % 2": "f32(sub(floordiv(i, 2), mod(i, 2)))",
    "s // 2": "floordiv(s, f32(2))",
    "-s": "neg(s)",
    "- -2": "f32(neg(neg(2)))",
    "-2147483648": "f32(-2147483648)",
    "2 ** 3": "f32(pow(2, 3))",
    "i ** (1 + 1)": "f32(pow(i, 2))",
    "i ** n": "f32(pow(i, n))",
    "s ** 2": "pow(s, f32(2))",
    "2.0 ** -i": "pow(2.0, f32(neg(i)))",
    "1_000 + .5e-1 + 2. + 1E3": "add(add(add(f32(1000), 0.05), 2.0), 1000.0)",
    # precedence
    "s + 2.0 * s - s / 2.0": "sub(add(s, mul(2.0, s)), div(s, 2.0))",
    "-s ** 2.0": "neg(pow(s, 2.0))",
    "2.0 ** 3.0 ** s": "pow(2.0, pow(3.0, s))",
    "s - s - s": "sub(sub(s, s), s)",
    "s if flag or i < j and not flag else 0.0": "select(or(flag, and(lt(i, j), not(flag))), s, 0.0)",
    "1.0 if flag else 2.0 if i < j else 3.0": "select(flag, 1.0, select(lt(i, j), 2.0, 3.0))",
    # comparisons
    "s if i > j else 1": "select(lt(j, i), s, f32(1))",
    "s if i >= j else s": "select(le(j, i), s, s)",
    "s if i == 1.5 else s": "select(eq(f32(i), 1.5), s, s)",
    "s if flag != (i < j) else s": "select(ne(flag, lt(i, j)), s, s)",
    "s if 0 <= i < j != 3 else s": "select(and(and(le(0, i), lt(i, j)), ne(j, 3)), s, s)",
    "s if i < x < j else s": "select(and(lt(f32(i), x), lt(x, f32(j))), s, s)",
    # builtins
    "min(i, j, 3)": "f32(min(min(i, j), 3))",
    "max(i, 0.5, j)": "max(max(f32(i), 0.5), f32(j))",
    "clamp(i, 0, 7)": "f32(min(max(i, 0), 7))",
    "clamp(s, lo = 0, hi = i)": "min(max(s, f32(0)), f32(i))",
    "abs(i) + abs(s)": "add(f32(abs(i)), abs(s))",
    "floor(s) + floor(i)": "add(floor(s), floor(f32(i)))",
    "relu(s)": "max(s, 0.0)",
    "softcap(s, 30)": "mul(f32(30), tanh(div(s, f32(30))))",
    "i32(s) + i32(j) + f32(i) + f32(s)": "add(add(f32(add(i32(s), j)), f32(i)), s)",
    "exp(i) + log1p(s)": "add(exp(f32(i)), log1p(s))",
    "1.0 if bit(i, 3) else 0.0": "select(bit(i, 3), 1.0, 0.0)",
    "dot * rsqrt(head_dim_qk)": "mul(dot, rsqrt(f32(head_dim_qk)))",
    "s + b + h + g + iq + kv_len + qo_len": "add(add(add(add(add(add(s, f32(b)), f32(h)), f32(g)), f32(iq)), f32(kv_len)), f32(qo_len))",  # noqa: E501
    "head_dim_vo + group_size + num_qo_heads + num_kv_heads":
        "f32(add(add(add(head_dim_vo, group_size), num_qo_heads), num_kv_heads))",
}  # fmt: skip
FLOATS = (
    *("floor", "exp", "exp2", "log", "log2", "log1p", "sqrt", "rsqrt"),
    *("tanh", "sin", "cos", "sigmoid", "logsigmoid", "softplus"),
)


@pytest.mark.parametrize("name", FLOATS)
def test_float_function(name: str) -> None:
    assert shown(variant(f"f_logits = {name}(s)").f_logits) == f"{name}(s)"
    assert shown(variant(f"f_q = {name}(q)").f_q) == f"{name}(q)"


VECTORS = {
    "q * 2": "mul(q, f32(2))",
    "q * w": "mul(q, w[d])",
    "q * w[d] + w[0]": "add(mul(q, w[d]), w[0])",
    "q * table[d // 2]": "mul(q, table[floordiv(d, 2)])",
    "q if d < 64 else -q": "select(lt(d, 64), q, neg(q))",
    "d": "f32(d)",
    "q / sqrt(sum(q * q))": "div(q, sqrt(sum(mul(q, q))))",
    "rmsnorm(q)": "mul(q, rsqrt(add(div(sum(mul(q, q)), f32(head_dim_qk)), 1e-06)))",
    "rmsnorm(q, none, 1e-5)": "mul(q, rsqrt(add(div(sum(mul(q, q)), f32(head_dim_qk)), 1e-05)))",
    "rmsnorm(q, 1 + w)": "mul(mul(q, rsqrt(add(div(sum(mul(q, q)), f32(head_dim_qk)), 1e-06))), add(f32(1), w[d]))",
    "l2norm(q, eps = 0)": "mul(q, rsqrt(add(sum(mul(q, q)), f32(0))))",
    "rope(q, i)": "rope(q, i, 10000.0, None, neox, ())",
    "rope(q, i, 1e6, 64, interleaved)": "rope(q, i, 1000000.0, 64, interleaved, ())",
    "rope(q, max(i, 0), dims = head_dim_qk, scaling = none)": "rope(q, max(i, 0), 10000.0, None, neox, ())",
    "rope(q, i, scaling = linear(4))": "rope(q, i, 10000.0, None, neox, (linear, f32(4)))",
    "rope(q, i, scaling = llama31(8.0, 1.0, 4.0, 8192))":
        "rope(q, i, 10000.0, None, neox, (llama31, 8.0, 1.0, 4.0, f32(8192)))",
    "rope(q, i, scaling = yarn(4.0, 4096.0))":
        "rope(q, i, 10000.0, None, neox, (yarn, 4.0, 4096.0, 32.0, 1.0, None))",
    "rope(q, i, scaling = yarn(4.0, 4096.0, attention_factor = 1.5, beta_fast = x))":
        "rope(q, i, 10000.0, None, neox, (yarn, 4.0, 4096.0, x, 1.0, 1.5))",
    "rope(q, i, dims = 32 * 2, cos = cosines, sin = sines)":
        "rope(q, i, 10000.0, 64, neox, (), cosines, sines)",
}  # fmt: skip


@pytest.mark.parametrize("text", VECTORS)
def test_vector(text: str) -> None:
    tensors = (
        "tensor w[d]: f32",
        "tensor table[64]: f16",
        "tensor cosines[pos, 32]: f32",
        "tensor sines[pos, n]: bf16",
    )
    v = variant(*tensors, f"f_q = {text}", scalars="x: f32")
    assert shown(v.f_q) == VECTORS[text] and v.f_q.type == Type("f32", "d")


def test_layernorm_and_the_value_side() -> None:
    v = variant("tensor w[e]: f32", "tensor c[e]: f32", "f_v = layernorm(v, w, c, 1e-5)", "epilogue = rope(o, -i)")
    centred = "sub(v, div(sum(v), f32(head_dim_vo)))"
    normed = f"mul({centred}, rsqrt(add(div(sum(mul({centred}, {centred})), f32(head_dim_vo)), 1e-05)))"
    assert shown(v.f_v) == f"add(mul({normed}, w[e]), c[e])"
    assert v.f_v.type == v.epilogue.type == Type("f32", "e")
    assert shown(v.epilogue) == "rope(o, neg(i), 10000.0, None, neox, ())"


@pytest.mark.parametrize(
    ("dtype", "type_"),
    [("f32", F32), ("bf16", F32), ("f16", F32), ("i32", I32), ("u32", I32), ("u8", I32), ("bool", BOOL)],
)
def test_type_of_a_load(dtype: str, type_: Type) -> None:
    v = variant(f"tensor t[h, 3]: {dtype}", "mask = t[h, 2] == t[h, 1]")
    assert v.mask.args[0] == Load("t", (Leaf("h"), Const(2, I32)), type_)


# -- statements


def test_index_spaces() -> None:
    v = variant(
        "tensor a[b, h, g, pos]: f32",
        "tensor c[iq, h, 7]: f32",
        "tensor x[j, g]: f32",
        "f_logits = s + a[b, h, g, j] + c[iq, h, 6] + x[j, g]",
    )
    assert [t.dims for t in v.tensors] == [("b", "h", "g", "pos"), ("iq", "h", 7), ("j", "g")]


def test_scalars() -> None:
    v = variant(
        "mask = true", scalars="a: i32 = -1, b2: f32 = 1, c: f32 = log(2.0) / 2, x: const bool = not false, y: i32,"
    )
    assert [(p.name, str(p.type), p.default, p.const) for p in v.scalars] == [
        ("a", "i32", -1, False),
        ("b2", "f32", 1.0, False),
        ("c", "f32", pytest.approx(0.34657359), False),
        ("x", "bool", True, True),
        ("y", "i32", None, False),
    ]
    assert isinstance(v.scalars[1].default, float)


def test_marks_in_any_order() -> None:
    v = variant("tensor a[pos]: f32 sorted grad", "tensor c[pos]: f32 grad sorted", "mask = a[j] < c[j]")
    assert all(t.grad and t.sorted for t in v.tensors)


def test_sink_and_scan() -> None:
    assert variant("scan = softmax()").scan == Scan("softmax")
    assert variant("scan = softmax(sink = 0)").scan == Scan("softmax", Op("f32", (Const(0, I32),), F32))
    assert shown(variant("scan = softmax(sink = f32(h) + i)").scan.sink) == "add(f32(h), f32(i))"


def test_domain() -> None:
    v = variant("tensor sel[iq, g, n]: i32", "domain = blocks(sel[iq, g, :], size = 32 * 2)")
    assert v.domain is not None and v.domain.tensor == "sel" and v.domain.index == (Leaf("iq"), Leaf("g"), None)
    assert shown(v.domain.size) == "mul(32, 2)"
    v = variant("tensor sel[iq, g, 8]: i32", "domain = blocks(sel[iq, g, :], C)", scalars="C: const i32")
    assert v.domain is not None and shown(v.domain.size) == "C"


def test_emits() -> None:
    v = variant(
        "emit peak[iq, h] = max(l)",
        "emit low[h] = min(l * 2)",
        "emit mass[j, g] = sum(exp(l - lse))",
        "emit seen[b] = sum(1)",
    )
    assert [(e.name, e.index, e.reduce, shown(e.value)) for e in v.emits] == [
        ("peak", ("iq", "h"), "max", "l"),
        ("low", ("h",), "min", "mul(l, f32(2))"),
        ("mass", ("j", "g"), "sum", "exp(sub(l, lse))"),
        ("seen", ("b",), "sum", "f32(1)"),
    ]


def test_epilogue_takes_lse() -> None:
    assert shown(variant("epilogue = o * sigmoid(lse)").epilogue) == "mul(o, sigmoid(lse))"


def test_slots_of_keys_and_heads() -> None:
    v = variant(
        "tensor ks[j, g]: f32",
        "f_k = k * ks[j, g] + f32(b)",
        "f_v = v * ks[j, g] * e",
        "scale = f32(h) + g + b",
    )
    assert shown(v.f_k) == "add(mul(k, ks[j, g]), f32(b))"
    assert shown(v.f_v) == "mul(mul(v, ks[j, g]), f32(e))"
    assert shown(v.scale) == "add(add(f32(h), f32(g)), f32(b))"


def test_docstring() -> None:
    assert variant('"""One line,', "", '  and \\"more\\".', '"""', "mask = true").doc == 'One line,\n\nand "more".'
    assert variant("'It says 12 \" wide'", "mask = true").doc == 'It says 12 " wide'
    assert variant("'a docstring is a body'").mask == Const(True, BOOL)


def test_def_is_typed_at_each_use() -> None:
    v = variant(
        "def twice(x) = x + x",
        "def third(x, y) = y if x < 0 else twice(x)",
        "f_logits = third(i, 0) + third(y = 1.5, x = s)",
        "f_q = twice(q)",
    )
    first, second = "select(lt(i, 0), 0, add(i, i))", "select(lt(s, f32(0)), 1.5, add(s, s))"
    assert shown(v.f_logits) == f"add(f32({first}), {second})"
    assert shown(v.f_q) == "add(q, q)"


def test_def_reads_what_surrounds_it() -> None:
    v = variant("def rel(x) = x * slope + j - i", "f_logits = rel(s)", scalars="slope: f32")
    assert shown(v.f_logits) == "sub(add(mul(s, slope), f32(j)), f32(i))"


def test_def_arguments_hide_names() -> None:
    v = variant("let n = 3", "def f(n, w) = n + w", "f_logits = f(s, n)", scalars="w: f32")
    assert shown(v.f_logits) == "add(s, f32(3))"


def test_order_does_not_matter() -> None:
    v = variant("f_logits = f(t)", "def f(x) = x * u", "let t = s + 1.0", "let u = 2.0")
    assert shown(v.f_logits) == "mul(add(s, 1.0), 2.0)"


def test_sharing_keeps_long_chains_small() -> None:
    lets = ["let a0 = s", *(f"let a{n + 1} = a{n} * a{n} + a{n}" for n in range(60))]
    v = variant(*lets, "f_logits = a60")
    assert sum(1 for _ in objects(v.f_logits)) == 121


def test_statements_over_several_lines() -> None:
    v = variant("scan = softmax(", "    sink = 1.0,", ")", "mask = (j", "# a comment", "", "    <= i", ")")
    assert shown(v.scan.sink) == "1.0" and shown(v.mask) == "le(j, i)"


def test_guarded_and_clamped_rows() -> None:
    v = variant(
        "tensor t[pos]: f32",
        "let safe = t[i] if i >= 0 else 1.0",
        "f_q = q * safe * t[max(i, 0)] * t[clamp(i + 3, 0, 9)] * t[abs(i)] * t[i % 8] * t[i if i > 0 else 0]",
        "epilogue = o * (1.0 if i < 0 or t[i] > 0.0 else 2.0)",
        "f_logits = s + t[i]",
    )
    assert sum(isinstance(x, Load) for x in objects(v.f_q)) == 6


def test_several_variants_keep_their_names_apart() -> None:
    text = (
        "attention a(x: i32):\n    let y = x\n    mask = j < y\nattention c(x: f32):\n    let y = x\n    f_logits = y\n"
    )
    first, second = load(Source("t", text))
    assert (shown(first.mask), shown(second.f_logits)) == ("lt(j, x)", "x")
    assert first.source == second.source and first.source is not None and first.source.text == text
