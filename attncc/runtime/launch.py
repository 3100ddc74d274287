"""A bound launch: parameter storage laid out once for one signature of arguments, rewritten and reused by every call.

The storage has the kernel's own parameter layout (offsets and sizes from the manifest).  What depends on shapes and
strides is written when the binding is made; a call writes pointers, the first word of each tensor map, and scalars.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Iterable, Mapping, Sequence
from math import gcd
from typing import Any

import torch

from attncc.runtime.arguments import I32_MAX, PARAM_DTYPES, Sizes, Spec, TensorParam
from attncc.runtime.artifact import Artifact
from attncc.runtime.driver import CudaError
from attncc.runtime.tensor_map import ALIGNMENT, MapCache, TensorMap, tensor_map, zero_map

SIZES = {"tensormap": 128, "ptr": 8, "i32": 4, "f32": 4}
MAPS = ("map_q", "map_k", "map_v", "map_o")
GEOMETRY = (
    "qo_len", "kv_len", "num_qo_heads", "num_kv_heads", "group_size", "num_tiles_q", "num_heads_batch",
    "section_heads", "late_tiles", "pack_shift",
)  # fmt: skip

# Keys and values of the heads that run together should stay in L2 (60 MB on an H200, in two halves): causal, 16 MiB ran
# 2-4 % faster than 32 at S1024 and S4096.
L2_SECTION_BYTES = 16 << 20
# Of a causal kernel's query tiles, the shortest quarter of every head is left for the end, where it evens out the CTAs.
LATE_SHARE = 4


# What a served kernel reads beside maps of K and V or, where it gathers rows, their addresses and strides.
ARENA = (
    "header", "tickets", "items", "targets", "sources", "row_request", "requests", "kv_indices", "part_o", "part_lse",
    "counters", "part_emits",
)  # fmt: skip
KV_STRIDES = tuple(f"{x}_{dim}_stride" for x in "kv" for dim in ("page", "row", "head"))
ROW_STRIDES = ("q_row_stride", "q_head_stride", "out_row_stride", "out_head_stride")
COUNTS = ("rows", "num_qo_heads", "num_kv_heads", "group_size", "page_size")
KNOWN = {
    "dense": {*MAPS, *GEOMETRY, "lse", "tickets"},
    "served": {"map_k", "map_v", "k", "v", "q", "out", "lse", *ARENA, *KV_STRIDES, *ROW_STRIDES, *COUNTS},
}
OF_PREPASS = {
    "k", "k_out", "v", "v_out", "requests", "header", "batch", "rows", "qo_len", "kv_len", "num_qo_heads",
    "num_kv_heads", "group_size", *(f"{x}_{dim}_stride" for x in "kv" for dim in ("batch", "row", "head")),
}  # fmt: skip
OF_AHEAD = {"made", *(x for x in OF_PREPASS if x.startswith(("k_", "v_"))), "k", "v"}
LISTING, LINES = "listing", "domain"  # a kernel of an artifact, and the name among a kernel's tensors of what it writes
OF_LISTING = {"lines", "words", "team", "rows"}


def check_params(
    kernel: Mapping[str, Any], spec: Spec, layout: str = "dense", lines: Iterable[TensorParam] = ()
) -> None:  # fmt: skip
    """ValueError where the manifest asks for a parameter that this runtime can't fill, or doesn't lay out soundly.
    `lines`: what a domain adds to the variant's tensors."""
    own = OF_PREPASS if "of" in kernel else KNOWN["dense" if layout == "dense" else "served"]
    own = own | OF_AHEAD if "ahead" in kernel else own
    tensors = (*spec.bound, *lines)
    known = {*own, *(OF_LISTING if lines else ()), *(f"s.{s.name}" for s in spec.scalars)}
    known |= {f"t.{t.name}" for t in tensors}
    pairs = ("iq", "j") if layout == "dense" else ("j",)  # index spaces of two dimensions
    dims = {f"t.{t.name}": sum(2 if d in pairs else 1 for d in t.dims) for t in tensors}
    known |= {f"{t}.{what}.{k}" for t, n in dims.items() for what in ("stride", "size") for k in range(n)}
    end = 0
    for param in kernel["params"]:
        if param["name"] not in known or param["kind"] not in SIZES:
            raise ValueError(f"kernel parameter {param['name']} ({param['kind']}) is not one this attncc knows to set")
        if param["size"] != SIZES[param["kind"]] or param["offset"] < end:
            raise ValueError(f"kernel parameter {param['name']}: offset {param['offset']}, size {param['size']}")
        if param["kind"] == "tensormap" and param["name"] not in kernel["tma"]:
            raise ValueError(f"kernel parameter {param['name']}: the manifest has no box for it")
        end = param["offset"] + param["size"]


