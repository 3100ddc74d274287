"""Variant to Variant: constants put in, the rules of rules.py run to a fixpoint, levels of expressions."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from attncc.ir.fold import fold
from attncc.ir.nodes import (
    F32,
    I32,
    NOWHERE,
    SIZES,
    TILE,
    Const,
    Expr,
    Interner,
    Leaf,
    Op,
    Param,
    ScalarParam,
    Variant,
    children,
    leaves,
    make,
    objects,
    transform,
)
from attncc.ir.rules import rules_of
from attncc.ir.verify import verify

F32_MAX = 3.4028234663852886e38
MAX_PASSES = 1000  # far above what any expression needs: a rule pair that undoes itself must not hang the compiler


def specialize(v: Variant, *, const: Mapping[str, object], head_dim_qk: int, head_dim_vo: int) -> Variant:
    """`v` for given head dims and values of its `const` parameters: they become literals.  The value used becomes the
    parameter's default, so that the result still says what it was specialised for.

    ValueError for a name that is no const parameter of `v`, or one without a value; TypeError for a value of the
    wrong type."""
    known = {p.name: p for p in v.scalars if p.const}
    for name in const:
        if name not in known:
            kind = "a run-time parameter" if any(p.name == name for p in v.scalars) else "no parameter"
            raise ValueError(
                f"const: {name!r} is {kind} of {v.name}; its const parameters: {', '.join(known) or 'none'}"
            )
    scalars = tuple(replace(p, default=_const_value(p, const)) if p.const else p for p in v.scalars)
    values = {p.name: p.default for p in scalars if p.const and p.default is not None}
    sizes = {"head_dim_qk": head_dim_qk, "head_dim_vo": head_dim_vo}

    def put(e: Expr) -> Expr:
        if isinstance(e, Param) and e.name in values:
            return Const(values[e.name], e.type, e.span)
        return Const(sizes[e.name], I32, e.span) if isinstance(e, Leaf) and e.name in sizes else e

    intern = Interner()
    return replace(v, scalars=scalars).map(lambda e: intern(transform(e, put)))


def _const_value(p: ScalarParam, const: Mapping[str, object]) -> int | float | bool:
    value: Any = const.get(p.name, p.default)
    if value is None:
        raise ValueError(f"const: {p.name!r} has no default: a value of type {p.type} is needed")
    wanted = {"bool": bool, "i32": numbers.Integral, "f32": numbers.Real}[p.type.elem]
    if not isinstance(value, wanted) or (isinstance(value, bool) and p.type.elem != "bool"):
        raise TypeError(f"const: {p.name!r} is {p.type}, found {value!r}")
    if p.type.elem == "i32" and not -(2**31) <= value < 2**31:
        raise ValueError(f"const: {p.name!r} is i32, found {value!r}")
    if p.type.elem == "f32" and F32_MAX < abs(value) != math.inf:
        raise ValueError(f"const: {p.name!r} is f32 (at most {F32_MAX:.4g} in size), found {value!r}")
    return {"bool": bool, "i32": int, "f32": float}[p.type.elem](value)


def simplify(v: Variant) -> Variant:
    """`v` with the rules applied until none does; equal nodes are one object, across slots too.  Raises VerifyError
    where the result is not well formed."""
    rewriter = Rewriter()
    for _ in range(MAX_PASSES):
        last, v = v, v.map(rewriter)
        verify(v)
        if v == last:
            return v
    raise RuntimeError(f"{v.name}: the rewrite rules reach no fixpoint")


def simplify_expr(e: Expr) -> Expr:
    """`e` with the rules applied until none does; equal nodes are one object."""
    rewriter = Rewriter()
    for _ in range(MAX_PASSES):
        last, e = e, rewriter(e)
        if e == last:
            return e
    raise RuntimeError(f"the rewrite rules reach no fixpoint at {e!r}")


class Rewriter:
    """One pass over an expression: every node, after its children, is folded and rewritten while a rule fires, and so
    is every node that a rule makes."""

    def __init__(self) -> None:
        self.intern = Interner()
        self.done: set[int] = set()  # nodes on which no rule fires; the interner keeps them alive

    def __call__(self, e: Expr) -> Expr:
        return transform(e, self.node)

    def node(self, e: Expr) -> Expr:
        """What `e`, whose children no rule changes any more, becomes."""
        e = self.intern.node(e)
        for _ in range(MAX_PASSES):
            new = e if id(e) in self.done else self.step(e)
            if new is e:
                self.done.add(id(e))
                return e
            e = new
        raise RuntimeError(f"the rewrite rules reach no fixpoint at {e!r}")

    def step(self, e: Expr) -> Expr:
        """`e` after the first rule that fires on it, or `e` itself."""
        if not isinstance(e, Op):
            return e
        folded = fold(e)
        if folded is not e:
            return self.intern.node(folded)

        def finish(made: Op) -> Expr:
            return self.node(made if made.span != NOWHERE else replace(made, span=e.span))

        for rule in rules_of(e.op):
            new = rule.apply(e, finish)
            if new is not None:
                return self.intern.node(new)
        return e


# What a leaf depends on.  A tile's corners are the same for every row and key of it.
LEVEL_OF = {
    **dict.fromkeys(SIZES, "call"),
    **dict.fromkeys(("b", "h", "g", *TILE), "head"),
    **dict.fromkeys(("i", "iq", "q", "o"), "row"),
    **dict.fromkeys(("j", "k", "v"), "col"),
    **dict.fromkeys(("s", "dot", "l", "lse"), "cell"),
    **dict.fromkeys(("d", "e"), "call"),
}


RANKS = ("call", "head", "row", "col", "cell")


class Levels:
    """`level` of many expressions that share nodes: each is looked at once."""

    def __init__(self) -> None:
        self.of: dict[Expr, str] = {}

    def __call__(self, e: Expr) -> str:
        todo = [e]
        while todo:  # only below what is new
            x = todo[-1]
            waiting = [] if x in self.of else [k for k in children(x) if k not in self.of]
            if waiting:
                todo += waiting
                continue
            todo.pop()
            found = {self.of[k] for k in children(x)} | ({LEVEL_OF[x.name]} if isinstance(x, Leaf) else set())
            self.of[x] = "cell" if {"row", "col"} <= found else max(found, key=RANKS.index, default="call")
        return self.of[e]


def level(e: Expr) -> str:
    """How often `e` has to be evaluated: "call" (scalars, sizes, literals), "head" (also b, h, g), "row" (also i, iq),
    "col" (j, with anything of call or head), "cell" (a row and j together, or s, dot, l, lse)."""
    return Levels()(e)


def drop_row_constants(v: Variant, *, keeps_lse: bool) -> Variant:
    """`v` without the additive terms of f_logits that are the same for a whole row: softmax does not see them, as long
    as they are finite.  `v` itself where anything else does: a sink, an emit, an epilogue that reads lse, an lse that
    the caller gets (`keeps_lse`), or no softmax at all."""
    seen = v.scan.kind != "softmax" or v.scan.sink is not None or v.emits or "lse" in leaves(v.epilogue)
    return v if keeps_lse or seen else replace(v, f_logits=_without_row_terms(v.f_logits))


def _without_row_terms(e: Expr) -> Expr:
    level_of = Levels()
    kept: dict[int, Expr | None] = {}  # of a node: what is left of it; None: nothing

    def strip(x: Expr) -> Expr | None:
        if level_of(x) in ("call", "head", "row"):
            return None
        if not isinstance(x, Op) or x.op not in ("add", "sub", "neg", "mul", "div"):
            return x
        rest = [kept[id(a)] for a in x.args]
        if x.op in ("mul", "div"):  # linear where one factor is the same for the whole row; never x / cell
            linear = None in rest and not (x.op == "div" and rest[1] is not None)
            args = tuple(a if r is None else r for a, r in zip(x.args, rest, strict=True))
            return make(x.op, *args, span=x.span) if linear else x
        if None not in rest:
            return make(x.op, *(r for r in rest if r is not None), span=x.span)
        if x.op == "sub" and rest[0] is None and rest[1] is not None:
            return make("neg", rest[1], span=x.span)
        return next((r for r in rest if r is not None), None)

    for x in objects(e):
        kept[id(x)] = strip(x)
    stripped = kept[id(e)]
    return Const(0.0, F32) if stripped is None else stripped
