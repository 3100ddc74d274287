"""Barriers: named ones of a CTA, and mbarriers in shared memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .effects import active, pick
from .memory import BARRIER, WRITTEN
from .program import Instr, PtxError, Sink
from .translate import APART, BLOCKED, Translator, effect


# ------------------------------------------------------------------------------------- named barriers
@dataclass
class NamedBarrier:
    expected: int = 0
    arrived: int = 0
    generation: int = 0


def _arrive(ins: Instr, c, number: int, expected: int, threads: int) -> NamedBarrier:
    barrier = c.cta.barriers.setdefault(number, NamedBarrier())
    if barrier.arrived and barrier.expected != expected:
        raise ins.fault(f"barrier {number} expects {barrier.expected} threads, this instruction says {expected}")
    barrier.expected = expected
    barrier.arrived += threads
    if barrier.arrived > expected:
        raise ins.fault(f"barrier {number}: {barrier.arrived} threads arrive where {expected} are expected")
    if barrier.arrived == expected:
        barrier.arrived = 0
        barrier.generation += 1
        c.machine.version += 1
    return barrier


@effect("bar.sync", "barrier.sync", "barrier.cta.sync", alone=True)
def barrier_sync(ins: Instr, t: Translator):
    """bar.sync is barrier.cta.sync.aligned: the lanes of a warp arrive together."""
    aligned = ins.words[0] == "bar" or "aligned" in ins.words
    number = t.reader(ins.args[0], "u32")
    count = t.reader(ins.args[1], "u32") if len(ins.args) > 1 else None

    def run(c, m):
        if aligned and m is not None and not c.joined(m):
            return APART
        lanes = active(c, m)
        if lanes is not None and not lanes.size:
            return None
        which = int(pick(number(c), lanes)[0])
        if ins.pc not in c.tokens:
            expected = int(pick(count(c), lanes)[0]) if count else c.cta.live_threads()
            if expected % 32:
                raise ins.fault(f"barrier {which}: {expected} threads are no whole warps")
            before = c.cta.barriers.get(which, NamedBarrier()).generation
            c.tokens[ins.pc] = before
            _arrive(ins, c, which, expected, c.n if lanes is None else lanes.size)
        barrier = c.cta.barriers[which]
        if barrier.generation == c.tokens[ins.pc]:
            c.why = f"barrier {which}: {barrier.arrived} of {barrier.expected} threads are there"
            return BLOCKED
        del c.tokens[ins.pc]
        return None

    return run


@effect("bar.arrive", "barrier.arrive", "barrier.cta.arrive", together=True)
def barrier_arrive(ins: Instr, t: Translator):
    number, count = (t.reader(a, "u32") for a in ins.args)

    def run(c, m):
        lanes = active(c, m)
        if lanes is None or lanes.size:
            threads = c.n if lanes is None else lanes.size
            _arrive(ins, c, int(pick(number(c), lanes)[0]), int(pick(count(c), lanes)[0]), threads)

    return run


# ------------------------------------------------------------------------------------- mbarriers
@dataclass
class Mbarrier:
    """`count` arrivals and `tx` bytes complete a phase; `phase` counts the completed ones."""

    count: int
    pending: int
    tx: int = 0
    phase: int = 0

    def settle(self, machine) -> None:
        if self.pending == 0 and self.tx == 0:
            self.pending = self.count
            self.phase += 1
            machine.version += 1


def mbarrier_at(ins: Instr, c, address: int) -> Mbarrier:
    barrier = c.cta.mbarriers.get(address)
    if barrier is None:
        raise ins.fault(f"shared address {address} holds no initialised mbarrier")
    return barrier


@effect("mbarrier.init")
def init(ins: Instr, t: Translator):
    address, count = t.address(ins.args[0]), t.reader(ins.args[1], "u32")

    def run(c, m):
        lanes = active(c, m)
        for at, n in zip(pick(address(c), lanes).tolist(), pick(count(c), lanes).tolist(), strict=True):
            if at % 8 or not c.cta.shared.base <= at <= c.cta.shared.limit - 8:
                raise ins.fault(f"no place for an mbarrier at shared address {at}")
            if at in c.cta.mbarriers:
                raise ins.fault(f"the mbarrier at shared address {at} is initialised twice")
            c.cta.mbarriers[at] = Mbarrier(n, n)
            c.cta.shared.state[at : at + 8] = BARRIER

    return run


@effect("mbarrier.inval")
def invalidate(ins: Instr, t: Translator):
    address = t.address(ins.args[0])

    def run(c, m):
        for at in pick(address(c), active(c, m)).tolist():
            mbarrier_at(ins, c, at)
            del c.cta.mbarriers[at]
            c.cta.shared.state[at : at + 8] = WRITTEN

    return run


@effect("mbarrier.arrive", "mbarrier.arrive_drop", "mbarrier.expect_tx", "mbarrier.complete_tx")
def arrive(ins: Instr, t: Translator):
    """[.expect_tx] state, [address][, number]: the number is bytes with expect_tx, arrivals without."""
    arrives, drops = ins.words[1] != "expect_tx" and ins.words[1] != "complete_tx", ins.words[1] == "arrive_drop"
    bytes_of = {"expect_tx": 1, "complete_tx": -1}
    sign = next((bytes_of[w] for w in ins.words if w in bytes_of), 0)
    if "noComplete" in ins.words or "shared::cluster" in ins.words:
        raise PtxError(f"mbarrier form not understood: {ins}")
    args = ins.args if arrives else (Sink(), *ins.args)
    write, address = t.writer(args[0], "b64"), t.address(args[1])
    number = t.reader(args[2], "u32") if len(args) > 2 else None

    def run(c, m):
        lanes = active(c, m)
        at = pick(address(c), lanes).tolist()
        numbers = pick(number(c), lanes).tolist() if number else [1] * len(at)
        before = []
        for a, n in zip(at, numbers, strict=True):
            b = mbarrier_at(ins, c, a)
            before.append(b.phase)
            b.tx += sign * n
            b.count -= drops
            if arrives:
                b.pending -= 1 if sign else n
            if b.pending < 0:
                raise ins.fault(f"the mbarrier at shared address {a} gets more than its {b.count} arrivals")
            b.settle(c.machine)
        write(c, np.array(before, "u8"), lanes)

    return run


@effect("mbarrier.try_wait", "mbarrier.test_wait", alone=True)
def wait(ins: Instr, t: Translator):
    """try_wait blocks; when nothing else can run it times out, and tells so by a false predicate."""
    parity, blocks = "parity" in ins.words, ins.words[1] == "try_wait"
    write, address = t.writer(ins.args[0], "pred"), t.address(ins.args[1])
    wanted = t.reader(ins.args[2], "u32" if parity else "b64")

    def run(c, m):
        lanes = active(c, m)
        where, phases = pick(address(c), lanes), pick(wanted(c), lanes)
        if (where == where[0]).all() and (phases == phases[0]).all():
            pairs = [(int(where[0]), int(phases[0]))]  # as it nearly always is
        else:
            pairs = list(zip(where.tolist(), phases.tolist(), strict=True))
        done = {}
        for at, phase in set(pairs):
            b = mbarrier_at(ins, c, at)
            done[at, phase] = b.phase & 1 != phase & 1 if parity else b.phase != phase
        if blocks and not all(done.values()) and not c.timeout:
            at, phase = next(k for k, v in done.items() if not v)
            b = mbarrier_at(ins, c, at)
            c.why = (
                f"mbarrier at shared address {at}, phase {phase} ({b.phase} phases done; "
                f"{b.pending} of {b.count} arrivals and {b.tx} bytes are missing)"
            )
            return BLOCKED
        c.timeout = False
        write(c, [done[p] for p in pairs] if len(pairs) > 1 else done[pairs[0]], lanes)
        return None

    return run


@effect("fence.proxy.async")
def fence(ins: Instr, t: Translator):
    def run(c, m):
        lanes = active(c, m)
        if lanes is None or lanes.size:
            c.cta.shared.fence(c.group.number)
            c.machine.memory.races.proxy_fence(c.cta.index)

    return run