def geometry(kernel: Mapping[str, Any], spec: Spec, sizes: Sizes) -> dict[str, int]:
    """The kernel's i32 parameters that follow from the sizes of a call; ValueError where they pass 2³¹."""
    shift = pack_shift(kernel, sizes.group_size)
    tiles = -(-sizes.qo_len // (kernel["tile_q"] >> shift))
    heads = sizes.batch * sizes.num_qo_heads
    if (count := tiles * heads >> shift) > I32_MAX - 4096:  # a CTA looks one grid past the last tile
        raise ValueError(f"q: expected fewer than 2³¹ tiles of {kernel['tile_q']} rows, found {count}")
    section, late = 1, 0
    if kernel.get("causal_like"):
        head_bytes = max(1, sizes.kv_len) * (spec.head_dim_qk + spec.head_dim_vo) * 2
        section = min(heads, max(1, L2_SECTION_BYTES // head_bytes) * sizes.group_size)
        late = tiles // LATE_SHARE
    return {
        "qo_len": sizes.qo_len, "kv_len": sizes.kv_len, "num_qo_heads": sizes.num_qo_heads,
        "num_kv_heads": sizes.num_kv_heads, "group_size": sizes.group_size, "num_tiles_q": tiles,
        "num_heads_batch": heads, "section_heads": section, "late_tiles": late,
        "pack_shift": shift,
    }  # fmt: skip


def pack_shift(kernel: Mapping[str, Any], group_size: int) -> int:
    """log2 of how many query heads of a kv head a tile holds: as many as the kernel allows, of a power of two that
    divides a group."""
    return gcd(group_size, kernel.get("packs", 1)).bit_length() - 1


def box_of(kernel: Mapping[str, Any], name: str, shift: int) -> list[int]:
    """Of a tensor map: a tile that holds several heads has fewer positions of each."""
    columns, rows, heads, batch = kernel["tma"][name]["box"]
    shift = shift if name in ("map_q", "map_o") else 0
    return [columns, rows >> shift, heads << shift, batch]


def tensor_fields(param: TensorParam, shape: Sequence[int], stride: Sequence[int]) -> dict[str, int]:
    """`t.NAME.size.K` and `t.NAME.stride.K`.  Where there is one element, no index reads the stride: it may be huge."""
    fields = {}
    for k, (n, s) in enumerate(zip(shape, stride, strict=True)):
        fields[f"t.{param.name}.size.{k}"] = n
        fields[f"t.{param.name}.stride.{k}"] = s if n > 1 else 0
    return fields


class Loaded:
    """A kernel of an artifact, loaded on one device."""

    def __init__(self, driver: Any, artifact: Artifact, where: torch.device, name: str | None = None):
        """`name`: which; None: the first one."""
        self.name = name or next(iter(artifact.manifest["kernels"]))
        self.entry = artifact.manifest["kernels"][self.name]
        self.driver, self.index = driver, where.index or 0
        self.function = driver.load(artifact.cubins[self.name], self.entry, artifact.manifest["arch"], self.index)
        self.sm_count = driver.sm_count(self.index)
        self._maps = MapCache(driver.encode)
        self._artifact, self.where, self._others = artifact, where, dict[str, Loaded]()

    def other(self, name: str) -> Loaded:
        """Another kernel of the artifact."""
        if name == self.name:
            return self
        if name not in self._others:
            self._others.setdefault(name, Loaded(self.driver, self._artifact, self.where, name))
        return self._others[name]

    def encode(self, t: Any, dtype: str, tma: Mapping[str, Any], address: int) -> bytes | None:
        """The tensor map of a tensor of four dimensions; None where TMA can't address its strides."""
        wanted: TensorMap | None = zero_map(dtype, tma["box"], tma["swizzle"])
        if t.numel():
            wanted = tensor_map(t.shape, t.stride(), dtype, tma["box"], tma["swizzle"])
        if wanted is None:
            return None
        try:
            return self._maps.get(wanted, address & ~(ALIGNMENT - 1))
        except CudaError as e:
            # The manual doesn't say whether a broadcast dimension may have stride 0: where it may not, copy.
            if 0 in wanted.strides and e.name == "CUDA_ERROR_INVALID_VALUE":
                return None
            raise


class Binding:
    """Parameter storage and grid for one signature.  `lock` guards the storage between writing and launching."""

    def __init__(self, kernel: Mapping[str, Any], function: Any, grid: int):
        params = kernel["params"]
        self.function, self.grid, self.lock = function, grid, threading.Lock()
        self._params = {p["name"]: p for p in params}
        self._raw = ctypes.create_string_buffer(params[-1]["offset"] + 128 + 64)
        # Offsets count from an odd place in constant memory (the first map is at 48): align the maps, not the start.
        first_map = next((p["offset"] for p in params if p["kind"] == "tensormap"), 0)
        self._shift = -(ctypes.addressof(self._raw) + first_map) % 64
        base = ctypes.addressof(self._raw) + self._shift
        self._pointers = (ctypes.c_void_p * len(params))(*[base + p["offset"] for p in params])
        self.arguments = ctypes.addressof(self._pointers)

    def set_maps(self, maps: Mapping[str, bytes]) -> None:
        for name, encoded in maps.items():
            at = self._shift + self._params[name]["offset"]
            self._raw[at : at + 128] = encoded

    def set_fields(self, fields: Mapping[str, int]) -> None:
        for name, value in fields.items():
            param = self._params.get(name)
            if param is not None:
                struct.pack_into("<i", self._raw, self._shift + param["offset"], value)

    def cell(self, name: str) -> Any:
        """A ctypes object over the parameter (over the address word of a tensor map); a spare one where the kernel
        has no such parameter, so that callers write without asking."""
        param = self._params.get(name)
        if param is None:
            return ctypes.py_object()  # takes any value
        kind = {"i32": ctypes.c_int32, "f32": ctypes.c_float}.get(param["kind"], ctypes.c_uint64)
        return kind.from_buffer(self._raw, self._shift + param["offset"])


class Parameters:
    """The cells of a variant's scalars and tensors in a binding, with the places of their values among the arguments of
    a call: scalars from the first on, tensors after q, k and v."""

    def __init__(self, binding: Binding, scalars: Sequence[Any], tensors: Sequence[TensorParam]):
        self._scalars = [(n, binding.cell(f"s.{s.name}")) for n, s in enumerate(scalars)]
        self._pointers = [
            (n, t.name, binding.cell(f"t.{t.name}"), PARAM_DTYPES[t.dtype][0].itemsize - 1)
            for n, t in enumerate(tensors, start=3)
        ]

    def write(self, tensors: Sequence[torch.Tensor], scalars: Sequence[int | float]) -> None:
        """Under the binding's lock.  ValueError where elements are misaligned."""
        for n, cell in self._scalars:
            cell.value = scalars[n]
        for n, name, cell, mask in self._pointers:
            cell.value = pointer = tensors[n].data_ptr()
            if pointer & mask:
                raise ValueError(f"{name}: expected elements at multiples of {mask + 1} bytes, found {pointer:#x}")
