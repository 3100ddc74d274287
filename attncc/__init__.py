"""attncc: a compiler for attention variants.

    kernel = attncc.compile("gemma2.attn", variant="gemma2_local", head_dim=128)
    out = kernel(q, k, v, window=4096)

Importing the package imports neither torch nor the compiler: each name is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "AttnError", "BatchAttention", "Kernel", "__version__", "append_kv", "compile", "load", "merge_state_list",
    "merge_states", "reference",
]  # fmt: skip

_HOMES = {
    "AttnError": "attncc.diagnostics",
    "BatchAttention": "attncc.runtime.batch",
    "Kernel": "attncc.runtime.kernel",
    "append_kv": "attncc.utilities",
    "compile": "attncc.compiler",
    "load": "attncc.compiler",
    "merge_state_list": "attncc.utilities",
    "merge_states": "attncc.utilities",
    "reference": "attncc.compiler",
}

if TYPE_CHECKING:
    from attncc.compiler import compile, load, reference
    from attncc.diagnostics import AttnError
    from attncc.runtime.batch import BatchAttention
    from attncc.runtime.kernel import Kernel
    from attncc.utilities import append_kv, merge_state_list, merge_states


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'attncc' has no attribute {name!r}")
    import importlib

    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
