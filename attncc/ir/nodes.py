"""The IR on one page: an attention variant as a small pure value.

A `Variant` holds one expression per slot.  Expressions are frozen, compare and hash by structure (positions are
carried but never compared), and are fully typed: every implicit conversion of the language stands here as an `i32`
or `f32` op, so the arguments of an arithmetic op have one element type.  What the language says with one name and
the IR with smaller parts is expanded when it is lowered: `softcap`, `clamp`, `relu`, the norms, `a > b` (`lt` with
its arguments swapped), `let` and `def`, n-ary `min` and `max`, comparison chains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from attncc.diagnostics import NOWHERE, Source, Span


@dataclass(frozen=True)
class Type:
    """`elem` is "i32", "f32" or "bool"; `space` is None for a scalar, "d" or "e" for a vector of features."""

    elem: str
    space: str | None = None

    def __str__(self) -> str:
        return self.elem if self.space is None else f"{self.elem}[{self.space}]"


I32, F32, BOOL = Type("i32"), Type("f32"), Type("bool")

# Leaves and their types.  Index names, then sizes, then the values a slot is given.  `i0 i1 j0 j1` are the first and
# last query position and key of a tile: only tile ranges (ranges.py) speak of them.
INDICES = ("b", "h", "g", "i", "iq", "j")
SIZES = ("qo_len", "kv_len", "head_dim_qk", "head_dim_vo", "group_size", "num_qo_heads", "num_kv_heads")
TILE = ("i0", "i1", "j0", "j1")
LEAVES: dict[str, Type] = {
    **dict.fromkeys(INDICES + SIZES + TILE, I32),
    "d": Type("i32", "d"), "e": Type("i32", "e"),
    "q": Type("f32", "d"), "k": Type("f32", "d"), "v": Type("f32", "e"), "o": Type("f32", "e"),
    "s": F32, "dot": F32, "l": F32, "lse": F32,
}  # fmt: skip

# op: (argument elements, result element); "n" stands for i32 or f32, one choice for all arguments and the result.
# A scalar argument beside a vector one is broadcast.  `sum` alone turns a vector into a scalar.
OPS: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("add", "sub", "mul", "min", "max"), ("nn", "n")),
    **dict.fromkeys(("floordiv", "mod", "pow"), ("nn", "n")),   # // and % floor; pow of i32: constant exponent >= 0
    "div": ("ff", "f"),
    **dict.fromkeys(("neg", "abs"), ("n", "n")),
    **dict.fromkeys(("lt", "le"), ("nn", "b")),
    **dict.fromkeys(("eq", "ne"), ("xx", "b")),                  # "x": i32, f32 or bool
    **dict.fromkeys(("and", "or"), ("bb", "b")),                 # the left argument guards the right one
    "not": ("b", "b"),
    "select": ("bxx", "x"),                                      # select(c, a, b): c guards a, not c guards b
    "floor": ("f", "f"),
    **dict.fromkeys(("exp", "exp2", "log", "log2", "log1p", "sqrt", "rsqrt", "tanh", "sin", "cos"), ("f", "f")),
    **dict.fromkeys(("sigmoid", "logsigmoid", "softplus"), ("f", "f")),
    "i32": ("f", "i"),                                           # truncates toward zero
    "f32": ("i", "f"),
    "bit": ("ii", "b"),                                          # bit(word, n): false for n outside 0..31
    "sum": ("n", "n"),
}  # fmt: skip
LETTERS = {"i": ("i32",), "f": ("f32",), "b": ("bool",), "n": ("i32", "f32"), "x": ("i32", "f32", "bool")}


def result_type(op: str, args: tuple[Type, ...]) -> Type:
    """The type of `op` on arguments of types `args`, by OPS.  TypeError naming what does not fit."""
    if op not in OPS:
        raise TypeError(f"unknown op {op!r}")
    wanted, result = OPS[op]
    if len(args) != len(wanted):
        raise TypeError(f"{op} takes {len(wanted)} arguments, found {len(args)}")
    chosen: dict[str, str] = {}
    for letter, a in zip(wanted, args, strict=True):
        if a.elem not in LETTERS[letter] or chosen.setdefault(letter, a.elem) != a.elem:
            raise TypeError(f"{op} of {', '.join(map(str, args))}")
    spaces = {a.space for a in args} - {None}
    if len(spaces) > 1:
        raise TypeError("vectors of d and e mixed")
    space = next(iter(spaces), None)
    if op == "sum" and space is None:
        raise TypeError("sum of a scalar")
    return Type(chosen.get(result) or LETTERS[result][0], None if op == "sum" else space)


class Node:
    """What every expression node shares: equality and hash by structure, positions aside.  Both are linear in the
    distinct nodes, however often those are shared (a chain of `let`s doubles the tree at every step) and however
    deep they nest.  Literals compare by their text, so that -0.0 differs from 0.0 and nan equals nan."""

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, NODES):
            return NotImplemented
        if hash(self) != hash(other):
            return False
        todo: list[tuple] = [(self, other)]
        seen: set[tuple[int, int]] = set()
        while todo:
            a, b = todo.pop()
            if a is b or (id(a), id(b)) in seen:
                continue
            seen.add((id(a), id(b)))
            if head(a) != head(b) or len(children(a)) != len(children(b)):
                return False
            todo += zip(children(a), children(b), strict=True)
        return True

    def __hash__(self) -> int:
        known = "_hash"
        todo: list = [] if known in self.__dict__ else [self]
        while todo:  # only what has no hash yet: nodes are mostly made from hashed ones
            x = todo[-1]
            waiting = [k for k in children(x) if known not in k.__dict__]
            if waiting:
                todo += waiting
            else:
                x.__dict__[known] = hash((head(x), *(k.__dict__[known] for k in children(x))))
                todo.pop()
        return self.__dict__[known]

    def __getstate__(self) -> dict:
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}  # str hashes differ by process

    def __repr__(self) -> str:
        from attncc.ir.text import brief  # the dataclass's own would spell a shared node out at every use

        return brief(self)  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False, repr=False)
class Const(Node):
    """A literal: int for i32, float for f32 (unrounded), bool for bool."""

    value: int | float | bool
    type: Type
    span: Span = NOWHERE


@dataclass(frozen=True, eq=False, repr=False)
class Leaf(Node):
    """An index, a size, or a value the slot is given: a key of LEAVES."""

    name: str
    span: Span = NOWHERE

    @property
    def type(self) -> Type:
        return LEAVES[self.name]


@dataclass(frozen=True, eq=False, repr=False)
class Param(Node):
    """A scalar parameter of the variant."""

    name: str
    type: Type
    span: Span = NOWHERE


@dataclass(frozen=True, eq=False, repr=False)
class Op(Node):
    op: str
    args: tuple[Expr, ...]
    type: Type
    span: Span = NOWHERE


@dataclass(frozen=True, eq=False, repr=False)
class Load(Node):
    """`tensor[index, …]`.  An index over the `iq`, `j` space is the request's own row number (the layout adds the
    request's offset); one over `d` or `e` is a vector and makes the result a vector."""

    tensor: str
    index: tuple[Expr, ...]
    type: Type
    span: Span = NOWHERE


