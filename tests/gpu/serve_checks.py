"""Random batches as an engine has them, and how their results are judged.

Whatever must not be read is NaN: unused rows of last pages, unused pages, what is beside the used part of a tensor over
`j`.  A few values of each request are larger the longer it is (`_mark`), so that losing one key among thousands shows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from cases import SCALARS
from checks import (
    UNIT,
    Parts,
    assert_close,
    assert_emits,
    assert_lse,
    lse_limit,
    parts_of,
    plain_reference,
    reference_case,
)
from oracle import LOOSE, rounds_before_scale, transforms
from serve_cases import Lengths, Served
from torch import Tensor

import attncc
from attncc import random_inputs as draw
from attncc.ir.nodes import Variant
from attncc.random_inputs import FLOATS, Shape

DEVICE = "cuda"


@dataclass(frozen=True)
class Batch:
    """Arguments of plan (`table`, on the host) and run; `places` [keys] (page, row) or (row,) of every key in order."""

    served: Served
    lengths: Lengths
    heads: tuple[int, int]
    q: Tensor
    kv: tuple[Tensor, Tensor]
    table: tuple[Tensor, ...]
    params: dict[str, object]
    places: tuple[Tensor, ...]

    @property
    def scalars(self) -> dict[str, object]:
        return {name: x for name, x in self.params.items() if not isinstance(x, Tensor)}

    @property
    def softmax(self) -> bool:
        return self.served.case.load().scan.kind == "softmax"

    def rows(self, b: int) -> slice:
        return slice(int(self.table[0][b]), int(self.table[0][b + 1]))

    def alone(self, b: int) -> Batch:
        """Request b as a batch of one, in the same cache; only for variants without tensors."""
        assert not any(isinstance(x, Tensor) for x in self.params.values())
        assert self.served.page_size is not None
        _, pages, ids, last = self.table
        first, end = int(pages[b]), int(pages[b + 1])
        rows = self.rows(b)
        table = (
            torch.tensor([0, rows.stop - rows.start]),
            torch.tensor([0, end - first]),
            ids[first:end],
            last[b : b + 1],
        )
        return replace(self, lengths=[self.lengths[b]], q=self.q[rows], table=tuple(t.int() for t in table))


def make_batch(
    served: Served, lengths: Lengths, heads: tuple[int, int] = (8, 2), seed: int = 0, *, view: str = "NHD",
    spare: int = 5, pages_seed: int | None = None, **given: object,
) -> Batch:  # fmt: skip
    """A batch on the GPU.  `view`: how the caches lie, NHD, HND, "combined" ([pages, 2, …]) or "differing" (K NHD, V
    HND).  The same `seed` gives the same values wherever the pages lie, which is `pages_seed`'s (default: seed's)."""
    case, size = served.case, served.page_size
    dtype, dims = FLOATS[case.dtype], (case.head_dim, case.head_dim_vo or case.head_dim)
    gen = torch.Generator(DEVICE).manual_seed(seed)
    qo, kv = (np.array([pair[n] for pair in lengths], dtype=np.int64) for n in (0, 1))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen, device=DEVICE, dtype=torch.float32).to(dtype)

    q = normal(int(qo.sum()), heads[0], dims[0])
    k, v = (normal(int(kv.sum()), heads[1], d) for d in dims)
    _mark(v, qo, kv, np.random.default_rng(seed))
    offsets = [_offsets(qo), _offsets(kv)]
    if size is None:
        caches, places, table = (k, v), (torch.arange(int(kv.sum()), device=DEVICE),), tuple(offsets)
    else:
        rng = np.random.default_rng(seed if pages_seed is None else pages_seed)
        counts = -(-kv // size)
        ids = rng.permutation(int(counts.sum()) + spare)[: int(counts.sum())]
        places = _places(ids, counts, kv, size)
        caches = tuple(_caches(int(counts.sum()) + spare, size, heads[1], dims, dtype, view))
        for cache_, x in zip(caches, (k, v), strict=True):
            cache_.index_put_(places, x)
        last = torch.from_numpy(np.where(counts > 0, kv - (counts - 1) * size, 0)).int()
        padded = torch.from_numpy(np.append(ids, np.full(7, -1))).int()
        table = (offsets[0], _offsets(counts), padded, last)
    shape = Shape(len(lengths), int(qo.max(initial=0)), int(kv.max(initial=0)), *heads, *dims)
    params = _params(case.load(), shape, q.shape[0], tuple(caches[0].shape[: len(places)]), places, gen, given)
    return Batch(served, lengths, heads, q, (caches[0], caches[1]), table, params, places)


def _offsets(lengths: np.ndarray) -> Tensor:
    return torch.from_numpy(np.append(0, np.cumsum(lengths))).int()


def _places(ids: np.ndarray, counts: np.ndarray, kv: np.ndarray, size: int) -> tuple[Tensor, Tensor]:
    """(page, row in the page) of every key of every request, in order."""
    position = np.arange(int(kv.sum())) - np.repeat(np.cumsum(kv) - kv, kv)
    page = ids[np.repeat(np.cumsum(counts) - counts, kv) + position // size] if len(position) else position
    return torch.from_numpy(page).to(DEVICE), torch.from_numpy(position % size).to(DEVICE)


def _caches(pages: int, size: int, heads: int, dims: tuple[int, int], dtype: torch.dtype, view: str) -> list[Tensor]:
    options: dict[str, Any] = {"dtype": dtype, "device": DEVICE}
    if view == "combined":
        assert dims[0] == dims[1]
        return list(torch.full((pages, 2, size, heads, dims[0]), torch.nan, **options).unbind(1))
    hnd = {"NHD": (False, False), "HND": (True, True), "differing": (False, True)}[view]
    return [
        torch.full((pages, heads, size, d), torch.nan, **options).transpose(1, 2)
        if by_head
        else torch.full((pages, size, heads, d), torch.nan, **options)
        for d, by_head in zip(dims, hnd, strict=True)
    ]


def _mark(v: Tensor, qo: np.ndarray, kv: np.ndarray, rng: np.random.Generator) -> None:
    """Scale the values of some keys of each request by sqrt(kv_len) / 4: the first, the last, the first new one, the
    ends of tiles and pages near by, and four at random."""
    start, at, scale = np.cumsum(kv) - kv, [], []
    for b, n in enumerate(kv.tolist()):
        if n:
            near = {0, n - 1, max(0, n - int(qo[b])), 127, 128, (n - 1) // 16 * 16, (n - 1) // 128 * 128}
            chosen = np.array(sorted(j for j in {*near, *rng.integers(0, n, 4).tolist()} if j < n))
            at.append(start[b] + chosen)
            scale.append(np.full(len(chosen), max(1.0, n**0.5 / 4)))
    if at:
        index = torch.from_numpy(np.concatenate(at)).to(DEVICE)
        v[index] *= torch.from_numpy(np.concatenate(scale)).to(DEVICE).to(v.dtype)[:, None, None]


def _params(
    variant: Variant, shape: Shape, rows: int, keys: tuple[int, ...], places: tuple[Tensor, ...], gen: torch.Generator,
    given: dict[str, object],
) -> dict[str, object]:  # fmt: skip
    """Scalars as in SCALARS, so that the masks' edges lie inside the batch, and tensors in the served layout: `iq` is
    one dimension, `j` lies as the caches do, NaN where no key is."""
    mine = {p.name for p in variant.scalars if not p.const}
    scalars, _ = draw._scalars(variant, shape, {**{n: x for n, x in SCALARS.items() if n in mine}, **given})
    params: dict[str, object] = dict(scalars)
    variant = draw._sized(variant, scalars)
    for t in variant.tensors:
        lies = {"iq": (rows,), "j": keys}
        dims = tuple(part for dim in t.dims for part in lies.get(str(dim), (dim,)))
        x = draw._tensor(replace(t, dims=dims), variant, shape, gen)
        if t.dims[0] == "j" and x.dtype.is_floating_point:
            poisoned = torch.full_like(x, torch.nan)
            poisoned[places] = x[places]
            x = poisoned
        params[t.name] = x
    return params


# ---------------------------------------------------------------------- running


@cache
def compile_served(served: Served) -> Any:
    return attncc.compile(served.source, **served.options)  # pyright: ignore[reportArgumentType]


def attention(batch: Batch, **options: Any) -> Any:
    """A BatchAttention that is just large enough for the batch, or as `options` say."""
    maxima = {"max_batch_size": max(1, len(batch.lengths)), "max_qo_rows": max(1, batch.q.shape[0])}
    heads = {"num_qo_heads": batch.heads[0], "num_kv_heads": batch.heads[1]}
    where = {} if batch.served.page_size is None else {"page_size": batch.served.page_size}
    return attncc.BatchAttention(compile_served(batch.served), **{**heads, **where, **maxima, **options})


def poisoned(batch: Batch) -> tuple[Tensor, Tensor]:
    """out and lse full of NaN: what a kernel doesn't write shows."""
    case, rows = batch.served.case, batch.q.shape[0]
    out = torch.full((rows, batch.heads[0], case.head_dim_vo or case.head_dim), torch.nan, device=batch.q.device)
    return out.to(batch.q.dtype), torch.full((rows, batch.heads[0]), torch.nan, device=batch.q.device)


