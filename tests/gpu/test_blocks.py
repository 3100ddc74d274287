"""Block-sparse attention against the float64 reference with the blocks as one more mask."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import serve_cases
import torch
from block_checks import Columns, attention, blocks_for, cells, lists, make_batch, reference, sizes
from serve_cases import Served
from serve_checks import Batch, check, run, same

QO_LEN, KV_LEN = 407, 999
CAUSAL = Served(serve_cases.CAUSAL, 16, blocks=True)


def there(batch: Batch, sees: Columns, block_rows: int) -> torch.Tensor:
    return cells(sees, block_rows, batch.served.page_size or 1, *batch.lengths[0])


def plan_and_check(batch: Batch, block_rows: int, seed: int) -> None:
    sees, attn = blocks_for(batch, block_rows, seed), attention(batch)
    attn.plan_block_sparse(*lists(sees), **sizes(batch, block_rows))
    check(batch, run(attn, batch), reference(batch, there(batch, sees, block_rows)))


@pytest.mark.parametrize("block_rows", [1, 3, 64, 200])
@pytest.mark.parametrize("served", serve_cases.BLOCKS, ids=str)
def test_block_sizes(served: Served, block_rows: int, seed: int) -> None:
    """Random blocks, cut short at both ends, one row of blocks empty and one full."""
    plan_and_check(make_batch(served, (QO_LEN, KV_LEN), (6, 2), seed), block_rows, seed)


@pytest.mark.parametrize("heads", [(2, 2), (8, 2), (7, 1)], ids=str)
@pytest.mark.parametrize("served", serve_cases.BLOCK_VARIANTS, ids=str)
def test_variants(served: Served, heads: tuple[int, int], seed: int) -> None:
    plan_and_check(make_batch(served, (130, 1500), heads, seed), 32, seed)


def test_long_rows_are_cut(seed: int) -> None:
    """One row of blocks over 60,000 of 100,000 keys: its pieces are merged."""
    plan_and_check(make_batch(CAUSAL, (3, 100_000), (8, 2), seed), 3, seed)


def test_rows_past_the_last_key(seed: int) -> None:
    """k and v may have more rows than there are keys: NaN, and not read."""
    batch = make_batch(CAUSAL, (QO_LEN, KV_LEN), (6, 2), seed)
    k, v = (torch.cat([t, torch.full_like(t[:20], torch.nan)]) for t in batch.kv)
    sees, attn = blocks_for(batch, 64, seed), attention(batch)
    attn.plan_block_sparse(*lists(sees), **sizes(batch, 64))
    assert same(run(attn, batch), run(attn, replace(batch, kv=(k, v))))


@pytest.mark.parametrize("served", [CAUSAL, replace(CAUSAL, page_size=5)], ids=str)
def test_heads_with_blocks_of_their_own(served: Served, seed: int) -> None:
    batch = make_batch(served, (QO_LEN, KV_LEN), (8, 4), seed)
    sees = [blocks_for(batch, 32, seed + g) for g in range(4)]
    attn = attention(batch)
    pairs = [lists(x) for x in sees]
    attn.plan_block_sparse([x for x, _ in pairs], [x for _, x in pairs], **sizes(batch, 32))
    check(batch, run(attn, batch), reference(batch, torch.stack([there(batch, x, 32) for x in sees])))


@pytest.mark.parametrize("unit", [1, 8])
@pytest.mark.parametrize("by_head", [False, True])
def test_blocks_of_any_sizes(by_head: bool, unit: int, seed: int) -> None:
    rng = np.random.default_rng(seed)

    def cut(total: int, parts: int) -> np.ndarray:
        ends = np.sort(rng.integers(0, total + 1, parts - 1))
        return np.diff([0, *ends, total])

    heads = 2 if by_head else 1
    rows = np.stack([cut(QO_LEN, 6) for _ in range(heads)])
    cols = unit * np.stack([cut(125, 9) for _ in range(heads)])
    mask = rng.random((heads, 6, 9)) < 0.5
    batch = make_batch(replace(CAUSAL, page_size=unit), (QO_LEN, 125 * unit), (6, 2), seed)
    attn = attention(batch)
    attn.plan_variable_blocks(*((mask, rows, cols) if by_head else (mask[0], rows[0], cols[0])))
    seen = [m.repeat(r, 0).repeat(c, 1) for m, r, c in zip(mask, rows, cols, strict=True)]
    check(batch, run(attn, batch), reference(batch, torch.from_numpy(np.stack(seen))))


def test_a_graph_follows_other_blocks(seed: int) -> None:
    batch = make_batch(CAUSAL, (QO_LEN, KV_LEN), (6, 2), seed)
    attn = attention(batch, max_kv_pages=10_000)
    out = torch.empty_like(batch.q)
    sees = [blocks_for(batch, rows, seed + rows) for rows in (64, 16)]
    attn.plan_block_sparse(*lists(sees[0]), **sizes(batch, 64))
    attn.run(batch.q, batch.kv, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attn.run(batch.q, batch.kv, out=out)
    for blocks, rows in ((sees[1], 16), (sees[0], 64)):
        attn.plan_block_sparse(*lists(blocks), **sizes(batch, rows))
        graph.replay()
        want, _ = reference(batch, there(batch, blocks, rows))
        check(batch, (out, None), (want, None))
