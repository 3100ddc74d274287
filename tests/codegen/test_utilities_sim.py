"""The kernels of append_kv and of the merges, in the PTX interpreter, against the torch operations on the CPU."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from ptx.utilities import simulated
from runtime.test_append import LENGTHS, Batch, same
from runtime.test_states import same_bits, states
from torch import Tensor

pytest.importorskip("cutlass")
from attncc import utilities
from attncc.codegen import build
from attncc.codegen import utilities as codegen
from attncc.runtime import append
from attncc.runtime.states import merge_state_list, merge_states

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("kernel_cache")]
INF = math.inf


def test_names() -> None:
    assert utilities.names() == codegen.NAMES
    entry = utilities.artifact("append_16").manifest["kernels"]["append_16"]
    assert entry["registers"] <= 64 and entry["spill_bytes"] == 0


def test_gates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codegen, "THREADS", 128)
    with pytest.raises(build.BuildError, match=r"append_8: block is \(256, 1, 1\), not 128 threads"):
        codegen.build("append_8", tmp_path)


# ------------------------------------------------------------------------------------- append
def appended(kernel: str, k: Tensor, v: Tensor, caches: Any, table: Any, checked: bool = False) -> None:
    """By that kernel, the table taken for one on the device (its values unknown) unless `checked`."""
    tensors = [t for t in table if isinstance(t, Tensor)]
    kernels, launched = simulated((k, v, *tensors), tuple(caches))
    if checked:
        append.append_kv(k, v, caches, *table, kernels=kernels)
    else:
        assert append._launched(kernels, k, v, caches, table)
    assert launched == [kernel]


@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_every_row_finds_its_place(page_size: int) -> None:
    batch = Batch(LENGTHS, page_size)
    for checked in (False, True):
        caches = batch.caches()
        want = batch.expected(caches)
        appended("append_16", batch.k, batch.v, caches, batch.table, checked)
        assert same(caches, want)


def test_many_requests_padding_and_mixed_indices() -> None:
    """Three rounds of the search; requests without rows; rows and page ids past the end; int64 with strides."""
    batch = Batch([(n % 3 == 0, n % 11 + 1) for n in range(1500)], 4)
    k, v = (torch.cat([x, torch.full((9, *x.shape[1:]), 7.0)]) for x in (batch.k, batch.v))
    qo, pages, ids, last = batch.table
    ids = torch.cat([ids, torch.full((5,), -1, dtype=torch.int32)])
    wide = [torch.stack([t.long(), torch.full_like(t.long(), 999)], 1)[:, 0] for t in (qo, last)]
    caches = batch.caches()
    want = batch.expected(caches)
    appended("append_16", k, v, caches, (wide[0], pages, ids, wide[1]))
    assert same(caches, want)


@pytest.mark.parametrize("width, dtype, dims, pad", [
    (8, torch.float32, (8, 6), 0), (4, torch.float32, (9, 1), 0), (4, torch.bfloat16, (16, 8), 2),
    (2, torch.bfloat16, (8, 8), 1), (2, torch.float16, (7, 5), 0), (1, torch.uint8, (8, 8), 1),
], ids=str)  # fmt: skip
def test_units(width: int, dtype: torch.dtype, dims: tuple[int, int], pad: int) -> None:
    """What alignment allows; `pad` elements after every head of the rows."""
    batch = Batch([(3, 9), (2, 2)], 4)
    k, v = ((100 * torch.randn(5, 3, d + pad)).to(dtype)[..., :d] for d in dims)
    caches = tuple(torch.zeros(batch.num_pages, 4, 3, d, dtype=dtype) for d in dims)
    want = tuple(c.clone() for c in caches)
    append.append_kv(k, v, want, *batch.table)  # type: ignore[arg-type]
    appended(f"append_{width}", k, v, caches, batch.table)
    assert all(torch.equal(a, b) for a, b in zip(caches, want, strict=True)) and any(c.any() for c in caches)


def test_views_and_wide_rows() -> None:
    """HND, K and V in one tensor, a k with its heads outermost; rows of several pieces."""
    batch = Batch([(3, 9), (2, 2), (0, 5)], 4)
    k, v = torch.randn(5, 70, 8), torch.randn(70, 5, 4).transpose(0, 1)
    hnd = tuple(torch.zeros(batch.num_pages, 70, 4, d).transpose(1, 2) for d in (8, 4))
    both = torch.zeros(batch.num_pages, 2, 4, 70, 8)
    for rows, caches in (((k, v), hnd), ((k, k), (both[:, 0], both[:, 1]))):
        want = tuple(c.clone() for c in caches)
        append.append_kv(*rows, want, *batch.table)  # type: ignore[arg-type]
        appended("append_16", *rows, caches, batch.table)
        assert same(caches, want)


def test_rows_without_a_place_are_not_written() -> None:
    batch = Batch([(2, 6), (3, 7), (1, 2)], 4)
    want = batch.expected(batch.caches())
    held = batch.ids[int(batch.pages[1]) + 1]
    for wrong in (-1, batch.num_pages, 2**31 - 1, 2**32):
        ids = batch.ids.long()
        ids[int(batch.pages[1]) + 1] = wrong
        found = batch.caches()
        appended("append_16", batch.k, batch.v, found, (batch.qo, batch.pages, ids, batch.last))
        assert all(bool(c[held].isnan().all()) for c in found)
        kept = torch.arange(batch.num_pages) != held
        assert same(tuple(c[kept] for c in found), tuple(c[kept] for c in want))
    found = batch.caches()
    short = torch.tensor([0, 0, 2, 3], dtype=torch.int32)  # request 0 has no page at all
    appended("append_16", batch.k, batch.v, found, (batch.qo, short, batch.ids[2:], batch.last))
    assert same(tuple(c[batch.ids[2:].long()] for c in found), tuple(c[batch.ids[2:].long()] for c in want))
    assert all(bool(c[batch.ids[:2].long()].isnan().all()) for c in found)


def test_nothing_to_write() -> None:
    batch = Batch([(0, 9), (0, 3)], 4)
    found = batch.caches()
    appended("append_16", torch.ones(5, 2, 8), torch.ones(5, 2, 4), found, batch.table)
    assert same(found, batch.caches())
    empty = Batch([], 4)
    kernels, launched = simulated()
    append.append_kv(empty.k, empty.v, empty.caches(), *empty.table, kernels=kernels)
    assert not launched


# ------------------------------------------------------------------------------------- merge
def merged(kernel: str, o: Tensor, lse: Tensor, base: str = "e") -> tuple[Tensor, Tensor]:
    kernels, launched = simulated()
    found = merge_state_list(o, lse, base, kernels=kernels)
    assert launched == [kernel]
    return found


def pair(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor, base: str = "e") -> tuple[Tensor, Tensor]:
    kernels, launched = simulated()
    found = merge_states(o_a, lse_a, o_b, lse_b, base, kernels=kernels)
    assert len(launched) == 1
    return found


def close(found: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> bool:
    """To rounding: once in o's dtype, a few times in f32."""
    (o, lse), (want_o, want_lse) = found, want
    assert o.dtype == want_o.dtype and o.shape == want_o.shape and lse.shape == want_lse.shape
    rounding = max(torch.finfo(o.dtype).eps, 4e-6)
    return torch.allclose(o.float(), want_o.float(), rtol=rounding, atol=2e-6, equal_nan=True) and torch.allclose(
        lse, want_lse, rtol=1e-6, atol=2e-6, equal_nan=True
    )


DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


KINDS = pytest.mark.parametrize("name, base", list(product(DTYPES, "e2")), ids=str)


@KINDS
def test_merge_is_that_of_torch(name: str, base: str) -> None:
    for dim, count in ((16, 1), (16, 2), (8, 5), (5, 3)):
        o, lse = states(7, count, 3, dim, DTYPES[name])
        width = 16 if dim % 8 == 0 else o.element_size()
        found = merged(f"merge_{name}_{width}", o, lse, base)
        assert close(found, merge_state_list(o, lse, base))
        if count == 2:
            both = pair(o[:, 0], lse[:, 0], o[:, 1], lse[:, 1], base)
            assert same_bits(both[0], found[0]) and same_bits(both[1], found[1])


@KINDS
def test_empty_states_change_no_bit(name: str, base: str) -> None:
    dtype = DTYPES[name]
    o, lse = torch.randn(8, 2, 16).to(dtype), 1e3 * torch.randn(8, 2)
    o[0], lse[1, 0], lse[1, 1] = -0.0, -0.0, 0.0
    o[2], lse[2] = 1e30, 3e38
    o[3], lse[3] = torch.finfo(dtype).tiny / 4, -3e38  # a subnormal
    o[4], lse[4] = INF, 1e-40
    nan, nothing = torch.full_like(o, math.nan), torch.full_like(lse, -INF)
    for found in (
        pair(o, lse, nan, nothing, base),
        pair(nan, nothing, o, lse, base),
        merged(f"merge_{name}_16", torch.stack([nan, o, nan], 1), torch.stack([nothing, lse, nothing], 1), base),
        merged(f"merge_{name}_16", o[:, None], lse[:, None], base),
    ):
        assert same_bits(found[0], o) and same_bits(found[1], lse)
    found = pair(nan, nothing, nan, nothing, base)
    assert same_bits(found[0], torch.zeros_like(o)) and same_bits(found[1], nothing)


def test_infinity_and_nan() -> None:
    values = [5.0, -INF, INF, math.nan, 1e-40, -3e38, 3e38]
    lse = torch.tensor(list(product(values, values))).T[..., None].contiguous()
    o = torch.randn(2, len(lse[0]), 1, 4)
    o[0, 3::5] = INF
    found, want = pair(o[0], lse[0], o[1], lse[1]), merge_states(o[0], lse[0], o[1], lse[1])
    assert close(found, want)
    assert torch.equal(found[1].isnan(), want[1].isnan()) and torch.equal(found[1].isinf(), want[1].isinf())


def test_strides() -> None:
    """Of a list, of pairs alike and not; an output that isn't aligned to 16 bytes; no contiguous last dimension."""
    o, lse = states(6, 3, 4, 8)
    want = merge_state_list(o, lse)
    strided = o.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3), lse.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    off = torch.cat([o, o[..., :1]], -1)[..., :8]
    for x, name in ((strided[0], "merge_f32_16"), (off, "merge_f32_4")):
        assert close(merged(name, x, strided[1]), want)
    two = merge_states(o[:, 0], lse[:, 0], o[:, 1], lse[:, 1])
    first, second = o[:, 0].transpose(0, 1).contiguous().transpose(0, 1), o[:, 1].transpose(1, 2).contiguous()
    for a, b in ((first, o[:, 1]), (first, second.transpose(1, 2)), (o[:, 0], o[:, 1])):
        assert close(pair(a, lse[:, 0], b, lse[:, 1].contiguous()), two)
