"""Timing on a GPU in rotated rounds, against cuDNN, FlexAttention, and for served batches attncc's dense kernel:
`attncc bench` and the scripts in bench/.

A card at its power limit runs the first kernel after a pause up to 10 % faster, and cards differ by as much.  So every
figure is compared inside one run only, rounds start with another contender each time, and medians count.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attncc import compiler, flex
from attncc.diagnostics import Source
from attncc.ir.nodes import Variant
from attncc.random_inputs import FLOATS, Inputs, Shape, as_ragged, in_pages, random_inputs
from attncc.trial import on_kernel

Call = Callable[[], object]
DEVICE = "cuda"


@dataclass(frozen=True)
class Row:
    """One variant at one shape: median milliseconds by contender, floating-point operations, and what was left out.
    `bytes`: of the keys and values that the mask shows, where each is read for one query row (decode)."""

    title: str
    milliseconds: dict[str, float]
    flops: float
    notes: tuple[str, ...] = ()
    bytes: float | None = None

    def tflops(self, contender: str) -> float:
        return self.flops / self.milliseconds[contender] / 1e9

    @property
    def plain(self) -> str | None:
        """cuDNN's name among the contenders."""
        return next((name for name in self.milliseconds if name.startswith("cudnn")), None)

    def beside(self, contender: str) -> tuple[str, str]:
        """Its milliseconds, and over those of attncc; dashes where it was left out."""
        ms = self.milliseconds.get(contender)
        return ("–", "–") if ms is None else (f"{ms:.3f}", f"{ms / self.milliseconds['attncc']:.2f}")


def require_gpu() -> None:
    """Raises ValueError where there is no Hopper GPU."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise ValueError("bench: needs a Hopper GPU (sm_90) that torch can use, and found none")


def rotated_rounds(calls: Mapping[str, Call], rounds: int = 3, milliseconds: int = 100) -> dict[str, list[float]]:
    """Milliseconds of each call, one figure a round: triton's do_bench median (it flushes the L2 between calls)."""
    from triton.testing import do_bench

    order = list(calls.items())
    found: dict[str, list[float]] = {name: [] for name in calls}
    for r in range(rounds):
        first = r * len(order) // rounds
        for name, call in order[first:] + order[:first]:
            found[name].append(float(do_bench(call, warmup=25, rep=milliseconds, return_mode="median")))
    return found


