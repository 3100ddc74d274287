"""What a cubin says of its kernel: an ELF reader for the few records a launcher needs, and a look at its SASS."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

EIATTR_FRAME_SIZE, EIATTR_REGCOUNT = 0x11, 0x2F
EIATTR_REQNTID, EIATTR_KPARAM_INFO = 0x10, 0x17


@dataclass(frozen=True)
class CubinFacts:
    """`params`: (offset, size) of each kernel parameter in bytes, in order."""

    target: int
    params: tuple[tuple[int, int], ...]
    block: tuple[int, int, int]
    registers: int
    frame_bytes: int


def _sections(d: bytes) -> dict[str, tuple[int, int]]:
    start = struct.unpack_from("<Q", d, 40)[0]
    size, count, names = struct.unpack_from("<HHH", d, 58)
    raw = [struct.unpack_from("<IIQQQQIIQQ", d, start + i * size) for i in range(count)]
    at = raw[names][4]
    return {d[at + r[0] : d.index(b"\0", at + r[0])].decode(): (r[4], r[5]) for r in raw}


def _records(d: bytes, at: int, size: int):
    end = at + size
    while at < end:
        form, attr = d[at], d[at + 1]
        n = struct.unpack_from("<H", d, at + 2)[0] if form == 4 else 0
        yield attr, d[at + 4 : at + 4 + n] if form == 4 else d[at + 2 : at + 4]
        at += 4 + n


def read_cubin(d: bytes, entry: str) -> CubinFacts:
    """Raises ValueError where `d` is not a cubin with a kernel called `entry`."""
    if d[:4] != b"\x7fELF":
        raise ValueError("not an ELF file")
    sections = _sections(d)
    if ".nv.info." + entry not in sections:
        raise ValueError(f"no kernel {entry!r} in the cubin")
    params: dict[int, tuple[int, int]] = {}
    block = (0, 0, 0)
    for attr, v in _records(d, *sections[".nv.info." + entry]):
        if attr == EIATTR_KPARAM_INFO:
            _, ordinal, offset, flags = struct.unpack("<IHHI", v)
            params[ordinal] = (offset, flags >> 18)
        elif attr == EIATTR_REQNTID:
            block = struct.unpack("<3I", v)
    whole = {attr: struct.unpack("<II", v)[1] for attr, v in _records(d, *sections[".nv.info"])
             if attr in (EIATTR_FRAME_SIZE, EIATTR_REGCOUNT)}  # fmt: skip
    flags = struct.unpack_from("<I", d, 48)[0]
    target = flags & 0xFF if flags & 0xFF > 20 else (flags >> 8) & 0xFF
    return CubinFacts(target, tuple(params[i] for i in sorted(params)), block, whole[EIATTR_REGCOUNT],
                      whole.get(EIATTR_FRAME_SIZE, 0))  # fmt: skip


def _tool(name: str) -> str:
    """cuobjdump and nvdisasm come as packages beside ours; a CUDA toolkit on the PATH serves as well."""
    for place in map(Path, sys.path):
        for found in place.glob(f"nvidia/*/bin/{name}"):
            return str(found)
    found = shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"{name} not found: pip install nvidia-cuda-{name}")
    return found


def disassemble(cubin: bytes) -> str:
    """The SASS of a cubin, one instruction a line."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin)
        f.flush()
        done = subprocess.run([_tool("nvdisasm"), "-c", f.name], capture_output=True, text=True)
    if done.returncode != 0:
        raise ValueError(f"nvdisasm: {done.stderr.strip()}")
    return done.stdout


# The nine low bits of a Hopper instruction name its operation, whatever its operand forms.
OPCODES = {
    "HGMMA": 0x1F0,
    "UTMALDG": 0x1B4,
    "UTMASTG": 0x1B5,
    "LDGSTS": 0x1AE,
    "LDL": 0x183,
    "STL": 0x187,
    "R2UR": 0x0CA,
}


def count_instructions(cubin: bytes, entry: str) -> dict[str, int]:
    """How often each of OPCODES stands in a kernel: read off the machine code, 16 bytes an instruction, since
    disassembling takes a third of a build."""
    at, size = _sections(cubin)[".text." + entry]
    words = struct.unpack_from("<" + "H14x" * (size // 16), cubin, at)
    found = Counter(w & 0x1FF for w in words)
    return {name: found[code] for name, code in OPCODES.items()}


def ptx_parameters(ptx: str) -> tuple[str, list[str], str]:
    """Entry name, kind of every parameter (tensormap, ptr, i32, f32, …) and target of a PTX module with one kernel."""
    entry, body = re.search(r"\.visible \.entry (\w+)\((.*?)\n\)", ptx, re.S).groups()  # type: ignore[union-attr]
    kinds = []
    for line in body.strip().splitlines():
        array = re.search(r"\.b8 \w+\[(\d+)\]", line)
        if array:
            kinds.append("tensormap" if array.group(1) == "128" else f"bytes{array.group(1)}")
        else:
            kind = re.search(r"\.param \.(\w+)", line).group(1)  # type: ignore[union-attr]
            kinds.append(
                {"u32": "i32", "b32": "i32", "s32": "i32", "f32": "f32", "u64": "ptr", "b64": "ptr"}.get(kind, kind)
            )
    return entry, kinds, re.search(r"\.target (\w+)", ptx).group(1)  # type: ignore[union-attr]
