"""f_k on the sixteen keys of a block that a warp multiplies itself (few.py), in registers.

ldmatrix gives a lane, of keys lane / 4 and 8 further, words of features 8 n + 2 (t % 4) + c: a row as vectors.py has
it, and the second operand of mma.sync.  So keys never go back to shared memory, and a slot is free when it is read.
Rows go part by part where their steps allow it, both of a lane together: they share weights, and the second one's
angles follow from the first one's.

What a key multiplies all of its features by (`few_scale`: a norm's scale) is left to its scores: a product a key and
row, not one a feature, and nobody waits for the sum.  Sums of squares are the diagonals of K Kᵀ, by mma.sync: row r's
is found in lane 4 r + r / 2.
"""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from .features import Tables
from .fragments import Sixteen, load_matrices, multiply
from .functors import head_of, key_position
from .keys import ROWS, Key, afresh
from .layout import quad
from .rope import cos_sin, features_of, further, table_of, turn, turn_part
from .rows import unpack
from .softmax import chains, opaque, pack
from .vectors import Part, evaluate, plus, runs_of

PAIRS = 16  # whose angles of eight keys stay in registers, at most


def eight_further(p, fn, turnings, t) -> tuple:
    """Of every part of a row: of its ropes (step, (cos, sin) of what eight keys further turn more, pair by pair).
    Nothing where positions don't grow evenly."""
    if not p.few_keys or "few_k" not in fn.STEPS:
        return ()
    steps, found, room = fn.STEPS["few_k"], [], PAIRS
    if p.layout == "blocks" or any(kind == "rope" and how[-1] is None for kind, *how in steps):
        return ()
    for part in parts_of(steps, p.head_dim_qk // 8):
        ropes = []
        for k, (kind, *how) in enumerate(steps):
            if kind == "rope" and part.turns:
                dims, style, table, step = how
                begin, made = table_of(p, turnings, table).toint(), []

                def angle(pair, begin=begin, step=step, made=made):
                    made.append(cos_sin(begin + pair * 8, Int32(ROWS * step)))
                    return made[-1]

                zeros = [Float32(0.0)] * (2 * len(part.blocks))
                if whole(p, part):
                    turn(zeros, dims, style, angle, t)
                else:
                    turn_part(zeros, style, angle, part.blocks[0], t)
                ropes.append((k, tuple(made[:room])))
                room -= len(ropes[-1][1])
        found.append(tuple(ropes))
    return tuple(found)


def read_keys(p, base, group) -> tuple:
    """Words of this warp's keys of a block at shared address `base`: [half][eight features]."""
    at = Sixteen(base, group, p.tile_kv, p.tile_qk, False)
    found = [load_matrices(at(k)) for k in range(p.tile_qk // 16)]
    return tuple([word for four in found for word in four[2 * half : 2 * half + 2]] for half in range(2))


def transform_keys(p, fn, turnings, more: tuple, words, env, first, stop):
    """(operands: k and the words of features 16 k on, two of each half, when they are done; what the two columns of
    each half are to be multiplied by, or None).  `more`: eight_further; `first`: the place of the warp's first key;
    from `stop` on there are none."""
    t, env = opaque(cute.arch.lane_idx()), afresh(env, first >> 15)
    hd, keys = head_of(fn, env), []
    for n in range(2):
        at = first + t // 4 + n * ROWS
        keys.append(Key(env, hd, key_position(p, env, at, stop), at < stop))
    rows = OwnRows(p, fn, turnings, words, keys, t)
    return rows.operands(more), rows.scales()


class OwnRows:
    """A lane's two keys of a block."""

    def __init__(self, p, fn, turnings, words, keys, t):
        self.p, self.fn, self.turnings, self.words, self.keys, self.t = p, fn, turnings, words, keys, t
        self.diagonal: Any = None

    def values(self, half: int, blocks) -> list:
        return [x for n in blocks for x in unpack(self.p, self.words[half][n])]

    def squares(self, half: int):
        """The sum of the squares of a row r, but only in lane 4 r + r / 2."""
        if self.diagonal is None:
            acc = [[Float32(0.0)] * 4 for _ in range(4)]
            for k in range(-(-self.p.head_dim_qk // 16)):
                for n, row in enumerate(self.words):
                    pair = row[2 * k : 2 * k + 2]  # two times eight features, as if of sixteen keys
                    for c in range(2):
                        multiply(self.p, acc[2 * n + c], 0, pair, pair[c : c + 1])
            odd = (self.t // 4) % 2 == 1
            self.diagonal = [
                cutlass.select_(odd, a[1] + b[3], a[0] + b[2]) for a, b in zip(acc[::2], acc[1::2], strict=True)
            ]
        return self.diagonal[half]

    def spread(self, half: int):
        """... in all lanes of its quad."""
        return cute.arch.shuffle_sync(self.squares(half), (self.t & ~3) + self.t // 8)

    def sums(self, slot: str, half: int, squares: Callable[[int], Any]) -> tuple:
        """Of a row, those of a slot none of which needs a rope."""
        found: tuple = ()
        blocks = list(range(self.p.head_dim_qk // 8))
        for k, (kind, *how) in enumerate(self.fn.STEPS[slot]):
            if kind == "sum":
                if how:
                    found = (*found, squares(half))
                else:
                    each = self.evaluate(slot, half, Part(blocks, found, until=k, shifts=(0,) * len(blocks)))
                    found = (*found, quad(plus, chains(plus, each, 2)))
        return found

    def evaluate(self, slot: str, half: int, part: Part, known=None, tables=None):
        p, some = self.p, None if known is not None and whole(self.p, part) else part
        at, values = tuple(self.keys[half]), self.values(half, part.blocks)
        return evaluate(p, self.fn, slot, self.turnings, at, values, self.t, some, known, tables)

    def scales(self):
        """What each half's two columns of a lane are multiplied by."""
        if "few_scale" not in self.fn.STEPS:
            return None
        column, found = (self.t % 4) * 9, []
        for half, key in enumerate(self.keys):
            x = self.fn.few_scale(*key, None, None, self.sums("few_scale", half, self.squares), (), None)
            found.append([cute.arch.shuffle_sync(x, column + 4 * c) for c in range(2)])
        return found

    def operands(self, more: tuple):
        p, made = self.p, tuple([*row] for row in self.words)
        done, left = set(range(p.head_dim_qk // 8, p.tile_qk // 8)), list(range(p.tile_qk // 16))
        for blocks in self.transformed(made, more) if "few_k" in self.fn.STEPS else [range(p.tile_qk // 8)]:
            done |= set(blocks)
            for k in [k for k in left if {2 * k, 2 * k + 1} <= done]:
                left.remove(k)
                yield k, [row[2 * k + c] for row in made for c in range(2)]

    def transformed(self, made, more: tuple):
        """Part by part into `made`, and which eights of features these are."""
        p, steps = self.p, self.fn.STEPS["few_k"]
        parts = parts_of(steps, p.head_dim_qk // 8)
        squares = [k for k, (kind, *how) in enumerate(steps) if kind == "sum" and how]
        sums: list = [None, None]
        for number, part in enumerate(parts):
            tables = Tables(p, features_of(p, self.turnings), part.blocks, self.t, part.shifts)
            turned: dict = {}
            for half in range(2):
                known = dict(turned)
                if whole(p, part):
                    known |= {k: self.spread(half) for k in squares}
                else:
                    sums[half] = sums[half] or self.sums("few_k", half, self.spread)
                    part = part._replace(sums=sums[half])
                found = self.evaluate("few_k", half, part, known, tables)
                for n, eight in enumerate(part.blocks):
                    made[half][eight] = pack(p, found[2 * n], found[2 * n + 1])
                turned = {k: further(known[k], pairs) for k, pairs in more[number]} if more else {}
            yield part.blocks


def parts_of(steps, count: int) -> list[Part]:
    """Of `count` eights of features, those that need one another."""
    runs = runs_of(steps, count, False)
    if runs is None or any((run.begin, run.end) != (0, 4) or any(x % 8 for x in run.offsets) for run in runs):
        return [Part(list(range(count)), shifts=(0,) * count)]
    return [
        Part([run.first + n + x // 8 for x in run.offsets], turns=run.turns) for run in runs for n in range(run.count)
    ]


def whole(p, part: Part) -> bool:
    return len(part.blocks) * 8 == p.head_dim_qk
