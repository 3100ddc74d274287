"""Are f_k and f_v applied by a pre-pass or in the attention kernel?  The cost model, in one place, of numbers alone.

In the kernel they are applied to a block of keys each time a tile of queries reads it, which is free of traffic: best
where keys are read once, as in decode.  A factor goes to scores and weights there, which is far cheaper than to
transform rows.  A pre-pass reads and writes k and v once more, and is one launch more.  Where dense k and v have only
factors, the prepared kernel does that itself beside its tiles: it takes no longer than a pre-pass, most often far less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from attncc.runtime.plan import Visible

PREPASS, PREPARED = "prepass", "prepared"  # kernels of an artifact: the pre-pass, and the main one that follows it

# Seconds: to launch; of a byte that it reads or writes; of one SM in the main kernel, for a feature of a key that is
# transformed, and for a key's factor.  Measured on a H200 (132 SMs, causal, 32 query and 8 kv heads of 128, ms more
# than plain, at B4 S4096, B16 S1024 and B1 S16384): f_k a norm with weights and a rope 0.75, 0.20 and 2.8, by a
# pre-pass 0.02, 0.02 and 0.03; factors of k and v 0.158, 0.039 and 0.55.
LAUNCH, BYTE, FEATURE, FACTOR = 3e-6, 1 / 4e12, 8.7e-11, 1.1e-9


class Costs(NamedTuple):
    """Seconds that f_k and f_v cost in the main kernel, and by a pre-pass."""

    fused: float
    prepass: float


def costs(*, keys: int, reads: int, features: int, factors: Sequence[int] = (), sm_count: int) -> Costs:
    """`keys`: rows of all kv heads; `reads`: how many a main kernel reads, each as often as a tile of queries asks for
    it; `features` of a row that are transformed, of k and v together; `factors`: features of those of k and v that the
    main kernel has a factor of."""
    fused = reads * (features * FEATURE + len(factors) * FACTOR) / sm_count
    return Costs(fused, LAUNCH + 2 * keys * (features + sum(factors)) * 2 * BYTE)


def choose(manifest: Mapping[str, Any], keys: int, reads: int, sm_count: int) -> str:
    """The main kernel of a call: the artifact's only one, or the one that should take less time."""
    main = next(iter(manifest["kernels"]))
    if not leaves_choice(manifest):
        return main
    kernels = manifest["kernels"]
    ahead = kernels[PREPARED].get("ahead")
    of, folded = (ahead, ahead) if ahead else (kernels[PREPASS][name] for name in ("of", "factors"))
    features, factors = sum(n for x, n in of.items() if x not in folded), [of[x] for x in folded]
    found = costs(keys=keys, reads=reads, features=features, factors=factors, sm_count=sm_count)
    return PREPARED if found.prepass < found.fused else main


def leaves_choice(manifest: Mapping[str, Any]) -> bool:
    """Can a call of this artifact go either way?"""
    return PREPARED in manifest["kernels"] and next(iter(manifest["kernels"])) != PREPARED


def dense_reads(
    tile: tuple[int, int], batch: int, qo_len: int, kv_len: int, num_qo_heads: int, visible: Visible | None
) -> int:  # fmt: skip
    """Keys that a dense kernel reads at most: every tile of queries of every head, the blocks of keys that it can see.
    `tile`: query rows of a tile, keys of a block."""
    import numpy as np  # only here: an artifact that leaves no choice runs without

    from attncc.runtime.plan import outward

    tile_q, tile_kv = tile
    first, shift = np.arange(0, qo_len, tile_q), kv_len - qo_len
    keys, lo, hi = np.full(len(first), kv_len), None, None
    if visible is not None:
        last = np.minimum(first + tile_q, qo_len) - 1
        lo, hi = visible(first + shift, last + shift, np.array([qo_len]), np.array([kv_len]))
    begin, end = outward(lo, hi, keys, tile_kv)
    return batch * num_qo_heads * int((end - begin).sum())
