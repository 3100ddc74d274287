"""Warps, CTAs and the scheduler.

The four warps of a warpgroup run as one context of 128 lanes while they are at the same instruction; after they part
each runs alone, furthest behind first, until they meet again.  A warp whose lanes part runs them under a mask, again
furthest behind first.  Without `lockstep` warps run alone in random order and meet for matrix products only: slower,
but it shows where a barrier between them is missing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from . import cp_async, mma, sync, tma, wgmma  # noqa: F401  (they register their instructions)
from .memory import GlobalMemory, SharedMemory
from .program import CLASS_SIZE, Fault, Parameter, Program, PtxError
from .races import Races
from .tma import Landing, TensorMap
from .translate import APART, BLOCKED, SPLIT, Translator

PARAM_BASE = 0x5000_0000
SHARED_BASE = 1024  # sm_90 keeps the first KiB
VIEWS = {"P": ("P",), "H": ("U2", "I2", "F2"), "R": ("U4", "I4", "F4"), "D": ("U8", "I8", "F8")}
DTYPE = {"P": "?", **{name: name.lower() for names in VIEWS.values() for name in names if name != "P"}}
POISON = {"P": 0, "H": 0x7FFF, "R": 0x7FFF_BAD0, "D": 0x7FFF_BAD0_7FFF_BAD0}  # registers never written: NaN


class Deadlock(Fault):
    """Nothing can run."""


class Lanes:
    """The registers of one warp, or of a whole warpgroup, as lists of rows: P, U2 I2 F2, U4 I4 F4, U8 I8 F8."""

    def __init__(self, group: Group, warps: list[Warp], lanes: slice):
        self.group, self.cta, self.machine, self.warps, self.lanes = group, group.cta, group.cta.machine, warps, lanes
        self.n = 32 * len(warps)
        self.ones, self.zeros = b"\x01" * self.n, b"\x00" * self.n
        self.tokens: dict[int, int] = {}  # barrier instruction -> its generation when this context arrived
        self.timeout = False
        self.why = ""
        self.stale = -1  # machine version at which it last could not run
        for cls, names in VIEWS.items():
            for name in names:
                setattr(self, name, list(group.files[cls].view(DTYPE[name])[:, lanes]))
        self.extra = dict.fromkeys(VIEWS, 0)
        self.rows = 0  # of the translator's pool, that this context has
        self.extend()

    def extend(self) -> None:
        """Rows for what the translator's pool holds by now."""
        for cls, specs in self.machine.translator.pool.specs.items():
            for spec in specs[self.extra[cls] :]:
                row = self.group.constant(cls, spec)[self.lanes]
                for name in VIEWS[cls]:
                    getattr(self, name).append(row.view(DTYPE[name]))
            self.extra[cls] = len(specs)
        self.rows = self.machine.translator.pool.rows

    def joined(self, mask: np.ndarray) -> bool:
        """Every live lane of the warp is in the mask."""
        return bool((mask | ~self.warps[0].live).all())

    def split(self, taken: np.ndarray, yes: int, no: int, mask: np.ndarray | None) -> int:
        for w in self.warps:
            p = taken if len(self.warps) == 1 else taken[w.lanes]
            here = w.live if mask is None else mask
            if w.pcs is None:
                w.pcs = np.full(32, w.pc)
            w.pcs[here] = np.where(p[here], yes, no)
            w.join()
        return SPLIT


class Warp:
    def __init__(self, group: Group, index: int):
        self.group, self.index = group, index
        self.lanes = slice(32 * index, 32 * index + 32)
        self.pc = 0
        self.pcs: np.ndarray | None = None  # one a lane, while they differ
        self.live = np.ones(32, bool)
        self.mma_open: list = []  # products not committed, then committed groups
        self.mma: list[list] = []
        self.bulk_open: dict[int, list] = {}  # the same for bulk stores, by lane
        self.bulk: dict[int, list[list]] = {}
        self.copies: list = []  # cp_async.Copies under way
        self.groups = np.zeros(32, int)  # cp.async groups that each lane has committed
        self.context: Lanes | None = None

    @property
    def done(self) -> bool:
        return not self.live.any()

    def join(self) -> None:
        """Drop lanes that have ended; forget single counters where they agree."""
        end = self.group.cta.machine.translator.end
        if self.pcs is None:
            if self.pc == end:
                self.live[:] = False
            return
        self.live &= self.pcs != end
        left = self.pcs[self.live]
        if left.size == 32 and (left == left[0]).all():
            self.pc, self.pcs = int(left[0]), None
        elif left.size:
            self.pc = int(left.min())

    def step(self) -> bool:
        """Run one block; False if none can."""
        c = self.context = self.context or Lanes(self.group, [self], self.lanes)
        machine = c.machine
        if c.stale == machine.version and not c.timeout:
            return False
        if self.pcs is None:
            r = machine.run(c, self.pc, None)
            if r >= 0:
                self.pc = r
                self.join()
            ran = r >= 0 or r == SPLIT
        else:
            ran = False
            for pc in sorted(set(self.pcs[self.live].tolist())):
                mask = self.live & (self.pcs == pc)
                r = machine.run(c, pc, mask)
                if r >= 0:
                    self.pcs[mask] = r
                    self.join()
                if r >= 0 or r == SPLIT:
                    ran = True
                    break
        c.stale = -1 if ran else machine.version
        return ran


