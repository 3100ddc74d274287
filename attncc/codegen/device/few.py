"""Tiles of few rows: products by mma.sync, every warp with sixteen keys of each block.

A warpgroup's product has 64 rows.  Where a tile has at most FEW, as in decoding, most of it would be padding, and
what counts is how long a block takes from its arrival to the release of its slot, and an item from its last block to
its result.  So all eight consumer warps take every block together: a warp multiplies the rows by its sixteen keys,
keeps a softmax state of its own, and at the end of the item the states meet in the first warp.  Rows, columns and
accumulators of a thread are those of a warpgroup's first warp: the variant's functors see no difference.
"""

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from .emits import OPS
from .epilogue import BAR_STORE
from .factors import give_back_factors, wait_factors
from .forward import weights
from .fragments import Sixteen, load_matrices, multiply
from .functors import Block
from .gather import place
from .keys import ROWS, Keys, ready_of, say_ready, transform_rows
from .layout import by_row, quad, rounds_of
from .lists import with_lists
from .merge import BAR_FREE, BAR_READY, BAR_TAKEN
from .own_keys import eight_further, read_keys, transform_keys
from .packed import FEW, block_of
from .ring import release, ring_place, wait_block
from .softmax import IDENTITY, chains, opaque, rescale
from .vectors import plus

KEYS = 16  # of a block, a warp
WARPS = 8
HELD = 128  # features of queries, at most, that stay in registers


