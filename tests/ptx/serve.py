"""A served kernel on torch CPU tensors: plans and parameters by the product's own BatchAttention.

The driver reads the plan from where the runtime left it, and gives the kernel just the records, page ids and partial
rows that the plan speaks of, each in memory of its own; partial states must be written before they are read, every row
of every request written, and counters and tickets left zero.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from attncc.runtime.batch import BatchAttention
from attncc.runtime.kernel import Kernel

from .launch import SimulatedDriver, collect, collect_lse, main_ptx, process_memory, span
from .memory import GlobalMemory, Segment
from .program import Fault
from .tma import TensorMap

ITEM, TARGET = 16, 8
REQUEST, ROW0, ROWS, KEYS, TABLE, TARGET0, TARGETS, DELTA = 0, 2, 3, 6, 8, 9, 10, 11  # words of an item
SOURCE0, SOURCES = 3, 4  # words of a target


class Simulated:
    """`attn` is a BatchAttention on the CPU: plan with it, then `run` here.  `ptx` stands in for the artifact's own;
    `sm_count` CTAs, `seed` and `lockstep` as of Machine."""

    def __init__(
        self, kernel: Kernel, *, sm_count: int = 2, seed: int = 0, lockstep: bool = True,
        change: Callable[[str], str] | None = None, **maxima: Any,
    ):  # fmt: skip
        """`change` makes other PTX of the artifact's."""
        page_size = maxima.get("page_size")
        artifact = kernel.serving("ragged" if page_size is None else "paged", page_size)
        ptx = main_ptx(artifact)
        self.driver = ServeDriver(change(ptx) if change else ptx, sm_count, seed, lockstep, artifact)
        self.attn = BatchAttention(kernel, device="cpu", driver=self.driver, **maxima)

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], **options: Any) -> Any:
        """As BatchAttention.run.  Raises Fault for what the kernel does wrong."""
        self.driver.rows, self.driver.kv = len(q), kv
        self.driver.tensors = {
            n: t for n, t in options.items() if isinstance(t, torch.Tensor) and n not in ("out", "lse")
        }
        return self.attn.run(q, kv, **options)


class ServeDriver(SimulatedDriver):
    rows: int
    kv: tuple[torch.Tensor, torch.Tensor]
    pieces = 0  # partial states that the last plan merges
    shared = False  # does one of its pieces belong to several requests?

    def place(
        self, memory: GlobalMemory, values: dict[str, bytes | TensorMap], number: Mapping[str, int],
        function: Mapping[str, Any],
    ) -> Callable[[], None]:  # fmt: skip
        head_dim_qk, head_dim_vo = (function["config"][f"head_dim_{x}"] for x in ("qk", "vo"))

        def at(name: str, size: int) -> int:
            base = memory.room(size, like=number[name])
            values[name] = base.to_bytes(8, "little")
            return base

        def put(name: str, size: int, writable: bool = False) -> Segment:
            return memory.put(name, process_memory(number[name], size), writable, at(name, size))

        def empty(name: str, size: int) -> Segment:
            return memory.empty(name, size, at(name, size))

        for name, t in zip("kv", self.kv, strict=True):
            if function["source"] == "tma":
                values[f"map_{name}"] = self.tensor(memory, f"map_{name}", values[f"map_{name}"])  # type: ignore[arg-type]
            elif t.numel():
                put(name, span(t))
        heads = number["num_qo_heads"]
        sizes = [
            2 * (1 + (self.rows - 1) * number[f"{x}_row_stride"] + (heads - 1) * number[f"{x}_head_stride"] + d - 1)
            for x, d in (("q", head_dim_qk), ("out", head_dim_vo))
        ]
        put("q", sizes[0])
        out = empty("out", sizes[1])
        lse = empty("lse", 4 * self.row_count(number)) if number["lse"] else None
        for name, (first, count) in planned(number, self.rows).items():
            if count:
                address, base = number[name] + 4 * first, memory.room(4 * count)
                memory.put(name, process_memory(address, 4 * count), base=base)
                values[name] = (base - 4 * first).to_bytes(8, "little")
        items = items_of(number)
        self.pieces, self.shared = int((items[:, TARGETS] > 0).sum()), bool((items[:, REQUEST] < 0).any())
        zeros = [put("tickets", 8, True)]
        targets, rows = workspace(number)
        if targets:
            zeros.append(put("counters", 4 * targets * number["num_kv_heads"], True))
            empty("part_o", 4 * rows * number["num_kv_heads"] * head_dim_vo)
            empty("part_lse", 4 * rows * number["num_kv_heads"])
            if "part_emits" in number:
                count = sum(re.fullmatch(r"t\.emit\.\d+", name) is not None for name in number)
                empty("part_emits", 4 * rows * number["num_kv_heads"] * count)
        for x in zeros:
            if x.bytes.any():
                raise Fault(f"{x.name} are other than zero before the launch")

        def finish() -> None:
            for x in zeros:
                if x.bytes.any():
                    raise Fault(f"the kernel leaves its {x.name} other than zero")
            dims = {"row": (self.rows, 2 * number["out_row_stride"]), "h": (heads, 2 * number["out_head_stride"])}
            collect(out, {**dims, "d": (head_dim_vo, 2)}, number["out"])
            if lse is not None:
                collect_lse(lse, number["lse"])

        return finish

    def row_count(self, number: Mapping[str, int]) -> int:
        return self.rows * number["num_qo_heads"]


