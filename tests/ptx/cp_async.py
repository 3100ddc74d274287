"""cp.async: 4 to 16 bytes a lane, global to shared, by the generic proxy.

Copies poison their targets when they are issued.  They land when a lane waits for its group, or, with an arrival on an
mbarrier after them, when nothing else can run.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .effects import pick, shared_of
from .memory import UNSIGNED
from .program import Imm, Instr, PtxError, Reg
from .sync import Mbarrier, mbarrier_at
from .translate import Translator, effect


@dataclass(eq=False)
class Copies:
    """What one instruction copies for lanes of one warp: `values` [lane, size], each to its target."""

    ins: Instr
    warp: object
    lanes: np.ndarray  # of the warp
    targets: np.ndarray
    values: np.ndarray
    group: np.ndarray  # which of the lane's groups

    def land(self, chosen: np.ndarray) -> None:
        """Those of the lanes."""
        shared, width = self.warp.group.cta.shared, self.values.dtype.itemsize  # type: ignore[attr-defined]
        for k in range(self.values.shape[1]):
            at, values = self.targets[chosen] + k * width, self.values[chosen, k]
            shared.land_generic(self.ins, at, width, values, self.warp.group.number)  # type: ignore[attr-defined]
        for name in ("lanes", "targets", "values", "group"):
            setattr(self, name, getattr(self, name)[~chosen])


def land(warp, lanes: np.ndarray, before: np.ndarray) -> None:
    """The copies of some lanes of a warp, those of groups below `before` (one number a lane)."""
    for copies in warp.copies:
        chosen = np.isin(copies.lanes, lanes) & (copies.group < before[copies.lanes])
        if chosen.any():
            copies.land(chosen)
    warp.copies[:] = [x for x in warp.copies if x.lanes.size]


def by_warp(c, m):
    """(warp, its active lanes, where these are among the context's) of every warp that has some."""
    for k, warp in enumerate(c.warps):
        here = np.arange(32) if m is None else np.flatnonzero(m[32 * k : 32 * k + 32])
        if here.size:
            yield warp, here, 32 * k + here


def fetch(ins: Instr, memory, source: np.ndarray, take: np.ndarray, size: int) -> np.ndarray:
    """[lane, size] bytes: `take` of a lane's are read, the others are zero."""
    width = next(w for w in (8, 4, 2, 1) if not ((source | take | size) % w).any())
    values = np.zeros((source.size, size // width), UNSIGNED[width])
    for k in range(size // width):
        some = np.flatnonzero(take > k * width)
        if some.size:
            values[some, k] = memory.load(ins, source[some] + k * width, width)
    return values.view("u1")


@effect("cp.async.ca", "cp.async.cg")
def copy_async(ins: Instr, t: Translator):
    """cp.async.cg.shared.global [target], [source], size[, source size, or predicate to ignore the source]: what the
    source doesn't fill is zero."""
    target, source, size = t.address(ins.args[0]), t.address(ins.args[1]), int(ins.args[2].text)
    extra = ins.args[3] if len(ins.args) > 3 + ("L2::cache_hint" in ins.words) else None
    if size not in (4, 8, 16) or (ins.words[2] == "cg" and size != 16):
        raise PtxError(f"copy not understood: {ins}")
    ignores = isinstance(extra, Reg) and extra.cls == "P"
    amount = t.reader(extra, "pred" if ignores else "u32") if extra is not None else None

    def run(c, m):
        to, at = target(c), source(c)
        given = np.full(to.size, size) if amount is None else amount(c)
        take = np.where(given, 0, size) if ignores else given.astype("i8")
        c.machine.memory.who = c.cta.index
        for warp, lanes, row in by_warp(c, m):
            if (to[row] % size).any() or (at[row][take[row] > 0] % size).any():
                raise ins.fault(f"a copy's addresses are not aligned to {size} bytes")
            if (take[row] > size).any():
                raise ins.fault(f"a copy of {size} bytes takes more from its source")
            width = min(size, 8)
            values = fetch(ins, c.machine.memory, at[row], take[row], size).view(UNSIGNED[width])
            for k in range(0, size, width):
                c.cta.shared.begin_copies(ins, to[row] + k, width)
            warp.copies.append(Copies(ins, warp, lanes, to[row], values, warp.groups[lanes]))

    return run


@effect("cp.async.commit_group")
def commit(ins: Instr, t: Translator):
    def run(c, m):
        for warp, lanes, _ in by_warp(c, m):
            warp.groups[lanes] += 1

    return run


@effect("cp.async.wait_group", "cp.async.wait_all")
def wait(ins: Instr, t: Translator):
    """All but the newest N groups of each lane, and what is in no group yet, have landed; wait_all: everything has."""
    if ins.args and not isinstance(ins.args[0], Imm):
        raise PtxError(f"wait not understood: {ins}")
    keep = int(ins.args[0].text) if ins.args else -1

    def run(c, m):
        for warp, lanes, _ in by_warp(c, m):
            land(warp, lanes, warp.groups - keep)

    return run


@dataclass(eq=False)
class Arrival:
    """Of lanes at mbarriers, once the copies that they had issued have landed."""

    cta: object
    ins: Instr
    warp: object
    lanes: np.ndarray
    copies: list[Copies]
    barriers: list[Mbarrier]

    def land(self, machine) -> None:
        for copies in self.copies:
            chosen = np.isin(copies.lanes, self.lanes)
            if chosen.any():
                copies.land(chosen)
        self.warp.copies[:] = [x for x in self.warp.copies if x.lanes.size]  # type: ignore[attr-defined]
        for b in self.barriers:
            b.pending -= 1
            if b.pending < 0:
                raise self.ins.fault(f"the mbarrier gets more than its {b.count} arrivals")
            b.settle(machine)
        machine.version += 1


@effect("cp.async.mbarrier.arrive")
def arrive_after_copies(ins: Instr, t: Translator):
    """[address]: without noinc the arrival is one more than the phase expected."""
    address, noinc = t.address(ins.args[0]), "noinc" in ins.words

    def run(c, m):
        shared_of(c)
        for warp, lanes, row in by_warp(c, m):
            barriers = [mbarrier_at(ins, c, a) for a in pick(address(c), row).tolist()]
            for b in barriers:
                b.pending += not noinc
            c.machine.landings.append(Arrival(c.cta, ins, warp, lanes, list(warp.copies), barriers))

    return run
