"""What the names of a variant stand for, where they may be used, and what to say of one that is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from attncc.diagnostics import Span
from attncc.frontend import ast, names
from attncc.ir.nodes import SIZES, Expr, ScalarParam, TensorParam

Report = Callable[[str, Span, "str | None"], None]


@dataclass
class Let:
    """Typed at its first use; `expr` is None where it is wrong."""

    syntax: ast.Let
    expr: Expr | None = None
    done: bool = False


@dataclass
class Function:
    """A `def`: typed at each use, and checked once on its own."""

    syntax: ast.Def
    done: bool = False


@dataclass(frozen=True)
class Axis:
    """The fresh name of a table's index."""

    tensor: str


@dataclass(frozen=True)
class Output:
    """The name of an `emit`."""


@dataclass(frozen=True)
class Unknown:
    """A name whose declaration is wrong, and reported: its uses say nothing more."""


Binding = ScalarParam | TensorParam | Let | Function | Axis | Output | Unknown

# Names that people try, and what the language has instead.
_INSTEAD = {
    "inf": "hide a key with `mask` instead of an infinite logit",
    "True": "did you mean 'true'?",
    "False": "did you mean 'false'?",
    "None": "did you mean 'none'?",
    "pi": "write 3.141592653589793",
    "pos": "positions are `i` (query) and `j` (key)",
    "q_idx": "the query's position is `i`, its row `iq`",
    "kv_idx": "the key's position is `j`",
    "score": "the score is `s`",
    "head_dim": "did you mean 'head_dim_qk'?",
}
_FUNCTIONS_INSTEAD = {
    "where": "write `x if condition else y`",
    "mean": "write `sum(x) / head_dim_qk`, or `head_dim_vo` for v and o",
    "pow": "write `x ** y`",
    "ln": "did you mean 'log'?",
    "silu": "write `x * sigmoid(x)`",
    "swish": "write `x * sigmoid(x)`",
}
_GIVEN = {"f_q": "q", "f_k": "k", "f_v": "v", "f_logits": "s", "epilogue": "o"}  # what a slot starts from


