"""What only a device can show of serving: graphs that follow plans, streams, devices, and appending in a graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import serve_cases
import torch
from checks import reference_case
from serve_cases import BY_PAGE, Lengths, Served, lengths_of
from serve_checks import Batch, attention, check, make_batch, reference, run, same

import attncc

PAGED, LOCAL = BY_PAGE[16], Served(serve_cases.LOCAL)


class Captured:
    """Several layers captured once over one q and one cache a layer, of sizes that no batch exceeds."""

    LAYERS = 3

    def __init__(self, served: Served, max_batch: int, max_rows: int, pages: int, **params: Any):
        self.served, self.params, self.max_rows = served, params, max_rows
        size = served.page_size
        assert size is not None
        full = [(max_rows // max_batch, 64)] * max_batch
        full[0] = (max_rows - sum(q for q, _ in full[1:]), 64 + max_rows)
        batch = make_batch(served, full, (8, 2))
        self.attn = attention(batch, max_batch_size=max_batch, max_qo_rows=max_rows, max_kv_pages=pages)
        options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
        self.q = torch.zeros(max_rows, 8, 128, **options)
        self.kv = [tuple(torch.zeros(pages, size, 2, 128, **options) for _ in "kv") for _ in range(self.LAYERS)]
        self.out = [torch.zeros(max_rows, 8, 128, **options) for _ in range(self.LAYERS)]
        self.lse = [torch.zeros(max_rows, 8, device="cuda") for _ in range(self.LAYERS)]
        self.attn.plan(*batch.table, **params)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for kv, out, lse in zip(self.kv, self.out, self.lse, strict=True):
                self.attn.run(self.q, kv, out=out, lse=lse, return_lse=True, **params)

    def load(self, lengths: Lengths, seed: int) -> list[Batch]:
        """Put a random batch into q and into each layer's cache; the batches, which share a table."""
        batches = [make_batch(self.served, lengths, (8, 2), seed, pages_seed=seed)]
        batches += [
            make_batch(self.served, lengths, (8, 2), seed + n, pages_seed=seed) for n in range(1, self.LAYERS)
        ]  # fmt: skip
        rows = batches[0].q.shape[0]
        self.q.fill_(torch.nan)[:rows] = batches[0].q
        for n, (k, v) in enumerate(self.kv):
            for cache, x in zip((k, v), batches[n].kv, strict=True):
                cache.fill_(torch.nan)[: x.shape[0]] = x
            self.out[n].fill_(7.0)
            self.lse[n].fill_(7.0)
        return batches

    def check(self, batches: list[Batch]) -> None:
        """Each layer's rows are right, and rows that the plan doesn't have are as they were."""
        rows = batches[0].q.shape[0]
        for n, batch in enumerate(batches):
            oracle = reference_case(batch.served.case)
            want = oracle.paged(batches[0].q, batch.kv, *batch.table, return_lse=True, **self.params)
            check(batch, (self.out[n][:rows], self.lse[n][:rows]), want)
            assert bool((self.out[n][rows:] == 7.0).all()) and bool((self.lse[n][rows:] == 7.0).all())


def test_a_graph_follows_ten_plans(seed: int) -> None:
    """Other batch sizes, kinds and lengths each time; then a second graph with other maxima, and the first again."""
    rng = np.random.default_rng(seed)
    first = Captured(PAGED, 24, 1400, 6000)
    kinds = [*serve_cases.KINDS, "decode", "mixed", "decode", "verify", "decode"]
    for n, kind in enumerate(kinds):
        batches = first.load(lengths_of(kind, 2000 if kind in ("decode", "verify") else 200, rng), seed + 10 * n)
        first.attn.plan(*batches[0].table)
        first.graph.replay()
        first.check(batches)
    second = Captured(PAGED, 300, 300, 9000)
    many = [(1, int(n)) for n in rng.integers(1, 400, 250)]
    batches = second.load(many, seed)
    again = first.load(lengths_of("mixed", 200, rng), seed + 999)
    second.attn.plan(*batches[0].table)
    first.attn.plan(*again[0].table)
    first.graph.replay()
    second.graph.replay()
    first.check(again)
    second.check(batches)


def test_a_graph_with_another_window_is_refused(seed: int) -> None:
    """A captured scalar can't change: a plan that relies on another one says so, and the graph still works."""
    captured = Captured(LOCAL, 8, 64, 400, window=40)
    batches = captured.load([(1, 300), (4, 90)], seed)
    for params in ({"window": 40}, {}):
        captured.attn.plan(*batches[0].table, **params)
        with pytest.raises(ValueError, match=r"\bwindow\b"):
            captured.attn.plan(*batches[0].table, window=41)
        captured.graph.replay()
        captured.check(batches)


