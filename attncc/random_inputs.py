"""Random arguments for a call of any variant: what `attncc run`, the benchmarks and the tests feed to kernels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from attncc.codegen.vectors import table_columns
from attncc.compiler import MAX_PAGE_SIZE
from attncc.ir.nodes import I32, Const, Param, TensorParam, Variant

FLOATS = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


@dataclass(frozen=True)
class Shape:
    """One dense call: q [batch, qo_len, num_qo_heads, head_dim_qk], k and v [batch, kv_len, num_kv_heads, …]."""

    batch: int
    qo_len: int
    kv_len: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int = 128
    head_dim_vo: int = 128

    def __str__(self) -> str:
        lengths = f"S{self.kv_len}" if self.qo_len == self.kv_len else f"qo {self.qo_len} kv {self.kv_len}"
        return f"B{self.batch} {lengths} {self.num_qo_heads}/{self.num_kv_heads}"


@dataclass(frozen=True)
class Inputs:
    """Arguments of a call.  `chosen` are the scalars of `params` that had neither a default nor a given value.

    `table`: of a served batch what BatchAttention.plan takes, int32 on the host, two tensors where keys are ragged and
    four where they lie in pages; q, k, v and tensors over `iq` and `j` then lie as `run` takes them.  Dense: none.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    params: dict[str, object]
    chosen: dict[str, object] = field(default_factory=dict)
    table: tuple[Tensor, ...] = ()


def random_inputs(
    variant: Variant, shape: Shape, *, dtype: torch.dtype, device: str | torch.device, seed: int,
    given: dict[str, object] | None = None, const: Mapping[str, object] | None = None,
) -> Inputs:  # fmt: skip
    """q, k, v of `dtype` and every parameter of `variant`, drawn on `device` from `seed`.

    Parameters take `given`; scalars else their default, else a value that suits the lengths.  `const`: values of const
    parameters.  Float tensors are
    standard normal, `sorted` integers grow slowly, u32 are random bits, other integers are positions below kv_len, and
    the selection of a `domain` holds block numbers and some -1.
    """
    gen = torch.Generator(device).manual_seed(seed)
    q, k, v = _qkv(shape, (shape.batch, shape.qo_len), (shape.batch, shape.kv_len), dtype, gen)
    scalars, chosen = _scalars(variant, shape, given or {})
    variant = _sized(variant, {**(const or {}), **scalars})
    tensors = {t.name: _tensor(t, variant, shape, gen) for t in variant.tensors if t.name not in scalars}
    return Inputs(q, k, v, {**scalars, **tensors}, chosen)


def _qkv(
    shape: Shape, rows: tuple[int, ...], keys: tuple[int, ...], dtype: torch.dtype, gen: torch.Generator
) -> tuple[Tensor, ...]:  # fmt: skip
    heads, kv_heads = shape.num_qo_heads, shape.num_kv_heads
    sizes = (
        (*rows, heads, shape.head_dim_qk), (*keys, kv_heads, shape.head_dim_qk), (*keys, kv_heads, shape.head_dim_vo)
    )  # fmt: skip
    return tuple(torch.randn(s, generator=gen, device=gen.device, dtype=torch.float32).to(dtype) for s in sizes)


