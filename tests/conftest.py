"""Goldens (expected texts in files beside their tests), and a kernel cache for one run of the tests."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden files with what is found")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)`: `text` must be that of the file `name`, relative to the test's own."""

    def check(name: str, text: str) -> None:
        path = request.path.parent / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"no golden file {path}: --update-golden writes it"
        assert text == path.read_text(encoding="utf-8")

    return check


@pytest.fixture
def kernel_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """ATTNCC_CACHE_DIR is a directory that the processes of this run of the tests share, for tests that want a kernel
    and don't mind who built it."""
    base = tmp_path_factory.getbasetemp()
    path = (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "kernels"
    monkeypatch.setenv("ATTNCC_CACHE_DIR", str(path))
    return path
