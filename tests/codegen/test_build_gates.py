"""What a build refuses to publish."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from gpu.cases import example

from attncc import compiler
from attncc.codegen.config import KernelConfig
from attncc.codegen.cubin import CubinFacts

pytest.importorskip("cutlass")
from attncc.codegen import build

KINDS = ["tensormap", "ptr", "i32"]
GOOD = CubinFacts(90, ((48, 128), (176, 8), (184, 4)), (384, 1, 1), 168, 0)
SASS = {"HGMMA": 40, "UTMALDG": 8, "UTMASTG": 2, "LDL": 0, "STL": 0, "R2UR": 30}


@pytest.fixture(scope="module")
def config() -> KernelConfig:
    case = example("causal", "causal")
    options = compiler._options(128, None, "bf16", None, "dense", None, "sm_90a")
    return compiler.generated(compiler.specialized(case.load(), options), options)[1]


def test_a_sound_kernel_passes(config: KernelConfig) -> None:
    build.check("k", config, KINDS, KINDS, "sm_90a", GOOD, SASS, build.SHARED_BYTES)


@pytest.mark.parametrize(
    "found, reason",
    [
        ({"target": "sm_100a"}, "built for sm_100a"),
        ({"facts": replace(GOOD, target=100)}, r"\(sm_100\), not sm_90a"),
        ({"kinds": ["tensormap", "i32", "ptr"]}, "kernel parameters are"),
        ({"facts": replace(GOOD, params=GOOD.params[:2])}, "kernel parameters are"),
        ({"facts": replace(GOOD, block=(256, 1, 1))}, "block is"),
        ({"sass": {**SASS, "HGMMA": 0}}, "no HGMMA instruction"),
        ({"sass": {**SASS, "UTMALDG": 0}}, "no UTMALDG instruction"),
    ],
)
def test_gates(config: KernelConfig, found: dict[str, Any], reason: str) -> None:
    given = {"kinds": KINDS, "target": "sm_90a", "facts": GOOD, "sass": SASS, "smem": 0, **found}
    with pytest.raises(build.BuildError, match=reason):
        build.check("k", config, KINDS, **given)


@pytest.mark.parametrize(
    "found", [{"facts": replace(GOOD, frame_bytes=8)}, {"sass": {**SASS, "STL": 1}}, {"sass": {**SASS, "LDL": 1}}]
)
def test_spills_are_refused(config: KernelConfig, found: dict[str, Any]) -> None:
    with pytest.raises(build.SpillError, match="spills registers with 128 keys a block"):
        build.check("k", config, KINDS, KINDS, "sm_90a", **{"facts": GOOD, "sass": SASS, "smem": 0, **found})


def test_too_much_shared_memory_is_refused(config: KernelConfig) -> None:
    with pytest.raises(build.DoesNotFit, match="needs 232449 bytes of shared memory with 128 keys a block, of 232448"):
        build.check("k", config, KINDS, KINDS, "sm_90a", GOOD, SASS, 232449)


def test_a_spilling_functor_is_built_with_fewer_keys_a_block(
    config: KernelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But first with registers shared out otherwise."""
    tried: list[tuple[int, int]] = []
    error: type[build.DoesNotFit] = build.SpillError

    def build_once(emitted: object, config: KernelConfig, work_dir: str) -> tuple[dict[str, Any], dict[str, bytes]]:
        tried.append((config.tile_kv, config.registers[1]))
        if config.tile_kv > 64:
            raise error("too much")
        return {}, {}

    monkeypatch.setattr(build, "build_once", build_once)
    build.build(None, config, "")  # type: ignore[arg-type]
    assert tried == [(128, 240), (112, 240), (96, 240), (64, 240)]
    tried.clear()
    config = replace(config, ahead="k")
    build.build(None, config, "")  # type: ignore[arg-type]
    assert tried == [(keys, n) for keys in (128, 112, 96) for n in (224, 232)] + [(64, 224)]
    tried.clear()
    error = build.DoesNotFit  # of shared memory: registers don't help
    build.build(None, config, "")  # type: ignore[arg-type]
    assert tried == [(keys, 224) for keys in (128, 112, 96, 64)]
    error = build.SpillError
    monkeypatch.setattr(config.__class__, "narrower", lambda self: None)
    with pytest.raises(build.SpillError):
        build.build(None, config, "")  # type: ignore[arg-type]
