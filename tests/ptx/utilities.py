"""The small kernels beside attention on torch CPU tensors, launched by the product's own runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from attncc import utilities
from attncc.runtime.utilities import Utilities

from .launch import SimulatedDriver, process_memory, translated
from .memory import GlobalMemory
from .tma import TensorMap


class UtilityDriver(SimulatedDriver):
    """`reads`, `writes`: the tensors that appends may read, or read and write.  A merge may read what its parameters
    speak of, and must write its results whole."""

    def __init__(self, seed: int = 0, lockstep: bool = True):
        self.options: dict[str, Any] = {"seed": seed, "lockstep": lockstep}
        self.folder = None
        self.reads: tuple[torch.Tensor, ...] = ()
        self.writes: tuple[torch.Tensor, ...] = ()
        self.tensors: dict[str, torch.Tensor] = {}
        self.launched: list[str] = []

    def sm_count(self, device: int) -> int:
        return 1

    def place(
        self, memory: GlobalMemory, values: dict[str, bytes | TensorMap], number: Mapping[str, int],
        function: Mapping[str, Any],
    ) -> Callable[[], None]:  # fmt: skip
        name = function["cubin"].removesuffix(".cubin")
        self.translator = translated((utilities.artifact(name).path / f"{name}.ptx").read_text())
        if name.startswith("merge"):
            unit = int(name.split("_")[-1])
            for low, high in joined([*states(number, "o", number["chunks"] * unit), *states(number, "lse", 4)]):
                memory.put("states", process_memory(low, high - low), base=low)
            sizes = {"out": number["total"] * unit, "lse_out": number["total"] // number["chunks"] * 4}
            results = [memory.empty(x, size, number[x]) for x, size in sizes.items()]
        else:
            for x in storages(self.reads):
                memory.put("rows or table", process_memory(*x), base=x[0])
            results = [memory.put("cache", process_memory(*x), True, x[0]) for x in storages(self.writes)]

        def finish() -> None:
            for x in results:
                process_memory(x.base, x.size)[:] = x.read("u1", (x.size,))

        return finish


def states(number: Mapping[str, int], name: str, size: int) -> list[tuple[int, int]]:
    """Where each state of a merge lies: from its first byte to past its last; `size`: of what a row and head has."""
    heads = number["heads"]
    rows = number["total"] // number["chunks"] // heads
    end = (rows - 1) * number[f"{name}_row"] + (heads - 1) * number[f"{name}_head"] + size
    starts = [(number[name] + s * number[f"{name}_state"]) % 2**64 for s in range(number["states"])]
    return [(start, start + end) for start in starts]


def joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges that overlap as one."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low < found[-1][1]:
            low, high = found[-1][0], max(high, found.pop()[1])
        found.append((low, high))
    return found


def storages(tensors: tuple[torch.Tensor, ...]) -> set[tuple[int, int]]:
    """(address, bytes) of all memory that belongs to them."""
    found = ((s.data_ptr(), s.nbytes()) for s in (t.untyped_storage() for t in tensors))
    return {x for x in found if x[1]}


def simulated(reads: tuple[torch.Tensor, ...] = (), writes: tuple[torch.Tensor, ...] = ()) -> tuple[Any, list[str]]:
    """(kernels, names of those that were launched)."""
    driver = UtilityDriver()
    driver.reads, driver.writes = reads, writes
    return Utilities(utilities.artifact, driver), driver.launched
