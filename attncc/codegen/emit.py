"""From a variant to the text of its functor module: straight-line CuTe DSL, one IR node a line.

Every function of the module belongs to a stage (codegen/device/functors.py lists them).  A value is computed in the
stage where it is first known - head, row, column - and handed up in tuples, so that the innermost code holds only
what really differs from score to score.  Reads of tensors carry their guards: what `and`, `or`, `if` and the mask
hide becomes the predicate of the load.  A read hoisted above a guard is checked against the tensor's extents instead.

Served kernels find rows and keys by what the Env says of the request: its first row, its pages.  Where a key lies is
looked up once a column.  The rows of a packed tile may be of several heads and requests; what they can't share is said.
Where keys are listed in blocks, a column's position is looked up, and the next column's doesn't follow from it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath

from attncc.ir.decompose import Logits
from attncc.ir.fold_vectors import weight_of
from attncc.ir.nodes import (
    F32,
    I32,
    Const,
    Domain,
    Expr,
    Leaf,
    Load,
    Op,
    Param,
    TensorParam,
    Variant,
    leaves,
    make,
    walk,
)
from attncc.ir.ranges import TileRanges
from attncc.ir.rewrite import simplify_expr

from .config import BY_ROW, ROW_LEAVES, KernelConfig, logits_of, ramp, ranges_of, slope
from .emit_outputs import emit_outputs
from .emit_vectors import emit_vectors, few_slots
from .listing import BITMAP, block_keys, line_index, whole_mask, with_domain, with_lines
from .prelude import IMPORTS, helpers_for
from .vectors import feature_values, used_slots

ELEMENT_BYTES = {"f32": 4, "i32": 4, "u32": 4, "bf16": 2, "f16": 2, "u8": 1, "bool": 1}
ENV_LEAVES = frozenset(("b", "h", "g", "qo_len", "kv_len", "num_qo_heads", "num_kv_heads", "group_size"))
COL_LEAVES = frozenset(("j", "i0"))
IN_RANGE = frozenset(("b", "h", "g", "iq"))  # leaves that never leave the extent they index

INFIX = {"add": "+", "sub": "-", "mul": "*", "lt": "<", "le": "<=", "eq": "==", "ne": "!=", "and": "&", "or": "|"}
FAST = {"exp": "exp({})", "log": "log({})", "sigmoid": "sigmoid({})", "softplus": "softplus({})",
        "logsigmoid": "-softplus(-{})", "exp2": "cute.math.exp2({}, fastmath=True)",
        "tanh": "cute.math.tanh({}, fastmath=True)",
        "log2": "cute.math.log2({}, fastmath=True)", "sqrt": "cute.math.sqrt({}, fastmath=True)",
        "rsqrt": "cute.math.rsqrt({}, fastmath=True)", "log1p": "cute.math.log1p({})", "sin": "sin({})",
        "cos": "cos({})", "floor": "cute.math.floor({})"}  # fmt: skip
PRECISE = {**FAST, "exp": "cute.math.exp({})", "log": "cute.math.log({})", "exp2": "cute.math.exp2({})",
           "tanh": "cute.math.tanh({})", "log2": "cute.math.log2({})", "sqrt": "cute.math.sqrt({})",
           "rsqrt": "cute.math.rsqrt({})"}  # fmt: skip
COLUMN_STAGES = ("block", "col")
OWN_SIZES = {"query": "x.qo_len", "listed": "x.kv_len"}  # of axes whose extent in the argument is that of all requests
DERIVED = ("bounds", "classify")  # stages of what the tile analysis made
SEEN = "seen"  # the guard that the mask and kv_len put on every read of a score


@dataclass(frozen=True)
class Emitted:
    """The module's text and the variant's own kernel parameters, (name, kind), in order.

    Of packed tiles: `columns_by_row`: block, col or ramp ask for what rows of other heads or requests have of their
    own, and so have values for each row; `ranges_by_row`: bounds or classify ask for the head.  `other_keys`: a tensor
    over `j` is read at keys other than the score's own, which a level of a cascade may not have."""

    name: str
    text: str
    params: tuple[tuple[str, str], ...]
    columns_by_row: bool = False
    ranges_by_row: bool = False
    other_keys: bool = False


