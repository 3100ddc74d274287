"""cp.async: late landing, groups, arrivals on mbarriers, and the fence before a product."""

from __future__ import annotations

import numpy as np
import pytest

from ptx.machine import Deadlock
from ptx.memory import GlobalMemory
from ptx.program import Fault
from ptx.snippets import launch, pointers
from ptx.test_async import START, decode, descriptor, encode, fragment, parameters
from ptx.test_barriers import wait

rng = np.random.default_rng(5)
# each lane copies 16 bytes twice: row 0 and row 1 of [2, lanes, 16]
TWO = """
    mov.u32 %r1, smem; shl.b32 %r2, %r0, 4; add.u32 %r1, %r1, %r2; cvt.u64.u32 %d10, %r2;
    add.s64 %d0, %d0, %d10; add.s64 %d1, %d1, %d10;
    cp.async.cg.shared.global [%r1], [%d0], 16; {first}
    cp.async.ca.shared.global [%r1+512], [%d0+512], 16; {second}
    ld.shared.v4.u32 {{%r10, %r11, %r12, %r13}}, [%r1]; st.global.v4.u32 [%d1], {{%r10, %r11, %r12, %r13}};
    {third} ld.shared.v4.u32 {{%r10, %r11, %r12, %r13}}, [%r1+512];
    st.global.v4.u32 [%d1+512], {{%r10, %r11, %r12, %r13}}; ret;
"""
COMMIT = "cp.async.commit_group;"


def two(first: str, second: str, third: str) -> None:
    memory = GlobalMemory()
    a = np.arange(256, dtype="u4")
    source, out = memory.put("in", a), memory.empty("out", 1024)
    launch(pointers(2) + TWO.format(first=first, second=second, third=third), source, out, memory=memory, shared=1024)
    assert (out.read("u4", (256,)) == a).all()


def test_groups_are_waited_for_in_order():
    two(COMMIT, COMMIT + "cp.async.wait_group 1;", "cp.async.wait_group 0;")
    two(COMMIT, COMMIT + "cp.async.wait_group 0;", "")
    two("", "cp.async.wait_all;", "")
    two(COMMIT, "cp.async.wait_group 0;", COMMIT + "cp.async.wait_group 0;")


@pytest.mark.parametrize("parts", [
    (COMMIT, COMMIT, "cp.async.wait_group 0;"), (COMMIT, COMMIT + "cp.async.wait_group 2;", "cp.async.wait_group 0;"),
    (COMMIT, COMMIT + "cp.async.wait_group 1;", ""), ("", "cp.async.wait_group 0;", "cp.async.wait_all;"),
    (COMMIT, "cp.async.wait_group 0;", "cp.async.wait_group 0;"),
])  # fmt: skip
def test_what_is_read_early_is_told(parts):
    with pytest.raises(Fault, match="read while a copy to it is under way"):
        two(*parts)


def test_only_the_source_size_is_read():
    """Lane l copies l % 5 words, and its source ends there."""
    memory = GlobalMemory()
    out = memory.empty("out", 512)
    sources = [
        memory.put(f"in {k}", np.arange(10 * k, 10 * k + k, dtype="u4"), base=0x1000_0000 * (k + 1))
        for k in (0, 1, 2, 3, 4)
    ]
    assert all(s.base == 0x1000_0000 * (k + 1) for k, s in enumerate(sources))
    body = (
        pointers(1)
        + """
        rem.u32 %r3, %r0, 5; add.u32 %r4, %r3, 1; mul.wide.u32 %d2, %r4, 0x10000000; shl.b32 %r3, %r3, 2;
        mov.u32 %r1, smem; shl.b32 %r2, %r0, 4; add.u32 %r1, %r1, %r2; cvt.u64.u32 %d10, %r2; add.s64 %d0, %d0, %d10;
        setp.eq.u32 %p0, %r3, 0;
        @!%p0 cp.async.cg.shared.global [%r1], [%d2], 16, %r3; @%p0 cp.async.cg.shared.global [%r1], [%d9], 16, %p0;
        cp.async.wait_all; ld.shared.v4.u32 {%r10, %r11, %r12, %r13}, [%r1];
        st.global.v4.u32 [%d0], {%r10, %r11, %r12, %r13}; ret;"""
    )
    launch(body, out, memory=memory, shared=512)
    want = [[10 * (n % 5) + k if k < n % 5 else 0 for k in range(4)] for n in range(32)]
    assert out.read("u4", (32, 4)).tolist() == want


