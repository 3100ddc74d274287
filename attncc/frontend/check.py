"""A syntax tree to variants: declarations, slots, and what must hold between them.  All errors are collected."""

from __future__ import annotations

import keyword

from attncc.diagnostics import AttnError, Diagnostic, Source, Span
from attncc.frontend import ast, guards, names
from attncc.frontend.expressions import Names, Output, Typer, Unknown, Value
from attncc.frontend.parse import parse_all
from attncc.ir.nodes import (
    SLOT_DEFAULTS,
    SPACES,
    Domain,
    Emit,
    Expr,
    Leaf,
    ScalarParam,
    Scan,
    TensorParam,
    Type,
    Variant,
    walk,
)


def load(source: Source) -> tuple[Variant, ...]:
    """The variants of a file, in its order.  Raises AttnError with all that is wrong with it."""
    file, errors = parse_all(source)
    variants = []
    lines: dict[str, int] = {}
    for attention in file.variants:
        checked = _Variant(attention, source, errors)
        name, at = attention.name.text, attention.name.span
        if name in lines and name != "?":
            checked.error(f"a second variant '{name}'", at, f"the first stands at line {lines[name]}")
        lines.setdefault(name, at.line)
        variants.append(checked.variant())
    if errors:
        raise AttnError(errors)
    return tuple(v for v in variants if v is not None)