def cudnn(inputs: Inputs, *, causal: bool) -> Call:
    """Plain attention by cuDNN through torch, full or causal (of square shapes)."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))

    def call() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
            )

    return call


def flex_attention(
    variant: Variant, shape: Shape, inputs: Inputs, params: Mapping[str, object]
) -> Callable[[], Any]:  # fmt: skip
    """The variant in FlexAttention, compiled; its block mask is made once and not timed."""
    from torch.nn.attention.flex_attention import create_block_mask
    from torch.nn.attention.flex_attention import flex_attention as attention

    functions = flex.mods(variant, shape, params)
    q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
    options: dict[str, Any] = {"scale": functions.scale, "enable_gqa": q.shape[1] != k.shape[1]}
    if functions.mask is not None:
        options["block_mask"] = create_block_mask(
            functions.mask,
            shape.batch if functions.mask_leaves & {"b"} else None,
            shape.num_qo_heads if functions.mask_leaves & {"h", "g"} else None,
            shape.qo_len, shape.kv_len, device=str(q.device),
        )  # fmt: skip
    compiled = torch.compile(attention, dynamic=False)

    def call() -> Any:
        return compiled(q, k, v, score_mod=functions.score, **options)

    def call_with_sink() -> Any:
        out, lse = compiled(q, k, v, score_mod=functions.score, return_lse=True, **options)
        return (out * torch.sigmoid(lse - sink)[..., None]).to(out.dtype)

    if functions.sink is None:
        return call
    b = torch.arange(shape.batch, device=q.device)[:, None]
    h = torch.arange(shape.num_qo_heads, device=q.device)[None]
    sink = flex.lift(functions.sink(b, h)).to(q.device).expand(shape.batch, shape.num_qo_heads)[..., None]
    return call_with_sink


def visible_pairs(variant: Variant, shape: Shape, params: Mapping[str, object], device: str) -> int:
    """How many (request, head, row, key) the mask shows, counted lane by lane."""
    functions = flex.mods(variant, shape, params)
    total = shape.batch * shape.num_qo_heads * shape.qo_len * shape.kv_len
    if functions.mask is None or total == 0:
        return total
    batches = range(shape.batch) if functions.mask_leaves & {"b"} else range(1)
    heads = range(shape.num_qo_heads) if functions.mask_leaves & {"h", "g"} else range(1)
    j = torch.arange(shape.kv_len, device=device)[None]
    rows, seen = max(1, (1 << 26) // shape.kv_len), 0
    for first in range(0, shape.qo_len, rows):
        iq = torch.arange(first, min(first + rows, shape.qo_len), device=device)[:, None]
        for b in batches:
            for h in heads:
                at = [torch.tensor(x, device=device) for x in (b, h)]
                seen += int(flex.lift(functions.mask(*at, iq, j)).expand(len(iq), shape.kv_len).sum())
    return seen * (shape.batch // len(batches)) * (shape.num_qo_heads // len(heads))


def causal_like(kernel: Any) -> bool:
    """Is its main kernel scheduled as causal ones are?"""
    return bool(next(iter(kernel.manifest["kernels"].values()))["causal_like"])


def inputs_for(
    variant: Variant, shape: Shape, options: dict[str, Any], seed: int, given: dict[str, object] | None
) -> Inputs:
    """Random inputs on the device; `options` as of compile, with a torch dtype."""
    return random_inputs(
        variant, shape, dtype=options["dtype"], device=DEVICE, seed=seed, given=given, const=options["const"]
    )


def bench_variant(
    source: Source, variant: Variant, shape: Shape, options: dict[str, Any], *,
    seed: int = 0, given: dict[str, object] | None = None, rounds: int = 3, rivals: bool = True,
) -> Row:  # fmt: skip
    """Time a kernel of `variant` in rotated rounds; with `rivals` FlexAttention too, where it can take the variant.

    cuDNN computes plain attention, causal where the variant's kernel is scheduled as causal ones are.
    """
    options = {**options, "dtype": FLOATS[options["dtype"]]}
    kernel = compiler.compile(source, **options)
    inputs = inputs_for(variant, shape, options, seed, given)
    given_params: dict[str, Any] = inputs.params
    params = {**{p.name: p.default for p in variant.scalars}, **kernel.manifest["const"], **given_params}
    causal = causal_like(kernel) and shape.qo_len == shape.kv_len
    out = torch.empty(*inputs.q.shape[:-1], shape.head_dim_vo, dtype=inputs.q.dtype, device=DEVICE)
    plain = f"cudnn {'causal' if causal else 'full'}"
    calls: dict[str, Call] = {
        "attncc": lambda: kernel(inputs.q, inputs.k, inputs.v, out=out, **given_params),
        plain: cudnn(inputs, causal=causal),
    }
    notes: list[str] = []
    if rivals:
        reason = flex.unsupported(variant)
        if reason is None:
            calls["flex"] = rival = flex_attention(variant, shape, inputs, params)
            _compare("FlexAttention", rival().transpose(1, 2), calls["attncc"](), notes)
        else:
            notes.append(f"FlexAttention cannot take {reason}")
    times = {name: statistics.median(found) for name, found in rotated_rounds(calls, rounds).items()}
    pairs = visible_pairs(variant, shape, params, DEVICE)
    flops = 2.0 * pairs * (shape.head_dim_qk + shape.head_dim_vo)
    return Row(f"{variant.name} {shape}", times, flops, tuple(notes))


def bench_served(
    source: Source, variant: Variant, shape: Shape, options: dict[str, Any], *,
    seed: int = 0, given: dict[str, object] | None = None, rounds: int = 3,
) -> Row:  # fmt: skip
    """Time BatchAttention over `shape.batch` requests of one length, in pages in random order or ragged, in rotated
    rounds with attncc's dense kernel and, where it takes the shape, cuDNN on the same values."""
    options = {**options, "dtype": FLOATS[options["dtype"]]}
    inputs = inputs_for(variant, shape, options, seed, given)
    kernel = compiler.compile(source, **options)
    dense = compiler.compile(source, **{**options, "layout": "dense", "page_size": None})
    calls = served_calls(variant, shape, inputs, kernel, dense, options["page_size"])
    notes: list[str] = []
    _compare("the dense kernel", calls["dense"](), calls["attncc"](), notes)
    causal = causal_like(dense) and shape.qo_len == shape.kv_len
    plain = cudnn(inputs, causal=causal)
    try:
        plain()
    except RuntimeError as e:
        notes.append(f"cuDNN does not take this shape: {str(e).splitlines()[0]}")
    else:
        calls[f"cudnn {'causal' if causal else 'full'}"] = plain
    times = {name: statistics.median(found) for name, found in rotated_rounds(calls, rounds).items()}
    params = {**{p.name: p.default for p in variant.scalars}, **dense.manifest["const"], **inputs.params}
    pairs, dims = visible_pairs(variant, shape, params, DEVICE), shape.head_dim_qk + shape.head_dim_vo
    each = dims * options["dtype"].itemsize * shape.num_kv_heads / shape.num_qo_heads
    read = pairs * each if shape.qo_len == 1 else None
    where = "ragged" if options["page_size"] is None else f"pages of {options['page_size']}"
    return Row(f"{variant.name} {shape} {where}", times, 2.0 * pairs * dims, tuple(notes), read)


