"""Extra outputs on a device: every kind against the float64 reference, and in graphs that follow plans."""

from __future__ import annotations

import numpy as np
import pytest
import serve_cases
import torch
from block_checks import attention as block_attention
from block_checks import blocks_for, cells, lists, sizes
from block_checks import make_batch as make_blocks
from block_checks import reference_all as block_reference
from cases import EMIT_SCALARS, SHAPES, Case, emit_cases
from checks import assert_emits, compile_case, inputs_for, parts_of, reference_case, run_and_check
from serve_cases import KINDS, Lengths, Served, lengths_of
from serve_checks import attention, check, make_batch, reference_all, run_all
from serve_checks import run_and_check as serve_and_check

CASES = {case.variant: case for case in emit_cases()}
WATCH = Served(CASES["watch"])


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=str)
def test_dense(case: Case, sizes: tuple[int, ...], seed: int) -> None:
    shape = case.shape(*sizes)
    run_and_check(case, shape, inputs_for(case, shape, seed, **EMIT_SCALARS.get(case.variant, {})))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("served", serve_cases.EMITS, ids=str)
def test_served(served: Served, kind: str, seed: int) -> None:
    lengths = lengths_of(kind, 9000 if kind in ("decode", "verify") else 2000, np.random.default_rng(seed))
    serve_and_check(make_batch(served, lengths, (8, 2), seed, **EMIT_SCALARS.get(served.case.variant, {})))


@pytest.mark.parametrize("served", serve_cases.EMITS_IN_BLOCKS, ids=str)
def test_blocks(served: Served, seed: int) -> None:
    batch = make_blocks(served, (130, 3000), (8, 2), seed)
    sees, attn = blocks_for(batch, 32, seed), block_attention(batch)
    attn.plan_block_sparse(*lists(sees), **sizes(batch, 32))
    found = run_all(attn, batch)
    want = block_reference(batch, cells(sees, 32, served.page_size or 1, *batch.lengths[0]))
    check(batch, found[:2], want[:2])
    assert_emits(found[2], want[2])


def test_runs_of_one_plan_have_the_same_bits(seed: int) -> None:
    """Sums too, however many pieces they are of."""
    batch = make_batch(Served(CASES["plain"]), [(1, 60_000), (3, 9000), (70, 900)], (8, 2), seed)
    attn = attention(batch)
    attn.plan(*batch.table)
    first = run_all(attn, batch)[2]
    for _ in range(5):
        again = run_all(attn, batch)[2]
        assert all(torch.equal(again[name], x) for name, x in first.items())


def test_a_dense_graph(seed: int) -> None:
    """Replayed with other values in the captured tensors, into memory that was given and memory that was not."""
    case = CASES["watch"]
    x, y = (inputs_for(case, case.shape(2, 300, 500, 4, 2), seed + n) for n in range(2))
    kernel, given = compile_case(case), {"head_max": torch.zeros(4, device="cuda")}
    kernel(x.q, x.k, x.v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, found = kernel(x.q, x.k, x.v, emit=given)
    assert found["head_max"] is given["head_max"]
    for mine, other in zip((x.q, x.k, x.v), (y.q, y.k, y.v), strict=True):
        mine.copy_(other)
    graph.replay()
    assert_emits(found, parts_of(case.load(), reference_case(case)(y.q, y.k, y.v, return_lse=True))[2])


REPLAYED: list[Lengths] = [
    [(40, 40), (1, 3000), (0, 9), (23, 700)], [(1, 2000)] * 6, [(3, 0), (2, 50)], [(64, 900)], [(1, 5000), (1, 1)],
]  # fmt: skip


def test_a_graph_follows_plans(seed: int) -> None:
    """Fewer rows and requests than were captured count for nothing; rows of each request follow the plan."""
    rows, requests, pages = 64, 6, 1000
    first = make_batch(WATCH, [(rows, 100)], (8, 2), seed)
    attn = attention(first, max_batch_size=requests, max_qo_rows=rows, max_kv_pages=pages)
    options = {"dtype": torch.bfloat16, "device": "cuda"}
    q, kv = torch.zeros(rows, 8, 64, **options), [torch.zeros(pages, 16, 2, 64, **options) for _ in "kv"]
    given = {
        "by_request": torch.zeros(requests, device="cuda"), "group_min": torch.zeros(2, requests, device="cuda"),
        "row_min": torch.zeros(rows, 8, device="cuda"),
    }  # fmt: skip
    attn.plan(*first.table)
    attn.run(q, kv)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, found = attn.run(q, kv, emit=given)
    for n, lengths in enumerate(REPLAYED):
        batch = make_batch(WATCH, lengths, (8, 2), seed + n)
        q.fill_(torch.nan)[: len(batch.q)] = batch.q
        for cache, x in zip(kv, batch.kv, strict=True):
            cache.fill_(torch.nan)[: len(x)] = x
        attn.plan(*batch.table)
        graph.replay()
        want = reference_all(batch)[2]
        b, r = len(lengths), len(batch.q)
        kept = {
            "row_max": found["row_max"][:r], "row_min": found["row_min"][:r], "turned": found["turned"][:, :r],
            "by_request": found["by_request"][:b], "group_min": found["group_min"][:, :b],
            "head_max": found["head_max"],
        }  # fmt: skip
        assert_emits({name: kept[name] for name in want}, want)
        assert bool((found["by_request"][b:] == -torch.inf).all())
        assert bool((found["group_min"][:, b:] == torch.inf).all())
