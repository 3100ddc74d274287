"""What the commands take: FILE:VARIANT, NAME=VALUE, and the options that several of them share."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from attncc.diagnostics import AttnError, Diagnostic, Source

if TYPE_CHECKING:
    from attncc.ir.nodes import Variant


@dataclass(frozen=True)
class Target:
    """FILE or FILE:VARIANT."""

    path: str
    variant: str | None = None

    def load(self) -> tuple[Source, tuple[Variant, ...]]:
        """The source and the variants that are meant.  Raises AttnError, also for a variant that isn't there."""
        from attncc import compiler

        source = Source.read(self.path)
        variants = compiler.variants(source)
        if self.variant is None:
            return source, variants
        chosen = tuple(v for v in variants if v.name == self.variant)
        if not chosen:
            names = [v.name for v in variants]
            near = difflib.get_close_matches(self.variant, names, 1)
            hint = f"did you mean '{near[0]}'?" if near else f"it has: {', '.join(names)}"
            raise AttnError([Diagnostic(f"no variant '{self.variant}'", source, hint=hint)])
        return source, chosen


class TargetType(click.ParamType):
    name = "FILE[:VARIANT]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Target:
        if isinstance(value, Target):
            return value
        path, colon, variant = value.rpartition(":")
        if os.path.exists(value) or not colon or not variant.isidentifier():
            return Target(value)  # a file may have ':' in its name
        return Target(path, variant)


class Assignment(click.ParamType):
    """NAME=VALUE; the value is an integer, a number, or true / false."""

    name = "NAME=VALUE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, object]:
        if isinstance(value, tuple):
            return value
        name, equals, text = value.partition("=")
        if not equals or not name.isidentifier():
            self.fail(f"expected NAME=VALUE, found {value!r}", param, ctx)
        if text.lower() in ("true", "false"):
            return name, text.lower() == "true"
        for number in (int, float):
            try:
                return name, number(text)
            except ValueError:
                continue
        self.fail(f"{name}: expected an integer, a number, true or false, found {text!r}", param, ctx)


TARGET, ASSIGNMENT = TargetType(), Assignment()
ARCHITECTURES, LAYOUTS, DTYPES = ("sm_90a",), ("dense", "ragged", "paged"), ("bf16", "f16")


@dataclass(frozen=True)
class BuildOptions:
    """What a variant does not say and a kernel must know; `const` as given, for all targets together."""

    head_dim: int = 128
    head_dim_vo: int | None = None
    dtype: str = "bf16"
    arch: str = "sm_90a"
    layout: str = "dense"
    page_size: int | None = None
    prepass: bool | None = None
    const: dict[str, object] = field(default_factory=dict)

    def for_variant(self, variant: Variant) -> dict[str, Any]:
        """Keyword arguments for the compiler: the const values that `variant` has, in their declared types."""
        return {
            "variant": variant.name, "head_dim": self.head_dim, "head_dim_vo": self.head_dim_vo,
            "dtype": self.dtype, "layout": self.layout, "page_size": self.page_size, "prepass": self.prepass,
            "const": own_values(variant, self.const, const=True),
        }  # fmt: skip


