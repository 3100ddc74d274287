"""What becomes of a domain: one more condition of the mask, checked by the reference, and the choice of a kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gpu.cases import Case, example, heads_cases, list_cases
from torch import Tensor

from attncc import compiler
from attncc.codegen.config import KernelConfig
from attncc.codegen.listing import BITMAP, described, mask_ranges, whole_mask, with_lines
from attncc.diagnostics import Source
from attncc.ir.nodes import Const, Load, Variant, walk
from attncc.ir.ranges import tile_ranges
from attncc.ir.reference import Reference
from attncc.random_inputs import FLOATS, Shape, random_inputs

TOPK = example("block_topk", "block_topk", head_dim=64)


def specialized(case: Case) -> Variant:
    return compiler.specialized(case.load(), options(case))


def options(case: Case, layout: str = "dense", page_size: int | None = None) -> compiler.Options:
    return compiler._options(case.head_dim, case.head_dim_vo, case.dtype, dict(case.const), layout, page_size, "sm_90a")


def config(case: Case, layout: str = "dense", page_size: int | None = None) -> KernelConfig:
    return compiler.generated(specialized(case), options(case, layout, page_size))[1]


def of_size(size: object, mask: str = "j <= i", scalars: str = "", head_dim: int = 128) -> Case:
    text = f"""
attention x({scalars}):
    tensor sel[iq, g, n]: i32
    domain = blocks(sel[iq, g, :], size = {size})
    mask   = {mask}
"""
    return Case(text, "x", head_dim=head_dim)


def lines_of(lists: Tensor, block: int, kv_len: int) -> Tensor:
    """The bits of lists, by sets: [..., words]."""
    words = (kv_len + 32 * block - 1) // (32 * block)
    found = torch.zeros(*lists.shape[:-1], words, dtype=torch.int64)
    for at in torch.cartesian_prod(*(torch.arange(n) for n in lists.shape[:-1])).tolist():
        for n in set(lists[tuple(at)].tolist()):
            if 0 <= n < 32 * words:
                found[(*at, n // 32)] |= 1 << (n % 32)
    return torch.where(found >= 2**31, found - 2**32, found).int()


@pytest.mark.parametrize("block", [1, 7, 64, 1000])
def test_the_mask_with_lines_says_what_the_domain_says(block: int) -> None:
    case = of_size("block", scalars="block: i32", head_dim=8)
    variant = specialized(case)
    shape = Shape(2, 5, 150, 4, 2, 8, 8)
    x = random_inputs(variant, shape, dtype=FLOATS["bf16"], device="cpu", seed=block, given={"block": block})
    lowered = replace(with_lines(variant), mask=whole_mask(variant), domain=None)
    chosen = x.params["sel"]
    assert isinstance(chosen, Tensor)
    made = {**x.params, BITMAP: lines_of(chosen, block, 150)}
    want, found = (
        Reference(v, head_dim=8, head_dim_vo=8, dtype=FLOATS["bf16"], const={})(
            x.q, x.k, x.v, return_lse=True, **params
        )
        for v, params in ((variant, x.params), (lowered, made))
    )
    assert all(torch.equal(a, b) for a, b in zip(want, found, strict=True))


def test_whose_the_lists_are() -> None:
    by = {case.variant: config(case).lists_by for case in list_cases()}
    assert by["by_head"] == by["by_chunk_of_rows"] == "h"
    assert by["sixteen"] == by["by_request"] == "g"
    assert by["tokens"] == by["looked_up"] == by["sized_by_keys"] == "row"
    assert config(example("causal", "causal")).lists_by == ""


# keys of a listed block; then the parts of a block of keys, which has 128, and are the lists' bits kept by threads
@pytest.mark.parametrize("size, parts, kept", [
    (64, 2, True), (128, 1, True), (256, 1, True), (192, 2, True), (1 << 20, 1, True), (100, 1, True), (32, 1, True),
    (16, 1, True), (8, 1, False), (1, 1, False), ((1 << 24) + 1, 1, False),
])  # fmt: skip
def test_parts_of_blocks_suit_listed_blocks(size: int, parts: int, kept: bool) -> None:
    found = config(of_size(size))
    assert (found.tile_kv, found.parts, found.list_block) == (128, parts, size if kept else 0)
    assert found.k_stages == found.v_stages == 2
    assert found.row_bounds == kept and not found.counted and found.walks_lists


def test_blocks_in_one_place_suit_listed_blocks() -> None:
    """Where a block of keys is one run of keys it is as large as a listed one, with as many bytes on their way."""
    text = "attention x():\n    tensor sel[iq, n]: i32\n    domain = blocks(sel[iq, :], size = 64)\n"
    text += "    f_k = rope(k, j, 1e4)\n"
    found = config(Case(text, "x", head_dim=64))
    assert (found.tile_kv, found.parts, found.k_stages, found.v_stages) == (64, 1, 4, 4)
    found = config(of_size(64), "paged", 16)
    assert (found.tile_kv, found.parts) == (64, 1)


def test_other_layouts() -> None:
    assert config(of_size(64), "paged", 16).walks_lists
    assert config(of_size("1 + kv_len // 8")).walks_lists
    for layout, page_size, size in (("blocks", 16, 64), ("paged", 16, "1 + kv_len // 8")):
        found = config(of_size(size), layout, page_size)
        assert found.counted and not found.walks_lists and found.list_block == 0 and not found.row_bounds


@pytest.mark.parametrize("mask", ["true", "j <= i", "i - 50 < j <= i", "j % 3 == 0"])
def test_without_a_walk_no_block_is_clear(mask: str) -> None:
    """Else its mask would not run, and hidden keys be seen."""
    for layout, page_size, size in (("blocks", 16, 64), ("paged", 16, "1 + kv_len // 8")):
        case = of_size(size, mask)
        text = compiler.generated(specialized(case), options(case, layout, page_size))[0].text
        assert text.split("def bounds")[1].split("return ")[1].split("\n")[0].endswith(", Int32(0), Int32(0)")
        assert text.split("def classify")[1].split("return ")[1].split("\n")[0].endswith(", Boolean(False)")


def test_the_walk_reads_no_more_of_the_mask_than_the_domain_shows() -> None:
    """A look-up by key, which classifying a tile may do where every key is there."""
    text = """
