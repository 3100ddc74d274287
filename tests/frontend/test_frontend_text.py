"""Text that editors, other systems and generators make: it works, or it is a diagnostic; and it is quick."""

from __future__ import annotations

import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from frontend_helpers import errors, shown, variant

from attncc.diagnostics import AttnError, Diagnostic, Source, Span
from attncc.frontend import ast, load, parse

CAUSAL = "attention causal():\n    mask = j <= i\n"


def only(text: str) -> str:
    """How the mask of the one variant is shown."""
    (v,) = load(Source("test.attn", text))
    return shown(v.mask)


# -- characters


@pytest.mark.parametrize(
    "text", [CAUSAL.replace("\n", "\r\n"), CAUSAL.replace("\n", "\r"), "\ufeff" + CAUSAL, CAUSAL[:-1]]
)
def test_ends_of_lines_and_marks(text: str) -> None:
    assert only(text) == "le(j, i)"


def test_lines_are_counted_alike() -> None:
    assert errors("\ufeff# ä\r\n\rattention a():\r\n    mask = wat\r\n") == ["4:12: unknown name 'wat'"]
    assert errors("# a\x0b\x0c\u2028\x85b\nattention a():\n    mask = wat\n") == ["3:12: unknown name 'wat'"]


def test_any_comment_and_docstring() -> None:
    assert only("# ± 注意 \x00\x1b[31m\nattention a():\n    '注意力 ü'\n    mask = j <= i  # ∀j ≤ i\n") == "le(j, i)"


@pytest.mark.parametrize("char", ["\x00", "\x1b", "\u00a0", "\u2212", "≤", "\x0c", "\U0001f600", "`", "$"])
def test_stray_character(char: str) -> None:
    text = f"attention a():\n    mask = j {char} i\n    scale = wat\n"
    code = f"'{char}'" if char in "`$" else f"U+{ord(char):04X}"
    assert errors(text) == [f"2:14: unexpected character {code}", "3:13: unknown name 'wat'"]


def test_nothing_unprintable_is_shown() -> None:
    with pytest.raises(AttnError) as caught:
        load(Source("t.attn", "attention a():\n    mask = j \x1b[31m\x00 wat\n"))
    assert all(c.isprintable() or c == "\n" for c in str(caught.value))


def test_half_a_surrogate_pair() -> None:
    assert errors("# a comment\n# \ud800\n" + CAUSAL) == ["2:3: not Unicode text"]


def test_wide_characters_are_marked_below() -> None:
    source = Source("t.attn", '    x = "注意" wat\n')
    shown = str(Diagnostic("unknown", source, Span(1, 14, 17))).splitlines()
    assert shown[1:] == ['    x = "注意" wat', "    " + " " * 11 + "^~~"]


def test_a_long_line_is_cut_around_the_place() -> None:
    text = "attention a():\n    mask = " + "j < i and " * 40 + "wat\n"
    with pytest.raises(AttnError) as caught:
        load(Source("t.attn", text))
    _, line, mark, *_ = str(caught.value).splitlines()
    assert len(line) <= 124 and line[mark.index("^") :].startswith("wat")


# -- indentation


def test_tabs() -> None:
    assert errors("attention a():\n\tmask = j <= i\n") == ["2:1: a tab in the indentation"]
    assert errors("attention a():\n  \tmask = j <= i\n") == ["2:3: a tab in the indentation"]
    assert only("attention\ta(\t):\n    mask\t=\tj <= i\t# a tab here is fine\n\t\n") == "le(j, i)"
    assert only("attention a():\n    mask = (j\n\t\t<= i)\n") == "le(j, i)"


def test_blank_lines_and_comments_have_no_indentation() -> None:
    assert only("\n# top\nattention a():\n\n# left\n        # right\n    mask = j <= i\n  \n# end") == "le(j, i)"


@pytest.mark.parametrize("text", ["", "\n", "   \n\n", "# only a comment", "\ufeff", "\t\n"])
def test_empty_file(text: str) -> None:
    assert errors(text) == ["1:1: no variant in this file"]


# -- size


def test_thousands_of_parentheses() -> None:
    for opening in ("(", "[", "((", "f("):
        text = f"attention a():\n    mask = {opening * 5000}j\n    scale = wat\n"
        assert len(errors(text)) == 2
    closed = "attention a():\n    mask = " + "(" * 5000 + "j" + ")" * 5000 + " < i\n"
    assert errors(closed) == ["2:112: brackets nested more than 100 deep"]


MANY = 2000
CHOICES = "1 if j < i else " * MANY + "2"
DEEP = ("-" * MANY + "j", "not " * MANY + "true", " ** ".join("j" * MANY), " + ".join("j" * MANY), CHOICES)


@pytest.mark.parametrize("text", DEEP)
def test_thousands_of_operators(text: str) -> None:
    (message,) = errors(f"attention a():\n    mask = {text}\n")
    assert message.endswith("an expression nested more than 100 deep")


def test_a_chain_of_comparisons_is_not_deep_to_read() -> None:
    assert errors("attention a():\n    mask = " + " < ".join("j" * MANY) + "\n") == [
        "2:12: an expression nested more than 200 deep, counting what its names stand for"
    ]


