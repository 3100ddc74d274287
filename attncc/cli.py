"""The command line: click commands and rich tables over compiler, runtime and explain.

Every import that costs time stands inside the command that needs it: `check` and `show` load neither torch nor cutlass.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from attncc.cli_options import (
    ASSIGNMENT,
    TARGET,
    BuildOptions,
    Target,
    argument_errors,
    build_options,
    check_names,
    own_values,
    shape_of,
    shape_options,
)
from attncc.diagnostics import AttnError

if TYPE_CHECKING:
    from attncc.ir.nodes import Variant


class Commands(click.Group):
    """A source error ends any command with its diagnostics on stderr and exit code 1, never with a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except AttnError as e:
            click.echo(str(e), err=True)
            ctx.exit(1)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # in the order in which a user meets them


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="attncc")
def main() -> None:
    """A compiler for attention variants: .attn text in, kernels for Hopper GPUs out.

    \b
    A first tour (none of this needs a GPU):
      attncc check examples/gemma2.attn                       is it right?
      attncc explain examples/gemma2.attn:gemma2_local --qo 8192 --kv 8192
      attncc show examples/gemma2.attn --stage py             what the kernel is given
      attncc build examples/gemma2.attn -o build/gemma2       Hopper kernels
      attncc run examples/gemma2.attn --qo 100 --kv 300       against the float64 reference

    FILE:VARIANT names one variant of a file; FILE alone means all of them.
    """


# ---------------------------------------------------------------------------------------------------- commands


@main.command(short_help="Say what is wrong with .attn files.")
@click.argument("files", nargs=-1, required=True, type=TARGET, metavar="FILE...")
@click.pass_context
def check(ctx: click.Context, files: tuple[Target, ...]) -> None:
    """Say what is wrong with .attn files: file:line:column, the line, and the nearest thing that would work.

    \b
      attncc check examples/*.attn

    Prints a line for each file without errors; exits with 1 where there are any.
    """
    failed = False
    for target in files:
        try:
            _, variants = target.load()
        except AttnError as e:
            click.echo(str(e), err=True)
            failed = True
        else:
            click.echo(f"{target.path}: ok ({', '.join(v.name for v in variants)})")
    ctx.exit(1 if failed else 0)


@main.command(short_help="Print what one stage of the compiler made.")
@click.argument("target", type=TARGET)
@click.option(
    "--stage",
    required=True,
    type=click.Choice(["ast", "ir", "grad", "py", "ptx", "sass"]),
    help="ast: as parsed; ir: typed and simplified; py: the generated module; ptx, sass: the kernel's code; "
    "grad: not supported yet.",
)
@build_options
def show(target: Target, stage: str, options: BuildOptions) -> None:
    """Print what one stage of the compiler made of a variant.

    \b
      attncc show examples/gemma2.attn --stage ir
      attncc show examples/gemma2.attn:gemma2_local --stage sass --head-dim 64
    """
    if stage == "grad":
        raise click.ClickException("--stage grad: gradients are not supported yet; what works: ast, ir, py, ptx, sass")
    from attncc import compiler

    source, variants = target.load()
    check_names(variants, options.const, "--const", const=True)
    if stage == "ast":
        click.echo(compiler.show_ast(source, target.variant).rstrip())
        return
    with argument_errors():
        texts = [compiler.show(source, stage, **options.for_variant(v)) for v in variants]
    click.echo("\n\n".join(text.rstrip() for text in texts))


