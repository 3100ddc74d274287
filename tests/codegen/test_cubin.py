"""The cubin reader against the assembler's own disassembler."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from attncc import compiler
from attncc.codegen.cubin import OPCODES, count_instructions, disassemble, ptx_parameters, read_cubin

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, Path]:
    path = tmp_path_factory.mktemp("artifact")
    return compiler.build_artifact(EXAMPLES / "causal.attn", path, variant="causal", head_dim=128), path


def test_opcodes_are_what_the_disassembler_says(built: tuple[dict, Path]) -> None:
    manifest, path = built
    cubin = (path / "forward.cubin").read_bytes()
    listing = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\w+)", disassemble(cubin))
    said = Counter(listing)
    assert count_instructions(cubin, manifest["kernels"]["forward"]["entry"]) == {op: said[op] for op in OPCODES}
    assert said["HGMMA"] >= 32 and said["UTMALDG"] >= 6 and said["LDL"] == said["STL"] == 0


def test_facts_agree_with_ptx_and_manifest(built: tuple[dict, Path]) -> None:
    manifest, path = built
    kernel = manifest["kernels"]["forward"]
    entry, kinds, target = ptx_parameters((path / "forward.ptx").read_text())
    facts = read_cubin((path / "forward.cubin").read_bytes(), entry)
    assert (entry, target, facts.target) == (kernel["entry"], "sm_90a", 90)
    assert kinds == [p["kind"] for p in kernel["params"]]
    assert list(facts.params) == [(p["offset"], p["size"]) for p in kernel["params"]]
    assert list(facts.block) == kernel["block"] and facts.frame_bytes == 0


def test_main_loops_stay_uniform(built: tuple[dict, Path]) -> None:
    """A divergent loop carries every wgmma descriptor through vector registers: 180 R2UR and more."""
    assert built[0]["kernels"]["forward"]["r2ur"] < 64


def test_other_files_are_refused() -> None:
    with pytest.raises(ValueError, match="not an ELF"):
        read_cubin(b"MZ" + bytes(100), "f")
