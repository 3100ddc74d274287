"""Every kernel that the GPU tests and benchmarks need, in one place: `prebuild.py` builds them, the tests run them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from attncc import compiler
from attncc.codegen.limits import refused
from attncc.diagnostics import Source
from attncc.ir.nodes import Leaf, Variant
from attncc.random_inputs import FLOATS, Shape

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@dataclass(frozen=True)
class Case:
    """One kernel: a variant of an example file, or of .attn text, and the options it is built with."""

    source: str
    variant: str
    head_dim: int = 128
    head_dim_vo: int | None = None
    dtype: str = "bf16"
    const: tuple[tuple[str, object], ...] = ()
    prepass: bool | None = None

    def __str__(self) -> str:
        dims = f"{self.head_dim}" if self.head_dim_vo is None else f"{self.head_dim}-{self.head_dim_vo}"
        how = [] if self.prepass is None else ["prepass" if self.prepass else "fused"]
        return "-".join([self.variant, dims, self.dtype, *(f"{k}={v}" for k, v in self.const), *how])

    @property
    def options(self) -> dict[str, object]:
        """Keyword arguments for attncc.compile and attncc.reference."""
        return {
            "variant": self.variant, "head_dim": self.head_dim, "head_dim_vo": self.head_dim_vo,
            "dtype": FLOATS[self.dtype], "const": dict(self.const), "prepass": self.prepass,
        }  # fmt: skip

    def shape(self, batch: int, qo_len: int, kv_len: int, num_qo_heads: int, num_kv_heads: int) -> Shape:
        head_dim_vo = self.head_dim if self.head_dim_vo is None else self.head_dim_vo
        return Shape(batch, qo_len, kv_len, num_qo_heads, num_kv_heads, self.head_dim, head_dim_vo)

    def load(self) -> Variant:
        return next(v for v in _variants(self.source) if v.name == self.variant)


@cache
def _variants(source: str) -> tuple[Variant, ...]:
    return compiler.variants(Source.of(source))


def example(name: str, variant: str, **options) -> Case:
    return Case(str(EXAMPLES / f"{name}.attn"), variant, **options)


def buildable(variant: Variant) -> bool:
    """Can kernels do all that the variant says?  (The others are the reference's alone.)"""
    return not refused(compiler.for_kernels(variant), "dense")


def example_variants() -> Iterator[tuple[Path, Variant]]:
    for path in sorted(EXAMPLES.glob("*.attn")):
        for variant in _variants(str(path)):
            yield path, variant


def example_cases() -> list[Case]:
    """Every example that kernels can run, at head dimension 128 in bf16."""
    return [Case(str(path), v.name) for path, v in example_variants() if buildable(v)]


# Values for run-time scalars that put the edges of masks inside small shapes.
SCALARS: dict[str, object] = {
    "window": 100, "chunk": 96, "sinks": 4, "width": 16, "radius": 3, "block": 24, "step": 3, "globals": 5,
    "bias": -3.0,
}  # fmt: skip

# batch, qo_len, kv_len, query heads, kv heads
SHAPES = [
    (1, 1, 1, 1, 1), (3, 1, 129, 4, 4), (2, 300, 777, 12, 2), (1, 129, 2000, 5, 1), (2, 500, 300, 4, 2),
    (1, 257, 64, 7, 1), (2, 1024, 1024, 28, 4), (1, 0, 5, 2, 1), (2, 5, 0, 2, 2),
]  # fmt: skip

HEAD_DIMS = [(64, None), (96, None), (72, None), (80, None), (8, None), (256, None), (192, 128), (40, 200)]
OTHER_DIMS = [
    example(name, variant, head_dim=qk, head_dim_vo=vo)
    for qk, vo in HEAD_DIMS
    for name, variant in (("causal", "causal"), ("gpt_oss", "gpt_oss_sliding"))
]
OTHER_DTYPES = [
    example("plain", "plain", dtype="f16"),
    example("gemma2", "gemma2_local", dtype="f16"),
    example("gated_output", "gated_output", dtype="f16"),
    example("sigmoid", "flash_sigmoid", dtype="f16"),
    example("causal", "causal", dtype="f16", head_dim=64),
]
OTHER_CONSTS = [example("gemma2", "gemma2_global", const=(("cap", 5.0),))]

HARD = """
attention nothing():
    mask = false

attention nothing_but_sink():
    tensor sink[h]: f32
    mask = false
    scan = softmax(sink = sink[h])

attention biased(bias: f32):
    f_logits = s + bias
    mask     = j <= i

attention first_key():
    # The table has one entry; a hidden lane that read it would be gigabytes away.
    tensor table[n]: f32
    f_logits = s + table[j * 16777216]
    mask     = j < 1

attention guarded():
    tensor table[n]: f32
    f_logits = s + (table[(j - 2) * 16777216] if j == 2 else 0.0)

attention enormous():
    tensor bias[pos, n]: u8
    f_logits = s + 0.05 * bias[i, 39999999 - j]
    mask     = j <= i

attention positions(first: i32 = 0):
    tensor rows[iq]: i32
    tensor keys[j]: i32
    mask = first <= keys[j] <= rows[iq]

attention every_space():
    tensor by_b[b]: f32
    tensor by_h[h]: f16
    tensor by_g[g]: bf16
    tensor by_key[j, g]: f32
    tensor by_row[iq, h]: f32
    tensor by_pos[pos]: u8
    tensor hidden[b, pos]: bool
    f_logits = s * by_b[b] + by_h[h] + by_g[g] * by_key[j, g] + by_row[iq, h] + 0.01 * by_pos[j]
    mask     = not hidden[b, j]
    epilogue = o * (1.0 + by_h[h]) + f32(e) * 0.01
"""


def hard(variant: str, **options) -> Case:
    return Case(HARD, variant, **options)


def hard_cases() -> list[Case]:
    return [Case(HARD, v.name) for v in _variants(HARD)]


# One variant for each corner of the emitter, and the run-time scalars that each is run with.
ODD = Path(__file__).resolve().parents[1] / "codegen" / "odd.attn"
ODD_SCALARS: dict[str, list[dict[str, object]]] = {
    "run_time_scale": [{"sm_scale": 0.1}, {"sm_scale": -0.1}, {"sm_scale": 0.0}],
    "run_time_cap": [{"cap": 4.0}, {"cap": -4.0}],
    "weights_and_epilogue": [{"a": 0.3}],
    "flags": [{"strict": True}, {"strict": False}],
    "holes_and_cap": [{"period": 3}, {"period": 1}],
    "wrapped": [{"window": 60}, {"window": 0}, {"window": 2**31 - 1}, {"window": -5}],
}


# One variant for each way to emit.
EMITS = ODD.with_name("emits.attn")
EMIT_SCALARS: dict[str, dict[str, object]] = {
    "unsettled": {"sm_scale": -0.2}, "sunk": {"window": 40}, "sigmoids": {"bias": -1.0},
}  # fmt: skip


def emit_cases() -> list[Case]:
    """Factors of keys in the kernel: what a pre-pass makes of them is rounded, and sums of scores show it."""
    found = _variants(str(EMITS))
    return [Case(str(EMITS), v.name, head_dim=64, prepass=False if v.name == "factors" else None) for v in found]


def odd_cases() -> list[Case]:
    return [Case(str(ODD), v.name, head_dim=64) for v in _variants(str(ODD))]


# Vector slots.  Head dimensions: a tile of their own, and a smaller one in a tile of 96.
VECTORS = Path(__file__).resolve().parents[1] / "codegen" / "vectors.attn"


def vector_cases() -> list[Case]:
    found = [Case(str(VECTORS), v.name, head_dim=64) for v in _variants(str(VECTORS))]
    padded = ("turned_back", "turned_10", "queries_turned", "queries_turned_10", "queries_layer_normed")
    found += [replace(c, head_dim=80, dtype="f16") for c in found if c.variant in padded]
    normed = vectors("queries_normed_and_turned", head_dim=128)
    return [*found, normed, example("qwen3", "qwen3", head_dim=256)]


def vectors(variant: str, head_dim: int = 64) -> Case:
    return Case(str(VECTORS), variant, head_dim=head_dim)


# Vector slots that are only a factor; `prepass` says whether keys and values are multiplied before.
FOLDED = Path(__file__).resolve().parents[1] / "codegen" / "folded.attn"


def folded(variant: str, prepass: bool = False) -> Case:
    return Case(str(FOLDED), variant, head_dim=64, prepass=prepass)


def folded_cases() -> list[Case]:
    return [folded(v.name) for v in _variants(str(FOLDED))]


def folded_before() -> list[Case]:
    """Two by a pre-pass."""
    return [folded(name, prepass=True) for name in ("both", "turned_and_weighed")]


AHEAD = {(128, 128): "bf16", (80, 40): "f16", (192, 128): "bf16"}


def ahead_cases() -> list[Case]:
    """Whose kernel multiplies keys and values itself: rows of several widths, and blocks that are two listed ones."""
    both = folded("both", prepass=True)
    found = [replace(both, head_dim=qk, head_dim_vo=vo, dtype=dtype) for (qk, vo), dtype in AHEAD.items()]
    return [*found, *(replace(case, prepass=True) for case in parts_cases() if case.variant == "parts_scaled")]


# f_k and f_v that are more than a factor; `prepass` says who applies them.
KEYS = Path(__file__).resolve().parents[1] / "codegen" / "keys.attn"
KEY_DIMS = {"turned_keys": (128, None), "normed_keys": (128, None), "normed_values": (128, None),
            "layer_normed_keys": (128, None), "scaled_keys": (64, None), "turned_pairs_of_keys": (64, None),
            "shifted_values": (192, 128), "of_requests": (80, 40),
            "turned_everywhere": (200, 216), "turned_in_part": (200, None)}  # fmt: skip


def keys_case(variant: str, **options) -> Case:
    return Case(str(KEYS), variant, **{"head_dim": 64, **options})


def keys_cases(prepass: bool | None) -> list[Case]:
    """Of every variant there."""
    return [
        keys_case(name, head_dim=qk, head_dim_vo=vo, dtype="f16" if qk == 80 else "bf16", prepass=prepass)
        for name, (qk, vo) in KEY_DIMS.items()
    ]


# Domains of every kind.
LISTS = Path(__file__).resolve().parents[1] / "codegen" / "lists.attn"
PARTS = ("parts_on_a_line", "parts_scaled")


def list_cases(head_dim: int = 64) -> list[Case]:
    names = [v.name for v in _variants(str(LISTS))]
    return [Case(str(LISTS), x, head_dim=head_dim) for x in names if x not in PARTS and x != "hides_reads"]


def parts_cases() -> list[Case]:
    """Blocks of keys that are two listed ones, of dense kernels."""
    return [Case(str(LISTS), name, head_dim=64) for name in PARTS]


# Dense tiles that hold several heads of a group.
HEADS = Path(__file__).resolve().parents[1] / "codegen" / "heads.attn"


def heads_cases() -> list[Case]:
    """Factors of keys in the kernel."""
    found = _variants(str(HEADS))
    return [Case(str(HEADS), v.name, head_dim=64, prepass=None if v.f_k == Leaf("k") else False) for v in found]


def topk_of(size: int) -> Case:
    """The example with other blocks, as bench/blocks.py has it."""
    return Case((EXAMPLES / "block_topk.attn").read_text().replace("size = 64", f"size = {size}"), "block_topk")


def all_cases() -> list[Case]:
    """Each kernel once."""
    found = [*example_cases(), *OTHER_DIMS, *OTHER_DTYPES, *OTHER_CONSTS, *hard_cases(), *odd_cases(), *vector_cases()]
    found += [
        *folded_cases(),
        *folded_before(),
        *ahead_cases(),
        *list_cases(),
        *parts_cases(),
        *heads_cases(),
        topk_of(128),
        *emit_cases(),
        *keys_cases(False),
        *keys_cases(True),
        keys_case("turned_keys"),
    ]
    return list(dict.fromkeys(found))
