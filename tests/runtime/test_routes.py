"""When a pre-pass should take less time than f_k and f_v in the attention kernel."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from fake_driver import FakeDriver, artifact, served_artifact, with_ahead, with_prepass

from attncc.runtime import plan as planning
from attncc.runtime import routes
from attncc.runtime.batch import BatchAttention
from attncc.runtime.kernel import Kernel
from attncc.runtime.visible import Visible

END = ["add", ["leaf", "i1"], ["const", 1]]
CAUSAL = {"lo": ["const", 0], "hi": END}
WINDOW = {"lo": ["sub", ["leaf", "i0"], ["param", "window"]], "hi": END}
TILE = (128, 128)


def with_choice(*, factors: tuple[str, ...] = (), **of: int) -> dict:
    return {"kernels": {"forward": {}, "prepared": {}, "prepass": {"of": of, "factors": list(factors)}}}


BOTH = with_choice(k=128)


def test_keys_that_are_read_once_stay_in_the_kernel_and_those_read_often_do_not() -> None:
    keys = 128 * 8 * 8192
    assert routes.choose(BOTH, keys, keys, 132) == "forward"
    assert routes.choose(BOTH, keys, 32 * keys, 132) == "prepared"


def test_a_launch_costs_more_than_few_keys() -> None:
    assert routes.choose(BOTH, 1000, 4000, 132) == "forward"


def test_factors_pay_for_a_pre_pass_later_than_transforms() -> None:
    keys = 8 * 8192
    transforms, factors = with_choice(k=128, v=128), with_choice(k=128, v=128, factors=("k", "v"))
    for times, *ways in ((1, "forward", "forward"), (8, "prepared", "forward"), (32, "prepared", "prepared")):
        assert [routes.choose(m, keys, times * keys, 132) for m in (transforms, factors)] == ways


def test_a_kernel_that_multiplies_keys_itself_counts_as_a_pre_pass() -> None:
    keys = 8 * 8192
    m = {"kernels": {"forward": {}, "prepared": {"ahead": {"k": 128, "v": 128}}}}
    assert [routes.choose(m, keys, n * keys, 132) for n in (8, 32)] == ["forward", "prepared"]
    assert routes.choose({"kernels": {"prepared": m["kernels"]["prepared"]}}, 1, 1, 132) == "prepared"


def test_what_an_artifact_does_not_have_is_not_chosen() -> None:
    kernels = BOTH["kernels"]
    assert routes.choose({"kernels": {"serve": {}}}, 1 << 30, 1 << 40, 132) == "serve"
    assert routes.choose({"kernels": {k: kernels[k] for k in ("prepared", "prepass")}}, 1, 1, 132) == "prepared"


def test_costs_are_traffic_and_a_launch_or_the_time_of_sms() -> None:
    found = routes.costs(keys=1 << 20, reads=4 << 20, features=256, factors=[64], sm_count=100)
    assert found.prepass == pytest.approx(3e-6 + (1 << 20) * 320 * 2 * 2 / 4e12)
    assert found.fused == pytest.approx((4 << 20) * (256 * routes.FEATURE + routes.FACTOR) / 100)


# ms on a H200 that calls took more than without f_k and f_v (bench/RESULTS.md): in the kernel, by a pre-pass
MEASURED = [
    (4, 4096, 128, (), 0.75, 0.02), (16, 1024, 128, (), 0.20, 0.02), (1, 16384, 128, (), 2.8, 0.03),
    (4, 4096, 0, (128, 128), 0.158, 0.036), (1, 16384, 0, (128, 128), 0.55, 0.036),
]  # fmt: skip


@pytest.mark.parametrize("batch, length, features, factors, fused, prepass", MEASURED)
def test_causal_calls_that_were_measured(batch, length, features, factors, fused, prepass) -> None:
    reads = routes.dense_reads(TILE, batch, length, length, 32, Visible(CAUSAL).bind({}))
    keys = batch * length * 8
    found = routes.costs(keys=keys, reads=reads, features=features, factors=factors, sm_count=132)
    assert found.fused * 1e3 == pytest.approx(fused, rel=0.15)
    assert found.prepass * 1e3 == pytest.approx(prepass, rel=0.5)


def test_dense_reads() -> None:
    """Two tiles of queries of each of 8 heads read 300 keys of 3 requests, or what a mask leaves, in whole blocks."""
    causal, window = Visible(CAUSAL).bind({}), Visible(WINDOW).bind({"window": 50})
    assert routes.dense_reads(TILE, 3, 129, 300, 8, None) == 3 * 8 * 2 * 300
    assert routes.dense_reads(TILE, 3, 129, 300, 8, causal) == 3 * 8 * 2 * 300  # the first tile sees 299 of them
    assert routes.dense_reads(TILE, 3, 300, 300, 8, causal) == 3 * 8 * (128 + 256 + 300)
    assert routes.dense_reads(TILE, 1, 300, 300, 1, window) == 128 + 256 + (300 - 128)
    assert routes.dense_reads(TILE, 1, 300, 30, 1, causal) == 30  # positions below 0 see nothing
    assert routes.dense_reads(TILE, 2, 5, 0, 1, causal) == routes.dense_reads(TILE, 2, 0, 5, 1, causal) == 0


def test_a_window_over_many_keys_stays_in_the_kernel() -> None:
    """All keys would cost 85 µs in the kernel, those of the window 4, a pre-pass 11."""
    reads = routes.dense_reads(TILE, 1, 256, 8192, 32, Visible(WINDOW).bind({"window": 127}))
    assert routes.choose(BOTH, 8 * 8192, reads, 132) == "forward"
    assert routes.choose(BOTH, 8 * 8192, 32 * 2 * 8192, 132) == "prepared"


# ---------------------------------------------------------------------- calls and plans
def launched(driver: FakeDriver) -> list[str]:
    found = [launch.function[2]["cubin"].removesuffix(".cubin") for launch in driver.launches]
    driver.launches.clear()
    return found


def rows(batch: int, length: int, heads: int) -> torch.Tensor:
    return torch.zeros(batch, length, heads, 128, dtype=torch.bfloat16)


@pytest.mark.parametrize("visible, way", [(None, ["prepass", "prepared"]), (CAUSAL, ["forward"])])
def test_a_dense_call_counts_what_the_mask_leaves(visible, way, monkeypatch) -> None:
    monkeypatch.setattr(routes, "LAUNCH", 0.0)
    monkeypatch.setattr(routes, "FEATURE", 4 / 1.9 * routes.BYTE)  # 1.9 reads cost what a pre-pass does
    driver = FakeDriver(sms=1)
    kernel = Kernel(with_prepass(artifact(visible=visible), k=128), driver)
    q, k, v = rows(1, 512, 1), rows(1, 512, 1), rows(1, 512, 1)
    kernel(rows(1, 256, 1), k, v)
    assert launched(driver) == way
    kernel(q, k, v)  # four tiles, of which the mask leaves two and a half
    assert launched(driver) == ["prepass", "prepared"]


def test_a_kernel_that_makes_its_keys_itself_finds_zeros_in_its_words(monkeypatch) -> None:
    """Words of a stream serve all its calls; each graph zeroes its own."""
    monkeypatch.setattr(routes, "LAUNCH", 0.0)
    monkeypatch.setattr(routes, "FACTOR", 4 * 128 / 1.9 * routes.BYTE)
    driver = FakeDriver(sms=1)
    kernel = Kernel(with_ahead(artifact(), v=128), driver)
    wide = rows(2, 300, 3)
    q, k, v = rows(2, 256, 2), rows(2, 300, 1), wide[:, :, 1:2]
    kernel(rows(2, 128, 1), k, v)
    assert launched(driver) == ["forward"]
    for stream in (0, 1, 0):
        driver.stream[0] = stream
        kernel(q, k, v)
    driver.capturing = {0}
    kernel(q, k, v)
    found = [x.values for x in driver.launches]
    assert launched(driver) == ["prepared"] * 4
    words = [x["made"] for x in found]
    assert words[0] == words[2] and len(set(words)) == 3
    for x in found:
        assert x["map_k"][0] == k.data_ptr() and x["v"] == v.data_ptr() and x["map_v"][0] == x["v_out"]
        assert [x[f"v_{d}_stride"] for d in ("batch", "row", "head")] == [300 * 3 * 16, 3 * 16, 0]
    assert process_words(words[0], 2 + 2 * 3) == [0] * 8


def process_words(address: int, count: int) -> list[int]:
    return list((ctypes.c_int32 * count).from_address(address))


def test_a_dense_call_asks_scalars_that_the_mask_asks(monkeypatch) -> None:
    """And is bound once for either way; the choice is made once for each value."""
    driver, scalars = FakeDriver(sms=1), [("other", "f32", 1.0), ("window", "i32", None)]
    monkeypatch.setattr(routes, "LAUNCH", 0.0)
    kernel = Kernel(with_prepass(artifact(scalars=scalars, visible=WINDOW), v=128), driver)
    q, k, v, asked = rows(1, 1024, 2), rows(1, 1024, 2), rows(1, 1024, 2), []
    reads = routes.dense_reads
    monkeypatch.setattr(routes, "dense_reads", lambda *a: asked.append(reads(*a)) or asked[-1])
    monkeypatch.setattr(routes, "FEATURE", 4 / 3 * routes.BYTE)
    for n in range(2):
        for window, way in ((1, ["forward"]), (2000, ["prepass", "prepared"]), (2, ["forward"])):
            kernel(q, k, v, window=window, other=float(n))
            assert launched(driver) == way
    assert len(asked) == 3 and len(driver.loads) == 3 and len(kernel._bindings) == 1


def test_a_plan_counts_what_the_mask_leaves(monkeypatch) -> None:
    monkeypatch.setattr(routes, "LAUNCH", 0.0)
    monkeypatch.setattr(routes, "FEATURE", 4 / 3 * routes.BYTE)
    driver = FakeDriver(sms=1)
    scalars = [("window", "i32", None)]
    kernel = Kernel(with_prepass(served_artifact(page_size=None, scalars=scalars, visible=WINDOW), k=128), driver)
    attn = BatchAttention(
        kernel, num_qo_heads=1, num_kv_heads=1, max_batch_size=2, max_qo_rows=2048, page_size=None, device="cpu"
    )
    q = k = torch.zeros(1024, 1, 128, dtype=torch.bfloat16)
    for window, way in ((1, ["serve"]), (2000, ["prepass", "prepared"])):
        attn.plan([0, 1024], [0, 1024], window=window)
        attn.run(q, (k, k), window=window)
        assert launched(driver) == way
    attn.plan([0, 1024], [0, 1024])  # no scalar, so the mask shows all keys before a row
    attn.run(q, (k, k), window=1)
    assert launched(driver) == ["prepass", "prepared"]


def test_reads_of_a_plan() -> None:
    """Packed rows, blocks of keys, every kv head; a request without rows reads nothing."""
    shape = planning.Shape(8, 2, 128, 128, 64, 0, 4, 8, 512, 0)
    batch = planning.Batch(np.array([0, 40, 41, 41]), np.array([0, 100, 300]), np.array([100, 200, 70]))
    assert planning.reads(shape, batch) == 2 * (2 * 100 + 200)
    assert planning.reads(shape, batch, Visible(CAUSAL).bind({})) == 2 * (100 + 100 + 200)
    assert planning.reads(shape, batch, Visible(WINDOW).bind({"window": 8})) == 2 * (100 + (100 - 64) + (200 - 128))
