"""One variant, many layouts: dense, ragged and paged calls agree, and so do the identities that attention obeys."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from reference_cases import CASES, SHAPES, Case, Shape
from test_reference_formulas import inputs, variant

from attncc.diagnostics import Source
from attncc.frontend import load
from attncc.ir.reference import Reference

ALL = [pytest.param(case, id=case.name) for case in CASES]


def requests_of(case: Case) -> list[Shape]:
    """Requests of the case's lengths with heads 4/2, one of no query and (where the case is free) one of no key."""
    shapes = [replace(s, B=1, H=4, G=2) for s in case.shapes]
    shapes.insert(1, replace(shapes[0], qo_len=0))
    return [*shapes, replace(shapes[0], qo_len=3, kv_len=0)] if case.shapes == SHAPES else shapes


def data_of(case: Case, v):
    """Per request (q, k, v, params), with everything that is not the request's own shared by all."""
    shapes = requests_of(case)
    g = torch.Generator().manual_seed(7)
    parts = [(*inputs(s, g), case.params(s, g)) for s in shapes]
    longest = max(range(len(shapes)), key=lambda b: shapes[b].kv_len)
    own = {t.name for t in v.tensors if {"b", "iq", "j"} & set(t.dims)}
    shared = {n: x for n, x in parts[longest][3].items() if n not in own}
    return [(q, k, vv, {**params, **shared}) for q, k, vv, params in parts]


def joined(v, parts) -> dict:
    """The parameters of one ragged call: rows one after another, `b` stacked, the rest padded to the longest."""
    params = dict(parts[0][3])
    for t in v.tensors:
        if not {"b", "iq", "j"} & set(t.dims):
            continue
        assert t.dims[0] in ("b", "iq", "j")
        xs = [p[3][t.name] if t.dims[0] == "b" else p[3][t.name][0] for p in parts]
        longest = [max(x.shape[n] for x in xs) for n in range(xs[0].ndim)]
        padded = [x.new_zeros([x.shape[0], *longest[1:]]) for x in xs]
        for x, into in zip(xs, padded, strict=True):
            into[tuple(slice(n) for n in x.shape)] = x
        params[t.name] = torch.cat(padded)
    return params


def offsets(lengths, dtype=torch.int32):
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def pages(rows: torch.Tensor, lengths, page_size: int, order: torch.Tensor) -> torch.Tensor:
    """Ragged rows in shuffled pages; what no row fills holds NaN (or the largest integer)."""
    kind = rows.dtype
    poison = float("nan") if kind.is_floating_point else True if kind == torch.bool else torch.iinfo(kind).max
    cache = torch.full((len(order) + 1, page_size, *rows.shape[1:]), poison, dtype=kind)
    page = row = 0
    for n in lengths:
        for first in range(0, n, page_size):
            count = min(page_size, n - first)
            cache[order[page], :count] = rows[row : row + count]
            page, row = page + 1, row + count
    return cache


def call(oracle, has_lse, layout, *arguments, **params):
    run = {"dense": oracle, "ragged": oracle.ragged, "paged": oracle.paged}[layout]
    return run(*arguments, return_lse=True, **params) if has_lse else (run(*arguments, **params),)


@pytest.mark.parametrize("case", ALL)
def test_layouts_agree(case: Case):
    v = variant(case)
    parts = data_of(case, v)
    oracle = Reference(v, head_dim=16, head_dim_vo=8)
    has_lse = v.scan.kind != "none"
    separate = [call(oracle, has_lse, "dense", *p[:3], **p[3]) for p in parts]
    want = tuple(torch.cat([x[n][0] for x in separate]) for n in range(len(separate[0])))

    q, k, vv = (torch.cat([p[n][0] for p in parts]) for n in range(3))
    params = joined(v, parts)
    qo_lens, kv_lens = ([p[n].shape[1] for p in parts] for n in (0, 1))
    found = call(oracle, has_lse, "ragged", q, k, vv, offsets(qo_lens), offsets(kv_lens, torch.int64), **params)
    torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)

    for page_size in (1, 4, 5):
        counts = [-(-n // page_size) for n in kv_lens]
        order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(page_size))
        caches = tuple(pages(x, kv_lens, page_size, order) for x in (k, vv))
        by_page = {
            t.name: pages(params[t.name], kv_lens, page_size, order) for t in v.tensors if t.dims and t.dims[0] == "j"
        }
        last = torch.tensor([(n - 1) % page_size + 1 for n in kv_lens])
        table = (offsets(counts), torch.cat([order.int(), torch.full((3,), -1)]), last)
        found = call(oracle, has_lse, "paged", q, caches, offsets(qo_lens), *table, **{**params, **by_page})
        torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12, msg=lambda m, n=page_size: f"page {n}: {m}")


EMITS = """
attention emits():
    tensor w[j, g]: f32
    mask = j <= i
    emit peak[iq, h] = max(l)
    emit low[g] = min(l)
    emit count[b] = sum(1.0)
    emit received[j, g] = sum(exp(l - lse) * w[j, g])
    emit all[] = sum(l)
"""