class _Variant:
    """Checks one variant."""

    def __init__(self, syntax: ast.Attention, source: Source, errors: list[Diagnostic]):
        self.syntax, self.source, self.errors = syntax, source, errors
        self.names = Names(complete=not syntax.broken)
        self.lines: dict[str, int] = {}  # name -> line of its declaration
        self.slots: dict[str, ast.Slot] = {}
        self.doc: str | None = None
        self.typer = Typer(self.names, self.error)

    def error(self, message: str, at: Span, hint: str | None = None) -> None:
        self.errors.append(Diagnostic(message, self.source, at, hint))

    # -- declarations

    def variant(self) -> Variant | None:
        """The whole variant; None where anything in it is wrong."""
        before = len(self.errors)
        for s in self.syntax.scalars:
            self._scalar(s)
        for n, s in enumerate(self.syntax.body):
            self._declare(s, first=n == 0)
        for s in self.syntax.body:
            if isinstance(s, ast.Let) and isinstance(self.names.bindings.get(s.name.text), Value):
                self._let(s)
            elif isinstance(s, ast.Def) and isinstance(self.names.bindings.get(s.name.text), Value):
                self.typer.check_def(s.name.text)
        slots = {slot: self._value_slot(slot) for slot in names.VALUE_SLOTS}
        scan, domain, emits = self._scan(), self._domain(), self._emits()
        if scan is not None and scan.kind == "none":
            self._refuse_lse(slots["epilogue"], *(x.value for x in emits if x is not None))
        for slot in ("f_q", "epilogue"):
            found = slots[slot]
            if found is not None:
                for load in guards.negative_rows(found):
                    hint = f"guard it, `{load.tensor}[…] if i >= 0 else …`, or clamp the index, `max(i, 0)`"
                    self.error(f"`i` is negative in `{slot}` where qo_len > kv_len", load.span, hint)
        if len(self.errors) > before or self.syntax.broken:
            return None
        bindings = self.names.bindings.values()
        return Variant(
            self.syntax.name.text,
            self.doc,
            tuple(b for b in bindings if isinstance(b, ScalarParam)),
            tuple(b for b in bindings if isinstance(b, TensorParam)),
            **slots,  # type: ignore[arg-type]
            scan=scan,  # type: ignore[arg-type]
            domain=domain,
            emits=tuple(emits),  # type: ignore[arg-type]
            source=self.source,
            spans=tuple((name, s.name.span) for name, s in self.slots.items()),
        )

    def _claim(self, word: ast.Word, what: str) -> bool:
        """Is the name free?"""
        name = word.text
        if name in names.RESERVED:
            self.error(
                f"'{name}' is {names.RESERVED[name]} of the language", word.span, f"give the {what} another name"
            )
            return False
        if name in self.lines:
            self.error(f"'{name}' is declared twice", word.span, f"the first stands at line {self.lines[name]}")
            return False
        self.lines[name] = word.span.line
        return True

    def _callable(self, word: ast.Word, *taken: str) -> None:
        """A parameter is passed by name: it must be possible to write that name in a Python call."""
        if word.text in taken:
            self.error(
                f"'{word}' is an argument of the kernel call itself", word.span, "give the parameter another name"
            )
        elif keyword.iskeyword(word.text):
            self.error(
                f"'{word}' is a word of Python: it could not be passed", word.span, "give the parameter another name"
            )

    def _scalar(self, s: ast.Scalar) -> None:
        if not self._claim(s.name, "parameter"):
            self.names.bindings.setdefault(s.name.text, Unknown())
            return
        self._callable(s.name, *names.CALL_ARGUMENTS, *names.PLAN_ARGUMENTS)
        words = list(s.words)
        const = bool(words) and words[0].text == "const"
        kind = words[1:] if const else words
        if len(kind) != 1 or kind[0].text not in names.SCALAR_TYPES:
            wrong = kind[0] if kind and kind[0].text not in names.SCALAR_TYPES else kind[1] if kind[1:] else words[-1]
            hint = names.suggest(wrong.text, (*names.SCALAR_TYPES, "const")) or "a scalar is `i32`, `f32` or `bool`"
            message = f"'{wrong}' is no type of a scalar" if wrong is not words[0] or not const else "a type is missing"
            self.error(message, wrong.span, hint)
            self.names.bindings[s.name.text] = Unknown()
            return
        type_ = Type(kind[0].text)
        default = None if s.default is None else self._default(s.default, type_)
        self.names.bindings[s.name.text] = ScalarParam(s.name.text, type_, default, const, s.name.span)

    def _default(self, syntax: ast.Expr, type_: Type) -> int | float | bool | None:
        alone = Typer(Names(), self.error)
        found = alone.typed(syntax, "size")
        if found is None:
            return None
        value = alone.build.value(found)
        if value is None:
            self.error("this default is not a constant", syntax.span, "write a value, such as 50.0 or -1")
            return None
        if type_.elem == "f32" and found.type.elem == "i32":
            return float(value)
        if found.type != type_:
            self.error(f"a default of {found.type} for a parameter of {type_}", syntax.span, f"write `{type_}` values")
            return None
        return value

    def _declare(self, s: ast.Statement, first: bool) -> None:
        if isinstance(s, ast.Docstring):
            if not first:
                self.error("a string stands first in a body, as its docstring", s.span, "comments begin with `#`")
            self.doc = s.text if first else self.doc
        elif isinstance(s, ast.Slot):
            self._declare_slot(s)
        elif isinstance(s, ast.Broken):
            if s.name is not None:
                self.names.bindings.setdefault(s.name.text, Unknown())
        elif isinstance(s, ast.Tensor):
            free = self._claim(s.name, "tensor")
            binding = self._tensor(s)
            if free:
                self.names.bindings[s.name.text] = binding or Unknown()
        else:
            what = {ast.Let: "value", ast.Def: "function", ast.Emit: "output"}[type(s)]
            if self._claim(s.name, what):
                self.names.bindings[s.name.text] = Output() if isinstance(s, ast.Emit) else Value(s)
            if isinstance(s, ast.Def):
                self._def_params(s)

    def _declare_slot(self, s: ast.Slot) -> None:
        name = s.name.text
        if name not in names.SLOTS:
            if name == "emit":
                self.error("an extra output has a name", s.name.span, "write `emit peak[iq, h] = max(l)`")
                return
            hint = names.suggest(name, names.SLOTS) or f"to name a value, write `let {name} = …`"
            self.error(f"unknown slot '{name}'", s.name.span, hint)
        elif name in self.slots:
            hint = f"the first stands at line {self.slots[name].name.span.line}"
            self.error(f"a second `{name}`", s.name.span, hint)
        else:
            self.slots[name] = s

    def _def_params(self, s: ast.Def) -> None:
        seen: set[str] = set()
        for p in s.params:
            if p.text in names.RESERVED:
                self.error(
                    f"'{p}' is {names.RESERVED[p.text]} of the language", p.span, "give the argument another name"
                )
            elif p.text in seen:
                self.error(f"'{p}' is declared twice", p.span, "give each argument its own name")
            seen.add(p.text)

    def _tensor(self, s: ast.Tensor) -> TensorParam | None:
        before = len(self.errors)
        self._callable(s.name, *names.CALL_ARGUMENTS)
        dims: list[str | int] = []
        for d in s.dims:
            if isinstance(d, ast.Number):
                if not isinstance(d.value, int) or not 0 < d.value < 2**31:
                    self.error("the length of a table is an integer of at least 1", d.span)
                else:
                    dims.append(d.value)
            elif d.text in SPACES:
                if d.text == "b" and "iq" in dims or d.text == "iq" and "b" in dims:
                    hint = "leave `b` out: a row of `iq` belongs to one request already"
                    self.error("`b` beside `iq`", d.span, hint)
                dims.append(d.text)
            else:
                if self._claim(d, "index"):
                    self.names.bindings[d.text] = Unknown()
                dims.append(d.text)
        dtype, *marks = s.words
        if dtype.text not in names.TENSOR_DTYPES:
            hint = names.suggest(dtype.text, names.TENSOR_DTYPES) or f"it is {names.listed(names.TENSOR_DTYPES, 'or')}"
            self.error(f"'{dtype}' is no dtype of a tensor", dtype.span, hint)
        self._marks(dtype, marks)
        if len(self.errors) > before:
            return None
        found = {m.text for m in marks}
        return TensorParam(s.name.text, tuple(dims), dtype.text, "grad" in found, "sorted" in found, s.name.span)

    def _marks(self, dtype: ast.Word, marks: list[ast.Word]) -> None:
        seen: set[str] = set()
        for m in marks:
            if m.text not in ("grad", "sorted"):
                hint = names.suggest(m.text, ("grad", "sorted")) or "after the dtype stand `grad` and `sorted`"
                self.error(f"'{m}' says nothing about a tensor", m.span, hint)
            elif m.text in seen:
                self.error(f"`{m}` twice", m.span)
            elif m.text == "grad" and dtype.text in names.TENSOR_DTYPES and dtype.text not in names.FLOAT_DTYPES:
                self.error(f"a tensor of {dtype} has no gradient", m.span, "gradients are of f32, bf16 and f16")
            seen.add(m.text)

    # -- slots

    def _let(self, s: ast.Let) -> None:
        found = self.typer.value(s.name.text)
        if found is None:
            return
        leaves = [n for n in self.typer.build.leaves(found) if n in names.WHERE]
        if leaves and not any(all(slot in names.WHERE[n] for n in leaves) for slot in names.SCOPES):
            self.error(f"no slot can use '{s.name}': {names.listed(leaves)} are never in scope together", s.name.span)

    def _value_slot(self, slot: str) -> Expr | None:
        if slot not in self.slots:
            return SLOT_DEFAULTS[slot]
        syntax = self.slots[slot].value
        found = self.typer.typed(syntax, slot)
        if found is None:
            return None
        space = names.VECTORS.get(slot)
        if slot == "mask":
            if found.type.elem != "bool":
                self.error(f"`mask` is a bool, not {found.type}", syntax.span, "compare: `j <= i`")
                return None
        elif not self.typer.is_number(found, syntax, f"`{slot}`"):
            return None
        if found.type.space != space:
            value = {"f_q": "q", "f_k": "k", "f_v": "v", "epilogue": "o"}.get(slot)
            if space is None:
                self.error(f"`{slot}` is one number, not {found.type}", syntax.span, "`sum` makes one of a vector")
            else:
                self.error(
                    f"`{slot}` is a vector over `{space}`, not {found.type}", syntax.span, f"write `{value} * …`"
                )
            return None
        return found if slot == "mask" else self.typer.build.f32(found)

    def _scan(self) -> Scan | None:
        if "scan" not in self.slots:
            return Scan("softmax")
        e = self.slots["scan"].value
        if isinstance(e, ast.Name) and e.name == "none":
            return Scan("none")
        if isinstance(e, ast.Call) and e.function.text == "softmax":
            if e.args and not isinstance(e.args[0], ast.Keyword):
                self.error("the sink is given by name", e.args[0].span, "write `softmax(sink = …)`")
                return None
            bound = self.typer.bind(e, (), ("sink",))
            if bound is None:
                return None
            sink = self._number(bound["sink"], "sink", "`sink`") if "sink" in bound else None
            return None if sink is None and "sink" in bound else Scan("softmax", sink)
        word = e.name if isinstance(e, ast.Name) else e.function.text if isinstance(e, ast.Call) else ""
        hint = "it is `softmax()`, `softmax(sink = …)` or `none`"
        if word == "softmax":
            hint = "write `softmax()`"
        self.error("unknown scan", e.span, names.suggest(word, ("softmax", "none")) if word not in ("softmax", "none") and
                   names.suggest(word, ("softmax", "none")) else hint)  # fmt: skip
        return None

    def _number(self, syntax: ast.Expr, slot: str, what: str) -> Expr | None:
        found = self.typer.typed(syntax, slot)
        if found is None or not self.typer.is_number(found, syntax, what):
            return None
        if found.type.space is not None:
            self.error(f"{what} is one number, not {found.type}", syntax.span, "`sum` makes one of a vector")
            return None
        return self.typer.build.f32(found)

    def _domain(self) -> Domain | None:
        if "domain" not in self.slots:
            return None
        e = self.slots["domain"].value
        shape = "write `blocks(selected[iq, g, :], size = 64)`"
        if not isinstance(e, ast.Call) or e.function.text != "blocks":
            self.error("unknown domain", e.span, shape)
            return None
        bound = self.typer.bind(e, ("selected", "size"))
        if bound is None:
            return None
        selected, size = self._selected(bound["selected"], shape), self.typer.typed(bound["size"], "size")
        if size is not None:
            value = self.typer.build.value(size)
            if str(size.type) != "i32" or (value is not None and value < 1):
                self.error("the size of a block is an i32 of at least 1", bound["size"].span, "write `size = 64`")
                return None
        if selected is None or size is None:
            return None
        return Domain(*selected, size, e.span)

    def _selected(self, e: ast.Expr, shape: str) -> tuple[str, tuple[Expr | None, ...]] | None:
        if not isinstance(e, ast.Index):
            self.error("the blocks are listed in a tensor", e.span, shape)
            return None
        binding = self.names.bindings.get(e.base.text)
        every = [n for n, x in enumerate(e.items) if isinstance(x, ast.Every)]
        if not isinstance(binding, TensorParam) or len(e.items) != len(binding.dims):
            return self.typer.typed(ast.Index(e.base, tuple(
                ast.Number(0, x.span) if isinstance(x, ast.Every) else x for x in e.items), e.span), "domain") and None  # fmt: skip
        if len(every) != 1:
            self.error("one index is `:`, over the listed blocks", e.span, shape)
            return None
        if binding.dims[every[0]] in SPACES:
            self.error(f"`:` over `{binding.dims[every[0]]}`", e.items[every[0]].span, f"declare `{e.base}[iq, g, n]`")
            return None
        if binding.dtype != "i32":
            self.error(f"blocks are listed as i32, not {binding.dtype}", e.base.span, "-1 fills the list")
            return None
        self.typer.slot = "domain"
        index = [None if isinstance(x, ast.Every) else self.typer.index(x) for x in e.items]
        self.typer.slot = None
        if any(x is None for n, x in enumerate(index) if n != every[0]):
            return None
        return e.base.text, tuple(index)

    # -- extra outputs

    def _emits(self) -> list[Emit | None]:
        return [self._emit(s) for s in self.syntax.body if isinstance(s, ast.Emit)]

    def _emit(self, s: ast.Emit) -> Emit | None:
        before = len(self.errors)
        kept = [w.text for w in s.index]
        allowed = ("b", "h", "g", "iq", "j")
        if not kept:
            self.error(
                "an extra output keeps an index", s.name.span, f"write `emit {s.name}[h] = …`: one number a head"
            )
        for n, w in enumerate(s.index):
            if w.text not in allowed:
                hint = "it is `iq`" if w.text == "i" else f"an output keeps {names.listed(allowed, 'or')}"
                self.error(f"an output cannot keep '{w}'", w.span, hint)
            elif w.text in kept[:n]:
                self.error(f"`{w}` twice", w.span)
            elif {w.text, *kept[:n]} >= {"b", "iq"} and w.text in ("b", "iq"):
                self.error("`b` beside `iq`", w.span, "leave `b` out: a row of `iq` belongs to one request already")
        e = s.value
        reductions = ("max", "min", "sum")
        if not isinstance(e, ast.Call) or e.function.text not in reductions or len(e.args) != 1:
            self.error("an extra output is one `max(x)`, `min(x)` or `sum(x)` over the keys", e.span,
                       f"write `emit {s.name}[…] = max(…)`")  # fmt: skip
            return None
        (arg,) = e.args
        if isinstance(arg, ast.Keyword):
            self.error(f"'{e.function}' has no argument '{arg.name}'", arg.span, f"write {e.function}(x)")
            return None
        value = self._number(arg, "emit", f"`{e.function}`")
        if value is None or len(self.errors) > before:
            return None
        return Emit(s.name.text, tuple(kept), e.function.text, value, s.name.span)

    def _refuse_lse(self, *found: Expr | None) -> None:
        for e in found:
            for node in walk(e) if e is not None else ():
                if isinstance(node, Leaf) and node.name == "lse":
                    self.error("there is no `lse` with `scan = none`", node.span, "leave `scan` out for a softmax")
