"""CTAs that meet in global memory: the order of their atomics, and what one may read of another's."""

from __future__ import annotations

import numpy as np
import pytest

from ptx.memory import GlobalMemory
from ptx.program import Fault
from ptx.snippets import launch, pointers

CTAS = 4
# each CTA leaves 64 numbers; whoever arrives last adds all up in order, and tells who it is
LAST = """
    mov.u32 %r1, %ctaid.x; shl.b32 %r2, %r1, 6; add.u32 %r2, %r2, %r0; mul.wide.u32 %d10, %r2, 4;
    add.s64 %d10, %d10, %d0; cvt.rn.f32.u32 %r3, %r2; st.global.f32 [%d10], %r3; {release} bar.sync 0;
    mov.u32 %r4, smem; setp.ne.u32 %p0, %r0, 0; @%p0 bra TOLD;
    {arrive} st.shared.u32 [%r4], %r5; TOLD: bar.sync 0; ld.shared.u32 %r5, [%r4];
    setp.ne.u32 %p1, %r5, 3; @%p1 bra END; {acquire}
    mul.wide.u32 %d11, %r0, 4; add.s64 %d12, %d11, %d0; mov.b32 %r6, 0; mov.u32 %r7, 0;
    SUM: {load} %r8, [%d12]; add.f32 %r6, %r6, %r8; add.s64 %d12, %d12, 256; add.u32 %r7, %r7, 1;
    setp.lt.u32 %p2, %r7, 4; @%p2 bra SUM;
    add.s64 %d13, %d11, %d2; st.global.f32 [%d13], %r6; @%p0 bra END; st.global.u32 [%d3], %r1; {reset} END: ret;
"""
GOOD = {
    "release": "", "arrive": "atom.acq_rel.gpu.global.add.u32 %r5, [%d1], 1;", "acquire": "", "load": "ld.global.f32",
    "reset": "st.global.u32 [%d1], 0;",
}  # fmt: skip
RELAXED = {
    "release": "fence.acq_rel.gpu;", "arrive": "atom.relaxed.gpu.global.add.u32 %r5, [%d1], 1;",
    "acquire": "fence.acq_rel.gpu;",
}  # fmt: skip


def last(seed: int = 0, lockstep: bool = True, **changes: str) -> int:
    """Who was last."""
    memory = GlobalMemory()
    part, counter = memory.empty("part", 4 * 64 * CTAS), memory.put("counter", np.zeros(1, "u4"), writable=True)
    out, who = memory.empty("out", 256), memory.empty("who", 4)
    body = pointers(4) + LAST.format(**{**GOOD, **changes})
    launch(body, part, counter, out, who, memory=memory, threads=64, grid=CTAS, shared=16, seed=seed, lockstep=lockstep)
    assert (out.read("f4", (64,)) == np.arange(256).reshape(4, 64).sum(0)).all()
    assert counter.read("u4", (1,))[0] == 0
    return int(who.read("u4", (1,))[0])


@pytest.mark.parametrize("changes", [
    {}, RELAXED, {**RELAXED, "release": "membar.gl;", "acquire": "membar.gl;"}, {**RELAXED, "release": "fence.sc.gpu;"},
    {"load": "ld.global.cg.f32"}, {"load": "ld.relaxed.gpu.global.f32"}, {"load": "ld.volatile.global.f32"},
    {"reset": "atom.global.exch.b32 %r9, [%d1], 0;"},
])  # fmt: skip
def test_any_cta_may_be_the_last(changes):
    found = {last(seed, seed % 2 == 0, **changes) for seed in range(24)}
    assert len(found) >= 3


@pytest.mark.parametrize("changes", [
    {"arrive": "atom.relaxed.gpu.global.add.u32 %r5, [%d1], 1;"},
    {"arrive": "atom.global.add.u32 %r5, [%d1], 1;"},
    {"arrive": "atom.acquire.gpu.global.add.u32 %r5, [%d1], 1;"},
    {"arrive": "atom.release.gpu.global.add.u32 %r5, [%d1], 1;"},
    {"arrive": "atom.acq_rel.cta.global.add.u32 %r5, [%d1], 1;"},
    {**RELAXED, "release": ""}, {**RELAXED, "acquire": ""},
    {**RELAXED, "release": "fence.acq_rel.cta;"}, {**RELAXED, "acquire": "membar.cta;"},
])  # fmt: skip
def test_a_missing_release_or_acquire_is_told(changes):
    with pytest.raises(Fault, match=r"reads 'part', which CTA . wrote with no release and acquire since"):
        last(**changes)


