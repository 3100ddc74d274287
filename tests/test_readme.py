"""Every snippet of README.md runs, and what it quotes is what is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from runtime.fake_driver import FakeDriver

import attncc
from attncc.cli import main
from attncc.codegen.limits import as_table
from attncc.frontend.builtins import _SCALINGS as SCALINGS
from attncc.frontend.names import FUNCTIONS

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def blocks(language: str) -> list[str]:
    return [text for found, text in BLOCKS if found == language]


def test_every_block_is_of_a_kind_that_is_tested() -> None:
    assert {language for language, _ in BLOCKS} == {"attn", "python", "sh", "text"}


def test_quoted_files_are_the_files() -> None:
    for text in blocks("attn"):
        name = re.search(r"`(examples/\w+\.attn)`:\n\n```attn\n" + re.escape(text), README)
        assert name is not None and (ROOT / name[1]).read_text(encoding="utf-8") == text


@pytest.mark.slow
def test_python_snippets_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kernel_cache: Path) -> None:
    """In order, sharing names, as a reader would type them.  Without a GPU each kernel is built all the same, and the
    reference stands in for it when it is called."""
    import torch

    on_gpu = torch.cuda.is_available()
    build, planner = attncc.compile, attncc.BatchAttention
    kernels: dict[int, Any] = {}

    def build_and_stand_in(source: str, **options: Any) -> Any:
        kernel, reference = build(source, **options), attncc.reference(source, **options, compute_dtype=torch.float32)
        assert all(k["spill_bytes"] == 0 for k in kernel.manifest["kernels"].values())
        kernels[id(reference)] = kernel
        return reference

    class StandIn:
        """The BatchAttention of the kernel takes every plan and run, by a driver that launches nothing; the reference
        computes."""

        def __init__(self, reference: Any, **options: Any):
            self.reference = reference
            self.real = planner(kernels[id(reference)], driver=FakeDriver(), device="cpu", **options)

        def plan(self, *table: Any, **options: Any) -> None:
            self.real.plan(*table, **options)
            self.table = table

        def run(self, q: Any, kv: Any, **options: Any) -> Any:
            self.real.run(q, kv, **options)
            return self.reference.paged(q, kv, *self.table, **options)

    if not on_gpu:
        monkeypatch.setattr(attncc, "compile", build_and_stand_in)
        monkeypatch.setattr(attncc, "BatchAttention", StandIn)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    shapes = []
    for text in blocks("python"):
        exec(text if on_gpu else text.replace('"cuda"', '"cpu"'), names)
        shapes.append(tuple(names["lse"].shape))
    assert list(dict.fromkeys(shapes)) == [(2, 300, 16), (306, 32)] and float(names["error"]) < 5e-3
    assert names["causal"].manifest["variant"]["name"] == "causal"


@pytest.mark.slow
def test_commands_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kernel_cache: Path) -> None:
    import torch

    targets = set(re.findall(r"^\.PHONY:(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[0].split())
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    for line in "".join(blocks("sh")).splitlines():
        command, *arguments = line.split("#")[0].split()
        if command == "make":
            assert set(arguments) <= targets
            continue
        assert command == "attncc"
        result = CliRunner().invoke(main, arguments)
        needs_gpu = arguments[0] == "bench" and not torch.cuda.is_available()
        assert result.exit_code == (1 if needs_gpu else 0), result.output
        assert not needs_gpu or "needs a Hopper GPU" in result.output


def test_the_diagnostic_is_what_check_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = blocks("text")[0]
    monkeypatch.chdir(tmp_path)
    lines = [
        "attention a(window: i32):",
        "    let c = 50.0",
        "    f_logits = softcap(s, c)",
        "    mask = i - windw < j",
    ]
    (tmp_path / "softcap.attn").write_text("\n".join(lines) + "\n")
    result = CliRunner().invoke(main, ["check", "softcap.attn"])
    assert result.exit_code == 1 and result.stderr == shown


def test_targets_and_files_named_in_the_text_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make (?:TORCH=torch )?([\w-]+)`", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for path in re.findall(r"\]\((\w[\w./]*)\)|`((?:attncc|examples)/[\w./]+)`", README):
        assert (ROOT / (path[0] or path[1])).exists(), path


def test_every_function_of_the_language_is_there() -> None:
    page = README.split("## The language in a page")[1].split("\n## ")[0]
    assert set(FUNCTIONS) <= set(re.findall(r"\w+", page))
    for scaling, (required, optional) in SCALINGS.items():
        assert f"{scaling}({', '.join((*required, *optional))})" in page


def test_the_table_of_limits_is_the_one_in_the_code() -> None:
    begin, end = re.escape("<!-- limits:begin (python -m attncc.codegen.limits) -->\n"), "<!-- limits:end -->"
    shown = re.search(f"{begin}(.*){end}", README, re.DOTALL)
    how = "put what `python -m attncc.codegen.limits` prints between the markers of README.md"
    assert shown is not None and shown[1] == as_table() + "\n", how
