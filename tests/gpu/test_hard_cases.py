"""Extreme values, rows that see nothing, odd head counts, views of all sorts: each with its right value."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from cases import Case, example, hard
from checks import allowed, assert_close, assert_lse, compile_case, inputs_for, poisoned, reference_case, run_and_check

from attncc.random_inputs import Inputs

PLAIN, CAUSAL = example("plain", "plain"), example("causal", "causal")


def randn(*size: int) -> torch.Tensor:
    return torch.randn(size, device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize("case", [PLAIN, CAUSAL], ids=str)
def test_one_key_at_an_extreme_logit_gives_its_value(case: Case) -> None:
    q, k, v = torch.full((2, 1, 4, 128), 64.0), torch.full((2, 1, 2, 128), -64.0), torch.randn(2, 1, 2, 128)
    q, k, v = (x.to("cuda", torch.bfloat16) for x in (q, k, v))
    out, lse = compile_case(case)(q, k, v, return_lse=True)
    assert torch.equal(out, v.repeat_interleave(2, 2))
    assert bool((lse - (-64.0 * 64 * 128 / math.sqrt(128))).abs().max() < 0.05)


@pytest.mark.parametrize("signs", [(-64.0, -64.0), (64.0, -64.0), (-64.0, 64.0), (64.0, 64.0)], ids=str)
def test_two_keys_at_extreme_logits(signs: tuple[float, float]) -> None:
    """Equal logits: the mean, exact for equal values; opposite ones: the larger one's value, exactly."""
    q, v = torch.full((1, 3, 2, 128), 64.0).to("cuda", torch.bfloat16), randn(1, 2, 2, 128)
    k = torch.tensor(signs).view(1, 2, 1, 1).expand(1, 2, 2, 128).to("cuda", torch.bfloat16)
    if signs[0] == signs[1]:
        v = v[:, :1].expand(1, 2, 2, 128)
    out = compile_case(PLAIN)(q, k, v)
    assert torch.equal(out, v[:, int(signs[1] > signs[0])][:, None].expand_as(out))


@pytest.mark.parametrize("bias", [-5e4, 5e4, -1e30, 1e30], ids=str)
def test_a_finite_bias_on_every_key_changes_only_lse(bias: float, seed: int) -> None:
    case = hard("biased")
    size = case.shape(2, 200, 333, 4, 2)
    x = inputs_for(case, size, seed, bias=bias)
    out, lse = poisoned(case, size)
    compile_case(case)(x.q, x.k, x.v, out=out, lse=lse, return_lse=True, **x.params)
    assert bool(out.isfinite().all()) and bool(lse.isfinite().all())
    want, _ = reference_case(case)(x.q, x.k, x.v, return_lse=True, bias=0.0)
    if abs(bias) < 1e6:  # s + bias keeps 8 bits below the point: the weights are off by that
        assert_close(out, want, 2e-2)
    assert bool(((lse - bias).abs() <= 20 + 1e-6 * abs(bias)).all())


@pytest.mark.parametrize(
    "case", [CAUSAL, example("causal", "sliding_window"), example("packed_documents", "packed_documents")], ids=str
)
@pytest.mark.parametrize("lengths", [(300, 100), (129, 1), (513, 512), (64, 0)], ids=str)
def test_rows_that_see_no_key(case: Case, lengths: tuple[int, int], seed: int) -> None:
    qo, kv = lengths
    size = case.shape(2, qo, kv, 4, 2)
    out, lse = run_and_check(case, size, inputs_for(case, size, seed))
    assert lse is not None
    blind = slice(0, qo - kv)
    assert bool((out[:, blind] == 0).all()) and bool(lse[:, blind].isneginf().all())
    if kv:
        assert bool((out[:, qo - kv :] != 0).any(-1).all()) and bool(lse[:, qo - kv :].isfinite().all())


def test_a_mask_that_is_false_everywhere(seed: int) -> None:
    case = hard("nothing")
    size = case.shape(2, 200, 300, 4, 2)
    out, lse = run_and_check(case, size, inputs_for(case, size, seed))
    assert lse is not None and bool((out == 0).all()) and bool(lse.isneginf().all())
    case = hard("nothing_but_sink")
    x = inputs_for(case, size, seed)
    out, lse = run_and_check(case, size, x)
    assert lse is not None and bool((out == 0).all())
    assert bool(((lse - x.params["sink"]).abs() < 1e-5).all())  # type: ignore[operator]


@pytest.mark.parametrize("heads", [(12, 2), (28, 4), (5, 1), (7, 1), (1, 1)], ids=str)
@pytest.mark.parametrize("case", [CAUSAL, example("alibi", "alibi")], ids=str)
def test_head_counts(case: Case, heads: tuple[int, int], seed: int) -> None:
    size = case.shape(2, 333, 444, *heads)
    run_and_check(case, size, inputs_for(case, size, seed))