@dataclass(frozen=True, eq=False, repr=False)
class Rope(Node):
    """Rotary position embedding of vector `x` at `pos` (RoFormer, arXiv 2104.09864, eq. 34) over its first `dims`
    features; `style` is "neox" (halves) or "interleaved" (pairs).  `scaling` is () or (name, value, …) with every
    argument of linear / llama31 / yarn in the language's order.  With `cos`, `sin` (tensors [pos, dims // 2], read
    at `pos`) theta and scaling are not used."""

    x: Expr
    pos: Expr
    theta: Expr
    dims: int | None  # None: all features
    style: str
    scaling: tuple[str | Expr | None, ...] = ()
    cos: str | None = None
    sin: str | None = None
    span: Span = NOWHERE

    @property
    def type(self) -> Type:
        return self.x.type


Expr = Const | Leaf | Param | Op | Load | Rope
NODES = (Const, Leaf, Param, Op, Load, Rope)


@dataclass(frozen=True)
class ScalarParam:
    """Run-time unless `const`.  `default` None: the caller must give it."""

    name: str
    type: Type
    default: int | float | bool | None
    const: bool
    span: Span = field(default=NOWHERE, compare=False)


@dataclass(frozen=True)
class TensorParam:
    """`dims`: an index space ("b" "h" "g" "iq" "j" "pos" "d" "e"), an int, or a fresh name (any length)."""

    name: str
    dims: tuple[str | int, ...]
    dtype: str  # f32 bf16 f16 i32 u32 u8 bool
    grad: bool = False
    sorted: bool = False
    span: Span = field(default=NOWHERE, compare=False)


