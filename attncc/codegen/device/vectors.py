"""The vector slots - f_q, f_k, f_v, epilogue - on rows as a consumer warpgroup holds them.

A row is a Python list of this thread's float32 features: 8 n + 2 (t % 4) + c at place 2 n + c, for n < head_dim / 8, so
never a feature that only the tile has.  The four lanes of a quad hold a row together.  What the module's functions take
and what STEPS says: codegen/emit_vectors.py.
"""

import cutlass
import cutlass.cute as cute

from .layout import quad
from .rope import cos_sin, table_of, turn
from .softmax import chains


def plus(a, b):
    return a + b


def evaluate(p, fn, slot: str, turnings, at: tuple, values, t):
    """What the slot makes of a row.  `at`: environment, the head's values, and what tells the slot's rows apart."""
    c_in = (t % 4) * 2
    sums, turned = (), ()

    def each(name: str):
        """The function of every feature."""
        return [
            getattr(fn, name)(*at, x, c_in + (8 * (k // 2) + k % 2), sums, tuple(row[k] for row in turned))
            for k, x in enumerate(values)
        ]

    for k, (kind, *how) in enumerate(fn.STEPS[slot]):
        name = f"{slot}_{k}"
        if kind == "sum":
            sums = (*sums, quad(plus, chains(plus, each(name), 1)))
        else:
            dims, style, table = how
            angle = angles(p, fn, name, turnings, table, at, sums)
            turned = (*turned, turn(each(name), dims, style, angle, t))
    return each(slot)


def angles(p, fn, name: str, turnings, table: int | None, at: tuple, sums):
    """pair -> (cos, sin) of a rope."""
    if table is None:
        return lambda pair: getattr(fn, f"{name}_pair")(*at, None, pair, sums, ())
    begin = table_of(p, turnings, table).toint()
    position = getattr(fn, f"{name}_position")(*at, None, None, sums, ())
    return lambda pair: cos_sin(begin + pair * 8, position)


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
