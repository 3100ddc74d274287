"""The generated modules: goldens of the examples, and what holds for all of them.  No cutlass is needed."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable

import pytest
from gpu.cases import Case, example, example_cases, hard_cases, odd_cases

from attncc import compiler
from attncc.codegen.config import KernelConfig
from attncc.codegen.emit import Emitted

ALL = [*example_cases(), *hard_cases(), *odd_cases()]
FUNCTIONS = {"head", "row", "block", "col", "unit", "score", "shift", "mask", "bounds", "classify", "epilogue"}


def emitted(case: Case) -> tuple[Emitted, KernelConfig]:
    options = compiler._options(
        case.head_dim, case.head_dim_vo, case.dtype, dict(case.const), "dense", "sm_90a"
    )  # fmt: skip
    return compiler.generated(compiler.specialized(case.load(), options), options)


@pytest.mark.parametrize("case", example_cases(), ids=lambda c: c.variant)
def test_examples(case: Case, golden: Callable[[str, str], None]) -> None:
    golden(f"golden/{case.variant}.py.golden", emitted(case)[0].text)


@pytest.mark.parametrize("case", ALL, ids=str)
def test_modules_import_cutlass_alone_and_are_straight_line(case: Case) -> None:
    text, params = emitted(case)[0].text, emitted(case)[0].params
    tree = ast.parse(text)
    modules = {n.module if isinstance(n, ast.ImportFrom) else n.names[0].name
               for n in ast.walk(tree) if isinstance(n, (ast.Import, ast.ImportFrom))}  # fmt: skip
    assert {m.split(".")[0] for m in modules if m} == {"cutlass"}
    assert not [n for n in ast.walk(tree) if isinstance(n, (ast.If, ast.IfExp, ast.BoolOp, ast.For, ast.While))]
    assert {n.name for n in tree.body if isinstance(n, ast.FunctionDef)} >= FUNCTIONS
    assert len(set(params)) == len(params)
    used = {int(k) for k in re.findall(r"x\.params\[(\d+)\]", text)}
    assert used == set(range(len(params)))


def body(text: str, function: str) -> str:
    return re.search(rf"^def {function}\(.*?(?=^def |\Z)", text, re.S | re.M).group(0)  # type: ignore[union-attr]


def test_a_line_names_the_line_it_comes_from() -> None:
    text = emitted(example("gemma2", "gemma2_local"))[0].text
    assert re.search(r"tanh.*# gemma2\.attn:\d+$", text, re.M)


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
