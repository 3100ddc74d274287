"""The words of the language: slots, sizes, builtins, and which name may stand where."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from attncc.ir.nodes import INDICES, SIZES

VALUE_SLOTS = ("scale", "f_q", "f_k", "f_v", "f_logits", "mask", "epilogue")  # hold one expression
SLOTS = (*VALUE_SLOTS, "scan", "domain")
KEYWORDS = ("attention", "tensor", "let", "def", "emit", "if", "else", "and", "or", "not", "true", "false")

VECTORS = {"f_q": "d", "f_k": "d", "f_v": "e", "epilogue": "e"}  # slots that hold a vector, and its space

# Where a value is in scope.  "sink", "domain" and "emit" are the expressions inside those; "size" is the block size
# of a domain, a number for the whole call.
_ROW = ("f_q", "f_logits", "mask", "domain", "epilogue", "emit", "sink")
WHERE: dict[str, tuple[str, ...]] = {
    "b": (*_ROW, "scale", "f_k", "f_v"),
    "h": (*_ROW, "scale"),
    "g": (*_ROW, "scale", "f_k", "f_v"),
    "i": _ROW,
    "iq": _ROW,
    "j": ("f_k", "f_v", "f_logits", "mask", "emit"),
    "d": ("f_q", "f_k"),
    "e": ("f_v", "epilogue"),
    "q": ("f_q",),
    "k": ("f_k",),
    "v": ("f_v",),
    "o": ("epilogue",),
    "s": ("f_logits",),
    "dot": ("f_logits",),
    "l": ("emit",),
    "lse": ("epilogue", "emit"),
}
SCOPES = ("scale", "f_q", "f_k", "f_v", "f_logits", "mask", "sink", "domain", "size", "epilogue", "emit")

UNARY_MATH = (
    *("abs", "floor", "exp", "exp2", "log", "log2", "log1p", "sqrt", "rsqrt", "tanh", "sin", "cos"),
    *("sigmoid", "logsigmoid", "softplus", "relu"),
)
FUNCTIONS = (
    *UNARY_MATH, "min", "max", "clamp", "i32", "f32", "bit", "softcap", "rope", "rmsnorm", "layernorm", "l2norm", "sum",
)  # fmt: skip
# Words with a meaning in one place of one slot or builtin: function-like, and bare.
SCALINGS = ("linear", "llama31", "yarn")
STYLES = ("neox", "interleaved")
PLACED = {
    "softmax": "`scan = softmax()`",
    "none": "`scan = none`, or a weight that is not there",
    "blocks": "`domain = blocks(tensor[iq, g, :], size = 64)`",
    **dict.fromkeys(SCALINGS, "rope's `scaling = …`"),
    **dict.fromkeys(STYLES, "rope's `style = …`"),
}

RESERVED: dict[str, str] = {
    **dict.fromkeys((*FUNCTIONS, *PLACED), "a builtin"),
    **dict.fromkeys(INDICES, "an index"),
    **dict.fromkeys(("d", "e"), "a feature index"),
    **dict.fromkeys(("q", "k", "v", "o", "s", "dot", "l", "lse"), "a value that the slots are given"),
    **dict.fromkeys(SIZES, "a size"),
    **dict.fromkeys(SLOTS, "a slot"),
}
# Arguments of a kernel call and of `plan`: a parameter of that name could not be passed.
CALL_ARGUMENTS = ("self", "kv", "out", "return_lse")
PLAN_ARGUMENTS = ("qo_indptr", "kv_indptr", "kv_indices", "last_page_len", "shared_prefix")

TENSOR_DTYPES = ("f32", "bf16", "f16", "i32", "u32", "u8", "bool")
FLOAT_DTYPES = ("f32", "bf16", "f16")
SCALAR_TYPES = ("i32", "f32", "bool")

# What other languages call the types.
_TYPES = {
    "f32": ("float", "float32", "fp32"), "f16": ("half", "float16", "fp16"), "bf16": ("bfloat16", "bfloat"),
    "i32": ("int", "int32"), "u32": ("uint", "uint32"), "u8": ("byte", "uint8"), "bool": ("boolean",),
}  # fmt: skip
_ALIASES = {alias: name for name, aliases in _TYPES.items() for alias in aliases}


@lru_cache(maxsize=4096)
def _closest(name: str, known: frozenset[str]) -> str | None:
    from difflib import get_close_matches

    lower = {k.lower(): k for k in sorted(known)}
    if name.lower() in lower:
        return lower[name.lower()]
    found = get_close_matches(name, sorted(known), n=1, cutoff=0.7)
    return found[0] if found else None


def suggest(name: str, known: Iterable[str]) -> str | None:
    """ "did you mean 'x'?" where one of `known` is spelled much like `name`."""
    words = frozenset(known)
    near = _ALIASES[name] if _ALIASES.get(name) in words else _closest(name[:64], words)
    return None if near is None else f"did you mean '{near}'?"


def listed(words: Iterable[str], last: str = "and") -> str:
    """`a`, `b` and `c`."""
    quoted = [f"`{w}`" for w in words]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} {last} {quoted[-1]}"
