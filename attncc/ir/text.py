"""The IR as text, one node a line, and back: what `attncc show --stage ir` prints and goldens hold.

    attention gemma2
      scalar cap: const f32 = 50.0
      f_logits:
        %0 = div s, $cap : f32                  # gemma2.attn:7
        %1 = tanh %0 : f32                      # gemma2.attn:7
        %2 = mul $cap, %1 : f32                 # gemma2.attn:7
        return %2
      mask = true

A slot whose value needs no node stands on one line.  Nodes are numbered by slot; a node used twice stands once.
`$name` is a scalar parameter; a literal with a point or an exponent, `inf` or `nan` is an f32.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from attncc.diagnostics import NOWHERE
from attncc.ir.nodes import (
    BOOL,
    EXPR_SLOTS,
    F32,
    I32,
    LEAVES,
    OPS,
    Const,
    Domain,
    Emit,
    Expr,
    Interner,
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
    objects,
)

COMMENT_COLUMN = 56  # where `# file:line` starts, on lines short enough


def print_variant(v: Variant, *, positions: bool = False) -> str:
    """`v` as text that `parse_variant` reads back to an equal value.  `positions` ends each node's line with
    `# file:line`, where it is known."""
    lines = [f"attention {v.name}"]
    if v.doc is not None:
        lines.append(f"  doc {json.dumps(v.doc)}")
    for p in v.scalars:
        default = "" if p.default is None else f" = {_literal(p.default)}"
        lines.append(f"  scalar {p.name}: {'const ' if p.const else ''}{p.type}{default}")
    for t in v.tensors:
        marks = (" grad" if t.grad else "") + (" sorted" if t.sorted else "")
        lines.append(f"  tensor {t.name}[{', '.join(map(str, t.dims))}]: {t.dtype}{marks}")
    for slot in EXPR_SLOTS:
        lines += _Printer(v, positions).slot(slot, "{}", getattr(v, slot))
    if v.scan.sink is None:
        lines.append("  scan = softmax()" if v.scan.kind == "softmax" else f"  scan = {v.scan.kind}")
    else:
        lines += _Printer(v, positions).slot("scan", f"{v.scan.kind}(sink = {{}})", v.scan.sink)
    if v.domain is not None:
        d = v.domain
        index = ", ".join(":" if x is None else "{}" for x in d.index)
        exprs = (*(x for x in d.index if x is not None), d.size)
        lines += _Printer(v, positions).slot("domain", f"blocks({d.tensor}[{index}], size = {{}})", *exprs)
    for e in v.emits:
        lines += _Printer(v, positions).slot(f"emit {e.name}[{', '.join(e.index)}]", f"{e.reduce}({{}})", e.value)
    return "\n".join(lines) + "\n"


def brief(e: Expr, limit: int = 160) -> str:
    """`e` as one line of nested calls, cut with `…` where it is deep or long: for messages."""

    def go(x: Expr, depth: int) -> str:
        if isinstance(x, Op | Load | Rope) and depth == 0:
            return "…"
        if isinstance(x, Op):
            return f"{x.op}({', '.join(go(a, depth - 1) for a in x.args)})"
        if isinstance(x, Load):
            return f"{x.tensor}[{', '.join(go(a, depth - 1) for a in x.index)}]"
        if isinstance(x, Rope):
            return f"rope({go(x.x, depth - 1)}, {go(x.pos, depth - 1)})"
        return _literal(x.value) if isinstance(x, Const) else x.name

    text = go(e, 6)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _literal(value: float | bool) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value)  # of a float: the shortest text that reads back to it, always with . or e or inf or nan


class _Printer:
    """Prints the nodes of one slot."""

    def __init__(self, v: Variant, positions: bool):
        self.file = v.source.name.rsplit("/", 1)[-1] if positions and v.source else None
        self.names: dict[int, str] = {}

    def slot(self, header: str, result: str, *exprs: Expr) -> Iterator[str]:
        """The lines of a slot: `result` with the operands of `exprs` filled in, after the nodes they need."""
        intern = Interner()
        exprs = tuple(intern(e) for e in exprs)  # kept alive: nodes are told apart by id
        nodes = [line for e in exprs for line in self.nodes(e)]
        result = result.format(*map(self.operand, exprs))
        if not nodes:
            yield f"  {header} = {result}"
        else:
            yield f"  {header}:"
            yield from nodes
            yield f"    return {result}"

    def nodes(self, e: Expr) -> Iterator[str]:
        for x in objects(e):
            if isinstance(x, Op | Load | Rope) and id(x) not in self.names:
                self.names[id(x)] = name = f"%{len(self.names)}"
                line = f"    {name} = {self.body(x)} : {x.type}"
                yield (
                    line
                    if self.file is None or x.span == NOWHERE
                    else (f"{line + '  ':<{COMMENT_COLUMN}}# {self.file}:{x.span.line}")
                )

    def operand(self, x: Expr) -> str:
        if isinstance(x, Const):
            return _literal(x.value)
        if isinstance(x, Leaf):
            return x.name
        return f"${x.name}" if isinstance(x, Param) else self.names[id(x)]

    def body(self, x: Op | Load | Rope) -> str:
        if isinstance(x, Op):
            return f"{x.op} {', '.join(map(self.operand, x.args))}"
        if isinstance(x, Load):
            return f"load {x.tensor}[{', '.join(map(self.operand, x.index))}]"
        parts = [f"x={self.operand(x.x)}", f"pos={self.operand(x.pos)}", f"theta={self.operand(x.theta)}"]
        parts.append(f"dims={'all' if x.dims is None else x.dims}")
        if x.scaling:
            name, *args = x.scaling
            inside = ", ".join("none" if a is None or isinstance(a, str) else self.operand(a) for a in args)
            parts.append(f"scaling={name}({inside})")
        parts += [f"{key}={table}" for key, table in (("cos", x.cos), ("sin", x.sin)) if table is not None]
        return f"rope {x.style} {' '.join(parts)}"


def parse_variant(text: str) -> Variant:
    """The variant that `print_variant` printed.  ValueError naming the line where the text is not of that form."""
    parser = _Parser()
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line.startswith("doc "):
            line = line.split("#")[0].rstrip()  # no other line holds text of the user's
        if line:
            try:
                parser.line(line)
            except (KeyError, IndexError, TypeError, ValueError) as e:
                raise ValueError(f"line {number}: {e}: {line}") from None
    try:
        return parser.variant()
    except ValueError as e:
        raise ValueError(f"line {len(text.splitlines())}: {e}") from None


def _match(pattern: str, text: str, what: str) -> tuple[str, ...]:
    found = re.fullmatch(pattern, text)
    if found is None:
        raise ValueError(f"expected {what}")
    return found.groups()


def _type(text: str) -> Type:
    elem, space = _match(r"(i32|f32|bool)(?:\[([de])\])?", text, "a type")
    return Type(elem, space)


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")] if text.strip() else []


class _Parser:
    """Reads line by line; `fields` gathers what Variant is made of."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.doc: str | None = None
        self.scalars: list[ScalarParam] = []
        self.tensors: list[TensorParam] = []
        self.emits: list[Emit] = []
        self.fields: dict[str, Any] = {}
        self.open: str | None = None  # the slot whose nodes are being read
        self.nodes: dict[str, Expr] = {}

    def line(self, line: str) -> None:
        word = line.split(None, 1)[0]
        if self.open is not None:
            if word == "return":
                self.result(self.open, line.removeprefix("return").strip())
                self.open, self.nodes = None, {}
            else:
                self.node(line)
        elif self.name is None:
            (self.name,) = _match(r"attention (\w+)", line, "`attention NAME`")
        elif word in ("doc", "scalar", "tensor"):
            getattr(self, f"declare_{word}")(line)
        elif line.endswith(":"):
            self.open = line[:-1]
        else:
            slot, result = _match(r"([^=]+?) = (.+)", line, "a declaration or `slot = value`")
            self.result(slot, result)

    def declare_doc(self, line: str) -> None:
        self.doc = json.loads(line.removeprefix("doc"))

    def declare_scalar(self, line: str) -> None:
        pattern = r"scalar (\w+): (const )?(i32|f32|bool)(?: = (\S+))?"
        name, const, elem, default = _match(pattern, line, "`scalar NAME: [const ]TYPE[ = VALUE]`")
        value = None if default is None else self.literal(default).value
        self.scalars.append(ScalarParam(name, Type(elem), value, const is not None))

    def declare_tensor(self, line: str) -> None:
        pattern = r"tensor (\w+)\[([^\]]*)\]: (\w+)( grad)?( sorted)?"
        name, dims, dtype, grad, is_sorted = _match(pattern, line, "`tensor NAME[DIMS]: DTYPE[ grad][ sorted]`")
        sizes = tuple(int(d) if d.isdecimal() else d for d in _split(dims))
        self.tensors.append(TensorParam(name, sizes, dtype, grad is not None, is_sorted is not None))

    def literal(self, text: str) -> Const:
        if text in ("true", "false"):
            return Const(text == "true", BOOL)
        return Const(int(text), I32) if re.fullmatch(r"-?\d+", text) else Const(float(text), F32)

    def operand(self, text: str) -> Expr:
        if text.startswith("%"):
            if text not in self.nodes:
                raise ValueError(f"no node {text} yet")
            return self.nodes[text]
        if text.startswith("$"):
            for p in self.scalars:
                if p.name == text[1:]:
                    return Param(p.name, p.type)
            raise ValueError(f"no scalar {text[1:]!r} declared")
        return Leaf(text) if text in LEAVES else self.literal(text)

    def operands(self, text: str) -> tuple[Expr, ...]:
        return tuple(map(self.operand, _split(text)))

    def node(self, line: str) -> None:
        name, op, rest, type_text = _match(r"(%\d+) = (\w+) (.*) : (\S+)", line, "`%N = OP OPERANDS : TYPE`")
        if name in self.nodes:
            raise ValueError(f"{name} is given twice")
        type_ = _type(type_text)
        if op == "load":
            tensor, index = _match(r"(\w+)\[(.*)\]", rest, "`load TENSOR[INDEX]`")
            self.nodes[name] = Load(tensor, self.operands(index), type_)
        elif op == "rope":
            self.nodes[name] = rope = self.rope(rest)
            if rope.type != type_:
                raise ValueError(f"rope has the type of x, {rope.type}")
        elif op in OPS:
            self.nodes[name] = Op(op, self.operands(rest), type_)
        else:
            raise ValueError(f"unknown op {op!r}")

    def rope(self, text: str) -> Rope:
        pattern = r"(\w+) x=(\S+) pos=(\S+) theta=(\S+) dims=(\w+)(?: scaling=(\w+)\((.*?)\))?"
        pattern += r"(?: cos=(\w+))?(?: sin=(\w+))?"
        style, x, pos, theta, dims, scaling, args, cos, sin = _match(pattern, text, "`rope STYLE x= pos= theta= dims=`")
        values = () if scaling is None else (scaling, *(None if a == "none" else self.operand(a) for a in _split(args)))
        x, pos, theta = map(self.operand, (x, pos, theta))
        return Rope(x, pos, theta, None if dims == "all" else int(dims), style, values, cos, sin)

    def result(self, slot: str, text: str) -> None:
        if slot in self.fields:
            raise ValueError(f"{slot} is given twice")
        if slot in EXPR_SLOTS:
            self.fields[slot] = self.operand(text)
        elif slot == "scan":
            self.fields[slot] = self.scan(text)
        elif slot == "domain":
            tensor, index, size = _match(r"blocks\((\w+)\[(.*)\], size = (\S+)\)", text, "`blocks(T[…], size = …)`")
            kept = tuple(None if x == ":" else self.operand(x) for x in _split(index))
            self.fields[slot] = Domain(tensor, kept, self.operand(size))
        else:
            name, index = _match(r"emit (\w+)\[(.*)\]", slot, "a slot")
            reduce, value = _match(r"(max|min|sum)\((.*)\)", text, "`max(…)`, `min(…)` or `sum(…)`")
            self.emits.append(Emit(name, tuple(_split(index)), reduce, self.operand(value)))

    def scan(self, text: str) -> Scan:
        if text in ("none", "softmax()"):
            return Scan(text.removesuffix("()"))
        (sink,) = _match(r"softmax\(sink = (\S+)\)", text, "`softmax()`, `softmax(sink = …)` or `none`")
        return Scan("softmax", self.operand(sink))

    def variant(self) -> Variant:
        missing = [slot for slot in (*EXPR_SLOTS, "scan") if slot not in self.fields]
        if self.name is None or self.open is not None or missing:
            what = "`attention NAME`" if self.name is None else self.open and f"`return` of {self.open}"
            raise ValueError(f"missing {what or ', '.join(missing)}")
        slots = {slot: self.fields[slot] for slot in (*EXPR_SLOTS, "scan")}
        v = Variant(self.name, self.doc, tuple(self.scalars), tuple(self.tensors), emits=tuple(self.emits), **slots)
        return replace(v, domain=self.fields.get("domain"))