def check_views(case: Case, x: Inputs, shape: tuple[int, ...]) -> None:
    """The same bits as from contiguous copies, and close to the reference."""
    out, _ = run_and_check(case, case.shape(*shape), x)
    copy = replace(x, q=x.q.contiguous(), k=x.k.contiguous(), v=x.v.contiguous())
    assert torch.equal(out, compile_case(case)(copy.q, copy.k, copy.v, **x.params))


def test_broadcast_keys(seed: int) -> None:
    """A batch that shares one K and V: stride 0."""
    x = inputs_for(CAUSAL, CAUSAL.shape(3, 200, 300, 4, 2), seed)
    x = replace(x, k=x.k[:1].expand(3, -1, -1, -1), v=x.v[:1].expand(3, -1, -1, -1))
    check_views(CAUSAL, x, (3, 200, 300, 4, 2))
    x = replace(x, k=x.k[:, :, :1].expand(-1, -1, 2, -1))
    check_views(CAUSAL, x, (3, 200, 300, 4, 2))


def test_transposed_and_packed(seed: int) -> None:
    """q stored as [B, H, S, D]; q, k, v inside one [B, S, 3, H, D]; every other row of a longer tensor."""
    x = inputs_for(CAUSAL, CAUSAL.shape(2, 300, 300, 4, 4), seed)
    transposed = replace(x, q=x.q.transpose(1, 2).contiguous().transpose(1, 2))
    check_views(CAUSAL, transposed, (2, 300, 300, 4, 4))
    q, k, v = torch.stack([x.q, x.k, x.v], 2).unbind(2)
    check_views(CAUSAL, replace(x, q=q, k=k, v=v), (2, 300, 300, 4, 4))
    long = randn(2, 600, 4, 128)
    check_views(CAUSAL, replace(x, k=long[:, ::2], v=long[:, 1::2]), (2, 300, 300, 4, 4))


def test_head_dim_inside_a_wider_row(seed: int) -> None:
    """D 80 as a slice of 128: what lies beside a row is never read into it."""
    case = example("causal", "causal", head_dim=80)
    x = inputs_for(case, case.shape(2, 300, 400, 4, 2), seed)
    wide = [torch.full((*t.shape[:-1], 128), torch.nan, device="cuda", dtype=t.dtype) for t in (x.q, x.k, x.v)]
    for w, t in zip(wide, (x.q, x.k, x.v), strict=True):
        w[..., 8:88] = t
    q, k, v = (w[..., 8:88] for w in wide)
    check_views(case, replace(x, q=q, k=k, v=v), (2, 300, 400, 4, 2))


