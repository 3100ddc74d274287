"""Where a piece of text stands, and what is wrong with it."""

from __future__ import annotations

from dataclasses import dataclass, field
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
    """The text of a .attn file and the name that diagnostics show for it."""

    name: str
    text: str = field(repr=False)

    @classmethod
    def of(cls, source: str | Path) -> Source:
        """`source` is .attn text where it contains a newline, else a path (Python API's rule)."""
        if isinstance(source, str) and "\n" in source:
            return cls("<string>", source)
        return cls.read(source)

    @classmethod
    def read(cls, path: str | Path) -> Source:
        """Read a file; an unreadable one is a diagnostic, not a traceback."""
        try:
            return cls(str(path), Path(path).read_text(encoding="utf-8"))
        except OSError as e:
            raise AttnError([Diagnostic(f"cannot read: {e.strerror}", cls(str(path), ""))]) from None
        except UnicodeDecodeError:
            raise AttnError([Diagnostic("not UTF-8 text", cls(str(path), ""))]) from None

    def line(self, number: int) -> str:
        lines = self.text.splitlines()
        return lines[number - 1] if 0 < number <= len(lines) else ""


@dataclass(frozen=True)
class Diagnostic:
    """One complaint: message, place, and the nearest thing that would work."""

    message: str
    source: Source
    span: Span = NOWHERE
    hint: str | None = None

    def __str__(self) -> str:
        at = self.span
        if at == NOWHERE:
            head = f"{self.source.name}: error: {self.message}"
            return head if self.hint is None else f"{head}\n{self.hint}"
        line = self.source.line(at.line).replace("\t", " ")
        mark = "^" + "~" * max(0, min(at.end_column, len(line) + 1) - at.column - 1)
        shown = [
            f"{self.source.name}:{at.line}:{at.column}: error: {self.message}",
            "    " + line.strip() if line.strip() else "",
            "    " + " " * (at.column - 1 - (len(line) - len(line.lstrip()))) + mark if line.strip() else "",
        ]
        if self.hint is not None:
            shown.append(self.hint)
        return "\n".join(s for s in shown if s)


class AttnError(Exception):
    """All that is wrong with a source, in order of position; `str()` shows every diagnostic."""

    def __init__(self, diagnostics: list[Diagnostic]):
        self.diagnostics = sorted(diagnostics, key=lambda d: (d.span.line, d.span.column))
        super().__init__("\n".join(map(str, self.diagnostics)))
