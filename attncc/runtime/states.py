"""Attention states and how they merge: (o, lse) over some keys and (o, lse) over others give (o, lse) over all of them.

A state is an output that is normalised over its own keys and the log of the sum of their weights; an empty one is
(0, -inf).  Merging is associative up to rounding (arXiv 2501.01005, section 2.2); here states are summed in the order
in which they are given, so the same input has the same bits whatever else is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from attncc.runtime.arguments import refuse_grad

BASES = {"e": (torch.exp, torch.log), "2": (torch.exp2, torch.log2)}
LSE_DTYPES = (torch.float32, torch.float64)


def merge_states(
    o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor, lse_base: str = "e"
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The state over the keys of a and b: (o, lse), of the same shapes and dtypes.

    `o_a`, `o_b` [n, H, D] of any float dtype, `lse_a`, `lse_b` float32 [n, H] (or float64), all on one device;
    `lse_base`: "e" where lse is a natural logarithm, "2" where it is to base 2.  Computed in float32, or float64 where
    one of them is.  A state whose lse is -inf is empty: its o is not read, and merging with it changes no bit; two
    empty states give (0, -inf).  Beside an lse of +inf the other state has no weight (two of them share it); NaN stays
    NaN.

    Never synchronises, may be captured in a CUDA graph.  Raises ValueError or TypeError naming the argument, what was
    expected and what was found.
    """
    _check_state("o_a", o_a, "lse_a", lse_a, "[n, H, D]", lse_base)
    for name, t, like_name, like in (("o_b", o_b, "o_a", o_a), ("lse_b", lse_b, "lse_a", lse_a)):
        _plain(name, t)
        if t.shape != like.shape:
            raise ValueError(f"{name}: expected shape {list(like.shape)} as {like_name}, found {list(t.shape)}")
        if t.dtype != like.dtype:
            raise TypeError(f"{name}: expected dtype {_short(like)} as {like_name}, found {_short(t)}")
        _same_device(name, t, like_name, like)
    return _merge([o_a, o_b], [lse_a, lse_b], o_a, lse_a, lse_base)


def merge_state_list(o: Tensor, lse: Tensor, lse_base: str = "e") -> tuple[Tensor, Tensor]:
    """The state over the keys of S states: (o [n, H, D], lse [n, H]) of `o` [n, S, H, D] and `lse` float32 [n, S, H].

    Everything else as `merge_states`; no state at all (S = 0) gives (0, -inf).
    """
    _check_state("o", o, "lse", lse, "[n, S, H, D]", lse_base)
    shape = (o.shape[0], *o.shape[2:])
    like = o.new_empty(()).expand(shape)
    return _merge(o.unbind(1), lse.unbind(1), like, lse.new_empty(()).expand(shape[:-1]), lse_base)


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
    """Refuse what isn't a float `o` of `shape` with an lse of the same leading dimensions on its device."""
    if base not in BASES:
        raise ValueError(f"lse_base: expected 'e' or '2', found {base!r}")
    _plain(o_name, o)
    _plain(lse_name, lse)
    if o.dim() != shape.count(",") + 1:
        raise ValueError(f"{o_name}: expected shape {shape}, found {list(o.shape)}")
    if not o.dtype.is_floating_point:
        raise TypeError(f"{o_name}: expected a float dtype, found {_short(o)}")
    if lse.shape != o.shape[:-1]:
        raise ValueError(f"{lse_name}: expected shape {list(o.shape[:-1])} as {o_name}, found {list(lse.shape)}")
    if lse.dtype not in LSE_DTYPES:
        raise TypeError(f"{lse_name}: expected dtype float32 or float64, found {_short(lse)}")
    _same_device(lse_name, lse, o_name, o)


def _plain(name: str, t: Any) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, found {type(t).__name__}")
    if torch.is_grad_enabled():  # autograd would give NaN at the infinities of empty states
        refuse_grad([(name, t)])


def _same_device(name: str, t: Tensor, like_name: str, like: Tensor) -> None:
    if t.device != like.device:
        raise ValueError(f"{name}: expected a tensor on {like.device} as {like_name} is, found {t.device}")


def _short(t: Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")
