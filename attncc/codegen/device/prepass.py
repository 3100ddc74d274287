"""The pre-pass: f_k of every row of k and f_v of every row of v, once, into memory of their own.

A warp has 16 rows of a head at a time: sixteen bytes a lane from global to shared memory and back, and in between what
keys.py does to rows of a block.
"""

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from ..prepass import PARAMS, THREADS
from .features import fill_features
from .functors import Env, head_of
from .gather import place
from .keys import ROWS, Key, transform_key
from .packed import word
from .rope import allocate_tables, features_of, fill_turnings
from .softmax import opaque

SHARE = 16  # rows of a warp at a time
LOT = 4  # copies of a lane
TILE = SHARE * (THREADS // 32)

Pass = NamedTuple("Pass", [(name, Any) for name, _ in PARAMS])


class Side(NamedTuple):
    """k or v: what of, addresses, strides in 16 bytes, features in memory and in shared memory."""

    what: str
    source: Any
    target: Any
    batch: Any
    row: Any
    head: Any
    used: int
    width: int


def side_of(p, what: str, x) -> Side:
    """`x`: a kernel's parameters, with these names among them."""
    strides = [getattr(x, f"{what}_{n}_stride") for n in ("batch", "row", "head")]
    widths = (p.head_dim_qk, p.tile_qk) if what == "k" else (p.head_dim_vo, p.tile_vo)
    return Side(what, getattr(x, what), getattr(x, f"{what}_out"), *strides, *widths)


def read_chunk(address):
    """16 bytes of global memory, as words."""
    load = "ld.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];"
    return cute.arch.inline_ptx(load, write_only_types=[Int32] * 4, read_only_args=[address])


def int_at(address, n):
    return word(cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=4), n)


@cute.jit
def request_of(x, row: Int32):
    """(request, its first row, qo_len, kv_len) of a row of ragged keys: of the last that starts at or before it."""
    count = int_at(x.header, 3)
    low, high = Int32(0), count
    while high - low > 1:
        middle = (low + high) // 2
        if int_at(x.requests, 4 * middle + 3) <= row:
            low = middle
        else:
            high = middle
    first, qo_len, kv_len = (int_at(x.requests, 4 * low + n) for n in (3, 1, 2))
    return low, first, qo_len, cutlass.select_(count > 0, kv_len, Int32(0))


def key_of(p, fn, x: Pass, outer: Env, b, g, row) -> Key:
    """Row `row` of batch entry b, or of all rows."""
    env = outer._replace(b=b, h=g * x.group_size, g=g)
    first, seen = 0, row < x.rows
    if p.layout == "ragged":
        b, first, qo_len, kv_len = request_of(x, row)
        env = env._replace(
            b=b, qo_len=qo_len, kv_len=kv_len, q_start=Int32(0), key_offset=Int32(0), key_stop=kv_len, table=first,
            page_size=Int32(0), kv_indices=Int64(0),
        )  # fmt: skip
        seen = seen & (row - first < kv_len)
    return Key(env, head_of(fn, env), row - first, seen)


def chunks_of(side: Side):
    """(row, chunk of 16 bytes) of each copy of a lane."""
    each, lane = side.used // 8, cute.arch.lane_idx()
    for n in range(-(-SHARE * each // 32)):
        at = n * 32 + lane
        yield cutlass.min(at // each, SHARE - 1), at % each


def lots_of(side: Side):
    """... and of those that are on their way at once: where rows fill no tile, all of them would make ptxas spill."""
    chunks = list(chunks_of(side))
    size = len(chunks) if side.used == side.width else LOT
    return [chunks[k : k + size] for k in range(0, len(chunks), size)]


@cute.jit
def pass_over(
    p: cutlass.Constexpr, fn: cutlass.Constexpr, what: cutlass.Constexpr, turnings: cutlass.Constexpr, x, outer,
    base: Int32,
):  # fmt: skip
    side = side_of(p, what, x)
    bx, _, _ = cute.arch.block_idx()
    gx, _, _ = cute.arch.grid_dim()
    first = cute.arch.warp_idx() * SHARE
    tiles = (x.rows + TILE - 1) // TILE
    for n in cutlass.range(bx, tiles * x.num_kv_heads * x.batch, gx, unroll=1):
        m = n // x.num_kv_heads
        g = n - m * x.num_kv_heads
        b = m // tiles
        row0 = (m - b * tiles) * TILE + first
        here = side.source + (Int64(b) * side.batch + Int64(g) * side.head) * 16
        for lot in lots_of(side):
            found = []
            for row, chunk in lot:  # rows past the last repeat it
                at = here + Int64(cutlass.min(row0 + row, x.rows - 1)) * Int64(side.row) * 16 + chunk * 16
                found.append(read_chunk(at))
            for (row, chunk), words in zip(lot, found, strict=True):
                cute.arch.inline_ptx(
                    "st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
                    read_only_args=[base + place(first + row, chunk, TILE, side.width), *words],
                )
        cute.arch.sync_warp()
        for run in cutlass.range_constexpr(SHARE // ROWS):
            t = opaque(cute.arch.lane_idx())
            row = run * ROWS + t // 4
            key = key_of(p, fn, x, outer, b, g, cutlass.min(row0 + row, x.rows - 1))
            transform_key(p, fn, what, turnings, base, TILE, first + row, key, t)
        cute.arch.sync_warp()
        for row, chunk in chunks_of(side):
            words = cute.arch.inline_ptx(
                "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
                write_only_types=[Int32] * 4, read_only_args=[base + place(first + row, chunk, TILE, side.width)],
            )  # fmt: skip
            if row0 + row < x.rows:
                at = (Int64(b) * x.rows + (row0 + row)) * x.num_kv_heads + g
                cute.arch.inline_ptx(
                    "st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
                    read_only_args=[side.target + at * (side.used * 2) + chunk * 16, *words],
                )
        cute.arch.sync_warp()


@cute.kernel
def kernel(values, p: cutlass.Constexpr, fn: cutlass.Constexpr):
    x = Pass(*values[: len(PARAMS)])
    t, _, _ = cute.arch.thread_idx()
    zero = Int32(0)
    outer = Env(
        zero, zero, zero, x.qo_len, x.kv_len, x.num_qo_heads, x.num_kv_heads, x.group_size, values[len(PARAMS) :]
    )
    smem = SmemAllocator()
    tile = smem.allocate_array(Int32, TILE * max(p.tile_qk, p.tile_vo) // 2, byte_alignment=1024)
    turnings = allocate_tables(p, smem)
    fill_turnings(p, fn, turnings, outer, t % 128, t // 128)
    fill_features(p, fn, features_of(p, turnings), outer, t % 128, t // 128)
    base = tile.toint()
    if const_expr(p.f_k):
        pass_over(p, fn, "k", turnings, x, outer, base)
    if const_expr(p.f_v):
        if const_expr(p.f_k):  # rows of another width lie elsewhere: where other warps may still have rows of K
            cute.arch.sync_threads()
        pass_over(p, fn, "v", turnings, x, outer, base)


@cute.jit
def host(
    values, stream: cuda.CUstream, p: cutlass.Constexpr, fn: cutlass.Constexpr, per_sm: cutlass.Constexpr,
):  # fmt: skip
    kernel(values, p, fn).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=per_sm)
