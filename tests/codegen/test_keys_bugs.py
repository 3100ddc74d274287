"""Planted bugs in the protocol by which blocks of keys are transformed before they are multiplied: some order of warps
must show each of them, since on a GPU no tool does.

CTAs take tiles of few rows, whose warps keep to keys of their own, tiles of up to 64, whose blocks the two warpgroups
take in turn, and larger ones, whose blocks they transform together, one after another over the same slots.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from codegen import simulated as sim
from codegen.simulated import Batch, Served, inputs_for
from gpu.cases import Case, keys_case
from ptx.launch import run_forward
from ptx.program import Fault

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("kernel_cache")]

ARRIVAL = r"mbarrier\.arrive\.shared::cta\.b64 _, \[(%r\d+)\], (\S+);"
NO_FENCE, STUCK, WRONG = (
    "no fence.proxy.async",
    "nothing can run",
    "NaN|wrong|no fence.proxy.async|before it is written",
)
# which lines of a kernel that speak of `ready`, what becomes of them, and what must be said
BUGS: dict[str, tuple[str, Callable[[str], str], str]] = {
    "shares that nobody waits for": ("wait", lambda line: "setp.eq.u32 P1, 0, 0;", WRONG),
    "a share never said to be done": ("arrival", lambda line: "", STUCK),
    "shares with no fence": ("fence", lambda line: "", NO_FENCE),
}  # fmt: skip
SERVED_BUGS = {
    "warps that count for their own warpgroup alone": (
        "arrival", lambda line: re.sub(r"\], %r\d+;", "], 1;", line), STUCK),
    "a use by few rows that is no phase": ("few", lambda line: "", STUCK + "|" + WRONG),
}  # fmt: skip
OF_VALUES = ("a share never said to be done", "shares with no fence")


def about_ready(lines: list[str]) -> dict[str, list[int]]:
    """Where a kernel speaks of `ready`: a warp's arrival when its share is written and fenced, the wait on it that
    follows (of K: V's comes later), the arrival of a warp that keeps to keys of its own."""
    found: dict[str, list[int]] = {"arrival": [], "wait": [], "fence": [], "few": []}
    served = any((x := re.search(ARRIVAL, line)) and x[2] != "1" for line in lines)  # there a warp may count for two
    for n, line in enumerate(lines):
        arrival = re.search(ARRIVAL, line)
        if arrival is None:
            continue
        fences = [k for k in range(n - 6, n) if "fence.proxy.async" in lines[k]]
        if arrival[2] == "1" and served:
            found["few"].append(n)
        elif fences:
            found["arrival"].append(n)
            found["fence"] += fences
            found["wait"] += [k for k in range(n, n + 9) if "try_wait" in lines[k] and f"[{arrival[1]}]" in lines[k]]
    return found


def planted(kind: str, becomes: Callable[[str], str]) -> Callable[[str], str]:
    def change(ptx: str) -> str:
        lines = ptx.splitlines()
        where = about_ready(lines)[kind]
        assert where, f"no {kind} in this kernel: a test of nothing"
        for n in where:
            lines[n] = becomes(lines[n])
        return "\n".join(lines)

    return change


@cache
def buggy(variant: str) -> Batch:
    x = sim.batch(Served(keys_case(variant), 16), [(1, 400), (12, 700), (70, 300), (1, 300), (5, 260)], (4, 1))
    sim.serve_and_check(x, sm_count=1)
    return x


@pytest.mark.parametrize("variant, name", [
    *(("turned_keys", name) for name in (*BUGS, *SERVED_BUGS)), *(("normed_values", name) for name in OF_VALUES)
])  # fmt: skip
def test_served(variant: str, name: str) -> None:
    kind, becomes, message = {**BUGS, **SERVED_BUGS}[name]
    x = buggy(variant)
    with pytest.raises(Fault, match=f"(?s){message}"):
        for seed in range(12):
            found = sim.serve(x, sm_count=1, seed=seed, lockstep=seed == 0, change=planted(kind, becomes))
            try:
                sim.serve_checks.check(x, found)
            except AssertionError:
                raise Fault("the output is wrong") from None


@pytest.mark.parametrize("name", OF_VALUES)
@pytest.mark.parametrize("variant", ["turned_keys", "normed_values"])
def test_dense(variant: str, name: str, artifact: Callable[[Case], Path]) -> None:
    """(The interpreter changes warps where one blocks: turns hide a wait that is missing here.)"""
    kind, becomes, message = BUGS[name]
    case = keys_case(variant, prepass=False)
    path, x = artifact(case), inputs_for(case, case.shape(1, 150, 400, 2, 1))
    ptx = planted(kind, becomes)((path / "forward.ptx").read_text())
    with pytest.raises(Fault, match=f"(?s){message}"):
        run_forward(path, x.q, x.k, x.v, x.params, ptx=ptx, sm_count=1, lockstep=False)
