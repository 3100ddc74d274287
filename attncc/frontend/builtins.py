"""Calls of the builtin functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncc.frontend import ast, names
from attncc.frontend.scope import Unknown
from attncc.ir.nodes import I32, SPACES, Const, Expr, Param, Rope, TensorParam

if TYPE_CHECKING:
    from attncc.frontend.expressions import Typer

_ARGUMENTS = {"clamp": ("x", "lo", "hi"), "softcap": ("s", "c"), "bit": ("word", "n")}  # all others take one `x`


def call(t: Typer, e: ast.Call) -> Expr | None:
    """The IR of a builtin's call; None where it is wrong, and reported."""
    name, at, build = e.function.text, e.span, t.build
    if name in _SPECIAL:
        return _SPECIAL[name](t, e)
    required = _ARGUMENTS.get(name, ("x",))
    bound = t.bind(e, required)
    operands = [bound[r] for r in required] if bound else [a.value if isinstance(a, ast.Keyword) else a for a in e.args]
    args = t.operands(operands, t.is_number, f"`{name}`")
    if bound is None or args is None or not t.one_space(at, *args):
        return None
    if name in ("clamp", "softcap", "relu", "f32", "i32"):
        return getattr(build, name)(*args, at)
    if name == "abs":
        return build.op("abs", *args, at=at)
    if name == "bit":
        for a, r in zip(args, required, strict=True):
            if a.type.elem != "i32":
                t.scope.error(f"`bit` takes i32, not {a.type}", bound[r].span, "write `i32(…)`")
                return None
        return build.op("bit", *args, at=at)
    return build.floats(name, *args, at=at)


def _extreme(t: Typer, e: ast.Call) -> Expr | None:
    name = e.function.text
    plain = [a for a in e.args if not isinstance(a, ast.Keyword)]
    for a in e.args:
        if isinstance(a, ast.Keyword):
            t.scope.error(f"'{name}' has no argument '{a.name}'", a.span, f"write `{name}(x, y, …)`")
    args = t.operands(plain, t.is_number, f"`{name}`")
    if len(e.args) < 2:
        hint = f"over keys, it stands in `emit NAME[…] = {name}(x)`"
        t.scope.error(f"'{name}' takes two or more arguments", e.span, hint)
    if args is None or len(plain) < max(2, len(e.args)) or not t.one_space(e.span, *args):
        return None
    return t.build.fold(name, args, e.span)


def _vector(t: Typer, syntax: ast.Expr, name: str, hint: str = "the vectors are `q`, `k`, `v` and `o`") -> Expr | None:
    x = t.expr(syntax)
    if x is None or not t.is_number(x, syntax, f"`{name}`"):
        return None
    if x.type.space is None:
        t.scope.error(f"`{name}` takes a vector, not {x.type}", syntax.span, hint)
        return None
    return x


def _sum(t: Typer, e: ast.Call) -> Expr | None:
    bound = t.bind(e, ("x",))
    if bound is None:
        return None
    x = _vector(t, bound["x"], "sum", "over keys, it stands in `emit NAME[…] = sum(x)`")
    return None if x is None else t.build.op("sum", x, at=e.span)


def _norm(t: Typer, e: ast.Call) -> Expr | None:
    name, at, build = e.function.text, e.span, t.build
    optional = {"rmsnorm": ("weight", "eps"), "layernorm": ("weight", "bias", "eps"), "l2norm": ("eps",)}[name]
    bound = t.bind(e, ("x",), optional)
    if bound is None:
        return None
    x = _vector(t, bound["x"], name)
    eps = t.number(bound["eps"], "`eps`") if "eps" in bound else build.const(1e-6, at)
    given = {k: bound[k] for k in ("weight", "bias") if k in bound and not _is_none(bound[k])}
    extra = {k: t.expr(syntax) for k, syntax in given.items()}
    if x is None or eps is None:
        return None
    normed = getattr(build, name)(build.f32(x), eps, at)
    for key, value in extra.items():
        if value is None or not t.is_number(value, given[key], f"`{key}`") or not t.one_space(at, x, value):
            return None
        if isinstance(value, Const | Param) and "eps" not in bound and given[key] in e.args:
            hint = f"write `eps = …`, or `{key} = …` where that is meant"
            t.scope.error(f"this number would be the `{key}` of `{name}`", given[key].span, hint)
            return None
        normed = build.floats("mul" if key == "weight" else "add", normed, value, at=at)
    return normed


def _is_none(e: ast.Expr) -> bool:
    return isinstance(e, ast.Name) and e.name == "none"


# The arguments of each scaling in order; those of the dict have a default (None: as transformers works it out).
_SCALINGS: dict[str, tuple[tuple[str, ...], dict[str, float | None]]] = {
    "linear": (("factor",), {}),
    "llama31": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position"), {}),
    "yarn": (("factor", "original_max_position"), {"beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": None}),
}


