"""Merging of states, on the CPU: against float64 over all keys at once, and bit for bit where nothing may change."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import attncc

INF = math.inf


def states(n: int, s: int, heads: int, dim: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.randn(n, s, heads, dim).to(dtype), 4 * torch.randn(n, s, heads)


def attention(logits: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(o [n, D], lse [n]) of logits [n, keys] and v [keys, D] in float64; no keys: (0, -inf)."""
    if not logits.shape[1]:
        return torch.zeros(len(logits), v.shape[1]).double(), torch.full((len(logits),), -INF).double()
    return logits.double().softmax(1) @ v.double(), logits.double().logsumexp(1)


def same_bits(a: Tensor, b: Tensor) -> bool:
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.view(bits), b.view(bits))


@settings(max_examples=30, deadline=None)
@given(cuts=st.lists(st.integers(0, 40), min_size=0, max_size=6), spread=st.floats(0.0, 50.0), seed=st.integers(0, 999))
def test_any_cut_of_the_keys_merges_to_the_whole(cuts: list[int], spread: float, seed: int) -> None:
    torch.manual_seed(seed)
    logits, v = spread * torch.randn(3, 40).double(), torch.randn(40, 8).double()
    want_o, want_lse = attention(logits, v)
    parts = [attention(logits[:, a:b], v[a:b]) for a, b in pairwise([0, *sorted(cuts), 40])]
    o, lse = attncc.merge_state_list(
        torch.stack([o for o, _ in parts], 1)[:, :, None], torch.stack([lse for _, lse in parts], 1)[:, :, None]
    )
    assert torch.allclose(o[:, 0], want_o, rtol=1e-12, atol=1e-12)
    assert torch.allclose(lse[:, 0], want_lse, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_two_states_are_a_list_of_two(dtype: torch.dtype) -> None:
    o, lse = states(50, 2, 3, 16, dtype)
    merged, merged_lse = attncc.merge_states(o[:, 0], lse[:, 0], o[:, 1], lse[:, 1])
    listed, listed_lse = attncc.merge_state_list(o, lse)
    assert merged.dtype == dtype and merged_lse.dtype == torch.float32
    assert same_bits(merged, listed) and same_bits(merged_lse, listed_lse)
    weight = torch.softmax(lse.double(), 1)
    want = (weight[..., None] * o.double()).sum(1)
    limit = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    assert float((merged.double() - want).abs().max()) <= 4 * limit * float(o.double().abs().max())
    assert float((merged_lse - torch.logsumexp(lse.double(), 1)).abs().max()) < 1e-5


def test_base_2() -> None:
    o, lse = states(20, 3, 2, 8)
    want, want_lse = attncc.merge_state_list(o, lse)
    got, got_lse = attncc.merge_state_list(o, lse / math.log(2), lse_base="2")
    assert torch.allclose(got, want, atol=1e-5) and torch.allclose(got_lse * math.log(2), want_lse, atol=1e-5)
    pair, pair_lse = attncc.merge_states(o[:, 0], lse[:, 0], o[:, 1], lse[:, 1], lse_base="2")
    assert torch.allclose(pair_lse, torch.log2(torch.exp2(lse[:, 0]) + torch.exp2(lse[:, 1])), atol=1e-5)
    assert pair.shape == (20, 2, 8)


@pytest.mark.parametrize("base", ["e", "2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_merging_with_an_empty_state_changes_no_bit(dtype: torch.dtype, base: str) -> None:
    o, lse = torch.randn(64, 2, 16).to(dtype), 1e3 * torch.randn(64, 2)
    o[0], lse[1, 0], lse[1, 1] = -0.0, -0.0, 0.0
    o[2], lse[2] = 1e30, 3e38
    o[3], lse[3] = torch.finfo(dtype).tiny / 4, -3e38  # a subnormal
    o[4], lse[4] = INF, 5.0
    zero, nothing = torch.zeros_like(o), torch.full_like(lse, -INF)
    for result in (
        attncc.merge_states(o, lse, zero, nothing, base),
        attncc.merge_states(zero, nothing, o, lse, base),
        attncc.merge_state_list(torch.stack([zero, o, zero], 1), torch.stack([nothing, lse, nothing], 1), base),
        attncc.merge_state_list(o[:, None], lse[:, None], base),
    ):
        assert same_bits(result[0], o) and same_bits(result[1], lse)


def test_empty_states_alone_give_an_empty_state() -> None:
    zero, nothing = torch.zeros(3, 2, 8), torch.full((3, 2), -INF)
    for o, lse in (
        attncc.merge_states(zero, nothing, zero, nothing),
        attncc.merge_state_list(zero[:, None].expand(-1, 4, -1, -1), nothing[:, None].expand(-1, 4, -1)),
        attncc.merge_state_list(torch.ones(3, 0, 2, 8), torch.ones(3, 0, 2)),
    ):
        assert same_bits(o, zero) and same_bits(lse, nothing)


def test_the_output_of_an_empty_state_is_not_read() -> None:
    o, lse = torch.randn(3, 2, 8), torch.randn(3, 2)
    got, got_lse = attncc.merge_states(o, lse, torch.full_like(o, math.nan), torch.full_like(lse, -INF))
    assert same_bits(got, o) and same_bits(got_lse, lse)


def test_infinity_and_nan() -> None:
    """+inf leaves the other state no weight and is shared by two; NaN comes out as NaN, in its own row alone."""
    a, b = torch.full((1, 1, 4), 2.0), torch.full((1, 1, 4), 6.0)
    lse = torch.tensor([[5.0]])
    o, merged = attncc.merge_states(a, lse, b, torch.full_like(lse, INF))
    assert bool((o == 6.0).all()) and float(merged) == INF
    o, merged = attncc.merge_states(a, torch.full_like(lse, INF), b, torch.full_like(lse, INF))
    assert bool((o == 4.0).all()) and float(merged) == INF
    o, merged = attncc.merge_states(
        torch.cat([a, a]), torch.tensor([[math.nan], [5.0]]), torch.cat([b, b]), torch.tensor([[1.0], [5.0]])
    )
    assert bool(o[0].isnan().all()) and bool(merged[0].isnan().all())
    assert bool((o[1] == 4.0).all()) and bool(merged[1].isfinite().all())


def test_bits_of_a_row_do_not_depend_on_the_batch() -> None:
    o, lse = states(333, 5, 4, 64, torch.bfloat16)
    whole, whole_lse = attncc.merge_state_list(o, lse)
    for rows in (slice(0, 1), slice(7, 9), slice(100, 333)):
        part, part_lse = attncc.merge_state_list(o[rows], lse[rows])
        assert same_bits(part, whole[rows]) and same_bits(part_lse, whole_lse[rows])


def test_views_and_empty_batches() -> None:
    o, lse = states(6, 3, 4, 8)
    want, want_lse = attncc.merge_state_list(o, lse)
    strided = o.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3)
    got, got_lse = attncc.merge_state_list(strided, lse.permute(2, 0, 1).contiguous().permute(1, 2, 0))
    assert same_bits(got.contiguous(), want) and same_bits(got_lse.contiguous(), want_lse)
    none, none_lse = attncc.merge_state_list(o[:0], lse[:0])
    assert none.shape == (0, 4, 8) and none_lse.shape == (0, 4)


OUT, LSE = torch.zeros(3, 2, 8), torch.zeros(3, 2)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"o_a": "x"}, TypeError, "o_a: expected a torch.Tensor, found str"),
        ({"o_a": OUT[0]}, ValueError, r"o_a: expected shape \[n, H, D\], found \[2, 8\]"),
        ({"o_a": OUT.int()}, TypeError, "o_a: expected dtype bfloat16, float16, float32 or float64, found int32"),
        (
            {"o_a": OUT.to(torch.float8_e4m3fn), "o_b": OUT.to(torch.float8_e4m3fn)},
            TypeError,
            "o_a: expected dtype bfloat16, float16, float32 or float64, found float8_e4m3fn",
        ),
        ({"o_a": OUT.to_sparse()}, TypeError, "o_a: expected a strided tensor, found layout torch.sparse_coo"),
        ({"lse_b": LSE.to_sparse()}, TypeError, "lse_b: expected a strided tensor, found layout torch.sparse_coo"),
        ({"lse_base": ["e"]}, ValueError, r"lse_base: expected 'e' or '2', found \['e'\]"),
        ({"lse_a": LSE[:2]}, ValueError, r"lse_a: expected shape \[3, 2\] as o_a, found \[2, 2\]"),
        ({"lse_a": LSE.half()}, TypeError, "lse_a: expected dtype float32 or float64, found float16"),
        ({"lse_a": None}, TypeError, "lse_a: expected a torch.Tensor, found NoneType"),
        ({"o_b": OUT[:2]}, ValueError, r"o_b: expected shape \[3, 2, 8\] as o_a, found \[2, 2, 8\]"),
        ({"o_b": OUT.half()}, TypeError, "o_b: expected dtype float32 as o_a, found float16"),
        ({"o_b": OUT.to("meta")}, ValueError, "o_b: expected a tensor on cpu as o_a is, found meta"),
        ({"lse_b": LSE.T}, ValueError, r"lse_b: expected shape \[3, 2\] as lse_a, found \[2, 3\]"),
        ({"lse_b": LSE.double()}, TypeError, "lse_b: expected dtype float32 as lse_a, found float64"),
        ({"lse_base": 2}, ValueError, "lse_base: expected 'e' or '2', found 2"),
        ({"lse_base": "10"}, ValueError, "lse_base: expected 'e' or '2', found '10'"),
        ({"o_b": OUT.clone().requires_grad_()}, ValueError, "o_b: expected a tensor that needs no gradient"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, object], error: type[Exception], says: str) -> None:
    arguments: dict[str, object] = {"o_a": OUT, "lse_a": LSE, "o_b": OUT, "lse_b": LSE, **change}
    with pytest.raises(error, match=says):
        attncc.merge_states(**arguments)  # pyright: ignore[reportArgumentType]


def test_bad_lists_are_named() -> None:
    with pytest.raises(ValueError, match=r"o: expected shape \[n, S, H, D\], found \[3, 2, 8\]"):
        attncc.merge_state_list(OUT, LSE)
    with pytest.raises(ValueError, match=r"lse: expected shape \[1, 3, 2\] as o, found \[3, 2\]"):
        attncc.merge_state_list(OUT[None], LSE)
    with torch.no_grad():
        attncc.merge_state_list(OUT[None].clone().requires_grad_(), LSE[None])
