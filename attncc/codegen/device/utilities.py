"""What stands beside attention, one launch each: rows into a paged cache, and the merge of attention states.

Parameters are addresses, counts, and strides in bytes; names and order: codegen/utilities.py.
"""

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int8, Int16, Int32, Int64, Uint32
from cutlass._mlir.dialects import llvm

from ..utilities import AHEAD, APPEND, MERGE, THREADS

# width in bytes of what a lane moves at a time -> elements and their type
UNITS = {16: (4, Int32), 8: (2, Int32), 4: (1, Int32), 2: (1, Int16), 1: (1, Int8)}
FLOATS = {"bf16": BFloat16, "f16": Float16, "f32": Float32}

Append = NamedTuple("Append", [(name, Any) for name, _ in APPEND])
Merge = NamedTuple("Merge", [(name, Any) for name, _ in MERGE])


def at(address, kind, count: int):
    """`count` elements at an address, which is a multiple of their size together."""
    width = kind.width // 8 * count
    return cute.make_tensor(
        cute.make_ptr(kind, address, cute.AddressSpace.gmem, assumed_align=width), cute.make_layout(count)
    )


# ------------------------------------------------------------------------------------- append
def index(base, stride, n, wide):
    """Element n of a list of int32, or of int64 where `wide`."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.b32 p, {$r1}, 0; @p ld.global.b64 {$w0}, [{$r0}]; @!p ld.global.s32 {$w0}, [{$r0}]; }",
        write_only_types=[Int64],
        read_only_args=[base + Int64(n) * stride, wide],
    )


@cute.jit
def request_of(x: Append, row: Int32):
    """How many requests end at or before `row`: 32 places of qo_indptr at a time."""
    low, high = Int32(0), x.batch
    lane = cute.arch.lane_idx()
    while low < high:
        step = Int32((Uint32(high - low) + 31) // 32)
        place = low + (lane + 1) * step - 1
        end = index(x.qo_indptr, x.qo_indptr_stride, cutlass.min(place, high - 1) + 1, x.wide & 1)
        passed = cute.arch.popc(cute.arch.vote_ballot_sync((place < high) & (end <= Int64(row))))
        low = low + passed * step
        high = cutlass.min(high, low + step - 1)
    return cutlass.min(low, x.batch - 1)


@cute.jit
def place_of(x: Append, row: Int32):
    """(has the row a place, its page, its row there)."""
    b = request_of(x, row)
    end = index(x.qo_indptr, x.qo_indptr_stride, b + 1, x.wide & 1)
    total = index(x.qo_indptr, x.qo_indptr_stride, x.batch, x.wide & 1)
    first = index(x.kv_indptr, x.kv_indptr_stride, b, x.wide & 2)
    last = index(x.kv_indptr, x.kv_indptr_stride, b + 1, x.wide & 2)
    length = (last - first - 1) * Int64(x.page_size) + index(x.last_page_len, x.last_page_len_stride, b, x.wide & 8)
    position = Int64(row) + length - end
    n = Uint32(position) // Uint32(x.page_size)
    entry = first + Int64(n)
    held = (Int64(row) < total) & (position >= 0) & (position <= 0x7FFFFFFF)
    held = held & (entry >= 0) & (entry < last) & (entry < Int64(x.num_indices))
    page = index(x.kv_indices, x.kv_indices_stride, cutlass.select_(held, Int32(entry), Int32(0)), x.wide & 4)
    held = held & (page >= 0) & (page < Int64(x.num_pages))
    return held, page, Int64(Uint32(position) - n * Uint32(x.page_size))


class Unit(NamedTuple):
    """One unit of a row: which head of k or v, how many bytes into it, and is it there."""

    of_v: Any
    head: Any
    rest: Any
    mine: Any


def unit_of(x: Append, unit: int, row, n) -> Unit:
    of_v = n >= x.heads * x.k_units
    units = cutlass.select_(of_v, x.v_units, x.k_units)
    n = n - cutlass.select_(of_v, x.heads * x.k_units, Int32(0))
    head = Int32(Uint32(n) // Uint32(units))
    return Unit(of_v, Int64(head), Int64(n - head * units) * unit, (head < x.heads) & (row < x.rows))


def source_of(x: Append, row, u: Unit):
    k, v = x.k + row * x.k_row + u.head * x.k_head, x.v + row * x.v_row + u.head * x.v_head
    return cutlass.select_(u.of_v, v, k) + u.rest


def target_of(x: Append, page, slot, u: Unit):
    k = x.k_cache + page * x.k_page_stride + slot * x.k_slot_stride + u.head * x.k_head_stride
    v = x.v_cache + page * x.v_page_stride + slot * x.v_slot_stride + u.head * x.v_head_stride
    return cutlass.select_(u.of_v, v, k) + u.rest


@cute.kernel
def append(values, unit: cutlass.Constexpr):
    """A warp copies a piece of a row: 32 units AHEAD times.  What it copies is on its way while it looks for where."""
    x = Append(*values)
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    piece = block * (THREADS // 32) + thread // 32
    row = Int32(Uint32(piece) // Uint32(x.pieces))
    first = (piece - row * x.pieces) * (32 * AHEAD) + thread % 32
    units = [unit_of(x, unit, row, first + 32 * i) for i in range(AHEAD)]
    count, kind = UNITS[unit]
    words = [cute.make_rmem_tensor((count,), kind) for _ in range(AHEAD)]
    for i in cutlass.range_constexpr(AHEAD):
        if units[i].mine:
            cute.autovec_copy(at(source_of(x, Int64(row), units[i]), kind, count), words[i])
    held, page, slot = place_of(x, row)
    for i in cutlass.range_constexpr(AHEAD):
        if held & units[i].mine:
            cute.autovec_copy(words[i], at(target_of(x, page, slot, units[i]), kind, count))


@cute.jit
def host_append(values, stream: cuda.CUstream, unit: cutlass.Constexpr):
    append(values, unit).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)


# ------------------------------------------------------------------------------------- merge
def minus_zero():
    """What an addition doesn't change.  The DSL takes a written -0.0 and 0.0 for the same constant."""
    return Float32(llvm.bitcast(Float32.mlir_type, Int32(-(2**31)).ir_value()))


