"""Extra outputs of a call: a kernel reduces over the keys of every query row and head, torch over what an output does
not keep, in the order of rows, so that the same rows give the same bits.

A kernel writes the rows of each reduction to a tensor over (iq, h), which a launch takes as it takes the variant's
tensors.  An output `[iq, h]` is that tensor itself.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attncc.runtime import arguments as check
from attncc.runtime.arguments import Emit, Spec

IDENTITY = {"max": -torch.inf, "min": torch.inf, "sum": 0.0}
OVER = {"max": torch.amax, "min": torch.amin, "sum": torch.sum}
ROWS = ("iq", "h")


@dataclass(frozen=True)
class Extent:
    """The sizes of one call: `rows` are q's leading dimensions, `requests` how many requests there are.  `offsets`:
    the first row of every request and the end of the last, on the device, where rows of all requests follow one
    another; None: the first of two dimensions tells requests apart."""

    rows: tuple[int, ...]
    requests: int
    num_qo_heads: int
    num_kv_heads: int
    offsets: Tensor | None = None

    def shape(self, emit: Emit, requests: int | None = None) -> tuple[int, ...]:
        sizes = {
            "b": (self.requests if requests is None else requests,), "iq": self.rows, "h": (self.num_qo_heads,),
            "g": (self.num_kv_heads,),
        }  # fmt: skip
        return tuple(n for name in emit.index for n in sizes[name])


def check_given(spec: Spec, given: Any, extent: Extent, device: Any, spare: bool = False) -> None:
    """ValueError and TypeError where `emit={name: tensor}` can't take the outputs.  `spare`: there may be more
    requests than the extent's."""
    if not isinstance(given, Mapping):
        raise TypeError(f"emit: expected a dict of tensors by name, found {type(given).__name__}")
    emits = {e.name: e for e in spec.emits}
    for name, t in given.items():
        if name not in emits:
            close = difflib.get_close_matches(str(name), emits, 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"emit: expected some of {', '.join(emits) or 'none'}, found {name!r}{hint}")
        requests = extent.requests
        at = position_of_b(emits[name])
        if spare and at is not None and isinstance(t, Tensor) and t.dim() > at:
            requests = max(requests, t.shape[at])
        shape = extent.shape(emits[name], requests)
        check.check_output(f"emit[{name!r}]", t, shape, torch.float32, spec, device)
        if t.requires_grad and torch.is_grad_enabled():
            check.refuse_grad([(f"emit[{name!r}]", t)])


def position_of_b(emit: Emit) -> int | None:
    """The dimension of requests; nothing that takes two dimensions stands beside it."""
    return emit.index.index("b") if "b" in emit.index else None


def make_rows(spec: Spec, given: Mapping[str, Tensor], q: Any) -> tuple[Any, ...]:
    """A tensor [*rows, num_qo_heads] for every reduction; one that the caller gave where it is laid out like that.
    Nones where q has no such shape: whoever checks it will say so."""
    try:
        shape, device = q.shape[:-1], q.device
        made: list[Any] = [None] * len(spec.rows)
        for e in spec.emits:
            if e.index == ROWS and e.name in given and given[e.name].is_contiguous() and made[e.rows] is None:
                made[e.rows] = given[e.name]
        return tuple(torch.empty(shape, dtype=torch.float32, device=device) if t is None else t for t in made)
    except (AttributeError, TypeError, RuntimeError):
        return (None,) * len(spec.rows)


def clear(spec: Spec, rows: Sequence[Any]) -> None:
    """Rows as if none saw a key."""
    for e in spec.emits:
        if rows[e.rows] is not None:
            rows[e.rows].fill_(IDENTITY[e.reduce])


def outputs(
    spec: Spec, rows: Sequence[Tensor], given: Mapping[str, Tensor], extent: Extent
) -> dict[str, Tensor]:  # fmt: skip
    """Every output by name, from the rows that a kernel has written."""
    found: dict[str, Tensor] = {}
    taken: set[int] = set()
    for e in spec.emits:
        target = given.get(e.name)
        at = position_of_b(e)
        requests = extent.requests if at is None or target is None else target.shape[at]
        made = output(e, rows[e.rows], extent, requests)
        if target is not None:
            if target is not made:
                target.copy_(made)
            made = target
        elif made is rows[e.rows] and e.rows in taken:  # two names, two tensors
            made = made.clone()
        if made is rows[e.rows]:
            taken.add(e.rows)
        found[e.name] = made
    return found


def beside(results: Any, emitted: dict[str, Tensor]) -> Any:
    """What a call returns: out, or (out, lse), and then what it emits."""
    return (*results, emitted) if isinstance(results, tuple) else (results, emitted)


def output(e: Emit, x: Tensor, extent: Extent, requests: int) -> Tensor:
    """One output from x [*rows, num_qo_heads]."""
    if e.index == ROWS:
        return x
    shape = extent.shape(e, requests)
    if not x.numel():
        return x.new_full(shape, IDENTITY[e.reduce])
    over, kept = OVER[e.reduce], set(e.index)
    if "h" not in kept:
        x = over(x.unflatten(-1, (extent.num_kv_heads, -1)), -1)
        if "g" not in kept:
            x = over(x, -1)
    lead = len(extent.rows)  # dimensions of rows in x
    if "b" in kept:
        x, lead = by_request(e, x, extent, requests), 1
    elif "iq" not in kept:
        x, lead = over(x, tuple(range(lead))), 0
    names = [name for name in ("b", "iq") if name in kept for _ in range(lead)]
    if {"g", "h"} <= kept:  # a head has one kv head: nothing is reduced to the others
        heads = x.shape[lead:]
        x, wide = x.unflatten(-1, (extent.num_kv_heads, -1)), x.new_full(
            (*x.shape[:lead], extent.num_kv_heads, *heads), IDENTITY[e.reduce]
        )  # fmt: skip
        wide.unflatten(-1, (extent.num_kv_heads, -1)).diagonal(dim1=lead, dim2=lead + 1).copy_(x.movedim(lead, -1))
        x = wide
    names += [name for name in ("g", "h") if name in kept]
    order = [n for name in e.index for n, mine in enumerate(names) if mine == name]
    return x.permute(order).contiguous()


def by_request(e: Emit, x: Tensor, extent: Extent, requests: int) -> Tensor:
    """x [*rows, …] to [requests, …]; of a request without rows, the identity."""
    if extent.offsets is None:
        return OVER[e.reduce](x, 1)
    ends = extent.offsets[: requests + 1]
    # `unsafe`: no look at values on the host
    return torch.segment_reduce(x, e.reduce, offsets=ends, initial=IDENTITY[e.reduce], unsafe=True)
