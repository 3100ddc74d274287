"""A run of BatchAttention, bound: what its tensors' shapes and strides say, in place before it is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from attncc.runtime import arguments as check
from attncc.runtime import launch, prepass, routes
from attncc.runtime.arguments import I32_MAX, Spec
from attncc.runtime.listing import Listing
from attncc.runtime.results import Copies, Results
from attncc.runtime.tensor_map import ALIGNMENT

if TYPE_CHECKING:
    from attncc.runtime.serving_arguments import Limit, ServedSizes

MISALIGNED = ALIGNMENT - 1
GATHERED = 1 << 32  # units of 16 bytes: how far from the first row a kernel finds the others that it gathers
SCRATCH = ("tickets", "counters", "part_o", "part_lse")


class Served:
    """What all runs over one kind of storage have in common: keys in pages of one size, ragged, or listed in blocks of
    one size.  `pages`: rows of a page of k and v; None: k and v are rows."""

    def __init__(self, loaded: launch.Loaded, manifest: Mapping[str, Any]):
        self.loaded, self.manifest = loaded, manifest
        self.spec = Spec.of(manifest, loaded.driver.device_type)
        self.page_size: int | None = manifest["page_size"]  # ... or keys of a block
        self.blocks = manifest["layout"] == "blocks"
        self.pages = None if self.blocks else self.page_size
        self.first = loaded.other(routes.PREPASS) if loaded.name == routes.PREPARED else None
        self.kind = (manifest["layout"], self.page_size, loaded.name)
        self.lists = manifest.get("domain") is not None

    def bind(
        self, sizes: ServedSizes, tensors: Sequence[torch.Tensor], out: torch.Tensor, addresses: Mapping[str, int]
    ) -> tuple[launch.Binding, prepass.Prepass | None, Listing | None]:
        """The launch of a run with tensors like q, k, v, parameters, and `out`, and of what comes before it.
        ValueError where the kernel can't address k or v."""
        q, k, v, *rest = tensors
        if self.pages is None:
            k, v = k.unsqueeze(0), v.unsqueeze(0)
        given = k, v
        if self.first is not None:
            k, v = (prepass.written(t) if x in self.first.entry["of"] else t for x, t in zip("kv", given, strict=True))
        fields = {
            "rows": len(q), "num_qo_heads": sizes.num_qo_heads, "num_kv_heads": sizes.num_kv_heads,
            "group_size": sizes.num_qo_heads // sizes.num_kv_heads, "page_size": self.page_size or 0,
            **row_strides("q", q), **row_strides("out", out),
        }  # fmt: skip
        for param, t in zip(self.spec.bound, rest, strict=True):
            shape, stride = list(t.shape), list(t.stride())
            labels = [label for label, _ in check.expand(param, sizes, self.spec)]
            if "nnz_kv" in labels:  # the kernel finds keys by page and row
                shape.insert(labels.index("nnz_kv"), 1)
                stride.insert(labels.index("nnz_kv"), 0)
            fields |= launch.tensor_fields(param, shape, stride)
        units = {name: key_strides(name, t) for name, t in (("k", k), ("v", v))}
        if self.loaded.entry["source"] == "gather":
            check_reach("k", k.shape, units["k"])
            check_reach("v", v.shape, units["v"])
        binding = launch.Binding(self.loaded.entry, self.loaded.function, self.loaded.sm_count)
        if self.loaded.entry["source"] == "tma":
            near = q.data_ptr()  # maps are encoded for some address, and used with others
            binding.set_maps({f"map_{name}": self._map(name, t, near) for name, t in (("k", k), ("v", v))})
        else:
            for name, strides in units.items():
                if self.blocks and self.page_size:  # runs of rows; kernels count modulo 2³²
                    strides[0] = (strides[1] * self.page_size + 2**31) % 2**32 - 2**31
                fields |= {f"{name}_{d}_stride": s for d, s in zip(("page", "row", "head"), strides, strict=True)}
        binding.set_fields(fields)
        for name, address in addresses.items():
            binding.cell(name).value = address
        listing = None
        if self.lists:
            heads = (sizes.num_qo_heads, sizes.num_kv_heads)
            listing = Listing(self.loaded, self.manifest, self.spec, binding, fields, heads, (len(q),), addresses)
        if self.first is None or not k.numel():
            return binding, None, listing
        for name, t in zip("kv", given, strict=True):
            key_strides(name, t)
        fields |= {"qo_len": 0, "kv_len": 0}  # a request's own
        return binding, prepass.Prepass(self.first, self.spec, *given, fields, addresses), listing

    def _map(self, name: str, t: torch.Tensor, near: int) -> bytes:
        encoded = self.loaded.encode(t, self.manifest["dtype"], self.loaded.entry["tma"][f"map_{name}"], near)
        if encoded is None:
            raise ValueError(
                f"{name}: expected strides that TMA can address, found {list(t.stride())}; pass {name}.contiguous()"
            )
        return encoded


def row_strides(name: str, t: torch.Tensor) -> dict[str, int]:
    """The kernel's strides of q or out, in elements."""
    row, head = (s if n > 1 else 0 for n, s in zip(t.shape[:2], t.stride()[:2], strict=True))
    return {f"{name}_row_stride": row, f"{name}_head_stride": head}


