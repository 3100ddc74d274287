"""Typed IR nodes: what the language says with one name and the IR with smaller parts is expanded here.

Arguments are expressions that fit (expressions.py and builtins.py complain of those that do not); conversions from
i32 to f32 are put in where an operation asks for them.
"""

from __future__ import annotations

from typing import NamedTuple

from attncc.diagnostics import Span
from attncc.ir.fold import fold
from attncc.ir.nodes import (
    BOOL,
    F32,
    I32,
    LEAVES,
    Const,
    Expr,
    Leaf,
    Load,
    Op,
    Param,
    Rope,
    ScalarParam,
    Type,
    children,
    make,
)

MAX_NODES = 20_000  # of one variant: a few lines of `def` could ask for 2 ** 30
MAX_DEPTH = 200  # of one expression: a later pass may recurse over it

_BIT = {name: 1 << n for n, name in enumerate(LEAVES)}
_CONST_PARAM, _RUN_TIME = 1 << len(LEAVES), 1 << len(LEAVES) + 1
_AT_BUILD = _CONST_PARAM | _BIT["head_dim_qk"] | _BIT["head_dim_vo"]


class TooLarge(Exception):
    """An expression that no later pass could take.  `full`: the whole variant is too large."""

    def __init__(self, message: str, at: Span, full: bool = False):
        self.message, self.span, self.full = message, at, full
        super().__init__(message)


class _Info(NamedTuple):
    """What is known of a node."""

    node: Expr  # kept alive, so that its id stays its own
    depth: int
    depends: int  # bits: leaves, const parameters, what is known at run time only
    literal: Const | None  # the value of a constant expression


