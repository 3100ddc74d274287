"""Built kernels on disk, by content: an entry's key is a hash of all that its kernel depends on.

The directory is ATTNCC_CACHE_DIR, else ~/.cache/attncc.  An entry is an artifact directory that appears under its key
when complete.  A lock file per key makes many processes build an entry once; a lock dies with its holder.  An entry
that is damaged, or that was copied from another key, is rebuilt with a warning.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attncc.paths import cache_dir
from attncc.runtime.artifact import MANIFEST, Artifact, read_artifact

COMPILER_PARTS = ("frontend", "ir", "codegen")  # beside compiler.py, what can change a kernel (not ir/reference*)


def key_of(fields: Mapping[str, Any]) -> str:
    """The key of an entry: sha256 over `fields` (JSON values, order free) and the compiler's own text."""
    text = json.dumps({**fields, "compiler": fingerprint()}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def fingerprint() -> str:
    """sha256 over the compiler's own sources, so that a changed compiler never serves an older one's kernels."""
    package = os.path.dirname(__file__)
    files = [os.path.join(package, "compiler.py")]
    for part in COMPILER_PARTS:
        for folder, _, names in os.walk(os.path.join(package, part)):  # pathlib would take three times as long
            names = [n for n in names if n.endswith((".py", ".lark")) and not n.startswith("reference")]
            files += [os.path.join(folder, n) for n in names]
    found = hashlib.sha256()
    for file in sorted(files):
        with open(file, "rb") as f:
            text = f.read()
        found.update(f"{os.path.relpath(file, package)}\0{len(text)}\0".encode() + text)
    return found.hexdigest()


Build = Callable[[], tuple[Mapping[str, Any], Mapping[str, bytes]]]


def get_or_build(key: str, build: Build) -> Artifact:
    """The entry of `key`, built by `build() -> (manifest, files)` where there is none that holds.

    Of many processes that ask at once, one builds and the others wait for it.  An exception of `build` propagates and
    leaves nothing behind.  Where the directory can't be written, the entry goes to a temporary one, with a warning.
    """
    root = cache_dir()
    found, reason = _look(root / key, key)
    if found is not None:
        return found
    if not _writable(root):
        root = _temporary_root(str(root))
        found, reason = _look(root / key, key)
        if found is not None:
            return found
    from filelock import FileLock

    with FileLock(root / f"{key}.lock"):
        found, reason = _look(root / key, key)  # another process may have built it while this one waited
        if found is not None:
            return found
        if reason is not None:
            warnings.warn(f"attncc cache: rebuilding an entry that doesn't hold: {reason}", stacklevel=2)
        manifest, files = build()
        _publish(root, key, {**manifest, "key": key}, files)
    return read_artifact(root / key)


def _look(entry: Path, key: str) -> tuple[Artifact | None, str | None]:
    """(the entry, None), (None, None) where there is none, (None, why) where it doesn't hold."""
    if not (entry / MANIFEST).exists():
        return None, f"{entry}: incomplete" if entry.exists() else None
    try:
        found = read_artifact(entry)
    except ValueError as e:
        return None, str(e)
    if found.manifest.get("key") != key:
        return None, f"{entry}: it belongs to another key"
    return found, None


def _publish(root: Path, key: str, manifest: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
    """Put the entry in place.  The caller holds the key's lock: what lies about of this key is a dead builder's."""
    from attncc.codegen.artifact import write_artifact

    for left_over in [root / key, *root.glob(f".{key}.*")]:
        if left_over.is_dir() and not left_over.is_symlink():
            shutil.rmtree(left_over)
        elif left_over.exists() or left_over.is_symlink():
            left_over.unlink()
    write_artifact(root / key, manifest, files)


def _writable(root: Path) -> bool:
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            return True
    except OSError:
        return False


@functools.cache
def _temporary_root(unwritable: str) -> Path:
    warnings.warn(
        f"attncc cache: cannot write to {unwritable}: kernels built by this process go to a temporary directory and "
        f"are built again next time; set ATTNCC_CACHE_DIR to a writable directory",
        RuntimeWarning,
        stacklevel=4,
    )
    root = Path(tempfile.mkdtemp(prefix="attncc-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root
