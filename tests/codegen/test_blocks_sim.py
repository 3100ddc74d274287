"""Block-sparse layouts in the PTX interpreter: blocks by TMA and key by key, against formulas and the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import simulated as sim
import torch
from gpu.cases import EMITS, VECTORS, Case, example, keys_case
from ptx.launch import main_ptx
from ptx.serve import ServeDriver

import attncc
from attncc.runtime.batch import BatchAttention
from attncc.runtime.kernel import Kernel

from block_checks import cells, lists, make_batch, reference, reference_all, some_blocks  # isort: skip  (simulated says where)
from serve_cases import Served  # isort: skip
from serve_checks import Batch  # isort: skip

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("kernel_cache")]


def blocks(file: str, variant: str, size: int, **options: Any) -> Served:
    return Served(example(file, variant, head_dim=64, **options), size, blocks=True)


def batch(served: Served, lengths: tuple[int, int], heads: tuple[int, int]) -> Batch:
    with patch.object(sim.serve_checks, "DEVICE", "cpu"):
        return make_batch(served, lengths, heads, 0)


class Simulated(sim.Simulated):
    """An object for the plans of blocks of one size, and no others."""

    def __init__(self, x: Batch, sm_count: int = 3, seed: int = 0):
        made = attncc.compile(x.served.source, **x.served.options)  # pyright: ignore[reportArgumentType]
        artifact = made.serving("blocks", x.served.page_size)

        def stand_in(layout: str, page_size: int | None) -> Any:  # for the kernel of plans that are not made here
            return replace(artifact, manifest={**artifact.manifest, "layout": layout, "page_size": page_size})

        self.driver = ServeDriver(main_ptx(artifact), sm_count, seed, seed % 2 == 0, artifact)
        self.attn = BatchAttention(
            Kernel(artifact, build=stand_in), device="cpu", driver=self.driver, num_qo_heads=x.heads[0],
            num_kv_heads=x.heads[1], max_batch_size=128, max_qo_rows=512,
        )  # fmt: skip


def plan_and_check(x: Batch, block_rows: int, **options: Any) -> Simulated:
    (qo_len, kv_len), size = x.lengths[0], x.served.page_size or 1
    sees = some_blocks(-(-qo_len // block_rows), -(-kv_len // size), np.random.default_rng(1))
    one = Simulated(x, **options)
    one.attn.plan_block_sparse(*lists(sees), block_rows=block_rows, block_cols=size, qo_len=qo_len, kv_len=kv_len)
    found, want = sim.run_all(one, x), reference_all(x, cells(sees, block_rows, size, qo_len, kv_len))
    sim.serve_checks.check(x, found[:2], want[:2])
    sim.assert_emits(found[2], want[2])
    return one


def test_plain_attention_written_out() -> None:
    """Over the keys of each row's blocks; a row of blocks without any gives 0 and -inf."""
    x = batch(blocks("plain", "plain", 16), (15, 125), (4, 2))
    sees, one, (k, v) = [[7, 3, 0], [], [2, 6, 4, 7]], Simulated(x), x.kv
    one.attn.plan_block_sparse(*lists(sees), block_rows=5, block_cols=16, kv_len=125)
    out, lse = sim.run(one, x)
    assert lse is not None
    for i in range(15):
        there = torch.tensor([j for c in sees[i // 5] for j in range(c * 16, min(125, c * 16 + 16))], dtype=torch.long)
        for h in range(4):
            score = k[there, h // 2].double() @ x.q[i, h].double() / 8
            assert torch.allclose(out[i, h].double(), torch.softmax(score, 0) @ v[there, h // 2].double(), atol=2e-2)
            assert torch.allclose(lse[i, h].double(), torch.logsumexp(score, 0), atol=1e-3)


# (kernel, rows of a block, (qo_len, kv_len), heads): blocks by TMA (multiples of 8 keys) and by the key, groups of 1, 2
# and 4, and what a variant may ask of a position
CASES = [
    (blocks("plain", "plain", 1), 1, (4, 42), (4, 1)),
    (blocks("causal", "causal", 128), 64, (150, 500), (4, 1)),
    (blocks("causal", "causal", 1), 3, (20, 150), (4, 1)),
    (blocks("alibi", "alibi", 8), 64, (70, 300), (2, 2)),
    (blocks("gemma2", "gemma2_local", 16), 3, (40, 333), (4, 2)),
    (blocks("kv_scales", "key_scales", 5), 3, (30, 203), (4, 2)),
    (blocks("gpt_oss", "gpt_oss_sliding", 5), 64, (70, 400), (4, 1)),
    (blocks("dilated", "longformer", 16, head_dim_vo=80), 1, (9, 260), (4, 1)),
    (blocks("sigmoid", "flash_sigmoid", 16), 5, (17, 150), (4, 2)),
    (blocks("gated_output", "gated_output", 8), 5, (17, 150), (4, 2)),
    (Served(Case(str(VECTORS), "queries_normed_and_turned", 64), 16, blocks=True), 5, (17, 150), (5, 1)),
    (Served(Case(str(VECTORS), "queries_by_row", 64), 5, blocks=True), 64, (70, 150), (4, 2)),
]  # fmt: skip


@pytest.mark.parametrize("served, block_rows, lengths, heads", CASES, ids=str)
def test_variants(served: Served, block_rows: int, lengths: tuple[int, int], heads: tuple[int, int]) -> None:
    plan_and_check(batch(served, lengths, heads), block_rows)


@pytest.mark.parametrize("variant, size", [("of_requests", 5), ("normed_values", 16), ("turned_keys", 1)])
def test_transformed_keys(variant: str, size: int) -> None:
    """A key stands where the list says."""
    plan_and_check(batch(Served(keys_case(variant), size, blocks=True), (40, 333), (4, 2)), 7)


def test_pieces_are_merged() -> None:
    x = batch(blocks("causal", "causal", 16), (3, 3000), (4, 2))
    for seed in range(2):
        assert plan_and_check(x, 3, sm_count=4, seed=seed).driver.pieces >= 2


def test_heads_with_blocks_of_their_own() -> None:
    """Lists of differing lengths, cut among them; k and v have NaN rows past kv_len."""
    x = batch(blocks("causal", "causal", 16), (7, 1500), (4, 2))
    rng = np.random.default_rng(3)
    sees = [some_blocks(2, 94, rng, 0.5)[::-1], some_blocks(2, 94, rng, 0.9)]
    pairs, one = [lists(s) for s in sees], Simulated(x, sm_count=4)
    one.attn.plan_block_sparse(
        [p for p, _ in pairs], [c for _, c in pairs], block_rows=4, block_cols=16, qo_len=7, kv_len=1500
    )  # fmt: skip
    k, v = (torch.cat([t, torch.full_like(t[:9], torch.nan)]) for t in x.kv)
    want = reference(x, torch.stack([cells(s, 4, 16, 7, 1500) for s in sees]))
    sim.serve_checks.check(x, sim.run(one, replace(x, kv=(k, v))), want)
    assert one.driver.pieces >= 4


@pytest.mark.parametrize("unit", [1, 16])
def test_blocks_of_any_sizes(unit: int) -> None:
    x = batch(blocks("causal", "causal", unit), (50, 20 * unit), (4, 2))
    rows, cols = np.array([[7, 0, 43], [20, 20, 10]]), unit * np.array([[5, 1, 14], [3, 13, 4]])
    mask = np.array([[[1, 0, 1], [1, 1, 1], [0, 1, 1]], [[0, 0, 0], [1, 1, 0], [0, 0, 1]]], dtype=bool)
    one = Simulated(x)
    one.attn.plan_variable_blocks(mask, rows, cols)
    seen = [m.repeat(r, 0).repeat(c, 1) for m, r, c in zip(mask, rows, cols, strict=True)]
    sim.serve_checks.check(x, sim.run(one, x), reference(x, torch.from_numpy(np.stack(seen))))


@pytest.mark.parametrize("name, size", [("watch", 16), ("curves", 5)])
def test_extra_outputs(name: str, size: int) -> None:
    """All rows are of one request."""
    x = batch(Served(Case(str(EMITS), name, head_dim=64), size, blocks=True), (70, 900), (4, 2))
    assert plan_and_check(x, 20, sm_count=8).driver.pieces