@main.command(short_help="Build Hopper kernels, on any machine.")
@click.argument("targets", nargs=-1, required=True, type=TARGET, metavar="FILE[:VARIANT]...")
@click.option(
    "-o",
    "--output",
    metavar="DIR",
    help="A new or empty directory, or an artifact to replace; with several kernels, each goes to DIR/VARIANT.  "
    "[default: build/VARIANT]",
)
@click.option("-j", "--jobs", type=click.IntRange(min=1), metavar="N", help="Processes at once.  [default: one a core]")
@build_options
@click.pass_context
def build(
    ctx: click.Context, targets: tuple[Target, ...], output: str | None, jobs: int | None, options: BuildOptions
) -> None:
    """Build Hopper kernels on any machine: no GPU, no driver.

    \b
      attncc build examples/gemma2.attn:gemma2_local -o build/local
      attncc build examples/gemma2.attn examples/gpt_oss.attn --head-dim 64 --dtype f16 -o build/all

    An artifact directory holds cubin, PTX and manifest.json; attncc.load(DIR) runs it with torch, numpy and
    cuda-bindings alone.  Kernels that fail, spilled registers included, are reported at the end, and the exit code is
    1.
    """
    from attncc import parallel_build
    from attncc.outputs import check_output

    work = [(source, v) for source, variants in (t.load() for t in targets) for v in variants]
    check_names([v for _, v in work], options.const, "--const", const=True)
    names = [v.name for _, v in work]
    twice = sorted({n for n in names if names.count(n) > 1})
    folder = "build" if output is None else output
    if twice:
        raise click.ClickException(f"-o {folder}: two kernels would both go to {os.path.join(folder, twice[0])}")
    alone = output is not None and len(work) == 1
    jobs_todo = [
        parallel_build.Job(source, folder if alone else os.path.join(folder, v.name), options.for_variant(v))
        for source, v in work
    ]
    with argument_errors():
        for job in jobs_todo:
            check_output(job.output)
        results = parallel_build.build_all(jobs_todo, jobs)
    ctx.exit(parallel_build.show(results))


@main.command(short_help="Run on random data; error against the reference.")
@click.argument("target", type=TARGET)
@click.option(
    "--backend",
    type=click.Choice(["auto", "cuda", "reference"]),
    default="auto",
    show_default=True,
    help="auto: the GPU when there is one.",
)
@shape_options(batch=1, length=256, heads=8, kv_heads=2)
@build_options
@click.pass_context
def run(
    ctx: click.Context, target: Target, backend: str, options: BuildOptions, seed: int,
    settings: tuple[tuple[str, object], ...], **shape: Any,
) -> None:  # fmt: skip
    """Run a variant once on random data and print its error against the float64 reference.

    \b
      attncc run examples/gemma2.attn:gemma2_local --qo 100 --kv 3000 --set window=512
      attncc run examples/alibi.attn --backend reference --heads 6 --kv-heads 2
      attncc run examples/causal.attn:causal --layout paged --page-size 16 --qo 30 --kv 700

    Tensor parameters are random too.  With --layout ragged or paged the call is a run of BatchAttention, over --batch
    requests of --qo rows and --kv keys and three shorter ones: a row to decode, drafts to verify, and a prompt.  Exits
    with 1 where the result is wrong.
    """
    source, variants = target.load()
    given = dict(settings)
    check_names(variants, options.const, "--const", const=True)
    check_names(variants, given, "--set", const=False)
    size = shape_of(options, **shape)
    from attncc import trial

    ok = True
    with argument_errors():
        name, described = trial.pick_backend(backend)
        call = trial.describe(size, options.layout, options.page_size)
        for variant in variants:
            result = trial.trial(
                source, variant, size, options.for_variant(variant),
                backend=name, seed=seed, given=own_values(variant, given, const=False),
            )  # fmt: skip
            ok = _show_trial(variant, result, described, f"{call}, {options.dtype}, seed {seed}") and ok
    ctx.exit(0 if ok else 1)


TOLERANCE = 2e-2  # relative, in the Frobenius norm: ten times what bf16 rounding leaves


def _show_trial(variant: Variant, result: Any, backend: str, call: str) -> bool:
    """Print one result; true where it agrees with the reference."""
    ok = result.agrees and result.out_error <= TOLERANCE
    lines = [("call", call), ("backend", backend)]
    lines += [(n, f"{v} (chosen: it has no default and no --set)") for n, v in result.inputs.chosen.items()]
    lse = "no lse (scan = none)" if result.lse_max is None else f"lse {result.lse_max:.1e} at most"
    lines.append(("error", f"out {result.out_error:.1e} relative, {result.out_max:.1e} at most; {lse}"))
    lines += [("emit", f"{name} {difference:.1e} at most") for name, difference in result.emit_max.items()]
    if result.not_finite:
        where = "both, in the same places" if result.agrees else "the reference"
        lines.append(("note", f"{result.not_finite} values of out are not finite in {where}"))
    if result.milliseconds is not None:
        lines.append(("time", f"{result.milliseconds:.3f} ms"))
    click.echo(f"{variant.name}: {'ok' if ok else 'WRONG'}, against the float64 reference")
    for label, text in lines:
        click.echo(f"  {label:8} {text}")
    return ok