@dataclass(frozen=True)
class Axis:
    """One dimension `k` of a tensor argument and what indexes it: `x` itself, or what a served kernel finds by it: the
    "query" row; of a key its "page", its "row" there, and whether it "is_here"; "listed": a key by its position."""

    k: int
    x: Expr
    part: str = ""
    feature: str = ""  # "d" or "e", where the dimension is as long as there are features


@dataclass(frozen=True)
class Guards:
    """What must hold for a lane to read: (condition, must it be true).  `checked`: a condition was left behind, so
    indices are compared with the extents."""

    conditions: tuple[tuple[Expr | str, bool], ...] = ()
    checked: bool = False

    def plus(self, condition: Expr | str, holds: bool) -> Guards:
        return Guards((*self.conditions, (condition, holds)), self.checked)


@dataclass
class Stage:
    """One function being written.  `below`: stages whose tuples it is given; `leaves`: names it has as arguments."""

    name: str
    leaves: frozenset[str]
    below: dict[str, Stage] = field(default_factory=dict)
    handle: str = ""  # how functions above call its tuple
    lines: list[str] = field(default_factory=list)
    names: dict = field(default_factory=dict)
    exports: list[str] = field(default_factory=list)

    def export(self, name: str) -> str:
        if name not in self.exports:
            self.exports.append(name)
        return f"{self.handle}[{self.exports.index(name)}]"


def home(e: Expr) -> str | None:
    """The stage where `e` is first known; None: it differs from cell to cell."""
    names = {x.name for x in walk(e) if isinstance(x, Leaf)} - ENV_LEAVES
    if not names:
        return "head"
    if names <= ROW_LEAVES:
        return "row"
    return "col" if names <= COL_LEAVES else None


def reads_memory(e: Expr) -> bool:
    return any(isinstance(x, Load) for x in walk(e))


