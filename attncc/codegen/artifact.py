"""Writing an artifact directory, whole or not at all.  Reading one is the runtime's part (runtime/artifact.py)."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attncc.outputs import refuse_others
from attncc.runtime.artifact import MANIFEST, SCHEMA, digest


def write_artifact(path: str | Path, manifest: Mapping[str, Any], files: Mapping[str, bytes]) -> dict[str, Any]:
    """Write `files` and the manifest to directory `path`; return the manifest as written.

    It gains the schema version, the sha256 of every file, and its own digest.  The directory appears under its name
    only when complete.  Whatever artifact was there is replaced; ValueError where `path` holds anything else.
    """
    target = Path(path)
    whole = {**manifest, "schema": SCHEMA, "files": {n: hashlib.sha256(c).hexdigest() for n, c in files.items()}}
    whole["digest"] = digest(whole)
    refuse_others(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.parent / f".{target.name}.{uuid.uuid4().hex}"
    fresh.mkdir()
    try:
        for name, content in files.items():
            (fresh / name).write_bytes(content)
        (fresh / MANIFEST).write_text(json.dumps(whole, indent=1), encoding="utf-8")
        _swap(fresh, target)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return whole


def _swap(fresh: Path, target: Path) -> None:
    """Rename `fresh` to `target`; what was there goes away."""
    if not target.exists() or not any(target.iterdir()):
        os.rename(fresh, target)  # rename(2) replaces an empty directory
        return
    old = fresh.with_name(f"{fresh.name}.old")
    os.rename(target, old)
    os.rename(fresh, target)
    shutil.rmtree(old, ignore_errors=True)
