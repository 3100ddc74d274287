"""append_kv on the CPU against a loop over rows: every position, layouts of the cache, padding, and what is refused.

On the CPU indices are on the host; the path that indices on a device take is called by itself here, and through the
public function in the GPU tests.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import attncc
from attncc.runtime import append

HEADS, DIMS = 2, (8, 4)


class Batch:
    """A random table for the lengths, a NaN cache, and the rows that a step adds."""

    def __init__(self, lengths: list[tuple[int, int]], page_size: int, seed: int = 0, spare: int = 3):
        gen = torch.Generator().manual_seed(seed)
        self.lengths, self.page_size = lengths, page_size
        counts = [-(-kv // page_size) for _, kv in lengths]
        self.num_pages = sum(counts) + spare
        self.ids = torch.randperm(self.num_pages, generator=gen)[: sum(counts)].int()
        self.qo = torch.tensor([0, *(q for q, _ in lengths)]).cumsum(0).int()
        self.pages = torch.tensor([0, *counts]).cumsum(0).int()
        self.last = torch.tensor([kv - (n - 1) * page_size if n else 0 for (_, kv), n in zip(lengths, counts)]).int()  # noqa: B905
        rows = int(self.qo[-1])
        self.k, self.v = (torch.randn(rows, HEADS, d, generator=gen) for d in DIMS)

    @property
    def table(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.qo, self.pages, self.ids, self.last

    def caches(self) -> tuple[Tensor, Tensor]:
        return tuple(torch.full((self.num_pages, self.page_size, HEADS, d), torch.nan) for d in DIMS)  # type: ignore[return-value]

    def expected(self, caches: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The caches afterwards, by a loop over rows."""
        k, v = (c.clone() for c in caches)
        for b, (low, high) in enumerate(pairwise(self.qo.tolist())):
            for r in range(low, high):
                position = self.lengths[b][1] - (high - low) + r - low
                page = int(self.ids[int(self.pages[b]) + position // self.page_size])
                k[page, position % self.page_size], v[page, position % self.page_size] = self.k[r], self.v[r]
        return k, v


def same(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(x.contiguous().view(torch.int32), y.contiguous().view(torch.int32)) for x, y in zip(a, b))  # noqa: B905


def device_path(k: Tensor, v: Tensor, kv: tuple[Tensor, Tensor], *table: Tensor) -> None:
    """What append_kv does where the indices are on the device."""
    append._append(k, v, kv, table)  # type: ignore[arg-type]


PATHS = pytest.mark.parametrize("path", [attncc.append_kv, device_path], ids=["host", "device"])
LENGTHS = [(1, 40), (0, 7), (5, 5), (3, 33), (0, 0), (17, 50), (1, 1), (1, 16), (1, 17)]


@PATHS
@pytest.mark.parametrize("page_size", [1, 5, 16, 64])
def test_every_row_finds_its_place_and_nothing_else_changes(path: Any, page_size: int) -> None:
    batch = Batch(LENGTHS, page_size)
    caches = batch.caches()
    want = batch.expected(caches)
    assert path(batch.k, batch.v, caches, *batch.table) is None
    assert same(caches, want)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 20)), min_size=1, max_size=8),
    page_size=st.integers(1, 9), padding=st.integers(0, 4), seed=st.integers(0, 99),
)  # fmt: skip
def test_random_batches_on_both_paths(lengths: list[tuple[int, int]], page_size: int, padding: int, seed: int) -> None:
    batch = Batch([(q, q + before) for q, before in lengths], page_size, seed)
    k, v = (torch.cat([x, torch.full((padding, *x.shape[1:]), 7.0)]) for x in (batch.k, batch.v))
    ids = torch.cat([batch.ids, torch.full((padding,), -1, dtype=torch.int32)])
    for path in (attncc.append_kv, device_path):
        caches = batch.caches()
        want = batch.expected(caches)
        path(k, v, caches, batch.qo, batch.pages, ids, batch.last)
        assert same(caches, want)


