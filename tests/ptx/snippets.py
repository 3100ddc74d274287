"""Running hand-written PTX: a body of instructions becomes an entry, arrays become parameters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .machine import Machine
from .memory import GlobalMemory, Segment
from .ops import TYPES
from .program import parse
from .tma import TensorMap
from .translate import Translator

REGISTERS = """
    .reg .pred %p<16>, %q<4>;
    .reg .b16 %h<64>;
    .reg .b32 %r<320>;
    .reg .b64 %d<64>;
"""


def module(body: str, params: int, threads: int = 32, shared: bool = False) -> str:
    """An entry with `params` 64-bit parameters P0 …; with `shared` it has dynamic shared memory `smem`."""
    names = ",\n".join(f".param .u64 P{k}" for k in range(params))
    extern = ".extern .shared .align 1024 .b8 smem[];" if shared else ""
    return f"""
        .version 8.8
        .target sm_90a
        .address_size 64
        {extern}
        .visible .entry test({names}
        ) .reqntid {threads}, 1, 1
        {{
            {REGISTERS}
            {body}
        }}"""


def launch(
    body: str, *params: Segment | int, memory: GlobalMemory, threads: int = 32, grid: int = 1, shared: int = 0,
    maps: Sequence[TensorMap] = (), **options,
) -> Machine:  # fmt: skip
    """Run a body; P0 … are addresses of segments or numbers, then addresses of tensor maps."""
    text = module(body, len(params) + len(maps), threads, shared > 0)
    values = [np.uint64(p.base if isinstance(p, Segment) else p).tobytes() for p in params]
    addresses = [0x6000_0000 + 128 * k for k in range(len(maps))]
    values += [np.uint64(a).tobytes() for a in addresses]
    machine = Machine(Translator(parse(text)), memory, values, grid, shared, **options)
    machine.maps.update(zip(addresses, maps, strict=True))
    machine.launch()
    return machine


def pointers(count: int) -> str:
    """%d0 … hold the parameters, %r0 the thread."""
    return "mov.u32 %r0, %tid.x;\n" + "".join(f"ld.param.u64 %d{k}, [P{k}];\n" for k in range(count))


_REGISTER = {"pred": "%p", "H": "%h", "R": "%r", "D": "%d"}


def register(kind: str, k: int) -> str:
    return f"{_REGISTER['pred' if kind == 'pred' else TYPES[kind][0]]}{k}"


def size_of(kind: str) -> int:
    return 1 if kind == "pred" else np.dtype(TYPES[kind][2]).itemsize


FORMS = {
    "all": "{op}\n",
    "guarded": "and.b32 %r1, %r0, 1; setp.ne.u32 %p15, %r1, 0; @%p15 {op}\n",
    "branch": "and.b32 %r1, %r0, 1; setp.eq.u32 %p15, %r1, 0; @%p15 bra OVER; {op} OVER:\n",
}


def lanewise(op: str, inputs: Sequence[tuple[str, np.ndarray]], output: str, form: str = "all") -> np.ndarray:
    """`op` once a lane: $a $b $c are the inputs, $d the output, which starts as zero.  Forms "guarded" and "branch"
    run it on odd lanes alone."""
    n = 32
    memory = GlobalMemory()
    arrays = [np.asarray(a) for _, a in inputs]
    segments = [memory.put(f"input {k}", a) for k, a in enumerate(arrays)]
    raw = "b16" if size_of(output) < 4 else f"b{8 * size_of(output)}"
    result = memory.empty("result", n * max(2, size_of(output)))
    text = pointers(len(inputs) + 1)
    for k, (kind, _) in enumerate(inputs):
        load = "u8" if kind == "pred" else f"b{8 * size_of(kind)}"
        into = "%h63" if kind == "pred" else register(kind, 10 + k)
        text += (
            f"mul.wide.u32 %d20, %r0, {size_of(kind)}; add.s64 %d20, %d{k}, %d20; ld.global.{load} {into}, [%d20];\n"
        )
        if kind == "pred":
            text += f"setp.ne.u16 %p{10 + k}, %h63, 0;\n"
        op = op.replace(f"${'abc'[k]}", register(kind, 10 + k))
    d = register(output, 14)
    text += f"setp.ne.u32 {d}, 0, 0;\n" if output == "pred" else f"mov.{raw} {d}, 0;\n"
    text += FORMS[form].format(op=op.replace("$d", d))
    if output == "pred":
        text += f"selp.b16 %h14, 1, 0, {d};\n"
        d = "%h14"
    text += f"mul.wide.u32 %d20, %r0, {max(2, size_of(output))}; add.s64 %d20, %d{len(inputs)}, %d20;\n"
    text += f"st.global.{raw} [%d20], {d}; ret;\n"
    launch(text, *segments, result, memory=memory)
    if output in ("pred", "u8", "s8"):
        out = result.read("u2", (n,)).astype("u1")
        return out.astype(bool) if output == "pred" else out.view(TYPES[output][2])
    return result.read(TYPES[output][2], (n,))
