"""Reading an artifact directory: a manifest and the files it names, checked before anything is used.

An artifact is self-contained: this module needs the standard library alone.  `manifest.json` carries the sha256 of
every file beside it and of itself (`digest`), so a truncated copy, an edited file or a file of another build is a
`ValueError` that says which, never a kernel that misbehaves.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCHEMA = 1
MANIFEST = "manifest.json"
ARCHITECTURES = {"sm_90a": (9, 0)}  # target -> the compute capability that runs it
REQUIRED = {
    "attncc": str, "dsl": str, "arch": str, "variant": dict, "head_dim_qk": int, "head_dim_vo": int, "dtype": str,
    "layout": str, "scan": str, "const": dict, "scalars": list, "tensors": list, "kernels": dict, "files": dict,
}  # fmt: skip
KERNEL_REQUIRED = {"cubin": str, "entry": str, "params": list, "block": list, "smem": int, "tma": dict}


@dataclass(frozen=True)
class Artifact:
    """A checked artifact: its manifest, and the cubin of every kernel by the kernel's name."""

    manifest: Mapping[str, Any]
    cubins: Mapping[str, bytes]
    path: Path


def digest(manifest: Mapping[str, Any]) -> str:
    """sha256 of the manifest's content, whatever its formatting; the field `digest` itself is left out."""
    content = {k: v for k, v in manifest.items() if k != "digest"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_artifact(path: str | Path) -> Artifact:
    """The artifact in directory `path`.

    Raises ValueError that names the directory and the first thing wrong with it: no manifest, another schema
    version, a target this runtime doesn't know, a missing file, a file whose content isn't what was built.
    """
    root = Path(path)
    manifest = _read_manifest(root)
    contents = {name: _read_file(root, name, sha) for name, sha in manifest["files"].items()}
    cubins = {}
    for name, kernel in manifest["kernels"].items():
        if kernel["cubin"] not in contents:
            raise ValueError(f"artifact {root}: kernel {name} names {kernel['cubin']}, which the manifest doesn't list")
        cubins[name] = contents[kernel["cubin"]]
    return Artifact(manifest, cubins, root)


def _read_manifest(root: Path) -> dict[str, Any]:
    if not root.is_dir():
        raise ValueError(f"artifact {root}: expected a directory written by `attncc build`, found none there")
    try:
        manifest = json.loads((root / MANIFEST).read_text(encoding="utf-8"))
    except OSError as e:
        inside = sorted(x.parent.name for x in root.glob(f"*/{MANIFEST}"))
        hint = f"; there are artifacts inside: {', '.join(inside)}" if inside else ""
        raise ValueError(f"artifact {root}: cannot read {MANIFEST}: {e.strerror}{hint}") from None
    except (ValueError, RecursionError):
        raise ValueError(f"artifact {root}: {MANIFEST} is not JSON: the artifact is damaged") from None
    if not isinstance(manifest, dict) or "schema" not in manifest:
        raise ValueError(f"artifact {root}: {MANIFEST} is not an attncc manifest")
    if manifest["schema"] != SCHEMA:
        raise ValueError(
            f"artifact {root}: manifest schema {manifest['schema']}, this attncc reads schema {SCHEMA}: build it again"
        )
    _require(root, manifest, REQUIRED, "")
    for name, kernel in manifest["kernels"].items():
        if not isinstance(kernel, dict):
            raise ValueError(f"artifact {root}: {MANIFEST}: kernels.{name} is not an object")
        _require(root, kernel, KERNEL_REQUIRED, f"kernels.{name}.")
    if manifest.get("digest") != digest(manifest):
        raise ValueError(f"artifact {root}: {MANIFEST} was changed after it was written (its digest doesn't match)")
    if manifest["arch"] not in ARCHITECTURES:
        raise ValueError(
            f"artifact {root}: built for {manifest['arch']}, this attncc runs {', '.join(ARCHITECTURES)}"
        )  # fmt: skip
    return manifest


def _require(root: Path, table: Mapping[str, Any], fields: Mapping[str, type], prefix: str) -> None:
    for name, kind in fields.items():
        if not isinstance(table.get(name), kind):
            found = "nothing" if name not in table else type(table[name]).__name__
            raise ValueError(f"artifact {root}: {MANIFEST}: {prefix}{name}: expected {kind.__name__}, found {found}")


def _read_file(root: Path, name: str, sha: str) -> bytes:
    if Path(name).name != name:
        raise ValueError(f"artifact {root}: file name {name!r} leads out of the directory")
    try:
        content = (root / name).read_bytes()
    except OSError as e:
        raise ValueError(f"artifact {root}: cannot read {name}: {e.strerror}") from None
    if hashlib.sha256(content).hexdigest() != sha:
        raise ValueError(f"artifact {root}: {name} is not the file that was built (its sha256 doesn't match)")
    return content
