"""The whole route on one screen: from a source to a kernel, and to what each stage on the way makes.

    Source -> frontend.load -> Variant -> specialize, simplify -> Variant -> config.choose, emit -> text
           -> build -> cubin, manifest -> cache -> Artifact -> Kernel

Every stage is imported where it is used: nothing here loads torch, lark or cutlass before it is needed, and a kernel
that is in the cache needs neither lark nor cutlass.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from attncc.diagnostics import AttnError, Diagnostic, Source

if TYPE_CHECKING:
    from attncc.codegen.config import KernelConfig
    from attncc.codegen.emit import Emitted
    from attncc.ir.nodes import TensorParam, Variant
    from attncc.ir.reference import Reference
    from attncc.runtime.artifact import Artifact
    from attncc.runtime.kernel import Kernel

DTYPES = {"bf16": "bf16", "f16": "f16", "torch.bfloat16": "bf16", "torch.float16": "f16"}
LAYOUTS, ARCHITECTURES = ("dense", "ragged", "paged", "blocks"), ("sm_90a",)
PAGED = ("paged", "blocks")
STAGES = ("ast", "ir", "py", "ptx", "sass")
MAX_HEAD_DIM = 256
POSITIONS = frozenset(("b", "i", "j", "qo_len", "kv_len"))
OF_REQUEST = frozenset(("b", "qo_len", "kv_len"))
MAX_PAGE_SIZE = 1 << 20  # rows


@dataclass(frozen=True)
class Options:
    """What a source doesn't say and a kernel must know; checked and in one spelling."""

    head_dim_qk: int
    head_dim_vo: int
    dtype: str
    layout: str
    page_size: int | None  # rows of a page, where the layout is paged; keys of a block, where it is blocks
    arch: str
    const: Mapping[str, int | float | bool]
    prepass: bool | None = None  # are f_k and f_v applied before the kernel?  None: each call chooses


# ---------------------------------------------------------------------- what users call


def compile(
    source: str | Path | Source, *, variant: str | None = None, head_dim: int, head_dim_vo: int | None = None,
    dtype: Any = "bf16", const: Mapping[str, object] | None = None, layout: str = "dense",
    page_size: int | None = None, arch: str = "sm_90a", prepass: bool | None = None,
) -> Kernel:  # fmt: skip
    """The kernel of a variant, from the cache where it was built before.

    `source`: .attn text where it contains a newline, else a path.  `variant` may be left out for a file with one.
    `head_dim` of q and k, `head_dim_vo` of v and out (default: the same): multiples of 8 up to 256.  `dtype`:
    torch.bfloat16 or torch.float16 (or "bf16", "f16").  `const`: values of const parameters.  `layout`: what is
    built now, "dense", or for BatchAttention "ragged", "paged" with pages of `page_size` rows, or "blocks" of
    `page_size` keys (plan_block_sparse); the others are built when they are asked for.  `prepass`: dense or ragged k
    and v go through f_k and f_v once, by a kernel of their own (True), in the attention kernel as often as it reads
    them (False), or as each call, or plan, finds faster (None); caches in pages are never copied.  What f_v makes of a
    key must be finite even where the mask hides it, but for a factor in the attention kernel.

    Raises AttnError for what is wrong with the source or can't be done on the target, ValueError and TypeError for
    the other arguments.
    """
    options = _options(head_dim, head_dim_vo, dtype, const, layout, page_size, arch, prepass)
    src = _source(source)
    key = _key(src, variant, options)
    kernel = _kernels.get(key)
    if kernel is None:
        from attncc.runtime.kernel import Kernel

        def build(layout: str, page_size: int | None) -> Artifact:
            """The same variant for another layout."""
            _check_prepass(prepass, layout)
            return _artifact(src, variant, replace(options, layout=layout, page_size=page_size))

        kernel = _kernels.setdefault(key, Kernel(_artifact(src, variant, options), build=build))
    return kernel


_kernels: dict[str, Kernel] = {}


def load(path: str | Path) -> Kernel:
    """The kernel of an artifact directory.  Raises ValueError where the artifact isn't whole."""
    from attncc.runtime.artifact import read_artifact
    from attncc.runtime.kernel import Kernel

    return Kernel(read_artifact(path))


