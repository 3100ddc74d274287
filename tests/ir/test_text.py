from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from ir.strategies import variants

from attncc.diagnostics import Source, Span
from attncc.frontend import load
from attncc.ir.nodes import F32, SLOT_DEFAULTS, Const, Leaf, Load, Scan, TensorParam, Variant, make, transform
from attncc.ir.text import brief, parse_variant, print_variant

PLAIN = Variant("plain", None, (), (), **SLOT_DEFAULTS, scan=Scan("softmax"))
EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.attn"))


@given(variants())
@settings(max_examples=60, deadline=None)
def test_round_trip(v: Variant) -> None:
    assert parse_variant(print_variant(v)) == v


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_examples_round_trip_with_and_without_positions(path: Path) -> None:
    for v in load(Source.read(path)):
        assert parse_variant(print_variant(v)) == v
        text = print_variant(v, positions=True)
        assert parse_variant(text) == v
        assert "%" not in text or f"# {path.name}:" in text


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-6, 0.1, 1e300, 5e-324, math.inf, -math.inf, math.nan, 1.0])
def test_floats_round_trip_to_the_last_bit(value: float) -> None:
    v = replace(PLAIN, f_logits=make("add", Leaf("s"), Const(value, F32)))
    again = parse_variant(print_variant(v)).f_logits.args[1].value  # type: ignore[union-attr]
    assert repr(again) == repr(value)


@pytest.mark.parametrize("doc", ["", "a # b.attn:3", 'quote " and \\ back', "two\nlines", "Überschrift\u2028x"])
def test_docstrings_round_trip(doc: str) -> None:
    assert parse_variant(print_variant(replace(PLAIN, doc=doc))).doc == doc


def test_a_shared_node_stands_once_and_deep_ones_are_no_trouble() -> None:
    e = Leaf("s")
    for _ in range(200):
        e = make("add", e, e)
    v = replace(PLAIN, f_logits=e)
    assert len(print_variant(v).splitlines()) < 220
    assert parse_variant(print_variant(v)) == v
    for _ in range(5000):
        e = make("add", e, Const(1.0, F32))
    v = replace(PLAIN, f_logits=e)
    assert parse_variant(print_variant(v)) == v


def test_positions_name_the_file_and_the_line() -> None:
    v = replace(PLAIN, f_logits=make("neg", Leaf("s"), span=Span(7, 3, 4)), source=Source("some/where/t.attn", ""))
    assert "    %0 = neg s : f32".ljust(56) + "# t.attn:7\n" in print_variant(v, positions=True)
    assert "#" not in print_variant(v)


def test_brief_is_short_whatever_the_expression() -> None:
    e = Leaf("s")
    for _ in range(300):
        e = make("add", e, e)
    assert len(brief(e)) <= 160 and "…" in brief(e)
    assert brief(make("mul", Leaf("s"), Const(0.5, F32))) == "mul(s, 0.5)"
    assert repr(e) == brief(e)


SLOPE = TensorParam("slope", ("h",), "f32")
BIASED = make("add", Leaf("s"), Load("slope", (Leaf("h"),), F32))
TEXT = print_variant(replace(PLAIN, tensors=(SLOPE,), f_logits=BIASED))


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("attention plain", "variant plain", 1, "expected `attention NAME`"),
        ("tensor slope[h]: f32", "tensor slope[h: f32", 2, "expected `tensor NAME"),
        ("%0 = f32 head_dim_qk : f32", "%0 = f32 head_dim_qk", 4, "expected `%N = OP OPERANDS : TYPE`"),
        ("%1 = rsqrt %0 : f32", "%1 = rsqrt %7 : f32", 5, "no node %7 yet"),
        ("%1 = rsqrt %0 : f32", "%0 = rsqrt %0 : f32", 5, "%0 is given twice"),
        ("%1 = rsqrt %0 : f32", "%1 = cbrt %0 : f32", 5, "unknown op 'cbrt'"),
        ("%1 = rsqrt %0 : f32", "%1 = rsqrt $x : f32", 5, "no scalar 'x' declared"),
        ("%1 = rsqrt %0 : f32", "%1 = rsqrt %0 : f64", 5, "expected a type"),
        ("%1 = rsqrt %0 : f32", "%1 = rsqrt what : f32", 5, "could not convert"),
        ("f_q = q", "f_z = q", 7, "expected a slot"),
        ("f_k = k", "f_q = q", 8, "f_q is given twice"),
        ("  epilogue = o\n", "", 15, "missing epilogue"),
        ("scan = softmax()", "scan = hardmax()", 16, "expected `softmax()`"),
    ],
)
def test_errors_name_the_line(old: str, new: str, line: int, words: str) -> None:
    assert TEXT.count(old) == 1
    with pytest.raises(ValueError) as found:
        parse_variant(TEXT.replace(old, new))
    assert str(found.value).startswith(f"line {line}: ") and words in str(found.value)


def test_a_slot_left_open_is_an_error() -> None:
    with pytest.raises(ValueError, match="missing `return` of f_logits"):
        parse_variant(TEXT[: TEXT.index("    return %1", TEXT.index("f_logits"))])


def test_language_examples(golden) -> None:
    """The text of the language page's variants, positions included."""
    source = Path(__file__).with_name("language.attn")
    for v in load(Source("language.attn", source.read_text(encoding="utf-8"))):
        golden(f"golden_text/{v.name}.ir", print_variant(v, positions=True))


def test_transform_of_printed_is_identity() -> None:
    v = parse_variant(TEXT)
    assert v.map(lambda e: transform(e, lambda x: x)) == v
