"""The generated modules: goldens of the examples, and what holds for all of them.  No cutlass is needed."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from gpu.cases import Case, example, example_cases, hard_cases, odd_cases

from attncc import compiler
from attncc.codegen import prepass
from attncc.codegen.config import KernelConfig
from attncc.codegen.emit import Emitted
from attncc.ir.fold_vectors import of_keys

ALL = [*example_cases(), *hard_cases(), *odd_cases()]
SERVED = ("tree_verify", "key_scales", "gated_output", "packed_documents", "alibi", "t5_encoder")
FUNCTIONS = {"head", "row", "block", "col", "unit", "score", "shift", "mask", "bounds", "classify"}


def emitted(case: Case, layout: str = "dense") -> tuple[Emitted, KernelConfig]:
    page_size = 16 if layout in ("paged", "blocks") else None
    options = compiler._options(
        case.head_dim, case.head_dim_vo, case.dtype, dict(case.const), layout, page_size, "sm_90a"
    )  # fmt: skip
    return compiler.generated(compiler.specialized(case.load(), options), options)


@pytest.mark.parametrize("case", example_cases(), ids=lambda c: c.variant)
def test_examples(case: Case, golden: Callable[[str, str], None]) -> None:
    golden(f"golden/{case.variant}.py.golden", emitted(case)[0].text)


@pytest.mark.parametrize("case", [c for c in example_cases() if c.variant in SERVED], ids=lambda c: c.variant)
def test_served_examples(case: Case, golden: Callable[[str, str], None]) -> None:
    golden(f"golden_served/{case.variant}.py.golden", emitted(case, "paged")[0].text)


@pytest.mark.parametrize("layout", ["dense", "paged", "blocks"])
@pytest.mark.parametrize("case", ALL, ids=str)
def test_modules_import_cutlass_alone_and_are_straight_line(case: Case, layout: str) -> None:
    text, params = emitted(case, layout)[0].text, emitted(case, layout)[0].params
    tree = ast.parse(text)
    modules = {n.module if isinstance(n, ast.ImportFrom) else n.names[0].name
               for n in ast.walk(tree) if isinstance(n, (ast.Import, ast.ImportFrom))}  # fmt: skip
    assert {m.split(".")[0] for m in modules if m} == {"cutlass"}
    assert not [n for n in ast.walk(tree) if isinstance(n, (ast.If, ast.IfExp, ast.BoolOp, ast.For, ast.While))]
    assert {n.name for n in tree.body if isinstance(n, ast.FunctionDef)} >= FUNCTIONS
    assert len(set(params)) == len(params)
    used = {int(k) for k in re.findall(r"x\.params\[(\d+)\]", text)}
    assert used == set(range(len(params)))


@pytest.mark.parametrize("case", [c for c in example_cases() if of_keys(c.load())], ids=lambda c: c.variant)
def test_a_pre_pass_has_the_tables_that_its_kernel_fills(case: Case) -> None:
    options = compiler._options(case.head_dim, case.head_dim_vo, case.dtype, dict(case.const), "dense", None, "sm_90a")
    special = compiler.specialized(case.load(), options)
    found, config = prepass.generated(special, emitted(case)[1], of_keys(special))
    assert re.findall(r"def feature_(\d+)", found.text) == [str(n) for n in range(len(config.features))]
    assert re.findall(r"def turning_(\d+)", found.text) == [str(n) for n in range(len(config.turnings))]
    assert config.features == () or config.features == (case.head_dim,)


def body(text: str, function: str) -> str:
    return re.search(rf"^def {function}\(.*?(?=^def |\Z)", text, re.S | re.M).group(0)  # type: ignore[union-attr]


def test_a_line_names_the_line_it_comes_from() -> None:
    text = emitted(example("gemma2", "gemma2_local"))[0].text
    assert re.search(r"tanh.*# gemma2\.attn:\d+$", text, re.M)


def test_listed_keys_do_not_follow_one_another() -> None:
    """A column's values come from its own position, and a tensor over keys is read there: not in pages."""
    text = emitted(example("alibi", "alibi"), "blocks")[0].text
    assert "* off" not in text and "Float32(v" in body(text, "col")
    text = emitted(example("kv_scales", "key_scales"), "blocks")[0].text
    assert "key_page" not in text and "< x.kv_len" in body(text, "factors")