@pytest.mark.parametrize("case", [PLAIN, CAUSAL, example("prefix_lm", "prefix_lm")], ids=str)
def test_memory_past_kv_len_is_never_read_into_a_result(case: Case, seed: int) -> None:
    x = inputs_for(case, case.shape(2, 100, 200, 4, 2), seed)
    k, v = (torch.full((2, 400, 2, 128), torch.nan, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k[:, :200], v[:, :200] = x.k, x.v
    run_and_check(case, case.shape(2, 100, 200, 4, 2), replace(x, k=k[:, :200], v=v[:, :200]))


def test_hidden_nan_values_stay_hidden(seed: int) -> None:
    """A NaN in a value that the mask hides from a row does not reach the row."""
    x = inputs_for(CAUSAL, CAUSAL.shape(1, 256, 256, 2, 2), seed)
    x.k[:, 200:], x.v[:, 200:] = torch.nan, torch.nan
    out, lse = compile_case(CAUSAL)(x.q, x.k, x.v, return_lse=True)
    want, want_lse = reference_case(CAUSAL)(x.q, x.k, x.v, return_lse=True)
    seen = slice(0, 128)  # rows of tiles that lie before the NaN; the same tile's rows are the next assertion
    assert_close(out[:, seen], want[:, seen], 8e-3)
    assert_lse(lse[:, seen], want_lse[:, seen])
    assert_lse(lse[:, :200], want_lse[:, :200])


def test_a_tensor_of_more_than_2_to_the_31_elements(seed: int) -> None:
    case = hard("enormous")
    bias = torch.zeros(64, 40_000_000, dtype=torch.uint8, device="cuda")
    assert bias.numel() > 2**31
    bias[:, -64:] = torch.randint(0, 100, (64, 64), device="cuda", dtype=torch.uint8)
    size = case.shape(1, 64, 64, 2, 1)
    x = Inputs(randn(1, 64, 2, 128), randn(1, 64, 1, 128), randn(1, 64, 1, 128), {"bias": bias})
    run_and_check(case, size, x)


@pytest.mark.parametrize("variant, length", [("first_key", 1), ("guarded", 1)])
def test_a_hidden_table_read_is_never_made(variant: str, length: int, seed: int) -> None:
    """The table ends there: the next read would be 64 MiB away, the last one 256 GiB."""
    case = hard(variant)
    size = case.shape(1, 200, 4000, 2, 1)
    x = inputs_for(case, size, seed)
    x.params["table"] = torch.randn(length, device="cuda")
    run_and_check(case, size, x)
    torch.cuda.synchronize()


def test_tensors_over_every_index_space(seed: int) -> None:
    for variant in ("every_space", "positions"):
        case = hard(variant)
        size = case.shape(3, 150, 290, 6, 2)
        run_and_check(case, size, inputs_for(case, size, seed, **({"first": 3} if variant == "positions" else {})))


def test_a_strided_tensor_parameter(seed: int) -> None:
    case = example("forgetting", "forgetting")
    size = case.shape(2, 200, 300, 4, 2)
    x = inputs_for(case, size, seed)
    x.params["decay"] = x.params["decay"].permute(2, 0, 1).contiguous().permute(1, 2, 0)  # type: ignore[attr-defined]
    run_and_check(case, size, x)


def test_a_scalar_changes_without_another_kernel(seed: int) -> None:
    case = example("causal", "sliding_window")
    size = case.shape(1, 300, 300, 2, 1)
    kernel = compile_case(case)
    for window in (1, 7, 300, 2**31 - 1, -5):
        run_and_check(case, size, inputs_for(case, size, seed, window=window))
    assert compile_case(case) is kernel


def test_a_scalar_as_a_tensor_is_refused_or_taken_and_never_rebuilt(seed: int) -> None:
    case = example("causal", "sliding_window")
    size = case.shape(1, 300, 300, 2, 1)
    x = inputs_for(case, size, seed, window=64)
    want = compile_case(case)(x.q, x.k, x.v, window=64)
    try:
        got = compile_case(case)(x.q, x.k, x.v, window=torch.tensor(64))
    except (TypeError, ValueError) as e:
        assert "window" in str(e)
    else:
        assert torch.equal(got, want)


def test_another_stream_and_graph_capture(seed: int) -> None:
    x = inputs_for(CAUSAL, CAUSAL.shape(2, 500, 500, 4, 2), seed)
    kernel, out = compile_case(CAUSAL), torch.empty_like(x.q)
    want = kernel(x.q, x.k, x.v)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        other = kernel(x.q, x.k, x.v)
    stream.synchronize()
    assert torch.equal(other, want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel(x.q, x.k, x.v, out=out)
    x.q.mul_(0.5)
    graph.replay()
    assert torch.equal(out, kernel(x.q, x.k, x.v))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU only")
def test_the_second_gpu(seed: int) -> None:
    x = inputs_for(CAUSAL, CAUSAL.shape(2, 300, 300, 4, 2), seed)
    want = compile_case(CAUSAL)(x.q, x.k, x.v)
    got = compile_case(CAUSAL)(*(t.to("cuda:1") for t in (x.q, x.k, x.v)))
    assert got.device == torch.device("cuda:1") and torch.equal(got.cpu(), want.cpu())


def test_errors_name_the_argument_and_leave_the_kernel_working(seed: int) -> None:
    case = example("alibi", "alibi")
    size = case.shape(2, 100, 200, 4, 2)
    x = inputs_for(case, size, seed)
    q, k, v, slope = x.q, x.k, x.v, x.params["slope"]
    assert isinstance(slope, torch.Tensor)
    kernel = compile_case(case)
    out = torch.full_like(q, 7.0)
    bad: dict[str, dict[str, object]] = {
        "q": {"q": q.float()}, "k": {"k": k[..., :64]}, "v": {"v": v[:, :-1]}, "slope": {"slope": slope[:-1]},
        "slope ": {"slope": slope.double()}, "slope  ": {"slope": slope.cpu()}, "slope   ": {"slope": None},
        "bend": {"bend": 3}, "q ": {"q": q[0]}, "q  ": {"q": q[:, :, :3]}, "k ": {"k": k.cpu()},
        "q   ": {"q": q.transpose(-1, -2)}, "out": {"out": out[:, :-1]},
    }  # fmt: skip
    for name, change in bad.items():
        arguments: dict[str, object] = {"q": q, "k": k, "v": v, "slope": slope, "out": out, **change}
        with pytest.raises((TypeError, ValueError), match=rf"\b{name.strip()}\b"):
            kernel(**{n: a for n, a in arguments.items() if a is not None})
        assert bool((out == 7.0).all())
    with pytest.raises((TypeError, ValueError), match=r"\bcap\b"):
        compile_case(example("gemma2", "gemma2_local"))(q, k, v, cap=30.0)
    run_and_check(case, size, x)


def test_allowed_error_follows_torch(seed: int) -> None:
    """The measure itself: torch's attention passes it, an output that is off by a percent doesn't."""
    size = CAUSAL.shape(1, 200, 200, 2, 2)
    x = inputs_for(CAUSAL, size, seed)
    want, want_lse = reference_case(CAUSAL)(x.q, x.k, x.v, return_lse=True)
    limit = allowed(CAUSAL, x, size, want, want_lse)
    q, k, v = (t.transpose(1, 2) for t in (x.q, x.k, x.v))
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    assert_close(theirs, want, limit)
    with pytest.raises(AssertionError):
        assert_close(theirs * 1.01, want, limit)
