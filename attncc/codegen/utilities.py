"""The small kernels beside attention: their names, their parameters, and their build.

append_UNIT copies UNIT bytes at a time; merge_DTYPE_UNIT merges states whose o is of that dtype.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

UNITS = (16, 8, 4, 2, 1)
ITEM = {"bf16": 2, "f16": 2, "f32": 4}
NAMES = (
    *(f"append_{unit}" for unit in UNITS),
    *(f"merge_{dtype}_{unit}" for dtype, item in ITEM.items() for unit in (16, item)),
)
THREADS = 256
AHEAD = 4  # units that a lane of an append has under way


def _params(wide: str, narrow: str, real: str = "") -> tuple[tuple[str, str], ...]:
    kinds = ((wide, "ptr"), (narrow, "i32"), (real, "f32"))
    return tuple((name, kind) for names, kind in kinds for name in names.split())


# addresses, and strides in bytes; counts.  wide: bit n, is list n of the table of int64; pieces: of a row, a warp each
APPEND = _params(
    "k k_row k_head v v_row v_head "
    "k_cache k_page_stride k_slot_stride k_head_stride v_cache v_page_stride v_slot_stride v_head_stride "
    "qo_indptr qo_indptr_stride kv_indptr kv_indptr_stride kv_indices kv_indices_stride "
    "last_page_len last_page_len_stride",
    "rows pieces heads k_units v_units batch num_indices num_pages page_size wide",
)
MERGE = _params(
    "o o_row o_state o_head lse lse_row lse_state lse_head out lse_out", "total states heads chunks",
    "to_base_2 from_base_2",
)  # fmt: skip


def build(name: str, work_dir: str | Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """(the manifest's entry, files) of one of NAMES.  Needs and raises what codegen/build.py does."""
    from .build import build_small
    from .device import utilities as device

    what, *how = name.split("_")
    if what == "append":
        parts = device.append, device.host_append, name, APPEND
        constants: tuple = (int(how[0]),)
    else:
        parts = device.merge, device.host_merge, name, MERGE
        constants = (device.FLOATS[how[0]], int(how[1]) // ITEM[how[0]])
    kernel, files = build_small(*parts, THREADS, Path(work_dir), *constants)
    return {**kernel, "ahead": AHEAD}, files
