"""A pre-pass: k and v as the launch describes them, and memory for what is made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .memory import GlobalMemory
from .program import Fault


def place_side(
    memory: GlobalMemory, number: Mapping[str, int], x: str, of: Mapping[str, int],
    process_memory: Callable[[int, int], Any], counts: Mapping[str, int] | None = None,
) -> None:  # fmt: skip
    """k or v as it comes.  `counts`: rows along each dimension, of dense keys as the launch says."""
    counts = counts or {
        "batch": number["num_heads_batch"] // number["num_qo_heads"], "row": number["kv_len"],
        "head": number["num_kv_heads"],
    }  # fmt: skip
    far = sum((n - 1) * number[f"{x}_{dim}_stride"] for dim, n in counts.items())
    memory.put(x, process_memory(number[x], 16 * far + 2 * of[x]), base=number[x])


def place(
    memory: GlobalMemory, number: Mapping[str, int], function: Mapping[str, Any],
    process_memory: Callable[[int, int], Any],
) -> Callable[[], None]:  # fmt: skip
    """Put what the parameters point at into memory; what is returned copies the results back.  Of dense keys all rows
    must be written; of ragged ones those that no request has become NaN."""
    counts = {"batch": number["batch"], "row": number["rows"], "head": number["num_kv_heads"]}
    total = counts["batch"] * counts["row"] * counts["head"]
    results = []
    for x, features in function["of"].items():
        place_side(memory, number, x, function["of"], process_memory, counts)
        results.append(memory.empty(f"{x}_out", 2 * total * features, base=number[f"{x}_out"]))
    ragged = number["header"] != 0
    if ragged:
        memory.put("header", process_memory(number["header"], 16), base=number["header"])
        requests = int(process_memory(number["header"], 16).view("i4")[3])
        memory.put("requests", process_memory(number["requests"], 16 * requests), base=number["requests"])

    def finish() -> None:
        for out in results:
            assert out.written is not None
            written = out.written.astype(bool)
            if not ragged and not written.all():
                raise Fault(f"{out.name}: {(~written).sum()} bytes were never written")
            there = process_memory(out.base, out.size)
            there[:] = 0xFF  # NaN
            there[written] = out.bytes[written]

    return finish