SPACES = ("b", "h", "g", "iq", "j", "pos", "d", "e")


@dataclass(frozen=True)
class Scan:
    """Kind "softmax" (with an optional sink logit) or "none": the weights are the logits themselves."""

    kind: str
    sink: Expr | None = None


@dataclass(frozen=True)
class Domain:
    """Only keys in the selected blocks of `size` exist.  `index` has None at the one `:`."""

    tensor: str
    index: tuple[Expr | None, ...]
    size: Expr
    span: Span = field(default=NOWHERE, compare=False)


@dataclass(frozen=True)
class Emit:
    """`emit name[index] = reduce(value)`: "max", "min" or "sum" over the visible keys and every index not kept."""

    name: str
    index: tuple[str, ...]
    reduce: str
    value: Expr
    span: Span = field(default=NOWHERE, compare=False)


@dataclass(frozen=True)
class Variant:
    name: str
    doc: str | None
    scalars: tuple[ScalarParam, ...]
    tensors: tuple[TensorParam, ...]
    scale: Expr
    f_q: Expr
    f_k: Expr
    f_v: Expr
    f_logits: Expr
    mask: Expr
    scan: Scan
    epilogue: Expr
    domain: Domain | None = None
    emits: tuple[Emit, ...] = ()
    source: Source | None = field(default=None, compare=False, repr=False)
    spans: tuple[tuple[str, Span], ...] = field(default=(), compare=False)  # slot -> where it is written

    def span_of(self, slot: str) -> Span:
        return dict(self.spans).get(slot, NOWHERE)

    def expressions(self) -> Iterator[tuple[str, Expr]]:
        """Every (slot, expression), `sink` and `emit NAME` included, in the language's order."""
        for slot in EXPR_SLOTS:
            yield slot, getattr(self, slot)
        if self.scan.sink is not None:
            yield "sink", self.scan.sink
        for emit in self.emits:
            yield f"emit {emit.name}", emit.value

    def map(self, f) -> Variant:
        """The variant with every expression of every slot replaced by f(expr)."""
        return replace(
            self,
            **{slot: f(getattr(self, slot)) for slot in EXPR_SLOTS},
            scan=replace(self.scan, sink=None if self.scan.sink is None else f(self.scan.sink)),
            domain=self.domain and replace(
                self.domain, size=f(self.domain.size),
                index=tuple(None if x is None else f(x) for x in self.domain.index)),
            emits=tuple(replace(e, value=f(e.value)) for e in self.emits),
        )  # fmt: skip


EXPR_SLOTS = ("scale", "f_q", "f_k", "f_v", "f_logits", "mask", "epilogue")
SLOT_DEFAULTS: dict[str, Expr] = {
    "scale": Op("rsqrt", (Op("f32", (Leaf("head_dim_qk"),), F32),), F32),
    "f_q": Leaf("q"), "f_k": Leaf("k"), "f_v": Leaf("v"), "f_logits": Leaf("s"),
    "mask": Const(True, BOOL), "epilogue": Leaf("o"),
}  # fmt: skip


