"""A built kernel in the PTX interpreter, judged by the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from gpu.cases import SCALARS, Case
from ptx.launch import run_forward
from torch import Tensor

import attncc
from attncc.random_inputs import FLOATS, Inputs, Shape, random_inputs

ROUNDING = {"bf16": 2.0**-9, "f16": 2.0**-12}  # largest relative error of one rounding


def inputs_for(case: Case, shape: Shape, **given: object) -> Inputs:
    variant = case.load()
    mine = {p.name for p in variant.scalars if not p.const}
    values = {**{name: value for name, value in SCALARS.items() if name in mine}, **given}
    return random_inputs(variant, shape, dtype=FLOATS[case.dtype], device="cpu", seed=shape.qo_len, given=values)


def check(case: Case, path: Path, x: Inputs, **options: Any) -> tuple[Tensor, Tensor | None]:
    """Run and compare: out and lse, as a whole and row by row."""
    softmax = case.load().scan.kind == "softmax"
    out, lse = run_forward(path, x.q, x.k, x.v, x.params, return_lse=softmax, **options)
    reference: Any = attncc.reference(case.source, **case.options)  # pyright: ignore[reportArgumentType]
    want = reference(x.q, x.k, x.v, return_lse=softmax, **x.params)
    want_out, want_lse = want if softmax else (want, None)
    limit = 3 * ROUNDING[case.dtype] + 5e-5
    rows, sizes = (out.double() - want_out).norm(dim=-1), want_out.norm(dim=-1)
    assert out.shape == want_out.shape and bool(out.isfinite().all())
    assert float(rows.norm()) <= limit * float(sizes.norm())
    floor = 1e-2 * float(sizes.square().mean().sqrt()) if sizes.numel() else 0
    assert bool((rows <= 4 * limit * sizes.clamp(min=floor)).all())
    if want_lse is not None:
        assert lse is not None and torch.equal(lse.isneginf(), want_lse.isneginf())
        seen = want_lse.isfinite()
        assert bool(((lse.double() - want_lse).abs() <= 1e-4 + 2e-6 * want_lse.abs())[seen].all())
    return out, lse
