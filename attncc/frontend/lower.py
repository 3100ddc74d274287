"""Well-typed IR nodes: what the language says with one name and the IR with smaller parts is expanded here.

Arguments are typed IR expressions that fit (the callers in typing.py have complained otherwise); conversions from i32
to f32 are put in where an operation asks for them.
"""

from __future__ import annotations

from typing import NamedTuple

from attncc.diagnostics import Span
from attncc.frontend import constants
from attncc.ir.nodes import BOOL, F32, I32, LEAVES, OPS, Const, Expr, Leaf, Load, Op, Param, Rope, Type, children

MAX_NODES = 100_000  # of one variant
MAX_DEPTH = 200  # of one expression; later passes recurse over it

_BIT = {name: 1 << n for n, name in enumerate(LEAVES)}
_VARIES = 1 << len(LEAVES)  # holds a parameter, or a tensor's element: no constant


class TooLarge(Exception):
    """An expression that no later pass could take."""

    def __init__(self, message: str, at: Span):
        self.message, self.span = message, at
        super().__init__(message)


class _Info(NamedTuple):
    depth: int
    bits: int  # the leaves it depends on
    value: int | float | bool | None  # of a constant expression
    node: Expr  # kept alive, so that its id stays its own


class Builder:
    """Makes the nodes of one variant, and knows what each depends on."""

    def __init__(self) -> None:
        self._info: dict[int, _Info] = {}  # by id(node)

    def _add(self, node: Expr, at: Span, own: int = 0) -> Expr:
        """Take in a new node; `own` are the bits of what it depends on beside its children."""
        kids = [self._info[id(k)] for k in children(node)]
        depth = 1 + max((k.depth for k in kids), default=0)
        bits = own
        for kid in kids:
            bits |= kid.bits
        if depth > MAX_DEPTH:
            raise TooLarge(f"an expression nested more than {MAX_DEPTH} deep, counting what its names stand for", at)
        if len(self._info) >= MAX_NODES:
            raise TooLarge(f"this variant grows beyond {MAX_NODES} operations", at)
        value = None
        if isinstance(node, Const):
            value = node.value
        elif isinstance(node, Op) and not bits:
            value = constants.apply(node.op, [k.value for k in kids])
        self._info[id(node)] = _Info(depth, bits, value, node)
        return node

    def leaves(self, e: Expr) -> list[str]:
        """The leaves that `e` depends on."""
        bits = self._info[id(e)].bits
        return [name for name, bit in _BIT.items() if bits & bit] if bits & (_VARIES - 1) else []

    def value(self, e: Expr) -> int | float | bool | None:
        """The value of a constant expression; None for any other, and where it has none."""
        return self._info[id(e)].value

    # -- the nodes themselves

    def const(self, value: int | float | bool, at: Span) -> Expr:
        elem = BOOL if isinstance(value, bool) else I32 if isinstance(value, int) else F32
        return self._add(Const(value, elem, at), at)

    def leaf(self, name: str, at: Span) -> Expr:
        return self._add(Leaf(name, at), at, _BIT[name])

    def param(self, name: str, kind: Type, at: Span) -> Expr:
        return self._add(Param(name, kind, at), at, _VARIES)

    def load(self, tensor: str, dtype: str, index: tuple[Expr, ...], at: Span) -> Expr:
        elem = {"bf16": "f32", "f16": "f32", "u32": "i32", "u8": "i32"}.get(dtype, dtype)
        return self._add(Load(tensor, index, Type(elem, space(*index)), at), at, _VARIES)

    def rope(self, node: Rope) -> Expr:
        return self._add(node, node.span, _VARIES)

    def op(self, op: str, *args: Expr, at: Span) -> Expr:
        """`op` of arguments whose elements agree with its signature in OPS."""
        wants, result = OPS[op]
        elem = {"f": "f32", "i": "i32", "b": "bool"}.get(result) or args[wants.index(result)].type.elem
        return self._add(Op(op, args, Type(elem, None if op == "sum" else space(*args)), at), at)

    # -- conversions

    def f32(self, e: Expr, at: Span | None = None) -> Expr:
        return e if e.type.elem == "f32" else self.op("f32", e, at=at or e.span)

    def i32(self, e: Expr, at: Span) -> Expr:
        return e if e.type.elem == "i32" else self.op("i32", e, at=at)

    def alike(self, *args: Expr) -> tuple[Expr, ...]:
        """f32 where any of them is."""
        return tuple(map(self.f32, args)) if any(a.type.elem == "f32" for a in args) else args

    # -- what is expanded

    def floats(self, op: str, *args: Expr, at: Span) -> Expr:
        """An operation on f32."""
        return self.op(op, *map(self.f32, args), at=at)

    def same(self, op: str, *args: Expr, at: Span) -> Expr:
        """An operation on i32, or on f32 where an argument is."""
        return self.op(op, *self.alike(*args), at=at)

    def fold(self, op: str, args: list[Expr], at: Span) -> Expr:
        """`min` or `max` of two or more, from the left."""
        first, *rest = self.alike(*args)
        for x in rest:
            first = self.op(op, first, x, at=at)
        return first

    def clamp(self, x: Expr, lo: Expr, hi: Expr, at: Span) -> Expr:
        x, lo, hi = self.alike(x, lo, hi)
        return self.op("min", self.op("max", x, lo, at=at), hi, at=at)

    def relu(self, x: Expr, at: Span) -> Expr:
        return self.floats("max", x, self.const(0.0, at), at=at)

    def softcap(self, s: Expr, c: Expr, at: Span) -> Expr:
        s, c = self.f32(s), self.f32(c)
        return self.op("mul", c, self.op("tanh", self.op("div", s, c, at=at), at=at), at=at)

    def compare(self, op: str, left: Expr, right: Expr, at: Span) -> Expr:
        """One link of a chain; `a > b` is `b < a`."""
        left, right = self.alike(left, right)
        if op in (">", ">="):
            left, right = right, left
        return self.op({"<": "lt", ">": "lt", "<=": "le", ">=": "le", "==": "eq", "!=": "ne"}[op], left, right, at=at)

    def mean(self, x: Expr, at: Span) -> Expr:
        """The mean over the features of the vector `x`."""
        size = self.leaf("head_dim_qk" if x.type.space == "d" else "head_dim_vo", at)
        return self.op("div", self.op("sum", x, at=at), self.f32(size, at), at=at)

    def _normed(self, x: Expr, square: Expr, eps: Expr, at: Span) -> Expr:
        return self.op("mul", x, self.op("rsqrt", self.op("add", square, eps, at=at), at=at), at=at)

    def rmsnorm(self, x: Expr, eps: Expr, at: Span) -> Expr:
        return self._normed(x, self.mean(self.op("mul", x, x, at=at), at), eps, at)

    def layernorm(self, x: Expr, eps: Expr, at: Span) -> Expr:
        return self.rmsnorm(self.op("sub", x, self.mean(x, at), at=at), eps, at)

    def l2norm(self, x: Expr, eps: Expr, at: Span) -> Expr:
        return self._normed(x, self.op("sum", self.op("mul", x, x, at=at), at=at), eps, at)


def space(*args: Expr) -> str | None:
    """The feature space of an operation on `args`: a scalar beside a vector is broadcast."""
    return next((a.type.space for a in args if a.type.space is not None), None)
