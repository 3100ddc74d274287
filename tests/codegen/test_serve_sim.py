"""Served kernels against the reference, run by the PTX interpreter on small batches with few CTAs: no GPU.

The interpreter also fails a kernel that leaves a row unwritten or its counters other than zero, reads a partial state
before it is released, a page id or a partial row that the plan doesn't speak of, or hangs (see ptx/__init__.py).  What
must not be read of a cache is NaN.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

import pytest
import torch
from codegen import simulated as sim
from codegen.simulated import Batch, Lengths, Served
from gpu.cases import example
from ptx.program import Fault

from attncc.runtime import prefix

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("kernel_cache")]

CAUSAL = Served(example("causal", "causal"), 16)
# three or four CTAs cut the longest requests; some rows see no key; several tiles
DECODE: Lengths = [(1, 1400), (1, 1), (1, 130), (1, 0), (1, 128)]
VERIFY: Lengths = [(4, 1100), (16, 40), (0, 50), (2, 0), (5, 3)]
PREFILL: Lengths = [(150, 150), (33, 300), (0, 0)]
MIXED: Lengths = [(1, 900), (3, 0), (40, 7), (0, 30), (70, 200), (1, 33)]
CUT: Lengths = [(1, 1100), (3, 0), (20, 45)]


def same(a: sim.State, b: sim.State) -> bool:
    return all(x is None or (y is not None and torch.equal(x, y)) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("lengths, heads, sm_count, pieces", [
    (DECODE, (8, 2), 3, 2), (DECODE, (1, 1), 4, 3), (VERIFY, (7, 1), 4, 2), (PREFILL, (2, 2), 3, 0),
    ([(24, 1200)], (5, 1), 4, 3), (MIXED, (4, 1), 4, 2),
], ids=str)  # fmt: skip
def test_kinds_of_batches(lengths: Lengths, heads: tuple[int, int], sm_count: int, pieces: int) -> None:
    sim.serve_and_check(sim.batch(CAUSAL, lengths, heads), pieces=pieces, sm_count=sm_count, seed=heads[0])


# every source of keys, head dims, groups, and what a variant may ask of a position; each kernel once
WINDOW, HOLES = (
    Served(example("gpt_oss", "gpt_oss_sliding", head_dim=64), 1),
    Served(example("dilated", "longformer", head_dim=64), None),
)
OTHERS = [
    (WINDOW, (8, 1)),
    (HOLES, (4, 1)),
    (Served(example("causal", "causal", head_dim=192, head_dim_vo=128), None), (5, 1)),
    (Served(example("causal", "causal", head_dim=192, head_dim_vo=128), 8), (4, 1)),
    (Served(example("causal", "causal", head_dim=96), 24), (4, 2)),
    (Served(example("causal", "causal", head_dim=128, head_dim_vo=232), 16), (4, 2)),
    (Served(example("causal", "causal", head_dim=184), 1), (16, 1)),
    (Served(example("causal", "causal", head_dim=256), 16), (4, 2)),
    (Served(example("causal", "causal", head_dim=256), 1), (2, 1)),
    (Served(example("alibi", "alibi", head_dim=80, dtype="f16"), 16), (4, 2)),
    (Served(example("tree_verify", "tree_verify", head_dim=64), 16), (7, 1)),
    (Served(example("kv_scales", "key_scales", head_dim=64), 5), (4, 1)),
    (Served(example("gated_output", "gated_output", head_dim=64), None), (2, 2)),
    (Served(example("sigmoid", "flash_sigmoid", head_dim=64), 16), (5, 1)),
    (Served(example("packed_documents", "packed_documents", head_dim=64), 16), (4, 2)),
]


@pytest.mark.parametrize("served, heads", OTHERS, ids=str)
def test_sources_and_variants(served: Served, heads: tuple[int, int]) -> None:
    """Planned for all keys, and, where scalars say which keys there are, for those alone."""
    x = sim.batch(served, [(1, 1200), (4, 200), (1, 0), (20, 130), (0, 20), (3, 17)], heads)
    sim.serve_and_check(x, pieces=2, sm_count=3)
    if x.scalars:
        sim.serve_and_check(x, x.scalars, sm_count=2, seed=1)


# two groups share a prefix each, one of them in two parts; a request without keys of its own
SHARED = [[(7, 37), (3, 150)], [(2, 0), (5, 20), (3, 0)], [(1, 10), (1, 0), (5, 130), (3, 40)]]


@pytest.mark.parametrize("served, heads", [(CAUSAL, (4, 2)), (WINDOW, (8, 1)), (HOLES, (4, 1))], ids=str)
def test_cascades(served: Served, heads: tuple[int, int]) -> None:
    x, levels, want = sim.cascade(served, SHARED, heads)
    for seed, scalars in enumerate([{}, x.scalars]):
        one = sim.simulated(x, sm_count=3, seed=seed)
        one.attn.plan_cascade(levels, **scalars)
        sim.serve_checks.check(x, sim.run(one, x), want[:2])


def test_prefixes_found_by_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six requests whose page lists start with the same 8 pages, as if a level took no time."""
    monkeypatch.setattr(prefix, "LEVEL_TIME", 0)
    x = sim.batch(CAUSAL, [(1, 128 + 16 * n) for n in range(6)], (4, 1))
    qo, pages, ids, last = x.table
    for first in pages[1:-1].tolist():
        ids[first : first + 8] = ids[:8]
    one = sim.simulated(x, sm_count=3)
    one.attn.plan(qo, pages, ids, last, shared_prefix="auto")
    sim.serve_checks.check(x, sim.run(one, x))
    assert one.driver.shared


