"""What to say about a statement that does not parse."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncc.diagnostics import Span
from attncc.frontend import names
from attncc.frontend.layout import span

if TYPE_CHECKING:
    from lark import Token

_Explained = tuple[str, Span, "str | None"]

# Terminals by Lark's names, as a message shows them.
_OPERATORS = ("OR", "AND", "PLUS", "MINUS", "STAR", "SLASH", "FLOORDIV", "PERCENT", "POW", "COMPARE", "IF")
_SHOWN = {
    **dict.fromkeys(_OPERATORS, "an operator"),
    "NAME": "a name", "COMMA": "','", "EQUAL": "'='", "COLON": "':'", "LPAR": "'('", "RPAR": "')'", "LSQB": "'['",
    "RSQB": "']'", "$END": "the end of the line",
}  # fmt: skip
_KEYWORDS = {word.upper() for word in names.KEYWORDS}
_STATEMENTS = ("tensor", "let", "def", "emit", "attention")
_BODY = "a body holds slots (`mask = …`), `tensor`, `let`, `def` and `emit`"
_CHOICE = "write `a if condition else b`"

# The shape of a statement, by its first word.
_SHAPES = {
    "ATTENTION": "write `attention {name}(window: i32):`",
    "TENSOR": "write `tensor {name}[h]: f32`",
    "LET": "write `let {name} = …`",
    "DEF": "write `def {name}(x) = …`",
    "EMIT": "write `emit {name}[iq, h] = max(l)`",
}
# Where more can be said: by the first word and what the parser found.
_INSTEAD = {
    ("TENSOR", "EQUAL"): "a tensor has no default",
    ("TENSOR", "RSQB"): "give it an index space, a length or a name; a single number is a parameter of the header",
    ("TENSOR", "COLON"): "write `tensor {name}[h]: f32`; a single number is a parameter of the header",
    ("DEF", "EQUAL"): "write `def {name}(x) = …`; a plain value is named by `let`",
    ("DEF", "COLON"): "the arguments of a `def` have no types, and it no block: `def {name}(x) = …`",
}
# Where an expression should stand, and where it should go on or end.
_NO_EXPRESSION = {
    "EQUAL": "equality is written `==`",
    "PLUS": "there is no unary `+`",
    "NOT": "put `not …` in parentheses",
    "STRING": "a string is a docstring, first in the body; words such as `neox` have no quotes",
    "LSQB": "numbers are listed in a tensor that the caller passes",
    "IF": _CHOICE,
    "$END": "a statement goes on over the lines inside ( ) and [ ] only",
}
_NO_OPERATOR = {
    "EQUAL": "equality is written `==`",
    "LSQB": "one pair of brackets holds all indices: `t[i, j]`",
    "COLON": "only a header ends in `:`",
    "COMMA": "commas stand between arguments and between indices",
    "STRING": "a string stands first in the body, as its docstring",
    "in": "write `low <= x < high`",
    "is": "equality is written `==`",
    "lambda": "define it: `def f(x) = …`",
}


def explain(start: str, tokens: list[Token], n: int, accepts: set[str]) -> _Explained:
    """Message, place and hint for statement `tokens` (of the rule `start`) whose token `n`, or end, does not fit;
    the parser would have taken one of the terminals `accepts`."""
    first, kind = tokens[0], tokens[n].type if n < len(tokens) else "$END"
    if first.type not in ("ATTENTION", "TENSOR", "LET", "DEF", "EMIT") and n <= 1 and first not in names.SLOTS:
        return _no_statement(start, tokens, n)
    at, found = _place(tokens, n)
    if "ELSE" in accepts:
        return f"`if` without `else` before {found}", at, _CHOICE
    if "NUMBER" in accepts and first.type != "TENSOR":
        hint = _NO_EXPRESSION.get(kind) or _word_of_the_language(kind)
        return f"expected an expression, found {found}", at, hint
    operator = "PLUS" in accepts
    wanted = [_SHOWN[t] for t in _SHOWN if t in accepts and not (operator and t in ("LPAR", "LSQB"))]
    if "NUMBER" in accepts:
        wanted = ["an index"]
    hint = _after_expression(tokens, n, kind) if operator else _after_word(tokens, n, kind, accepts)
    return f"expected {_either(list(dict.fromkeys(wanted)))}, found {found}", at, hint


def _no_statement(start: str, tokens: list[Token], n: int) -> _Explained:
    """The first word begins none of the statements."""
    first, at = tokens[0], span(tokens[0])
    follows = tokens[1].type if n == 1 and len(tokens) > 1 else ""
    if start == "statement" and follows == "COLON" and len(tokens) > 2:
        hint = f"parameters stand in the header: `attention NAME({first}: {tokens[2]}):`"
        return f"'{first}' cannot be declared like this", at, hint
    if start == "statement" and follows == "LSQB" and any(t.type == "COLON" for t in tokens):
        return f"'{first}' cannot be declared like this", at, f"write `tensor {first}[…]: …`"
    near = names.suggest(str(first), _STATEMENTS if start == "statement" else ("attention",))
    if first.type in ("IF", "ELSE"):
        near = "a choice is an expression: `mask = a if condition else b`"
    return f"{_quoted(first)} begins no statement", at, near or _BODY


def _place(tokens: list[Token], n: int) -> tuple[Span, str]:
    """Where token `n` stands, and how it is called."""
    if n < len(tokens):
        return span(tokens[n]), _quoted(tokens[n])
    last = tokens[-1]
    column = last.end_column or 1
    return Span(last.end_line or 1, column, column + 1), "the end of the line"


def _quoted(token: Token) -> str:
    text = token.split("\n", 1)[0]
    return f"'{token}'" if len(token) <= 40 and text == token else f"'{text[:30]}…'"


def _after_expression(tokens: list[Token], n: int, kind: str) -> str | None:
    """Where an operator or the end was due."""
    words = [str(tokens[k]) for k in (n, n - 1) if k < len(tokens)]
    hint = _NO_OPERATOR.get(kind) or next((_NO_OPERATOR[w] for w in words if w in _NO_OPERATOR), None)
    if hint is None and kind in ("NAME", "NUMBER", "LPAR") and tokens[n - 1].type in ("NUMBER", "RPAR", "NAME"):
        return "a product is written `a * b`"
    return hint


def _after_word(tokens: list[Token], n: int, kind: str, accepts: set[str]) -> str | None:
    """Where a name or the next part of a declaration was due."""
    first = tokens[0]
    if accepts == {"$END"} and kind in _NO_OPERATOR:
        return _NO_OPERATOR[kind]
    if first in names.SLOTS:
        return f"write `{first} = …`"
    if accepts == {"NAME"} and kind in _KEYWORDS:
        return _word_of_the_language(kind)
    name = str(tokens[1]) if len(tokens) > 1 and tokens[1].type == "NAME" else "NAME"
    if first.type == "ATTENTION":
        if accepts == {"$END"}:
            return "the body stands on the lines below, indented"
        if kind == "COLON" and "COMMA" in accepts:
            return "a comma stands between parameters"
        if n > 2 and (accepts == {"NAME"} or (accepts == {"COLON"} and tokens[n - 1].type == "NAME")):
            return "a parameter has a type: `window: i32`"
        if n == len(tokens) and accepts == {"COLON"}:
            return "a header ends in `:`"
    return (_INSTEAD.get((first.type, kind)) or _SHAPES.get(first.type, "")).format(name=name) or None


def _word_of_the_language(kind: str) -> str | None:
    return f"`{kind.lower()}` is a word of the language" if kind in _KEYWORDS else None


def _either(words: list[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
