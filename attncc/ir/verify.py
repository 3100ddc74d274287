"""Is a Variant well formed?  The tables say what is allowed where; the code only looks things up in them.

`verify` runs after lowering and after every rewrite pass.  What it refuses is a fault of the compiler, not of the
user, with two exceptions that only specialisation brings to light: an i32 division by zero, a block of no keys.
"""

from __future__ import annotations

from dataclasses import replace

from attncc.ir.nodes import (
    BOOL,
    F32,
    I32,
    LEAVES,
    SIZES,
    TILE,
    Const,
    Domain,
    Emit,
    Expr,
    Leaf,
    Load,
    Op,
    Param,
    Rope,
    TensorParam,
    Type,
    Variant,
    objects,
    result_type,
)
from attncc.ir.text import brief

# slot: (leaves beside the sizes, type of the value)
ROW = ("b", "h", "g", "i", "iq")
SLOTS: dict[str, tuple[frozenset[str], Type]] = {
    slot: (frozenset((*names, *SIZES)), type_)
    for slot, names, type_ in (
        ("scale", ("b", "h", "g"), F32),
        ("f_q", (*ROW, "d", "q"), Type("f32", "d")),
        ("f_k", ("b", "g", "j", "d", "k"), Type("f32", "d")),
        ("f_v", ("b", "g", "j", "e", "v"), Type("f32", "e")),
        ("f_logits", (*ROW, "j", "s", "dot"), F32),
        ("mask", (*ROW, "j"), BOOL),
        ("epilogue", (*ROW, "e", "o", "lse"), Type("f32", "e")),
        ("sink", ROW, F32),
        ("domain", ROW, I32),
        ("domain size", (), I32),
        ("emit", (*ROW, "j", "l", "lse"), F32),
    )
}

# dtype of a tensor: element type of its loads
DTYPES = {"f32": "f32", "bf16": "f32", "f16": "f32", "i32": "i32", "u32": "i32", "u8": "i32", "bool": "bool"}

LITERALS = {"i32": int, "f32": float, "bool": bool}
EMIT_INDICES = ("b", "h", "g", "iq", "j")
SCALINGS = {"linear": 1, "llama31": 4, "yarn": 5}  # name: number of arguments


class VerifyError(ValueError):
    """The IR is not well formed: names the variant, the slot, the node and the reason."""

    def __init__(self, variant: str, slot: str, reason: str, node: Expr | None = None):
        super().__init__(f"{variant}: {slot}: {reason}" + ("" if node is None else f" in {brief(node)}"))
        self.slot, self.reason, self.node = slot, reason, node


def verify(v: Variant) -> None:
    """Raises VerifyError where `v` is not well formed.  Linear in the distinct nodes."""
    _check_declarations(v)
    for slot, e in v.expressions():
        leaves, type_ = SLOTS[slot.split()[0]]
        _check_slot(v, slot, e, leaves, type_)
    if v.scan.kind not in ("softmax", "none") or (v.scan.kind == "none" and v.scan.sink is not None):
        raise VerifyError(v.name, "scan", f"a {v.scan.kind!r} scan" + (" with a sink" if v.scan.sink else ""))
    if v.domain is not None:
        _check_domain(v, v.domain)
    for emit in v.emits:
        _check_emit(v, emit)


