"""Reads that no guard keeps from an index out of range.

Where qo_len > kv_len the first rows have a negative position `i`; no mask hides them from `f_q` and `epilogue`.
"""

from __future__ import annotations

from collections.abc import Iterator

from attncc.ir.nodes import Const, Expr, Leaf, Load, Op, Param, children, leaves


def negative_rows(e: Expr) -> list[Load]:
    """The loads in `e` that stand under no guard and whose index may be negative with `i`."""
    return [x for x in loads(e) if any("i" in leaves(k) and not _reaches_no_negative(k) for k in x.index)]


def loads(e: Expr) -> Iterator[Load]:
    """The loads in `e` that stand under no guard, each once."""
    seen: set[int] = set()

    def go(x: Expr) -> Iterator[Load]:
        if id(x) in seen:
            return
        seen.add(id(x))
        if isinstance(x, Load):
            yield x
        # What a guard stands before is left out: the condition alone is always evaluated.
        guarded = isinstance(x, Op) and x.op in ("and", "or", "select")
        for k in children(x)[:1] if guarded else children(x):
            yield from go(k)

    return go(e)


def _reaches_no_negative(e: Expr) -> bool:
    """Is `e` at least 0 whatever `i` is?  Parameters and elements of tensors are taken to be what they should."""
    if isinstance(e, Const):
        return e.value >= 0
    if isinstance(e, Leaf):
        return e.name != "i"
    if isinstance(e, Param | Load):
        return True
    if not isinstance(e, Op):
        return False
    kids = [_reaches_no_negative(k) for k in e.args]
    if e.op == "max":
        return any(kids)
    if e.op == "select":  # a guard around the index itself
        return True
    if e.op == "mod":
        return kids[1]
    return e.op == "abs" or (e.op in ("add", "mul", "min", "floordiv", "pow") and all(kids))
