"""The parser's tables are kept on disk; whatever lies there, a file is read the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from attncc import frontend
from attncc.diagnostics import Source
from attncc.frontend.parse import _lark

TEXT = "attention causal():\n    mask = j <= i\n"


@pytest.fixture(autouse=True)
def fresh():
    _lark.cache_clear()
    yield
    _lark.cache_clear()


def read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    _lark.cache_clear()
    monkeypatch.setenv("ATTNCC_CACHE_DIR", str(folder))
    return frontend.load(Source("t.attn", TEXT))[0].name


def test_made_once_then_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(tmp_path / "new", monkeypatch) == "causal"
    kept = (tmp_path / "new" / "grammar.tables").read_bytes()
    assert read(tmp_path / "new", monkeypatch) == "causal"
    assert (tmp_path / "new" / "grammar.tables").read_bytes() == kept


@pytest.mark.parametrize("junk", [b"", b"junk", b"0" * 64 + b"\n" + bytes(100)])
def test_damaged_tables_are_made_again(junk: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(tmp_path, monkeypatch) == "causal"
    kept = (tmp_path / "grammar.tables").read_bytes()
    for damaged in (junk, kept[: len(kept) // 2]):
        (tmp_path / "grammar.tables").write_bytes(damaged)
        assert read(tmp_path, monkeypatch) == "causal"
        assert len((tmp_path / "grammar.tables").read_bytes()) > len(kept) // 2 > len(junk)


def test_no_place_to_keep_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    assert read(tmp_path / "file" / "below", monkeypatch) == "causal"
    (tmp_path / "taken" / "grammar.tables").mkdir(parents=True)
    assert read(tmp_path / "taken", monkeypatch) == "causal"
