"""Factors of q, k and v in built kernels, run by the PTX interpreter against the reference: dense, ragged, paged.

Random factors are normal, so about half of them are negative: a score that is hidden before it is multiplied would
come back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from codegen import simulated as sim
from codegen.simulated import Served
from gpu.cases import Case, folded, folded_cases
from ptx.launch import SimulatedDriver, run_forward

import attncc
from attncc.random_inputs import Inputs
from attncc.runtime.artifact import read_artifact
from attncc.runtime.kernel import Kernel

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("kernel_cache")]

SHAPES = [(1, 70, 200, 4, 2), (2, 130, 33, 3, 1), (1, 5, 420, 2, 2)]
LENGTHS = [(1, 1100), (4, 200), (1, 0), (20, 130), (0, 20), (3, 17)]


@pytest.mark.parametrize("case", folded_cases(), ids=str)
def test_dense(case: Case, artifact: Callable[[Case], Path]) -> None:
    for k, sizes in enumerate(SHAPES):
        sim.check(case, artifact(case), sim.inputs_for(case, case.shape(*sizes)), sm_count=1 + k, seed=k)


@pytest.mark.parametrize("name, page_size, heads", [
    ("both", 16, (8, 2)), ("both", 1, (4, 2)), ("both", None, (4, 2)), ("capped", 16, (4, 1)), ("weighed", 5, (4, 2)),
    ("query", 16, (5, 1)), ("all_three", 16, (4, 2)), ("all_three", None, (4, 2)), ("by_request", 16, (4, 2)),
    ("sloped", 1, (4, 1)), ("value_alone", None, (2, 2)), ("key_alone", 16, (7, 1)),
    ("by_length", 16, (4, 2)),
], ids=str)  # fmt: skip
def test_served(name: str, page_size: int | None, heads: tuple[int, int]) -> None:
    x = sim.batch(Served(folded(name), page_size), LENGTHS, heads)
    sim.serve_and_check(x, pieces=2, sm_count=3)


# ------------------------------------------------------------------------------------- by a pre-pass
BEFORE = ("both", "key_alone", "value_alone", "weighed", "all_three", "by_request", "score_and_value",
          "turned_and_weighed")  # fmt: skip


@pytest.mark.parametrize("name", BEFORE)
def test_dense_by_a_pre_pass(name: str, artifact: Callable[[Case], Path]) -> None:
    case = folded(name, prepass=True)
    for k, sizes in enumerate(SHAPES):
        sim.check(case, artifact(case), sim.inputs_for(case, case.shape(*sizes)), sm_count=1 + k, seed=k)


@pytest.mark.parametrize("name, dims, dtype, sms", [
    ("both", (80, 40), "f16", 3), ("both", (192, 128), "bf16", 2), ("value_alone", (256, 256), "bf16", 1),
    ("key_alone", (64, 128), "f16", 4), ("weighed", (96, 8), "bf16", 2), ("both", (192, 8), "bf16", 2),
    ("key_alone", (8, 192), "f16", 3),
])  # fmt: skip
def test_rows_of_any_width_are_multiplied_ahead(name, dims, dtype, sms, artifact: Callable[[Case], Path]) -> None:
    case = replace(folded(name, prepass=True), head_dim=dims[0], head_dim_vo=dims[1], dtype=dtype)
    found = read_artifact(artifact(case))
    assert found.manifest["kernels"]["prepared"]["ahead"] == {
        x: d for x, d in zip("kv", dims, strict=True) if name not in ("value_alone" if x == "k" else "key_alone",)
    }
    for sizes in ((2, 70, 300, 4, 2), (1, 200, 131, 3, 1)):
        sim.check(case, found.path, sim.inputs_for(case, case.shape(*sizes)), sm_count=sms, seed=sms)


def test_counts_of_blocks_are_there_for_the_next_call(artifact: Callable[[Case], Path]) -> None:
    """A window leaves most blocks unread, so makers end after readers; without keys there is nothing to make."""
    case = folded("value_alone", prepass=True)
    driver = SimulatedDriver((artifact(case) / "prepared.ptx").read_text(), 2, seed=1)
    kernel = Kernel(read_artifact(artifact(case)), driver=driver)
    plain = attncc.reference(case.source, **case.options)  # pyright: ignore[reportArgumentType]
    for sizes in ((1, 140, 520, 2, 1), (1, 140, 520, 2, 1), (1, 140, 0, 2, 1)):
        x = sim.inputs_for(case, case.shape(*sizes), window=40)
        driver.tensors = {"vs": x.params["vs"]}  # pyright: ignore[reportAttributeAccessIssue]
        out = kernel(x.q, x.k, x.v, **x.params)
        sim.close(out, plain(x.q, x.k, x.v, **x.params), 3 * sim.ROUNDING["bf16"] + 5e-5)
    assert driver.launched == ["prepared"] * 3


@pytest.mark.parametrize("name", BEFORE)
def test_ragged_by_a_pre_pass(name: str) -> None:
    x = sim.batch(Served(folded(name, prepass=True), None), LENGTHS, (4, 2))
    one = sim.simulated(x, sm_count=3)
    one.attn.plan(*x.table)
    sim.serve_checks.check(x, sim.run(one, x))
    assert one.driver.launched == ["prepass", "prepared"]


@pytest.mark.parametrize("name", ["both", "by_request"])
def test_cascades(name: str) -> None:
    levels = [[(7, 37), (3, 150)], [(2, 0), (5, 20), (3, 0)], [(1, 10), (1, 0), (5, 130), (3, 40)]]
    x, planned, want = sim.cascade(Served(folded(name), 16), levels, (4, 2))
    one = sim.simulated(x, sm_count=3)
    one.attn.plan_cascade(planned)
    sim.serve_checks.check(x, sim.run(one, x), want[:2])


def poisoned(x: Inputs) -> tuple[Inputs, Inputs]:
    """Every third key is hidden: with any factors, and with NaN for factors."""
    bad = torch.arange(len(x.params["bad"])) % 3 == 1  # pyright: ignore[reportArgumentType]
    nan = {name: torch.where(bad, torch.nan, x.params[name]) for name in ("ks", "vs")}  # pyright: ignore
    clean = {**x.params, "bad": bad}
    return Inputs(x.q, x.k, x.v, clean), Inputs(x.q, x.k, x.v, {**clean, **nan})


def test_hidden_keys_may_have_any_factor(artifact: Callable[[Case], Path]) -> None:
    case = folded("holes")
    clean, dirty = poisoned(sim.inputs_for(case, case.shape(1, 150, 300, 4, 2)))
    want = sim.check(case, artifact(case), clean)
    got = run_forward(artifact(case), dirty.q, dirty.k, dirty.v, dirty.params, return_lse=True)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True) if a is not None and b is not None)


def test_a_hidden_key_that_a_pre_pass_makes_nan(artifact: Callable[[Case], Path]) -> None:
    """Of k; what is made of v must be finite."""
    case = folded("holes", prepass=True)
    clean, dirty = poisoned(sim.inputs_for(case, case.shape(1, 150, 300, 4, 2)))
    want = sim.check(case, artifact(case), clean)
    params = {**dirty.params, "vs": clean.params["vs"]}
    got = run_forward(artifact(case), dirty.q, dirty.k, dirty.v, params, return_lse=True)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True) if a is not None and b is not None)


def test_a_row_without_keys_has_no_factor(artifact: Callable[[Case], Path]) -> None:
    """Of v: neither is it read where there is none, nor does what it is there reach the output."""
    case = folded("of_the_last_key")
    sim.check(case, artifact(case), sim.inputs_for(case, case.shape(2, 5, 0, 4, 2)))
    x = sim.inputs_for(case, case.shape(2, 5, 3, 4, 2))
    x.params["vs"][1] = torch.inf  # pyright: ignore[reportIndexIssue]
    out, _ = run_forward(artifact(case), x.q, x.k, x.v, x.params)
    assert bool((out[:, :2] == 1.0).all()) and bool(out[1, 2:].isinf().all())
    sim.serve_and_check(sim.batch(Served(case, 16), LENGTHS, (4, 2)), sm_count=3)


# what is written for what: each must show
WRONG = {
    "sign of k's factor": ("both", "k * ks[j, g]", "-k * ks[j, g]"),
    "sign of v's factor": ("both", "vs[j, g] * v", "vs[j, g] * -v"),
    "sign of q's factor": ("query", "q * t[iq, h]", "q * -t[iq, h]"),
    "factor of the wrong head": ("both", "k * ks[j, g]", "k * ks[j, 0]"),
    "factor of the next key": ("by_request", "k * ks[b, j]", "k * ks[b, j + 1]"),
    "factor of the first request": ("by_request", "v * vs[b, j]", "v * vs[0, j]"),
    "epilogue before the factor": ("query", "v * vs[g]", "v"),
    "weights in the sum": ("value_alone", "f_v  = v * (vs[j] if j > 40 else -1.0)", "f_logits = s + 0.0 * vs[j]"),
}


@pytest.mark.parametrize("name", WRONG)
def test_another_factor_shows(name: str, artifact: Callable[[Case], Path]) -> None:
    variant, text, wrong = WRONG[name]
    case, source = folded(variant), Path(folded(variant).source).read_text()
    assert text in source
    built = Case(source.replace(text, wrong), variant, head_dim=64)
    x = sim.inputs_for(case, case.shape(2, 70, 200, 4, 2))
    with pytest.raises(AssertionError):
        sim.check(case, artifact(built), x)


@pytest.mark.parametrize("part", ["drop_hidden", "multiply"])
def test_what_hides_keys_is_needed(
    part: str, artifact: Callable[[Case], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without it, NaN factors of hidden keys (or no factor at all) reach the output."""
    from attncc.codegen.device import softmax

    monkeypatch.setenv("ATTNCC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(softmax, part, lambda *_: None)
    case = folded("holes")
    _, dirty = poisoned(sim.inputs_for(case, case.shape(1, 150, 300, 4, 2)))
    clean, _ = poisoned(sim.inputs_for(case, case.shape(1, 150, 300, 4, 2)))
    out, _ = run_forward(artifact(case), dirty.q, dirty.k, dirty.v, dirty.params, return_lse=True)
    with pytest.raises(AssertionError):
        assert bool(out.isfinite().all())
        sim.check(case, artifact(case), clean)
