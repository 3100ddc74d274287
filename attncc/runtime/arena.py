"""What a plan is on the device: named slices at fixed offsets, filled by one asynchronous copy from pinned memory.

Every address stays what it was when the arena was made (but for `grow`), so a CUDA graph that captured a launch finds
the latest plan there.  Elements are int32 or float32: four bytes each.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

ALIGN = 64  # elements: a slice starts at a multiple of 256 bytes
RING = 3  # staging buffers: a plan waits for the copy of the third plan before it
JOIN = 1 << 15  # elements: 128 KiB cross the bus in the time that a second copy takes to start


class Arena:
    """Slices that plans fill, and slices that only the device uses (zeroed once).

    `planned` and `scratch` give the elements of every slice; those of `planned` lie in that order.  Behind what is used
    of the last one lies the tail, up to `tail` elements whose place (`tail_at`) goes with the plan: all that a plan
    says lies close together, so that one copy takes it, though no slice moves.  `driver` (driver.py) makes the copies.
    """

    def __init__(
        self, planned: Mapping[str, int], tail: int, scratch: Mapping[str, int], device: torch.device,
        driver: Any,
    ):  # fmt: skip
        self._device, self._index, self._driver = device, device.index or 0, driver
        self._sizes, self._last = dict(planned), list(planned)[-1]
        self._lay_out(tail)
        offsets, total = place(scratch)
        with torch.inference_mode(False):  # else calls outside it might not write to them
            self._scratch = torch.zeros(total, dtype=torch.int32, device=device)
            if self._scratch.is_cuda:  # launches of other streams will use it; this happens once
                torch.cuda.current_stream(device).synchronize()
        self._fixed = {name: self._scratch.data_ptr() + 4 * at for name, at in offsets.items()}

    def _lay_out(self, tail: int) -> None:
        offsets, total = place({**self._sizes, "": tail})
        pinned = self._device.type == "cuda"
        with torch.inference_mode(False):
            plan = torch.zeros(total, dtype=torch.int32, device=self._device)
            staging = [torch.zeros(total, dtype=torch.int32, device="cpu", pin_memory=pinned) for _ in range(RING)]
        ring = [Staging(t, plan, self._driver, self._index) for t in staging]
        # nothing has changed where memory ran out
        self.tail, self._offsets, self._plan, self._base = tail, offsets, plan, plan.data_ptr()
        self._ring, self._turn = ring, 0

    def address(self, name: str) -> int:
        """Where a slice starts on the device."""
        return self._base + 4 * self._offsets[name] if name in self._offsets else self._fixed[name]

    def view(self, name: str) -> torch.Tensor:
        """A planned slice as an int32 tensor on the device, whose values follow the plan."""
        return self._plan[self._offsets[name] :][: self._sizes[name]]

    @property
    def base(self) -> int:
        """The address that `tail_at` counts from."""
        return self._base

    def tail_at(self, used: int) -> int:
        """Where the tail starts, in elements from `base`, when so many of the last slice are used."""
        return self._offsets[self._last] + -(-used // ALIGN) * ALIGN

    def grow(self, tail: int) -> None:
        """Make room for a tail of so many elements: planned slices move, and the plan in them is lost."""
        before = self._plan
        self._lay_out(tail)
        if before.is_cuda:  # launches on this stream may still read the old ones
            before.record_stream(torch.cuda.current_stream(self._device))

    def check(self, parts: Mapping[str, np.ndarray]) -> None:
        """Does every part fit its slice?"""
        for name, array in parts.items():
            size = self._sizes[name]
            assert array.size <= size, f"{name}: {array.size} elements in a slice of {size}"

    def upload(self, parts: Mapping[str, np.ndarray], tail: Sequence[np.ndarray] = ()) -> None:
        """Fill slices, and the tail with arrays one after another, on torch's current stream.

        Waits only where the staging buffer whose turn it is still has a copy in flight.
        """
        self.check(parts)
        staging = self._ring[self._turn]
        self._driver.wait(staging.event)
        memory, used = staging.memory, []
        for name, array in parts.items():
            at, size = self._offsets[name], array.size
            if size:
                memory[at : at + size] = array.ravel()
                used.append((at, at + size))
        at = self.tail_at(parts[self._last].size)
        assert sum(map(len, tail)) <= self.tail
        for array in tail:
            end = at + len(array)
            memory[at:end] = array
            used += [(at, end)] if end > at else []
            at = end
        copies = [
            (self._base + 4 * start, staging.address + 4 * start, 4 * (end - start)) for start, end in joined(used)
        ]
        self._driver.upload(copies, self._driver.current_stream(self._index), staging.event)
        self._turn = (self._turn + 1) % RING


class Staging:
    """Host memory that copies to the device read, and the event that tells when the last one has read it."""

    def __init__(self, source: torch.Tensor, destination: torch.Tensor, driver: Any, index: int):
        self.memory, self.address = source.numpy(), source.data_ptr()
        self.event = driver.make_event(index)
        # torch knows nothing of the copies: it would hand memory that one of them still needs to somebody else
        weakref.finalize(self, _release, (source, destination), driver, self.event).atexit = False


def _release(memory: tuple[torch.Tensor, ...], driver: Any, event: Any) -> None:
    """Wait for the last copy, until which `memory` is held."""
    driver.destroy(event)


def place(sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """(where each slice starts, elements in all)."""
    offsets, at = {}, 0
    for name, size in sizes.items():
        offsets[name] = at
        at += -(-size // ALIGN) * ALIGN
    return offsets, max(at, ALIGN)


def joined(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The ranges in order, those that lie close together as one."""
    found: list[tuple[int, int]] = []
    last, until = 0, -JOIN - 1
    for start, end in sorted(ranges):
        if start - until > JOIN:
            found.append((start, end))
            last = start
        else:
            found[-1] = (last, end)
        until = end
    return found
