"""Who may import whom, and what importing costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("torch", "lark", "cutlass", "numpy", "rich", "matplotlib", "cuda")


def loaded_by(code: str) -> set[str]:
    """The top-level modules among HEAVY that a fresh interpreter has loaded after `code`."""
    script = f"{code}\nimport sys; print(*(m for m in {HEAVY!r} if m in sys.modules))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(run.stdout.splitlines()[-1].split())


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert loaded_by("import attncc; attncc.AttnError; dir(attncc)") == set()


def test_the_command_line_loads_nothing_heavy() -> None:
    assert loaded_by("import attncc.cli, attncc.compiler") == set()


@pytest.mark.parametrize("command", ["check {}", "show {} --stage ast", "show {} --stage ir", "show {} --stage py"])
def test_check_and_show_load_the_parser_alone(command: str) -> None:
    arguments = command.format(ROOT / "examples" / "gemma2.attn").split()
    code = f"from attncc.cli import main\nmain({arguments!r}, standalone_mode=False)"
    assert loaded_by(code) <= {"lark", "numpy"}  # tile ranges may use numpy


def test_the_runtime_needs_no_compiler() -> None:
    code = "import attncc.runtime.kernel, attncc.runtime.artifact"
    assert loaded_by(code) & {"lark", "cutlass"} == set()


def imports_of(path: Path) -> set[str]:
    """Every module that a file imports anywhere, by full name."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
    return found


def test_only_the_driver_touches_the_cuda_api() -> None:
    """Kernels may name the type of a stream, which the DSL wants in a signature."""
    for path in (ROOT / "attncc").rglob("*.py"):
        if not any(name.split(".")[0] == "cuda" for name in imports_of(path)):
            assert path.name != "driver.py"
        elif path.parent.name == "device":
            tree = ast.parse(path.read_text(encoding="utf-8"))
            named = {x.attr for x in ast.walk(tree) if isinstance(x, ast.Attribute) and ast.unparse(x.value) == "cuda"}
            assert named == {"CUstream"}, path
        else:
            assert path == ROOT / "attncc" / "runtime" / "driver.py"


def test_only_build_and_the_kernels_import_cutlass() -> None:
    for path in (ROOT / "attncc").rglob("*.py"):
        if any(name.split(".")[0] == "cutlass" for name in imports_of(path)):
            inside = path.relative_to(ROOT / "attncc" / "codegen")
            assert inside.parts[0] in ("build.py", "device"), path


def test_import_contracts_hold() -> None:
    """The contracts of pyproject.toml, by import-linter."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stdout
