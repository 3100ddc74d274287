"""Attention states and how they merge: (o, lse) over some keys and (o, lse) over others give (o, lse) over all of them.

A state is an output that is normalised over its own keys and the log of the sum of their weights; an empty one is
(0, -inf).  Merging is associative up to rounding (arXiv 2501.01005, section 2.2); here states are summed in the order
in which they are given, so the same input has the same bits whatever else is in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attncc.runtime.arguments import I32_MAX, refuse_grad

if TYPE_CHECKING:
    from attncc.runtime.utilities import Utilities

BASES = {"e": (torch.exp, torch.log), "2": (torch.exp2, torch.log2)}
KERNEL_DTYPES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
LOG2_E = math.log2(math.e)
DTYPES = (*KERNEL_DTYPES, torch.float64)
LSE_DTYPES = (torch.float32, torch.float64)


def merge_states(
    o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor, lse_base: str = "e", kernels: Utilities | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """attncc.merge_states (attncc/utilities.py), by one of `kernels` where there is one for these tensors."""
    _check_state("o_a", o_a, "lse_a", lse_a, "[n, H, D]", lse_base)
    for name, t, like_name, like in (("o_b", o_b, "o_a", o_a), ("lse_b", lse_b, "lse_a", lse_a)):
        _plain(name, t)
        if t.shape != like.shape:
            raise ValueError(f"{name}: expected shape {list(like.shape)} as {like_name}, found {list(t.shape)}")
        if t.dtype != like.dtype:
            raise TypeError(f"{name}: expected dtype {_short(like)} as {like_name}, found {_short(t)}")
        _same_device(name, t, like_name, like)
    if kernels is not None and kernels.able(o_a.device):
        # two tensors of the same strides are a list of two
        (o, o_next), (lse, lse_next) = _alike(o_a, o_b), _alike(lse_a, lse_b)
        steps = o_next.data_ptr() - o.data_ptr(), lse_next.data_ptr() - lse.data_ptr()
        merged = _launched(kernels, o, lse, 2, steps, lse_base)
        if merged is not None:
            return merged
    return _merge([o_a, o_b], [lse_a, lse_b], o_a, lse_a, lse_base)


def merge_state_list(
    o: Tensor, lse: Tensor, lse_base: str = "e", kernels: Utilities | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """attncc.merge_state_list, in the same way."""
    _check_state("o", o, "lse", lse, "[n, S, H, D]", lse_base)
    if kernels is not None and kernels.able(o.device) and o.shape[1]:
        o = _rows(o)
        steps = o.stride(1) * o.element_size(), lse.stride(1) * lse.element_size()
        merged = _launched(kernels, o[:, 0], lse[:, 0], o.shape[1], steps, lse_base)
        if merged is not None:
            return merged
    shape = (o.shape[0], *o.shape[2:])
    like = o.new_empty(()).expand(shape)
    return _merge(o.unbind(1), lse.unbind(1), like, lse.new_empty(()).expand(shape[:-1]), lse_base)


# ---------------------------------------------------------------------- one launch


def _launched(
    kernels: Utilities, o: Tensor, lse: Tensor, states: int, steps: tuple[int, int], base: str
) -> tuple[Tensor, Tensor] | None:
    """The sum of `states` states in one launch: (o, lse) is the first, `steps` the bytes from each to the next.  None
    where there is no kernel for them."""
    n, heads, dim = o.shape
    item = o.element_size()
    places = o.data_ptr() | steps[0] | dim * item
    for extent, stride in ((n, o.stride(0)), (heads, o.stride(1))):
        places |= stride * item if extent > 1 else 0
    unit = item if places % 16 else 16
    chunks = dim * item // unit
    total = n * heads * chunks
    if o.dtype not in KERNEL_DTYPES or lse.dtype != torch.float32 or not 0 < total <= I32_MAX:
        return None
    kernel = kernels.get(f"merge_{KERNEL_DTYPES[o.dtype]}_{unit}", o.device)
    if kernel is None:
        return None
    out = torch.empty((n, heads, dim), dtype=o.dtype, device=o.device)
    lse_out = torch.empty((n, heads), dtype=lse.dtype, device=o.device)
    natural = base == "e"
    fields: dict[str, int | float] = {
        "o": o.data_ptr(), "o_row": o.stride(0) * item, "o_state": steps[0], "o_head": o.stride(1) * item,
        "lse": lse.data_ptr(), "lse_row": lse.stride(0) * 4, "lse_state": steps[1], "lse_head": lse.stride(1) * 4,
        "out": out.data_ptr(), "lse_out": lse_out.data_ptr(),
        "total": total, "states": states, "heads": heads, "chunks": chunks,
        "to_base_2": LOG2_E if natural else 1.0, "from_base_2": 1 / LOG2_E if natural else 1.0,
    }  # fmt: skip
    kernel.launch(-(-total // kernel.threads), fields)
    return out, lse_out


def _alike(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Both, with the same strides, and the last one 1."""
    a, b = _rows(a), _rows(b)
    return (a, b) if a.stride() == b.stride() else (a.contiguous(), b.contiguous())


