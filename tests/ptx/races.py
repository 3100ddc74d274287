"""Who may read what another CTA wrote to global memory: happens-before through gpu-scope atomics and fences.

Each CTA has a vector clock.  A release leaves it at an address, an acquire there takes it up; a fence makes releases of
the relaxed writes after it and acquires of the relaxed reads before it (PTX ISA, "Memory Consistency Model").  A CTA
counts as one thread: a barrier missing inside it shows as memory read before it is written, when warps run apart.
"""

from __future__ import annotations

import numpy as np

from .program import Instr

WIDE = ("gpu", "sys", "gl")  # scopes that reach other CTAs


def scope_of(words: tuple[str, ...]) -> str:
    return next((w for w in words if w in ("cta", "cluster", *WIDE)), "gpu")


class Races:
    """Of one launch with `ctas` CTAs."""

    def __init__(self, ctas: int):
        self.clocks = np.eye(ctas, dtype="i4")  # [CTA]: what it has seen of each
        self.fenced = np.zeros_like(self.clocks)  # its clock at its last fence
        self.unfenced = np.zeros_like(self.clocks)  # what relaxed reads have brought since
        self.proxied = np.zeros_like(self.clocks)  # its clock at its last fence.proxy.async
        self.left: dict[int, np.ndarray] = {}  # address -> what releases left there
        self.writers: dict = {}  # segment -> (CTA, its time) of the last plain store to each word

    # --------------------------------------------------------------------------------- plain accesses
    def stored(self, ins: Instr, segment, at: np.ndarray, cta: int) -> None:
        if segment not in self.writers:
            words = segment.size // 4 + 1
            self.writers[segment] = np.full(words, -1, "i2"), np.zeros(words, "i4")
        owner, time = self.writers[segment]
        words = (at - segment.base) >> 2
        if other := self._unordered(owner, time, words, cta):
            raise ins.fault(f"{segment.name!r} is written by CTA {cta} and by CTA {other[0]}, in no order")
        owner[words], time[words] = cta, self.clocks[cta, cta]

    def loaded(self, ins: Instr, segment, at: np.ndarray, cta: int) -> None:
        if segment not in self.writers:
            return
        owner, time = self.writers[segment]
        if other := self._unordered(owner, time, (at - segment.base) >> 2, cta):
            raise ins.fault(
                f"CTA {cta} reads {segment.name!r}, which CTA {other[0]} wrote with no release and acquire since"
            )

    def copied(self, ins: Instr, segment, at: np.ndarray, cta: int) -> None:
        """A load through the async proxy: what it reads must be known at the CTA's last proxy fence."""
        self.loaded(ins, segment, at, cta)
        if segment in self.writers:
            owner, time = self.writers[segment]
            words = (at - segment.base) >> 2
            who, when = owner[words], time[words]
            if (when[who >= 0] > self.proxied[cta, who[who >= 0]]).any():
                raise ins.fault(f"CTA {cta} copies {segment.name!r}, written with no fence.proxy.async since")

    def proxy_fence(self, cta: int) -> None:
        self.proxied[cta] = self.clocks[cta]

    def constant(self, ins: Instr, segment, at: np.ndarray) -> None:
        """A load through the non-coherent cache."""
        if segment in self.writers and (self.writers[segment][0][(at - segment.base) >> 2] >= 0).any():
            raise ins.fault(f"ld.global.nc of {segment.name!r}, which this launch writes")

    def _unordered(self, owner: np.ndarray, time: np.ndarray, words: np.ndarray, cta: int) -> list[int]:
        """CTAs other than `cta` that wrote one of these words without its knowing."""
        who = owner[words]
        foreign = (who != cta) & (who >= 0)
        if not foreign.any():
            return []
        who, when = who[foreign], time[words][foreign]
        return who[when > self.clocks[cta, who]].tolist()

    # --------------------------------------------------------------------------------- synchronisation
    def synchronise(self, words: tuple[str, ...], addresses: list[int], cta: int, reads: bool, writes: bool) -> None:
        """An atomic, volatile or otherwise strong access of these words."""
        if scope_of(words) not in WIDE:
            return
        none = np.zeros_like(self.clocks[cta])
        if reads:
            acquires = "acquire" in words or "acq_rel" in words
            into = self.clocks[cta] if acquires else self.unfenced[cta]
            for a in addresses:
                np.maximum(into, self.left.get(a, none), out=into)
        if writes:
            releases = "release" in words or "acq_rel" in words
            given = self.clocks[cta] if releases else self.fenced[cta]
            for a in addresses:
                self.left[a] = np.maximum(self.left.get(a, none), given)
            self.clocks[cta, cta] += releases

    def fence(self, cta: int) -> None:
        """fence.acq_rel or stronger, at gpu scope."""
        np.maximum(self.clocks[cta], self.unfenced[cta], out=self.clocks[cta])
        self.fenced[cta] = self.clocks[cta]
        self.clocks[cta, cta] += 1
