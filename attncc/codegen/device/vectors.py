"""The vector slots - f_q, f_k, f_v, epilogue - on rows as a consumer warpgroup holds them.

A row is a Python list of this thread's float32 features: 8 n + 2 (t % 4) + c at place 2 n + c, for n < head_dim / 8, so
never a feature that only the tile has.  The four lanes of a quad hold a row together.  What the module's functions take
and what STEPS says: codegen/emit_vectors.py.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from .features import Tables
from .layout import quad
from .rope import cos_sin, features_of, table_of, turn, turn_part
from .softmax import chains


def plus(a, b):
    return a + b


class Part(NamedTuple):
    """Some eights of a row's features, `blocks`, which need of the rest the sums that are known alone.  `turns`: ropes
    reach them; `until`: the step to stop at; `shifts`: how many features further on each begins."""

    blocks: list
    sums: tuple = ()
    turns: bool = True
    until: int | None = None
    shifts: tuple = (0, 0)


def evaluate(
    p, fn, slot: str, turnings, at: tuple, values, t, part: Part | None = None, known: dict | None = None, tables=None
):
    """What the slot makes of a row.  `at`: environment, the head's values, and what tells the slot's rows apart.

    With `part`: of a part of it, and where that ends at a sum, what this adds up.  `known`: of a step, the sum, or
    cosines and sines, one after another, which take the place of the row's own as far as there are any; where the step
    isn't there, those that were computed are put there.  `tables`: what has been read of them.
    """
    c_in = (t % 4) * 2
    sums, turned = (() if part is None else part.sums), ()
    blocks = range(len(values) // 2) if part is None else part.blocks
    shifts = (0,) * len(blocks) if part is None else part.shifts
    tables = tables or Tables(p, features_of(p, turnings), blocks, t, shifts)

    def each(name: str):
        """The function of every feature."""
        return [
            getattr(fn, name)(
                *at, x, c_in + (8 * blocks[k // 2] + (shifts[k // 2] + k % 2)), sums, tuple(row[k] for row in turned),
                tables.of(k // 2, k % 2),
            )
            for k, x in enumerate(values)
        ]  # fmt: skip

    for k, (kind, *how) in enumerate(fn.STEPS[slot]):
        name = f"{slot}_{k}"
        if part is not None and k == part.until:
            return each(name)
        if kind == "sum":
            if part is None:
                there = known is not None and k in known
                sums = (*sums, known[k] if there else quad(plus, chains(plus, each(name), 2)))
        else:
            dims, style, table, _ = how
            angle = angles(p, fn, name, turnings, table, at, sums)
            if known is not None:
                angle = remembered(known, k, angle)
            if part is None:
                turned = (*turned, turn(each(name), dims, style, angle, t))
            else:
                turned = (*turned, turn_part(each(name), style, angle, blocks[0], t) if part.turns else each(name))
    return each(slot)


def remembered(known: dict, k: int, angle):
    """`angle`, but with what is known of step k; what isn't, will be."""
    if k in known:
        found = iter(known[k])
        return lambda pair: next(found, None) or angle(pair)
    known[k] = []

    def of(pair):
        known[k].append(angle(pair))
        return known[k][-1]

    return of


def angles(p, fn, name: str, turnings, table: int | None, at: tuple, sums):
    """pair -> (cos, sin) of a rope."""
    if table is None:
        return lambda pair: getattr(fn, f"{name}_pair")(*at, None, pair, sums, (), None)
    begin = table_of(p, turnings, table).toint()
    position = getattr(fn, f"{name}_position")(*at, None, None, sums, (), None)
    return lambda pair: cos_sin(begin + pair * 8, position)


WHOLE = 16  # eights of a row that stay in registers from step to step


class Run(NamedTuple):
    """Parts that are alike: for each n < count the eights of features from 8 (first + n) + offsets on, and of these
    what lanes `begin` to `end` of a quad hold."""

    first: int
    count: int
    offsets: tuple[int, ...]
    turns: bool
    begin: int = 0
    end: int = 4


def runs_of(steps, blocks: int, room: bool, spread: int = 1) -> list[Run] | None:
    """A row of so many eights of features in parts that are alike; None: as a whole, which is faster where it fits, or
    the only way.  `room`: there are registers for WHOLE of them; `spread`: eights of a part, where any will do."""
    if steps and room and blocks <= WHOLE:
        return None
    ropes = [how for kind, *how in steps if kind == "rope"]
    if not ropes:
        count = blocks // spread
        parts = tuple(8 * count * n for n in range(spread))
        runs = [Run(0, count, parts, False), Run(count * spread, blocks % spread, (0,), False)]
        return [run for run in runs if run.count > 0]
    dims, style, *_ = ropes[0]
    if len(ropes) > 1 or steps[-1][0] == "sum" or (style == "neox" and dims % 4):
        return None
    first, offsets = (dims // 2, (0, dims // 2)) if style == "neox" else (dims, (0,))
    runs = [Run(0, first // 8, offsets, True), Run(first // 8, 1, offsets, True, 0, first % 8 // 2),
            Run(dims // 8, 1, (0,), False, dims % 8 // 2, 4 if dims % 8 else 0),
            Run(-(-dims // 8), blocks - -(-dims // 8), (0,), False)]  # fmt: skip
    return [run for run in runs if run.count > 0 and run.begin < run.end]


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
