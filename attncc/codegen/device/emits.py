"""Extra outputs: what `emit` asks for, reduced over the visible keys of a row beside softmax.

A thread reduces its own columns of every block, once, from the scores as the product left them: before softmax writes
to these, and whichever pass it takes.  The four lanes that share a row meet when the tile ends.  What the pieces of a
cut tile found waits in device memory beside their states, and is reduced in the order of the plan.

`found`: for every reduction of `p.emits` a pair of registers, one a row of the thread.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from .functors import cell_of, columns, emitted_of, position, visible
from .layout import quad, row_elems
from .softmax import IDENTITY, chains, hidden_already, hide, opaque

OPS = {"max": cute.arch.fmax, "min": cute.arch.fmin, "sum": lambda a, b: a + b}


@cute.jit
def observe(p: cutlass.Constexpr, fn: cutlass.Constexpr, S, state, tile, col0, masked):
    """A block of scores, before softmax takes them.  Where softmax would begin by hiding some this is done here: two
    branches one after the other, on the same condition, make ptxas call the loop divergent."""
    if const_expr(p.emits):
        if masked:
            reduce_block(p, fn, S, state.emits, tile, opaque(col0), True)
            if const_expr(hidden_already(p)):
                hide(p, fn, S, tile, col0)
        else:
            reduce_block(p, fn, S, state.emits, tile, opaque(col0), False)


def reduce_block(p, fn, S, found, tile, col0, masked: bool):
    cls = columns(p, fn, tile, col0)
    for i in range(2):
        for k, reduce in enumerate(p.emits):
            cells = []
            for e in row_elems(i, p.tile_kv):
                cl, off = cls[i][e[2], e[1]], 8 * e[2] + e[1]
                seen = visible(p, fn, tile, i, cl, col0, off) if masked else True
                x = cell_of(fn, k, tile, i, cl, S[e], position(p, tile, col0, off), seen)
                cells.append(cutlass.select_(seen, x, Float32(IDENTITY[reduce])) if masked else x)
            found[k][i] = OPS[reduce](found[k][i], chains(OPS[reduce], cells, 4))


def finished(p, fn, state, tile):
    """Each row's values, in all lanes; of a row that sees no key, the identity."""
    found = tuple(cute.make_rmem_tensor((2,), Float32) for _ in p.emits)
    for k, reduce in enumerate(p.emits):
        for i in range(2):
            total = quad(OPS[reduce], state.emits[k][i])
            found[k][i] = cutlass.select_(total == IDENTITY[reduce], total, emitted_of(fn, k, tile, i, total))
    return found


@cute.jit
def store_emits(p: cutlass.Constexpr, fn: cutlass.Constexpr, found, tile, rows, stop: Int32, c_in: Int32):
    """[B, qo_len, num_qo_heads] or [nnz_qo, num_qo_heads] of every reduction, for the thread's `rows` below `stop`."""
    if const_expr(p.emits):
        for i in cutlass.range_constexpr(2):
            if (c_in == 0) & (rows[i] < stop):
                store_row(p, fn, found, tile, i)


def store_row(p, fn, found, tile, i: int) -> None:
    env, iq = tile.rows[i].env, tile.rows[i].iq
    first = Int64(env.q_start) if p.served else Int64(env.b) * env.qo_len
    at = (first + iq) * env.num_qo_heads + env.h
    for k, rows in enumerate(fn.emit_rows(env)):
        put(rows + at * 4, found[k][i])


def put(address, x) -> None:
    cute.arch.inline_ptx("st.global.f32 [{$r0}], {$r1};", read_only_args=[address, x])


# ------------------------------------------------------------------------------------- across warpgroups and CTAs
def in_fours(found):
    """Pairs of registers as lists of four (pair, which)."""
    flat = [(pair, i) for pair in found for i in range(2)]
    return [flat[n : n + 4] for n in range(0, len(flat), 4)]


def part(p, fn, tile, row, k: int):
    """Where reduction k of a partial row lies."""
    return fn.emit_parts(tile.rows[0].env) + (row * len(p.emits) + k) * 4


def store_parts(p, fn, found, tile, i: int, row) -> None:
    """What a piece found for row i of the thread, which is a partial row."""
    for k in range(len(p.emits)):
        put(part(p, fn, tile, row, k), found[k][i])


def add_parts(p, fn, found, tile, i: int, row) -> None:
    for k, reduce in enumerate(p.emits):
        load = "ld.global.cg.f32 {$w0}, [{$r0}];"
        x = cute.arch.inline_ptx(load, write_only_types=[Float32], read_only_args=[part(p, fn, tile, row, k)])
        found[k][i] = OPS[reduce](found[k][i], x)