def _rows(t: Tensor) -> Tensor:
    """The tensor, copied where its last dimension is not contiguous."""
    return t if t.shape[-1] < 2 or t.stride(-1) == 1 else t.contiguous()


# ---------------------------------------------------------------------- torch operations


def _merge(
    os: Sequence[Tensor], lses: Sequence[Tensor], o_like: Tensor, lse_like: Tensor, base: str
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The sum of states, in order; results have the shapes and dtypes of `o_like` and `lse_like`."""
    exp, log = BASES[base]
    dtype = reduce(torch.promote_types, (o_like.dtype, lse_like.dtype, torch.float32))
    where = o_like.device
    top = reduce(torch.maximum, lses, torch.full(lse_like.shape, -torch.inf, dtype=lse_like.dtype, device=where))
    # -0.0 is what an addition doesn't change: 0.0 would turn a sum of nothing but -0.0 into 0.0
    o = torch.full(o_like.shape, -0.0, dtype=dtype, device=where)
    total = torch.zeros(lse_like.shape, dtype=dtype, device=where)
    for o_s, lse_s in zip(os, lses, strict=True):
        # the difference of equal infinities is 0 here: states of lse +inf share the weight
        below = (lse_s.to(dtype) - top.to(dtype)).masked_fill(lse_s == top, 0.0)
        empty = lse_s.isneginf()
        weight = exp(below).masked_fill(empty, 0.0)
        o = o + (weight[..., None] * o_s).masked_fill(empty[..., None], -0.0)
        total = total + weight
    o = (o / total[..., None]).masked_fill((total == 0)[..., None], 0.0)
    lse = torch.where(total == 1, top, top + log(total))  # -0.0 + log(1) would be 0.0; of no weight at all, -inf
    return o.to(o_like.dtype), lse.to(lse_like.dtype)


def _check_state(o_name: str, o: Any, lse_name: str, lse: Any, shape: str, base: Any) -> None:
    """Refuse what isn't an `o` of `shape` with an lse of the same leading dimensions on its device."""
    if not isinstance(base, str) or base not in BASES:
        raise ValueError(f"lse_base: expected 'e' or '2', found {base!r}")
    _plain(o_name, o)
    _plain(lse_name, lse)
    if o.dim() != shape.count(",") + 1:
        raise ValueError(f"{o_name}: expected shape {shape}, found {list(o.shape)}")
    if o.dtype not in DTYPES:
        raise TypeError(f"{o_name}: expected dtype bfloat16, float16, float32 or float64, found {_short(o)}")
    if lse.shape != o.shape[:-1]:
        raise ValueError(f"{lse_name}: expected shape {list(o.shape[:-1])} as {o_name}, found {list(lse.shape)}")
    if lse.dtype not in LSE_DTYPES:
        raise TypeError(f"{lse_name}: expected dtype float32 or float64, found {_short(lse)}")
    _same_device(lse_name, lse, o_name, o)


def _plain(name: str, t: Any) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, found {type(t).__name__}")
    if t.layout != torch.strided:
        raise TypeError(f"{name}: expected a strided tensor, found layout {t.layout}")
    if torch.is_grad_enabled():  # autograd would give NaN at the infinities of empty states
        refuse_grad([(name, t)])


def _same_device(name: str, t: Tensor, like_name: str, like: Tensor) -> None:
    if t.device != like.device:
        raise ValueError(f"{name}: expected a tensor on {like.device} as {like_name} is, found {t.device}")


def _short(t: Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")
