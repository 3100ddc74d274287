"""When a pre-pass should take less time than f_k and f_v in the attention kernel."""

from __future__ import annotations

from attncc.runtime import routes

BOTH = {"kernels": {"forward": {}, "prepared": {}, "prepass": {"of": {"k": 128}}}}


def test_keys_that_are_read_once_stay_in_the_kernel_and_those_read_often_do_not() -> None:
    keys = 128 * 8 * 8192
    assert routes.choose(BOTH, keys, keys, 132) == "forward"
    assert routes.choose(BOTH, keys, 32 * keys, 132) == "prepared"


def test_a_launch_costs_more_than_few_keys() -> None:
    assert routes.choose(BOTH, 1000, 5000, 132) == "forward"


def test_what_an_artifact_does_not_have_is_not_chosen() -> None:
    kernels = BOTH["kernels"]
    assert routes.choose({"kernels": {"serve": {}}}, 1 << 30, 1 << 40, 132) == "serve"
    assert routes.choose({"kernels": {k: kernels[k] for k in ("prepared", "prepass")}}, 1, 1, 132) == "prepared"


def test_costs_are_traffic_and_a_launch_or_the_time_of_sms() -> None:
    found = routes.costs(keys=1 << 20, reads=4 << 20, features=256, sm_count=100)
    assert found.prepass == 3e-6 + (1 << 20) * 256 * 2 * 2 / 4e12
    assert found.fused == (4 << 20) * 256 * routes.FEATURE / 100


def test_dense_reads() -> None:
    """Two tiles of queries of each of 8 heads read 300 keys of 3 requests."""
    assert routes.dense_reads(128, 3, 129, 300, 8) == 3 * 8 * 2 * 300
