"""A syntax tree to variants: every slot, and what must hold between them.  All errors are collected."""

from __future__ import annotations

from attncc.diagnostics import AttnError, Diagnostic, Source, Span
from attncc.frontend import ast, guards, names
from attncc.frontend.declare import Declarations, beside_requests
from attncc.frontend.expressions import Typer
from attncc.frontend.parse import parse_all
from attncc.frontend.scope import Function, Let, Scope
from attncc.ir.nodes import (
    I32,
    SLOT_DEFAULTS,
    SPACES,
    Domain,
    Emit,
    Expr,
    Leaf,
    Load,
    ScalarParam,
    Scan,
    TensorParam,
    Variant,
    leaves,
    objects,
)
from attncc.ir.verify import verify

_BLOCKS = "write `blocks(selected[iq, g, :], size = 64)`"
_KEPT = ("b", "h", "g", "iq", "j")  # what an emit may keep


def load(source: Source) -> tuple[Variant, ...]:
    """The variants of a file, in its order.  Raises AttnError with all that is wrong with it."""
    file, errors = parse_all(source)
    variants = [_Check(attention, source, errors).variant() for attention in file.variants]
    lines: dict[str, int] = {}
    for name in (a.name for a in file.variants if a.name is not None):
        if name.text in lines:
            hint = f"the first stands at line {lines[name.text]}"
            errors.append(Diagnostic(f"a second variant '{name}'", source, name.span, hint))
        lines.setdefault(name.text, name.span.line)
    if errors:
        raise AttnError(errors)
    good = tuple(v for v in variants if v is not None)
    for v in good:
        verify(v)
    return good


