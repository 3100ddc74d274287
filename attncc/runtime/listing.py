"""The launch before attention that a variant with a `domain` needs: lists of blocks become lines of bits.

A line has a bit for every block of a row's keys; every row has one, or one a head where heads have lists of their own
(codegen/listing.py).  Lines are as short as the longest request needs.  They live from this launch to the one after it,
so their memory comes from torch's allocator in the order of the stream, as that of `out` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from attncc.runtime import launch
from attncc.runtime.arguments import I32_MAX, Spec, TensorParam

TEAM = 32  # threads that make a line, at most
CAPTURED_BYTES = 64 << 20  # of lines that a graph holds so that requests may grow, beside what its plan needs


def line_param(domain: Mapping[str, Any]) -> TensorParam:
    """The lines, as kernels take them among their tensors."""
    heads = {"h": "h", "g": "g", "row": 1}[domain["by"]]
    return TensorParam(launch.LINES, ("iq", heads, "word"), "u32")


class Listing:
    """Prepared for one signature of a call."""

    def __init__(
        self, loaded: launch.Loaded, manifest: Mapping[str, Any], spec: Spec, main: launch.Binding,
        fields: Mapping[str, int], heads: tuple[int, int], rows: tuple[int, ...], addresses: Mapping[str, int],
    ):  # fmt: skip
        """`main`: the launch of attention.  `fields`: what both launches are told of sizes and of the variant's
        tensors.  `heads`: (num_qo_heads, num_kv_heads); `rows`: q's leading dimensions; `addresses`: of the plan."""
        domain = manifest["domain"]
        self._tensor, self._block = domain["tensor"], domain["block"]
        self._place = next((n for n, s in enumerate(spec.scalars) if s.name == self._block), None)
        self._lines = {"h": heads[0], "g": heads[1], "row": 1}[domain["by"]]
        self._rows, self._device = rows, loaded.where
        self._total = self._lines
        for n in rows:
            self._total *= n
        own = loaded.other(launch.LISTING)
        self._threads = own.entry["block"][0]
        self._driver, self._main, self._own = loaded.driver, main, launch.Binding(own.entry, own.function, 0)
        self._param, self._words = line_param(domain), 0
        self._own.set_fields({**fields, "rows": self._total // self._lines, "lines": self._lines})
        for name, address in addresses.items():
            self._own.cell(name).value = address
        self._targets = [b.cell(f"t.{launch.LINES}") for b in (main, self._own)]
        self._parameters = launch.Parameters(self._own, spec.scalars, spec.tensors)

    def block(self, scalars: Sequence[int | float]) -> int:
        """Keys of a block at least."""
        size = int(self._block if self._place is None else scalars[self._place])
        if size < 1:
            raise ValueError(f"{self._block}: expected at least 1, the keys of a block that is listed, found {size}")
        return size

    def words(self, keys: int, block: int) -> int:
        """Of a line of a row with so many keys."""
        return max(1, -(-keys // (32 * block)))

    def captured_words(self, keys: int, most_keys: int, block: int) -> int:
        """... that a graph holds: room for what later plans may have."""
        room = CAPTURED_BYTES // (4 * max(1, self._total))
        return max(self.words(keys, block), min(self.words(most_keys, block), room))

    def launch(
        self, stream: int, tensors: Sequence[torch.Tensor], scalars: Sequence[int | float], words: int
    ) -> torch.Tensor:
        """Make lines of `words` words and point both launches at them; under the lock of the main one.  What is
        returned must live until that is enqueued.  ValueError where kernels can't count the lines."""
        if self._total * max(words, TEAM) > I32_MAX:
            raise ValueError(
                f"{self._tensor}: expected lists whose bits take fewer than 2³¹ words, found {self._total} lines of "
                f"{words}; nearest: larger blocks, or fewer rows a call"
            )
        made = torch.empty(self._total * words, dtype=torch.int32, device=self._device)
        if words != self._words:
            shape = (*self._rows, self._lines, words)
            fields = launch.tensor_fields(self._param, shape, torch.empty(shape, device="meta").stride())
            for binding in (self._main, self._own):
                binding.set_fields({**fields, "words": words, "team": min(words, TEAM)})
            self._words = words
        for cell in self._targets:
            cell.value = made.data_ptr()
        self._parameters.write(tensors, scalars)
        grid = -(-self._total * min(words, TEAM) // self._threads)
        self._driver.launch(self._own.function, grid, stream, self._own.arguments)
        return made
