"""The oracle against formulas written out independently, one variant after another."""

from __future__ import annotations

import pytest
import torch
from reference_cases import CASES, Case, Shape

from attncc.diagnostics import Source
from attncc.frontend import load
from attncc.ir import reference
from attncc.ir.reference import Reference

FULL_CASES = [pytest.param(case, id=case.name) for case in CASES]


def variant(case: Case):
    (found,) = load(Source("t.attn", case.attn()))
    return found


def inputs(s: Shape, g: torch.Generator):
    def rand(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    return rand(s.B, s.qo_len, s.H, s.D), rand(s.B, s.kv_len, s.G, s.D), rand(s.B, s.kv_len, s.G, s.E)


def widened(given: dict) -> dict:
    return {n: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for n, x in given.items()}


@pytest.mark.parametrize("case", FULL_CASES)
def test_formula(case: Case):
    v = variant(case)
    for number, s in enumerate(case.shapes):
        g = torch.Generator().manual_seed(number)
        qkv, params = inputs(s, g), case.params(s, g)
        oracle = Reference(v, head_dim=s.D, head_dim_vo=s.E)
        want_out, want_lse = case.formula(*qkv, **widened(case.given(params)))
        if want_lse is None:
            out, lse = oracle(*qkv, **params), None
        else:
            out, lse = oracle(*qkv, return_lse=True, **params)
        assert out.dtype == torch.float64 and out.shape == (s.B, s.qo_len, s.H, s.E)
        torch.testing.assert_close(out, want_out, rtol=1e-10, atol=1e-12, msg=lambda m, s=s: f"{s}: {m}")
        if want_lse is not None:
            torch.testing.assert_close(lse, want_lse, rtol=1e-10, atol=1e-12, msg=lambda m, s=s: f"lse, {s}: {m}")


@pytest.mark.parametrize("chunk", [1, 60, 400])
@pytest.mark.parametrize("name", ["t5_encoder", "tree_verify", "kv_scales", "block_topk", "normed_output", "sink"])
def test_chunks_change_nothing(name, chunk, monkeypatch):
    case = next(c for c in CASES if c.name == name)
    s = Shape(2, 9, 11, 6, 2)
    g = torch.Generator().manual_seed(3)
    qkv, params = inputs(s, g), case.params(s, g)
    oracle = Reference(variant(case), head_dim=s.D, head_dim_vo=s.E)
    whole = oracle(*qkv, return_lse=True, **params)
    monkeypatch.setattr(reference, "CHUNK", chunk)
    torch.testing.assert_close(oracle(*qkv, return_lse=True, **params), whole, rtol=1e-12, atol=1e-12)


def test_max_logits():
    text = "attention max_logit():\n    mask = j <= i\n    emit peak[iq, h] = max(l)\n    emit top[h] = max(l)\n"
    (v,) = load(Source("t.attn", text))
    s = Shape(2, 7, 5, 4, 2)
    q, k, vv = inputs(s, torch.Generator().manual_seed(0))
    out, emitted = Reference(v, head_dim=s.D, head_dim_vo=s.E)(q, k, vv)
    peak = torch.full((s.B, s.qo_len, s.H), -torch.inf, dtype=torch.float64)
    for b in range(s.B):
        for r in range(s.qo_len):
            for h in range(s.H):
                for c in range(r + s.kv_len - s.qo_len + 1):
                    peak[b, r, h] = max(peak[b, r, h], q[b, r, h] @ k[b, c, h // 2] / s.D**0.5)
    torch.testing.assert_close(emitted, {"peak": peak, "top": peak.amax((0, 1))})
    assert (peak[:, :2] == -torch.inf).all() and not out[:, :2].any()