def test_what_a_row_or_a_column_knows_is_not_computed_for_each_cell() -> None:
    """ALiBi: one multiplication by the slope a column, none a cell; documents: one look-up a row and a column."""
    text = emitted(example("alibi", "alibi"))[0].text
    assert "load" not in body(text, "score") and body(text, "score").count("*") == 1
    assert "load" in body(text, "head") and "*" in body(text, "col")
    text = emitted(example("packed_documents", "packed_documents"))[0].text
    assert "load" in body(text, "row") and "load" in body(text, "col") and "load" not in body(text, "mask")


def test_guards_become_predicates() -> None:
    """A table read under `if` inside the score carries the condition and `seen`."""
    case = next(c for c in hard_cases() if c.variant == "guarded")
    score = body(emitted(case)[0].text, "score") + body(emitted(case)[0].text, "col")
    assert re.search(r"load_b32\(.*(seen|\w+\[\d+\]).*\)", score)


@pytest.mark.parametrize(
    "variant, counted, row_bounds, below",
    [("plain", True, True, False), ("causal", True, True, False), ("sliding_window", True, True, True),
     ("chunked", True, False, True), ("packed_documents", False, False, False), ("tree_verify", True, False, False)],
)  # fmt: skip
def test_masks_are_recognised(variant: str, counted: bool, row_bounds: bool, below: bool) -> None:
    case = next(c for c in example_cases() if c.variant == variant)
    config = emitted(case)[1]
    assert (config.counted, config.row_bounds, config.masks_below) == (counted, row_bounds, below)


@pytest.mark.parametrize(
    "variant, score", [("causal", "dot"), ("alibi", "linear"), ("gemma2_local", "any"), ("t5_encoder", "any")]
)
def test_scores_are_recognised(variant: str, score: str) -> None:
    case = next(c for c in example_cases() if c.variant == variant)
    config = emitted(case)[1]
    assert config.score == score and config.score_loads == (variant == "t5_encoder") and config.unit_positive


def case_of(variant: str) -> Case:
    return next(c for c in ALL if c.variant == variant)


def test_pages_change_nothing_without_tensors_over_rows_or_keys() -> None:
    """... nor does it matter to the module whether keys lie in pages: the Env says so at run time."""
    for case in ALL:
        made = [emitted(case, layout) for layout in ("dense", "paged", "ragged")]
        (dense, most), (paged, some), (ragged, _) = ((x[0], x[1]) for x in made)
        variant = case.load()
        over = {dim for t in variant.tensors for dim in t.dims} & {"iq", "j"}  # ... nor pieces of tiles that emit
        differ = over or variant.emits or some.few_keys  # which have slots of their own
        differ = differ or most.features != some.features  # there may be room for fewer tables
        assert paged.text == ragged.text and (paged.text != dense.text) == bool(differ), case


def test_a_key_is_looked_up_once_a_column_and_a_row_counts_from_the_first_of_all() -> None:
    found = emitted(case_of("rows_and_keys"), "paged")[0]
    text, params = found.text, found.params
    assert len(re.findall(r"= key_page\(", text)) == len(re.findall(r"= key_row\(", text)) == 1
    assert all(f"{name}(x, j)" in body(text, "col") for name in ("key_page", "key_row", "key_is_here"))
    assert "Int64(x.q_start + iq)" in body(text, "row")
    names = {name for name, _ in params}
    assert {"t.bias_row.stride.0", "t.bias_row.stride.1", "t.bias_key.stride.0", "t.bias_key.stride.1",
            "t.bias_key.stride.2"} <= names  # fmt: skip
    assert not names & {"t.bias_row.stride.2", "t.bias_key.stride.3", "t.bias_key.size.0", "t.bias_key.size.1"}


def test_keys_beside_rows_of_one_tensor_are_looked_up_in_the_column() -> None:
    text = emitted(Case(KEYS, "both"), "paged")[0].text
    assert "key_page(x, j)" in body(text, "col")
    assert "load_u8" in body(text, "mask") and "key_" not in body(text, "mask")
    assert "x.q_start + iq" in body(text, "row")


