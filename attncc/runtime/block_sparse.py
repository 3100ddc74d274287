"""Block-sparse attention as batches: one request, of which every row of blocks sees keys of its own.

A row of blocks is planned like a request and its list of block columns like a page table; what a kernel is then told of
rows and keys is where they stand in the whole matrix.  Where kv heads see other blocks each has lists of its own, and
is planned as if its rows followed those of the head before.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from attncc.runtime import plan as planning
from attncc.runtime.arguments import I32_MAX
from attncc.runtime.serving_arguments import check_counts, described, host, offsets

SWIZZLE_ROWS = 8  # blocks of other sizes are gathered key by key, so a list may just as well name keys


@dataclass(frozen=True)
class Matrix:
    """A checked layout; int64 on the host.

    Of `heads` kv heads (1: what all of them see) each has `rows` rows of blocks; of these, the heads' one after
    another: `row_offsets` [heads · rows + 1], which count on from head to head, `start`, the first of its block columns
    in `columns`, and `keys`, how many keys these have.  Columns are ascending in every row.  `exact`: kv_len is not
    known but for what the columns say.
    """

    heads: int
    block_cols: int
    qo_len: int
    kv_len: int
    row_offsets: np.ndarray
    start: np.ndarray
    keys: np.ndarray
    columns: np.ndarray
    exact: bool = False

    @property
    def rows(self) -> int:
        return len(self.keys) // self.heads

    @property
    def needs(self) -> dict[str, int]:
        """What a plan needs of the tensors of its runs, as serving_arguments.needs."""
        return {"rows": self.qo_len, "requests": 1, "pages": 0, "kv_rows": self.kv_len, "positions": self.kv_len}


# ------------------------------------------------------------------------------------- blocks of one size


def uniform(
    num_kv_heads: int, indptr: Any, indices: Any, block_rows: int, block_cols: int, qo_len: int | None,
    kv_len: int | None,
) -> Matrix:  # fmt: skip
    """The matrix of plan_block_sparse's arguments.  ValueError and TypeError naming the argument."""
    check_counts(block_rows=block_rows, block_cols=block_cols, qo_len=qo_len, kv_len=kv_len)
    block_rows, block_cols = int(block_rows), int(block_cols)  # small ones of numpy would wrap
    lists = _lists(num_kv_heads, indptr, indices)
    counts, columns = [], []
    for where, ends, found in lists:
        rows, ids = offsets(f"indptr{where}", ends), host(f"indices{where}", found).astype(np.int64)
        if len(ids) < rows[-1]:
            raise ValueError(
                f"indices{where}: expected at least {rows[-1]} block columns, indptr{where}[-1], found {len(ids)}"
            )
        if counts and len(rows) != len(counts[0]) + 1:
            raise ValueError(f"indptr{where}: expected {len(counts[0]) + 1} offsets as in indptr[0], found {len(rows)}")
        counts.append(np.diff(rows))
        columns.append(_ordered(where, np.arange(len(rows) - 1).repeat(counts[-1]), ids[: rows[-1]]))
    each, ids = len(counts[0]), np.concatenate(columns)
    blocks = int(ids.max(initial=-1)) + 1
    known = blocks * block_cols if kv_len is None else int(kv_len)
    if (blocks - 1) * block_cols >= known:
        raise ValueError(f"indices: expected blocks of {kv_len} keys (kv_len), found column {blocks - 1}")
    if known > I32_MAX:
        raise ValueError(
            f"indices: expected blocks of {block_cols} keys that end below 2³¹, or a kv_len, found column {blocks - 1}"
        )
    count = np.concatenate(counts)
    start = count.cumsum() - count
    # a block cut short by kv_len is the last of its row
    last = ids[np.maximum(start + count - 1, 0)] if len(ids) else np.zeros(len(count), np.int64)
    keys = count * block_cols - np.where(count > 0, np.maximum((last + 1) * block_cols - known, 0), 0)
    row_offsets = _row_offsets(each, block_rows, qo_len)
    in_line = _in_line([row_offsets] * len(lists))
    return Matrix(
        len(lists), block_cols, int(row_offsets[-1]), known, in_line, start, keys, ids, exact=kv_len is None
    )  # fmt: skip


