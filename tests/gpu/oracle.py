"""The reference as a kernel rounds.

A kernel keeps f_q(q), f_k(k) and f_v(v) in the element type, as it does q, k and v; the float64 reference does not.  So
a variant that transforms them is judged tightly by a reference that rounds there, and loosely by the plain one, which
knows nothing of how kernels work.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from attncc.ir import reference
from attncc.ir.nodes import SLOT_DEFAULTS, Expr, Variant

TRANSFORMS = ("f_q", "f_k", "f_v")


def transforms(variant: Variant) -> bool:
    return any(getattr(variant, slot) != SLOT_DEFAULTS[slot] for slot in TRANSFORMS)


LOOSE = 8  # times the tight limit: what rounding q', k' and v' may add


def as_kernels_round(variant: Variant, plain: Any, dtype: torch.dtype) -> Any:
    """An `attncc.reference` of the variant, which judges kernels tightly."""
    return Rounding(plain, dtype) if transforms(variant) else plain


class Rounding:
    """An `attncc.reference` whose transformed q, k and v are rounded to `dtype`."""

    def __init__(self, plain: Any, dtype: torch.dtype):
        self.plain = plain

        class Lanes(reference.Lanes):
            def checked(self, e: Expr, lanes: Tensor | None = None) -> Tensor:
                found = super().checked(e, lanes)
                slots = [getattr(self.call.variant, s) for s in TRANSFORMS]
                mine = any(e is x and x != SLOT_DEFAULTS[s] for s, x in zip(TRANSFORMS, slots, strict=True))
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
