"""Built forward kernels against the reference, run by the PTX interpreter on small odd shapes: no GPU.

The interpreter also fails a kernel that leaves an output unwritten, reads out of bounds, reads a buffer before its
copy has landed or refills one that is still read, or that hangs (see ptx/__init__.py).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from codegen.simulated import check, inputs_for
from gpu.cases import HARD, Case, example, example_cases
from ptx.launch import run_forward

from attncc.random_inputs import Inputs

pytestmark = pytest.mark.slow

# batch, qo_len, kv_len, query heads, kv heads: part tiles of rows and keys; rows that see no key when causal; several
# tiles of keys, some hidden whole, some clear
SHAPES = [(1, 70, 200, 4, 2), (2, 130, 33, 3, 1), (1, 200, 420, 2, 2)]
DIMS = [
    example("causal", "causal", head_dim=qk, head_dim_vo=vo)
    for qk, vo in [(64, None), (72, None), (96, None), (256, None), (192, 128), (40, 200)]
]
DTYPES = [example("gemma2", "gemma2_local", dtype="f16"), example("relu_squared", "relu_squared", dtype="f16")]


@pytest.mark.parametrize("case", [*example_cases(), *DIMS, *DTYPES], ids=str)
def test_variants(case: Case, artifact: Callable[[Case], Path]) -> None:
    for k, sizes in enumerate(SHAPES):
        check(case, artifact(case), inputs_for(case, case.shape(*sizes)), sm_count=1 + k, seed=k)


PLAIN, CAUSAL = example("plain", "plain"), example("causal", "causal")


@pytest.mark.parametrize(
    "sizes", [(1, 1, 1, 1, 1), (2, 1, 129, 7, 1), (1, 5, 0, 2, 2), (3, 129, 5, 5, 1), (1, 0, 5, 2, 1)]
)
@pytest.mark.parametrize("case", [PLAIN, CAUSAL], ids=str)
def test_smallest_sizes(case: Case, sizes: tuple[int, ...], artifact: Callable[[Case], Path]) -> None:
    check(case, artifact(case), inputs_for(case, case.shape(*sizes)))


def test_any_order_of_warps_and_copies_gives_the_same_bits(artifact: Callable[[Case], Path]) -> None:
    x = inputs_for(CAUSAL, CAUSAL.shape(1, 300, 300, 2, 1))
    first = check(CAUSAL, artifact(CAUSAL), x, seed=0, sm_count=1)
    for seed in range(1, 5):
        again = check(CAUSAL, artifact(CAUSAL), x, seed=seed, sm_count=1 + seed % 3, lockstep=seed % 2 == 0)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True) if a is not None and b is not None)


def test_scores_that_grow_past_the_guard(artifact: Callable[[Case], Path]) -> None:
    """Keys towards the first one score ever higher, by far more than a kept base allows; and scores as large as bf16
    inputs give, where the output is exactly the value of the one key that wins."""
    x = inputs_for(PLAIN, PLAIN.shape(1, 70, 420, 2, 1))
    ramp = torch.linspace(24, 0.01, 420)[:, None, None].to(x.k.dtype)
    check(PLAIN, artifact(PLAIN), Inputs(x.q * 4, x.k * ramp, x.v, {}))
    q, k = torch.full_like(x.q, 64.0), torch.full_like(x.k, -64.0)
    k[:, 77] = 64.0
    out, _ = run_forward(artifact(PLAIN), q, k, x.v)
    assert torch.equal(out, x.v[:, 77:78].expand_as(out))


def test_strides(artifact: Callable[[Case], Path]) -> None:
    """q transposed, k and v from one packed tensor, k one batch broadcast, out with room between its rows."""
    shape = CAUSAL.shape(2, 70, 150, 4, 2)
    x = inputs_for(CAUSAL, shape)
    packed = torch.cat([x.k, x.v], -1)
    q = x.q.transpose(1, 2).contiguous().transpose(1, 2)
    out = torch.full((2, 70, 4, 256), 7.0, dtype=x.q.dtype)
    check(CAUSAL, artifact(CAUSAL), Inputs(q, packed[..., :128], packed[..., 128:], {}), out=out[..., :128])
    assert bool((out[..., 128:] == 7).all())
    check(CAUSAL, artifact(CAUSAL), Inputs(x.q, x.k[:1].expand_as(x.k), x.v, {}))


@pytest.mark.parametrize("name", ["nothing", "nothing_but_sink", "positions", "every_space"])
def test_hard_variants(name: str, artifact: Callable[[Case], Path]) -> None:
    case = Case(HARD, name)
    check(case, artifact(case), inputs_for(case, case.shape(2, 70, 200, 4, 2)))


@pytest.mark.parametrize("name", ["first_key", "guarded"])
def test_hidden_lanes_never_load(name: str, artifact: Callable[[Case], Path]) -> None:
    """The table has one entry: a read for any hidden key would be out of bounds."""
    case = Case(HARD, name)
    x = inputs_for(case, case.shape(1, 70, 200, 2, 1))
    check(case, artifact(case), Inputs(x.q, x.k, x.v, {"table": torch.tensor([1.5])}))


def test_a_tensor_of_more_elements_than_an_int_counts(artifact: Callable[[Case], Path]) -> None:
    case = Case(HARD, "enormous")
    x = inputs_for(case, case.shape(1, 70, 70, 1, 1), **{})
    bias = torch.zeros(70, 40_000_000, dtype=torch.uint8)  # only touched pages take memory
    bias[:, -70:] = torch.randint(0, 100, (70, 70), dtype=torch.uint8)
    check(case, artifact(case), Inputs(x.q, x.k, x.v, {"bias": bias}))
