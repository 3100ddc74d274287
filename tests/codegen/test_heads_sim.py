"""Dense tiles that hold several heads of a group, in the PTX interpreter: groups of every size by one kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from codegen.simulated import check, inputs_for
from codegen.test_lists_sim import spoilt
from gpu.cases import Case, example, heads_cases
from ptx.launch import run_forward

from attncc.runtime.artifact import read_artifact

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("kernel_cache")]

TOPK = example("block_topk", "block_topk")
# batch, qo_len, kv_len, query heads, kv heads: groups of 1, 2, 3, 4, 6, 8, 12, 16, 32; tiles that end short, rows that
# see no key, several tiles of a head
SHAPES = [
    (1, 70, 200, 2, 2), (2, 70, 200, 4, 2), (1, 130, 150, 3, 1), (2, 37, 200, 8, 2), (1, 90, 60, 6, 1),
    (2, 19, 300, 16, 2), (1, 41, 130, 12, 1), (1, 21, 90, 16, 1), (1, 3, 150, 32, 1), (3, 1, 70, 8, 1),
]  # fmt: skip


@pytest.mark.parametrize("case", [TOPK, *heads_cases()], ids=str)
def test_groups(case: Case, artifact: Callable[[Case], Path]) -> None:
    path = artifact(case)
    entry = next(iter(read_artifact(path).manifest["kernels"].values()))
    assert entry.get("packs", 1) == entry["config"]["packs"] and entry["r2ur"] < 100
    for k, sizes in enumerate(SHAPES):
        x = inputs_for(case, case.shape(*sizes))
        params = spoilt(case, x.params) if k % 2 else x.params
        check(case, path, replace(x, params=params), sm_count=1 + k % 3, seed=k, lockstep=k % 2 == 0)


def test_a_tile_visits_what_its_own_positions_list(artifact: Callable[[Case], Path]) -> None:
    """Sixteen positions of eight heads: values of blocks that only others list are NaN, which no weight would hide."""
    x = inputs_for(TOPK, TOPK.shape(1, 64, 1200, 8, 1))
    lists = torch.tensor([[16, 3], [16, 7], [16, 11], [15, -1]], dtype=torch.int32)
    lists = lists.repeat_interleave(16, 0)[None, :, None].contiguous()
    want, _ = run_forward(artifact(TOPK), x.q, x.k, x.v, {"selected": lists})
    for tile in range(4):
        seen = torch.isin(torch.arange(1200) // 64, lists[0, 16 * tile, 0])
        v = torch.where(seen[:, None, None], x.v, torch.nan).to(x.v.dtype)
        out, _ = run_forward(artifact(TOPK), x.q, x.k, v, {"selected": lists})
        rows = slice(16 * tile, 16 * tile + 16)
        assert torch.equal(out[:, rows], want[:, rows])
        assert bool(out.isnan().any())


def test_strides(artifact: Callable[[Case], Path]) -> None:
    """q with heads outside rows, out with room between heads."""
    x = inputs_for(TOPK, TOPK.shape(2, 70, 150, 8, 2))
    q = x.q.transpose(1, 2).contiguous().transpose(1, 2)
    out = torch.full((2, 70, 8, 256), 7.0, dtype=x.q.dtype)
    check(TOPK, artifact(TOPK), replace(x, q=q), out=out[..., :128])
    assert bool((out[..., 128:] == 7).all())
