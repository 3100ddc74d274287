"""The oracle: attention as language.md defines it, interpreted from the IR in float64 with torch, with no tricks.

The work is cut only to bound memory: one request at a time, some key/value heads and query rows of it at a time.
Nothing here is shared with the kernels, so that a kernel and the oracle cannot be wrong together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attncc.ir import reference_layout as layouts
from attncc.ir.nodes import I32, Domain, Emit, Interner, Leaf, Load, Variant
from attncc.ir.reference_args import bind_const, bind_scalars, bind_tensors
from attncc.ir.reference_eval import Call, Lanes

CHUNK = 1 << 21  # elements of the largest tensor of a chunk: 16 MiB in float64


@dataclass(frozen=True)
class Outputs:
    """Where results go: `out` and `lse` lead with q's leading dimensions and the heads, emits are shaped by index."""

    out: Tensor
    lse: Tensor
    emits: dict[str, Tensor]


class Reference:
    """A variant as a function of q, k, v and its parameters, in float64 on their device.

    `dtype` is the dtype that a kernel would be built for.  It changes nothing here: q, k and v are taken in any float
    dtype, unrounded, and results are of `compute_dtype`.  Raises ValueError and TypeError for `const`, as a call does
    for its arguments; each names the argument, what was expected and what was found.
    """

    def __init__(
        self,
        variant: Variant,
        *,
        head_dim: int,
        head_dim_vo: int | None = None,
        dtype: torch.dtype | None = None,
        compute_dtype: torch.dtype = torch.float64,
        const: Mapping[str, object] | None = None,
    ):
        for name, value in (("head_dim", head_dim), ("head_dim_vo", head_dim_vo)):
            if not (isinstance(value, int) and value > 0) and not (name == "head_dim_vo" and value is None):
                raise ValueError(f"{name}: expected a positive int, found {value!r}")
        for name, value in (("dtype", dtype or torch.float64), ("compute_dtype", compute_dtype)):
            if not isinstance(value, torch.dtype) or not value.is_floating_point:
                raise TypeError(f"{name}: expected a torch float dtype, found {value!r}")
        self.variant, self.dtype, self.compute_dtype = variant.map(Interner()), dtype, compute_dtype
        self.const = bind_const(variant, const)
        self.sizes = {"head_dim_qk": head_dim, "head_dim_vo": head_dim if head_dim_vo is None else head_dim_vo}

    def __repr__(self) -> str:
        v = self.variant
        scalars = [(f"{p.name}: {p.type}", p.default) for p in v.scalars if not p.const]
        takes = [said if default is None else f"{said} = {default}" for said, default in scalars]
        takes += [f"{t.name}: {t.dtype}[{', '.join(map(str, t.dims))}]" for t in v.tensors]
        takes += [f"{name}: const = {value}" for name, value in self.const.items()]
        head_dim = "/".join(map(str, dict.fromkeys(self.sizes.values())))
        dtype = str(self.compute_dtype).removeprefix("torch.")
        return f"<attncc.Reference {v.name}({', '.join(takes)}) head_dim {head_dim}, in {dtype}>"

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, **params: Any) -> Any:
        """Dense: q [B, qo_len, num_qo_heads, head_dim_qk], k and v [B, kv_len, num_kv_heads, head_dim].

        Returns out [B, qo_len, num_qo_heads, head_dim_vo]; with `return_lse` also lse [B, qo_len, num_qo_heads]
        (natural log); where the variant emits also, last, a dict of the emitted tensors.  Raises ValueError and
        TypeError for a bad argument, and in a lane that nothing hides OutOfRange (an IndexError) for a tensor read out
        of range, DivisionByZero (a ZeroDivisionError) for an integer division by zero; both are ValueErrors.
        """
        return self._run(layouts.dense(q, k, v, self.sizes), return_lse, params)

    def ragged(
        self, q: Tensor, k: Tensor, v: Tensor, qo_indptr: Tensor, kv_indptr: Tensor, *,
        return_lse: bool = False, **params: Any,
    ) -> Any:  # fmt: skip
        """Ragged: q [nnz_qo, num_qo_heads, head_dim_qk], k and v [nnz_kv, num_kv_heads, head_dim], indptr [B + 1].

        Returns and raises as a dense call does, with out [nnz_qo, num_qo_heads, head_dim_vo] and lse
        [nnz_qo, num_qo_heads].
        """
        layout = layouts.ragged(q, k, v, qo_indptr, kv_indptr, self.sizes)
        return self._run(layout, return_lse, params)

    def paged(
        self, q: Tensor, kv: tuple[Tensor, Tensor], qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor,
        last_page_len: Tensor, *, return_lse: bool = False, **params: Any,
    ) -> Any:  # fmt: skip
        """Paged: q [nnz_qo, num_qo_heads, head_dim_qk], kv = (k_cache, v_cache), each [num_pages, page_size,
        num_kv_heads, head_dim]; kv_indptr [B + 1] counts pages, kv_indices may be padded, last_page_len [B].

        Returns and raises as a ragged call does.
        """
        layout = layouts.paged(q, kv, (qo_indptr, kv_indptr, kv_indices, last_page_len), self.sizes)
        return self._run(layout, return_lse, params)

    def _run(self, layout: layouts.Layout, return_lse: bool, params: dict[str, Any]) -> Any:
        variant, rows = self.variant, (*layout.row_shape, layout.num_qo_heads)
        if return_lse and variant.scan.kind == "none":
            raise ValueError(f"return_lse: {variant.name} has scan = none, which has no lse")
        sizes = {
            **self.sizes, "num_qo_heads": layout.num_qo_heads, "num_kv_heads": layout.num_kv_heads,
            "group_size": layout.num_qo_heads // layout.num_kv_heads,
        }  # fmt: skip
        call = Call(
            variant=variant,
            sizes=sizes,
            scalars={**self.const, **bind_scalars(variant, params)},
            tensors=bind_tensors(variant, params, layout, sizes),
            params={t.name: t for t in variant.tensors},
            compute_dtype=self.compute_dtype,
            device=layout.device,
        )
        options: dict[str, Any] = {"dtype": self.compute_dtype, "device": layout.device}
        outputs = Outputs(
            out=torch.zeros(*rows, sizes["head_dim_vo"], **options),
            lse=torch.full(rows, -torch.inf, **options),
            emits={
                e.name: torch.full(_emit_shape(e, layout, sizes), IDENTITY[e.reduce], **options) for e in variant.emits
            },
        )
        for request in layout.requests():
            for g in _ranges(sizes["num_kv_heads"], _kv_heads_at_once(call, request)):
                _Heads(call, request, g).run(outputs)
        results = (outputs.out, *((outputs.lse,) if return_lse else ()), *((outputs.emits,) if outputs.emits else ()))
        return results if len(results) > 1 else outputs.out


