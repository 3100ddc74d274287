"""Arguments of a reference call: each is checked by name, or refused with what was expected and what was found."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from difflib import get_close_matches

import torch
from torch import Tensor

from attncc.ir.nodes import ScalarParam, TensorParam, Variant
from attncc.ir.reference_layout import Layout

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    "f32": FLOATS, "bf16": FLOATS, "f16": FLOATS,  # a wider value than the kernel's is what an oracle is for
    "i32": (torch.int32,), "u32": (torch.int32, torch.uint32), "u8": (torch.uint8,), "bool": (torch.bool,),
}  # fmt: skip


def bind_const(variant: Variant, const: Mapping[str, object] | None) -> dict[str, int | float | bool]:
    """Values of the `const` parameters: those of `const`, else their defaults.

    Raises ValueError for a name that is no const parameter or a value that is missing, TypeError for a wrong type.
    """
    params = {p.name: p for p in variant.scalars if p.const}
    given = dict(const or {})
    for name in given:
        if name not in params:
            known = ", ".join(params) or "none"
            raise ValueError(f"const: {variant.name} has no const parameter {name!r} (it has: {known})")
    return {name: _scalar(p, given, variant.name) for name, p in params.items()}


def bind_scalars(variant: Variant, given: Mapping[str, object]) -> dict[str, int | float | bool]:
    """Values of the run-time scalars.  Raises ValueError and TypeError, as `bind_const` does, naming the parameter."""
    takes = [p.name for p in variant.scalars if not p.const] + [t.name for t in variant.tensors]
    for p in variant.scalars:
        if p.const and p.name in given:
            raise ValueError(f"{p.name}: a const parameter of {variant.name} is fixed at build, not given to a call")
    for name in given:
        if name not in takes:
            known = ", ".join(takes) or "none"
            near = get_close_matches(name, takes, 1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise ValueError(f"{name}: {variant.name} has no such parameter (it has: {known}){hint}")
    return {p.name: _scalar(p, given, variant.name) for p in variant.scalars if not p.const}


def _scalar(param: ScalarParam, given: Mapping[str, object], owner: str) -> int | float | bool:
    name, elem = param.name, param.type.elem
    value = given.get(name, param.default)
    if value is None:
        raise ValueError(f"{name}: {owner} needs this {elem} parameter, and it is missing")
    if isinstance(value, Tensor):
        if value.ndim:
            raise TypeError(f"{name}: expected a number ({elem}), found a tensor of shape {list(value.shape)}")
        value = value.item()
    kind = {"i32": numbers.Integral, "f32": numbers.Real, "bool": bool}[elem]
    if not isinstance(value, kind) or (elem != "bool" and isinstance(value, bool)):
        raise TypeError(f"{name}: expected {elem}, found {type(value).__name__} {value!r}")
    if elem == "i32" and not -(2**31) <= value < 2**31:  # type: ignore[operator]
        raise ValueError(f"{name}: expected an i32, found {value}, which 32 bits cannot hold")
    try:
        return {"i32": int, "f32": float, "bool": bool}[elem](value)  # type: ignore[arg-type]
    except OverflowError:
        raise ValueError(f"{name}: expected an f32, found an int that is larger than any") from None


def bind_tensors(
    variant: Variant, given: Mapping[str, object], layout: Layout, sizes: Mapping[str, int]
) -> dict[str, Tensor]:
    """Checked tensor parameters, u32 as int32 of the same bits; floats keep the dtype they are given in."""
    return {t.name: _tensor(t, given.get(t.name), layout, sizes, variant.name) for t in variant.tensors}


def _tensor(param: TensorParam, x: object, layout: Layout, sizes: Mapping[str, int], owner: str) -> Tensor:
    name = param.name
    shown = f"{name}[{', '.join(map(str, param.dims))}]: {param.dtype}"
    if x is None:
        raise ValueError(f"{name}: {owner} needs the tensor {shown}, and it is missing")
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a torch tensor for {shown}, found {type(x).__name__}")
    if x.dtype not in DTYPES[param.dtype]:
        known = " or ".join(str(d).removeprefix("torch.") for d in DTYPES[param.dtype])
        raise TypeError(f"{name}: expected dtype {known} for {shown}, found {str(x.dtype).removeprefix('torch.')}")
    if x.device != layout.device:
        raise ValueError(f"{name}: expected a tensor on {layout.device}, as q, found one on {x.device}")
    want: list[str] = []
    length: list[tuple[int, int]] = []  # least and greatest of each expected dimension
    for dim in param.dims:
        for text, low, high in _expected(dim, layout, sizes):
            want.append(text)
            length.append((low, high))
    if x.ndim != len(want):
        raise ValueError(f"{name}: expected {len(want)} dimensions [{', '.join(want)}] for {shown}, found {x.ndim}")
    if not all(low <= n <= high for n, (low, high) in zip(x.shape, length, strict=True)):
        raise ValueError(f"{name}: expected shape [{', '.join(want)}] for {shown}, found {list(x.shape)}")
    return x.view(torch.int32) if x.dtype == torch.uint32 else x


def _expected(dim: str | int, layout: Layout, sizes: Mapping[str, int]) -> list[tuple[str, int, int]]:
    """What one index stands for in the argument: (how to show it, least, greatest length) for each dimension."""
    anything = 2**63
    if dim in ("iq", "j"):
        return [(str(n), n, n) for n in (layout.row_shape if dim == "iq" else layout.key_shape)]
    if dim == "pos":
        return [(f"at least {layout.max_kv_len}", layout.max_kv_len, anything)]
    exact = {
        "b": layout.batch, "h": sizes["num_qo_heads"], "g": sizes["num_kv_heads"],
        "d": sizes["head_dim_qk"], "e": sizes["head_dim_vo"],
    }.get(str(dim), dim)  # fmt: skip
    return [(str(exact), exact, exact) if isinstance(exact, int) else (str(dim), 0, anything)]