@PATHS
def test_int64_and_strided_indices_and_rows(path: Any) -> None:
    batch = Batch(LENGTHS, 5)
    caches = batch.caches()
    want = batch.expected(caches)
    table = [torch.stack([t.long(), torch.full_like(t.long(), 999)], 1)[:, 0] for t in batch.table]
    k = batch.k.transpose(0, 1).contiguous().transpose(0, 1)
    v = torch.cat([batch.v, batch.v], -1)[..., : DIMS[1]]
    path(k, v, caches, *table)
    assert same(caches, want)


def test_lists_and_arrays() -> None:
    batch = Batch(LENGTHS, 5)
    caches = batch.caches()
    want = batch.expected(caches)
    qo, pages, ids, last = batch.table
    attncc.append_kv(batch.k, batch.v, caches, qo.tolist(), pages.numpy(), ids, last.tolist())
    assert same(caches, want)


@PATHS
def test_views_of_a_cache(path: Any) -> None:
    """HND, and K and V in one [pages, 2, page_size, heads, head_dim]."""
    batch = Batch(LENGTHS, 16)
    want = batch.expected(batch.caches())
    hnd = tuple(torch.full((batch.num_pages, HEADS, 16, d), torch.nan).transpose(1, 2) for d in DIMS)
    path(batch.k, batch.v, hnd, *batch.table)
    assert same(hnd, want)
    both = torch.full((batch.num_pages, 2, 16, HEADS, 8), torch.nan)
    path(batch.k, batch.k, (both[:, 0], both[:, 1]), *batch.table)
    assert same((both[:, 0], both[:, 1]), (want[0], want[0]))


@PATHS
def test_nothing_to_write(path: Any) -> None:
    for lengths in ([(0, 9), (0, 0)], [(0, 0)], []):
        batch = Batch(lengths, 4)
        caches = batch.caches()
        path(batch.k, batch.v, caches, *batch.table)
        assert same(caches, batch.caches())
    batch = Batch([(0, 9), (0, 3)], 4)  # all of k and v is padding
    caches = tuple(torch.randn_like(c) for c in batch.caches())
    before = tuple(c.clone() for c in caches)
    path(torch.ones(5, HEADS, 8), torch.ones(5, HEADS, 4), caches, *batch.table)
    assert same(caches, before)


def test_on_the_device_rows_without_a_place_are_not_written() -> None:
    """Where nothing can be checked: page ids that aren't there, more new rows than the table has positions."""
    batch = Batch([(2, 6), (3, 7), (1, 2)], 4)
    caches = batch.caches()
    want = batch.expected(caches)
    ids = batch.ids.clone()
    for wrong in (-1, batch.num_pages, 2**31 - 1):
        ids[int(batch.pages[1]) + 1] = wrong  # rows 2, 3, 4 of the batch are at positions 4, 5, 6 of request 1
        found = batch.caches()
        device_path(batch.k, batch.v, found, batch.qo, batch.pages, ids, batch.last)
        held = batch.ids[int(batch.pages[1]) + 1]
        assert all(bool(c[held].isnan().all()) for c in found)
        kept = torch.arange(batch.num_pages) != held
        assert same(tuple(c[kept] for c in found), tuple(c[kept] for c in want))
    found = batch.caches()
    short = torch.tensor([0, 0, 2, 3], dtype=torch.int32)  # request 0 has no page at all
    device_path(batch.k, batch.v, found, batch.qo, short, batch.ids[2:], batch.last)
    assert same(tuple(c[batch.ids[2:].long()] for c in found), tuple(c[batch.ids[2:].long()] for c in want))
    assert all(bool(c[batch.ids[:2].long()].isnan().all()) for c in found)


