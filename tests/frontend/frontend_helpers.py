"""Short ways to read text and to show IR."""

from __future__ import annotations

from typing import Any

import pytest

from attncc.diagnostics import AttnError, Source
from attncc.frontend import load
from attncc.ir.nodes import Const, Expr, Load, Op, Rope


def variant(*body: str, scalars: str = "") -> Any:
    """The one variant with these parameters and statements (`Any`: tests look into unions of nodes)."""
    (found,) = load(Source("test.attn", f"attention t({scalars}):\n" + "".join(f"    {line}\n" for line in body)))
    return found


def shown(e: Expr | str | int | None) -> str:
    """All of an expression as nested calls, with the values of literals as Python writes them."""
    if isinstance(e, Const):
        return repr(e.value)
    if isinstance(e, Op):
        return f"{e.op}({', '.join(map(shown, e.args))})"
    if isinstance(e, Load):
        return f"{e.tensor}[{', '.join(map(shown, e.index))}]"
    if isinstance(e, Rope):
        parts = (e.x, e.pos, e.theta, e.dims, e.style)
        tables = f", {e.cos}, {e.sin}" if e.cos else ""
        return f"rope({', '.join(map(shown, parts))}, ({', '.join(map(shown, e.scaling))}){tables})"
    return str(e) if e is None or isinstance(e, str | int) else e.name


def errors(text: str) -> list[str]:
    """`line:column: message` of each diagnostic."""
    with pytest.raises(AttnError) as caught:
        load(Source("test.attn", text))
    assert str(caught.value)
    return [f"{d.span.line}:{d.span.column}: {d.message}" for d in caught.value.diagnostics]
