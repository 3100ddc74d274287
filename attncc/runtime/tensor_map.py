"""Tensor maps: how TMA sees a [B, S, H, D] tensor of any strides.

A map's dimensions are (d, s, h, b), innermost first.  The strides must be multiples of 16 bytes below 2^40 and the
address a multiple of 16.  Encoding takes tens of microseconds, so maps are cached by everything but the address, and
a cached map is pointed at another tensor by rewriting its first 8 bytes: nothing else in it depends on the address
(the work-around of `driver.encode` depends on the span alone).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

ITEMSIZE = {"bf16": 2, "f16": 2}
ALIGNMENT = 16
STRIDE_LIMIT = 1 << 40
MAX_CACHED = 4096


@dataclass(frozen=True)
class TensorMap:
    """Everything about a tensor map but its address.  `strides` in bytes, of every dimension but the innermost."""

    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int

    @property
    def span(self) -> int:
        """Bytes from the first element to past the last one."""
        item = ITEMSIZE[self.dtype]
        return item + sum((n - 1) * s for n, s in zip(self.dims, (item, *self.strides), strict=True))


def tensor_map(shape: Sequence[int], stride: Sequence[int], dtype: str, box: Sequence[int], swizzle: int):
    """The map of a [B, S, H, D] tensor (strides in elements, the last one 1), or None where TMA can't see it so.

    A dimension of one element may have any stride in torch: it gets one that TMA accepts.
    """
    item = ITEMSIZE[dtype]
    (b, s, h, d), (sb, ss, sh, _) = shape, stride
    harmless = -(-d * item // ALIGNMENT) * ALIGNMENT
    strides = tuple(harmless if n == 1 else x * item for n, x in ((s, ss), (h, sh), (b, sb)))
    if any(x % ALIGNMENT or x >= STRIDE_LIMIT for x in strides):
        return None
    return TensorMap(dtype, (d, s, h, b), strides, tuple(box), swizzle)


def zero_map(dtype: str, box: Sequence[int], swizzle: int) -> TensorMap:
    """The map of a tensor with no rows: eight elements, which must be zero (TMA knows no extent of 0)."""
    return TensorMap(dtype, (8, 1, 1, 1), (ALIGNMENT,) * 3, tuple(box), swizzle)


class MapCache:
    """Encoded maps by `TensorMap`.  `encode` is the driver's."""

    def __init__(self, encode: Any):
        self._encode = encode
        self._maps: dict[TensorMap, bytes] = {}
        self._lock = threading.Lock()

    def get(self, wanted: TensorMap, address: int) -> bytes:
        """128 bytes; the first 8 hold some address that was valid once, for the caller to overwrite."""
        found = self._maps.get(wanted)
        if found is None:
            found = self._encode(wanted, address)
            with self._lock:
                while len(self._maps) >= MAX_CACHED:
                    del self._maps[next(iter(self._maps))]
                self._maps[wanted] = found
        return found
