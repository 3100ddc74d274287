"""Shared-memory layouts, tensor-map coordinates and MMA atoms of the forward kernel.

Rows are kept in panels as wide as a swizzle atom: 64 features (128 bytes) where the tile is a multiple of 64,
32 (64 bytes) else (96).  A TMA box is one panel.
"""

import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Float16, Float32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

K_MAJOR = OperandMajorMode.K
MN_MAJOR = OperandMajorMode.MN
ATOM = warpgroup.SmemLayoutAtomKind
FAR = 1 << 20  # nominal extent of dynamic modes; the real bounds live in the tensor maps


def element(p):
    return {"bf16": BFloat16, "f16": Float16}[p.dtype]


def panel_width(cols: int) -> int:
    """Features of one panel."""
    return 64 if cols % 64 == 0 else 32


def rows_layout(p, rows: int, cols: int, *slots: int):
    """`cols` contiguous, swizzled; of one tile, or of a number of them."""
    kind = ATOM.K_SW128 if cols % 64 == 0 else ATOM.K_SW64
    atom = warpgroup.make_smem_layout_atom(kind, element(p))
    return cute.tile_to_shape(atom, (rows, cols, *slots), order=(0, 1, 2)[: 2 + len(slots)])


def cols_layout(p, rows: int, cols: int, *slots: int):
    """The same bytes seen as (rows contiguous, cols): V as the PV product wants it."""
    kind = ATOM.MN_SW128 if rows % 64 == 0 else ATOM.MN_SW64
    atom = warpgroup.make_smem_layout_atom(kind, element(p))
    return cute.tile_to_shape(atom, (rows, cols, *slots), order=(1, 0, 2)[: 2 + len(slots)])


def allocate_tiles(p, smem):
    """Q, K, V and the store buffer in shared memory, with their slots."""
    layouts = (
        rows_layout(p, 64, p.tile_qk, p.q_stages * p.warpgroups), rows_layout(p, p.tile_kv, p.tile_qk, p.k_stages),
        cols_layout(p, p.tile_vo, p.tile_kv, p.v_stages), rows_layout(p, 64, p.stage_vo, p.warpgroups),
    )  # fmt: skip
    return [smem.allocate_tensor(element(p), layout.outer, 1024, swizzle=layout.inner) for layout in layouts]


def coords(d: int, transposed: bool = False):
    """Coordinates of a rank-4 map (d, s, h, b), seen as (s, d, h, b) or (d, s, h, b)."""
    e = [cute.E(i) for i in range(4)]
    shape, stride = ((d, FAR, FAR, FAR), e) if transposed else ((FAR, d, FAR, FAR), [e[1], e[0], e[2], e[3]])
    return cute.make_tensor((0, 0, 0, 0), cute.make_layout(shape, stride=tuple(stride)))


def box_place(what: str, c: int, slot):
    """Of a tile of K or V in boxes of rows, which zipped_divide makes: box c of a slot."""
    return (c, 0, slot) if what == "k" else (0, c, slot)


def mma_scores(p):
    dt = element(p)
    return sm90.make_trivial_tiled_mma(dt, dt, K_MAJOR, K_MAJOR, Float32, (1, 1, 1), (64, p.tile_kv))


def mma_values(p, cols: int | None = None):
    dt = element(p)
    return sm90.make_trivial_tiled_mma(
        dt, dt, K_MAJOR, MN_MAJOR, Float32, (1, 1, 1), (64, cols or p.head_dim_vo), warpgroup.OperandSource.RMEM
    )


def values_of(p, sV, t):
    """V as an operand.  Rows of the tile are whole panels, of which a product may read less."""
    whole = mma_values(p, p.tile_vo).get_slice(t)
    return whole.make_fragment_B(whole.partition_B(sV))


def by_row(acc, cols: int):
    """A 64 x cols fp32 accumulator as (2 rows, 2 neighbours, cols/8): this thread's elements are rows r, r + 8 and
    columns 8 n + c of its corner."""
    return cute.make_tensor(acc.iterator, cute.make_layout((2, 2, cols // 8), stride=(2, 1, 4)))


def rounds_of(p) -> list[range]:
    """The eights of features that the store buffer holds at once, time after time."""
    each, whole = p.stage_vo // 8, p.head_dim_vo // 8
    return [range(first, min(first + each, whole)) for first in range(0, whole, each)]


def row_elems(i: int, cols: int):
    return [(i, c, n) for n in range(cols // 8) for c in range(2)]


def quad(op, x):
    """Reduce over the four lanes that share a row."""
    x = op(x, cute.arch.shuffle_sync_bfly(x, offset=1))
    return op(x, cute.arch.shuffle_sync_bfly(x, offset=2))