attention x():
    tensor sel[iq, g, n]: i32
    tensor shown[m]: bool sorted
    domain = blocks(sel[iq, g, :], size = 64)
    mask   = shown[j // 128]
"""
    variant = specialized(Case(text, "x"))
    assert tile_ranges(replace(variant, domain=None)).unknown == ()
    ranges = mask_ranges(variant)
    parts = (ranges.lo, ranges.hi, ranges.clear_lo, ranges.clear_hi, ranges.may, ranges.must)
    assert not any(isinstance(x, Load) for e in parts if e is not None for x in walk(e))


def test_what_a_runtime_is_told() -> None:
    def told(case: Case) -> dict[str, int | str]:
        domain = specialized(case).domain
        assert domain is not None
        return described(domain)

    assert told(of_size(64)) == {"by": "g", "tensor": "sel", "block": 64}
    assert told(of_size("C", scalars="C: const i32 = 48"))["block"] == 48
    assert told(of_size("C", scalars="C: i32"))["block"] == "C"
    assert told(of_size("1 + kv_len // 8"))["block"] == 1


def test_a_constant_size_stands_in_the_module() -> None:
    text = compiler.generated(specialized(TOPK), options(TOPK))[0].text
    assert "def block_keys(x):\n    return Int32(64)" in text
    sized = specialized(of_size("block", scalars="block: i32"))
    assert not isinstance(sized.domain.size if sized.domain else None, Const)


def test_lists_over_keys_are_refused_where_keys_lie_in_pages() -> None:
    text = "attention x():\n    tensor sel[j, n]: i32\n    domain = blocks(sel[max(i, 0), :], size = 64)\n"
    compiler.show(Source("x.attn", text), "py", head_dim=64)
    with pytest.raises(
        compiler.AttnError, match=r"x.attn:3:14: error: kernels over pages.* through sel, a tensor over"
    ):
        compiler.show(Source("x.attn", text), "py", head_dim=64, layout="paged", page_size=16)


def test_query_heads_in_a_tile() -> None:
    """All that share lists; few where columns ask for the head, one where a tile's blocks or the factors of keys do."""
    assert {case.variant: config(case).packs for case in heads_cases()} == {
        "rows_of_heads": 8, "columns_of_heads": 4, "looked_up_by_heads": 8, "no_softmax_of_groups": 4,
        "ranges_of_heads": 1, "factors_of_heads": 1, "logits_emitted_by_heads": 4,
    }  # fmt: skip
    assert config(TOPK).packs == 8
    assert config(TOPK, "paged", 16).packs == config(TOPK, "blocks", 16).packs == 1
    assert config(example("block_topk", "moba")).packs == config(example("causal", "causal")).packs == 1
