"""Launching the small kernels that stand beside attention (codegen/utilities.py names them)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from attncc.runtime import launch
from attncc.runtime.artifact import ARCHITECTURES, Artifact
from attncc.runtime.driver import driver as cuda_driver


class Utilities:
    """The small kernels by name, loaded once a device.  Threads may share them."""

    def __init__(self, find: Callable[[str], Artifact | None], driver: Any = None):
        """`find(name)`: a kernel's artifact, None where there is none.  `driver`: what launches, by default CUDA's."""
        self._find, self._driver = find, driver
        self._ready: dict[tuple[str, torch.device], Utility | None] = {}
        self._able: dict[torch.device, bool] = {}
        self._lock = threading.Lock()

    def able(self, where: torch.device) -> bool:
        """Can a device run such kernels?"""
        if where not in self._able:
            if self._driver is not None:
                self._able[where] = where.type == self._driver.device_type
            else:
                hopper = ARCHITECTURES.values()
                self._able[where] = where.type == "cuda" and torch.cuda.get_device_capability(where) in hopper
        return self._able[where]

    def get(self, name: str, where: torch.device) -> Utility | None:
        """A kernel on a device; None where the device can't run it, or where there is none."""
        key = (name, where)
        if key not in self._ready:
            with self._lock:
                if key not in self._ready:
                    self._ready[key] = self._load(name, where)
        return self._ready[key]

    def _load(self, name: str, where: torch.device) -> Utility | None:
        artifact = self._find(name) if self.able(where) else None
        return None if artifact is None else Utility(launch.Loaded(self._driver or cuda_driver(), artifact, where))


class Utility:
    """A small kernel on one device."""

    def __init__(self, loaded: launch.Loaded):
        entry = loaded.entry
        self.threads: int = entry["block"][0]
        self.ahead: int = entry["ahead"]
        self._driver, self._index = loaded.driver, loaded.index
        self._binding = launch.Binding(entry, loaded.function, 0)
        self._cells = {p["name"]: self._binding.cell(p["name"]) for p in entry["params"]}

    def launch(self, grid: int, values: Mapping[str, int | float]) -> None:
        """Launch `grid` blocks on torch's current stream with all of the kernel's parameters."""
        if values.keys() != self._cells.keys():
            raise ValueError(f"kernel parameters: expected {sorted(self._cells)}, found {sorted(values)}")
        binding, driver = self._binding, self._driver
        with binding.lock:
            for name, value in values.items():
                self._cells[name].value = value
            driver.launch(binding.function, grid, driver.current_stream(self._index), binding.arguments)
