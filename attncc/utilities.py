"""What stands beside attention: new keys and values into a paged cache, and the merge of attention states.

On a Hopper GPU each call launches one small kernel.  The kernels belong to no variant: they are built when first used,
a second or so, and lie in the cache (attncc/cache.py) like any other.  Where one is neither in the cache nor can be
built, torch operations do the same, slower, and a warning says so; so they do on other devices.
"""

from __future__ import annotations

import functools
import tempfile
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from attncc.runtime.artifact import Artifact
    from attncc.runtime.utilities import Utilities

ARCH = "sm_90a"


def append_kv(
    k: Tensor, v: Tensor, kv: tuple[Tensor, Tensor], qo_indptr: Any, kv_indptr: Any, kv_indices: Any,
    last_page_len: Any,
) -> None:  # fmt: skip
    """Write row r of request b, a row of `k` and of `v`, to position kv_len[b] - qo_len[b] + r - qo_indptr[b].

    `k`, `v` [nnz, num_kv_heads, head_dim] of any strides; `kv` = (k_cache, v_cache) [num_pages, page_size,
    num_kv_heads, head_dim] of their dtypes and any strides.  The table is as `BatchAttention.plan` takes it, and as it
    is after appending: tensors, arrays or lists of int32 or int64; `kv_indices` may be longer than kv_indptr[-1], and
    padded.  Rows of k and v at or past qo_indptr[-1] are padding and not written.  k and v may be views of the caches:
    what they held before the call is written.

    With the indices on the device nothing synchronises and a CUDA graph may capture the call: a replay reads them anew.
    Then values are not checked; a row without a place (a page id out of range, a request shorter than its new rows) is
    not written.  Indices on the host are checked, and copied without waiting for the device; they can't be captured.

    One kernel launch on a Hopper GPU, where the last dimensions are contiguous (fastest where all strides are multiples
    of 16 bytes); else torch operations.  These write, where there is not one row to write, one row of the cache with
    what it holds.

    Raises ValueError or TypeError naming the argument, what was expected and what was found; nothing was written then.
    """
    from attncc.runtime import append

    append.append_kv(k, v, kv, qo_indptr, kv_indptr, kv_indices, last_page_len, kernels=_kernels())


def merge_states(
    o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor, lse_base: str = "e"
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The state over the keys of a and b: (o, lse), of the same shapes and dtypes.

    `o_a`, `o_b` [n, H, D] of bf16, f16, f32 or f64, `lse_a`, `lse_b` float32 [n, H] (or float64), all on one device;
    `lse_base`: "e" where lse is a natural logarithm, "2" where it is to base 2.  Computed in float32, or float64 where
    one of them is.  A state whose lse is -inf is empty: its o has no effect, and merging with it changes no bit; two
    empty states give (0, -inf).  Beside an lse of +inf the other state has no weight (two of them share it); NaN stays
    NaN.

    Never synchronises, may be captured in a CUDA graph.  One kernel launch on a Hopper GPU for o of bf16, f16 or f32
    and lse of f32; else torch operations.  Raises ValueError or TypeError naming the argument, what was expected and
    what was found.
    """
    from attncc.runtime import states

    return states.merge_states(o_a, lse_a, o_b, lse_b, lse_base, kernels=_kernels())


def merge_state_list(o: Tensor, lse: Tensor, lse_base: str = "e") -> tuple[Tensor, Tensor]:
    """The state over the keys of S states: (o [n, H, D], lse [n, H]) of `o` [n, S, H, D] and `lse` float32 [n, S, H].

    Everything else as `merge_states`; no state at all (S = 0) gives (0, -inf).
    """
    from attncc.runtime import states

    return states.merge_state_list(o, lse, lse_base, kernels=_kernels())


# ---------------------------------------------------------------------- kernels


def names() -> tuple[str, ...]:
    """Every small kernel."""
    from attncc.codegen.utilities import NAMES

    return NAMES


def artifact(name: str) -> Artifact:
    """A small kernel, from the cache where it was built before.  ImportError where what builds it is missing."""
    from attncc import cache
    from attncc.runtime.artifact import SCHEMA

    return cache.get_or_build(cache.key_of({"utility": name, "schema": SCHEMA}), lambda: _built(name))


def _built(name: str) -> tuple[dict[str, Any], dict[str, bytes]]:
    """(manifest, files) of a small kernel.  What a manifest says of a variant is empty here."""
    from attncc import __version__
    from attncc.codegen import config, utilities

    with tempfile.TemporaryDirectory(prefix="attncc-build-") as work_dir:
        kernel, files = utilities.build(name, work_dir)
    nothing = {"head_dim_qk": 0, "head_dim_vo": 0, "dtype": "", "scan": "", "const": {}, "scalars": [], "tensors": []}
    manifest = {
        "attncc": __version__, "dsl": config.DSL_VERSION, "arch": ARCH, "variant": {"name": name}, "layout": "utility",
        **nothing, "kernels": {name: kernel},
    }  # fmt: skip
    return manifest, files


@functools.cache
def _kernels() -> Utilities:
    from attncc.runtime.utilities import Utilities

    return Utilities(_find)


def _find(name: str) -> Artifact | None:
    try:
        return artifact(name)
    except ImportError as e:
        _warn(str(e))
        return None


@functools.cache
def _warn(reason: str) -> None:
    warnings.warn(
        f"attncc: append_kv and merge_states use torch operations, which are slower: their kernels are not in the "
        f"cache and can't be built ({reason})",
        RuntimeWarning,
        stacklevel=2,
    )