def reference(
    source: str | Path | Source, *, variant: str | None = None, head_dim: int, head_dim_vo: int | None = None,
    dtype: Any = "bf16", const: Mapping[str, object] | None = None, layout: str = "dense",
    page_size: int | None = None, arch: str = "sm_90a", prepass: bool | None = None, compute_dtype: Any = None,
) -> Reference:  # fmt: skip
    """The oracle: the variant as a plain function in float64 (or `compute_dtype`) on tensors of any float dtype,
    anywhere.  Takes the arguments of `compile`; honours every feature of the language and every layout (`.ragged`,
    `.paged`), whatever `layout`, `page_size`, `arch` and `prepass` say.  Raises as `compile` does."""
    import torch

    from attncc.ir.reference import Reference

    dims, values = _dims(head_dim, head_dim_vo), _const_values(const)
    chosen = _choose(variants(source), variant, _source(source))
    taken: Any = {"bf16": torch.bfloat16, "f16": torch.float16}.get(dtype, dtype)
    made = Reference(
        chosen, head_dim=dims["head_dim"], head_dim_vo=dims["head_dim_vo"], dtype=taken, const=values,
        compute_dtype=torch.float64 if compute_dtype is None else compute_dtype,
    )  # fmt: skip
    # refuses what a build would: a const that makes a divisor 0, a rope of more features than there are
    options = Options(dims["head_dim"], dims["head_dim_vo"], "bf16", layout, page_size, arch, values)
    raise_all(misfitting(specialized(chosen, options), options))
    return made


# ---------------------------------------------------------------------- stages


def variants(source: str | Path | Source) -> tuple[Variant, ...]:
    """The variants of a source, checked and lowered.  Raises AttnError with all that is wrong."""
    from attncc import frontend

    return frontend.load(_source(source))


def specialized(variant: Variant, options: Options) -> Variant:
    """The variant with its const parameters and head dims filled in, simplified.  AttnError where these make an
    integer divisor 0, or a block of a domain smaller than a key."""
    from attncc.ir.rewrite import simplify, specialize
    from attncc.ir.verify import VerifyError

    dims = {"head_dim_qk": options.head_dim_qk, "head_dim_vo": options.head_dim_vo}
    special = specialize(variant, const=options.const, **dims)
    try:
        return simplify(special)
    except VerifyError as e:
        if e.node is None or variant.source is None:
            raise
        fixed = [f"{p.name} = {p.default}" for p in special.scalars if p.const]
        hint = ", ".join(["with " + s if n == 0 else s for n, s in enumerate(fixed)]) or None
        raise AttnError([Diagnostic(e.reason, variant.source, e.node.span, hint)]) from None


def for_kernels(variant: Variant) -> Variant:
    """A specialized variant with slots that kernels don't have in terms of those that they have."""
    from attncc.ir.fold_vectors import fold_vectors
    from attncc.ir.rewrite import simplify

    return simplify(fold_vectors(variant))


class Generated(NamedTuple):
    """The functor module of a variant, the kernel it goes into, and the variant as kernels have it (for_kernels)."""

    emitted: Emitted
    config: KernelConfig
    variant: Variant


def generated(variant: Variant, options: Options) -> Generated:
    """Of a specialized variant.  AttnError where kernels can't."""
    from attncc.codegen import config, emit

    variant = for_kernels(variant)
    refuse(variant, options)
    chosen = config.choose(
        variant, head_dim_qk=options.head_dim_qk, head_dim_vo=options.head_dim_vo, dtype=options.dtype,
        layout=options.layout, page_size=options.page_size,
    )  # fmt: skip
    return Generated(emit.emit(variant, chosen), chosen, variant)


def built(src: Source, variant: str | None, options: Options) -> tuple[dict[str, Any], dict[str, bytes]]:
    """(manifest, files) of a variant: the route from text to cubin."""
    written = _choose(variants(src), variant, src)
    special = specialized(written, options)
    emitted, config, in_kernel = generated(special, options)
    import tempfile

    from attncc.codegen import listing, prepass
    from attncc.codegen.build import DoesNotFit, build
    from attncc.codegen.emit import emit
    from attncc.ir.fold_vectors import of_keys

    slots = of_keys(special)
    if options.prepass and not slots:
        raise ValueError(
            f"prepass: expected None or False, since {written.name} transforms neither k nor v, and has no factor of "
            f"each key, found True"
        )
    ahead = slots and options.prepass is not False and options.layout in prepass.LAYOUTS
    parts: list[tuple[Any, ...]] = [] if ahead and options.prepass else [(config.name, build, emitted, config)]
    if ahead:
        other, plain, alone = generated(prepass.prepared(special, slots), options)
        plain = replace(plain, prepared=True)
        factors = {slot[-1]: c for slot, c in slots.items() if c is not None}
        if options.layout == "dense" and len(factors) == len(slots):
            plain = replace(plain, ahead="".join(factors))
            other = emit(alone, plain, factors)
        parts.append((plain.name, build, other, plain))
        if not plain.ahead:
            parts.append((prepass.NAME, prepass.build, *prepass.generated(special, config, slots), slots))
    if config.lists_by:
        parts.append((listing.NAME, listing.build, emitted, config))
    kernels, files = {}, {}
    with tempfile.TemporaryDirectory(prefix="attncc-build-") as work_dir:
        for name, make, *part in parts:
            try:
                kernels[name], made = make(*part, work_dir)
            except DoesNotFit as e:
                if ahead and name == config.name:
                    continue  # the choice was left to us: keys always go through the pre-pass
                raise AttnError([too_large(in_kernel, options, str(e))]) from e
            files |= made
    return _manifest(src, written, special, in_kernel, options, kernels), files