def test_bits_are_copied() -> None:
    """NaN payloads and float8 too."""
    batch = Batch([(3, 5)], 4)
    bits = torch.randint(-(2**15), 2**15, (3, HEADS, 8), dtype=torch.int16)
    cache = torch.zeros(batch.num_pages, 4, HEADS, 8, dtype=torch.bfloat16)
    attncc.append_kv(bits.view(torch.bfloat16), bits.view(torch.bfloat16), (cache, cache.clone()), *batch.table)
    places = [(int(batch.ids[p // 4]), p % 4) for p in (2, 3, 4)]
    assert all(torch.equal(cache[at].view(torch.int16), bits[r]) for r, at in enumerate(places))
    small = torch.zeros(batch.num_pages, 4, HEADS, 8).to(torch.float8_e4m3fn)
    rows = torch.randn(3, HEADS, 8).to(torch.float8_e4m3fn)
    attncc.append_kv(rows, rows, (small, small.clone()), *batch.table)
    assert all(torch.equal(small[at].view(torch.uint8), rows[r].view(torch.uint8)) for r, at in enumerate(places))


def test_rows_that_lie_in_the_cache() -> None:
    """What they held before the call is written, wherever it lies and whatever is written there."""
    torch.manual_seed(0)
    for pick in (lambda c: c[2, :3], lambda c: c[::2, 1][:3], lambda c: c.flatten(0, 1)[1:4]):
        cache, other = torch.randn(2, 6, 4, HEADS, 8)
        k, v = pick(cache).clone(), pick(cache).flip(0)
        want = cache.clone(), other.clone()
        for r, at in enumerate([(2, 0), (2, 1), (0, 3)]):  # of the first request positions 4, 5; of the other 3
            want[0][at], want[1][at] = k[r], v[r]
        attncc.append_kv(pick(cache), v, (cache, other), [0, 2, 3], [0, 2, 3], [5, 2, 0], [2, 4])
        assert same((cache, other), want)
    cache, other = torch.randn(2, 6, 4, HEADS, 8)
    want = cache.clone(), other.clone()
    want[0][1, 0], want[1][1, 0] = other[1, 2], cache[1, 0]  # v was there before k was written
    attncc.append_kv(other[1, 2:3], cache[1, :1], (cache, other), [0, 1], [0, 1], [1], [1])
    assert same((cache, other), want)


def test_rows_beside_the_cache_are_not_copied() -> None:
    memory = torch.zeros(7, 4, HEADS, 8)
    caches = memory[:6], torch.zeros(6, 4, HEADS, 8)
    assert append._apart(memory[6], caches).data_ptr() == memory[6].data_ptr()
    assert append._apart(memory[5], caches).data_ptr() != memory[5].data_ptr()


GOOD = Batch([(2, 6), (3, 7)], 4)
K, V = GOOD.caches()


def changed(name: str, at: int, value: int) -> dict[str, object]:
    table: dict[str, Tensor] = dict(zip(append.TABLE, GOOD.table, strict=True))
    t = table[name].clone()
    t[at] = value
    return {name: t}


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"k": None}, TypeError, "k: expected a torch.Tensor, found NoneType"),
        ({"k": GOOD.k.half()}, TypeError, "k: expected dtype float32 as k_cache, found float16"),
        ({"k": GOOD.k.to(torch.complex128), "kv": (K.to(torch.complex128), V)}, TypeError,
         "k: expected a dtype that is not complex, found complex128"),
        ({"v": GOOD.v.to(torch.complex64), "kv": (K, V.to(torch.complex64))}, TypeError,
         "v: expected a dtype that is not complex, found complex64"),
        ({"k": GOOD.k.to_sparse()}, TypeError, "k: expected a strided tensor, found layout torch.sparse_coo"),
        ({"kv": (K, V.to_sparse())}, TypeError, "v_cache: expected a strided tensor, found layout torch.sparse_coo"),
        ({"kv_indices": GOOD.ids.to_sparse()}, TypeError, "kv_indices: expected a strided tensor, found layout torch."),
        ({"k": GOOD.k[:, :1]}, ValueError, r"k: expected shape \[nnz, 2, 8\] .*k_cache.*, found \[5, 1, 8\]"),
        ({"k": GOOD.k[0]}, ValueError, r"k: expected shape \[nnz, 2, 8\]"),
        ({"v": GOOD.v[..., :3]}, ValueError, r"v: expected shape \[nnz, 2, 4\] .*v_cache.*, found \[5, 2, 3\]"),
        ({"v": GOOD.v[:4]}, ValueError, "v: expected 5 rows as in k, found 4"),
        ({"v": GOOD.v.to("meta")}, ValueError, "v: expected a tensor on cpu as k is, found meta"),
        ({"kv": K}, TypeError, r"kv: expected \(k_cache, v_cache\), found Tensor"),
        ({"kv": (K[0], V)}, ValueError, "k_cache: expected shape"),
        ({"kv": (K, V[:-1])}, ValueError, "v_cache: expected .* as k_cache"),
        ({"kv": (K[:1].expand(9, -1, -1, -1), V)}, ValueError, "k_cache: expected elements that don't overlap"),
        ({"kv": (K[:, :0], V[:, :0])}, ValueError, "k_cache: expected a page_size of at least 1"),
        ({"qo_indptr": "025"}, TypeError, "qo_indptr: expected a tensor, an array or a list of ints, found str"),
        ({"qo_indptr": [0, 2.5]}, TypeError, "qo_indptr: expected int32 or int64, found float64"),
        ({"qo_indptr": GOOD.qo.float()}, TypeError, "qo_indptr: expected dtype int32 or int64, found float32"),
        ({"qo_indptr": GOOD.qo[:0]}, ValueError, "qo_indptr: expected 1 values"),
        ({"kv_indices": GOOD.ids[None]}, ValueError, "kv_indices: expected one dimension"),
        ({"kv_indptr": GOOD.pages[:2]}, ValueError, "kv_indptr: expected 3 values, for 2 requests, found 2"),
        ({"last_page_len": GOOD.qo}, ValueError, "last_page_len: expected 2 values, for 2 requests, found 3"),
        (changed("qo_indptr", 0, 1), ValueError, "qo_indptr: expected offsets that start at 0, found 1"),
        (changed("qo_indptr", 1, 6), ValueError, "qo_indptr: expected offsets that never decrease, found 6, 5 for r"),
        (changed("qo_indptr", 2, 6), ValueError, "qo_indptr: expected at most 5 rows, as in k, found 6"),
        (changed("kv_indptr", 2, 9), ValueError, "kv_indices: expected at least 9 page ids"),
        (changed("kv_indices", 3, 7), ValueError, "kv_indices: expected page ids in 0…6, found 7 at 3"),
        (changed("kv_indices", 0, -1), ValueError, "kv_indices: expected page ids in 0…6, found -1 at 0"),
        (changed("last_page_len", 1, 0), ValueError, r"last_page_len: expected 1…4 .*, found 0 for request 1"),
        (changed("last_page_len", 0, 5), ValueError, r"last_page_len: expected 1…4 .*, found 5 for request 0"),
        (changed("kv_indptr", 1, 0), ValueError, "kv_indptr: expected pages for the 2 new rows of request 0"),
        ({"k": GOOD.k.clone().requires_grad_()}, ValueError, "k: expected a tensor that needs no gradient"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named_and_nothing_is_written(change: dict, error: type[Exception], says: str) -> None:
    arguments = {"k": GOOD.k, "v": GOOD.v, "kv": (K, V), **dict(zip(append.TABLE, GOOD.table, strict=True)), **change}
    with pytest.raises(error, match=says):
        attncc.append_kv(**arguments)
    assert bool(K.isnan().all()) and bool(V.isnan().all())
