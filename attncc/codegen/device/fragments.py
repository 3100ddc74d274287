"""Operands of mma.sync: how a warp's lanes read and multiply them."""

import cutlass.cute as cute
from cutlass import Float32, Int32

from .gather import turn_of
from .layout import panel_width


def load_matrices(address, transposed: bool = False):
    """Four 8 x 8 matrices of 16 bits, whose rows lie where lanes 8 k … 8 k + 7 say: a word of each a lane."""
    form = "ldmatrix.sync.aligned.m8n8.x4" + (".trans" if transposed else "") + ".shared.b16"
    return cute.arch.inline_ptx(
        form + " {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", write_only_types=[Int32] * 4, read_only_args=[address]
    )


def multiply(p, acc, at: int, a, b) -> None:
    """acc[at … at + 3] += a (16 x K) · b (K x 8), spread over the lanes of a warp; K is 16, or 8 where b is a word."""
    kind = p.dtype
    names = [f"{{$r{n}}}" for n in range(len(a) + len(b) + 4)]
    groups = names[: len(a)], names[len(a) : -4], names[-4:]
    text = f"mma.sync.aligned.m16n8k{8 * len(b)}.row.col.f32.{kind}.{kind}.f32 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, "
    text += ", ".join("{" + ", ".join(group) + "}" for group in groups) + ";"
    held = [acc[at + k] for k in range(4)]
    made = cute.arch.inline_ptx(text, write_only_types=[Float32] * 4, read_only_args=[*a, *b, *held])
    for k in range(4):
        acc[at + k] = made[k]


class Sixteen:
    """Where a lane's rows of 16 x 16 parts of a swizzled tile lie, for `load_matrices`: rows 16 `group` on, features
    16 k on.  The matrices follow each other down the rows first, or along the features."""

    def __init__(self, base, group, rows: int, tile: int, rows_first: bool):
        lane = cute.arch.lane_idx()
        down, along = ((lane // 8) % 2, lane // 16) if rows_first else (lane // 16, (lane // 8) % 2)
        row = group * 16 + down * 8 + lane % 8
        self.width = panel_width(tile)
        self.line = base + row * (self.width * 2)
        self.turn = along ^ turn_of(row, self.width)
        self.panel = rows * self.width * 2

    def __call__(self, k: int):
        each = self.width // 8
        return self.line + ((2 * k % each) ^ self.turn) * 16 + (2 * k // each) * self.panel
