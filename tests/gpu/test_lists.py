"""Domains on the GPU against the float64 reference: lists of every kind, every layout, and graphs."""

from __future__ import annotations

import cases
import numpy as np
import pytest
import serve_cases
import torch
from block_checks import attention as block_attention
from block_checks import blocks_for, cells, lists, sizes
from block_checks import make_batch as make_blocks
from block_checks import reference as block_reference
from cases import Case, example
from checks import compile_case, inputs_for, run_and_check
from serve_cases import Served, lengths_of
from serve_checks import attention, check, make_batch, reference, run

TOPK = example("block_topk", "block_topk")


@pytest.mark.parametrize("shape", [(2, 300, 777, 6, 2), (1, 257, 64, 7, 1), (1, 1000, 4000, 8, 2)], ids=str)
@pytest.mark.parametrize("case", [*cases.list_cases(), *cases.parts_cases()], ids=str)
def test_dense(case: Case, shape: tuple[int, ...], seed: int) -> None:
    size = case.shape(*shape)
    run_and_check(case, size, inputs_for(case, size, seed))


@pytest.mark.parametrize("shape", [(2, 300, 777, 8, 2), (1, 257, 300, 16, 1), (1, 1000, 900, 12, 1)], ids=str)
@pytest.mark.parametrize("case", [TOPK, *cases.heads_cases()], ids=str)
def test_tiles_of_several_heads(case: Case, shape: tuple[int, ...], seed: int) -> None:
    size = case.shape(*shape)
    run_and_check(case, size, inputs_for(case, size, seed))


@pytest.mark.parametrize("kind", ["decode", "verify", "mixed"])
@pytest.mark.parametrize("served", serve_cases.LISTS, ids=str)
def test_served(served: Served, kind: str, seed: int) -> None:
    lengths = lengths_of(kind, 3000, np.random.default_rng(seed))
    batch = make_batch(served, lengths, (6, 2), seed)
    attn = attention(batch)
    attn.plan(*batch.table)
    check(batch, run(attn, batch), reference(batch))


@pytest.mark.parametrize("served", serve_cases.LISTED_BLOCKS, ids=str)
def test_beside_blocks_of_the_plan(served: Served, seed: int) -> None:
    batch = make_blocks(served, (130, 1500), (8, 2), seed)
    sees, attn = blocks_for(batch, 32, seed), block_attention(batch)
    attn.plan_block_sparse(*lists(sees), **sizes(batch, 32))
    there = cells(sees, 32, served.page_size or 1, *batch.lengths[0])
    check(batch, run(attn, batch), block_reference(batch, there))


def test_many_rows_share_their_blocks(seed: int) -> None:
    """Tiles that run no mask, tiles of which rows list other blocks, and a tile that lists nothing."""
    size = TOPK.shape(1, 4096, 4096, 8, 2)
    x = inputs_for(TOPK, size, seed)
    gen = torch.Generator("cuda").manual_seed(seed)
    chosen = torch.randint(-1, 64, (1, 32, 2, 16), generator=gen, device="cuda", dtype=torch.int32)
    rows = chosen.repeat_interleave(128, 1)
    rows[:, 1024:2048, :, 0] = torch.randint(0, 64, (1, 1024, 2), generator=gen, device="cuda", dtype=torch.int32)
    rows[:, 3072:3200] = -1
    x.params["selected"] = rows
    run_and_check(TOPK, size, x)


def test_a_graph_follows_lists_and_requests_that_grow(seed: int) -> None:
    served = Served(TOPK)
    longest = make_batch(served, [(1, 5000), (1, 900)], (8, 2), seed)
    attn = attention(longest, max_kv_pages=1000)
    chosen = torch.empty_like(longest.params["selected"])  # type: ignore[arg-type]
    out = torch.empty_like(longest.q)
    short = longest.table[1].new_tensor([0, 40, 80]), longest.table[3].new_tensor([16, 16])
    attn.plan(longest.table[0], short[0], longest.table[2], short[1])
    attn.run(longest.q, longest.kv, out=out, selected=chosen)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attn.run(longest.q, longest.kv, out=out, selected=chosen)
    attn.plan(*longest.table)
    for _ in range(2):
        chosen.copy_(torch.randint(-1, 79, chosen.shape, device="cuda"))
        graph.replay()
        longest.params["selected"] = chosen
        want, _ = reference(longest)
        check(longest, (out, None), (want, None))


def test_same_lists_same_bits(seed: int) -> None:
    size = TOPK.shape(1, 700, 1300, 8, 2)
    x = inputs_for(TOPK, size, seed)
    kernel, again = compile_case(TOPK), {**x.params, "selected": x.params["selected"].flip(-1)}  # type: ignore[union-attr]
    assert torch.equal(kernel(x.q, x.k, x.v, **x.params), kernel(x.q, x.k, x.v, **again))