@cute.kernel
def merge(values, kind: cutlass.Constexpr, count: cutlass.Constexpr):
    """A thread sums `count` features of a row over its states, in order."""
    x = Merge(*values)
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    n = Uint32(block) * THREADS + Uint32(thread)
    if n < Uint32(x.total):
        row_head = n // Uint32(x.chunks)
        chunk = n - row_head * Uint32(x.chunks)
        row = row_head // Uint32(x.heads)
        head = Int64(row_head - row * Uint32(x.heads))
        o_at = x.o + Int64(row) * x.o_row + head * x.o_head + Int64(chunk) * (kind.width // 8 * count)
        lse_at = x.lse + Int64(row) * x.lse_row + head * x.lse_head
        top = -Float32.inf
        for s in cutlass.range(x.states, unroll=2):
            top = cute.arch.fmax(top, at(lse_at + Int64(s) * x.lse_state, Float32, 1)[0])
        total = Float32(0.0)
        acc, part = cute.make_rmem_tensor((count,), Float32), cute.make_rmem_tensor((count,), kind)
        acc.fill(minus_zero())
        for s in cutlass.range(x.states, unroll=2):
            lse = at(lse_at + Int64(s) * x.lse_state, Float32, 1)[0]
            cute.autovec_copy(at(o_at + Int64(s) * x.o_state, kind, count), part)
            # the difference of equal infinities is 0 here: states of lse +inf share the weight
            below = cutlass.select_(lse == top, Float32(0.0), lse - top)
            empty = lse == -Float32.inf
            weight = cutlass.select_(empty, Float32(0.0), cute.math.exp2(below * x.to_base_2, fastmath=True))
            wide = part.load().to(Float32)
            for e in cutlass.range_constexpr(count):
                acc[e] = cutlass.select_(empty, acc[e], acc[e] + weight * wide[e])
            total = total + weight
        share = cutlass.select_(total == 0.0, Float32(0.0), 1.0 / total)
        for e in cutlass.range_constexpr(count):
            acc[e] = cutlass.select_(total == 0.0, Float32(0.0), acc[e] * share)
        out = cute.make_rmem_tensor((count,), kind)
        out.store(acc.load().to(kind))
        cute.autovec_copy(out, at(x.out + Int64(n) * (kind.width // 8 * count), kind, count))
        if chunk == 0:
            # -0.0 + log(1) would be 0.0
            log = cute.math.log2(total, fastmath=True) * x.from_base_2
            whole = cutlass.select_(total == 1.0, top, top + log)
            at(x.lse_out + Int64(row_head) * 4, Float32, 1)[0] = whole


@cute.jit
def host_merge(values, stream: cuda.CUstream, kind: cutlass.Constexpr, count: cutlass.Constexpr):
    merge(values, kind, count).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)
