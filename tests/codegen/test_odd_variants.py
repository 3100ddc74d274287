"""One variant for each corner of the emitter, built and run in the interpreter against the reference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from codegen.test_forward_sim import artifact, check, inputs_for  # noqa: F401  (artifact is a fixture)
from gpu.cases import Case

from attncc import compiler

SOURCE = Path(__file__).with_name("odd.attn")
SCALARS: dict[str, list[dict[str, object]]] = {
    "run_time_scale": [{"sm_scale": 0.1}, {"sm_scale": -0.1}, {"sm_scale": 0.0}],
    "run_time_cap": [{"cap": 4.0}, {"cap": -4.0}],
    "weights_and_epilogue": [{"a": 0.3}],
    "flags": [{"strict": True}, {"strict": False}],
    "holes_and_cap": [{"period": 3}, {"period": 1}],
    "wrapped": [{"window": 60}, {"window": 0}, {"window": 2**31 - 1}, {"window": -5}],
}
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", [v.name for v in compiler.variants(SOURCE)])
def test_odd_variant(name: str, artifact: Callable[[Case], Path]) -> None:  # noqa: F811
    case = Case(str(SOURCE), name, head_dim=64)
    for given in SCALARS.get(name, [{}]):
        for k, sizes in enumerate([(2, 70, 200, 4, 2), (1, 150, 90, 2, 1)]):
            check(case, artifact(case), inputs_for(case, case.shape(*sizes), **given), sm_count=1 + k, seed=k)
