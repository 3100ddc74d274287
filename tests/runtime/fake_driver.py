"""A device that records: what `Kernel` would launch, seen through the same pointers that the driver reads."""

from __future__ import annotations

import ctypes
import hashlib
import struct
from dataclasses import dataclass
from pathlib import Path

from attncc.runtime.artifact import Artifact
from attncc.runtime.driver import CudaError

KINDS = {"tensormap": (128, 64), "ptr": (8, 8), "i32": (4, 4), "f32": (4, 4)}
GEOMETRY = [
    "qo_len", "kv_len", "num_qo_heads", "num_kv_heads", "group_size", "num_tiles_q", "num_heads_batch",
    "section_heads", "late_tiles",
]  # fmt: skip


@dataclass
class Launch:
    function: object
    grid: int
    stream: int
    values: dict


class FakeDriver:
    """The methods of runtime.driver.Driver over CPU (or meta) tensors."""

    device_type = "cpu"

    def __init__(self, device_type="cpu", stride_zero=True, sms=132):
        self.device_type, self.stride_zero, self.sms = device_type, stride_zero, sms
        self.launches: list[Launch] = []
        self.loads: list[int] = []
        self.encoded: list = []
        self.stream = {0: 0, 1: 0}
        self.capturing: set[int] = set()
        self.on_launch = lambda values: None  # may read and write memory as a kernel would

    def sm_count(self, device):
        return self.sms

    def current_stream(self, device):
        return self.stream[device]

    def is_capturing(self, stream):
        return stream in self.capturing

    def make_event(self, device):
        return None

    def upload(self, copies, stream, event):
        for destination, source, size in copies:
            ctypes.memmove(destination, source, size)

    def wait(self, event):
        pass

    def destroy(self, event):
        pass

    def load(self, cubin, kernel, arch, device):
        self.loads.append(device)
        return ("function", device, kernel)

    def encode(self, tensor_map, address):
        assert address % 16 == 0
        assert all(1 <= n <= 1 << 32 for n in tensor_map.dims)
        assert all(s % 16 == 0 and s < 1 << 40 for s in tensor_map.strides)
        if 0 in tensor_map.strides and not self.stride_zero:
            raise CudaError("cuTensorMapEncodeTiled", "CUDA_ERROR_INVALID_VALUE")
        self.encoded.append(tensor_map)
        digest = hashlib.sha256(repr(tensor_map).encode()).digest()
        return struct.pack("<Q", address) + (digest * 4)[:120]

    def launch(self, function, grid, stream, arguments):
        values = {}
        params = function[2]["params"]
        pointers = (ctypes.c_void_p * len(params)).from_address(arguments)
        for p, pointer in zip(params, pointers, strict=True):
            raw = ctypes.string_at(pointer, p["size"])
            form = {"ptr": "<Q", "i32": "<i", "f32": "<f"}.get(p["kind"])
            if form:
                values[p["name"]] = struct.unpack(form, raw)[0]
            else:
                assert pointer % 64 == 0
                values[p["name"]] = (struct.unpack_from("<Q", raw)[0], raw[8:])
        self.launches.append(Launch(function, grid, stream, values))
        self.on_launch(values)


