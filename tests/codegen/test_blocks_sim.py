"""Block-sparse layouts against formulas written out, run by the PTX interpreter: blocks by TMA and row by row."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from gpu.cases import EXAMPLES
from ptx.serve import Simulated

import attncc

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("kernel_cache")]

Columns = list[list[int]]


@pytest.mark.parametrize("rows, cols, sees, kv_len", [
    (5, 16, [[7, 3, 0], [1], [2, 6, 4, 7]], 125), (2, 3, [[0, 30, 9, 41], [], [7]], None), (1, 1, [[4, 2], [1]], None),
])  # fmt: skip
def test_block_sparse_layouts(rows: int, cols: int, sees: Columns, kv_len: int | None) -> None:
    """plain attention over the keys of each row's blocks; a row of blocks without any gives 0 and -inf."""
    blocks = max(max(x, default=0) for x in sees) + 1
    kernel = attncc.compile(EXAMPLES / "plain.attn", head_dim=64, layout="paged", page_size=cols)
    simulated = Simulated(kernel, page_size=cols, num_qo_heads=4, num_kv_heads=2, max_batch_size=4, max_qo_rows=64)
    torch.manual_seed(0)
    q = torch.randn(len(sees) * rows, 4, 64).bfloat16()
    k, v = (torch.randn(blocks * cols, 2, 64).bfloat16() for _ in "kv")
    simulated.attn.plan_block_sparse(
        [0, *accumulate(map(len, sees))], [c for x in sees for c in x], block_rows=rows, block_cols=cols, kv_len=kv_len
    )
    out, lse = simulated.run(q, (k.unflatten(0, (blocks, cols)), v.unflatten(0, (blocks, cols))), return_lse=True)
    for i in range(len(q)):
        keys = [j for c in sees[i // rows] for j in range(c * cols, (c + 1) * cols) if kv_len is None or j < kv_len]
        there = torch.tensor(keys, dtype=torch.long)
        for h in range(4):
            score = k[there, h // 2].double() @ q[i, h].double() / 8
            want = torch.softmax(score, 0) @ v[there, h // 2].double()
            assert torch.allclose(out[i, h].double(), want, atol=2e-2)
            assert torch.allclose(lse[i, h].double(), torch.logsumexp(score, 0), atol=1e-3)