def run(attn: Any, batch: Batch) -> tuple[Tensor, Tensor | None]:
    """Run a planned batch into poisoned outputs: (out, lse)."""
    return run_all(attn, batch)[:2]


def run_all(attn: Any, batch: Batch) -> Parts:
    """... and emitted tensors."""
    out, lse = poisoned(batch)
    options = {"lse": lse, "return_lse": True} if batch.softmax else {}
    return parts_of(batch.served.case.load(), attn.run(batch.q, batch.kv, out=out, **options, **batch.params))


def reference(batch: Batch, oracle: Any = None) -> tuple[Tensor, Tensor | None]:
    return reference_all(batch, oracle)[:2]


def reference_all(batch: Batch, oracle: Any = None) -> Parts:
    oracle = oracle or reference_case(batch.served.case)
    options: dict[str, Any] = {"return_lse": batch.softmax, **batch.params}
    if batch.served.page_size is None:
        want = oracle.ragged(batch.q, *batch.kv, *batch.table, **options)
    else:
        want = oracle.paged(batch.q, batch.kv, *batch.table, **options)
    return parts_of(batch.served.case.load(), want)


def check(batch: Batch, found: tuple[Tensor, Tensor | None], want: tuple[Tensor, Tensor | None] | None = None) -> None:
    """A weight, a value and the output rounded once each, and what the approximate functions (tanh, ex2, rcp) add."""
    (out, lse), (want_out, want_lse) = found, reference(batch) if want is None else want
    case = batch.served.case
    apart = 1.5 if rounds_before_scale(case) else 1.0
    limit = apart * (3 * UNIT[out.dtype] + 5e-4)
    assert_close(out, want_out, limit)
    if want is None and transforms(case):
        assert_close(out, reference(batch, plain_reference(case))[0], LOOSE * limit)
    if want_lse is not None:
        assert lse is not None
        assert_lse(lse, want_lse, apart * lse_limit(case))


def run_and_check(batch: Batch, *, plan: dict[str, Any] | None = None, **options: Any) -> tuple[Tensor, Tensor | None]:
    """Plan (with scalars `plan`), run and judge a batch by an object of its own."""
    attn = attention(batch, **options)
    attn.plan(*batch.table, **(plan or {}))
    found = run_all(attn, batch)
    check(batch, found[:2])
    if found[2]:
        assert_emits(found[2], reference_all(batch)[2])
    return found[:2]


def same(a: tuple[Tensor, Tensor | None], b: tuple[Tensor, Tensor | None]) -> bool:
    """The same bits (none of them is NaN)."""
    return all(x is None or (y is not None and torch.equal(x, y)) for x, y in zip(a, b, strict=True))
