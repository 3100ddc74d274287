"""Damaged files: whatever is done to a good file, it loads or its diagnostics say why; never a Python traceback."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from attncc.diagnostics import AttnError, Source
from attncc.frontend import ast, load, parse
from attncc.frontend.names import FUNCTIONS, KEYWORDS, PLACED, SLOTS, WHERE
from attncc.ir.text import parse_variant, print_variant

HERE = Path(__file__).parent
CORPUS = [
    path.read_text(encoding="utf-8").split("#!", 1)[0]
    for path in (HERE / "language.attn", HERE / "every_statement.attn", *sorted((HERE / "errors").glob("*.attn")))
    if path.stem != "too_large"
]
PIECES = [
    *KEYWORDS, *SLOTS, *FUNCTIONS, *PLACED, *WHERE, "kv_len", "head_dim_qk", "window", "x", "tensor t[h]: f32", "t[h]",
    *"()[]:,=+-*/%<>#\"'\n\t\r\0.@é", "//", "**", "<=", "==", "\n    ", "\n", "0", "1", "2147483648", "1e400", "1e",
    "f32", "i32", "bool", "bf16", "grad", "sorted", "const", '"""', "\ufeff", "\u2028", "(((((", "))", "none",
]  # fmt: skip


def check(text: str) -> None:
    """Loading either works or explains itself."""
    source = Source("fuzz.attn", text)
    try:
        variants = load(source)
    except AttnError as error:
        lines = source.text.split("\n")
        assert error.diagnostics and str(error)
        for d in error.diagnostics:
            assert d.message and 1 <= d.span.line <= len(lines)
            assert 1 <= d.span.column <= len(lines[d.span.line - 1]) + 1 and d.span.end_column > d.span.column
        return
    assert variants and ast.dump(parse(source))
    for v in variants:
        assert parse_variant(print_variant(v)) == v


@st.composite
def damaged(draw: st.DrawFn) -> str:
    """A file of the corpus after a few cuts, insertions and exchanges."""
    text = draw(st.sampled_from(CORPUS))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.sampled_from([0, 0, 1, 1, 2, 5, 30])))
        kind = draw(st.sampled_from(["piece", "piece", "piece", "text", "copy"]))
        if kind == "piece":
            new = draw(st.sampled_from(PIECES))
        elif kind == "text":
            new = draw(st.text(max_size=3))
        else:
            other = draw(st.integers(0, len(text)))
            new = text[other : other + draw(st.integers(1, 40))]
        text = text[:start] + new + text[end:]
    return text


@settings(max_examples=250, deadline=None)
@given(damaged())
def test_damaged_files(text: str) -> None:
    check(text)


@settings(max_examples=120, deadline=None)
@given(st.lists(st.sampled_from([*PIECES, " "]), max_size=30).map(" ".join))
def test_random_statements(body: str) -> None:
    check(f"attention a(window: i32, x: f32):\n    tensor t[h]: f32\n    {body}\n    mask = {body}\n")


@settings(max_examples=120, deadline=None)
@given(st.text())
def test_any_text(text: str) -> None:
    check(text)


ATOMS = ("i", "j", "s", "1", "0", "0.5", "true", "x", "n", "t[h]", "q", "w", "d", "flag", "-2147483648", "kv_len")


def _compound(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    operators = ("+", "-", "*", "/", "//", "%", "**", "<", "<=", "==", "!=", ">", ">=", "and", "or")
    return st.one_of(
        st.tuples(inner, st.sampled_from(operators), inner).map(lambda x: f"({' '.join(x)})"),
        st.tuples(st.sampled_from(["-", "not "]), inner).map("".join),
        st.tuples(inner, inner, inner).map(lambda x: f"({x[0]} if {x[1]} else {x[2]})"),
        st.tuples(st.sampled_from(FUNCTIONS), st.lists(inner, min_size=1, max_size=3)).map(
            lambda x: f"{x[0]}({', '.join(x[1])})"
        ),
        inner.map(lambda x: f"t[{x}]"),
    )


@settings(max_examples=250, deadline=None)
@given(
    st.recursive(st.sampled_from(ATOMS), _compound, max_leaves=12),
    st.sampled_from(["f_logits", "mask", "f_q", "scale"]),
)
def test_random_expressions(text: str, slot: str) -> None:
    """Well formed, of any types: what is accepted is well typed (`load` runs the verifier) and reads back."""
    scalars = "x: f32, n: const i32, flag: bool"
    check(f"attention a({scalars}):\n    tensor t[h]: f32\n    tensor w[d]: f32\n    {slot} = {text}\n")
