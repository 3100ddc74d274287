"""f_k and f_v on blocks of keys in shared memory, in place, by the warps that multiply them.

A warp takes eight rows at a time, in the layout of accumulators (vectors.py): a quad of lanes has a row, and a lane
features 8 n + 2 (t % 4) + c.  Rows are read and written as words of two features, free of bank conflicts.

A slot that has landed is transformed before it is multiplied: by the warpgroup whose block it is where they take blocks
in turn, else by all of them, each a share of the rows.  The slot's `ready` barrier completes when every warp has done
its part; in the first case a warp counts for those of the other warpgroup, too.  Where each warp multiplies keys of its
own (few.py) it transforms these, where it can in registers (own_keys.py), and nobody waits.  So each use of a slot is
one phase of `ready` as it is of `full`, and whoever may wait for the one may wait for the other.  The slot goes back by
`empty` as ever, which is after the product and so after `ready`.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from .functors import head_of, key_position
from .ring import own_thread, warp_uniform
from .rows import Line, transform_row
from .softmax import opaque

ROWS = 8  # a warp takes at a time


class Keys(NamedTuple):
    """A block of keys in shared memory: where its first row stands, and from where on keys do not exist; None: all of
    its rows do."""

    env: Any
    first: Any
    stop: Any


class Key(NamedTuple):
    """A row as f_k and f_v know it; `seen`: there is such a key."""

    env: Any
    hd: tuple
    j: Any
    seen: Any


def barriers(p) -> int:
    """How many `ready` barriers a kernel has."""
    return p.k_stages * p.f_k + p.v_stages * p.f_v


def open_ready(p, ready) -> None:
    for n in range(barriers(p)):
        cute.arch.mbarrier_init(ready + n, 4 * p.warpgroups)


def ready_of(p, ready, what: str):
    """The barriers of K's or V's slots."""
    return ready if what == "k" else ready + p.k_stages * p.f_k


@cute.jit
def transform_share(
    p: cutlass.Constexpr, fn: cutlass.Constexpr, what: cutlass.Constexpr, turnings: cutlass.Constexpr, tiles, ready,
    slot: Int32, keys, split, lead,
):  # fmt: skip
    """This warp's share of a slot that has landed.  tiles: address of the first slot; ready: barrier of the first;
    `split`: 1 where the warpgroups take blocks in turn, and this one is its own."""
    base = tiles + slot * (p.tile_kv * (p.tile_qk if what == "k" else p.tile_vo) * 2)
    runs, warps = p.tile_kv // ROWS, 4 * p.warpgroups
    alone, together = -(-runs // 4), -(-runs // warps)
    each = together + split * (alone - together)
    warp = warp_uniform(own_thread() // 32) - 4
    begin = (warp & (warps - 1 - 4 * split)) * each
    transform_rows(p, fn, what, turnings, base, begin, cutlass.min(begin + each, runs), keys)
    say_ready(ready, slot, 1 + split * (p.warpgroups - 1), lead)


@cute.jit
def transform_rows(
    p: cutlass.Constexpr, fn: cutlass.Constexpr, what: cutlass.Constexpr, turnings: cutlass.Constexpr, base: Int32,
    begin: Int32, end: Int32, keys,
):  # fmt: skip
    """Rows ROWS begin … ROWS end - 1 of a block at shared address `base`, but none that nobody has copied."""
    if const_expr(keys.stop is not None):
        end = cutlass.min(end, (keys.stop - keys.first + ROWS - 1) // ROWS)
    hd = head_of(fn, afresh(keys.env, begin))
    for run in cutlass.range(begin, end, unroll=1):
        t, env = opaque(cute.arch.lane_idx()), afresh(keys.env, run)
        row = run * ROWS + t // 4
        at = keys.first + row
        seen = True if keys.stop is None else at < keys.stop
        key = Key(env, hd, key_position(p, keys.env, at, keys.stop), seen)
        transform_key(p, fn, what, turnings, base, p.tile_kv, row, key, t)
    cute.arch.fence_view_async_shared()
    cute.arch.sync_warp()


def afresh(env, turn):
    """The environment, of which nothing that is computed from the variant's parameters is kept in registers from one
    turn of a loop to the next: neither what a feature reads nor where it lies.
    (ptxas sees through a mere zero.)"""
    if not any(isinstance(x, Int64) for x in env.params):  # nothing is read
        return env
    zero = turn >> 16
    return env._replace(params=tuple(x if isinstance(x, Float32) else x + type(x)(zero) for x in env.params))


def say_ready(ready, slot, count, lead) -> None:
    """This warp is done with its part of a slot; it counts for `count`."""
    cute.arch.inline_ptx(
        "mbarrier.arrive.shared::cta.b64 _, [{$r0}], {$r1};",
        read_only_args=[(ready + slot).toint(), count],
        predicate=lead,
    )


def transform_key(p, fn, what: str, turnings, base, rows: int, row, key: Key, t) -> None:
    """A row of a tile of `rows` rows at shared address `base`.  Where there is no such key it becomes zeros in V, since
    its weight is 0 times it; in K nobody looks at its score.  Beside V's rows there are weights that wait for them."""
    width, used = (p.tile_qk, p.head_dim_qk) if what == "k" else (p.tile_vo, p.head_dim_vo)
    line = Line(base, row, rows, width, key.seen if what == "v" else True)
    transform_row(p, fn, f"f_{what}", turnings, tuple(key), line, used, t, what == "k")
