"""The syntax tree of a .attn file, with the place of every node, and a readable picture of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from attncc.diagnostics import Source, Span


@dataclass(frozen=True, eq=False)
class Word:
    """A name where it is written."""

    text: str
    span: Span

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, eq=False)
class Number:
    """`value` is an int for an i32 literal, a float for an f32 one, in range or not."""

    value: int | float
    span: Span
    depth: int = 1


@dataclass(frozen=True, eq=False)
class Boolean:
    value: bool
    span: Span
    depth: int = 1


@dataclass(frozen=True, eq=False)
class Name:
    name: str
    span: Span
    depth: int = 1


@dataclass(frozen=True, eq=False)
class Unary:
    """`op`: "-" or "not"."""

    op: str
    operand: Expr
    span: Span
    depth: int = 1


@dataclass(frozen=True, eq=False)
class Binary:
    """`op`: + - * / // % ** and or."""

    op: str
    left: Expr
    right: Expr
    span: Span
    depth: int = 1


@dataclass(frozen=True, eq=False)
class Compare:
    """A chain `operands[0] ops[0] operands[1] ops[1] …`."""

    ops: tuple[str, ...]
    operands: tuple[Expr, ...]
    span: Span
    depth: int = 1


@dataclass(frozen=True, eq=False)
class Conditional:
    """`then if condition else other`."""

    condition: Expr
    then: Expr
    other: Expr
    span: Span
    depth: int = 1


@dataclass(frozen=True, eq=False)
class Keyword:
    """`name = value` among the arguments of a call."""

    name: Word
    value: Expr

    @property
    def span(self) -> Span:
        return self.name.span


@dataclass(frozen=True, eq=False)
class Call:
    function: Word
    args: tuple[Expr | Keyword, ...]
    span: Span
    depth: int = 1


@dataclass(frozen=True, eq=False)
class Every:
    """The `:` of `blocks(sel[iq, g, :], …)`."""

    span: Span
    depth: int = 1


@dataclass(frozen=True, eq=False)
class Index:
    base: Word
    items: tuple[Expr | Every, ...]
    span: Span
    depth: int = 1


Expr = Number | Boolean | Name | Unary | Binary | Compare | Conditional | Call | Index


@dataclass(frozen=True, eq=False)
class Scalar:
    """`name: const f32 = default`; `words` are all the names after the colon."""

    name: Word
    words: tuple[Word, ...]
    default: Expr | None


@dataclass(frozen=True, eq=False)
class Docstring:
    text: str
    span: Span


@dataclass(frozen=True, eq=False)
class Tensor:
    """`tensor name[dims]: dtype [grad] [sorted]`; `words` are all the names after the colon."""

    name: Word
    dims: tuple[Word | Number, ...]
    words: tuple[Word, ...]


@dataclass(frozen=True, eq=False)
class Let:
    name: Word
    value: Expr


@dataclass(frozen=True, eq=False)
class Def:
    name: Word
    params: tuple[Word, ...]
    value: Expr


@dataclass(frozen=True, eq=False)
class Emit:
    name: Word
    index: tuple[Word, ...]
    value: Expr


@dataclass(frozen=True, eq=False)
class Slot:
    name: Word
    value: Expr


@dataclass(frozen=True, eq=False)
class Broken:
    """A statement that did not parse (its error is reported): `name` is what it would have declared."""

    name: Word | None


Statement = Docstring | Tensor | Let | Def | Emit | Slot | Broken


@dataclass(frozen=True, eq=False)
class Attention:
    """One variant.  `broken`: the header did not parse, so its parameters are unknown, and perhaps its name."""

    name: Word | None
    scalars: tuple[Scalar, ...]
    body: tuple[Statement, ...]
    span: Span
    broken: bool = False


@dataclass(frozen=True, eq=False)
class File:
    variants: tuple[Attention, ...]
    source: Source


def dump(file: File) -> str:
    """A readable tree of the file, one node a line, for `attncc show --stage ast`."""
    return "\n".join(line for v in file.variants for line in _attention(v)) + "\n"


def _attention(v: Attention) -> Iterator[str]:
    yield f"attention {v.name}  @{v.span.line}"
    for p in v.scalars:
        yield f"  scalar {p.name}: {' '.join(map(str, p.words))}"
        if p.default is not None:
            yield from _tree(p.default, 2, "default ")
    for s in v.body:
        yield from _statement(s)


def _statement(s: Statement) -> Iterator[str]:
    if isinstance(s, Docstring):
        yield f"  docstring {s.text!r}"
    elif isinstance(s, Tensor):
        dims = ", ".join(str(x.value) if isinstance(x, Number) else x.text for x in s.dims)
        yield f"  tensor {s.name}[{dims}]: {' '.join(map(str, s.words))}  @{s.name.span.line}"
    elif isinstance(s, Broken):
        yield f"  broken {s.name or ''}".rstrip()
    else:
        head = {
            Let: lambda s: f"let {s.name}",
            Def: lambda s: f"def {s.name}({', '.join(map(str, s.params))})",
            Emit: lambda s: f"emit {s.name}[{', '.join(map(str, s.index))}]",
            Slot: lambda s: f"slot {s.name}",
        }[type(s)](s)
        yield f"  {head}  @{s.name.span.line}"
        yield from _tree(s.value, 2)


def _tree(e: Expr | Every | Keyword, level: int, label: str = "") -> Iterator[str]:
    kids: tuple = ()
    if isinstance(e, Keyword):
        yield from _tree(e.value, level, f"{e.name} = ")
        return
    if isinstance(e, Number | Boolean):
        text = repr(e.value).lower()
    elif isinstance(e, Name):
        text = e.name
    elif isinstance(e, Unary):
        text, kids = e.op, (e.operand,)
    elif isinstance(e, Binary):
        text, kids = e.op, (e.left, e.right)
    elif isinstance(e, Compare):
        text, kids = "compare " + " ".join(e.ops), e.operands
    elif isinstance(e, Conditional):
        text, kids = "if", (e.condition, e.then, e.other)
    elif isinstance(e, Call):
        text, kids = f"call {e.function}", e.args
    elif isinstance(e, Index):
        text, kids = f"index {e.base}", e.items
    else:
        text = ":"
    yield "  " * level + label + text
    for k in kids:
        yield from _tree(k, level + 1)