class _Check:
    """Checks and lowers one variant."""

    def __init__(self, syntax: ast.Attention, source: Source, errors: list[Diagnostic]):
        self.syntax, self.source, self.errors = syntax, source, errors
        self.scope = Scope(self._report, complete=not syntax.broken)
        self.typer = Typer(self.scope)
        self.declared = Declarations(self.scope)

    def _report(self, message: str, at: Span, hint: str | None) -> None:
        self.errors.append(Diagnostic(message, self.source, at, hint))

    def variant(self) -> Variant | None:
        """The whole variant; None where anything in it is wrong."""
        self.declared.read(self.syntax)
        self._shared()
        slots = {slot: self._slot(slot) for slot in names.VALUE_SLOTS}
        scan, domain, emits = self._scan(), self._domain(), self._emits()
        self._row_guards(slots)
        self._constant_indices([*slots.values(), scan and scan.sink, *(x and x.value for x in emits)], domain)
        if scan is not None and scan.kind == "none":
            self._refuse_lse([slots["epilogue"], *(x and x.value for x in emits)])
        if self.scope.errors or self.syntax.broken or self.syntax.name is None:
            return None
        bindings = self.scope.bindings.values()
        return Variant(
            self.syntax.name.text,
            self.declared.doc,
            tuple(b for b in bindings if isinstance(b, ScalarParam)),
            tuple(b for b in bindings if isinstance(b, TensorParam)),
            **slots,  # type: ignore[arg-type]
            scan=scan,  # type: ignore[arg-type]
            domain=domain,
            emits=tuple(emits),  # type: ignore[arg-type]
            source=self.source,
            spans=tuple((name, s.name.span) for name, s in self.declared.slots.items()),
        )

    def _shared(self) -> None:
        """Lets and defs, used or not."""
        for name in (*self.scope.of(Let), *self.scope.of(Function)):
            binding = self.scope.bindings[name]
            if isinstance(binding, Function):
                self.typer.check_def(name)
            elif isinstance(binding, Let) and (found := self.typer.let(name)) is not None:
                leaves = [n for n in self.typer.build.leaves(found) if n in names.WHERE]
                if not any(all(slot in names.WHERE[n] for n in leaves) for slot in names.SCOPES):
                    message = f"{names.listed(leaves)} are nowhere in scope together"
                    self.scope.error(message, binding.syntax.name.span, f"no slot can use '{name}'")

    # -- slots

    def _slot(self, slot: str) -> Expr | None:
        """The expression of one of `names.VALUE_SLOTS`."""
        if slot not in self.declared.slots:
            return SLOT_DEFAULTS[slot]
        syntax = self.declared.slots[slot].value
        if slot != "mask" and slot not in names.VECTORS:
            return self._number(syntax, slot, f"`{slot}`")
        read = self._mask if slot == "mask" else lambda e: self._vector(e, slot)
        return self.typer.typed(syntax, slot, read)

    def _mask(self, syntax: ast.Expr) -> Expr | None:
        found = self.typer.expr(syntax)
        return found if found is not None and self.typer.is_bool(found, syntax, "`mask`") else None

    def _vector(self, syntax: ast.Expr, slot: str) -> Expr | None:
        found = self.typer.expr(syntax)
        if found is None or not self.typer.is_number(found, syntax, f"`{slot}`"):
            return None
        space = names.VECTORS[slot]
        if found.type.space != space:
            given = {"f_q": "q", "f_k": "k", "f_v": "v", "epilogue": "o"}[slot]
            message = f"`{slot}` is a vector over `{space}`, not {found.type}"
            self.scope.error(message, syntax.span, f"write `{given} * …`")
            return None
        return self.typer.build.f32(found)

    def _number(self, syntax: ast.Expr, slot: str, what: str) -> Expr | None:
        """One number, read in the scope of `slot`."""
        return self.typer.typed(syntax, slot, lambda e: self.typer.number(e, what))

    def _scan(self) -> Scan | None:
        if "scan" not in self.declared.slots:
            return Scan("softmax")
        e = self.declared.slots["scan"].value
        word = e.name if isinstance(e, ast.Name) else e.function.text if isinstance(e, ast.Call) else ""
        if isinstance(e, ast.Name) and word == "none":
            return Scan("none")
        if not isinstance(e, ast.Call) or word != "softmax":
            near = names.suggest(word, ("softmax", "none"))
            near = {"softmax": "write `softmax()`", "none": "write `none`"}.get(word, near)
            hint = near or "it is `softmax()`, `softmax(sink = …)` or `none`"
            self.scope.error("unknown scan", e.span, hint)
            return None
        if e.args and not isinstance(e.args[0], ast.Keyword):
            self.scope.error("the sink is given by name", e.args[0].span, "write `softmax(sink = …)`")
            return None
        bound = self.typer.bind(e, (), ("sink",))
        if not bound:
            return None if bound is None else Scan("softmax")
        sink = self._number(bound["sink"], "sink", "`sink`")
        return None if sink is None else Scan("softmax", sink)

    def _domain(self) -> Domain | None:
        if "domain" not in self.declared.slots:
            return None
        e = self.declared.slots["domain"].value
        if not isinstance(e, ast.Call) or e.function.text != "blocks":
            self.scope.error("unknown domain", e.span, _BLOCKS)
            return None
        bound = self.typer.bind(e, ("selected", "size"))
        if bound is None:
            return None
        selected, size = self._selected(bound["selected"]), self.typer.typed(bound["size"], "size")
        if size is not None:
            value = self.typer.build.value(size)
            if size.type != I32 or (value is not None and value < 1):
                self.scope.error("the size of a block is an i32 of at least 1", bound["size"].span, _BLOCKS)
                return None
        return None if selected is None or size is None else Domain(*selected, size, e.span)

    def _selected(self, e: ast.Expr) -> tuple[str, tuple[Expr | None, ...]] | None:
        """The tensor that lists the blocks, and its indices."""
        if not isinstance(e, ast.Index):
            self.scope.error("the blocks are listed in a tensor", e.span, _BLOCKS)
            return None
        tensor = self.typer.tensor(e)
        read = self.typer.index_item
        index = [None if isinstance(x, ast.Every) else self.typer.typed(x, "domain", read) for x in e.items]
        every = [n for n, x in enumerate(e.items) if isinstance(x, ast.Every)]
        if tensor is None:
            return None
        if len(every) != 1:
            self.scope.error("one index is `:`, which runs over the listed blocks", e.span, _BLOCKS)
        elif tensor.dims[every[0]] in SPACES:
            message = f"`:` runs over a table, not over `{tensor.dims[every[0]]}`"
            self.scope.error(message, e.items[every[0]].span, f"declare `tensor {tensor.name}[iq, g, n]: i32`")
        elif tensor.dtype != "i32":
            self.scope.error(f"blocks are listed as i32, not {tensor.dtype}", e.base.span, "-1 fills the list up")
        elif sum(x is None for x in index) == 1:
            return tensor.name, tuple(index)
        return None

    # -- extra outputs

    def _emits(self) -> list[Emit | None]:
        return [self._emit(s) for s in self.syntax.body if isinstance(s, ast.Emit)]

    def _emit(self, s: ast.Emit) -> Emit | None:
        scope = self.scope
        kept: set[str] = set()
        good = bool(s.index)
        if not good:
            scope.error(
                "an extra output keeps an index", s.name.span, f"write `emit {s.name}[h] = …`: one number a head"
            )
        for w in s.index:
            if w.text not in _KEPT:
                hint = {"i": "rows are kept by `iq`", "pos": "rows are kept by `iq`"}.get(w.text)
                scope.error(f"an output cannot keep '{w}'", w.span, hint or f"it keeps {names.listed(_KEPT, 'or')}")
            elif w.text in kept:
                scope.error(f"a second `{w}`", w.span, "once is enough")
            good = good and w.text in _KEPT and w.text not in kept and beside_requests(scope, w, kept)
            kept.add(w.text)
        e = s.value
        if not isinstance(e, ast.Call) or e.function.text not in ("max", "min", "sum") or len(e.args) != 1:
            hint = f"write `emit {s.name}[…] = max(…)`"
            scope.error("an extra output is one `max(x)`, `min(x)` or `sum(x)` over the keys", e.span, hint)
            return None
        (arg,) = e.args
        if isinstance(arg, ast.Keyword):
            scope.error(f"'{e.function}' has no argument '{arg.name}'", arg.span, f"write `{e.function}(x)`")
            return None
        value = self._number(arg, "emit", f"`{e.function}`")
        if value is None or not good:
            return None
        return Emit(s.name.text, tuple(w.text for w in s.index), e.function.text, value, s.name.span)

    # -- between slots

    def _refuse_lse(self, found: list[Expr | None]) -> None:
        for e in found:
            for x in objects(e) if e is not None else ():
                if isinstance(x, Leaf) and x.name == "lse":
                    self.scope.error("there is no `lse` with `scan = none`", x.span, "leave `scan` out for a softmax")

    def _row_guards(self, slots: dict[str, Expr | None]) -> None:
        for slot in ("f_q", "epilogue"):
            e = slots[slot]
            for x in guards.negative_rows(e) if e is not None else ():
                hint = f"guard it, `{x.tensor}[…] if i >= 0 else …`, or clamp the index, `max(i, 0)`"
                tensor = self.scope.bindings.get(x.tensor)
                dims = tensor.dims if isinstance(tensor, TensorParam) else ()
                if any(dim == "iq" and "i" in leaves(k) for dim, k in zip(dims, x.index, strict=False)):
                    hint = "`iq` is the row, `i` its position: write `iq`"
                message = f"`i` indexes '{x.tensor}' in `{slot}`, and is negative where qo_len > kv_len"
                self.scope.error(message, x.span, hint)

    def _constant_indices(self, found: list[Expr | None], domain: Domain | None) -> None:
        """An index of known value is inside its table, whose length is known too."""
        reads: list[Load | Domain] = [] if domain is None else [domain]
        reads += [x for e in (*found, *(domain.index if domain else ())) if e is not None for x in guards.loads(e)]
        for x in reads:
            tensor = self.scope.bindings.get(x.tensor)
            for dim, item in zip(tensor.dims if isinstance(tensor, TensorParam) else (), x.index, strict=False):
                value = None if item is None else self.typer.build.value(item)
                if isinstance(dim, int) and item is not None and value is not None and not 0 <= value < dim:
                    message = f"index {value} is outside 0...{dim - 1} of '{x.tensor}'"
                    self.scope.error(message, item.span, f"its length is {dim}")
