"""Calls of the builtin functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncc.frontend import ast, names
from attncc.ir.nodes import Expr, Rope, TensorParam

if TYPE_CHECKING:
    from attncc.frontend.expressions import Typer


def call(t: Typer, e: ast.Call) -> Expr | None:
    """The IR of a builtin's call; None where it is wrong, and reported."""
    name = e.function.text
    if name in ("min", "max"):
        return _extreme(t, e)
    if name in _SPECIAL:
        return _SPECIAL[name](t, e)
    required = {"clamp": ("x", "lo", "hi"), "softcap": ("s", "c"), "bit": ("word", "n")}.get(name, ("x",))
    bound = t.bind(e, required)
    args = bound and t.all(bound[r] for r in required)
    if not args or not bound:
        return None
    if not all([t.is_number(a, bound[r], f"`{name}`") for a, r in zip(args, required)]):
        return None
    if not t.one_space(e.span, *args):
        return None
    build, at = t.build, e.span
    if name in ("clamp", "softcap", "relu"):
        return getattr(build, name)(*args, at)
    if name == "abs":
        return build.op("abs", *args, at=at)
    if name == "i32":
        return build.i32(args[0], at)
    if name == "f32":
        return build.f32(args[0], at)
    if name == "bit":
        if any(a.type.elem != "i32" for a in args):
            wrong = next(r for a, r in zip(args, required) if a.type.elem != "i32")
            t.error("`bit` takes i32, not f32", bound[wrong].span, "write `i32(…)`")
            return None
        return build.op("bit", *args, at=at)
    return build.floats(name, *args, at=at)


def _extreme(t: Typer, e: ast.Call) -> Expr | None:
    name = e.function.text
    for a in e.args:
        if isinstance(a, ast.Keyword):
            t.error(f"'{name}' has no argument '{a.name}'", a.span, f"write {name}(x, y, …)")
            return None
    args = t.all(e.args)  # type: ignore[arg-type]
    if len(e.args) < 2:
        hint = f"as a reduction it stands in `emit NAME[…] = {name}(x)`"
        t.error(f"'{name}' takes two or more arguments", e.span, hint)
        return None
    if args is None or not all([t.is_number(a, s, f"`{name}`") for a, s in zip(args, e.args)]):  # type: ignore[arg-type]
        return None
    return t.build.fold(name, args, e.span) if t.one_space(e.span, *args) else None


def _sum(t: Typer, e: ast.Call) -> Expr | None:
    bound = t.bind(e, ("x",))
    x = bound and t.expr(bound["x"])
    if not x or not bound or not t.is_number(x, bound["x"], "`sum`"):
        return None
    if x.type.space is None:
        hint = "over keys, `sum` stands in `emit NAME[…] = sum(x)`"
        t.error(f"`sum` adds the features of a vector, not {x.type}", e.span, hint)
        return None
    return t.build.op("sum", x, at=e.span)


def _vector(t: Typer, syntax: ast.Expr, name: str) -> Expr | None:
    """The vector that a norm or rope works on, as f32."""
    x = t.expr(syntax)
    if x is None or not t.is_number(x, syntax, f"`{name}`"):
        return None
    if x.type.space is None:
        t.error(f"`{name}` works on a vector, not {x.type}", syntax.span, "the vectors are `q`, `k`, `v`, `o`")
        return None
    return t.build.f32(x)


def number(t: Typer, syntax: ast.Expr, what: str) -> Expr | None:
    """A scalar, as f32."""
    x = t.expr(syntax)
    if x is None or not t.is_number(x, syntax, what):
        return None
    if x.type.space is not None:
        t.error(f"{what} is a scalar, not {x.type}", syntax.span)
        return None
    return t.build.f32(x)


def _norm(t: Typer, e: ast.Call) -> Expr | None:
    name, at, build = e.function.text, e.span, t.build
    optional = {"rmsnorm": ("weight", "eps"), "layernorm": ("weight", "bias", "eps"), "l2norm": ("eps",)}[name]
    bound = t.bind(e, ("x",), optional)
    if bound is None:
        return None
    x = _vector(t, bound["x"], name)
    eps = number(t, bound["eps"], "eps") if "eps" in bound else build.const(1e-6, at)
    given = {k: bound[k] for k in ("weight", "bias") if k in bound and not _is_none(bound[k])}
    extra = {k: t.expr(syntax) for k, syntax in given.items()}
    if x is None or eps is None or any(v is None for v in extra.values()):
        return None
    normed = getattr(build, name)(x, eps, at)
    for key, op in (("weight", "mul"), ("bias", "add")):
        value = extra.get(key)
        if value is not None:
            if not t.is_number(value, given[key], f"`{name}`") or not t.one_space(at, normed, value):
                return None
            normed = build.floats(op, normed, value, at=at)
    return normed


