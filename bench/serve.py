"""Serving figures: decode as a share of the read ceiling, paged prefill beside dense, host time, appending, merging.

    python bench/serve.py [--cases decode,prefill,prefix,host,append,merge] [--rounds N] [--pages 16,1]

Needs a Hopper GPU and triton.  bf16, 32 query heads, 8 kv heads, head dimension 128, causal.  What is compared runs in
the same rounds, which start with another contender each time; medians count.  A decode figure is the time of one run
inside a CUDA graph that rotates over caches larger than the L2, each with its own random page order.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import attncc
from attncc import benchmark
from attncc.random_inputs import Inputs

CAUSAL = Path(__file__).resolve().parents[1] / "examples" / "causal.attn"
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
BYTES = KV_HEADS * HEAD_DIM * 2 * 2  # of K and V, a position
RUNS = 64  # in a graph, as of a model with so many layers; 4 where one takes long
ROTATE = 1.5e9  # bytes of caches below which eight are rotated, above two: the L2 has 50 MB


def lengths() -> dict[str, list[int]]:
    """The decode cases: kv lengths of a batch."""
    rng = np.random.default_rng(1)
    weights = 1 / np.arange(1, 65)
    zipf = np.rint(weights / weights.sum() * 64 * 4096).astype(int)
    return {
        "B128 kv 8192": [8192] * 128,
        "B16 kv 8192": [8192] * 16,
        "B16 kv 1024": [1024] * 16,
        "B1 kv 32768": [32768],
        "B16 kv 4096-12288": rng.integers(4096, 12289, 16).tolist(),
        "B64 Zipf, mean 4096": rng.permutation(zipf).tolist(),
    }


def table(qo_lens: Sequence[int], kv_lens: Sequence[int], page_size: int, seed: int) -> tuple[Tensor, ...]:
    """Arguments of plan, on the host, with pages in random order."""
    kv = np.asarray(kv_lens)
    counts = -(-kv // page_size)
    ids = np.random.default_rng(seed).permutation(int(counts.sum()))
    arrays = (np.append(0, np.cumsum(qo_lens)), np.append(0, np.cumsum(counts)), ids, kv - (counts - 1) * page_size)
    return tuple(torch.from_numpy(a).int() for a in arrays)


def attention(page_size: int | None, batch: int, rows: int) -> attncc.BatchAttention:
    layout: dict[str, Any] = {"layout": "ragged"} if page_size is None else {"layout": "paged", "page_size": page_size}
    kernel = attncc.compile(CAUSAL, variant="causal", head_dim=HEAD_DIM, **layout)
    return attncc.BatchAttention(
        kernel, num_qo_heads=HEADS, num_kv_heads=KV_HEADS, page_size=page_size, max_batch_size=batch, max_qo_rows=rows
    )


def randn(*size: int) -> Tensor:
    return torch.empty(size, device="cuda", dtype=torch.bfloat16).normal_()


# ---------------------------------------------------------------------- the read ceiling


def read_kernels() -> list[Callable[[], object]]:
    """Triton kernels of several shapes that do nothing but read 4.3 GB."""
    import triton
    import triton.language as tl

    @triton.jit
    def read(source, sink, BLOCK: tl.constexpr, STEPS: tl.constexpr):
        total = tl.zeros([BLOCK], tl.int32)
        first = tl.program_id(0).to(tl.int64) * STEPS * BLOCK + tl.arange(0, BLOCK)
        for step in range(STEPS):
            total += tl.load(source + first + step * BLOCK, eviction_policy="evict_first")
        value = tl.sum(total)
        if value == 1234567:  # so that nothing is dropped
            tl.store(sink, value)

    kernel: Any = read
    source = torch.randint(0, 1 << 30, (1 << 30,), dtype=torch.int32, device="cuda")
    sink = torch.zeros(1, dtype=torch.int32, device="cuda")

    def call(block: int, steps: int, warps: int) -> Callable[[], object]:
        grid = (source.numel() // (block * steps),)
        return lambda: kernel[grid](source, sink, BLOCK=block, STEPS=steps, num_warps=warps)

    return [call(*c) for c in ((4096, 8, 8), (2048, 8, 4), (4096, 16, 8), (8192, 4, 8), (2048, 32, 4), (1024, 16, 4))]


def gigabytes_read(call: Callable[[], object]) -> float:
    """GB/s of a read kernel: median of five."""
    found = [milliseconds(call) for _ in range(6)][1:]
    return 4 * (1 << 30) / statistics.median(found) / 1e6


def milliseconds(call: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


# ---------------------------------------------------------------------- decode


class Decode:
    """A batch of one row each, in a graph that rotates over caches."""

    def __init__(self, kv_lens: list[int], page_size: int):
        self.bytes = sum(kv_lens) * BYTES
        batch = len(kv_lens)
        caches = 8 if self.bytes < ROTATE else 2
        self.runs = RUNS if caches == 8 else 4
        q, out = randn(batch, HEADS, HEAD_DIM), torch.empty(batch, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        self.keep: list[Any] = [q, out]
        calls = []
        for n in range(caches):
            indices = table([1] * batch, kv_lens, page_size, n)
            k, v = (randn(int(indices[1][-1]), page_size, KV_HEADS, HEAD_DIM) for _ in range(2))
            attn = attention(page_size, batch, batch)
            attn.plan(*indices)
            calls.append(lambda attn=attn, k=k, v=v: attn.run(q, (k, v), out=out))
            calls[-1]()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for call in itertools.islice(itertools.cycle(calls), self.runs):
                call()
        self.keep.append(calls)

    def gigabytes(self) -> float:
        """GB/s of K and V: median of five replays."""
        found = [milliseconds(self.graph.replay) for _ in range(6)][1:]
        return self.bytes * self.runs / statistics.median(found) / 1e6


def decode(pages: list[int], rounds: int) -> list[list[str]]:
    kernels = read_kernels()
    best = max(kernels, key=gigabytes_read)
    rows, ceilings = [], []
    for title, kv_lens in lengths().items():
        contenders = {page: Decode(kv_lens, page) for page in pages}
        found: dict[int, list[float]] = {page: [] for page in pages}
        ceiling = []
        for r in range(rounds):
            ceiling.append(gigabytes_read(best))
            for page in pages[r % len(pages) :] + pages[: r % len(pages)]:
                found[page].append(contenders[page].gigabytes())
        top = statistics.median(ceiling)
        ceilings.append(top)
        for page, speeds in found.items():
            speed = statistics.median(speeds)
            micro = contenders[page].bytes / speed / 1e3
            rows.append([title, str(page), f"{speed:,.0f}", f"{micro:.1f}", f"{100 * speed / top:.1f} %"])
            print("decode", *rows[-1], flush=True)
        del contenders
        torch.cuda.empty_cache()
    print(f"read ceiling {min(ceilings):,.0f} to {max(ceilings):,.0f} GB/s (best of {len(kernels)} read kernels)")
    return rows


# ---------------------------------------------------------------------- prefill


def prefill(pages: list[int], rounds: int, batch: int = 4, length: int = 4096) -> list[list[str]]:
    """Causal self-attention of whole prompts: pages and ragged rows against the dense kernel and cuDNN."""
    q, k, v = (randn(batch, length, h, HEAD_DIM) for h in (HEADS, KV_HEADS, KV_HEADS))
    dense, out = attncc.compile(CAUSAL, variant="causal", head_dim=HEAD_DIM), torch.empty_like(q)
    calls: dict[str, Callable[[], object]] = {
        "dense": lambda: dense(q, k, v, out=out),
        "cuDNN": benchmark.cudnn(Inputs(q, k, v, {}), causal=True),
    }
    flat_q, flat_out = q.flatten(0, 1), torch.empty_like(q).flatten(0, 1)
    for page in (None, *pages):
        attn = attention(page, batch, batch * length)
        if page is None:
            name, kv = "ragged", (k.flatten(0, 1), v.flatten(0, 1))
            offsets = torch.arange(batch + 1).int() * length
            attn.plan(offsets, offsets)
        else:
            indices = table([length] * batch, [length] * batch, page, page)
            name = f"page {page}"
            kv = tuple(torch.empty_like(t.reshape(-1, page, KV_HEADS, HEAD_DIM)) for t in (k, v))
            for cache, t in zip(kv, (k, v), strict=True):
                cache[indices[2].long().cuda()] = t.reshape(-1, page, KV_HEADS, HEAD_DIM)
            attn.plan(*indices)
        calls[name] = lambda attn=attn, kv=kv: attn.run(flat_q, kv, out=flat_out)
        calls[name]()
        dense(q, k, v, out=out)
        error = float((flat_out.float() - out.flatten(0, 1).float()).norm() / out.float().norm())
        assert error < 5e-3, f"{name}: differs from the dense kernel by {error:.1e}"
    times = {name: statistics.median(found) for name, found in benchmark.rotated_rounds(calls, rounds).items()}
    flops = 2.0 * batch * HEADS * length * length * HEAD_DIM  # half of the square, by convention
    rows = []
    for name, ms in times.items():
        rows.append([f"B{batch} S{length} causal", name, f"{flops / ms / 1e9:.0f}", f"{ms:.3f}"])
        rows[-1] += [f"{times['dense'] / ms:.2f}", f"{times['cuDNN'] / ms:.2f}"]
    return rows


# ---------------------------------------------------------------------- shared prefixes


def shared_table(batch: int, shared: int, own: int, page_size: int) -> tuple[Tensor, ...]:
    """Arguments of plan for decode rows whose first `shared` keys lie in the same pages."""
    prefix, rest = shared // page_size, -(-own // page_size)
    ids = np.random.default_rng(batch).permutation(prefix + batch * rest)
    table = [np.concatenate([ids[:prefix], part]) for part in np.split(ids[prefix:], batch)]
    last = [(shared + own - 1) % page_size + 1] * batch
    arrays = (np.arange(batch + 1), np.arange(batch + 1) * (prefix + rest), np.concatenate(table), last)
    return tuple(torch.from_numpy(np.asarray(a)).int() for a in arrays)


def prefix(rounds: int, page_size: int = 16) -> list[list[str]]:
    """Decode of requests that start alike: every request for itself, and with shared_prefix="auto"."""
    rows = []
    for batch, shared, own in ((16, 32768, 512), (64, 8192, 256), (128, 2048, 512), (32, 1024, 1024)):
        indices = shared_table(batch, shared, own, page_size)
        caches = [[randn(int(indices[2].max()) + 1, page_size, KV_HEADS, HEAD_DIM) for _ in "kv"] for _ in range(4)]
        q = randn(batch, HEADS, HEAD_DIM)
        outs, plans, calls = {}, {}, {}
        for mode in (None, "auto"):
            attn, out = attention(page_size, batch, batch), torch.empty_like(q)
            attn.plan(*indices, shared_prefix=mode)
            graph = torch.cuda.CUDAGraph()
            attn.run(q, caches[0], out=out)
            with torch.cuda.graph(graph):
                for n in range(RUNS):
                    attn.run(q, caches[n % 4], out=out)
            plans[mode] = plan_microseconds(attn, indices, 20, shared_prefix=mode)
            outs[mode], calls[mode] = out, (graph, attn)
        found: dict[str | None, list[float]] = {mode: [] for mode in calls}
        for _ in range(rounds):
            for mode, (graph, _attn) in calls.items():
                found[mode].append(statistics.median(milliseconds(graph.replay) for _ in range(5)) * 1e3 / RUNS)
        assert float((outs[None].float() - outs["auto"].float()).norm() / outs[None].float().norm()) < 1e-2
        flat, auto = (statistics.median(f) for f in found.values())
        rows.append([f"B{batch}, {shared} shared, {own} own", f"{flat:.1f}", f"{auto:.1f}", f"{flat / auto:.2f}"])
        rows[-1] += [f"{plans[None]:.0f}", f"{plans['auto']:.0f}"]
    return rows


# ---------------------------------------------------------------------- host


def plan_microseconds(
    attn: attncc.BatchAttention, indices: Sequence[Tensor], repeats: int = 200, **options: Any
) -> float:
    """Median host time of plan, the GPU idle before each."""
    found = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        attn.plan(*indices, **options)
        found.append(time.perf_counter() - begun)
    return statistics.median(found) * 1e6


def run_microseconds(call: Callable[[], object], inner: int = 50, repeats: int = 41) -> float:
    """Median over repeats of the mean of `inner` calls in a row that the GPU keeps up with."""
    for _ in range(200):
        call()
    found = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(inner):
            call()
        found.append((time.perf_counter() - begun) / inner)
    return statistics.median(found) * 1e6


def host(pages: list[int]) -> list[list[str]]:
    rows = []
    uniform = np.random.default_rng(3).integers(1, 8192, 128).tolist()
    for page in pages:
        attn = attention(page, 128, 128)
        for title, kv_lens in (("kv 1024", [1024] * 128), ("kv 8192", [8192] * 128), ("kv 1-8192", uniform)):
            indices = table([1] * 128, kv_lens, page, 0)
            rows.append([f"plan, B128 {title}, page {page}", f"{plan_microseconds(attn, indices):.0f}"])
        q, k, v = randn(4, HEADS, HEAD_DIM), *(randn(256, page, KV_HEADS, HEAD_DIM) for _ in range(2))
        out = torch.empty_like(q)
        attn.plan(*table([1] * 4, [64 if page > 1 else 16] * 4, page, 0))
        given = run_microseconds(lambda attn=attn, q=q, k=k, v=v, out=out: attn.run(q, (k, v), out=out))
        rows.append([f"run, out given, page {page}", f"{given:.1f}"])
        made = run_microseconds(lambda attn=attn, q=q, k=k, v=v: attn.run(q, (k, v), return_lse=True))
        rows.append([f"run, out and lse made, page {page}", f"{made:.1f}"])
    return rows


def graph_microseconds(calls: Sequence[Callable[[], object]]) -> float:
    """Time of one of `calls`, which follow one another in a CUDA graph: median of 25 replays."""
    for call in calls:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    found = [milliseconds(graph.replay) for _ in range(30)][5:]
    return statistics.median(found) * 1e3 / len(calls)


def append(pages: list[int], layers: int = 16) -> list[list[str]]:
    """append_kv, one cache a layer; GB/s of what is read and written."""
    rows = []
    for page in pages:
        for title, qo_lens, kv_len in (("B16", [1] * 16, 1024), ("B128", [1] * 128, 1024), ("B4", [2048] * 4, 2048)):
            indices = table(qo_lens, [kv_len] * len(qo_lens), page, 0)
            on_device = [t.cuda() for t in indices]
            caches = [[randn(int(indices[1][-1]), page, KV_HEADS, HEAD_DIM) for _ in "kv"] for _ in range(layers)]
            k, v = (randn(sum(qo_lens), KV_HEADS, HEAD_DIM) for _ in "kv")
            micro = graph_microseconds(
                [lambda k=k, v=v, c=c, t=on_device: attncc.append_kv(k, v, (c[0], c[1]), *t) for c in caches]
            )
            speed = 2 * sum(qo_lens) * BYTES / micro / 1e3
            rows.append([f"{title}, {qo_lens[0]} rows each, page {page}", f"{micro:.1f}", f"{speed:,.0f}"])
            del caches
    return rows


def merge() -> list[list[str]]:
    """The public merges; the kernel merges its own splits by itself.  GB/s of what is read and written."""
    rows = []
    for dtype in (torch.bfloat16, torch.float32):
        for n, states in ((128, 2), (128, 8), (8192, 2)):
            o, lse = randn(n, states, HEADS, HEAD_DIM).to(dtype), torch.randn(n, states, HEADS, device="cuda")
            micro = graph_microseconds([lambda o=o, lse=lse: attncc.merge_state_list(o, lse)] * 4)
            speed = (o.nbytes + lse.nbytes) * (states + 1) / states / micro / 1e3
            name = str(dtype).removeprefix("torch.")
            rows.append([f"merge of {states} states, {n} rows, {name}", f"{micro:.1f}", f"{speed:,.0f}"])
    return rows


# ----------------------------------------------------------------------


def show(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    for row in (heads, ["---"] * len(heads), *rows):
        print(f"| {' | '.join(row)} |")
    print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--cases", default="decode,prefill,prefix,host,append,merge", help="which tables, separated by commas"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pages", default="16,1", help="page sizes, separated by commas")
    arguments = parser.parse_args()
    benchmark.require_gpu()
    pages, cases = [int(p) for p in arguments.pages.split(",")], arguments.cases.split(",")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {datetime.date.today()}", flush=True)
    tables: list[tuple[list[str], list[list[str]]]] = []
    if "decode" in cases:
        tables.append((["decode", "page", "GB/s", "µs", "of the ceiling"], decode(pages, arguments.rounds)))
    if "prefill" in cases:
        tables.append((["prefill", "keys", "TFLOP/s", "ms", "of dense", "of cuDNN"], prefill(pages, arguments.rounds)))
    if "prefix" in cases:
        heads = ["shared prefix, page 16", "flat, µs", "auto, µs", "ratio", "plan flat, µs", "plan auto, µs"]
        tables.append((heads, prefix(arguments.rounds)))
    if "host" in cases:
        tables.append((["host time", "µs"], host(pages)))
    if "append" in cases:
        tables.append((["appending, in a graph", "µs", "GB/s"], append(pages)))
    if "merge" in cases:
        tables.append((["merging, in a graph", "µs", "GB/s"], merge()))
    for heads, rows in tables:
        show(heads, rows)


if __name__ == "__main__":
    main()