def test_copies_gone_wrong():
    def wrong(copy: str, message: str, after: str = "cp.async.wait_all;"):
        memory = GlobalMemory()
        source = memory.put("in", np.zeros(128, "u4"))
        body = pointers(1) + "mov.u32 %r1, smem; shl.b32 %r2, %r0, 4; add.u32 %r1, %r1, %r2;" + copy + after + "ret;"
        with pytest.raises(Fault, match=message):
            launch(body, source, memory=memory, shared=512)

    wrong("cp.async.cg.shared.global [%r1+4], [%d0], 16;", "not aligned to 16 bytes")
    wrong("cp.async.cg.shared.global [%r1], [%d0+8], 16;", "not aligned to 16 bytes")
    wrong("cp.async.cg.shared.global [%r1], [%d0], 16, 20;", "takes more from its source")
    wrong("cp.async.cg.shared.global [%r1+16], [%d0], 16;", r"outside \[1024, 1536\)")
    wrong("cp.async.cg.shared.global [%r1], [%d0+512], 16;", "is in no allocation")
    wrong("cp.async.cg.shared.global [%r1], [%d0], 16; st.shared.u32 [%r1], %r0;", "where a copy is landing")
    wrong(2 * "cp.async.cg.shared.global [%r1], [%d0], 16;", "target of a copy under way")
    wrong("cp.async.cg.shared.global [%r1], [%d0], 16;", "ends while a copy to its shared memory is under way", "")


# ------------------------------------------------------------------------------------- arrivals
# warpgroup 0 copies b [64 keys, 64] by cp.async, zeros past `rows` keys; warpgroup 1 multiplies; 2 does what it is told
ARRIVE = "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r1];"
FENCE = "fence.proxy.async.shared::cta;"
SWIZZLED = """
    shr.u32 %r5, %r0, 3; and.b32 %r6, %r0, 7; mov.u32 %r7, 0;
    COPY: add.u32 %r8, %r5, %r7; shl.b32 %r9, %r8, 7; and.b32 %r10, %r8, 7; xor.b32 %r10, %r10, %r6;
    shl.b32 %r10, %r10, 4; add.u32 %r10, %r10, %r9; add.u32 %r10, %r10, %r1; shl.b32 %r11, %r6, 4;
    add.u32 %r11, %r11, %r9; cvt.u64.u32 %d10, %r11; add.s64 %d10, %d10, %d1;
    setp.lt.u32 %p3, %r8, 50; selp.b32 %r12, 16, 0, %p3;
    cp.async.cg.shared.global [%r10+1024], [%d10], 16, %r12;
    add.u32 %r7, %r7, 16; setp.lt.u32 %p3, %r7, 64; @%p3 bra COPY;
"""
GATHER = (
    parameters(4)
    + START.replace("mbarrier.init.shared.b64 [%r1], 1;", "mbarrier.init.shared.b64 [%r1], {count};").replace(
        "@%p1 bra AFTER;", ""
    )
    + """
    shr.u32 %r2, %r0, 7; setp.eq.u32 %p2, %r2, 1; @%p2 bra READER; setp.eq.u32 %p2, %r2, 2; @%p2 bra OTHER;
    {copy} {arrive} {kept} ret;
    OTHER: {other} ret;
    READER: and.b32 %r0, %r0, 127; mul.wide.u32 %d10, %r0, 4; add.s64 %d11, %d2, %d10; {wait} {fence}
"""
    + "".join(f"mov.b32 %r{100 + i}, 0;\n" for i in range(32))
    + "wgmma.fence.sync.aligned; setp.ne.u32 %p5, 1, 0;\n"
    + "".join(
        "".join(f"ld.global.b32 %r{40 + i}, [%d11+{512 * (4 * step + i)}];\n" for i in range(4))
        + f"add.u32 %r4, %r1, {1024 + 32 * step};"
        + descriptor("%d20", "%r4", 16, 1024, 3)
        + "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {acc}, {{%r40,%r41,%r42,%r43}}, %d20, %p5, 1, 1, 0;\n"
        for step in range(4)
    )
    + "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; add.s64 %d12, %d0, %d10;\n"
    + "".join(f"st.global.b32 [%d12+{512 * i}], %r{100 + i};\n" for i in range(32))
    + "ret;"
)
ACC = "{" + ", ".join(f"%r{100 + i}" for i in range(32)) + "}"


