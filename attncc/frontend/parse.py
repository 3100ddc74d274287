"""Text to syntax tree.  Every statement is parsed on its own: one mistake never hides another."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from attncc.diagnostics import AttnError, Diagnostic, Source, Span
from attncc.frontend import ast
from attncc.frontend.layout import MAX_DEPTH, Line, join, lines, span
from attncc.frontend.syntax import explain
from attncc.paths import cache_dir

if TYPE_CHECKING:
    from lark import Lark, Token

_NUMBER = re.compile(r"(?P<whole>\d[\d_]*)|(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][+-]?\d+)?")
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "\n": ""}


def parse(source: Source) -> ast.File:
    """The syntax tree of a file.  Raises AttnError with every syntax error."""
    file, errors = parse_all(source)
    if errors:
        raise AttnError(errors)
    return file


def parse_all(source: Source) -> tuple[ast.File, list[Diagnostic]]:
    """The syntax tree, with `Broken` for what did not parse, and every syntax error."""
    reader = _Reader(source)
    return reader.file(), reader.errors


class Mistake(Exception):
    """A statement that cannot be read: raised inside the parser, reported by `_Reader`."""

    def __init__(self, message: str, at: Span, hint: str | None = None):
        self.message, self.span, self.hint = message, at, hint
        super().__init__(message)


@lru_cache(maxsize=1)
def _lark() -> Lark:
    """The tables take 100 ms to make and 8 to load, so Lark keeps them beside the kernels: it checks that they are of
    this grammar, makes them again where they are not, and goes on without where it can't write."""
    from lark import Lark

    return Lark(
        Path(__file__).with_name("grammar.lark").read_text(encoding="utf-8"),
        parser="lalr",
        lexer="basic",
        start=["header", "statement", "lexical"],
        maybe_placeholders=True,
        transformer=_Build(),
        cache=_tables(),
    )


def _tables() -> str | bool:
    """The file of the tables; False where there can't be one."""
    folder = cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return str(folder / "grammar.tables")


class _Reader:
    """One pass over the statements of a source."""

    def __init__(self, source: Source):
        self.source = source
        self.errors: list[Diagnostic] = []

    def report(self, message: str, at: Span, hint: str | None = None) -> None:
        self.errors.append(Diagnostic(message, self.source, at, hint))

    def file(self) -> ast.File:
        blocks: list[tuple[Line, list[Line]]] = []
        for line in lines(self._tokens(), self.report):
            self._check_tabs(line)
            if _is_header(line):
                if line.indent:
                    self.report("`attention` is indented", span(line.tokens[0]), "a variant begins at the first column")
                blocks.append((line, []))
            elif blocks:
                blocks[-1][1].append(line)
            else:
                hint = "a file holds variants: `attention NAME():` and an indented body"
                self.report("this stands outside of any variant", span(line.tokens[0]), hint)
        if not blocks and not self.errors:
            hint = "write `attention NAME():` and an indented body, such as `mask = j <= i`"
            self.report("no variant in this file", Span(1, 1, 2), hint)
        return ast.File(tuple(self._attention(head, body) for head, body in blocks), self.source)

    def _tokens(self) -> list[Token]:
        text = self.source.text
        try:
            text.encode()
        except UnicodeEncodeError as e:  # half of a surrogate pair: no file can hold it
            line = text.count("\n", 0, e.start) + 1
            column = e.start - text.rfind("\n", 0, e.start)
            self.report("not Unicode text", Span(line, column, column + 1))
            return []
        return list(_lark().lex(text))

    def _check_tabs(self, line: Line) -> None:
        before = self._indentation(line)
        if "\t" in before:
            at = before.index("\t") + 1
            self.report("a tab in the indentation", Span(line.tokens[0].line or 1, at, at + 1), "indent with spaces")

    def _indentation(self, line: Line) -> str:
        return self.source.line(line.tokens[0].line or 1)[: line.indent]

    def _attention(self, head: Line, body: list[Line]) -> ast.Attention:
        header = self._parse("header", head)
        at = join(span(head.tokens[0]), span(head.tokens[-1]))
        if not body and header is not None:
            self.report("this variant has no body", at, "indent at least one statement below, such as `mask = j <= i`")
        spaced = [line for line in body if "\t" not in self._indentation(line)]  # a tab has no width to compare
        for line in spaced:
            if line.indent != spaced[0].indent or line.indent == 0:
                self._misindented(line, spaced[0])
        statements = tuple(self._statement(line) for line in body)
        if header is None:
            named = [_word(t) for t in head.tokens[1:2] if t.type == "NAME"]
            return ast.Attention(named[0] if named else None, (), statements, at, broken=True)
        name, scalars = header
        return ast.Attention(name, scalars, statements, at)

    def _misindented(self, line: Line, first: Line) -> None:
        at = span(line.tokens[0])
        if line.indent == 0:
            self.report("this stands outside of any variant", at, "indent it to make it part of the variant above")
        elif first.indent:
            hint = f"the body of this variant is indented by {first.indent}, as line {first.tokens[0].line} is"
            self.report(f"indented by {line.indent}", at, hint)

    def _statement(self, line: Line) -> ast.Statement:
        found = self._parse("statement", line)
        if found is not None:
            return found
        declares = line.tokens[0].type in ("TENSOR", "LET", "DEF", "EMIT")
        named = [t for t in line.tokens[declares : declares + 1] if t.type == "NAME"]
        return ast.Broken(_word(named[0]) if named else None)

    def _parse(self, start: str, line: Line):
        """The node that the line holds; None where it holds a mistake, which is then reported."""
        from lark import UnexpectedToken

        if line.broken:
            return None
        parser = _lark().parse_interactive(start=start)
        n = 0
        try:
            for n, token in enumerate(line.tokens):  # noqa: B007
                parser.feed_token(token)
            n = len(line.tokens)
            return parser.feed_eof(line.tokens[-1])
        except UnexpectedToken:
            self.report(*explain(start, line.tokens, n, parser.accepts()))
        except Mistake as e:
            self.report(e.message, e.span, e.hint)
        return None


