"""Are f_k and f_v applied by a pre-pass or in the attention kernel?  The cost model, in one place, of numbers alone.

In the kernel they are applied to a block of keys each time a tile of queries reads it, which is free of traffic: best
where keys are read once, as in decode.  A pre-pass reads and writes k and v once more, and is one launch more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

PREPASS, PREPARED = "prepass", "prepared"  # kernels of an artifact: the pre-pass, and the main one that follows it

# seconds: to launch; of a byte that it reads or writes; of one SM for a feature of a key in the main kernel, a rope's
LAUNCH, BYTE, FEATURE = 3e-6, 1 / 4e12, 5e-11


class Costs(NamedTuple):
    """Seconds that f_k and f_v cost in the main kernel, and by a pre-pass."""

    fused: float
    prepass: float


def costs(*, keys: int, reads: int, features: int, sm_count: int) -> Costs:
    """`keys`: rows of all kv heads; `reads`: how many a main kernel reads, each as often as a tile of queries asks for
    it; `features` of a row that are transformed, of k and v together."""
    return Costs(reads * features * FEATURE / sm_count, LAUNCH + 2 * keys * features * 2 * BYTE)


def features_of(manifest: Mapping[str, Any]) -> int:
    """Of a key that a pre-pass of this artifact transforms; 0 where there is none."""
    return sum(manifest["kernels"].get(PREPASS, {}).get("of", {}).values())


def choose(manifest: Mapping[str, Any], keys: int, reads: int, sm_count: int) -> str:
    """The main kernel of a call: the artifact's only one, or the one that should take less time."""
    main = next(iter(manifest["kernels"]))
    if PREPASS not in manifest["kernels"] or main == PREPARED:
        return main
    found = costs(keys=keys, reads=reads, features=features_of(manifest), sm_count=sm_count)
    return PREPARED if found.prepass < found.fused else main


def dense_reads(tile_q: int, batch: int, qo_len: int, kv_len: int, num_qo_heads: int) -> int:
    """Keys that a dense kernel reads at most: every tile of queries of every head, all of its keys."""
    return batch * num_qo_heads * -(-qo_len // tile_q) * kv_len
