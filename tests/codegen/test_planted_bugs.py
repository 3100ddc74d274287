"""One synchronising instruction of a built kernel taken away: the interpreter must notice every time.

This is what makes a pass of the other simulated tests worth something.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from codegen.simulated import inputs_for
from gpu.cases import Case, example
from ptx.launch import run_forward
from ptx.program import Fault

pytestmark = pytest.mark.slow
CAUSAL = example("causal", "causal")
READ = "still read by"
# which line goes (the nth that matches), and what must be said; "NaN": the output holds some
BUGS = {
    "barriers used before they are set up": (r"bar\.sync\s+0;", 0, "holds no initialised mbarrier"),
    "items read before they are posted": (r"try_wait.* 0, 10000000", 0, "read before it is written"),
    "item slot never given back": (r"@%p\d+ mbarrier\.arrive", 0, "nothing can run"),
    "value slot never given back": (r"@%p\d+ mbarrier\.arrive", -1, "nothing can run"),
    "bytes not announced": (r"mbarrier\.arrive\.expect_tx", 0, "nothing can run"),
    "turn not passed on": (r"bar\.arrive", -1, "nothing can run"),
    "turn never taken up": (r"bar\.sync\s+%r\d+, 256;", -1, "128 of 256 threads at barrier"),
    "slot refilled under a product": (r"wgmma\.wait_group\.sync\.aligned\s+0;", 0, READ),
    "scores read before they are done": (r"wgmma\.wait_group\.sync\.aligned\s+1;", 0, "NaN"),
    "products in one group": (r"wgmma\.commit_group", 1, "NaN"),
    "store without a fence": (r"fence\.proxy\.async", 0, "no fence.proxy.async"),
    "buffer rewritten under its store": (r"cp\.async\.bulk\.wait_group", 0, READ),
    "end under a store": (r"cp\.async\.bulk\.wait_group", -1, "ends while its shared memory is still read"),
    "store of half a tile": (r"bar\.sync\s+%r\d+, 128;", -1, READ + "|never written|no fence"),
    "buffer rewritten by other warps": (r"bar\.sync\s+%r\d+, 128;", 0, READ),
    "output not stored": (r"cp\.async\.bulk\.tensor\.4d\.global", -1, "elements of the output were never written"),
    "lse not stored": (r"st\.global\.b32", 0, "lse: .* were never written"),
    "tickets not put back": (r"atom\.global\.exch", 0, "tickets other than zero"),
}  # fmt: skip


def without(ptx: str, pattern: str, nth: int) -> str:
    lines = ptx.splitlines()
    at = [k for k, line in enumerate(lines) if re.search(pattern, line)][nth]
    lines[at] = "setp.eq.u32 P1, 0, 0;" if "try_wait" in lines[at] else ""
    return "\n".join(lines)


@pytest.mark.parametrize("name", BUGS)
def test_is_noticed(name: str, artifact: Callable[[Case], Path]) -> None:
    pattern, nth, message = BUGS[name]
    path, x = artifact(CAUSAL), inputs_for(CAUSAL, CAUSAL.shape(1, 300, 400, 2, 1))
    ptx = without((path / "forward.ptx").read_text(), pattern, nth)
    with pytest.raises(Fault, match=f"(?s){message}"):
        out, _ = run_forward(path, x.q, x.k, x.v, ptx=ptx, lockstep=False)
        if out.isnan().any():
            raise Fault("the output holds NaN")


@pytest.mark.parametrize("nth", range(2))
def test_a_copy_used_before_it_landed_is_noticed(nth: int, artifact: Callable[[Case], Path]) -> None:
    """The waits for the first queries and keys.  Copies land in random order: some order shows it."""
    path, x = artifact(CAUSAL), inputs_for(CAUSAL, CAUSAL.shape(1, 300, 400, 2, 1))
    whole = (path / "forward.ptx").read_text()
    consumer = whole.index("setmaxnreg.inc")
    head, tail = whole[:consumer], whole[consumer:]
    ptx = head + without(tail, r"try_wait", 1 + nth)

    def noticed(seed: int) -> bool:
        try:
            return bool(run_forward(path, x.q, x.k, x.v, ptx=ptx, seed=seed)[0].isnan().any())
        except Fault:
            return True

    assert any(noticed(seed) for seed in range(8))
