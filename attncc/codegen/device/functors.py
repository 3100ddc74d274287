"""A variant's generated functors on one fragment, one row, one tile.

The generated module (codegen/emit.py) is a set of straight-line functions; what they share is handed down in
tuples, each computed once at its own level:

  head(x)                        -> hd   what depends on scalars, request and head
  row(x, hd, i, iq)              -> rw   ... and on the query row
  block(x, hd, i0, j)            -> bk   of a thread's first column j in a block of keys
  col(x, hd, bk, j, off)         -> cl   of column j = first + off, shared by the thread's two rows
  unit(hd, rw)                   logit in base 2 = unit * score + shift
  factors(x, hd, j, seen)        what key j multiplies the dot product by, and its weight: those that there are
  ahead(x, hd, j, seen)          what its rows of k and v are multiplied by before they are read (ahead.py)
  score(x, hd, rw, cl, dot, i, j, seen)  seen: a lane that may read memory
  ramp(hd, bk)                   (a, start, step) where score = a * dot + start + step * off
  shift(x, hd, rw, i, i0)
  mask(x, hd, rw, cl, i, j)      is key j there for row i
  sink(x, hd, rw, i)             the sink logit, base 2
  bounds(x, i0, i1)              keys [lo, hi) that any row of i0..i1 sees, [clear_lo, clear_hi) that all see
  classify(x, i0, i1, j0, j1)    (may any cell be seen, must all be)
  line(x, iq), block_keys(x), listed(x, i, iq)   of a domain: lists.py, listing.py
  cell_K(x, hd, rw, cl, dot, i, j, seen), emitted_K(x, hd, rw, i, i0, total)  what emit K reduces; the row's value
  emit_rows(x), emit_parts(x)    addresses: of the rows of every emit, of what pieces of tiles leave

Vector slots have functions of their own (vectors.py).

A method called inside a run-time loop counts as a change of its object for the DSL, so kernels reach the module
only through the functions here.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass._mlir.dialects import llvm


class Env(NamedTuple):
    """Where a value is computed, and what the call was given."""

    b: Any
    h: Any
    g: Any
    qo_len: Any
    kv_len: Any
    num_qo_heads: Any
    num_kv_heads: Any
    group_size: Any
    params: tuple
    # served kernels: where the request's rows and keys lie
    q_start: Any = None
    key_offset: Any = None
    key_stop: Any = None
    table: Any = None
    page_size: Any = None
    kv_indices: Any = None
    shift: Any = None  # dense kernels that pack heads (heads.py): log2 of how many a tile holds


class Grid(NamedTuple):
    num_tiles_q: Any
    num_heads_batch: Any
    section: Any
    late_tiles: Any


def tile_bounds(fn, env, i0, i1):
    return fn.bounds(env, i0, i1)


def classify_tile(fn, env, i0, i1, j0, j1):
    return fn.classify(env, i0, i1, j0, j1)


def head_of(fn, env):
    return fn.head(env)


class Row(NamedTuple):
    """One query row of a thread: its own values, position, and, for masks of one run, the keys [lo, hi) it sees.  The
    rows of a packed tile may be of different heads and requests: each has its own environment."""

    env: Env
    hd: tuple
    unit: Any
    rw: tuple
    i: Any
    iq: Any
    lo: Any
    hi: Any
    line: Any = None  # where a domain's bits of it lie


class Block(NamedTuple):
    """A block of keys: this thread's first column in each part of it, and whether the mask runs."""

    col0: Any
    masked: Any


class Tile(NamedTuple):
    """What a thread keeps while it works on one query tile."""

    rows: tuple[Row, Row]
    i0: Any
    stop: Any  # keys from this position on do not exist; where keys are listed, from this place in the list on
    chosen: Any = None  # of each row: which columns of one block of keys a domain lists, as bits (lists.py)


def open_tile(p, fn, envs, i0, rows) -> Tile:
    """The tile of a thread with two rows, each of the head that its environment says.  Rows past qo_len repeat the last
    one: they read only what it reads, and are never stored."""
    hds = (first := fn.head(envs[0]), first if envs[1] is envs[0] else fn.head(envs[1]))
    last = envs[0].qo_len - 1
    opened = tuple(
        open_row(p, fn, env, hd, cutlass.min(r, last), env.kv_len) for env, hd, r in zip(envs, hds, rows, strict=True)
    )
    return Tile(opened, i0, envs[0].kv_len)


def unit_of(p, fn, hd, rw):
    unit = fn.unit(hd, rw)
    if p.score == "dot" and not p.unit_positive:
        unit = cutlass.select_(unit == 0.0, Float32(1e-30), unit)  # so that a hidden score, times it, is -inf
    return unit


def open_row(p, fn, env, hd, iq, stop) -> Row:
    i = iq + env.kv_len - env.qo_len
    lo, hi = Int32(0), stop
    if p.row_bounds:
        lo, hi, _, _ = fn.bounds(env, i, i)
        hi = cutlass.min(hi, stop)
    rw = fn.row(env, hd, i, iq)
    line = line_of(fn, env, iq) if p.list_block else None
    return Row(env, hd, unit_of(p, fn, hd, rw), rw, i, iq, lo, hi, line)


