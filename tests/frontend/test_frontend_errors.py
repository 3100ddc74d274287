"""Bad files: each states its diagnostics, in order, in trailing `#!` comments (hints indented below)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from attncc.diagnostics import AttnError, Source
from attncc.frontend import load

FILES = sorted((Path(__file__).parent / "errors").glob("*.attn"))


def found(name: str, text: str) -> AttnError:
    with pytest.raises(AttnError) as caught:
        load(Source(name, text))
    return caught.value


def stated(error: AttnError) -> str:
    lines = []
    for d in error.diagnostics:
        lines.append(f"#! {d.span.line}:{d.span.column}: {d.message}")
        lines += [f"#!     {hint}" for hint in (d.hint or "").splitlines()]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_stated_diagnostics(path: Path, golden: Callable[[str, str], None]) -> None:
    text = path.read_text(encoding="utf-8").split("#!", 1)[0]
    golden(f"errors/{path.name}", text + stated(found(path.name, text)))


def test_there_are_many() -> None:
    assert len(FILES) >= 50


RENDERED = (
    "unknown_name", "out_of_scope_through_let", "def_at_use", "unclosed_bracket", "too_deep", "foreign_names",
    "tab_indentation",
)  # fmt: skip


@pytest.mark.parametrize("name", RENDERED)
def test_rendering(name: str, golden: Callable[[str, str], None]) -> None:
    """Whole diagnostics, source line and caret included."""
    text = (Path(__file__).parent / "errors" / f"{name}.attn").read_text(encoding="utf-8").split("#!", 1)[0]
    golden(f"rendered/{name}.golden", str(found(f"{name}.attn", text)) + "\n")
