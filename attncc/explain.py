"""What a mask costs: which tiles of the score matrix are empty, full or partial."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING, Any

from attncc.diagnostics import NOWHERE
from attncc.ir.fold_vectors import of_keys
from attncc.ir.nodes import Expr, Load, Param, Variant, objects
from attncc.ir.ranges import TileRanges, tile_ranges
from attncc.ir.ranges_clauses import whole_mask

if TYPE_CHECKING:
    import numpy as np

COLUMNS, ROWS = 64, 32  # of the text map, at most
EXAMPLE_HEADS, EXAMPLE_DIM, EXAMPLE_SMS = (32, 8), 128, 132  # of a call whose f_k and f_v are weighed
GLYPHS = {"empty": "·", "partial": "▒", "full": "█"}
COLOURS = {"empty": "#eceff1", "partial": "#ffb74d", "full": "#1565c0"}


@dataclass(frozen=True)
class Explanation:
    """The tiles of one variant at one size.

    `classes`: int8 [tiles of queries, tiles of keys], 0 empty, 1 partial, 2 full.  `assumed`: scalars that were neither
    given nor have a default, with the values taken.  `missing`: tensors of the mask that were not given.
    """

    variant: Variant
    qo_len: int
    kv_len: int
    tile_q: int
    tile_kv: int
    classes: np.ndarray
    ranges: TileRanges
    values: Mapping[str, Any]
    assumed: tuple[str, ...]
    missing: tuple[str, ...]

    @property
    def counts(self) -> dict[str, int]:
        """How many tiles are empty, full, partial."""
        return {name: int((self.classes == k).sum()) for name, k in (("empty", 0), ("full", 2), ("partial", 1))}

    @property
    def skipped(self) -> float:
        """Share of the work, the products with K and V of every tile, that is never done."""
        return self.counts["empty"] / max(1, self.classes.size)

    @property
    def masked(self) -> float:
        """Share of the tiles computed that run mask code."""
        return self.counts["partial"] / max(1, self.counts["partial"] + self.counts["full"])

    def text(self) -> str:
        """Map, counts and notes, for a terminal."""
        rows, columns = self.classes.shape
        head = f"{self.variant.name}: {self.qo_len} queries x {self.kv_len} keys"
        head += f" in {rows} x {columns} tiles of {self.tile_q} x {self.tile_kv}"
        parts = (self._given(), self._map(), self._counts(), self._keys(), self._notes())
        parts = tuple(part for part in parts if part)
        return "\n".join([head, *("\n".join(f"  {line}".rstrip() for line in part) + "\n" for part in parts)])

    def _given(self) -> list[str]:
        lines = [f"mask = {_text(self.variant, self.variant.mask)}"]
        for name in _names(self.ranges, Param):
            note = f"   (assumed; --set {name}=VALUE)" if name in self.assumed else ""
            lines.append(f"{name} = {self.values[name]}{note}")
        return lines

    def _map(self) -> list[str]:
        """One character for a block of tiles; a character is about twice as high as it is wide."""
        rows, columns = self.classes.shape
        wide = -(-columns // COLUMNS)
        high = 1 if wide == 1 and rows <= ROWS else max(round(2 * wide * self.tile_kv / self.tile_q), -(-rows // ROWS))
        lines = ["".join(map(_glyph, row)) for row in _blocks(self.classes, high, wide)]
        one = "a tile" if high == wide == 1 else f"{high} x {wide} tiles"
        mixed = "" if high == wide == 1 else " or mixed"
        legend = f"{GLYPHS['empty']} empty  {GLYPHS['partial']} partial{mixed}  {GLYPHS['full']} full"
        return [*lines, "", f"{legend}   (a character: {one}; rows: queries, columns: keys)"]

    def _counts(self) -> list[str]:
        cost = {"empty": "skipped", "full": "no mask code", "partial": "run mask code"}
        total = max(1, self.classes.size)
        return [f"{name:<8}{n:>10}  {n / total:>6.1%}  {cost[name]}" for name, n in self.counts.items()] + [
            f"skipped: {self.skipped:.1%} of the work; of the tiles computed, {self.masked:.1%} run mask code"
        ]

    def _keys(self) -> list[str]:
        """What f_k and f_v cost, and which way a call would go."""
        from attncc.codegen.work import visible
        from attncc.runtime import routes
        from attncc.runtime.visible import Visible

        if not of_keys(self.variant):
            return []
        v = self._specialized()
        slots, (heads, kv_heads) = of_keys(v), EXAMPLE_HEADS
        if not slots:
            return []
        bounds = Visible(visible(v)).bind({**self.values, "group_size": heads // kv_heads})
        reads = routes.dense_reads((self.tile_q, self.tile_kv), 1, self.qo_len, self.kv_len, heads, bounds)
        factors = [EXAMPLE_DIM] * sum(factor is not None for factor in slots.values())
        found = routes.costs(
            keys=kv_heads * self.kv_len, reads=reads, features=EXAMPLE_DIM * len(slots) - sum(factors), factors=factors,
            sm_count=EXAMPLE_SMS,
        )  # fmt: skip
        named = [slot if factor is None else f"{slot} (a factor)" for slot, factor in slots.items()]
        once, inside = "by a pre-pass", "in the kernel"
        taken = "a pre-pass" if found.prepass < found.fused else "the kernel"
        way = f"go through {taken}; pages always through the kernel"
        if len(factors) == len(slots):  # dense kernels do it themselves
            once, inside = "or less applied once", "in scores and weights"
            way = "have them in scores and weights, as pages always have"
            if found.prepass < found.fused:
                way = "are multiplied once, by the kernel or a pre-pass; pages always have them in scores and weights"
        return [
            f"{' and '.join(named)}: each key is read {reads / heads / self.kv_len:.1f} times a query head",
            f"of {EXAMPLE_DIM} features for {heads} heads over {kv_heads} and batch 1 on {EXAMPLE_SMS} SMs: "
            f"{1e6 * found.fused:.1f} µs {inside}, {1e6 * found.prepass:.1f} µs {once}",
            f"left to the call, dense or ragged keys {way}",
        ]

    def _specialized(self) -> Variant:
        """As kernels of the example's head dims have it."""
        from attncc.compiler import Options, specialized

        const = {p.name: self.values[p.name] for p in self.variant.scalars if p.const}
        return specialized(self.variant, Options(EXAMPLE_DIM, EXAMPLE_DIM, "bf16", "dense", None, "sm_90a", const))

    def _notes(self) -> list[str]:
        lines = [
            f"tensor {name}: not given, so what the mask asks of it counts as unknown (partial)"
            for name in self.missing
        ]
        unknown = [_text(self.variant, e) for e in self.ranges.unknown]
        if unknown:
            lines += ["the analysis does not know (counted as partial where it decides):", *(f"  {x}" for x in unknown)]
        elif not self.missing:
            lines.append("the whole mask was analysed")
        if self.variant.domain is not None:
            lines.append("the kernel asks the lists of the domain about each tile before it is loaded")
            lines += self._heads()
        elif self.ranges.contiguous:
            lines.append("each row sees one run of keys: the kernel loops over its tiles and tests none")
        elif self.ranges.may is None:
            lines.append("the kernel loops over one run of tiles and tests none")
        else:
            lines.append("the kernel tests each tile before it is loaded")
        return lines

    def _heads(self) -> list[str]:
        """How many query heads a tile of dense queries holds, where that may be more than one."""
        from attncc.codegen.config import choose
        from attncc.compiler import for_kernels

        v = for_kernels(self._specialized())
        packs = choose(v, head_dim_qk=EXAMPLE_DIM, head_dim_vo=EXAMPLE_DIM, dtype="bf16").packs
        if packs == 1:
            return []
        group = EXAMPLE_HEADS[0] // EXAMPLE_HEADS[1]
        heads = gcd(packs, group)
        return [
            f"heads of a group share their lists, so a dense tile holds several: {self.tile_q // heads} positions of",
            f"{heads} heads of a group of {group} (the largest power of two up to {packs} that divides it), and visits",
            "what these positions list; the map is drawn for one head a tile",
        ]

    def png(self, path: str) -> None:
        """Draw the map to `path`.  ModuleNotFoundError where matplotlib is not installed."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.colors import ListedColormap
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch

        figure = Figure(figsize=(7, 7.5), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        extent = (0, self.kv_len, self.qo_len, 0)
        colours = ListedColormap([COLOURS[n] for n in GLYPHS])
        axes.imshow(self.classes, cmap=colours, vmin=0, vmax=2, extent=extent, interpolation="nearest", aspect="auto")
        axes.set(
            xlabel="key", ylabel="query row", title=f"{self.variant.name}, tiles of {self.tile_q} x {self.tile_kv}"
        )
        total = max(1, self.classes.size)
        patches = [Patch(color=COLOURS[n], label=f"{n} {k / total:.1%}") for n, k in self.counts.items()]
        figure.legend(handles=patches, loc="outside lower center", ncols=3, frameon=False)
        figure.savefig(path, dpi=150, format="png")


def explain(
    variant: Variant, qo_len: int, kv_len: int, tile_q: int = 128, tile_kv: int = 128,
    values: Mapping[str, Any] | None = None,
) -> Explanation:  # fmt: skip
    """Classify the tiles of one request.

    `values`: scalars and tensors of the variant by name (a tensor with its batch dimension, of which request 0 is
    taken; over `iq` or `j` the request's own rows).  A scalar that is not given takes its default, else an assumed
    value: i32 kv_len // 8 (at least 1), f32 1, bool true.  A tensor that is not given is unknown: tiles that depend on
    it are partial.  ValueError for a length or tile below 1, an unknown name, or a tensor that is too small.
    """
    from attncc.ir.ranges_eval import tile_map

    for name, x in (("qo_len", qo_len), ("kv_len", kv_len), ("tile_q", tile_q), ("tile_kv", tile_kv)):
        if x < 1:
            raise ValueError(f"{name}: expected at least 1, found {x}")
    given = dict(values or {})
    known = {p.name for p in variant.scalars} | {t.name for t in variant.tensors}
    for name in given:
        if name not in known:
            raise ValueError(f"{name}: no scalar or tensor of {variant.name}; there is: {', '.join(sorted(known))}")
    taken = {"i32": max(1, kv_len // 8), "f32": 1.0, "bool": True}
    assumed = {p.name: taken[p.type.elem] for p in variant.scalars if p.default is None and p.name not in given}
    given = {**{p.name: p.default for p in variant.scalars}, **assumed, **given}
    missing = [t.name for t in variant.tensors if t.name not in given]
    ranges = tile_ranges(variant, without=missing)
    classes = tile_map(variant, qo_len, kv_len, tile_q, tile_kv, given, ranges=ranges)
    asked = {x.tensor for x in objects(whole_mask(variant)) if isinstance(x, Load)}
    return Explanation(
        variant, qo_len, kv_len, tile_q, tile_kv, classes, ranges, given,
        tuple(assumed), tuple(name for name in missing if name in asked),
    )  # fmt: skip


def _names(r: TileRanges, kind: type[Param]) -> list[str]:
    """Scalars that the ranges depend on."""
    return list(dict.fromkeys(x.name for e in r.parts for x in objects(e) if isinstance(x, kind)))


def _text(v: Variant, e: Expr) -> str:
    """The expression as it is written, where that is known and on one line."""
    if v.source is None or e.span == NOWHERE:
        return repr(e)
    line = v.source.line(e.span.line)
    return line[e.span.column - 1 : e.span.end_column - 1].strip() or repr(e)


def _blocks(classes: np.ndarray, high: int, wide: int) -> Iterator[list[np.ndarray]]:
    for i in range(0, classes.shape[0], high):
        yield [classes[i : i + high, j : j + wide] for j in range(0, classes.shape[1], wide)]


def _glyph(part: np.ndarray) -> str:
    low, high = part.min(), part.max()
    return GLYPHS["empty"] if high == 0 else GLYPHS["full"] if low == 2 else GLYPHS["partial"]