def test_emits_in_every_layout():
    text = EMITS.replace("    emit all[] = sum(l)\n", "")
    (v,) = load(Source("t.attn", text))
    oracle = Reference(v, head_dim=16, head_dim_vo=8)
    g = torch.Generator().manual_seed(1)
    shapes = [Shape(1, 4, 7, 4, 2), Shape(1, 5, 3, 4, 2), Shape(1, 0, 2, 4, 2), Shape(1, 3, 0, 4, 2)]
    parts = [(*inputs(s, g), {"w": torch.randn(1, s.kv_len, s.G, generator=g)}) for s in shapes]
    separate = [oracle(*p[:3], **p[3])[-1] for p in parts]
    want = {
        "peak": torch.cat([e["peak"][0] for e in separate]),
        "low": torch.stack([e["low"] for e in separate]).amin(0),
        "count": torch.cat([e["count"] for e in separate]),
        "received": torch.cat([e["received"][0] for e in separate]),
    }
    assert want["count"].tolist() == [4 * (4 + 5 + 6 + 7), 4 * (0 + 0 + 1 + 2 + 3), 0, 0]
    assert want["low"].isfinite().all() and separate[3]["low"].tolist() == [torch.inf, torch.inf]
    # What a key receives over all rows of its kv head, times its weight: rows of weights sum to one.
    total = (want["received"][:7] / parts[0][3]["w"][0]).sum(0)
    torch.testing.assert_close(total, torch.full((2,), 4 * 2.0, dtype=torch.float64))

    q, k, vv, w = (torch.cat([p[n][0] if n < 3 else p[3]["w"][0] for p in parts]) for n in range(4))
    qo, kv = offsets([4, 5, 0, 3]), [7, 3, 2, 0]
    torch.testing.assert_close(oracle.ragged(q, k, vv, qo, offsets(kv), w=w)[-1], want)
    order = torch.tensor([2, 0, 3, 1])
    k_pages, v_pages, w_pages = (pages(x, kv, 4, order) for x in (k, vv, w))
    table = (offsets([2, 1, 1, 0]), order, torch.tensor([3, 3, 2, 0]))
    _, lse, found = oracle.paged(q, (k_pages, v_pages), qo, *table, w=w_pages, return_lse=True)
    received = found.pop("received")
    assert received.shape == (5, 4, 2) and lse.shape == (12, 4)
    torch.testing.assert_close(found, {n: x for n, x in want.items() if n != "received"})
    want_pages = torch.nan_to_num(pages(want["received"], kv, 4, order), nan=0.0)
    torch.testing.assert_close(received, want_pages)


@pytest.mark.parametrize("name", ["causal", "alibi_bloom", "kv_scales", "gated_output", "block_topk", "t5_decoder"])
def test_grouped_heads_equal_repeated_heads(name):
    case = next(c for c in CASES if c.name == name)
    v = variant(case)
    s = Shape(2, 6, 10, 6, 2)
    g = torch.Generator().manual_seed(5)
    (q, k, vv), params = inputs(s, g), case.params(s, g)
    oracle = Reference(v, head_dim=s.D, head_dim_vo=s.E)
    repeated = dict(params)
    for t in v.tensors:
        if "g" in t.dims:  # the iq or j before it is two dimensions in a dense argument
            repeated[t.name] = params[t.name].repeat_interleave(3, dim=t.dims.index("g") + 1)
    torch.testing.assert_close(
        oracle(q, k, vv, return_lse=True, **params),
        oracle(q, k.repeat_interleave(3, 2), vv.repeat_interleave(3, 2), return_lse=True, **repeated),
    )


@pytest.mark.parametrize("logits", ["s", "softcap(s, 3.0) + 0.1 * j"])
def test_states_of_disjoint_keys_merge(logits):
    text = f"attention part(side: i32):\n    tensor part[b, pos]: i32\n    f_logits = {logits}\n"
    (whole,) = load(Source("t.attn", text + "    mask = j <= i and (side < 0 or part[b, j] == side)\n"))
    s = Shape(2, 9, 7, 4, 2)
    g = torch.Generator().manual_seed(2)
    q, k, vv = inputs(s, g)
    part = torch.randint(0, 3, (s.B, s.kv_len), generator=g, dtype=torch.int32)
    oracle = Reference(whole, head_dim=s.D, head_dim_vo=s.E)
    states = [oracle(q, k, vv, side=n, part=part, return_lse=True) for n in range(3)]
    lse = torch.stack([x[1] for x in states])
    merged = lse.logsumexp(0)
    weights = (lse - merged).exp().nan_to_num(0.0)[..., None]
    out = (torch.stack([x[0] for x in states]) * weights).sum(0)
    torch.testing.assert_close((out, merged), oracle(q, k, vv, side=-1, part=part, return_lse=True))
