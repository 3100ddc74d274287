"""Host time of a call and of a warm compile, in microseconds.

    python bench/host.py

Needs a Hopper GPU: the call is measured with its launch, on shapes so small that the GPU never falls behind.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

import attncc
from attncc import benchmark

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def microseconds(call: Callable[[], object], inner: int = 50, repeats: int = 41) -> float:
    """Median over repeats of the mean of `inner` calls in a row; the GPU is idle before each."""
    for _ in range(200):
        call()
    found = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(inner):
            call()
        found.append((time.perf_counter() - start) / inner * 1e6)
    return statistics.median(found)


def main() -> None:
    benchmark.require_gpu()
    q, k, v = (torch.randn(1, 128, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    out, slope = torch.empty_like(q), torch.ones(2, device="cuda")
    options = {"head_dim": 128, "dtype": torch.bfloat16}
    plain = attncc.compile(EXAMPLES / "plain.attn", variant="plain", **options)
    window = attncc.compile(EXAMPLES / "causal.attn", variant="sliding_window", **options)
    alibi = attncc.compile(EXAMPLES / "alibi.attn", variant="alibi", **options)
    rows: list[tuple[str, Callable[[], object]]] = [
        ("plain, out given", lambda: plain(q, k, v, out=out)),
        ("plain", lambda: plain(q, k, v)),
        ("plain, lse returned", lambda: plain(q, k, v, return_lse=True)),
        ("one scalar", lambda: window(q, k, v, window=64, out=out)),
        ("one tensor", lambda: alibi(q, k, v, slope=slope, out=out)),
        ("torch.empty_like, for comparison", lambda: torch.empty_like(q)),
    ]
    print("| call | host µs |\n| --- | --- |")
    for title, call in rows:
        print(f"| {title} | {microseconds(call):.1f} |")
    warm = microseconds(lambda: attncc.compile(EXAMPLES / "plain.attn", variant="plain", **options), inner=5)
    print(f"| compile, same process | {warm:.0f} |")


if __name__ == "__main__":
    main()
