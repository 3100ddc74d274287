"""What a call must look like, and what to say when it doesn't.

Pure functions of shapes, strides, dtypes and values: nothing here touches a device, so all of it is tested on the CPU.
Every complaint is a ValueError or TypeError of the form "argument: expected …, found …", raised before any launch.
"""

from __future__ import annotations

import difflib
import math
import numbers
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

I32_MIN, I32_MAX = -(1 << 31), (1 << 31) - 1
F32_MAX = 3.4028234663852886e38
F32_TOP = 3.4028235677973366e38  # rounds to infinity from here on
RESERVED = ("q", "k", "v", "return_lse", "out", "lse", "emit")

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
# a tensor parameter's declared dtype -> what the caller may pass (a u32 tensor has the bits of an int32 one)
PARAM_DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    "f32": (torch.float32,), "bf16": (torch.bfloat16,), "f16": (torch.float16,), "i32": (torch.int32,),
    "u32": (torch.uint32, torch.int32), "u8": (torch.uint8,), "bool": (torch.bool,),
}  # fmt: skip


@dataclass(frozen=True)
class Scalar:
    """A run-time scalar parameter; `default` None: the caller must give it."""

    name: str
    type: str
    default: Any


@dataclass(frozen=True)
class TensorParam:
    """A tensor parameter; `dims` are index spaces, integers, or fresh names (any length)."""

    name: str
    dims: tuple[str | int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.name}[{', '.join(map(str, self.dims))}]: {self.dtype}"


@dataclass(frozen=True)
class Emit:
    """An extra output; the kernel writes what it is made from as the `rows`-th tensor of rows."""

    name: str
    index: tuple[str, ...]
    reduce: str
    rows: int


@dataclass(frozen=True)
class Spec:
    """The part of a manifest that arguments are checked against."""

    name: str
    head_dim_qk: int
    head_dim_vo: int
    dtype: torch.dtype
    scan: str
    scalars: tuple[Scalar, ...]
    tensors: tuple[TensorParam, ...]
    const: Mapping[str, Any]
    device_type: str = "cuda"
    names: frozenset[str] = field(default=frozenset())
    emits: tuple[Emit, ...] = ()

    @classmethod
    def of(cls, manifest: Mapping[str, Any], device_type: str) -> Spec:
        scalars = tuple(Scalar(s["name"], s["type"], s["default"]) for s in manifest["scalars"])
        tensors = tuple(TensorParam(t["name"], tuple(t["dims"]), t["dtype"]) for t in manifest["tensors"])
        return cls(
            name=manifest["variant"]["name"],
            head_dim_qk=manifest["head_dim_qk"],
            head_dim_vo=manifest["head_dim_vo"],
            dtype=DTYPES[manifest["dtype"]],
            scan=manifest["scan"],
            scalars=scalars,
            tensors=tensors,
            const=manifest["const"],
            device_type=device_type,
            names=frozenset(p.name for p in (*scalars, *tensors)),
            emits=tuple(Emit(e["name"], tuple(e["index"]), e["reduce"], e["rows"]) for e in manifest.get("emits", ())),
        )

    @property
    def rows(self) -> tuple[TensorParam, ...]:
        """What emits are made from: tensors that a launch takes behind the variant's own, and writes."""
        count = max((e.rows + 1 for e in self.emits), default=0)
        return tuple(TensorParam(f"emit.{k}", ("iq", "h"), "f32") for k in range(count))

    @property
    def bound(self) -> tuple[TensorParam, ...]:
        """Every tensor of a launch beside q, k, v and results, in order."""
        return (*self.tensors, *self.rows)


Space = list[tuple[str, int | None]]  # (label, length) of its dimensions; None: any length; for "pos" the least one


@dataclass(frozen=True)
class Sizes:
    """The sizes of one dense call; `spaces` says what the index spaces of tensor parameters are in it."""

    batch: int
    qo_len: int
    kv_len: int
    num_qo_heads: int
    num_kv_heads: int

    @property
    def group_size(self) -> int:
        return self.num_qo_heads // self.num_kv_heads if self.num_kv_heads else 1

    @property
    def spaces(self) -> dict[str, Space]:
        return {
            "b": [("b", self.batch)], "h": [("h", self.num_qo_heads)], "g": [("g", self.num_kv_heads)],
            "iq": [("B", self.batch), ("qo_len", self.qo_len)], "j": [("B", self.batch), ("kv_len", self.kv_len)],
            "pos": [("pos", self.kv_len)],
        }  # fmt: skip


