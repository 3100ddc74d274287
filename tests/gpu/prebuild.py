"""Fill the kernel cache (ATTNCC_CACHE_DIR) with every kernel of `cases.py` and `serve_cases.py`, and the small ones
beside attention; needs no GPU."""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import cases
import serve_cases

from attncc import utilities


def build(case: cases.Case | serve_cases.Served | str) -> str | None:
    """What went wrong, or None.  A name is that of a small kernel."""
    from attncc import compiler, utilities
    from attncc.diagnostics import AttnError

    try:
        if isinstance(case, str):
            utilities.artifact(case)
            return None
        compiler.compile(case.source, **case.options)  # pyright: ignore[reportArgumentType]
    except (AttnError, ValueError, TypeError, RuntimeError) as e:
        return f"{case}: {e}"
    return None


def main() -> int:
    start = time.perf_counter()
    todo = [*cases.all_cases(), *serve_cases.all_served(), *utilities.names()]
    with ProcessPoolExecutor(min(os.cpu_count() or 1, len(todo)), mp_context=get_context("spawn")) as pool:
        failed = [e for e in pool.map(build, todo) if e is not None]
    for e in failed:
        print(e, file=sys.stderr)
    print(f"{len(todo) - len(failed)} of {len(todo)} kernels in {time.perf_counter() - start:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
