"""Kernels for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from gpu.cases import Case

from attncc import compiler


@pytest.fixture
def artifact(kernel_cache: Path, tmp_path: Path) -> Callable[[Case], Path]:
    """Builds a case's artifact, or finds it in the cache of this run, and returns its directory."""

    def build(case: Case) -> Path:
        path = tmp_path / str(case)
        if not path.exists():
            compiler.build_artifact(case.source, path, **case.options)
        return path

    return build
