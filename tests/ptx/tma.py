"""Bulk copies: tensors through tensor maps, and plain ranges.

A load poisons its target when it is issued and lands when nothing else can run; a store takes its bytes when it is
issued and keeps its source under watch until its group is waited for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from .effects import active, memory_of
from .memory import LANDING, SHIFT, UNSIGNED, WRITTEN, Segment
from .program import Fault, Imm, Instr, PtxError
from .sync import mbarrier_at
from .translate import Translator, effect

SPAN = {0: 0, 1: 32, 2: 64, 3: 128}  # CUtensorMapSwizzle -> bytes a row of its pattern


@dataclass(frozen=True)
class TensorMap:
    """A tiled tensor map: `dims` in elements and `box` innermost first, `strides` in bytes for dims[1:]; `offset` is
    where the tensor starts in its allocation.  Raises Fault where cuTensorMapEncodeTiled would refuse."""

    segment: Segment
    itemsize: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 3
    offset: int = 0
    grid: tuple = field(init=False, repr=False, compare=False)

    def __post_init__(self):
        name, inner = self.segment.name, self.box[0] * self.itemsize
        if not 1 <= len(self.dims) <= 5 or len(self.strides) != len(self.dims) - 1 or len(self.box) != len(self.dims):
            raise Fault(f"tensor map of {name!r}: ranks disagree")
        if self.offset % 16 or any(s % 16 or s >= 1 << 40 or s < 0 for s in self.strides):
            raise Fault(f"tensor map of {name!r}: address or strides {self.strides} are no multiples of 16")
        if not all(1 <= b <= 256 for b in self.box) or not all(1 <= d <= 1 << 32 for d in self.dims):
            raise Fault(f"tensor map of {name!r}: box {self.box} or dims {self.dims} out of range")
        if inner % 16 or (self.swizzle and inner > SPAN[self.swizzle]):
            raise Fault(f"tensor map of {name!r}: {inner} bytes a box row do not fit swizzle {self.swizzle}")
        if self.swizzle and inner != SPAN[self.swizzle]:
            raise PtxError(f"tensor map of {name!r}: box rows narrower than the swizzle are not modelled")
        last = self.offset + (self.dims[0] - 1) * self.itemsize
        last += sum((d - 1) * s for d, s in zip(self.dims[1:], self.strides, strict=True))
        if last + self.itemsize > self.segment.size:
            raise Fault(f"tensor map of {name!r} reaches past the end of the tensor")
        rows = int(np.prod(self.box[1:]))
        outer = np.indices(self.box[:0:-1]).reshape(len(self.box) - 1, rows)[::-1]  # the first outer dimension fastest
        object.__setattr__(self, "grid", (np.arange(self.box[0]), outer))

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.box)) * self.itemsize

    def elements(self, coords: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """(inside [rows, box[0]], element numbers of what is inside) for a box at `coords`."""
        columns, outer = self.grid[0] + coords[0], self.grid[1] + np.array(coords[1:], "i8")[:, None]
        limit = np.array(self.dims[1:], "i8")[:, None]
        rows_in = ((outer >= 0) & (outer < limit)).all(0)
        inside = rows_in[:, None] & ((columns >= 0) & (columns < self.dims[0]))
        at = (np.array(self.strides, "i8")[:, None] * outer).sum(0)[:, None] + columns * self.itemsize + self.offset
        return inside, at[inside] >> SHIFT[self.itemsize]


@lru_cache(maxsize=256)
def chunks(start: int, count: int, swizzle: int) -> np.ndarray:
    """Where 16-byte chunk k of a box at 16-byte chunk `start` of shared memory lies, relative to the start: the
    swizzle exchanges address bits 4.. with bits 7.. by exclusive or."""
    k = np.arange(start, start + count)
    return (k ^ (k >> 3 & (1 << swizzle) - 1)) - start


def _check_tile(ins: Instr, tensor: TensorMap, address: int) -> None:
    if address % (128 if tensor.swizzle or len(tensor.box) > 1 else 16):
        raise ins.fault(f"shared address {address} of a tensor copy is not aligned to 128 bytes")


@dataclass
class Landing:
    """A load under way."""

    cta: object
    address: int
    raw: np.ndarray
    barrier: object
    ins: Instr

    def land(self, machine) -> None:
        self.cta.shared.land(self.address, self.raw)  # type: ignore[attr-defined]
        self.barrier.tx -= self.raw.size  # type: ignore[attr-defined]
        self.barrier.settle(machine)  # type: ignore[attr-defined]
        machine.version += 1


def tensor_load(c, ins: Instr, tensor: TensorMap, target: int, coords: list[int], barrier: int) -> None:
    _check_tile(ins, tensor, target)
    c.cta.shared.begin_copy(ins, target, tensor.nbytes)
    inside, at = tensor.elements(coords)
    data = np.zeros(inside.shape, UNSIGNED[tensor.itemsize])
    segment = tensor.segment
    if segment.written is not None and not segment.written[at << SHIFT[tensor.itemsize]].all():
        raise ins.fault(f"global memory of {segment.name!r} is read before it is written")
    if segment.written is not None:
        c.machine.memory.races.copied(ins, segment, segment.base + (at << SHIFT[tensor.itemsize]), c.cta.index)
    data[inside] = segment.views[tensor.itemsize][at]
    tiles = data.reshape(-1).view("u1").reshape(-1, 16)
    raw = np.empty_like(tiles)
    raw[chunks(target // 16, len(tiles), tensor.swizzle)] = tiles
    c.machine.landings.append(Landing(c.cta, target, raw.reshape(-1), mbarrier_at(ins, c, barrier), ins))


def tensor_store(c, ins: Instr, tensor: TensorMap, coords: list[int], source: int, lane: int) -> None:
    _check_tile(ins, tensor, source)
    segment, shared, n = tensor.segment, c.cta.shared, tensor.nbytes
    if not segment.writable:
        raise ins.fault(f"{segment.name!r} is read-only")
    order = chunks(source // 16, n // 16, tensor.swizzle)
    inside, at = tensor.elements(coords)
    data = shared.data[source : source + n].reshape(-1, 16)[order].reshape(-1).view(UNSIGNED[tensor.itemsize])
    where = np.arange(source, source + n).reshape(-1, 16)[order].reshape(*inside.shape, tensor.itemsize)
    _check_source(ins, c, where[inside].reshape(-1))
    segment.views[tensor.itemsize][at] = data.reshape(inside.shape)[inside]
    if segment.written is not None:
        segment.written.view(UNSIGNED[tensor.itemsize])[at] = ~UNSIGNED[tensor.itemsize].type(0)
    begin_bulk_read(c, ins, source, n, lane)


def _check_source(ins: Instr, c, addresses: np.ndarray) -> None:
    state = c.cta.shared.state[addresses]
    if (state & LANDING).any() or not (state & WRITTEN).all():
        raise ins.fault("the store reads shared memory that was never written, or where a copy is landing")
    if c.cta.shared.unfenced(c.group.number, addresses):
        raise ins.fault("the store reads what was written with no fence.proxy.async after it")


def begin_bulk_read(c, ins: Instr, source: int, size: int, lane: int) -> None:
    read = c.cta.shared.begin_read(ins, source, source + size)
    c.warps[lane // 32].bulk_open.setdefault(lane % 32, []).append(read)


def _lanes(c, m) -> list[int]:
    lanes = active(c, m)
    return list(range(c.n)) if lanes is None else lanes.tolist()


@effect("cp.async.bulk.tensor")
def tensor_copy(ins: Instr, t: Translator):
    """cp.async.bulk.tensor.Nd.shared::cta.global… [target], [map, {coords}], [mbarrier], and back:
    cp.async.bulk.tensor.Nd.global.shared::cta… [map, {coords}], [source]"""
    loads = ins.words[5] != "global"
    if any(w.startswith(("im2col", "multicast", "cta_group")) for w in ins.words):
        raise PtxError(f"tensor copy not understood: {ins}")
    map_operand = ins.args[1] if loads else ins.args[0]
    shared, the_map = t.address(ins.args[0] if loads else ins.args[1]), t.address(map_operand)
    coords = [t.reader(a, "s32") for a in map_operand.coords.items]
    barrier = t.address(ins.args[2]) if loads else None

    def run(c, m):
        lanes = _lanes(c, m)
        at, where = shared(c), the_map(c)
        corners = np.stack([read(c) for read in coords], 1)
        stored = set()
        for k in lanes:
            tensor, corner = c.machine.maps.get(int(where[k])), corners[k].tolist()
            if tensor is None:
                raise ins.fault(f"no tensor map at {int(where[k]):#x}")
            if len(corner) != len(tensor.box):
                raise ins.fault(f"{len(corner)} coordinates for a map of rank {len(tensor.box)}")
            if barrier is not None:
                tensor_load(c, ins, tensor, int(at[k]), corner, int(barrier(c)[k]))
            elif (what := (int(at[k]), int(where[k]), *corner)) not in stored:  # one UTMASTG a warp, not a lane
                stored.add(what)
                tensor_store(c, ins, tensor, corner, int(at[k]), k)

    return run


@effect("cp.async.bulk.shared::cta", "cp.async.bulk.shared::cluster")
def range_load(ins: Instr, t: Translator):
    """cp.async.bulk.shared::cta.global.mbarrier… [target], [source], size, [mbarrier]"""
    if "global" not in ins.words:
        raise PtxError(f"bulk copy not understood: {ins}")
    target, source, barrier = t.address(ins.args[0]), t.address(ins.args[1]), t.address(ins.args[3])
    amount = t.reader(ins.args[2], "u32")

    def run(c, m):
        to, at, size, bar = target(c), source(c), amount(c), barrier(c)
        for k in _lanes(c, m):
            if (int(to[k]) | int(at[k]) | int(size[k])) % 16:
                raise ins.fault("a bulk copy's addresses and size must be multiples of 16")
            c.cta.shared.begin_copy(ins, int(to[k]), int(size[k]))
            memory, _ = memory_of(c, "global", at)
            words = memory.load(ins, np.arange(int(at[k]), int(at[k]) + int(size[k]), 8), 8)
            b = mbarrier_at(ins, c, int(bar[k]))
            c.machine.landings.append(Landing(c.cta, int(to[k]), words.view("u1"), b, ins))

    return run


@effect("cp.async.bulk.global")
def range_store(ins: Instr, t: Translator):
    """cp.async.bulk.global.shared::cta.bulk_group [target], [source], size"""
    target, source, amount = t.address(ins.args[0]), t.address(ins.args[1]), t.reader(ins.args[2], "u32")

    def run(c, m):
        to, at, size = target(c), source(c), amount(c)
        for k in _lanes(c, m):
            n, low = int(size[k]), int(at[k])
            if (int(to[k]) | low | n) % 16:
                raise ins.fault("a bulk copy's addresses and size must be multiples of 16")
            _check_source(ins, c, np.arange(low, low + n))
            words = c.cta.shared.data[low : low + n].view("u8")
            memory, _ = memory_of(c, "global", to)
            memory.store(ins, np.arange(int(to[k]), int(to[k]) + n, 8), 8, words)
            begin_bulk_read(c, ins, low, n, k)

    return run


@effect("cp.async.bulk.commit_group")
def commit(ins: Instr, t: Translator):
    def run(c, m):
        for k in _lanes(c, m):
            warp = c.warps[k // 32]
            warp.bulk.setdefault(k % 32, []).append(warp.bulk_open.pop(k % 32, []))

    return run


@effect("cp.async.bulk.wait_group")
def wait(ins: Instr, t: Translator):
    """All but the newest N groups of each lane are done."""
    if not isinstance(ins.args[0], Imm):
        raise PtxError(f"wait not understood: {ins}")
    keep = int(ins.args[0].text)

    def run(c, m):
        for k in _lanes(c, m):
            groups = c.warps[k // 32].bulk.get(k % 32, [])
            while len(groups) > keep:
                for read in groups.pop(0):
                    c.cta.shared.end_read(read)

    return run
