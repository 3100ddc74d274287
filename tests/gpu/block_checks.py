"""Random block-sparse layouts, and how their results are judged: by the reference of the variant with one more mask."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import serve_checks
import torch
from checks import Parts, parts_of
from oracle import as_kernels_round
from serve_cases import Served
from serve_checks import Batch, compile_served
from torch import Tensor

import attncc
from attncc.ir.nodes import BOOL, Leaf, Load, TensorParam, make
from attncc.ir.reference import Reference
from attncc.random_inputs import FLOATS

Columns = list[list[int]]  # the block columns that each row of blocks sees


def some_blocks(rows: int, cols: int, rng: np.random.Generator, share: float = 0.4) -> Columns:
    """Columns in any order; of several rows of blocks the first sees none and the second all."""
    chosen = rng.random((rows, cols)) < share
    if rows > 1:
        chosen[0], chosen[1] = False, True
    return [rng.permutation(np.flatnonzero(x)).tolist() for x in chosen]


def lists(sees: Columns) -> tuple[list[int], list[int]]:
    """(indptr, indices)."""
    return np.append(0, np.cumsum([len(x) for x in sees])).tolist(), [c for x in sees for c in x]


def cells(sees: Columns, block_rows: int, block_cols: int, qo_len: int, kv_len: int) -> Tensor:
    """bool [qo_len, kv_len]: is the key in a block that the row sees?"""
    found = torch.zeros(len(sees) * block_rows, kv_len, dtype=torch.bool)
    for m, columns in enumerate(sees):
        for c in columns:
            found[m * block_rows : (m + 1) * block_rows, c * block_cols : (c + 1) * block_cols] = True
    return found[:qo_len]


def make_batch(served: Served, lengths: tuple[int, int], heads: tuple[int, int], seed: int) -> Batch:
    """One request for a kernel of listed blocks: keys are rows."""
    assert served.blocks
    ragged = serve_checks.make_batch(replace(served, page_size=None, blocks=False), [lengths], heads, seed)
    return replace(ragged, served=served)


def attention(batch: Batch, **options: Any) -> Any:
    """An object with pages of its own, large enough for any blocks of the batch; its kernel for blocks is another."""
    own = compile_served(Served(batch.served.case))
    most = {"max_batch_size": 1 + len(batch.q), "max_qo_rows": len(batch.q), "page_size": 16}
    return attncc.BatchAttention(own, num_qo_heads=batch.heads[0], num_kv_heads=batch.heads[1], **{**most, **options})


def blocks_for(batch: Batch, block_rows: int, seed: int) -> Columns:
    (qo_len, kv_len), size = batch.lengths[0], batch.served.page_size or 1
    return some_blocks(-(-qo_len // block_rows), -(-kv_len // size), np.random.default_rng(seed))


def sizes(batch: Batch, block_rows: int) -> dict[str, int]:
    (qo_len, kv_len), size = batch.lengths[0], batch.served.page_size or 1
    return {"block_rows": block_rows, "block_cols": size, "qo_len": qo_len, "kv_len": kv_len}


def reference(batch: Batch, there: Tensor) -> tuple[Tensor, Tensor | None]:
    return reference_all(batch, there)[:2]


def reference_all(batch: Batch, there: Tensor) -> Parts:
    """`there` [qo_len, kv_len], or with kv heads before: is the key in a block that the row sees?"""
    case = batch.served.case
    variant = case.load()
    seen = Load("there", (Leaf("g"), Leaf("iq"), Leaf("j")), BOOL)
    masked = replace(
        variant, tensors=(*variant.tensors, TensorParam("there", ("g", "rows", "pos"), "bool")),
        mask=make("and", seen, variant.mask),
    )  # fmt: skip
    plain = Reference(
        masked, head_dim=case.head_dim, head_dim_vo=case.head_dim_vo, dtype=FLOATS[case.dtype], const=dict(case.const)
    )  # fmt: skip
    oracle = as_kernels_round(case, plain)
    there = there.to(batch.q.device).expand(batch.heads[1], *there.shape[-2:])
    options: dict[str, Any] = {"return_lse": batch.softmax, "there": there, **batch.params}
    want = oracle.ragged(batch.q, *batch.kv, *batch.table, **options)
    return parts_of(variant, want)