@dataclass
class Scope:
    """The names of one variant, and the slot whose expression is being read (None: a `let` or a `def`)."""

    report: Report
    bindings: dict[str, Binding] = field(default_factory=dict)
    complete: bool = True  # False where the header did not parse: any unknown name may have been a parameter
    slot: str | None = None
    args: dict[str, Expr | None] = field(default_factory=dict)  # of the def whose body is being read
    caller: str | None = None  # where that def is called
    errors: int = 0
    silent: set[str] = field(default_factory=set)  # names reported already: their uses say nothing more
    _said: set[tuple[str, Span]] = field(default_factory=set)

    def error(self, message: str, at: Span, hint: str | None = None) -> None:
        """Report, but once: the body of a def is read at each use."""
        if (message, at) not in self._said:
            self._said.add((message, at))
            self.errors += 1
            self.report(message, at, "\n".join(h for h in (hint, self.caller) if h) or None)

    def admits(self, leaves: list[str], at: Span, through: str = "") -> bool:
        """Are all of `leaves` in scope?  `through` says why one is needed that is not written here."""
        wrong = [] if self.slot is None else [n for n in leaves if self.slot not in names.WHERE.get(n, (self.slot,))]
        if wrong:
            here = "the size of a block" if self.slot == "size" else f"`{self.slot}`"
            what = f"{through} `{wrong[0]}`, which" if through else f"`{wrong[0]}`"
            hint = f"`{wrong[0]}` can be used in {names.listed(names.WHERE[wrong[0]])}"
            if wrong[0] in ("q", "k") and self.slot == "f_logits":
                hint += "; here `dot` is q · k, and `s` is `scale * dot`"
            self.error(f"{what} is not in scope in {here}", at, hint)
        return not wrong

    def of(self, kind: type) -> list[str]:
        """The declared names of a kind."""
        return [name for name, binding in self.bindings.items() if isinstance(binding, kind)]

    def values(self) -> list[str]:
        """All that may be named as a value here."""
        given = [n for n, where in names.WHERE.items() if self.slot is None or self.slot in where]
        mine = [name for kind in (ScalarParam, TensorParam, Let) for name in self.of(kind)]
        return [*given, *SIZES, *mine, *self.args, "true", "false"]

    def functions(self) -> list[str]:
        """All that may be called."""
        return [*names.FUNCTIONS, *self.of(Function)]

    # -- a name that stands where it cannot

    def no_value(self, name: str, at: Span) -> None:
        """`name` is used as a value."""
        if name in self.silent:
            return
        binding = self.bindings.get(name)
        if name in names.SLOTS:
            hint = (
                f"the value that it starts from is `{_GIVEN[name]}`" if name in _GIVEN else "share a value with `let`"
            )
            self.error(f"'{name}' is a slot, not a value", at, hint)
        elif name in names.PLACED:
            self.error(f"'{name}' has no meaning here", at, f"it stands in {names.PLACED[name]}")
        elif name in names.RESERVED or isinstance(binding, Function):
            self.error(f"'{name}' is a function", at, f"call it: `{name}(…)`")
        elif isinstance(binding, TensorParam):
            self.error(f"'{name}' is a tensor: one of its elements is meant", at, f"write `{pattern(binding)}`")
        elif isinstance(binding, Axis):
            self.error(f"'{name}' is an index of tensor '{binding.tensor}', not a value", at)
        elif isinstance(binding, Output):
            self.error(f"'{name}' is an output, which no expression reads", at, "share a value with `let`")
        elif binding is None and self.complete:
            hint = _INSTEAD.get(name) or names.suggest(name, self.values())
            self.error(f"unknown name '{name}'", at, hint or "declare it: a parameter, a `tensor` or a `let`")

    def no_tensor(self, name: str, at: Span) -> None:
        """`name` is used as a tensor: `name[…]`."""
        if name in self.silent:
            return
        binding = self.bindings.get(name)
        if isinstance(binding, Function) or name in names.FUNCTIONS:
            self.error(f"'{name}' is a function, not a tensor", at, f"call it: `{name}(…)`")
        elif name in names.RESERVED or name in self.args or isinstance(binding, ScalarParam | Let | Axis | Output):
            hint = f"`{name}` alone is the whole vector" if name in _GIVEN.values() and name != "s" else None
            hint = hint or names.suggest(name, self.of(TensorParam))
            self.error(f"'{name}' is not a tensor: it has no elements", at, hint)
        elif binding is None and self.complete:
            hint = names.suggest(name, self.of(TensorParam))
            self.error(f"unknown tensor '{name}'", at, hint or f"declare it: `tensor {name}[…]: f32`")
            self.silent.add(name)

    def no_function(self, name: str, at: Span) -> None:
        """`name` is used as a function: `name(…)`."""
        binding = self.bindings.get(name)
        near = names.suggest(name, self.functions())
        if name in names.PLACED:
            self.error(f"'{name}' has no meaning here", at, f"it stands in {names.PLACED[name]}")
        elif isinstance(binding, TensorParam):
            self.error(f"'{name}' is a tensor, not a function", at, f"write `{pattern(binding)}`")
        elif name in names.RESERVED or name in self.args or isinstance(binding, ScalarParam | Let | Axis | Output):
            self.error(f"'{name}' is not a function", at, near)
        elif binding is None and self.complete:
            near = _FUNCTIONS_INSTEAD.get(name) or near
            self.error(f"unknown function '{name}'", at, near or f"define it: `def {name}(x) = …`")


def pattern(t: TensorParam) -> str:
    """How an element of the tensor is written."""
    index = ("i" if x == "pos" else "…" if isinstance(x, int) else str(x) for x in t.dims)
    return f"{t.name}[{', '.join(index)}]"
