"""A small evaluator of the IR with numpy, written apart from the compiler's own: what tests hold rewrites against.

Scalars are arrays over lanes, vectors have a feature axis behind it.  An i32 wraps, an f32 is of the width asked for,
and zeros lose their sign after every f32 op, which is the one liberty that all rules may take.  Every tensor element
read by a lane that no guard hides is recorded; an index out of range is taken modulo the length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from attncc.ir.nodes import Const, Expr, Leaf, Load, Op, Param, Rope, children, objects


def _scalar(f: Callable[..., float]) -> Callable[..., np.ndarray]:
    """`f` of the math module on arrays: the same last bit as on literals, inf and nan where it raises."""

    def safe(x: float) -> float:
        try:
            return f(x)
        except OverflowError:
            return math.inf
        except (ValueError, ZeroDivisionError):
            return -math.inf if x == 0 and f in (math.log, math.log2) else math.inf if x == 0 else math.nan

    return lambda x: np.vectorize(safe, otypes=[np.float64])(np.asarray(x, np.float64)).astype(np.asarray(x).dtype)


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else math.exp(x) / (1.0 + math.exp(x))


def _power(x: np.ndarray, n: np.ndarray) -> np.ndarray:
    """Integer exponents from 2 on by square and multiply, lane by lane; numpy's otherwise."""
    if x.dtype == np.int64:
        pairs = zip(*(a.ravel() for a in np.broadcast_arrays(x, n)), strict=True)
        return np.array([pow(int(a), int(b), 2**32) for a, b in pairs]).reshape(np.broadcast_shapes(x.shape, n.shape))
    x, n = np.broadcast_arrays(x, n)
    chained = np.isfinite(n) & (n == np.floor(n)) & (n >= 2) & (n <= 16)
    left, square, result = np.where(chained, n, 0).astype(int), x, np.ones_like(x)
    while left.any():
        result = np.where(left & 1, np.where(result == 1, square, result * square), result)
        left, square = left >> 1, square * square
    return np.where(chained, result, np.power(x, n))


UNARY: dict[str, Callable[[Any], Any]] = {
    "neg": np.negative, "abs": np.abs, "not": np.logical_not, "floor": np.floor, "f32": lambda x: x,
    "exp": _scalar(math.exp), "exp2": _scalar(lambda x: math.pow(2.0, x)), "log": _scalar(math.log),
    "log2": _scalar(math.log2), "log1p": _scalar(math.log1p), "sqrt": _scalar(math.sqrt),
    "rsqrt": _scalar(lambda x: 1.0 / math.sqrt(x)), "tanh": _scalar(math.tanh), "sin": _scalar(math.sin),
    "cos": _scalar(math.cos), "sigmoid": _scalar(_sigmoid), "softplus": _scalar(_softplus),
    "logsigmoid": _scalar(lambda x: -_softplus(-x)),
    "i32": lambda x: np.trunc(np.clip(np.nan_to_num(x), -(2.0**31), 2.0**31 - 1)).astype(np.int64),
}  # fmt: skip
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "min": np.minimum, "max": np.maximum,
    "floordiv": np.floor_divide, "mod": np.mod, "pow": np.power, "lt": np.less, "le": np.less_equal, "eq": np.equal,
    "ne": np.not_equal, "and": np.logical_and, "or": np.logical_or,
    "bit": lambda word, n: (n >= 0) & (n < 32) & ((word >> np.clip(n, 0, 31)) & 1 == 1),
}  # fmt: skip


class Evaluator:
    """`values`: of leaves and parameters, by name, arrays [lanes] or [lanes, features].  `tensors`: arrays by name.
    `chain`: integer powers by square and multiply, as the rewriter makes them, to the last bit."""

    def __init__(self, values: Mapping[str, Any], tensors: Mapping[str, Any], lanes: int, real: Any = np.float64,
                 chain: bool = False):  # fmt: skip
        self.values, self.tensors, self.lanes, self.real, self.chain = values, tensors, lanes, real, chain
        self.reads: set[tuple] = set()  # (tensor, lane, index, …)

    def __call__(self, e: Expr) -> np.ndarray:
        """`e` on every lane: int64 within 32 bits, `real`, or bool."""
        order = list(objects(e))
        done: dict[int, np.ndarray] = {}
        with np.errstate(all="ignore"):
            for x in order:
                done[id(x)] = self.typed(x, self.value(x, [done[id(k)] for k in children(x)]))
        active = {id(x): np.zeros(self.lanes, bool) for x in order}
        active[id(e)][:] = True
        for x in reversed(order):  # users before what they use
            self.guard(x, active, done)
            if isinstance(x, Load):
                index = np.broadcast_arrays(*self.aligned(x, [done[id(k)] for k in x.index]))
                for lane in np.flatnonzero(active[id(x)]):
                    self.reads |= {
                        (x.tensor, int(lane), *at) for at in zip(*(a[lane].ravel() for a in index), strict=True)
                    }
        return done[id(e)]

    def guard(self, x: Expr, active: dict[int, np.ndarray], done: dict[int, np.ndarray]) -> None:
        """Marks the lanes for which `x` evaluates each of its children."""
        kids = children(x)
        wanted = [active[id(x)]] * len(kids)
        if isinstance(x, Op) and x.op in ("and", "or", "select"):
            first = done[id(kids[0])].reshape(self.lanes, -1)
            yes, no = first.any(axis=1) & wanted[0], (~first).any(axis=1) & wanted[0]
            wanted = [wanted[0], *{"and": (yes,), "or": (no,), "select": (yes, no)}[x.op]]
        for k, lanes in zip(kids, wanted, strict=True):
            active[id(k)] |= lanes

    def typed(self, x: Expr, value: Any) -> np.ndarray:
        if x.type.elem == "i32":
            return (np.asarray(value, np.int64) + 2**31) % 2**32 - 2**31
        return np.asarray(value, bool) if x.type.elem == "bool" else np.asarray(value, self.real) + self.real(0.0)

    def aligned(self, x: Expr, args: list[np.ndarray]) -> list[np.ndarray]:
        """Scalars beside vectors get a feature axis."""
        return [a[:, None] if a.ndim == 1 and x.type.space else a for a in args]

    def value(self, x: Expr, args: list[np.ndarray]) -> Any:
        if isinstance(x, Const):
            return np.full(self.lanes, x.value)
        if isinstance(x, Leaf | Param):
            return self.values[x.name]
        if isinstance(x, Op) and x.op == "sum":
            return args[0].sum(axis=1)
        args = self.aligned(x, args)
        if isinstance(x, Load):
            table = self.tensors[x.tensor]
            return table[tuple(a % n for a, n in zip(args, table.shape, strict=True))]
        if isinstance(x, Rope):  # not rope: anything that tells its arguments apart will do
            return args[0] * np.cos(args[1] / args[2]) + sum((n + 2) * a for n, a in enumerate(args[3:]))
        if x.op == "pow" and (x.type.elem == "i32" or self.chain):
            return _power(*args)
        return np.where(*args) if x.op == "select" else (UNARY | BINARY)[x.op](*args)