# ---------------------------------------------------------------------- names


def refuse_names(spec: Spec, given: Iterable[str]) -> NoReturn:
    """Say which of the parameters (with defaults filled in) is unknown, `const` or missing."""
    for name in given:
        if name in spec.const:
            raise TypeError(
                f"{name}: a const parameter of {spec.name}, {name} = {spec.const[name]} in this kernel; "
                f"expected in attncc.compile(…, const={{{name!r}: …}}), found in a call"
            )
        if name not in spec.names:
            close = difflib.get_close_matches(name, [*spec.names, *RESERVED], n=1)
            known = ", ".join(sorted(spec.names)) or "none"
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"{name}: unknown parameter; {spec.name} takes {known}{hint}")
    missing = [f"{s.name}: {s.type}" for s in spec.scalars if s.name not in given]
    missing += [str(t) for t in spec.tensors if t.name not in given]
    raise TypeError(f"{spec.name}: missing parameter{'s' if len(missing) > 1 else ''} {'; '.join(missing)}")


class Parameters:
    """Keyword arguments of a call, in the kernel's order."""

    def __init__(self, spec: Spec):
        self._spec = spec
        self.scalars = tuple((s.name, scalar_check(s)) for s in spec.scalars)
        self.tensors = tuple(t.name for t in spec.tensors)
        self._defaults = {s.name: s.default for s in spec.scalars if s.default is not None}

    def split(self, params: dict[str, Any]) -> tuple[list[int | float], tuple[Any, ...]]:
        """(scalars, tensors), defaults filled in, scalars checked.  TypeError for a name that is unknown or missing."""
        if self._defaults:
            params = {**self._defaults, **params}
        if params.keys() != self._spec.names:
            refuse_names(self._spec, params)
        return [convert(params[name]) for name, convert in self.scalars], tuple([params[n] for n in self.tensors])


# ---------------------------------------------------------------------- scalars


def scalar_check(scalar: Scalar) -> Callable[[Any], int | float]:
    """A function that turns an argument into the number the kernel takes, quickly where the type is plain."""
    name = scalar.name

    if scalar.type == "i32":

        def check(value: Any) -> int | float:
            if type(value) is not int:
                value = _integer(name, value)
            if I32_MIN <= value <= I32_MAX:
                return value
            raise ValueError(f"{name}: expected an i32 (−2³¹ to 2³¹−1), found {value}")

    elif scalar.type == "f32":

        def check(value: Any) -> int | float:
            if type(value) is not float:
                value = _real(name, value)
            if -F32_TOP < value < F32_TOP or math.isinf(value) or math.isnan(value):
                return value
            raise ValueError(f"{name}: expected an f32 (at most {F32_MAX:.4g} in size, or inf or nan), found {value}")

    else:

        def check(value: Any) -> int | float:
            return int(value if type(value) is bool else _boolean(name, value))

    return check


def as_declared(spec: Spec, values: Mapping[str, int | float]) -> dict[str, int | float | bool]:
    """Checked scalars by name, flags as bools again."""
    flags = {s.name for s in spec.scalars if s.type == "bool"}
    return {name: bool(value) if name in flags else value for name, value in values.items()}


def _integer(name: str, value: Any) -> int:
    _no_tensor(name, value)
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    raise TypeError(f"{name}: expected an int (i32), found {_found(value)}")


def _real(name: str, value: Any) -> float:
    _no_tensor(name, value)
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise ValueError(f"{name}: expected an f32, found an int that is larger than any") from None
    raise TypeError(f"{name}: expected a float (f32), found {_found(value)}")


def _boolean(name: str, value: Any) -> bool:
    _no_tensor(name, value)
    numpy = sys.modules.get("numpy")
    if isinstance(value, bool) or (numpy is not None and isinstance(value, numpy.bool_)):
        return bool(value)
    raise TypeError(f"{name}: expected a bool, found {_found(value)}")


