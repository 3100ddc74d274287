"""Small device memory that launches need: tile counters, and zeros to point an empty tensor's map at."""

from __future__ import annotations

import threading
from typing import Any

import torch

PAIRS = 1 << 12
ZERO_BYTES = 256


class Workspace:
    """One slab on a device: 256 zero bytes, then pairs of zeroed int32.

    A kernel takes its tiles from a pair of counters and leaves them zeroed, so a pair may serve any number of launches
    that never overlap.  Launches of one stream share a pair.  A launch captured in a CUDA graph gets a pair of its own,
    for good: the graph may be replayed beside anything.  When the slab is used up, a captured launch zeroes new memory
    in the graph.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._slab: torch.Tensor | None = None
        self._streams: dict[int, int] = {}
        self._used = 0
        self._lock = threading.Lock()

    def take(self, stream: int, capturing: bool) -> tuple[int, int, Any]:
        """(address of a pair, address of the zeros, what must stay alive until the launch is enqueued)."""
        if not capturing:
            address = self._streams.get(stream)
            if address is not None:
                return address, self._zeros, None
        with self._lock:
            if self._slab is None and not capturing:
                self._slab = torch.zeros(ZERO_BYTES // 4 + 2 * PAIRS, dtype=torch.int32, device=self._device)
                self._zeros = self._slab.data_ptr()
                if self._slab.is_cuda:  # other streams will use it; this happens once
                    torch.cuda.current_stream(self._device).synchronize()
            if self._slab is None or self._used == PAIRS:
                own = torch.zeros(ZERO_BYTES // 4 + 2, dtype=torch.int32, device=self._device)
                return own.data_ptr() + ZERO_BYTES, own.data_ptr(), own
            address = self._zeros + ZERO_BYTES + 8 * self._used
            self._used += 1
            if not capturing:
                self._streams[stream] = address
            return address, self._zeros, None
