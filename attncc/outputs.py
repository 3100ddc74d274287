"""Where artifacts may be written: found out before minutes go into compiling what could not be kept."""

from __future__ import annotations

import json
import os
from pathlib import Path

from attncc.runtime.artifact import MANIFEST


def check_output(path: str | Path) -> None:
    """ValueError unless an artifact can be written to directory `path`."""
    try:
        refuse_others(Path(path))
        parent = next(p for p in Path(path).absolute().parents if p.exists())
    except OSError as e:
        raise ValueError(f"{path}: cannot be written to: {e.strerror}") from e
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise ValueError(f"{path}: cannot be made: {parent} is no directory that can be written to")


def refuse_others(target: Path) -> None:
    """ValueError unless `target` is absent, empty, or an artifact and nothing besides."""
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target}: expected a directory, found a file")
    found = {p.name for p in target.iterdir()} if target.exists() else set()
    ours = {MANIFEST}
    if MANIFEST in found:
        try:
            ours |= set(json.loads((target / MANIFEST).read_text(encoding="utf-8"))["files"])
        except (ValueError, KeyError, TypeError):
            ours = set()
    if found - ours:
        names = ", ".join(sorted(found - ours)[:5])
        raise ValueError(f"{target}: expected a new or empty directory or an artifact to replace, found {names} in it")