class Emitter:
    """Writes the functions of one variant."""

    def __init__(self, variant: Variant, config: KernelConfig, slots: Sequence[str]):
        """`slots`: of vectors, those that are transformed."""
        self.variant, self.slots = variant, slots
        self.head_dims = {"d": config.head_dim_qk, "e": config.head_dim_vo}
        self.features = feature_values(variant, slots)[: len(config.features)]
        self.layout = config.layout
        self.columns_by_row = False
        self.tensors = {t.name: t for t in variant.tensors}
        self.params: list[tuple[str, str]] = []
        self.file = PurePath(variant.source.name).name if variant.source else variant.name
        self.known: dict[Expr, str] = {}  # steps of the vector slot being written that are done
        self.homes: dict[Expr, str | None] = {}
        self.readers: dict[Expr, bool] = {}
        self.rounders: dict[Expr, bool] = {}
        self.head = Stage("head", frozenset(), handle="hd")
        self.row = Stage("row", ROW_LEAVES, {"head": self.head}, "rw")
        self.block = Stage("block", COL_LEAVES, {"head": self.head}, "bk")
        self.col = Stage("col", frozenset("j"), {"head": self.head, "block": self.block}, "cl")
        self.functions: list[str] = []
        self.constants: list[str] = []

    # ------------------------------------------------------------------ leaves
    def param(self, name: str, kind: str) -> str:
        if (name, kind) not in self.params:
            self.params.append((name, kind))
        return f"x.params[{self.params.index((name, kind))}]"

    def trivial(self, e: Expr) -> str | None:
        """Constants, parameters and sizes are at hand everywhere."""
        match e:
            case Const(value):
                kind = {"i32": "Int32", "f32": "Float32", "bool": "Boolean"}[e.type.elem]
                text = repr(value) if value == value and abs(value) != float("inf") else f'float("{value}")'
                return f"{kind}({text})"
            case Param(name):
                at = self.param(f"s.{name}", "f32" if e.type.elem == "f32" else "i32")
                return f"({at} != 0)" if e.type.elem == "bool" else at
            case Leaf(name) if name in ENV_LEAVES:
                return f"x.{name}"
        return None

    def home(self, e: Expr) -> str | None:
        if e not in self.homes:
            self.homes[e] = home(e)
        return self.homes[e]

    def reads(self, e: Expr) -> bool:
        if e not in self.readers:
            self.readers[e] = reads_memory(e)
        return self.readers[e]

    def rounds(self, e: Expr) -> bool:
        """Is there something in `e` that has a fast and a precise form?"""
        if e not in self.rounders:
            self.rounders[e] = any(isinstance(x, Op) and (x.op == "div" or x.op in FAST) for x in walk(e))
        return self.rounders[e]

    # ------------------------------------------------------------------ values
    def value(self, e: Expr, stage: Stage, guards: Guards = Guards(), precise: bool = False) -> str:
        """The name of `e` in a stage, computing it there or below."""
        self.columns_by_row |= stage.name in COLUMN_STAGES and bool(leaves(e) & BY_ROW)
        at_hand = self.trivial(e)
        if at_hand is not None:
            return at_hand
        if isinstance(e, Leaf) and e.name in stage.leaves:
            return e.name
        if e == Leaf("i0") and stage is self.col:
            return self.block.export("i0")
        if e in self.known:
            return self.known[e]
        precise = precise and self.rounds(e)
        key = (e, guards if self.reads(e) else None, precise)
        if key not in stage.names:
            below = stage.below.get(self.home(e) or "")
            if below is not None:
                stage.names[key] = self.lift(below, e, guards, precise)
            else:
                stage.names[key] = self.line(stage, self.compute(e, stage, guards, precise), e)
        return stage.names[key]

    def lift(self, below: Stage, e: Expr, guards: Guards, precise: bool) -> str:
        """A value computed in a lower stage."""
        return below.export(self.value(e, below, self.guards_below(below, guards), precise))

    def guards_below(self, below: Stage, guards: Guards) -> Guards:
        """Conditions that are not known in a lower stage yet are left behind."""
        kept = tuple(c for c in guards.conditions if c[0] != SEEN and self.home(c[0]) in ("head", below.name))  # type: ignore[arg-type]
        return Guards(kept, guards.checked or len(kept) < len(guards.conditions))

    def line(self, stage: Stage, text: str, e: Expr | None = None) -> str:
        name = f"v{len(stage.lines)}"
        # what is derived from a mask shares equal parts with those of other files, and so their lines
        own = e is not None and e.span.line and stage.name not in DERIVED
        where = f"  # {self.file}:{e.span.line}" if e is not None and own else ""
        stage.lines.append(f"{name} = {text}{where}")
        return name

    def compute(self, e: Expr, stage: Stage, guards: Guards, precise: bool) -> str:
        if isinstance(e, Load):
            return self.load(e, stage, guards)
        assert isinstance(e, Op), f"{e} has no place in stage {stage.name}"
        if e.op in ("and", "or"):
            left = self.value(e.args[0], stage, guards, precise)
            return (
                f"{left} {INFIX[e.op]} {self.value(e.args[1], stage, guards.plus(e.args[0], e.op == 'and'), precise)}"
            )
        if e.op == "select":
            c, a, b = e.args
            cond = self.value(c, stage, guards, precise)
            yes = self.value(a, stage, guards.plus(c, True), precise)
            return f"cutlass.select_({cond}, {yes}, {self.value(b, stage, guards.plus(c, False), precise)})"
        if stage is self.col and e.op == "f32" and self.layout != "blocks":
            c = slope(e.args[0])
            if c is not None:  # one conversion a block, then constants are added
                return f"{self.block.export(self.value(e, self.block, guards))} + {float(c)} * off"
        # what decides a branch or an index is computed as the reference does, not by approximations
        exact = (
            precise
            or stage.name in ("head", "row", "block")
            or (e.op in ("i32", "floor", "lt", "le", "eq", "ne", "floordiv", "mod"))
        )
        args = [self.value(a, stage, guards, exact) for a in e.args]
        return self.operation(e, args, exact)

    def operation(self, e: Op, args: list[str], precise: bool) -> str:
        integer = e.args[0].type.elem == "i32"
        a = args[0]
        match e.op:
            case op if op in INFIX:
                return f"{a} {INFIX[op]} {args[1]}"
            case "neg":
                return f"-{a}"
            case "not":
                return f"~{a}"
            case "div":
                return f"{a} / {args[1]}" if precise else f"{a} * cute.arch.rcp_approx({args[1]})"
            case "min" | "max":
                return f"cutlass.{e.op}({a}, {args[1]})" if integer else f"cute.arch.f{e.op}({a}, {args[1]})"
            case "abs":
                return f"cutlass.max({a}, -{a})" if integer else f"cute.arch.fmax({a}, -{a})"
            case "floordiv" | "mod":
                return self.division(e, a, args[1])
            case "pow":
                return self.power(e, a, args[1])
            case "i32":
                return f"Int32({a})"
            case "f32":
                return f"Float32({a})"
            case "bit":
                return f"bit({a}, {args[1]})"
        return (PRECISE if precise else FAST)[e.op].format(a)

    def division(self, e: Op, a: str, b: str) -> str:
        if e.args[0].type.elem == "f32":
            whole = f"cute.math.floor({a} / {b})"
            return whole if e.op == "floordiv" else f"{a} - {whole} * {b}"
        c = int(e.args[1].value) if isinstance(e.args[1], Const) else 0
        if c > 0 and c & (c - 1) == 0:
            return f"{a} >> {c.bit_length() - 1}" if e.op == "floordiv" else f"{a} & {c - 1}"
        return f"{a} // {b}" if e.op == "floordiv" else f"{a} - {a} // {b} * {b}"  # the DSL's // floors, its % does not

    def power(self, e: Op, a: str, b: str) -> str:
        y = e.args[1].value if isinstance(e.args[1], Const) else None
        if y is not None and y == int(y) and 0 <= y <= 16:
            one = "Int32(1)" if e.type.elem == "i32" else "Float32(1.0)"
            return " * ".join([a] * int(y)) if y else one
        if e.type.elem == "i32":
            raise ValueError(f"i32 exponent {y} is not supported by kernels")
        return f"power({a}, {b})"

    # ------------------------------------------------------------------ memory
    def load(self, e: Load, stage: Stage, guards: Guards) -> str:
        tensor = self.tensors[e.tensor]
        index = list(expand(tensor, e.index, self.layout))
        self.columns_by_row |= stage.name in COLUMN_STAGES and any(a.part == "query" for a in index)
        same = leaves(e) <= ENV_LEAVES | {"d", "e"}  # for all keys, those that do not exist too
        ok = [self.condition(c, holds, stage) for c, holds in guards.conditions if not (same and c == SEEN)]
        if guards.checked:
            ok += self.inside(tensor, index, stage, guards)
        address = self.address(tensor, index, stage, guards)
        gate = " & ".join(f"({c})" if " " in c and not c.startswith("(") else c for c in dict.fromkeys(ok)) or "True"
        match tensor.dtype:
            case "f32":
                return f"as_f32(load_b32({address}, {gate}))"
            case "i32" | "u32":
                return f"load_b32({address}, {gate})"
            case "bf16":
                return f"as_f32(load_u16({address}, {gate}) << 16)"
            case "f16":
                return f"f16_as_f32(load_u16({address}, {gate}))"
            case "bool":
                return f"load_u8({address}, {gate}) != 0"
        return f"load_u8({address}, {gate})"

    def inside(self, tensor: TensorParam, index: list[Axis], stage: Stage, guards: Guards) -> Iterator[str]:
        """The comparisons that keep a read in the tensor."""
        for a in index:
            if isinstance(a.x, Leaf) and a.x.name in (*IN_RANGE, a.feature):
                continue
            if a.part == "page":
                yield self.place(Axis(a.k, a.x, "is_here"), stage, guards)
            elif a.part != "row":
                at = self.value(a.x, stage, guards)
                size = OWN_SIZES.get(a.part) or self.param(f"t.{tensor.name}.size.{a.k}", "i32")
                yield f"({at} >= 0) & ({at} < {size})"

    def condition(self, c: Expr | str, holds: bool, stage: Stage) -> str:
        if isinstance(c, str):
            return c
        at = self.value(c, stage, self.guards_of_condition(c, stage))
        return at if holds else f"~{at}"

    def guards_of_condition(self, c: Expr, stage: Stage) -> Guards:
        """A condition that itself reads memory is read where it stands: in the score under `seen`."""
        if not self.reads(c):
            return Guards()
        return Guards(((SEEN, True),)) if SEEN in stage.leaves else Guards(checked=True)

    def address(self, tensor: TensorParam, index: list[Axis], stage: Stage, guards: Guards) -> str:
        """The element's address; the part of each index that a lower stage knows is added there."""
        below = self.part_below(index, stage)
        mine = [a for a in index if below is None or not self.known_in(a.x, below)]
        if below is None:
            at = self.param(f"t.{tensor.name}", "ptr")
        else:
            rest = [a for a in index if a not in mine]
            kept = Guards((), True) if guards != Guards() else guards
            key = ("address", tensor.name, tuple(rest))
            if key not in below.names:
                below.names[key] = self.line(below, self.address(tensor, rest, below, kept))
            at = below.export(below.names[key])
        size = ELEMENT_BYTES[tensor.dtype]
        for a in mine:
            stride = self.param(f"t.{tensor.name}.stride.{a.k}", "i32")
            at += f" + Int64({self.place(a, stage, guards)}) * Int64({stride}) * {size}"
        return at

    def place(self, a: Axis, stage: Stage, guards: Guards) -> str:
        """The index itself.  A key's place is looked up in the stage where the key is first known."""
        if a.part in ("", "listed"):
            return self.value(a.x, stage, guards)
        if a.part == "query":
            return f"x.q_start + {self.value(a.x, stage, guards)}"
        key = ("key", a.part, a.x, guards if self.reads(a.x) else None)
        if key not in stage.names:
            below = stage.below.get(self.home(a.x) or "")
            if below is not None:
                stage.names[key] = below.export(self.place(a, below, self.guards_below(below, guards)))
            else:
                stage.names[key] = self.line(stage, f"key_{a.part}(x, {self.value(a.x, stage, guards)})")
        return stage.names[key]

    def known_in(self, x: Expr, below: Stage) -> bool:
        return self.home(x) in ("head", below.name)

    def part_below(self, index: list[Axis], stage: Stage) -> Stage | None:
        for name in ("row", "head"):
            below = stage.below.get(name)
            if below is not None and any(self.home(a.x) == name for a in index):
                return below
        return None

    # ------------------------------------------------------------------ functions
    def function(self, signature: str, stage: Stage, result: str) -> None:
        body = [*stage.lines, f"return {result}"]
        self.functions.append(f"def {signature}:\n" + "".join(f"    {line}\n" for line in body))

    def cell(self, name: str, args: Iterable[str], below: Iterable[Stage]) -> Stage:
        return Stage(name, frozenset(args), {s.name: s for s in below})

    def text(self) -> str:
        stages = [("head(x)", self.head), ("row(x, hd, i, iq)", self.row), ("block(x, hd, i0, j)", self.block),
                  ("col(x, hd, bk, j, off)", self.col)]  # fmt: skip
        written = self.functions
        self.functions = []
        for signature, stage in stages:
            self.function(signature, stage, "(" + "".join(f"{n}, " for n in stage.exports) + ")")
        body = "\n\n".join(self.functions + written + self.constants)
        title = f'"""{self.variant.name}, generated by attncc from {self.file}."""'
        return f"{title}\n\n{IMPORTS}\n\n{helpers_for(body)}\n\n{body}".rstrip() + "\n"