def _is_header(line: Line) -> bool:
    first, last = line.tokens[0], line.tokens[-1]
    misspelt = first.type == "NAME" and line.indent == 0 and last.type == "COLON"
    return first.type == "ATTENTION" or misspelt


def _word(token: Token) -> ast.Word:
    return ast.Word(str(token), span(token))


def _deeper(at: Span, *kids) -> int:
    depth = 1 + max((k.depth for k in kids), default=0)
    if depth > MAX_DEPTH:
        raise Mistake(f"an expression nested more than {MAX_DEPTH} deep", at, "name its parts with `let`")
    return depth


class _Build:
    """What Lark calls at every rule, bottom-up: from the children of a rule to a node."""

    def header(self, c: list):
        return _word(c[1]), c[3] or ()

    def params(self, c: list):
        return tuple(c)

    def param(self, c: list):
        return ast.Scalar(_word(c[0]), tuple(map(_word, c[1:-1])), c[-1])

    def docstring(self, c: list):
        from inspect import cleandoc

        quote = 3 if c[0][:3] in ('"""', "'''") else 1
        text = _ESCAPE.sub(lambda m: _ESCAPES.get(m[1], m[1]), c[0][quote:-quote])
        return ast.Docstring(cleandoc(text), span(c[0]))

    def tensor(self, c: list):
        return ast.Tensor(_word(c[0]), c[1], tuple(map(_word, c[2:])))

    def dims(self, c: list):
        return tuple(_word(t) if t.type == "NAME" else self.number([t]) for t in c)

    def names(self, c: list):
        return tuple(map(_word, c))

    def let(self, c: list):
        return ast.Let(_word(c[0]), c[1])

    def define(self, c: list):
        return ast.Def(_word(c[0]), c[1] or (), c[2])

    def emit(self, c: list):
        return ast.Emit(_word(c[0]), c[1] or (), c[2])

    def slot(self, c: list):
        return ast.Slot(_word(c[0]), c[1])

    def conditional(self, c: list):
        then, condition, other = c
        at = join(then.span, other.span)
        return ast.Conditional(condition, then, other, at, _deeper(at, *c))

    def binary(self, c: list):
        left, op, right = c
        at = join(left.span, right.span)
        return ast.Binary(str(op), left, right, at, _deeper(at, left, right))

    def unary(self, c: list):
        op, operand = c
        at = join(span(op), operand.span)
        return ast.Unary(str(op), operand, at, _deeper(at, operand))

    def compare(self, c: list):
        at = join(c[0].span, c[-1].span)
        return ast.Compare(tuple(map(str, c[1::2])), tuple(c[::2]), at, _deeper(at, *c[::2]))

    def name(self, c: list):
        return ast.Name(str(c[0]), span(c[0]))

    def number(self, c: list):
        at, found = span(c[0]), _NUMBER.fullmatch(c[0])
        if not found:
            raise Mistake(f"'{c[0]}' is not a number", at, "write 12, 0.5 or 1e-6")
        if found["whole"]:  # beyond ten digits any i32 is out of range, and int() has a limit of its own
            return ast.Number(int(c[0]) if len(c[0]) <= 16 else 1 << 63, at)
        return ast.Number(float(c[0]), at)

    def boolean(self, c: list):
        return ast.Boolean(c[0] == "true", span(c[0]))

    def paren(self, c: list):
        from dataclasses import replace

        return replace(c[1], span=join(span(c[0]), span(c[2])))

    def call(self, c: list):
        function, _, args, close = c
        at = join(span(function), span(close))
        kids = [a.value if isinstance(a, ast.Keyword) else a for a in args or ()]
        return ast.Call(_word(function), args or (), at, _deeper(at, *kids))

    def args(self, c: list):
        return tuple(c)

    def keyword(self, c: list):
        return ast.Keyword(_word(c[0]), c[1])

    def index(self, c: list):
        base, _, items, close = c
        at = join(span(base), span(close))
        return ast.Index(_word(base), items, at, _deeper(at, *items))

    def items(self, c: list):
        return tuple(c)

    def every(self, c: list):
        return ast.Every(span(c[0]))
