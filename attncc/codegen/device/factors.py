"""What a key multiplies by: `k = k * c` is a factor of its dot products, `v = v * c` one of its weights.

A thread needs the factors of 2 columns in 8, its warp those of all.  The eight lanes whose columns are the same share
them out: each computes those of an eighth, before the block's products, and they go round by shuffles.  That is an
eighth of the loads (and of the look-ups of pages).  Where the rows of a packed tile may differ in them, each thread
computes its own.

A key that the mask hides may have any factor, NaN too: hidden scores become -inf after the product (softmax.py), and
hidden weights 0.
"""

import cutlass.cute as cute
from cutlass import Float32

from .functors import Tile, key_position, position

SHARE = 8  # lanes with the same columns: those of equal place in their quads
SAME_PLACE = 3 << 8 | 31  # a segment mask of shfl.idx: the low two bits of the source lane are this lane's own


def load_factors(p, fn, tile: Tile, col0):
    """Of a block whose first column of this thread is col0: the factors of every eighth column of its own."""
    if not (p.key_factor or p.weight_factor) or p.factors_by_row:
        return ()
    turn = cute.arch.lane_idx() // 4
    found = ()
    for at in range(0, p.tile_kv // 4, SHARE):  # of the thread's columns, two in 8
        col = col0 + 4 * at + 8 * (turn // 2) + turn % 2
        there = col < tile.stop
        if at + SHARE > p.tile_kv // 4:
            there = there & (turn < p.tile_kv // 4 - at)
        where = key_position(p, tile.rows[0].env, col, tile.stop)
        found = (*found, factors(p, fn, tile, 0, where, there))
    return found


def factors(p, fn, tile: Tile, i: int, where, there):
    """(of the dot product, of the weight) of the key at position `where`, for row i of the thread; 1 where there is
    none.  `there`: it exists."""
    row = tile.rows[i]
    found = iter(fn.factors(row.env, row.hd, where, there))
    return tuple(next(found) if used else Float32(1.0) for used in (p.key_factor, p.weight_factor))


class Factors:
    """The factors of a thread's columns in a block."""

    def __init__(self, p, fn, tile: Tile, col0, loaded):
        self.p, self.fn, self.tile, self.col0, self.loaded = p, fn, tile, col0, loaded
        self.known = {}

    def of(self, which: int, i: int, off: int):
        """`which`: 0, of the dot product; 1, of the weight; for row i of the thread and column col0 + off."""
        if self.p.factors_by_row:
            where, there = position(self.p, self.tile, self.col0, off), self.col0 + off < self.tile.stop
            return factors(self.p, self.fn, self.tile, i, where, there)[which]
        if (which, off) not in self.known:
            number = 2 * (off // 8) + off % 2
            mine, turn = self.loaded[number // SHARE][which], number % SHARE
            self.known[which, off] = cute.arch.shuffle_sync(mine, 4 * turn, mask_and_clamp=SAME_PLACE)
        return self.known[which, off]
