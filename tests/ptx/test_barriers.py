"""mbarriers and named barriers: phases, byte counts, deadlocks told."""

from __future__ import annotations

import numpy as np
import pytest

from ptx.machine import Deadlock
from ptx.memory import GlobalMemory
from ptx.program import Fault
from ptx.snippets import launch, pointers

WAIT = """{{ .reg .pred P1; LAB_WAIT: mbarrier.try_wait.parity.shared.b64 P1, [{bar}], {phase}, 10000000;
    @P1 bra.uni DONE; bra.uni LAB_WAIT; DONE: }}
"""


def wait(bar: str, phase: str) -> str:
    return WAIT.format(bar=bar, phase=phase)


RING = """
    mov.u32 %r1, smem; shr.u32 %r2, %r0, 5; and.b32 %r3, %r0, 31; setp.eq.u32 %p0, %r3, 0;
    setp.ne.u32 %p1, %r0, 0; @%p1 bra READY;
    mbarrier.init.shared.b64 [%r1], 1; mbarrier.init.shared.b64 [%r1+8], 1; READY: fence.mbarrier_init.release.cluster;
    bar.sync 0; mov.u32 %r4, 0; setp.eq.u32 %p2, %r2, 0; @!%p2 bra CONSUMER;
    PRODUCER:  // one number a turn: waits until it was taken
        xor.b32 %r5, %r4, 1; and.b32 %r5, %r5, 1; {empty}
        mul.lo.u32 %r6, %r4, %r4; @%p0 st.shared.u32 [%r1+16], %r6;
        @%p0 mbarrier.arrive.shared::cta.b64 _, [%r1]; add.u32 %r4, %r4, 1; setp.lt.u32 %p3, %r4, 9; @%p3 bra PRODUCER;
    ret;
    CONSUMER:
        and.b32 %r5, %r4, 1; {full}
        ld.shared.u32 %r6, [%r1+16]; shl.b32 %r7, %r4, 2; cvt.u64.u32 %d1, %r7; add.s64 %d2, %d0, %d1;
        @%p0 st.global.u32 [%d2], %r6; {release}
        add.u32 %r4, %r4, 1; setp.lt.u32 %p3, %r4, 9; @%p3 bra CONSUMER;
    ret;
"""
RELEASE = "@%p0 mbarrier.arrive.release.cta.shared::cta.b64 _, [%r1+8];"


@pytest.mark.parametrize("seed", range(4))
def test_a_ring_of_one_slot(seed):
    memory = GlobalMemory()
    out = memory.empty("out", 36)
    body = RING.format(empty=wait("%r1+8", "%r5"), full=wait("%r1", "%r5"), release=RELEASE)
    launch(pointers(1) + body, out, memory=memory, threads=64, shared=64, seed=seed)
    assert (out.read("u4", (9,)) == np.arange(9) ** 2).all()


def test_a_forgotten_release_is_a_deadlock_that_names_both_sides():
    memory = GlobalMemory()
    out = memory.empty("out", 36)
    body = RING.format(empty=wait("%r1+8", "%r5"), full=wait("%r1", "%r5"), release="")
    with pytest.raises(Deadlock) as e:
        launch(pointers(1) + body, out, memory=memory, threads=64, shared=64)
    told = str(e.value)
    assert "CTA 0 warp 0: mbarrier at shared address 1032, phase 0 (0 phases done; 1 of 1 arrivals" in told
    assert "CTA 0 warp 1: mbarrier at shared address 1024, phase 1 (1 phases done" in told
    assert "mbarrier.try_wait" in told


def test_test_wait_does_not_block():
    memory = GlobalMemory()
    out = memory.empty("out", 12)
    body = (
        pointers(1)
        + """
        mov.u32 %r1, smem; setp.ne.u32 %p1, %r0, 0; @%p1 bra END;
        mbarrier.init.shared.b64 [%r1], 2;
        mbarrier.test_wait.parity.shared::cta.b64 %p2, [%r1], 0; selp.b32 %r2, 1, 0, %p2; st.global.u32 [%d0], %r2;
        mbarrier.arrive.shared::cta.b64 %d1, [%r1]; mbarrier.arrive.shared::cta.b64 _, [%r1];
        mbarrier.test_wait.parity.shared::cta.b64 %p2, [%r1], 0; selp.b32 %r2, 1, 0, %p2; st.global.u32 [%d0+4], %r2;
        mbarrier.try_wait.shared::cta.b64 %p2, [%r1], %d1; selp.b32 %r2, 1, 0, %p2; st.global.u32 [%d0+8], %r2;
        mbarrier.inval.shared.b64 [%r1]; mbarrier.init.shared.b64 [%r1], 1;
        END: ret;"""
    )
    launch(body, out, memory=memory, shared=64)
    assert out.read("u4", (3,)).tolist() == [0, 1, 1]


