"""The pre-pass of a variant with f_k or f_v: a kernel that writes what they make of k and v, and the kernel that then
takes these as they are.  What it makes of a transform has the bits that the main kernel would make of the same rows by
itself; a factor, which that folds into scores and weights, it applies to the rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from attncc.ir.nodes import SLOT_DEFAULTS, Variant

from .config import KernelConfig, entries_of, tables_of
from .emit import Emitted, emit_keys
from .vectors import SLOTS, feature_values, turnings

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

# ... and of a kernel that multiplies dense keys by their factors itself, ahead of its tiles (device/ahead.py).  `made`:
# words that it finds zero and leaves so: two, and for each block of keys of every (request, kv head) one a side.
AHEAD_PARAMS = tuple(
    (name, kind)
    for kind, names in (
        ("ptr", "k k_out v v_out made"),
        ("i32", "k_batch_stride k_row_stride k_head_stride v_batch_stride v_row_stride v_head_stride"),
    )
    for name in names.split()
)


def prepared(variant: Variant, slots: Iterable[str]) -> Variant:
    """The variant on keys and values that have been through a pre-pass with these slots."""
    return replace(variant, **{slot: SLOT_DEFAULTS[slot] for slot in slots})


def generated(variant: Variant, config: KernelConfig, slots: Iterable[str]) -> tuple[Emitted, KernelConfig]:
    """The functor module of the pre-pass, and its kernel.  `variant`: specialised, nothing folded; `config`: of the
    main kernel; `slots`: what is applied."""
    slots = tuple(slots)
    alone = prepared(variant, (slot for slot in SLOTS if slot not in slots))
    head_dims = {"d": config.head_dim_qk, "e": config.head_dim_vo}
    config = replace(
        config, f_k="f_k" in slots, f_v="f_v" in slots, turnings=tables_of(turnings(alone, head_dims)),
        features=entries_of(feature_values(alone, slots), head_dims),
    )  # fmt: skip
    return emit_keys(alone, config, slots), config


def build(
    emitted: Emitted, config: KernelConfig, factors: Mapping[str, object], work_dir: str | Path
) -> tuple[dict[str, Any], dict[str, bytes]]:  # fmt: skip
    """(the manifest's entry, files) of the kernel that `generated` describes.  `factors`: ir.fold_vectors.of_keys.
    Needs and raises what codegen/build.py does."""
    from .build import SpillError, build_small, import_functors
    from .device import prepass as device

    fn = import_functors(emitted.text, Path(work_dir))
    of_kernel = device.kernel, device.host, NAME, (*PARAMS, *emitted.params), THREADS, Path(work_dir), config, fn
    try:
        kernel, files = build_small(*of_kernel, 0)
    except SpillError:  # ptxas would rather have eight CTAs an SM; one may have all registers
        kernel, files = build_small(*of_kernel, 1)
    of = {name: config.key_dims[name] for name, there in (("k", config.f_k), ("v", config.f_v)) if there}
    folded = [slot[-1] for slot, factor in factors.items() if factor is not None]
    return {**kernel, "of": of, "factors": folded}, {**files, "prepass_functors.py": emitted.text.encode()}
