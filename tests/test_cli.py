"""The command line: what it prints, where, and its exit codes."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from attncc import parallel_build
from attncc.cli import main
from attncc.diagnostics import Source

ROOT = Path(__file__).resolve().parents[1]
GEMMA = str(ROOT / "examples" / "gemma2.attn")
CAUSAL = str(ROOT / "examples" / "causal.attn")

BAD = "attention a(window: i32):\n    mask = i - windw < j\n    f_logits = s + unknown\n"


def attncc(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(main, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


# ---------------------------------------------------------------------------------------------------- help


@pytest.mark.parametrize("command", ["check", "show", "build", "run", "explain", "bench"])
def test_every_command_teaches_with_an_example(command: str) -> None:
    shown = attncc(command, "--help").output
    assert f"  attncc {command} examples/" in shown
    for line in shown.splitlines():
        for word in line.split():
            if word.startswith("examples/") and "*" not in word:
                path, _, variant = word.partition(":")
                text = (ROOT / path).read_text()
                assert not variant or f"attention {variant}(" in text, line


def test_help_lists_the_commands_in_order() -> None:
    shown = attncc("--help").output.split("Commands:")[1]
    assert [line.split()[0] for line in shown.strip().splitlines()] == [
        "check", "show", "build", "run", "explain", "bench",
    ]  # fmt: skip


def test_version() -> None:
    assert "0.1.0" in attncc("--version").output


# ---------------------------------------------------------------------------------------------------- check


def test_check_says_ok_for_each_file() -> None:
    result = attncc("check", GEMMA, CAUSAL)
    assert result.stdout.splitlines() == [
        f"{GEMMA}: ok (gemma2_global, gemma2_local)", f"{CAUSAL}: ok (causal, sliding_window)",
    ]  # fmt: skip
    assert result.stderr == ""


def test_check_shows_every_error_on_stderr_and_goes_on(tmp_path: Path) -> None:
    bad = tmp_path / "bad.attn"
    bad.write_text(BAD)
    result = attncc("check", str(bad), GEMMA, code=1)
    assert f"{bad}:2:16: error: unknown name 'windw'\n    mask = i - windw < j\n               ^~~~~\n" in result.stderr
    assert "did you mean 'window'?" in result.stderr
    assert f"{bad}:3:20: error: unknown name 'unknown'" in result.stderr
    assert result.stdout == f"{GEMMA}: ok (gemma2_global, gemma2_local)\n"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    latin = tmp_path / "latin.attn"
    latin.write_bytes(b"attention \xe9():\n    mask = j <= i\n")
    empty = tmp_path / "empty.attn"
    empty.write_text("")
    result = attncc("check", str(tmp_path / "none.attn"), str(tmp_path), str(latin), str(empty), code=1)
    shown = result.stderr
    assert "none.attn: error: cannot read: No such file or directory" in shown
    assert f"{tmp_path}: error: cannot read: Is a directory" in shown
    assert "latin.attn: error: not UTF-8 text" in shown
    assert "empty.attn" in shown and result.stdout == ""


def test_a_colon_in_a_file_name(tmp_path: Path) -> None:
    odd = tmp_path / "odd:name"
    odd.write_text("attention a():\n    mask = j <= i\n")
    assert attncc("check", str(odd)).stdout == f"{odd}: ok (a)\n"
    assert attncc("check", f"{odd}:a").stdout == f"{odd}: ok (a)\n"


def test_a_variant_that_is_not_there() -> None:
    for command in (["check"], ["show", "--stage", "ir"], ["run"], ["explain", "--qo", "8", "--kv", "8"], ["build"]):
        result = attncc(command[0], f"{GEMMA}:gemma2_locl", *command[1:], code=1)
        assert f"{GEMMA}: error: no variant 'gemma2_locl'\ndid you mean 'gemma2_local'?" in result.stderr
    assert "it has: gemma2_global, gemma2_local" in attncc("check", f"{GEMMA}:zzz", code=1).stderr


# ---------------------------------------------------------------------------------------------------- show


def test_show_ast_and_ir() -> None:
    from attncc import compiler
    from attncc.ir.text import parse_variant

    assert "gemma2_local" in attncc("show", GEMMA, "--stage", "ast").stdout
    both = attncc("show", GEMMA, "--stage", "ir", "--const", "cap=30").stdout
    assert "30.0" in both and both.count("gemma2_") == 2
    one = attncc("show", f"{GEMMA}:gemma2_local", "--stage", "ir", "--head-dim", "64").stdout
    assert one in both.replace("30.0", "50.0")
    assert parse_variant(one).name == "gemma2_local"
    assert len(compiler.variants(GEMMA)) == 2


def test_show_py_names_the_lines_it_came_from() -> None:
    shown = attncc("show", f"{GEMMA}:gemma2_local", "--stage", "py").stdout
    compile(shown, "functors.py", "exec")
    assert "gemma2.attn:" in shown and "tanh" in shown


def test_show_grad_is_refused_clearly() -> None:
    assert "not supported yet; what works: ast, ir, py, ptx, sass" in attncc(
        "show", GEMMA, "--stage", "grad", code=1
    ).stderr.replace("\n", " ")


# ---------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize("options, message", [
    (["--kv-dtype", "e4m3"], "--kv-dtype e4m3: keys and values of another type than q are not supported yet; "
                             "what works: --kv-dtype bf16"),
    (["--kv-dtype", "f16"], "what works: --kv-dtype bf16"),
    (["--dtype", "f16", "--kv-dtype", "bf16"], "what works: --kv-dtype f16"),
    (["--layout", "paged"], "--layout paged: expected --page-size N, the rows of a page"),
    (["--layout", "paged", "--page-size", "0"], "page_size: expected 1 to 1048576, found 0"),
    (["--layout", "ragged", "--page-size", "16"], "--page-size: goes with --layout paged"),
    (["--page-size", "16"], "--page-size: goes with --layout paged"),
    (["--layout", "paged", "--page-size", "16", "--prepass"],
     "--prepass: a cache in pages is never copied; what works: --no-prepass"),
    (["--const", "cup=3"], "--const cup: no const parameter of that name; there is: cap"),
    (["--const", "window=3"], "--const window: no const parameter of that name; it is a run-time scalar: --set"),
    (["--head-dim", "100"], "head_dim: expected a multiple of 8 from 8 to 256, found 100"),
    (["--head-dim", "264"], "found 264"),
    (["--const", "cap=true"], "cap"),
])  # fmt: skip
def test_bad_options_are_refused(options: list[str], message: str, tmp_path: Path) -> None:
    result = attncc("build", GEMMA, "-j", "1", "-o", str(tmp_path / "out"), *options, code=1)
    assert message in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", [["--const", "cap"], ["--const", "cap=x"], ["--dtype", "f32"], ["--arch", "sm_80"]])
def test_malformed_options(options: list[str]) -> None:
    assert "Usage:" in attncc("build", GEMMA, *options, code=2).stderr


# ---------------------------------------------------------------------------------------------------- run


def test_run_on_the_reference() -> None:
    shown = attncc("run", GEMMA, "--backend", "reference", "--qo", "33", "--kv", "70", "--set", "window=9").stdout
    assert "gemma2_global: ok, against the float64 reference" in shown
    assert "gemma2_local: ok, against the float64 reference" in shown
    errors = [line for line in shown.splitlines() if line.startswith("  error")]
    assert len(errors) == 2 and all("relative" in line and "lse" in line for line in errors)
    relative = float(errors[0].split("out ")[1].split()[0])
    assert 1e-4 < relative < 4e-3  # rounded to bf16, so neither exact nor worse than that


def test_run_says_what_it_chose_and_takes_what_it_is_given() -> None:
    path = str(ROOT / "examples" / "sigmoid.attn")
    chosen = attncc("run", path, "--backend", "reference", "--qo", "20").stdout
    assert "bias     0.5 (chosen: it has no default and no --set)" in chosen and "no lse (scan = none)" in chosen
    given = attncc("run", path, "--backend", "reference", "--qo", "20", "--set", "bias=-3").stdout
    assert "chosen" not in given


def test_run_shapes_and_seed() -> None:
    arguments = ["run", CAUSAL + ":causal", "--backend", "reference", "--batch", "3", "--qo", "10", "--kv", "21"]
    first = attncc(*arguments, "--heads", "6", "--kv-heads", "2", "--head-dim", "64", "--head-dim-vo", "32").stdout
    assert "B3 qo 10 kv 21 6/2, bf16, seed 0" in first
    assert attncc(*arguments, "--seed", "1").stdout == attncc(*arguments, "--seed", "1").stdout
    assert attncc(*arguments, "--seed", "1").stdout != attncc(*arguments, "--seed", "2").stdout
    for empty in (["--qo", "0"], ["--kv", "0"], ["--batch", "0"]):
        attncc("run", CAUSAL + ":causal", "--backend", "reference", *empty)


@pytest.mark.parametrize("layout", [["ragged"], ["paged", "--page-size", "16"], ["paged", "--page-size", "5"]])
def test_run_of_served_batches(layout: list[str]) -> None:
    arguments = ["run", GEMMA, "--backend", "reference", "--batch", "2", "--qo", "33", "--kv", "70", "--layout"]
    shown = attncc(*arguments, *layout, "--set", "window=9").stdout
    assert shown.count("ok, against the float64 reference") == 2
    how = f"pages of {layout[-1]}" if layout[0] == "paged" else "ragged"
    assert f"B2 qo 33 kv 70 8/2 and qo/kv 1/70, 4/46, 16/16, {how}, bf16, seed 0" in shown
    errors = [float(line.split("out ")[1].split()[0]) for line in shown.splitlines() if line.startswith("  error")]
    assert len(errors) == 2 and all(1e-4 < x < 4e-3 for x in errors)
    for empty in (["--qo", "0"], ["--kv", "0"], ["--batch", "0"]):
        attncc("run", CAUSAL, "--backend", "reference", "--layout", *layout, *empty)


@pytest.mark.parametrize("command", ["run", "bench"])
def test_layouts_that_cannot_be(command: str) -> None:
    paged = attncc(command, CAUSAL, "--layout", "paged", code=1).stderr
    assert "--layout paged: expected --page-size N, the rows of a page" in paged
    assert "goes with --layout paged" in attncc(command, CAUSAL, "--page-size", "16", code=1).stderr


@pytest.mark.parametrize("command", ["build", "run", "bench"])
@pytest.mark.parametrize("size", ["-1", "0", "1048577", "5000000"])
def test_pages_that_cannot_be(command: str, size: str) -> None:
    arguments = [command, CAUSAL, "--layout", "paged", "--page-size", size]
    assert f"page_size: expected 1 to 1048576, found {size}" in attncc(*arguments, code=1).stderr


def test_run_shows_emitted_tensors() -> None:
    shown = attncc("run", str(ROOT / "examples" / "max_logit.attn"), "--backend", "reference", "--qo", "20").stdout
    assert "emit     row_max" in shown and "emit     head_max" in shown


@pytest.mark.parametrize("layout", ["dense", "ragged"])
def test_run_with_blocks_of_a_const_size(layout: str, tmp_path: Path) -> None:
    path = tmp_path / "listed.attn"
    path.write_text(
        "attention listed(n: const i32):\n    tensor sel[iq, top]: i32\n    domain = blocks(sel[iq, :], size = n)\n"
    )
    call = ["run", str(path), "--backend", "reference", "--qo", "4", "--kv", "9", "--head-dim", "8", "--layout", layout]
    assert "listed: ok" in attncc(*call, "--const", "n=2").stdout
    assert "n: listed needs this i32 parameter" in attncc(*call, code=1).stderr
    assert "the size of a block is at least 1" in attncc(*call, "--const", "n=0", code=1).stderr


def test_run_where_the_reference_itself_is_not_finite(tmp_path: Path) -> None:
    path = tmp_path / "huge.attn"
    path.write_text("attention huge(x: f32 = -1.0):\n    mask = j <= i\n    epilogue = o / 0.0 if iq == 1 else o\n")
    shown = attncc("run", str(path), "--backend", "reference", "--qo", "4", "--head-dim", "8").stdout
    assert "huge: ok" in shown and "nan" not in shown
    assert "64 values of out are not finite in both, in the same places" in shown


@pytest.mark.parametrize("found", [0.0, float("inf")])
def test_values_that_are_not_finite_must_be_the_same(found: float) -> None:
    import torch

    from attncc.trial import _largest

    nan = float("nan")
    want = torch.tensor([1.0, nan, -torch.inf], dtype=torch.float64)
    assert _largest(torch.tensor([1.5, nan, -torch.inf]), want) == (0.5, True)
    assert _largest(torch.tensor([1.5, found, -torch.inf]), want) == (0.5, False)
    assert _largest(torch.tensor([1.5, nan, found]), want) == (0.5, False)


def test_run_bad_arguments() -> None:
    assert (
        "--heads: expected a multiple of the 3 kv heads, found 4"
        in attncc("run", CAUSAL, "--heads", "4", "--kv-heads", "3", code=1).stderr
    )
    assert (
        "--set cap: no run-time scalar of that name; it is a const parameter: --const"
        in attncc("run", GEMMA, "--set", "cap=3", code=1).stderr
    )
    for command in (["run", GEMMA, "--backend", "reference"], ["explain", GEMMA, "--qo", "8", "--kv", "8"]):
        for value in ("1.5", "true", "2147483648"):
            refused = attncc(*command, "--set", f"window={value}", code=1).stderr
            assert f"window: expected i32, found {value}" in refused


def test_the_module_is_the_command() -> None:
    found = subprocess.run([sys.executable, "-m", "attncc.cli", "check", GEMMA], capture_output=True, text=True)
    assert found.stdout == f"{GEMMA}: ok (gemma2_global, gemma2_local)\n"


def test_examples_of_the_help_are_not_wrapped() -> None:
    for name, command in main.commands.items():
        shown, meant = (
            {line.strip() for line in text.splitlines()} for text in (attncc(name, "--help").output, command.help)
        )
        assert {line for line in meant if line.startswith("attncc ")} <= shown


def test_without_a_gpu() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert "no Hopper GPU" in attncc("run", CAUSAL, "--backend", "cuda", code=1).stderr
    assert "needs a Hopper GPU" in attncc("bench", CAUSAL, code=1).stderr
    assert "needs a Hopper GPU" in attncc("bench", CAUSAL, "--layout", "ragged", code=1).stderr
    assert "reference in float32, rounded (no Hopper GPU)" in attncc("run", CAUSAL, "--qo", "8").stdout


# ---------------------------------------------------------------------------------------------------- build


@pytest.mark.slow
def test_build_several_in_processes(tmp_path: Path, kernel_cache: Path) -> None:
    unbuildable = tmp_path / "emits.attn"
    unbuildable.write_text("attention emits():\n    mask = j <= i\n    emit peak[h, j] = max(l)\n")
    out = tmp_path / "out"
    result = attncc("build", GEMMA, str(unbuildable), "-o", str(out), "--head-dim", "64", "-j", "2", code=1)
    header, *rows = result.stdout.splitlines()
    for title in ("kernel", "tile", "stages", "registers", "shared memory", "spilled bytes", "build time"):
        assert title in header
    assert [row.split()[0] for row in rows[:2]] == ["gemma2_global", "gemma2_local"]
    assert "emits: not built" in result.stderr and "emits.attn:3:" in result.stderr
    assert sorted(p.name for p in out.iterdir()) == ["gemma2_global", "gemma2_local"]
    manifest = json.loads((out / "gemma2_local" / "manifest.json").read_text())
    assert manifest["variant"]["name"] == "gemma2_local" and manifest["head_dim_qk"] == 64
    assert manifest["kernels"]["forward"]["spill_bytes"] == 0


@pytest.mark.slow
def test_build_shows_every_kernel_of_a_variant(tmp_path: Path, kernel_cache: Path) -> None:
    llama = str(ROOT / "examples" / "llama31_rope.attn")
    shown = attncc("build", llama, "-o", str(tmp_path / "out"), "--head-dim", "64").stdout
    assert all(f"llama31_rope{name} " in shown for name in ("", " prepared", " prepass"))


@pytest.mark.slow
def test_build_one_goes_to_the_directory_itself(tmp_path: Path, kernel_cache: Path) -> None:
    import attncc as package

    out = tmp_path / "one"
    attncc("build", f"{CAUSAL}:causal", "-o", str(out), "--dtype", "f16", "--head-dim", "64")
    assert (out / "manifest.json").exists()
    assert package.load(out).manifest["dtype"] == "f16"


@pytest.mark.slow
def test_show_ptx_and_sass(kernel_cache: Path) -> None:
    arguments = ["show", f"{CAUSAL}:causal", "--head-dim", "64", "--stage"]
    assert ".target sm_90a" in attncc(*arguments, "ptx").stdout
    assert "HGMMA" in attncc(*arguments, "sass").stdout


def test_two_kernels_of_one_name(tmp_path: Path) -> None:
    copy = tmp_path / "copy.attn"
    copy.write_text(Path(CAUSAL).read_text())
    result = attncc("build", CAUSAL, str(copy), "-o", str(tmp_path / "out"), code=1)
    assert f"two kernels would both go to {tmp_path / 'out' / 'causal'}" in result.stderr


def test_where_kernels_go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One alone goes to -o DIR itself; several, or any without -o, each to a folder of its own."""
    went: list[str] = []

    def build_all(jobs: list[parallel_build.Job], processes: int | None) -> list[parallel_build.Result]:
        went.extend(job.output for job in jobs)
        return []

    monkeypatch.setattr(parallel_build, "build_all", build_all)
    monkeypatch.chdir(tmp_path)
    for arguments, outputs in [
        ([f"{CAUSAL}:causal"], ["build/causal"]),
        ([f"{CAUSAL}:causal", "-o", "x"], ["x"]),
        ([GEMMA], ["build/gemma2_global", "build/gemma2_local"]),
        ([GEMMA, "-o", "x"], ["x/gemma2_global", "x/gemma2_local"]),
    ]:
        went.clear()
        attncc("build", *arguments)
        assert went == outputs


