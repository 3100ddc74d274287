"""Tokens to statements: a newline ends one, except inside brackets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attncc.diagnostics import Span
from attncc.frontend import names

if TYPE_CHECKING:
    from lark import Token

MAX_DEPTH = 100  # of brackets, and of a syntax tree: every later pass may recurse over an expression
Report = Callable[[str, Span, "str | None"], None]

_OPENS = {"LPAR": "RPAR", "LSQB": "RSQB"}
_CLOSE = {"LPAR": "write ')' where it ends", "LSQB": "write ']' where it ends"}
_STARTS = ("ATTENTION", "TENSOR", "LET", "DEF", "EMIT")  # never inside an expression
_STRAY_HINTS = {
    "&": "write `and`; `bit(word, n)` reads a bit",
    "|": "write `or`",
    "!": "write `not`",
    "^": "powers are written `**`",
    "?": "write `a if condition else b`",
    ";": "write one statement a line",
    "\\": "a statement goes on over the lines inside ( ) and [ ]",
    "{": "only ( ) and [ ] are brackets",
    "}": "only ( ) and [ ] are brackets",
    ".": "there are no attributes: write `log(2.0)`",
    "\u00a0": "this is a no-break space; use a plain one",
}


@dataclass(frozen=True)
class Line:
    """The tokens of one statement; `broken` where something in it is reported already."""

    tokens: list[Token]
    broken: bool

    @property
    def indent(self) -> int:
        return (self.tokens[0].column or 1) - 1


def span(token: Token) -> Span:
    """Where a token stands (its first line only)."""
    line, column = token.line or 1, token.column or 1
    width = len(token) if token.end_line == token.line else len(token.split("\n", 1)[0])
    return Span(line, column, column + width)


def join(first: Span, last: Span) -> Span:
    """From `first` to `last`, as far as they stand on one line."""
    return Span(first.line, first.column, last.end_column if last.line == first.line else first.end_column)


def lines(tokens: list[Token], report: Report) -> Iterator[Line]:
    """Group the tokens of a file into statements, reporting stray characters and brackets that do not match."""
    line: list[Token] = []
    stack: list[Token] = []
    broken = fresh = False
    foreign: set[str] = set()

    def complain(message: str, at: Token, hint: str | None = None) -> None:
        nonlocal broken
        if not broken:  # one error a statement is enough: what follows it is often its consequence
            report(message, span(at), hint)
        broken = True

    for n, token in enumerate(tokens):
        if token.type == "NEWLINE":
            fresh = True
            if not stack and line:
                yield Line(line, broken)
                line, broken = [], False
            continue
        if fresh and stack and _starts_statement(tokens, n):
            complain(f"'{stack[-1]}' is never closed", stack[-1], _CLOSE[stack[-1].type])
            yield Line(line, broken)
            line, stack, broken = [], [], False
        fresh = False
        line.append(token)
        if token.type in _OPENS:
            stack.append(token)
            if len(stack) > MAX_DEPTH:
                complain(f"brackets nested more than {MAX_DEPTH} deep", token, "name the parts with `let`")
        elif token.type in _OPENS.values():
            if not stack:
                complain(f"'{token}' closes no bracket", token, "open one before it, or leave it out")
            elif _OPENS[(opening := stack.pop()).type] != token.type:
                message = f"'{token}' does not close the '{opening}' at {opening.line}:{opening.column}"
                complain(message, token, _CLOSE[opening.type])
        elif token.type == "STRAY":
            hint = _STRAY_HINTS.get(token)
            shown = f"'{token}'" if token.isprintable() and token.isascii() else f"U+{ord(token):04X}"
            complain(f"unexpected character {shown}", token, hint)
        elif token.type == "OPEN_STRING":
            complain(
                "this string is never closed",
                token,
                f"end it with {token[:3] if token[:3] == 3 * token[0] else token[0]}",
            )
        elif token.type == "NAME" and not token.isascii() and token not in foreign:
            foreign.add(str(token))
            report(f"'{token}' is not an ASCII name", span(token), "names are made of a-z, A-Z, 0-9 and _")
    if stack:
        complain(f"'{stack[-1]}' is never closed", stack[-1], _CLOSE[stack[-1].type])
    if line:
        yield Line(line, broken)


def _starts_statement(tokens: list[Token], n: int) -> bool:
    """Does a line inside brackets begin what can only be the next statement?"""
    if tokens[n].type in _STARTS:
        return True
    is_slot = tokens[n].type == "NAME" and tokens[n] in names.SLOTS
    return is_slot and n + 1 < len(tokens) and tokens[n + 1].type == "EQUAL"