def expand(tensor: TensorParam, index: tuple[Expr, ...], layout: str) -> Iterator[Axis]:
    """The dimensions of the argument.  Dense: the request's own before `iq` and `j`.  Served: the rows of all requests
    one after the other, and keys as the cache has them, by page and row; those of blocks all in one page."""
    k, served = 0, layout != "dense"
    for dim, x in zip(tensor.dims, index, strict=True):
        if dim == "iq" and served:
            parts = [Axis(k, x, "query")]
        elif dim == "j" and layout == "blocks":
            parts, k = [Axis(k + 1, x, "listed")], k + 1
        elif dim == "j" and served:
            parts = [Axis(k, x, "page"), Axis(k + 1, x, "row")]
        elif dim in ("iq", "j"):
            parts = [Axis(k, Leaf("b")), Axis(k + 1, x)]
        else:
            parts = [Axis(k, x, feature=str(dim) if dim in ("d", "e") else "")]
        yield from parts
        k += len(parts)


def emit(variant: Variant, config: KernelConfig, ahead: Mapping[str, Expr] = {}) -> Emitted:
    """The functor module of a specialised, simplified variant.  `ahead`: the factors of KernelConfig.ahead."""
    ranges, logits = ranges_of(variant), logits_of(variant, config.layout)
    m = Emitter(with_lines(variant), config, used_slots(variant))
    all_below = (m.head, m.row, m.col)
    # what does not stand under `seen`: a row may see no key at all, and a block may reach past kv_len
    unseen = Guards(checked=True)

    by_row = m.home(logits.unit) == "row"
    below, guards = (m.row, unseen) if by_row else (m.head, Guards())
    m.function("unit(hd, rw)", m.cell("unit", (), ()), below.export(m.value(logits.unit, below, guards)))
    stage = m.cell("score", ("dot", "i", "j", "seen"), all_below)
    result = m.value(logits.score, stage, Guards(((SEEN, True),)))
    m.function("score(x, hd, rw, cl, dot, i, j, seen)", stage, result)
    if config.ramp:
        emit_ramp(m, logits)
    emit_factors(m, "factors", logits.key, weight_of(variant))
    emit_factors(m, "ahead", *ahead.values())
    stage = m.cell("shift", ("i", "i0"), (m.head, m.row))
    m.function("shift(x, hd, rw, i, i0)", stage, m.value(logits.shift, stage, unseen))
    stage = m.cell("mask", ("i", "j"), all_below)
    # lists that a thread knows once a block of keys are no part of it
    mask = variant.mask if config.list_block else whole_mask(variant)
    m.function("mask(x, hd, rw, cl, i, j)", stage, m.value(mask, stage, unseen))
    if variant.scan.sink is not None:
        base2 = Op("mul", (variant.scan.sink, Const(math.log2(math.e), F32)), F32)
        m.function("sink(x, hd, rw, i)", stage := m.cell("sink", ("i",), (m.head, m.row)), m.value(base2, stage))
    emit_ranges(m, with_domain(ranges, variant, config.walks_lists))
    if variant.domain is not None:
        emit_lists(m, variant.domain)
    emit_vectors(m, variant, unseen, few_slots(variant, config.dtype) if config.few_keys else None)
    emit_outputs(m, variant, Guards(((SEEN, True),)), unseen)
    return Emitted(variant.name, m.text(), tuple(m.params), m.columns_by_row, by_head(ranges), other_keys(variant))


