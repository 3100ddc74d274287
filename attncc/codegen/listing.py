"""`domain` in kernels: what the lists of selected blocks become.

A small kernel (device/listing.py) turns every list into a line of bits, one a block, before attention runs; to
attention the lines are one more tensor, and that a key's block is listed is one more condition of its mask.  Where a
block of keys holds no listed one of any row of a tile, the tile doesn't visit it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attncc.ir.nodes import I32, Const, Domain, Expr, Leaf, Load, Param, TensorParam, Variant, leaves, make
from attncc.ir.ranges import TileRanges, tile_ranges
from attncc.ir.rewrite import simplify_expr

if TYPE_CHECKING:
    from .config import KernelConfig
    from .emit import Emitted

NAME = "listing"  # the kernel that makes the lines
BITMAP = "domain"  # the name of the lines among a kernel's tensors: the slot's, so no parameter has it
MOST_TOUCHED = 9  # listed blocks that a block of keys may lie in, for a thread to keep their bits
MOST_KEYS = 1 << 24  # of such a block, so that products of them fit
LEAST_TILE = 64  # keys in one place
# parameters of the kernel that makes the lines, by whether batches are served; the variant's own follow
_COUNTS = tuple(
    (name, "i32") for name in ("rows", "lines", "words", "team", "num_qo_heads", "num_kv_heads", "group_size")
)
LISTING = {
    False: (*_COUNTS, ("qo_len", "i32"), ("kv_len", "i32")),
    True: (*((name, "ptr") for name in ("header", "row_request", "requests")), *_COUNTS),
}
PER_REQUEST = frozenset(("qo_len", "kv_len"))


@dataclass(frozen=True)
class Lists:
    """How a kernel uses the lines; the fields of KernelConfig, and the keys in one place that suit them."""

    by: str
    walked: bool
    block: int
    tile_kv: int


def lists_of(variant: Variant, layout: str, tile_kv: int) -> Lists:
    """For `tile_kv` keys in one place, or fewer where more would lie in several listed blocks."""
    d = variant.domain
    if d is None:
        return Lists("", False, 0, tile_kv)
    if layout == "blocks":  # keys stand where a list of the plan says, so nothing is alike in a block of them
        return Lists(space_of(d), False, 0, tile_kv)
    size = int(d.size.value) if isinstance(d.size, Const) else 0
    parts = [n for n in range(LEAST_TILE, tile_kv + 1, 16) if size % n == 0 and tile_kv % n == 0]
    tile_kv = parts[-1] if size and parts else tile_kv
    kept = 0 < size <= MOST_KEYS and (tile_kv + size - 2) // size + 1 <= MOST_TOUCHED
    # rows of a served tile may be of several requests
    walked = layout == "dense" or not leaves(d.size) & PER_REQUEST
    return Lists(space_of(d), walked, size if kept else 0, tile_kv)


def space_of(d: Domain) -> str:
    names = frozenset[str]().union(*(leaves(x) for x in d.index if x is not None))
    return next((name for name in ("h", "g") if name in names), "row")


def block_keys(d: Domain) -> Expr:
    """Keys of a listed block: at least 1, whatever a scalar says."""
    return simplify_expr(make("max", d.size, Const(1, I32)))


def with_lines(v: Variant) -> Variant:
    """The variant with the tensor of lines: [iq, head, word], bit n of word w says whether block 32 w + n is listed."""
    if v.domain is None:
        return v
    heads = {"h": "h", "g": "g", "row": 1}[space_of(v.domain)]
    return replace(v, tensors=(*v.tensors, TensorParam(BITMAP, ("iq", heads, "word"), "u32")))


def line_index(d: Domain) -> tuple[Expr, Expr]:
    """Which line a row has."""
    by = space_of(d)
    return Leaf("iq"), Const(0, I32) if by == "row" else Leaf(by)


def is_listed(d: Domain) -> Expr:
    """Is the block of key j listed?"""
    block = make("floordiv", Leaf("j"), block_keys(d), span=d.span)
    word, n = (make(op, block, Const(32, I32), span=d.span) for op in ("floordiv", "mod"))
    return make("bit", Load(BITMAP, (*line_index(d), word), I32, d.span), n, span=d.span)


def whole_mask(v: Variant) -> Expr:
    """The mask of a variant `with_lines`, and of its domain."""
    return v.mask if v.domain is None else simplify_expr(make("and", v.mask, is_listed(v.domain)))


def mask_ranges(v: Variant) -> TileRanges:
    """The tile ranges of the mask alone.  What it reads, it may not read where the domain hides a key."""
    return tile_ranges(v) if v.domain is None else tile_ranges(replace(v, domain=None), guarded=True)


def with_domain(ranges: TileRanges, v: Variant, walked: bool) -> TileRanges:
    """Those ranges for kernels: where the walk asks no lists, nothing is known to be visible."""
    if v.domain is None or walked:
        return ranges
    return replace(ranges, clear_lo=Const(0, I32), clear_hi=Const(0, I32), must=None)


def described(d: Domain) -> dict[str, int | str]:
    """What a runtime must know: whose the lists are, which tensor, and the keys of a block, or the scalar that says
    so; where neither does, as few as a block may have."""
    match d.size:
        case Const(value):
            block = max(int(value), 1)
        case Param(name):
            block = name
        case _:
            block = 1
    return {"by": space_of(d), "tensor": d.tensor, "block": block}


def build(emitted: Emitted, config: KernelConfig, work_dir: str | Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """(the manifest's entry, files) of the kernel that makes the lines of this main kernel.  Needs and raises what
    build.py does."""
    from .build import build_small, import_functors
    from .device import listing as device

    params = (*LISTING[config.served], *emitted.params)
    functors = import_functors(emitted.text, Path(work_dir))
    entry, files = build_small(
        device.kernel, device.host, NAME, params, device.THREADS, Path(work_dir), config, functors
    )  # fmt: skip
    return {**entry, "starts_early": True}, files
