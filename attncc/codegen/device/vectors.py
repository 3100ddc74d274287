"""The vector slots - f_q, f_k, f_v, epilogue - on rows as a consumer warpgroup holds them.

A row is a Python list of this thread's float32 features: 8 n + 2 (t % 4) + c at place 2 n + c, for n < head_dim / 8, so
never a feature that only the tile has.  The four lanes of a quad hold a row together.  What the module's functions take
and what STEPS says: codegen/emit_vectors.py.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm

from .gather import place
from .layout import quad
from .ring import warp_uniform
from .rope import cos_sin, table_of, turn, turn_part
from .softmax import chains, pack

BAR_ROWS = 12  # ... 13: rows of a warpgroup have been transformed


def plus(a, b):
    return a + b


class Part(NamedTuple):
    """Some eights of a row's features, `blocks`, which need of the rest the sums that are known alone.  `turns`: ropes
    reach them; `until`: the step to stop at."""

    blocks: list
    sums: tuple = ()
    turns: bool = True
    until: int | None = None


def evaluate(p, fn, slot: str, turnings, at: tuple, values, t, part: Part | None = None):
    """What the slot makes of a row.  `at`: environment, the head's values, and what tells the slot's rows apart.

    With `part`: of a part of it, and where that ends at a sum, what this adds up.
    """
    c_in = (t % 4) * 2
    sums, turned = (() if part is None else part.sums), ()
    blocks = range(len(values) // 2) if part is None else part.blocks

    def each(name: str):
        """The function of every feature."""
        return [
            getattr(fn, name)(*at, x, c_in + (8 * blocks[k // 2] + k % 2), sums, tuple(row[k] for row in turned))
            for k, x in enumerate(values)
        ]

    for k, (kind, *how) in enumerate(fn.STEPS[slot]):
        name = f"{slot}_{k}"
        if part is not None and k == part.until:
            return each(name)
        if kind == "sum":
            if part is None:
                sums = (*sums, quad(plus, chains(plus, each(name), 1)))
        else:
            dims, style, table = how
            angle = angles(p, fn, name, turnings, table, at, sums)
            if part is None:
                turned = (*turned, turn(each(name), dims, style, angle, t))
            else:
                turned = (*turned, turn_part(each(name), style, angle, blocks[0], t) if part.turns else each(name))
    return each(slot)


def angles(p, fn, name: str, turnings, table: int | None, at: tuple, sums):
    """pair -> (cos, sin) of a rope."""
    if table is None:
        return lambda pair: getattr(fn, f"{name}_pair")(*at, None, pair, sums, ())
    begin = table_of(p, turnings, table).toint()
    position = getattr(fn, f"{name}_position")(*at, None, None, sums, ())
    return lambda pair: cos_sin(begin + pair * 8, position)


WHOLE = 16  # eights of a row that stay in registers from step to step


class Run(NamedTuple):
    """Parts that are alike: for each n < count the eights of features first + n + offsets."""

    first: int
    count: int
    offsets: tuple[int, ...]
    turns: bool


def runs_of(steps, blocks: int, room: bool) -> list[Run] | None:
    """A row of so many eights of features in parts that are alike; None: as a whole, which is faster where it fits, or
    the only way.  `room`: there are registers for WHOLE of them."""
    if steps and room and blocks <= WHOLE:
        return None
    ropes = [how for kind, *how in steps if kind == "rope"]
    if not ropes:
        return [Run(0, blocks, (0,), False)]
    dims, style, _ = ropes[0]
    pairs = dims // 16 if style == "neox" else 0
    if len(ropes) > 1 or steps[-1][0] == "sum" or dims % (16 if pairs else 8):
        return None
    turning = Run(0, pairs, (0, pairs), True) if pairs else Run(0, dims // 8, (0,), True)
    return [turning, Run(dims // 8, blocks - dims // 8, (0,), False)]


@cute.jit
def finish_rows(p: cutlass.Constexpr, fn: cutlass.Constexpr, turnings: cutlass.Constexpr, O, tile, lse, t):
    """The epilogue of an accumulator's two rows, in place."""
    for i in cutlass.range_constexpr(2):
        row = tile.rows[i]
        places = [(i, c, n) for n in range(p.head_dim_vo // 8) for c in range(2)]
        at = row.env, row.hd, row.i, row.iq, lse[i]
        found = evaluate(p, fn, "epilogue", turnings, at, [O[e] for e in places], t)
        for e, x in zip(places, found, strict=True):
            O[e] = x


# ------------------------------------------------------------------------------------- tiles in shared memory
def transform_rows(p, fn, slot: str, turnings, at, base, row, rows: int, tile: int, features: int, t) -> None:
    """The slot on two rows of a thread, `row` and row + 8, and so on 16 of a warp, in place and rounded to the element
    type: rows of a swizzled tile of `rows` rows and `tile` features, of which `features` exist, at shared address
    `base`.  `at`: what `evaluate` must know of each of the two.  Runs on whole warps only.

    The caller owes: before, the wait at the barrier which says that the tile has landed; after, by every thread that
    came here, cute.arch.fence_view_async_shared() - these are writes of the generic proxy, which products do not see
    by themselves, nor would a later TMA copy into the tile stay behind them - and then a barrier with all threads that
    multiply these rows.
    """
    for i in range(2):
        places = [base + place(row + 8 * i, n, rows, tile) + 4 * (t % 4) for n in range(features // 8)]
        values = [x for address in places for x in unpack(p, load_word(address))]
        found = evaluate(p, fn, slot, turnings, at[i], values, t)
        for n, address in enumerate(places):
            word = pack(p, found[2 * n], found[2 * n + 1])
            cute.arch.inline_ptx("st.shared.b32 [{$r0}], {$r1};", read_only_args=[address, word])


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
        at = [(row.env, row.hd, row.i, row.iq) for row in tile.rows]
        row = (t // 32) * 16 + (t % 32) // 4
        transform_rows(p, fn, "f_q", turnings, at, base, row, 64, p.tile_qk, p.head_dim_qk, t)
    cute.arch.fence_view_async_shared()
    cute.arch.barrier(barrier_id=BAR_ROWS + w, number_of_threads=128)
