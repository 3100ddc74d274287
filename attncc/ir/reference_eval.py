"""One expression of the IR over all lanes of a chunk, in plain torch.

Axes are named by place: a scalar value has the axes (h, iq, j), a vector value (h, iq, j, feature); what does not
depend on an axis has length 1 there, and torch broadcasts.  i32 is held in int64 and wrapped to 32 bits after each
operation, f32 in the compute dtype (float64 by default), bool in bool.

A guard hides what it guards, so a read out of range is no error by itself.  Every value therefore carries a *fault*: a
boolean mask of the lanes whose evaluation reads out of range or divides an integer by zero (None: no such lane).
`and`, `or` and `select` drop the faults of lanes they do not take, and `Lanes.checked` raises for those that are left
in lanes that exist.  Each node is so evaluated once, however many guards it stands under.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attncc.ir.nodes import Const, Expr, Leaf, Load, Op, Param, Rope, TensorParam, Variant, children, objects

if TYPE_CHECKING:
    from attncc.ir.reference_layout import Request


class OutOfRange(IndexError, ValueError):
    """A tensor is read out of range in a lane that nothing hides: names the tensor, the index and the position."""


class DivisionByZero(ZeroDivisionError, ValueError):
    """An integer is divided by zero in a lane that nothing hides: names the position."""


Value = tuple[Tensor, "Tensor | None"]
I32_MIN, I32_MAX = -(2**31), 2**31 - 1


@dataclass(frozen=True)
class Call:
    """What one call fixes before any lane is looked at: checked arguments, and sizes that all requests share."""

    variant: Variant
    sizes: dict[str, int]
    scalars: dict[str, int | float | bool]
    tensors: dict[str, Tensor]
    params: dict[str, TensorParam]
    compute_dtype: torch.dtype
    device: torch.device


class Lanes:
    """Evaluates expressions over the lanes of one chunk of one request.

    `leaves` gives the axes and the values that slots speak of, each with three axes (four for vectors); `set` adds
    those that come later (s, l, lse, o).
    """

    def __init__(self, call: Call, request: Request, leaves: dict[str, Tensor]):
        self.call, self.request = call, request
        sizes = {**call.sizes, "qo_len": request.qo_len, "kv_len": request.kv_len, "b": request.b}
        self.leaves = {name: self._full(n, torch.int64) for name, n in sizes.items()}
        for space, size in (("d", "head_dim_qk"), ("e", "head_dim_vo")):
            self.leaves[space] = torch.arange(call.sizes[size], device=call.device).view(1, 1, 1, -1)
        self.leaves.update(leaves)
        self._memo: dict[int, tuple[Expr, Value]] = {}

    def set(self, **leaves: Tensor) -> None:
        """Give leaves that were not known before; nothing that names them may have been evaluated yet."""
        self.leaves.update(leaves)

    def checked(self, e: Expr, lanes: Tensor | None = None) -> Tensor:
        """The value of `e`, three or four axes, broadcastable over the chunk.

        Raises OutOfRange or DivisionByZero for a lane where `lanes` (None: every lane of the value) is true.
        """
        value, fault = self.value(e)
        if fault is not None:
            self.refuse(e, fault, lanes)
        return value

    def refuse(self, e: Expr, fault: Tensor, lanes: Tensor | None) -> None:
        """Raise for the first lane of `fault` that is in `lanes`; return where there is none."""
        if lanes is not None:
            fault = fault & (lanes.unsqueeze(-1) if fault.ndim > lanes.ndim else lanes)
        if fault.any():
            raise self._blame(e, tuple(int(x) for x in fault.nonzero()[0]), AXES if lanes is not None else AXES[:-1])

    def value(self, e: Expr) -> Value:
        """The value of `e` and its fault, unchecked; hidden lanes hold anything."""
        if id(e) not in self._memo:
            for x in objects(e):  # children first, so that no depth of nesting recurses
                if id(x) not in self._memo:
                    self._memo[id(x)] = (x, self._value(x))  # holding the node keeps its id from being used again
        return self._memo[id(e)][1]

    def _value(self, e: Expr) -> Value:
        if isinstance(e, Leaf):
            return self.leaves[e.name], None
        if isinstance(e, Const):
            return self._full(e.value, self.dtype(e.type.elem)), None
        if isinstance(e, Param):
            return self._full(self.call.scalars[e.name], self.dtype(e.type.elem)), None
        if isinstance(e, Load):
            return self._gather(e.tensor, *self._args(e.index))
        if isinstance(e, Rope):
            return self._rope(e)
        if e.op in GUARDS:
            return self._guarded(e)
        args, fault = self._args(e.args)
        if e.op == "sum":
            total = args[0].sum(-1)
            return self._wrapped(e, total), None if fault is None else fault.any(-1)
        if e.op in ("floordiv", "mod") and e.type.elem == "i32":
            zero = args[1] == 0
            fault = _either(fault, zero)
            args[1] = torch.where(zero, 1, args[1])
        if e.op == "pow" and e.type.elem == "i32":
            return _power_i32(*args), fault
        return self._wrapped(e, FUNCTIONS[e.op](*args)), fault

    def dtype(self, elem: str) -> torch.dtype:
        return {"i32": torch.int64, "f32": self.call.compute_dtype, "bool": torch.bool}[elem]

    def _full(self, value: int | float | bool, dtype: torch.dtype) -> Tensor:
        return torch.full((1, 1, 1), value, dtype=dtype, device=self.call.device)

    def _wrapped(self, e: Op, x: Tensor) -> Tensor:
        if e.type.elem == "i32":
            return wrap(x)
        return x.to(self.call.compute_dtype) if e.op == "f32" else x

    def _args(self, exprs: tuple[Expr, ...]) -> tuple[list[Tensor], Tensor | None]:
        """Values with equal numbers of axes, and the lanes where any of them is at fault."""
        values = [self.value(e) for e in exprs]
        fault = None
        for _, f in values:
            fault = _either(fault, f)
        return _align(*(x for x, _ in values)), fault

    def _guarded(self, e: Op) -> Value:
        values = [self.value(a) for a in e.args]
        x, *rest = _align(*(v for v, _ in values))
        f, *faults = (f for _, f in values)
        if e.op == "select":
            taken = _either(_both(x, faults[0]), _both(~x, faults[1]))
            return torch.where(x, *rest), _either(f, taken)
        open_ = x if e.op == "and" else ~x
        return FUNCTIONS[e.op](x, rest[0]), _either(f, _both(open_, faults[0]))

    def length(self, space: str | int, n: int) -> int:
        """The number of values that an index over `space` may take, n being the argument's dimension."""
        return {"iq": self.request.qo_len, "j": self.request.kv_len}.get(str(space), n)

    def _gather(self, name: str, index: list[Tensor], fault: Tensor | None) -> Value:
        data, dims = self.call.tensors[name], self.call.params[name].dims
        shape = torch.broadcast_shapes(*(x.shape for x in index))
        at: list[Tensor] = []
        for space, x in zip(dims, index, strict=True):
            n = self.length(space, data.shape[len(at)])
            outside = (x < 0) | (x >= n)
            if outside.any():
                fault = _either(fault, outside)
            if n == 0:
                elem = torch.zeros((), dtype=data.dtype, device=data.device)
                return self._loaded(elem.expand(shape)), fault
            at += self.request.locate(space, x.clamp(0, n - 1))
        return self._loaded(data[tuple(at)]), fault

    def _loaded(self, x: Tensor) -> Tensor:
        if x.dtype == torch.bool:
            return x
        return x.to(self.call.compute_dtype if x.dtype.is_floating_point else torch.int64)

    def _rope(self, e: Rope) -> Value:
        (x, pos), fault = self._args((e.x, e.pos))
        dims = x.shape[-1] if e.dims is None else e.dims
        if dims % 2 or dims > x.shape[-1]:
            raise ValueError(f"rope: expected an even dims of at most {x.shape[-1]} features, found {dims}")
        half = torch.arange(dims // 2, device=x.device).view(1, 1, 1, -1)
        if e.cos is not None and e.sin is not None:
            for name in (e.cos, e.sin):
                if self.call.tensors[name].shape[-1] != dims // 2:
                    found = list(self.call.tensors[name].shape)
                    raise ValueError(
                        f"{name}: expected a last dimension of {dims // 2} (dims // 2), found shape {found}"
                    )
            cos, f_cos = self._gather(e.cos, [pos, half], None)
            sin, f_sin = self._gather(e.sin, [pos, half], None)
            fault = _either(_either(fault, f_cos), f_sin)
        else:
            scaling = [a if a is None or isinstance(a, str) else self._args((e.x, a)) for a in e.scaling]
            (_, theta), f_theta = self._args((e.x, e.theta))
            fault = _either(fault, f_theta)
            values: list = []
            for a in scaling:
                values.append(a if a is None or isinstance(a, str) else a[0][1].to(self.call.compute_dtype))
                fault = fault if a is None or isinstance(a, str) else _either(fault, a[1])
            freq, magnitude = frequencies(theta, dims, half.to(theta.dtype), values)
            cos, sin = torch.cos(pos * freq) * magnitude, torch.sin(pos * freq) * magnitude
        return rotate(x, cos, sin, dims, e.style), fault

    def _blame(self, e: Expr, at: tuple[int, ...], axes: tuple[str, ...]) -> Exception:
        """The error of the node that is at fault in lane `at`, found by following what that lane evaluates."""
        while True:
            kids = children(e)
            if isinstance(e, Op) and e.op == "select":
                kids = (kids[0], kids[1] if _pick(self.value(kids[0])[0], at).all() else kids[2])
            bad = [k for k in kids if (f := self.value(k)[1]) is not None and _pick(f, at).any()]
            if not bad:
                break
            e = bad[0]
            fault = self.value(e)[1]
            if fault is not None and fault.ndim > len(at):
                at = (*at, int(_pick(fault, at).nonzero()[0]))
        where = " ".join(f"{name}={int(_pick(self.leaves[name], at))}" for name in axes if name in self.leaves)
        line = f", line {e.span.line}" if e.span.line else ""
        if isinstance(e, Op):
            return DivisionByZero(f"integer division by zero at {where}{line}")
        reads: dict[str, tuple[Expr, ...]] = {e.tensor: e.index} if isinstance(e, Load) else {}
        if isinstance(e, Rope):
            reads = {str(e.cos): (e.pos,), str(e.sin): (e.pos,)}
        for name, index in reads.items():
            data, taken = self.call.tensors[name], 0
            for k, (space, x) in enumerate(zip(self.call.params[name].dims, index, strict=False)):
                n, i = self.length(space, data.shape[taken]), int(_pick(self.value(x)[0], at).flatten()[0])
                if not 0 <= i < n:
                    text = f"tensor {name!r} is read out of range: index {k} ({space}) is {i}, not in 0…{n - 1}"
                    return OutOfRange(f"{text}, at {where}{line}")
                taken += self.request.axes(space)
        raise AssertionError("a fault without a cause")


AXES = ("b", "h", "g", "iq", "i", "j")
GUARDS = ("and", "or", "select")


def wrap(x: Tensor) -> Tensor:
    """int64 to the 32-bit two's complement value of the same low bits, in int64."""
    return x.to(torch.int32).to(torch.int64)


def _align(*values: Tensor) -> list[Tensor]:
    """Give scalars a feature axis where any value is a vector."""
    axes = max(x.ndim for x in values)
    return [x if x.ndim == axes else x.unsqueeze(-1) for x in values]


def _both(a: Tensor, b: Tensor | None) -> Tensor | None:
    if b is None:
        return None
    x, y = _align(a, b)
    return x & y


def _either(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    x, y = _align(a, b)
    return x | y


def _pick(x: Tensor, at: tuple[int, ...]) -> Tensor:
    """The element of `x` in lane `at`; axes of length 1 stand for every index."""
    return x[tuple(min(i, n - 1) for i, n in zip(at, x.shape, strict=False))]


def _truncate(x: Tensor) -> Tensor:
    """Toward zero; beyond 32 bits to the nearest i32 and NaN to 0, as cvt.rzi.s32 does."""
    return x.nan_to_num(0.0, math.inf, -math.inf).clamp(I32_MIN, I32_MAX).trunc().to(torch.int64)


def _bit(word: Tensor, n: Tensor) -> Tensor:
    return ((word >> n.clamp(0, 31)) & 1).bool() & (n >= 0) & (n <= 31)


def _power_i32(x: Tensor, n: Tensor) -> Tensor:
    """x ** n in wrapping 32-bit arithmetic, by squaring."""
    x, n = torch.broadcast_tensors(x, n.clamp(min=0))
    result = torch.ones_like(x)
    while n.any():
        result = torch.where((n & 1).bool(), wrap(result * x), result)
        x, n = wrap(x * x), n >> 1
    return result


def _softplus(x: Tensor) -> Tensor:
    return torch.logaddexp(x, torch.zeros_like(x))  # torch's own softplus is linear beyond a threshold


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "min": torch.minimum, "max": torch.maximum,
    "floordiv": torch.floor_divide, "mod": torch.remainder, "pow": torch.pow, "div": torch.div,
    "neg": torch.neg, "abs": torch.abs, "lt": torch.lt, "le": torch.le, "eq": torch.eq, "ne": torch.ne,
    "and": torch.logical_and, "or": torch.logical_or, "not": torch.logical_not, "floor": torch.floor,
    "exp": torch.exp, "exp2": torch.exp2, "log": torch.log, "log2": torch.log2, "log1p": torch.log1p,
    "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "tanh": torch.tanh, "sin": torch.sin, "cos": torch.cos,
    "sigmoid": torch.sigmoid, "softplus": _softplus, "logsigmoid": lambda x: -_softplus(-x),
    "i32": _truncate, "f32": lambda x: x, "bit": _bit,
}  # fmt: skip


def frequencies(theta: Tensor, dims: int, k: Tensor, scaling: list) -> tuple[Tensor, Tensor | float]:
    """Angles a position and the factor on cos and sin, [..., dims // 2], after `scaling` = [] or [name, value, …].

    theta^(-2k/dims) is RoFormer's (arXiv 2104.09864, eq. 15); linear is position interpolation (arXiv 2306.15595);
    llama31 interpolates long wavelengths; yarn is arXiv 2309.00071, eqs. 17-22, with the bounds of its ramp rounded
    outward and its attention factor 0.1 ln(factor) + 1 unless given.
    """
    freq = theta ** (-2.0 * k / dims)
    if not scaling:
        return freq, 1.0
    name, factor, *rest = scaling
    if name == "linear":
        return freq / factor, 1.0
    if name == "llama31":
        low, high, original = rest
        turns = original * freq / (2 * math.pi)
        keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        return freq * keep + freq / factor * (1 - keep), 1.0
    original, beta_fast, beta_slow, magnitude = rest

    def feature_of(turns: Tensor) -> Tensor:
        """The (fractional) pair of features that turns so often over the original length."""
        return dims * torch.log(original / (turns * 2 * math.pi)) / (2 * torch.log(theta))

    first = feature_of(beta_fast).floor().clamp(min=0)
    last = feature_of(beta_slow).ceil().clamp(max=dims - 1)
    last = torch.where(first == last, last + 0.001, last)
    interpolate = ((k - first) / (last - first)).clamp(0.0, 1.0)
    if magnitude is None:
        magnitude = torch.where(factor > 1, 0.1 * torch.log(factor) + 1, 1.0)
    return freq / factor * interpolate + freq * (1 - interpolate), magnitude


def rotate(x: Tensor, cos: Tensor, sin: Tensor, dims: int, style: str) -> Tensor:
    """Turn each pair of the first `dims` features; neox pairs (n, n + dims / 2), interleaved (2n, 2n + 1)."""
    head = x[..., :dims]
    if style == "interleaved":
        a, b = head[..., 0::2], head[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = head.chunk(2, dim=-1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    rest = x[..., dims:]
    return torch.cat((turned, rest.expand(*turned.shape[:-1], rest.shape[-1])), dim=-1)
