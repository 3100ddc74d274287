"""A variant for FlexAttention: `score_mod` and `mask_mod` written from the IR, for benchmarks and as a second opinion.

FlexAttention sees a scaled score and where it stands, so it can take `f_logits`, `mask`, a `scale` that is a number,
and a `sink` of the head; what else a variant has is refused by `unsupported`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attncc.ir.nodes import SLOT_DEFAULTS, Const, Expr, Leaf, Load, Op, Param, Variant, leaves, walk
from attncc.random_inputs import Shape


@dataclass(frozen=True)
class Mods:
    """`score(s, b, h, iq, j)`, `mask(b, h, iq, j)` and `sink(b, h)` on integer tensors; None where there is nothing to
    do.  They broadcast, so they also count what a mask shows."""

    score: Callable[..., Tensor] | None
    mask: Callable[..., Tensor] | None
    sink: Callable[..., Tensor] | None
    scale: float
    mask_leaves: frozenset[str]


def unsupported(variant: Variant) -> str | None:
    """The slot that FlexAttention cannot take, or None."""
    for slot in ("f_q", "f_k", "f_v", "epilogue"):
        if getattr(variant, slot) != SLOT_DEFAULTS[slot]:
            return slot
    if variant.scan.kind != "softmax":
        return "scan"
    if variant.domain is not None:
        return "domain"
    if variant.emits:
        return "emit"
    if any(not isinstance(x, (Const, Op, Leaf, Param)) for x in walk(variant.scale)) or leaves(variant.scale) & HEADS:
        return "scale"
    if variant.scan.sink is not None and leaves(variant.scan.sink) & {"i", "iq"}:
        return "sink"
    return None


HEADS = {"b", "h", "g"}


def mods(variant: Variant, shape: Shape, params: Mapping[str, object]) -> Mods:
    """The variant's functions at one shape; `params` holds every scalar, const ones too, and every tensor."""
    write = _Writer(variant, shape, params)
    constant = Const(True, variant.mask.type)
    return Mods(
        score=None if variant.f_logits == Leaf("s") else write.function(variant.f_logits, "s, b, h, iq, j"),
        mask=None if variant.mask == constant else write.function(variant.mask, "b, h, iq, j"),
        sink=None if variant.scan.sink is None else write.function(variant.scan.sink, "b, h"),
        scale=float(write.function(variant.scale, "")()),
        mask_leaves=leaves(variant.mask),
    )


INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "floordiv": "//", "mod": "%", "pow": "**",
    "lt": "<", "le": "<=", "eq": "==", "ne": "!=", "and": "&", "or": "|",
}  # fmt: skip
CALLS = {
    "min": "minimum", "max": "maximum", "neg": "negative", "not": "negation", "bit": "bit", "select": "choose",
    "i32": "to_i32", "f32": "to_f32",
}  # fmt: skip
TORCH = {
    "logsigmoid": "torch.nn.functional.logsigmoid", "softplus": "torch.nn.functional.softplus",
}  # fmt: skip


class _Writer:
    """Each expression becomes a Python function of torch operations, one node a line; FlexAttention traces it."""

    def __init__(self, variant: Variant, shape: Shape, params: Mapping[str, object]):
        self.scalars = {p.name for p in variant.scalars}
        group = shape.num_qo_heads // shape.num_kv_heads
        self.captured = {f"p_{name}": value for name, value in params.items()}
        self.fixed = {
            "qo_len": str(shape.qo_len), "kv_len": str(shape.kv_len), "head_dim_qk": str(shape.head_dim_qk),
            "head_dim_vo": str(shape.head_dim_vo), "group_size": str(group), "num_qo_heads": str(shape.num_qo_heads),
            "num_kv_heads": str(shape.num_kv_heads), "g": f"(h // {group})",
            "i": f"(iq + {shape.kv_len - shape.qo_len})",
        }  # fmt: skip
        self.dims = {t.name: t.dims for t in variant.tensors}

    def function(self, e: Expr, arguments: str) -> Callable[..., Any]:
        names: dict[Expr, str] = {}
        lines = []
        for n, x in enumerate(walk(e)):
            names[x] = f"x{n}"
            lines.append(f"        x{n} = {self._text(x, names)}")
        given = ", ".join(self.captured)
        text = "\n".join([
            f"def make({given}):", f"    def function({arguments}):", *lines, f"        return {names[e]}",
            "    return function",
        ])  # fmt: skip
        # The globals are this module's own, under its name: torch.compile looks names up by module.
        namespace = dict(globals())
        exec(compile(text, f"<flex {arguments}>", "exec"), namespace)
        return namespace["make"](**self.captured)

    def _text(self, e: Expr, names: Mapping[Expr, str]) -> str:
        if isinstance(e, Const):
            return repr(e.value)
        if isinstance(e, Leaf):
            return self.fixed.get(e.name, e.name)
        if isinstance(e, Param):
            return f"p_{e.name}"
        if isinstance(e, Load):
            return self._load(e, names)
        assert isinstance(e, Op)
        args = [names[a] for a in e.args]
        if e.op in INFIX:
            return f"{args[0]} {INFIX[e.op]} {args[1]}"
        if e.op in CALLS:
            return f"{CALLS[e.op]}({', '.join(args)})"
        return f"{TORCH.get(e.op, 'torch.' + e.op)}(lift({args[0]}))"

    def _load(self, e: Load, names: Mapping[Expr, str]) -> str:
        """Guards do not hold here: an index that may be out of range in a hidden lane is clamped."""
        index = []
        for space, x in zip(self.dims[e.tensor], e.index, strict=True):
            if space in ("iq", "j"):
                index.append("b")
            plain = isinstance(x, Leaf) and (x.name in HEADS or x.name == space)
            index.append(names[x] if plain else f"inside({names[x]}, p_{e.tensor}.shape[{len(index)}])")
        return f"p_{e.tensor}[{', '.join(index)}]"


# What the written functions call: torch's operations on tensors and Python numbers alike.


def lift(x: Any) -> Tensor:
    return x if isinstance(x, Tensor) else torch.tensor(x)


def inside(index: Any, length: int) -> Any:
    return index.clamp(0, length - 1) if isinstance(index, Tensor) else min(max(index, 0), length - 1)


def minimum(a: Any, b: Any) -> Any:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.minimum(a, b)
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return a.clamp(max=b) if isinstance(a, Tensor) else b.clamp(max=a)
    return min(a, b)


def maximum(a: Any, b: Any) -> Any:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.maximum(a, b)
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return a.clamp(min=b) if isinstance(a, Tensor) else b.clamp(min=a)
    return max(a, b)


def negative(a: Any) -> Any:
    return -a


def negation(a: Any) -> Any:
    return ~a if isinstance(a, Tensor) else not a


def bit(word: Any, n: Any) -> Any:
    return (((word >> minimum(maximum(n, 0), 31)) & 1) == 1) & (n >= 0) & (n <= 31)


def choose(c: Any, a: Any, b: Any) -> Any:
    return torch.where(c, a, b) if isinstance(c, Tensor) else (a if c else b)


def to_i32(a: Any) -> Any:
    return a.to(torch.int32) if isinstance(a, Tensor) else int(a)


def to_f32(a: Any) -> Any:
    return a.to(torch.float32) if isinstance(a, Tensor) else float(a)