def test_bits_that_do_not_depend_on_the_batch() -> None:
    x = sim.batch(CAUSAL, [(1, 2300), (3, 0), (20, 45)], (4, 1))
    out, lse = sim.serve_and_check(x, pieces=2, sm_count=3, deterministic="batch_invariant")
    assert lse is not None
    for b in (0, 2):
        alone = sim.serve(x.alone(b), sm_count=2, seed=1, deterministic="batch_invariant")
        assert same(alone, (out[x.rows(b)], lse[x.rows(b)]))


def test_any_order_of_ctas_warps_and_copies_gives_the_same_bits() -> None:
    x = sim.batch(CAUSAL, CUT, (8, 2))
    first = sim.serve(x, pieces=2, sm_count=3)
    for seed in range(1, 3):
        assert same(first, sim.serve(x, sm_count=3, seed=seed, lockstep=seed % 2 == 0))
    # nor does it matter where pages lie
    assert same(first, sim.serve(sim.batch(CAUSAL, CUT, (8, 2), pages_seed=9), sm_count=3))


def test_plans_that_follow_one_another() -> None:
    """One object, as in a graph: what a launch leaves behind is what the next one needs."""
    batches = [sim.batch(CAUSAL, lengths, (4, 1), seed) for seed, lengths in enumerate([CUT, VERIFY, CUT])]
    one = sim.simulated(batches[0], sm_count=3, max_batch_size=8, max_qo_rows=200)
    for x in batches:
        one.attn.plan(*x.table)
        sim.serve_checks.check(x, sim.run(one, x))
    assert same(sim.run(one, batches[2]), sim.run(one, batches[2]))


@pytest.mark.parametrize("view", ["HND", "combined"])
def test_views_of_a_cache(view: str) -> None:
    sim.serve_and_check(sim.batch(CAUSAL, CUT, (4, 2), view=view))


def test_strides_of_rows() -> None:
    """q and out with room between rows and heads: only what is theirs is written."""
    x = sim.batch(CAUSAL, VERIFY, (4, 2))
    wide = torch.full((len(x.q), 4, 2, 128), torch.nan, dtype=x.q.dtype)
    wide[:, :, 0] = x.q
    out = torch.full((len(x.q), 5, 128), 7.0, dtype=x.q.dtype)
    one = sim.simulated(x)
    one.attn.plan(*x.table)
    found = one.run(wide[:, :, 0], x.kv, out=out[:, :4], return_lse=True)
    sim.serve_checks.check(x, found)
    assert bool((out[:, 4] == 7).all())