def served_calls(
    variant: Variant, shape: Shape, inputs: Inputs, kernel: Any, dense: Any, page_size: int | None
) -> dict[str, Call]:  # fmt: skip
    """Contenders on the same values: "attncc" runs BatchAttention over them in the served layout, "dense" the dense
    kernel.  Each gives out [B, qo_len, num_qo_heads, head_dim_vo], always the same tensor."""
    served = as_ragged(variant, inputs)
    served = served if page_size is None else in_pages(variant, served, page_size, seed=0)
    outs = [inputs.q.new_empty(*inputs.q.shape[:-1], shape.head_dim_vo) for _ in range(2)]
    rows, run = outs[0].flatten(0, 1), on_kernel(kernel, served)
    params: list[dict[str, Any]] = [served.params, inputs.params]

    def planned() -> Tensor:
        run(out=rows, **params[0])
        return outs[0]

    return {
        "attncc": planned, "dense": lambda: dense(inputs.q, inputs.k, inputs.v, out=outs[1], **params[1]),
    }  # fmt: skip


def _compare(rival: str, theirs: Any, ours: Any, notes: list[str]) -> None:
    """A rival that computes something else would be no rival."""
    a, b = ((x[0] if isinstance(x, tuple) else x).float() for x in (theirs, ours))
    error = float((a - b).norm() / b.norm())
    if not error < 2e-2:
        notes.append(f"the result of {rival} differs by {error:.1e}")


def show(rows: Sequence[Row]) -> None:
    """A table: the speed of attncc over the keys that the mask shows, and the others' times over its own (×)."""
    from rich.console import Console
    from rich.table import Table

    rival = "dense" if any("dense" in row.milliseconds for row in rows) else "flex"
    speeds = ("TFLOP/s", "GB/s") if rival == "dense" else ("TFLOP/s",)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("visible keys only")
    for title in (*speeds, "ms", "cuDNN ms", "of plain", "×", f"{rival} ms", "×"):
        table.add_column(title, justify="right")
    for row in rows:
        ours, plain = row.milliseconds["attncc"], row.plain or "–"
        speed = [f"{row.tflops('attncc'):.0f}", "–" if row.bytes is None else f"{row.bytes / ours / 1e6:,.0f}"]
        theirs, times = row.beside(plain)
        of = plain.removeprefix("cudnn ")
        table.add_row(row.title, *speed[: len(speeds)], f"{ours:.3f}", theirs, of, times, *row.beside(rival))
    Console(highlight=False, width=120).print(table)
    for row in rows:
        for note in row.notes:
            print(f"{row.title}: {note}")
