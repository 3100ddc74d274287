"""How q, k and v lie in memory: dense, ragged and paged, each as a sequence of requests of one shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Request:
    """One request: q [qo_len, num_qo_heads, head_dim_qk], k and v [kv_len, num_kv_heads, head_dim].

    `rows` and `keys` turn the request's own row or key numbers into an index of the dimensions that `iq` or `j` stand
    for in a tensor argument; `out` selects the request's rows in an output.
    """

    b: int
    q: Tensor
    k: Tensor
    v: Tensor
    rows: Callable[[Tensor], tuple[Tensor, ...]]
    keys: Callable[[Tensor], tuple[Tensor, ...]]
    out: int | slice

    @property
    def qo_len(self) -> int:
        return self.q.shape[0]

    @property
    def kv_len(self) -> int:
        return self.k.shape[0]

    def locate(self, space: str | int, x: Tensor) -> tuple[Tensor, ...]:
        """The indices into an argument's dimensions for index `x` over `space`."""
        return self.rows(x) if space == "iq" else self.keys(x) if space == "j" else (x,)

    def axes(self, space: str | int) -> int:
        """How many dimensions of an argument `space` stands for."""
        return len(self.locate(space, torch.zeros(0, dtype=torch.int64)))


@dataclass(frozen=True)
class Layout:
    """`row_shape` and `key_shape` are what `iq` and `j` stand for in a tensor argument; `requests` yields each request
    when it is needed, so that no more than one gathered KV is alive."""

    batch: int
    row_shape: tuple[int, ...]
    key_shape: tuple[int, ...]
    max_kv_len: int
    num_qo_heads: int
    num_kv_heads: int
    device: torch.device
    requests: Callable[[], Iterator[Request]]


def _check_qkv(q: Tensor, k: Tensor, v: Tensor, shapes: tuple[str, str, str], sizes: dict[str, int]) -> None:
    """Ranks, float dtypes, one device, head counts and head dims; `shapes` show what each must be."""
    for name, x, shape in zip("qkv", (q, k, v), shapes, strict=True):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: expected a torch tensor {shape}, found {type(x).__name__}")
        if not x.dtype.is_floating_point:
            raise TypeError(f"{name}: expected a float dtype, found {str(x.dtype).removeprefix('torch.')}")
        if x.ndim != shape.count(",") + 1:
            raise ValueError(f"{name}: expected shape {shape}, found {list(x.shape)}")
        if x.device != q.device:
            raise ValueError(f"{name}: expected a tensor on {q.device}, as q, found one on {x.device}")
        head_dim = sizes["head_dim_vo" if name == "v" else "head_dim_qk"]
        if x.shape[-1] != head_dim:
            raise ValueError(f"{name}: expected a last dimension of {head_dim}, found shape {list(x.shape)}")
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"v: expected shape {[*k.shape[:-1], sizes['head_dim_vo']]}, as k, found {list(v.shape)}")
    heads, kv_heads = q.shape[-2], k.shape[-2]
    if not heads or not kv_heads or heads % kv_heads:
        raise ValueError(f"q: expected a multiple of k's {kv_heads} heads, found {heads} heads")


def dense(q: Tensor, k: Tensor, v: Tensor, sizes: dict[str, int]) -> Layout:
    """q [B, qo_len, num_qo_heads, head_dim_qk], k and v [B, kv_len, num_kv_heads, head_dim].

    Raises ValueError and TypeError naming the argument, what was expected and what was found (as all layouts do).
    """
    row, key = "[B, qo_len, num_qo_heads, head_dim_qk]", "[B, kv_len, num_kv_heads, head_dim]"
    _check_qkv(q, k, v, (row, key, key), sizes)
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"k: expected a batch of {q.shape[0]}, as q, found shape {list(k.shape)}")

    def requests() -> Iterator[Request]:
        for b in range(q.shape[0]):
            here = _at_request(b)
            yield Request(b, q[b], k[b], v[b], here, here, b)

    return Layout(
        q.shape[0], tuple(q.shape[:2]), tuple(k.shape[:2]), k.shape[1], q.shape[2], k.shape[2], q.device, requests
    )


def ragged(
    q: Tensor, k: Tensor, v: Tensor, qo_indptr: Tensor, kv_indptr: Tensor, sizes: dict[str, int]
) -> Layout:  # fmt: skip
    """q [nnz_qo, num_qo_heads, head_dim_qk], k and v [nnz_kv, num_kv_heads, head_dim], indptr [B + 1]."""
    row, key = "[nnz_qo, num_qo_heads, head_dim_qk]", "[nnz_kv, num_kv_heads, head_dim]"
    _check_qkv(q, k, v, (row, key, key), sizes)
    rows = _offsets("qo_indptr", qo_indptr, q.shape[0])
    keys = _offsets("kv_indptr", kv_indptr, k.shape[0])
    if len(rows) != len(keys):
        raise ValueError(f"kv_indptr: expected {len(rows)} offsets, as qo_indptr, found {len(keys)}")

    def requests() -> Iterator[Request]:
        for b in range(len(rows) - 1):
            row, key = slice(rows[b], rows[b + 1]), slice(keys[b], keys[b + 1])
            yield Request(b, q[row], k[key], v[key], _offset_by(rows[b]), _offset_by(keys[b]), row)

    longest = max((b - a for a, b in pairwise(keys)), default=0)
    return Layout(
        len(rows) - 1, (q.shape[0],), (k.shape[0],), longest, q.shape[1], k.shape[1], q.device, requests
    )  # fmt: skip


