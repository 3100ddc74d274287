"""Where a piece of text stands, and what is wrong with it."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path


@dataclass(frozen=True)
class Span:
    """A stretch of one line of a source: 1-based line, 1-based first column, 1-based end column (exclusive)."""

    line: int
    column: int
    end_column: int


NOWHERE = Span(0, 0, 0)


@dataclass(frozen=True)
class Source:
    """The text of a .attn file and the name that diagnostics show for it.

    A byte order mark is dropped and every line ends in a plain newline, so that lines and columns are counted alike
    wherever the text comes from.
    """

    name: str
    text: str = field(repr=False)

    def __post_init__(self) -> None:
        plain = self.text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
        object.__setattr__(self, "text", plain)

    @classmethod
    def of(cls, source: str | Path) -> Source:
        """`source` is .attn text where it contains a newline, else a path (Python API's rule)."""
        if isinstance(source, str) and ("\n" in source or "\r" in source):
            return cls("<string>", source)
        try:
            return cls.read(source)
        except AttnError as e:
            path, _, variant = str(source).rpartition(":")
            if isinstance(source, str) and re.match(r"\s*attention\s", source):
                hint = "text needs a newline; without one it is taken for a path"
            elif variant.isidentifier() and Path(path).is_file():
                hint = f"the command line's FILE:VARIANT is {path!r} with variant={variant!r} here"
            else:
                raise
            raise AttnError([replace(d, hint=hint) for d in e.diagnostics]) from None

    @classmethod
    def read(cls, path: str | Path) -> Source:
        """Read a file; an unreadable one is a diagnostic, not a traceback."""
        try:
            return cls(str(path), Path(path).read_bytes().decode("utf-8"))
        except OSError as e:
            reason = f"cannot read: {e.strerror}"
        except UnicodeDecodeError as e:
            reason = f"not UTF-8 text (byte {e.start})"
        except ValueError as e:  # a path that no file system takes
            reason = f"cannot read: {e}"
        raise AttnError([Diagnostic(reason, cls(str(path), ""))])

    def line(self, number: int) -> str:
        """A line by its 1-based number, without its end; "" beyond the last."""
        lines = _lines(self.text)
        return lines[number - 1] if 0 < number <= len(lines) else ""


@lru_cache(maxsize=4)
def _lines(text: str) -> list[str]:
    return text.split("\n")


@dataclass(frozen=True)
class Diagnostic:
    """One complaint: message, place, and the nearest thing that would work."""

    message: str
    source: Source
    span: Span = NOWHERE
    hint: str | None = None

    def __str__(self) -> str:
        at, name = self.span, self.source.name
        where = name if at == NOWHERE else f"{name}:{at.line}:{at.column}"
        shown = [f"{where}: error: {self.message}", *_excerpt(self.source.line(at.line), at)]
        return "\n".join(shown if self.hint is None else [*shown, self.hint])


_WIDTH = 120  # of an excerpt; a longer line is cut around the place


def _excerpt(line: str, at: Span) -> list[str]:
    """The source line, and the place marked below it; nothing for an empty line."""
    if not line.strip():
        return []
    indent = min(len(line) - len(line.lstrip()), max(at.column - 1, 0))  # the place may be in the indentation itself
    text = line[indent:].rstrip()
    first = at.column - 1 - indent
    length = max(1, min(at.end_column, len(line) + 1) - at.column)
    if len(text) > _WIDTH:
        cut = max(0, min(first - _WIDTH // 3, len(text) - _WIDTH))
        text, first = text[cut : cut + _WIDTH], first - cut
        length = min(length, _WIDTH - first)
    text = "".join(c if c.isprintable() else " " for c in text)
    marked = sum(map(_columns, text[first : first + length])) or 1
    before = sum(map(_columns, text[:first].ljust(first)))
    return ["    " + text.rstrip(), "    " + " " * before + "^" + "~" * (marked - 1)]


def _columns(char: str) -> int:
    """How many columns of a terminal a character takes."""
    if char.isascii():
        return 1
    return 0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1


class AttnError(Exception):
    """All that is wrong with a source, in order of position; `str()` shows every diagnostic."""

    def __init__(self, diagnostics: list[Diagnostic]):
        self.diagnostics = sorted(diagnostics, key=lambda d: (d.span.line, d.span.column))
        super().__init__(self.diagnostics)

    def __str__(self) -> str:
        return "\n".join(map(str, self.diagnostics))
