"""A built kernel in the PTX interpreter, judged by the reference."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from gpu.cases import SCALARS, Case
from ptx.launch import call_forward
from ptx.serve import Simulated
from torch import Tensor

import attncc
from attncc.random_inputs import FLOATS, Inputs, Shape, random_inputs
from attncc.runtime.artifact import read_artifact

sys.path.append(str(Path(__file__).parents[1] / "gpu"))  # as its own tests see it: batches are made and judged there
import oracle
import serve_checks
from checks import Parts, assert_emits, out_of, parts_of
from serve_cases import Lengths, Served
from serve_checks import Batch

EMIT = 5e-4  # here tanh is no approximation
ROUNDING = {"bf16": 2.0**-9, "f16": 2.0**-12}  # largest relative error of one rounding


def inputs_for(case: Case, shape: Shape, **given: object) -> Inputs:
    variant = case.load()
    mine = {p.name for p in variant.scalars if not p.const}
    values = {**{name: value for name, value in SCALARS.items() if name in mine}, **given}
    return random_inputs(variant, shape, dtype=FLOATS[case.dtype], device="cpu", seed=shape.qo_len, given=values)


def check(case: Case, path: Path, x: Inputs, **options: Any) -> tuple[Tensor, Tensor | None]:
    """Run and compare: out and lse, as a whole and row by row."""
    softmax = case.load().scan.kind == "softmax"
    arguments = {**x.params, "return_lse": softmax}
    given = {name: options.pop(name) for name in ("out",) if name in options}
    out, lse, emits = parts_of(case.load(), call_forward(path, x.q, x.k, x.v, {**arguments, **given}, **options))
    plain: Any = attncc.reference(case.source, **case.options)  # pyright: ignore[reportArgumentType]
    reference = oracle.as_kernels_round(case, plain)
    want_out, want_lse, want_emits = parts_of(case.load(), reference(x.q, x.k, x.v, **arguments))
    assert_emits(emits, want_emits, EMIT)
    limit = 3 * ROUNDING[case.dtype] + 5e-5
    close(out, want_out, limit)
    if reference is not plain:
        close(out, out_of(plain(x.q, x.k, x.v, **x.params)), oracle.LOOSE * limit)
    if want_lse is not None:
        assert lse is not None and torch.equal(lse.isneginf(), want_lse.isneginf())
        seen = want_lse.isfinite()
        # a feature of q' that lies between two numbers may round to the other one, and one of k' that is made ahead
        ahead = "ahead" in next(iter(read_artifact(path).manifest["kernels"].values()))
        limit = 1e-4 if reference is plain else ROUNDING[case.dtype] * (1 + ahead)
        assert bool(((lse.double() - want_lse).abs() <= limit + 2e-6 * want_lse.abs())[seen].all())
    return out, lse


def close(out: Tensor, want: Tensor, limit: float) -> None:
    """As a whole, and row by row."""
    rows, sizes = (out.double() - want).norm(dim=-1), want.norm(dim=-1)
    assert out.shape == want.shape and bool(out.isfinite().all())
    assert float(rows.norm()) <= limit * float(sizes.norm())
    floor = 1e-2 * float(sizes.square().mean().sqrt()) if sizes.numel() else 0
    assert bool((rows <= 4 * limit * sizes.clamp(min=floor)).all())


# ------------------------------------------------------------------------------------- served batches
State = tuple[Tensor, Tensor | None]  # out, lse


def batch(served: Served, lengths: Lengths, heads: tuple[int, int], seed: int = 0, **options: Any) -> Batch:
    """serve_checks.make_batch on the CPU."""
    with patch.object(serve_checks, "DEVICE", "cpu"):
        return serve_checks.make_batch(served, lengths, heads, seed, **options)


def simulated(x: Batch, **options: Any) -> Simulated:
    """An object that is just large enough for the batch; options of Simulated and of BatchAttention."""
    maxima = {"max_batch_size": max(1, len(x.lengths)), "max_qo_rows": max(1, len(x.q))}
    heads = {"num_qo_heads": x.heads[0], "num_kv_heads": x.heads[1], "page_size": x.served.page_size}
    return Simulated(serve_checks.compile_served(x.served), **{**heads, **maxima, **options})


def serve(x: Batch, plan: dict[str, Any] | None = None, pieces: int = 0, **options: Any) -> State:
    """Plan (with scalars `plan`) and run; at least so many pieces must have been merged."""
    sim = simulated(x, **options)
    sim.attn.plan(*x.table, **(plan or {}))
    found = run(sim, x)
    assert sim.driver.pieces >= pieces, f"the plan merges {sim.driver.pieces} pieces: a test of nothing"
    return found


def run(sim: Simulated, x: Batch) -> State:
    return run_all(sim, x)[:2]


def run_all(sim: Simulated, x: Batch, **given: Any) -> Parts:
    """The same, and what it emits."""
    return parts_of(x.served.case.load(), sim.run(x.q, x.kv, return_lse=x.softmax, **given, **x.params))


def serve_and_check(x: Batch, plan: dict[str, Any] | None = None, **options: Any) -> State:
    """The same, judged by the reference."""
    found = serve(x, plan, **options)
    serve_checks.check(x, found)
    return found


def judge(x: Batch, found: Parts) -> None:
    """out, lse and emits by the reference."""
    want = serve_checks.reference_all(x)
    serve_checks.check(x, found[:2], want[:2])
    # a key's rounding twice, about the size of the rounding itself
    assert_emits(found[2], want[2], ROUNDING["bf16"] if oracle.rounds_before_scale(x.served.case) else EMIT)


Level = list[tuple[int, int]]  # (query rows, keys) of every group


def cascade(served: Served, levels: list[Level], heads: tuple[int, int]) -> tuple[Batch, list, Parts]:
    """(batch, what plan_cascade takes, what it must give).  The groups of all levels but the last appear in the batch
    as requests without rows; a tensor over b is that of the last level's requests."""
    hidden = [(0, keys) for level in levels[:-1] for _, keys in level]
    x = _with_last_requests(batch(served, [*hidden, *levels[-1]], heads), len(levels[-1]))
    offsets, planned, at = x.table[1], [], 0
    for level in levels:
        end = at + len(level)
        mine = (torch.tensor([0, *(rows for rows, _ in level)]).cumsum(0).int(), offsets[at : end + 1])
        if served.page_size is not None:
            mine = (mine[0], mine[1] - mine[1][0], x.table[2][int(offsets[at]) :], x.table[3][at:end])
        planned.append(mine)
        at = end
    return x, planned, _flat(x, levels, planned)


