"""Vector slots in built kernels, run in the interpreter and judged by the reference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from codegen import simulated as sim
from codegen.simulated import Served, check, inputs_for
from gpu.cases import Case, vector_cases

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("case", vector_cases(), ids=str)
def test_dense(case: Case, artifact: Callable[[Case], Path]) -> None:
    for k, sizes in enumerate([(2, 70, 40, 2, 1), (1, 130, 150, 5, 1)]):
        check(case, artifact(case), inputs_for(case, case.shape(*sizes)), sm_count=1 + k, seed=k)


SERVED = [
    (variant, page_size) for variant, page_size in
    [("turned_back", 16), ("turned_pairs", None), ("turned_by_tables", 5), ("normed_and_turned", 1)]
]  # fmt: skip


@pytest.mark.usefixtures("kernel_cache")
@pytest.mark.parametrize("variant, page_size", SERVED)
def test_served(variant: str, page_size: int | None) -> None:
    """Once, on the merged output, whoever merges."""
    case = next(c for c in vector_cases() if c.variant == variant)
    x = sim.batch(Served(case, page_size), [(1, 700), (40, 200), (3, 0), (0, 20), (5, 17)], (5, 1))
    sim.serve_and_check(x, pieces=2, sm_count=3)