@cute.jit
def clear_own_tail(p: cutlass.Constexpr, base: Int32, group: Int32, left: Int32):
    """Zero this warp's rows of V from `left` on: their weights are 0, but they may hold anything, NaN too."""
    chunks = p.tile_vo // 8
    for k in cutlass.range(KEYS * chunks // 32, unroll=1):
        at = k * 32 + cute.arch.lane_idx()
        row = group * KEYS + at // chunks
        if row >= left:
            cute.arch.inline_ptx(
                "st.shared.v4.b32 [{$r0}], {{$r1}, {$r1}, {$r1}, {$r1}};",
                read_only_args=[base + place(row, at % chunks, p.tile_kv, p.tile_vo), Int32(0)],
            )
    cute.arch.fence_view_async_shared()
    cute.arch.sync_warp()


class Queries:
    """The rows as operands, features 16 k on: from registers where these hold them all, else from shared memory."""

    def __init__(self, p, base):
        self.rows = Sixteen(base, 0, 64, p.tile_qk, True)
        self.held = None
        if p.tile_qk <= HELD and not (p.f_k or p.f_v):  # these need registers themselves
            self.held = [load_matrices(self.rows(k)) for k in range(p.tile_qk // 16)]

    def __call__(self, k: int):
        return load_matrices(self.rows(k)) if self.held is None else self.held[k]


def scores_of_sixteen(p, S, queries, operands, scales=None) -> None:
    """S = Q Kᵀ of this warp's keys, in two sums a column that do not wait for one another.  `operands`: (k, words of
    features 16 k on, two of each eight keys); `scales`: what the columns of each eight are multiplied by."""
    parts = [[Float32(0.0)] * 8 for _ in range(2)]
    for k, b in operands:
        a = queries(k)
        multiply(p, parts[k % 2], 0, a, b[:2])
        multiply(p, parts[k % 2], 4, a, b[2:])
    for n in range(8):
        S[n] = parts[0][n] + parts[1][n]
        if scales is not None:
            S[n] = S[n] * scales[n // 4][n % 2]


def loaded(p, keys: Sixteen):
    """Operands of scores, as keys lie in shared memory."""
    return ((k, load_matrices(keys(k))) for k in range(p.tile_qk // 16))


def add_values(p, acc_o, P, values: Sixteen) -> None:
    """O += P V of this warp's keys."""
    a = [P[n] for n in range(4)]
    for k in range(-(-p.head_dim_vo // 16)):
        b = load_matrices(values(k), transposed=True)
        multiply(p, acc_o, 8 * k, a, b[:2])
        if 16 * k + 8 < p.head_dim_vo:
            multiply(p, acc_o, 8 * k + 4, a, b[2:])


@cute.jit
def transform_own(
    p: cutlass.Constexpr, fn: cutlass.Constexpr, what: cutlass.Constexpr, turnings: cutlass.Constexpr, base: Int32,
    tile, first: Int32, left: Int32, group: Int32,
):  # fmt: skip
    """f_k or f_v of this warp's keys of a block at shared address `base` whose first key stands at `first`, in place,
    where the variant has it."""
    if const_expr(p.f_k if what == "k" else p.f_v):
        keys, each = Keys(tile.rows[0].env, first, first + left), KEYS // ROWS
        transform_rows(p, fn, what, turnings, base, group * each, (group + 1) * each, keys)


@cute.jit
def pass_ready(ring: cutlass.Constexpr, ready, at: Int32, lead):
    """Nobody waits for `ready` here, but each use of a slot is a phase of it.  The one before has passed: a slot is
    filled again when all warps have come by here."""
    slot, phase = ring_place(ring.stages, at)
    cute.arch.mbarrier_wait(ready + slot, phase ^ 1)
    say_ready(ready, slot, 1, lead)


def give_back(ring, ready, at, slot, lead, written=True) -> None:
    """A slot of which this warp has used its part.  `ready`: the barriers of slots that are transformed, else None;
    `written`: ... in place."""
    if ready is not None and written:
        cute.arch.fence_view_async_shared()  # before a TMA copy into the slot
    cute.arch.sync_warp()
    if ready is not None:
        pass_ready(ring, ready, at, lead)
    release(ring, slot, lead)


def busy(p, group):
    """Has this warp keys of a block?"""
    if p.few_keys and p.tile_kv == KEYS * WARPS:  # no branch: two registers less
        return Boolean(True)
    return group < p.tile_kv // KEYS


@cute.jit
def attend_few(
    p: cutlass.Constexpr, fn: cutlass.Constexpr, turnings: cutlass.Constexpr, acc_o, O, state, tile, item, tags, ready,
    shelf: cutlass.Constexpr, k_ring: cutlass.Constexpr, v_ring: cutlass.Constexpr, q_base: Int32, k_base: Int32,
    v_base: Int32, start: Int32, lead, group: Int32,
):  # fmt: skip
    """This warp's keys of all blocks of an item, whose first is the CTA's `start`-th."""
    mine = const_expr(replace(p, tile_kv=KEYS))
    c_in = (cute.arch.lane_idx() % 4) * 2
    acc_s = cute.make_rmem_tensor((8,), Float32)
    S = by_row(acc_s, KEYS)
    P = cute.make_rmem_tensor((4,), Int32)
    # A warp without keys never writes them, and what begins undefined ptxas keeps in registers through the whole
    # kernel.  (Other kernels of 256 features fit as they are, and would not with this.)
    if const_expr(p.staged):
        acc_s.fill(0.0)
        P.fill(0)
    queries = Queries(p, q_base)
    more = eight_further(p, fn, turnings, opaque(cute.arch.lane_idx()))
    has_keys = busy(p, group)
    at, n = start, item.end - 1
    for _ in cutlass.range(item.end - item.begin, unroll=1):
        ks = wait_block(k_ring, at)
        block = block_of(p, tags, ks, item, n, c_in)
        left = item.offset + item.keys - (block.col0[0] - c_in)
        here = with_lists(mine, fn, tile, (block.col0[0] + KEYS * group,), block.masked)
        waited = ready_of(p, ready, "k") if p.f_k else None
        if has_keys:
            keys = k_base + ks * (p.tile_kv * p.tile_qk * 2)
            if const_expr(p.few_keys):
                words = read_keys(p, keys, group)
                give_back(k_ring, waited, at, ks, lead, written=False)
                first = block.col0[0] - c_in
                env, mine_at = tile.rows[0].env, first + KEYS * group
                made = transform_keys(p, fn, turnings, more, words, env, mine_at, first + left)
                scores_of_sixteen(p, acc_s, queries, *made)
            else:
                transform_own(p, fn, "k", turnings, keys, tile, block.col0[0] - c_in, left, group)
                places = Sixteen(keys, group, p.tile_kv, p.tile_qk, False)
                scores_of_sixteen(p, acc_s, queries, loaded(p, places))
        elif const_expr(p.few_keys):
            give_back(k_ring, waited, at, ks, lead, written=False)
        if const_expr(not p.few_keys):
            give_back(k_ring, waited, at, ks, lead)
        stale = Boolean(False)
        slot, phase = ring_place(p.v_stages, at)
        factors_at = wait_factors(p, shelf, slot, phase, group)
        if has_keys:
            keys_of = Block((block.col0[0] + KEYS * group,), block.masked)
            stale = weights(mine, fn, S, P, state, here, keys_of, factors_at, False)
        give_back_factors(p, shelf, slot, lead)
        vs = wait_block(v_ring, at)
        if has_keys:
            values = v_base + vs * (p.tile_kv * p.tile_vo * 2)
            if const_expr(p.chunk):
                if left < p.tile_kv:
                    clear_own_tail(p, values, group, left)
            transform_own(p, fn, "v", turnings, values, tile, block.col0[0] - c_in, left, group)
            if stale:
                rescale(O, p.head_dim_vo, state.grow)
            add_values(p, acc_o, P, Sixteen(values, group, p.tile_kv, p.tile_vo, True))
        give_back(v_ring, ready_of(p, ready, "v") if p.f_v else None, at, vs, lead)
        at, n = at + 1, n - 1


@cute.jit
def weigh_states(p: cutlass.Constexpr, state, tile, sums: Int32, group: Int32, row: Int32):
    """The factors of this warp's O, where all warps' states have a base in common; the state becomes that of all."""
    factors = cute.make_rmem_tensor((2,), Float32)
    factors.fill(1.0)
    if const_expr(p.scan == "softmax"):
        first = cute.arch.lane_idx() % 4 == 0
        for i in cutlass.range_constexpr(2):
            total = quad(plus, state.total[i])
            if first:
                cute.arch.inline_ptx(
                    "st.shared.v2.f32 [{$r0}], {{$r1}, {$r2}};",
                    read_only_args=[sums + (group * FEW + row + 8 * i) * 8, state.top[i], total],
                )
    # nobody reads the store buffer any more, and every state has been written
    cute.arch.barrier(barrier_id=BAR_FREE, number_of_threads=256)
    if const_expr(p.scan == "softmax"):
        load = "ld.shared.v2.f32 {{$w0}, {$w1}}, [{$r0}];"
        for i in cutlass.range_constexpr(2):
            found = [
                cute.arch.inline_ptx(
                    load, write_only_types=[Float32] * 2, read_only_args=[sums + (k * FEW + row + 8 * i) * 8]
                )
                for k in range(WARPS)
            ]
            new = chains(cute.arch.fmax, [top for top, _ in found], 2)
            scale = tile.rows[i].unit if p.unit_positive else Float32(1.0)
            parts = [total * cute.math.exp2((top - new) * scale, fastmath=True) for top, total in found]
            factors[i] = cute.math.exp2((state.top[i] - new) * scale, fastmath=True)
            state.top[i] = new
            state.total[i] = cutlass.select_(first, chains(plus, parts, 2), Float32(0.0))  # a quad adds its lanes up
    return factors


@cute.jit
def meet(
    p: cutlass.Constexpr, O, state, tile, stage: Int32, sums: Int32, rows: Int32, group: Int32, t: Int32, w: Int32
):
    """All warps' states become one, in the first warp.  `stage`: the store buffer of both warpgroups, which nobody may
    write before BAR_TAKEN; it holds eight rows of stage_vo features of every warp."""
    lane = cute.arch.lane_idx()
    row, c_in = lane // 4, (lane % 4) * 2
    factors = weigh_states(p, state, tile, sums, group, row)
    for i in cutlass.range_constexpr(2):
        for r, eights in enumerate(rounds_of(p)):
            blocks = len(eights)  # of eight rows by eight features, one after another
            if rows > 8 * i:
                if const_expr(i + r > 0):
                    cute.arch.barrier(barrier_id=BAR_FREE, number_of_threads=256)
                for n, eight in enumerate(eights):
                    here = stage + ((group * blocks + n) * 64 + row * 8 + c_in) * 4
                    x, y = (O[i, c, eight] * factors[i] for c in range(2))
                    cute.arch.inline_ptx("st.shared.v2.f32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[here, x, y])
                if w == 1:
                    cute.arch.barrier_arrive(barrier_id=BAR_READY, number_of_threads=256)
                else:
                    cute.arch.barrier(barrier_id=BAR_READY, number_of_threads=256)
                    add_up(p, stage, blocks, t)
                    cute.arch.barrier(barrier_id=BAR_STORE, number_of_threads=128)
                    if t < 32:
                        for n, eight in enumerate(eights):
                            x, y = cute.arch.inline_ptx(
                                "ld.shared.v2.f32 {{$w0}, {$w1}}, [{$r0}];",
                                write_only_types=[Float32] * 2,
                                read_only_args=[stage + (n * 64 + row * 8 + c_in) * 4],
                            )
                            O[i, 0, eight], O[i, 1, eight] = x, y
    if const_expr(p.emits):
        meet_emits(p, state, stage, group, w)
    if w == 0:
        cute.arch.barrier_arrive(barrier_id=BAR_TAKEN, number_of_threads=256)


@cute.jit
def meet_emits(p: cutlass.Constexpr, state, stage: Int32, group: Int32, w: Int32):
    """What emits reduce becomes, in the first warpgroup, that of all warps; by way of the store buffer, too."""
    lane = cute.arch.lane_idx()
    first = lane % 4 == 0
    here = stage + (group * FEW + lane // 4) * 4
    own = [[quad(OPS[reduce], pair[i]) for i in range(2)] for reduce, pair in zip(p.emits, state.emits, strict=True)]
    cute.arch.barrier(barrier_id=BAR_FREE, number_of_threads=256)
    if first:
        for k, i in places(p):
            at = here + (k * WARPS * FEW + 8 * i) * 4
            cute.arch.inline_ptx("st.shared.f32 [{$r0}], {$r1};", read_only_args=[at, own[k][i]])
    if w == 1:
        cute.arch.barrier_arrive(barrier_id=BAR_READY, number_of_threads=256)
    else:
        cute.arch.barrier(barrier_id=BAR_READY, number_of_threads=256)
        load = "ld.shared.f32 {$w0}, [{$r0}];"
        for k, i in places(p):
            at = stage + (k * WARPS * FEW + lane // 4 + 8 * i) * 4
            found = [
                cute.arch.inline_ptx(load, write_only_types=[Float32], read_only_args=[at + n * (FEW * 4)])
                for n in range(WARPS)
            ]
            whole = chains(OPS[p.emits[k]], found, 2)
            # a quad adds its lanes up
            state.emits[k][i] = cutlass.select_(first, whole, Float32(IDENTITY[p.emits[k]]))


def places(p) -> list[tuple[int, int]]:
    """(reduction, row of a thread)."""
    return [(k, i) for k in range(len(p.emits)) for i in range(2)]


@cute.jit
def add_up(p: cutlass.Constexpr, stage: Int32, blocks: cutlass.Constexpr, t: Int32):
    """The first warp's part of the store buffer becomes the sum of all."""
    for k in cutlass.range_constexpr(-(-blocks * 16 // 128)):
        if k * 128 + t < blocks * 16:
            at = stage + (k * 128 + t) * 16
            load = "ld.shared.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];"
            found = [
                cute.arch.inline_ptx(load, write_only_types=[Float32] * 4, read_only_args=[at + n * (blocks * 256)])
                for n in range(WARPS)
            ]
            total = [chains(plus, list(x), 2) for x in zip(*found, strict=True)]
            cute.arch.inline_ptx("st.shared.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[at, *total])