def _with_last_requests(x: Batch, count: int) -> Batch:
    """Tensors over b, pos drawn for so many requests, and for all keys together."""
    size, gen = (count, sum(keys for _, keys in x.lengths)), torch.Generator().manual_seed(count)
    over = [t.name for t in x.served.case.load().tensors if t.dims == ("b", "pos")]
    return replace(x, params={**x.params, **{name: torch.randn(size, generator=gen) for name in over}})


def _flat(x: Batch, levels: list[Level], planned: list) -> Parts:
    """The reference, each request with the keys of its groups one after another."""
    ends = torch.tensor([keys for _, keys in x.lengths]).cumsum(0).tolist()
    found, at = [], 0
    for row in planned[-1][0][:-1].tolist():
        found.append([])
        at = 0
        for level, (rows, *_) in zip(levels, planned, strict=True):
            group = at + int(torch.searchsorted(rows[1:].contiguous(), row, right=True))
            found[-1] += range(ends[group] - x.lengths[group][1], ends[group])
            at += len(level)
    keys = torch.tensor([n for one in found for n in one])
    here = tuple(p[keys] for p in x.places)
    k, v = (cache[here] for cache in x.kv)
    over_keys = {t.name: x.params[t.name][here] for t in x.served.case.load().tensors if "j" in t.dims}  # type: ignore
    indptr = torch.tensor([0, *map(len, found)]).cumsum(0).int()
    judge: Any = serve_checks.reference_case(x.served.case)
    want = judge.ragged(x.q, k, v, planned[-1][0], indptr, return_lse=x.softmax, **{**x.params, **over_keys})
    return parts_of(x.served.case.load(), want)