# ------------------------------------------------------------------------------------- the protocol
UNORDERED = "no release and acquire|read before it is written|in no order"
READ = "still read by"
# what is changed in the PTX ((pattern, nth that matches or None for all[, what for what]), …), and what must be said;
# "NaN", "wrong": of the output
BUGS = {
    "states not released": (
        [(r"atom\.global\.acq_rel", -1, "acq_rel", "relaxed"), (r"fence\.acq_rel\.gpu;", 0)], UNORDERED),
    "states not acquired": (
        [(r"atom\.global\.acq_rel", -1, "acq_rel", "relaxed"), (r"fence\.acq_rel\.gpu;", 1)], UNORDERED),
    "arrival before the others have stored": ([(r"bar\.sync\s+\S+, %r\d+;", 0)], UNORDERED),
    "the flag read before it is there": ([(r"bar\.sync\s+\S+, %r\d+;", 1)], "before it is written|wrong|never|nothing"),
    "counters not put back": ([(r"atom\.global\.exch", -1)], "leaves its counters other than zero"),
    "tickets not put back": ([(r"atom\.global\.exch", 0)], "leaves its tickets other than zero"),
    "exchanged before it is written": ([(r"bar\.sync\s+2, 256;", -1)], "before it is written|barrier 2|NaN"),
    "exchange buffer never given": ([(r"bar\.arrive\s+1, 256;", 0)], "nothing can run"),
    "rows past the last key not cleared": ([(r"st\.shared\.v4\.b32.*, \{0, 0, 0, 0\}", -1)], "NaN"),
    "rows cleared with no fence": ([(r"fence\.proxy\.async", -1)], "no fence.proxy.async"),
    "queries multiplied with no fence": ([(r"fence\.proxy\.async", 0)], "no fence.proxy.async"),
    "queries never announced": ([(r"cp\.async\.mbarrier\.arrive", 0)], "nothing can run"),
    "bytes not announced": ([(r"mbarrier\.arrive\.expect_tx", 0)], "nothing can run"),
    "keys refilled under a product": ([(r"wgmma\.wait_group\.sync\.aligned\s+0;", 0)], READ + "|NaN"),
    "output staged under other warps": ([(r"bar\.sync\s+%r\d+, 128;", -1)], "before it is written|wrong|NaN"),
    "lse of pieces not stored": ([(r"st\.global\.b32", 0)], "read before it is written"),
    "output not stored": ([(r"st\.global\.v4\.b32", 0)], "elements of the output were never written"),
}  # fmt: skip


GATHER_BUGS = {
    "gathered keys multiplied with no fence": ([(r"fence\.proxy\.async", 1)], "no fence.proxy.async"),
    "gathered values multiplied with no fence": ([(r"fence\.proxy\.async", -1)], "no fence.proxy.async"),
    "keys announced when their copies are issued": (
        [(r"cp\.async\.mbarrier\.arrive", None, "cp.async.mbarrier.arrive.noinc.shared::cta.b64",
          "mbarrier.arrive.shared::cta.b64 _,")], "NaN|fence|under way|wrong"),
}  # fmt: skip


# of tiles whose rows are few enough for mma.sync
FEW_BUGS = {
    "few: rows past the last key not cleared": ([(r"st\.shared\.v4\.b32.*, \{0, 0, 0, 0\}", 0)], "NaN"),
    "few: states read before all are there": ([(r"bar\.sync\s+1, 256;", 0)], "before it is written|barrier 1|wrong"),
    "few: added up before all are there": ([(r"bar\.sync\s+2, 256;", 0)], "before it is written|barrier 2|wrong"),
    "few: read before they are added up": ([(r"bar\.sync\s+8, 128;", 0)], "wrong|NaN"),
    "few: eight rows more over those that are read": ([(r"bar\.sync\s+1, 256;", 1)], "nothing can run|wrong|NaN"),
    "few: never said that they were read": ([(r"bar\.arrive\s+3, 256;", 0)], "nothing can run"),
}  # fmt: skip


def changed(changes: list[tuple]) -> Callable[[str], str]:
    def change(ptx: str) -> str:
        lines = ptx.splitlines()
        for pattern, nth, *words in changes:
            found = [k for k, line in enumerate(lines) if re.search(pattern, line)]
            for k in found if nth is None else [found[nth]]:
                lines[k] = lines[k].replace(*words) if words else ""
        return "\n".join(lines)

    return change


@cache
def buggy(served: Served) -> Batch:
    """Three pieces of 48 rows each, which three warps hold; keys that end inside a block."""
    x = sim.batch(served, [(12, 1100), (3, 0), (20, 45)], (4, 1))
    sim.serve_and_check(x, pieces=3, sm_count=4)
    return x


@cache
def buggy_few() -> Batch:
    x = sim.batch(CAUSAL, [(1, 1100), (3, 30), (1, 0), (4, 100)], (4, 1))
    sim.serve_and_check(x, sm_count=2)
    return x


@pytest.mark.parametrize("name", [*BUGS, *GATHER_BUGS, *FEW_BUGS])
def test_a_bug_is_noticed(name: str) -> None:
    """Some order of warps shows it."""
    changes, message = {**BUGS, **GATHER_BUGS, **FEW_BUGS}[name]
    x = buggy_few() if name in FEW_BUGS else buggy(WINDOW if name in GATHER_BUGS else CAUSAL)
    with pytest.raises(Fault, match=f"(?s){message}"):
        for seed in range(24):
            out, _ = found = sim.serve(x, sm_count=4, seed=seed, lockstep=seed == 0, change=changed(changes))
            if out.isnan().any():
                raise Fault("the output holds NaN")
            try:
                sim.serve_checks.check(x, found)
            except AssertionError:
                raise Fault("the output is wrong") from None