def test_an_output_that_cannot_be_written_is_refused_before_compiling(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(parallel_build, "build_all", lambda *_: pytest.fail("compiled"))
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("keep")
    (tmp_path / "file").write_text("keep")
    for folder, message in [
        ("notes", "expected a new or empty directory or an artifact to replace, found mine.txt in it"),
        ("file", "expected a directory, found a file"),
        ("n" * 300, "cannot be written to: File name too long"),
        ("file/below", f"cannot be made: {tmp_path / 'file'} is no directory that can be written to"),
    ]:
        shown = attncc("build", f"{CAUSAL}:causal", "-o", str(tmp_path / folder), code=1).stderr
        assert f"{tmp_path / folder}: {message}" in shown


def test_a_failed_build_keeps_the_others(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The table shows what was built, stderr what wasn't, whatever the compiler raised for it."""
    from attncc import compiler

    errors = {"bad": RuntimeError("kernel spills 8 bytes"), "worse": KeyError("lost")}
    kernel = {"tile_q": 128, "tile_kv": 128, "stages": [2, 2, 2], "registers": 168, "smem": 230_400, "spill_bytes": 0,
              "build_seconds": 1.25}  # fmt: skip

    def build_artifact(source: Source, output: str, *, variant: str) -> dict[str, object]:
        if variant in errors:
            raise errors[variant]
        return {"kernels": {"forward": kernel}}

    monkeypatch.setattr(compiler, "build_artifact", build_artifact)
    source = Source("x.attn", "")
    jobs = [parallel_build.Job(source, f"out/{name}", {"variant": name}) for name in ("bad", "good", "worse")]
    assert parallel_build.show(parallel_build.build_all(jobs, 1)) == 1
    shown = capsys.readouterr()
    row = next(line for line in shown.out.splitlines() if line.startswith("good "))
    assert row.split() == ["good", "128×128", "2/2/2", "168", "230,400", "0", "1.2", "s"]
    assert shown.err.startswith("bad: not built\nkernel spills 8 bytes\nworse: not built\nan error of attncc itself:\n")
    assert shown.err.endswith("KeyError: 'lost'\n\n")


class Lethal:
    """Ends the process that unpickles it."""

    def __reduce__(self) -> tuple[object, tuple[int]]:
        return os._exit, (1,)


def test_a_build_process_that_dies_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    jobs = [parallel_build.Job(Source("x.attn", ""), "out", {"variant": Lethal()}) for _ in range(2)]
    assert parallel_build.show(parallel_build.build_all(jobs, 2)) == 1
    assert "the process that built it died" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------- explain


def test_explain(tmp_path: Path) -> None:
    shown = attncc("explain", f"{CAUSAL}:sliding_window", "--qo", "1024", "--kv", "1024", "--set", "window=200").stdout
    assert "sliding_window" in shown
    png = tmp_path / "tiles.png"
    attncc("explain", f"{CAUSAL}:sliding_window", "--qo", "1024", "--kv", "1024", "--png", str(png))
    assert png.read_bytes().startswith(b"\x89PNG")
    assert (
        "one variant a picture"
        in attncc("explain", CAUSAL, "--qo", "64", "--kv", "64", "--png", str(png), code=1).stderr
    )


@pytest.mark.parametrize("name, message", [
    ("missing/tiles.png", "cannot write: No such file or directory"),
    ("tiles.pdf", "expected a file name that ends in .png"),
    ("tiles", "expected a file name that ends in .png"),
])  # fmt: skip
def test_a_picture_that_cannot_be_drawn(name: str, message: str, tmp_path: Path) -> None:
    path = str(tmp_path / name)
    shown = attncc("explain", f"{CAUSAL}:causal", "--qo", "64", "--kv", "64", "--png", path, code=1).stderr
    assert shown == f"Error: --png {path}: {message}\n"


# ---------------------------------------------------------------------------------------------------- cold start


@pytest.mark.parametrize("arguments, target", [(["check", GEMMA], 0.4), (["show", GEMMA, "--stage", "py"], 0.6)])
def test_cold_start(arguments: list[str], target: float) -> None:
    """Seconds of processor time, best of three, against twice the target: on an idle machine they are the wall clock's,
    and a machine that is busy with other tests doesn't stretch them as much."""
    command = [str(Path(sys.executable).with_name("attncc")), *arguments]
    found = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(found) < 2 * target, found