def verify_expr(e: Expr, v: Variant, slot: str, leaves: frozenset[str]) -> None:
    """Raises VerifyError where a node of `e`, which belongs to `slot` of `v`, is ill typed or names a leaf that is
    neither in `leaves` nor a size."""
    scalars = {p.name: p for p in v.scalars}
    tensors = {t.name: t for t in v.tensors}
    for x in objects(e):
        reason = None
        if isinstance(x, Leaf):
            if x.name not in LEAVES:
                reason = f"unknown leaf {x.name!r}"
            elif x.name not in leaves and x.name not in SIZES:
                reason = f"{x.name!r} has no meaning here"
            elif x.name == "lse" and v.scan.kind == "none":
                reason = "there is no lse where scan is none"
        elif isinstance(x, Const):
            reason = _const_fault(x)
        elif isinstance(x, Param):
            declared = scalars.get(x.name)
            if declared is None or declared.type != x.type:
                reason = f"no scalar {x.name!r} of type {x.type} is declared"
        elif isinstance(x, Op):
            reason = _op_fault(x) or _pow_fault(x, v) or _zero_fault(x)
        elif isinstance(x, Load):
            reason = _load_fault(x, tensors.get(x.tensor))
        else:
            reason = _rope_fault(x, tensors)
        if reason is not None:
            raise VerifyError(v.name, slot, reason, x)


def _check_slot(v: Variant, slot: str, e: Expr, leaves: frozenset[str], type_: Type) -> None:
    verify_expr(e, v, slot, leaves)
    if e.type != type_:
        raise VerifyError(v.name, slot, f"expected {type_}, found {e.type}", e)


def _check_declarations(v: Variant) -> None:
    names = set(LEAVES) - set(TILE)
    for p in (*v.scalars, *v.tensors, *v.emits):
        if p.name in names:
            raise VerifyError(v.name, p.name, "the name is taken")
        names.add(p.name)
    for s in v.scalars:
        if s.type not in (I32, F32, BOOL):
            raise VerifyError(v.name, s.name, f"a scalar of type {s.type}")
        fault = None if s.default is None else _const_fault(Const(s.default, s.type))
        if fault is not None:
            raise VerifyError(v.name, s.name, fault)
    for t in v.tensors:
        if t.dtype not in DTYPES:
            raise VerifyError(v.name, t.name, f"unknown dtype {t.dtype!r}")
        if any(d < 1 for d in t.dims if isinstance(d, int)):
            raise VerifyError(v.name, t.name, "a dimension of no length")
        if "b" in t.dims and {"iq", "j"} & set(t.dims):
            raise VerifyError(v.name, t.name, "iq and j tell requests apart already: no b beside them")


def _const_fault(x: Const) -> str | None:
    if x.type not in (I32, F32, BOOL) or type(x.value) is not LITERALS[x.type.elem]:
        return f"{x.value!r} is no literal of type {x.type}"
    return "the literal has more than 32 bits" if x.type == I32 and not -(2**31) <= x.value < 2**31 else None


def _op_fault(x: Op) -> str | None:
    try:
        type_ = result_type(x.op, tuple(a.type for a in x.args))
    except TypeError as e:
        return str(e)
    return None if x.type == type_ else f"the node says {x.type}, its arguments {type_}"


def _pow_fault(x: Op, v: Variant) -> str | None:
    """i32 ** i32 has a constant exponent >= 0; before specialisation it may still depend on const parameters."""
    if x.op != "pow" or x.type.elem != "i32":
        return None
    exponent = x.args[1]
    if isinstance(exponent, Const):
        return None if exponent.value >= 0 else "a negative exponent of an i32"
    const = {p.name for p in v.scalars if p.const}
    fixed = all(
        isinstance(k, Const | Op) or (isinstance(k, Param) and k.name in const)
        or (isinstance(k, Leaf) and k.name in ("head_dim_qk", "head_dim_vo"))
        for k in objects(exponent)
    )  # fmt: skip
    return None if fixed else "the exponent of an i32 is not constant"


def _zero_fault(x: Op) -> str | None:
    zero = x.op in ("floordiv", "mod") and x.type.elem == "i32" and isinstance(x.args[1], Const) and not x.args[1].value
    return "integer division by zero" if zero else None


def _index_fault(index: tuple[Expr, ...], tensor: TensorParam | None, name: str) -> str | None:
    if tensor is None:
        return f"no tensor {name!r} is declared"
    if len(index) != len(tensor.dims):
        return f"{name} has {len(tensor.dims)} dimensions, the index {len(index)}"
    wrong = next((a for a in index if a.type.elem != "i32"), None)
    return None if wrong is None else f"an index of type {wrong.type}"


