"""Lists of blocks to lines of bits, before attention: what a domain's lists say, as lists.py asks it.

`team` threads make the words of a line in turn, each from the whole list, which so may be unsorted, say a block twice,
and be filled up with anything that is no block.  A line ends where its row's keys do.
"""

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from ..listing import LISTING
from .functors import Env, block_keys, line_of, list_of
from .lists import line_word
from .ring import own_thread

THREADS = 256


class Call(NamedTuple):
    """What a launch is given, the variant's parameters aside; served ones find a row's request in the plan."""

    rows: Any
    lines: Any  # of a row
    words: Any  # of a line, which there is room for
    team: Any
    num_qo_heads: Any
    num_kv_heads: Any
    group_size: Any
    qo_len: Any = None
    kv_len: Any = None
    header: Any = None
    row_request: Any = None
    requests: Any = None


def plan_word(address, n):
    return line_word(address + Int64(n) * 4, True)


def row_of(p, call, row, head, params):
    """(environment, row in its request, does it exist)."""
    h, g = {"h": (head, head // call.group_size), "g": (head * call.group_size, head), "row": (Int32(0), Int32(0))}[
        p.lists_by
    ]
    sizes = call.num_qo_heads, call.num_kv_heads, call.group_size
    if p.layout == "dense":
        b = row // call.qo_len
        return Env(b, h, g, call.qo_len, call.kv_len, *sizes, params), row - b * call.qo_len, row < call.rows
    # a graph may have captured more rows than the plan has, or fewer: then nothing runs
    planned = plan_word(call.header, 2)
    exists = (row < call.rows) & (row < planned)
    b = line_word(call.row_request + Int64(row) * 4, exists)
    start, qo_len, kv_len = (line_word(call.requests + Int64(4 * b + k) * 4, exists) for k in range(3))
    return Env(b, h, g, qo_len, kv_len, *sizes, params, q_start=start), row - start, exists


@cute.kernel
def kernel(values, p: cutlass.Constexpr, fn: cutlass.Constexpr):
    # attention waits by itself for the lines
    cute.arch.griddepcontrol_launch_dependents()
    names = [name for name, _ in LISTING[p.served]]
    call, params = Call(**dict(zip(names, values[: len(names)], strict=True))), values[len(names) :]
    block, _, _ = cute.arch.block_idx()
    n = block * THREADS + own_thread()
    line = n // call.team
    row = line // call.lines
    env, iq, exists = row_of(p, call, row, line - row * call.lines, params)
    # no kernel writes a plan, so that was read early; the one before may still run, write the lists and read the lines
    cute.arch.griddepcontrol_wait()
    if exists:
        address, stride, count = list_of(fn, env, iq + env.kv_len - env.qo_len, iq)
        size = block_keys(fn, env)
        words = cutlass.min(Int32((Uint32(env.kv_len) + size - 1) // size + 31) >> 5, call.words)
        target = line_of(fn, env, iq)
        for w in cutlass.range(n - line * call.team, words, call.team, unroll=1):
            word = Int32(0)
            for k in cutlass.range(count, unroll=16):
                bit = line_word(address + Int64(k) * Int64(stride) * 4, True) - 32 * w
                word = word | cutlass.select_(Uint32(bit) < 32, Int32(1) << (bit & 31), Int32(0))
            cute.make_tensor(
                cute.make_ptr(Int32, target + Int64(w) * 4, cute.AddressSpace.gmem, assumed_align=4),
                cute.make_layout(1),
            )[0] = word


@cute.jit
def host(values, stream: cuda.CUstream, p: cutlass.Constexpr, fn: cutlass.Constexpr):
    kernel(values, p, fn).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)