def _rope(t: Typer, e: ast.Call) -> Expr | None:
    bound = t.bind(e, ("x", "pos"), ("theta", "dims", "style", "scaling", "cos", "sin"))
    if bound is None:
        return None
    x, pos = _vector(t, bound["x"], "rope"), t.expr(bound["pos"])
    theta = t.number(bound["theta"], "`theta`") if "theta" in bound else t.build.const(1e4, e.span)
    whole = "head_dim_vo" if x is not None and x.type.space == "e" else "head_dim_qk"
    dims_fit, dims = _rope_dims(t, bound.get("dims"), whole)
    style, scaling = _rope_style(t, bound.get("style")), _rope_scaling(t, bound.get("scaling"))
    tables = _rope_tables(t, bound, dims)
    if pos is not None and pos.type != I32:
        hint = "positions are `i` and `j`; `scaling = linear(factor)` divides them"
        t.scope.error(f"rope's `pos` is i32, not {pos.type}", bound["pos"].span, hint)
        return None
    if x is None or pos is None or theta is None or style is None or scaling is None or tables is None or not dims_fit:
        return None
    return t.build.rope(Rope(t.build.f32(x), pos, theta, dims, style, scaling, *tables, span=e.span))


def _rope_dims(t: Typer, syntax: ast.Expr | None, whole: str) -> tuple[bool, int | None]:
    """Is it good, and an even number of features, or None for all of them."""
    if syntax is None or (isinstance(syntax, ast.Name) and syntax.name == whole):
        return True, None
    found = t.expr(syntax)
    if found is None:
        return False, None
    dims = t.build.value(found)
    if found.type != I32 or dims is None or dims < 2 or dims % 2:
        hint = f"write an even number, such as 64, or `{whole}` for all features"
        t.scope.error("rope's `dims` is a constant, even i32", syntax.span, hint)
        return False, None
    return True, int(dims)


def _rope_style(t: Typer, syntax: ast.Expr | None) -> str | None:
    if syntax is None:
        return "neox"
    word = syntax.name if isinstance(syntax, ast.Name) else ""
    if word not in names.STYLES:
        hint = names.suggest(word, names.STYLES) or "it is `neox` (halves) or `interleaved` (pairs)"
        t.scope.error("unknown style of rope", syntax.span, hint)
    return word if word in names.STYLES else None


def _rope_scaling(t: Typer, syntax: ast.Expr | None) -> tuple[str | Expr | None, ...] | None:
    if syntax is None or _is_none(syntax):
        return ()
    if isinstance(syntax, ast.Name) and syntax.name in _SCALINGS:
        syntax = ast.Call(ast.Word(syntax.name, syntax.span), (), syntax.span)  # which lacks arguments
    word = syntax.function.text if isinstance(syntax, ast.Call) else syntax.name if isinstance(syntax, ast.Name) else ""
    if not isinstance(syntax, ast.Call) or word not in _SCALINGS:
        near = names.suggest(word, _SCALINGS) if word not in _SCALINGS else None
        hint = near or "it is `none`, `linear(…)`, `llama31(…)` or `yarn(…)`"
        t.scope.error("unknown scaling of rope", syntax.span, hint)
        return None
    required, optional = _SCALINGS[word]
    bound = t.bind(syntax, required, optional)
    if bound is None:
        return None
    values: list[Expr | None] = []
    good = True
    for key in (*required, *optional):
        default = optional.get(key)
        if key in bound:
            values.append(t.number(bound[key], f"`{key}`"))
            good = good and values[-1] is not None
        else:
            values.append(None if default is None else t.build.const(default, syntax.span))
    return (word, *values) if good else None


def _rope_tables(t: Typer, bound: dict[str, ast.Expr], dims: int | None) -> tuple[str | None, str | None] | None:
    """The names of the tensors of cosines and sines."""
    given = [k for k in ("cos", "sin") if k in bound]
    if not given:
        return None, None
    if len(given) == 1:
        t.scope.error(f"rope is given `{given[0]}` alone", bound[given[0]].span, "give both `cos` and `sin`")
        return None
    cos, sin = (_rope_table(t, bound[k], dims) for k in given)
    for key in ("theta", "scaling"):
        if key in bound:
            t.scope.error(f"rope with `cos` and `sin` takes no `{key}`", bound[key].span, "leave it out")
            return None
    return (cos, sin) if cos and sin else None


def _rope_table(t: Typer, syntax: ast.Expr, dims: int | None) -> str | None:
    hint = "declare `tensor cosines[pos, 64]: f32`, and name it bare"
    table = t.scope.bindings.get(syntax.name) if isinstance(syntax, ast.Name) else None
    if isinstance(syntax, ast.Name) and table is None and syntax.name not in names.RESERVED:
        t.scope.no_value(syntax.name, syntax.span)
    elif not isinstance(table, TensorParam):
        if not isinstance(table, Unknown):
            t.scope.error("rope's `cos` and `sin` are tensors [pos, dims // 2]", syntax.span, hint)
    elif len(table.dims) != 2 or table.dims[0] != "pos" or table.dims[1] in SPACES:
        t.scope.error(f"'{table.name}' is not a tensor [pos, dims // 2]", syntax.span, hint)
    elif table.dtype not in names.FLOAT_DTYPES:
        t.scope.error(f"'{table.name}' holds {table.dtype}, not cosines or sines", syntax.span, hint)
    elif dims is not None and isinstance(table.dims[1], int) and table.dims[1] != dims // 2:
        message = f"'{table.name}' has {table.dims[1]} columns, and dims // 2 is {dims // 2}"
        t.scope.error(message, syntax.span, f"declare `tensor {table.name}[pos, {dims // 2}]: {table.dtype}`")
    else:
        return table.name
    return None


_SPECIAL = {
    "min": _extreme, "max": _extreme, "sum": _sum, "rmsnorm": _norm, "layernorm": _norm, "l2norm": _norm, "rope": _rope,
}  # fmt: skip
