"""Examples of models against what the models' own code computes, written out in torch: scores, positions, norms."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ir import formulas
from torch import Tensor

from attncc import compiler
from attncc.random_inputs import Shape, random_inputs

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def normed(x: Tensor, weight: Tensor | float = 1.0, eps: float = 1e-6) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rotated(x: Tensor, at: Tensor, theta: float, style: str = "neox", dims: int | None = None) -> Tensor:
    return formulas.turn(x, at, formulas.frequencies(theta, dims or x.shape[-1]), style)


def at(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    i, j = formulas.positions(q, k)
    return i[:, 0], j[0]


def causal(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    i, j = formulas.positions(q, k)
    return formulas.attend(formulas.scores(q, k, scale), j <= i, v)[0]


def qwen3(q, k, v, wq, wk):
    i, j = at(q, k)
    return causal(rotated(normed(q, wq), i, 1e6), rotated(normed(k, wk), j, 1e6), v)


def qwen3_next(q, k, v, wq, wk, gate):
    i, j = at(q, k)
    q, k = rotated(normed(q, 1 + wq), i, 1e7, dims=64), rotated(normed(k, 1 + wk), j, 1e7, dims=64)
    return causal(q, k, v) / (1 + torch.exp(-gate))


def gemma3_local(q, k, v, wq, wk, window):
    i, j = at(q, k)
    q, k = rotated(normed(q, 1 + wq), i, 1e4), rotated(normed(k, 1 + wk), j, 1e4)
    far = (j <= i[:, None]) & (i[:, None] - j < window)
    return formulas.attend(formulas.scores(q, k, 1 / 16), far, v)[0]


def gemma3_global(q, k, v, wq, wk):
    i, j = (n.double() / 8 for n in at(q, k))
    turn = formulas.frequencies(1e6, q.shape[-1])

    def turned(x, n):  # positions that are no integers, by hand
        angle = n[:, None] * torch.tensor(turn, dtype=torch.float64)
        a, b = x.chunk(2, -1)
        c, s = angle.cos()[:, None], angle.sin()[:, None]
        return torch.cat([a * c - b * s, b * c + a * s], -1)

    return causal(turned(normed(q, 1 + wq), i), turned(normed(k, 1 + wk), j), v, 1 / 16)


def llama4_local(q, k, v, chunk):
    i, j = at(q, k)
    q, k = (normed(rotated(x, n, 500000.0, "interleaved"), eps=1e-5) for x, n in ((q, i), (k, j)))
    same = torch.div(i[:, None], chunk, rounding_mode="floor") == j // chunk
    return formulas.attend(formulas.scores(q, k), same & (j <= i[:, None]), v)[0]


def llama4_global(q, k, v, floor_scale):
    i, _ = at(q, k)
    temperature = torch.log(torch.floor((i.double() + 1.0) / floor_scale) + 1.0) * 0.1 + 1.0
    return causal(q * temperature[:, None, None], k, v)


def deepseek_v3_prefill(q, k, v):
    """With the rotated features where the model has them, last; transformers: yarn_get_mscale."""
    i, j = at(q, k)
    turn = formulas.frequencies_yarn(1e4, 64, 40.0, 4096)

    def laid_out(x, n):
        return torch.cat([x[..., 64:], formulas.turn(x[..., :64], n, turn, "interleaved")], -1)

    return causal(laid_out(q, i), laid_out(k, j), v, 192**-0.5 * (0.1 * math.log(40.0) + 1.0) ** 2)


def streaming_llm(q, k, v, window, sinks):
    """One row: a cache that holds the first `sinks` keys and the last `window`, numbered as they lie there."""
    n = k.shape[1]
    kept = [*range(min(sinks, n)), *range(max(n - window, sinks), n)]
    k, v, cache = k[:, kept], v[:, kept], torch.arange(len(kept))
    q = rotated(q, cache[-1:], 1e4)
    return formulas.attend(formulas.scores(q, rotated(k, cache, 1e4)), torch.tensor(True), v)[0]


def swin_v2(q, k, v, tau, bias, region):
    cosine = formulas.scores(*(x / x.norm(dim=-1, keepdim=True) for x in (q, k)), 1.0)
    n = q.shape[1]
    logits = cosine * tau.clamp(max=math.log(100.0)).exp()[:, None, None] + 16 * torch.sigmoid(bias[:, :n, :n])
    return formulas.attend(logits, (region[:, :n, None] == region[:, None, :n])[:, None], v)[0]


def kv_scales(q, k, v, k_scale, v_scale):
    return causal(q, k * k_scale[..., None], v * v_scale[..., None])


def bloom_alibi(q, k, v, slope):
    return formulas.alibi_bloom(q, k, v, slope)[0]


def moba(q, k, v, selected):
    i, j = formulas.positions(q, k)
    listed = (selected[..., None] == (j // 512)).any(-2)  # [B, qo_len, H, kv_len]
    visible = listed.transpose(1, 2) & (j <= i)
    return formulas.attend(formulas.scores(q, k), visible, v)[0]


SMALL, FEW = Shape(2, 7, 23, 4, 2, 16, 16), Shape(2, 1, 23, 4, 2, 16, 16)
CASES: dict[str, tuple[str, Callable[..., Tensor], Shape, dict[str, Any]]] = {
    "qwen3": ("qwen3", qwen3, SMALL, {}),
    "qwen3_next": ("qwen3", qwen3_next, Shape(1, 3, 9, 2, 1, 256, 256), {}),
    "gemma3_local": ("gemma3", gemma3_local, SMALL, {"window": 6}),
    "gemma3_global": ("gemma3", gemma3_global, SMALL, {}),
    "llama4_local": ("llama4", llama4_local, SMALL, {"chunk": 9}),
    "llama4_global": ("llama4", llama4_global, SMALL, {"floor_scale": 5.0}),
    "deepseek_v3_prefill": ("deepseek_v3", deepseek_v3_prefill, Shape(1, 4, 9, 2, 2, 192, 128), {}),
    "streaming_llm": ("streaming_llm", streaming_llm, FEW, {"window": 9, "sinks": 3}),
    "streaming_llm, nothing dropped": ("streaming_llm", streaming_llm, FEW, {"window": 30, "sinks": 3}),
    "swin_v2": ("swin_v2", swin_v2, Shape(3, 16, 16, 4, 4, 16, 16), {}),
    "kv_scales": ("kv_scales", kv_scales, SMALL, {}),
    "bloom_alibi": ("alibi", bloom_alibi, SMALL, {}),
    "moba": ("block_topk", moba, Shape(2, 5, 1200, 4, 2, 16, 16), {}),
}


@pytest.mark.parametrize("name", CASES)
def test_is_what_the_model_computes(name: str) -> None:
    file, formula, shape, given = CASES[name]
    path, variant = EXAMPLES / f"{file}.attn", name.split(",")[0]
    (found,) = (v for v in compiler.variants(path) if v.name == variant)
    x = random_inputs(found, shape, dtype=torch.float64, device="cpu", seed=2, given=given)
    reference: Any = compiler.reference(
        path, variant=variant, head_dim=shape.head_dim_qk, head_dim_vo=shape.head_dim_vo
    )
    params = {n: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for n, t in x.params.items()}
    want = formula(x.q, x.k, x.v, **params)
    assert torch.allclose(reference(x.q, x.k, x.v, **x.params), want.nan_to_num(0.0), rtol=1e-6, atol=1e-6)
