"""QK-norm and RoPE inside the kernel, scales folded into it, and gates, beside the plain variant and beside unfused
torch: norm and rotation as kernels of their own (torch.compile), then cuDNN.

    python bench/vectors.py [--rounds N] [--cases prefill,decode,gates]

Prefill is dense; decode reads a cache in pages of 16 (unfused: contiguous keys, which cuDNN takes).  Gates have the
heads of Qwen3-Next, 16 and 2 of 256 features, on pages of 16; unfused, a kernel of torch.compile follows our plain one.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from serve import HEAD_DIM, HEADS, KV_HEADS, randn, show, table
from torch import Tensor

import attncc
from attncc import benchmark
from attncc.random_inputs import Inputs

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
THETA, EPS = 1e6, 1e-6
QUERIES = """
attention queries(theta: f32 = 1e6):
    tensor wq[d]: f32
    f_q  = rope(rmsnorm(q, wq), i, theta)
    mask = j <= i
"""
PLAIN = {"source": EXAMPLES / "causal.attn", "variant": "causal"}
BOTH = {"source": EXAMPLES / "qwen3.attn", "variant": "qwen3"}
SCALES = {"source": EXAMPLES / "kv_scales.attn", "variant": "kv_scales"}
ONLY_Q = {"source": QUERIES, "variant": "queries"}
GATED = {"source": EXAMPLES / "gated_output.attn", "variant": "gated_output"}
PREFILL = ((4, 4096), (16, 1024), (1, 16384))
DECODE = ((128, 8192), (16, 8192))
GATES = ((128, 1, 4096), (16, 1, 4096), (4, 2048, 2048), (1, 8192, 8192))  # requests, rows and keys of each
WIDE, WIDE_HEADS, WIDE_KV_HEADS = 256, 16, 2

Call = Callable[[], Any]


def kernel(which: Mapping[str, Any], **options: Any) -> Any:
    return attncc.compile(which["source"], variant=which["variant"], **{"head_dim": HEAD_DIM, **options})


def rotated(x: Tensor, weight: Tensor, positions: Tensor) -> Tensor:
    """rmsnorm, then RoPE in halves: x [B, S, H, D], positions [S] or [B, S]."""
    x = F.rms_norm(x.float(), (HEAD_DIM,), weight, EPS)
    half = torch.arange(HEAD_DIM // 2, device=x.device, dtype=torch.float64)
    angles = positions[..., None].double() * THETA ** (-2 * half / HEAD_DIM)
    cos, sin = (f.float()[..., None, :] for f in (angles.cos(), angles.sin()))
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).bfloat16()


def weighed(x: Tensor, gate: Tensor) -> Tensor:
    return x * torch.sigmoid(gate)


fused_rotation: Any = torch.compile(rotated, dynamic=False)
fused_gate: Any = torch.compile(weighed, dynamic=False)


def times(calls: Mapping[str, Call], rounds: int) -> dict[str, float]:
    """Median milliseconds."""
    return {name: statistics.median(found) for name, found in benchmark.rotated_rounds(calls, rounds).items()}


def agree(a: Tensor, b: Tensor, what: str) -> None:
    error = float((a.flatten().float() - b.flatten().float()).norm() / b.float().norm())
    assert error < 1.5e-2, f"{what}: differs by {error:.1e}"


def rows_of(title: str, found: dict[str, float]) -> list[list[str]]:
    plain, unfused = found["plain"], found["unfused torch"]
    return [[title, name, f"{ms:.3f}", f"{ms / plain:.3f}", f"{unfused / ms:.2f}"] for name, ms in found.items()]


def prefill(rounds: int, batch: int, length: int) -> list[list[str]]:
    wq, wk = (1 + 0.1 * torch.randn(HEAD_DIM, device="cuda") for _ in range(2))
    q, k, v = (randn(batch, length, h, HEAD_DIM) for h in (HEADS, KV_HEADS, KV_HEADS))
    positions, ones = torch.arange(length, device="cuda"), torch.ones(batch, length, KV_HEADS, device="cuda")
    out = torch.empty_like(q)
    plain, only_q, scales = kernel(PLAIN), kernel(ONLY_Q), kernel(SCALES)
    both, inside, folded = kernel(BOTH), kernel(BOTH, prepass=False), kernel(SCALES, prepass=False)

    def unfused() -> Any:
        turned = Inputs(fused_rotation(q, wq, positions), fused_rotation(k, wk, positions), v, {})
        return benchmark.cudnn(turned, causal=True)()

    want = both(q, k, v, wq=wq, wk=wk)
    agree(want, unfused().transpose(1, 2), "prefill")
    agree(inside(q, k, v, wq=wq, wk=wk), want, "prefill, in the kernel")
    calls = {
        "plain": lambda: plain(q, k, v, out=out),
        "f_q": lambda: only_q(q, k, v, out=out, wq=wq),
        "f_q, f_k": lambda: both(q, k, v, out=out, wq=wq, wk=wk),
        "f_q, f_k, no pre-pass": lambda: inside(q, k, v, out=out, wq=wq, wk=wk),
        "scales of k and v": lambda: scales(q, k, v, out=out, k_scale=ones, v_scale=ones),
        "scales, no pre-pass": lambda: folded(q, k, v, out=out, k_scale=ones, v_scale=ones),
        "unfused torch": unfused,
        "plain cuDNN": benchmark.cudnn(Inputs(q, k, v, {}), causal=True),
    }
    return rows_of(f"prefill B{batch} S{length}", times(calls, rounds))


def decode(rounds: int, batch: int, length: int, page: int = 16) -> list[list[str]]:
    wq, wk = (1 + 0.1 * torch.randn(HEAD_DIM, device="cuda") for _ in range(2))
    indices = table([1] * batch, [length] * batch, page, 1)
    q = randn(batch, HEADS, HEAD_DIM)
    k, v = (randn(batch, length, KV_HEADS, HEAD_DIM) for _ in range(2))
    cache = tuple(
        torch.empty(batch * length // page, page, KV_HEADS, HEAD_DIM, device="cuda", dtype=k.dtype) for _ in "kv"
    )
    for pages, x in zip(cache, (k, v), strict=True):
        pages[indices[2].long().cuda()] = x.view(pages.shape)
    ones = torch.ones(batch * length // page, page, KV_HEADS, device="cuda")
    last, every = torch.full((1,), length - 1, device="cuda"), torch.arange(length, device="cuda")
    out = torch.empty_like(q)

    def served(which: Mapping[str, Any], **params: Any) -> Call:
        attn = attncc.BatchAttention(
            kernel(which, layout="paged", page_size=page), num_qo_heads=HEADS, num_kv_heads=KV_HEADS, page_size=page,
            max_batch_size=batch, max_qo_rows=batch,
        )  # fmt: skip
        attn.plan(*indices)
        return lambda: attn.run(q, cache, out=out, **params)

    def unfused(k_too: bool) -> Any:
        keys = fused_rotation(k, wk, every) if k_too else k
        turned = Inputs(fused_rotation(q[:, None], wq, last), keys, v, {})
        return benchmark.cudnn(turned, causal=False)()

    calls = {
        "plain": served(PLAIN), "f_q": served(ONLY_Q, wq=wq), "f_q, f_k": served(BOTH, wq=wq, wk=wk),
        "scales of k and v": served(SCALES, k_scale=ones, v_scale=ones),
        "unfused torch": lambda: unfused(True), "unfused torch, q alone": lambda: unfused(False),
        "plain cuDNN": benchmark.cudnn(Inputs(q[:, None], k, v, {}), causal=False),
    }  # fmt: skip
    for name, k_too in (("f_q", False), ("f_q, f_k", True)):
        agree(calls[name](), unfused(k_too).transpose(1, 2), f"decode, {name}")
    return rows_of(f"decode B{batch} kv {length}", times(calls, rounds))


def gates(rounds: int, batch: int, rows: int, length: int, page: int = 16) -> list[list[str]]:
    indices = table([rows] * batch, [length] * batch, page, 1)
    q, gate = (randn(batch * rows, WIDE_HEADS, WIDE) for _ in range(2))
    cache = tuple(randn(int(indices[1][-1]), page, WIDE_KV_HEADS, WIDE) for _ in "kv")
    out = torch.empty_like(q)

    def served(which: Mapping[str, Any], **params: Any) -> Call:
        attn = attncc.BatchAttention(
            kernel(which, head_dim=WIDE, layout="paged", page_size=page), num_qo_heads=WIDE_HEADS,
            num_kv_heads=WIDE_KV_HEADS, page_size=page, max_batch_size=batch, max_qo_rows=batch * rows,
        )  # fmt: skip
        attn.plan(*indices)
        return lambda: attn.run(q, cache, out=out, **params)

    plain, gated = served(PLAIN), served(GATED, gate=gate)
    unfused = lambda: fused_gate(plain(), gate)  # noqa: E731
    want = unfused().clone()
    agree(gated(), want, "gates")
    calls = {"plain": plain, "gate": gated, "unfused torch": unfused}
    return rows_of(f"B{batch} of {rows} rows, kv {length}", times(calls, rounds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", default="prefill,decode,gates")
    options = parser.parse_args()
    benchmark.require_gpu()
    cases = {"prefill": (prefill, PREFILL), "decode": (decode, DECODE), "gates": (gates, GATES)}
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    rows = []
    for measure, shapes in map(cases.__getitem__, options.cases.split(",")):
        for shape in shapes:
            rows += measure(options.rounds, *shape)
            torch.cuda.empty_cache()
    show(["case", "", "ms", "of plain", "faster than unfused torch"], rows)


if __name__ == "__main__":
    main()