def ints(address: int, count: int) -> np.ndarray:
    return process_memory(address, 4 * count).view("i4").copy() if count else np.zeros(0, "i4")


def items_of(number: Mapping[str, int]) -> np.ndarray:
    """The records of the plan."""
    tickets, lanes = ints(number["header"], 2).tolist()
    if tickets % lanes:
        raise Fault(f"the plan has {tickets} tickets of {lanes} a record")
    return ints(number["items"], tickets // lanes * ITEM).reshape(-1, ITEM)


def targets_of(number: Mapping[str, int], items: np.ndarray) -> np.ndarray:
    count = int((items[:, TARGET0] + items[:, TARGETS]).max(where=items[:, TARGETS] > 0, initial=0))
    return ints(number["targets"], count * TARGET).reshape(-1, TARGET)


def planned(number: Mapping[str, int], rows: int) -> dict[str, tuple[int, int]]:
    """(first, count) of the int32 elements that a launch may read of each slice that the plan fills."""
    items = items_of(number)
    targets = targets_of(number, items)
    shared = bool((items[:, REQUEST] < 0).any() or (targets[:, REQUEST] < 0).any())
    counts = {
        "header": 4,
        "items": items.size,
        "targets": targets.size,
        "sources": int((targets[:, SOURCE0] + targets[:, SOURCES]).max(initial=0)),
        "row_request": rows if shared else 0,
        "requests": 4 * (int(ints(number["row_request"], rows).max()) + 1) if shared else 0,
    }
    return {name: (0, count) for name, count in counts.items()} | {"kv_indices": page_ids(number["page_size"], items)}


def page_ids(page_size: int, items: np.ndarray) -> tuple[int, int]:
    items = items[items[:, KEYS] > 0]
    if not page_size or not len(items):
        return 0, 0
    first = int(items[:, TABLE].min())
    return first, int((items[:, TABLE] + -(-items[:, KEYS] // page_size)).max()) - first


def workspace(number: Mapping[str, int]) -> tuple[int, int]:
    """(targets, partial rows) of the plan."""
    items = items_of(number)
    cut = items[items[:, TARGETS] > 0]
    if (cut[:, DELTA] + cut[:, ROW0] < 0).any():
        raise Fault("the plan has partial rows below 0")
    return len(targets_of(number, items)), int((cut[:, DELTA] + cut[:, ROW0] + cut[:, ROWS]).max(initial=0))
