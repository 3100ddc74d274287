"""Every rule against the evaluator: same values, and nothing read that was not read before."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
from ir.evaluate import Evaluator

from attncc.ir.fold import fold
from attncc.ir.nodes import OPS, Const, Expr, Interner, Leaf, Load, Op, Type, make, result_type
from attncc.ir.rules import RULES, Rule, build, read_pattern

INF, NAN = math.inf, math.nan
VALUES = {
    "i32": [0, 1, -1, 2, 3, -7, 100, 2**24 + 1, 2**31 - 1, -(2**31)],
    "f32": [0.0, 1.0, -1.0, 0.5, 3.7, -2.5, 1e30, -1e30, 1e-30, INF, -INF, NAN],
    "bool": [False, True],
}
LITERALS = {
    "i32": [0, 1, 2, 3, 5, 7, 32, 64, -1, -3, 2**24 + 1, 2**31 - 1, -(2**31)],
    "f32": [0.0, 1.0, 2.0, 3.0, 8.0, 0.5, -0.25, -3.0, 0.1, 2.0**126, 2.0**-126, 1e30, -1.0],
    "bool": [False, True],
}
ELEMS = ("i32", "f32", "bool")


def names(pattern: tuple) -> dict[str, str]:
    """The letters of a pattern, and which of them stand for literals."""
    kind, *parts = pattern
    if kind in ("any", "literal"):
        return {parts[0]: kind}
    return {} if kind == "value" else {k: v for p in parts for k, v in names(p).items()}


def instances(rule: Rule) -> Iterator[tuple[Expr, dict[str, np.ndarray]]]:
    """Expressions the rule may fire on, one for every choice of types and literals, with the tensors its letters
    read: each letter x is `x[i]`, so that reads show; an i32 also a remainder, which is known to be small."""
    pattern = read_pattern(rule.pattern)
    kinds = names(pattern)
    for elems in itertools.product(ELEMS, repeat=len(kinds)):
        types = dict(zip(kinds, elems, strict=True))
        if types["x"] not in rule.on:
            continue
        letters = [k for k, kind in kinds.items() if kind == "any"]
        grids = np.meshgrid(*(VALUES[types[k]] for k in letters), indexing="ij")
        tensors = {k: grid.ravel() for k, grid in zip(letters, grids, strict=True)}
        bound: dict[str, Expr] = {k: Load(k, (Leaf("i"),), Type(types[k])) for k in letters}
        small = {**bound, "x": make("mod", bound["x"], Const(1000, bound["x"].type))} if types["x"] == "i32" else bound
        literals = [k for k, kind in kinds.items() if kind == "literal"]
        for values in itertools.product(*(LITERALS[types[k]] for k in literals)):
            given = {k: Const(x, Type(types[k])) for k, x in zip(literals, values, strict=True)}
            try:
                yield build(pattern, {**bound, **given}, types["x"], lambda e: e), tensors
                yield build(pattern, {**small, **given}, types["x"], lambda e: e), tensors
            except (TypeError, KeyError):
                break  # letters of types that the ops do not take


def check(rule: Rule) -> int:
    """Holds the rule against the evaluator; how many instances it fired on."""
    fired = 0
    intern = Interner()
    for e, tensors in instances(rule):
        e = intern(e)
        assert isinstance(e, Op)
        new = rule.apply(e, lambda made: intern.node(fold(made)))
        if new is None:
            continue
        fired += 1
        lanes = len(next(iter(tensors.values())))
        for real in (np.float64, np.float32):
            before, after = (Evaluator({"i": np.arange(lanes)}, tensors, lanes, real) for _ in range(2))
            was, now = before(e), after(new)
            assert was.dtype == now.dtype
            with np.errstate(all="ignore"):
                if rule.exact or e.type.elem != "f32":
                    np.testing.assert_array_equal(now, was, f"{rule.pattern}: {e} -> {new}")
                else:
                    tolerance = 40 * np.finfo(real).eps
                    np.testing.assert_allclose(now, was, tolerance, np.finfo(real).tiny, err_msg=rule.pattern)
            assert after.reads <= before.reads, f"{rule.pattern} reads what was guarded"
    return fired


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.pattern)
def test_keeps_values_and_guards(rule: Rule) -> None:
    assert check(rule) > 0, "the rule fires on nothing"


@pytest.mark.parametrize(
    "wrong",
    [
        Rule("x - x", "0", on="f32"),
        Rule("x * 0", "0", on="f32"),
        Rule("x <= x", "True", on="f32"),
        Rule("x == x", "True", on="f32"),
        Rule("not x < y", "y <= x", on="f32"),
        Rule("(x + c1) + c2", "x + (c1 + c2)", on="f32"),
        Rule("(x + y) - y", "x", on="f32"),
        Rule("x / c1", "x * (1 / c1)", on="f32", when=lambda b: b["c1"].value != 0),  # type: ignore[union-attr]
        Rule("i32(f32(x))", "x"),
        Rule("(x // c1) // c2", "x // (c1 * c2)", on="i32"),
        Rule("min(max(x, c1), c2)", "c2", on="i32"),
        Rule("x // c1", "x / c1", on="f32"),
        Rule("x and y", "y and x"),
        Rule("y if c else x", "x if not c else x"),
        Rule("x or (not x and y)", "y or x"),
        Rule("x < y", "x <= y", on="i32"),
        Rule("-(x - y)", "x - y", on="i32"),
    ],
    ids=lambda r: f"{r.pattern} -> {r.replacement}",
)  # fmt: skip
def test_a_wrong_rule_is_caught(wrong: Rule) -> None:
    with pytest.raises(AssertionError):
        check(wrong)


def literal_arguments(op: str) -> Iterator[tuple[Const, ...]]:
    choices = {"i": ["i32"], "f": ["f32"], "b": ["bool"], "n": ["i32", "f32"], "x": list(ELEMS)}
    wanted = OPS[op][0]
    for elems in itertools.product(*(choices[letter] for letter in wanted)):
        types = tuple(map(Type, elems))
        try:
            result_type(op, types)
        except TypeError:
            continue
        for values in itertools.product(*(LITERALS[e] for e in elems)):
            yield tuple(Const(x, t) for x, t in zip(values, types, strict=True))


@pytest.mark.parametrize("op", [op for op in OPS if op != "sum"])
def test_literals_fold_to_what_they_evaluate_to(op: str) -> None:
    folded = 0
    for args in literal_arguments(op):
        e = make(op, *args)
        got = fold(e)
        if got is e:
            continue
        folded += 1
        assert isinstance(got, Const) and got.type == e.type and type(got.value) in (int, float, bool)
        want = Evaluator({}, {}, 1)(e)[0]
        np.testing.assert_allclose(float(got.value), float(want), rtol=1e-14, err_msg=repr(e))
    assert folded > 0


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("div", (1.0, 0.0)), ("floordiv", (1, 0)), ("mod", (5, 0)), ("floordiv", (1.0, 0.0)), ("log", (0.0,)),
        ("log", (-1.0,)), ("sqrt", (-1.0,)), ("rsqrt", (0.0,)), ("exp", (1e4,)), ("pow", (0.0, -1.0)),
        ("pow", (-8.0, 0.5)), ("i32", (3e9,)), ("i32", (INF,)), ("mul", (1e308, 10.0)), ("sub", (INF, INF)),
    ],
)  # fmt: skip
def test_what_has_no_finite_value_is_not_folded(op: str, args: tuple) -> None:
    e = make(op, *(Const(a, Type("f32" if isinstance(a, float) else "i32")) for a in args))
    assert fold(e) is e


def test_i32_literals_wrap() -> None:
    def of(op: str, *args: int) -> int | float | bool:
        got = fold(make(op, *(Const(a, Type("i32")) for a in args)))
        assert isinstance(got, Const)
        return got.value

    low, high = -(2**31), 2**31 - 1
    assert of("add", high, 1) == low and of("neg", low) == low and of("abs", low) == low
    assert of("mul", 65536, 65536) == 0 and of("floordiv", low, -1) == low and of("pow", 3, 40) == 689_956_897
    assert of("floordiv", -7, 2) == -4 and of("mod", -7, 2) == 1 and of("mod", 7, -2) == -1
    assert of("bit", -1, 31) is True and of("bit", -1, 32) is False and of("bit", -1, -1) is False
