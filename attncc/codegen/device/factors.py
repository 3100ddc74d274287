"""What a key multiplies by: `k = k * c` is a factor of its dot products, `v = v * c` one of its weights.

A producer puts the factors of a block's keys into a small ring in shared memory, which has as many slots as V's, at the
same places: who fills V's slots, or, where batches are served, the schedule warp, which has time for it.

A thread has two columns in eight; sixteen columns are a line of 64 bytes in which its four lie together, then comes
such a line of the other factor, if there are two.

Where the rows of a packed tile may differ in their keys' factors, each thread computes its own.

A key that the mask hides may have any factor, NaN too: hidden scores become -inf after the product (softmax.py), and
hidden weights 0.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from .functors import Tile, column, head_of, key_position, position
from .ring import Ring, arrive, is_lead, release_for

LINE = 16  # columns of a line


class Shelf(NamedTuple):
    """The ring, and the shared address of its first slot."""

    base: Any
    ring: Ring


def used(p) -> int:
    return bool(p.key_factor) + p.weight_factor


def factor_barriers(p) -> int:
    return 2 * p.v_stages if p.shelved else 0


def allocate_shelf(p, smem, barriers) -> Shelf:
    base = Int32(0)
    if p.shelved:
        base = smem.allocate_array(Float32, p.v_stages * used(p) * p.tile_kv, byte_alignment=16).toint()
    return Shelf(base, Ring(barriers, p.v_stages if p.shelved else 0))


def factors(p, fn, env, where, there) -> tuple:
    """Of the key at position `where`: those that the variant has; `there`: it exists."""
    return fn.factors(env, head_of(fn, env), where, there)


# ------------------------------------------------------------------------------------- producers
def compute_factors(p, fn, env, first, stop) -> tuple:
    """A lane's share of the factors of a block whose parts' first keys have places `first`; from `stop` on there are
    none."""
    found: tuple = ()
    if p.shelved:
        for k in range(-(-p.tile_kv // 32)):
            part = 32 * k // p.part_kv
            at = first[part] + own_column(k - part * p.part_kv // 32)
            found = (*found, factors(p, fn, env, key_position(p, env, at, stop), at < stop))
    return found


def own_column(k: int):
    return 32 * k + cute.arch.lane_idx()


def put_factors(p, shelf: Shelf, slot, phase, found: tuple) -> None:
    """... into a slot, when it is free.  Predicates, no branches: see `arrive`."""
    if not p.shelved:
        return
    cute.arch.mbarrier_wait(shelf.ring.empty + slot, phase)
    for k, values in enumerate(found):
        column = own_column(k)
        line, inside = column // LINE, ((column % 8) // 2) * 4 + ((column // 8) % 2) * 2 + column % 2
        to = shelf.base + slot * (used(p) * p.tile_kv * 4) + (line * (used(p) * LINE) + inside) * 4
        inside_tile = None if 32 * (k + 1) <= p.tile_kv else Boolean(column < p.tile_kv)
        for n, x in enumerate(values):
            cute.arch.inline_ptx(
                f"st.shared.f32 [{{$r0}} + {n * LINE * 4}], {{$r1}};", read_only_args=[to, x], predicate=inside_tile
            )
    cute.arch.sync_warp()
    arrive(shelf.ring.full + slot, is_lead())


# ------------------------------------------------------------------------------------- consumers
@cute.jit
def wait_factors(p: cutlass.Constexpr, shelf: cutlass.Constexpr, slot: Int32, phase: Int32, line: Int32):
    """Where this thread's factors of a block lie, once they are there; `line`: of the block, its columns' first."""
    found = Int32(0)
    if const_expr(p.shelved):
        cute.arch.mbarrier_wait(shelf.ring.full + slot, phase)
        found = shelf.base + (slot * p.tile_kv + line * LINE) * (used(p) * 4) + (cute.arch.lane_idx() % 4) * 16
    return found


def give_back_factors(p, shelf: Shelf, slot, lead, count=1) -> None:
    """This warp needs them no more; it counts for `count`."""
    if p.shelved:
        release_for(shelf.ring, slot, lead, Int32(count))


class Factors:
    """The factors of a thread's columns in a block, which lie at `place`."""

    def __init__(self, p, fn, tile: Tile, col0, place):
        self.p, self.fn, self.tile, self.col0, self.place = p, fn, tile, col0, place
        self.known = {}

    def of(self, which: int, i: int, off: int):
        """`which`: 0, of the dot product; 1, of the weight; for row i of the thread and column col0 + off."""
        p = self.p
        n = which if p.key_factor else 0
        if p.factors_by_row:
            where, there = position(p, self.tile, self.col0, off), column(p, self.col0, off) < self.tile.stop
            return factors(p, self.fn, self.tile.rows[i].env, where, there)[n]
        eight = off // 8
        if (which, eight) not in self.known:
            at = ((eight // 2 * used(p) + n) * LINE + eight % 2 * 2) * 4
            self.known[which, eight] = cute.arch.inline_ptx(
                f"ld.volatile.shared.v2.f32 {{{{$w0}}, {{$w1}}}}, [{{$r0}} + {at}];",
                write_only_types=[Float32] * 2,
                read_only_args=[self.place],
            )
        return self.known[which, eight][off % 2]
