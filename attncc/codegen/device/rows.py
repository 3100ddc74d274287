"""The vector slots on rows of a swizzled tile in shared memory, in place and rounded to the element type.

A quad of lanes has a row, and a lane reads and writes words of two of its features (vectors.py), free of bank
conflicts.  Rows of many features go part by part, since they would not stay in registers.

Whoever transforms rows owes: before, the wait at the barrier which says that the tile has landed; after, by every
thread that took part, cute.arch.fence_view_async_shared() - these are writes of the generic proxy, which wgmma does not
see by itself, nor would a later TMA copy into the tile stay behind them - and then a barrier with all that multiply the
rows.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm

from .gather import place
from .layout import quad
from .ring import warp_uniform
from .softmax import pack
from .vectors import Part, evaluate, plus, runs_of

BAR_ROWS = 12  # ... 13: rows of a warpgroup have been transformed
SPREAD = 8  # eights, at most, that a quad of several has at once: what they read is on its way together


class Line(NamedTuple):
    """A row of a tile of `rows` rows and `width` features at shared address `base`.  `kept`: it is, else it becomes
    zeros."""

    base: Any
    row: Any
    rows: int
    width: int
    kept: Any = True

    def address(self, n, t, shift: int = 0):
        """Of this lane's word of the features from 8 n + shift on."""
        lane = t % 4
        if shift:
            n, lane = n + (lane + shift // 2) // 4, (lane + shift // 2) % 4
        return self.place(n, lane)

    def load(self, p, blocks, t, shifts=()):
        places = enumerate(blocks)
        return [x for k, n in places for x in self.get(p, self.address(n, t, shifts[k] if shifts else 0))]

    def store(self, p, blocks, found, t, shifts=(), mine=None) -> None:
        """Where this lane has a share in them: `mine`."""
        for k, n in enumerate(blocks):
            given = {} if mine is None else {"predicate": mine}
            self.put(p, self.address(n, t, shifts[k] if shifts else 0), found[2 * k], found[2 * k + 1], given)

    # ---- how two features lie in memory
    def place(self, n, lane):
        return self.base + place(self.row, n, self.rows, self.width) + lane * 4

    def get(self, p, address):
        return unpack(p, load_word(address))

    def put(self, p, address, a, b, given) -> None:
        word = pack(p, a, b)
        if self.kept is not True:
            word = cutlass.select_(self.kept, word, Int32(0))
        cute.arch.inline_ptx("st.shared.b32 [{$r0}], {$r1};", read_only_args=[address, word], **given)


def transform_row(p, fn, slot: str, turnings, at: tuple, line, features: int, t, room=True, team: int = 1) -> None:
    """A row of `features` features.  `at`: as of `evaluate`; `line`: a Line, of whatever kind; `room`: there are
    registers for a row of 128; `team`: so many quads, neighbours in a warp, have the row together."""
    kind, blocks = type(line), features // 8
    runs = runs_of(fn.STEPS[slot], blocks, room, 1 if team == 1 else min(SPREAD, blocks // team))
    if runs is None:
        found = evaluate(p, fn, slot, turnings, at, line.load(p, range(blocks), t), t)
        if team > 1:  # each quad of them does all of it
            cute.arch.sync_warp()
        line.store(p, range(blocks), found, t)
        return
    sums: tuple = ()
    for k, (what, *_) in enumerate(fn.STEPS[slot]):
        if what == "sum":
            mine = quad(plus, add_up(p, fn, slot, turnings, at, kind, *line[:4], sums, k, blocks, t, team))
            sums = (*sums, of_team(plus, mine, team))
    for run in runs:
        transform_run(p, fn, slot, turnings, at, kind, *line, run, sums, t, team)


def of_team(op, x, team: int):
    """Reduce over the quads that share a row, what the lanes of each agree on."""
    for n in range(team.bit_length() - 1):
        x = op(x, cute.arch.shuffle_sync_bfly(x, offset=4 << n))
    return x


def first_of(team: int, t):
    """The first part of a row that a quad has, of which it then has every `team`-th."""
    return 0 if team == 1 else (t // 4) % team


@cute.jit
def add_up(
    p: cutlass.Constexpr, fn: cutlass.Constexpr, slot: cutlass.Constexpr, turnings: cutlass.Constexpr, at,
    kind: cutlass.Constexpr, base, row, rows: cutlass.Constexpr, width: cutlass.Constexpr, sums,
    number: cutlass.Constexpr, blocks: cutlass.Constexpr, t, team: cutlass.Constexpr,
):  # fmt: skip
    """This lane's share of the sum that is step `number`."""
    one = first_of(team, t)
    a, b = evaluate(
        p, fn, slot, turnings, at, kind(base, row, rows, width).load(p, [one], t), t, Part([one], sums, until=number)
    )
    total = a + b
    for n in cutlass.range(one + team, blocks, team, unroll=2):
        here = kind(base, row, rows, width)
        for x in evaluate(p, fn, slot, turnings, at, here.load(p, [n], t), t, Part([n], sums, until=number)):
            total = total + x
    return total


@cute.jit
def transform_run(
    p: cutlass.Constexpr, fn: cutlass.Constexpr, slot: cutlass.Constexpr, turnings: cutlass.Constexpr, at,
    kind: cutlass.Constexpr, base, row, rows: cutlass.Constexpr, width: cutlass.Constexpr, kept,
    run: cutlass.Constexpr, sums, t, team: cutlass.Constexpr,
):  # fmt: skip
    for n in cutlass.range(first_of(team, t), run.count, team, unroll=2 if team == 1 else 1):
        line = kind(base, row, rows, width, kept)
        blocks = [run.first + n + offset // 8 for offset in run.offsets]
        part = Part(blocks, sums, run.turns, shifts=tuple(offset % 8 for offset in run.offsets))
        lane, mine = of_quad(run, t)
        found = evaluate(p, fn, slot, turnings, at, line.load(p, blocks, lane, part.shifts), lane, part)
        line.store(p, blocks, found, lane, part.shifts, mine)


def of_quad(run, t):
    """(the lane whose features of a part this one takes, do they count?): those past the part's repeat its last."""
    if run.begin == 0 and run.end == 4:
        return t, None
    inner = t % 4
    return (t & ~3) + cutlass.min(inner, run.end - 1), (inner >= run.begin) & (inner < run.end)


def load_word(address):
    return cute.arch.inline_ptx("ld.shared.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address])


def unpack(p, word):
    """Two features of a word, as fp32."""
    if p.dtype == "bf16":
        return as_f32(word << 16), as_f32(word & -65536)
    asm = "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, {$r0}; cvt.f32.f16 {$w0}, lo; cvt.f32.f16 {$w1}, hi; }"
    return cute.arch.inline_ptx(asm, write_only_types=[Float32, Float32], read_only_args=[word])


def as_f32(word):
    return Float32(llvm.bitcast(Float32.mlir_type, Int32(word).ir_value()))


@cute.jit
def transform_queries(
    p: cutlass.Constexpr, fn: cutlass.Constexpr, turnings: cutlass.Constexpr, base: Int32, tile, rows: Int32, t: Int32,
    w: Int32,
):  # fmt: skip
    """f_q on a warpgroup's 64 rows of Q, which have landed at `base`; afterwards they may be multiplied.  Warps that
    have none of the first `rows` leave theirs as they are."""
    if warp_uniform(t // 32) * 16 < rows:
        for i, row in enumerate(tile.rows):
            line = Line(base, (t // 32) * 16 + (t % 32) // 4 + 8 * i, 64, p.tile_qk)
            transform_row(p, fn, "f_q", turnings, (row.env, row.hd, row.i, row.iq), line, p.head_dim_qk, t)
    cute.arch.fence_view_async_shared()
    cute.arch.barrier(barrier_id=BAR_ROWS + w, number_of_threads=128)
