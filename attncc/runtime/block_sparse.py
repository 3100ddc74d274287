"""Block-sparse layouts (BSR) as batches: a row of blocks is a request, its columns are pages of block_cols keys.

A row of blocks sees its keys packed together, so this serves variants that don't ask where keys and rows stand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from attncc.runtime.serving_arguments import Table, check_counts, host, offsets


def table(
    indptr: Any, indices: Any, block_rows: int, block_cols: int, qo_len: int | None, kv_len: int | None
) -> Table:  # fmt: skip
    """The indices of the batch that a block-sparse layout is.  ValueError and TypeError naming the argument."""
    check_counts(block_rows=block_rows, block_cols=block_cols, qo_len=qo_len, kv_len=kv_len)
    rows = offsets("indptr", indptr)
    columns = host("indices", indices).astype(np.int64)
    if len(columns) < rows[-1]:
        raise ValueError(f"indices: expected at least {rows[-1]} block columns, indptr[-1], found {len(columns)}")
    of = np.arange(len(rows) - 1).repeat(np.diff(rows))
    columns = _ordered(of, columns[: rows[-1]])
    blocks = int(columns.max(initial=-1)) + 1
    last = np.full(len(rows) - 1, block_cols)
    if kv_len is not None:
        if (blocks - 1) * block_cols >= kv_len:
            raise ValueError(f"indices: expected blocks of {kv_len} keys (kv_len), found column {blocks - 1}")
        ends = columns[np.maximum(rows[1:] - 1, 0)] if len(columns) else np.zeros(len(last), np.int64)
        last = np.minimum(block_cols, kv_len - ends * block_cols)
    count = np.diff(rows)
    keys = np.where(count > 0, (count - 1) * block_cols + last, 0)
    return Table(_rows(len(count), block_rows, qo_len), rows[:-1], keys, columns, blocks)


def _ordered(of: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Columns of every row ascending, so that a block cut short by kv_len is the last; none may stand there twice."""
    if columns.min(initial=0) < 0 or columns.max(initial=0) >= 1 << 31:
        at = int(((columns < 0) | (columns >= 1 << 31)).argmax())
        raise ValueError(f"indices: expected block columns from 0 to 2³¹−1, found {columns[at]} at index {at}")
    key = np.sort((of << 31) + columns)
    twice = np.flatnonzero(key[1:] == key[:-1])
    if len(twice):
        row, column = divmod(int(key[twice[0]]), 1 << 31)
        raise ValueError(f"indices: expected every column once in a row of blocks, found {column} twice in row {row}")
    return key & ((1 << 31) - 1)


def _rows(count: int, block_rows: int, qo_len: int | None) -> np.ndarray:
    """qo_indptr: block_rows query rows each, fewer in the last row of blocks where qo_len says so."""
    total = count * block_rows if qo_len is None else qo_len
    if not (count - 1) * block_rows < total <= count * block_rows:
        raise ValueError(
            f"qo_len: expected {(count - 1) * block_rows + 1} to {count * block_rows} rows, those of {count} rows of "
            f"blocks, found {total}"
        )
    return np.minimum(np.arange(count + 1) * block_rows, total)


def refuse_positions(manifest: Mapping[str, Any]) -> None:
    """ValueError where the variant asks for what a kernel doesn't know of packed keys."""
    if manifest.get("positions") != []:
        name, reads = manifest["variant"]["name"], ", ".join(manifest.get("positions") or ["positions"])
        raise ValueError(
            f"plan_block_sparse: expected a variant that doesn't ask where rows and keys stand, found {name}, which "
            f"reads {reads}; nearest: a mask of the variant's own that says which keys exist"
        )


def in_blocks(kv: Sequence[Any], block_cols: int | None) -> list[Any]:
    """k and v as blocks, where they are rows.  ValueError where the rows don't fill their last block."""
    assert block_cols is not None
    found = []
    for name, t in zip("kv", kv, strict=True):
        if isinstance(t, torch.Tensor) and t.dim() == 3:
            if len(t) % block_cols:
                raise ValueError(
                    f"{name}: expected whole blocks of {block_cols} rows (pad the last one; kv_len tells which exist), "
                    f"found shape {list(t.shape)}"
                )
            t = t.unflatten(0, (len(t) // block_cols, block_cols))
        found.append(t)
    return found
