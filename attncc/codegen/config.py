"""Which kernel: tile, stages, registers, and what the variant lets the kernel leave out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from math import gcd

from attncc.ir.decompose import Logits, decompose, sign
from attncc.ir.fold_vectors import weight_of
from attncc.ir.nodes import BOOL, F32, Const, Expr, Leaf, Load, Op, Variant, leaves, make, walk
from attncc.ir.ranges import TileRanges
from attncc.ir.rewrite import simplify_expr

from .emit_outputs import distinct, reductions
from .listing import lists_of, mask_ranges, with_domain
from .vectors import Turning, feature_values, turnings, used_slots

DSL_VERSION = "4.8.1"  # nvidia-cutlass-dsl, pinned exactly: build checks it
TILES = (64, 96, 128, 192, 256)  # features
NARROWER = (112, 96, 64, 32)  # keys a block, for functors that spill
SWIZZLE_ROWS = 8  # a swizzled tile repeats after so many rows: TMA may fill it in multiples of them
RING_BYTES = 128 << 10
SHARED_BYTES = 227 << 10  # that a CTA may have
OTHER_SHARED = 1 << 10  # barriers, work items and alignment; as much again where batches are served, for sums of rows
MOST_HEADS, SAME_HEAD = 8, 4  # in a dense tile; ... if a thread's two rows are to be of one head
PAGE_UNITS = 128 * 3 * 5 * 7  # every number of keys a block divides it
BY_ROW = frozenset(("b", "h", "qo_len", "kv_len"))  # what may differ between the rows of a packed tile
ROW_LEAVES = frozenset(("i", "iq"))
OF_COLUMNS = frozenset(("j", "i0"))  # what a column keeps is over these, and over nothing of a row
OF_CELLS = ROW_LEAVES | {"dot"}
ONE = Const(1.0, F32)


@dataclass(frozen=True)
class KernelConfig:
    """Static choices of one forward kernel.  Sizes in rows, keys and features; `registers` (producer, consumer)."""

    dtype: str
    head_dim_qk: int
    head_dim_vo: int
    tile_kv: int
    warpgroups: int  # consumers, 64 query rows each
    k_stages: int
    v_stages: int
    q_stages: int
    turns: bool  # consumers take turns to issue their products
    early_item: bool  # the next work item is read while there is time, where there are registers for it
    dynamic: bool  # tiles from an atomic counter, else dealt back and forth
    # what the variant is like
    scan: str
    sink: bool
    mask: bool  # something besides kv_len hides keys
    counted: bool  # blocks of keys are visited in one run, TileRanges.lo to hi; else each is classified
    row_bounds: bool  # a row sees exactly one run of keys, and the mask is two comparisons
    masks_below: bool  # ... which may start after key 0
    score: str  # "dot": the score is the dot product; "linear": rises with it, so -inf stays -inf; "any"
    ramp: bool  # "linear", and what is added changes evenly from column to column (ALiBi)
    score_loads: bool  # a score reads memory lane by lane
    unit_positive: bool
    f_q: bool
    epilogue: bool
    epilogue_lse: bool  # ... and it asks for a row's log-sum-exp
    turnings: tuple[tuple[str, int], ...]  # scaling and turned features of each table of frequencies (vectors.py)
    features: tuple[int, ...]  # entries of each table of what is known of a feature alone (vectors.py)
    key_factor: str  # a key's factor of the dot product: "" none; "unit": the unit is in it, and 1 by itself; "dot"
    weight_factor: bool  # a key has a factor of its weight
    factors_by_row: bool  # ... and these differ between the rows of a packed tile
    emits: tuple[str, ...]  # what is reduced beside softmax, each "max", "min" or "sum"
    # what is applied to blocks of keys before they are multiplied
    f_k: bool = False
    f_v: bool = False
    prepared: bool = False  # what a pre-pass made of k and v comes in
    ahead: str = ""  # "k", "v", "kv": what the kernel multiplies by factors itself, ahead of its tiles
    split: int = 0  # how the registers are shared out: which of `splits`
    # where keys and queries lie
    layout: str = "dense"
    page_unit: int = 0  # paged, blocks: the page size, or the keys of a block, is a multiple of it
    # what a packed tile's rows do not share (Emitted says)
    columns_by_row: bool = False
    ranges_by_row: bool = False
    # a domain's lists of blocks, which the kernel reads as bitmaps (listing.py)
    lists_by: str = (
        ""  # "h", "g": a query head, a kv head has lists of its own; "row": all share a row's; "": no domain
    )
    walks_lists: bool = False  # blocks of keys that no row of a tile lists are not visited
    list_block: int = 0  # keys of a listed block, where a thread looks its bits up once a block of keys; 0: a score
    parts: int = 1  # of a block of keys, which lie in places of their own
    asks: bool = False  # blocks of keys are visible or not by more than their place and the lists
    packs: int = 1  # query heads of a kv head that a dense tile may hold, at most; a power of two (device/heads.py)

    @property
    def served(self) -> bool:
        return self.layout != "dense"

    @property
    def few_keys(self) -> bool:
        """Where few rows meet a key, is f_k applied to it in registers?"""
        return self.served and self.f_k and self.tile_qk <= 128

    @property
    def staged(self) -> bool:
        """Does the epilogue run on rows in shared memory, since registers have no room for it?"""
        return self.served and self.epilogue and self.head_dim_vo > 128

    @property
    def staged_lses(self) -> int:
        """Words of shared memory for what it then must know of rows."""
        return 16 * self.warpgroups if self.staged and self.epilogue_lse else 0

    @property
    def name(self) -> str:
        """Of the kernel, in manifests and file names."""
        return "prepared" if self.prepared else "serve" if self.served else "forward"

    @property
    def chunk(self) -> int:
        """Served kernels: rows of a TMA box, which lie in one page; 0: rows are gathered one by one."""
        if self.layout == "ragged":
            return self.tile_kv
        rows = gcd(self.page_unit, self.tile_kv)
        return rows if rows % SWIZZLE_ROWS == 0 else 0

    @property
    def key_dims(self) -> dict[str, int]:
        """Features of k and of v."""
        return {"k": self.head_dim_qk, "v": self.head_dim_vo}

    @property
    def part_kv(self) -> int:
        return self.tile_kv // self.parts

    @property
    def tile_q(self) -> int:
        return 64 * self.warpgroups

    @property
    def tile_qk(self) -> int:
        return tile_of(self.head_dim_qk)

    @property
    def tile_vo(self) -> int:
        return tile_of(self.head_dim_vo)

    @property
    def stage_vo(self) -> int:
        """Features of the output that the store buffer holds at once."""
        return self.tile_vo if self.tile_vo <= 128 else self.tile_vo // 2 if self.tile_vo == 256 else 64

    @property
    def threads(self) -> int:
        return 128 * (self.warpgroups + 1)

    @property
    def splits(self) -> tuple[tuple[int, int], ...]:
        """Registers of a producer and of a consumer, those to be tried first first.

        Three warpgroups start with 168 each: more than 504 together, and setmaxnreg waits for ever.  Choosing blocks
        one by one takes the producers more than 24, as do pages or factors of keys to be looked up; both take more
        than 56."""
        if self.ahead:  # the spare warp keeps more rows on their way where it has more
            return (56, 224), (40, 232)
        looks = self.served or self.shelved
        return {
            (True, False): ((24, 240),), (True, True): ((40, 232),), (False, False): ((56, 224),),
            (False, True): ((88, 208),),
        }[self.counted, looks]  # fmt: skip

    @property
    def registers(self) -> tuple[int, int]:
        return self.splits[self.split]

    def with_other_split(self) -> KernelConfig | None:
        """The same kernel with more registers for consumers; None where there is no such split."""
        return replace(self, split=self.split + 1) if self.split + 1 < len(self.splits) else None

    @property
    def shelved(self) -> bool:
        """Are factors of keys in shared memory, where the producers put them?"""
        return bool(self.key_factor or self.weight_factor) and not self.factors_by_row

    def narrower(self) -> KernelConfig | None:
        """The same kernel with fewer keys a block, and so fewer registers; None where it can't get smaller."""
        # a block of keys across two listed ones would read what nobody listed
        fits = lambda n: not self.list_block or self.list_block % n == 0 or n % self.list_block == 0  # noqa: E731
        smaller = [n for n in NARROWER if n < self.tile_kv and fits(n)] or [n for n in NARROWER if n < self.tile_kv]
        return replace(self, tile_kv=smaller[0], split=0, parts=1).with_bytes_on_their_way() if smaller else None

    def with_bytes_on_their_way(self) -> KernelConfig:
        """Served kernels, with as many stages, a power of two, as keep 128 KiB of keys on their way: what decoding
        needs (64 KiB at 64 features ran at 85 % of the memory's rate); or with fewer, where that is too much."""
        if not self.served:
            return self
        block = self.tile_kv * (self.tile_qk + self.tile_vo) * 2
        stages = max(2, 1 << (RING_BYTES // block).bit_length() - 1)
        fewer = replace(self, k_stages=stages, v_stages=stages)
        while fewer.k_stages > 2 and fewer.shared_bytes() > SHARED_BYTES:
            fewer = replace(fewer, k_stages=fewer.k_stages // 2, v_stages=fewer.v_stages // 2)
        return fewer

    def shared_bytes(self) -> int:
        """What the kernel cannot do without: tiles, tables of frequencies, and some for barriers and sums."""
        queries, keys = self.tile_qk * self.q_stages * self.tile_q, self.tile_qk * self.k_stages * self.tile_kv
        values, out = self.tile_vo * self.v_stages * self.tile_kv, self.stage_vo * self.tile_q
        tables = sum(4 * dims for _, dims in self.turnings)
        lses = 4 * self.staged_lses
        return 2 * (queries + keys + values + out) + tables + lses + OTHER_SHARED * (1 + self.served)

    def with_room_for_tables(self) -> KernelConfig:
        """The tables of features that fit besides."""
        fit, spare = (), SHARED_BYTES - self.shared_bytes()
        for entries in self.features:
            if 4 * (sum(fit) + entries) > spare:
                break
            fit = (*fit, entries)
        return replace(self, features=fit)

    def to_json(self) -> dict:
        return {**asdict(self), "tile_q": self.tile_q, "tile_qk": self.tile_qk, "tile_vo": self.tile_vo}


def tile_of(head_dim: int) -> int:
    return next(t for t in TILES if t >= head_dim)


def panel(tile: int) -> int:
    """Features in one swizzled panel, and so in one TMA box."""
    return 64 if tile % 64 == 0 else 32


# Keys a block, then stages of K, V and Q, by the tiles of q, k and of v, out: what 227 KiB of shared memory and 240
# registers a thread hold.  Measured (bench/RESULTS.md): a third stage at 64 and 96 is 1-3 % slower, 96 keys at 192, 192
# 2 % slower, 112 keys at 192, 128 6 % faster than 80.  Other pairs take the row of the larger tile.
SHAPES: dict[tuple[int, int], tuple[int, int, int, int]] = {
    (64, 64): (128, 2, 2, 2),
    (96, 96): (128, 2, 2, 2),
    (128, 128): (128, 2, 2, 2),
    (192, 128): (112, 2, 2, 1),
    (192, 192): (80, 2, 2, 1),
    (256, 256): (64, 2, 2, 1),
}


def shape_of(tile_qk: int, tile_vo: int) -> tuple[int, int, int, int]:
    larger = max(tile_qk, tile_vo)
    return SHAPES.get((tile_qk, tile_vo)) or SHAPES[larger, larger]


@lru_cache(maxsize=8)
def ranges_of(variant: Variant) -> TileRanges:
    """Asked for by planning, tile choice and emission; some masks take half a second.  A domain can only hide more."""
    return mask_ranges(variant)


def logits_of(variant: Variant, layout: str) -> Logits:
    logits = decompose(variant)
    by_row = leaves(logits.unit) & ROW_LEAVES or differ_by_row((logits.unit, *factors_of(variant, logits)), layout)
    alone = logits.score == Leaf("dot") and variant.scan.kind == "softmax"
    return never_zero(with_unit_in_key(logits) if logits.key is not None and alone and not by_row else logits)


def factors_of(variant: Variant, logits: Logits) -> tuple[Expr, ...]:
    """Of a key: of its dot products and of its weight, those that there are."""
    return tuple(e for e in (logits.key, weight_of(variant)) if e is not None)


def differ_by_row(parts: Iterable[Expr], layout: str) -> bool:
    """May the rows of a packed tile differ in these?"""
    return layout != "dense" and any(leaves(e) & BY_ROW for e in parts)


def with_unit_in_key(logits: Logits) -> Logits:
    """Where the score is nothing but the dot product and the unit the same for all rows of a tile: the exponent of a
    weight is then one FMA again."""
    assert logits.key is not None
    return replace(logits, unit=ONE, unit_positive=True, key=simplify_expr(make("mul", logits.key, logits.unit)))


def never_zero(logits: Logits) -> Logits:
    """Factors of the score that are known to be positive may still be 0 in float32: a hidden score, times them, must
    be -inf."""

    def at_least(x: Expr) -> Expr:
        return simplify_expr(make("max", x, Const(1e-30, F32)))

    if logits.unit_positive:
        logits = replace(logits, unit=at_least(logits.unit))
    line = line_of(logits)
    if line is not None and sign(line[0]) == 1:
        logits = replace(logits, score=make("add", make("mul", Leaf("dot"), at_least(line[0])), line[1]))
    return logits


def line_of(logits: Logits) -> tuple[Expr, Expr] | None:
    """(a, c) where the score is a * dot + c, and c knows nothing of dot."""
    match logits.score:
        case Op("add", (Op("mul", (Leaf("dot"), a)), c)) if "dot" not in leaves(c):
            return a, c
    return None


def page_unit(page_size: int) -> int:
    """What a kernel must know of a page size: kernels of equal units are the same."""
    unit = gcd(page_size, PAGE_UNITS)
    return unit if unit % SWIZZLE_ROWS == 0 else 1


def choose(
    variant: Variant, *, head_dim_qk: int, head_dim_vo: int, dtype: str, layout: str = "dense",
    page_size: int | None = None,
) -> KernelConfig:  # fmt: skip
    """The kernel for a specialised, simplified variant."""
    ranges, logits = ranges_of(variant), logits_of(variant, layout)
    tile_kv, k_stages, v_stages, q_stages = shape_of(tile_of(head_dim_qk), tile_of(head_dim_vo))
    mask = variant.mask != Const(True, BOOL) or variant.domain is not None
    # keys in blocks are listed, so all are visited, and where they stand is looked up: nothing runs on from key to key
    listed = layout == "blocks"
    slots = used_slots(variant)
    lists = lists_of(variant, layout, tile_kv)
    finer, parts = tile_kv // lists.tile_kv, 1
    # keys that are transformed in place lie in one; a served kernel waits for memory, not for a step's latencies
    if layout == "dense" and lists.walked and "f_k" not in slots and "f_v" not in slots:
        finer, parts = 1, finer
    tile_kv = lists.tile_kv * parts
    ranges = with_domain(ranges, variant, lists.walked)
    asks = ranges.may is not None or ranges.must is not None
    counted = listed or not (asks or lists.walked)
    masks_below = not (listed or starts_at_zero(ranges))
    score = kind_of_score(logits)
    by_row = differ_by_row(factors_of(variant, logits), layout)
    row_bounds = ranges.contiguous and not listed and (variant.domain is None or lists.block > 0)
    config = KernelConfig(
        dtype=dtype, head_dim_qk=head_dim_qk, head_dim_vo=head_dim_vo,
        tile_kv=tile_kv, warpgroups=2, k_stages=k_stages * finer, v_stages=v_stages * finer, q_stages=q_stages,
        turns=layout == "dense", dynamic=mask,
        early_item=layout == "dense" and counted and not masks_below and score == "dot" and not variant.emits
        and (by_row or not factors_of(variant, logits)),
        scan=variant.scan.kind, sink=variant.scan.sink is not None,
        mask=mask, counted=counted, row_bounds=row_bounds, masks_below=masks_below,
        score=score, ramp=score == "linear" and ramp(logits) is not None and not listed,
        score_loads=bool(cell_loads(logits)), unit_positive=logits.unit_positive,
        f_q="f_q" in slots, f_k="f_k" in slots, f_v="f_v" in slots, epilogue="epilogue" in slots,
        epilogue_lse="lse" in leaves(variant.epilogue),
        turnings=tables_of(turnings(variant, {"d": head_dim_qk, "e": head_dim_vo})),
        features=entries_of(feature_values(variant, slots), {"d": head_dim_qk, "e": head_dim_vo}),
        key_factor="" if logits.key is None else "dot" if by_row or score != "dot" or logits.unit != ONE else "unit",
        weight_factor=weight_of(variant) is not None, factors_by_row=by_row,
        emits=tuple(reduce for reduce, _ in distinct(variant)),
        layout=layout, page_unit=page_unit(page_size) if page_size else 0,
        lists_by=lists.by, walks_lists=lists.walked, list_block=lists.block, parts=parts, asks=asks,
        packs=most_heads(variant, logits, ranges) if layout == "dense" and lists.walked and lists.by != "h" else 1,
    )  # fmt: skip
    return config.with_bytes_on_their_way().with_room_for_tables()


def most_heads(variant: Variant, logits: Logits, ranges: TileRanges) -> int:
    """KernelConfig.packs, where the heads of a group share the lists that a tile walks over.

    What is asked for a whole tile, or once a key, is one for all its heads.  Values of a column are kept once for a
    thread's two rows, so these must be of one head."""
    keyed = [e for e in (*factors_of(variant, logits), variant.f_k, variant.f_v) if e is not None]
    if any("h" in leaves(e) for e in (*ranges.parts, *keyed)):
        return 1
    cells = (logits.score, variant.mask, *(e.value for e in variant.emits))
    # a logit that is emitted may bring its head's factor to those of a column
    kept = (x for r in reductions(variant) for x in walk(r.cell) if leaves(x).isdisjoint(OF_CELLS))
    by_head = any("h" in leaves(e) for e in cells) or any("h" in leaves(x) and leaves(x) & OF_COLUMNS for x in kept)
    return SAME_HEAD if by_head else MOST_HEADS


def tables_of(tables: Iterable[Turning]) -> tuple[tuple[str, int], ...]:
    """KernelConfig.turnings."""
    return tuple((t.scaling, t.dims) for t in tables)


def entries_of(values: Iterable[tuple[str, Expr]], head_dims: dict[str, int]) -> tuple[int, ...]:
    """KernelConfig.features."""
    return tuple(head_dims[space] for space, _ in values)


def starts_at_zero(ranges: TileRanges) -> bool:
    return isinstance(ranges.lo, Const) and ranges.lo.value <= 0 and ranges.clear_lo == ranges.lo


def cell_loads(logits: Logits) -> list[Load]:
    """Reads that differ from score to score."""
    return [x for x in walk(logits.score) if isinstance(x, Load) and varies_by_cell(x)]


def varies_by_cell(x) -> bool:
    names = leaves(x)
    return bool(names & {"dot"} or (names & {"i", "iq"} and names & {"j", "i0"}))


def kind_of_score(logits: Logits) -> str:
    """ "linear": a positive multiple of the dot product plus what is known without it, so that a hidden key may be
    hidden before the functor runs."""
    if logits.score == Leaf("dot"):
        return "dot"
    line = line_of(logits)
    rises = line is not None and sign(line[0]) == 1 and logits.unit_positive
    return "linear" if rises and not cell_loads(logits) else "any"


def ramp(logits: Logits) -> tuple[Expr, Expr, Expr, int] | None:
    """(a, c, coefficient, slope) where the score is a * dot + c and c = coefficient * f32(slope * j + …): the parts of
    a line over the columns of a block; None where it is not one."""
    line = line_of(logits)
    if line is None:
        return None
    a, c = line
    factor, near = (c.args[1], c.args[0]) if isinstance(c, Op) and c.op == "mul" else (Const(1.0, F32), c)
    if not isinstance(near, Op) or near.op != "f32" or leaves(factor) & {"i", "iq", "j", "i0"}:
        return None
    step = slope(near.args[0])
    return None if not step or leaves(near) & {"i", "iq"} else (a, c, factor, step)


def slope(e: Expr) -> int | None:
    """c where an i32 `e` is c * j + something without j; None where it is not known to be."""
    match e:
        case Leaf("j"):
            return 1
        case Op("add" | "sub", (a, b)):
            sa, sb = slope(a), slope(b)
            return None if sa is None or sb is None else sa + sb if e.op == "add" else sa - sb
        case Op("neg", (a,)):
            sa = slope(a)
            return None if sa is None else -sa
        case Op("mul", (a, Const(c)) | (Const(c), a)) if e.type.elem == "i32":
            sa = slope(a)
            return None if sa is None else sa * int(c)
    return None if "j" in leaves(e) else 0