@main.command(short_help="Show which tiles are empty, full, partial.")
@click.argument("target", type=TARGET)
@click.option("--qo", required=True, type=click.IntRange(min=1), metavar="N", help="Query rows.")
@click.option("--kv", required=True, type=click.IntRange(min=1), metavar="N", help="Key rows.")
@click.option("--png", type=click.Path(dir_okay=False), metavar="FILE", help="Draw the tile map too.")
@click.option(
    "--set",
    "settings",
    type=ASSIGNMENT,
    multiple=True,
    metavar="NAME=VALUE",
    help="Value of a scalar, const or not; may be repeated.  [default: the file's]",
)
def explain(target: Target, qo: int, kv: int, png: str | None, settings: tuple[tuple[str, object], ...]) -> None:
    """Show which tiles of the score matrix are empty, full or partial, and what share of the work is skipped.

    The tiles are of 128 x 128; a kernel whose code needs more registers may take narrower ones.  What the mask reads
    from tensors is unknown here, so it makes no tile empty or full.

    \b
      attncc explain examples/causal.attn:sliding_window --qo 4096 --kv 4096 --set window=512
      attncc explain examples/gemma2.attn:gemma2_local --qo 8192 --kv 8192 --png tiles.png
    """
    from attncc.explain import explain as explain_variant

    _, variants = target.load()
    given = dict(settings)
    check_names(variants, given, "--set", const=None)
    if png is not None and not png.lower().endswith(".png"):
        raise click.ClickException(f"--png {png}: expected a file name that ends in .png")
    if png is not None and len(variants) > 1:
        names = ", ".join(v.name for v in variants)
        raise click.ClickException(f"--png: one variant a picture; name it as FILE:VARIANT, one of {names}")
    with argument_errors():
        for variant in variants:
            explanation = explain_variant(variant, qo, kv, values=own_values(variant, given, const=None))
            click.echo(explanation.text())
            if png is not None:
                try:
                    explanation.png(png)
                except OSError as e:
                    raise click.ClickException(f"--png {png}: cannot write: {e.strerror or e}") from e
                click.echo(f"drawn: {png}")


@main.command(short_help="Time against cuDNN and FlexAttention.")
@click.argument("target", type=TARGET)
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    metavar="N",
    help="Rounds; the order rotates, the median counts.",
)
@shape_options(batch=4, length=4096, heads=32, kv_heads=8)
@build_options
def bench(
    target: Target, rounds: int, options: BuildOptions, seed: int, settings: tuple[tuple[str, object], ...],
    **shape: Any,
) -> None:  # fmt: skip
    """Time a variant on the GPU against cuDNN and FlexAttention, in the same run.

    \b
      attncc bench examples/gemma2.attn:gemma2_local --set window=1024
      attncc bench examples/causal.attn:causal --batch 1 --qo 16384
      attncc bench examples/causal.attn:causal --layout paged --page-size 16 --batch 64 --qo 1 --kv 8192

    cuDNN computes plain full or causal attention whatever the variant: it is a yardstick, FlexAttention a rival.  With
    --layout ragged or paged, BatchAttention is timed beside attncc's dense kernel and cuDNN on the same values.
    """
    source, variants = target.load()
    given = dict(settings)
    check_names(variants, options.const, "--const", const=True)
    check_names(variants, given, "--set", const=False)
    size = shape_of(options, **shape)
    from attncc import benchmark

    with argument_errors():
        benchmark.require_gpu()
        time = benchmark.bench_variant if options.layout == "dense" else benchmark.bench_served
        rows = [
            time(
                source, variant, size, options.for_variant(variant),
                seed=seed, given=own_values(variant, given, const=False), rounds=rounds,
            )
            for variant in variants
        ]  # fmt: skip
    benchmark.show(rows)


if __name__ == "__main__":
    main(prog_name="attncc")