class Group:
    """A warpgroup: registers of up to four warps."""

    def __init__(self, cta: Cta, first: int, count: int):
        self.cta, self.first, self.number = cta, first, first // 4
        program = cta.machine.program
        self.files = {
            cls: np.full((program.registers[cls], 32 * count), POISON[cls], DTYPE[VIEWS[cls][0]]) for cls in CLASS_SIZE
        }
        self.constants: dict = {}
        self.products: dict = {}  # accumulator registers -> wgmma.Accumulator under way
        self.warps = [Warp(self, k) for k in range(count)]
        self.whole = Lanes(self, self.warps, slice(0, 32 * count))
        self.together = cta.machine.lockstep
        self.order: np.ndarray | None = None  # of warps, where they run apart
        self.polite: list[Warp] = []  # have met others in memory, the last one last: they may be polling

    def constant(self, cls: str, spec) -> np.ndarray:
        if (cls, spec) not in self.constants:
            value = self.cta.machine.value(spec, self)
            dtype = DTYPE[VIEWS[cls][0]]
            self.constants[cls, spec] = np.broadcast_to(np.asarray(value).astype(dtype), self.whole_shape()).copy()
        return self.constants[cls, spec]

    def whole_shape(self) -> tuple[int]:
        return (32 * len(self.warps),)

    @property
    def done(self) -> bool:
        return all(w.done for w in self.warps)

    def contexts(self) -> list[Lanes]:
        return [self.whole, *(w.context for w in self.warps if w.context)]

    def meet(self) -> bool:
        """All warps whole, at one instruction, and none in the middle of a barrier."""
        pc = self.warps[0].pc
        return all(w.pc == pc and w.pcs is None and not (w.context and w.context.tokens) for w in self.warps)

    def run(self, budget: int) -> bool:
        """Run blocks until nothing can or the budget is spent; True if anything ran."""
        ran, lockstep, random = False, self.cta.machine.lockstep, self.cta.machine.random
        # half of the time in one order throughout: who comes first gets far ahead
        self.order = random.permutation(len(self.warps)) if not lockstep and random.integers(2) else None
        while budget > 0 and not self.done:
            used = self.run_together(budget if lockstep else 1) if self.together else self.run_apart()
            if not used:
                break
            ran, budget = True, budget - used
            if self.cta.machine.switch:
                budget, self.cta.machine.switch = 0, False
            self.together = self.together and (lockstep or self.at_product())
        return ran

    def at_product(self) -> bool:
        """Is the next instruction one that only a whole warpgroup can run?"""
        machine = self.cta.machine
        pc = self.warps[0].pc
        return pc < machine.translator.end and machine.program.code[pc].words[:2] == ("wgmma", "mma_async")

    def run_together(self, budget: int) -> int:
        c, machine = self.whole, self.cta.machine
        if c.stale == machine.version and not c.timeout:
            return 0
        pc, end, used, r = self.warps[0].pc, machine.translator.end, 0, 0
        while used < budget and pc != end:
            r = machine.run(c, pc, None)
            if r < 0:
                break
            pc, used = r, used + 1
            if machine.switch:
                break
        if r == SPLIT:
            self.together = False
            return used + 1
        for w in self.warps:
            w.pc = pc
            w.join()
        c.stale = machine.version if used == 0 else -1
        return used

    def run_apart(self) -> int:
        machine = self.cta.machine
        warps = [w for w in self.warps if not w.done]
        if machine.lockstep:
            warps.sort(key=lambda w: (self.polite.index(w) if w in self.polite else -1, w.pc))
        elif self.order is None:
            machine.random.shuffle(warps)  # pyright: ignore[reportArgumentType]
        else:
            warps = [self.warps[k] for k in self.order if not self.warps[k].done]
        for w in warps:
            if w.step():
                if machine.switch:  # others go first, or whoever polls would do so for ever
                    self.polite = [*(x for x in self.polite if x is not w), w]
                if self.meet() and not self.done and (machine.lockstep or self.at_product()):
                    self.together, self.whole.stale = True, -1
                return 1
        return 0


