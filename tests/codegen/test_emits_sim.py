"""Extra outputs of built kernels against the reference, run by the PTX interpreter: no GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from codegen import simulated as sim
from codegen.simulated import Batch, Lengths, Served, inputs_for
from gpu.cases import EMIT_SCALARS, Case, emit_cases
from ptx.program import Fault

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("kernel_cache")]

CASES = {case.variant: case for case in emit_cases()}


# ------------------------------------------------------------------------------------- dense
SHAPES = [(1, 70, 200, 4, 2), (2, 130, 33, 3, 1), (1, 200, 420, 2, 2), (2, 5, 0, 2, 1)]


@pytest.mark.parametrize("name", CASES)
def test_dense(name: str, artifact: Callable[[Case], Path]) -> None:
    one = CASES[name]
    for n, sizes in enumerate(SHAPES):
        x = inputs_for(one, one.shape(*sizes), **EMIT_SCALARS.get(name, {}))
        sim.check(one, artifact(one), x, sm_count=1 + n % 3, seed=n)


def test_a_row_without_keys_asks_for_nothing(artifact: Callable[[Case], Path]) -> None:
    """Not even for what all its keys share."""
    text = """
attention hidden_worth():
    tensor worth[iq, h]: f32
    mask = j < i
    emit most[iq, h]  = max(l + worth[iq, h])
    emit total[iq, h] = sum(l * worth[iq, h])