def _artifact(src: Source, variant: str | None, options: Options) -> Artifact:
    """The built kernel of a variant.  Page sizes that make no difference to it share one entry of the cache."""
    from attncc import cache

    if options.page_size is None:
        return cache.get_or_build(_key(src, variant, options), lambda: built(src, variant, options))
    from attncc.codegen.config import page_unit

    like = replace(options, page_size=page_unit(options.page_size))
    found = cache.get_or_build(_key(src, variant, like), lambda: built(src, variant, like))
    return replace(found, manifest={**found.manifest, "page_size": options.page_size})


def build_artifact(source: str | Path | Source, out_dir: str | Path, *, variant: str | None = None, **options: Any):
    """Put the artifact of a variant into `out_dir`; arguments and errors as of `compile`.  Returns its manifest."""
    from attncc.codegen.artifact import write_artifact
    from attncc.outputs import check_output

    src, chosen = _source(source), _options(**_with_defaults(options))
    check_output(out_dir)
    found = _artifact(src, variant, chosen)
    manifest = {**found.manifest, "variant": {**found.manifest["variant"], "path": src.name}}
    del manifest["key"]
    return write_artifact(out_dir, manifest, {name: (found.path / name).read_bytes() for name in manifest["files"]})


def show(source: str | Path | Source, stage: str, *, variant: str | None = None, **options: Any) -> str:
    """What a stage makes of a variant, as text.  `stage`: ast, ir, py, ptx, sass; the rest as of `compile`."""
    if stage not in STAGES:
        raise ValueError(f"stage: expected one of {', '.join(STAGES)}, found {stage!r}")
    src = _source(source)
    if stage == "ast":
        return show_ast(src, variant)
    chosen = _options(**_with_defaults(options))
    if stage in ("ir", "py"):
        special = specialized(_choose(variants(src), variant, src), chosen)
        if stage == "py":
            return generated(special, chosen).emitted.text
        from attncc.ir.text import print_variant

        return print_variant(special)
    found = _artifact(src, variant, chosen)
    if stage == "ptx":
        return "\n".join((found.path / f"{name}.ptx").read_text(encoding="utf-8") for name in found.cubins)
    from attncc.codegen.cubin import disassemble

    return "\n".join(map(disassemble, found.cubins.values()))


def show_ast(source: str | Path | Source, variant: str | None = None) -> str:
    """The syntax tree of a source, or of one variant of it.  Raises AttnError for a syntax error."""
    from dataclasses import replace

    from attncc import frontend
    from attncc.frontend import ast

    src = _source(source)
    file = frontend.parse(src)
    if variant is not None:
        file = replace(file, variants=(_choose(file.variants, variant, src),))
    return ast.dump(file)


# ---------------------------------------------------------------------- arguments


def _source(source: str | Path | Source) -> Source:
    if isinstance(source, Source):
        return source
    if not isinstance(source, (str, Path)):
        raise TypeError(f"source: expected .attn text or a path, found {type(source).__name__}")
    return Source.of(source)


def _with_defaults(options: dict[str, Any]) -> dict[str, Any]:
    defaults = {"head_dim_vo": None, "dtype": "bf16", "const": None, "layout": "dense",
                "page_size": None, "arch": "sm_90a", "prepass": None}  # fmt: skip
    for name in options:
        if name != "head_dim" and name not in defaults:
            raise TypeError(f"{name}: unknown option; there are head_dim, {', '.join(defaults)}")
    if "head_dim" not in options:
        raise TypeError("head_dim: expected, found nothing")
    return {**defaults, **options}


