"""Warpgroup matrix products (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions").

A product is computed when it is issued but its accumulator registers are NaN until its group is waited for, and what
it reads from shared memory is under watch until then.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .memory import GENERIC, AsyncRead
from .ops import from_bf16
from .program import Imm, Instr, PtxError, Reg, Vec
from .translate import APART, Translator, effect

POISON = np.uint32(0x7FFF_DEAD)
ROW_BYTES = {0: 16, 1: 128, 2: 64, 3: 32}  # the descriptor's layout field -> bytes a row of the swizzle atom
SWIZZLE_BITS = {0: 0, 1: 3, 2: 2, 3: 1}
OPERANDS = {"bf16": from_bf16, "f16": lambda bits: bits.view("f2").astype("f4")}


@dataclass(eq=False)
class Accumulator:
    """The 64 x N product that a set of registers will hold."""

    registers: tuple[int, ...]
    value: np.ndarray
    left: int = 4  # warps that have not waited for it


@lru_cache(maxsize=4096)
def operand_index(descriptor: int, rows: int, transposed: bool) -> tuple[np.ndarray, int, int]:
    """(16-bit word numbers [rows, 16], lowest byte, end) of an operand in shared memory.  `transposed`: its rows (M or
    N) are contiguous, not K.  Canonical layouts as in the PTX ISA, "Shared Memory Matrix Layout"."""
    start, leading, stride = ((descriptor >> at & 0x3FFF) << 4 for at in (0, 16, 32))
    if descriptor >> 49 & 7:
        raise PtxError("matrix descriptors with a base offset are not modelled")
    layout = descriptor >> 62 & 3
    width = ROW_BYTES[layout]
    r, k = np.arange(rows)[:, None], np.arange(16)[None, :]
    if not transposed and layout:  # 8 rows x `width` bytes; K stays inside the width
        at = r % 8 * width + r // 8 * stride + k * 2
    elif not transposed:  # core matrices of 8 rows x 16 bytes
        at = r % 8 * 16 + r // 8 * stride + k % 8 * 2 + k // 8 * leading
    elif layout:  # 8 values of K x `width` bytes of rows
        n = width // 2
        at = r % n * 2 + r // n * leading + k % 8 * width + k // 8 * stride
    else:
        at = r % 8 * 2 + r // 8 * stride + k % 8 * 16 + k // 8 * leading
    at = at + start
    at ^= (at >> 7 & (1 << SWIZZLE_BITS[layout]) - 1) << 4
    return at >> 1, int(at.min()), int(at.max()) + 2


def read_shared(c, ins: Instr, descriptor: int, rows: int, transposed: bool, kind: str) -> tuple[np.ndarray, AsyncRead]:
    index, low, high = operand_index(descriptor, rows, transposed)
    shared = c.cta.shared
    if high > shared.limit:
        raise ins.fault(f"the operand reaches byte {high} of shared memory, which ends at {shared.limit}")
    if (shared.state[low:high] & GENERIC).any() and shared.unfenced(c.group.number, 2 * index.reshape(-1)):
        raise ins.fault("the product reads what was written with no fence.proxy.async after it")
    return OPERANDS[kind](shared.views[2][index]), shared.begin_read(ins, low, high, readers=4)


def fragment_a(words: np.ndarray, kind: str) -> np.ndarray:
    """Registers [4, 128] of an A operand as 64 x 16: register 2 c + r holds columns 8 c.., rows 8 r.. of each warp."""
    a = words.view("u2").reshape(2, 2, 4, 8, 4, 2)  # c, r, warp, lane // 4, lane % 4, pair
    return OPERANDS[kind](np.ascontiguousarray(a.transpose(2, 1, 3, 0, 4, 5)).reshape(64, 16))


def from_registers(rows: np.ndarray) -> np.ndarray:
    """Accumulator registers [N / 2, 128] as 64 x N."""
    d = rows.reshape(-1, 2, 2, 4, 8, 4)  # column // 8, row // 8, pair, warp, lane // 4, lane % 4
    return np.ascontiguousarray(d.transpose(3, 1, 4, 0, 5, 2)).reshape(64, -1)


def to_registers(value: np.ndarray) -> np.ndarray:
    d = value.reshape(4, 2, 8, -1, 4, 2)
    return np.ascontiguousarray(d.transpose(3, 1, 5, 0, 2, 4)).reshape(-1, 128)


@effect("wgmma.mma_async", alone=True)
def product(ins: Instr, t: Translator):
    """wgmma…mMnNk16.f32.in.in d, a, b, scale-d, negate-a, negate-b[, transpose-a], transpose-b"""
    m = re.search(r"m64n(\d+)k16\.f32\.(bf16|f16)\.(bf16|f16)$", ins.op)
    if m is None or m.group(2) != m.group(3) or any(not isinstance(r, Reg) for r in ins.args[0].items):
        raise PtxError(f"product not understood: {ins}")
    columns, kind = int(m.group(1)), m.group(2)
    registers = tuple(r.index for r in ins.args[0].items)
    if len(registers) != columns // 2:
        raise PtxError(f"{len(registers)} registers for {columns} columns: {ins}")
    flags = [int(a.text) for a in ins.args[4:] if isinstance(a, Imm)]
    from_regs = isinstance(ins.args[1], Vec)
    if len(flags) != (3 if from_regs else 4):
        raise PtxError(f"product not understood: {ins}")
    a_regs = [t.reader(r, "b32") for r in ins.args[1].items] if from_regs else []
    a_desc = None if from_regs else t.reader(ins.args[1], "b64")
    b_desc, accumulate = t.reader(ins.args[2], "b64"), t.reader(ins.args[3], "pred")
    sign, trans_a, trans_b = flags[0] * flags[1], not from_regs and flags[2] == 1, flags[-1] == 1

    def run(c, mask):
        if c.n != 128 or (mask is not None and not mask.all()):
            return APART
        keep = accumulate(c)
        if keep.any() != keep.all():
            raise ins.fault("scale-d differs between lanes")
        reads = []
        if a_desc is None:
            a = fragment_a(np.stack([r(c) for r in a_regs]), kind)
        else:
            a, read = read_shared(c, ins, uniform(ins, a_desc(c)), 64, trans_a, kind)
            reads.append(read)
        b, read = read_shared(c, ins, uniform(ins, b_desc(c)), columns, trans_b, kind)
        reads.append(read)
        acc = claim(c, ins, registers, bool(keep[0]))
        out = a @ b.T if sign > 0 else -(a @ b.T)
        acc.value = acc.value + out if keep[0] else out
        for w in c.warps:
            w.mma_open += reads
            w.mma_open.append(acc)
        return None

    return run


def uniform(ins: Instr, row: np.ndarray) -> int:
    first = int(row[0])
    if (row != row[0]).any():
        raise ins.fault("the descriptor differs between lanes")
    return first


def claim(c, ins: Instr, registers: tuple[int, ...], keep: bool) -> Accumulator:
    """The accumulator of these registers: the one under way, or a new one; the registers are NaN until it is done."""
    acc = c.group.products.get(registers)
    if acc is not None:
        if acc.left != 4:
            raise ins.fault("some warps have waited for the accumulators, others have not")
        for w in c.warps:  # it is done only when this product is
            for held in (*w.mma, w.mma_open):
                if acc in held:
                    held.remove(acc)
        return acc
    busy = {r for other in c.group.products for r in other}
    if not busy.isdisjoint(registers):
        raise ins.fault("accumulators overlap those of a product under way")
    index = list(registers)
    file = c.group.files["R"]
    value = from_registers(file[index].view("f4")) if keep else np.zeros((64, 2 * len(index)), "f4")
    file[index] = POISON
    acc = c.group.products[registers] = Accumulator(registers, value)
    return acc


@effect("wgmma.commit_group", together=True)
def commit(ins: Instr, t: Translator):
    def run(c, m):
        for w in c.warps:
            w.mma.append(w.mma_open)
            w.mma_open = []

    return run


@effect("wgmma.wait_group", together=True)
def wait(ins: Instr, t: Translator):
    pending = int(ins.args[0].text)

    def run(c, m):
        for w in c.warps:
            while len(w.mma) > pending:
                for item in w.mma.pop(0):
                    if isinstance(item, AsyncRead):
                        c.cta.shared.end_read(item)
                    else:
                        retire(c, item, w)

    return run


def retire(c, acc: Accumulator, warp) -> None:
    """Give a warp its rows."""
    rows = to_registers(acc.value)[:, warp.lanes]
    c.group.files["R"][list(acc.registers), warp.lanes] = rows.view("u4")
    acc.left -= 1
    if acc.left == 0:
        del c.group.products[acc.registers]
