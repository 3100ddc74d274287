"""One variant for each corner of the emitter, built and run in the interpreter against the reference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from codegen.simulated import check, inputs_for
from gpu.cases import ODD_SCALARS, Case, odd_cases

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("case", odd_cases(), ids=str)
def test_odd_variant(case: Case, artifact: Callable[[Case], Path]) -> None:
    for given in ODD_SCALARS.get(case.variant, [{}]):
        for k, sizes in enumerate([(2, 70, 200, 4, 2), (1, 150, 90, 2, 1)]):
            check(case, artifact(case), inputs_for(case, case.shape(*sizes), **given), sm_count=1 + k, seed=k)
