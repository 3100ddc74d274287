"""Every example checks, reads like one, runs on the reference, and (where kernels take it) reaches a functor module."""

from __future__ import annotations

import importlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attncc import compiler
from attncc.codegen.limits import refused
from attncc.diagnostics import AttnError
from attncc.ir.nodes import Variant
from attncc.ir.text import parse_variant, print_variant
from attncc.random_inputs import Shape, random_inputs

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "examples").glob("*.attn"))
ALL = [(path, v) for path in FILES for v in compiler.variants(path)]
SHAPES = [Shape(2, 7, 45, 4, 2, 16, 24), Shape(1, 33, 20, 3, 1, 16, 16), Shape(2, 1, 64, 2, 2, 8, 16),
          Shape(1, 3, 0, 2, 1, 8, 8)]  # fmt: skip
DIMS = {"qwen3_next": (256, 256), "deepseek_v3_prefill": (192, 128)}  # of examples that turn so many features
SCALARS: dict[str, object] = {"window": 9, "chunk": 10, "width": 8, "radius": 1, "block": 6, "globals": 2, "step": 3}


def name_of(x: Any) -> str:
    return x.name if isinstance(x, Variant) else x.stem if isinstance(x, Path) else str(x)


def buildable(variant: Variant) -> bool:
    return not refused(compiler.for_kernels(variant), "dense")


def test_there_is_much_to_learn_from() -> None:
    assert len(FILES) >= 20
    slots = {slot for _, v in ALL for slot, _ in v.spans}
    assert {"scale", "f_q", "f_k", "f_v", "f_logits", "mask", "scan", "epilogue"} <= slots
    assert any(v.domain for _, v in ALL) and any(v.emits for _, v in ALL)
    assert sum(not buildable(v) for _, v in ALL) < len(ALL) // 3


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_files_are_commented_and_narrow(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert lines[0].startswith("# ")
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize("path, variant", ALL, ids=name_of)
def test_variant_has_a_docstring_and_prints(path: Path, variant: Variant) -> None:
    assert variant.doc and len(variant.doc) > 20
    assert parse_variant(print_variant(variant)) == variant


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("path, variant", ALL, ids=name_of)
def test_runs_on_the_reference(path: Path, variant: Variant, shape: Shape) -> None:
    if variant.name in DIMS:
        shape = replace(shape, head_dim_qk=DIMS[variant.name][0], head_dim_vo=DIMS[variant.name][1])
    mine = {p.name for p in variant.scalars if not p.const}
    given = {n: x for n, x in SCALARS.items() if n in mine}
    x = random_inputs(variant, shape, dtype=torch.float32, device="cpu", seed=3, given=given)
    reference = compiler.reference(
        path, variant=variant.name, head_dim=shape.head_dim_qk, head_dim_vo=shape.head_dim_vo
    )
    result = reference(x.q, x.k, x.v, return_lse=variant.scan.kind == "softmax", **x.params)
    out = result[0] if isinstance(result, tuple) else result
    assert out.shape == (*x.q.shape[:3], shape.head_dim_vo) and bool(out.isfinite().all())
    if variant.scan.kind == "softmax":
        assert result[1].shape == x.q.shape[:3] and not result[1].isnan().any()
    if variant.emits:
        assert set(result[-1]) == {e.name for e in variant.emits}


@pytest.mark.parametrize("path, variant", ALL, ids=name_of)
def test_reaches_a_module_or_is_refused_with_the_line(path: Path, variant: Variant) -> None:
    if buildable(variant):
        text = compiler.show(path, "py", variant=variant.name, head_dim=128)
        compile(text, "functors.py", "exec")
        return
    with pytest.raises(AttnError, match=rf"{path.name}:\d+:\d+: error: kernels can't .*\n.*\n.*\nnearest: "):
        compiler.show(path, "py", variant=variant.name, head_dim=128)


@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("*.py")), ids=name_of)
def test_scripts_run(script: Path, tmp_path: Path, kernel_cache: Path) -> None:
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout and not run.stderr


class ReferenceAttention:
    """What a serving loop needs of BatchAttention, by the reference; `wrong` changes each plan."""

    def __init__(self, head_dim: int, wrong: Any = None):
        self.oracle = compiler.reference(ROOT / "examples" / "causal.attn", variant="causal", head_dim=head_dim)
        self.wrong = wrong or (lambda *table: table)

    def plan(self, *table: torch.Tensor) -> None:
        self.table = self.wrong(*table)

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return self.oracle.paged(q, kv, *self.table).to(q.dtype)


@torch.inference_mode()
def test_the_serving_loop_gives_the_tokens_of_the_model_without_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, without its graph; and it notices where a page or a key is not the right one."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    loop = importlib.import_module("decode_loop")
    small = {"LAYERS": 2, "WIDTH": 64, "HEADS": 4, "KV_HEADS": 2, "HEAD_DIM": 16, "VOCABULARY": 50, "CHUNK": 8}
    for name, value in {**small, "PAGE_SIZE": 4}.items():
        monkeypatch.setattr(loop, name, value)
    torch.manual_seed(5)
    prompts = [torch.randint(50, (n,)).tolist() for n in (1, 8, 21, 30)]

    def worst(wrong: Any = None) -> float:
        model = loop.Model("cpu", torch.float32)
        server = loop.Server(model, loop.PagedCache(model, 4, 40), ReferenceAttention(16, wrong))
        first = server.prefill(prompts)
        following, _ = server.decode(first, 5)
        tokens = torch.cat([first[None], following]).T.tolist()
        return max(loop.surprise(model, p, t) for p, t in zip(prompts, tokens, strict=True))

    assert worst() < 1e-3
    assert worst(lambda qo, pages, ids, last: (qo, pages, ids.flip(0), last)) > 0.2
    assert worst(lambda qo, pages, ids, last: (qo, pages, ids, (last - 1).clamp(min=1))) > 0.2