def _lists(num_kv_heads: int, indptr: Any, indices: Any) -> list[tuple[str, Any, Any]]:
    """(where in the arguments, indptr, indices) of all kv heads alike, or of each."""
    if isinstance(indptr, (torch.Tensor, np.ndarray)):
        by_head = indptr.ndim == 2
        indptr = _on_host("indptr", indptr) if isinstance(indptr, torch.Tensor) and by_head else indptr
    else:
        by_head = isinstance(indptr, (list, tuple)) and len(indptr) > 0 and hasattr(indptr[0], "__len__")
    if not by_head:
        return [("", indptr, indices)]
    if len(indptr) != num_kv_heads:
        raise ValueError(f"indptr: expected offsets of {num_kv_heads} kv heads, or of all alike, found {len(indptr)}")
    lists = isinstance(indices, (list, tuple, torch.Tensor, np.ndarray)) and getattr(indices, "ndim", 1)
    if not lists or len(indices) != num_kv_heads:
        raise ValueError(f"indices: expected {num_kv_heads} lists, one a kv head as in indptr, found {_said(indices)}")
    return [(f"[{g}]", indptr[g], indices[g]) for g in range(num_kv_heads)]


def _ordered(where: str, of: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Columns of every row ascending, so that a block cut short by kv_len is the last; none may stand there twice."""
    if columns.min(initial=0) < 0 or columns.max(initial=0) > I32_MAX:
        at = int(((columns < 0) | (columns > I32_MAX)).argmax())
        raise ValueError(f"indices{where}: expected block columns from 0 to 2³¹−1, found {columns[at]} at index {at}")
    key = np.sort((of << 31) + columns)
    twice = np.flatnonzero(key[1:] == key[:-1])
    if len(twice):
        row, column = divmod(int(key[twice[0]]), 1 << 31)
        raise ValueError(
            f"indices{where}: expected every column once in a row of blocks, found {column} twice in row {row}"
        )
    return key & ((1 << 31) - 1)


def _row_offsets(count: int, block_rows: int, qo_len: int | None) -> np.ndarray:
    """block_rows query rows each, fewer in the last row of blocks where qo_len says so."""
    total = count * block_rows if qo_len is None else int(qo_len)
    if not (count - 1) * block_rows < total <= count * block_rows:
        raise ValueError(
            f"qo_len: expected {(count - 1) * block_rows + 1} to {count * block_rows} rows, those of {count} rows of "
            f"blocks, found {total}"
        )
    return np.minimum(np.arange(count + 1) * block_rows, total)


def _in_line(offsets_by_head: Sequence[np.ndarray]) -> np.ndarray:
    """The row offsets of all heads, each counting on from the one before."""
    total = int(offsets_by_head[0][-1])
    return np.concatenate([[0], *(x[1:] + g * total for g, x in enumerate(offsets_by_head))])


# ------------------------------------------------------------------------------------- blocks of any sizes


def variable(num_kv_heads: int, mask: Any, block_row_sizes: Any, block_col_sizes: Any) -> Matrix:
    """The matrix of plan_variable_blocks's arguments.  ValueError and TypeError naming the argument."""
    row_sizes = _sizes("block_row_sizes", block_row_sizes, num_kv_heads)
    col_sizes = _sizes("block_col_sizes", block_col_sizes, num_kv_heads)
    seen = _values("mask", mask, (2, 3), "bool")
    sizes = [row_sizes.shape[1], col_sizes.shape[1]]
    if list(seen.shape[-2:]) != sizes or (seen.ndim == 3 and len(seen) != num_kv_heads):
        raise ValueError(
            f"mask: expected shape {sizes}, rows and columns of blocks, or {[num_kv_heads, *sizes]}, one for each kv "
            f"head, found {list(seen.shape)}"
        )
    seen = seen if seen.ndim == 3 else seen[None]
    heads = max(len(seen), len(row_sizes), len(col_sizes))
    seen, row_sizes, col_sizes = (
        np.broadcast_to(x, (heads, *x.shape[1:])) for x in (seen, row_sizes, col_sizes)
    )  # fmt: skip
    unit = int(np.gcd.reduce(col_sizes, axis=None)) if col_sizes.size else 1
    unit = unit if unit and unit % SWIZZLE_ROWS == 0 else 1
    width = col_sizes // unit
    head, row, column = seen.nonzero()  # in the order of heads, rows, columns
    length = width[head, column]
    first = (width.cumsum(1) - width)[head, column]
    ids = np.arange(int(length.sum())) + (first - (length.cumsum() - length)).repeat(length)
    count = np.bincount(head * sizes[0] + row, length, heads * sizes[0]).astype(np.int64)
    row_offsets = [np.append(0, x.cumsum()) for x in row_sizes]
    return Matrix(
        heads, unit, int(row_offsets[0][-1]), int(col_sizes[0].sum()), _in_line(row_offsets), count.cumsum() - count,
        count * unit, ids,
    )  # fmt: skip


def _sizes(name: str, given: Any, num_kv_heads: int) -> np.ndarray:
    """[1 or num_kv_heads, blocks] int64: sizes from 0 which sum to the same in every head."""
    found = _values(name, given, (1, 2), "int32", "int64").astype(np.int64)
    found = found if found.ndim == 2 else found[None]
    if len(found) not in (1, num_kv_heads):
        raise ValueError(f"{name}: expected sizes of {num_kv_heads} kv heads, or of all alike, found {len(found)}")
    if found.min(initial=0) < 0:
        raise ValueError(f"{name}: expected sizes from 0, found {found.min()}")
    # sizes that a user got wrong may have a sum that an int64 doesn't hold
    total = found.sum(1, dtype=object if found.max(initial=0) > I32_MAX else np.int64)
    if (total != total[0]).any():
        raise ValueError(f"{name}: expected the same sum in every kv head, found {total.tolist()}")
    if total[0] > I32_MAX:
        raise ValueError(f"{name}: expected a sum below 2³¹, found {total[0]}")
    return found


def _values(name: str, given: Any, ranks: tuple[int, int], *dtypes: str) -> np.ndarray:
    """A tensor, an array or lists as an array on the host."""
    if isinstance(given, torch.Tensor):
        dtype = str(given.dtype).removeprefix("torch.")
        if dtype not in dtypes and given.numel():  # before numpy, which has fewer
            raise TypeError(f"{name}: expected {' or '.join(dtypes)}, found {dtype}")
        given = _on_host(name, given)
    try:
        found = np.asarray(given)
    except ValueError:
        raise ValueError(f"{name}: expected lists of one length, found others") from None
    if str(found.dtype) not in dtypes and found.size:
        raise TypeError(f"{name}: expected {' or '.join(dtypes)}, found {found.dtype}")
    if found.ndim not in ranks:
        raise ValueError(f"{name}: expected {ranks[0]} dimensions, or {ranks[1]}, found shape {list(found.shape)}")
    return found


def _on_host(name: str, given: torch.Tensor) -> np.ndarray:
    """A tensor as an array."""
    if given.layout != torch.strided:
        raise TypeError(f"{name}: expected a strided tensor, found layout {given.layout}")
    if given.is_meta:
        raise ValueError(f"{name}: expected a tensor with values, found one on meta")
    return given.detach().cpu().numpy()


def _said(x: Any) -> str:
    return f"shape {list(x.shape)}" if isinstance(x, np.ndarray) else described(x)


# ------------------------------------------------------------------------------------- plan and run


def plan(shape: planning.Shape, matrix: Matrix) -> planning.Plan:
    """The plan of a matrix for the `shape` of its kernel.  ValueError beyond the declared maxima."""
    _check_maxima(shape, matrix)
    batch = planning.Batch(matrix.row_offsets, matrix.start, matrix.keys)
    made, heads = _planned(shape, batch, matrix.heads), None
    group, rows = shape.group_size, matrix.rows
    if matrix.heads > 1:
        heads = [x[:, planning.REQUEST] // rows for x in (made.items, made.targets)]
        shift = [(x * (matrix.qo_len * group)).astype(np.int32) for x in heads]
        made.items[:, planning.HEAD] = heads[0]
        made.items[:, planning.ROW0] -= shift[0]
        made.items[:, planning.DELTA] += shift[0]
        made.targets[:, planning.T_ROW0] -= shift[1]
        if len(made.sources):  # those of a target follow one another, and targets ascend
            of = made.targets[:, planning.T_SOURCE0].searchsorted(np.arange(len(made.sources)), "right") - 1
            made.sources[:] += shift[1][of]
    whole = (0, matrix.qo_len, matrix.kv_len)
    for records, first in ((made.items, planning.Q_START), (made.targets, planning.T_Q_START)):
        records[:, planning.REQUEST] = 0
        records[:, first : first + 3] = whole
    return made


def _planned(shape: planning.Shape, batch: planning.Batch, heads: int) -> planning.Plan:
    """The plan of rows of blocks as requests.  Where every kv head has its own, each is a request for one head."""
    if heads == 1:
        return planning.plan(shape, batch)
    room = planning.capacity(shape)
    alone = replace(
        shape, num_qo_heads=shape.group_size, num_kv_heads=1, max_batch_size=heads * shape.max_batch_size,
        max_qo_rows=heads * shape.max_qo_rows,
    )  # fmt: skip
    if shape.batch_invariant:  # nothing may be cut less
        made = planning.plan(replace(alone, partial_rows=I32_MAX), batch)
        _check_room(shape, made)
        return made
    while True:
        made = planning.plan(alone, batch)
        if _fits(made, room):
            return made
        alone = replace(alone, partial_rows=alone.partial_rows // 2)  # fewer cuts: these take what there is no room for


def _fits(made: planning.Plan, room: Mapping[str, int]) -> bool:
    return all(getattr(made, name).size <= room[name] for name in ("items", "targets", "sources"))


def _check_room(shape: planning.Shape, made: planning.Plan) -> None:
    """ValueError where a plan for heads one by one has no room, with the maxima that give it room."""
    partial_rows, batch = max(made.partial_rows, shape.partial_rows), shape.max_batch_size

    def holds(max_batch_size: int) -> bool:
        return _fits(made, planning.capacity(replace(shape, max_batch_size=max_batch_size, partial_rows=partial_rows)))

    # a request more is room for a target more at least
    needed = range(batch, batch + len(made.targets) + 1)
    needed = needed[bisect_left(needed, True, key=holds)]
    wanted = [("partial_rows", partial_rows, shape.partial_rows), ("max_batch_size", needed, batch)]
    short = [x for x in wanted if x[1] > x[2]]
    if short:
        names, least, found = zip(*short, strict=True)
        raise ValueError(
            f"{', '.join(names)}: expected at least {', '.join(map(str, least))}, since kv heads with blocks of their "
            f"own are cut one by one, found {', '.join(map(str, found))}"
        )


def _check_maxima(shape: planning.Shape, matrix: Matrix) -> None:
    if matrix.rows > shape.max_batch_size:
        raise ValueError(
            f"max_batch_size: expected at least {matrix.rows}, the rows of blocks, found {shape.max_batch_size}"
        )
    if matrix.qo_len > shape.max_qo_rows:
        raise ValueError(f"max_qo_rows: expected at least {matrix.qo_len} (qo_len), found {shape.max_qo_rows}")
    packed = matrix.heads * matrix.qo_len * shape.group_size
    if packed > I32_MAX:
        raise ValueError(f"qo_len: expected fewer than 2³¹ rows times query heads, found {packed}")


def reads_kv_len(manifest: Mapping[str, Any]) -> bool:
    """Does it matter to the variant how many keys there are, listed or not?"""
    return not {"i", "kv_len"}.isdisjoint(manifest.get("positions", ("i",)))


def as_rows(kv: Sequence[Any], block_cols: int | None, keys: int | None) -> list[Any]:
    """k and v as rows, where they are blocks.  `keys`: how many rows they must have, if that matters."""
    found = []
    for name, t in zip("kv", kv, strict=True):
        if isinstance(t, torch.Tensor) and t.dim() == 4:
            if t.shape[1] != block_cols:
                raise ValueError(f"{name}: expected blocks of {block_cols} keys, found shape {list(t.shape)}")
            try:
                t = t.view(-1, *t.shape[2:])
            except RuntimeError:
                raise ValueError(
                    f"{name}: expected blocks that follow one another like their rows, found strides "
                    f"{list(t.stride())}; nearest: [nnz_kv, num_kv_heads, head_dim]"
                ) from None
        if keys is not None and isinstance(t, torch.Tensor) and t.dim() == 3 and len(t) != keys:
            raise ValueError(
                f"{name}: expected {keys} keys, those up to the last listed block, since the variant counts positions "
                f"from the last key, found {len(t)}; plan_block_sparse(…, kv_len=…) says how many there are"
            )
        found.append(t)
    return found
