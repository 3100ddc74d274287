"""append_kv and the merges of states: their kernels against torch operations on the same device, one launch each."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import attncc
from attncc import utilities
from attncc.runtime import append, states
from attncc.runtime.driver import driver
from attncc.runtime.utilities import Utilities

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
INF = math.inf


class Counting:
    """CUDA's driver; counts launches."""

    def __init__(self) -> None:
        self.launches = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(driver(), name)

    def launch(self, *arguments: Any) -> None:
        self.launches += 1
        driver().launch(*arguments)


@pytest.fixture
def kernels() -> Any:
    """Kernels that are not loaded yet; each test must launch some."""
    counting = Counting()
    yield Utilities(utilities.artifact, counting)
    assert counting.launches


def same_bits(a: Tensor, b: Tensor) -> bool:
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))


# ---------------------------------------------------------------------- merge


def random_states(n: int, count: int, heads: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    o = torch.randn(n, count, heads, dim, device="cuda").to(dtype)
    lse = 4 * torch.randn(n, count, heads, device="cuda")
    lse[torch.rand_like(lse) < 0.1] = -INF
    return o, lse


def check(found: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    (o, lse), (want_o, want_lse) = found, want
    assert o.dtype == want_o.dtype and o.shape == want_o.shape and lse.dtype == want_lse.dtype
    rounding = max(torch.finfo(o.dtype).eps, 4e-6)
    assert torch.allclose(o.float(), want_o.float(), rtol=rounding, atol=4e-6, equal_nan=True)
    assert torch.allclose(lse, want_lse, rtol=1e-6, atol=4e-6, equal_nan=True)


@pytest.mark.parametrize("base", "e2")
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_merges_are_those_of_torch(dtype: torch.dtype, base: str, kernels: Utilities, seed: int) -> None:
    for n, count, heads, dim in ((1, 1, 1, 8), (300, 2, 32, 128), (77, 9, 5, 72), (40, 3, 7, 5), (513, 2, 3, 1)):
        o, lse = random_states(n, count, heads, dim, dtype)
        want = states.merge_state_list(o, lse, base)
        found = states.merge_state_list(o, lse, base, kernels=kernels)
        check(found, want)
        swapped = o.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3), lse.mT.contiguous().mT
        off = torch.cat([o, o[..., :1]], -1)[..., :dim]
        for x, y in (swapped, (off, lse)):
            check(states.merge_state_list(x, y, base, kernels=kernels), want)
        if count == 2:
            for b in (o[:, 1], o[:, 1].mT.contiguous().mT):
                pair = states.merge_states(o[:, 0], lse[:, 0], b, lse[:, 1], base, kernels=kernels)
                assert same_bits(pair[0], found[0]) and same_bits(pair[1], found[1])


@pytest.mark.parametrize("base", "e2")
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_empty_states_change_no_bit(dtype: torch.dtype, base: str, kernels: Utilities, seed: int) -> None:
    o, lse = torch.randn(64, 8, 128, device="cuda").to(dtype), 1e3 * torch.randn(64, 8, device="cuda")
    o[0], lse[1, :4], lse[1, 4:] = -0.0, -0.0, 0.0
    o[2], lse[2] = 1e30, 3e38
    o[3], lse[3] = torch.finfo(dtype).tiny / 4, -3e38  # a subnormal
    o[4], lse[4] = INF, 1e-40
    nan, nothing = torch.full_like(o, math.nan), torch.full_like(lse, -INF)
    for found in (
        states.merge_states(o, lse, nan, nothing, base, kernels=kernels),
        states.merge_states(nan, nothing, o, lse, base, kernels=kernels),
        states.merge_state_list(
            torch.stack([nan, o, nan], 1), torch.stack([nothing, lse, nothing], 1), base, kernels=kernels
        ),
        states.merge_state_list(o[:, None], lse[:, None], base, kernels=kernels),
    ):
        assert same_bits(found[0], o) and same_bits(found[1], lse)
    found = states.merge_states(nan, nothing, nan, nothing, base, kernels=kernels)
    assert same_bits(found[0], torch.zeros_like(o)) and same_bits(found[1], nothing)


def test_infinity_and_nan(kernels: Utilities) -> None:
    values = torch.tensor([5.0, -INF, INF, math.nan, 1e-40, -3e38, 3e38], device="cuda")
    lse = torch.cartesian_prod(values, values)[..., None]
    o = torch.randn(len(lse), 2, 1, 8, device="cuda")
    check(states.merge_state_list(o, lse, kernels=kernels), states.merge_state_list(o, lse))


def test_a_first_merge_may_be_captured(kernels: Utilities, seed: int) -> None:
    o, lse = random_states(90, 2, 4, 128, torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = states.merge_states(o[:, 0], lse[:, 0], o[:, 1], lse[:, 1], kernels=kernels)
    o.copy_(torch.randn_like(o))
    graph.replay()
    check(found, states.merge_state_list(o, lse))


# ---------------------------------------------------------------------- append


def random_table(lengths: list[tuple[int, int]], page_size: int, spare: int = 3) -> tuple[int, list[Tensor]]:
    """(pages of a cache, table on the device) for (new rows, positions) of each request."""
    counts = torch.tensor([-(-kv // page_size) for _, kv in lengths])
    new, kv = (torch.tensor(x) for x in zip(*lengths, strict=True))
    pages = int(counts.sum()) + spare
    ends = [torch.cat([torch.zeros(1, dtype=torch.int64), x.cumsum(0)]) for x in (new, counts)]
    last = (kv - (counts - 1) * page_size).where(counts > 0, torch.zeros_like(kv))
    return pages, [t.int().cuda() for t in (*ends, torch.randperm(pages)[: int(counts.sum())], last)]


def bits(*shape: Any) -> Tensor:
    """Any bits, NaN among them; the last of `shape` is the dtype."""
    *sizes, last, dtype = shape
    return torch.randint(0, 256, (*sizes, last * dtype.itemsize), dtype=torch.uint8, device="cuda").view(dtype)


LENGTHS = [(1, 40), (0, 7), (5, 5), (3, 33), (0, 0), (170, 500), (1, 1), (1, 16), (1, 17)]
MANY = [(n % 3, n % 17 + 2) for n in range(2000)]


@pytest.mark.parametrize("page_size, lengths", [(1, LENGTHS), (16, LENGTHS), (5, LENGTHS), (16, MANY)], ids=str)
@pytest.mark.parametrize("dtype, dims", [
    (torch.bfloat16, (128, 128)), (torch.bfloat16, (192, 128)), (torch.float16, (12, 8)), (torch.bfloat16, (7, 5)),
    (torch.float8_e4m3fn, (64, 64)), (torch.uint8, (5, 3)), (torch.float32, (8, 8)),
], ids=str)  # fmt: skip
def test_appending_is_that_of_torch(
    page_size: int, lengths: list, dtype: torch.dtype, dims: tuple[int, int], kernels: Utilities, seed: int
) -> None:
    """With rows past the end, of other strides, into caches of every layout, by indices of both widths."""
    pages, table = random_table(lengths, page_size)
    rows, heads = int(table[0][-1]) + 5, 3
    off, v = (bits(rows, heads, d + extra, dtype) for d, extra in zip(dims, (1, 0), strict=True))
    off = off[..., :-1]
    k = off.contiguous()
    wide = [torch.stack([t.long(), t.long()], 1)[:, 0] for t in table]
    swapped = v.transpose(0, 1).contiguous().transpose(0, 1)
    nhd = [bits(pages, page_size, heads, d, dtype) for d in dims]
    hnd = [c.transpose(1, 2).contiguous().transpose(1, 2) for c in nhd]
    for x, y, caches, indices in (
        (k, v, nhd, table), (k, swapped, hnd, wide), (off, v, nhd, [wide[0], table[1], wide[2], table[3]]),
        (k, v, nhd, [t.cpu() for t in table]), (k, v, hnd, [t.cpu() for t in wide]),
    ):  # fmt: skip
        found, want = ([c.clone(memory_format=torch.preserve_format) for c in caches] for _ in range(2))
        append.append_kv(x, y, (found[0], found[1]), *indices, kernels=kernels)
        append.append_kv(x, y, (want[0], want[1]), *indices)
        assert all(same_bits(a, b) for a, b in zip(found, want, strict=True))
        assert not all(same_bits(a, b) for a, b in zip(found, caches, strict=True))


def test_rows_without_a_place(kernels: Utilities, seed: int) -> None:
    pages, table = random_table(LENGTHS, 16)
    k, v = (torch.randn(int(table[0][-1]), 2, 64, device="cuda") for _ in "kv")
    for wrong in (-1, pages, 2**31 - 1, 2**32):
        ids = table[2].long()
        ids[::3] = wrong
        found, want = ([torch.zeros(pages, 16, 2, 64, device="cuda") for _ in "kv"] for _ in range(2))
        for caches, by in ((found, kernels), (want, None)):
            append.append_kv(k, v, (caches[0], caches[1]), table[0], table[1], ids, table[3], kernels=by)
        assert all(same_bits(a, b) for a, b in zip(found, want, strict=True))


def test_a_first_append_may_be_captured(kernels: Utilities, seed: int) -> None:
    """A replay reads the indices and rows of its own time."""
    pages, table = random_table(LENGTHS, 16)
    rows = int(table[0][-1])
    k, v = (torch.randn(rows, 4, 128, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    caches = tuple(torch.zeros(pages, 16, 4, 128, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        append.append_kv(k, v, caches, *table, kernels=kernels)  # type: ignore[arg-type]
    for _ in range(3):
        table[2].copy_(torch.randperm(pages)[: len(table[2])])
        table[0].clamp_(max=rows - 2)  # what is then shorter than its rows
        for t in (k, v):
            t.normal_()
        for c in caches:
            c.zero_()
        graph.replay()
        want = tuple(torch.zeros_like(c) for c in caches)
        append.append_kv(k, v, want, *table)  # type: ignore[arg-type]
        assert all(same_bits(a, b) for a, b in zip(caches, want, strict=True))


@pytest.mark.parametrize("where", ["cuda", "cpu"])
def test_one_launch(where: str, seed: int) -> None:
    """The public functions, as a profiler sees them: nothing but our kernel, and a copy of indices on the host."""
    pages, table = random_table(LENGTHS, 16)
    table = [t.to(where) for t in table]
    k = torch.randn(int(table[0][-1]), 4, 128, device="cuda", dtype=torch.bfloat16)
    caches = tuple(torch.zeros(pages, 16, 4, 128, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    o, lse = random_states(90, 2, 4, 128, torch.bfloat16)
    for _ in range(2):  # loaded in the first round
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            attncc.append_kv(k, k, caches, *table)  # type: ignore[arg-type]
            attncc.merge_states(o[:, 0], lse[:, 0], o[:, 1], lse[:, 1])
            torch.cuda.synchronize()
    done = [e.name for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]  # type: ignore[union-attr]
    kernels = [name for name in done if not name.startswith("Memcpy")]
    assert sorted(kernels) == ["attncc_append_16_0", "attncc_merge_bf16_16_0"]
    assert len(done) - len(kernels) == (where == "cpu")