def _scalars(variant: Variant, shape: Shape, given: dict[str, object]) -> tuple[dict[str, object], dict[str, object]]:
    suits = {"i32": max(1, shape.kv_len // 2), "f32": 0.5, "bool": True}
    chosen = {
        p.name: suits[p.type.elem] for p in variant.scalars if not p.const and p.default is None and p.name not in given
    }
    return {**given, **chosen}, chosen


def _tensor(param: TensorParam, variant: Variant, shape: Shape, gen: torch.Generator) -> Tensor:
    size = tuple(_lengths(param, variant, shape))
    if param.dtype in FLOATS:
        x = torch.randn(size, generator=gen, device=gen.device, dtype=torch.float32)
        return (x.sort(-1).values if param.sorted else x).to(FLOATS[param.dtype])
    low, high, dtype = _range(param, variant, shape)
    x = torch.randint(low, high, size, generator=gen, device=gen.device).to(dtype)
    return x.sort(-1).values if param.sorted else x


def _lengths(param: TensorParam, variant: Variant, shape: Shape) -> Iterator[int]:
    longest = max(shape.qo_len, shape.kv_len, 1)
    spaces = {
        "b": (shape.batch,), "h": (shape.num_qo_heads,), "g": (shape.num_kv_heads,),
        "iq": (shape.batch, shape.qo_len), "j": (shape.batch, shape.kv_len),
        "pos": (longest,), "d": (shape.head_dim_qk,), "e": (shape.head_dim_vo,),
    }  # fmt: skip
    columns = table_columns(variant, {"d": shape.head_dim_qk, "e": shape.head_dim_vo})
    for dim in (*param.dims[:-1], columns.get(param.name, param.dims[-1])):
        if isinstance(dim, int):
            yield dim
        elif dim in spaces:
            yield from spaces[dim]
        elif param.name == _selection(variant):
            yield min(8, _num_blocks(variant, shape))
        elif param.dtype == "u32":
            yield -(-longest // 32)  # words of bits, one bit a position
        else:
            yield longest


def _range(param: TensorParam, variant: Variant, shape: Shape) -> tuple[int, int, torch.dtype]:
    """Least value, greatest value + 1, dtype."""
    if param.name == _selection(variant):
        return -1, _num_blocks(variant, shape), torch.int32
    if param.dtype == "u32":
        return -(2**31), 2**31, torch.int32
    if param.dtype == "bool":
        return 0, 2, torch.bool
    if param.sorted:
        return 0, min(255, 2 + shape.kv_len // 256), torch.uint8 if param.dtype == "u8" else torch.int32
    if param.dtype == "u8":
        return 0, min(256, max(1, shape.kv_len)), torch.uint8
    return 0, max(1, shape.kv_len), torch.int32


def _sized(variant: Variant, scalars: dict[str, object]) -> Variant:
    """The variant with the size of its domain's blocks as a number, where a scalar says it."""
    d = variant.domain
    if d is None or not isinstance(d.size, Param):
        return variant
    value: Any = {**{p.name: p.default for p in variant.scalars}, **scalars}[d.size.name]
    return replace(variant, domain=replace(d, size=Const(int(value), I32)))


def _selection(variant: Variant) -> str | None:
    return None if variant.domain is None else variant.domain.tensor


def _num_blocks(variant: Variant, shape: Shape) -> int:
    assert variant.domain is not None
    size = variant.domain.size
    return max(1, -(-shape.kv_len // max(1, int(size.value)))) if isinstance(size, Const) else 8


# ---------------------------------------------------------------------- served batches

SPARE = 2  # pages of a cache that no request has


def shorter(shape: Shape) -> list[tuple[int, int]]:
    """(qo_len, kv_len) of requests that a batch of `shape` is mixed with: a row to decode, drafts to verify, a
    prompt."""
    prompt = min(shape.qo_len, shape.kv_len) // 2
    return [(1, shape.kv_len), (min(4, shape.qo_len), 2 * shape.kv_len // 3), (prompt, prompt)]


def random_batch(
    variant: Variant, lengths: Sequence[tuple[int, int]], shape: Shape, *, dtype: torch.dtype,
    device: str | torch.device, seed: int, page_size: int | None = None, given: dict[str, object] | None = None,
    const: Mapping[str, object] | None = None,
) -> Inputs:  # fmt: skip
    """As random_inputs, for requests of `lengths` (qo_len, kv_len) with the heads and head dims of `shape`; keys lie in
    pages of `page_size` rows, or ragged where that is None.  Raises ValueError for a page size that compile refuses."""
    gen = torch.Generator(device).manual_seed(seed)
    qo, kv = ([pair[n] for pair in lengths] for n in (0, 1))
    longest = replace(shape, batch=len(qo), qo_len=max(qo, default=0), kv_len=max(kv, default=0))
    q, k, v = _qkv(shape, (sum(qo),), (sum(kv),), dtype, gen)
    scalars, chosen = _scalars(variant, longest, given or {})
    params, variant = dict(scalars), _sized(variant, {**(const or {}), **scalars})
    for t in variant.tensors:
        dims = tuple({"iq": sum(qo), "j": sum(kv)}.get(str(dim), dim) for dim in t.dims)
        params[t.name] = _tensor(replace(t, dims=dims), variant, longest, gen)
    ragged = Inputs(q, k, v, params, chosen, (_offsets(qo), _offsets(kv)))
    return ragged if page_size is None else in_pages(variant, ragged, page_size, seed)


def as_ragged(variant: Variant, dense: Inputs) -> Inputs:
    """The same values as a served batch of equal lengths, ragged."""
    params = dict(dense.params)
    for t in variant.tensors:
        x = dense.params[t.name]
        assert isinstance(x, Tensor)
        for n, dim in enumerate(t.dims):  # those before it are one dimension each by now
            x = x.flatten(n, n + 1) if dim in ("iq", "j") else x
        params[t.name] = x
    q, k, v = (x.flatten(0, 1) for x in (dense.q, dense.k, dense.v))
    table = tuple(_offsets([x.shape[1]] * x.shape[0]) for x in (dense.q, dense.k))
    return Inputs(q, k, v, params, dense.chosen, table)


def in_pages(variant: Variant, ragged: Inputs, page_size: int, seed: int) -> Inputs:
    """The same values in pages of `page_size` rows, in random order.  What no key has is NaN: rows past the end of a
    request in its last page, and SPARE pages.  Raises ValueError for a page size that compile refuses."""
    if not 1 <= page_size <= MAX_PAGE_SIZE:
        raise ValueError(f"page_size: expected 1 to {MAX_PAGE_SIZE}, found {page_size}")
    qo_indptr, kv_indptr = ragged.table
    kv_len = kv_indptr.diff()
    counts = (kv_len + page_size - 1) // page_size
    first, pages = _offsets(counts.tolist()), int(counts.sum()) + SPARE
    ids = torch.randperm(pages, generator=torch.Generator().manual_seed(seed)).int()[: pages - SPARE]
    request = torch.arange(len(kv_len)).repeat_interleave(kv_len)
    position = torch.arange(len(request)) - kv_indptr[request]
    rows = ids[first[request] + position // page_size].long() * page_size + position % page_size
    rows = rows.to(ragged.k.device)

    def put(x: Tensor, axis: int) -> Tensor:
        size = [*x.shape[:axis], pages * page_size, *x.shape[axis + 1 :]]
        nothing = torch.nan if x.dtype.is_floating_point else 0
        cache = torch.full(size, nothing, dtype=x.dtype, device=x.device).index_copy_(axis, rows, x)
        return cache.unflatten(axis, (pages, page_size))

    params = dict(ragged.params)
    for t in variant.tensors:
        for n in reversed([n for n, dim in enumerate(t.dims) if dim == "j"]):
            x = params[t.name]
            assert isinstance(x, Tensor)
            params[t.name] = put(x, n)
    table = (qo_indptr, first, torch.cat([ids, ids.new_full((3,), -1)]), kv_len - (counts - 1) * page_size)
    return replace(ragged, k=put(ragged.k, 0), v=put(ragged.v, 0), params=params, table=table)


def _offsets(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()