def emit_keys(variant: Variant, config: KernelConfig, slots: Sequence[str]) -> Emitted:
    """The module of a pre-pass: f_k and f_v as they are written, factors too."""
    m = Emitter(variant, config, slots)
    emit_vectors(m, variant, Guards(checked=True))
    return Emitted(variant.name, m.text(), tuple(m.params))


def by_head(ranges: TileRanges) -> bool:
    return any("h" in leaves(e) for e in ranges.parts)


def other_keys(variant: Variant) -> bool:
    over_j = {t.name: t.dims.index("j") for t in variant.tensors if "j" in t.dims}
    loads = [x for _, e in variant.expressions() for x in walk(e) if isinstance(x, Load) and x.tensor in over_j]
    return any(x.index[over_j[x.tensor]] != Leaf("j") for x in loads)


def emit_ramp(m: Emitter, logits: Logits) -> None:
    """score = a * dot + start + step * off."""
    parts = ramp(logits)
    assert parts is not None
    a, line, coefficient, per_column = parts
    step = make("mul", coefficient, Const(float(per_column), F32))
    values = [m.head.export(m.value(a, m.head)), m.block.export(m.value(line, m.block)),
              m.head.export(m.value(simplify_expr(step), m.head))]  # fmt: skip
    m.columns_by_row |= any(leaves(e) & BY_ROW for e in parts[:3])
    m.function("ramp(hd, bk)", m.cell("ramp", (), ()), ", ".join(values))


