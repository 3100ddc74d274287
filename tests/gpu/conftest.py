"""GPU tests: marked `gpu`, skipped where there is no Hopper GPU (an error instead under ATTNCC_REQUIRE_GPU=1)."""

from __future__ import annotations

import functools
import os
import random

import pytest

SEED = int(os.environ.get("ATTNCC_SEED") or random.SystemRandom().randrange(2**31))


@functools.cache
def hopper() -> bool:
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def pytest_report_header() -> str:
    return f"random inputs: ATTNCC_SEED={SEED}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = os.path.dirname(__file__)
    for item in items:
        if str(item.path).startswith(here + os.sep):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def needs_gpu() -> None:
    if not hopper():
        if os.environ.get("ATTNCC_REQUIRE_GPU") == "1":
            pytest.fail("no Hopper GPU that torch can use")
        pytest.skip("no Hopper GPU that torch can use")


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """Another for each test, the same under the same ATTNCC_SEED; torch's own generators start from it too."""
    import torch

    number = random.Random(f"{SEED} {request.node.nodeid}").randrange(2**31)
    torch.manual_seed(number)
    return number