def test_a_state_read_before_the_others_are_there():
    with pytest.raises(Fault, match=r"'part' is read before it is written|no release and acquire"):
        for seed in range(8):
            last(seed, arrive=GOOD["arrive"] + "mov.u32 %r5, 3;")


def test_a_missing_barrier_before_the_arrival_is_told():
    """Warp 1 may not have stored yet when warp 0 arrives."""
    first, *rest = LAST.format(**GOOD).split("bar.sync 0;")
    with pytest.raises(Fault, match=r"'part' is read before it is written|no release and acquire"):
        for seed in range(12):
            memory = GlobalMemory()
            part, counter = memory.empty("part", 1024), memory.put("counter", np.zeros(1, "u4"), writable=True)
            out, who = memory.empty("out", 256), memory.empty("who", 4)
            launch(pointers(4) + first + "bar.sync 0;".join(rest), part, counter, out, who, memory=memory, threads=64,
                   grid=CTAS, shared=16, seed=seed, lockstep=False)  # fmt: skip


def test_two_ctas_that_write_one_place():
    memory = GlobalMemory()
    out = memory.empty("out", 128)
    body = pointers(1) + "mul.wide.u32 %d1, %r0, 4; add.s64 %d0, %d0, %d1; st.global.u32 [%d0], %r0; ret;"
    launch(body, out, memory=memory)
    with pytest.raises(Fault, match=r"'out' is written by CTA . and by CTA ., in no order"):
        launch(body, out, memory=memory, grid=2)


def test_the_constant_cache_and_memory_that_is_written():
    memory = GlobalMemory()
    out = memory.empty("out", 4)
    with pytest.raises(Fault, match=r"ld.global.nc of 'out', which this launch writes"):
        launch(pointers(1) + "st.global.u32 [%d0], 7; ld.global.nc.u32 %r1, [%d0]; ret;", out, memory=memory)
    launch(pointers(1) + "ld.global.nc.u32 %r1, [%d0]; ret;", out, memory=memory)  # a later launch


MESSAGE = """
    mov.u32 %r1, %ctaid.x; setp.ne.u32 %p0, %r0, 0; @%p0 bra END; setp.ne.u32 %p1, %r1, 0; @%p1 bra READ;
    st.global.u32 [%d0], 42; {write} bra END;
    READ: {read} %r2, [%d1]; setp.eq.u32 %p2, %r2, 0; @%p2 bra READ; {fence}
    ld.global.u32 %r3, [%d0]; st.global.u32 [%d2], %r3; END: ret;
"""


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("write, read, fence, good", [
    ("st.release.gpu.global.u32 [%d1], 1;", "ld.acquire.gpu.global.u32", "", True),
    ("fence.acq_rel.gpu; st.relaxed.gpu.global.u32 [%d1], 1;", "ld.relaxed.gpu.global.u32", "fence.acq_rel.gpu;", True),
    ("red.release.gpu.global.add.u32 [%d1], 1;", "ld.acquire.gpu.global.u32", "", True),
    ("fence.acq_rel.gpu; st.volatile.global.u32 [%d1], 1;", "ld.volatile.global.u32", "membar.gl;", True),
    ("st.relaxed.gpu.global.u32 [%d1], 1;", "ld.acquire.gpu.global.u32", "", False),
    ("st.release.gpu.global.u32 [%d1], 1;", "ld.relaxed.gpu.global.u32", "", False),
])  # fmt: skip
def test_a_flag_that_is_polled(write, read, fence, good, seed):
    memory = GlobalMemory()
    data, out = memory.empty("data", 4), memory.empty("out", 4)
    flag = memory.put("flag", np.zeros(1, "u4"), writable=True)

    def run():
        body = pointers(3) + MESSAGE.format(write=write, read=read, fence=fence)
        launch(body, data, flag, out, memory=memory, grid=2, seed=seed)
        return int(out.read("u4", (1,))[0])

    if good:
        assert run() == 42
    else:
        with pytest.raises(Fault, match="no release and acquire"):
            run()
