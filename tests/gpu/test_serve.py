"""Every served kernel against the float64 reference: page sizes, groups, head dims, variants, kinds of batches."""

from __future__ import annotations

import numpy as np
import pytest
import serve_cases
from serve_cases import BY_PAGE, DIMS, GROUPS, KINDS, PAGE_SIZES, RAGGED, Served, lengths_of
from serve_checks import attention, check, make_batch, reference, run, run_and_check

LONGEST = 33_000


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("page_size", [*PAGE_SIZES, None])
def test_page_sizes_and_groups(page_size: int | None, group: int, kind: str, seed: int) -> None:
    """kv lengths from 1 to 33,000, random for each batch; two kv heads, so that a head isn't the only one."""
    served = RAGGED if page_size is None else BY_PAGE[page_size]
    lengths = lengths_of(kind, LONGEST if kind in ("decode", "verify") else 6000, np.random.default_rng(seed))
    run_and_check(make_batch(served, lengths, (2 * group, 2), seed))


@pytest.mark.parametrize("kind", ["decode", "mixed"])
@pytest.mark.parametrize("group", [1, 5, 8])
@pytest.mark.parametrize("served", [*DIMS, serve_cases.HALF], ids=str)
def test_head_dims_and_half(served: Served, group: int, kind: str, seed: int) -> None:
    lengths = lengths_of(kind, 5000, np.random.default_rng(seed))
    run_and_check(make_batch(served, lengths, (2 * group, 2), seed))


@pytest.mark.parametrize("kind", ["decode", "verify", "mixed"])
@pytest.mark.parametrize("served", [*serve_cases.EXAMPLES, *serve_cases.ROWS_AND_RAGGED, *serve_cases.FOLDED], ids=str)
def test_variants(served: Served, kind: str, seed: int) -> None:
    """Planned for all keys, and for those that the mask shows."""
    lengths = lengths_of(kind, 2000, np.random.default_rng(seed))
    batch = make_batch(served, lengths, (6, 2), seed)
    want, attn = reference(batch), attention(batch)
    for scalars in ({}, batch.scalars) if batch.scalars else ({},):
        attn.plan(*batch.table, **scalars)
        check(batch, run(attn, batch), want)


@pytest.mark.parametrize("kind", ["verify", "mixed"])
@pytest.mark.parametrize("served", serve_cases.HARD, ids=str)
def test_hard_variants(served: Served, kind: str, seed: int) -> None:
    given = {"first": 3} if served.case.variant == "positions" else {}
    lengths = lengths_of(kind, 1000, np.random.default_rng(seed))
    run_and_check(make_batch(served, lengths, (6, 2), seed, **given))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", [1, 5])
@pytest.mark.parametrize("served", [*serve_cases.VECTORS, *serve_cases.WIDE], ids=str)
def test_vector_slots(served: Served, group: int, kind: str, seed: int) -> None:
    lengths = lengths_of(kind, 3000, np.random.default_rng(seed))
    run_and_check(make_batch(served, lengths, (2 * group, 2), seed))


@pytest.mark.parametrize("view", ["HND", "combined", "differing"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_views_of_a_cache(page_size: int, view: str, seed: int) -> None:
    """The same bits as from NHD caches, close to the reference."""
    lengths = lengths_of("mixed", 3000, np.random.default_rng(seed))
    found = run_and_check(make_batch(BY_PAGE[page_size], lengths, (8, 2), seed, view=view))
    plain = run_and_check(make_batch(BY_PAGE[page_size], lengths, (8, 2), seed))
    assert (found[0] == plain[0]).all() and (found[1] == plain[1]).all()


@pytest.mark.parametrize(
    "lengths",
    [
        [(1, n) for n in serve_cases.zipf(64, 4096)],
        [(1, 4096)] * 64,
        [(1, 1000), (1, 100), (1, 100), (1, 50)],
        [(1, 33_000)],
        [(4000, 4000)],
        [(5, 5)],
        [(1, 1)] * 300,
    ],
    ids=["zipf", "equal", "worked example", "one long", "one prefill", "one short", "many of one"],
)
@pytest.mark.parametrize("page_size", [1, 16])
def test_lengths(page_size: int, lengths: list[tuple[int, int]], seed: int) -> None:
    run_and_check(make_batch(BY_PAGE[page_size], lengths, (8, 2), seed))


def test_1025_requests(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = [(int(rng.integers(0, 3)), int(rng.integers(0, 60))) for _ in range(1025)]
    run_and_check(make_batch(BY_PAGE[16], lengths, (4, 1), seed))


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_million_tokens_among_255_of_ten(page_size: int, seed: int) -> None:
    lengths = [(1, 10)] * 255
    lengths.insert(100, (1, 1_000_000))
    run_and_check(make_batch(BY_PAGE[page_size], lengths, (4, 1), seed))
