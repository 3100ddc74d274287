"""Which keys a tile of queries can see, from the mask expression alone.

For rows at positions i0..i1 and keys j0..j1 (both inclusive) `tile_ranges` says whether the tile is empty (no visible
cell), full (every cell visible: no mask code needed) or partial.  The answer is made of expressions, so that kernels
print them as scalar code and `attncc explain` evaluates them in Python.

The mask is spread out into clauses (ranges_clauses.py), a clause into bounds on i, j and j - i, which close over each
other exactly, and conditions weighed at the ends of these (ranges_tiles.py).  A cell may be visible if some clause of
the mask may hold in the tile; all are visible if no clause of the mask's negation may.  What is not understood counts
as unknown, so that an answer is never wrong, only vague.

It relies on: |i|, j, sizes and head numbers below 2**27; i0 <= i1 <= kv_len - 1 and 0 <= j0 <= j1 <= kv_len - 1.
Scalars and tensors may hold anything, and arithmetic wraps as the mask's does.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from attncc.ir.nodes import Expr, Interner, Leaf, Op, Variant
from attncc.ir.ranges_clauses import Clauses, Reads, whole_mask
from attncc.ir.ranges_exprs import (
    FALSE,
    KV,
    TRUE,
    ZERO,
    Fact,
    both,
    choose,
    either,
    least,
    linear,
    most,
    negate,
    shift,
    substitute,
)
from attncc.ir.ranges_tiles import Region, region, regions


@dataclass(frozen=True)
class TileRanges:
    """Tile class: empty iff it has no key in [lo, hi) or `may` is false; full iff it lies inside
    [clear_lo, clear_hi) or `must` is true; else partial.

    All ranges may reach beyond 0..kv_len, and are empty where their end is not above their start.  Loads in `may` and
    `must` are in range for every tile as above, if `and`, `or` and `select` guard as they do in a mask.
    """

    lo: Expr  # i32, over i0 i1: keys outside [lo, hi) are hidden from every row
    hi: Expr
    clear_lo: Expr  # i32, over i0 i1: keys in [clear_lo, clear_hi) are visible to every row
    clear_hi: Expr
    may: Expr | None  # bool, over i0 i1 j0 j1 too; None where [lo, hi) alone says it
    must: Expr | None  # bool, over i0 i1 j0 j1 too; None where [clear_lo, clear_hi) alone says it
    contiguous: bool = False  # a row i sees exactly the keys [lo, hi) of i0 = i1 = i, whatever scalars and tensors hold
    unknown: tuple[Expr, ...] = ()  # parts of the mask that the analysis could not use

    @property
    def parts(self) -> tuple[Expr, ...]:
        """All expressions that there are."""
        ends = (self.lo, self.hi, self.clear_lo, self.clear_hi)
        return (*ends, *(e for e in (self.may, self.must) if e is not None))

    def row(self) -> tuple[Expr, Expr]:
        """lo and hi for one row i, over the leaf i."""
        at: dict[str, Expr] = {"i0": Leaf("i"), "i1": Leaf("i")}
        return substitute(self.lo, at), substitute(self.hi, at)


def tile_ranges(v: Variant, *, without: Collection[str] = (), guarded: bool = False) -> TileRanges:
    """The tile ranges of a variant's mask (and domain, of which nothing is known).  Tensors named in `without` are not
    read: what the mask asks of them counts as unknown.  `guarded`: nor is what the mask reads there for every key."""
    share = Interner()
    mask = share(whole_mask(v))
    reads = Reads(v, mask, without, guarded)
    clauses = Clauses(reads)
    shown, unknown = regions(clauses.of(mask, True), reads)
    hidden, unknown_too = regions(clauses.of(mask, False), reads)
    lo, hi, may, contiguous = _visible_keys(shown)
    clear_lo, clear_hi, must = _clear_keys(_informed(hidden))
    unknown = tuple(dict.fromkeys(unknown + unknown_too))
    lo, hi, clear_lo, clear_hi = map(share, (lo, hi, clear_lo, clear_hi))
    may, must = (e and share(e) for e in (may, must))
    return TileRanges(lo, hi, clear_lo, clear_hi, may, must, contiguous and not unknown, unknown)


def _informed(hidden: Sequence[Region]) -> list[Region]:
    """Regions of hidden cells, simple ones first: where they hold nowhere, the others know of it."""
    result: list[Region] = []
    facts: list[Fact] = []
    for known in sorted(hidden, key=lambda r: bool(r.rest)):
        r = region(known.used, known.reads, facts)
        holds = FALSE if r is None else r.holds()
        if r is None or holds == FALSE:
            continue
        result.append(r)
        if isinstance(holds, Op) and holds.op in ("lt", "le") and all(linear(x).exact for x in holds.args):
            x, y = holds.args
            facts.append((y, x) if holds.op == "lt" else (shift(y, 1), x))
    return result


def _start(r: Region) -> Expr:
    return ZERO if r.lowest is None else r.lowest


def _stop(r: Region) -> Expr:
    return KV if r.highest is None else shift(r.highest, 1)


def _visible_keys(shown: Sequence[Region]) -> tuple[Expr, Expr, Expr | None, bool]:
    """lo, hi, may, contiguous."""
    if not shown:
        return ZERO, ZERO, None, True
    starts, stops = list(map(_start, shown)), list(map(_stop, shown))
    if all(not r.rest for r in shown) and (len(set(starts)) == 1 or len(set(stops)) == 1):  # the ranges join up
        if len(set(starts)) == 1:
            lo = starts[0]
            hi = most(*(choose(r.when, x, ZERO) for r, x in zip(shown, stops, strict=True)))
        else:
            lo = least(*(choose(r.when, x, KV) for r, x in zip(shown, starts, strict=True)))
            hi = stops[0]
        return lo, hi, None, all(r.exact for r in shown)
    lo = ZERO if ZERO in starts else least(*starts)
    hi = KV if KV in stops else most(*stops)
    may = either(*(r.holds((lo, shift(hi, -1))) for r in shown))
    return lo, hi, None if may == TRUE else may, False


def _clear_keys(hidden: Sequence[Region]) -> tuple[Expr, Expr, Expr | None]:
    """clear_lo, clear_hi, must.  Of keys hidden in the middle, those above count as clear."""
    starts, stops, enough = [], [], True
    for r in hidden:
        enough = enough and not r.rest and (r.lowest is None or r.highest is None)
        if r.highest is not None:
            starts.append(choose(r.when, _stop(r), ZERO))
        else:
            stops.append(choose(r.when, _start(r), KV))
    must = TRUE if enough else both(*(negate(r.holds()) for r in hidden))
    must = None if enough or must == FALSE else must
    if ZERO in stops:
        return ZERO, ZERO, must
    return most(*starts) if starts else ZERO, least(*stops) if stops else KV, must
