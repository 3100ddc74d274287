"""Vector slots in built kernels, run in the interpreter and judged by the reference."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
from codegen import simulated as sim
from codegen.simulated import Served, check, inputs_for
from gpu.cases import Case, example, vector_cases
from gpu.cases import vectors as of_vectors

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("kernel_cache")]


def test_parts_of_a_row_take_every_feature_once() -> None:
    device = pytest.importorskip("attncc.codegen.device.vectors")
    for blocks, style in product(range(17, 33), ("neox", "interleaved")):
        for dims in range(4, 8 * blocks + 1, 4):
            found = [
                (8 * (run.first + n) + offset + 2 * lane + c, run.turns)
                for run in device.runs_of([("rope", dims, style, 0, 1)], blocks, True)
                for n, offset, lane, c in product(range(run.count), run.offsets, range(run.begin, run.end), range(2))
            ]
            assert sorted(found) == [(n, n < dims) for n in range(8 * blocks)]
        runs = device.runs_of([("sum",)], blocks, False, 4)
        eights = [run.first + n + at // 8 for run in runs for n, at in product(range(run.count), run.offsets)]
        assert sorted(eights) == list(range(blocks)) and len(runs[0].offsets) == 4


@pytest.mark.parametrize("case", vector_cases(), ids=str)
def test_dense(case: Case, artifact: Callable[[Case], Path]) -> None:
    for k, sizes in enumerate([(2, 70, 40, 2, 1), (1, 130, 150, 5, 1)]):
        check(case, artifact(case), inputs_for(case, case.shape(*sizes)), sm_count=1 + k, seed=k)


def vectors(variant: str, page_size: int | None) -> Served:
    """At head dimension 64."""
    return Served(of_vectors(variant), page_size)


# by TMA, by the row, and ragged; heads that share keys and heads that don't
SERVED = [
    ("turned_back", 16, (5, 1)), ("turned_pairs", None, (5, 1)), ("turned_by_tables", 5, (2, 2)),
    ("normed_and_turned", 1, (5, 1)), ("queries_turned", 16, (5, 1)), ("queries_turned_10", 16, (2, 2)),
    ("queries_yarn", 1, (4, 2)), ("queries_by_tables", 5, (5, 1)), ("queries_normed_and_turned", None, (5, 1)),
    ("queries_l2_normed", None, (2, 2)), ("queries_by_row", 16, (5, 1)), ("queries_by_row", 1, (2, 2)),
]  # fmt: skip


@pytest.mark.parametrize("variant, page_size, heads", SERVED)
def test_served(variant: str, page_size: int | None, heads: tuple[int, int]) -> None:
    """Few rows, whose keys two warpgroups share, and many; pieces that several CTAs leave."""
    x = sim.batch(vectors(variant, page_size), [(1, 700), (40, 200), (3, 0), (0, 20), (5, 17)], heads)
    sim.serve_and_check(x, pieces=2, sm_count=3)


WIDE = [
    (example("gated_output", "gated_output", head_dim=256), 16, (5, 1)),
    (example("gated_output", "gated_output", head_dim=192), 1, (2, 2)),
    (example("gated_output", "gated_output", head_dim=200, dtype="f16"), None, (4, 2)),
    (example("qwen3", "qwen3_next", head_dim=256), 1, (4, 2)),
    (of_vectors("weighed_by_lse", 256), 16, (4, 2)), (of_vectors("normed_and_turned", 256), 16, (2, 2)),
    (of_vectors("normed_and_turned", 160), None, (5, 1)), (of_vectors("turned_20_pairs", 136), 16, (2, 2)),
    (of_vectors("turned_10", 144), 1, (4, 2)), (of_vectors("turned_12", 200), None, (2, 2)),
    (of_vectors("turned_by_tables", 224), 16, (5, 1)),
]  # fmt: skip


@pytest.mark.parametrize("case, page_size, heads", WIDE, ids=str)
def test_epilogues_of_many_features(case: Case, page_size: int | None, heads: tuple[int, int]) -> None:
    """Rows are finished in shared memory: few, more than a warp's, both warpgroups', and merged ones."""
    x = sim.batch(Served(case, page_size), [(1, 700), (40, 200), (3, 0), (0, 20), (70, 90)], heads)
    sim.serve_and_check(x, pieces=2, sm_count=3)


@pytest.mark.parametrize("case, page_size", [
    (of_vectors("queries_normed_and_turned"), 16), (of_vectors("queries_yarn"), 1),
    (of_vectors("normed_and_turned", 160), 16), (of_vectors("weighed_by_lse", 256), 16),
], ids=str)  # fmt: skip
def test_cascades(case: Case, page_size: int) -> None:
    """Rows of several requests in a tile, each at its own position; of many features, finished in shared memory."""
    levels = [[(7, 37), (3, 150)], [(2, 0), (5, 20), (3, 0)], [(1, 10), (1, 0), (5, 130), (3, 40)]]
    x, planned, want = sim.cascade(Served(case, page_size), levels, (4, 2))
    one = sim.simulated(x, sm_count=3)
    one.attn.plan_cascade(planned)
    sim.serve_checks.check(x, sim.run(one, x), want[:2])
