"""The pre-pass of a variant with f_k or f_v: a kernel that writes what they make of k and v, and the kernel that then
takes these as they are.  Its results have the bits that the main kernel would make of the same rows by itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from attncc.ir.nodes import SLOT_DEFAULTS, Variant

from .config import KernelConfig
from .emit import Emitted

NAME, THREADS = "prepass", 256
LAYOUTS = ("dense", "ragged")  # of k and v that a pre-pass may copy; a cache in pages is never copied

# Of both, whether they are used or not: addresses, and strides in units of 16 bytes; of dense keys `batch` times `rows`
# rows, of ragged ones `rows` in all, which `requests` share out: header[3] of them (runtime/plan.py).
PARAMS = tuple(
    (name, kind)
    for kind, names in (
        ("ptr", "k k_out v v_out requests header"),
        ("i32", "k_batch_stride k_row_stride k_head_stride v_batch_stride v_row_stride v_head_stride batch rows"),
        ("i32", "qo_len kv_len num_qo_heads num_kv_heads group_size"),
    )
    for name in names.split()
)


def prepared(variant: Variant, config: KernelConfig) -> Variant:
    """The variant on keys and values that have been through the pre-pass; `config` is that of its own kernel."""
    done = {slot: SLOT_DEFAULTS[slot] for slot in ("f_k", "f_v") if getattr(config, slot)}
    return replace(variant, **done)


def build(emitted: Emitted, config: KernelConfig, work_dir: str | Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """(the manifest's entry, files) of the kernel, for the variant's own functors.  Needs and raises what
    codegen/build.py does."""
    from .build import build_small, import_functors
    from .device import prepass as device

    fn = import_functors(emitted.text, Path(work_dir))
    kernel, files = build_small(
        device.kernel, device.host, NAME, (*PARAMS, *emitted.params), THREADS, Path(work_dir), config, fn
    )
    of = {"k": config.head_dim_qk} if config.f_k else {}
    of |= {"v": config.head_dim_vo} if config.f_v else {}
    return {**kernel, "of": of}, files