class Cta:
    def __init__(self, machine: Machine, index: int):
        self.machine, self.index = machine, index
        self.shared = SharedMemory(SHARED_BASE, machine.shared_size)
        self.mbarriers: dict[int, sync.Mbarrier] = {}
        self.barriers: dict[int, sync.NamedBarrier] = {}
        warps = machine.threads // 32
        self.groups = [Group(self, k, min(4, warps - k)) for k in range(0, warps, 4)]

    @property
    def done(self) -> bool:
        return all(g.done for g in self.groups)

    def live_threads(self) -> int:
        return 32 * sum(not w.done for g in self.groups for w in g.warps)

    def close(self, landings: list[Landing]) -> None:
        """Raises Fault for what the CTA left unfinished."""
        left = [x for x in landings if x.cta is self]
        if left := left + [x for g in self.groups for w in g.warps for x in w.copies]:
            raise left[0].ins.fault(f"CTA {self.index} ends while a copy to its shared memory is under way")
        if self.shared.reads:
            raise self.shared.reads[0].ins.fault(f"CTA {self.index} ends while its shared memory is still read")
        for number, b in self.barriers.items():
            if b.arrived:
                raise Fault(f"CTA {self.index} ends with {b.arrived} of {b.expected} threads at barrier {number}")


@dataclass
class Machine:
    """One launch.  `params`: bytes, or a TensorMap, for every parameter of the entry, in order; `grid`: CTAs along x,
    `resident` of them at a time.  `seed` orders the scheduler and the landing of copies."""

    translator: Translator
    memory: GlobalMemory
    params: list[bytes | TensorMap]
    grid: int
    dynamic_shared: int = 0
    resident: int = 4
    seed: int = 0
    lockstep: bool = True
    max_blocks: int = 2_000_000
    switch: bool = False  # another warp shall run now
    version: int = 0  # counts what may let a waiting warp run
    instructions: int = 0  # warp instructions so far
    blocks: int = 0
    landings: list[Landing] = field(default_factory=list)
    ctas: list[Cta] = field(default_factory=list)

    def __post_init__(self):
        program = self.program
        self.threads = int(np.prod(program.block))
        if self.threads % 32:
            raise PtxError(f"blocks of {self.threads} threads are not modelled")
        self.random = np.random.default_rng(self.seed)
        self.memory.races = Races(self.grid)
        self.symbols: dict[str, int] = {}
        self.bytes_of: dict[str, bytes] = {}
        self.maps: dict[int, TensorMap] = {}
        self._place_parameters(program.params)
        self._place_variables()

    @property
    def program(self) -> Program:
        return self.translator.program

    def _place_parameters(self, parameters: tuple[Parameter, ...]) -> None:
        if len(parameters) != len(self.params):
            raise PtxError(f"the entry takes {len(parameters)} parameters, {len(self.params)} are given")
        for k, (p, value) in enumerate(zip(parameters, self.params, strict=True)):
            self.symbols[p.name] = PARAM_BASE + 4096 * k
            if isinstance(value, TensorMap):
                self.maps[self.symbols[p.name]] = value
            elif len(value) != p.size:
                raise PtxError(f"parameter {p.name} has {p.size} bytes, {len(value)} are given")
            else:
                self.bytes_of[p.name] = value

    def _place_variables(self) -> None:
        at, dynamic = SHARED_BASE, []
        for v in self.program.variables:
            if v.space == "shared" and v.size is None:
                dynamic.append(v)
            elif v.space == "shared":
                at = (at + v.align - 1) // v.align * v.align
                self.symbols[v.name], at = at, at + (v.size or 0)
            else:
                data = np.frombuffer(v.data if v.data is not None else bytes(v.size or 0), "u1")
                self.symbols[v.name] = self.memory.put(v.name, data, writable=v.space == "global").base
        for v in dynamic:
            at = (at + v.align - 1) // v.align * v.align
            self.symbols[v.name] = at
        self.shared_size = at + self.dynamic_shared - SHARED_BASE

    def value(self, spec: tuple, group: Group):
        """What a row of the translator's pool holds in a group: one number, or one a lane."""
        kind, what, *more = spec
        if kind == "bits":
            return np.uint64(what)
        if kind == "address":
            return np.uint64(self.symbols[what] + more[0])
        if kind == "param":
            raw = self.bytes_of[what][more[0] :]
            return np.frombuffer(raw, more[1], 1).view(f"u{np.dtype(more[1]).itemsize}")[0]
        return self.special(what, group)

    def special(self, name: str, group: Group):
        thread = 32 * group.first + np.arange(group.whole_shape()[0])
        lane = thread % 32
        x, y, _ = self.program.block
        position = {"x": thread % x, "y": thread // x % y, "z": thread // (x * y)}
        axis = name[-1]
        sizes = dict(zip("xyz", self.program.block, strict=True))
        one, many = {"x": 0, "y": 0, "z": 0}, {"x": self.grid, "y": 1, "z": 1}
        table = {
            "%tid": position.get(axis), "%ntid": sizes.get(axis),
            "%ctaid": {**one, "x": group.cta.index}.get(axis), "%nctaid": many.get(axis),
            "%cluster_ctaid": 0, "%cluster_nctaid": 1, "%clusterid": {**one, "x": group.cta.index}.get(axis),
            "%nclusterid": many.get(axis),
        }  # fmt: skip
        whole = {
            "%laneid": lane, "%warpid": thread // 32, "%smid": group.cta.index, "%nsmid": 132, "%clock": 0,
            "%clock64": 0, "%cluster_ctarank": 0, "%cluster_nctarank": 1, "%globaltimer": 0,
            "%lanemask_eq": 1 << lane, "%lanemask_lt": (1 << lane) - 1, "%lanemask_le": (2 << lane) - 1,
            "%lanemask_gt": 0xFFFF_FFFF & ~((2 << lane) - 1), "%lanemask_ge": 0xFFFF_FFFF & ~((1 << lane) - 1),
            "%dynamic_smem_size": self.dynamic_shared,
        }  # fmt: skip
        value = whole.get(name) if name in whole else table.get(name[:-2])
        if value is None:
            raise PtxError(f"special register {name} is not known")
        return value

    # --------------------------------------------------------------------------------- other CTAs
    def may_switch(self) -> None:
        """Where CTAs meet in memory, half of the time another warpgroup runs next."""
        self.switch = self.switch or bool(self.random.integers(2))

    def synchronise(self, ins, c: Lanes, addresses: np.ndarray, reads: bool = False, writes: bool = False) -> None:
        """A strong access to global memory."""
        self.memory.races.synchronise(ins.words, addresses.tolist(), c.cta.index, reads, writes)
        self.may_switch()

    # --------------------------------------------------------------------------------- running
    def run(self, c: Lanes, pc: int, mask: np.ndarray | None) -> int:
        """One block in a context."""
        entry = (self.translator.full if mask is None else self.translator.masked)[pc]
        if entry is None:
            entry = self.translator.block(pc, mask is not None)
        if c.rows != self.translator.pool.rows:
            c.extend()
        r = entry[0](c) if mask is None else entry[0](c, mask)
        if r != BLOCKED and r != APART:
            self.instructions += entry[1] * len(c.warps)
            self.blocks += 1
            if self.blocks > self.max_blocks:
                raise Fault(f"no end after {self.max_blocks} blocks; now at {self.program.code[pc]}")
        return r

    def launch(self) -> int:
        """Run the grid to its end.  Returns the number of warp instructions.  Raises Fault, Deadlock, PtxError."""
        with np.errstate(all="ignore"):
            waiting = list(range(self.grid))
            while waiting or self.ctas:
                while waiting and len(self.ctas) < self.resident:
                    self.ctas.append(Cta(self, waiting.pop(0)))
                self._until_one_ends()
        return self.instructions

    def _until_one_ends(self) -> None:
        idle, quiet = 0, 0
        while not any(c.done for c in self.ctas):
            before, ran = self.version, False
            groups = [g for c in self.ctas for g in c.groups if not g.done]
            for k in self.random.permutation(len(groups)):
                ran |= groups[k].run(200)
            idle, quiet = (0, 0) if self.version != before else (idle, quiet + 1)
            if ran and quiet < 3:
                continue
            if self.landings:
                self.landings.pop(int(self.random.integers(len(self.landings)))).land(self)
            elif ran:  # a loop that polls memory: max_blocks ends it
                continue
            elif idle < 4:  # let waits run out of time: a program may do something else then
                idle += 1
                for g in groups:
                    for c in g.contexts():
                        c.timeout = True
            else:
                raise Deadlock("nothing can run; every warp waits:\n" + "\n".join(self._waits(groups)))
        for cta in [c for c in self.ctas if c.done]:
            cta.close(self.landings)
            self.ctas.remove(cta)
            self.version += 1

    def _waits(self, groups: list[Group]):
        for g in groups:
            for w in g.warps:
                if not w.done:
                    c = g.whole if g.together else w.context
                    why = c.why if c and c.why else "the other lanes or warps of its group"
                    yield f"  CTA {g.cta.index} warp {g.first + w.index}: {why}\n     at {self.program.code[w.pc]}"