def build_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that build, run, bench and show share; the command receives them as one `options`."""
    import functools

    @functools.wraps(command)
    def wrapped(**given: Any) -> None:
        kv_dtype = given.pop("kv_dtype")
        names = ("head_dim", "head_dim_vo", "dtype", "arch", "layout", "page_size", "prepass")
        options = BuildOptions(**{name: given.pop(name) for name in names}, const=dict(given.pop("const")))
        _refuse_unsupported(options, kv_dtype)
        command(options=options, **given)

    for option in reversed([
        click.option("--head-dim", type=int, default=128, show_default=True, metavar="N",
                     help="Head dimension of q and k: a multiple of 8 up to 256."),
        click.option("--head-dim-vo", type=int, metavar="N",
                     help="Head dimension of v and out.  [default: --head-dim]"),
        click.option("--dtype", type=click.Choice(DTYPES), default="bf16", show_default=True,
                     help="Type of q, k, v and out."),
        click.option("--kv-dtype", type=click.Choice(["bf16", "f16", "e4m3"]),
                     help="Type of k and v; for now it must be --dtype."),
        click.option("--layout", type=click.Choice(LAYOUTS), default="dense", show_default=True,
                     help="How requests lie in memory; ragged and paged kernels are for BatchAttention."),
        click.option("--page-size", type=int, metavar="N", help="Rows of a page, with --layout paged."),
        click.option("--prepass/--no-prepass", default=None,
                     help="Apply f_k and f_v by a kernel of their own, or in the attention kernel.  [default: each "
                     "call chooses]"),
        click.option("--arch", type=click.Choice(ARCHITECTURES), default="sm_90a", show_default=True, help="Target."),
        click.option("--const", type=ASSIGNMENT, multiple=True, metavar="NAME=VALUE",
                     help="Value of a const parameter; may be repeated."),
    ]):  # fmt: skip
        wrapped = option(wrapped)
    return wrapped


def _refuse_unsupported(options: BuildOptions, kv_dtype: str | None) -> None:
    if kv_dtype not in (None, options.dtype):
        raise click.ClickException(
            f"--kv-dtype {kv_dtype}: keys and values of another type than q are not supported yet; "
            f"what works: --kv-dtype {options.dtype}"
        )
    if options.layout == "paged" and options.page_size is None:
        raise click.ClickException("--layout paged: expected --page-size N, the rows of a page")
    if options.layout != "paged" and options.page_size is not None:
        raise click.ClickException("--page-size: goes with --layout paged")
    if options.layout == "paged" and options.prepass:
        raise click.ClickException("--prepass: a cache in pages is never copied; what works: --no-prepass")
    from attncc.compiler import MAX_PAGE_SIZE

    if options.page_size is not None and not 1 <= options.page_size <= MAX_PAGE_SIZE:
        raise click.ClickException(f"page_size: expected 1 to {MAX_PAGE_SIZE}, found {options.page_size}")


def own_values(variant: Variant, given: dict[str, object], *, const: bool | None) -> dict[str, object]:
    """Those of the `given` values that belong to scalars of `variant`; an integer becomes a float for an f32.
    ClickException for a value of another type.

    `const`: true for const parameters, false for run-time ones, None for both.
    """
    kinds = {p.name: p.type.elem for p in variant.scalars if const in (None, p.const)}
    values: dict[str, object] = {}
    for name, value in given.items():
        if name in kinds:
            kind = kinds[name]
            takes = {"bool": bool, "i32": int, "f32": int | float}[kind]
            good = isinstance(value, takes) and isinstance(value, bool) == (kind == "bool")
            if not good or (kind == "i32" and not -(2**31) <= value < 2**31):  # type: ignore[operator]
                raise click.ClickException(f"{name}: expected {kind}, found {str(value).lower()}")
            values[name] = float(value) if kind == "f32" else value  # type: ignore[arg-type]
    return values


def check_names(variants: Sequence[Variant], given: dict[str, object], option: str, *, const: bool | None) -> None:
    """Every NAME of --const or --set belongs to one of the variants at least."""
    known = {p.name for v in variants for p in v.scalars if const in (None, p.const)}
    for name in given:
        if name not in known:
            kind = "scalar" if const is None else "const parameter" if const else "run-time scalar"
            there = f"there is: {', '.join(sorted(known)) or 'none'}"
            if any(p.name == name for v in variants for p in v.scalars):
                there = "it is a run-time scalar: --set" if const else "it is a const parameter: --const"
            raise click.ClickException(f"{option} {name}: no {kind} of that name; {there}")


@contextmanager
def argument_errors() -> Iterator[None]:
    """What compiler, runtime and reference raise for bad arguments is a message for the user: it names the argument."""
    try:
        yield
    except (ValueError, TypeError, RuntimeError, IndexError, ZeroDivisionError) as e:
        raise click.ClickException(str(e)) from e


def shape_options(batch: int, length: int, heads: int, kv_heads: int) -> Callable[..., Any]:
    """Options for the shape of a call and its parameters, with these defaults."""

    def add(command: Callable[..., None]) -> Callable[..., None]:
        count = click.IntRange(min=0)
        for option in reversed([
            click.option("--batch", type=count, default=batch, show_default=True, metavar="N", help="Requests."),
            click.option("--qo", type=count, default=length, show_default=True, metavar="N", help="Query rows each."),
            click.option("--kv", type=count, metavar="N", help="Key rows each.  [default: --qo]"),
            click.option("--heads", type=click.IntRange(min=1), default=heads, show_default=True, metavar="N",
                         help="Query heads."),
            click.option("--kv-heads", type=click.IntRange(min=1), default=kv_heads, show_default=True, metavar="N",
                         help="Key/value heads."),
            click.option("--seed", type=int, default=0, show_default=True, metavar="N", help="Of the random data."),
            click.option("--set", "settings", type=ASSIGNMENT, multiple=True, metavar="NAME=VALUE",
                         help="Value of a run-time scalar; may be repeated.  [default: the file's]"),
        ]):  # fmt: skip
            command = option(command)
        return command

    return add


def shape_of(options: BuildOptions, batch: int, qo: int, kv: int | None, heads: int, kv_heads: int) -> Any:
    from attncc.random_inputs import Shape

    if heads % kv_heads:
        raise click.ClickException(f"--heads: expected a multiple of the {kv_heads} kv heads, found {heads}")
    head_dim_vo = options.head_dim if options.head_dim_vo is None else options.head_dim_vo
    return Shape(batch, qo, qo if kv is None else kv, heads, kv_heads, options.head_dim, head_dim_vo)