def test_a_graph_with_too_few_rows_does_nothing(seed: int) -> None:
    """Prefill without a graph between replays of a small one: nothing is written past the captured out."""
    small, large = (make_batch(PAGED, lengths, (8, 2), seed) for lengths in ([(1, 300), (4, 90)], [(100, 300)]))
    attn = attention(small, max_batch_size=8, max_qo_rows=200, max_kv_pages=400)
    attn.plan(*small.table)
    out, lse = torch.zeros_like(small.q), torch.zeros(small.q.shape[:2], device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attn.run(small.q, small.kv, out=out, lse=lse, return_lse=True)
    attn.plan(*(t % len(small.kv[0]) if n == 2 else t for n, t in enumerate(large.table)))
    out.fill_(7.0)
    graph.replay()
    assert bool((out == 7.0).all())
    attn.plan(*small.table)
    graph.replay()
    check(small, (out, lse), reference_case(small.served.case).paged(small.q, small.kv, *small.table, return_lse=True))


def test_plans_while_a_graph_holds_the_index_buffer(seed: int) -> None:
    """More pages than the captured buffer holds are refused, with the number needed."""
    captured = Captured(PAGED, 8, 64, 400)
    batches = captured.load([(1, 300), (4, 90)], seed)
    captured.attn.plan(*batches[0].table)
    with pytest.raises(ValueError, match=r"kv_indices: .*\b626\b"):
        table = make_batch(PAGED, [(1, 10_001)], (8, 2), seed).table
        captured.attn.plan(*table[:2], table[2] % 400, table[3])
    captured.graph.replay()
    captured.check(batches)


# ---------------------------------------------------------------------- streams and devices


def delay(milliseconds: int = 20) -> None:
    torch.cuda._sleep(milliseconds * 1_500_000)


@pytest.mark.parametrize("plans", [2, 9])
def test_plans_ahead_of_a_delayed_stream(plans: int, seed: int) -> None:
    """Plan, run, plan, run, … all queued while the stream stands still: each run sees its own plan."""
    batches = [
        make_batch(PAGED, [(1, 100 + 900 * n), (3, 400 - 40 * n), (n, 50)], (8, 2), seed + n) for n in range(plans)
    ]
    wants = [reference(b) for b in batches]
    attn = attention(batches[0], max_batch_size=3, max_qo_rows=16)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        delay()
        found = []
        for batch in batches:
            attn.plan(*batch.table)
            found.append(run(attn, batch))
    stream.synchronize()
    for batch, out, want in zip(batches, found, wants, strict=True):
        check(batch, out, want)


def test_plan_a_plan_b_then_the_twin_of_a(seed: int) -> None:
    """B's plan doesn't disturb A's copy in flight, and A planned again gives A's bits."""
    a, b = (make_batch(PAGED, lengths, (8, 2), seed) for lengths in ([(1, 9000), (2, 300)], [(1, 40)] * 5))
    attn = attention(a, max_batch_size=5, max_qo_rows=8)
    attn.plan(*a.table)
    want = run(attn, a)
    check(a, want)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        delay()
        attn.plan(*a.table)
        attn.plan(*b.table)
        other = run(attn, b)
        attn.plan(*[t.clone() for t in a.table])
        twin = run(attn, a)
    stream.synchronize()
    check(b, other)
    assert same(twin, want)


def test_two_objects_on_two_streams(seed: int) -> None:
    lengths = [[(1, 20_000), (1, 3), (4, 700)], [(300, 900), (1, 5000)]]
    batches = [make_batch(PAGED, x, (8, 2), seed + n) for n, x in enumerate(lengths)]
    attns, streams = [attention(b) for b in batches], [torch.cuda.Stream() for _ in batches]
    wants = []
    for attn, batch in zip(attns, batches, strict=True):
        attn.plan(*batch.table)
        wants.append(run(attn, batch))
        check(batch, wants[-1])
    torch.cuda.synchronize()
    found: list[list[Any]] = [[], []]
    for _ in range(20):
        for n, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                attns[n].plan(*batches[n].table)
                found[n].append(run(attns[n], batches[n]))
    torch.cuda.synchronize()
    assert all(same(x, want) for n, want in enumerate(wants) for x in found[n])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU only")
def test_the_second_gpu_while_the_first_is_current(seed: int) -> None:
    batch = make_batch(PAGED, lengths_of("mixed", 3000, np.random.default_rng(seed)), (8, 2), seed)
    attn = attention(batch)
    attn.plan(*batch.table)
    want = run(attn, batch)
    check(batch, want)
    there = attention(batch, device="cuda:1")
    q, k, v = (t.to("cuda:1") for t in (batch.q, *batch.kv))
    for table in (batch.table, [t.to("cuda:1") for t in batch.table]):
        there.plan(*table)
        out, lse = there.run(q, (k, v), return_lse=True)
        assert torch.cuda.current_device() == 0 and out.device == torch.device("cuda:1")
        assert same((out.cpu(), lse.cpu()), tuple(None if t is None else t.cpu() for t in want))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="q: "):
        there.run(batch.q, (k, v))


# ---------------------------------------------------------------------- what is around attention


