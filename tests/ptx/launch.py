"""A built artifact on torch CPU tensors: the product's own runtime, with this interpreter where the CUDA driver is.

`run_forward` is what tests call.  The runtime checks the arguments, encodes tensor maps and lays out the parameters as
it does on a GPU; `SimulatedDriver` reads them back from the parameter storage as the CUDA driver would, runs the PTX
on copies of the tensors, and refuses a launch that leaves an element of its outputs unwritten.
"""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attncc.runtime import tensor_map
from attncc.runtime.artifact import Artifact, read_artifact
from attncc.runtime.kernel import Kernel

from . import prepass
from .machine import Machine
from .memory import GlobalMemory, Segment
from .program import Fault, parse
from .tma import TensorMap
from .translate import Translator


@lru_cache(maxsize=16)
def translated(ptx: str) -> Translator:
    """Blocks are compiled once for all launches of a kernel."""
    return Translator(parse(ptx))


def run_forward(
    artifact: Artifact | str | Path, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    params: Mapping[str, Any] | None = None, *, sm_count: int = 2, seed: int = 0, lockstep: bool = True,
    return_lse: bool = True, out: torch.Tensor | None = None, ptx: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """out [B, qo_len, num_qo_heads, head_dim_vo] in q's dtype and lse [B, qo_len, num_qo_heads] (None without
    `return_lse`) of a forward artifact on CPU tensors.

    `sm_count` CTAs share the tiles; `seed` orders warps and the landing of copies, `lockstep` as of Machine; `ptx`
    stands in for the artifact's own.  Raises Fault (Deadlock) for what
    the kernel does wrong, ValueError and TypeError for arguments, as on a GPU.
    """
    options = {"sm_count": sm_count, "seed": seed, "lockstep": lockstep, "ptx": ptx}
    result = call_forward(artifact, q, k, v, {**(params or {}), "return_lse": return_lse, "out": out}, **options)
    return result if return_lse else (result, None)


def call_forward(
    artifact: Artifact | str | Path, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, arguments: Mapping[str, Any],
    *, sm_count: int = 2, seed: int = 0, lockstep: bool = True, ptx: str | None = None,
) -> Any:  # fmt: skip
    """What a call with these keyword arguments returns; the rest as of run_forward."""
    artifact = artifact if isinstance(artifact, Artifact) else read_artifact(artifact)
    driver = SimulatedDriver(ptx or main_ptx(artifact), sm_count, seed, lockstep, artifact)
    driver.tensors = {n: t for n, t in arguments.items() if isinstance(t, torch.Tensor) and n != "out"}
    return Kernel(artifact, driver=driver)(q, k, v, **arguments)


def main_ptx(artifact: Artifact) -> str:
    return (artifact.path / f"{next(iter(artifact.manifest['kernels']))}.ptx").read_text()


def process_memory(address: int, size: int) -> np.ndarray:
    """Bytes of this process, as a view."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


class SimulatedDriver:
    """The methods of attncc.runtime.driver.Driver.  `tensors`: the tensor parameters of the next launches by name."""

    device_type = "cpu"
    lines: Segment | None = None  # what the last listing has written

    def __init__(
        self, ptx: str, sm_count: int, seed: int = 0, lockstep: bool = True, artifact: Artifact | None = None
    ):  # fmt: skip
        """`ptx`: of the first kernel of the artifact; the others are found there."""
        self.translator, self.sms = translated(ptx), sm_count
        self.folder = artifact.path if artifact else None
        self.first = next(iter(artifact.manifest["kernels"])) if artifact else None
        self.launched: list[str] = []
        self.options: dict[str, Any] = {"seed": seed, "lockstep": lockstep}
        self.tensors: dict[str, torch.Tensor] = {}
        self.maps: list[tensor_map.TensorMap] = []
        self.addresses: dict[str, int] = {}  # of the tensors behind the maps
        self.machine: Machine | None = None  # the last launch

    def sm_count(self, device: int) -> int:
        return self.sms

    def current_stream(self, device: int) -> int:
        return 0

    def is_capturing(self, stream: int) -> bool:
        return False

    def make_event(self, device: int) -> None: ...

    def upload(self, copies: Sequence[tuple[int, int, int]], stream: int, event: None) -> None:
        for destination, source, size in copies:
            ctypes.memmove(destination, source, size)

    def wait(self, event: None) -> None: ...

    def destroy(self, event: None) -> None: ...

    def load(self, cubin: bytes, kernel: Mapping[str, Any], arch: str, device: int) -> Mapping[str, Any]:
        return kernel

    def encode(self, wanted: tensor_map.TensorMap, address: int) -> bytes:
        """128 bytes: the address, as in a CUtensorMap, and which map it is."""
        self.maps.append(wanted)
        return struct.pack("<QQ112x", address, len(self.maps) - 1)

    def launch(self, function: Mapping[str, Any], grid: int, stream: int, arguments: int) -> None:
        params = function["params"]
        pointers = (ctypes.c_void_p * len(params)).from_address(arguments)
        raw = {p["name"]: ctypes.string_at(at, p["size"]) for p, at in zip(params, pointers, strict=True)}
        number = {p["name"]: int.from_bytes(raw[p["name"]], "little") for p in params if p["kind"] in ("i32", "ptr")}
        memory = GlobalMemory()
        values: dict[str, bytes | TensorMap] = dict(raw)
        name = function["cubin"].removesuffix(".cubin")
        self.launched.append(name)
        if "of" in function:
            finish = prepass.place(memory, number, function, process_memory)
        elif name == "listing":
            finish = self.place_listing(memory, number)
        else:
            finish = self.place(memory, values, number, function)
            if self.lines is not None and "t.domain" in number:
                if number["t.domain"] != self.lines.base:
                    raise Fault("the kernel reads other lines of a domain than were written")
                memory.keep(self.lines)
        translator = self.translator
        if self.folder is not None and name != self.first:
            translator = translated((self.folder / f"{name}.ptx").read_text())
        rows = [] if "of" in function or name == "listing" else self.emitted(memory, number)
        for name, t in self.tensors.items():
            self.parameter(memory, f"t.{name}", t, number)
        self.machine = Machine(
            translator, memory, [values[p["name"]] for p in params], grid, function["smem"], **self.options
        )
        self.machine.launch()
        finish()
        for k, found in enumerate(rows):
            collect_lse(found, number[f"t.emit.{k}"])

    def place(
        self, memory: GlobalMemory, values: dict[str, bytes | TensorMap], number: Mapping[str, int],
        function: Mapping[str, Any],
    ) -> Callable[[], None]:  # fmt: skip
        """Put what the parameters point at into memory; what is returned looks at the results, and copies them back."""
        for name in ("map_q", "map_k", "map_v", "map_o"):
            made = name[-1] in function.get("ahead", {}) and number["kv_len"] > 0
            values[name] = self.tensor(memory, name, values[name], made)  # type: ignore[arg-type]
            if made:
                prepass.place_side(memory, number, name[-1], function["ahead"], process_memory)
        if "ahead" in function:
            blocks = number["num_heads_batch"] // number["group_size"] * -(-number["kv_len"] // function["tile_kv"])
            size = 4 * (2 + blocks * len(function["ahead"]))
            counts = memory.put("made", process_memory(number["made"], size), writable=True, base=number["made"])
        out = values["map_o"]
        lse = None
        if number["lse"]:
            lse = memory.empty("lse", 4 * self.row_count(number), base=number["lse"])
        tickets = memory.put("tickets", process_memory(number["tickets"], 8), writable=True, base=number["tickets"])

        def finish() -> None:
            if tickets.bytes.any():
                raise Fault("the kernel leaves its tickets other than zero")
            if "ahead" in function and counts.bytes.any():
                raise Fault("the kernel leaves its counts of blocks other than zero")
            collect(
                out.segment,
                dict(zip("bhsd", zip(out.dims[::-1], (*out.strides[::-1], 2), strict=True), strict=True)),
                self.addresses["map_o"],
            )
            if lse is not None:
                collect_lse(lse, number["lse"])

        return finish

    def place_listing(self, memory: GlobalMemory, number: Mapping[str, int]) -> Callable[[], None]:
        """The same for the lines of a domain: of all rows, which nobody reads further than they are written."""
        size = 4 * number["rows"] * number["lines"] * number["words"]
        lines = memory.empty("t.domain", size, number["t.domain"])
        self.lines = None
        sizes = {"header": 12, "row_request": 4 * number["rows"], "requests": 16}
        for name in sizes.keys() & number.keys():
            size = sizes[name]
            if name == "requests":
                size *= 1 + int(process_memory(number["row_request"], 4 * number["rows"]).view("i4").max())
            memory.put(name, process_memory(number[name], size), base=number[name])

        def finish() -> None:
            self.lines = lines

        return finish

    def emitted(self, memory: GlobalMemory, number: Mapping[str, int]) -> list[Segment]:
        """Where the kernel writes the rows of every reduction."""
        addresses = [x for name, x in number.items() if re.fullmatch(r"t\.emit\.\d+", name)]
        return [
            memory.empty(f"emit {k}", 4 * self.row_count(number), base=x) for k, x in enumerate(addresses)
        ]  # fmt: skip

    def row_count(self, number: Mapping[str, int]) -> int:
        """Query rows of all heads and requests."""
        return number["qo_len"] * number["num_heads_batch"]

    def tensor(self, memory: GlobalMemory, name: str, raw: bytes, made: bool = False) -> TensorMap:
        """A map's tensor, copied to memory of its own: only TMA reaches it.  `made`: the kernel writes it first."""
        address, index = struct.unpack_from("<QQ", raw)
        self.addresses[name] = address
        wanted = self.maps[index]
        if made or name == "map_o":
            segment = memory.empty(name, wanted.span, base=address if made else None)
        else:
            segment = memory.put(name, process_memory(address, wanted.span))
        return TensorMap(segment, 2, wanted.dims, wanted.strides, wanted.box, wanted.swizzle)

    def parameter(self, memory: GlobalMemory, name: str, t: torch.Tensor, number: Mapping[str, int]) -> None:
        if name not in number or not t.numel():
            return
        if number[name] != t.data_ptr():
            raise Fault(f"{name} points at {number[name]:#x}, the tensor is at {t.data_ptr():#x}")
        memory.put(name, process_memory(t.data_ptr(), span(t)), base=t.data_ptr())


def span(t: torch.Tensor) -> int:
    """Bytes from a tensor's first element to past its last one."""
    return (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))) * t.element_size()


def collect(out: Segment, dims: Mapping[str, tuple[int, int]], address: int) -> None:
    """Copy an output to the process's memory, sparing the bytes between its rows.  `dims`: (count, bytes from one to
    the next) along each dimension.  Raises Fault unless every element was written."""
    at = sum(np.ix_(*(np.arange(n) * step for n, step in dims.values())))
    written = out.written
    assert written is not None
    missing = np.argwhere(written[at] == 0)
    if missing.size:
        first = dict(zip(dims, missing[0].tolist(), strict=True))
        raise Fault(f"{len(missing)} of {at.size} elements of the output were never written, the first at {first}")
    mask = written.astype(bool)
    process_memory(address, out.size)[mask] = out.bytes[mask]


def collect_lse(lse: Segment, address: int) -> None:
    lse.read("f4", (lse.size // 4,))  # complains of what was not written
    process_memory(address, lse.size)[:] = lse.bytes