def gather(seed: int = 0, **changes: str) -> None:
    parts = {"count": "128", "copy": SWIZZLED, "arrive": ARRIVE, "kept": "", "other": "", "wait": wait("%r1", "0"),
             "fence": FENCE, "acc": ACC}  # fmt: skip
    a, b = encode(rng.standard_normal((64, 64)), "bf16"), encode(rng.standard_normal((50, 64)), "bf16")
    words = a.view("u4").reshape(4, 2, 8, 4, 2, 4).transpose(3, 4, 1, 0, 2, 5).reshape(16, 128)
    memory = GlobalMemory()
    out = memory.empty("out", 32 * 512)
    launch(GATHER.format(**{**parts, **changes}), out, memory.put("b", b), memory.put("a", words), 0, memory=memory,
           threads=384, shared=16384, seed=seed)  # fmt: skip
    got = fragment(out.read("f4", (32, 128)))
    want = decode(a, "bf16").astype("f8") @ decode(b, "bf16").astype("f8").T
    if np.isnan(got).any():
        raise Fault("the result is NaN")
    np.testing.assert_allclose(got[:, :50], want, rtol=1e-5, atol=1e-4)
    assert (got[:, 50:] == 0).all()


@pytest.mark.parametrize("seed", range(3))
def test_gathered_rows_reach_a_product(seed):
    gather(seed)
    gather(seed, count="256", arrive=ARRIVE.replace(".noinc", "") + 2 * "mbarrier.arrive.shared::cta.b64 _, [%r1];")
    # the writer may fence, once its copies have landed
    writer = "cp.async.wait_all; fence.proxy.async; mbarrier.arrive.shared::cta.b64 _, [%r1];"
    gather(seed, arrive=writer, fence="")


@pytest.mark.parametrize("changes, message", [
    ({"wait": ""}, "NaN|ends while a copy"),
    ({"fence": ""}, "with no fence.proxy.async"),
    ({"fence": "", "wait": FENCE + wait("%r1", "0")}, "with no fence.proxy.async"),  # before the copies land
    ({"fence": "", "arrive": FENCE + ARRIVE}, "with no fence.proxy.async"),
    ({"fence": "", "other": wait("%r1", "0") + FENCE}, "with no fence.proxy.async"),  # by neither writer nor reader
    ({"arrive": "mbarrier.arrive.shared::cta.b64 _, [%r1];", "kept": "cp.async.wait_all;", "fence": ""}, "NaN|fence"),
    ({"arrive": ARRIVE.replace(".noinc", "")}, "128 of 128 arrivals"),
    ({"count": "256"}, "128 of 256 arrivals"),
])  # fmt: skip
def test_what_is_forgotten_is_told(changes, message):
    with pytest.raises((Fault, Deadlock), match=message):
        for seed in range(4):
            gather(seed, **changes)
