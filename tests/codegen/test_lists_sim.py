"""Domains in the PTX interpreter: lists of every kind, as bits, in the walk over blocks of keys and in scores.

The interpreter also fails a kernel that reads a word of a line which was not written for it, or past a list.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import test_blocks_sim as listed_blocks
import torch
from codegen import simulated as sim
from codegen.simulated import Lengths, Served, check, inputs_for
from gpu.cases import LISTS, Case, example, list_cases, parts_cases
from ptx.launch import SimulatedDriver, run_forward
from ptx.program import Fault
from torch import Tensor

from attncc.runtime.artifact import read_artifact
from attncc.runtime.kernel import Kernel

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("kernel_cache")]

TOPK = example("block_topk", "block_topk")
SHAPES = [(1, 70, 200, 4, 2), (2, 130, 33, 3, 1), (1, 200, 420, 2, 2)]  # as of test_forward_sim
MIXED: Lengths = [(1, 1200), (4, 200), (1, 0), (20, 130), (0, 20), (3, 17)]
# what is no block: padding, and numbers past the last block of any request
NOTHING = torch.tensor([-1, -7, 2**31 - 1, -(2**31), 1 << 20], dtype=torch.int32)


def case_of(variant: str, **options: Any) -> Case:
    return Case(str(LISTS), variant, head_dim=64, **options)


def spoil(lists: Tensor, axis: int) -> Tensor:
    """Lists (along `axis`) with blocks said twice, entries that are no blocks anywhere, and some lists of none."""
    gen = torch.Generator().manual_seed(0)
    flat = lists.movedim(axis, -1).clone()
    half = flat.shape[-1] // 2
    flat[..., :half] = flat[..., flat.shape[-1] - half :]
    there = torch.rand(flat.shape, generator=gen) < 0.3
    flat[there] = NOTHING[torch.randint(len(NOTHING), flat.shape, generator=gen)][there]
    flat[torch.rand(flat.shape[:-1], generator=gen) < 0.2] = -1
    return flat.movedim(-1, axis)


def spoilt(case: Case, params: dict[str, Any]) -> dict[str, Any]:
    domain = case.load().domain
    assert domain is not None
    axis = domain.index.index(None) - len(domain.index)
    return {**params, domain.tensor: spoil(params[domain.tensor], axis)}


@pytest.mark.parametrize("case", [TOPK, *list_cases(), *parts_cases()], ids=str)
def test_dense(case: Case, artifact: Callable[[Case], Path]) -> None:
    for k, sizes in enumerate(SHAPES):
        x = inputs_for(case, case.shape(*sizes))
        params = spoilt(case, x.params) if k else x.params
        check(case, artifact(case), replace(x, params=params), sm_count=1 + k, seed=k)


def test_blocks_in_parts_are_made_ahead(artifact: Callable[[Case], Path]) -> None:
    (case,) = [replace(c, prepass=True) for c in parts_cases() if c.variant == "parts_scaled"]
    kernel = read_artifact(artifact(case)).manifest["kernels"]["prepared"]
    assert kernel["config"]["parts"] == 2 and list(kernel["ahead"]) == ["k", "v"]
    for k, sizes in enumerate(SHAPES):
        check(case, artifact(case), inputs_for(case, case.shape(*sizes)), sm_count=1 + k, seed=k)


SERVED = [Served(TOPK, 1), Served(TOPK, None), Served(TOPK, 16)]
SERVED += [Served(case, (16, 1, None)[k % 3]) for k, case in enumerate(list_cases())]


@pytest.mark.parametrize("served", SERVED, ids=str)
def test_served(served: Served) -> None:
    """Decode, verification and prefill of one batch, the longest cut in pieces."""
    x = sim.batch(served, MIXED, (4, 2))
    sim.serve_and_check(replace(x, params=spoilt(served.case, x.params)), pieces=2, sm_count=3)


@pytest.mark.parametrize("heads", [(8, 1), (7, 1), (5, 5)], ids=str)
def test_groups(heads: tuple[int, int]) -> None:
    for case in (TOPK, case_of("by_head")):
        sim.serve_and_check(sim.batch(Served(case, 16), [(1, 300), (150, 200), (9, 700)], heads), sm_count=3)


# keys that requests share end inside a listed block
SHARED = [[(7, 37), (3, 150)], [(2, 0), (5, 20), (3, 0)], [(1, 10), (1, 0), (5, 130), (3, 40)]]


@pytest.mark.parametrize("case", [TOPK, case_of("by_head"), case_of("sized_by_keys"), case_of("tokens")], ids=str)
def test_cascades(case: Case) -> None:
    x, levels, want = sim.cascade(Served(case, 16), SHARED, (4, 2))
    one = sim.simulated(x, sm_count=3)
    one.attn.plan_cascade(levels)
    sim.serve_checks.check(x, sim.run(one, x), want[:2])


@pytest.mark.parametrize("size", [1, 16])
def test_beside_blocks_of_the_plan(size: int) -> None:
    for case in (case_of("with_sink"), case_of("by_head")):
        x = listed_blocks.batch(Served(case, size, blocks=True), (70, 300), (4, 2))
        listed_blocks.plan_and_check(replace(x, params=spoilt(case, x.params)), 3)


# ------------------------------------------------------------------------------------- what is not listed is not read


@pytest.mark.parametrize("size", [64, 128])
def test_blocks_that_no_row_lists_are_not_visited(size: int, artifact: Callable[[Case], Path]) -> None:
    """Values of other blocks are NaN, which a weight of 0 would not hide."""
    case = Case(Path(TOPK.source).read_text().replace("64", str(size)), "block_topk", head_dim=64)
    x = inputs_for(case, case.shape(1, 300, 900, 2, 1))
    lists = torch.tensor([0, 4, 2, -1], dtype=torch.int32).expand(1, 300, 1, 4)
    seen = torch.isin(torch.arange(900) // size, torch.tensor([0, 2, 4]))
    v = torch.where(seen[:, None, None], x.v, torch.nan).to(x.v.dtype)
    finite = replace(x, params={**x.params, "selected": lists})
    want, _ = check(case, artifact(case), finite)
    out, _ = run_forward(artifact(case), x.q, x.k, v, finite.params)
    assert torch.equal(out, want)


def test_decode_visits_what_its_row_lists() -> None:
    x = sim.batch(Served(TOPK, 16), [(1, 1200), (1, 700)], (4, 1))
    lists = torch.full((2, 1, 8), -1, dtype=torch.int32)
    lists[0, 0, :3], lists[1, 0, :2] = torch.tensor([18, 3, 11]), torch.tensor([0, 10])
    seen = torch.isin(torch.arange(1200) // 64, torch.tensor([18, 3, 11]))
    seen = torch.cat([seen, torch.isin(torch.arange(700) // 64, torch.tensor([0, 10]))])
    hidden = tuple(p[~seen] for p in x.places)
    x = replace(x, params={"selected": lists})
    want = sim.serve_and_check(x, sm_count=3)
    x.kv[1][hidden] = torch.nan
    assert torch.equal(sim.serve(x, sm_count=3)[0], want[0])


def test_a_guard_holds_in_the_walk_too(artifact: Callable[[Case], Path]) -> None:
    case = case_of("hides_reads")
    x = inputs_for(case, case.shape(1, 70, 200, 2, 1))
    rows = torch.zeros(1, 70, 1, dtype=torch.int32)
    big = torch.zeros(7 * 16777216 + 1, dtype=torch.bool)  # what is listed can be read
    big[::16777216] = torch.tensor([1, 0, 1, 1, 0, 1, 1, 1]).bool()
    check(case, artifact(case), replace(x, params={"chosen": rows, "shown": big}))


def test_a_mask_that_hides_the_first_block_ends_the_walk(artifact: Callable[[Case], Path]) -> None:
    """All rows list it, and none of the last tile sees it."""
    case = case_of("hides_the_first")
    x = inputs_for(case, case.shape(1, 140, 300, 4, 2))
    check(case, artifact(case), replace(x, params={"chosen": torch.zeros(1, 140, 2, 3, dtype=torch.int32)}))
    y = sim.batch(Served(case, 16), [(1, 300), (130, 200), (20, 0)], (4, 2))
    sim.serve_and_check(replace(y, params={"chosen": torch.zeros(151, 2, 3, dtype=torch.int32)}), sm_count=2)


# ------------------------------------------------------------------------------------- the lines themselves


@pytest.mark.parametrize("block", [1, 24, 1000])
def test_lines_of_bits(block: int, artifact: Callable[[Case], Path]) -> None:
    """Bit by bit against sets; rows with keys for several words and a last block that ends short."""
    case = case_of("run_time")
    x = inputs_for(case, case.shape(2, 9, 1300, 4, 2), block=block)
    lists = spoil(torch.randint(-1, -(-1300 // block), (2, 9, 2, 20), dtype=torch.int32), -1)
    found = read_artifact(artifact(case))
    driver = SimulatedDriver((found.path / "forward.ptx").read_text(), 1, artifact=found)
    driver.tensors = {"chosen": lists}
    Kernel(found, driver=driver)(x.q, x.k, x.v, chosen=lists, block=block)
    assert driver.lines is not None
    lines = driver.lines.read("u4", (2, 9, 2, -1))
    count = -(-1300 // block)
    for at in [(b, iq, g) for b in range(2) for iq in range(9) for g in range(2)]:
        bits = {32 * w + n for w, word in enumerate(lines[at].tolist()) for n in range(32) if word >> n & 1}
        assert {n for n in bits if n < count} == {n for n in lists[at].tolist() if 0 <= n < count}


# ------------------------------------------------------------------------------------- planted bugs
# of each word of a line: what any row lists, and what all do
WORD = r"or\.b32( \t%r\d+, (%r\d+), %r\d+;\n\t)and\.b32( \t%r\d+, \2, %r\d+;)"
BUGS = {
    "a block that one row lists is left out": r"and.b32\1and.b32\3",
    "a block that one row doesn't list runs no mask": r"or.b32\1or.b32\3",
}


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_noticed(name: str, artifact: Callable[[Case], Path]) -> None:
    path, x = artifact(TOPK), inputs_for(TOPK, TOPK.shape(1, 300, 600, 2, 1))
    # all rows but the first list blocks 1 and 6; each has one that another row doesn't have
    lists = torch.tensor([1, 6, 3], dtype=torch.int32).repeat(1, 300, 1, 1)
    lists[:, 7::8, :, 2], lists[:, 0] = 2, -1
    x = replace(x, params={"selected": lists})
    ptx, count = re.subn(WORD, BUGS[name], (path / "forward.ptx").read_text())
    assert count
    with pytest.raises((AssertionError, Fault)):
        check(TOPK, path, x, ptx=ptx)
    check(TOPK, path, x)
