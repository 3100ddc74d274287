"""What to say about a statement that does not parse."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncc.diagnostics import Span
from attncc.frontend import names
from attncc.frontend.layout import span

if TYPE_CHECKING:
    from lark import Token


def explain(start: str, tokens: list[Token], token: Token, accepts: set[str]) -> tuple[str, Span, str | None]:
    """Message, place and hint for the `token` that the parser of a `start` could not take."""
    if token.type == "$END":
        last = tokens[-1]
        column = last.end_column or 1
        return f"expected {_wanted(accepts)} at the end of the line", Span(last.end_line or 1, column, column + 1), None
    return f"expected {_wanted(accepts)}, found '{token}'", span(token), None


def _wanted(accepts: set[str]) -> str:
    return "something else" if not accepts else " or ".join(sorted(accepts)[:3])