class Builder:
    """Makes the nodes of one variant, and knows what each depends on."""

    def __init__(self) -> None:
        self._info: dict[int, _Info] = {}  # by id(node)

    def _add(self, node: Expr, own: int = 0) -> Expr:
        """Take in a new node; `own` is what it depends on beside its children."""
        kids = [self._info[id(k)] for k in children(node)]
        depth = 1 + max((k.depth for k in kids), default=0)
        if depth > MAX_DEPTH:
            message = f"an expression nested more than {MAX_DEPTH} deep, counting what its names stand for"
            raise TooLarge(message, node.span)
        if len(self._info) >= MAX_NODES:
            raise TooLarge(f"this variant takes more than {MAX_NODES} operations", node.span, full=True)
        depends = own
        for kid in kids:
            depends |= kid.depends
        literal = node if isinstance(node, Const) else None
        literals = [k.literal for k in kids if k.literal is not None]
        if isinstance(node, Op) and len(literals) == len(kids):
            value = fold(Op(node.op, tuple(literals), node.type, node.span))
            literal = value if isinstance(value, Const) else None
        self._info[id(node)] = _Info(node, depth, depends, literal)
        return node

    def leaves(self, e: Expr) -> list[str]:
        """The leaves that `e` depends on."""
        depends = self._info[id(e)].depends
        return [name for name, bit in _BIT.items() if depends & bit]

    def value(self, e: Expr) -> int | float | bool | None:
        """The value of a constant expression; None for any other, and where it has none."""
        literal = self._info[id(e)].literal
        return None if literal is None else literal.value

    def fixed(self, e: Expr) -> bool:
        """Is the value known once the kernel is built?"""
        return not self._info[id(e)].depends & ~_AT_BUILD

    # -- the nodes themselves

    def const(self, value: int | float | bool, at: Span) -> Expr:
        elem = BOOL if isinstance(value, bool) else I32 if isinstance(value, int) else F32
        return self._add(Const(value, elem, at))

    def leaf(self, name: str, at: Span) -> Expr:
        return self._add(Leaf(name, at), _BIT[name])

    def param(self, p: ScalarParam, at: Span) -> Expr:
        return self._add(Param(p.name, p.type, at), _CONST_PARAM if p.const else _RUN_TIME)

    def load(self, tensor: str, dtype: str, index: tuple[Expr, ...], at: Span) -> Expr:
        elem = {"bf16": "f32", "f16": "f32", "u32": "i32", "u8": "i32"}.get(dtype, dtype)
        space = next((x.type.space for x in index if x.type.space is not None), None)
        return self._add(Load(tensor, index, Type(elem, space), at), _RUN_TIME)

    def rope(self, node: Rope) -> Expr:
        return self._add(node, _RUN_TIME)

    def op(self, op: str, *args: Expr, at: Span) -> Expr:
        """`op` of arguments whose elements agree with its signature in OPS."""
        return self._add(make(op, *args, span=at))

    # -- conversions

    def f32(self, e: Expr, at: Span | None = None) -> Expr:
        return e if e.type.elem == "f32" else self.op("f32", e, at=at or e.span)

    def i32(self, e: Expr, at: Span) -> Expr:
        return e if e.type.elem == "i32" else self.op("i32", e, at=at)

    def alike(self, *args: Expr) -> tuple[Expr, ...]:
        """f32 where any of them is."""
        return tuple(self.f32(a) for a in args) if any(a.type.elem == "f32" for a in args) else args

    def floats(self, op: str, *args: Expr, at: Span) -> Expr:
        """An operation on f32."""
        return self.op(op, *(self.f32(a) for a in args), at=at)

    def same(self, op: str, *args: Expr, at: Span) -> Expr:
        """An operation on i32, or on f32 where an argument is."""
        return self.op(op, *self.alike(*args), at=at)

    # -- what is expanded

    def fold(self, op: str, args: list[Expr], at: Span) -> Expr:
        """`min` or `max` of two or more, from the left."""
        found, *rest = self.alike(*args)
        for x in rest:
            found = self.op(op, found, x, at=at)
        return found

    def compare(self, op: str, left: Expr, right: Expr, at: Span) -> Expr:
        """One link of a chain; `a > b` is `b < a`."""
        left, right = self.alike(left, right)
        if op in (">", ">="):
            left, right = right, left
        return self.op({"<": "lt", ">": "lt", "<=": "le", ">=": "le", "==": "eq", "!=": "ne"}[op], left, right, at=at)

    def clamp(self, x: Expr, lo: Expr, hi: Expr, at: Span) -> Expr:
        x, lo, hi = self.alike(x, lo, hi)
        return self.op("min", self.op("max", x, lo, at=at), hi, at=at)

    def relu(self, x: Expr, at: Span) -> Expr:
        return self.floats("max", x, self.const(0.0, at), at=at)

    def softcap(self, s: Expr, c: Expr, at: Span) -> Expr:
        s, c = self.f32(s), self.f32(c)
        return self.op("mul", c, self.op("tanh", self.op("div", s, c, at=at), at=at), at=at)

    def rmsnorm(self, x: Expr, eps: Expr, at: Span) -> Expr:
        """x / sqrt(mean(x²) + eps) (arXiv 1910.07467, eq. 4)."""
        return self._normed(x, self._mean(self.op("mul", x, x, at=at), at), eps, at)

    def layernorm(self, x: Expr, eps: Expr, at: Span) -> Expr:
        """The same of x - mean(x) (arXiv 1607.06450, eq. 4)."""
        return self.rmsnorm(self.op("sub", x, self._mean(x, at), at=at), eps, at)

    def l2norm(self, x: Expr, eps: Expr, at: Span) -> Expr:
        """x / sqrt(sum(x²) + eps)."""
        return self._normed(x, self.op("sum", self.op("mul", x, x, at=at), at=at), eps, at)

    def _normed(self, x: Expr, square: Expr, eps: Expr, at: Span) -> Expr:
        return self.op("mul", x, self.op("rsqrt", self.op("add", square, eps, at=at), at=at), at=at)

    def _mean(self, x: Expr, at: Span) -> Expr:
        """Over the features of the vector `x`."""
        size = self.leaf("head_dim_qk" if x.type.space == "d" else "head_dim_vo", at)
        return self.op("div", self.op("sum", x, at=at), self.f32(size), at=at)
