"""Global and shared memory with the state of every byte.

Addresses come as int64 arrays, one a lane; values go as unsigned arrays of 1, 2, 4 or 8 bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

import numpy as np

from .program import Fault, Instr
from .races import Races

UNSIGNED = {1: np.dtype("u1"), 2: np.dtype("u2"), 4: np.dtype("u4"), 8: np.dtype("u8")}
SHIFT = {1: 0, 2: 1, 4: 2, 8: 3}


def _every_byte(value: int, width: int):
    return UNSIGNED[width].type(int.from_bytes(bytes([value] * width), "little"))


def _aligned(ins: Instr, addresses: np.ndarray, width: int) -> None:
    if width > 1 and (addresses & (width - 1)).any():
        bad = int(addresses[(addresses & (width - 1)) != 0][0])
        raise ins.fault(f"address {bad:#x} is not a multiple of {width}")


# ------------------------------------------------------------------------------------- global
@dataclass(eq=False)
class Segment:
    """One allocation.  `written` None: all of it has a value.  The bytes begin `base % 8` into `data`, so that aligned
    addresses are aligned in the views of wider words."""

    name: str
    base: int
    size: int
    data: np.ndarray
    written: np.ndarray | None
    writable: bool

    def __post_init__(self):
        self.origin = self.base - self.base % 8
        self.views = {w: self.data[: self.data.size // w * w].view(UNSIGNED[w]) for w in UNSIGNED}

    @property
    def bytes(self) -> np.ndarray:
        lead = self.base - self.origin
        return self.data[lead : lead + self.size]

    def read(self, dtype, shape) -> np.ndarray:
        """All of it, copied.  Raises Fault where an element was never written."""
        if self.written is not None and not self.written.all():
            missing = np.flatnonzero(self.written == 0)
            item = np.dtype(dtype).itemsize
            first = np.unravel_index(int(missing[0]) // item, shape)
            raise Fault(
                f"{self.name}: {len(missing) // item} of {self.size // item} elements were never written, "
                f"the first at {tuple(int(i) for i in first)}"
            )
        return self.bytes.view(dtype).reshape(shape).copy()


class GlobalMemory:
    """Allocations far apart, so that an address just past one is in none.  `who`: the CTA whose plain accesses these
    are, None where order needs no check."""

    GAP = 1 << 20

    def __init__(self):
        self.races = Races(1)
        self.who: int | None = None
        self.segments: list[Segment] = []
        self.bases: list[int] = []
        self.top = 0x7000_0000_0000

    def room(self, size: int, like: int = 0) -> int:
        """A fresh address for `size` bytes, aligned as `like` is."""
        base, self.top = self.top + like % 256, self.top + (size + self.GAP + 4095) // 4096 * 4096
        return base

    def _add(self, name, size, data, written, writable, base) -> Segment:
        base = self.room(size) if base is None else base
        segment = Segment(name, base, size, data, written, writable)
        k = bisect_right(self.bases, base)
        before, after = self.segments[k - 1 : k] if k else [], self.segments[k : k + 1]
        if any(s.base + s.size > base for s in before) or any(base + size > s.base for s in after):
            raise Fault(f"{name!r} overlaps {(before + after)[0].name!r}")
        self.segments.insert(k, segment)
        self.bases.insert(k, base)
        return segment

    def put(self, name: str, array: np.ndarray, writable: bool = False, base: int | None = None) -> Segment:
        """Bytes that all have a value, at an address of ours or at `base`: a copy, unless read-only and aligned."""
        flat = np.ascontiguousarray(array).reshape(-1).view("u1")
        lead = 0 if base is None else base % 8
        if not writable and not lead:
            return self._add(name, flat.size, flat, None, False, base)
        data = np.zeros(lead + flat.size, "u1")
        data[lead:] = flat
        return self._add(name, flat.size, data, None, writable, base)

    def empty(self, name: str, size: int, base: int | None = None) -> Segment:
        """`size` bytes that must be written before they are read."""
        lead = 0 if base is None else base % 8
        return self._add(name, size, np.full(lead + size, 0xFF, "u1"), np.zeros(size, "u1"), True, base)

    def keep(self, x: Segment) -> Segment:
        """What another launch has written and this one may read; what that left out may not be read."""
        return self._add(x.name, x.size, x.data, x.written, False, x.base)

    def find(self, ins: Instr, low: int, high: int) -> Segment | None:
        """The allocation that holds [low, high), None if `low` alone is in one."""
        k = bisect_right(self.bases, low) - 1
        segment = self.segments[k] if k >= 0 else None
        if segment is None or low >= segment.base + segment.size:
            near = "" if segment is None else f"; {segment.name!r} ends {low - segment.base - segment.size} bytes below"
            raise ins.fault(f"global address {low:#x} is in no allocation{near}")
        return segment if high <= segment.base + segment.size else None

    def _parts(self, ins: Instr, addresses: np.ndarray, width: int):
        """(segment, which lanes or None for all) for every allocation the addresses touch."""
        low, high = int(addresses.min()), int(addresses.max()) + width
        if (whole := self.find(ins, low, high)) is not None:
            yield whole, None
            return
        owner = np.searchsorted(self.bases, addresses, side="right")
        for k in np.unique(owner):
            mine = np.flatnonzero(owner == k)
            low, high = int(addresses[mine].min()), int(addresses[mine].max()) + width
            segment = self.find(ins, low, high)
            if segment is None:
                raise ins.fault(f"global address {high - width:#x} is past the end of {self.segments[k - 1].name!r}")
            yield segment, mine

    def load(self, ins: Instr, addresses: np.ndarray, width: int) -> np.ndarray:
        _aligned(ins, addresses, width)
        out = np.empty(addresses.size, UNSIGNED[width])
        for segment, lanes in self._parts(ins, addresses, width):
            at = addresses if lanes is None else addresses[lanes]
            index = (at - segment.origin) >> SHIFT[width]
            if segment.written is not None and not segment.written[at - segment.base].all():
                raise ins.fault(f"global memory of {segment.name!r} is read before it is written")
            if segment.written is not None and self.who is not None:
                self.races.loaded(ins, segment, at, self.who)
            out[slice(None) if lanes is None else lanes] = segment.views[width][index]
        return out

    def store(self, ins: Instr, addresses: np.ndarray, width: int, values: np.ndarray) -> None:
        _aligned(ins, addresses, width)
        for segment, lanes in self._parts(ins, addresses, width):
            at, value = (addresses, values) if lanes is None else (addresses[lanes], values[lanes])
            if not segment.writable:
                raise ins.fault(f"{segment.name!r} is read-only")
            segment.views[width][(at - segment.origin) >> SHIFT[width]] = value
            if segment.written is not None:
                if self.who is not None:
                    self.races.stored(ins, segment, at, self.who)
                for k in range(width):
                    segment.written[at - segment.base + k] = 1

    def refuse_written(self, ins: Instr, addresses: np.ndarray, width: int) -> None:
        """Of a load that may see what was there before the launch."""
        for segment, lanes in self._parts(ins, addresses, width):
            self.races.constant(ins, segment, addresses if lanes is None else addresses[lanes])


# ------------------------------------------------------------------------------------- shared
WRITTEN, GENERIC, LANDING, BARRIER = 1, 2, 4, 8
MAX_GROUPS = 8  # warpgroups of a CTA


@dataclass(eq=False)
class AsyncRead:
    """Bytes [low, high) that a product or a store still reads."""

    low: int
    high: int
    ins: Instr
    left: int = 1  # warps that have not waited for it yet


@dataclass(eq=False)
class SharedMemory:
    """One CTA's.  A byte is written; by the generic proxy; landing (a copy to it is under way); or part of an mbarrier.

    What warpgroup `who` writes generically may be read by the async proxy of a warpgroup once either of the two has
    executed fence.proxy.async: `times` and `writers` are kept by the word, `fences` by the warpgroup."""

    base: int
    size: int
    reads: list[AsyncRead] = field(default_factory=list)
    who: int = 0
    time: int = 0

    def __post_init__(self):
        padded = (self.base + self.size + 15) // 16 * 16
        self.limit = self.base + self.size
        self.data = np.full(padded, 0xFF, "u1")  # NaN as bf16, f16 and f32
        self.state = np.zeros(padded, "u1")
        self.views = {w: self.data.view(UNSIGNED[w]) for w in UNSIGNED}
        self.states = {w: self.state.view(UNSIGNED[w]) for w in UNSIGNED}
        self.times, self.writers = np.zeros(padded // 4, "i4"), np.zeros(padded // 4, "u1")
        self.fences = np.zeros(MAX_GROUPS, "i4")

    def _index(self, ins: Instr, addresses: np.ndarray, width: int) -> np.ndarray:
        _aligned(ins, addresses, width)
        low, high = int(addresses.min()), int(addresses.max()) + width
        if low < self.base or high > self.limit:
            bad = low if low < self.base else high - width
            raise ins.fault(f"shared address {bad} is outside [{self.base}, {self.limit})")
        return addresses >> SHIFT[width]

    def load(self, ins: Instr, addresses: np.ndarray, width: int, matrix: bool = False) -> np.ndarray:
        """`matrix`: an operand of products; rows of it that nobody uses may never have been written, and are NaN."""
        index = self._index(ins, addresses, width)
        need = _every_byte(WRITTEN, width)
        if matrix:
            bad = (self.states[width][index] & _every_byte(LANDING | BARRIER, width)) != 0
        else:
            bad = (self.states[width][index] & need) != need
        if bad.any():
            self._refuse_read(ins, int(addresses[np.flatnonzero(bad)[0]]))
        return self.views[width][index]

    def _refuse_read(self, ins: Instr, address: int):
        state = int(self.state[address])
        why = {LANDING: "while a copy to it is under way", BARRIER: "but holds an mbarrier"}
        raise ins.fault(f"shared address {address} is read {why.get(state, 'before it is written')}")

    def store(self, ins: Instr, addresses: np.ndarray, width: int, values: np.ndarray) -> None:
        index = self._index(ins, addresses, width)
        if (self.states[width][index] & _every_byte(LANDING | BARRIER, width)).any():
            raise ins.fault("shared memory is written where a copy is landing or an mbarrier lives")
        every = _every_byte(WRITTEN, width)
        news = (self.views[width][index] != values) | (self.states[width][index] & every != every)
        if not news.all():  # to write what is there already changes nothing for anybody
            index, addresses, values = index[news], addresses[news], values[news]
        for r in self.reads:
            if ((addresses < r.high) & (addresses + width > r.low)).any():
                raise ins.fault(f"shared memory is written while it is still read by\n     {r.ins}")
        self.views[width][index] = values
        self.states[width][index] = _every_byte(WRITTEN | GENERIC, width)
        self.time += 1
        for word in range(0, width, 4):
            self.times[(addresses + word) >> 2] = self.time
            self.writers[(addresses + word) >> 2] = self.who

    def fence(self, group: int) -> None:
        """fence.proxy.async by a warpgroup, for what was written so far."""
        self.fences[group] = self.time

    def unfenced(self, group: int, addresses: np.ndarray) -> bool:
        """Is there a byte that the async proxy of this warpgroup does not see yet?"""
        words = addresses[(self.state[addresses] & GENERIC) != 0] >> 2
        seen = np.maximum(self.fences[group], self.fences[self.writers[words]])
        return bool((self.times[words] > seen).any())

    def begin_copy(self, ins: Instr, low: int, size: int) -> None:
        """An asynchronous copy to [low, low + size) is under way: until it lands, the bytes are NaN."""
        high = low + size
        if low < self.base or high > self.limit:
            raise ins.fault(f"the copy's target [{low}, {high}) is outside shared memory [{self.base}, {self.limit})")
        if (self.state[low:high] & (LANDING | BARRIER)).any():
            raise ins.fault("the copy's target is the target of a copy under way, or holds an mbarrier")
        for r in self.reads:
            if low < r.high and high > r.low:
                raise ins.fault(f"the copy's target is still read by\n     {r.ins}")
        self.data[low:high] = 0xFF
        self.state[low:high] = LANDING

    def begin_copies(self, ins: Instr, addresses: np.ndarray, width: int) -> None:
        """The same for many targets of 4 or 8 bytes."""
        index = self._index(ins, addresses, width)
        if (self.states[width][index] & _every_byte(LANDING | BARRIER, width)).any():
            raise ins.fault("the copy's target is the target of a copy under way, or holds an mbarrier")
        for r in self.reads:
            if ((addresses < r.high) & (addresses + width > r.low)).any():
                raise ins.fault(f"the copy's target is still read by\n     {r.ins}")
        self.views[width][index] = _every_byte(0xFF, width)
        self.states[width][index] = _every_byte(LANDING, width)

    def land(self, low: int, raw: np.ndarray) -> None:
        self.data[low : low + raw.size] = raw
        self.state[low : low + raw.size] = WRITTEN

    def land_generic(self, ins: Instr, addresses: np.ndarray, width: int, values: np.ndarray, group: int) -> None:
        """Bytes that the generic proxy of a warpgroup has copied."""
        self.states[width][addresses >> SHIFT[width]] = 0
        self.who = group
        self.store(ins, addresses, width, values)

    def begin_read(self, ins: Instr, low: int, high: int, readers: int = 1) -> AsyncRead:
        read = AsyncRead(low, high, ins, readers)
        self.reads.append(read)
        return read

    def end_read(self, read: AsyncRead) -> None:
        """One reader has waited for it."""
        read.left -= 1
        if read.left == 0:
            self.reads.remove(read)
