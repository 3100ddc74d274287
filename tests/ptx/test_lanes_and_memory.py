"""Lanes, memory, atomics, divergence: answers written out in numpy, and what is wrong is found."""

from __future__ import annotations

import numpy as np
import pytest

from ptx.memory import GlobalMemory
from ptx.ops import from_bf16, to_bf16
from ptx.program import Fault
from ptx.snippets import lanewise, launch, pointers

LANE = np.arange(32)
rng = np.random.default_rng(3)
VALUES = rng.integers(0, 2**32, 32, "u4")


# ------------------------------------------------------------------------------------- other lanes
def segment_source(mode: str, lane: int, b: int, clamp: int, segment: int) -> int:
    """PTX ISA, shfl.sync, transcribed for one lane."""
    last = lane & segment | clamp & ~segment
    first = lane & segment
    j, inside = {
        "up": (lane - b, lane - b >= last), "down": (lane + b, lane + b <= last),
        "bfly": (lane ^ b, (lane ^ b) <= last), "idx": (first | b & ~segment, (first | b & ~segment) <= last),
    }[mode]  # fmt: skip
    return j if inside else lane


@pytest.mark.parametrize("width", [32, 8])
@pytest.mark.parametrize(
    "mode, b", [("bfly", 1), ("bfly", 16), ("idx", 0), ("idx", 5), ("down", 4), ("up", 3), ("idx", 31)]
)
def test_shuffles(mode, b, width):
    segment = 32 - width
    clamp = 0 if mode == "up" else 31
    source = [segment_source(mode, lane, b, clamp, segment) for lane in range(32)]
    op = f"shfl.sync.{mode}.b32 $d|%q0, $a, {b}, {segment << 8 | clamp}, -1;"
    assert (lanewise(op, [("b32", VALUES)], "b32") == VALUES[source]).all()
    got = lanewise(op.replace("$d|%q0", "%r50|$d"), [("b32", VALUES)], "pred")
    for lane in range(32):
        moved = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": source[lane]}[mode]
        assert got[lane] == (source[lane] == moved)


def test_shuffle_by_a_register():
    lanes = rng.integers(0, 32, 32, "u4")
    got = lanewise("shfl.sync.idx.b32 $d, $a, $b, 31, -1;", [("b32", VALUES), ("b32", lanes)], "b32")
    assert (got == VALUES[lanes]).all()


def test_votes():
    p = rng.random(32) < 0.5
    word = int(sum(1 << k for k in LANE[p]))
    for q in (p, np.ones(32, bool), np.zeros(32, bool)):
        assert (lanewise("vote.sync.any.pred $d, $a, -1;", [("pred", q)], "pred") == q.any()).all()
        assert (lanewise("vote.sync.all.pred $d, $a, -1;", [("pred", q)], "pred") == q.all()).all()
        assert (lanewise("vote.sync.uni.pred $d, $a, -1;", [("pred", q)], "pred") == (q.all() or not q.any())).all()
    assert (lanewise("vote.sync.ballot.b32 $d, $a, -1;", [("pred", p)], "b32") == word).all()


def test_match_reduce_elect_activemask():
    a = rng.integers(0, 4, 32, "u4")
    same = [sum(1 << k for k in range(32) if a[k] == a[lane]) for lane in range(32)]
    assert lanewise("match.any.sync.b32 $d, $a, -1;", [("b32", a)], "b32").tolist() == same
    assert (lanewise("match.all.sync.b32 $d|%q0, $a, -1;", [("b32", a)], "b32") == 0).all()
    assert (lanewise("match.all.sync.b32 $d|%q0, $a, -1;", [("b32", a * 0)], "b32") == 2**32 - 1).all()
    s = VALUES.view("i4")
    assert (lanewise("redux.sync.min.s32 $d, $a, -1;", [("s32", s)], "s32") == s.min()).all()
    assert (lanewise("redux.sync.add.u32 $d, $a, -1;", [("u32", VALUES)], "u32") == VALUES.sum(dtype="u4")).all()
    assert (lanewise("redux.sync.xor.b32 $d, $a, -1;", [("b32", VALUES)], "b32") == np.bitwise_xor.reduce(VALUES)).all()
    assert (lanewise("elect.sync %r50|$d, -1;", [], "pred") == (LANE == 0)).all()
    odd = lanewise("activemask.b32 $d;", [], "b32", "branch")
    assert (odd[1::2] == 0xAAAAAAAA).all() and (odd[::2] == 0).all()


