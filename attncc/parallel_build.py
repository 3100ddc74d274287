"""Several kernels at once: a process a core, a progress bar, a table at the end."""

from __future__ import annotations

import os
import shutil
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from attncc.diagnostics import AttnError, Source


@dataclass(frozen=True)
class Job:
    """One kernel to build: a variant of `source` (named in `options`, arguments of compiler.build_artifact)."""

    source: Source
    output: str
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.options["variant"])


@dataclass(frozen=True)
class Result:
    """What became of a job: the artifact's manifest, or what to tell the user."""

    job: Job
    manifest: dict[str, Any] | None = None
    error: str | None = None


def build_one(job: Job) -> Result:
    """Build in this process.  Whatever goes wrong comes back as text, so that the other jobs go on: the message where
    it is meant for users, the whole traceback where it isn't."""
    from attncc import compiler

    try:
        return Result(job, dict(compiler.build_artifact(job.source, job.output, **job.options)))
    except (AttnError, ValueError, TypeError, RuntimeError, ImportError, OSError) as e:
        return Result(job, error=str(e))
    except Exception:
        return Result(job, error=f"an error of attncc itself:\n{traceback.format_exc()}")


def build_all(jobs: Sequence[Job], processes: int | None = None) -> list[Result]:
    """Build every job in up to `processes` processes (default: one a core); results in order, failures among them."""
    processes = min(processes or os.cpu_count() or 1, len(jobs))
    with _progress(len(jobs)) as advance:
        if processes == 1:
            results = []
            for job in jobs:
                advance(job.name, 0)
                results.append(build_one(job))
                advance(job.name, 1)
            return results
        return _in_processes(jobs, processes, advance)


def _in_processes(jobs: Sequence[Job], processes: int, advance: Callable[[str, int], None]) -> list[Result]:
    from multiprocessing import get_context

    # spawn: a fork of a process that has started threads (torch, rich) may hang; each worker imports cutlass once.
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        futures: dict[Future[Result], Job] = {pool.submit(build_one, job): job for job in jobs}
        waiting = set(futures)
        while waiting:
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                advance(futures[future].name, 1)
    return [_result(future, job) for future, job in futures.items()]


def _result(future: Future[Result], job: Job) -> Result:
    """A job's result, also where its process died (killed for memory, say)."""
    error = future.exception()
    return future.result() if error is None else Result(job, error=f"the process that built it died: {error}")


class _progress:
    """A progress bar on stderr, shown only on a terminal; entering gives `advance(name, steps)`."""

    def __init__(self, total: int):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        console = Console(stderr=True)
        columns = (
            TextColumn("building"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
        )
        self.bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.task = self.bar.add_task("", total=total)

    def __enter__(self) -> Callable[[str, int], None]:
        self.bar.start()
        return lambda name, steps: self.bar.update(self.task, advance=steps, description=name)

    def __exit__(self, *_: object) -> None:
        self.bar.stop()


def show(results: Sequence[Result]) -> int:
    """Print a table of what was built, then what failed on stderr; the exit code."""
    import click
    from rich.console import Console
    from rich.table import Table

    built = [r for r in results if r.manifest is not None]
    if built:
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("kernel", no_wrap=True)
        for title in ("tile", "stages", "registers", "shared memory", "spilled bytes", "build time"):
            table.add_column(title, justify="right", no_wrap=True)
        for r in built:
            assert r.manifest is not None
            for name, kernel in r.manifest["kernels"].items():
                if "stages" in kernel:  # slots of the rings for Q, K and V
                    tile, stages = f"{kernel['tile_q']}×{kernel['tile_kv']}", "/".join(map(str, kernel["stages"]))
                    seconds = f"{kernel['build_seconds']:.1f} s"
                else:  # a pre-pass has no tiles
                    tile = stages = seconds = "-"
                table.add_row(
                    r.job.name if name == "forward" else f"{r.job.name} {name}",
                    tile, stages, str(kernel["registers"]), f"{kernel['smem']:,}", str(kernel["spill_bytes"]), seconds,
                )  # fmt: skip
        Console(highlight=False, width=max(shutil.get_terminal_size().columns, 100)).print(table)
        click.echo("".join(f"{r.job.name} -> {r.job.output}\n" for r in built), nl=False)
    for r in results:
        if r.error is not None:
            click.echo(f"{r.job.name}: not built\n{r.error}", err=True)
    return 0 if len(built) == len(results) else 1
