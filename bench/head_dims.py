"""Causal attention at other head dimensions beside cuDNN: B4 S4096, 32 query heads, 8 kv heads, bf16.

    python bench/head_dims.py

Needs a Hopper GPU.
"""

from __future__ import annotations

from pathlib import Path

from attncc import benchmark, compiler
from attncc.diagnostics import Source
from attncc.random_inputs import Shape

CAUSAL = Path(__file__).resolve().parents[1] / "examples" / "causal.attn"


def main() -> None:
    benchmark.require_gpu()
    source = Source.read(CAUSAL)
    variant = next(v for v in compiler.variants(source) if v.name == "causal")
    print("| head dims | TFLOP/s | cuDNN | × |\n| --- | --- | --- | --- |")
    for qk, vo in [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)]:
        options = {
            "variant": "causal",
            "head_dim": qk,
            "head_dim_vo": None if vo == qk else vo,
            "dtype": "bf16",
            "const": {},
        }
        shape = Shape(4, 4096, 4096, 32, 8, qk, vo)
        row = benchmark.bench_variant(source, variant, shape, options, rounds=5, rivals=False)
        ours, theirs = row.tflops("attncc"), row.tflops("cudnn causal")
        print(f"| {qk} / {vo} | {ours:.0f} | {theirs:.0f} | {ours / theirs:.2f} |", flush=True)


if __name__ == "__main__":
    main()
