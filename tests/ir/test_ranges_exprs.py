"""Integer expressions of tile analysis: what is built is equal to what was asked for, what is proved is true."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from attncc.ir import ranges_exprs as exprs
from attncc.ir.nodes import I32, Expr, Leaf, Param, make
from attncc.ir.ranges_eval import evaluate

I0, I1, J0, J1, KV, W, X = (*map(Leaf, ("i0", "i1", "j0", "j1", "kv_len")), Param("w", I32), Param("x", I32))
CLIPPED = make("max", make("min", W, exprs.number(2**20)), exprs.number(1))
SMALL = st.integers(-9, 9).map(exprs.number)
LEAVES = st.one_of(st.sampled_from([I0, I1, J0, J1, KV, I0, J1, W, X, CLIPPED]), SMALL)


def grow(inner: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    divisors = st.one_of(st.integers(1, 5).map(exprs.number), st.just(CLIPPED))
    return st.one_of(
        st.builds(make, st.sampled_from(["add", "sub", "min", "max", "add", "sub"]), inner, inner),
        st.builds(make, st.just("neg"), inner),
        st.builds(make, st.just("mul"), inner, SMALL),
        st.builds(make, st.sampled_from(["floordiv", "mod"]), inner, divisors),
        st.builds(lambda x, n: make("mul", make("floordiv", x, n), n), inner, divisors),
        st.builds(lambda x, y: make("select", make("lt", W, X), x, y), inner, inner),
    )


NUMBERS = st.recursive(LEAVES, grow, max_leaves=4)
SCALARS = st.one_of(st.integers(-6, 6), st.sampled_from([exprs.MIN, exprs.MIN + 1, 2**28, exprs.MAX]))


@st.composite
def tiles(draw):
    """Ends of many tiles of one length, and two scalars."""
    kv_len = draw(st.integers(1, 9))
    grid = np.meshgrid(*[np.arange(-3, kv_len)] * 2, *[np.arange(kv_len)] * 2, indexing="ij")
    i0, i1, j0, j1 = (x.ravel() for x in grid)
    real = (i0 <= i1) & (j0 <= j1)
    at = {"i0": i0[real], "i1": i1[real], "j0": j0[real], "j1": j1[real], "kv_len": kv_len}
    return at, {"w": draw(SCALARS), "x": draw(SCALARS)}


@settings(max_examples=200, deadline=None)
@given(NUMBERS, tiles())
def test_building_keeps_the_value(e, tile):
    at, values = tile
    wanted = evaluate(e, at, values)
    built = exprs.substitute(e, {})
    assert (evaluate(built, at, values) == wanted).all()
    assert (evaluate(exprs.total(exprs.linear(e)), at, values) == wanted).all()
    low, high = exprs.span(e)
    assert low <= wanted.min() and wanted.max() <= high


@settings(max_examples=400, deadline=None)
@given(NUMBERS, NUMBERS, st.integers(-2, 2), st.lists(st.tuples(NUMBERS, NUMBERS), max_size=2), tiles())
def test_what_is_proved_is_true(x, y, by, facts, tile):
    at, values = tile
    facts = [(a, b) for a, b in facts if exprs.linear(a).exact and exprs.linear(b).exact]
    hold = [evaluate(a, at, values) <= evaluate(b, at, values) for a, b in facts]
    if exprs.proved(x, y, facts, by):
        true = evaluate(x, at, values) + by <= evaluate(y, at, values)
        assert true[np.logical_and.reduce(hold)].all() if hold else true.all()


def test_what_is_to_be_proved():
    n = exprs.number
    below = make("mul", make("floordiv", I1, n(8)), n(8))
    below_w = make("mul", make("floordiv", I0, CLIPPED), CLIPPED)
    for x, y in (
        (I0, I1),
        (exprs.shift(I1, 1), KV),
        (below, I1),
        (exprs.shift(I1, 1), exprs.shift(below, 8)),
        (below_w, I1),
        (exprs.shift(I0, 1), exprs.add(below_w, CLIPPED)),
        (make("min", I0, J0), I1),
        (I0, make("max", W, I1)),
        (make("select", make("lt", W, X), I0, n(-3)), make("select", make("lt", W, X), I1, n(5))),
    ):
        assert exprs.proved(x, y), (x, y)
    assert exprs.proved(J1, I1, [(J1, I0)]) and not exprs.proved(J1, I1)
    for x, y in ((I1, I0), (exprs.sub(I0, W), exprs.sub(I1, W)), (I0, W), (I1, below), (I0, J0)):
        assert not exprs.proved(x, y), (x, y)