def _load_fault(x: Load, tensor: TensorParam | None) -> str | None:
    fault = _index_fault(x.index, tensor, x.tensor)
    if fault is not None or tensor is None:
        return fault
    spaces = {a.type.space for a in x.index} - {None}
    if len(spaces) > 1:
        return "vectors of d and e mixed"
    for dim, a in zip(tensor.dims, x.index, strict=True):
        if dim in ("d", "e") and a.type.space not in (None, dim):
            return f"dimension {dim} is indexed over {a.type.space}"
    type_ = Type(DTYPES[tensor.dtype], next(iter(spaces), None))
    return None if x.type == type_ else f"the node says {x.type}, {x.tensor} and its index {type_}"


def _rope_fault(x: Rope, tensors: dict[str, TensorParam]) -> str | None:
    if x.x.type.elem != "f32" or x.x.type.space is None:
        return f"rope of {x.x.type}"
    if x.pos.type != I32 or x.theta.type != F32:
        return f"rope at {x.pos.type} with theta {x.theta.type}"
    if x.style not in ("neox", "interleaved"):
        return f"unknown style {x.style!r}"
    if x.dims is not None and (x.dims < 2 or x.dims % 2):
        return f"{x.dims} rotated features: not an even number"
    if x.scaling and (SCALINGS.get(str(x.scaling[0])) != len(x.scaling) - 1):
        return f"scaling {x.scaling[0]!r} with {len(x.scaling) - 1} arguments"
    if (x.cos is None) != (x.sin is None):
        return "cos without sin, or sin without cos"
    for name in (x.cos, x.sin):
        table = name and tensors.get(name)
        if name is not None and (not table or len(table.dims) != 2 or DTYPES[table.dtype] != "f32"):
            return f"{name!r} is no table [pos, dims // 2] of floats"
    return None


def _check_domain(v: Variant, domain: Domain) -> None:
    tensor = next((t for t in v.tensors if t.name == domain.tensor), None)
    given = tuple(x for x in domain.index if x is not None)
    if len(given) != len(domain.index) - 1:
        raise VerifyError(v.name, "domain", f"{len(domain.index) - len(given)} of the indices are `:`, not one")
    whole = Leaf("kv_len")  # stands for the `:`
    fault = _index_fault(tuple(x or whole for x in domain.index), tensor, domain.tensor)
    if fault is None and tensor is not None and DTYPES[tensor.dtype] != "i32":
        fault = f"{domain.tensor} holds {tensor.dtype}, not block numbers"
    if fault is not None:
        raise VerifyError(v.name, "domain", fault)
    for x in given:
        _check_slot(v, "domain", x, *SLOTS["domain"])
    _check_slot(v, "domain size", domain.size, *SLOTS["domain size"])
    if isinstance(domain.size, Const) and domain.size.value < 1:
        fault = f"the size of a block is at least 1, not {domain.size.value}"
        raise VerifyError(v.name, "domain", fault, replace(domain.size, span=domain.span))


def _check_emit(v: Variant, emit: Emit) -> None:
    slot = f"emit {emit.name}"
    if emit.reduce not in ("max", "min", "sum"):
        raise VerifyError(v.name, slot, f"unknown reduction {emit.reduce!r}")
    if len(set(emit.index)) != len(emit.index) or not set(emit.index) <= set(EMIT_INDICES):
        raise VerifyError(
            v.name, slot, f"index [{', '.join(emit.index)}]: some of {', '.join(EMIT_INDICES)}, each once"
        )
    if "b" in emit.index and {"iq", "j"} & set(emit.index):
        raise VerifyError(v.name, slot, "iq and j tell requests apart already: no b beside them")
