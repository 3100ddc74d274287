"""Tensor copies and matrix products: every layout against numpy, and every missing wait or fence found."""

from __future__ import annotations

import numpy as np
import pytest

from ptx.machine import Deadlock
from ptx.memory import GlobalMemory
from ptx.ops import from_bf16, to_bf16
from ptx.program import Fault
from ptx.snippets import launch
from ptx.test_barriers import wait
from ptx.tma import TensorMap

rng = np.random.default_rng(11)
LOAD = "cp.async.bulk.tensor.{rank}d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
STORE = "cp.async.bulk.tensor.{rank}d.global.shared::cta.tile.bulk_group"
# thread 0 alone runs what comes between START and AFTER
START = """
    mov.u32 %r0, %tid.x; mov.u32 %r1, smem; setp.ne.u32 %p1, %r0, 0; @%p1 bra READY;
    mbarrier.init.shared.b64 [%r1], 1; mbarrier.init.shared.b64 [%r1+8], 1; READY: bar.sync 0; @%p1 bra AFTER;
"""


def parameters(count: int) -> str:
    return "".join(f"ld.param.u64 %d{k}, [P{k}];\n" for k in range(count))


def tensor_map(memory: GlobalMemory, name: str, array: np.ndarray, box, swizzle: int, writable=False) -> TensorMap:
    """A contiguous array's map; the last axis is the innermost dimension."""
    segment = memory.empty(name, array.nbytes) if writable else memory.put(name, array)
    dims, strides = array.shape[::-1], array.strides[-2::-1]
    return TensorMap(segment, array.itemsize, dims, strides, tuple(box), swizzle)


