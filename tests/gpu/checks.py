"""How a kernel's result is judged: against the float64 reference, and by what torch's own attention makes of it."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from cases import SCALARS, Case
from oracle import LOOSE, as_kernels_round, transforms
from torch import Tensor

import attncc
from attncc import flex
from attncc.ir.nodes import SLOT_DEFAULTS, Variant
from attncc.random_inputs import FLOATS, Inputs, Shape, random_inputs

UNIT = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}  # largest relative error of one rounding
LSE = 5e-3  # tanh.approx under a softcap of 50 reaches half of it; without one it is 1e-5


EMIT = 4e-3  # of what tanh.approx under a softcap of 5 adds to an exponential; without one it is 1e-6
Parts = tuple[Tensor, Tensor | None, dict[str, Tensor]]


def parts_of(variant: Variant, result: Any) -> Parts:
    """out, lse and emitted tensors of a call that asked for lse where there is one."""
    whole = result if isinstance(result, tuple) else (result,)
    softmax = variant.scan.kind == "softmax"
    assert len(whole) == 1 + softmax + bool(variant.emits)
    return whole[0], whole[1] if softmax else None, whole[-1] if variant.emits else {}


@cache
def compile_case(case: Case) -> Any:
    return attncc.compile(case.source, **case.options)  # pyright: ignore[reportArgumentType]


def out_of(result: Any) -> Tensor:
    """Of a call that did not ask for lse."""
    return result[0] if isinstance(result, tuple) else result


def plain_reference(case: Case) -> Any:
    return attncc.reference(case.source, **case.options)  # pyright: ignore[reportArgumentType]


def reference_case(case: Case) -> Any:
    """The reference that judges a kernel's output tightly."""
    return as_kernels_round(case, plain_reference(case))


def inputs_for(case: Case, shape: Shape, seed: int, **given: object) -> Inputs:
    """Random inputs on the GPU; scalars as in SCALARS, so that the masks' edges lie inside the shape."""
    variant = case.load()
    mine = {p.name for p in variant.scalars if not p.const}
    values = {**{name: value for name, value in SCALARS.items() if name in mine}, **given}
    return random_inputs(variant, shape, dtype=FLOATS[case.dtype], device="cuda", seed=seed, given=values)


def poisoned(case: Case, shape: Shape) -> tuple[Tensor, Tensor]:
    """out and lse full of NaN: what a kernel doesn't write shows."""
    rows = (shape.batch, shape.qo_len, shape.num_qo_heads)
    out = torch.full((*rows, shape.head_dim_vo), torch.nan, dtype=FLOATS[case.dtype], device="cuda")
    return out, torch.full(rows, torch.nan, device="cuda")


def run_and_check(case: Case, shape: Shape, x: Inputs) -> tuple[Tensor, Tensor | None]:
    """Run the kernel into poisoned outputs and compare them with the reference; returns (out, lse)."""
    softmax = case.load().scan.kind == "softmax"
    out, lse = poisoned(case, shape)
    options = {"lse": lse, "return_lse": True} if softmax else {}
    found = compile_case(case)(x.q, x.k, x.v, out=out, **options, **x.params)
    want = reference_case(case)(x.q, x.k, x.v, return_lse=softmax, **x.params)
    want_out, want_lse, want_emits = parts_of(case.load(), want)
    assert_emits(parts_of(case.load(), found)[2], want_emits)
    limit = allowed(case, x, shape, want_out, want_lse)
    assert_close(out, want_out, limit)
    if transforms(case):
        assert_close(out, out_of(plain_reference(case)(x.q, x.k, x.v, **x.params)), LOOSE * limit)
    if want_lse is None:
        return out, None
    assert_lse(lse, want_lse, lse_limit(case))
    return out, lse


def lse_limit(case: Case) -> float:
    """A feature of q' or k' that lies between two numbers may round to the other one: of a feature of 6 in both, with a
    scale of 1/16, that is 9e-3."""
    return 4 * LSE if transforms(case) else LSE


