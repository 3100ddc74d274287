"""One call on random data beside the float64 reference: `attncc run`, and the measure of error that tests use."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attncc import compiler
from attncc.diagnostics import Source
from attncc.ir.nodes import Variant
from attncc.random_inputs import FLOATS, Inputs, Shape, random_batch, random_inputs, shorter
from attncc.runtime.batch import BatchAttention


@dataclass(frozen=True)
class Trial:
    """`out_error` is |out - reference| / |reference| in the Frobenius norm, `out_max` the largest |out - reference|,
    `lse_max` the largest |lse - reference| over rows that see a key (None without lse), all where the reference is
    finite; `not_finite` counts where its out is not.  `agrees`: finite where the reference is, and the same infinity
    or NaN elsewhere.  `emit_max`: as `lse_max`, for each emitted tensor.  `milliseconds`: median of a GPU call."""

    backend: str
    inputs: Inputs
    out_error: float
    out_max: float
    lse_max: float | None
    emit_max: dict[str, float]
    not_finite: int
    agrees: bool
    milliseconds: float | None


def trial(
    source: Source, variant: Variant, shape: Shape, options: dict[str, Any], *,
    backend: str, seed: int, given: dict[str, object],
) -> Trial:  # fmt: skip
    """Run `variant` once on random data and compare; `backend` is "cuda" or "reference".  With a served layout in
    `options` the call is a run of BatchAttention over requests of `shape` and shorter ones.

    The reference backend computes in float32 and rounds to the kernel's dtype, as a kernel does.
    """
    options = {**options, "dtype": FLOATS[options["dtype"]]}
    drawn: dict[str, Any] = {
        "dtype": options["dtype"], "device": "cuda" if backend == "cuda" else "cpu", "seed": seed, "given": given,
        "const": options["const"],
    }  # fmt: skip
    reference = compiler.reference(source, **options)  # says what is wrong with the options
    if options["layout"] == "dense":
        inputs = random_inputs(variant, shape, **drawn)
    else:
        lengths = [(shape.qo_len, shape.kv_len)] * shape.batch + shorter(shape)
        inputs = random_batch(variant, lengths, shape, page_size=options["page_size"], **drawn)
    oracle = on_reference(reference, inputs)
    if backend == "cuda":
        function = on_kernel(compiler.compile(source, **options), inputs)
    else:
        function = on_reference(compiler.reference(source, **options, compute_dtype=torch.float32), inputs)
    return_lse = variant.scan.kind != "none"

    def call(f: Callable[..., Any]) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        result = f(return_lse=return_lse, **inputs.params)
        parts: tuple[Any, ...] = result if isinstance(result, tuple) else (result,)
        return parts[0], parts[1] if return_lse else None, parts[-1] if variant.emits else {}

    out, lse, emits = call(function)
    want, want_lse, want_emits = call(oracle)
    out = out.to(options["dtype"])
    checks = {"out": _largest(out, want)}
    if lse is not None and want_lse is not None:
        checks["lse"] = _largest(lse, want_lse)
    emitted = {name: _largest(x, want_emits[name]) for name, x in emits.items()}
    finite = want.isfinite()
    norm = float(want[finite].norm())
    return Trial(
        backend, inputs,
        out_error=float((out.double() - want)[finite].norm()) / (norm or 1.0),
        out_max=checks["out"][0],
        lse_max=checks["lse"][0] if "lse" in checks else None,
        emit_max={name: difference for name, (difference, _) in emitted.items()},
        not_finite=int((~finite).sum()),
        agrees=all(same for _, same in [*checks.values(), *emitted.values()]),
        milliseconds=_time(lambda: call(function)) if backend == "cuda" else None,
    )  # fmt: skip


def on_reference(reference: Any, x: Inputs) -> Callable[..., Any]:
    """The reference with these q, k, v, however they lie; what it still takes is parameters and return_lse."""
    if not x.table:
        return partial(reference, x.q, x.k, x.v)
    if len(x.table) == 2:
        return partial(reference.ragged, x.q, x.k, x.v, *x.table)
    return partial(reference.paged, x.q, (x.k, x.v), *x.table)


def on_kernel(kernel: Any, x: Inputs) -> Callable[..., Any]:
    """The same of a kernel.  A served batch is planned here, for the scalars of `x`, by an object that just holds
    it."""
    if not x.table:
        return partial(kernel, x.q, x.k, x.v)
    attention = BatchAttention(
        kernel, num_qo_heads=x.q.shape[-2], num_kv_heads=x.k.shape[-2], max_batch_size=max(1, len(x.table[0]) - 1),
        max_qo_rows=max(1, x.q.shape[0]), page_size=x.k.shape[1] if len(x.table) == 4 else None, device=x.q.device,
    )  # fmt: skip
    attention.plan(*x.table, **{name: value for name, value in x.params.items() if not isinstance(value, Tensor)})
    return partial(attention.run, x.q, (x.k, x.v))


def describe(shape: Shape, layout: str, page_size: int | None) -> str:
    """What `trial` calls, in words."""
    if layout == "dense":
        return str(shape)
    others = ", ".join(f"{qo}/{kv}" for qo, kv in shorter(shape))
    lies = f"pages of {page_size}" if layout == "paged" else "ragged"
    return f"{shape} and qo/kv {others}, {lies}"


def _largest(found: Tensor, want: Tensor) -> tuple[float, bool]:
    """The largest difference where the reference is finite, and whether both are the same where it isn't."""
    finite = want.isfinite()
    difference = (found.double() - want)[finite].abs()
    same = torch.equal(finite, found.isfinite())
    same = same and torch.allclose(found[~finite].double(), want[~finite].double(), equal_nan=True)
    return float(difference.max()) if difference.numel() else 0.0, same


def _time(call: Callable[[], object], repeats: int = 20) -> float:
    """Median milliseconds of a call on the GPU, after three unmeasured ones."""
    for _ in range(3):
        call()
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in pairs:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs)


def pick_backend(wanted: str) -> tuple[str, str]:
    """The backend for "auto", "cuda" or "reference", and how to name it.  Raises ValueError where there is no GPU."""
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    if wanted == "cuda" and not hopper:
        raise ValueError("--backend cuda: no Hopper GPU that torch can use; what works: --backend reference")
    if hopper and wanted != "reference":
        return "cuda", torch.cuda.get_device_name()
    return "reference", "reference in float32, rounded" + ("" if hopper else " (no Hopper GPU)")
