"""What a variant's mask tells the planner: expressions for the keys that a run of rows can see, written into the
manifest, so that no work is planned for keys that the mask hides from all of it."""

from __future__ import annotations

from attncc.ir.nodes import Const, Expr, Leaf, Op, Param, Variant, children, make, objects

from .config import ranges_of

LEAVES = frozenset(("i0", "i1", "qo_len", "kv_len"))  # what a planner knows of some rows of a request
# on i32 and bool alone: float32 in a planner need not round as a kernel does
OPS = frozenset((
    "add", "sub", "mul", "min", "max", "floordiv", "mod", "neg", "abs", "lt", "le", "eq", "ne", "and", "or", "not",
    "select",
))  # fmt: skip
MAX_NODES = 500  # of an expression written out
FAR = 2**27  # no position is: tile ranges clamp with such numbers


def visible(variant: Variant) -> dict[str, list | None]:
    """{"lo", "hi", "lo_any", "hi_any"} of a specialised, simplified variant.

    Rows at positions i0..i1 (both inclusive) of one request see no key position outside [lo, hi); nor outside
    [lo_any, hi_any), which are weaker and hold whatever the scalars are.  None: nothing is known of that end.  Ends may
    lie outside [0, kv_len], and lo above hi, where nothing is seen.

    An expression is ["const", value], ["leaf", "i0" | "i1" | "qo_len" | "kv_len"], ["param", name] or [op, argument, …]
    with an op of OPS, named and meant as in ir/nodes.py: i32 wraps, // and % floor.  A select's arguments, and the
    right ones of `and` and `or`, may divide by 0 where they are not taken.
    """
    ranges = ranges_of(variant)
    ends = {"lo": (ranges.lo, False), "hi": (ranges.hi, True)}
    found = {name: bound(e, upper, True) for name, (e, upper) in ends.items()}
    found |= {f"{name}_any": bound(e, upper, False) for name, (e, upper) in ends.items()}
    return {name: None if e is None else spelled(e) for name, e in found.items()}


def bound(e: Expr, upper: bool, scalars: bool) -> Expr | None:
    """An expression that planners can evaluate, with the scalars or without: `e`, or one that is never below it
    (`upper`) or never above it.  None where none is found."""
    if nodes(e) > MAX_NODES or (isinstance(e, Const) and (e.value if upper else -e.value) >= FAR):
        return None
    if all(known(x, scalars) for x in objects(e)):
        return e
    match e:
        case Op("add" | "sub", (x, Const() as c)):  # tile ranges let no such sum wrap
            x = bound(x, upper, scalars)
            return None if x is None else make(e.op, x, c)
    if not isinstance(e, Op) or e.op not in ("select", "min", "max"):
        return None
    parts = [bound(a, upper, scalars) for a in (e.args[1:] if e.op == "select" else e.args)]
    op = e.op if e.op != "select" else "max" if upper else "min"
    there = [p for p in parts if p is not None]
    if len(there) == len(parts):
        return make(op, *there)
    return there[0] if there and op == ("min" if upper else "max") else None  # the other could only tighten it


def known(x: Expr, scalars: bool) -> bool:
    """Can planners evaluate this node, given its children?"""
    if x.type.elem not in ("i32", "bool") or x.type.space is not None:
        return False
    match x:
        case Const():
            return True
        case Leaf(name):
            return name in LEAVES
        case Param():
            return scalars
        case Op(op):
            return op in OPS
    return False


def nodes(e: Expr) -> int:
    """Of `e` written out, without sharing."""
    size: dict[int, int] = {}
    for x in objects(e):
        size[id(x)] = 1 + sum(size[id(k)] for k in children(x))
    return size[id(e)]


def spelled(e: Expr) -> list:
    match e:
        case Const(value):
            return ["const", value]
        case Leaf(name):
            return ["leaf", name]
        case Param(name):
            return ["param", name]
    assert isinstance(e, Op), e
    return [e.op, *map(spelled, e.args)]