def test_arrivals_by_the_number():
    """One lane arrives for many; the phase ends with the last of 7."""
    memory = GlobalMemory()
    out = memory.empty("out", 12)
    body = (
        pointers(1)
        + """
        mov.u32 %r1, smem; setp.ne.u32 %p1, %r0, 0; @%p1 bra END; mbarrier.init.shared.b64 [%r1], 7; mov.u32 %r3, 4;
        mbarrier.arrive.shared::cta.b64 _, [%r1], %r3;
        mbarrier.test_wait.parity.shared::cta.b64 %p2, [%r1], 0; selp.b32 %r2, 1, 0, %p2; st.global.u32 [%d0], %r2;
        mbarrier.arrive.shared::cta.b64 _, [%r1], 2;
        mbarrier.test_wait.parity.shared::cta.b64 %p2, [%r1], 0; selp.b32 %r2, 1, 0, %p2; st.global.u32 [%d0+4], %r2;
        mbarrier.arrive.release.cta.shared::cta.b64 _, [%r1], 1;
        mbarrier.test_wait.parity.shared::cta.b64 %p2, [%r1], 0; selp.b32 %r2, 1, 0, %p2; st.global.u32 [%d0+8], %r2;
        END: ret;"""
    )
    launch(body, out, memory=memory, shared=64)
    assert out.read("u4", (3,)).tolist() == [0, 0, 1]


def test_a_wait_that_runs_out_of_time_says_so():
    """try_wait may return false: a program that gives up then goes on."""
    memory = GlobalMemory()
    out = memory.empty("out", 4)
    body = (
        pointers(1)
        + """
        mov.u32 %r1, smem; setp.ne.u32 %p1, %r0, 0; @%p1 bra END; mbarrier.init.shared.b64 [%r1], 1;
        mbarrier.try_wait.parity.shared.b64 %p2, [%r1], 0; selp.b32 %r2, 1, 0, %p2;
        st.global.u32 [%d0], %r2; END: ret;"""
    )
    launch(body, out, memory=memory, shared=64)
    assert out.read("u4", (1,))[0] == 0


def one_thread(body: str, message: str, kind=Fault, shared: int = 64, threads: int = 32):
    text = f"mov.u32 %r0, %tid.x; mov.u32 %r1, smem; setp.ne.u32 %p1, %r0, 0; @%p1 bra END; {body} END: ret;"
    with pytest.raises(kind, match=message):
        launch(text, memory=GlobalMemory(), shared=shared, threads=threads)


def test_misused_mbarriers():
    one_thread("mbarrier.arrive.shared::cta.b64 _, [%r1];", "holds no initialised mbarrier")
    one_thread("mbarrier.init.shared.b64 [%r1], 1; mbarrier.init.shared.b64 [%r1], 1;", "initialised twice")
    one_thread("mbarrier.init.shared.b64 [%r1+4], 1;", "no place for an mbarrier")
    one_thread("mbarrier.init.shared.b64 [%r1], 1; st.shared.u32 [%r1], %r0;", "an mbarrier lives")
    one_thread("mbarrier.init.shared.b64 [%r1], 1; ld.shared.u32 %r2, [%r1];", "holds an mbarrier")
    one_thread(
        "mbarrier.init.shared.b64 [%r1], 2; mbarrier.arrive.shared::cta.b64 _, [%r1], 3;", "more than its 2 arrivals"
    )


def test_bytes_that_never_come():
    body = "mbarrier.init.shared.b64 [%r1], 1; mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 128;" + wait("%r1", "0")
    one_thread(body, r"0 of 1 arrivals and 128 bytes are missing", Deadlock)


def test_named_barriers_that_do_not_meet():
    body = """mov.u32 %r0, %tid.x; shr.u32 %r1, %r0, 5; setp.eq.u32 %p0, %r1, 0; @%p0 bra ONE;
        {other} ret; ONE: bar.sync 1, 64; ret;"""

    def run(other):
        launch(body.format(other=other), memory=GlobalMemory(), threads=64)

    run("bar.sync 1, 64;")
    run("bar.arrive 1, 64;")
    run("barrier.cta.sync 1, 64;")
    with pytest.raises(Deadlock, match="barrier 1: 32 of 64 threads are there"):
        run("bar.sync 2, 64;")
    with pytest.raises(Deadlock, match="barrier 1: 32 of 64 threads are there"):
        run("")
    with pytest.raises(Fault, match=r"barrier 1 expects (64|128) threads, this instruction says (128|64)"):
        run("bar.sync 1, 128;")


def test_an_aligned_barrier_in_half_a_warp():
    body = """mov.u32 %r0, %tid.x; setp.lt.u32 %p0, %r0, 16; @%p0 bra SKIP; bar.sync 0; SPIN: bra.uni END;
        SKIP: mbarrier.try_wait.parity.shared.b64 %p1, [smem], 0; @!%p1 bra SKIP; END: ret;"""
    body = "mov.u32 %r0, %tid.x; setp.eq.u32 %p2, %r0, 0; @%p2 mbarrier.init.shared.b64 [smem], 1;" + body
    with pytest.raises(Deadlock):
        launch(body, memory=GlobalMemory(), shared=64)


def test_a_barrier_left_half_full():
    with pytest.raises(Fault, match="ends with 32 of 64 threads at barrier 3"):
        launch("bar.arrive 3, 64; ret;", memory=GlobalMemory())
