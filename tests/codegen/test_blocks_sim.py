"""Block-sparse layouts against formulas written out, run by the PTX interpreter: blocks by TMA and key by key."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from gpu.cases import EXAMPLES, SCALARS
from ptx.serve import ServeDriver
from torch import Tensor

import attncc
from attncc.runtime.batch import BatchAttention
from attncc.runtime.kernel import Kernel

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("kernel_cache")]

Columns = list[list[int]]


@dataclass(frozen=True)
class Shape:
    """Heads, rows and columns of blocks, and where the request ends."""

    heads: tuple[int, int]
    rows: int
    cols: int
    qo_len: int
    kv_len: int


# ------------------------------------------------------------------------------------- running
class Simulated:
    """A BatchAttention of one kernel for blocks of so many keys, run by the interpreter."""

    def __init__(self, source: str, variant: str, cols: int, heads: tuple[int, int], sm_count: int, seed: int):
        made = attncc.compile(
            EXAMPLES / f"{source}.attn", variant=variant, head_dim=64, layout="blocks", page_size=cols
        )  # fmt: skip
        artifact = made.serving("blocks", cols)

        def stand_in(layout: str, page_size: int | None) -> Any:  # for the kernel of plans that are not made here
            return replace(artifact, manifest={**artifact.manifest, "layout": layout, "page_size": page_size})

        self.driver = ServeDriver((artifact.path / "serve.ptx").read_text(), sm_count, seed, seed % 2 == 0)
        self.attn = BatchAttention(
            Kernel(artifact, build=stand_in), device="cpu", driver=self.driver, num_qo_heads=heads[0],
            num_kv_heads=heads[1], max_batch_size=64, max_qo_rows=512,
        )  # fmt: skip

    def run(self, q: Tensor, kv: tuple[Tensor, Tensor], **params: Any) -> tuple[Tensor, Tensor]:
        self.driver.rows, self.driver.kv = len(q), kv
        self.driver.tensors = {n: t for n, t in params.items() if isinstance(t, Tensor)}
        return self.attn.run(q, kv, return_lse=True, **params)


def draw(shape: Shape, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    gen = torch.Generator().manual_seed(seed)
    sizes = ((shape.qo_len, shape.heads[0]), (shape.kv_len, shape.heads[1]), (shape.kv_len, shape.heads[1]))
    q, k, v = (torch.randn(*n, 64, generator=gen).bfloat16() for n in sizes)
    return q, k, v


def lists(sees: Columns) -> tuple[list[int], list[int]]:
    return [0, *accumulate(map(len, sees))], [c for x in sees for c in x]


def cells(sees: Columns, shape: Shape) -> Tensor:
    """bool [qo_len, kv_len]: is the key in a block that the row sees?"""
    found = torch.zeros(shape.qo_len, shape.kv_len, dtype=torch.bool)
    for m, columns in enumerate(sees):
        for c in columns:
            found[m * shape.rows : (m + 1) * shape.rows, c * shape.cols : (c + 1) * shape.cols] = True
    return found


# ------------------------------------------------------------------------------------- what must come out
def logits_of(variant: str, s: Tensor, i: Tensor, j: Tensor, h: int, params: dict[str, Any]) -> tuple[Tensor, Any]:
    """(logits, which the variant shows) of scores s [rows, keys], after the variant's formula."""
    causal = j <= i
    if variant == "alibi":
        return s + params["slope"][h].double() * (j - i), causal
    if variant == "gemma2_local":
        s = s / 2  # scaled by 1 / 16 and not 1 / 8
        return 50.0 * torch.tanh(s / 50.0), causal & (i - j < params["window"])
    if variant == "key_scales":
        return s * params["k_scale"][:, h // params["group"]].double(), causal
    return s, causal if variant == "causal" else torch.ones_like(causal)


def expected(variant: str, q: Tensor, k: Tensor, v: Tensor, there: list[Tensor], params: dict[str, Any]) -> Any:
    """(out, lse) in float64.  `there`: cells of each kv head."""
    (qo_len, heads, _), (kv_len, kv_heads, _) = q.shape, k.shape
    i, j = torch.arange(qo_len)[:, None] + (kv_len - qo_len), torch.arange(kv_len)
    outs, lses = [], []
    for h in range(heads):
        g = h // (heads // kv_heads)
        s = q[:, h].double() @ k[:, g].double().T / 8
        logits, shown = logits_of(variant, s, i, j, h, {**params, "group": heads // kv_heads})
        seen = there[g] & shown
        logits = logits.masked_fill(~seen, -torch.inf)
        outs.append(logits.softmax(-1).masked_fill(~seen, 0.0) @ v[:, g].double())
        lses.append(logits.logsumexp(-1))
    return torch.stack(outs, 1), torch.stack(lses, 1)


def compare(found: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    assert bool(found[0].isfinite().all())
    assert torch.allclose(found[0].double(), want[0], atol=2e-2, rtol=1e-2)
    assert torch.equal(found[1].isneginf(), want[1].isneginf())
    seen = want[1].isfinite()
    assert torch.allclose(found[1].double()[seen], want[1][seen], atol=1e-3, rtol=1e-5)


def some_blocks(shape: Shape, seed: int) -> Columns:
    """About half of the columns in any order; the first row of blocks sees none, the second one all."""
    gen = torch.Generator().manual_seed(seed)
    rows, cols = -(-shape.qo_len // shape.rows), -(-shape.kv_len // shape.cols)
    found = [[c for c in torch.randperm(cols, generator=gen).tolist() if c % 2 or c % 7 == m % 7] for m in range(rows)]
    return [[] if m == 0 < rows - 1 else list(range(cols)) if m == 1 else x for m, x in enumerate(found)]


def tensors(variant: str, shape: Shape) -> dict[str, Any]:
    gen = torch.Generator().manual_seed(7)
    made: dict[str, Any] = {
        "alibi": {"slope": 0.02 * torch.rand(shape.heads[0], generator=gen)},
        "gemma2_local": {"window": SCALARS["window"]},
        "key_scales": {"k_scale": 0.5 + torch.rand(shape.kv_len, shape.heads[1], generator=gen)},
    }
    return made.get(variant, {})


# every variant once, block sizes by TMA (multiples of 8) and by the key, and groups of 1, 2 and 4
CASES = [
    ("plain", "plain", Shape((4, 2), 5, 16, 15, 125)),
    ("plain", "plain", Shape((4, 1), 1, 1, 4, 42)),
    ("causal", "causal", Shape((4, 1), 64, 128, 150, 500)),
    ("causal", "causal", Shape((4, 1), 3, 1, 20, 150)),
    ("alibi", "alibi", Shape((2, 2), 64, 8, 70, 300)),
    ("gemma2", "gemma2_local", Shape((4, 2), 3, 16, 40, 333)),
    ("kv_scales", "key_scales", Shape((4, 2), 3, 5, 30, 203)),
]  # fmt: skip


@pytest.mark.parametrize("source, variant, shape", CASES, ids=str)
def test_variants(source: str, variant: str, shape: Shape) -> None:
    """Rows past kv_len in k and v, if there are any, are NaN."""
    q, k, v = draw(shape, 0)
    sees, params = some_blocks(shape, 1), tensors(variant, shape)
    sim = Simulated(source, variant, shape.cols, shape.heads, 3, 0)
    sim.attn.plan_block_sparse(
        *lists(sees), block_rows=shape.rows, block_cols=shape.cols, qo_len=shape.qo_len, kv_len=shape.kv_len
    )
    want = expected(variant, q, k, v, [cells(sees, shape)] * shape.heads[1], params)
    compare(sim.run(q, (k, v), **params), want)
    if variant == "causal":
        padded = [torch.cat([t, torch.full_like(t[:9], torch.nan)]) for t in (k, v)]
        compare(sim.run(q, (padded[0], padded[1]), **params), want)