def paged(
    q: Tensor, kv_cache: tuple[Tensor, Tensor], table: tuple[Tensor, Tensor, Tensor, Tensor], sizes: dict[str, int]
) -> Layout:
    """q [nnz_qo, num_qo_heads, head_dim_qk], caches [num_pages, page_size, num_kv_heads, head_dim].

    `table` is (qo_indptr [B + 1], kv_indptr [B + 1] in pages, kv_indices, last_page_len [B]); rows of a page at or past
    its request's kv_len are never read.
    """
    if not isinstance(kv_cache, (tuple, list)) or len(kv_cache) != 2:
        raise TypeError(f"kv: expected (k_cache, v_cache), found {type(kv_cache).__name__}")
    (k, v), (qo_indptr, kv_indptr, kv_indices, last_page_len) = kv_cache, table
    row, key = "[nnz_qo, num_qo_heads, head_dim_qk]", "[num_pages, page_size, num_kv_heads, head_dim]"
    _check_qkv(q, k, v, (row, key, key), sizes)
    num_pages, page_size = k.shape[:2]
    rows = _offsets("qo_indptr", qo_indptr, q.shape[0])
    pages = _offsets("kv_indptr", kv_indptr, None)
    if len(rows) != len(pages):
        raise ValueError(f"kv_indptr: expected {len(rows)} offsets, as qo_indptr, found {len(pages)}")
    ids = _integers("kv_indices", kv_indices)
    if len(ids) < pages[-1]:
        raise ValueError(f"kv_indices: expected at least {pages[-1]} page ids (kv_indptr[-1]), found {len(ids)}")
    for n, page in enumerate(ids[: pages[-1]]):
        if not 0 <= page < num_pages:
            raise ValueError(f"kv_indices: expected page ids in 0…{num_pages - 1}, found {page} at {n}")
    last = _integers("last_page_len", last_page_len)
    if len(last) != len(rows) - 1:
        raise ValueError(f"last_page_len: expected {len(rows) - 1} lengths, one a request, found {len(last)}")
    lengths: list[int] = []
    for b, n in enumerate(last):
        count = pages[b + 1] - pages[b]
        if count and not 1 <= n <= page_size:
            raise ValueError(f"last_page_len: expected 1…{page_size} (page_size), found {n} for request {b}")
        lengths.append((count - 1) * page_size + n if count else 0)

    def requests() -> Iterator[Request]:
        for b, kv_len in enumerate(lengths):
            page = torch.tensor(ids[pages[b] : pages[b + 1]], dtype=torch.int64, device=q.device)
            row = slice(rows[b], rows[b + 1])
            keys = _through(page, page_size)
            at = keys(torch.arange(kv_len, device=q.device))
            yield Request(b, q[row], k[at], v[at], _offset_by(rows[b]), keys, row)

    return Layout(
        len(last), (q.shape[0],), (num_pages, page_size), max(lengths, default=0), q.shape[1], k.shape[2], q.device,
        requests,
    )  # fmt: skip


def _at_request(b: int) -> Callable[[Tensor], tuple[Tensor, ...]]:
    return lambda x: (torch.full_like(x, b), x)


def _offset_by(first: int) -> Callable[[Tensor], tuple[Tensor, ...]]:
    return lambda x: (x + first,)


def _through(pages: Tensor, page_size: int) -> Callable[[Tensor], tuple[Tensor, ...]]:
    return lambda x: (pages[x // page_size], x % page_size) if x.numel() else (x, x)


def _integers(name: str, x: object) -> list[int]:
    if isinstance(x, (list, tuple, np.ndarray)):  # as plans take them
        x = torch.as_tensor(x if len(x) else np.zeros(0, np.int64))
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected integers in a list, an array or a tensor, found {type(x).__name__}")
    if x.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: expected int32 or int64, found {str(x.dtype).removeprefix('torch.')}")
    if x.ndim != 1:
        raise ValueError(f"{name}: expected one dimension, found shape {list(x.shape)}")
    return x.tolist()


def _offsets(name: str, x: object, end: int | None) -> list[int]:
    """Offsets that start at 0, never decrease and (where it is given) stop at `end`."""
    found = _integers(name, x)
    if not found or found[0] != 0:
        raise ValueError(f"{name}: expected B + 1 offsets that start at 0, found {found[:1]}")
    for b, (low, high) in enumerate(pairwise(found)):
        if high < low:
            raise ValueError(f"{name}: expected offsets that never decrease, found {low}, {high} for request {b}")
    if end is not None and found[-1] != end:
        raise ValueError(f"{name}: expected the last offset to be the number of rows, {end}, found {found[-1]}")
    return found
