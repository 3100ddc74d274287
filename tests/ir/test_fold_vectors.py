"""Factors taken out of f_q, f_k, f_v: what is found, what is left alone, and that the variant stays what it was."""

from __future__ import annotations

import math

import pytest
import torch

from attncc import compiler
from attncc.diagnostics import Source
from attncc.ir.fold_vectors import apart, fold_vectors, weight_of
from attncc.ir.nodes import SLOT_DEFAULTS, Leaf, Variant
from attncc.ir.reference import Reference
from attncc.ir.rewrite import simplify, specialize
from attncc.ir.verify import verify

TENSORS = """
    tensor ks[j, g]: f32
    tensor t[iq, h]: f32
    tensor w[d]: f32
    tensor u[e]: f32
    tensor c[g]: f32"""


def one(body: str) -> Variant:
    (v,) = compiler.variants(Source("x.attn", f"attention x(n: i32 = 3, a: f32 = 0.5):{TENSORS}\n    {body}\n"))
    return simplify(specialize(v, const={}, head_dim_qk=16, head_dim_vo=16))


FACTORS = [
    ("f_k = k", "s"),
    ("f_k = k * ks[j, g]", "mul(s, ks[j, g])"),
    ("f_k = ks[j, g] * k / 2.0", "mul(s, mul(ks[j, g], 0.5))"),
    ("f_k = k / ks[j, g]", "mul(s, div(1.0, ks[j, g]))"),
    ("f_k = -(k * ks[j, g])", "mul(s, neg(ks[j, g]))"),
    ("f_k = (k * a) * ks[j, g]", "mul(s, mul(a, ks[j, g]))"),
    ("f_k = k * ks[j, g] if j < n else k", "mul(s, select(lt(j, n), ks[j, g], 1.0))"),
    ("f_k = k if j < n else -k", "mul(s, select(lt(j, n), 1.0, -1.0))"),
    ("f_q = q * t[iq, h]", "mul(s, t[iq, h])"),
    ("f_q = q * t[iq, h]\n    f_k = k * ks[j, g]", "mul(mul(s, ks[j, g]), t[iq, h])"),
    ("f_q = q * a\n    f_logits = softcap(dot, 2.0) + s", "add(mul(tanh(mul(mul(dot, a), 0.5)), 2.0), mul(s, a))"),
]


@pytest.mark.parametrize("body, logits", FACTORS)
def test_factors_of_q_and_k_go_into_the_score(body: str, logits: str) -> None:
    v = simplify(fold_vectors(one(body)))
    verify(v)
    assert (v.f_q, v.f_k) == (Leaf("q"), Leaf("k")) and repr(v.f_logits) == logits


@pytest.mark.parametrize("body, weight, epilogue", [
    ("f_v = v", None, "o"),
    ("f_v = v * ks[j, g] * 0.5", "mul(ks[j, g], 0.5)", "o"),
    ("f_v = v if j < n else v * a", "select(lt(j, n), 1.0, a)", "o"),
    ("f_v = v * c[g]", None, "select(ne(o, 0.0), mul(o, c[g]), o)"),
    ("f_v = v / a\n    epilogue = o + 1.0", None, "add(select(ne(o, 0.0), mul(o, div(1.0, a)), o), 1.0)"),
    ("f_v = -v / 4.0", None, "mul(o, -0.25)"),
    ("f_v = v / kv_len", None, "select(ne(o, 0.0), mul(o, div(1.0, f32(kv_len))), o)"),
])  # fmt: skip
def test_factors_of_v_go_to_the_weights_or_past_them(body: str, weight: str | None, epilogue: str) -> None:
    v = simplify(fold_vectors(one(body)))
    verify(v)
    found = weight_of(v)
    assert (None if found is None else repr(found)) == weight and repr(v.epilogue) == epilogue


