"""Extra outputs: `emit NAME[index, …] = max(x) | min(x) | sum(x)`, as far as a kernel reduces them.

A kernel reduces each distinct value once, over the keys that a row and head sees; indices that an output doesn't keep
are reduced afterwards (runtime/emits.py).  What moves or scales a whole row stays out of the inner loop:

    value = unit * cell + shift         so   max(value) = unit * max(cell) + shift   for a positive unit
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from attncc.ir.decompose import Logits, decompose, sign
from attncc.ir.nodes import F32, Const, Emit, Expr, Leaf, Scan, Variant, make, transform
from attncc.ir.rewrite import simplify_expr

if TYPE_CHECKING:
    from .emit import Emitter, Guards

ONE, ZERO = Const(1.0, F32), Const(0.0, F32)


@dataclass(frozen=True)
class Reduction:
    """A row's value is unit * reduce(cell) + shift.  `cell` is over dot, i, iq, j and i0, the first row position of
    the tile; `unit` differs by head, `shift` by row."""

    reduce: str
    cell: Expr
    unit: Expr = ONE
    shift: Expr = ZERO


def distinct(variant: Variant) -> list[tuple[str, Expr]]:
    """What kernels reduce, each (reduction, value) once, in the order of the emits."""
    return list(dict.fromkeys((e.reduce, e.value) for e in variant.emits))


def number_of(variant: Variant, emit: Emit) -> int:
    """Which of `distinct` an output is made from."""
    return distinct(variant).index((emit.reduce, emit.value))


def reductions(variant: Variant) -> list[Reduction]:
    """Of a specialised, simplified variant."""
    return [reduction(variant, reduce, value) for reduce, value in distinct(variant)]


def reduction(variant: Variant, reduce: str, value: Expr) -> Reduction:
    logit = transform(value, lambda x: variant.f_logits if x == Leaf("l") else x)
    like = replace(variant, f_logits=logit, scan=Scan("softmax"))
    parts = in_dot(decompose(like))
    unit, shift = (simplify_expr(make("mul", e, Const(math.log(2.0), F32))) for e in (parts.unit, parts.shift))
    if reduce == "sum" and parts.shift == ZERO:
        return Reduction(reduce, parts.score, unit)
    if reduce != "sum" and sign(parts.unit) == 1:
        return Reduction(reduce, parts.score, unit, shift)
    return Reduction(reduce, in_dot(decompose(replace(like, scan=Scan("none")))).score)


def in_dot(parts: Logits) -> Logits:
    """In terms of the dot product without its key's factor."""
    if parts.key is None:
        return parts
    scaled = make("mul", Leaf("dot"), parts.key)
    score = transform(parts.score, lambda x: scaled if x == Leaf("dot") else x)
    return replace(parts, score=score, key=None)


def emit_outputs(m: Emitter, variant: Variant, in_cell: Guards, in_row: Guards) -> None:
    """`in_cell`, `in_row`: what guards the reads of a cell and of a row."""
    found = reductions(variant)
    for k, r in enumerate(found):
        stage = m.cell(f"cell {k}", ("dot", "i", "j", "seen"), (m.head, m.row, m.col))
        m.function(f"cell_{k}(x, hd, rw, cl, dot, i, j, seen)", stage, m.value(r.cell, stage, in_cell))
        stage = m.cell(f"emitted {k}", ("total", "i", "i0"), (m.head, m.row))
        unit, shift = (m.value(e, stage, in_row, True) for e in (r.unit, r.shift))
        m.function(f"emitted_{k}(x, hd, rw, i, i0, total)", stage, f"total * {unit} + {shift}")
    if found:
        rows = "".join(f"{m.param(f't.emit.{k}', 'ptr')}, " for k in range(len(found)))
        m.function("emit_rows(x)", m.cell("emit rows", (), ()), f"({rows})")
        if m.layout != "dense":
            m.function("emit_parts(x)", m.cell("emit parts", (), ()), m.param("part_emits", "ptr"))
