"""Serving's hard cases, each with its right value: empty requests, order and bits, sharing, huge caches, refusals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import serve_cases
import torch
from serve_cases import BY_PAGE, RAGGED, Served, lengths_of
from serve_checks import attention, check, make_batch, poisoned, reference, run, run_and_check, same

from attncc.runtime import prefix

PAGED = BY_PAGE[16]


def equal(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is not None and b is not None and torch.equal(a, b)


# ---------------------------------------------------------------------- empty requests


@pytest.mark.parametrize("served", [PAGED, BY_PAGE[1], RAGGED], ids=str)
def test_requests_without_keys_or_rows_leave_their_neighbours_alone(served: Served, seed: int) -> None:
    """kv_len 0 gives 0 and -inf; qo_len 0 gives no rows; the others' bits are those of the batch without them."""
    some = [(1, 5000), (3, 700), (130, 400), (1, 1)]
    full = [some[0], (2, 0), some[1], (0, 800), some[2], (0, 0), some[3], (1, 0)]
    found = run_and_check(make_batch(served, full, (8, 2), seed), deterministic="batch_invariant")
    batch = make_batch(served, full, (8, 2), seed)
    out, lse = found
    assert lse is not None
    for b in (1, 7):
        assert bool((out[batch.rows(b)] == 0).all()) and bool(lse[batch.rows(b)].isneginf().all())
    if served.page_size is None:
        return
    for b in (0, 2, 4, 6):
        alone = run_and_check(batch.alone(b), deterministic="batch_invariant")
        assert equal(alone[0], out[batch.rows(b)]) and equal(alone[1], lse[batch.rows(b)])


def test_empty_requests_take_no_part_in_the_plan(seed: int) -> None:
    """Without batch_invariant too: the same lengths but for empty requests, the same bits."""
    some = [(1, 5000), (1, 700), (1, 3000)]
    full = make_batch(PAGED, [some[0], (1, 0), some[1], (0, 0), some[2]], (8, 2), seed)
    found = run_and_check(full)
    kept = [0, 2, 4]
    qo, pages, ids, last = full.table
    q = torch.cat([full.q[full.rows(b)] for b in kept])
    table = (torch.tensor([0, 1, 2, 3]).int(), pages[[0, 1, 3, 5]], ids, last[kept])
    out, lse = run_and_check(replace(full, lengths=some, q=q, table=table))
    at = [int(qo[b]) for b in kept]
    assert equal(out, found[0][at]) and found[1] is not None and equal(lse, found[1][at])


def test_nothing_at_all(seed: int) -> None:
    for lengths in ([(0, 0)], [(0, 40), (0, 0)], [(2, 0), (1, 0)]):
        out, lse = run_and_check(make_batch(PAGED, lengths, (8, 2), seed))
        assert lse is not None and bool((out == 0).all()) and bool(lse.isneginf().all())


# ---------------------------------------------------------------------- bits


@pytest.mark.parametrize("served", [PAGED, BY_PAGE[1], Served(serve_cases.LOCAL)], ids=str)
def test_same_lengths_same_bits(served: Served, seed: int) -> None:
    """Run again, planned again, by another object, with pages elsewhere."""
    lengths = lengths_of("mixed", 20_000, np.random.default_rng(seed))
    batch = make_batch(served, lengths, (8, 2), seed)
    attn = attention(batch)
    attn.plan(*batch.table)
    first = run(attn, batch)
    check(batch, first)
    for _ in range(5):
        assert same(run(attn, batch), first)
    attn.plan(*make_batch(served, [(1, 100)] * 3, (8, 2), seed).table)
    attn.plan(*batch.table)
    assert same(run(attn, batch), first)
    moved = make_batch(served, lengths, (8, 2), seed, pages_seed=seed + 1, spare=50)
    other = attention(moved, max_batch_size=100, max_qo_rows=4000)
    other.plan(*moved.table)
    assert same(run(other, moved), first)


