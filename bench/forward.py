"""The forward figures of the README: plain attention beside cuDNN, then variants; medians of rotated rounds in one run.

    python bench/forward.py [--rounds N] [--rivals]

Needs a Hopper GPU.  With kernels in the cache (make prebuild) it needs neither nvidia-cutlass-dsl nor a compiler.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
from collections.abc import Callable
from pathlib import Path

import torch

import attncc
from attncc import benchmark, compiler
from attncc.diagnostics import Source
from attncc.random_inputs import Shape, random_inputs

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SHAPES = [Shape(16, 1024, 1024, 32, 8), Shape(4, 4096, 4096, 32, 8), Shape(1, 16384, 16384, 32, 8),
          Shape(2, 8192, 8192, 16, 16)]  # fmt: skip


def plain(shape: Shape, rounds: int) -> dict[str, tuple[float, float]]:
    """(TFLOP/s of attncc, of cuDNN) by "full" and "causal", all four timed in the same rounds."""
    calls: dict[str, Callable[[], object]] = {}
    for name, file, causal in (("full", "plain", False), ("causal", "causal", True)):
        source = Source.read(EXAMPLES / f"{file}.attn")
        variant = next(v for v in compiler.variants(source) if v.name == file)
        kernel = attncc.compile(source, variant=file, head_dim=128)
        x = random_inputs(variant, shape, dtype=torch.bfloat16, device="cuda", seed=1)
        out = torch.empty_like(x.q)
        calls[name] = lambda kernel=kernel, x=x, out=out: kernel(x.q, x.k, x.v, out=out)
        calls[f"cudnn {name}"] = benchmark.cudnn(x, causal=causal)
    times = {name: statistics.median(found) for name, found in benchmark.rotated_rounds(calls, rounds).items()}
    flops = 4.0 * shape.batch * shape.num_qo_heads * shape.qo_len * shape.kv_len * shape.head_dim_qk
    work = {"full": flops, "causal": flops / 2}  # by convention half, the diagonal not counted
    return {name: (w / times[name] / 1e9, w / times[f"cudnn {name}"] / 1e9) for name, w in work.items()}


def variants(shape: Shape, rounds: int, rivals: bool) -> list[benchmark.Row]:
    # The slopes of the ALiBi paper (arXiv 2108.12409): random ones would favour far keys, which no model does.
    slope = 2.0 ** (-8.0 * torch.arange(1, shape.num_qo_heads + 1, device="cuda") / shape.num_qo_heads)
    cases: list[tuple[str, str, dict[str, object]]] = [
        ("causal", "causal", {}),
        ("gemma2", "gemma2_global", {}),
        ("alibi", "alibi", {"slope": slope}),
        ("causal", "sliding_window", {"window": 1024}),
        ("gpt_oss", "gpt_oss_full", {}),
    ]
    rows = []
    for file, name, given in cases:
        source = Source.read(EXAMPLES / f"{file}.attn")
        variant = next(v for v in compiler.variants(source) if v.name == name)
        options = {"variant": name, "head_dim": 128, "head_dim_vo": None, "dtype": "bf16", "const": {}}
        rows.append(benchmark.bench_variant(source, variant, shape, options, given=given, rounds=rounds, rivals=rivals))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rivals", action="store_true", help="FlexAttention beside the variants")
    arguments = parser.parse_args()
    benchmark.require_gpu()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {datetime.date.today()}", flush=True)
    print("TFLOP/s, bf16, head dimension 128")
    print("| shape | full | cuDNN | × | causal | cuDNN | × |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for shape in SHAPES:
        cells = [str(shape)]
        for ours, theirs in plain(shape, arguments.rounds).values():
            cells += [f"{ours:.0f}", f"{theirs:.0f}", f"{ours / theirs:.2f}"]
        print(f"| {' | '.join(cells)} |", flush=True)
    benchmark.show(variants(SHAPES[1], arguments.rounds, arguments.rivals))


if __name__ == "__main__":
    main()