def _no_tensor(name: str, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        raise TypeError(
            f"{name}: expected a Python number, found a tensor of shape {list(value.shape)} on {value.device}; reading "
            f"it would wait for the device: pass {name}.item() where you can afford that"
        )


def _found(value: Any) -> str:
    kind = type(value).__name__
    if isinstance(value, str):
        return f"{kind} {value!r}"
    return f"{kind} {value}" if isinstance(value, numbers.Number) else kind


# ---------------------------------------------------------------------- tensors


def check_inputs(spec: Spec, q: Any, k: Any, v: Any) -> Sizes:
    """Check q, k, v against the kernel and each other."""
    where = q.device if isinstance(q, torch.Tensor) else None
    check_input("q", q, ("B", "qo_len", "num_qo_heads", "head_dim_qk"), spec, where)
    check_input("k", k, ("B", "kv_len", "num_kv_heads", "head_dim_qk"), spec, where)
    check_input("v", v, ("B", "kv_len", "num_kv_heads", "head_dim_vo"), spec, where)
    if k.shape[0] != q.shape[0] or v.shape[0] != q.shape[0]:
        name, t = ("k", k) if k.shape[0] != q.shape[0] else ("v", v)
        raise ValueError(f"{name}: expected batch {q.shape[0]} as in q, found {_shape(t)}")
    if v.shape[1] != k.shape[1]:
        raise ValueError(f"v: expected kv_len {k.shape[1]} as in k, found {_shape(v)}")
    if v.shape[2] != k.shape[2]:
        raise ValueError(f"v: expected num_kv_heads {k.shape[2]} as in k, found {_shape(v)}")
    heads, kv_heads = q.shape[2], k.shape[2]
    if heads and (kv_heads == 0 or heads % kv_heads):
        raise ValueError(
            f"q: expected num_qo_heads a multiple of num_kv_heads, found {heads} query heads and {kv_heads} kv heads"
        )
    for name, value in (("q", q.shape[1]), ("k", k.shape[1]), ("q", heads)):
        if value > I32_MAX:
            raise ValueError(f"{name}: expected sizes below 2³¹, found {value}")
    return Sizes(q.shape[0], q.shape[1], k.shape[1], heads, kv_heads)


def check_input(
    name: str, t: Any, dims: Sequence[str], spec: Spec, device: torch.device | None, as_what: str = "q is"
) -> None:  # fmt: skip
    """Check what q, k and v must be in any layout; `dims` names their dimensions, the last of them a head dim."""
    _plain(name, t)
    if t.dim() != len(dims):
        raise ValueError(f"{name}: expected rank {len(dims)}, [{', '.join(dims)}], found {_shape(t)}")
    _on_device(name, t, spec, device, as_what)
    if t.dtype != spec.dtype:
        wanted = f"{_dtype(spec.dtype)} (what the kernel was compiled for)"
        raise TypeError(f"{name}: expected dtype {wanted}, found {_dtype(t.dtype)}")
    width = dims[-1]
    if t.shape[-1] != getattr(spec, width):
        raise ValueError(
            f"{name}: expected {width} {getattr(spec, width)} (what the kernel was compiled for) in the last "
            f"dimension, found {_shape(t)}"
        )
    _contiguous_rows(name, t)


def check_results(
    spec: Spec, return_lse: Any, out: Any, lse: Any, lse_shape: tuple[int, ...], device: Any
) -> tuple[int, ...]:  # fmt: skip
    """Check that the results asked for can be had, and fit the memory given for them; returns the shape of out."""
    if not isinstance(return_lse, bool):
        raise TypeError(f"return_lse: expected a bool, found {type(return_lse).__name__}")
    if spec.scan == "none" and (return_lse or lse is not None):
        name = "return_lse" if return_lse else "lse"
        raise ValueError(f"{name}: expected none, since {spec.name} has scan = none: its weights have no lse")
    out_shape = (*lse_shape, spec.head_dim_vo)
    if out is not None:
        check_output("out", out, out_shape, spec.dtype, spec, device)
    if lse is not None:
        check_output("lse", lse, lse_shape, torch.float32, spec, device)
    return out_shape


def check_output(name: str, t: Any, shape: tuple[int, ...], dtype: torch.dtype, spec: Spec, device: Any) -> None:
    """Check a tensor that the caller gives to be written to."""
    _plain(name, t)
    if tuple(t.shape) != shape:
        raise ValueError(f"{name}: expected shape {list(shape)}, found {_shape(t)}")
    _on_device(name, t, spec, device)
    if t.dtype != dtype:
        raise TypeError(f"{name}: expected dtype {_dtype(dtype)}, found {_dtype(t.dtype)}")
    if name == "out":
        _contiguous_rows(name, t)
    inner = 1
    for stride, size in sorted((s, n) for s, n in zip(t.stride(), t.shape, strict=True) if n > 1):
        if stride < inner:
            raise ValueError(f"{name}: expected elements that don't overlap, found strides {list(t.stride())}")
        inner = stride * (size - 1) + inner


def check_tensor(param: TensorParam, t: Any, sizes: Any, spec: Spec, device: Any) -> None:
    """Check a tensor parameter: its shape is its index spaces in the call's layout (`sizes.spaces`)."""
    _plain(param.name, t)
    labels = expand(param, sizes, spec)
    fits = t.dim() == len(labels) and all(
        n == want or want is None or (label == "pos" and n >= want)
        for n, (label, want) in zip(t.shape, labels, strict=False)
    )
    if not fits:
        spaces = ", ".join(label for label, _ in labels)
        wanted = ", ".join(
            "any" if want is None else f"≥ {want}" if label == "pos" else str(want) for label, want in labels
        )
        raise ValueError(f"{param.name}: expected shape [{spaces}] = [{wanted}], found {_shape(t)}")
    _on_device(param.name, t, spec, device)
    if t.dtype not in PARAM_DTYPES[param.dtype]:
        wanted = " or ".join(map(_dtype, PARAM_DTYPES[param.dtype]))
        raise TypeError(f"{param.name}: expected dtype {wanted}, found {_dtype(t.dtype)}")
    for size, stride in zip(t.shape, t.stride(), strict=True):
        if size > I32_MAX or (size > 1 and stride > I32_MAX):
            raise ValueError(
                f"{param.name}: expected sizes and strides below 2³¹ elements, found {_shape(t)} with strides "
                f"{list(t.stride())}"
            )


def expand(param: TensorParam, sizes: Any, spec: Spec) -> Space:
    """The dimensions of the argument, index spaces as `sizes.spaces` has them."""
    spaces = {**sizes.spaces, "d": [("d", spec.head_dim_qk)], "e": [("e", spec.head_dim_vo)]}
    fresh = lambda d: [(str(d), d if isinstance(d, int) else None)]  # noqa: E731
    return [part for d in param.dims for part in spaces.get(d, fresh(d))]


def refuse_grad(tensors: Iterable[tuple[str, torch.Tensor | None]]) -> None:
    """There is no backward yet: a result that silently forgot its graph would be wrong training."""
    for name, t in tensors:
        if t is not None and t.requires_grad:
            raise ValueError(
                f"{name}: expected a tensor that needs no gradient, found requires_grad=True; attncc has no backward "
                f"yet: call under torch.no_grad(), or pass {name}.detach()"
            )


def _plain(name: str, t: Any) -> None:
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, found {type(t).__name__}")
    if t.layout != torch.strided:
        raise TypeError(f"{name}: expected a strided tensor, found layout {t.layout}")


def _on_device(
    name: str, t: torch.Tensor, spec: Spec, device: torch.device | None, as_what: str = "q is"
) -> None:  # fmt: skip
    if t.device.type != spec.device_type:
        raise ValueError(
            f"{name}: expected a tensor on a {spec.device_type} device, found {t.device}; "
            f"attncc.reference(…) computes the same anywhere"
        )
    if device is not None and t.device != device:
        raise ValueError(f"{name}: expected a tensor on {device} as {as_what}, found {t.device}")


def _contiguous_rows(name: str, t: torch.Tensor) -> None:
    if t.shape[-1] > 1 and t.stride(-1) != 1:
        raise ValueError(f"{name}: expected a contiguous last dimension (stride 1), found strides {list(t.stride())}")


def _shape(t: torch.Tensor) -> str:
    return f"shape {list(t.shape)}"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
