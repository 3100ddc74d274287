"""Text to IR: `load` a source as variants, `parse` it to a syntax tree."""

from __future__ import annotations

from attncc.frontend.check import load
from attncc.frontend.parse import parse

__all__ = ["load", "parse"]
