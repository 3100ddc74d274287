"""The pre-pass: f_k and f_v of all keys by a small kernel of their own, before a main kernel that takes k and v as they
are (routes.py says when).

What it writes lives in memory of torch's allocator, as `out` does: a graph that captures the call keeps it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from attncc.runtime import launch
from attncc.runtime.arguments import I32_MAX, Spec
from attncc.runtime.tensor_map import ALIGNMENT

TILE = 128  # rows that a CTA takes at a time
CTAS = 4  # ... an SM


class Prepass:
    """A bound pre-pass for k and v of one shape: [B, rows, num_kv_heads, head_dim]."""

    def __init__(
        self, loaded: launch.Loaded, spec: Spec, k: torch.Tensor, v: torch.Tensor, fields: Mapping[str, int],
        addresses: Mapping[str, int],
    ):  # fmt: skip
        """`fields`: of sizes and of tensor parameters; `addresses`: of what a plan left on the device."""
        batch, rows, heads = k.shape[:3]
        grid = min(batch * heads * -(-rows // TILE), CTAS * loaded.sm_count)
        self._binding = binding = launch.Binding(loaded.entry, loaded.function, grid)
        binding.set_fields({**fields, "batch": batch, "rows": rows})
        for name, address in addresses.items():
            binding.cell(name).value = address
        self._driver = loaded.driver
        self._sides = []
        for n, (x, t) in enumerate((("k", k), ("v", v)), start=1):
            if x in loaded.entry["of"]:
                binding.set_fields(strides_of(x, t))
                self._sides.append((n, binding.cell(x), binding.cell(f"{x}_out"), t.shape))
        self._parameters = launch.Parameters(binding, spec.scalars, spec.tensors)

    def call(self, tensors: Sequence[torch.Tensor], scalars: Sequence[int | float], stream: int):
        """Launch it; (q, k, v) for the main kernel, to be kept until that is launched."""
        found = list(tensors[:3])
        binding = self._binding
        with binding.lock:
            for n, source, target, shape in self._sides:
                found[n] = torch.empty(shape, dtype=tensors[n].dtype, device=tensors[n].device)
                source.value, target.value = tensors[n].data_ptr(), found[n].data_ptr()
            self._parameters.write(tensors, scalars)
            self._driver.launch(binding.function, binding.grid, stream, binding.arguments)
        return found


def written(entry: Mapping[str, Any], name: str, t: torch.Tensor) -> torch.Tensor:
    """What the main kernel will be given for k or v: the tensor, or the layout of what a pre-pass makes of it."""
    return torch.empty(t.shape, dtype=t.dtype, device="meta") if name in entry["of"] else t


def strides_of(name: str, t: torch.Tensor) -> dict[str, int]:
    """In units of 16 bytes."""
    item, dims = t.element_size(), ("batch", "row", "head")
    strides = [s * item // ALIGNMENT if n > 1 else 0 for n, s in zip(t.shape[:3], t.stride()[:3], strict=True)]
    return {f"{name}_{dim}_stride": s for dim, s in zip(dims, strides, strict=True)}


def unfit(t: torch.Tensor) -> bool:
    """Can't it find rows with these strides?"""
    item = t.element_size()
    strides = [s * item for n, s in zip(t.shape[:3], t.stride()[:3], strict=True) if n > 1]
    return any(s % ALIGNMENT or s // ALIGNMENT > I32_MAX for s in strides)