def test_special_registers():
    assert (lanewise("mov.u32 $d, %laneid;", [], "u32") == LANE).all()
    assert (lanewise("mov.u32 $d, %ntid.x;", [], "u32") == 32).all()
    assert (lanewise("mov.u32 $d, %lanemask_lt;", [], "u32") == (1 << LANE) - 1).all()
    memory = GlobalMemory()
    out = memory.empty("out", 4 * 3 * 64)
    body = pointers(1) + """
        mov.u32 %r1, %ctaid.x; mov.u32 %r2, %nctaid.x; mov.u32 %r6, %ntid.x; mad.lo.s32 %r3, %r1, %r6, %r0;
        mul.wide.u32 %d1, %r3, 4; add.s64 %d0, %d0, %d1;
        mad.lo.s32 %r4, %r1, 1000, %r0; mad.lo.s32 %r4, %r2, 10000, %r4;
        st.global.u32 [%d0], %r4; ret;"""  # fmt: skip
    launch(body, out, memory=memory, threads=64, grid=3, resident=2)
    want = 30000 + 1000 * np.arange(3)[:, None] + np.arange(64)
    assert (out.read("u4", (3, 64)) == want).all()


# ------------------------------------------------------------------------------------- divergence
def test_a_loop_that_ends_lane_by_lane():
    """Collatz: every lane loops its own number of times, and all meet again before the shuffle."""
    start = np.arange(1, 33, dtype="u4")
    body = """
        mov.u32 $d, 0; mov.u32 %r50, $a;
        LOOP: setp.eq.u32 %p0, %r50, 1; @%p0 bra OUT;
        add.u32 $d, $d, 1; and.b32 %r51, %r50, 1; setp.eq.u32 %p1, %r51, 0;
        @%p1 bra EVEN; mad.lo.u32 %r50, %r50, 3, 1; bra LOOP;
        EVEN: shr.u32 %r50, %r50, 1; bra LOOP;
        OUT: shfl.sync.bfly.b32 $d, $d, 1, 31, -1;"""

    def steps(n: int) -> int:
        return 0 if n == 1 else 1 + steps(3 * n + 1 if n % 2 else n // 2)

    got = lanewise(body, [("u32", start)], "u32")
    assert got.tolist() == [steps(int(start[lane ^ 1])) for lane in range(32)]


def test_lanes_that_leave_early():
    memory = GlobalMemory()
    out = memory.put("out", np.zeros(32, "u4"), writable=True)
    body = (
        pointers(1)
        + """
        setp.lt.u32 %p0, %r0, 5; setp.ge.u32 %p1, %r0, 0; @%p0 ret;
        vote.sync.ballot.b32 %r1, %p1, -1; mul.wide.u32 %d1, %r0, 4; add.s64 %d0, %d0, %d1;
        st.global.u32 [%d0], %r1; exit;"""
    )
    launch(body, out, memory=memory)
    assert (out.read("u4", (32,)) == np.where(LANE < 5, 0, 0xFFFFFFE0)).all()


def test_warps_of_a_group_part_and_meet_again():
    """Each warp takes a different way, a named barrier of two warps lets one wait for another, then all meet."""
    memory = GlobalMemory()
    out = memory.empty("out", 4 * 128)
    body = (
        pointers(1)
        + """
        shr.u32 %r1, %r0, 5; mov.u32 %r2, 100; mov.u32 %r9, smem;
        setp.eq.u32 %p0, %r1, 3; @%p0 bra LAST; setp.eq.u32 %p1, %r1, 0; @!%p1 bra JOIN;
        bar.sync 1, 64; ld.shared.u32 %r2, [%r9]; bra JOIN;
        LAST: mov.u32 %r3, 7; st.shared.u32 [%r9], %r3; bar.arrive 1, 64;
        JOIN: bar.sync 0; add.u32 %r2, %r2, %r1; mul.wide.u32 %d1, %r0, 4; add.s64 %d0, %d0, %d1;
        st.global.u32 [%d0], %r2; ret;"""
    )
    launch(body, out, memory=memory, threads=128, shared=64)
    assert (out.read("u4", (4, 32)) == np.array([[7], [101], [102], [103]])).all()


# ------------------------------------------------------------------------------------- global memory
@pytest.mark.parametrize(
    "width, many", [(8, 1), (16, 1), (16, 2), (16, 4), (32, 1), (32, 2), (32, 4), (64, 1), (64, 2)]
)
def test_vector_loads_and_stores(width, many):
    data = rng.integers(0, 256, 32 * many * width // 8, "u1")
    memory = GlobalMemory()
    source, target = memory.put("in", data), memory.empty("out", data.size)
    name = {8: "%h", 16: "%h", 32: "%r", 64: "%d"}[width]
    regs = [f"{name}{20 + k}" for k in range(many)]
    vector = f".v{many}" if many > 1 else ""
    group = "{" + ", ".join(regs) + "}" if many > 1 else regs[0]
    body = (
        pointers(2)
        + f"""
        mul.wide.u32 %d10, %r0, {many * width // 8}; add.s64 %d0, %d0, %d10; add.s64 %d1, %d1, %d10;
        ld.global.nc.L1::no_allocate{vector}.b{width} {group}, [%d0]; st.global{vector}.b{width} [%d1], {group}; ret;"""
    )
    launch(body, source, target, memory=memory)
    assert (target.read("u1", data.shape) == data).all()


def test_narrow_loads_extend():
    data = rng.integers(0, 256, 32, "u1")
    memory = GlobalMemory()
    source = memory.put("in", data)
    for kind, want in (("s8", data.view("i1")), ("u8", data)):
        target = memory.empty(kind, 128)
        body = (
            pointers(2)
            + f"""
            cvt.u64.u32 %d10, %r0; add.s64 %d0, %d0, %d10; ld.global.{kind} %r1, [%d0];
            shl.b64 %d10, %d10, 2; add.s64 %d1, %d1, %d10; st.global.b32 [%d1], %r1; ret;"""
        )
        launch(body, source, target, memory=memory)
        assert (target.read("i4", (32,)) == want).all()


def test_a_load_that_its_predicate_hides_is_not_made():
    """The lanes past the end keep their fallback value."""
    memory = GlobalMemory()
    source, target = memory.put("table", np.arange(10, dtype="f4")), memory.empty("out", 128)
    body = (
        pointers(2)
        + """
        setp.lt.u32 %p0, %r0, 10; mul.wide.u32 %d10, %r0, 4; add.s64 %d0, %d0, %d10; add.s64 %d1, %d1, %d10;
        { .reg .pred p; setp.lt.u32 p, %r0, 10; mov.b32 %r1, 0fBF800000; @p ld.global.nc.b32 %r1, [%d0]; }
        st.global.b32 [%d1], %r1; ret;"""
    )
    launch(body, source, target, memory=memory)
    assert (target.read("f4", (32,)) == np.where(LANE < 10, LANE, -1)).all()


def test_atomics():
    memory = GlobalMemory()
    counter = memory.put("counter", np.array([5, 0, 9], "u4"), writable=True)
    seen = memory.empty("seen", 4 * 64)
    body = (
        pointers(2)
        + """
        atom.global.add.u32 %r1, [%d0], 1; atom.acq_rel.gpu.global.max.u32 %r2, [%d0+4], %r0;
        setp.eq.u32 %p0, %r0, 33; @%p0 atom.global.exch.b32 %r3, [%d0+8], 77;
        red.global.add.u32 [%d0+4], 0;
        mul.wide.u32 %d2, %r0, 4; add.s64 %d1, %d1, %d2; st.global.u32 [%d1], %r1; ret;"""
    )
    launch(body, counter, seen, memory=memory, threads=64)
    assert counter.read("u4", (3,)).tolist() == [69, 63, 77]
    assert sorted(seen.read("u4", (64,)).tolist()) == list(range(5, 69))


def test_compare_and_swap_lets_one_lane_win():
    memory = GlobalMemory()
    lock, won = (
        memory.put("lock", np.zeros(1, "u4"), writable=True),
        memory.put("won", np.zeros(1, "u4"), writable=True),
    )
    body = (
        pointers(2)
        + """
        add.u32 %r1, %r0, 1; atom.global.cas.b32 %r2, [%d0], 0, %r1; setp.eq.u32 %p0, %r2, 0;
        @%p0 red.global.add.u32 [%d1], 1; ret;"""
    )
    launch(body, lock, won, memory=memory, threads=128)
    assert won.read("u4", (1,))[0] == 1 and lock.read("u4", (1,))[0] != 0


def test_module_constants():
    memory = GlobalMemory()
    out = memory.empty("out", 128)
    body = (
        pointers(1)
        + """
        .global .align 4 .b32 table[4] = {10, 20, 0x1E, 40};
        mov.u64 %d1, table; and.b32 %r1, %r0, 3; mul.wide.u32 %d2, %r1, 4; add.s64 %d1, %d1, %d2;
        ld.global.b32 %r2, [%d1]; mul.wide.u32 %d2, %r0, 4; add.s64 %d0, %d0, %d2; st.global.u32 [%d0], %r2; ret;"""
    )
    launch(body, out, memory=memory)
    assert (out.read("u4", (32,)) == np.array([10, 20, 30, 40])[LANE % 4]).all()


# ------------------------------------------------------------------------------------- shared memory
def test_generic_addresses_reach_shared_memory():
    memory = GlobalMemory()
    out = memory.empty("out", 128)
    body = (
        pointers(1)
        + """
        mov.b64 %d1, smem; cvta.shared.u64 %d2, %d1; mul.wide.u32 %d3, %r0, 4; add.s64 %d2, %d2, %d3;
        st.u32 [%d2], %r0; cvta.to.shared.u64 %d4, %d2; cvt.u32.u64 %r1, %d4; ld.shared.u32 %r2, [%r1];
        add.s64 %d0, %d0, %d3; st.u32 [%d0], %r2; ret;"""
    )
    launch(body, out, memory=memory, shared=128)
    assert (out.read("u4", (32,)) == LANE).all()


@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_matrix_stores_and_loads(count, trans):
    """stmatrix, then plain loads; plain stores, then ldmatrix: register k of lane l holds row l // 4 of matrix k."""
    tiles = rng.integers(0, 2**16, (count, 8, 8), "u2")
    held = tiles.swapaxes(1, 2) if trans else tiles
    words = np.ascontiguousarray(held).view("u4").reshape(count, 32)
    memory = GlobalMemory()
    source, out, back = memory.put("in", words), memory.empty("out", 128 * count), memory.empty("back", 128 * count)
    regs = "{" + ", ".join(f"%r{20 + k}" for k in range(count)) + "}"
    other = "{" + ", ".join(f"%r{30 + k}" for k in range(count)) + "}"
    kind = f"sync.aligned.m8n8.x{count}{'.trans' if trans else ''}.shared.b16"
    body = (
        pointers(3)
        + "mul.wide.u32 %d10, %r0, 4; add.s64 %d0, %d0, %d10; add.s64 %d1, %d1, %d10; add.s64 %d2, %d2, %d10;\n"
    )
    body += (
        "mov.u32 %r1, smem; shl.b32 %r2, %r0, 4; add.u32 %r2, %r1, %r2; shl.b32 %r3, %r0, 2; add.u32 %r3, %r1, %r3;\n"
    )
    body += "".join(f"ld.global.b32 %r{20 + k}, [%d0+{128 * k}];\n" for k in range(count))
    body += f"stmatrix.{kind} [%r2], {regs}; bar.warp.sync -1;\n ldmatrix.{kind} {other}, [%r2];\n"
    for k in range(count):
        body += f"ld.shared.b32 %r40, [%r3+{128 * k}]; st.global.b32 [%d1+{128 * k}], %r40;\n"
        body += f"st.global.b32 [%d2+{128 * k}], %r{30 + k};\n"
    launch(body + "ret;", source, out, back, memory=memory, shared=512)
    assert (out.read("u2", tiles.shape) == tiles).all()
    assert (back.read("u4", words.shape) == words).all()


def test_a_matrix_moved_to_its_transpose():
    tile = rng.integers(0, 2**16, (2, 8, 8), "u2")
    memory = GlobalMemory()
    source, out = memory.put("in", tile), memory.empty("out", 256)
    body = (
        pointers(2)
        + """
        mul.wide.u32 %d10, %r0, 4; add.s64 %d0, %d0, %d10; add.s64 %d1, %d1, %d10; ld.global.b32 %r1, [%d0];
        movmatrix.sync.aligned.m8n8.trans.b16 %r2, %r1; st.global.b32 [%d1], %r2; ret;"""
    )
    launch(body, source, out, memory=memory, threads=64)
    assert (out.read("u2", tile.shape) == tile.swapaxes(1, 2)).all()


def lanes_of(a: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """[register, lane, 2] of a row-major fragment: 8 x 8 parts, down the rows first; as the PTX ISA draws it."""
    out = np.zeros((rows * columns // 64, 32, 2), a.dtype)
    for k in range(len(out)):
        for lane in range(32):
            row, column = 8 * (k % (rows // 8)) + lane // 4, 8 * (k // (rows // 8)) + 2 * (lane % 4)
            out[k, lane] = a[row, column : column + 2]
    return out


@pytest.mark.parametrize("kind", ["bf16", "f16"])
@pytest.mark.parametrize("k", [8, 16])
def test_a_product_of_one_warp(kind, k):
    """16 x 8 = 16 x k times k x 8, plus what was there."""
    a, b, c = rng.standard_normal((16, k)), rng.standard_normal((8, k)), rng.standard_normal((16, 8)).astype("f4")
    a, b = ((to_bf16(x.astype("f4")) if kind == "bf16" else x.astype("f2").view("u2")).reshape(x.shape) for x in (a, b))
    n = k // 8
    memory = GlobalMemory()
    regs = [lanes_of(a, 16, k).view("u4").reshape(-1, 32), lanes_of(b, 8, k).view("u4").reshape(-1, 32)]
    start = lanes_of(c, 16, 8).transpose(0, 2, 1).reshape(4, 32).view("u4")
    source, out = memory.put("in", np.concatenate([*regs, start])), memory.empty("out", 512)
    body = pointers(2) + "mul.wide.u32 %d10, %r0, 4; add.s64 %d0, %d0, %d10; add.s64 %d1, %d1, %d10;\n"
    body += "".join(f"ld.global.b32 %r{10 + i}, [%d0+{128 * i}];\n" for i in range(3 * n + 4))
    names = [f"%r{10 + i}" for i in range(3 * n + 4)]
    groups = [names[3 * n :], names[: 2 * n], names[2 * n : 3 * n], names[3 * n :]]
    args = ", ".join("{" + ", ".join(g) + "}" for g in groups)
    body += f"mma.sync.aligned.m16n8k{k}.row.col.f32.{kind}.{kind}.f32 {args};\n"
    body += "".join(f"st.global.b32 [%d1+{128 * i}], {names[3 * n + i]};\n" for i in range(4)) + "ret;"
    launch(body, source, out, memory=memory)
    real = from_bf16 if kind == "bf16" else lambda x: x.view("f2").astype("f4")
    want = lanes_of(real(a).astype("f8") @ real(b).astype("f8").T + c, 16, 8).transpose(0, 2, 1).reshape(4, 32)
    np.testing.assert_allclose(out.read("f4", (4, 32)), want, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------- what is wrong is found
WRONG = {
    "past the end": (
        "mul.wide.u32 %d1, %r0, 8; add.s64 %d0, %d0, %d1; st.global.u32 [%d0], %r0;", "past the end of 'out'"),
    "before the start": ("st.global.u32 [%d0-4], %r0;", "is in no allocation"),
    "misaligned": ("st.global.u32 [%d0+2], %r0;", "not a multiple of 4"),
    "misaligned vector": ("ld.global.v2.u32 {%r1, %r2}, [%d0+4];", "not aligned to 8"),
    "read before written": ("ld.global.u32 %r1, [%d0];", "'out' is read before it is written"),
    "shared read before written": ("mov.u32 %r1, smem; ld.shared.u32 %r2, [%r1];", "read before it is written"),
    "shared past the end": ("mov.u32 %r1, smem; st.shared.u32 [%r1+64], %r0;", r"outside \[1024, 1088\)"),
    "register garbage as an address": ("st.global.u32 [%d9], %r0;", "is in no allocation"),
    "trap": ("trap;", "trap"),
    "shuffle from a lane that is away": (
        "setp.lt.u32 %p0, %r0, 8; @%p0 shfl.sync.bfly.b32 %r1, %r0, 8, 31, 255;", "takes no part"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_faults_name_the_instruction(name):
    body, message = WRONG[name]
    memory = GlobalMemory()
    out = memory.empty("out", 128)
    with pytest.raises(Fault, match=f"(?s){message}.*at line \\d+: "):
        launch(pointers(1) + body + " ret;", out, memory=memory, shared=64)


def test_a_missing_write_is_told_with_its_place():
    memory = GlobalMemory()
    out = memory.empty("out", 128)
    body = (
        pointers(1)
        + """
        setp.ne.u32 %p0, %r0, 11; mul.wide.u32 %d1, %r0, 4; add.s64 %d0, %d0, %d1;
        @%p0 st.global.u32 [%d0], %r0; ret;"""
    )
    launch(body, out, memory=memory)
    with pytest.raises(Fault, match=r"1 of 32 elements were never written, the first at \(1, 3\)"):
        out.read("u4", (4, 8))


def test_inputs_are_read_only():
    memory = GlobalMemory()
    q = memory.put("q", np.zeros(32, "u4"))
    with pytest.raises(Fault, match="'q' is read-only"):
        launch(pointers(1) + "st.global.u32 [%d0], %r0; ret;", q, memory=memory)


def test_an_endless_loop_ends():
    with pytest.raises(Fault, match="no end after 1000 blocks"):
        launch("AGAIN: add.u32 %r1, %r1, 1; bra AGAIN;", memory=GlobalMemory(), max_blocks=1000)
