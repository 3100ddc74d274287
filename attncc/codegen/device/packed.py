"""Served batches: what a work item says, and the rows of a packed tile.

A tile is up to tile_q consecutive *packed rows* of one kv head g: packed row P = r * group_size + x is query row r of
the whole batch and query head g * group_size + x.  So heads that share keys fill a tile even where a request has one
row.  Keys are counted within an item's own list (`keys` of them, the first at position `offset`).

Items come from the plan (runtime/plan.py says what each word means); the schedule warp adds the kv head and the blocks
that the mask leaves.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass._mlir.dialects import llvm

from .functors import Block, Env, Tile, open_row
from .lists import Lines
from .ring import warp_uniform

RECORD_WORDS, TARGET_WORDS, SOURCES = 16, 8, 4  # ... and which word of a target counts its pieces
RECORD = (
    "request", "head", "row0", "rows", "key_begin", "key_end", "keys", "offset", "table", "target0", "targets", "delta",
    "q_start", "qo_len", "kv_len", "spare",
)  # fmt: skip
# blocks [begin, end), of which clear_count from clear_begin need no mask; where the mask has holes: their number, as
# [0, end), and what the walk over them starts from
ADDED = (
    "g", "live", "begin", "end", "clear_begin", "clear_count", "split", "lo", "hi", "clear_lo", "clear_hi", "i0", "i1",
    "classify",
)  # fmt: skip
WORDS = {name: n for n, name in enumerate(RECORD + ADDED)}
ITEM_WORDS, ITEM_STAGES = 32, 4
FEW = 16  # rows that mma.sync takes (few.py)


class Lists(NamedTuple):
    """The plan and the partial states in device memory: pointers."""

    header: Any
    tickets: Any
    items: Any
    targets: Any
    sources: Any
    row_request: Any
    requests: Any
    kv_indices: Any
    part_o: Any
    part_lse: Any
    counters: Any


class Sizes(NamedTuple):
    rows: Any  # of q and out
    q_row: Any  # strides, in elements
    q_head: Any
    out_row: Any
    out_head: Any
    num_qo_heads: Any
    num_kv_heads: Any
    group_size: Any
    page_size: Any  # 0: keys lie one after another
    params: tuple


class Owner(NamedTuple):
    """A request, as its rows know it; request -1: each row looks its own up."""

    request: Any
    q_start: Any
    qo_len: Any
    kv_len: Any


def word(pointer, at):
    return cute.make_tensor(pointer + at, cute.make_layout(1))[0]


EVICT_LAST = 0x14F0000000000000  # an L2 policy


def kept_word(pointer, at, ok):
    """A word of the plan where ok, else 0.  Every layer of a model reads it again: it is to stay in L2 while keys
    stream through.  A predicate, not a branch: at a join the warp would wait for what it has loaded."""
    asm = "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0; @p ld.global.L2::cache_hint.b32 $0, [$1], $3; }"
    arguments = [(pointer + at).toint().ir_value(), Int32(ok).ir_value(), Int64(EVICT_LAST).ir_value()]
    return Int32(llvm.inline_asm(Int32.mlir_type, arguments, asm, "=r,l,r,l", has_side_effects=False))


class Load(NamedTuple):
    """What the producers read of an item."""

    live: Any
    g: Any
    row0: Any
    rows: Any
    keys: Any
    table: Any
    begin: Any
    end: Any
    split: Any


class Keyed(NamedTuple):
    """... and where keys have factors."""

    offset: Any
    kv_len: Any


class Holes(NamedTuple):
    """... and where the mask has holes."""

    request: Any
    q_start: Any
    qo_len: Any
    kv_len: Any
    offset: Any
    lo: Any
    hi: Any
    clear_lo: Any
    clear_hi: Any
    i0: Any
    i1: Any
    classify: Any


class Work(NamedTuple):
    """What the consumers read of an item."""

    live: Any
    g: Any
    request: Any
    q_start: Any
    qo_len: Any
    kv_len: Any
    row0: Any
    rows: Any
    keys: Any
    offset: Any
    table: Any
    begin: Any
    end: Any
    clear_begin: Any
    clear_count: Any
    split: Any
    target0: Any
    targets: Any
    delta: Any
    i0: Any


def peek(kind, items, slot):
    """The words of an item that `kind` names, the same in all lanes."""
    at = cute.make_tensor(items + ITEM_WORDS * slot, cute.make_layout(ITEM_WORDS))
    return kind(*(warp_uniform(at[WORDS[name]]) for name in kind._fields))


@cute.jit
def owner_of(owner, lists, row: Int32):
    """The request of a query row."""
    request, q_start, qo_len, kv_len = owner.request, owner.q_start, owner.qo_len, owner.kv_len
    if request < 0:
        request = word(lists.row_request, row)
        at = cute.make_tensor(lists.requests + 4 * request, cute.make_layout(4))
        q_start, qo_len, kv_len = at[0], at[1], at[2]
    return Owner(request, q_start, qo_len, kv_len)


def env_of(owner, h, g, offset, keys, table, lists, sizes) -> Env:
    return Env(
        owner.request, h, g, owner.qo_len, owner.kv_len, sizes.num_qo_heads, sizes.num_kv_heads, sizes.group_size,
        sizes.params, owner.q_start, offset, offset + keys, table, sizes.page_size, lists.kv_indices.toint(),
    )  # fmt: skip


def launch_env(sizes) -> Env:
    """What all requests and heads share."""
    nothing = Int32(0)
    return Env(
        nothing, nothing, nothing, nothing, nothing, sizes.num_qo_heads, sizes.num_kv_heads, sizes.group_size,
        sizes.params,
    )  # fmt: skip


def row_env(owner, packed, g, offset, keys, table, lists, sizes):
    """(environment, row in its request) of a packed row."""
    r = packed // sizes.group_size
    mine = owner_of(owner, lists, r)
    h = g * sizes.group_size + (packed - r * sizes.group_size)
    return env_of(mine, h, g, offset, keys, table, lists, sizes), r - mine.q_start


def lines_of(p, row0, rows, sizes) -> Lines | None:
    """The lines of a domain that the rows of a tile have."""
    if not p.walks_lists:
        return None
    if p.lists_by == "h":
        return Lines(row0, rows)
    first = row0 // sizes.group_size
    return Lines(first, (row0 + rows - 1) // sizes.group_size - first + 1)


def open_packed(p, fn, owner, g, row0, rows, row, offset, table, keys, i0, lists, sizes) -> Tile:
    """The tile of a thread whose rows are row, row + 8 of packed rows row0 … row0 + rows - 1; rows past the last repeat
    it.  Keys end `keys` past `offset`."""
    opened, stop = (), offset + keys
    for r in (row, row + 8):
        env, iq = row_env(owner, row0 + cutlass.min(r, rows - 1), g, offset, keys, table, lists, sizes)
        opened = (*opened, open_row(p, fn, env, fn.head(env), iq, stop))
    return Tile(opened, i0, stop)


def block_of(p, tags, slot, item, n, c_in) -> Block:
    """Block n of an item; where the mask has holes, the one that the slot's tag says."""
    if p.counted:
        # one unsigned comparison: two joined by `or` make ptxas call the loop divergent
        masked = cutlass.Uint32(n - item.clear_begin) >= cutlass.Uint32(item.clear_count)
    else:
        tag = warp_uniform(cute.make_tensor(tags + slot, cute.make_layout(1))[0])
        n, masked = tag >> 1, (tag & 1) != 0
    return Block((item.offset + n * p.tile_kv + c_in,), masked)
