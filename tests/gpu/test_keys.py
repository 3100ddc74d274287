"""f_k and f_v on the GPU: in the kernels of every layout, by a pre-pass to the same bits, and in graphs.

The oracle rounds what they make of k and v, as kernels do.
"""

from __future__ import annotations

from dataclasses import replace

import block_checks
import cases
import numpy as np
import pytest
import serve_cases
import torch
from cases import Case, keys_case
from checks import compile_case, inputs_for, run_and_check
from oracle import rounds_before_scale
from serve_cases import Served, fused, lengths_of
from serve_checks import Batch, attention, make_batch, reference, same
from serve_checks import check as check_batch
from serve_checks import run as run_batch
from serve_checks import run_and_check as run_and_check_batch

from attncc.runtime import routes

# many query tiles and blocks; more queries than keys; a row
SHAPES = [(2, 300, 777, 6, 2), (1, 257, 64, 7, 1), (3, 1, 4001, 8, 2), (2, 1024, 1024, 28, 4)]


def assert_alike(a: torch.Tensor, b: torch.Tensor, limit: float = 2e-3) -> None:
    """Up to a few keys that are rounded the other way: ptxas may fuse a product and a sum in one of two kernels."""
    assert float((a.float() - b.float()).norm()) <= limit * float(a.float().norm())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("case", cases.keys_cases(False), ids=str)
def test_dense(case: Case, shape: tuple[int, ...], seed: int) -> None:
    size = case.shape(*shape)
    x = inputs_for(case, size, seed)
    fused = run_and_check(case, size, x)
    before = run_and_check(replace(case, prepass=True), size, x)
    assert_alike(fused[0], before[0])


@pytest.mark.parametrize("kind", serve_cases.KINDS)
@pytest.mark.parametrize("group", [1, 4, 7])
@pytest.mark.parametrize("served", serve_cases.KEYS, ids=str)
def test_served(served: Served, group: int, kind: str, seed: int) -> None:
    """Tiles of few rows, of up to 64 and of more; pages whose last rows are NaN."""
    lengths = lengths_of(kind, 9000 if kind == "decode" else 3000, np.random.default_rng(seed))
    run_and_check_batch(make_batch(served, lengths, (2 * group, 2), seed))


