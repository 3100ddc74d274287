"""Syntax to typed IR: every expression is given its type, and all that is wrong with it is reported.

`None` stands for an expression that is reported already: what is built on it says nothing more.  A `let` is typed
once and a `def` at each use, both outside of any slot; where they are used, what they depend on must be in scope.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from attncc.diagnostics import Span
from attncc.frontend import ast, names
from attncc.frontend.lower import Builder, TooLarge
from attncc.ir.nodes import LEAVES, Expr, ScalarParam, TensorParam

Report = Callable[[str, Span, "str | None"], None]
_MAX_LEVEL = 220  # of expressions being typed, lets and defs that they use included: each takes two or three frames
_ARITHMETIC = {"+": "add", "-": "sub", "*": "mul", "//": "floordiv", "%": "mod"}
_LITERAL_HINTS = {
    "inf": "a mask hides a key: there is no infinity to add",
    "True": "did you mean 'true'?",
    "False": "did you mean 'false'?",
    "pi": "write 3.141592653589793",
    "position": "positions are `i` (query) and `j` (key)",
}


@dataclass
class Value:
    """A `let`, typed at its first use; a `def`, checked once on its own."""

    syntax: ast.Let | ast.Def
    expr: Expr | None = None
    done: bool = False


@dataclass(frozen=True)
class Output:
    """The name of an emit."""


@dataclass(frozen=True)
class Unknown:
    """A name whose declaration is wrong, and reported."""


Binding = ScalarParam | TensorParam | Value | Output | Unknown


@dataclass
class Names:
    """What a variant declares."""

    bindings: dict[str, Binding] = field(default_factory=dict)
    complete: bool = True  # False where the header did not parse: any name may have been a parameter


class Typer:
    """Types the expressions of one variant."""

    def __init__(self, declared: Names, report: Report):
        self.declared = declared
        self.build = Builder()
        self._report = report
        self._said: set[tuple[str, Span]] = set()
        self.slot: str | None = None  # None: in a let or a def
        self._args: dict[str, Expr | None] = {}  # of the def whose body is being typed
        self._busy: list[str] = []
        self._level = 0
        self._calls: dict[tuple, Expr | None] = {}
        self._caller: str | None = None

    def error(self, message: str, at: Span, hint: str | None = None) -> None:
        """Report once; the same place may be typed several times (a def at each use)."""
        if (message, at) not in self._said:
            self._said.add((message, at))
            self._report(message, at, hint or self._caller)

    # -- entry points

    def typed(self, e: ast.Expr, slot: str | None) -> Expr | None:
        """The expression of a slot (a key of `names.SCOPES`)."""
        outer, self.slot = self.slot, slot
        try:
            return self.expr(e)
        except TooLarge as x:
            self.error(x.message, x.span, "a smaller expression says it, or `min`, `max` and tables do")
            return None
        finally:
            self.slot = outer

    def value(self, name: str) -> Expr | None:
        """What a `let` stands for."""
        binding = self.declared.bindings[name]
        assert isinstance(binding, Value)
        if not binding.done and self._enter(name, binding.syntax.name.span):
            binding.expr = self._apart(binding.syntax.value, {})
            self._busy.pop()
            binding.done = True
        return binding.expr

    def check_def(self, name: str) -> None:
        """Check the body of a `def` on its own, whatever its arguments may be."""
        binding = self.declared.bindings[name]
        assert isinstance(binding, Value) and isinstance(binding.syntax, ast.Def)
        if not binding.done and self._enter(name, binding.syntax.name.span):
            self._apart(binding.syntax.value, {p.text: None for p in binding.syntax.params})
            self._busy.pop()
            binding.done = True

    def _apart(self, body: ast.Expr, args: dict[str, Expr | None]) -> Expr | None:
        """Type `body` outside of any slot, with the arguments of a def."""
        outer = self._args
        self._args = args
        try:
            return self.typed(body, None)
        finally:
            self._args = outer

    def _enter(self, name: str, at: Span) -> bool:
        if name not in self._busy:
            self._busy.append(name)
            return True
        cycle = [*self._busy[self._busy.index(name) :], name]
        self.error(f"'{name}' is defined by itself: {' uses '.join(cycle)}", at, "there is no recursion")
        for n in cycle:
            self.declared.bindings[n] = Unknown()
        return False

    # -- expressions

    def expr(self, e: ast.Expr) -> Expr | None:
        if self._level > _MAX_LEVEL:
            self.error(
                "nested too deeply, counting the lets and defs that it uses", e.span, "define them first to last"
            )
            return None
        self._level += 1
        try:
            return getattr(self, "_" + type(e).__name__.lower())(e)
        finally:
            self._level -= 1

    def all(self, es: Iterable[ast.Expr]) -> list[Expr] | None:
        """All of them, so that every error is seen; None where one is wrong."""
        found = [self.expr(e) for e in es]
        return None if any(x is None for x in found) else found  # type: ignore[return-value]

    def _number(self, e: ast.Number) -> Expr | None:
        top = 3.4028234663852886e38 if isinstance(e.value, float) else 2**31 - 1
        if e.value > top:
            kind = "f32" if isinstance(e.value, float) else "i32"
            hint = None if kind == "f32" else "the largest i32 is 2147483647; write 4294967296.0 for an f32"
            self.error(f"out of the range of {kind}", e.span, hint)
            return None
        return self.build.const(e.value, e.span)

    def _boolean(self, e: ast.Boolean) -> Expr | None:
        return self.build.const(e.value, e.span)

    def _unary(self, e: ast.Unary) -> Expr | None:
        if e.op == "not":
            x = self.expr(e.operand)
            return self.build.op("not", x, at=e.span) if x and self.is_bool(x, e.operand, "`not`") else None
        if isinstance(e.operand, ast.Number) and e.operand.value == 2**31:  # -2147483648 is an i32, 2147483648 is not
            return self.build.const(-(2**31), e.span)
        x = self.expr(e.operand)
        return self.build.op("neg", x, at=e.span) if x and self.is_number(x, e.operand, "`-`") else None

    def _binary(self, e: ast.Binary) -> Expr | None:
        args = self.all((e.left, e.right))
        if args is None:
            return None
        left, right = args
        good = self.is_bool if e.op in ("and", "or") else self.is_number
        fits = [good(x, syntax, f"`{e.op}`") for x, syntax in ((left, e.left), (right, e.right))]
        if not all(fits) or not self.one_space(e.span, left, right):
            return None
        build = self.build
        if e.op in ("and", "or"):
            return build.op(e.op, left, right, at=e.span)
        if e.op == "/":
            return build.floats("div", left, right, at=e.span)
        if e.op == "**":
            return self._power(e, left, right)
        integers = left.type.elem == right.type.elem == "i32"
        if e.op in ("//", "%") and integers and build.value(right) == 0:
            self.error("integer division by zero", e.right.span, "`/` divides as f32")
            return None
        return build.same(_ARITHMETIC[e.op], left, right, at=e.span)

    def _power(self, e: ast.Binary, left: Expr, right: Expr) -> Expr | None:
        if not left.type.elem == right.type.elem == "i32":
            return self.build.floats("pow", left, right, at=e.span)
        exponent = self.build.value(right)
        if exponent is None or exponent < 0:
            what = "negative" if exponent is not None else "not constant"
            self.error(f"the exponent of an i32 is {what}", e.right.span, "make the base an f32: `f32(x) ** n`")
            return None
        return self.build.op("pow", left, self.build.const(int(exponent), e.right.span), at=e.span)

    def _compare(self, e: ast.Compare) -> Expr | None:
        args = self.all(e.operands)
        if args is None or not self.one_space(e.span, *args):
            return None
        chain: Expr | None = None
        for n, op in enumerate(e.ops):
            left, right = args[n], args[n + 1]
            if op in ("==", "!="):
                kinds = {left.type.elem, right.type.elem}
                if "bool" in kinds and len(kinds) > 1:
                    hint = "compare numbers with numbers, bools with bools"
                    self.error(f"`{op}` of {left.type} and {right.type}", e.operands[n].span, hint)
                    return None
            elif not all([self.is_number(x, e.operands[n + m], f"`{op}`") for m, x in enumerate((left, right))]):
                return None
            link = self.build.compare(op, left, right, e.span)
            chain = link if chain is None else self.build.op("and", chain, link, at=e.span)
        return chain

    def _conditional(self, e: ast.Conditional) -> Expr | None:
        args = self.all((e.condition, e.then, e.other))
        if args is None or not self.is_bool(args[0], e.condition, "`if`") or not self.one_space(e.span, *args):
            return None
        condition, then, other = args
        if (then.type.elem == "bool") != (other.type.elem == "bool"):
            hint = "make both numbers, or both bools"
            self.error(f"`if` chooses between {then.type} and {other.type}", e.span, hint)
            return None
        return self.build.op("select", condition, *self.build.alike(then, other), at=e.span)

    # -- names

    def _name(self, e: ast.Name) -> Expr | None:
        name, at = e.name, e.span
        if name in self._args:
            return self._args[name]
        if name in LEAVES and name in names.RESERVED:
            return self.build.leaf(name, at) if self._in_scope([name], at, "") else None
        binding = self.declared.bindings.get(name)
        if isinstance(binding, ScalarParam):
            return self.build.param(name, binding.type, at)
        if isinstance(binding, TensorParam):
            return self._bare_tensor(binding, at)
        if isinstance(binding, Value) and isinstance(binding.syntax, ast.Let):
            found = self.value(name)
            return (
                found if found is not None and self._in_scope(self.build.leaves(found), at, f"'{name}' uses ") else None
            )
        if binding is None:
            self._unknown(name, at)
        elif isinstance(binding, Value):
            self.error(f"'{name}' is a function", at, f"call it: {name}(…)")
        elif isinstance(binding, Output):
            self.error(f"'{name}' is an extra output, which no expression can read", at)
        return None

    def _bare_tensor(self, t: TensorParam, at: Span) -> Expr | None:
        if t.dims not in (("d",), ("e",)):
            self.error(f"'{t.name}' is a tensor: its element is needed", at, f"write {_pattern(t)}")
            return None
        feature = str(t.dims[0])
        if not self._in_scope([feature], at, f"'{t.name}' is a vector over "):
            return None
        return self.build.load(t.name, t.dtype, (self.build.leaf(feature, at),), at)

    def _unknown(self, name: str, at: Span) -> None:
        if name in names.SLOTS or name == "emit":
            given = {"f_logits": "s", "f_q": "q", "f_k": "k", "f_v": "v", "epilogue": "o"}.get(name)
            hint = f"the value that it changes is `{given}`" if given else "name a shared value with `let`"
            self.error(f"'{name}' is a slot, not a value", at, hint)
        elif name in names.PLACED:
            self.error(f"'{name}' has no meaning here", at, f"it stands in {names.PLACED[name]}")
        elif name in names.RESERVED:
            self.error(f"'{name}' is a function", at, f"call it: {name}(…)")
        elif self.declared.complete:
            hint = _LITERAL_HINTS.get(name) or names.suggest(name, self.known())
            self.error(f"unknown name '{name}'", at, hint or "declare it: a parameter, a `tensor` or a `let`")

    def known(self) -> list[str]:
        """The values that may be named here."""
        here = [n for n, where in names.WHERE.items() if self.slot is None or self.slot in where]
        mine = [n for n, b in self.declared.bindings.items() if not isinstance(b, Output | Unknown)]
        return [
            *here,
            *(n for n in names.RESERVED if names.RESERVED[n] == "a size"),
            *mine,
            *self._args,
            "true",
            "false",
        ]

    def _in_scope(self, leaves: list[str], at: Span, through: str) -> bool:
        if self.slot is None:
            return True
        for leaf in leaves:
            where = names.WHERE.get(leaf)
            if where is not None and self.slot not in where:
                here = {"size": "the size of a block", "sink": "`sink`"}.get(self.slot, f"`{self.slot}`")
                self.error(f"{through}`{leaf}`{', which' if through else ''} is not in scope in {here}", at,
                           f"`{leaf}` can be used in {names.listed(where)}")  # fmt: skip
                return False
        return True

    def _index(self, e: ast.Index) -> Expr | None:
        name, at = e.base.text, e.base.span
        binding = self.declared.bindings.get(name)
        items = [self._item(x, name) for x in e.items]
        if not isinstance(binding, TensorParam):
            self._not_a_tensor(name, at, binding)
            return None
        if len(items) != len(binding.dims):
            many = "index" if len(binding.dims) == 1 else "indices"
            hint = f"write {_pattern(binding)}"
            self.error(f"'{name}' takes {len(binding.dims)} {many}, not {len(items)}", e.span, hint)
            return None
        if any(x is None for x in items) or not self.one_space(e.span, *items):  # type: ignore[arg-type]
            return None
        return self.build.load(name, binding.dtype, tuple(items), e.span)  # type: ignore[arg-type]

    def _item(self, e: ast.Expr | ast.Every, tensor: str) -> Expr | None:
        if isinstance(e, ast.Every):
            hint = f"it stands in `domain = blocks({tensor}[…, :], size = …)`"
            self.error("`:` has no meaning here", e.span, hint)
            return None
        return self.index(e)

    def index(self, e: ast.Expr) -> Expr | None:
        """An index of a tensor: i32."""
        x = self.expr(e)
        if x is not None and x.type.elem != "i32":
            self.error(f"an index is i32, not {x.type}", e.span, "write `i32(…)`" if x.type.elem == "f32" else None)
            return None
        return x

    def _not_a_tensor(self, name: str, at: Span, binding: Binding | None) -> None:
        if isinstance(binding, Unknown) or (binding is None and not self.declared.complete):
            return
        tensors = [n for n, b in self.declared.bindings.items() if isinstance(b, TensorParam)]
        if binding is None and name not in names.RESERVED and name not in self._args:
            hint = names.suggest(name, tensors)
            self.error(f"unknown tensor '{name}'", at, hint or f"declare it: `tensor {name}[…]: f32`")
        elif name in names.FUNCTIONS or (isinstance(binding, Value) and isinstance(binding.syntax, ast.Def)):
            self.error(f"'{name}' is a function, not a tensor", at, f"call it: {name}(…)")
        else:
            self.error(f"'{name}' is not a tensor: it has no elements", at, names.suggest(name, tensors))

    # -- what the builtins ask as well

    def is_bool(self, x: Expr, syntax: ast.Expr, what: str) -> bool:
        if x.type.elem != "bool":
            self.error(f"{what} takes bool, not {x.type}", syntax.span, "compare it with something: `x != 0`")
        return x.type.elem == "bool"

    def is_number(self, x: Expr, syntax: ast.Expr, what: str) -> bool:
        if x.type.elem == "bool":
            self.error(f"{what} takes numbers, not {x.type}", syntax.span, "write `1 if … else 0`")
        return x.type.elem != "bool"

    def one_space(self, at: Span, *args: Expr) -> bool:
        if len({a.type.space for a in args} - {None}) > 1:
            self.error("vectors over `d` and over `e` do not combine", at, "`d` is q's and k's, `e` v's and o's")
            return False
        return True

    # -- calls

    def _call(self, e: ast.Call) -> Expr | None:
        from attncc.frontend import builtins

        name = e.function.text
        if name in names.FUNCTIONS:
            return builtins.call(self, e)
        binding = self.declared.bindings.get(name)
        if isinstance(binding, Value) and isinstance(binding.syntax, ast.Def):
            return self._use(e, binding.syntax)
        for a in e.args:
            if not isinstance(a, ast.Keyword):
                self.expr(a)
        self._not_a_function(name, e.function.span, binding)
        return None

    def _not_a_function(self, name: str, at: Span, binding: Binding | None) -> None:
        if isinstance(binding, Unknown) or (binding is None and not self.declared.complete):
            return
        defs = [n for n, b in self.declared.bindings.items() if isinstance(b, Value) and isinstance(b.syntax, ast.Def)]
        if name in names.PLACED:
            self.error(f"'{name}' has no meaning here", at, f"it stands in {names.PLACED[name]}")
        elif isinstance(binding, TensorParam):
            self.error(f"'{name}' is a tensor, not a function", at, f"write {_pattern(binding)}")
        elif binding is not None or name in names.RESERVED or name in self._args:
            self.error(f"'{name}' is not a function", at, names.suggest(name, (*names.FUNCTIONS, *defs)))
        else:
            hint = names.suggest(name, (*names.FUNCTIONS, *defs))
            self.error(f"unknown function '{name}'", at, hint or f"define it: `def {name}(x) = …`")

    def bind(self, e: ast.Call, required: Iterable[str], optional: Iterable[str] = ()) -> dict[str, ast.Expr] | None:
        """The arguments of a call by name."""
        required, names_all = list(required), [*required, *optional]
        name, bound, good = e.function.text, {}, True
        shape = f"write {name}({', '.join([*required, *(f'{o} = …' for o in optional)])})"
        for n, a in enumerate(e.args):
            if isinstance(a, ast.Keyword):
                key, value = a.name.text, a.value
                if key not in names_all:
                    self.error(f"'{name}' has no argument '{key}'", a.span, names.suggest(key, names_all) or shape)
                    good = False
                    continue
            elif n >= len(names_all):
                self.error(
                    f"'{name}' takes {len(names_all)} argument{'s'[: len(names_all) != 1]}, not {len(e.args)}",
                    a.span,
                    shape,
                )
                return None
            elif any(isinstance(x, ast.Keyword) for x in e.args[:n]):
                self.error("an argument without a name follows a named one", a.span, shape)
                return None
            else:
                key, value = names_all[n], a
            if key in bound:
                self.error(f"'{name}' is given '{key}' twice", a.span, shape)
                good = False
            bound[key] = value
        missing = [r for r in required if r not in bound]
        if good and missing:
            self.error(f"'{name}' needs {names.listed(missing)}", e.span, shape)
        return bound if good and not missing else None

    def _use(self, e: ast.Call, function: ast.Def) -> Expr | None:
        """Type the body of a def with the arguments of this call."""
        params = [p.text for p in function.params]
        bound = self.bind(e, params)
        if bound is None:
            return None
        args = {p: self.expr(bound[p]) for p in params}
        name = function.name.text
        if any(a is None for a in args.values()):
            if name in self._busy:
                self._enter(name, e.function.span)
            else:
                self.check_def(name)
            return None
        key = (name, *map(id, args.values()))
        if key not in self._calls:
            if not self._enter(name, e.function.span):
                return None
            outer = self._caller
            kinds = ", ".join(f"{p}: {a.type}" for p, a in args.items() if a is not None)
            self._caller = outer or f"called at {e.span.line}:{e.span.column} with {kinds or 'no arguments'}"
            self._calls[key] = self._apart(function.value, args)
            self._caller = outer
            self._busy.pop()
        found = self._calls[key]
        if found is None or not self._in_scope(self.build.leaves(found), e.span, f"'{name}' uses "):
            return None
        return found


def _pattern(t: TensorParam) -> str:
    """How an element of the tensor is written."""
    return f"{t.name}[{', '.join({'pos': 'i'}.get(str(x), '…' if isinstance(x, int) else str(x)) for x in t.dims)}]"
