"""Which rows a dense tile holds: of one query head, or of several that share a kv head.

Where lists say which blocks of keys are visited, a tile visits what any of its rows lists.  So where the heads of a
group share their lists a tile takes P heads at once, a power of two, and 128 / P positions: rows that choose alike.
Of a warpgroup's 64 rows, row r is of head r // (64 / P) and position r % (64 / P): a TMA box of so many positions and
P heads, with the bytes and the swizzle of 64 rows of one head.  P is a parameter of the launch (runtime/launch.py):
one kernel serves all group sizes.  Items carry their first head.
"""

import cutlass
import cutlass.cute as cute

from ..config import SAME_HEAD
from .layout import coords


def packs(p) -> bool:
    return p.packs > 1


def positions_of(p, env, rows: int):
    """How many positions so many rows are."""
    return rows >> env.shift if packs(p) else rows


def of_packs(p, env, heads):
    """How many items a number of heads is."""
    return heads >> env.shift if packs(p) else heads


def first_head(p, env, item):
    return item << env.shift if packs(p) else item


def own_rows(p, env, m, w, r_in):
    """(environments, positions) of the two rows r_in, r_in + 8 of a warpgroup's share of tile m."""
    if not packs(p):
        row0 = (m * p.warpgroups + w) * 64 + r_in
        return (env, env), (row0, row0 + 8)
    each = positions_of(p, env, 64)
    first = (m * p.warpgroups + w) * each
    row = first + (r_in & (each - 1))
    mine = env._replace(h=env.h + (r_in >> (6 - env.shift)))
    if p.packs <= SAME_HEAD:
        return (mine, mine), (row, row + 8)
    other = env._replace(h=env.h + ((r_in + 8) >> (6 - env.shift)))
    return (mine, other), (row, first + ((r_in + 8) & (each - 1)))


def rows_there(p, env, m, w):
    """How many of a warpgroup's rows must be looked at: packed, all if there is one."""
    first = (m * p.warpgroups + w) * positions_of(p, env, 64)
    left = env.qo_len - first
    return cutlass.min(left, 1) << 6 if packs(p) else left


def box_of(p, env, m, w, cols: int, tile: int):
    """(coordinates of a row of boxes in the map of q or out, which of them) of a warpgroup's share of the tile that an
    item says: of `cols` features at a time, of `tile`."""
    whole = coords(tile)[None, None, env.h, env.b]
    if not packs(p):
        return cute.local_tile(whole, (64, cols), (None, None)), m * p.warpgroups + w
    begin = (m * p.warpgroups + w) * positions_of(p, env, 64)
    return cute.local_tile(cute.domain_offset((begin, 0), whole), (64, cols), (None, None)), 0