@pytest.mark.parametrize("served", [PAGED, BY_PAGE[1], BY_PAGE[64]], ids=str)
def test_batch_invariant(served: Served, seed: int) -> None:
    """A request's bits are the same alone, in this batch, and in another order of it."""
    rng = np.random.default_rng(seed)
    lengths = [*lengths_of("mixed", 20_000, rng), *lengths_of("decode", 33_000, rng)]
    batch = make_batch(served, lengths, (8, 2), seed)
    out, lse = run_and_check(batch, deterministic="batch_invariant")
    assert lse is not None
    one = attention(batch, deterministic="batch_invariant")
    for b in range(len(lengths)):
        if lengths[b][0]:
            alone = batch.alone(b)
            one.plan(*alone.table)
            found = run(one, alone)
            assert equal(found[0], out[batch.rows(b)]) and equal(found[1], lse[batch.rows(b)]), lengths[b]


# ---------------------------------------------------------------------- indices


@pytest.mark.parametrize("served", [PAGED, RAGGED], ids=str)
def test_indices_of_every_sort_give_the_same_bits(served: Served, seed: int) -> None:
    batch = make_batch(served, lengths_of("mixed", 3000, np.random.default_rng(seed)), (8, 2), seed)
    attn = attention(batch)
    attn.plan(*batch.table)
    want = run(attn, batch)
    check(batch, want)
    strided = [torch.stack([t, torch.full_like(t, -99)], 1)[:, 0] for t in batch.table]
    for table in (
        [t.long() for t in batch.table],
        strided,
        [t.cuda() for t in batch.table],
        [t.long().cuda() for t in strided],
        [batch.table[0].cuda(), *batch.table[1:]],
    ):
        attn.plan(*make_batch(served, [(1, 9)], (8, 2), seed).table)
        attn.plan(*table)
        assert same(run(attn, batch), want)


def test_a_longer_table_with_anything_behind_it(seed: int) -> None:
    batch = make_batch(PAGED, [(1, 300), (4, 90)], (8, 2), seed)
    attn = attention(batch)
    for behind in ([], [-1] * 1000, [2**31 - 1, -(2**31)] * 50):
        used = batch.table[2][: int(batch.table[1][-1])]
        attn.plan(*batch.table[:2], torch.cat([used, torch.tensor(behind, dtype=torch.int32)]), batch.table[3])
        check(batch, run(attn, batch))


def test_ragged_keys_with_unused_ends(seed: int) -> None:
    """Keys in wider rows, and NaN rows behind the last request's."""
    batch = make_batch(RAGGED, [(1, 300), (40, 90), (0, 5), (3, 2000)], (8, 2), seed)
    want = run_and_check(batch)
    longer = [torch.cat([t, torch.full_like(t[:200], torch.nan)]) for t in batch.kv]
    wide = [torch.full((*t.shape[:2], 256), torch.nan, dtype=t.dtype, device="cuda") for t in longer]
    for w, t in zip(wide, longer, strict=True):
        w[..., 64:192] = t
    attn = attention(batch)
    attn.plan(*batch.table)
    for kv in (longer, [w[..., 64:192] for w in wide]):
        assert same(run(attn, replace(batch, kv=(kv[0], kv[1]))), want)


# ---------------------------------------------------------------------- sharing


def shared(served: Served, prefixes: list[int], suffixes: list[list[tuple[int, int]]], seed: int):
    """Groups of requests that start with the same pages: (batch, its levels for plan_cascade).  `prefixes` [groups]
    in pages, `suffixes` (qo_len, keys after the prefix) of each request of each group."""
    size = served.page_size
    assert size is not None
    flat = [(q, prefixes[n] * size + rest) for n, group in enumerate(suffixes) for q, rest in group]
    batch = make_batch(served, flat, (8, 2), seed)
    qo, pages, ids, last = (t.clone() for t in batch.table)
    first, b = [], 0
    for n, group in enumerate(suffixes):
        at = int(pages[b])
        first.append(ids[at : at + prefixes[n]])
        for _ in group:
            ids[int(pages[b]) : int(pages[b]) + prefixes[n]] = first[n]
            b += 1
    batch = replace(batch, table=(qo, pages, ids, last))
    ends = np.cumsum([0, *(len(group) for group in suffixes)])
    outer = (qo[ends], offsets(prefixes), torch.cat(first), torch.full((len(prefixes),), size).int())
    own = [prefixes[n] for n, group in enumerate(suffixes) for _ in group]
    counts = [int(pages[b + 1] - pages[b]) - own[b] for b in range(len(flat))]
    kept = [ids[int(pages[b]) + own[b] : int(pages[b + 1])] for b in range(len(flat))]
    return batch, [outer, (qo, offsets(counts), torch.cat(kept), last)]