def emit_factors(m: Emitter, name: str, *factors: Expr | None) -> None:
    """What a key multiplies something by.  The mask may hide the key, so indices are checked."""
    stage = m.cell(name, ("j", "seen"), (m.head,))
    there = Guards(((SEEN, True),), checked=True)
    values = [m.value(e, stage, there, precise=True) for e in factors if e is not None]
    if values:
        m.function(f"{name}(x, hd, j, seen)", stage, "(" + "".join(f"{v}, " for v in values) + ")")


def emit_ranges(m: Emitter, ranges: TileRanges) -> None:
    stage = m.cell("bounds", ("i0", "i1"), ())
    parts = (ranges.lo, ranges.hi, ranges.clear_lo, ranges.clear_hi)
    m.function("bounds(x, i0, i1)", stage, ", ".join(m.value(e, stage) for e in parts))
    stage = m.cell("classify", ("i0", "i1", "j0", "j1"), ())
    may, must = ("Boolean(True)" if e is None else m.value(e, stage) for e in (ranges.may, ranges.must))
    m.function("classify(x, i0, i1, j0, j1)", stage, f"{may}, {must if ranges.must is not None else 'Boolean(False)'}")


def emit_lists(m: Emitter, d: Domain) -> None:
    """Where a row's line of bits lies, how many keys a block has, and the list that the line is made from."""
    lines, listing = m.tensors[BITMAP], m.tensors[d.tensor]
    stage = m.cell("line", ("iq",), ())
    index = list(expand(lines, (*line_index(d), Const(0, I32)), m.layout))[:-1]
    m.function("line(x, iq)", stage, m.address(lines, index, stage, Guards()))
    m.function("block_keys(x)", stage := m.cell("block_keys", (), ()), m.value(block_keys(d), stage))
    # read where the indices are in range: else no key of the row exists, or nobody asks for it
    stage, unseen = m.cell("list", ("i", "iq"), ()), Guards(checked=True)
    every, whole = d.index.index(None), tuple(x or Const(0, I32) for x in d.index)
    at = len(list(expand(replace(listing, dims=listing.dims[:every]), whole[:every], m.layout)))
    rest = [a for a in expand(listing, whole, m.layout) if a.k != at]
    ok = " & ".join(f"({c})" for c in m.inside(listing, rest, stage, unseen)) or "Boolean(True)"
    address = m.address(listing, rest, stage, unseen)
    stride, size = (m.param(f"t.{d.tensor}.{what}.{at}", "i32") for what in ("stride", "size"))
    m.function("listed(x, i, iq)", stage, f"{address}, {stride}, cutlass.select_({ok}, {size}, Int32(0))")
