"""Tables in shared memory of what the vector slots know of a feature alone, such as the weights of a norm.

A CTA computes them once: read from memory for every row, an eighth of all instructions would be 64-bit addresses.
They follow the tables of frequencies, a word for every feature.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

BAR_TABLES = 6  # a named barrier: the tables are there


class Feature(NamedTuple):
    """One feature, as functions of a slot ask for its entries: `fixed[n]` is that of table n."""

    tables: Any
    block: Any
    place: int
    c: int

    def __getitem__(self, n: int):
        return self.tables.pair(n, self.block, self.place)[self.c]


class Tables:
    """The entries of this lane's features of a row, read when they are first asked for.  `blocks`, `shifts`: as of a
    Part (vectors.py)."""

    def __init__(self, p, begin, blocks, t, shifts):
        self.p, self.blocks, self.shifts = p, list(blocks), shifts
        self.mine = begin + (t % 4) * 8 if p.features else begin
        self.known: dict = {}

    def of(self, place: int, c: int) -> Feature:
        return Feature(self, self.blocks[place], place, c)

    def pair(self, n: int, block, place: int):
        if (n, place) not in self.known:
            at, offset = self.mine, 4 * (sum(self.p.features[:n]) + self.shifts[place])
            if isinstance(block, int):
                offset += 32 * block
            else:
                at = at + block * 32
            self.known[n, place] = cute.arch.inline_ptx(
                f"ld.shared.v2.f32 {{{{$w0}}, {{$w1}}}}, [{{$r0}} + {offset}];",
                write_only_types=[Float32] * 2, read_only_args=[at],
            )  # fmt: skip
        return self.known[n, place]


def words(p) -> int:
    return sum(p.features)


@cute.jit
def fill_features(p: cutlass.Constexpr, fn: cutlass.Constexpr, begin: Int32, env, t: Int32, w: Int32):
    """By all consumers.  `begin`: the shared address of the first table."""
    threads = 128 * p.warpgroups
    for n in cutlass.range_constexpr(len(p.features)):
        for first in cutlass.range_constexpr(0, p.features[n], threads):
            feature = first + w * 128 + t
            if feature < p.features[n]:
                at = begin + (sum(p.features[:n]) + feature) * 4
                entry = getattr(fn, f"feature_{n}")(env, feature)
                cute.arch.inline_ptx("st.shared.f32 [{$r0}], {$r1};", read_only_args=[at, entry])
    if const_expr(len(p.features) + len(p.turnings) > 0):
        cute.arch.barrier(barrier_id=BAR_TABLES, number_of_threads=threads)
