"""Hypothesis strategies for well-typed IR: expressions over a Scope, and whole Variants that verify."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from attncc.ir.nodes import (
    BOOL,
    F32,
    I32,
    LEAVES,
    OPS,
    SLOT_DEFAULTS,
    Const,
    Domain,
    Emit,
    Expr,
    Leaf,
    Load,
    Op,
    Param,
    Rope,
    ScalarParam,
    Scan,
    TensorParam,
    Type,
    Variant,
    make,
)
from attncc.ir.verify import DTYPES, SLOTS

SCALARS = (
    ScalarParam("window", I32, None, False),
    ScalarParam("cap", F32, 50.0, False),
    ScalarParam("flag", BOOL, True, False),
    ScalarParam("size", I32, 64, True),
    ScalarParam("eps", F32, 1e-6, True),
)
TENSORS = (
    TensorParam("slope", ("h",), "f32", grad=True),
    TensorParam("table", ("h", 8), "bf16"),
    TensorParam("start", ("b",), "i32", sorted=True),
    TensorParam("words", ("iq", "w"), "u32"),
    TensorParam("seen", ("b", "pos"), "bool"),
    TensorParam("gain", ("d",), "f32", grad=True),
    TensorParam("gate", ("h", "e"), "f16"),
    TensorParam("cosines", ("pos", "half"), "f32"),
    TensorParam("sines", ("pos", "half"), "f32"),
    TensorParam("chosen", ("iq", "g", "n"), "i32"),
)


@dataclass(frozen=True)
class Scope:
    """What an expression may name."""

    leaves: tuple[str, ...]
    scalars: tuple[ScalarParam, ...] = SCALARS
    tensors: tuple[TensorParam, ...] = TENSORS

    def atoms(self, type_: Type) -> list[Expr]:
        leaves: list[Expr] = [Leaf(name) for name in self.leaves if LEAVES[name] == type_]
        return leaves + [Param(p.name, p.type) for p in self.scalars if p.type == type_]

    def spaces(self) -> list[str]:
        """Spaces of which there is a vector."""
        return sorted({LEAVES[name].space for name in self.leaves} - {None})  # type: ignore[type-var]


INTEGERS = st.one_of(
    st.sampled_from([0, 1, -1, 2, 3, 8, 31, 32, 2**31 - 1, -(2**31)]), st.integers(-100, 100)
)  # fmt: skip
REALS = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 0.5, 0.1, 50.0, -8.0]), st.floats(-1e4, 1e4, width=32)
)  # fmt: skip
# Ops whose value on literals may differ in the last bit from the one on arrays: kept out from under what jumps.
JUMPS = ("floor", "i32", "lt", "le", "eq", "ne", "floordiv", "mod")
ROUNDED = ("exp", "exp2", "log", "log2", "log1p", "sqrt", "rsqrt", "tanh", "sin", "cos", "sigmoid", "logsigmoid",
           "softplus", "pow")  # fmt: skip


def literals(elem: str) -> st.SearchStrategy[Const]:
    values = {"i32": INTEGERS, "f32": REALS, "bool": st.booleans()}[elem]
    return values.map(lambda x: Const(x, Type(elem)))


@st.composite
def expressions(draw, type_: Type, scope: Scope, depth: int = 4) -> Expr:
    """An expression of `type_` over `scope`, at most `depth` ops deep (a few more for vectors); nodes are shared."""
    return _Grower(draw, scope).expr(type_, depth, exact=False)


class _Grower:
    def __init__(self, draw, scope: Scope):
        self.draw, self.scope = draw, scope
        self.made: dict[tuple[Type, bool], list[Expr]] = {}

    def expr(self, type_: Type, depth: int, exact: bool) -> Expr:
        shared = self.made.setdefault((type_, exact), [])
        if shared and self.draw(st.integers(0, 4)) == 0:
            return self.draw(st.sampled_from(shared))
        atoms = self.scope.atoms(type_)
        if type_.space is not None and depth <= 0 and not atoms:
            return self.broadcast(type_, exact)
        if depth <= 0 or self.draw(st.integers(0, 5)) == 0:
            found = self.atom(type_, atoms)
        else:
            found = self.grown(type_, depth - 1, exact)
        shared.append(found)
        return found

    def atom(self, type_: Type, atoms: list[Expr]) -> Expr:
        if type_.space is None and (not atoms or self.draw(st.booleans())):
            return self.draw(literals(type_.elem))
        return self.draw(st.sampled_from(atoms)) if atoms else self.broadcast(type_, exact=True)

    def broadcast(self, type_: Type, exact: bool) -> Expr:
        """A vector from a scalar: there is always the feature index."""
        index = Leaf(type_.space or "")
        if type_.elem == "i32":
            return index
        return make("f32", index) if type_.elem == "f32" else make("eq", index, self.expr(I32, 0, exact))

    def grown(self, type_: Type, depth: int, exact: bool) -> Expr:
        kinds = ["op"] * 5 + ["load"]
        if type_ == Type("f32", "d") and not exact:
            kinds.append("rope")
        kind = self.draw(st.sampled_from(kinds))
        if kind == "rope":
            return self.rope(type_, depth)
        return (self.load(type_, depth) if kind == "load" else None) or self.op(type_, depth, exact)

    def load(self, type_: Type, depth: int) -> Load | None:
        fit = [
            t for t in self.scope.tensors
            if DTYPES[t.dtype] == type_.elem and set(t.dims) & {"d", "e"} <= {type_.space}
        ]  # fmt: skip
        if not fit:
            return None
        t = self.draw(st.sampled_from(fit))
        index = [self.expr(I32, min(depth, 1), True) for _ in t.dims]
        if type_.space is not None:
            index[-1] = Leaf(type_.space)
        return Load(t.name, tuple(index), type_)

    def rope(self, type_: Type, depth: int) -> Rope:
        scaling = self.draw(st.sampled_from(["", "linear", "llama31", "yarn", "table"]))
        x, pos, theta = self.expr(type_, depth, False), self.expr(I32, depth, True), self.expr(F32, 0, False)
        dims, style = self.draw(st.sampled_from([None, 2, 4])), self.draw(st.sampled_from(["neox", "interleaved"]))
        if scaling == "table":
            return Rope(x, pos, theta, dims, style, (), "cosines", "sines")
        count = {"": 0, "linear": 1, "llama31": 4, "yarn": 4}[scaling]
        args = [self.expr(F32, 0, False) for _ in range(count)]
        return Rope(x, pos, theta, dims, style, (scaling, *args, *[None] * (scaling == "yarn")) if scaling else ())

    def op(self, type_: Type, depth: int, exact: bool) -> Op:
        name = self.draw(st.sampled_from([name for name in OPS if self.makes(name, type_, exact)]))
        wanted, result = OPS[name]
        elems = {letter: self.elem(letter, result, type_) for letter in wanted}
        exact = exact or name in JUMPS
        if name == "sum":
            space = self.draw(st.sampled_from(self.scope.spaces()))
            return make("sum", self.expr(Type(type_.elem, space), depth, exact))
        # One argument of a vector is a vector; the others may be scalars.
        where = self.draw(st.integers(0, len(wanted) - 1))
        spaces = [type_.space if n == where or self.draw(st.booleans()) else None for n in range(len(wanted))]
        args = [self.expr(Type(elems[x], s), depth, exact) for x, s in zip(wanted, spaces, strict=True)]
        if type_.elem == "i32" and name in ("pow", "floordiv", "mod"):
            args[0] = args[0] if type_ == args[0].type else self.expr(type_, depth, exact)
            args[1] = Const(
                self.draw(st.integers(0, 6)) if name == "pow" else self.draw(st.sampled_from([1, 2, 3, -7, 32])), I32
            )
        return make(name, *args)

    def makes(self, name: str, type_: Type, exact: bool) -> bool:
        result = {"i": "i32", "f": "f32", "b": "bool"}.get(OPS[name][1])
        if name == "sum" and (type_.space is not None or not self.scope.spaces()):
            return False
        if exact and name in (*ROUNDED, "sum"):
            return False
        return result == type_.elem or (result is None and (OPS[name][1] == "x" or type_.elem != "bool"))

    def elem(self, letter: str, result: str, type_: Type) -> str:
        if letter == result:
            return type_.elem
        choices = {"i": ["i32"], "f": ["f32"], "b": ["bool"], "n": ["i32", "f32"], "x": ["i32", "f32", "bool"]}
        return self.draw(st.sampled_from(choices[letter]))


def slot_expressions(slot: str, depth: int = 4) -> st.SearchStrategy[Expr]:
    """Expressions that may stand in `slot` of a variant with SCALARS and TENSORS and a softmax."""
    leaves, type_ = SLOTS[slot]
    return expressions(type_, Scope(tuple(sorted(leaves))), depth)


@st.composite
def variants(draw, depth: int = 3) -> Variant:
    """Variants that verify, each slot by chance its default or random."""
    slots = {
        slot: draw(slot_expressions(slot, depth)) if draw(st.booleans()) else default
        for slot, default in SLOT_DEFAULTS.items()
    }
    kind = draw(st.sampled_from(["softmax", "sink", "none"]))
    scan = Scan("softmax", draw(slot_expressions("sink", depth))) if kind == "sink" else Scan(kind)
    if kind == "none":
        leaves, type_ = SLOTS["epilogue"]
        slots["epilogue"] = draw(expressions(type_, Scope(tuple(sorted(leaves - {"lse"}))), depth))
    domain = None
    if draw(st.booleans()):
        index = (draw(slot_expressions("domain", 1)), draw(slot_expressions("domain", 1)), None)
        size = make("max", draw(slot_expressions("domain size", 1)), Const(1, I32))
        domain = Domain("chosen", index, size)
    emits = ()
    if draw(st.booleans()):
        leaves, _ = SLOTS["emit"]
        scope = Scope(tuple(sorted(leaves - ({"lse"} if kind == "none" else set()))))
        index = draw(st.sampled_from([(), ("h",), ("iq", "h"), ("b", "g"), ("iq", "h", "j")]))
        emits = (
            Emit("peak", index, draw(st.sampled_from(["max", "min", "sum"])), draw(expressions(F32, scope, depth))),
        )
    doc = draw(st.none() | st.text(max_size=20))
    return Variant("random", doc, SCALARS, TENSORS, **slots, scan=scan, domain=domain, emits=emits)
