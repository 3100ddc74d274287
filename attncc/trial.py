"""One call on random data beside the float64 reference: `attncc run`, and the measure of error that tests use."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attncc import compiler
from attncc.diagnostics import Source
from attncc.ir.nodes import Variant
from attncc.random_inputs import FLOATS, Inputs, Shape, random_inputs


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
    """Run `variant` once on random data and compare; `backend` is "cuda" or "reference".

    The reference backend computes in float32 and rounds to the kernel's dtype, as a kernel does.
    """
    options = {**options, "dtype": FLOATS[options["dtype"]]}
    device = "cuda" if backend == "cuda" else "cpu"
    inputs = random_inputs(variant, shape, dtype=options["dtype"], device=device, seed=seed, given=given)
    oracle = compiler.reference(source, **options)
    if backend == "cuda":
        function = compiler.compile(source, **options)
    else:
        function = compiler.reference(source, **options, compute_dtype=torch.float32)
    return_lse = variant.scan.kind != "none"

    def call(f: Callable[..., Any]) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        result = f(inputs.q, inputs.k, inputs.v, return_lse=return_lse, **inputs.params)
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
