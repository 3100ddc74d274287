"""The reference as a kernel rounds.

A kernel keeps f_q(q), f_k(k) and f_v(v) in the element type, as it does q, k and v; the float64 reference does not.  So
a variant that transforms them is judged tightly by a reference that rounds there, and loosely by the plain one, which
knows nothing of how kernels work.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from cases import Case
from torch import Tensor

from attncc.codegen.vectors import used_slots
from attncc.compiler import for_kernels
from attncc.ir import reference
from attncc.ir.fold_vectors import ONE, apart, of_keys
from attncc.ir.nodes import Expr
from attncc.random_inputs import FLOATS


def transforms(case: Case) -> set[str]:
    """The slots of which a case's kernels store what they make of a vector: not those that are only a factor, but where
    a pre-pass applies it."""
    variant = case.load()
    before = set(of_keys(variant)) if case.prepass else set()
    return before | {"f_q", "f_k", "f_v"} & set(used_slots(for_kernels(variant)))


def rounds_before_scale(case: Case) -> bool:
    """Do served kernels round k' where it still lacks a factor of its row, which goes to the scores?  The reference
    rounds after it, so the two errors add up."""
    return case.dtype == "bf16" and not case.prepass and apart(for_kernels(case.load()).f_k)[0] != ONE


LOOSE = 8  # times the tight limit: what rounding q', k' and v' may add


def as_kernels_round(case: Case, plain: Any) -> Any:
    """An `attncc.reference` of the case, which judges kernels tightly."""
    slots = transforms(case)
    return Rounding(plain, FLOATS[case.dtype], slots) if slots else plain


class Rounding:
    """An `attncc.reference` where what `slots` make is rounded to `dtype`."""

    def __init__(self, plain: Any, dtype: torch.dtype, slots: set[str]):
        self.plain = plain

        class Lanes(reference.Lanes):
            def checked(self, e: Expr, lanes: Tensor | None = None) -> Tensor:
                found = super().checked(e, lanes)
                mine = any(e is getattr(self.call.variant, slot) for slot in slots)
                return found.to(dtype).to(found.dtype) if mine else found

        self.lanes = Lanes

    def __call__(self, *args: Any, **options: Any) -> Any:
        with patch.object(reference, "Lanes", self.lanes):
            return self.plain(*args, **options)

    def ragged(self, *args: Any, **options: Any) -> Any:
        with patch.object(reference, "Lanes", self.lanes):
            return self.plain.ragged(*args, **options)

    def paged(self, *args: Any, **options: Any) -> Any:
        with patch.object(reference, "Lanes", self.lanes):
            return self.plain.paged(*args, **options)