KEYS = """
attention both():
    tensor shown[iq, j]: bool
    mask = shown[iq, j]

attention neighbour():
    tensor kind[j]: i32
    mask = j == 0 or kind[j - 1] == 3

attention own():
    tensor kind[j]: i32 sorted
    mask = kind[j] <= 3

attention earlier_row():
    tensor kind[iq]: i32
    f_logits = s if iq == 0 or kind[iq - 1] == 0 else -s

attention row_of_key():
    tensor kind[iq]: i32
    mask = j <= i - qo_len or kind[j - (kv_len - qo_len)] == 0

attention row_at():
    tensor kind[iq]: i32
    tensor first[g]: i32
    mask = j < first[g] or kind[j - first[g]] == 0

attention head_window():
    tensor window[h]: i32
    mask = i - window[h] < j <= i

attention group_window():
    tensor window[g]: i32
    mask = i - window[g] < j <= i

attention head_bias():
    tensor bias[h, pos]: f32
    f_logits = s + bias[h, j]

attention group_bias():
    tensor bias[g, pos]: f32
    f_logits = s + bias[g, j]

attention from_the_end():
    f_logits = s + 0.5 * f32((kv_len - j) // 4)

attention alibi_by_group():
    tensor slope[g]: f32
    f_logits = s + slope[g] * f32(j - i)
"""


@pytest.mark.parametrize(
    "case, columns, ranges, others",
    [(case_of("causal"), False, False, False), (case_of("sliding_window"), False, False, False),
     (case_of("alibi"), True, False, False), (Case(KEYS, "alibi_by_group"), False, False, False),
     (case_of("tree_verify"), True, False, False), (case_of("key_scales"), False, False, False),
     (case_of("packed_documents"), True, False, False), (case_of("t5_encoder"), False, False, False),
     (case_of("flags"), True, False, False), (case_of("head_scale"), False, False, False),
     (Case(KEYS, "row_at"), True, False, False), (Case(KEYS, "row_of_key"), True, False, False),
     (Case(KEYS, "both"), False, False, False), (Case(KEYS, "neighbour"), False, False, True),
     (Case(KEYS, "own"), False, False, False), (Case(KEYS, "head_window"), False, True, False),
     (Case(KEYS, "group_window"), False, False, False), (Case(KEYS, "head_bias"), True, False, False),
     (Case(KEYS, "group_bias"), False, False, False), (Case(KEYS, "from_the_end"), True, False, False)],
    ids=lambda x: x.variant if isinstance(x, Case) else "",
)  # fmt: skip
def test_what_rows_of_a_packed_tile_share(case: Case, columns: bool, ranges: bool, others: bool) -> None:
    e = emitted(case, "paged")[0]
    assert (e.columns_by_row, e.ranges_by_row, e.other_keys) == (columns, ranges, others)


def test_another_row_is_compared_with_the_rows_of_its_request() -> None:
    text = emitted(Case(KEYS, "earlier_row"), "paged")[0].text
    assert re.search(r"load_b32\(.*Int64\(x\.q_start \+ (v\d+)\).*\(\1 >= 0\) & \(\1 < x\.qo_len\)", body(text, "row"))


@pytest.mark.parametrize("dtype, few", [
    ("bf16", {"few_k": (("rope", 128, "neox", 0, 1),), "few_scale": (("sum", "squares"),)}),
    ("f16", {"few_k": (("sum", "squares"), ("rope", 128, "neox", 0, 1))}),
])  # fmt: skip
def test_few_rows_take_a_norms_scale_apart(dtype: str, few: dict[str, tuple]) -> None:
    """f16 has no room for features without it; where rows are many, or features, nothing is taken apart."""
    case = replace(case_of("qwen3"), dtype=dtype)
    for layout, slots in (("paged", few), ("dense", {})):
        text = emitted(case, layout)[0].text
        steps = ast.literal_eval(text[text.index("STEPS = ") + 8 :])
        assert {k: v for k, v in steps.items() if k.startswith("few_")} == slots
    assert "few_" not in emitted(replace(case, head_dim=256), "paged")[0].text