def column(p, col0, off: int):
    """The place of column `off` after a thread's first one in a block whose parts begin at `col0`."""
    return col0[off // p.part_kv] + off % p.part_kv


def position(p, tile: Tile, col0, off: int):
    """Where that column stands: at its place, or, where keys are listed in blocks, as the list says (anywhere, for
    columns past the last key).  Nobody asks memory where nobody uses it."""
    if p.layout != "blocks":
        return column(p, col0, off)
    alike = p.chunk or 1  # columns whose blocks are the same
    return key_position(p, tile.rows[0].env, column(p, col0, off // alike * alike), tile.stop) + off % alike


def key_position(p, env, key, stop):
    """Where a key stands; `key`, too, unless keys are listed in blocks: then that is its place in the list.  None for
    `stop`: there is such a key."""
    if p.layout != "blocks":
        return key
    index = Int32(Uint32(key) // Uint32(env.page_size))
    there = True if stop is None else Uint32(key) < Uint32(stop)  # what is read ahead may lie before the first key
    listed = load_word(env.kv_indices + Int64(env.table + index) * 4, there)
    return (listed - index) * env.page_size + key


def load_word(address, ok):
    """32 bits at an address where ok, else 0: a load that LLVM may share, move and drop."""
    asm = "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0; @p ld.global.nc.b32 $0, [$1]; }"
    arguments = [Int64(address).ir_value(), Int32(ok).ir_value()]
    return Int32(llvm.inline_asm(Int32.mlir_type, arguments, asm, "=r,l,r", has_side_effects=False))


def visible(p, fn, tile: Tile, i: int, cl, col0, off: int):
    """Does the key of column col0 + off exist for row i of the thread?"""
    row = tile.rows[i]
    if p.row_bounds:  # ptxas moves bits of a word to predicates seven at a time
        bits = columns_below(p, row.hi, col0)
        if p.masks_below:
            bits = bits & ~columns_below(p, row.lo, col0)
        if p.list_block:
            bits = bits & tile.chosen[i]
        return (bits & bit_of(off)) != 0
    j = position(p, tile, col0, off)
    seen = (column(p, col0, off) < tile.stop) & fn.mask(row.env, row.hd, row.rw, cl, row.i, j)
    return seen & ((tile.chosen[i] & bit_of(off)) != 0) if p.list_block else seen


def columns_below(p, x, col0):
    """A thread's columns of a block whose places are below x, as bits."""
    bits = prefix(x - col0[0], p.part_kv if p.parts > 1 else 128)
    for k, first in enumerate(col0[1:], start=1):
        bits = bits | prefix(x - first, p.part_kv) << k * part_bits(p)
    return bits


def part_bits(p) -> int:
    return p.part_kv // 8 * 2


def prefix(n, most: int = 128):
    """A thread's columns 0, 1, 8, 9, 16, 17, … below n, as the low bits of a word; n is at most `most`."""
    n = cutlass.min(cutlass.max(n, 0), most)
    count = 2 * (n >> 3) + cutlass.min(n & 7, 2)
    return Int32((Int64(1) << Int64(count)) - 1)


def bit_of(off: int) -> int:
    """The bit of column `off` in such a word, as a signed 32-bit number."""
    bit = 1 << (2 * (off // 8) + off % 8)
    return bit - (1 << 32) if bit >> 31 else bit


def line_of(fn, env, iq):
    """Address of a row's line of bits."""
    return fn.line(env, iq)


def list_of(fn, env, i, iq):
    """A row's list of blocks: address, stride in elements, how many."""
    return fn.listed(env, i, iq)


def block_keys(fn, env):
    return Uint32(fn.block_keys(env))


def columns(p, fn, tile: Tile, col0):
    """The values of every column (n, c) of this thread in a block, for each of its rows."""
    first = row_columns(p, fn, tile, 0, col0)
    return first, row_columns(p, fn, tile, 1, col0) if p.columns_by_row else first


def row_columns(p, fn, tile: Tile, i: int, col0):
    row = tile.rows[i]
    found = {}
    for k, first in enumerate(col0):
        bk, begin = fn.block(row.env, row.hd, tile.i0, first), k * p.part_kv
        for off in (begin + 8 * n + c for n in range(p.part_kv // 8) for c in range(2)):
            found[off // 8, off % 8] = fn.col(row.env, row.hd, bk, position(p, tile, col0, off), off - begin)
    return found


def ramp_of(p, fn, tile: Tile, col0):
    """(a, start, step) of each row in one part of a block, with score = a * dot + start + step * off."""
    rows = [fn.ramp(r.hd, fn.block(r.env, r.hd, tile.i0, col0)) for r in tile.rows[: 1 + p.columns_by_row]]
    return rows[0], rows[-1]


def score_of(p, fn, tile: Tile, i: int, cl, dot, col0, off: int, seen):
    row = tile.rows[i]
    return fn.score(row.env, row.hd, row.rw, cl, dot, row.i, position(p, tile, col0, off), seen)


def shift_of(fn, tile: Tile, i: int):
    row = tile.rows[i]
    return fn.shift(row.env, row.hd, row.rw, row.i, tile.i0)


def sink_of(fn, tile: Tile, i: int):
    row = tile.rows[i]
    return fn.sink(row.env, row.hd, row.rw, row.i)


def cell_of(fn, k: int, tile: Tile, i: int, cl, dot, j, seen):
    """What one key and row add to reduction k."""
    row = tile.rows[i]
    return getattr(fn, f"cell_{k}")(row.env, row.hd, row.rw, cl, dot, row.i, j, seen)


def emitted_of(fn, k: int, tile: Tile, i: int, total):
    row = tile.rows[i]
    return getattr(fn, f"emitted_{k}")(row.env, row.hd, row.rw, row.i, tile.i0, total)


def highest_bit(x):
    """Position of the highest set bit of a word that is not 0."""
    return cute.arch.inline_ptx("bfind.u32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[x])


NEG_INF = -Float32.inf
