"""What benchmarks hand to FlexAttention computes what the reference computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from attncc import compiler, flex
from attncc.ir.nodes import Variant
from attncc.random_inputs import Shape, random_inputs

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SHAPE = Shape(2, 33, 48, 4, 2, 16, 16)
SCALARS: dict[str, object] = {"window": 7, "chunk": 10, "width": 8, "radius": 1, "block": 5, "globals": 3, "step": 3}


def taken() -> list[tuple[Path, Variant]]:
    found = [(path, v) for path in sorted(EXAMPLES.glob("*.attn")) for v in compiler.variants(path)]
    return [(path, v) for path, v in found if flex.unsupported(v) is None]


def arguments(variant: Variant) -> tuple[Any, dict[str, Any]]:
    mine = {p.name for p in variant.scalars if not p.const}
    given = {n: x for n, x in SCALARS.items() if n in mine}
    x = random_inputs(variant, SHAPE, dtype=torch.float32, device="cpu", seed=1, given=given)
    return x, {**{p.name: p.default for p in variant.scalars}, **x.params}


def test_most_examples_are_taken() -> None:
    assert {v.name for _, v in taken()} >= {"plain", "gemma2_local", "gpt_oss_full", "t5_encoder", "packed_documents"}
    assert "qwen3_gated" not in {v.name for _, v in taken()}


@pytest.mark.parametrize("path, variant", taken(), ids=lambda x: x.name)
def test_written_functions_agree_with_the_reference(path: Path, variant: Variant) -> None:
    x, params = arguments(variant)
    functions = flex.mods(variant, SHAPE, params)
    b, h, iq, j = (torch.arange(n).view([-1 if a == at else 1 for a in range(4)])
                   for at, n in enumerate((SHAPE.batch, SHAPE.num_qo_heads, SHAPE.qo_len, SHAPE.kv_len)))  # fmt: skip
    q, k, v = (t.double().transpose(1, 2) for t in (x.q, x.k, x.v))
    k, v = (t.repeat_interleave(2, 1) for t in (k, v))
    s = q @ k.transpose(-1, -2) * functions.scale
    logits = s if functions.score is None else functions.score(s, b, h, iq, j)
    if functions.mask is not None:
        logits = torch.where(flex.lift(functions.mask(b, h, iq, j)), logits, -torch.inf)
    if functions.sink is not None:
        sink = flex.lift(functions.sink(b, h)).double().expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, sink], -1)
    weights = torch.nan_to_num(torch.softmax(logits, -1))[..., : SHAPE.kv_len]
    want = compiler.reference(path, variant=variant.name, head_dim=16)(x.q, x.k, x.v, **x.params)
    torch.testing.assert_close((weights @ v).transpose(1, 2), want, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_takes_them() -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    path = EXAMPLES / "gemma2.attn"
    variant = next(v for v in compiler.variants(path) if v.name == "gemma2_local")
    x, params = arguments(variant)
    functions = flex.mods(variant, SHAPE, params)
    block_mask = create_block_mask(functions.mask, None, None, SHAPE.qo_len, SHAPE.kv_len, device="cpu")
    q, k, v = (t.transpose(1, 2) for t in (x.q, x.k, x.v))
    out = flex_attention(
        q, k, v, score_mod=functions.score, block_mask=block_mask, scale=functions.scale, enable_gqa=True
    )
    want = compiler.reference(path, variant="gemma2_local", head_dim=16)(x.q, x.k, x.v, **x.params)
    torch.testing.assert_close(out.transpose(1, 2), want.float(), rtol=1e-4, atol=1e-4)  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["plain", "gemma2_local", "packed_documents", "prefix_lm"])
def test_visible_pairs_are_counted(name: str) -> None:
    from attncc.benchmark import visible_pairs

    variant = next(v for _, v in taken() if v.name == name)
    _, params = arguments(variant)
    i, j = torch.arange(SHAPE.qo_len)[:, None] + SHAPE.kv_len - SHAPE.qo_len, torch.arange(SHAPE.kv_len)[None]
    want = 0
    for b in range(SHAPE.batch):
        seen = {
            "plain": lambda b: torch.ones(SHAPE.qo_len, SHAPE.kv_len, dtype=torch.bool),
            "gemma2_local": lambda b: (i - 7 < j) & (j <= i),
            "packed_documents": lambda b: (j <= i) & (params["doc"][b][i] == params["doc"][b][j]),
            "prefix_lm": lambda b: (j < params["prefix"][b]) | (j <= i),
        }[name](b)
        want += int(seen.sum()) * SHAPE.num_qo_heads
    assert visible_pairs(variant, SHAPE, params, "cpu") == want