"""
    one = Case(text, "hidden_worth", head_dim=64)
    x = inputs_for(one, one.shape(1, 5, 5, 2, 1))
    x.params["worth"][:, 0] = torch.nan  # pyright: ignore[reportIndexIssue]
    sim.check(one, artifact(one), x)


# ------------------------------------------------------------------------------------- served
# cut tiles of few rows and of many, rows that see no key, requests without rows or keys
LENGTHS: Lengths = [(1, 1400), (1, 0), (40, 7), (0, 30), (30, 1100), (1, 128), (3, 17)]
SERVED = [
    ("watch", 16, (8, 2)), ("plain", None, (3, 3)), ("curves", 16, (5, 1)), ("tables", 5, (4, 2)), ("sunk", 1, (4, 1)),
    ("unsettled", 16, (2, 1)), ("sigmoids", 16, (7, 1)), ("hidden", None, (2, 2)),
    ("factors", 16, (4, 1)), ("normed", None, (4, 2)), ("normed", 16, (8, 1)), ("selected", 16, (4, 2)),
    ("by_length", 16, (2, 2)),
]  # fmt: skip


@pytest.mark.parametrize("name, page_size, heads", SERVED)
def test_served(name: str, page_size: int | None, heads: tuple[int, int]) -> None:
    x = sim.batch(Served(CASES[name], page_size), LENGTHS, heads, **EMIT_SCALARS.get(name, {}))
    one = sim.simulated(x, sm_count=4 * heads[1], seed=heads[0])
    one.attn.plan(*x.table)
    found = sim.run_all(one, x)
    assert name in ("hidden", "selected") or one.driver.pieces >= 2
    sim.judge(x, found)


def test_every_request_by_itself() -> None:
    """Formulas written out, of values after rounding to bf16."""
    x = sim.batch(Served(CASES["watch"], None), [(2, 300), (3, 0), (1, 40)], (4, 2))
    one = sim.simulated(x, sm_count=6)
    one.attn.plan(*x.table)
    _, _, found = sim.run_all(one, x)
    logits = {b: [] for b in range(3)}
    for b, first, keys in ((0, 0, slice(0, 300)), (2, 5, slice(300, 340))):
        for iq in range(x.lengths[b][0]):
            seen = x.lengths[b][1] - x.lengths[b][0] + iq + 1
            k = x.kv[0][keys][:seen].double()
            logits[b].append(torch.einsum("hd,jhd->hj", x.q[first + iq].double(), k.repeat_interleave(2, 1)) / 8)
    for b, rows in logits.items():
        peak = max((float(row.max()) for row in rows), default=-torch.inf)
        assert float(found["by_request"][b]) == pytest.approx(peak, rel=1e-5)
        for g in range(2):
            low = min((float(row[2 * g : 2 * g + 2].min()) for row in rows), default=torch.inf)
            assert float(found["group_min"][g, b]) == pytest.approx(low, rel=1e-5)
    assert found["row_max"][2:5].eq(-torch.inf).all() and found["row_min"][2:5].eq(torch.inf).all()


CUT: Lengths = [(1, 1100), (3, 0), (20, 45)]


@pytest.mark.parametrize("name", ["watch", "plain"])
def test_any_order_of_ctas_gives_the_same_bits(name: str) -> None:
    x = sim.batch(Served(CASES[name], 16), CUT, (4, 1))
    found = []
    for seed in range(3):
        one = sim.simulated(x, sm_count=4, seed=seed, lockstep=seed == 0)
        one.attn.plan(*x.table)
        found.append(sim.run_all(one, x)[2])
        assert one.driver.pieces >= 3
    assert all(torch.equal(found[0][n], other[n]) for other in found[1:] for n in other)


def test_bits_that_do_not_depend_on_the_batch() -> None:
    x = sim.batch(Served(CASES["plain"], 16), [(1, 2300), (20, 45)], (4, 1))

    def run(x: Batch, **options: int) -> dict[str, torch.Tensor]:
        one = sim.simulated(x, deterministic="batch_invariant", **options)
        one.attn.plan(*x.table)
        return sim.run_all(one, x)[2]

    whole, alone = run(x, sm_count=3), run(x.alone(0), sm_count=2, seed=1)
    assert all(torch.equal(whole[n][:1], alone[n]) for n in ("most", "keys"))


# two groups share a prefix each, one of them in two parts; a request without keys of its own
SHARED = [[(7, 37), (3, 150)], [(2, 0), (5, 20), (3, 0)], [(1, 10), (1, 0), (5, 130), (3, 40)]]


@pytest.mark.parametrize("name", ["watch", "curves"])
def test_cascades(name: str) -> None:
    x, levels, want = sim.cascade(Served(CASES[name], 16), SHARED, (4, 2))
    if "beyond" in want[2]:  # of every group of the batch; those of outer levels are no requests
        want[2]["beyond"] = want[2]["beyond"][-4:]
    one = sim.simulated(x, sm_count=3)
    one.attn.plan_cascade(levels)
    found = sim.run_all(one, x)
    sim.serve_checks.check(x, found[:2], want[:2])
    sim.assert_emits(found[2], want[2])


def test_memory_and_plans_that_follow() -> None:
    """One object and one set of outputs, as in a graph."""
    one, given = None, {}
    for seed, lengths in enumerate([CUT, [(2, 700), (1, 3), (1, 900)]]):
        x = sim.batch(Served(CASES["watch"], 16), lengths, (4, 1), seed)
        one = one or sim.simulated(x, sm_count=4, max_qo_rows=64)
        one.attn.plan(*x.table)
        given = {"row_min": torch.full((len(x.q), 4), torch.nan), "by_request": torch.full((3,), torch.nan)}
        found = sim.run_all(one, x, emit=given)
        assert all(found[2][n] is t for n, t in given.items())
        sim.judge(x, found)


BUGS = {
    "parts not stored": (r"st\.global\.f32", 0, "read before it is written"),
    "rows not stored": (r"st\.global\.f32", -1, "emit 1: .* were never written"),
    "what the other warps found read early": (r"bar\.sync\s+2, 256;", 0, "before it is written|barrier 2|wrong"),
    "what the other warpgroup found read early": (r"bar\.sync\s+2, 256;", -1, "before it is written|barrier 2|wrong"),
}  # fmt: skip


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_noticed(name: str) -> None:
    pattern, nth, message = BUGS[name]

    def change(ptx: str) -> str:
        lines = ptx.splitlines()
        lines[[n for n, line in enumerate(lines) if re.search(pattern, line)][nth]] = ""
        return "\n".join(lines)

    lengths = [(12, 1100), (3, 0), (20, 45)] if "warpgroup" in name else CUT
    x = sim.batch(Served(CASES["watch"], 16), lengths, (4, 1))
    with pytest.raises(Fault, match=f"(?s){message}"):
        for seed in range(12):
            one = sim.simulated(x, sm_count=4, seed=seed, lockstep=seed == 0, change=change)
            one.attn.plan(*x.table)
            found = sim.run_all(one, x)
            try:
                sim.judge(x, found)
            except AssertionError:
                raise Fault("wrong") from None
