"""The manifest's "visible": between which positions a tile's rows can see keys, evaluated when a batch is planned.

An expression is nested lists, `["add", x, y]`, `["leaf", "i0"]`, `["const", 1]`, `["param", "window"]`.  i32 and bool
only, wrapping as the kernel's do: an end that asks for anything else (a tensor, float32, whose last bit might differ
from the kernel's, a scalar not given) is unknown, and the plan then goes to the end of the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

LEAVES = ("i0", "i1", "qo_len", "kv_len")
OPS: dict[str, tuple[int, Callable[..., np.ndarray]]] = {
    "neg": (1, np.negative), "abs": (1, np.abs), "not": (1, np.logical_not),
    "add": (2, np.add), "sub": (2, np.subtract), "mul": (2, np.multiply),
    "min": (2, np.minimum), "max": (2, np.maximum), "floordiv": (2, np.floor_divide), "mod": (2, np.mod),
    "lt": (2, np.less), "le": (2, np.less_equal), "eq": (2, np.equal), "ne": (2, np.not_equal),
    "and": (2, np.logical_and), "or": (2, np.logical_or), "select": (3, np.where),
}  # fmt: skip

Range = tuple[np.ndarray | None, np.ndarray | None]
Bounds = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], Range]


class Visible:
    """Both ends, compiled once.  `bind(scalars)` gives what `plan` takes as `visible`."""

    def __init__(self, spec: Mapping[str, Any]):
        """`spec`: the manifest's {"lo": expression or null, "hi": …}; "lo_any" and "hi_any", where there are such, are
        weaker ends that ask for fewer scalars."""
        self._code = _Code()
        self._ends = [
            [self._code.number(spec[name]) for name in (end, f"{end}_any") if spec.get(name) is not None]
            for end in ("lo", "hi")
        ]

    def asks(self) -> set[str]:
        """Names of what a bound answer may depend on, beside LEAVES."""
        steps = {n for ends in self._ends for e in ends for n in self._code.steps(e)}
        return {name for n in steps if (name := self._code.name(n)) is not None} - {*LEAVES}

    def bind(self, scalars: Mapping[str, Any]) -> Bounds | None:
        """(i0, i1, qo_len, kv_len) -> [lo, hi), int32, for these values of the variant's scalars (and of leaves that
        are the same for all tiles, such as group_size).  Ends may lie outside of [0, kv_len], and `lo` above `hi`; an
        end is None where it is unknown, or the first key whatever the tile.  None where both ends are."""
        given = {name: known for name, x in scalars.items() if (known := _known(x)) is not None}
        lo, hi = (next(filter(None, (self._code.needed(e, given) for e in ends)), None) for ends in self._ends)
        if lo is not None and self._code.is_first_key(lo[-1]):
            lo = None
        if lo is None and hi is None:
            return None
        run, fixed = self._code.run, {**self._code.constants, **given}

        def bounds(i0: np.ndarray, i1: np.ndarray, qo_len: np.ndarray, kv_len: np.ndarray) -> Range:
            values: dict[Any, np.ndarray] = {**fixed, "i0": i0, "i1": i1, "qo_len": qo_len, "kv_len": kv_len}
            return None if lo is None else run(lo, values), None if hi is None else run(hi, values)

        # to silence what only a division says takes as long as some operations do
        return np.errstate(all="ignore")(bounds) if self._code.divides(lo, hi) else bounds


def _known(x: Any) -> np.ndarray | None:
    """A scalar as the array of one element that arithmetic wraps on; None for what is no i32 or bool."""
    if isinstance(x, (bool, np.bool_)):
        return np.array([x], bool)
    if isinstance(x, (int, np.integer)) and -(2**31) <= x < 2**31:
        return np.array([x], np.int32)
    return None


class _Code:
    """Expressions as a list of distinct steps, operands before what uses them."""

    def __init__(self) -> None:
        self._steps: list[tuple[str, Any]] = []
        self._numbers: dict[tuple[str, Any], int] = {}
        self.constants: dict[Any, np.ndarray] = {}  # by number

    def number(self, expr: Any) -> int:
        """The step that is the value of `expr`."""
        op, *rest = expr
        if op in OPS and len(rest) == OPS[op][0]:
            step = (op, tuple(map(self.number, rest)))
        elif op in ("leaf", "param") and len(rest) == 1:
            step = ("name", str(rest[0]))
        elif op == "const" and len(rest) == 1 and _known(rest[0]) is not None:
            step = ("const", (type(rest[0]), rest[0]))
        else:
            step = ("unknown", None)
        if step not in self._numbers:
            self._numbers[step] = len(self._steps)
            if step[0] == "const" and (known := _known(rest[0])) is not None:
                self.constants[len(self._steps)] = known
            self._steps.append(step)
        return self._numbers[step]

    def steps(self, end: int) -> list[int]:
        """The steps that step `end` needs, in order."""
        needed, todo = set(), [end]
        while todo:
            n = todo.pop()
            if n not in needed:
                needed.add(n)
                op, rest = self._steps[n]
                todo.extend(rest if op in OPS else ())
        return sorted(needed)

    def name(self, n: int) -> str | None:
        """What step `n` is a look-up of, if it is one."""
        op, rest = self._steps[n]
        return rest if op == "name" else None

    def needed(self, end: int, given: Mapping[str, Any]) -> list[int] | None:
        """The same; None where one of them is unknown."""
        steps = self.steps(end)
        for op, rest in (self._steps[n] for n in steps):
            if op == "unknown" or (op == "name" and rest not in LEAVES and rest not in given):
                return None
        return steps

    def divides(self, *ends: list[int] | None) -> bool:
        """Is there a division in these steps?  By 0 it makes numpy warn."""
        return any(self._steps[n][0] in ("floordiv", "mod") for steps in ends for n in steps or ())

    def is_first_key(self, end: int) -> bool:
        """Is that step a number that no position lies below?"""
        op, rest = self._steps[end]
        return op == "const" and rest[1] <= 0

    def run(self, steps: list[int], values: dict[Any, np.ndarray]) -> np.ndarray:
        """The value of the last of `steps`; `values` has those of names and constants.  Values of steps stay there,
        by number, for the other end."""
        for n in steps:
            if n not in values:
                op, rest = self._steps[n]
                if op == "name":
                    values[n] = values[rest].astype(np.int32) if rest in LEAVES else values[rest]
                else:
                    values[n] = OPS[op][1](*[values[x] for x in rest])
        return values[steps[-1]]
