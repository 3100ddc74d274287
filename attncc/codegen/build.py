"""From a generated functor module and a KernelConfig to a cubin: needs nvidia-cutlass-dsl, no GPU and no driver."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from .config import DSL_VERSION, SHARED_BYTES, KernelConfig, panel
from .cubin import count_instructions, ptx_parameters, read_cubin
from .emit import Emitted
from .prepass import AHEAD_PARAMS

ARCH = "sm_90a"
os.environ["CUTE_DSL_ARCH"] = ARCH  # unset, the DSL silently builds for another chip

import cutlass  # noqa: E402
import cutlass.cute as cute  # noqa: E402
from cutlass import BFloat16, Float16, Float32, Int32, Int64  # noqa: E402
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor, make_ptr  # noqa: E402

from .device import forward, serve  # noqa: E402

FORWARD_PARAMS = (
    ("map_q", "tensormap"), ("map_k", "tensormap"), ("map_v", "tensormap"), ("map_o", "tensormap"),
    ("lse", "ptr"), ("tickets", "ptr"),
    *((n, "i32") for n in ("qo_len", "kv_len", "num_qo_heads", "num_kv_heads", "group_size")),
    *((n, "i32") for n in ("num_tiles_q", "num_heads_batch", "section_heads", "late_tiles")),
)  # fmt: skip
PACK_PARAM = "pack_shift", "i32"
CACHE_PARAMS = {  # of served kernels: as boxes, as rows
    True: (("map_k", "tensormap"), ("map_v", "tensormap")),
    False: tuple((name, kind) for x in "kv" for name, kind in (
        (x, "ptr"), (f"{x}_page_stride", "i32"), (f"{x}_row_stride", "i32"), (f"{x}_head_stride", "i32"))),
}  # fmt: skip
SERVE_POINTERS = (
    "q", "out", "lse", "header", "tickets", "items", "targets", "sources", "row_request", "requests", "kv_indices",
    "part_o", "part_lse", "counters",
)  # fmt: skip
SERVE_SIZES = (
    "rows", "q_row_stride", "q_head_stride", "out_row_stride", "out_head_stride", "num_qo_heads", "num_kv_heads",
    "group_size", "page_size",
)  # fmt: skip
SAMPLE = {"i32": lambda: Int32(1), "f32": lambda: Float32(1.0), "ptr": lambda: Int64(0)}


class BuildError(RuntimeError):
    """The kernel came out, but not as it must be: it spills, or its layout, target or instructions are wrong."""


class CompilerMissing(BuildError, ImportError):
    """Another version of nvidia-cutlass-dsl is installed."""


class DoesNotFit(BuildError):
    """The kernel needs more than there is of something, perhaps only with so many keys a block."""


class SpillError(DoesNotFit):
    """... of registers."""


def build(emitted: Emitted, config: KernelConfig, work_dir: str | Path) -> tuple[dict, dict[str, bytes]]:
    """Compile one kernel; where a heavy functor spills, again with registers shared out otherwise, then with fewer keys
    a block.

    Returns (the manifest's entry, {name: bytes}).  `work_dir` must exist; intermediate files stay
    there.  Raises BuildError where the result breaks one of the gates of `check`.
    """
    if config.served:
        config = replace(config, columns_by_row=emitted.columns_by_row, ranges_by_row=emitted.ranges_by_row)
    began = time.perf_counter()
    while True:
        try:
            kernel, files = build_once(emitted, config, work_dir)
            return {**kernel, "build_seconds": round(time.perf_counter() - began, 3)}, files
        except DoesNotFit as e:
            other = (config.with_other_split() if isinstance(e, SpillError) else None) or config.narrower()
            if other is None:
                raise
            config = other


def build_once(emitted: Emitted, config: KernelConfig, work_dir: str | Path) -> tuple[dict, dict[str, bytes]]:
    require_dsl()
    fn = import_functors(emitted.text, Path(work_dir))
    compiled = (compile_serve if config.served else compile_forward)(fn, emitted, config, Path(work_dir))
    cubin, ptx = compiled.__cubin__, compiled.__ptx__
    names = (*fixed_params(config), *emitted.params)
    entry, kinds, target = ptx_parameters(ptx)
    facts = read_cubin(cubin, entry)
    sass = count_instructions(cubin, entry)
    spilled = facts.frame_bytes + 4 * (sass["LDL"] + sass["STL"])
    smem = dynamic_smem(str(compiled.ir_module))
    check(emitted.name, config, [k for _, k in names], kinds, target, facts, sass, smem)
    kernel = {
        **described(config.name, compiled, facts, names), "spill_bytes": spilled, "r2ur": sass["R2UR"],
        "tile_q": config.tile_q, "tile_kv": config.tile_kv,
        "stages": [config.q_stages, config.k_stages, config.v_stages],
        "causal_like": config.dynamic, "config": config.to_json(), "tma": boxes(config),
    }  # fmt: skip
    if config.packs > 1:
        kernel["packs"] = config.packs
    if config.ahead:
        kernel["ahead"] = {name: config.key_dims[name] for name in config.ahead}
    if config.served:
        kernel |= {"source": "tma" if config.chunk else "gather", "chunk": config.chunk, "starts_early": True}
    functors = "prepared_functors.py" if config.prepared else "functors.py"
    files = {f"{config.name}.cubin": cubin, f"{config.name}.ptx": ptx.encode(), functors: emitted.text.encode()}
    return kernel, files


def build_small(kernel, host, name: str, params, threads: int, work_dir: Path, *constants) -> tuple[dict, dict]:
    """(manifest's entry, {name: bytes}) of a kernel that takes values alone: its (name, kind) pairs are `params`;
    `constants` follow the stream in `host`.  Raises BuildError as `build`."""
    require_dsl()
    values = samples(params)
    compiled = compile_with(kernel, host, name, work_dir, values, make_fake_stream(), *constants)
    entry, kinds, target = ptx_parameters(compiled.__ptx__)
    facts, sass = read_cubin(compiled.__cubin__, entry), count_instructions(compiled.__cubin__, entry)
    wrong = misbuilt(threads, [k for _, k in params], kinds, target, facts)
    if wrong:
        raise BuildError(f"{name}: " + "; ".join(wrong))
    if facts.frame_bytes or sass["LDL"] or sass["STL"]:
        raise SpillError(f"{name}: spills registers")
    files = {f"{name}.cubin": compiled.__cubin__, f"{name}.ptx": compiled.__ptx__.encode()}
    return {**described(name, compiled, facts, params), "spill_bytes": 0, "tma": {}}, files


def require_dsl() -> None:
    if cutlass.__version__ != DSL_VERSION:
        raise CompilerMissing(f"nvidia-cutlass-dsl {DSL_VERSION} is needed, {cutlass.__version__} is installed")


def described(name: str, compiled, facts, params) -> dict:
    """What a launcher must know of any kernel.  `params`: its (name, kind) pairs."""
    laid_out = [{"name": n, "kind": k, "offset": o, "size": s}
                for (n, k), (o, s) in zip(params, facts.params, strict=True)]  # fmt: skip
    return {
        "cubin": f"{name}.cubin", "sha256": hashlib.sha256(compiled.__cubin__).hexdigest(),
        "entry": ptx_parameters(compiled.__ptx__)[0], "params": laid_out, "block": list(facts.block),
        "smem": dynamic_smem(str(compiled.ir_module)), "registers": facts.registers,
    }  # fmt: skip


def fixed_params(config: KernelConfig) -> tuple[tuple[str, str], ...]:
    """(name, kind) of the parameters that every kernel of this kind has, in order."""
    if not config.served:
        packed = (PACK_PARAM,) if config.packs > 1 else ()
        return (*FORWARD_PARAMS, *packed, *(AHEAD_PARAMS if config.ahead else ()))
    rest = (*((n, "ptr") for n in SERVE_POINTERS), *((n, "i32") for n in SERVE_SIZES))
    return (*CACHE_PARAMS[config.chunk > 0], *rest)


def boxes(config: KernelConfig) -> dict[str, dict]:
    """Box and swizzle of every tensor map."""
    row = lambda rows, tile: {"box": [panel(tile), rows, 1, 1], "swizzle": 3 if panel(tile) == 64 else 2}  # noqa: E731
    if not config.served:
        return {"map_q": row(64, config.tile_qk), "map_k": row(config.part_kv, config.tile_qk),
                "map_v": row(config.part_kv, config.tile_vo), "map_o": row(64, config.tile_vo)}  # fmt: skip
    if not config.chunk:
        return {}
    return {"map_k": row(config.chunk, config.tile_qk), "map_v": row(config.chunk, config.tile_vo)}


def import_functors(text: str, work_dir: Path) -> ModuleType:
    """A real file: the DSL reads the source of what it traces, and its errors name the line."""
    name = "attncc_functors_" + hashlib.sha256(text.encode()).hexdigest()[:16]
    path = work_dir / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def fake_rows(config: KernelConfig, d: int, transposed: bool = False):
    """A tensor (row, d, head, batch), or (d, row, head, batch), of any extents and strides."""
    extent, stride = cute.sym_int, lambda: cute.sym_int64(divisibility=8)
    shape, strides = (extent(), d, extent(), extent()), (stride(), 1, stride(), stride())
    if transposed:
        shape, strides = (d, shape[0], *shape[2:]), (1, strides[0], *strides[2:])
    dtype = {"bf16": BFloat16, "f16": Float16}[config.dtype]
    return make_fake_tensor(dtype, shape, stride=strides, assumed_align=16)


def pointer(kind, align: int = 4):
    return make_ptr(kind, 16, cute.AddressSpace.gmem, assumed_align=align)


def compile_with(kernel, host, name: str, work_dir: Path, *arguments):
    kernel.set_name_prefix(f"attncc_{name}", remove_cutlass_symbol=True, keep_mangled_name=False)
    host.set_name_prefix(f"host_{name}", remove_cutlass_symbol=True, keep_mangled_name=False)
    options = f"--gpu-arch {ARCH} --keep-ptx --keep-cubin --dump-dir {work_dir}"
    return cute.compile(host, *arguments, options=options)


def samples(params) -> tuple:
    return tuple(SAMPLE[kind]() for _, kind in params)


def compile_forward(fn: ModuleType, emitted: Emitted, config: KernelConfig, work_dir: Path):
    rows = lambda d: fake_rows(config, d)  # noqa: E731
    return compile_with(
        forward.kernel, forward.host, emitted.name, work_dir,
        rows(config.tile_qk), rows(config.tile_qk), fake_rows(config, config.tile_vo, True), rows(config.tile_vo),
        pointer(Float32), pointer(Int32), samples((*fixed_params(config)[6:], *emitted.params)), Int32(1),
        make_fake_stream(), config, fn,
    )  # fmt: skip


def compile_serve(fn: ModuleType, emitted: Emitted, config: KernelConfig, work_dir: Path):
    dtype = {"bf16": BFloat16, "f16": Float16}[config.dtype]
    kinds = {name: Int32 for name in SERVE_POINTERS} | {"q": dtype, "out": dtype, "lse": Float32, "part_o": Float32,
                                                        "part_lse": Float32}  # fmt: skip
    pointers = [pointer(kinds[n], 16 if n in ("q", "out") else 4) for n in SERVE_POINTERS]
    values = samples((*((n, "i32") for n in SERVE_SIZES), *emitted.params))
    if config.chunk:
        host = serve.host_boxes
        k, v = fake_rows(config, config.tile_qk), fake_rows(config, config.tile_vo, True)
    else:
        host = serve.host_rows
        k = v = samples(CACHE_PARAMS[False][:4])
    return compile_with(
        serve.kernel, host, emitted.name, work_dir,
        k, v, *pointers[:3], tuple(pointers[3:]), values, Int32(1), make_fake_stream(), config, fn,
    )  # fmt: skip


def check(name, config, expected, kinds, target, facts, sass, smem: int) -> None:
    """The gates: target, parameter layout, block, wgmma and TMA in the machine code, no spill, shared memory."""
    wrong = misbuilt(config.threads, expected, kinds, target, facts)
    copies = "UTMALDG" if boxes(config) else "LDGSTS"
    wrong += [f"no {op} instruction" for op in ("HGMMA", copies) if not sass[op]]
    if wrong:
        raise BuildError(f"{name}: " + "; ".join(wrong))
    if facts.frame_bytes or sass["LDL"] or sass["STL"]:
        raise SpillError(
            f"{name}: spills registers with {config.tile_kv} keys a block: {facts.frame_bytes} bytes of stack, "
            f"{sass['LDL']} loads, {sass['STL']} stores"
        )
    if smem > SHARED_BYTES:
        needs = f"{smem} bytes of shared memory with {config.tile_kv} keys a block, of {SHARED_BYTES}"
        raise DoesNotFit(f"{name}: needs {needs}; each table of frequencies takes four for every feature that turns")


def misbuilt(threads: int, expected: list[str], kinds: list[str], target: str, facts) -> list[str]:
    """What is wrong with a kernel's target, parameters or block."""
    wrong = []
    if target != ARCH or facts.target != 90:
        wrong.append(f"built for {target} (sm_{facts.target}), not {ARCH}")
    if expected != kinds or len(expected) != len(facts.params):
        wrong.append(f"kernel parameters are {kinds}, the manifest would say {expected}")
    if facts.block != (threads, 1, 1):
        wrong.append(f"block is {facts.block}, not {threads} threads")
    return wrong


def dynamic_smem(mlir: str) -> int:
    """Dynamic shared memory in bytes, as the DSL's own host code would ask for it."""
    struct = re.escape("!llvm.struct<(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32)>")
    slot = re.search(r"%(\w+) = llvm\.getelementptr %\w+\[0, 2\][^\n]*" + struct, mlir).group(1)  # type: ignore[union-attr]
    value = re.search(rf"llvm\.store %(\w+), %{slot} : i64", mlir).group(1)  # type: ignore[union-attr]
    return int(re.search(rf"%{value} = llvm\.mlir\.constant\((-?\d+) : i64\)", mlir).group(1))  # type: ignore[union-attr]