def _options(
    head_dim: Any, head_dim_vo: Any, dtype: Any, const: Any, layout: Any, page_size: Any, arch: Any, prepass: Any = None
) -> Options:  # fmt: skip
    """Checked options.  Raises ValueError and TypeError naming the argument."""
    dims = _dims(head_dim, head_dim_vo)
    for name, value in dims.items():
        if value % 8 or not 8 <= value <= MAX_HEAD_DIM:
            raise ValueError(f"{name}: expected a multiple of 8 from 8 to {MAX_HEAD_DIM}, found {value}")
    if str(dtype) not in DTYPES:
        raise ValueError(f"dtype: expected torch.bfloat16 or torch.float16 (or 'bf16', 'f16'), found {dtype}")
    for name, value, works in (("layout", layout, LAYOUTS), ("arch", arch, ARCHITECTURES)):
        if value not in works:
            raise ValueError(f"{name}: expected one of {', '.join(map(repr, works))}, found {value!r}")
    _check_prepass(prepass, layout)
    return Options(
        dims["head_dim"], dims["head_dim_vo"], DTYPES[str(dtype)], layout, _page_size(layout, page_size), arch,
        _const_values(const), prepass,
    )  # fmt: skip


def _check_prepass(prepass: Any, layout: str) -> None:
    if prepass is not None and not isinstance(prepass, bool):
        raise TypeError(f"prepass: expected None, True or False, found {type(prepass).__name__}")
    if prepass and layout in PAGED:
        what = "a cache in pages" if layout == "paged" else "keys listed in blocks"
        raise ValueError(
            f"prepass: expected None or False with layout {layout!r}, since a pre-pass would copy {what}, of which a "
            f"call may read a small part, found True; nearest: f_k and f_v in the kernel (prepass=False)"
        )


def _page_size(layout: str, page_size: Any) -> int | None:
    """Rows of a page, or keys of a block: given with these layouts, and only there."""
    if layout not in PAGED:
        if page_size is not None:
            raise ValueError(f"page_size: expected none with layout {layout!r}, found {page_size!r}")
        return None
    if page_size is None:
        raise ValueError(f"page_size: expected the rows of a page, since layout is {layout!r}, found none")
    if not isinstance(page_size, numbers.Integral) or isinstance(page_size, bool):
        raise TypeError(f"page_size: expected an int, found {type(page_size).__name__}")
    rows = int(page_size)
    if not 1 <= rows <= MAX_PAGE_SIZE:
        raise ValueError(f"page_size: expected 1 to {MAX_PAGE_SIZE}, found {rows}")
    return rows


def _dims(head_dim: Any, head_dim_vo: Any) -> dict[str, int]:
    dims = {"head_dim": head_dim, "head_dim_vo": head_dim if head_dim_vo is None else head_dim_vo}
    for name, value in dims.items():
        if not isinstance(value, numbers.Integral) or isinstance(value, bool):
            raise TypeError(f"{name}: expected an int, found {type(value).__name__}")
    return {name: int(value) for name, value in dims.items()}


def _const_values(const: Any) -> dict[str, int | float | bool]:
    if const is not None and not isinstance(const, Mapping):
        raise TypeError(f"const: expected a dict of parameter names and values, found {type(const).__name__}")
    return {name: _const_value(name, value) for name, value in (const or {}).items()}