def make(op: str, *args: Expr, span: Span = NOWHERE) -> Op:
    """The Op with its type worked out.  TypeError where the arguments do not fit."""
    return Op(op, args, result_type(op, tuple(a.type for a in args)), span)


def children(e: Expr) -> tuple[Expr, ...]:
    """The expressions directly under `e`, in evaluation order."""
    if isinstance(e, Op):
        return e.args
    if isinstance(e, Load):
        return e.index
    if isinstance(e, Rope):
        return (e.x, e.pos, e.theta, *(a for a in e.scaling if isinstance(a, NODES)))
    return ()


def rebuild(e: Expr, kids: tuple[Expr, ...]) -> Expr:
    """`e` with other children, in the order of `children`."""
    if isinstance(e, Op):
        return replace(e, args=kids)
    if isinstance(e, Load):
        return replace(e, index=kids)
    if isinstance(e, Rope):
        rest = iter(kids[3:])
        scaling = tuple(next(rest) if isinstance(a, NODES) else a for a in e.scaling)
        return replace(e, x=kids[0], pos=kids[1], theta=kids[2], scaling=scaling)
    return e


def head(e: Expr) -> tuple:
    """All that `e` says beside its children and its position."""
    if isinstance(e, Const):
        return Const, e.type, repr(e.value)
    if isinstance(e, Leaf):
        return Leaf, e.name
    if isinstance(e, Param):
        return Param, e.name, e.type
    if isinstance(e, Op):
        return Op, e.op, e.type
    if isinstance(e, Load):
        return Load, e.tensor, e.type
    return Rope, e.dims, e.style, tuple(... if isinstance(a, NODES) else a for a in e.scaling), e.cos, e.sin


def objects(e: Expr) -> Iterator[Expr]:
    """Every node object below and including `e`, children first, each once however often it is shared."""
    seen: set[int] = set()
    todo = [e]
    while todo:
        x = todo[-1]
        waiting = [] if id(x) in seen else [k for k in children(x) if id(k) not in seen]
        if waiting:
            todo += reversed(waiting)
        else:
            todo.pop()
            if id(x) not in seen:
                seen.add(id(x))
                yield x


def walk(e: Expr) -> Iterator[Expr]:
    """Every distinct node below and including `e`, children first, each once."""
    number: dict[tuple, int] = {}
    of: dict[int, int] = {}
    for x in objects(e):
        key = (head(x), *(of[id(k)] for k in children(x)))
        new = key not in number
        of[id(x)] = number.setdefault(key, len(number))
        if new:
            yield x


def transform(e: Expr, f: Callable[[Expr], Expr]) -> Expr:
    """Rebuild bottom-up: f sees every node after its children; shared nodes are visited once."""
    done: dict[int, Expr] = {}
    for x in objects(e):
        kids = children(x)
        new = tuple(done[id(k)] for k in kids)
        done[id(x)] = f(x if all(a is b for a, b in zip(new, kids, strict=True)) else rebuild(x, new))
    return done[id(e)]


class Interner:
    """Makes equal nodes one object: `intern = Interner(); a = intern(a); b = intern(b)` share all that they can, and
    equal expressions become identical ones."""

    def __init__(self) -> None:
        self.table: dict[tuple, Expr] = {}

    def node(self, x: Expr) -> Expr:
        """The one object equal to `x`, whose children are such objects."""
        return self.table.setdefault((head(x), *map(id, children(x))), x)

    def __call__(self, e: Expr) -> Expr:
        return transform(e, self.node)


def leaves(e: Expr) -> frozenset[str]:
    """Names of the leaves that `e` depends on."""
    return frozenset(x.name for x in objects(e) if isinstance(x, Leaf))
