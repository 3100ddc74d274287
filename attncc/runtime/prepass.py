"""The pre-pass: f_k and f_v of all keys by a small kernel of their own, before a main kernel that takes k and v as they
are (routes.py says when); or, where they are factors of dense keys, by that kernel itself, ahead of its tiles.

What these write lives in memory of torch's allocator, as `out` does: a graph that captures the call keeps it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from attncc.runtime import launch
from attncc.runtime.arguments import I32_MAX, Spec
from attncc.runtime.tensor_map import ALIGNMENT

TILE = 128  # rows that a CTA takes at a time
CTAS = 4  # ... an SM


class Rows:
    """k and v, [B, rows, num_kv_heads, head_dim], as a binding's kernel finds them, and memory for what it makes of
    those in `of`."""

    def __init__(self, binding: launch.Binding, of: Iterable[str], k: torch.Tensor, v: torch.Tensor):
        self._sides = []
        for n, (x, t) in enumerate((("k", k), ("v", v)), start=1):
            if x in of:
                binding.set_fields(strides_of(x, t))
                self._sides.append((n, binding.cell(x), binding.cell(f"{x}_out"), t.shape))

    def make(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """(q, k, v) as they will be.  Under the binding's lock."""
        found = list(tensors[:3])
        for n, source, target, shape in self._sides:
            found[n] = torch.empty(shape, dtype=tensors[n].dtype, device=tensors[n].device)
            source.value, target.value = tensors[n].data_ptr(), found[n].data_ptr()
        return found


class Ahead:
    """... and the words in which a kernel that makes them itself counts what is done."""

    def __init__(self, binding: launch.Binding, entry: Mapping[str, Any], k: torch.Tensor, v: torch.Tensor):
        self._rows = Rows(binding, entry["ahead"], k, v)
        self._made, self._device = binding.cell("made"), k.device
        blocks = k.shape[0] * k.shape[2] * -(-k.shape[1] // entry["tile_kv"])
        self._words = 2 + blocks * len(entry["ahead"])
        self._streams: dict[int, torch.Tensor] = {}

    def make(self, tensors: Sequence[torch.Tensor], stream: int, capturing: bool) -> list[torch.Tensor]:
        """(q, k, v) as they will be, to be kept until the kernel is launched.  Under the binding's lock."""
        words = None if capturing else self._streams.get(stream)
        if words is None:  # a graph zeroes its own each time
            words = torch.zeros(self._words, dtype=torch.int32, device=self._device)
            if not capturing:
                self._streams[stream] = words
        self._made.value = words.data_ptr()
        return [*self._rows.make(tensors), words]


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
        self._rows = Rows(binding, loaded.entry["of"], k, v)
        self._parameters = launch.Parameters(binding, spec.scalars, spec.tensors)

    def call(self, tensors: Sequence[torch.Tensor], scalars: Sequence[int | float], stream: int):
        """Launch it; (q, k, v) for the main kernel, to be kept until that is launched."""
        binding = self._binding
        with binding.lock:
            found = self._rows.make(tensors)
            self._parameters.write(tensors, scalars)
            self._driver.launch(binding.function, binding.grid, stream, binding.arguments)
        return found


def written(t: torch.Tensor, by_head: bool = False) -> torch.Tensor:
    """The layout of what is made of k or v, [B, rows, num_kv_heads, head_dim]; `by_head`: as `Ahead` has it."""
    if by_head:
        return torch.empty([t.shape[n] for n in (0, 2, 1, 3)], dtype=t.dtype, device="meta").transpose(1, 2)
    return torch.empty(t.shape, dtype=t.dtype, device="meta")


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
