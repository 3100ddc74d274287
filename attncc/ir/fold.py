"""The value of an op on literals, as the language defines it: i32 wraps at 32 bits, `//` and `%` floor, f32 is computed
in float64.  What has no finite value (a division by zero, the log of a negative number) is left for run time."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable

from attncc.ir.nodes import BOOL, F32, I32, Const, Expr, Op


def wrap(n: int) -> int:
    """`n` as an i32 of the same low 32 bits."""
    return (n + 2**31) % 2**32 - 2**31


def _logsigmoid(x: float) -> float:
    return -_softplus(-x)


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else math.exp(x) / (1.0 + math.exp(x))


INTEGER: dict[str, Callable] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "min": min, "max": max, "neg": operator.neg,
    "abs": abs, "floordiv": operator.floordiv, "mod": operator.mod, "pow": lambda x, n: pow(x, n, 2**32),
}  # fmt: skip
REAL: dict[str, Callable] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "min": min, "max": max, "neg": operator.neg,
    "abs": abs, "floordiv": operator.floordiv, "mod": operator.mod, "pow": math.pow, "div": operator.truediv,
    "floor": lambda x: float(math.floor(x)), "exp": math.exp, "exp2": lambda x: math.pow(2.0, x), "log": math.log,
    "log2": math.log2, "log1p": math.log1p, "sqrt": math.sqrt, "rsqrt": lambda x: 1.0 / math.sqrt(x),
    "tanh": math.tanh, "sin": math.sin, "cos": math.cos, "sigmoid": _sigmoid, "logsigmoid": _logsigmoid,
    "softplus": _softplus,
}  # fmt: skip
PREDICATE: dict[str, Callable] = {
    "lt": operator.lt, "le": operator.le, "eq": operator.eq, "ne": operator.ne, "and": lambda x, y: x and y,
    "or": lambda x, y: x or y, "not": operator.not_, "bit": lambda word, n: 0 <= n < 32 and bool(word >> n & 1),
}  # fmt: skip


def fold(e: Op) -> Expr:
    """`e` itself, or the literal it is worth where all its arguments are literals."""
    args = [a.value for a in e.args if isinstance(a, Const)]
    if len(args) < len(e.args):
        return e
    if e.op == "select":
        return e.args[1] if args[0] else e.args[2]
    if e.op in PREDICATE:
        return Const(PREDICATE[e.op](*args), BOOL, e.span)
    try:
        if e.type == I32:
            n = math.trunc(args[0]) if e.op == "i32" else wrap(INTEGER[e.op](*args))
            return Const(n, I32, e.span) if n == wrap(n) else e
        x = float(args[0]) if e.op == "f32" else REAL[e.op](*args)
        return Const(x, F32, e.span) if math.isfinite(x) else e
    except (ArithmeticError, ValueError):
        return e