def _is_none(e: ast.Expr) -> bool:
    return isinstance(e, ast.Name) and e.name == "none"


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
    theta = number(t, bound["theta"], "theta") if "theta" in bound else t.build.const(1e4, e.span)
    dims = _rope_dims(t, bound.get("dims"), x)
    style = _rope_style(t, bound.get("style"))
    scaling = _rope_scaling(t, bound.get("scaling"))
    tables = _rope_tables(t, e, bound, dims)
    if pos is not None and str(pos.type) != "i32":
        t.error(f"rope's pos is i32, not {pos.type}", bound["pos"].span, "positions are `i` and `j`")
        return None
    if (
        x is None
        or pos is None
        or theta is None
        or dims is _WRONG
        or style is None
        or scaling is None
        or tables is None
    ):
        return None
    return t.build.rope(Rope(x, pos, theta, dims, style, scaling, *tables, span=e.span))  # type: ignore[arg-type]


_WRONG = object()


def _rope_dims(t: Typer, syntax: ast.Expr | None, x: Expr | None):
    """An even number of features, or None for all of them."""
    if syntax is None:
        return None
    whole = "head_dim_vo" if x is not None and x.type.space == "e" else "head_dim_qk"
    if isinstance(syntax, ast.Name) and syntax.name == whole:
        return None
    found = t.expr(syntax)
    if found is None:
        return _WRONG
    dims = t.build.value(found)
    if not isinstance(dims, int) or isinstance(dims, bool) or dims < 2 or dims % 2:
        t.error("rope's dims is an even number, known here", syntax.span, f"write 64, or `{whole}` for all features")
        return _WRONG
    return dims


def _rope_style(t: Typer, syntax: ast.Expr | None) -> str | None:
    if syntax is None:
        return "neox"
    if isinstance(syntax, ast.Name) and syntax.name in names.STYLES:
        return syntax.name
    near = names.suggest(syntax.name, names.STYLES) if isinstance(syntax, ast.Name) else None
    t.error("unknown style of rope", syntax.span, near or "it is `neox` (halves) or `interleaved` (pairs)")
    return None


def _rope_scaling(t: Typer, syntax: ast.Expr | None) -> tuple[str | Expr | None, ...] | None:
    if syntax is None or _is_none(syntax):
        return ()
    if not isinstance(syntax, ast.Call) or syntax.function.text not in _SCALINGS:
        word = syntax.function.text if isinstance(syntax, ast.Call) else getattr(syntax, "name", "")
        hint = "it is `none`, `linear(…)`, `llama31(…)` or `yarn(…)`"
        t.error(
            "unknown scaling of rope", syntax.span, names.suggest(word, _SCALINGS) if word not in _SCALINGS else hint
        )
        return None
    required, optional = _SCALINGS[syntax.function.text]
    bound = t.bind(syntax, required, optional)
    if bound is None:
        return None
    found: list[str | Expr | None] = [syntax.function.text]
    good = True
    for key in (*required, *optional):
        default = optional.get(key)
        if key in bound:
            value = number(t, bound[key], key)
            good = good and value is not None
            found.append(value)
        else:
            found.append(None if default is None else t.build.const(default, syntax.span))
    return tuple(found) if good else None


def _rope_tables(t: Typer, e: ast.Call, bound: dict[str, ast.Expr], dims) -> tuple[str | None, str | None] | None:
    """The tensors of cosines and sines, by name."""
    given = [k for k in ("cos", "sin") if k in bound]
    if not given:
        return None, None
    if len(given) == 1:
        t.error(f"rope is given `{given[0]}` alone", bound[given[0]].span, "give both `cos` and `sin`")
        return None
    for key in ("theta", "scaling"):
        if key in bound:
            t.error(f"rope's `{key}` is not used with `cos` and `sin`", bound[key].span, "leave it out")
            return None
    found = [_rope_table(t, bound[k], dims) for k in given]
    return (found[0], found[1]) if all(found) else None


def _rope_table(t: Typer, syntax: ast.Expr, dims) -> str | None:
    hint = "declare `tensor cosines[pos, 64]: f32` and give its bare name"
    binding = t.declared.bindings.get(syntax.name) if isinstance(syntax, ast.Name) else None
    if not isinstance(binding, TensorParam):
        if (
            isinstance(syntax, ast.Name)
            and syntax.name not in t.declared.bindings
            and syntax.name not in names.RESERVED
        ):
            t.expr(syntax)
        elif binding is None or not type(binding).__name__ == "Unknown":
            t.error("rope's cos and sin are tensors [pos, dims // 2]", syntax.span, hint)
        return None
    if (
        len(binding.dims) != 2
        or binding.dims[0] != "pos"
        or binding.dims[1] in ("b", "h", "g", "iq", "j", "pos", "d", "e")
    ):
        t.error(f"'{binding.name}' is not a tensor [pos, dims // 2]", syntax.span, hint)
        return None
    if binding.dtype not in names.FLOAT_DTYPES:
        t.error(f"'{binding.name}' holds {binding.dtype}, not cosines or sines", syntax.span, hint)
        return None
    if isinstance(dims, int) and isinstance(binding.dims[1], int) and binding.dims[1] != dims // 2:
        t.error(f"'{binding.name}' has {binding.dims[1]} columns, not dims // 2 = {dims // 2}", syntax.span)
        return None
    return binding.name


_SPECIAL = {"sum": _sum, "rmsnorm": _norm, "layernorm": _norm, "l2norm": _norm, "rope": _rope}
