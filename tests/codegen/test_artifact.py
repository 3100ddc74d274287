"""Artifact directories: written whole or not at all, and every kind of damage named when they are read."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from attncc.codegen.artifact import write_artifact
from attncc.runtime.artifact import digest, read_artifact

FILES = {"forward.cubin": b"\x7fELF code", "forward.ptx": b".version 8.8", "functors.py": b"def score(): ..."}


def manifest(**changes):
    kernel = {"cubin": "forward.cubin", "entry": "e", "params": [], "block": [384, 1, 1], "smem": 1, "tma": {}}
    return {
        "attncc": "0.1.0", "dsl": "4.8.1", "arch": "sm_90a", "variant": {"name": "causal"}, "head_dim_qk": 128,
        "head_dim_vo": 128, "dtype": "bf16", "layout": "dense", "scan": "softmax", "const": {"cap": float("inf")},
        "scalars": [], "tensors": [], "kernels": {"forward": kernel}, **changes,
    }  # fmt: skip


@pytest.fixture
def written(tmp_path):
    write_artifact(tmp_path / "a", manifest(), FILES)
    return tmp_path / "a"


def rewrite(path, **changes):
    """Change the manifest and make its digest right again: what another version of attncc might write."""
    m = json.loads((path / "manifest.json").read_text()) | changes
    m["digest"] = digest(m)
    (path / "manifest.json").write_text(json.dumps(m))


def test_what_is_written_is_read(written):
    found = read_artifact(written)
    assert found.cubins == {"forward": FILES["forward.cubin"]}
    assert found.manifest["variant"] == {"name": "causal"}
    assert found.manifest["const"] == {"cap": float("inf")}
    assert found.manifest["schema"] == 1
    assert found.path == written
    assert {p.name for p in written.iterdir()} == {"manifest.json", *FILES}
    assert [p.name for p in written.parent.iterdir()] == ["a"]


def test_an_artifact_may_be_moved_and_reformatted(written, tmp_path):
    moved = tmp_path / "deep" / "b"
    shutil.copytree(written, moved)
    m = json.loads((moved / "manifest.json").read_text())
    (moved / "manifest.json").write_text(json.dumps(dict(reversed(m.items()))))
    assert read_artifact(str(moved)).manifest == read_artifact(written).manifest


def edit(name, content):
    return lambda path: (path / name).write_bytes(content)


DAMAGE = {
    "cubin: another byte": (edit("forward.cubin", b"\x7fELF codE"), "forward.cubin is not the file that was built"),
    "cubin: truncated": (edit("forward.cubin", b"\x7fELF"), "forward.cubin is not the file that was built"),
    "cubin: missing": (lambda path: (path / "forward.cubin").unlink(), "cannot read forward.cubin: No such file"),
    "ptx: edited": (edit("forward.ptx", b""), "forward.ptx is not the file that was built"),
    "manifest: missing": (lambda path: (path / "manifest.json").unlink(), "cannot read manifest.json: No such file"),
    "manifest: not JSON": (edit("manifest.json", b"{"), "manifest.json is not JSON"),
    "manifest: not UTF-8": (edit("manifest.json", b"\xff\xfe"), "manifest.json is not JSON"),
    "manifest: endless": (edit("manifest.json", b"[" * 100_000), "manifest.json is not JSON"),
    "manifest: something else": (edit("manifest.json", b"[]"), "manifest.json is not an attncc manifest"),
    "manifest: edited": (
        lambda path: (path / "manifest.json").write_text((path / "manifest.json").read_text().replace("128", "256")),
        "manifest.json was changed after it was written",
    ),
    "another schema": (lambda path: rewrite(path, schema=2), "manifest schema 2, this attncc reads schema 1"),
    "another target": (lambda path: rewrite(path, arch="sm_100a"), "built for sm_100a, this attncc runs sm_90a"),
    "a field short": (lambda path: rewrite(path, scalars=None), "scalars: expected list, found NoneType"),
    "no such cubin": (
        lambda path: rewrite(path, files={}),
        "kernel forward names forward.cubin, which the manifest doesn't list",
    ),
    "a path out of it": (lambda path: rewrite(path, files={"../x": ""}), "leads out of the directory"),
    "a kernel that isn't": (lambda path: rewrite(path, kernels={"forward": 1}), "kernels.forward is not an object"),
    "a kernel's field short": (
        lambda path: rewrite(path, kernels={"forward": {"cubin": "forward.cubin"}}),
        "kernels.forward.entry: expected str, found nothing",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named(written, damage):
    harm, says = DAMAGE[damage]
    harm(written)
    with pytest.raises(ValueError) as e:
        read_artifact(written)
    assert says in str(e.value)
    assert str(written) in str(e.value)


def test_a_directory_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="expected a directory written by `attncc build`"):
        read_artifact(tmp_path / "nowhere")


def test_an_artifact_is_replaced_whole(written):
    write_artifact(written, manifest(dtype="f16"), {"forward.cubin": b"new"})
    assert read_artifact(written).manifest["dtype"] == "f16"
    assert {p.name for p in written.iterdir()} == {"manifest.json", "forward.cubin"}
    assert [p.name for p in written.parent.iterdir()] == ["a"]


def test_an_empty_directory_is_filled(tmp_path):
    (tmp_path / "out").mkdir()
    write_artifact(tmp_path / "out", manifest(), FILES)
    read_artifact(tmp_path / "out")


@pytest.mark.parametrize("beside", [False, True])
def test_other_files_are_never_replaced(written, beside):
    target = written if beside else written.parent / "mine"
    target.mkdir(exist_ok=True)
    (target / "thesis.tex").write_text("years of work")
    with pytest.raises(
        ValueError, match=r"expected a new or empty directory or an artifact to replace, found thesis\.tex"
    ):
        write_artifact(target, manifest(), FILES)
    assert (target / "thesis.tex").read_text() == "years of work"


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(ValueError, match="out: expected a directory, found a file"):
        write_artifact(tmp_path / "out", manifest(), FILES)


def test_a_failed_write_leaves_the_old_artifact_and_nothing_else(written, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(OSError, match="disk full"):
        write_artifact(written, manifest(dtype="f16"), FILES)
    assert read_artifact(written).manifest["dtype"] == "bf16"
    assert [p.name for p in written.parent.iterdir()] == ["a"]
