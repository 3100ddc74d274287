from __future__ import annotations

import math
import pickle
import subprocess
import sys

import pytest
from hypothesis import given, settings
from ir.strategies import slot_expressions

from attncc.diagnostics import Span
from attncc.ir.nodes import (
    BOOL,
    F32,
    I32,
    Const,
    Expr,
    Interner,
    Leaf,
    Load,
    Op,
    Type,
    children,
    leaves,
    make,
    objects,
    rebuild,
    result_type,
    transform,
    walk,
)


def doubled(depth: int) -> Expr:
    e: Expr = Leaf("s")
    for _ in range(depth):
        e = make("add", e, e)
    return e


def chain(depth: int) -> Expr:
    e: Expr = Leaf("j")
    for n in range(depth):
        e = make("add", e, Const(n, I32))
    return e


def test_shared_nodes_are_seen_once() -> None:
    a, b = doubled(200), doubled(200)
    assert a == b and hash(a) == hash(b) and a is not b
    assert a != make("add", b, Leaf("dot"))
    assert len(list(walk(a))) == len(list(objects(a))) == 201
    assert leaves(a) == {"s"}
    seen: list[Expr] = []
    assert transform(a, lambda x: seen.append(x) or x) is a
    assert len(seen) == 201


def test_depth_is_no_trouble() -> None:
    a, b = chain(5_000), chain(5_000)
    assert a == b and hash(a) == hash(b)
    assert len(list(walk(a))) == 10_001
    assert leaves(transform(a, lambda x: Leaf("i") if x == Leaf("j") else x)) == {"i"}
    assert a != chain(4_999)


@given(slot_expressions("epilogue"))
@settings(max_examples=50, deadline=None)
def test_walk_gives_children_first_and_equal_nodes_once(e: Expr) -> None:
    order = list(walk(e))
    assert len(set(order)) == len(order) and order[-1] == e
    place = {x: n for n, x in enumerate(order)}
    assert all(place[k] < place[x] for x in order for k in children(x))


@given(slot_expressions("f_q"))
@settings(max_examples=50, deadline=None)
def test_a_copy_is_equal_and_interning_makes_it_the_same(e: Expr) -> None:
    copy = transform(e, lambda x: rebuild(Leaf(x.name) if isinstance(x, Leaf) else x, children(x)))
    assert copy == e and hash(copy) == hash(e)
    intern = Interner()
    one = intern(e)
    assert one == e and intern(copy) is one
    assert len(list(objects(one))) == len(list(walk(e)))


def test_what_equality_sees() -> None:
    assert Const(0.0, F32) != Const(-0.0, F32)
    assert Const(math.nan, F32) == Const(math.nan, F32)
    assert Const(1, I32) != Const(1.0, F32) and Const(1, I32) != Const(True, BOOL)
    assert Leaf("s", Span(1, 2, 3)) == Leaf("s")
    x, y = Leaf("i"), Leaf("j")
    assert make("sub", x, y) != make("sub", y, x) != make("add", y, x)
    assert Load("t", (x,), I32) != Load("t", (x,), F32) != Load("u", (x,), F32)
    assert Leaf("s") != "s"


def test_hashes_survive_another_process() -> None:
    """Pickled after hashing, read where strings hash otherwise: still found in a set of fresh nodes."""
    e = make("mul", Leaf("s"), Const(2.0, F32))
    hash(e)
    code = (
        "import pickle, sys; from attncc.ir.nodes import *;"
        "e = pickle.load(sys.stdin.buffer); assert e in {make('mul', Leaf('s'), Const(2.0, F32))}"
    )
    done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(e), env={"PYTHONHASHSEED": "7"})
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("op", "args", "result"),
    [
        ("add", (I32, I32), I32),
        ("add", (F32, Type("f32", "d")), Type("f32", "d")),
        ("lt", (F32, F32), BOOL),
        ("eq", (BOOL, BOOL), BOOL),
        ("select", (BOOL, Type("i32", "e"), I32), Type("i32", "e")),
        ("sum", (Type("f32", "d"),), F32),
        ("i32", (F32,), I32),
        ("bit", (I32, Type("i32", "d")), Type("bool", "d")),
    ],
)
def test_result_types(op: str, args: tuple[Type, ...], result: Type) -> None:
    assert result_type(op, args) == result


@pytest.mark.parametrize(
    ("op", "args", "words"),
    [
        ("cbrt", (F32,), "unknown op"),
        ("add", (I32, F32), "add of i32, f32"),
        ("add", (BOOL, BOOL), "add of bool, bool"),
        ("neg", (F32, F32), "neg takes 1 arguments, found 2"),
        ("select", (I32, F32, F32), "select of i32"),
        ("add", (Type("f32", "d"), Type("f32", "e")), "vectors of d and e mixed"),
        ("sum", (F32,), "sum of a scalar"),
    ],
)
def test_arguments_that_do_not_fit(op: str, args: tuple[Type, ...], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        result_type(op, args)
    assert isinstance(make("neg", Leaf("s")), Op)