def run_alone(batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A run that nothing judges."""
    attn = attention(batch)
    attn.plan(*batch.table)
    return run_batch(attn, batch)


@pytest.mark.parametrize("kind", ["decode", "mixed", "prefill"])
@pytest.mark.parametrize("served", serve_cases.KEYS_BEFORE, ids=str)
def test_ragged_keys_go_either_way(served: Served, kind: str, seed: int) -> None:
    lengths = lengths_of(kind, 3000, np.random.default_rng(seed))
    batch = make_batch(served, lengths, (8, 2), seed)
    found, other = run_and_check_batch(batch), run_alone(replace(batch, served=fused(served)))
    assert_alike(found[0], other[0], 5e-3 if rounds_before_scale(fused(served).case) else 2e-3)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("case", cases.folded_before(), ids=str)
def test_factors_go_either_way(case: Case, shape: tuple[int, ...], seed: int) -> None:
    """Each as the reference rounds there: a product that is stored, or none."""
    size = case.shape(*shape)
    for how in (False, True):
        run_and_check(replace(case, prepass=how), size, inputs_for(case, size, seed))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("case", cases.ahead_cases(), ids=str)
def test_keys_made_ahead(case: Case, shape: tuple[int, ...], seed: int) -> None:
    size = case.shape(*shape)
    run_and_check(case, size, inputs_for(case, size, seed))


@pytest.mark.parametrize("lengths", [(4, 300, 4096), (2, 4096, 4096), (40, 130, 260)], ids=str)
def test_many_orders_of_makers(lengths: tuple[int, int, int], seed: int) -> None:
    """The same bits every time, on streams that take turns and in graphs, whose counts of blocks are their own."""
    case = cases.ahead_cases()[0]
    size = case.shape(*lengths, 32, 8)
    x = inputs_for(case, size, seed)
    want, kernel = run_and_check(case, size, x)[0], compile_case(case)
    streams = [torch.cuda.Stream() for _ in range(2)]
    found = [torch.full_like(want, torch.nan) for _ in range(40)]
    torch.cuda.synchronize()
    for n, out in enumerate(found):
        with torch.cuda.stream(streams[n % 2]):
            kernel(x.q, x.k, x.v, out=out, **x.params)
    torch.cuda.synchronize()
    assert all(torch.equal(out, want) for out in found)
    graph, out = torch.cuda.CUDAGraph(), torch.full_like(want, torch.nan)
    with torch.cuda.graph(graph):
        for _ in range(3):
            kernel(x.q, x.k, x.v, out=out, **x.params)
    for _ in range(5):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, want)


@pytest.mark.parametrize("kind", ["decode", "mixed", "prefill"])
@pytest.mark.parametrize("served", serve_cases.FOLDED_BEFORE, ids=str)
def test_factors_of_ragged_keys_go_either_way(served: Served, kind: str, seed: int) -> None:
    batch = make_batch(served, lengths_of(kind, 3000, np.random.default_rng(seed)), (8, 2), seed)
    for way in (served, fused(served)):
        run_and_check_batch(replace(batch, served=way))


@pytest.mark.parametrize("served", serve_cases.KEYS_IN_BLOCKS, ids=str)
def test_blocks_of_a_list(served: Served, seed: int) -> None:
    batch = block_checks.make_batch(served, (70, 900), (8, 2), seed)
    sees, attn = block_checks.blocks_for(batch, 16, seed), block_checks.attention(batch)
    attn.plan_block_sparse(*block_checks.lists(sees), **block_checks.sizes(batch, 16))
    there = block_checks.cells(sees, 16, served.page_size or 1, 70, 900)
    check_batch(batch, run_batch(attn, batch), block_checks.reference(batch, there))


def test_many_orders_of_warps(seed: int) -> None:
    """Protocols fail now and then: the same bits every time, over batches that mix all kinds of tiles."""
    served = Served(cases.keys_cases(False)[0])
    batch = make_batch(served, [(1, 5000), (12, 3000), (200, 1000)] * 12 + [(1, 77)] * 40, (8, 2), seed)
    want = run_and_check_batch(batch)
    attn = attention(batch)
    attn.plan(*batch.table)
    for _ in range(200):
        assert same(run_batch(attn, batch), want)


@pytest.mark.parametrize("how", ["forward", "prepared"])
def test_a_graph_of_dense_calls(how: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a pre-pass writes belongs to the graph."""
    case = keys_case("turned_keys")
    size = case.shape(2, 200, 500, 8, 2)
    x, other = inputs_for(case, size, seed), inputs_for(case, size, seed + 1)
    monkeypatch.setattr(routes, "choose", lambda *_: how)
    kernel = compile_case(case)
    kernel._bindings.clear()  # as if it had not been called before
    out = kernel(x.q, x.k, x.v, **x.params)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = kernel(x.q, x.k, x.v, **x.params)
    spoil = [torch.full_like(x.k, torch.nan) for _ in range(8)]  # memory of others
    graph.replay()
    assert torch.equal(again, out)
    for mine, theirs in ((x.q, other.q), (x.k, other.k), (x.v, other.v)):
        mine.copy_(theirs)
    graph.replay()
    assert torch.equal(again, kernel(other.q, other.k, other.v, **x.params))
    kernel._bindings.clear()
    del spoil


def test_a_graph_of_ragged_runs_follows_plans(seed: int) -> None:
    served = serve_cases.KEYS_BEFORE[0]
    total = [(3, 900), (1, 40), (120, 333), (0, 27)]
    batches = [make_batch(served, [total[n] for n in order], (8, 2), seed) for order in ([0, 1, 2, 3], [2, 3, 1, 0])]
    attn = attention(batches[0])
    attn.plan(*batches[0].table)
    first = batches[0]
    run_batch(attn, first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attn.run(first.q, first.kv, return_lse=True, **first.params)
    wants = [reference(replace(batch, q=first.q, kv=first.kv)) for batch in batches]
    for batch, want in [*zip(batches, wants, strict=True)] * 2:
        attn.plan(*batch.table)
        graph.replay()
        check_batch(batch, (out, lse), want)
