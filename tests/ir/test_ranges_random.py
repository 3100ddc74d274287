"""Tile ranges of random masks, with random scalars and tensors: sound, and every read in range."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import assume, given, note, settings
from hypothesis import strategies as st
from mask_tiles import HUGE, check, dense, variant

from attncc.ir.nodes import BOOL, I32, Const, Expr, Leaf, Load, Param, make
from attncc.ir.ranges import tile_ranges

BASE = variant(
    "true", "w: i32, x: i32, flag: bool",
    "doc[b, pos]: i32 sorted", "tag[b, pos]: i32", "prefix[b]: i32", "table[4]: i32 sorted", "any[n]: i32 sorted",
    "part[iq]: i32 sorted", "key[j]: i32 sorted", "late[pos]: bool sorted", "noise[iq, j]: bool",
)  # fmt: skip
COMPARISONS = ("lt", "le", "eq", "ne")


def number(value: int) -> Const:
    return Const(value, I32)


def of(tensor: str, *index: Expr) -> Load:
    return Load(tensor, index, BOOL if tensor in ("late", "noise") else I32)


I, J, IQ, B = map(Leaf, ("i", "j", "iq", "b"))  # noqa: E741
FREE = st.sampled_from([Param("w", I32), Param("x", I32), of("prefix", B)])
SMALL = st.integers(-3, 7).map(number)
POSITIONS = st.sampled_from([I, J, I, J, IQ, make("sub", I, J), Leaf("kv_len"), Leaf("qo_len")])
READS = st.sampled_from([
    of("doc", B, I), of("doc", B, J), of("tag", B, I), of("tag", B, J), of("part", IQ), of("key", J),
    of("any", make("floordiv", I, number(2))), of("any", make("floordiv", J, number(2))), of("any", make("sub", I, J)),
    of("any", Param("w", I32)), of("any", make("min", I, J)), of("any", make("sub", J, of("prefix", B))),
    of("table", number(1)), of("table", make("mod", J, number(4))),
])  # fmt: skip


def any_of(*ops: str) -> st.SearchStrategy[str]:
    return st.sampled_from(ops)


def grow_numbers(inner: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    divisor = st.one_of(st.integers(-2, 5).map(number), FREE)
    return st.one_of(
        st.builds(make, any_of("add", "sub", "add", "sub", "min", "max"), inner, inner),
        st.builds(make, st.just("mul"), st.one_of(SMALL, inner), inner),
        st.builds(make, any_of("neg", "abs"), inner),
        st.builds(make, any_of("floordiv", "mod"), inner, divisor),
        st.builds(lambda x, n: make("mul", make("floordiv", x, n), n), inner, divisor),
        st.builds(make, st.just("select"), st.builds(make, any_of(*COMPARISONS), inner, inner), inner, inner),
    )


NUMBERS = st.recursive(st.one_of(POSITIONS, POSITIONS, SMALL, FREE, READS), grow_numbers, max_leaves=4)
COMPARED = st.builds(make, any_of(*COMPARISONS), NUMBERS, NUMBERS)
CHAINED = st.builds(
    lambda a, x, b: make("and", make("lt", a, x), make("le", x, b)), NUMBERS, st.sampled_from([I, J]), NUMBERS
)
ALIKE = st.builds(lambda x, c: make(c, x(I), x(J)), st.sampled_from([
    lambda p: of("doc", B, p), lambda p: of("tag", B, p), lambda p: make("floordiv", p, number(3)),
    lambda p: make("mod", p, number(3)), lambda p: make("mod", p, Param("w", I32)),
    lambda p: make("floordiv", p, Param("w", I32)),
]), any_of(*COMPARISONS))  # fmt: skip
PLAIN = st.sampled_from([
    Param("flag", BOOL), of("late", J), of("late", I), of("noise", IQ, J), make("le", J, I), make("le", J, I),
    make("lt", make("sub", I, Param("w", I32)), J), make("bit", of("tag", B, I), J), Const(True, BOOL),
])  # fmt: skip


def grow_masks(inner: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    return st.one_of(
        st.builds(make, st.sampled_from(["and", "or", "and", "or", "eq", "ne"]), inner, inner),
        st.builds(make, st.just("not"), inner),
        st.builds(make, st.just("select"), inner, inner, inner),
    )


MASKS = st.recursive(st.one_of(COMPARED, CHAINED, ALIKE, PLAIN), grow_masks, max_leaves=4)
SCALARS = st.one_of(st.integers(-4, 9), st.sampled_from([-HUGE - 1, -HUGE, -(2**29), 2**28, 2**30, HUGE - 2, HUGE]))


@st.composite
def inputs(draw):
    qo_len, kv_len = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    small = st.integers(-2, 8)

    def some(n, elements=small, in_order=True):
        values = draw(st.lists(elements, min_size=n, max_size=n))
        return np.array(sorted(values) if in_order else values)

    spread = st.one_of(small, small, SCALARS)
    values = {
        "w": draw(SCALARS), "x": draw(SCALARS), "flag": draw(st.booleans()), "doc": some(kv_len, spread)[None],
        "tag": some(kv_len, spread, False)[None], "prefix": some(1, SCALARS), "table": some(4, spread),
        "any": some(draw(st.integers(1, 9))), "part": some(qo_len, spread), "key": some(kv_len, spread),
        "late": some(kv_len, st.booleans()), "noise": some(qo_len * kv_len, st.booleans(), False).reshape(qo_len, -1),
    }  # fmt: skip
    return qo_len, kv_len, values


POINTS = st.sampled_from([I, J, I, J, IQ])
LIMITS = st.one_of(
    FREE, SMALL, READS,
    st.builds(make, any_of("add", "sub"), POINTS, st.one_of(FREE, SMALL)),
    st.builds(lambda x, n: make("mul", make("floordiv", x, n), n), POINTS, st.one_of(FREE, st.just(number(3)))),
)  # fmt: skip
LINES = st.builds(
    lambda c, x, y, swap: make(c, *((y, x) if swap else (x, y))),
    any_of("lt", "le", "lt", "le", "eq", "ne"), st.one_of(POINTS, LIMITS), LIMITS, st.booleans(),
)  # fmt: skip
BANDS = st.recursive(LINES, lambda inner: st.builds(make, any_of("and", "and", "or"), inner, inner), max_leaves=5)


def sound(mask, several):
    v = replace(BASE, mask=mask)
    r = tile_ranges(v)
    note(f"{r}")
    for qo_len, kv_len, values in several:
        try:
            cells = dense(v, qo_len, kv_len, values)
        except IndexError:  # the mask reads where it may not
            assume(False)
        check(v, r, cells, values, exact=False)


@settings(max_examples=100, deadline=None)
@given(MASKS, st.lists(inputs(), min_size=2, max_size=2))
def test_sound(mask, several):
    sound(mask, several)


@settings(max_examples=100, deadline=None)
@given(BANDS, st.lists(inputs(), min_size=3, max_size=3))
def test_sound_bands(mask, several):
    """Many bounds on few things: what closes over what."""
    sound(mask, several)