def assert_close(out: Tensor, want: Tensor, limit: float) -> None:
    """Relative error in the Frobenius norm within `limit`, and within four times that for every row by itself: one
    wrong row among thousands hardly shows in the norm."""
    assert out.shape == want.shape
    assert bool(out.isfinite().all()), f"{int((~out.isfinite()).sum())} values are not finite"
    if not out.numel():
        return
    difference = out.double() - want
    error = relative(difference, want)
    rows, sizes = difference.norm(dim=-1), want.norm(dim=-1)
    floor = 1e-2 * float(sizes.square().mean().sqrt())
    worst = float((rows / sizes.clamp(min=max(floor, 1e-30))).max())
    assert error <= limit, f"relative error {error:.2e}, allowed {limit:.2e}"
    assert worst <= 4 * limit, f"relative error {worst:.2e} in one row, allowed {4 * limit:.2e}"


def assert_lse(lse: Tensor, want: Tensor, limit: float = LSE) -> None:
    """-inf exactly where the reference is, else within `limit` and float32's own rounding."""
    assert torch.equal(lse.isneginf(), want.isneginf())
    seen = want.isfinite()
    assert bool(lse[seen].isfinite().all())
    excess = (lse.double() - want).abs()[seen] - 1e-6 * want.abs()[seen]
    assert not seen.any() or float(excess.max()) <= limit, f"lse differs by {float(excess.max()):.1e}"


def assert_emits(found: dict[str, Tensor], want: dict[str, Tensor], limit: float = EMIT) -> None:
    """Infinities exactly where the reference has them."""
    assert list(found) == list(want)
    for name, x in want.items():
        assert (found[name].shape, found[name].dtype) == (x.shape, torch.float32), name
        finite = x.isfinite()
        assert torch.equal(found[name][~finite].double(), x[~finite]), name
        error = ((found[name].double() - x).abs() / (1 + x.abs()))[finite]
        assert not error.numel() or float(error.max()) < limit, f"{name} differs by {float(error.max()):.1e}"


def relative(difference: Tensor, want: Tensor) -> float:
    norm = float(want.norm())
    return float(difference.norm()) / norm if norm else float(difference.norm())


def allowed(case: Case, x: Inputs, shape: Shape, want: Tensor, want_lse: Tensor | None) -> float:
    """1.6 times the error of torch's attention on the same input where torch can express the variant; else a weight,
    a value and the output rounded once each, and what the approximate functions (tanh, ex2, rcp) add."""
    theirs = torch_error(case, x, shape, want, want_lse)
    unit = UNIT[FLOATS[case.dtype]]
    return 3 * unit + 5e-4 if theirs is None else 1.6 * theirs + unit / 16


def torch_error(case: Case, x: Inputs, shape: Shape, want: Tensor, want_lse: Tensor | None) -> float | None:
    """Relative error of scaled_dot_product_attention over the rows that see a key; None where it can't be expressed."""
    variant = case.load()
    plain = all(getattr(variant, slot) == SLOT_DEFAULTS[slot] for slot in ("f_logits", "epilogue"))
    if not plain or variant.scan.sink is not None or want_lse is None or flex.unsupported(variant) or not want.numel():
        return None
    if not shape.kv_len:
        return None
    functions = flex.mods(variant, shape, {**{p.name: p.default for p in variant.scalars}, **x.params})
    index = [torch.arange(n, device="cuda") for n in (shape.batch, shape.num_qo_heads, shape.qo_len, shape.kv_len)]
    b, h, iq, j = (t.view([-1 if axis == at else 1 for axis in range(4)]) for at, t in enumerate(index))
    mask = None if functions.mask is None else flex.lift(functions.mask(b, h, iq, j)).to("cuda")
    if mask is not None:
        mask = mask.expand(*mask.shape[:2], shape.qo_len, shape.kv_len)
    q, k, v = (t.transpose(1, 2) for t in (x.q, x.k, x.v))
    k, v = (t.repeat_interleave(shape.num_qo_heads // shape.num_kv_heads, 1) for t in (k, v))
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=functions.scale)
    seen = want_lse.isfinite()
    return relative((theirs.transpose(1, 2).double() - want)[seen], want[seen]) if bool(seen.any()) else None
