"""Scales, logits and epilogues at the edge of what float32 and a tile can hold, in the interpreter."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from codegen.simulated import check, inputs_for
from gpu.cases import Case

pytestmark = pytest.mark.slow

SOURCE = """
attention vanishing(a: f32):
    "Provably positive, and 0 in float32 for a = -200."
    scale = exp(a)
    mask  = j <= i

attention vanishing_under_bias(a: f32):
    tensor slope[h]: f32
    scale    = exp(a)
    f_logits = s + slope[h] * (j - i)
    mask     = j <= i

attention enormous():
    "Rows whose keys all lie in the second block that they visit: the base of an unseen row, times 1e9, stays finite."
    scale = 1e9
    mask  = i - 30 < j <= i

attention row_bias():
    tensor bias[iq, h]: f32
    f_logits = s + bias[iq, h]

attention capped_bias():
    "A bias by distance under a function that is not linear."
    tensor slope[h]: f32
    f_logits = softcap(s + slope[h] * (j - i), 30.0)
    mask     = j <= i

attention guarded_columns(least: i32 = 90):
    "Guards that read memory themselves, known for a whole column or row."
    tensor kind[b, pos]: u8
    tensor bonus[pos]: f32
    tensor level[iq]: i32
    f_logits = s + (bonus[j] if kind[b, j] > least else -0.5) + (bonus[max(i, 0)] * s if level[iq] > least else 0.1 * s)
    mask     = j <= i

attention features():
    "Sums under guards and of integers, and tables that end with the last feature."
    tensor gate[pos, e]: f32
    tensor table[n]: f32
    mask     = j <= i
    epilogue = o * (sum(gate[i, e]) if i >= 0 else 1.0) * table[e // 2] + 0.01 * f32(sum(e))
"""


def case(variant: str) -> Case:
    return Case(SOURCE, variant, head_dim=16)


@pytest.mark.parametrize("variant", ["vanishing", "vanishing_under_bias"])
@pytest.mark.parametrize("a", [-2.0, -200.0, 3.0])
def test_a_scale_that_vanishes(a: float, variant: str, artifact: Callable[[Case], Path]) -> None:
    c = case(variant)
    check(c, artifact(c), inputs_for(c, c.shape(1, 70, 200, 2, 1), a=a))


def test_an_enormous_scale(artifact: Callable[[Case], Path]) -> None:
    c = case("enormous")
    check(c, artifact(c), inputs_for(c, c.shape(1, 128, 192, 2, 1)))


def test_rows_whose_logits_are_all_minus_infinity(artifact: Callable[[Case], Path]) -> None:
    c = case("row_bias")
    x = inputs_for(c, c.shape(1, 70, 200, 4, 2))
    bias = x.params["bias"]
    assert isinstance(bias, torch.Tensor)
    bias[:, ::3] = -math.inf
    out, lse = check(c, artifact(c), x)
    assert lse is not None and bool((out[:, ::3] == 0).all()) and bool(lse[:, ::3].isneginf().all())


def test_guards_that_read_memory(artifact: Callable[[Case], Path]) -> None:
    c = case("guarded_columns")
    check(c, artifact(c), inputs_for(c, c.shape(2, 70, 200, 4, 2)))


@pytest.mark.parametrize("sizes", [(2, 70, 200, 4, 2), (1, 150, 90, 2, 1)], ids=str)
def test_features_of_the_epilogue(sizes: tuple[int, ...], artifact: Callable[[Case], Path]) -> None:
    c = case("features")
    x = inputs_for(c, c.shape(*sizes))
    table = x.params["table"]
    assert isinstance(table, torch.Tensor)
    x.params["table"] = table[:8].clone()  # a read for a feature past the 16th would leave it
    check(c, artifact(c), x)


def test_a_position_bias_inside_a_function(artifact: Callable[[Case], Path]) -> None:
    c = case("capped_bias")
    check(c, artifact(c), inputs_for(c, c.shape(2, 70, 200, 4, 2)))