# ------------------------------------------------------------------------------------- tensor copies
@pytest.mark.parametrize("swizzle, inner", [(0, 16), (1, 16), (2, 32), (3, 64)])
@pytest.mark.parametrize("corner", [(0, 0, 0), (32, 7, 1), (-16, -3, 0), (64, 60, 2)])
def test_a_box_comes_and_goes(swizzle, inner, corner):
    """Out of range reads as zero and is not written; the bytes lie as the swizzle says."""
    a = rng.integers(0, 2**16, (3, 64, 128), "u2")
    memory = GlobalMemory()
    source = tensor_map(memory, "a", a, (inner, 16, 1), swizzle)
    target = memory.put("b", np.full(a.shape, 7, "u2"), writable=True)
    back = TensorMap(target, 2, source.dims, source.strides, source.box, swizzle)
    raw = memory.empty("raw", 16 * inner * 2)
    coords = "{" + ", ".join(f"%r{10 + k}" for k in range(3)) + "}"
    body = parameters(3) + "".join(f"mov.s32 %r{10 + k}, {c};\n" for k, c in enumerate(corner)) + START
    body += f"""
        mbarrier.arrive.expect_tx.shared.b64 _, [%r1], {source.nbytes};
        {LOAD.format(rank=3)}.L2::cache_hint [%r1+1024], [%d1, {coords}], [%r1], %d9;
        {wait("%r1", "0")}
        {STORE.format(rank=3)} [%d2, {coords}], [%r1+1024];
        cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
        AFTER: bar.sync 0; shl.b32 %r2, %r0, 4; add.u32 %r2, %r1, %r2; shl.b32 %r3, %r0, 4; cvt.u64.u32 %d4, %r3;
        add.s64 %d0, %d0, %d4; mov.u32 %r4, 0;
        COPY: ld.shared.v4.b32 {{%r20, %r21, %r22, %r23}}, [%r2+1024];
        st.global.v4.b32 [%d0], {{%r20, %r21, %r22, %r23}};
        add.u32 %r4, %r4, 512; add.u32 %r2, %r2, 512; add.s64 %d0, %d0, 512; setp.lt.u32 %p4, %r4, {source.nbytes};
        @%p4 bra COPY; ret;"""
    launch(body, raw, memory=memory, shared=16384, maps=[source, back])
    x, y, z = corner
    box, want = np.zeros((16, inner), "u2"), np.full(a.shape, 7, "u2")
    for r in range(16):
        for c in range(inner):
            if 0 <= y + r < 64 and 0 <= x + c < 128:
                box[r, c] = want[z, y + r, x + c] = a[z, y + r, x + c]
    assert (target.read("u2", a.shape) == want).all()
    seen = raw.read("u2", (16 * inner,))
    for r in range(16):  # 16-byte chunks of each 128 bytes exchanged by the number of the 128-byte line
        for c in range(inner):
            at = (r * inner + c) * 2
            at ^= (at >> 7 & (1 << swizzle) - 1) << 4
            assert seen[at // 2] == box[r, c]


def test_maps_that_the_driver_would_refuse():
    memory = GlobalMemory()
    segment = memory.put("a", np.zeros((64, 128), "u2"))
    for options, message in [
        ({"strides": (250,)}, "no multiples of 16"), ({"box": (128, 8)}, "do not fit swizzle"),
        ({"box": (64, 300)}, "out of range"), ({"dims": (0, 64)}, "out of range"),
        ({"dims": (128, 65)}, "past the end"),
    ]:  # fmt: skip
        with pytest.raises(Fault, match=message):
            TensorMap(segment, 2, **{"dims": (128, 64), "strides": (256,), "box": (64, 8), **options})


# ------------------------------------------------------------------------------------- products
LAYOUT = {3: 1, 2: 2, 1: 3, 0: 0}  # CUtensorMapSwizzle -> the descriptor's field
DESCRIPTOR = """
    and.b32 %r90, {address}, 0x3FFFF; shr.u32 %r90, %r90, 4; cvt.u64.u32 {into}, %r90;
    or.b64 {into}, {into}, {rest};
"""


def descriptor(into: str, address: str, leading: int, stride: int, swizzle: int) -> str:
    rest = leading >> 4 << 16 | stride >> 4 << 32 | LAYOUT[swizzle] << 62
    return DESCRIPTOR.format(into=into, address=address, rest=rest)


def panels(n: int, k: int, swizzle: int, transposed: bool) -> tuple[int, tuple[int, int], int, int, int]:
    """How an n x k operand lies in shared memory: (panel width in elements, rows of a panel, bytes of a panel, leading,
    stride offsets).  Panels are what one tensor copy brings."""
    width = {3: 64, 2: 32, 1: 16}[swizzle]
    rows = k if transposed else n
    size = rows * width * 2
    # K contiguous: 8 rows to the next group; rows contiguous: panels along n, groups of 8 k
    return width, (rows, (n if transposed else k) // width), size, size if transposed else 16, 8 * width * 2


def product_body(n: int, k: int, swizzle: int, transposed: bool, kind: str, source: str) -> str:
    """out[64, n] = a[64, k] b[n, k]^T with b as loaded; a from shared memory (128-byte swizzle) or registers."""
    width, (_, count), size, leading, stride = panels(n, k, swizzle, transposed)
    a_bytes = 64 * k * 2
    acc = "{" + ", ".join(f"%r{100 + i}" for i in range(n // 2)) + "}"
    body = parameters(5) + START + f"mbarrier.arrive.expect_tx.shared.b64 _, [%r1], {count * size + a_bytes};\n"
    for p in range(count):
        body += f"mov.s32 %r10, {p * width}; mov.s32 %r11, 0;\n"
        body += f"{LOAD.format(rank=2)} [%r1+{32768 + p * size}], [%d3, {{%r10, %r11}}], [%r1];\n"
    for p in range(k // 64):
        body += f"mov.s32 %r10, {p * 64}; mov.s32 %r11, 0;\n"
        body += f"{LOAD.format(rank=2)} [%r1+{1024 + p * 8192}], [%d4, {{%r10, %r11}}], [%r1];\n"
    body += "AFTER:" + wait("%r1", "0") + "add.u32 %r2, %r1, 1024; add.u32 %r3, %r1, 32768;\n"
    body += "".join(f"mov.b32 %r{100 + i}, 0f3F800000;\n" for i in range(n // 2))
    shape = f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind}"
    body += "mul.wide.u32 %d10, %r0, 4; add.s64 %d11, %d1, %d10; wgmma.fence.sync.aligned;\n"
    for step in range(k // 16):
        across, along = step * 16 * width * 2, step * 16 // width * size + step * 16 % width * 2
        offset = across if transposed else along
        body += f"add.u32 %r4, %r3, {offset};" + descriptor("%d20", "%r4", leading, stride, swizzle)
        flags = f"%p5, 1, 1, {{extra}}{int(transposed)};\n"
        body += "setp.ne.u32 %p5, 1, 0;\n"
        if source == "registers":
            regs = "{" + ", ".join(f"%r{40 + i}" for i in range(4)) + "}"
            for i in range(4):
                body += f"ld.global.b32 %r{40 + i}, [%d11+{512 * (4 * step + i)}];\n"
            body += f"{shape} {acc}, {regs}, %d20, " + flags.format(extra="")
        else:
            at = step * 16 // 64 * 8192 + step * 16 % 64 * 2
            body += f"add.u32 %r4, %r2, {at};" + descriptor("%d21", "%r4", 16, 1024, 3)
            body += f"{shape} {acc}, %d21, %d20, " + flags.format(extra="0, ")
    body += "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;\n"
    body += "add.s64 %d12, %d0, %d10;\n"
    body += "".join(f"st.global.b32 [%d12+{512 * i}], %r{100 + i};\n" for i in range(n // 2))
    return body + "bar.sync 0; ret;"


def fragment(d: np.ndarray) -> np.ndarray:
    """[registers, 128] of an accumulator -> [64, n], as the PTX ISA draws it."""
    out = np.zeros((64, 2 * len(d)), d.dtype)
    for reg in range(len(d)):
        for t in range(128):
            warp, lane = divmod(t, 32)
            n8, r, c = reg // 4, reg // 2 % 2, reg % 2
            out[16 * warp + lane // 4 + 8 * r, 8 * n8 + 2 * (lane % 4) + c] = d[reg, t]
    return out


def a_registers(a: np.ndarray) -> np.ndarray:
    """[steps, 4, 128] words of the A operand in registers."""
    out = np.zeros((a.shape[1] // 16, 4, 128), "u4")
    for step in range(len(out)):
        for i in range(4):
            for t in range(128):
                warp, lane = divmod(t, 32)
                row, col = 16 * warp + lane // 4 + 8 * (i % 2), 16 * step + 2 * (lane % 4) + 8 * (i // 2)
                out[step, i, t] = int(a[row, col]) | int(a[row, col + 1]) << 16
    return out


def encode(x: np.ndarray, kind: str) -> np.ndarray:
    return to_bf16(x).reshape(x.shape) if kind == "bf16" else x.astype("f2").view("u2")


def decode(bits: np.ndarray, kind: str) -> np.ndarray:
    return from_bf16(bits) if kind == "bf16" else bits.view("f2").astype("f4")


@pytest.mark.parametrize("source", ["shared", "registers"])
@pytest.mark.parametrize("kind", ["bf16", "f16"])
@pytest.mark.parametrize("n, k, swizzle, transposed", [
    (128, 64, 3, False), (64, 128, 3, False), (64, 64, 2, False), (32, 64, 1, False),
    (128, 64, 3, True), (64, 128, 3, True), (96, 64, 2, True), (32, 64, 1, True), (8, 64, 3, False), (256, 64, 3, True),
])  # fmt: skip
def test_products(n, k, swizzle, transposed, kind, source):
    a, b = encode(rng.standard_normal((64, k)), kind), encode(rng.standard_normal((n, k)), kind)
    memory = GlobalMemory()
    out, regs = memory.empty("out", n // 2 * 512), memory.put("a registers", a_registers(a))
    width, (rows, _), *_ = panels(n, k, swizzle, transposed)
    map_b = tensor_map(memory, "b", b.T.copy() if transposed else b, (width, rows), swizzle)
    map_a = tensor_map(memory, "a", a, (64, 64), 3)
    body = product_body(n, k, swizzle, transposed, kind, source)
    launch(body, out, regs, 0, memory=memory, threads=128, shared=98304, maps=[map_b, map_a])
    got = fragment(out.read("f4", (n // 2, 128)))
    want = 1 + decode(a, kind).astype("f8") @ decode(b, kind).astype("f8").T
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


# ------------------------------------------------------------------------------------- what goes wrong
def faulty(change, message, kind=Fault, n=128):
    """A product whose program is changed by `change` must raise."""
    a, b = encode(rng.standard_normal((64, 64)), "bf16"), encode(rng.standard_normal((n, 64)), "bf16")
    memory = GlobalMemory()
    out, regs = memory.empty("out", n // 2 * 512), memory.put("a registers", a_registers(a))
    maps = [tensor_map(memory, "b", b, (64, n), 3), tensor_map(memory, "a", a, (64, 64), 3)]
    body = change(product_body(n, 64, 3, False, "bf16", "shared"))
    with pytest.raises(kind, match=message):
        launch(body, out, regs, 0, memory=memory, threads=128, shared=98304, maps=maps)
        if np.isnan(out.read("f4", (n // 2, 128))).any():
            raise Fault("the result is NaN")


WAIT_GROUP = "wgmma.wait_group.sync.aligned 0;"


def test_results_read_before_the_wait_are_nan():
    def late(body):
        before, after = body.split(WAIT_GROUP)
        return before + after.replace("bar.sync 0; ret;", WAIT_GROUP + " bar.sync 0; ret;")

    faulty(late, "the result is NaN")


def test_products_nobody_waits_for():
    faulty(lambda body: body.replace(WAIT_GROUP, ""), "ends while its shared memory is still read")


def test_operands_read_before_their_copy_lands_are_nan():
    faulty(lambda body: body.replace(wait("%r1", "0"), "").replace(WAIT_GROUP, WAIT_GROUP + wait("%r1", "0")), "NaN")


def test_a_slot_refilled_under_a_product():
    refill = (
        "mov.s32 %r10, 0; mov.s32 %r11, 0; @!%p1 " + LOAD.format(rank=2) + " [%r1+32768], [%d3, {%r10, %r11}], [%r1+8];"
    )
    faulty(lambda body: body.replace(WAIT_GROUP, refill + WAIT_GROUP), r"still read by\s+line \d+: wgmma")


def test_shared_memory_stored_under_a_product():
    faulty(
        lambda body: body.replace(WAIT_GROUP, "st.shared.u32 [%r3], %r0;" + WAIT_GROUP),
        r"still read by\s+line \d+: wgmma",
    )


def test_an_operand_written_by_threads_needs_a_fence():
    def generic(fence):
        # the operand's first word becomes another one
        again = "mov.b32 %r5, 0x3F803F80; @!%p1 st.shared.u32 [%r3], %r5; " + fence + " bar.sync 0;"
        return lambda body: body.replace("wgmma.fence.sync.aligned;", again + "wgmma.fence.sync.aligned;", 1)

    faulty(generic(""), "with no fence.proxy.async")
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        faulty(generic("fence.proxy.async.shared::cta;"), "with no fence.proxy.async")


def test_writing_what_is_there_already_harms_nobody():
    again = "ld.shared.u32 %r5, [%r3]; @!%p1 st.shared.u32 [%r3], %r5;"
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        faulty(lambda body: body.replace("wgmma.", again + "wgmma."), "read|fence")


def test_bytes_miscounted():
    faulty(lambda body: body.replace(", [%r1], 24576;", ", [%r1], 24592;"), "16 bytes are missing", Deadlock)


def test_a_warp_that_is_missing():
    """wgmma needs the whole warpgroup."""
    skip = "shr.u32 %r6, %r0, 5; setp.eq.u32 %p6, %r6, 2; @%p6 bra GONE; wgmma.fence.sync.aligned;"

    def change(body):
        return body.replace("wgmma.fence.sync.aligned;", skip, 1).replace("bar.sync 0; ret;", "GONE: bar.sync 0; ret;")

    faulty(change, "(?s)warp 0: the other lanes or warps of its group.*wgmma.mma_async", Deadlock)


STORE_BODY = """
    mov.u32 %r0, %tid.x; mov.u32 %r1, smem; shl.b32 %r2, %r0, 5; add.u32 %r2, %r1, %r2;
    {write} {fence} bar.sync 0; setp.ne.u32 %p1, %r0, 0; @%p1 bra END; mov.s32 %r10, 0; mov.s32 %r11, 0;
    {store} [%d0, {{%r10, %r11}}], [%r1]; {commit} {after} END: bar.sync 0; {late} ret;
"""
GOOD = {
    "write": "st.shared.v4.u32 [%r2], {%r0, %r0, %r0, %r0}; st.shared.v4.u32 [%r2+16], {%r0, %r0, %r0, %r0};",
    "fence": "fence.proxy.async.shared::cta;", "store": STORE.format(rank=2), "commit": "cp.async.bulk.commit_group;",
    "after": "cp.async.bulk.wait_group.read 0;", "late": "",
}  # fmt: skip


def store(**changes):
    memory = GlobalMemory()
    out = tensor_map(memory, "out", np.zeros((16, 32), "u2"), (32, 16), 2, writable=True)
    body = parameters(1) + STORE_BODY.format(**{**GOOD, **changes})
    launch(body, memory=memory, shared=1024, maps=[out])
    return out.segment.read("u2", (16, 32))


def test_a_store():
    """Thread t writes its number to bytes 32 t .. 32 t + 31; the store reads them through the 64-byte swizzle."""
    at = 4 * np.arange(256)
    at ^= (at >> 7 & 3) << 4
    assert (store().view("u4").reshape(-1) == at // 32).all()


def test_stores_gone_wrong():
    with pytest.raises(Fault, match=r"no fence\.proxy\.async"):
        store(fence="")
    with pytest.raises(Fault, match="never written"):
        store(write="st.shared.v4.u32 [%r2], {%r0, %r0, %r0, %r0};")
    with pytest.raises(Fault, match="ends while its shared memory is still read"):
        store(after="")
    with pytest.raises(Fault, match=r"still read by\s+line \d+: cp\.async\.bulk\.tensor"):
        store(after="st.shared.u32 [%r1], 7; cp.async.bulk.wait_group.read 0;")
    with pytest.raises(Fault, match="ends while its shared memory is still read"):
        store(commit="")


def test_a_load_nobody_waits_for():
    memory = GlobalMemory()
    source = tensor_map(memory, "a", np.zeros((16, 64), "u2"), (64, 16), 3)
    body = (
        parameters(1)
        + START
        + f"""
        mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 2048; mov.s32 %r10, 0;
        {LOAD.format(rank=2)} [%r1+1024], [%d0, {{%r10, %r10}}], [%r1]; AFTER: ret;"""
    )
    with pytest.raises(Fault, match="ends while a copy to its shared memory is under way"):
        launch(body, memory=memory, shared=4096, maps=[source])


def test_a_tensor_load_by_every_lane():
    memory = GlobalMemory()
    source = tensor_map(memory, "a", np.zeros((16, 64), "u2"), (64, 16), 3)
    body = (
        parameters(1)
        + START
        + f"""
        AFTER: bar.sync 0; mov.s32 %r10, 0;
        {LOAD.format(rank=2)} [%r1+1024], [%d0, {{%r10, %r10}}], [%r1]; ret;"""
    )
    with pytest.raises(Fault, match="the target of a copy under way"):
        launch(body, memory=memory, shared=4096, maps=[source])


def test_a_plain_bulk_copy():
    memory = GlobalMemory()
    data = np.arange(64, dtype="u4")
    source, target = memory.put("a", data), memory.empty("b", 256)
    body = (
        parameters(2)
        + START
        + f"""
        mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 256;
        cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r1+128], [%d0], 256, [%r1];
        {wait("%r1", "0")} cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r1+128], 256;
        cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; AFTER: ret;"""
    )
    launch(body, source, target, memory=memory, shared=4096)
    assert (target.read("u4", (64,)) == data).all()
