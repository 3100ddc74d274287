"""Where artifacts may be written: found out before minutes go into compiling what could not be kept."""

from __future__ import annotations

import os
from pathlib import Path


def check_output(path: str) -> None:
    """ValueError unless an artifact can be written to directory `path`."""
    from attncc.codegen.artifact import _refuse_others

    try:
        _refuse_others(Path(path))
        parent = next(p for p in Path(path).absolute().parents if p.exists())
    except OSError as e:
        raise ValueError(f"{path}: cannot be written to: {e.strerror}") from e
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise ValueError(f"{path}: cannot be made: {parent} is no directory that can be written to")
