"""Syntax to typed IR: every expression is given its type, and all that is wrong with it is reported.

`None` stands for an expression that is reported already: what is built on it says nothing more.  A `let` is typed
once and a `def` at each use, both outside of any slot; where they are used, what they depend on must be in scope.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

from attncc.diagnostics import Span
from attncc.frontend import ast, builtins, names
from attncc.frontend.lower import Builder, TooLarge
from attncc.frontend.scope import Function, Let, Scope, Unknown, pattern
from attncc.ir.nodes import LEAVES, Expr, ScalarParam, TensorParam

# How many expressions may be open at once while they are typed, those of the lets and defs in use included.  Each
# takes three to five of Python's thousand frames.
_MAX_LEVEL = 120
_F32_MAX, _I32_MAX = 3.4028234663852886e38, 2**31 - 1
_ARITHMETIC = {"+": "add", "-": "sub", "*": "mul", "//": "floordiv", "%": "mod"}


class Typer:
    """Types the expressions of one variant."""

    def __init__(self, scope: Scope):
        self.scope = scope
        self.build = Builder()
        self._busy: list[str] = []  # lets and defs being typed, the outermost first
        self._level = 0
        self._calls: dict[tuple, Expr | None] = {}  # a def and the ids of its arguments: its value
        self._full = False

    # -- whole expressions

    def typed(self, e: ast.Expr, slot: str | None, read: Callable[..., Expr | None] | None = None) -> Expr | None:
        """The expression of a slot (one of `names.SCOPES`), by `read` (default: `expr`)."""
        outer, self.scope.slot = self.scope.slot, slot
        try:
            return (read or self.expr)(e)
        except TooLarge as x:
            if not self._full:
                self.scope.error(x.message, x.span, "a table or a shorter formula may say the same")
            self._full = x.full
            return None
        finally:
            self.scope.slot = outer

    def let(self, name: str) -> Expr | None:
        """What a `let` stands for."""
        binding = cast(Let, self.scope.bindings[name])
        if not binding.done and self._enter(name, binding.syntax.name.span):
            binding.expr = self._apart(binding.syntax.value, {}, None)
            binding.done = True
            self._busy.pop()
        return binding.expr

    def check_def(self, name: str) -> None:
        """Check the body of a `def` on its own, whatever its arguments may be."""
        binding = cast(Function, self.scope.bindings[name])
        if not binding.done and self._enter(name, binding.syntax.name.span):
            self._apart(binding.syntax.value, {p.text: None for p in binding.syntax.params}, None)
            binding.done = True
            self._busy.pop()

    def _apart(self, body: ast.Expr, args: dict[str, Expr | None], caller: str | None) -> Expr | None:
        """Type `body` outside of any slot, with the arguments of a def."""
        scope = self.scope
        outer = scope.args, scope.caller
        scope.args, scope.caller = args, caller
        try:
            return self.typed(body, None)
        finally:
            scope.args, scope.caller = outer

    def _enter(self, name: str, at: Span) -> bool:
        """Begin the let or def `name`; False where it is begun already."""
        if name in self._busy:
            cycle = [*self._busy[self._busy.index(name) :], name]
            self.scope.error(f"'{name}' is defined by itself ({' → '.join(cycle)})", at, "there is no recursion")
            self.scope.bindings.update(dict.fromkeys(cycle, Unknown()))
            return False
        self._busy.append(name)
        return True

    # -- expressions

    def expr(self, e: ast.Expr) -> Expr | None:
        """The typed expression.  TooLarge where no later pass could take it."""
        if self._level >= _MAX_LEVEL:
            raise TooLarge("nested too deeply, counting the lets and defs that it uses", e.span)
        self._level += 1
        try:
            return getattr(self, "_" + type(e).__name__.lower())(e)
        finally:
            self._level -= 1

    def all(self, es: Iterable[ast.Expr]) -> list[Expr] | None:
        """All of them, so that every error is seen; None where one is wrong."""
        found: list[Expr | None] = []
        for e in es:
            found.append(self.expr(e))
        return None if any(x is None for x in found) else cast("list[Expr]", found)

    def operands(self, es: Iterable[ast.Expr], fits: Callable[..., bool], what: str) -> list[Expr] | None:
        """All of them where each `fits` (`is_bool`, `is_number`); None where one is wrong."""
        found: list[Expr] = []
        good = True
        for e in es:
            x = self.expr(e)
            if x is None or not fits(x, e, what):
                good = False
            else:
                found.append(x)
        return found if good else None

    def _number(self, e: ast.Number) -> Expr | None:
        if isinstance(e.value, float) and e.value > _F32_MAX:
            self.scope.error("out of the range of f32", e.span, "the largest f32 is 3.4028235e38")
            return None
        if isinstance(e.value, int) and e.value > _I32_MAX:
            self.scope.error("out of the range of i32", e.span, f"the largest i32 is {_I32_MAX}; an f32 has a point")
            return None
        return self.build.const(e.value, e.span)

    def _boolean(self, e: ast.Boolean) -> Expr | None:
        return self.build.const(e.value, e.span)

    def _unary(self, e: ast.Unary) -> Expr | None:
        if e.op == "-" and isinstance(e.operand, ast.Number) and e.operand.value == _I32_MAX + 1:
            return self.build.const(-_I32_MAX - 1, e.span)  # an i32, though 2147483648 is none
        fits = self.is_bool if e.op == "not" else self.is_number
        args = self.operands((e.operand,), fits, f"`{e.op}`")
        return None if args is None else self.build.op("not" if e.op == "not" else "neg", *args, at=e.span)

    def _binary(self, e: ast.Binary) -> Expr | None:
        fits = self.is_bool if e.op in ("and", "or") else self.is_number
        args = self.operands((e.left, e.right), fits, f"`{e.op}`")
        if args is None or not self.one_space(e.span, *args):
            return None
        left, right = args
        if e.op in ("and", "or"):
            return self.build.op(e.op, left, right, at=e.span)
        if e.op == "/":
            return self.build.floats("div", left, right, at=e.span)
        integers = left.type.elem == right.type.elem == "i32"
        if e.op == "**":
            return self._power(e, left, right) if integers else self.build.floats("pow", left, right, at=e.span)
        if e.op in ("//", "%") and integers and self.build.value(right) == 0:
            self.scope.error("integer division by zero", e.right.span, "the divisor must not be 0")
            return None
        return self.build.same(_ARITHMETIC[e.op], left, right, at=e.span)

    def _power(self, e: ast.Binary, base: Expr, exponent: Expr) -> Expr | None:
        """i32 ** i32."""
        value = self.build.value(exponent)
        if value is not None and value >= 0:
            exponent = self.build.const(value, e.right.span)
        elif value is not None or not self.build.fixed(exponent):
            what = "not constant" if value is None else "negative"
            self.scope.error(f"the exponent of an i32 is {what}", e.right.span, "make the base an f32: `f32(x) ** n`")
            return None
        return self.build.op("pow", base, exponent, at=e.span)

    def _compare(self, e: ast.Compare) -> Expr | None:
        args = self.all(e.operands)
        if args is None or not self.one_space(e.span, *args):
            return None
        chain: Expr | None = None
        for n, op in enumerate(e.ops):
            if not self._comparable(op, args[n : n + 2], e.operands[n : n + 2]):
                return None
            link = self.build.compare(op, args[n], args[n + 1], e.span)
            chain = link if chain is None else self.build.op("and", chain, link, at=e.span)
        return chain

    def _comparable(self, op: str, args: list[Expr], syntax: tuple[ast.Expr, ...]) -> bool:
        kinds = [a.type.elem == "bool" for a in args]
        if op in ("==", "!="):
            if any(kinds) and not all(kinds):
                found = " with ".join(str(a.type) for a in args)
                self.scope.error(f"`{op}` compares {found}", syntax[1].span, "compare numbers, or bools")
            return any(kinds) == all(kinds)
        return all([self.is_number(x, s, f"`{op}`") for x, s in zip(args, syntax, strict=True)])

    def _conditional(self, e: ast.Conditional) -> Expr | None:
        condition = self.operands((e.condition,), self.is_bool, "`if`")
        branches = self.all((e.then, e.other))
        if condition is None or branches is None or not self.one_space(e.span, *condition, *branches):
            return None
        then, other = branches
        if (then.type.elem == "bool") != (other.type.elem == "bool"):
            self.scope.error(
                f"`if` chooses between {then.type} and {other.type}", e.span, "make both numbers, or bools"
            )
            return None
        return self.build.op("select", *condition, *self.build.alike(then, other), at=e.span)

    # -- names

    def _name(self, e: ast.Name) -> Expr | None:
        name, at, scope = e.name, e.span, self.scope
        if name in scope.args:
            return scope.args[name]
        if name in LEAVES and name in names.RESERVED:
            return self.build.leaf(name, at) if scope.admits([name], at) else None
        binding = scope.bindings.get(name)
        if isinstance(binding, ScalarParam):
            return self.build.param(binding, at)
        if isinstance(binding, TensorParam) and binding.dims in (("d",), ("e",)):
            feature = str(binding.dims[0])
            if not scope.admits([feature], at, f"'{name}' is a vector over"):
                return None
            return self.build.load(name, binding.dtype, (self.build.leaf(feature, at),), at)
        if isinstance(binding, Let):
            return self._if_admitted(self.let(name), at, name)
        scope.no_value(name, at)
        return None

    def _if_admitted(self, found: Expr | None, at: Span, name: str) -> Expr | None:
        """What a let or def stands for, where all that it depends on is in scope."""
        if found is None or not self.scope.admits(self.build.leaves(found), at, f"'{name}' uses"):
            return None
        return found

    def tensor(self, e: ast.Index) -> TensorParam | None:
        """The tensor that is indexed, where it has as many dimensions."""
        found = self.scope.bindings.get(e.base.text)
        if e.base.text in self.scope.silent:
            return None
        if not isinstance(found, TensorParam) or e.base.text in self.scope.args:
            self.scope.no_tensor(e.base.text, e.base.span)
            return None
        if len(found.dims) != len(e.items):
            many = "1 index" if len(found.dims) == 1 else f"{len(found.dims)} indices"
            self.scope.error(f"'{found.name}' takes {many}, not {len(e.items)}", e.span, f"write `{pattern(found)}`")
            return None
        return found

    def _index(self, e: ast.Index) -> Expr | None:
        found = self.tensor(e)
        items = [self.index_item(x) for x in e.items]
        if found is None or any(x is None for x in items):
            return None
        index = cast("list[Expr]", items)
        if not self.one_space(e.span, *index):
            return None
        for dim, item, syntax in zip(found.dims, index, e.items, strict=True):
            if dim in ("d", "e") and item.type.space not in (None, dim):
                self.scope.error(
                    f"'{found.name}' is indexed by `{dim}`, not {item.type}", syntax.span, f"write `{dim}`"
                )
                return None
        return self.build.load(found.name, found.dtype, tuple(index), e.span)

    def index_item(self, e: ast.Expr | ast.Every) -> Expr | None:
        """One index of a tensor: i32."""
        if isinstance(e, ast.Every):
            self.scope.error("`:` has no meaning here", e.span, f"it stands in {names.PLACED['blocks']}")
            return None
        x = self.expr(e)
        if x is not None and x.type.elem != "i32":
            self.scope.error(
                f"an index is i32, not {x.type}", e.span, "write `i32(…)`" if x.type.elem == "f32" else None
            )
            return None
        return x

    # -- what must hold between arguments

    def is_bool(self, x: Expr, syntax: ast.Expr, what: str) -> bool:
        if x.type.elem != "bool":
            self.scope.error(
                f"{what} takes bool, not {x.type}", syntax.span, "compare it with something, as in `x != 0`"
            )
        return x.type.elem == "bool"

    def is_number(self, x: Expr, syntax: ast.Expr, what: str) -> bool:
        if x.type.elem == "bool":
            self.scope.error(f"{what} takes numbers, not {x.type}", syntax.span, "write `1 if … else 0`")
        return x.type.elem != "bool"

    def one_space(self, at: Span, *args: Expr) -> bool:
        if len({a.type.space for a in args} - {None}) > 1:
            self.scope.error("vectors over `d` and over `e` do not combine", at, "`d` is of q and k, `e` of v and out")
            return False
        return True

    def number(self, syntax: ast.Expr, what: str) -> Expr | None:
        """One number, as f32."""
        x = self.expr(syntax)
        if x is None or not self.is_number(x, syntax, what):
            return None
        if x.type.space is not None:
            self.scope.error(f"{what} is one number, not {x.type}", syntax.span, "`sum` makes one of a vector")
            return None
        return self.build.f32(x)

    # -- calls

    def _call(self, e: ast.Call) -> Expr | None:
        name = e.function.text
        if name in names.FUNCTIONS:
            return builtins.call(self, e)
        binding = self.scope.bindings.get(name)
        if isinstance(binding, Function) and name not in self.scope.args:
            return self._use(e, binding.syntax)
        self.all(values(e))
        self.scope.no_function(name, e.function.span)
        return None

    def bind(self, e: ast.Call, required: Iterable[str], optional: Iterable[str] = ()) -> dict[str, ast.Expr] | None:
        """The arguments of a call by name; None where they do not fit."""
        name, needed = e.function.text, list(required)
        takes = [*needed, *optional]
        shape = f"write `{name}({', '.join([*needed, *(f'{o} = …' for o in takes[len(needed) :])])})`"
        bound: dict[str, ast.Expr] = {}
        for n, a in enumerate(e.args):
            if isinstance(a, ast.Keyword):
                key, value = a.name.text, a.value
                wrong = f"'{name}' has no argument '{key}'" if key not in takes else ""
                hint = names.suggest(key, takes) or shape
            else:
                key, value, hint = takes[n] if n < len(takes) else "", a, shape
                count = f"{len(takes)} argument{'' if len(takes) == 1 else 's'}"
                named = any(isinstance(x, ast.Keyword) for x in e.args[:n])
                wrong = "an argument without a name after a named one" if named else ""
                wrong = wrong or (f"'{name}' takes {count}, not {len(e.args)}" if not key else "")
            if not wrong and key in bound:
                wrong, hint = f"'{name}' is given '{key}' twice", shape
            if wrong:
                self.scope.error(wrong, a.span, hint)
                return None
            bound[key] = value
        missing = [r for r in needed if r not in bound]
        if missing:
            self.scope.error(f"'{name}' needs {names.listed(missing)}", e.span, shape)
        return None if missing else bound

    def _use(self, e: ast.Call, function: ast.Def) -> Expr | None:
        """Type the body of a def with the arguments of this call."""
        name, params = function.name.text, [p.text for p in function.params]
        bound = self.bind(e, params)
        args = self.all(values(e) if bound is None else (bound[p] for p in params))
        if bound is None or args is None:
            self._enter(name, e.function.span) if name in self._busy else self.check_def(name)
            return None
        key = (name, *map(id, args))
        if key not in self._calls:
            if not self._enter(name, e.function.span):
                return None
            given = ", ".join(f"{p}: {a.type}" for p, a in zip(params, args, strict=True))
            caller = self.scope.caller or f"in the call at {e.span.line}:{e.span.column}, with {given or 'no argument'}"
            self._calls[key] = self._apart(function.value, dict(zip(params, args, strict=True)), caller)
            self._busy.pop()
        return self._if_admitted(self._calls[key], e.span, name)


def values(e: ast.Call) -> list[ast.Expr]:
    """The arguments of a call, named or not."""
    return [a.value if isinstance(a, ast.Keyword) else a for a in e.args]