IDENTITY = {"max": -torch.inf, "min": torch.inf, "sum": 0.0}
SCATTER = {"max": "amax", "min": "amin", "sum": "sum"}


class _Heads:
    """Some key/value heads of one request: keys and values after `f_k` and `f_v`, then chunk by chunk of query rows."""

    def __init__(self, call: Call, request: layouts.Request, g: range):
        self.call, self.request, self.g = call, request, g
        self.j = torch.arange(request.kv_len, device=call.device).view(1, 1, -1)
        self.exists = torch.ones_like(self.j, dtype=torch.bool)
        if request.qo_len == 0:
            return  # no lane exists, so nothing may be read
        lanes = Lanes(call, request, {
            "g": torch.arange(g.start, g.stop, device=call.device).view(-1, 1, 1),
            "j": self.j, "k": self._kv(request.k), "v": self._kv(request.v),
        })  # fmt: skip
        shape = (len(g), 1, request.kv_len)
        variant, sizes = call.variant, call.sizes
        self.k = lanes.checked(variant.f_k, self.exists).expand(*shape, sizes["head_dim_qk"]).squeeze(1)
        self.v = lanes.checked(variant.f_v, self.exists).expand(*shape, sizes["head_dim_vo"]).squeeze(1)
        finite = self.v.isfinite()
        self.v_finite = torch.where(finite, self.v, 0.0)
        self.unusual = [int(j) for j in (~finite.all(-1).all(0)).nonzero()]

    def _kv(self, x: Tensor) -> Tensor:
        """[kv_len, num_kv_heads, D] -> [g, 1, kv_len, D]."""
        return x[:, self.g.start : self.g.stop].to(self.call.compute_dtype).transpose(0, 1).unsqueeze(1)

    def run(self, outputs: Outputs) -> None:
        """Every query row of these heads into `outputs`."""
        group = self.call.sizes["group_size"]
        lane = max(self.request.kv_len, self.call.sizes["head_dim_qk"], self.call.sizes["head_dim_vo"])
        all_heads = range(self.g.start * group, self.g.stop * group)
        # More than one kv head goes together only where all their query heads fit.
        at_once = len(all_heads) if len(self.g) > 1 else max(1, min(group, CHUNK // lane))
        for n in _ranges(len(all_heads), at_once):
            heads = range(all_heads.start + n.start, all_heads.start + n.stop)
            for rows in _ranges(self.request.qo_len, max(1, CHUNK // (lane * len(heads)))):
                self._chunk(heads, rows, outputs)

    def _chunk(self, heads: range, rows: range, outputs: Outputs) -> None:
        call, request, variant = self.call, self.request, self.call.variant
        h = torch.arange(heads.start, heads.stop, device=call.device).view(-1, 1, 1)
        iq = torch.arange(rows.start, rows.stop, device=call.device).view(1, -1, 1)
        shape = (len(heads), len(rows), request.kv_len)
        q = request.q[rows.start : rows.stop, heads.start : heads.stop].to(call.compute_dtype)
        lanes = Lanes(call, request, {
            "h": h, "g": h // call.sizes["group_size"], "iq": iq, "i": iq + (request.kv_len - request.qo_len),
            "j": self.j, "q": q.transpose(0, 1).unsqueeze(2),
        })  # fmt: skip

        q = lanes.checked(variant.f_q).expand(*shape[:2], 1, call.sizes["head_dim_qk"]).squeeze(2)
        dot = (self._by_kv_head(q) @ self.k.transpose(1, 2)).view(shape)
        lanes.set(dot=dot, s=lanes.checked(variant.scale) * dot)
        visible = _visible(lanes, self.exists)
        logits = lanes.checked(variant.f_logits, visible)
        sink = None if variant.scan.sink is None else lanes.checked(variant.scan.sink)
        if variant.scan.kind == "none":
            logits = weights = torch.where(visible, logits, 0.0).expand(shape)
        else:
            logits = torch.where(visible, logits, -torch.inf).expand(shape)
            weights, lse = softmax(logits, sink)
            lanes.set(lse=lse)
            outputs.lse[request.out][rows.start : rows.stop, heads.start : heads.stop] = lse.squeeze(2).T
        lanes.set(l=logits, o=self._weighted_sum(weights, visible.expand(shape)).unsqueeze(2))
        out = lanes.checked(variant.epilogue).expand(*shape[:2], 1, call.sizes["head_dim_vo"]).squeeze(2)
        outputs.out[request.out][rows.start : rows.stop, heads.start : heads.stop] = out.transpose(0, 1)
        for emit in variant.emits:
            _reduce(emit, lanes, visible, shape, outputs.emits[emit.name])

    def _by_kv_head(self, x: Tensor) -> Tensor:
        """[heads, rows, …] -> [g, heads of a group * rows, …], so that no key is copied for each query head."""
        return x.reshape(len(self.g), x.shape[0] // len(self.g) * x.shape[1], x.shape[-1])

    def _weighted_sum(self, weights: Tensor, visible: Tensor) -> Tensor:
        """sum_j w_j v_j over the visible keys, [heads, rows, head_dim_vo]; a hidden value is never multiplied, so a
        NaN in it stays where it is."""
        shape = (*weights.shape[:2], self.call.sizes["head_dim_vo"])
        o = (self._by_kv_head(weights) @ self.v_finite).view(shape)
        for j in self.unusual:
            term = self.v[:, j : j + 1] - self.v_finite[:, j : j + 1]  # [g, 1, head_dim_vo], 0 where it is finite
            term = (self._by_kv_head(weights[:, :, j : j + 1]) * term).view(shape)
            o = o + torch.where(visible[:, :, j : j + 1], term, 0.0)
        return o


def softmax(logits: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weights and natural-log lse (keeping the last axis) of logits that are -inf where no key is visible.

    A row with nothing visible has weights 0 and lse -inf, or with a sink its lse.
    """
    m = logits.amax(-1, keepdim=True) if logits.shape[-1] else logits.new_full((*logits.shape[:-1], 1), -torch.inf)
    if sink is not None:
        m = torch.maximum(m, sink)
    m = torch.where(m == -torch.inf, 0.0, m)
    p = torch.exp(logits - m)
    total = p.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink - m)
    return p / torch.where(total == 0, 1.0, total), m + torch.log(total)


def _visible(lanes: Lanes, exists: Tensor) -> Tensor:
    """Which keys exist for which rows: the mask's and, where there is one, the domain's; broadcastable to the chunk
    and never of length 1 along the keys (`exists`, [1, 1, kv_len], is true).

    Each of mask and domain hides what the other may not read.
    """
    variant = lanes.call.variant
    if variant.domain is None:
        return lanes.checked(variant.mask, exists) & exists
    mask, mask_fault = lanes.value(variant.mask)
    load = _entries(lanes, variant.domain)
    entries, fault = lanes.value(load)
    chosen = _chosen(lanes, variant.domain, entries.squeeze(2), exists) & exists
    if mask_fault is not None:
        lanes.refuse(variant.mask, mask_fault, (chosen if fault is None else chosen | fault.any(-1)) & exists)
    if fault is not None:
        lanes.refuse(load, fault, mask & exists)
    return mask & chosen


def _entries(lanes: Lanes, domain: Domain) -> Load:
    """The read of a row's whole block list; its `:` becomes a vector index, as `d` is."""
    at = domain.index.index(None)
    dims = lanes.call.params[domain.tensor].dims
    axis = sum(lanes.request.axes(space) for space in dims[:at])
    n = lanes.length(dims[at], lanes.call.tensors[domain.tensor].shape[axis])
    lanes.set(**{":": torch.arange(n, device=lanes.call.device).view(1, 1, 1, -1)})
    return Load(domain.tensor, tuple(Leaf(":") if x is None else x for x in domain.index), I32, domain.span)


def _chosen(lanes: Lanes, domain: Domain, entries: Tensor, exists: Tensor) -> Tensor:
    """Is key j in one of the blocks of `entries` [h, iq, n]?  A negative entry is padding."""
    size = lanes.checked(domain.size, exists)
    if ((size < 1) & exists).any():
        raise ValueError(f"domain: expected a block size of at least 1, found {int(size.min())}")
    size = size.clamp(min=1)
    blocks = -(-lanes.request.kv_len // int(size.min()))
    kept = torch.where((entries < 0) | (entries >= blocks), blocks, entries)
    chosen = torch.zeros(*kept.shape[:2], blocks + 1, dtype=torch.bool, device=kept.device).scatter_(2, kept, True)
    block = lanes.leaves["j"] // size
    shape = torch.broadcast_shapes(chosen.shape[:2], block.shape[:2])
    return chosen.expand(*shape, -1).gather(2, block.expand(*shape, -1))


def _emit_shape(emit: Emit, layout: layouts.Layout, sizes: Mapping[str, int]) -> tuple[int, ...]:
    shapes = {
        "b": (layout.batch,), "h": (sizes["num_qo_heads"],), "g": (sizes["num_kv_heads"],),
        "iq": layout.row_shape, "j": layout.key_shape,
    }  # fmt: skip
    return tuple(n for name in emit.index for n in shapes[name])


def _reduce(emit: Emit, lanes: Lanes, visible: Tensor, shape: tuple[int, ...], into: Tensor) -> None:
    """Reduce the chunk's visible lanes over what `emit` does not keep, and add the rest to `into`."""
    value = torch.where(visible, lanes.checked(emit.value, visible), IDENTITY[emit.reduce]).expand(shape)
    kept = {"h" if name == "g" else name for name in emit.index}
    for axis, name in enumerate(("h", "iq", "j")):
        if name not in kept and value.shape[axis]:
            value = getattr(value, SCATTER[emit.reduce])(axis, keepdim=True)
    if value.numel() == 0:
        return
    flat = torch.zeros((1, 1, 1), dtype=torch.int64, device=value.device)
    dims = [x for name in emit.index for x in lanes.request.locate(name, lanes.leaves[name])]
    for n, x in zip(into.shape, dims, strict=True):
        flat = flat * n + x
    into.view(-1).scatter_reduce_(0, flat.expand(value.shape).flatten(), value.flatten(), SCATTER[emit.reduce])


def _kv_heads_at_once(call: Call, request: layouts.Request) -> int:
    widest = max(call.sizes["group_size"], call.sizes["head_dim_qk"], call.sizes["head_dim_vo"])
    return max(1, CHUNK // max(1, request.kv_len * widest))


def _ranges(n: int, step: int) -> Iterator[range]:
    for start in range(0, n, step):
        yield range(start, min(start + step, n))