def test_a_step_in_a_graph_appends_and_attends(seed: int) -> None:
    """append_kv and run captured once: every step's indices are read at replay, and no other row of a cache changes."""
    captured = Captured(PAGED, 6, 40, 800)
    k_new, v_new = (torch.zeros(40, 2, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    sizes = ((7, torch.int32), (7, torch.int64), (900, torch.int32), (6, torch.int32))
    table = [torch.zeros(n, dtype=dtype, device="cuda") for n, dtype in sizes]
    graph = torch.cuda.CUDAGraph()
    captured.attn.plan([0, 40, 40, 40, 40, 40, 40], [0, 3, 3, 3, 3, 3, 3], [0, 1, 2], [16] * 6)
    with torch.cuda.graph(graph):
        attncc.append_kv(k_new, v_new, captured.kv[0], *table)
        captured.attn.run(captured.q, captured.kv[0], out=captured.out[0], lse=captured.lse[0], return_lse=True)
    for n in range(3):
        lengths = [(1, 700), (0, 33), (5, 16), (16, 17), (1, 1), (2, 900)][: 5 + (n == 0)]
        batch = captured.load(lengths, seed + n)[0]
        rows, size = batch.q.shape[0], PAGED.page_size
        ends = np.cumsum([kv for _, kv in lengths])
        new = torch.cat([torch.arange(end - q, end) for (q, _), end in zip(lengths, ends, strict=True)])
        page, slot = (x[new.cuda()] for x in batch.places)
        for cache, x in zip(captured.kv[0], (k_new, v_new), strict=True):
            x.fill_(torch.nan)[:rows] = cache[page, slot]
            cache[page, slot] = torch.nan
        padded = len(table[0]) - len(batch.table[0])
        qo, pages, ids, last = (t.cuda() for t in batch.table)
        table[0].copy_(torch.cat([qo, qo[-1:].expand(padded)]))
        table[1].copy_(torch.cat([pages, pages[-1:].expand(padded)]))
        table[2].fill_(-1)[: len(ids)] = ids
        table[3].fill_(0)[: len(last)] = last
        captured.attn.plan(*batch.table)
        graph.replay()
        for cache, whole in zip(captured.kv[0], batch.kv, strict=True):
            here, there = cache[: whole.shape[0]].view(torch.int16), whole.view(torch.int16)
            assert size and torch.equal(here, there) and bool(cache[whole.shape[0] :].isnan().all())
        check(batch, (captured.out[0][:rows], captured.lse[0][:rows]))


@pytest.mark.parametrize("page_size", [1, 16])
def test_append_far_into_a_large_cache(page_size: int, seed: int) -> None:
    """Beyond 2^32 elements, with indices on the host and on the device: the same rows, and no others."""
    pages = 2**32 // (page_size * 128) + 100
    cache = torch.zeros(pages, page_size, 1, 128, dtype=torch.bfloat16, device="cuda")
    v_cache = torch.zeros(pages, page_size, 1, 8, dtype=torch.bfloat16, device="cuda")
    count = -(-20 // page_size)
    ids = torch.arange(pages - count, pages).flip(0).int()
    table = [torch.tensor([0, 20]), torch.tensor([0, count]), ids, torch.tensor([20 - (count - 1) * page_size])]
    k, v = (torch.randn(20, 1, d, device="cuda", dtype=torch.bfloat16) for d in (128, 8))
    for where in ("cpu", "cuda"):
        attncc.append_kv(k, v, (cache, v_cache), *(t.to(where) for t in table))
        for c, x in ((cache, k), (v_cache, v)):
            assert torch.equal(c[ids.cuda()].flatten(0, 1)[:20], x)
            assert int(c[:-count].count_nonzero()) == 0
            c[-count:] = 0


def test_merging_in_a_graph_and_parts_of_a_batch(seed: int) -> None:
    """Keys in two halves, each planned by itself, merge to the whole; captured, the merge follows its inputs."""
    size, half = 16, 640
    batch = make_batch(serve_cases.EXAMPLES[[s.case.variant for s in serve_cases.EXAMPLES].index("plain")],
                       [(1, 2 * half), (3, 2 * half)], (8, 2), seed)  # fmt: skip
    want, attn, parts = reference(batch), attention(batch), []
    qo, pages, ids, _ = batch.table
    for first in (0, half // size):
        kept = torch.cat([ids[int(p) + first : int(p) + first + half // size] for p in pages[:-1]])
        attn.plan(qo, [0, half // size, 2 * half // size], kept, [size, size])
        parts.append(run(attn, batch))
    merged = attncc.merge_states(*parts[0], *parts[1])
    check(batch, merged, want)
    stacked = attncc.merge_state_list(torch.stack([o for o, _ in parts], 1), torch.stack([x for _, x in parts], 1))
    assert same(merged, stacked)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = attncc.merge_states(*parts[0], *parts[1])
        nothing = attncc.merge_states(*parts[0], torch.zeros_like(again[0]), torch.full_like(again[1], -torch.inf))
    graph.replay()
    assert same(again, merged) and same(nothing, parts[0])