def unfit_rows(t: torch.Tensor) -> bool:
    """Can't the kernel address q or out with these strides?"""
    item, strides = t.element_size(), row_strides("", t).values()
    if any(s * item % ALIGNMENT or s > I32_MAX for s in strides):
        return True
    return sum((n - 1) * s * item // ALIGNMENT for n, s in zip(t.shape, strides, strict=False)) >= GATHERED


def key_strides(name: str, t: torch.Tensor) -> list[int]:
    """Strides of a page, a row and a head in units of 16 bytes.  ValueError where they aren't whole or don't fit."""
    item = t.element_size()
    strides = [s * item if n > 1 else 0 for n, s in zip(t.shape[:3], t.stride()[:3], strict=True)]
    if any(s % ALIGNMENT or s // ALIGNMENT > I32_MAX for s in strides):
        raise ValueError(
            f"{name}: expected strides that are multiples of 16 bytes, below 32 GiB, found {list(t.stride())} elements "
            f"of {item} bytes; a cache is never copied"
        )
    return [s // ALIGNMENT for s in strides]


def check_reach(name: str, shape: Sequence[int], strides: Sequence[int]) -> None:
    """ValueError where rows lie further from the first one than a kernel that gathers them can tell.  `strides` in
    units of 16 bytes."""
    last = sum((n - 1) * s for n, s in zip(shape, strides, strict=False) if n)
    if last >= GATHERED:
        raise ValueError(
            f"{name}: expected a cache that spans at most 64 GiB, since pages of this size are gathered row by row, "
            f"found {last * ALIGNMENT / 2**30:.1f} GiB; nearest: pages of a multiple of 8 rows"
        )


class ServedLaunch:
    """A run that launches: everything but pointers, scalars and the stream is in place."""

    requires_grad = False

    def __init__(
        self, served: Served, bound: tuple[launch.Binding, prepass.Prepass | None, Listing | None], results: Results,
        empty_kv: int, run: Callable[..., Any],
        hold: Callable[[ServedLaunch, Sequence[int | float], Sequence[Limit]], None],
        keys: Callable[[], tuple[int, int]],
    ):  # fmt: skip
        """`bound`: of Served.bind.  `empty_kv`: where k and v point that have no element, else 0.  `run`: the same run
        with other tensors.  `hold`: told of a run that a graph captures, and of what it has beside its tensors.
        `keys`: the most keys of a request, now and of any plan for these tensors."""
        spec, loaded = served.spec, served.loaded
        binding, self._first, self._listing = bound
        self._binding, self._results, self._empty_kv, self._keys = binding, results, empty_kv, keys
        self._driver, self._index, self._run, self._hold = loaded.driver, loaded.index, run, hold
        prefix = "map_" if loaded.entry["source"] == "tma" else ""
        self._q, self._k, self._v, self._o = (binding.cell(n) for n in ("q", f"{prefix}k", f"{prefix}v", "out"))
        self._lse = binding.cell("lse")
        self._parameters = launch.Parameters(binding, spec.scalars, spec.bound)

    def call(self, tensors, scalars, out, lse, return_lse):
        q, k, v = tensors[0].data_ptr(), tensors[1].data_ptr(), tensors[2].data_ptr()
        if self._empty_kv:
            k = v = self._empty_kv
        o = 0 if out is None else out.data_ptr()
        if (q | k | v | o) & MISALIGNED:
            return self._misaligned(tensors, scalars, out, lse, return_lse)
        out = self._results.make_out() if out is None else out
        lse = self._results.make_lse() if lse is None and return_lse else lse
        driver, binding = self._driver, self._binding
        stream = driver.current_stream(self._index)
        capturing, lines = driver.is_capturing(stream), None
        words, limits = self._listed(scalars, capturing)
        if capturing:
            self._hold(self, scalars, limits)
        if self._first is not None:
            made = self._first.call(tensors, scalars, stream)
            k, v = made[1].data_ptr(), made[2].data_ptr()
        with binding.lock:
            self._q.value = q
            self._k.value = k
            self._v.value = v
            self._o.value = out.data_ptr()
            self._lse.value = 0 if lse is None else lse.data_ptr()
            self._parameters.write(tensors, scalars)
            if self._listing is not None:
                lines = self._listing.launch(stream, tensors, scalars, words)
            driver.launch(binding.function, binding.grid, stream, binding.arguments)
        del lines  # the allocator reuses them in stream order
        return (out, lse) if return_lse else out

    def _listed(self, scalars: Sequence[int | float], capturing: bool) -> tuple[int, list[Limit]]:
        """(words of a line of a domain's bits, what plans a graph that holds them can follow)."""
        if self._listing is None:
            return 0, []
        block, (keys, most) = self._listing.block(scalars), self._keys()
        if not capturing:
            return self._listing.words(keys, block), []
        words = self._listing.captured_words(keys, most, block)
        return words, [("positions", "domain", 32 * words * block)]

    def _misaligned(self, tensors, scalars, out, lse, return_lse):
        for name, t in (("k", tensors[1]), ("v", tensors[2])):
            if t.data_ptr() & MISALIGNED and not self._empty_kv:
                raise ValueError(
                    f"{name}: expected a base address that is a multiple of 16 bytes, found {t.data_ptr():#x}; a cache "
                    f"is never copied"
                )
        named = (("q", tensors[0]), ("out", out))
        unfit = frozenset(name for name, t in named if t is not None and t.data_ptr() & MISALIGNED)
        return Copies(self._run, unfit).call(tensors, scalars, out, lse, return_lse)
