"""Functions of the vector slots: for slot f_q, say, `f_q_0`, `f_q_1`, … are its steps (vectors.py) and `f_q` one
feature of the result.

Each takes (environment, head's values, what tells rows apart …, the vector's feature, its index, sums, turned, fixed):
`sums` are those of earlier steps, `turned` this feature of what earlier ropes made, `fixed` its entries in the tables
that feature_N(x, d) fills.  STEPS says what the steps are:

  ("sum",)                      f_q_K is what is summed
  ("sum", "squares")            ... each feature's square (of the slots below alone)
  ("rope", dims, style, N, S)   f_q_K is what turns, f_q_K_position where to; N counts the tables of frequencies, which
                                turning_N(x), (theta, arguments of the scaling …) in float64, speaks of; S: by how much
                                the position grows from one key to the next, None: by no one number
  ("rope", dims, style, None, None)   f_q_K_pair are cosine and sine, read from memory, of the pair that the index is

Where few rows meet a key (device/own_keys.py) f_k comes as two slots besides, either of which may be missing: `few_k`,
whose result is k' but for `few_scale`, one number a key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from attncc.ir.fold_vectors import ONE, apart
from attncc.ir.nodes import Const, Expr, Leaf, Load, Rope, Type, Variant, make

from .config import slope
from .vectors import SLOTS, dims_of, steps_of, turned_argument, turning_of, turnings

if TYPE_CHECKING:
    from .emit import Emitter, Guards


def emit_vectors(m: Emitter, variant: Variant, everywhere: Guards, few: Mapping[str, Expr] | None = None) -> None:
    """Of the slots that the emitter was given.  `everywhere`: of reads that run for every row, whatever guards stand
    around their uses; `few`: few_slots, where the kernel has use for them."""
    tables = turnings(variant, m.head_dims)
    steps = {slot: SlotWriter(m, slot, slot, everywhere).write(getattr(variant, slot)) for slot in m.slots}
    for name, e in (few or {}).items():
        steps[name] = SlotWriter(m, name, "f_k", everywhere).write(e, squares=True)
    for n, turning in enumerate(tables):
        stage = m.cell("turning", (), ())
        values = [wide(m, e, stage) for e in (turning.theta, *turning.arguments)]
        m.function(f"turning_{n}(x)", stage, "".join(f"{v}, " for v in values).strip())
    for n, (space, e) in enumerate(m.features):
        stage = m.cell("feature", (space,), ())
        m.function(f"feature_{n}(x, {space})", stage, m.value(e, stage, everywhere))
    if steps:
        m.constants.append("STEPS = {\n" + "".join(f"    {k!r}: {v!r},\n" for k, v in steps.items()) + "}\n")


def few_slots(variant: Variant, dtype: str) -> dict[str, Expr]:
    """f16 has no room for features without their scale."""
    scale, rest = apart(variant.f_k) if dtype == "bf16" else (ONE, variant.f_k)
    return {name: e for name, e, trivial in (("few_k", rest, Leaf("k")), ("few_scale", scale, ONE)) if e != trivial}


def wide(m: Emitter, e: Expr, stage) -> str:
    """A scalar in float64: literals unrounded."""
    return f"Float64({e.value!r})" if isinstance(e, Const) else f"Float64({m.value(e, stage, precise=True)})"


class SlotWriter:
    """`slot`: whose arguments the functions have; `name`: what they are called."""

    def __init__(self, m: Emitter, name: str, slot: str, everywhere: Guards):
        self.m, self.slot, self.everywhere = m, name, everywhere
        vector, self.feature, rows = SLOTS[slot]
        self.square = make("mul", Leaf(vector), Leaf(vector))
        self.args = (*rows, vector, self.feature)

    def write(self, result: Expr, squares: bool = False) -> tuple[tuple, ...]:
        """The functions; what the steps are.  `squares`: sums of squares are told from others."""
        from .emit import SEEN, Guards

        m, described, counts = self.m, [], {"sum": 0, "rope": 0}
        own = Guards()
        if SEEN in self.args:  # a row of keys may be one that does not exist
            self.everywhere, own = self.everywhere.plus(SEEN, True), own.plus(SEEN, True)
        tabulated = {e: f"fixed[{n}]" for n, (space, e) in enumerate(m.features) if space == self.feature}
        m.known = dict(tabulated)
        for k, step in enumerate(steps_of(result)):
            name, kind = f"{self.slot}_{k}", "rope" if isinstance(step, Rope) else "sum"
            if isinstance(step, Rope):
                described.append(self.rope(name, step))
            else:
                self.function(name, self.everywhere, step.args[0])
                described.append(("sum", "squares") if squares and step.args[0] == self.square else ("sum",))
            m.known[step] = f"{'turned' if kind == 'rope' else 'sums'}[{counts[kind]}]"
            counts[kind] += 1
        self.function(self.slot, own, result)
        m.known = {}
        return tuple(described)

    def function(self, name: str, guards: Guards, *values: Expr) -> None:
        stage = self.m.cell(name, self.args, (self.m.head,))
        written = ", ".join(self.m.value(e, stage, guards) for e in values)
        self.m.function(f"{name}(x, hd, {', '.join(self.args)}, sums, turned, fixed)", stage, written)

    def rope(self, name: str, rope: Rope) -> tuple:
        m = self.m
        self.function(name, self.everywhere, turned_argument(rope, m.head_dims))
        turning, number, step = turning_of(rope, m.head_dims), None, None
        if turning is None:
            pair = (rope.pos, Leaf(self.feature))
            read = [Load(str(t), pair, Type("f32", self.feature), rope.span) for t in (rope.cos, rope.sin)]
            self.function(f"{name}_pair", self.everywhere, *read)
        else:
            number = turnings(m.variant, m.head_dims).index(turning)
            self.function(f"{name}_position", self.everywhere, rope.pos)
            step = slope(rope.pos) if "j" in self.args else None
        return "rope", dims_of(rope, m.head_dims), rope.style, number, step
