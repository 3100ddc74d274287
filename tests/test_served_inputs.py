"""Served batches of `attncc run` and `attncc bench`: values lie where plan and run look for them, in every layout."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ptx.serve import ServeDriver
from runtime.fake_driver import FakeDriver, served_artifact

import attncc
from attncc import benchmark, compiler
from attncc.diagnostics import Source
from attncc.random_inputs import Inputs, Shape, as_ragged, in_pages, random_batch, random_inputs, shorter
from attncc.runtime.kernel import Kernel
from attncc.trial import on_kernel, on_reference

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
# tensors over j, over iq, over positions (sorted ones, and bits), over b; and one that emits
VARIANTS = ["kv_scales:key_scales", "tree_verify:tree_verify", "packed_documents:packed_documents",
            "gated_output:gated_output", "prefix_lm:prefix_lm", "max_logit:max_logit"]  # fmt: skip
SHAPE = Shape(2, 9, 33, 4, 2, 16, 16)


def variant_of(name: str) -> tuple[Any, Any]:
    """(the variant, its reference)."""
    file, _, variant = name.partition(":")
    path = str(EXAMPLES / f"{file}.attn")
    found = next(v for v in compiler.variants(path) if v.name == variant)
    return found, attncc.reference(path, variant=variant, head_dim=16)


def results(reference: Any, x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    found = on_reference(reference, x)(return_lse=True, **x.params)
    return found[0], found[1]


def same(found: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.allclose(a, b.view(a.shape), rtol=1e-12, atol=1e-12) for a, b in zip(found, want, strict=True))


@pytest.mark.parametrize("name", VARIANTS)
def test_the_same_values_in_every_layout(name: str) -> None:
    variant, reference = variant_of(name)
    dense = random_inputs(variant, SHAPE, dtype=torch.float32, device="cpu", seed=1)
    want = results(reference, dense)
    ragged = as_ragged(variant, dense)
    assert same(want, results(reference, ragged))
    for size in (1, 5, 16, 40):
        assert same(want, results(reference, in_pages(variant, ragged, size, seed=2)))


@pytest.mark.parametrize("name", VARIANTS)
def test_random_batches(name: str) -> None:
    """One seed gives the same values in pages as ragged."""
    variant, reference = variant_of(name)
    lengths = [(0, 5), *shorter(SHAPE), (9, 33), (2, 0)]
    drawn: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", "seed": 3}
    ragged = random_batch(variant, lengths, SHAPE, **drawn)
    paged = random_batch(variant, lengths, SHAPE, page_size=8, **drawn)
    assert same(results(reference, ragged), results(reference, paged))
    keys = sum(kv for _, kv in lengths)
    used = paged.k.isfinite().all(-1).all(-1)
    assert int(used.sum()) == keys and not used.flatten().all()  # what no key has is NaN
    assert paged.table[1].tolist() == [0, 1, 6, 9, 10, 15, 15]
    assert paged.table[3][[0, 1, 2, 3, 4]].tolist() == [5, 1, 6, 4, 1]
    assert ragged.table[0].tolist() == [0, 0, 1, 5, 9, 18, 20]


def test_a_page_has_rows() -> None:
    variant, _ = variant_of("kv_scales:key_scales")
    for size in (0, 1048577):
        with pytest.raises(ValueError, match=f"page_size: expected 1 to 1048576, found {size}"):
            random_batch(variant, [(1, 1)], SHAPE, dtype=torch.float32, device="cpu", seed=0, page_size=size)


@pytest.mark.parametrize("page_size", [None, 16])
def test_batches_are_planned_and_run(page_size: int | None) -> None:
    """With the real BatchAttention, by a driver that records: it takes the table, the tensors and the scalars."""
    source = """
attention a(window: i32):
    tensor key_scale[j, g]: f32
    tensor gate[iq, h]: f32
    tensor doc[b, pos]: i32
    mask = i - window < j <= i and doc[b, i] == doc[b, j]
    f_logits = s * key_scale[j, g]
    epilogue = o * gate[iq, h]