def _const_value(name: Any, value: Any) -> int | float | bool:
    """A plain Python number: numpy's scalars are taken, tensors and strings are not."""
    if not isinstance(name, str):
        raise TypeError(f"const: expected parameter names as keys, found {name!r}")
    if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):
        return bool(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    raise TypeError(f"const[{name!r}]: expected an int, float or bool, found {type(value).__name__}")


def _choose(found: tuple[Any, ...], name: str | None, src: Source) -> Any:
    """The variant of that name, or the only one."""
    names = [str(v.name) for v in found]
    if name is None:
        if len(found) == 1:
            return found[0]
        raise ValueError(f"variant: expected one of {', '.join(names)}, since {src.name} has several, found none")
    if name in names:
        return found[names.index(name)]
    import difflib

    close = difflib.get_close_matches(str(name), names, 1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"variant: expected one of {', '.join(names)}, as in {src.name}, found {name!r}{hint}")


def refuse(variant: Variant, options: Options) -> None:
    """AttnError for every part of a specialized variant that kernels can't honour, or that head dims make wrong, with
    where it stands."""
    from attncc.codegen.limits import refused

    raise_all([*refused(variant, options.layout), *misfitting(variant, options)])


def misfitting(variant: Variant, options: Options) -> list[Diagnostic]:
    """What head dims make wrong with a specialized variant."""
    from attncc.codegen.vectors import misfits

    src = variant.source or Source(variant.name, "")
    head_dims = {"d": options.head_dim_qk, "e": options.head_dim_vo}
    return [Diagnostic(message, src, rope.span, hint) for rope, message, hint in misfits(variant, head_dims)]


def too_large(variant: Variant, options: Options, reason: str) -> Diagnostic:
    """A kernel has no room for what the variant computes; said of the slot that mostly asks too much."""
    from attncc.codegen.limits import REFERENCE
    from attncc.codegen.vectors import used_slots

    used = [*used_slots(variant), "f_logits"]
    slot = next(name for name in ("epilogue", "f_v", "f_k", "f_q", "f_logits") if name in used)
    dims = f"{options.head_dim_qk}/{options.head_dim_vo}"
    message = f"{slot}: a kernel for head dims {dims} and {options.layout} keys has no room for this variant ({reason})"
    hint = f"nearest: smaller head dims, or {REFERENCE}"
    return Diagnostic(message, variant.source or Source(variant.name, ""), variant.span_of(slot), hint)


def raise_all(problems: list[Diagnostic]) -> None:
    if problems:
        raise AttnError(problems)


# ---------------------------------------------------------------------- key and manifest


def _key(src: Source, variant: str | None, options: Options) -> str:
    """The cache's key of a kernel.  The exact version of nvidia-cutlass-dsl is in it: the compiler's text pins it."""
    from attncc import cache
    from attncc.runtime.artifact import SCHEMA

    return cache.key_of({"source": src.text, "variant": variant, "options": asdict(options), "schema": SCHEMA})


def _manifest(
    src: Source, written: Variant, special: Variant, in_kernel: Variant, options: Options, kernels: dict
) -> dict[str, Any]:  # fmt: skip
    import hashlib

    from attncc import __version__
    from attncc.codegen import vectors, work
    from attncc.codegen.config import DSL_VERSION
    from attncc.codegen.emit_outputs import number_of
    from attncc.codegen.listing import described
    from attncc.ir.text import print_variant

    served = {} if options.layout == "dense" else _served(special, in_kernel, options)
    if special.domain is not None:
        served |= {"domain": described(special.domain)}
    columns = vectors.table_columns(special, {"d": options.head_dim_qk, "e": options.head_dim_vo})

    def dims_of(t: TensorParam) -> list[str | int]:
        return [*t.dims[:-1], columns.get(t.name, t.dims[-1])]

    return {
        "attncc": __version__, "dsl": DSL_VERSION, "arch": options.arch,
        "variant": {
            "name": written.name, "path": src.name, "source": src.text,
            "sha256": hashlib.sha256(src.text.encode()).hexdigest(), "ir": print_variant(special),
        },
        "head_dim_qk": options.head_dim_qk, "head_dim_vo": options.head_dim_vo, "dtype": options.dtype,
        "layout": options.layout, **served, "visible": work.visible(in_kernel), "scan": written.scan.kind,
        "const": {p.name: p.default for p in special.scalars if p.const},  # specialize left the values there
        "scalars": [
            {"name": p.name, "type": p.type.elem, "default": p.default} for p in written.scalars if not p.const
        ],
        "tensors": [
            {"name": t.name, "dims": dims_of(t), "dtype": t.dtype, "sorted": t.sorted} for t in written.tensors
        ],
        "emits": [
            {"name": e.name, "index": list(e.index), "reduce": e.reduce, "rows": number_of(special, e)}
            for e in special.emits
        ],
        "kernels": kernels,
    }  # fmt: skip


def _served(special: Variant, in_kernel: Variant, options: Options) -> dict[str, Any]:
    """What planning must know of a variant beside what is visible: what of positions it reads, and what of a request
    keys depend on where the kernel transforms them (a factor of a key is that of each row's own request)."""
    from attncc.codegen import vectors
    from attncc.ir.nodes import leaves

    transformed = [leaves(getattr(in_kernel, slot)) for slot in vectors.used_slots(in_kernel) if slot in ("f_k", "f_v")]
    reads = frozenset[str]().union(*(leaves(e) for _, e in special.expressions()))
    if special.domain is not None:
        reads = reads.union(*(leaves(e) for e in (*special.domain.index, special.domain.size) if e is not None), {"j"})
    return {
        "page_size": options.page_size, "positions": sorted(reads & POSITIONS),
        "keys_by_request": sorted(frozenset().union(*transformed) & OF_REQUEST),
    }  # fmt: skip
