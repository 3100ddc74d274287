"""Matrix products of one warp: mma.sync.m16n8k16 and m16n8k8, bf16 or f16 in, fp32 out."""

from __future__ import annotations

import re

import numpy as np

from .program import Instr, PtxError
from .translate import Translator, effect
from .wgmma import OPERANDS


def rows_of(words: np.ndarray, kind: str) -> np.ndarray:
    """One register [lanes] of 8 rows x 8 columns a warp: lane 4 r + c holds columns 2 c, 2 c + 1 of row r."""
    return OPERANDS[kind](words.copy().view("u2")).reshape(-1, 8, 8)


@effect("mma.sync", together=True)
def product(ins: Instr, t: Translator):
    """mma.sync.aligned.m16n8kK.row.col.f32.in.in.f32 d, a, b, c"""
    form = re.fullmatch(r"mma\.sync\.aligned\.m16n8k(8|16)\.row\.col\.f32\.(bf16|f16)\.(bf16|f16)\.f32", ins.op)
    if form is None or form.group(2) != form.group(3):
        raise PtxError(f"product not understood: {ins}")
    kind, steps = form.group(2), int(form.group(1)) // 8
    d, a, b, c = (arg.items for arg in ins.args)
    if (len(d), len(a), len(b), len(c)) != (4, 2 * steps, steps, 4):
        raise PtxError(f"product not understood: {ins}")
    writers = [t.writer(r, "f32") for r in d]
    a_regs, b_regs, c_regs = (
        [t.reader(r, "b32") for r in a],
        [t.reader(r, "b32") for r in b],
        [t.reader(r, "f32") for r in c],
    )

    def run(ctx, m):
        if m is not None and not m.all():
            raise ins.fault("mma with inactive lanes")
        # register 2 k + r of a: columns 8 k.., rows 8 r..; register k of b: rows 8 k.. of a column a row of lanes
        parts = [rows_of(r(ctx), kind) for r in a_regs]
        left = np.concatenate([np.concatenate(parts[2 * k : 2 * k + 2], 1) for k in range(steps)], 2)
        right = np.concatenate([rows_of(r(ctx), kind) for r in b_regs], 2)  # [warp, n, k]
        out = left @ right.swapaxes(1, 2)  # [warp, 16, 8]
        for k, (write, held) in enumerate(zip(writers, c_regs, strict=True)):
            half = out[:, 8 * (k // 2) : 8 * (k // 2) + 8, k % 2 :: 2].reshape(-1)
            write(ctx, half + held(ctx), None)

    return run
