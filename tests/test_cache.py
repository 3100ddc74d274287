"""The cache: one build for many askers, nothing half-written, damage rebuilt, other directories honoured."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import time
import warnings
from pathlib import Path

import pytest

from attncc import cache
from attncc.runtime.artifact import read_artifact

FILES = {"forward.cubin": b"code", "forward.ptx": b"text", "functors.py": b""}
KEY = "0" * 64


def manifest(**changes):
    kernel = {"cubin": "forward.cubin", "entry": "e", "params": [], "block": [384, 1, 1], "smem": 1, "tma": {}}
    return {
        "attncc": "0.1.0", "dsl": "4.8.1", "arch": "sm_90a", "variant": {"name": "causal"}, "head_dim_qk": 128,
        "head_dim_vo": 128, "dtype": "bf16", "layout": "dense", "scan": "softmax", "const": {},
        "scalars": [], "tensors": [], "kernels": {"forward": kernel}, **changes,
    }  # fmt: skip


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNCC_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Builder:
    """Counts builds in a file, so that processes can count together."""

    def __init__(self, log: Path, seconds: float = 0.0, **changes):
        self.log, self.seconds, self.changes = log, seconds, changes

    def __call__(self):
        with self.log.open("a") as f:
            f.write(f"{os.getpid()}\n")
        time.sleep(self.seconds)
        return manifest(**self.changes), FILES

    @property
    def builds(self):
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


@pytest.fixture
def build(tmp_path):
    return Builder(tmp_path / "builds")


def test_an_entry_is_built_once(root, build):
    first = cache.get_or_build(KEY, build)
    again = cache.get_or_build(KEY, build)
    assert build.builds == 1
    assert first.manifest == again.manifest
    assert first.path == root / KEY
    assert first.manifest["key"] == KEY


def test_the_directory_is_read_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("ATTNCC_CACHE_DIR", str(tmp_path / "here"))
    assert cache.cache_dir() == tmp_path / "here"
    monkeypatch.delenv("ATTNCC_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.cache_dir() == tmp_path / ".cache" / "attncc"


def test_keys_differ_where_anything_does():
    fields = {"source": "text", "options": {"const": {"cap": 50}, "head_dim": 128}}
    keys = {
        cache.key_of(fields),
        cache.key_of(fields | {"source": "text "}),
        cache.key_of(fields | {"options": {"const": {"cap": 50.0}, "head_dim": 128}}),
        cache.key_of(fields | {"options": {"const": {"cap": True}, "head_dim": 128}}),
        cache.key_of(fields | {"options": {"const": {}, "head_dim": 128}}),
    }
    assert len(keys) == 5
    assert cache.key_of(dict(reversed(fields.items()))) == cache.key_of(fields)


def test_keys_differ_where_the_compiler_does(monkeypatch, tmp_path):
    copy = tmp_path / "attncc"
    shutil.copytree(Path(cache.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))

    def fingerprint():
        monkeypatch.setattr(cache, "__file__", str(copy / "cache.py"))
        return cache.fingerprint.__wrapped__()

    found = [fingerprint()]
    assert found[0] == cache.fingerprint()
    for name in ("ir/nodes.py", "frontend/grammar.lark", "codegen/device/forward.py", "compiler.py"):
        with (copy / name).open("a") as f:
            f.write("\n# changed\n")
        found.append(fingerprint())
    assert len(set(found)) == 5
    for name in ("cli.py", "ir/reference.py", "runtime/kernel.py"):  # these say nothing about kernels
        (copy / name).write_text("# changed")
    assert fingerprint() == found[-1]
    (copy / "ir/nodes.py").rename(copy / "ir/knots.py")
    assert fingerprint() not in found


def damage_cubin(entry):
    (entry / "forward.cubin").write_bytes(b"c0de")


def damage_manifest(entry):
    (entry / "manifest.json").write_text((entry / "manifest.json").read_text().replace("bf16", "f16"))


def drop_manifest(entry):
    (entry / "manifest.json").unlink()


def become_a_file(entry):
    shutil.rmtree(entry)
    entry.write_text("not a directory")


@pytest.mark.parametrize("harm", [damage_cubin, damage_manifest, drop_manifest, become_a_file])
def test_a_damaged_entry_is_rebuilt_with_a_warning(root, build, harm):
    cache.get_or_build(KEY, build)
    harm(root / KEY)
    with pytest.warns(UserWarning, match="rebuilding an entry that doesn't hold"):
        found = cache.get_or_build(KEY, build)
    assert found.cubins == {"forward": b"code"}
    assert build.builds == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.get_or_build(KEY, build)
    assert build.builds == 2


def test_an_entry_of_another_key_is_rebuilt(root, build):
    cache.get_or_build("1" * 64, build)
    shutil.copytree(root / ("1" * 64), root / KEY)
    with pytest.warns(UserWarning, match="it belongs to another key"):
        assert cache.get_or_build(KEY, build).manifest["key"] == KEY
    assert build.builds == 2


def test_a_failed_build_leaves_nothing(root):
    def fail():
        raise ValueError("no kernel")

    for _ in range(2):
        with pytest.raises(ValueError, match="no kernel"):
            cache.get_or_build(KEY, fail)
    assert {p.name for p in root.iterdir()} <= {f"{KEY}.lock"}


def test_what_a_killed_builder_left_is_cleared(root, build):
    left = root / f".{KEY}.123abc"
    left.mkdir(parents=True)
    (left / "forward.cubin").write_bytes(b"half")
    (root / f".{'1' * 64}.123abc").mkdir()  # another key's builder may be alive
    cache.get_or_build(KEY, build)
    assert not left.exists()
    assert (root / f".{'1' * 64}.123abc").exists()


def test_a_directory_that_cannot_be_written_is_replaced_by_a_temporary_one(tmp_path, monkeypatch, build):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("ATTNCC_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.warns(RuntimeWarning, match="cannot write to .*; set ATTNCC_CACHE_DIR to a writable directory"):
        found = cache.get_or_build(KEY, build)
    assert found.path.exists()
    cache.get_or_build(KEY, build)
    assert build.builds == 1


def test_a_read_only_cache_serves_what_it_has(root, build, monkeypatch):
    cache.get_or_build(KEY, build)
    monkeypatch.setattr(cache, "_writable", lambda _: False)  # root may write anywhere
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.get_or_build(KEY, build).path == root / KEY


# ---------------------------------------------------------------------- many processes


def ask(log, seconds, barrier, results):
    barrier.wait()
    found = cache.get_or_build(KEY, Builder(log, seconds))
    results.put((found.manifest["key"], found.cubins["forward"]))


@pytest.fixture
def processes():
    context = multiprocessing.get_context("fork")
    started = []
    yield context, started
    for p in started:
        if p.is_alive():
            p.kill()
        p.join()


def test_many_processes_build_once(root, tmp_path, processes):
    context, started = processes
    barrier, results = context.Barrier(6), context.Queue()
    for _ in range(6):
        started.append(context.Process(target=ask, args=(tmp_path / "builds", 0.3, barrier, results)))
        started[-1].start()
    assert [results.get(timeout=30) for _ in range(6)] == [(KEY, b"code")] * 6
    assert Builder(tmp_path / "builds").builds == 1


def test_a_dead_builder_blocks_nobody(root, tmp_path, processes, build):
    context, started = processes
    barrier, results = context.Barrier(1), context.Queue()
    started.append(context.Process(target=ask, args=(tmp_path / "dying", 60, barrier, results)))
    started[0].start()
    dying = Builder(tmp_path / "dying")
    while not dying.builds:
        time.sleep(0.01)
    os.kill(started[0].pid, signal.SIGKILL)
    started[0].join()
    begun = time.monotonic()
    assert cache.get_or_build(KEY, build).manifest["key"] == KEY
    assert time.monotonic() - begun < 5
    assert build.builds == 1


def test_readers_never_see_half_an_entry(root, tmp_path, processes):
    """One process publishes over and over; another must always read a whole entry or none."""
    context, started = processes

    def publish():
        while True:
            cache._publish(root, KEY, manifest(key=KEY), FILES)
            time.sleep(0.002)

    root.mkdir()
    started.append(context.Process(target=publish))
    started[0].start()
    whole, looks, end = 0, 0, time.monotonic() + 30
    while (whole < 50 or looks < 300) and time.monotonic() < end:
        found, reason = cache._look(root / KEY, KEY)
        whole, looks = whole + (found is not None), looks + 1
        # Between removal and renaming the directory may be gone; what is there is never wrong.
        assert reason is None or "doesn't match" not in reason
    assert whole >= 50


def test_a_hit_is_quick_and_needs_neither_filelock_nor_the_compiler(root, build):
    import subprocess
    import sys

    cache.get_or_build(KEY, build)
    script = f"""
import sys
from attncc import cache
cache.get_or_build({KEY!r}, None)
loaded = {{m.partition(".")[0] for m in sys.modules}}
print(sorted(loaded & {{"filelock", "lark", "cutlass", "torch", "numpy"}}))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_entries_are_artifacts(root, build):
    cache.get_or_build(KEY, build)
    assert read_artifact(root / KEY).cubins == {"forward": b"code"}
    assert json.loads((root / KEY / "manifest.json").read_text())["key"] == KEY
