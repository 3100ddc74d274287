"""Random arguments for a call of any variant: what `attncc run`, the benchmarks and the tests feed to kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attncc.ir.nodes import Const, TensorParam, Variant

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
    """Arguments of a call.  `chosen` are the scalars of `params` that had neither a default nor a given value."""

    q: Tensor
    k: Tensor
    v: Tensor
    params: dict[str, object]
    chosen: dict[str, object] = field(default_factory=dict)


def random_inputs(
    variant: Variant, shape: Shape, *, dtype: torch.dtype, device: str | torch.device, seed: int,
    given: dict[str, object] | None = None,
) -> Inputs:  # fmt: skip
    """q, k, v of `dtype` and every parameter of `variant`, drawn on `device` from `seed`.

    Parameters take `given`; scalars else their default, else a value that suits the lengths.  Float tensors are
    standard normal, `sorted` integers grow slowly, u32 are random bits, other integers are positions below kv_len, and
    the selection of a `domain` holds block numbers and some -1.
    """
    gen = torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=gen, device=device, dtype=torch.float32).to(dtype)

    q = normal(shape.batch, shape.qo_len, shape.num_qo_heads, shape.head_dim_qk)
    k = normal(shape.batch, shape.kv_len, shape.num_kv_heads, shape.head_dim_qk)
    v = normal(shape.batch, shape.kv_len, shape.num_kv_heads, shape.head_dim_vo)
    scalars, chosen = _scalars(variant, shape, given or {})
    tensors = {t.name: _tensor(t, variant, shape, gen) for t in variant.tensors if t.name not in scalars}
    return Inputs(q, k, v, {**scalars, **tensors}, chosen)


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
    for dim in param.dims:
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


def _selection(variant: Variant) -> str | None:
    return None if variant.domain is None else variant.domain.tensor


def _num_blocks(variant: Variant, shape: Shape) -> int:
    assert variant.domain is not None
    size = variant.domain.size
    return max(1, -(-shape.kv_len // int(size.value))) if isinstance(size, Const) else 1