def test_depth_through_lets_and_defs() -> None:
    lets = "".join(f"    let a{n + 1} = a{n} + i\n" for n in range(500))
    (message,) = errors(f"attention a():\n    let a0 = j\n{lets}    mask = a500 < 3\n")
    assert "nested more than 200 deep" in message
    backwards = "".join(f"    let a{n} = a{n + 1} + i\n" for n in range(500))
    assert errors(f"attention a():\n{backwards}    let a500 = j\n    mask = a0 < 3\n")
    calls = "".join(f"    def f{n + 1}(x) = f{n}(f{n}(x))\n" for n in range(200))
    assert errors(f"attention a():\n    def f0(x) = x + 1\n{calls}    mask = f200(j) < 3\n")


def test_deep_but_legal() -> None:
    inner = "(" * 60 + "j" + " + i)" * 60
    norms = "rmsnorm(" * 30 + "q" + ")" * 30
    assert variant(f"mask = {inner} < 3", f"f_q = {norms}").f_q.type.space == "d"


def test_a_huge_file_is_quick() -> None:
    one = "attention v{n}(window: i32, cap: f32 = 50.0):\n    f_logits = softcap(s, cap)\n    mask = i - window < j\n\n"
    text = "".join(one.format(n=n) for n in range(500))
    start = time.process_time()
    assert len(load(Source("huge.attn", text))) == 500
    assert time.process_time() - start < 5


def test_many_errors_are_quick() -> None:
    text = "attention a():\n" + "    @\n" * 999 + "".join(f"    let x{n} = wat{n} + (\n" for n in range(999))
    start = time.process_time()
    assert len(errors(text)) == 1998
    assert time.process_time() - start < 5


# -- what the package promises


def test_cold_start_is_light() -> None:
    """`attncc check` has 0.4 s in all: nothing heavy is imported, and the parser is made in a few hundredths."""
    script = (
        "import sys, time; t = time.process_time()\n"
        "from attncc.diagnostics import Source\n"
        "from attncc.frontend import load\n"
        f"assert load(Source('t', {CAUSAL!r}))\n"
        "print(time.process_time() - t, *sorted({'torch', 'cutlass', 'numpy', 'click', 'rich'} & set(sys.modules)))\n"
    )
    found = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split()
    assert found[1:] == []
    assert float(found[0]) < 0.4


def test_reading_files(tmp_path: Path) -> None:
    path = tmp_path / "causal.attn"
    path.write_bytes(b"\xef\xbb\xbf" + CAUSAL.replace("\n", "\r\n").encode())
    assert Source.read(path) == Source(str(path), CAUSAL) == Source.of(str(path))
    assert Source.of(CAUSAL) == Source("<string>", CAUSAL)


@pytest.mark.parametrize("make", ["missing", "directory", "latin"])
def test_unreadable_files(make: str, tmp_path: Path) -> None:
    path = tmp_path / "x.attn"
    if make == "directory":
        path.mkdir()
    elif make == "latin":
        path.write_bytes(b"# \xe4\n")
    with pytest.raises(AttnError) as caught:
        Source.read(path)
    assert str(caught.value).startswith(f"{path}: error: ")
    with pytest.raises(AttnError):
        Source.read("a\0b")


def test_text_that_is_taken_for_a_path(tmp_path: Path) -> None:
    there = tmp_path / "there.attn"
    there.touch()
    for source, hint in [
        (f"{there}:wide", f"the command line's FILE:VARIANT is {str(there)!r} with variant='wide' here"),
        ("attention a(): mask = j <= i", "text needs a newline; without one it is taken for a path"),
        (str(tmp_path / "attention.attn"), None),
        (tmp_path / "attention a.attn", None),
    ]:
        with pytest.raises(AttnError) as caught:
            Source.of(source)
        assert [d.hint for d in caught.value.diagnostics] == [hint]


def test_errors_are_in_order_and_travel() -> None:
    source = Source("t.attn", "abc\ndef\n")
    error = AttnError(
        [Diagnostic("second", source, Span(2, 1, 4)), Diagnostic("first", source, Span(1, 2, 3), "a hint")]
    )
    assert str(error) == (
        "t.attn:1:2: error: first\n    abc\n     ^\na hint\nt.attn:2:1: error: second\n    def\n    ^~~"
    )
    again = pickle.loads(pickle.dumps(error))
    assert again.diagnostics == error.diagnostics and str(again) == str(error)


def test_parse_stops_at_syntax() -> None:
    assert [a.name and a.name.text for a in parse(Source("t", "attention a():\n    mask = wat\n")).variants] == ["a"]
    with pytest.raises(AttnError):
        parse(Source("t", "attention a():\n    mask = \n"))


def test_dump(golden: Callable[[str, str], None]) -> None:
    names = ("language.attn", "every_statement.attn")
    for name in names:
        file = parse(Source(name, Path(__file__).with_name(name).read_text(encoding="utf-8")))
        golden(f"dump/{name}.golden", ast.dump(file))