def offsets(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0).int()


GROUPS_OF_REQUESTS = {
    "one group": ([300], [[(1, 100 + 7 * n) for n in range(20)]]),
    "three groups": ([0, 64, 7], [[(1, 33)], [(1, 900), (1, 1), (2, 64)], [(5, 17), (1, 16)]]),
    "verify": ([200], [[(4, 4 + n) for n in range(12)]]),
    "prefill": ([100], [[(200, 200), (100, 300), (1, 1)]]),
}


@pytest.mark.parametrize("groups", GROUPS_OF_REQUESTS, ids=str)
@pytest.mark.parametrize(
    "served", [PAGED, BY_PAGE[1], Served(serve_cases.LOCAL), Served(serve_cases.SINK), *serve_cases.WIDE[:2]], ids=str
)
def test_shared_prefixes(served: Served, groups: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """plan_cascade and shared_prefix="auto", as if a level took no time, give what the flat plan gives, and each the
    same bits again."""
    monkeypatch.setattr(prefix, "LEVEL_TIME", 0)
    prefixes, suffixes = GROUPS_OF_REQUESTS[groups]
    scale = 16 // (served.page_size or 16)
    batch, levels = shared(served, [n * scale for n in prefixes], suffixes, seed)
    want = reference(batch)
    for plan in (
        lambda attn: attn.plan(*batch.table),
        lambda attn: attn.plan_cascade(levels),
        lambda attn: attn.plan(*batch.table, shared_prefix="auto"),
    ):
        attn = attention(batch)
        plan(attn)
        found = run(attn, batch)
        check(batch, found, want)
        assert same(run(attn, batch), found)


def test_three_levels(seed: int) -> None:
    """A prefix of all, one of each half, and each request's own keys."""
    own = [(1, 50), (2, 700), (1, 16), (1, 5)]
    batch, (outer, inner) = shared(PAGED, [30], [own], seed)
    qo, pages, ids, last = inner
    # the first 2 pages of requests 0 and 1, as one more level; requests 2 and 3 share none
    ids = ids.clone()
    ids[int(pages[1]) : int(pages[1]) + 2] = ids[:2]
    middle = (qo[[0, 2, 4]], torch.tensor([0, 2, 2]).int(), ids[:2], torch.tensor([16, 16]).int())
    kept = torch.cat([ids[2 : int(pages[1])], ids[int(pages[1]) + 2 :]])
    last_level = (qo, pages - torch.tensor([0, 2, 4, 4, 4]).int(), kept, last)
    table = list(batch.table)
    full_ids = table[2].clone()
    full_ids[int(table[1][1]) + 30 : int(table[1][1]) + 32] = ids[:2]
    batch = replace(batch, table=(table[0], table[1], full_ids, table[3]))
    attn = attention(batch)
    attn.plan_cascade([outer, middle, last_level])
    check(batch, run(attn, batch))


# ---------------------------------------------------------------------- large caches


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_cache_of_more_than_2_to_the_32_elements(page_size: int, seed: int) -> None:
    """Page ids at its end, in one combined cache of 8.6 GB."""
    batch = make_batch(BY_PAGE[page_size], [(1, 700), (20, 90), (1, 33)], (4, 1), seed, spare=0)
    pages = 2**32 // (2 * page_size * 128) + 100
    both = torch.empty(pages, 2, page_size, 1, 128, dtype=torch.bfloat16, device="cuda")
    assert both.numel() > 2**32
    moved = pages - batch.kv[0].shape[0]
    both[:200] = torch.nan  # where an offset that lost its high bits would lead
    for n in (0, 1):
        both[moved:, n] = batch.kv[n]
    ids = batch.table[2] + moved
    ids[int(batch.table[1][-1]) :] = -1
    far = replace(batch, kv=(both[:, 0], both[:, 1]), table=(*batch.table[:2], ids, batch.table[3]))
    assert same(run_and_check(far), run_and_check(batch))


# ---------------------------------------------------------------------- refusals


def test_what_is_refused_leaves_the_object_working(seed: int) -> None:
    batch = make_batch(PAGED, [(1, 100), (4, 40)], (8, 2), seed)
    attn = attention(batch, max_kv_pages=12)
    qo, pages, ids, last = batch.table
    more_rows = make_batch(PAGED, [(1, 100), (5, 40)], (8, 2), seed).table
    more_pages = make_batch(PAGED, [(1, 100), (4, 100)], (8, 2), seed).table
    more_requests = make_batch(PAGED, [(1, 20), (1, 20), (1, 20)], (8, 2), seed).table
    wrong_id, far_id, last_0, last_17 = ids.clone(), ids.clone(), last.clone(), last.clone()
    wrong_id[2], far_id[2], last_0[0], last_17[1] = -1, batch.kv[0].shape[0], 0, 17

    def planned(*table: torch.Tensor) -> None:
        attn.plan(*table)
        run(attn, batch)

    refused = {
        r"max_batch_size.* 3|3 .*max_batch_size": lambda: planned(*more_requests),
        r"max_qo_rows.* 6|6 .*max_qo_rows": lambda: planned(*more_rows),
        r"max_kv_pages.* 14|14 .*max_kv_pages": lambda: planned(*more_pages),
        r"kv_indices: .* found -1": lambda: planned(qo, pages, wrong_id, last),
        r"pages": lambda: planned(qo, pages, far_id, last),
        r"last_page_len: .* found 0": lambda: planned(qo, pages, ids, last_0),
        r"last_page_len: .* found 17": lambda: planned(qo, pages, ids, last_17),
        r"qo_indptr: ": lambda: planned(qo.flip(0), pages, ids, last),
        r"kv_indptr: ": lambda: planned(qo, pages[:-1], ids, last),
        r"kv_indices: expected": lambda: planned(qo, pages, ids[:3], last),
        r"\bwindow\b": lambda: attn.run(batch.q, batch.kv, window=3),
        r"\bq: .*rows": lambda: attn.run(batch.q[:-1], batch.kv),
        r"\bq: .*dtype": lambda: attn.run(batch.q.float(), batch.kv),
        r"\bk.*: .*page_size": lambda: attn.run(batch.q, (batch.kv[0][:, :8], batch.kv[1])),
        r"\bv.*: ": lambda: attn.run(batch.q, (batch.kv[0], batch.kv[1][..., :64])),
    }
    for says, call in refused.items():
        attn.plan(*batch.table)
        with pytest.raises((ValueError, TypeError), match=says):
            call()
        attn.plan(*batch.table)
        check(batch, run(attn, batch))


def test_a_refused_run_writes_nothing(seed: int) -> None:
    batch = make_batch(Served(serve_cases.LOCAL), [(1, 300), (3, 90)], (8, 2), seed)
    attn = attention(batch)
    attn.plan(*batch.table, window=100)
    out, lse = poisoned(batch)
    for says, options in {
        "window": {"window": 50}, "sink": {"window": 100, "sink": 1}, "lse": {"window": 100, "lse": lse[:-1]},
    }.items():  # fmt: skip
        with pytest.raises((ValueError, TypeError), match=rf"\b{says}\b"):
            attn.run(batch.q, batch.kv, out=out, **options)
        torch.cuda.synchronize()
        assert bool(out.isnan().all()) and bool(lse.isnan().all())
    attn.run(batch.q, batch.kv, out=out, lse=lse, return_lse=True, window=100)
    check(batch, (out, lse))
