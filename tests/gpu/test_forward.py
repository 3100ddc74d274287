"""Every forward kernel on the GPU against the float64 reference: all example variants, odd shapes, fresh inputs."""

from __future__ import annotations

import cases
import pytest
from cases import SHAPES, Case, example
from checks import inputs_for, run_and_check


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("case", cases.example_cases(), ids=str)
def test_example(case: Case, shape: tuple[int, ...], seed: int) -> None:
    size = case.shape(*shape)
    run_and_check(case, size, inputs_for(case, size, seed))


@pytest.mark.parametrize("shape", [SHAPES[2], SHAPES[4], (2, 640, 640, 4, 2)], ids=str)
@pytest.mark.parametrize("case", [*cases.OTHER_DIMS, *cases.OTHER_DTYPES, *cases.OTHER_CONSTS], ids=str)
def test_head_dims_dtypes_and_consts(case: Case, shape: tuple[int, ...], seed: int) -> None:
    size = case.shape(*shape)
    run_and_check(case, size, inputs_for(case, size, seed))


@pytest.mark.parametrize("shape", [(2, 300, 777, 6, 2), (1, 257, 64, 7, 1)], ids=str)
@pytest.mark.parametrize("case", [*cases.odd_cases(), *cases.folded_cases()], ids=str)
def test_odd_variants(case: Case, shape: tuple[int, ...], seed: int) -> None:
    for given in cases.ODD_SCALARS.get(case.variant, [{}]):
        size = case.shape(*shape)
        run_and_check(case, size, inputs_for(case, size, seed, **given))


@pytest.mark.parametrize("shape", [(2, 300, 777, 6, 2), (1, 257, 64, 5, 1), (1, 1024, 1024, 8, 2)], ids=str)
@pytest.mark.parametrize("case", cases.vector_cases(), ids=str)
def test_vector_slots(case: Case, shape: tuple[int, ...], seed: int) -> None:
    size = case.shape(*shape)
    run_and_check(case, size, inputs_for(case, size, seed))


@pytest.mark.parametrize(
    "case", [example("plain", "plain"), example("causal", "causal"), example("alibi", "alibi")], ids=str
)
@pytest.mark.parametrize("first, last", [(24.0, 0.01), (0.01, 24.0)], ids=["falling", "rising"])
def test_score_ramps(case: Case, first: float, last: float, seed: int) -> None:
    """Scores that grow or fall along the keys by far more than a running maximum's guard lets pass."""
    import torch

    size = case.shape(2, 500, 1500, 8, 2)
    x = inputs_for(case, size, seed)
    x.k.mul_(torch.linspace(first, last, 1500, device="cuda")[:, None, None].to(x.k.dtype))
    run_and_check(case, size, x)


@pytest.mark.parametrize("case", [example("plain", "plain"), example("causal", "causal")], ids=str)
def test_large(case: Case, seed: int) -> None:
    """Enough tiles for every CTA to take several, in every section of the schedule."""
    size = case.shape(2, 4096, 4096, 32, 8)
    run_and_check(case, size, inputs_for(case, size, seed))


def test_same_input_same_bits(seed: int) -> None:
    import torch

    case = example("gemma2", "gemma2_local")
    size = case.shape(2, 700, 1300, 8, 2)
    x = inputs_for(case, size, seed)
    first, second = run_and_check(case, size, x), run_and_check(case, size, x)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])  # type: ignore[arg-type]
