"""What a call gives back, and the calls that launch nothing of their own: without rows, and through copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Results:
    """What a call makes where the caller gives no memory."""

    def __init__(self, out_shape: tuple[int, ...], lse_shape: tuple[int, ...], dtype: torch.dtype, device: Any):
        self.out_shape, self.dtype, self.device = out_shape, dtype, device
        # `empty_like` of one broadcast element takes half the time of `empty` with its shape, dtype and device, and
        # what it makes is contiguous unasked.
        self._out = torch.empty((1,) * len(out_shape), dtype=dtype, device=device).expand(out_shape)
        self._lse = torch.empty((1,) * len(lse_shape), dtype=torch.float32, device=device).expand(lse_shape)

    @property
    def like(self) -> torch.Tensor:
        """A tensor laid out as `make_out` makes them; of no memory."""
        return torch.empty(self.out_shape, dtype=self.dtype, device="meta")

    def make_out(self) -> torch.Tensor:
        return torch.empty_like(self._out)

    def make_lse(self) -> torch.Tensor:
        return torch.empty_like(self._lse)


class Nothing:
    """A call without rows: empty results, no launch."""

    requires_grad = False

    def __init__(self, results: Results):
        self._results = results

    def call(self, tensors, scalars, out, lse, return_lse):
        out = self._results.make_out() if out is None else out
        lse = self._results.make_lse() if lse is None and return_lse else lse
        return (out, lse) if return_lse else out


class Copies:
    """A call with tensors that the kernel can't address: through contiguous copies of those.

    `run(tensors, scalars, out, lse, return_lse)` is what makes the call with them.
    """

    requires_grad = False

    def __init__(self, run: Callable[..., Any], unfit: frozenset[str]):
        self._run, self._unfit = run, unfit

    def call(self, tensors, scalars, out, lse, return_lse):
        named = {"q": tensors[0], "k": tensors[1], "v": tensors[2], "out": out, "lse": lse}
        copies = {n: named[n].clone(memory_format=torch.contiguous_format) for n in self._unfit}
        fit = {**named, **copies}
        results = self._run((fit["q"], fit["k"], fit["v"], *tensors[3:]), scalars, fit["out"], fit["lse"], return_lse)
        for name in copies.keys() & {"out", "lse"}:
            named[name].copy_(copies[name])
        made_out, made_lse = results if return_lse else (results, None)
        out, lse = made_out if out is None else out, made_lse if lse is None else lse
        return (out, lse) if return_lse else out