@pytest.mark.parametrize("body", [
    "f_k = k * w", "f_k = k * f32(d)", "f_k = k + ks[j, g]", "f_k = k * k", "f_k = rope(k, j) * ks[j, g]",
    "f_k = k * rsqrt(sum(k * k))", "f_k = 1.0 / k", "f_k = k * sum(w * w)", "f_k = k * a if j < n else k * w",
    "f_k = min(k, a)", "f_q = l2norm(q) * t[iq, h]", "f_v = v * u", "f_v = v * sum(v)", "f_v = abs(v)",
    "f_v = v if j < n else u",
])  # fmt: skip
def test_what_is_more_than_a_factor_is_left_alone(body: str) -> None:
    v = one(body)
    assert fold_vectors(v) == v
    assert any(getattr(v, slot) != SLOT_DEFAULTS[slot] for slot in ("f_q", "f_k", "f_v")) and weight_of(v) is None


def formula(q, k, v, ks, t, c, n, a, softmax: bool):
    """All three slots below, written out on the vectors themselves."""
    i, j = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1], torch.arange(k.shape[1])
    q = q * t[..., None] / 3.0
    k = -k * torch.where((j < n)[:, None], ks[0], a)[None, ..., None]
    v = v * ks[..., None] * c[:, None]
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    logits = torch.tanh(torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1]))
    hidden = j > i
    w = logits.masked_fill(hidden, -math.inf).softmax(-1) if softmax else logits.masked_fill(hidden, 0.0)
    return torch.einsum("bhij,bjhe->bihe", w, v) + 1.0


@pytest.mark.parametrize("softmax", [True, False])
def test_the_variant_stays_what_it_was(softmax: bool) -> None:
    scan = "softmax()" if softmax else "none"
    v = one(
        f"""f_q = q * t[iq, h] / 3.0
    f_k = -(k * ks[j, g] if j < n else k * a)
    f_v = v * ks[j, g] * c[g]
    f_logits = tanh(s)
    mask = j <= i
    scan = {scan}
    epilogue = o + 1.0"""
    )
    gen = torch.Generator().manual_seed(0)
    q, k, x = (torch.randn(1, n, h, 16, generator=gen, dtype=torch.float64) for n, h in ((7, 4), (9, 2), (9, 2)))
    params = {"ks": torch.randn(1, 9, 2, generator=gen), "t": torch.randn(1, 7, 4, generator=gen),
              "c": torch.randn(2, generator=gen)}  # fmt: skip
    want = formula(q, k, x, *(p.double() for p in params.values()), 3, 0.5, softmax)
    unused = {"w": torch.zeros(16), "u": torch.zeros(16)}
    for variant in (v, fold_vectors(v), simplify(fold_vectors(v))):
        reference = Reference(variant, head_dim=16, head_dim_vo=16, dtype=torch.bfloat16, const={})
        got = reference(q, k, x, **params, **unused)
        assert torch.allclose(got, want, rtol=1e-10, atol=1e-10)


# ------------------------------------------------------------------------------------- what is common to a row
RSQRT = "rsqrt(add(mul(sum(mul(k, k)), 0.0625), 1e-06))"


@pytest.mark.parametrize("body, scale, rest", [
    ("k", "1.0", "k"),
    ("rope(k * w, j)", "1.0", "rope(k * w, j)"),
    ("rmsnorm(k)", RSQRT, "k"),
    ("rope(rmsnorm(k, w), j, 1e4)", RSQRT, "rope(k * w, j, 1e4)"),
    ("-rope(k * ks[j, g], j, dims=8) / ks[j, g]", "div(ks[j, g], ks[j, g])", "-rope(k, j, dims=8)"),
    ("(k + 1.0) * sum(k) * w", "sum(k)", "(k + 1.0) * w"),
    ("(k * sum(k)) * (w * ks[j, g])", "mul(sum(k), ks[j, g])", "k * w"),
    ("ks[j, g] / (k * k + 1.0)", "ks[j, g]", "1.0 / (k * k + 1.0)"),
    ("k * a * c[g]", "1.0", "k * a * c[g]"),  # rows share it
    ("k * sum(rope(k, j))", "1.0", "k * sum(rope(k, j))"),
    ("k * ks[j, g] + w", "1.0", "k * ks[j, g] + w"),
])  # fmt: skip
def test_scales_of_rows(body: str, scale: str, rest: str) -> None:
    c, left = apart(one(f"f_k = {body}").f_k)
    assert (repr(c), left) == (scale, one(f"f_k = {rest}").f_k)
