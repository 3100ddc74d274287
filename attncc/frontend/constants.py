"""The value of an operation on literals: i32 wraps at 32 bits, floats are Python's."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable


def wrap(value: int) -> int:
    """`value` as a signed 32-bit integer."""
    return (value + 2**31) % 2**32 - 2**31


def _power(x, n):
    """i32 by squaring modulo 2**32, so that no exponent makes a huge number."""
    return pow(x, n, 2**32) if isinstance(x, int) else math.pow(x, n)


def _log_sigmoid(x: float) -> float:
    return min(x, 0.0) - math.log1p(math.exp(-abs(x)))


_VALUES: dict[str, Callable] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "min": min, "max": max,
    "floordiv": operator.floordiv, "mod": operator.mod, "pow": _power, "div": operator.truediv,
    "neg": operator.neg, "abs": abs, "lt": operator.lt, "le": operator.le, "eq": operator.eq, "ne": operator.ne,
    "and": lambda a, b: a and b, "or": lambda a, b: a or b, "not": operator.not_,
    "select": lambda c, a, b: a if c else b,
    "floor": lambda x: float(math.floor(x)), "exp": math.exp, "exp2": lambda x: math.pow(2.0, x),
    "log": math.log, "log2": math.log2, "log1p": math.log1p, "sqrt": math.sqrt, "rsqrt": lambda x: 1.0 / math.sqrt(x),
    "tanh": math.tanh, "sin": math.sin, "cos": math.cos,
    "sigmoid": lambda x: math.exp(_log_sigmoid(x)), "logsigmoid": _log_sigmoid, "softplus": lambda x: -_log_sigmoid(-x),
    "i32": lambda x: wrap(int(x)), "f32": float,
    "bit": lambda w, n: 0 <= n < 32 and bool(w >> n & 1),
}  # fmt: skip


def apply(op: str, args: list[int | float | bool | None]) -> int | float | bool | None:
    """The value of an operation on constants; None where it has none (log(-1.0), 1 // 0) or an argument has none."""
    if any(a is None for a in args):
        return None
    try:
        found = _VALUES[op](*args)
    except (ArithmeticError, ValueError):
        return None
    return wrap(found) if isinstance(found, int) and not isinstance(found, bool) else found
