"""Every served kernel that the GPU tests and bench/serve.py need, in one place, and the shapes of the batches they run.

A kernel depends on the page size only through what its loads can tell of it (`codegen.config.page_unit`: 1 and 5 are
the same), and not on head counts or lengths at all: the grid of the tests is larger than the list of kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from cases import (
    Case,
    emit_cases,
    example,
    example_cases,
    folded,
    folded_before,
    hard,
    keys_cases,
    list_cases,
    topk_of,
    vectors,
)


@dataclass(frozen=True)
class Served:
    """A case with the layout of its keys: pages of `page_size` rows, or ragged where that is None; with `blocks` they
    are listed in blocks of so many."""

    case: Case
    page_size: int | None = 16
    blocks: bool = False

    def __str__(self) -> str:
        what = "block" if self.blocks else "page"
        return f"{self.case}-{'ragged' if self.page_size is None else f'{what}{self.page_size}'}"

    @property
    def source(self) -> str:
        return self.case.source

    @property
    def layout(self) -> str:
        return "ragged" if self.page_size is None else "blocks" if self.blocks else "paged"

    @property
    def options(self) -> dict[str, object]:
        """Keyword arguments for attncc.compile and attncc.reference."""
        return {**self.case.options, "layout": self.layout, "page_size": self.page_size}


PAGE_SIZES = (1, 5, 8, 16, 64, 256)
GROUPS = (1, 4, 5, 7, 8, 16)  # query heads a kv head
HEAD_DIMS = ((64, None), (80, None), (192, 128), (256, None))  # beside 128

PLAIN, CAUSAL = example("plain", "plain"), example("causal", "causal")
LOCAL, SCALES = example("gemma2", "gemma2_local"), example("kv_scales", "key_scales")
SINK, GATED = example("gpt_oss", "gpt_oss_sliding"), example("gated_output", "gated_output")

BY_PAGE = {p: Served(CAUSAL, p) for p in PAGE_SIZES}
RAGGED = Served(CAUSAL, None)
EXAMPLES = [Served(case) for case in example_cases()]
# Where keys lie shows in a functor only through tensors over j; the rest is registers.
ROWS_AND_RAGGED = [Served(case, p) for case in (LOCAL, SCALES, SINK, GATED) for p in (1, None)]
HARD = [Served(hard(name)) for name in ("every_space", "positions", "nothing_but_sink")]
DIMS = [
    Served(example("causal", "causal", head_dim=qk, head_dim_vo=vo), p) for qk, vo in HEAD_DIMS for p in (16, 1)
]  # fmt: skip
BLOCK_SIZES = (1, 5, 8, 16, 128)
BLOCKS = [Served(PLAIN, n, blocks=True) for n in BLOCK_SIZES] + [Served(CAUSAL, n, blocks=True) for n in BLOCK_SIZES]
BLOCK_VARIANTS = [
    Served(case, n, blocks=True) for case in (example("alibi", "alibi"), LOCAL, SCALES, SINK) for n in (5, 16)
]  # fmt: skip
BLOCK_VARIANTS += [
    Served(example(file, variant), 16, blocks=True)
    for file, variant in (("gated_output", "gated_output"), ("dilated", "longformer"), ("sigmoid", "flash_sigmoid"))
]  # fmt: skip
FOLDED = [Served(folded(name), p) for name in ("both", "all_three", "weighed", "by_request") for p in (16, 1, None)]
# Vector slots: queries by TMA and by the row, at positions of several requests.
VECTORS = [
    Served(vectors(name), p)
    for name, p in (
        ("turned_back", 16),
        ("turned_by_tables", 5),
        ("queries_turned", 16),
        ("queries_turned_10", 16),
        ("queries_yarn", 1),
        ("queries_by_tables", 5),
        ("queries_l2_normed", None),
        ("queries_by_row", 16),
        ("queries_by_row", 1),
        ("queries_normed_and_turned", None),
    )
]
VECTORS += [Served(vectors("queries_normed_and_turned", 128), p) for p in (16, 1)]
VECTORS += [Served(example("qwen3", "qwen3", head_dim=256), p) for p in (16, 1)]
# Epilogues of more than 128 features, which run on rows in shared memory.
WIDE = [Served(example("qwen3", "qwen3_next", head_dim=256), p) for p in (16, 1, None)]
WIDE += [Served(example("qwen3_gated", "qwen3_gated", head_dim=256), p) for p in (16, None)]
WIDE += [Served(vectors(name, 256), 16) for name in ("normed_and_turned", "weighed_by_lse")]
WIDE.append(Served(example("gated_output", "gated_output", head_dim=192), 1))
LISTS = [Served(case, p) for case in list_cases() for p in (16, 1, None)]
LISTS.append(Served(topk_of(128), 16))
LISTED_BLOCKS = [Served(case, n, blocks=True) for case in list_cases() for n in (5, 16)]
EMITS = [Served(case) for case in emit_cases()]
EMITS += [Served(case, p) for case in emit_cases() for p in (1, None) if case.variant in ("watch", "curves", "tables")]
EMITS_IN_BLOCKS = [Served(case, 16, blocks=True) for case in emit_cases() if case.variant in ("watch", "curves")]
HALF = Served(example("causal", "causal", dtype="f16"))
KEYS = [Served(case, p) for case in keys_cases(False) for p in (16, 1, None)]
KEYS_BEFORE = [Served(case, None) for case in keys_cases(True)]  # ragged keys, through a pre-pass
FOLDED_BEFORE = [Served(case, None) for case in folded_before()]
KEYS_IN_BLOCKS = [Served(case, n, blocks=True) for case in keys_cases(False)[:2] for n in (5, 16)]


def all_served() -> list[Served]:
    """Each kernel once."""
    found = [*BY_PAGE.values(), RAGGED, *EXAMPLES, *ROWS_AND_RAGGED, *HARD, *DIMS, *BLOCKS, *BLOCK_VARIANTS, *FOLDED]
    found += [HALF, *VECTORS, *WIDE, *LISTS, *LISTED_BLOCKS, *EMITS, *EMITS_IN_BLOCKS]
    found += [*KEYS, *KEYS_BEFORE, *KEYS_IN_BLOCKS, *FOLDED_BEFORE, *map(fused, FOLDED_BEFORE)]
    return list(dict.fromkeys(found))


def fused(served: Served) -> Served:
    """The same without a pre-pass."""
    return replace(served, case=replace(served.case, prepass=False))


# ---------------------------------------------------------------------- lengths

Lengths = list[tuple[int, int]]  # (qo_len, kv_len) of each request
KINDS = ("decode", "verify", "chunked", "prefill", "mixed")


def lengths_of(kind: str, longest: int, rng: np.random.Generator) -> Lengths:
    """A batch of a kind; kv lengths up to `longest`, spread evenly over their orders of magnitude."""

    def some() -> int:
        return int(math.exp(rng.uniform(0, math.log(longest))))

    def upto(low: int, high: int) -> int:
        return int(rng.integers(low, high + 1))

    if kind == "decode":
        found = [(1, n) for n in (1, longest, *(some() for _ in range(7)))]
    elif kind == "verify":
        found = [(q, q + some()) for q in (2, 16, *(upto(2, 16) for _ in range(4)))]
    elif kind == "chunked":
        found = [(q, q + some()) for q in (128, *(upto(30, 300) for _ in range(3)))]
    elif kind == "prefill":
        found = [(n, n) for n in (1, 127, 129, upto(2, 64), upto(200, min(1000, max(longest, 200))))]
    else:
        found = [(1, some()), (1, longest), (upto(2, 16), 20 + some()), (200, 200 + some()), (300, 300)]
        found += [(0, 50), (0, 0), (3, 0), (40, 7)]
    return [found[i] for i in rng.permutation(len(found))]


def zipf(batch: int, mean: int, seed: int = 0) -> list[int]:
    """Lengths proportional to 1 / rank, in random order."""
    weights = 1 / np.arange(1, batch + 1)
    found = np.maximum(1, np.rint(weights / weights.sum() * mean * batch)).astype(int)
    return np.random.default_rng(seed).permutation(found).tolist()
