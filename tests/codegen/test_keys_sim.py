"""f_k and f_v in built kernels, run in the interpreter: in the attention kernel and by a pre-pass, to the same bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from codegen import simulated as sim
from codegen.simulated import Lengths, Served, check, inputs_for
from gpu.cases import Case, keys_case

from attncc.runtime import routes

pytestmark = pytest.mark.slow
NAMES = ("turned_keys", "normed_keys", "turned_pairs_of_keys", "shifted_values", "normed_values", "of_requests",
         "layer_normed_keys", "scaled_keys")  # fmt: skip
CASES = [
    *(keys_case(name) for name in NAMES),
    keys_case("turned_keys", head_dim=80, dtype="f16"), keys_case("normed_keys", head_dim=128, dtype="f16"),
    keys_case("shifted_values", head_dim=192, head_dim_vo=128),
    keys_case("of_requests", head_dim=40, head_dim_vo=72, dtype="f16"),
    keys_case("turned_everywhere", head_dim=200, head_dim_vo=216),
    keys_case("turned_in_part", head_dim=200),
]  # fmt: skip
# more than a tile of queries and a block of keys; a block and a bit; more queries than keys
SIZES = [(2, 150, 300, 4, 2), (1, 7, 129, 5, 1), (1, 140, 30, 2, 2)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_dense(case: Case, artifact: Callable[[Case], Path]) -> None:
    """Either way, and to the same bits."""
    fused, before = (artifact(replace(case, prepass=x)) for x in (False, True))
    for k, sizes in enumerate(SIZES):
        x = inputs_for(case, case.shape(*sizes))
        out, lse = check(case, fused, x, sm_count=1 + k, seed=k)
        also, also_lse = check(case, before, x, sm_count=2)
        assert torch.equal(out, also) and torch.equal(lse, also_lse)


# one long request is cut; one warpgroup's rows, two's; no rows, no keys
LENGTHS: Lengths = [(1, 1100), (40, 200), (3, 0), (0, 20), (5, 17), (70, 129)]
LAYOUTS = [(16, 4), (None, 5), (5, 1), (8, 7)]  # page size, group size
SERVED = [(case, *LAYOUTS[(n + k) % 4]) for n, case in enumerate(CASES) for k in range(1 + (n < 6))]


@pytest.mark.usefixtures("kernel_cache")
@pytest.mark.parametrize("case, page_size, group", SERVED, ids=str)
def test_served(case: Case, page_size: int | None, group: int) -> None:
    x = sim.batch(Served(replace(case, prepass=False), page_size), LENGTHS, (2 * group, 2))
    sim.serve_and_check(x, sm_count=3, seed=group)


# ------------------------------------------------------------------------------------- by a pre-pass
@pytest.mark.usefixtures("kernel_cache")
@pytest.mark.parametrize("case", [CASES[0], CASES[4], CASES[5], CASES[11]], ids=str)
def test_ragged_keys_go_either_way(case: Case) -> None:
    found = []
    for how in (False, True):
        x = sim.batch(Served(replace(case, prepass=how), None), LENGTHS, (4, 2))
        one = sim.simulated(x, sm_count=3)
        one.attn.plan(*x.table)
        found.append(sim.run(one, x))
        assert one.driver.launched == (["prepass", "prepared"] if how else ["serve"])
    for way in found:
        sim.serve_checks.check(x, way)


@pytest.mark.usefixtures("kernel_cache")
def test_a_plan_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what it reads: one row reads keys once, three tiles read them three times.  A captured run's way is kept."""
    x = sim.batch(Served(keys_case("turned_keys"), None), [(1, 500), (1, 60)], (2, 2))
    many = sim.batch(Served(keys_case("turned_keys"), None), [(300, 500), (2, 60)], (2, 2))
    monkeypatch.setattr(routes, "LAUNCH", 0.0)
    monkeypatch.setattr(routes, "FEATURE", 2 * routes.BYTE)  # as much as half of what a pre-pass moves for it
    one = sim.simulated(many, sm_count=1)
    one.attn.plan(*many.table)
    sim.serve_checks.check(many, sim.run(one, many))
    one.attn.plan(*x.table)
    sim.serve_checks.check(x, sim.run(one, x))
    assert one.driver.launched == ["prepass", "prepared", "serve"]
    with patch.object(one.driver, "is_capturing", lambda stream: True):
        sim.run(one, x)
    one.attn.plan(*many.table)
    assert sim.serve_checks.same(sim.run(one, many), sim.run(one, many)) and one.driver.launched[-1] == "serve"


@pytest.mark.usefixtures("kernel_cache")
def test_cascades_take_the_kernel() -> None:
    """Keys of a prefix stand where its first key does, whoever shares it."""
    levels = [[(7, 37), (3, 150)], [(2, 0), (5, 20), (3, 0)], [(1, 10), (1, 0), (5, 130), (3, 40)]]
    for page_size in (16, None):
        x, planned, want = sim.cascade(Served(keys_case("turned_keys"), page_size), levels, (4, 2))
        one = sim.simulated(x, sm_count=3)
        one.attn.plan_cascade(planned)
        sim.serve_checks.check(x, sim.run(one, x), want[:2])
    x = sim.batch(Served(keys_case("turned_keys", prepass=True), None), [(1, 5)], (2, 2))
    with pytest.raises(ValueError, match="plan_cascade: expected a kernel that transforms k and v itself"):
        sim.simulated(x).attn.plan_cascade([x.table])
