"""Which keys a tile of queries can see, from the mask expression alone.

For rows at positions i0..i1 and keys j0..j1 (both inclusive) `TileRanges` decides whether the tile is empty (no
visible cell), full (every cell visible: no mask code needed) or partial.  Its members are expressions, so that the
kernels print them as scalar code and `attncc explain` evaluates them in Python.
"""

from __future__ import annotations

from dataclasses import dataclass

from attncc.ir.nodes import BOOL, I32, Const, Expr, Leaf, Op, Variant, leaves


@dataclass(frozen=True)
class TileRanges:
    """Tile class: empty iff it has no key in [lo, hi) or `may` is false; full iff it lies inside
    [clear_lo, clear_hi) or `must` is true; else partial."""

    lo: Expr  # i32: keys outside [lo, hi) are hidden from every row i0..i1; 0 <= lo, hi <= kv_len, hi < lo is empty
    hi: Expr
    clear_lo: Expr  # i32: keys in [clear_lo, clear_hi) are visible to every row i0..i1; may be empty
    clear_hi: Expr
    may: Expr | None  # bool, over i0 i1 j0 j1 too; None where [lo, hi) alone says it
    must: Expr | None  # bool, over i0 i1 j0 j1 too; None where [clear_lo, clear_hi) alone says it
    unknown: tuple[Expr, ...] = ()  # parts of the mask that the analysis could not use


def _i(value: int) -> Const:
    return Const(value, I32)


def _op(op: str, *args: Expr) -> Op:
    return Op(op, args, BOOL if op in ("lt", "le") else I32)


def _terms(e: Expr) -> list[Expr]:
    return [t for a in e.args for t in _terms(a)] if isinstance(e, Op) and e.op == "and" else [e]


def tile_ranges(v: Variant) -> TileRanges:
    """The tile ranges of `v.mask`; sound for every mask, and for every value of scalars and tensors."""
    i, j, zero, kv_len = Leaf("i"), Leaf("j"), _i(0), Leaf("kv_len")
    lo, hi, clear_lo, clear_hi, unknown = zero, kv_len, zero, kv_len, []
    for term in _terms(v.mask):
        if term == Const(True, BOOL):
            continue
        if term == Op("le", (j, i), BOOL):
            hi, clear_hi = (_op("add", Leaf(x), _i(1)) for x in ("i1", "i0"))
            continue
        match term:
            case Op("lt", (Op("sub", (x, w)), y)) if (x, y) == (i, j) and not leaves(w) & {"i", "iq", "j"}:
                # i - w may wrap: then the last row's bound is below the first one's
                first, last = (_op("sub", Leaf(x), w) for x in ("i0", "i1"))
                straight = _op("le", first, last)
                lo = _op("select", straight, _op("add", _op("max", first, _i(-1)), _i(1)), zero)
                clear_lo = _op("select", straight, _op("add", _op("max", last, _i(-1)), _i(1)), kv_len)
                continue
        unknown.append(term)
    if unknown:
        clear_hi = zero
    return TileRanges(lo, hi, clear_lo, clear_hi, None, None, tuple(unknown))
