"""What a variant declares: its scalars, tensors, lets, defs, outputs and slots, each name once."""

from __future__ import annotations

import keyword
import math
from dataclasses import dataclass, field

from attncc.frontend import ast, names
from attncc.frontend.expressions import Typer
from attncc.frontend.scope import Axis, Function, Let, Output, Scope, Unknown
from attncc.ir.nodes import SPACES, ScalarParam, TensorParam, Type

_I32_MAX = 2**31 - 1


@dataclass
class Declarations:
    """Fills `scope` from the statements of a variant."""

    scope: Scope
    slots: dict[str, ast.Slot] = field(default_factory=dict)
    doc: str | None = None
    _lines: dict[str, int] = field(default_factory=dict)  # name -> line of its declaration

    def read(self, syntax: ast.Attention) -> None:
        """Take in the header and the body, reporting what is wrong with them."""
        for s in syntax.scalars:
            self._scalar(s)
        for n, s in enumerate(syntax.body):
            if isinstance(s, ast.Docstring):
                self._docstring(s, first=n == 0)
            elif isinstance(s, ast.Slot):
                self._slot(s)
            elif isinstance(s, ast.Tensor):
                self._tensor(s)
            elif isinstance(s, ast.Broken):
                if s.name is not None:
                    self.scope.bindings.setdefault(s.name.text, Unknown())
            else:
                self._named(s)

    def _claim(self, word: ast.Word, what: str) -> bool:
        """Is the name free?"""
        name, scope = word.text, self.scope
        if name in names.RESERVED:
            scope.error(f"'{name}' is taken: it is {names.RESERVED[name]}", word.span, f"give the {what} another name")
            return False
        if name in self._lines:
            scope.error(f"'{name}' is declared twice", word.span, f"the first stands at line {self._lines[name]}")
            return False
        self._lines[name] = word.span.line
        return True

    def _can_be_passed(self, word: ast.Word, *taken: str) -> None:
        """A parameter is a keyword argument of the kernel in Python."""
        hint = "give the parameter another name"
        if word.text in taken:
            self.scope.error(f"'{word}' is an argument of the kernel call itself", word.span, hint)
        elif keyword.iskeyword(word.text):
            self.scope.error(f"'{word}' is a word of Python: no call could name it", word.span, hint)

    def _docstring(self, s: ast.Docstring, first: bool) -> None:
        if first:
            self.doc = s.text
        else:
            self.scope.error("a string stands first in the body, as its docstring", s.span, "a comment begins with `#`")

    def _slot(self, s: ast.Slot) -> None:
        name, at = s.name.text, s.name.span
        if name in self.slots:
            self.scope.error(f"a second `{name}`", at, f"the first stands at line {self.slots[name].name.span.line}")
        elif name in names.SLOTS:
            self.slots[name] = s
        else:
            hint = names.suggest(name, names.SLOTS) or f"a value is named by `let {name} = …`"
            self.scope.error(f"unknown slot '{name}'", at, hint)
            self.scope.bindings.setdefault(name, Unknown())

    def _named(self, s: ast.Let | ast.Def | ast.Emit) -> None:
        what = {ast.Let: "value", ast.Def: "function", ast.Emit: "output"}[type(s)]
        if self._claim(s.name, what):
            binding = Let(s) if isinstance(s, ast.Let) else Function(s) if isinstance(s, ast.Def) else Output()
            self.scope.bindings[s.name.text] = binding
        if isinstance(s, ast.Def):
            seen: set[str] = set()
            for p in s.params:
                if p.text in names.RESERVED:
                    message = f"'{p}' is taken: it is {names.RESERVED[p.text]}"
                    self.scope.error(message, p.span, "give the argument another name")
                elif p.text in seen:
                    self.scope.error(f"'{p}' is declared twice", p.span, "give each argument its own name")
                seen.add(p.text)

    # -- parameters

    def _scalar(self, s: ast.Scalar) -> None:
        free = self._claim(s.name, "parameter")
        self._can_be_passed(s.name, *names.CALL_ARGUMENTS, *names.PLAN_ARGUMENTS)
        const = s.words[0].text == "const"
        type_ = self._scalar_type(s.words, const)
        default = None if type_ is None or s.default is None else self._default(s.default, type_)
        if free:
            good = type_ is not None
            found = ScalarParam(s.name.text, type_, default, const, s.name.span) if good else Unknown()
            self.scope.bindings[s.name.text] = found

    def _scalar_type(self, words: tuple[ast.Word, ...], const: bool) -> Type | None:
        """`f32` or `const f32`."""
        kinds = words[const:]
        if len(kinds) == 1 and kinds[0].text in names.SCALAR_TYPES:
            return Type(kinds[0].text)
        wrong = next((w for w in kinds if w.text not in names.SCALAR_TYPES), (*kinds, *words)[-1])
        hint = "a scalar is `i32`, `f32` or `bool`, with `const` before it where it specialises the kernel"
        if not kinds:
            self.scope.error("the type is missing", wrong.span, hint)
        elif wrong.text in names.SCALAR_TYPES:
            self.scope.error("a scalar has one type", wrong.span, hint)
        elif wrong.text == "const":
            self.scope.error("`const` stands before the type, once", wrong.span, "write `const f32`")
        else:
            near = names.suggest(wrong.text, (*names.SCALAR_TYPES, "const"))
            self.scope.error(f"a scalar cannot be '{wrong}'", wrong.span, near or hint)
        return None

    def _default(self, syntax: ast.Expr, type_: Type) -> int | float | bool | None:
        scope = self.scope
        lone = Typer(Scope(scope.report, complete=False))
        before = scope.errors
        found = lone.typed(syntax, None)
        value = None if found is None else lone.build.value(found)
        if found is None or value is None:
            if scope.errors == before:
                scope.error("a default is a constant", syntax.span, "write a value, such as 50.0 or -1")
            return None
        if type_.elem == "f32" and found.type.elem == "i32":
            return float(value)
        if found.type != type_:
            hint = {"i32": _whole(value), "f32": "write a number", "bool": "write `true` or `false`"}
            scope.error(f"a default of {found.type} for a parameter of {type_}", syntax.span, hint[type_.elem])
            return None
        return value

    def _tensor(self, s: ast.Tensor) -> None:
        scope = self.scope
        free = self._claim(s.name, "tensor")
        if not free:
            scope.silent.add(s.name.text)
        self._can_be_passed(s.name, *names.CALL_ARGUMENTS)
        before = scope.errors
        dims = tuple(self._dim(d, s, n) for n, d in enumerate(s.dims))
        dtype, *marks = s.words
        if dtype.text not in names.TENSOR_DTYPES:
            hint = f"the dtypes are {names.listed(names.TENSOR_DTYPES)}"
            near = names.suggest(dtype.text, names.TENSOR_DTYPES)
            scope.error(f"a tensor cannot hold '{dtype}'", dtype.span, near or hint)
        self._marks(dtype.text, marks)
        if free:
            said = {m.text for m in marks}
            found = TensorParam(s.name.text, dims, dtype.text, "grad" in said, "sorted" in said, s.name.span)
            scope.bindings[s.name.text] = found if scope.errors == before else Unknown()

    def _dim(self, d: ast.Word | ast.Number, s: ast.Tensor, n: int) -> str | int:
        """An index space, the length of a table, or the fresh name of one of any length."""
        scope = self.scope
        if isinstance(d, ast.Number):
            if not isinstance(d.value, int) or not 1 <= d.value <= _I32_MAX:
                scope.error("the length of a table is an integer of at least 1", d.span, "a name stands for any length")
            return int(d.value)
        if d.text in SPACES:
            earlier = {x.text for x in s.dims[:n] if isinstance(x, ast.Word)}
            beside_requests(scope, d, earlier)
        elif self._claim_axis(d):
            scope.bindings[d.text] = Axis(s.name.text)
        return d.text

    def _claim_axis(self, d: ast.Word) -> bool:
        if d.text in ("i", "l", "q", "k", "v", "o", "s"):
            hint = {"i": "positions are indexed by `pos`"}.get(d.text, f"the index spaces are {names.listed(SPACES)}")
            self.scope.error(f"'{d}' is no index space", d.span, hint)
            return False
        return self._claim(d, "index")

    def _marks(self, dtype: str, marks: list[ast.Word]) -> None:
        seen: set[str] = set()
        for m in marks:
            if m.text not in ("grad", "sorted"):
                hint = names.suggest(m.text, ("grad", "sorted")) or "after the dtype may stand `grad` and `sorted`"
                self.scope.error(f"a tensor cannot be '{m}'", m.span, hint)
            elif m.text in seen:
                self.scope.error(f"a second `{m}`", m.span, "once is enough")
            elif m.text == "grad" and dtype in names.TENSOR_DTYPES and dtype not in names.FLOAT_DTYPES:
                hint = f"gradients are of {names.listed(names.FLOAT_DTYPES)}"
                self.scope.error(f"a tensor of {dtype} has no gradient", m.span, hint)
            seen.add(m.text)


def _whole(value: int | float | bool) -> str:
    """What to write for `value` where an i32 is meant."""
    if isinstance(value, bool):
        return f"write {int(value)}, or make the parameter a bool"
    if abs(value) > _I32_MAX:
        return f"write an integer of at most {_I32_MAX}"
    low = math.floor(value)
    return f"write it without a point: {low}" if value == low else f"did you mean {low} or {low + 1}?"


def beside_requests(scope: Scope, d: ast.Word, earlier: set[str]) -> bool:
    """Rows and keys tell requests apart already: is there no `b` beside them?"""
    rows = earlier & {"iq", "j"} if d.text == "b" else {d.text} if d.text in ("iq", "j") and "b" in earlier else set()
    if rows:
        row = min(rows)
        hint = f"leave `b` out: `{row}` tells requests apart already" + ("; or say `b, pos`" if row == "j" else "")
        scope.error(f"`b` beside `{row}`", d.span, hint)
    return not rows
