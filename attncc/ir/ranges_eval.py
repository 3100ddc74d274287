"""Expressions of masks and tile ranges evaluated with numpy, and a map of tile classes.

The arithmetic is the kernels': i32 that wraps, float32; a tensor is read only where its guard lets it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from attncc.ir.nodes import Const, Expr, Leaf, Load, Op, Param, Variant
from attncc.ir.ranges import TileRanges, tile_ranges

EMPTY, PARTIAL, FULL = 0, 1, 2
TILES_AT_ONCE = 2**20  # bounds the memory that a map takes

_UNARY = {
    "neg": np.negative, "abs": np.abs, "not": np.logical_not, "floor": np.floor, "exp": np.exp, "exp2": np.exp2,
    "log": np.log, "log2": np.log2, "log1p": np.log1p, "sqrt": np.sqrt, "tanh": np.tanh, "sin": np.sin,
    "cos": np.cos, "rsqrt": lambda x: 1 / np.sqrt(x), "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "logsigmoid": lambda x: -np.logaddexp(0, -x), "softplus": lambda x: np.logaddexp(0, x),
    "i32": np.trunc, "f32": lambda x: x,
}  # fmt: skip
_BINARY = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "min": np.minimum, "max": np.maximum, "div": np.divide,
    "pow": np.power, "floordiv": np.floor_divide, "mod": np.mod, "lt": np.less, "le": np.less_equal,
    "eq": np.equal, "ne": np.not_equal,
    "bit": lambda x, n: (n >= 0) & (n < 32) & ((x >> np.clip(n, 0, 31)) & 1 == 1),
}  # fmt: skip


def evaluate(e: Expr, leaves: Mapping[str, Any], values: Mapping[str, Any]) -> np.ndarray:
    """`e` for every element of the (broadcast) arrays of integers in `leaves`; `values` has scalars and tensors.

    Returns an array of int64 (within 32 bits), float32 or bool.  Raises IndexError where a tensor is read out of range
    by an element that no guard hides, KeyError for a leaf or value that is not given.
    """
    arrays = np.broadcast_arrays(*(np.asarray(x, np.int64) for x in leaves.values())) if leaves else []
    env = dict(zip(leaves, arrays, strict=True))
    shape = arrays[0].shape if leaves else ()
    with np.errstate(all="ignore"):
        return _Evaluator(env, values).go(e, np.ones(shape, bool))


class _Evaluator:
    def __init__(self, leaves: Mapping[str, np.ndarray], values: Mapping[str, Any]):
        self.leaves, self.values = leaves, values

    def go(self, e: Expr, active: np.ndarray) -> np.ndarray:
        if isinstance(e, Const):
            return _typed(np.full(active.shape, e.value), e.type.elem)
        if isinstance(e, Leaf):
            return self.leaves[e.name]
        if isinstance(e, Param):
            return _typed(np.full(active.shape, self.values[e.name]), e.type.elem)
        if isinstance(e, Load):
            return self.load(e, active)
        if not isinstance(e, Op):
            raise TypeError(f"a mask has no {type(e).__name__}")
        if e.op in ("and", "or"):
            x = self.go(e.args[0], active)
            y = self.go(e.args[1], active & (x if e.op == "and" else ~x))
            return x & y if e.op == "and" else x | y
        if e.op == "select":
            c = self.go(e.args[0], active)
            return np.where(c, self.go(e.args[1], active & c), self.go(e.args[2], active & ~c))
        args = [self.go(a, active) for a in e.args]
        return _typed((_UNARY if len(args) == 1 else _BINARY)[e.op](*args), e.type.elem)

    def load(self, e: Load, active: np.ndarray) -> np.ndarray:
        tensor = np.asarray(self.values[e.tensor])
        index = [self.go(x, active) for x in e.index]
        for k, (x, size) in enumerate(zip(index, tensor.shape, strict=True)):
            outside = active & ((x < 0) | (x >= size))
            if outside.any():
                raise IndexError(f"{e.tensor}: index {x[outside][0]} of dimension {k}, which has {size}")
        if 0 in tensor.shape:
            return _typed(np.zeros(active.shape), e.type.elem)
        return _typed(tensor[tuple(np.where(active, x, 0) for x in index)], e.type.elem)


def _typed(x: np.ndarray, elem: str) -> np.ndarray:
    if elem == "i32":
        return (x.astype(np.int64) + 2**31) % 2**32 - 2**31
    return x.astype(np.float32 if elem == "f32" else bool)


def tile_map(
    v: Variant, qo_len: int, kv_len: int, tile_q: int, tile_kv: int, values: Mapping[str, Any],
    *, ranges: TileRanges | None = None,
) -> np.ndarray:  # fmt: skip
    """The class of every tile: int8 [ceil(qo_len / tile_q), ceil(kv_len / tile_kv)] of EMPTY, PARTIAL and FULL.

    `values`: the scalars that have no default, and tensors by name (one not given is unknown, so that tiles that
    depend on it are PARTIAL); also `b`, `h`, `g` (0) and sizes such as `num_qo_heads` (1).  A dimension over `iq` or
    `j` has the request's own rows.  `ranges`, where they are at hand, must do without the tensors that are not given.
    ValueError for a scalar without a value, or for a tensor that is too small.
    """
    if ranges is None:
        ranges = tile_ranges(v, without=[t.name for t in v.tensors if t.name not in values])
    values = {**{p.name: p.default for p in v.scalars if p.default is not None}, **values}
    i0 = np.arange(0, qo_len, tile_q)[:, None] + kv_len - qo_len
    j0 = np.arange(0, kv_len, tile_kv)[None, :]
    at = {"i0": i0, "i1": np.minimum(i0 + tile_q, kv_len) - 1, "j0": j0, "j1": np.minimum(j0 + tile_kv, kv_len) - 1}
    sizes = dict.fromkeys(("head_dim_qk", "head_dim_vo", "group_size", "num_qo_heads", "num_kv_heads"), 1)
    fixed = {**dict.fromkeys("bhg", 0), **sizes, "qo_len": qo_len, "kv_len": kv_len}
    at |= {name: values.get(name, x) for name, x in fixed.items()}
    result = np.empty((i0.size, j0.size), np.int8)
    step = max(1, TILES_AT_ONCE // max(1, j0.size))
    try:
        for row in range(0, i0.size, step):
            some = {name: x[row : row + step] if name in ("i0", "i1") else x for name, x in at.items()}
            result[row : row + step] = _classes(ranges, some, values)
    except KeyError as e:
        raise ValueError(f"{e.args[0]}: expected a value for the mask's scalar, found none") from None
    except IndexError as e:
        raise ValueError(str(e)) from None
    return result


def _classes(r: TileRanges, at: Mapping[str, Any], values: Mapping[str, Any]) -> np.ndarray:
    j0, j1 = at["j0"], at["j1"]
    lo, hi, clear_lo, clear_hi = (evaluate(e, at, values) for e in (r.lo, r.hi, r.clear_lo, r.clear_hi))
    seen = (lo < hi) & (j0 < hi) & (j1 >= lo)
    full = (j0 >= clear_lo) & (j1 < clear_hi)
    if r.may is not None:
        seen = seen & evaluate(r.may, at, values)
    if r.must is not None:
        full = full | evaluate(r.must, at, values)
    return np.where(full, FULL, np.where(seen, PARTIAL, EMPTY))
