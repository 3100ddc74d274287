"""Selected blocks: time for each visible key, beside causal attention and cuDNN in the same rounds.

    python bench/blocks.py [--rounds N] [--top N] [--only prefill|decode] [--beside FOLDER]

Needs a Hopper GPU.  bf16, 32 query heads, 8 kv heads, head dimension 128; every row sees `top` blocks of C keys, its
own block among them, chosen a kv head.  Prefill (B1 S16384): lists that the 128 rows of a tile share, that 16
share, and of each row's own; a tile reads the blocks that any of its rows lists, so time goes with that union.  Causal
attention counts half the square; beside it runs a window of as many keys, whose tiles end as soon.  Decode (B64 kv
32768): one graph of 64 runs over two caches in turn, beside causal decode of as many keys as a row sees.
`--beside`: prefills of another build in the same rounds; FOLDER/C is its artifact for blocks of C keys.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from serve import HEAD_DIM, HEADS, KV_HEADS, milliseconds, randn, table
from torch import Tensor

import attncc
from attncc import benchmark
from attncc.random_inputs import Inputs

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
TOPK = (EXAMPLES / "block_topk.attn").read_text(encoding="utf-8")
SIZES, LENGTH, BATCH, KEYS, PAGE, RUNS = (64, 128), 16384, 64, 32768, 16, 64


def kernel(size: int | None, **layout: Any) -> attncc.Kernel:
    """Of blocks of so many keys; None: causal."""
    if size is None:
        return attncc.compile(EXAMPLES / "causal.attn", variant="causal", head_dim=HEAD_DIM, **layout)
    source = TOPK.replace("size = 64", f"size = {size}")
    return attncc.compile(source, variant="block_topk", head_dim=HEAD_DIM, **layout)


def choose(position: Tensor, size: int, top: int, shared: int) -> Tensor:
    """int32 [rows, KV_HEADS, top]: the block of each row's position and others before it at random, -1 where there are
    not so many; `shared` rows that follow one another choose alike."""
    groups = -(-len(position) // shared)
    last = position[torch.arange(groups, device="cuda") * shared] // size  # of a group's first row
    count = int(position.max()) // size + 1
    score = torch.rand(groups, KV_HEADS, count, device="cuda")
    there = torch.arange(count, device="cuda") < last[:, None, None]
    found = score.masked_fill(~there, -1.0).topk(min(top, count), -1)
    lists = torch.where(found.values >= 0, found.indices, -1).int().repeat_interleave(shared, 0)[: len(position)]
    lists[..., -1] = (position // size).int()[:, None]
    return lists.contiguous()


def pairs(lists: Tensor, position: Tensor, size: int) -> int:
    """(row, key) pairs that a query head sees, a kv head in the mean."""
    keys = (position[:, None, None] + 1 - lists * size).clamp(0, size)
    return int(torch.where(lists >= 0, keys, 0).sum()) // KV_HEADS


# ---------------------------------------------------------------------- prefill


def prefill(top: int, rounds: int, beside: Path | None) -> list[list[str]]:
    q, k, v = (randn(1, LENGTH, h, HEAD_DIM) for h in (HEADS, KV_HEADS, KV_HEADS))
    out, position = torch.empty_like(q), torch.arange(LENGTH, device="cuda")
    causal = kernel(None)
    window = attncc.compile(EXAMPLES / "causal.attn", variant="sliding_window", head_dim=HEAD_DIM)
    calls: dict[str, Callable[[], object]] = {
        "causal": lambda: causal(q, k, v, out=out),
        "cuDNN causal": benchmark.cudnn(Inputs(q, k, v, {}), causal=True),
    }
    seen = dict.fromkeys(calls, LENGTH * LENGTH // 2)
    for size in SIZES:
        builds, keys = {"": kernel(size)}, size * top
        if beside is not None:
            builds[", beside"] = attncc.load(beside / str(size))
        calls[name := f"window of {keys} keys"] = lambda keys=keys: window(q, k, v, out=out, window=keys)
        seen[name] = int((position + 1).clamp(max=keys).sum())
        for shared in (128, 16, 1):
            lists = choose(position, size, top, shared)
            for which, ours in builds.items():
                name = f"C {size}, {shared} rows alike{which}"
                calls[name] = lambda ours=ours, x=lists[None]: ours(q, k, v, out=out, selected=x)
                seen[name] = pairs(lists, position, size)
    times = {name: statistics.median(x) for name, x in benchmark.rotated_rounds(calls, rounds).items()}
    rates = {name: 4.0 * HEADS * HEAD_DIM * seen[name] / times[name] / 1e9 for name in times}
    cells = {name: (f"{1e3 * t:.0f}", f"{rates[name]:.0f}", f"{rates[name] / rates['causal']:.2f}")
             for name, t in times.items()}  # fmt: skip
    return [[f"prefill S{LENGTH}", name, *x] for name, x in cells.items()]


# ---------------------------------------------------------------------- decode


class Decode:
    """A row of each request, in a graph that rotates over caches."""

    def __init__(self, size: int | None, keys: int, top: int):
        layout = {"layout": "paged", "page_size": PAGE}
        ours, q = kernel(size, **layout), randn(BATCH, HEADS, HEAD_DIM)
        out = torch.empty_like(q)
        self.keep: list[Any] = []
        calls = []
        for n in range(2):
            indices = table([1] * BATCH, [keys] * BATCH, PAGE, n)
            kv = tuple(randn(int(indices[1][-1]), PAGE, KV_HEADS, HEAD_DIM) for _ in range(2))
            attn = attncc.BatchAttention(
                ours, num_qo_heads=HEADS, num_kv_heads=KV_HEADS, page_size=PAGE, max_batch_size=BATCH, max_qo_rows=BATCH
            )
            attn.plan(*indices)
            position = torch.full((BATCH,), keys - 1, device="cuda")
            given = {} if size is None else {"selected": choose(position, size, top, 1)}
            calls.append(lambda attn=attn, kv=kv, given=given: attn.run(q, kv, out=out, **given))
            calls[-1]()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for call in itertools.islice(itertools.cycle(calls), RUNS):
                call()
        self.keep = [calls, q, out]

    def microseconds(self) -> float:
        return 1e3 * milliseconds(self.graph.replay) / RUNS


def decode(top: int, rounds: int) -> list[list[str]]:
    contenders = {}
    for size in SIZES:
        contenders[f"causal, kv {top * size}"] = Decode(None, top * size, top)
        contenders[f"C {size}"] = Decode(size, KEYS, top)
    found: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for r in range(rounds + 1):
        for name in names[r % len(names) :] + names[: r % len(names)]:
            found[name].append(contenders[name].microseconds())
    times = {name: statistics.median(x[1:]) for name, x in found.items()}
    rows = []
    for size in SIZES:
        keys = BATCH * top * size * KV_HEADS * HEAD_DIM * 4
        base = times[f"causal, kv {top * size}"]
        for name in (f"causal, kv {top * size}", f"C {size}"):
            rate = f"{keys / times[name] / 1e3:.0f} GB/s"
            rows.append([f"decode B{BATCH} kv {KEYS}", name, f"{times[name]:.1f}", rate, f"{base / times[name]:.2f}"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--top", type=int, default=16)
    parser.add_argument("--only", choices=("prefill", "decode"))
    parser.add_argument("--beside", type=Path)
    arguments = parser.parse_args()
    benchmark.require_gpu()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {datetime.date.today()}", flush=True)
    print("| what | contender | µs | TFLOP/s or GB/s of visible keys | × causal |")
    print("| --- | --- | --- | --- | --- |")
    parts = {
        "prefill": lambda: prefill(arguments.top, arguments.rounds, arguments.beside),
        "decode": lambda: decode(arguments.top, arguments.rounds),
    }
    for part in [arguments.only] if arguments.only else parts:
        for row in parts[part]():
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