"""
    (variant,) = compiler.variants(source)
    tensors = [(t.name, t.dims, t.dtype) for t in variant.tensors]
    driver = FakeDriver()
    made = served_artifact(page_size=page_size, scalars=[("window", "i32", None)], tensors=tensors)
    shape = Shape(1, 40, 100, 8, 2)
    lengths = [(40, 100), *shorter(shape)]
    x = random_batch(
        variant, lengths, shape, dtype=torch.bfloat16, device="cpu", seed=0, page_size=page_size, given={"window": 7}
    )
    run = on_kernel(Kernel(made, driver), x)
    assert run(return_lse=True, **x.params)[0].shape == (65, 8, 128)
    (launch,) = driver.launches
    assert launch.values["q"] == x.q.data_ptr() and launch.values["s.window"] == 7
    with pytest.raises(ValueError, match="window: expected 7 as in the plan, found 8"):
        run(**{**x.params, "window": 8})


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [None, 16])
def test_kernels_of_served_batches(page_size: int | None, kernel_cache: Path) -> None:
    """What `attncc run --backend cuda` does, in the interpreter."""
    options: dict[str, Any] = {"variant": "causal", "head_dim": 128}
    layout = {"layout": "ragged"} if page_size is None else {"layout": "paged", "page_size": page_size}
    path = str(EXAMPLES / "causal.attn")
    built = attncc.compile(path, **options, **layout).serving(layout["layout"], page_size)  # pyright: ignore
    driver = ServeDriver((built.path / "serve.ptx").read_text(), 2, 0, True)
    variant = next(v for v in compiler.variants(path) if v.name == "causal")
    shape = Shape(1, 20, 150, 4, 2)
    x = random_batch(
        variant, [(20, 150), *shorter(shape)], shape, dtype=torch.bfloat16, device="cpu", seed=0, page_size=page_size
    )
    driver.rows, driver.kv, driver.tensors = len(x.q), (x.k, x.v), {}
    out, lse = on_kernel(Kernel(built, driver), x)(return_lse=True)
    want, want_lse = results(attncc.reference(path, **options), x)
    assert float((out.double() - want).norm() / want.norm()) < 5e-3
    assert torch.allclose(lse.double(), want_lse, atol=1e-4)


# ---------------------------------------------------------------------------------------------------- bench


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Timing with the reference for kernels; `wrong` is added to what a planned run gives, `cudnn` is raised there."""
    told = SimpleNamespace(wrong=0.0, cudnn=None, layouts=[])

    def compile_(source: Source, **options: Any) -> Any:
        told.layouts.append((options["layout"], options["page_size"]))
        reference = attncc.reference(source, **options, compute_dtype=torch.float32)

        def call(q: Any, k: Any, v: Any, out: torch.Tensor, **params: Any) -> torch.Tensor:
            return out.copy_(reference(q, k, v, **params))

        call.reference = reference  # type: ignore[attr-defined]
        call.manifest = {"const": {}, "kernels": {"forward": {"causal_like": True}}}  # type: ignore[attr-defined]
        return call

    def run(kernel: Any, x: Inputs, out: torch.Tensor, **params: Any) -> torch.Tensor:
        return out.copy_(on_reference(kernel.reference, x)(**params) + told.wrong)

    def cudnn(inputs: Inputs, *, causal: bool) -> Any:
        def call() -> None:
            if told.cudnn is not None:
                raise told.cudnn

        return call

    monkeypatch.setattr(benchmark, "DEVICE", "cpu")
    monkeypatch.setattr(compiler, "compile", compile_)
    monkeypatch.setattr(benchmark, "on_kernel", lambda kernel, x: partial(run, kernel, x))
    monkeypatch.setattr(benchmark, "cudnn", cudnn)
    monkeypatch.setattr(benchmark, "rotated_rounds", lambda calls, rounds: {name: [float(len(name))] for name in calls})
    return told


def bench(name: str, shape: Shape, page_size: int | None = 16) -> benchmark.Row:
    file, _, variant = name.partition(":")
    source = Source.of(EXAMPLES / f"{file}.attn")
    found = next(v for v in compiler.variants(source) if v.name == variant)
    options = {"variant": variant, "head_dim": 16, "head_dim_vo": None, "dtype": "bf16", "const": {}}
    options |= {"layout": "ragged" if page_size is None else "paged", "page_size": page_size}
    return benchmark.bench_served(source, found, shape, options)


def test_bench_of_prefill(on_cpu: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    row = bench("causal:causal", Shape(2, 40, 40, 4, 2, 16, 16))
    assert list(row.milliseconds) == ["attncc", "dense", "cudnn causal"] and row.notes == () and row.bytes is None
    assert row.flops == 2 * (2 * 4 * 40 * 41 / 2) * 32
    assert on_cpu.layouts == [("paged", 16), ("dense", None)]
    benchmark.show([row])
    head, line = capsys.readouterr().out.splitlines()
    assert head.split("only")[1].split() == [
        "TFLOP/s", "GB/s", "ms", "cuDNN", "ms", "of", "plain", "×", "dense", "ms", "×"
    ]  # fmt: skip
    title, *cells = line.rsplit(maxsplit=8)
    assert title == "causal B2 S40 4/2 pages of 16"
    assert cells == ["0", "–", "6.000", "12.000", "causal", "2.00", "5.000", "0.83"]


def test_bench_of_decode(on_cpu: SimpleNamespace) -> None:
    row = bench("causal:sliding_window", Shape(3, 1, 50, 4, 2, 16, 16), None)
    assert row.title.endswith("ragged") and list(row.milliseconds) == ["attncc", "dense", "cudnn full"]
    assert row.bytes == 3 * 50 * 2 * (16 + 16) * 2  # requests, keys, kv heads, K and V, bytes of each: all in sight
    with_tensor = bench("kv_scales:key_scales", Shape(3, 1, 50, 4, 2, 16, 16))
    assert with_tensor.notes == ()


def test_bench_says_what_is_wrong(on_cpu: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    on_cpu.wrong, on_cpu.cudnn = 1.0, RuntimeError("No available kernel.\nmore")
    row = bench("causal:causal", Shape(2, 4, 40, 4, 2, 16, 16))
    assert list(row.milliseconds) == ["attncc", "dense"]
    wrong, cudnn = row.notes
    assert wrong.startswith("the result of the dense kernel differs by")
    assert cudnn == "cuDNN does not take this shape: No available kernel."
    benchmark.show([row])
    assert f"{row.title}: {cudnn}" in capsys.readouterr().out