def layout(names):
    """[(name, kind)] -> the manifest's params, laid out as the compiler does."""
    base, params = 0x210, []  # parameters stand from there on in constant memory; alignment counts from its start
    at = base
    for name, kind in names:
        size, align = KINDS[kind]
        at = -(-at // align) * align
        params.append({"name": name, "kind": kind, "offset": at - base, "size": size})
        at += size
    return params


def manifest(
    scalars=(), tensors=(), const=None, scan="softmax", head_dim=128, head_dim_vo=None, causal_like=False, emits=(),
    visible=None, packs=1,
):  # fmt: skip
    """A manifest as `attncc build` writes it.  scalars (name, type, default); tensors (name, dims, dtype); emits (name,
    index, reduction, rows)."""
    names = [(f"map_{x}", "tensormap") for x in "qkvo"] + [("lse", "ptr"), ("tickets", "ptr")]
    names += [(x, "i32") for x in (*GEOMETRY, *(["pack_shift"] if packs > 1 else []))]
    names += [(f"s.{n}", "f32" if t == "f32" else "i32") for n, t, _ in scalars]
    for name, dims, _ in tensors:
        rank = sum(2 if d in ("iq", "j") else 1 for d in dims)
        names.append((f"t.{name}", "ptr"))
        names += [(f"t.{name}.{what}.{k}", "i32") for k in range(rank) for what in ("stride", "size")]
    names += rows_of(emits)
    box = {"box": [64, 64, 1, 1], "swizzle": 3}
    return {
        "schema": 1, "attncc": "0.1.0", "dsl": "4.8.1", "arch": "sm_90a",
        "variant": {"name": "test", "path": "test.attn", "source": "", "sha256": "", "ir": ""},
        "head_dim_qk": head_dim, "head_dim_vo": head_dim_vo or head_dim, "dtype": "bf16", "layout": "dense",
        "scan": scan, "const": const or {}, "visible": visible,
        "scalars": [{"name": n, "type": t, "default": d} for n, t, d in scalars],
        "tensors": [{"name": n, "dims": list(d), "dtype": t, "sorted": False} for n, d, t in tensors],
        "emits": [{"name": n, "index": list(i), "reduce": r, "rows": k} for n, i, r, k in emits],
        "kernels": {"forward": {
            "cubin": "forward.cubin", "entry": "attncc_test_0", "params": layout(names), "block": [384, 1, 1],
            "smem": 230400, "registers": 168, "spill_bytes": 0, "tile_q": 128, "tile_kv": 128, "stages": 2,
            "build_seconds": 1.5, "causal_like": causal_like, "tma": {f"map_{x}": dict(box) for x in "qkvo"},
            **({"packs": packs} if packs > 1 else {}),
        }},
    }  # fmt: skip


def rows_of(emits):
    return [(f"t.emit.{k}", "ptr") for k in sorted({k for *_, k in emits})]


def artifact(**options):
    return Artifact(manifest(**options), {"forward": b"cubin"}, Path("test"))


SERVED_POINTERS = (
    "q", "out", "lse", "header", "tickets", "items", "targets", "sources", "row_request", "requests", "kv_indices",
    "part_o", "part_lse", "counters",
)  # fmt: skip
SERVED_SIZES = (
    "rows", "q_row_stride", "q_head_stride", "out_row_stride", "out_head_stride", "num_qo_heads", "num_kv_heads",
    "group_size", "page_size",
)  # fmt: skip


def served_manifest(
    page_size=16, source="tma", scalars=(), tensors=(), visible=None, positions=(), blocks=False, **options
):  # fmt: skip
    """The manifest of a served kernel; `page_size` None: ragged, else pages, or `blocks`, of so many rows.
    `positions`: what of them the variant reads."""
    made = manifest(scalars=scalars, tensors=tensors, visible=visible, **options)
    if source == "tma":
        names = [("map_k", "tensormap"), ("map_v", "tensormap")]
    else:
        strides = ("page_stride", "row_stride", "head_stride")
        names = [part for x in "kv" for part in ((x, "ptr"), *((f"{x}_{s}", "i32") for s in strides))]
    names += [(x, "ptr") for x in SERVED_POINTERS] + [(x, "i32") for x in SERVED_SIZES]
    names += [(f"s.{n}", "f32" if t == "f32" else "i32") for n, t, _ in scalars]
    for name, dims, _ in tensors:
        names.append((f"t.{name}", "ptr"))
        rank = sum(2 if d == "j" else 1 for d in dims)
        names += [(f"t.{name}.{what}.{k}", "i32") for k in range(rank) for what in ("stride", "size")]
    emits = rows_of(options.get("emits", ()))
    names += [*emits, *([("part_emits", "ptr")] if emits else [])]
    box = {"box": [64, 8, 1, 1], "swizzle": 3}
    kernel = {
        **made["kernels"]["forward"], "cubin": "serve.cubin", "params": layout(names), "tile_kv": 64,
        "source": source, "chunk": 8 if source == "tma" else 0,
        "tma": {"map_k": box, "map_v": box} if source == "tma" else {},
    }  # fmt: skip
    return {
        **made, "layout": "ragged" if page_size is None else "blocks" if blocks else "paged", "page_size": page_size,
        "positions": list(positions),
        "kernels": {"serve": kernel},
    }  # fmt: skip


def served_artifact(**options):
    return Artifact(served_manifest(**options), {"serve": b"cubin"}, Path("test"))


def with_prepass(made, factors=(), **of):
    """The artifact of a variant that may go through a pre-pass; `of`: features by vector, `factors`: those that have
    only a factor."""
    ((name, main),) = made.manifest["kernels"].items()
    params = [(f"{x}{out}", "ptr") for x in "kv" for out in ("", "_out")]
    params += [(f"{x}_{dim}_stride", "i32") for x in "kv" for dim in ("batch", "row", "head")]
    first = {**main, "cubin": "prepass.cubin", "params": layout(params), "of": of, "factors": list(factors)}
    kernels = {name: main, "prepared": {**main, "cubin": "prepared.cubin"}, "prepass": first}
    cubins = dict.fromkeys(kernels, b"cubin")
    return Artifact({**made.manifest, "kernels": kernels}, cubins, made.path)


def with_ahead(made, **of):
    """The artifact of a variant whose dense k or v have a factor of each key."""
    ((name, main),) = made.manifest["kernels"].items()
    params = [(p["name"], p["kind"]) for p in main["params"]]
    params += [(f"{x}{out}", "ptr") for x in "kv" for out in ("", "_out")] + [("made", "ptr")]
    params += [(f"{x}_{dim}_stride", "i32") for x in "kv" for dim in ("batch", "row", "head")]
    prepared = {**main, "cubin": "prepared.cubin", "params": layout(params), "ahead": of}
    kernels = {name: main, "prepared": prepared}
    return Artifact({**made.manifest, "kernels": kernels}, dict.fromkeys(kernels, b"cubin"), made.path)


COUNTS = ("rows", "lines", "words", "team", "num_qo_heads", "num_kv_heads", "group_size")


def with_lists(made, tensor, by="g", block=64):
    """The artifact of a variant with a domain: `tensor` lists blocks of `block` keys."""
    (main,) = made.manifest["kernels"].values()
    served = made.manifest["layout"] != "dense"
    pointers = ("header", "row_request", "requests") if served else ()
    counts = COUNTS if served else (*COUNTS, "qo_len", "kv_len")
    names = [(n, "ptr") for n in pointers] + [(n, "i32") for n in counts]
    own = [(p["name"], p["kind"]) for p in main["params"] if p["name"][:2] in ("s.", "t.")]
    own.append(("t.domain", "ptr"))
    own += [(f"t.domain.{what}.{k}", "i32") for k in range(4 - served) for what in ("stride", "size")]
    fixed = [(p["name"], p["kind"]) for p in main["params"] if p["name"][:2] not in ("s.", "t.")]
    listing = {
        "cubin": "listing.cubin", "entry": "attncc_listing_0", "params": layout([*names, *own]), "block": [256, 1, 1],
        "smem": 0, "tma": {},
    }  # fmt: skip
    (name,) = made.manifest["kernels"]
    kernels = {name: {**main, "params": layout([*fixed, *own])}, "listing": listing}
    domain = {"by": by, "tensor": tensor, "block": block}
    cubins = {**made.cubins, "listing": b"other"}
    return Artifact({**made.manifest, "domain": domain, "kernels": kernels}, cubins, made.path)
