"""append_kv and the merges where their kernels can't be had: on other devices, and without a compiler."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from runtime.fake_driver import FakeDriver

import attncc
from attncc import cache, utilities
from attncc.runtime.states import merge_states
from attncc.runtime.utilities import Utilities


def missing(key: str, build: Any) -> Any:
    raise ModuleNotFoundError("No module named 'cutlass'")


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    utilities._warn.cache_clear()
    monkeypatch.setattr(cache, "get_or_build", missing)


def test_without_a_compiler_torch_merges_and_one_warning_says_so(no_compiler: None) -> None:
    driver = FakeDriver()
    kernels = Utilities(utilities._find, driver)
    o, lse = torch.randn(2, 3, 2, 8), torch.randn(2, 3, 2)
    with pytest.warns(RuntimeWarning, match=r"use torch operations.*No module named 'cutlass'"):
        found = merge_states(o[0], lse[0], o[1], lse[1], kernels=kernels)
    want = attncc.merge_states(o[0], lse[0], o[1], lse[1])
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True)) and not driver.launches
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        merge_states(o[0].half(), lse[0], o[1].half(), lse[1], kernels=kernels)


def test_cpu_tensors_ask_for_no_kernel(no_compiler: None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attncc.merge_state_list(torch.randn(3, 2, 2, 8), torch.randn(3, 2, 2))
        k, cache_ = torch.randn(1, 2, 8), torch.zeros(1, 4, 2, 8)
        attncc.append_kv(k, k, (cache_, cache_.clone()), [0, 1], [0, 1], [0], [2])
    assert torch.equal(cache_[0, 1], k[0])


def test_another_compiler_counts_as_none(no_compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cutlass")
    from attncc.codegen import build

    monkeypatch.setattr(build, "DSL_VERSION", "0.0")
    monkeypatch.setattr(cache, "get_or_build", lambda key, make: make())
    with pytest.warns(RuntimeWarning, match=r"nvidia-cutlass-dsl 0\.0 is needed"):
        assert utilities._find("append_16") is None


def test_float64_and_other_kinds_stay_with_torch() -> None:
    driver = FakeDriver()

    def refuse(name: str) -> Any:
        raise AssertionError(name)

    kernels = Utilities(refuse, driver)
    for dtype, lse_dtype in ((torch.float64, torch.float32), (torch.float32, torch.float64)):
        o, lse = torch.randn(2, 3, 2, 8, dtype=dtype), torch.randn(2, 3, 2, dtype=lse_dtype)
        found = merge_states(o[0], lse[0], o[1], lse[1], kernels=kernels)
        assert found[0].dtype == dtype and found[1].dtype == lse_dtype
