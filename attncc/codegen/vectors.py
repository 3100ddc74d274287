"""What a vector slot - f_q, f_k, f_v, epilogue - asks of a row as a whole before one of its features can be computed.

A *step* is a sum over the features or a rope: each needs all features of its argument, and perhaps earlier steps.  A
*turning* is what ropes share whose angles grow alike with the position: theta, scaling, and how many features turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from attncc.ir.fold_vectors import weight_of
from attncc.ir.nodes import (
    F32,
    I32,
    NODES,
    SLOT_DEFAULTS,
    Const,
    Expr,
    Leaf,
    Load,
    Op,
    Param,
    Rope,
    Variant,
    children,
    leaves,
    make,
    walk,
)
from attncc.ir.rewrite import simplify_expr

# vector, its features, and what tells rows apart
SLOTS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "f_q": ("q", "d", ("i", "iq")), "f_k": ("k", "d", ("j", "seen")), "f_v": ("v", "e", ("j", "seen")),
    "epilogue": ("o", "e", ("i", "iq", "lse")),
}  # fmt: skip
COMMON = frozenset(("num_qo_heads", "num_kv_heads", "group_size"))  # leaves that a table of frequencies may depend on


@dataclass(frozen=True)
class Turning:
    """`arguments`: of the scaling, in the language's order; the attention factor of yarn is no part of the angles."""

    theta: Expr
    scaling: str
    arguments: tuple[Expr, ...]
    dims: int


def used_slots(variant: Variant) -> list[str]:
    """Not f_v, where it is a factor of the keys' weights."""
    folded = ("f_v",) if weight_of(variant) is not None else ()
    return [slot for slot in SLOTS if getattr(variant, slot) != SLOT_DEFAULTS[slot] and slot not in folded]


def steps_of(e: Expr) -> list[Op | Rope]:
    """In the order in which they need one another."""
    return [x for x in walk(e) if isinstance(x, Rope) or (isinstance(x, Op) and x.op == "sum")]


def dims_of(rope: Rope, head_dims: dict[str, int]) -> int:
    """`head_dims`: by space."""
    return head_dims[str(rope.type.space)] if rope.dims is None else rope.dims


def turning_of(rope: Rope, head_dims: dict[str, int]) -> Turning | None:
    """None where its cosines and sines are given."""
    if rope.cos is not None:
        return None
    name, *arguments = rope.scaling or ("none",)
    count = {"none": 0, "linear": 1, "llama31": 4, "yarn": 4}[str(name)]
    needed = tuple(a for a in arguments[:count] if isinstance(a, NODES))
    return Turning(rope.theta, str(name), needed, dims_of(rope, head_dims))


def turnings(variant: Variant, head_dims: dict[str, int]) -> list[Turning]:
    """Each once, in the order of the slots."""
    found = (turning_of(x, head_dims) for x in ropes(variant))
    return list(dict.fromkeys(t for t in found if t is not None))


def feature_values(variant: Variant, slots: Iterable[str]) -> list[tuple[str, Expr]]:
    """(space, value) of what these vector slots read that depends on the feature alone: the largest such parts, each
    once, those first that are asked for with every key."""
    spaces = [(slot, SLOTS[slot][1]) for slot in sorted(slots, key=lambda slot: slot not in ("f_k", "f_v"))]
    found = [(s, e) for slot, s in spaces for e in largest(getattr(variant, slot), lambda e, s=s: of_feature(e, s))]
    return list(dict.fromkeys(found))


def of_feature(e: Expr, space: str) -> bool:
    parts = list(walk(e))
    plain = all(isinstance(x, (Const, Param, Leaf, Load)) or (isinstance(x, Op) and x.op != "sum") for x in parts)
    reads = any(isinstance(x, Load) for x in parts)
    return plain and reads and e.type.elem == "f32" and space in leaves(e) and leaves(e) <= COMMON | {space}


def largest(e: Expr, wanted: Callable[[Expr], bool]) -> Iterator[Expr]:
    """The parts of `e` that are wanted, but not those that are only found inside another."""
    todo, seen = [e], set()
    while todo:
        x = todo.pop()
        if id(x) not in seen:
            seen.add(id(x))
            if wanted(x):
                yield x
            else:
                todo += reversed(children(x))


def turned_argument(rope: Rope, head_dims: dict[str, int]) -> Expr:
    """What is turned: with yarn's attention factor, which multiplies cosines and sines alike."""
    if not rope.scaling or rope.scaling[0] != "yarn":
        return rope.x
    factor, magnitude = rope.scaling[1], rope.scaling[5]
    one = Const(1.0, F32)
    if not isinstance(magnitude, NODES):
        assert isinstance(factor, NODES)
        grown = make("add", make("mul", Const(0.1, F32), make("log", factor)), one)
        magnitude = make("select", make("lt", one, factor), grown, one)
    space, dims = str(rope.type.space), dims_of(rope, head_dims)
    if dims < head_dims[space]:
        magnitude = make("select", make("lt", Leaf(space), Const(dims, I32)), magnitude, one)
    return simplify_expr(make("mul", rope.x, magnitude))


def ropes(variant: Variant) -> list[Rope]:
    """In the order of the slots."""
    return [x for slot in SLOTS for x in steps_of(getattr(variant, slot)) if isinstance(x, Rope)]


def table_columns(variant: Variant, head_dims: dict[str, int]) -> dict[str, int]:
    """Of every tensor of cosines or sines: one for each pair of features that turn."""
    given = [(str(name), x) for x in ropes(variant) for name in (x.cos, x.sin) if name is not None]
    return {name: dims_of(x, head_dims) // 2 for name, x in reversed(given)}


def misfits(variant: Variant, head_dims: dict[str, int]) -> Iterator[tuple[Rope, str, str]]:
    """(rope, what only the head dims show to be wrong with it, a hint)."""
    columns = table_columns(variant, head_dims)
    declared = {t.name: t.dims[-1] for t in variant.tensors}
    for x in ropes(variant):
        dims, features = dims_of(x, head_dims), head_dims[str(x.type.space)]
        if dims > features or dims % 2:
            yield x, f"rope turns {dims} features, and there are {features}", "`dims` is even, and at most the head dim"
        for name in dict.fromkeys(str(n) for n in (x.cos, x.sin) if n is not None):
            found = declared[name] if isinstance(declared[name], int) else columns[name]
            if found != dims // 2:
                message = f"{name!r} has {found} columns, and dims // 2 is {dims // 2}"
                yield x, message, f"nearest: a tensor {name}[pos, {dims // 2}]"


def own_names(rope: Rope) -> list[str]:
    """Leaves and tensors that keep theta and scaling from being the same for a whole launch."""
    if rope.cos is not None:
        return []
    parts = [rope.theta, *(a for a in rope.scaling if isinstance(a, NODES))]
    tensors = {x.tensor for e in parts for x in walk(e) if isinstance(x, Load)}
    return sorted(set().union(*(leaves(e) for e in parts)) - COMMON | tensors)
