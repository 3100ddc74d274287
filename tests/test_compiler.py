"""The whole route: what compile, reference, load, build_artifact and show do, and what they say of bad arguments."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import attncc
from attncc import compiler
from attncc.diagnostics import AttnError, Source

sys.path.insert(0, str(Path(__file__).parent / "runtime"))
from fake_driver import GEOMETRY, SERVED_POINTERS, SERVED_SIZES, FakeDriver, layout

ONE = """
attention windowed(window: i32 = 7, cap: const f32 = 50.0, soft: const bool = false):
    tensor sink[h]: f32
    f_logits = softcap(s, cap) if soft else s
    mask = i - window < j <= i
    scan = softmax(sink = sink[h])
"""
TWO = """
attention left():
    mask = j <= i

attention right():
    mask = j >= i
"""


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNCC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "_kernels", {})


@pytest.fixture
def builds(monkeypatch):
    """codegen.build without cutlass: the parameters are those that emit asks for, the cubin is the module's text."""
    calls = []

    def build(emitted, config, work_dir):
        assert os.path.isdir(work_dir)
        calls.append(emitted.name)
        if config.served:
            names = [("map_k", "tensormap"), ("map_v", "tensormap")]
            names += [(x, "ptr") for x in SERVED_POINTERS] + [(x, "i32") for x in SERVED_SIZES]
        else:
            names = [(f"map_{x}", "tensormap") for x in "qkvo"] + [("lse", "ptr"), ("tickets", "ptr")]
            names += [(x, "i32") for x in GEOMETRY]
        names += list(emitted.params)
        kernel = {
            "cubin": f"{config.name}.cubin", "entry": f"attncc_{emitted.name}_0", "params": layout(names),
            "block": [384, 1, 1], "smem": 1024, "registers": 168, "spill_bytes": 0, "tile_q": config.tile_q,
            "tile_kv": config.tile_kv, "stages": 2, "causal_like": config.dynamic, "build_seconds": 0.1,
            "tma": {f"map_{x}": {"box": [64, 64, 1, 1], "swizzle": 3} for x in "qkvo"},
            "source": "tma", "chunk": 8,
        }  # fmt: skip
        files = {f"{config.name}.cubin": emitted.text.encode(), f"{config.name}.ptx": b"// ptx", "functors.py": b""}
        return kernel, files

    module = ModuleType("attncc.codegen.build")
    module.build = build  # type: ignore[attr-defined]
    module.DoesNotFit = type("DoesNotFit", (RuntimeError,), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "attncc.codegen.build", module)
    return calls


def python(script, **environment):
    """Standard output of a script in a new interpreter."""
    environment = {**os.environ, **environment}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# ---------------------------------------------------------------------- the package


def test_importing_the_package_imports_nothing_else():
    loaded = python("""
        import sys, attncc
        attncc.__version__, dir(attncc)
        print(sorted({m.partition(".")[0] for m in sys.modules} & {"torch", "lark", "cutlass", "numpy", "cuda"}))
        attncc.AttnError, attncc.compile, attncc.load, attncc.reference
        print(sorted({m.partition(".")[0] for m in sys.modules} & {"torch", "lark", "cutlass", "numpy", "cuda"}))
    """)
    assert loaded == "[]\n[]"


def test_the_package_has_its_names_and_no_others():
    assert set(attncc.__all__) <= set(dir(attncc))
    assert attncc.AttnError is AttnError
    assert attncc.compile is compiler.compile
    with pytest.raises(AttributeError, match="module 'attncc' has no attribute 'compiel'"):
        attncc.compiel  # noqa: B018


# ---------------------------------------------------------------------- compile


def test_compile_makes_a_kernel_that_takes_the_variants_parameters(builds):
    kernel = attncc.compile(ONE, head_dim=128, const={"soft": True, "cap": 30})
    assert kernel.variant == "windowed"
    assert kernel.params == {"window": "i32 = 7", "sink": "f32[h]"}
    manifest = kernel.manifest
    assert manifest["const"] == {"cap": 30.0, "soft": True}
    assert (manifest["head_dim_qk"], manifest["head_dim_vo"], manifest["dtype"]) == (128, 128, "bf16")
    assert (manifest["scan"], manifest["arch"], manifest["layout"]) == ("softmax", "sm_90a", "dense")
    assert manifest["variant"]["source"] == ONE
    assert "attention windowed" in manifest["variant"]["ir"]
    assert manifest["tensors"] == [{"name": "sink", "dims": ["h"], "dtype": "f32", "sorted": False}]

    driver = FakeDriver()
    kernel = type(kernel)(entry(), driver)
    q, k, v = (torch.zeros(1, 40, h, 128, dtype=torch.bfloat16) for h in (4, 2, 2))
    kernel(q, k, v, sink=torch.zeros(4))
    assert driver.launches[0].values["s.window"] == 7


def entry():
    """The one artifact in the cache."""
    from attncc.runtime.artifact import read_artifact

    (found,) = [p for p in Path(os.environ["ATTNCC_CACHE_DIR"]).iterdir() if p.is_dir()]
    return read_artifact(found)


def test_a_kernel_is_built_once(builds):
    first = attncc.compile(ONE, head_dim=64)
    assert attncc.compile(ONE, head_dim=64) is first
    assert attncc.compile(ONE, head_dim=64, head_dim_vo=64, dtype=torch.bfloat16, const={}) is first
    compiler._kernels.clear()
    assert attncc.compile(ONE, head_dim=np.int64(64), dtype="bf16") is not first
    assert builds == ["windowed"]


def test_what_changes_a_kernel_builds_another(builds, tmp_path):
    attncc.compile(ONE, head_dim=64)
    attncc.compile(ONE, head_dim=128)
    attncc.compile(ONE, head_dim=64, head_dim_vo=128)
    attncc.compile(ONE, head_dim=64, dtype=torch.float16)
    attncc.compile(ONE, head_dim=64, const={"cap": 20.0})
    attncc.compile(ONE + "# a comment\n", head_dim=64)
    assert len(builds) == 6
    (tmp_path / "one.attn").write_text(ONE)
    attncc.compile(tmp_path / "one.attn", head_dim=64)  # the same text by path
    attncc.compile(str(tmp_path / "one.attn"), head_dim=64)
    assert len(builds) == 6


def test_a_kernel_is_built_for_the_layout_that_is_used(builds):
    kernel = attncc.compile(ONE, head_dim=64, layout="paged", page_size=np.int64(8))
    assert (kernel.manifest["layout"], kernel.manifest["page_size"], list(kernel.manifest["kernels"])) == (
        "paged", 8, ["serve"],
    )  # fmt: skip
    assert set(kernel.manifest["visible"]) >= {"lo", "hi"}
    assert kernel.manifest["positions"] == ["i", "j"]
    assert attncc.compile(ONE, head_dim=64, layout="paged", page_size=8) is kernel
    assert len(builds) == 1
    assert kernel.serving("paged", 8).manifest == kernel.manifest
    ragged = kernel.serving("ragged").manifest
    assert (ragged["layout"], ragged["page_size"]) == ("ragged", None)
    assert list(kernel.serving("dense").manifest["kernels"]) == ["forward"]
    assert attncc.compile(ONE, head_dim=64).serving("paged", 8).cubins == kernel.serving("paged", 8).cubins
    assert len(builds) == 3
    assert attncc.compile(ONE, head_dim=64, layout="paged", page_size=16).manifest["page_size"] == 16
    assert len(builds) == 4
    odd = [attncc.compile(ONE, head_dim=64, layout="paged", page_size=n) for n in (1, 11)]
    assert [kernel.manifest["page_size"] for kernel in odd] == [1, 11]
    assert len(builds) == 5  # rows of such pages are gathered one by one, whatever the size


def test_a_served_artifact(builds, tmp_path):
    options = {"head_dim": 64, "layout": "paged", "page_size": 16}
    compiler.build_artifact(ONE, tmp_path / "out", **options)
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "manifest.json", "serve.cubin", "serve.ptx", "functors.py",
    }  # fmt: skip
    assert attncc.load(tmp_path / "out").serving("paged", 16).manifest["page_size"] == 16
    with pytest.raises(ValueError, match="attncc build FILE:windowed --layout ragged"):
        attncc.load(tmp_path / "out").serving("ragged")
    assert compiler.show(ONE, "ptx", **options) == "// ptx"


def test_threads_compile_once(builds):
    with ThreadPoolExecutor(4) as pool:
        kernels = list(pool.map(lambda _: attncc.compile(ONE, head_dim=64), range(8)))
    assert len(set(map(id, kernels))) == 1
    assert builds == ["windowed"]


def test_a_variant_is_chosen_by_name(builds):
    assert attncc.compile(TWO, variant="right", head_dim=64).variant == "right"
    for name, says in (
        (None, "variant: expected one of left, right, since <string> has several, found none"),
        ("rihgt", "variant: expected one of left, right, as in <string>, found 'rihgt'; did you mean 'right'?"),
    ):
        for call in (attncc.compile, attncc.reference):
            with pytest.raises(ValueError) as e:
                call(TWO, variant=name, head_dim=64)
            assert str(e.value) == says


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"head_dim": 100}, ValueError, "head_dim: expected a multiple of 8 from 8 to 256, found 100"),
        ({"head_dim": 264}, ValueError, "head_dim: expected a multiple of 8 from 8 to 256, found 264"),
        ({"head_dim": 0}, ValueError, "head_dim: expected a multiple of 8"),
        ({"head_dim": -8}, ValueError, "head_dim: expected a multiple of 8"),
        ({"head_dim": 64.0}, TypeError, "head_dim: expected an int, found float"),
        ({"head_dim": True}, TypeError, "head_dim: expected an int, found bool"),
        ({"head_dim_vo": 12}, ValueError, "head_dim_vo: expected a multiple of 8"),
        ({"dtype": torch.float32}, ValueError, "dtype: expected torch.bfloat16 or torch.float16 (or 'bf16', 'f16'), "
         "found torch.float32"),
        ({"dtype": "fp16"}, ValueError, "dtype: expected"),
        ({"layout": "pagde"}, ValueError, "layout: expected one of 'dense', 'ragged', 'paged', 'blocks', found "),
        ({"layout": "paged"}, ValueError, "page_size: expected the rows of a page, since layout is 'paged', "
         "found none"),
        ({"layout": "paged", "page_size": 0}, ValueError, "page_size: expected 1 to 1048576, found 0"),
        ({"layout": "paged", "page_size": 16.0}, TypeError, "page_size: expected an int, found float"),
        ({"layout": "ragged", "page_size": 16}, ValueError, "page_size: expected none with layout 'ragged', found 16"),
        ({"page_size": 16}, ValueError, "page_size: expected none with layout 'dense', found 16"),
        ({"arch": "sm_100a"}, ValueError, "arch: expected one of 'sm_90a', found 'sm_100a'"),
        ({"const": {"cpa": 1.0}}, ValueError, "const: 'cpa'"),
        ({"const": {"window": 1}}, ValueError, "const: 'window' is a run-time parameter"),
        ({"const": {"cap": "big"}}, TypeError, "const['cap']: expected an int, float or bool, found str"),
        ({"const": {"cap": torch.tensor(1.0)}}, TypeError, "const['cap']: expected an int, float or bool, found "
         "Tensor"),
        ({"const": {"cap": True}}, TypeError, "cap"),
        ({"const": {1: 1}}, TypeError, "const: expected parameter names as keys, found 1"),
        ({"const": {"cap": 1e39}}, ValueError, "const: 'cap' is f32 (at most 3.403e+38 in size), found 1e+39"),
        ({"const": {"cap": 10**400}}, ValueError, "const: 'cap' is f32 (at most 3.403e+38 in size)"),
        ({"const": 5}, TypeError, "const: expected a dict of parameter names and values, found int"),
        ({"source": 5}, TypeError, "source: expected .attn text or a path, found int"),
        ({"source": "nowhere.attn"}, AttnError, "nowhere.attn: error: cannot read: No such file"),
        ({"source": "attention x():\n    mask = jj\n"}, AttnError, "<string>:2:12: error: unknown name 'jj'"),
        ({"source": TWO}, ValueError, "variant: expected one of left, right"),
    ],
)  # fmt: skip
def test_bad_arguments(builds, change, error, says):
    arguments = {"source": ONE, "head_dim": 64} | change
    with pytest.raises(error) as e:
        attncc.compile(arguments.pop("source"), **arguments)
    assert says in str(e.value)
    assert builds == []


def test_numpy_scalars_are_consts(builds):
    kernel = attncc.compile(ONE, head_dim=64, const={"cap": np.float32(2.0), "soft": np.bool_(True)})
    assert kernel.manifest["const"] == {"cap": 2.0, "soft": True}
    oracle: Any = attncc.reference(ONE, head_dim=np.int64(64), const={"cap": np.float32(2.0), "soft": np.bool_(True)})
    assert oracle.const == {"cap": 2.0, "soft": True}
    with pytest.raises(TypeError, match="head_dim: expected an int, found bool"):
        attncc.reference(ONE, head_dim=True)
    with pytest.raises(TypeError, match="const: expected a dict"):
        attncc.reference(ONE, head_dim=64, const=[("cap", 2.0)])  # type: ignore[arg-type]


@pytest.mark.parametrize("call", [attncc.compile, attncc.reference])
def test_a_const_that_makes_a_divisor_zero_is_an_error_with_its_place(call):
    source = "attention x(n: const i32 = 3):\n    mask = j // (n - 3) == i or j <= i\n"
    with pytest.raises(AttnError) as e:
        call(source, head_dim=64)
    assert str(e.value).startswith("<string>:2:12: error: integer division by zero")
    assert "with n = 3" in str(e.value)
    compiler.show(source, "ir", head_dim=64, const={"n": 4})
    guarded = source.replace("j // (n - 3) == i", "(n != 3 and j // (n - 3) == i)")
    assert "floordiv" not in compiler.show(guarded, "ir", head_dim=64)


@pytest.mark.parametrize("call", [attncc.compile, attncc.reference])
def test_a_const_that_leaves_a_block_no_key_is_an_error_with_its_place(call):
    source = "attention x(n: const i32 = -4):\n    tensor sel[iq, m]: i32\n    domain = blocks(sel[iq, :], size = n)\n"
    with pytest.raises(AttnError) as e:
        call(source, head_dim=64)
    assert str(e.value).startswith("<string>:3:14: error: the size of a block is at least 1, not -4")
    assert "with n = -4" in str(e.value)
    compiler.show(source, "ir", head_dim=64, const={"n": 1})


# ---------------------------------------------------------------------- what kernels refuse

REFUSED = {
    "emit column[j, h] = max(l)": (2, "kernels can't keep a value for every key (emit column)"),
    "emit surprise[iq, h] = sum(exp(l - lse) * (lse - l))": (
        2,
        "kernels know lse only after the last key (emit surprise)",
    ),
}


@pytest.mark.parametrize("body", REFUSED)
def test_what_kernels_cannot_do_is_refused_with_its_line(builds, body):
    line, says = REFUSED[body]
    source = f"attention x():\n    {body}\n    mask = j <= i\n"
    with pytest.raises(AttnError) as e:
        attncc.compile(source, head_dim=64)
    (diagnostic,) = e.value.diagnostics
    assert diagnostic.message == says
    assert diagnostic.span.line == line
    assert "attncc.reference" in str(e.value)
    assert builds == []
    compiler.show(source, "ir", head_dim=64)
    attncc.reference(source, head_dim=64)


MISFITS = {
    "epilogue = rope(o, i, dims=96)": "rope turns 96 features, and there are 64",
    "tensor t[pos, 64]: f32\n    epilogue = rope(o, i, cos=t, sin=t)": "'t' has 64 columns, and dims // 2 is 32",
    "tensor t[pos, n]: f32\n    epilogue = rope(rope(o, i, cos=t, sin=t), i, dims=32, cos=t, sin=t)":
        "'t' has 32 columns, and dims // 2 is 16",
}  # fmt: skip


@pytest.mark.parametrize("body", MISFITS)
@pytest.mark.parametrize("call", [attncc.compile, attncc.reference])
def test_a_rope_that_does_not_fit_the_head_dims_is_refused(builds, call, body):
    with pytest.raises(AttnError) as e:
        call(f"attention x():\n    {body}\n", head_dim=64)
    assert [d.message for d in e.value.diagnostics] == [MISFITS[body]]
    assert builds == []


def test_transforms_that_do_not_fit_into_the_kernel_are_left_to_the_pre_pass(builds, monkeypatch):
    from attncc.codegen import prepass

    module: Any = sys.modules["attncc.codegen.build"]
    whole = module.build

    def build(emitted, config, work_dir):
        if config.f_k:
            raise module.DoesNotFit("spills")
        return whole(emitted, config, work_dir)

    monkeypatch.setattr(module, "build", build)
    monkeypatch.setattr(prepass, "build", lambda *_: ({}, {}))
    source = compiler.Source.of("attention x():\n    f_k = rope(k, j)\n")

    def kernels(keys, chosen):
        page_size = 16 if keys == "paged" else None
        options = compiler._options(64, None, "bf16", None, keys, page_size, "sm_90a", chosen)
        return list(compiler.built(source, None, options)[0]["kernels"])

    assert kernels("dense", None) == kernels("ragged", None) == kernels("dense", True) == ["prepared", "prepass"]
    for keys, chosen in (("dense", False), ("paged", None)):
        with pytest.raises(AttnError) as e:  # with where it stands
            kernels(keys, chosen)
        (found,) = e.value.diagnostics
        assert (
            found.message == f"f_k: a kernel for head dims 64/64 and {keys} keys has no room for this variant (spills)"
        )
        assert found.span.line == 2 and found.hint == "nearest: smaller head dims, or attncc.reference(…) computes it"


def test_factors_of_keys_have_the_kernels_that_transforms_have(builds, monkeypatch):
    """Not those that all keys of a head share, nor what f_logits says; and no cache in pages is copied."""
    from attncc.codegen import prepass

    module: Any = sys.modules["attncc.codegen.build"]
    seen: dict[str, Any] = {}
    ahead: dict[str, str] = {}

    def build(emitted, config, work_dir):
        seen[config.name], ahead[config.name] = emitted.text, config.ahead
        return {}, {}

    def build_prepass(emitted, config, factors, work_dir):
        seen["prepass"] = emitted.text
        return {"of": (config.f_k, config.f_v), "factors": factors}, {}

    monkeypatch.setattr(module, "build", build)
    monkeypatch.setattr(prepass, "build", build_prepass)

    def manifest(body, keys="dense", chosen=None):
        seen.clear()
        tensors = "    tensor ks[j, g]: f32\n    tensor vs[g]: f32\n"
        source = compiler.Source.of(f"attention x():\n{tensors}{body}")
        options = compiler._options(64, None, "bf16", None, keys, 16 if keys == "paged" else None, "sm_90a", chosen)
        return compiler.built(source, None, options)[0]

    of_key, of_head = "    f_k = k * ks[j, g]\n", "    f_k = k * vs[g]\n"
    both = "    f_logits = s * ks[j, g]\n    f_v = v * ks[j, g]\n"
    for keys, main in (("dense", "forward"), ("ragged", "serve")):
        assert list(manifest(of_key, keys, False)["kernels"]) == [main]
        for body in (of_head, "    f_logits = s * ks[j, g]\n", "    f_v = v / f32(kv_len)\n"):
            assert list(manifest(body, keys)["kernels"]) == [main]
        mixed = manifest("    f_k = rope(k, j)\n    f_v = v * ks[j, g]\n", keys)["kernels"]
        assert list(mixed) == [main, "prepared", "prepass"]
        assert mixed["prepass"]["of"] == (True, True) and list(mixed["prepass"]["factors"]) == ["f_k", "f_v"]
        assert [c is None for c in mixed["prepass"]["factors"].values()] == [True, False]
    made = manifest(of_key, "ragged")
    assert list(made["kernels"]) == ["serve", "prepared", "prepass"] and set(made["visible"]) >= {"lo", "hi"}
    assert made["kernels"]["prepass"]["of"] == (True, False) and list(made["kernels"]["prepass"]["factors"]) == ["f_k"]
    assert ["factors(x" in seen[n] for n in ("serve", "prepared", "prepass")] == [True, False, False]
    assert ["def f_k(" in seen[n] for n in ("serve", "prepared", "prepass")] == [False, False, True]
    assert list(manifest(of_key, "ragged", True)["kernels"]) == ["prepared", "prepass"]
    assert manifest(both, "ragged")["kernels"]["prepass"]["of"] == (False, True) and "factors(x" in seen["prepared"]
    # of dense keys the prepared kernel does it itself
    assert list(manifest(of_key)["kernels"]) == ["forward", "prepared"] and ahead["prepared"] == "k"
    assert ["factors(x" in seen[n] for n in ("forward", "prepared")] == [True, False]
    assert ["ahead(x" in seen[n] for n in ("forward", "prepared")] == [False, True]
    assert list(manifest(of_key, "dense", True)["kernels"]) == ["prepared"]
    assert list(manifest(both)["kernels"]) == ["forward", "prepared"] and ahead["prepared"] == "v"
    assert "factors(x" in seen["prepared"] and "ahead(x" in seen["prepared"]
    assert list(manifest(of_key, "paged")["kernels"]) == ["serve"]
    with pytest.raises(ValueError, match="x transforms neither k nor v, and has no factor of each key, found True"):
        manifest(of_head, "dense", True)


def test_everything_refused_is_said_at_once(builds):
    source = "attention x():\n    f_q = q * q\n    emit m[j, h] = max(l)\n    emit n[j] = sum(1.0)\n"
    with pytest.raises(AttnError) as e:
        attncc.compile(source, head_dim=64)
    assert [d.span.line for d in e.value.diagnostics] == [3, 4]


def test_a_pre_pass_is_refused_where_there_is_nothing_to_do_or_a_cache_to_copy(builds):
    with pytest.raises(ValueError, match="prepass: expected None or False, since x transforms neither k nor v"):
        attncc.compile("attention x():\n    mask = j <= i\n", head_dim=64, prepass=True)
    turned = "attention x():\n    f_k = rope(k, j)\n"
    for kind, what in (("paged", "a cache in pages"), ("blocks", "keys listed in blocks")):
        with pytest.raises(ValueError, match=f"prepass: expected None or False with layout '{kind}'.*{what}"):
            attncc.compile(turned, head_dim=64, layout=kind, page_size=16, prepass=True)
    with pytest.raises(TypeError, match="prepass: expected None, True or False, found int"):
        attncc.compile(turned, head_dim=64, prepass=1)
    assert builds == []


def test_a_transform_that_simplifies_away_is_no_transform(builds):
    attncc.compile("attention x():\n    f_q = q * 1.0\n    mask = j <= i\n", head_dim=64)


# ---------------------------------------------------------------------- reference


def test_reference_takes_the_arguments_of_compile():
    q, k, v = (torch.randn(1, 5, h, 16) for h in (4, 2, 2))
    oracle = attncc.reference(
        TWO, variant="left", head_dim=16, head_dim_vo=16, dtype=torch.float16, const={}, layout="dense", arch="sm_90a"
    )
    out, lse = oracle(q, k, v, return_lse=True)
    want = torch.nn.functional.scaled_dot_product_attention(
        *(t.double().transpose(1, 2) for t in (q, k, v)), is_causal=True, enable_gqa=True
    )
    assert out.dtype == torch.float64
    assert torch.allclose(out, want.transpose(1, 2), rtol=1e-12, atol=1e-12)
    assert lse.shape == (1, 5, 4)
    assert (
        attncc.reference(TWO, variant="left", head_dim=16, compute_dtype=torch.float32)(q, k, v).dtype == torch.float32
    )


# ---------------------------------------------------------------------- artifacts


def test_build_artifact_and_load(builds, tmp_path):
    (tmp_path / "two.attn").write_text(TWO)
    manifest = compiler.build_artifact(
        Source.read(tmp_path / "two.attn"), tmp_path / "out", variant="left", head_dim=64, dtype="f16"
    )
    kernel = attncc.load(tmp_path / "out")
    assert dict(kernel.manifest) == manifest
    assert kernel.variant == "left"
    assert manifest["dtype"] == "f16"
    assert manifest["variant"]["path"] == str(tmp_path / "two.attn")
    assert "key" not in manifest
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "manifest.json", "forward.cubin", "forward.ptx", "functors.py",
    }  # fmt: skip
    compiler.build_artifact(TWO, tmp_path / "out", variant="right", head_dim=64)
    assert attncc.load(tmp_path / "out").variant == "right"
    with pytest.raises(TypeError, match="head_dmi: unknown option"):
        compiler.build_artifact(TWO, tmp_path / "out", head_dmi=64)


def test_an_artifact_runs_without_the_compiler(builds, tmp_path):
    """Loading and binding import torch and nothing of lark, cutlass, the frontend or the IR."""
    compiler.build_artifact(TWO, tmp_path / "out", variant="left", head_dim=64)
    loaded = python(f"""
        import sys
        for name in ("lark", "cutlass", "filelock", "numpy"):
            sys.modules[name] = None
        sys.path.insert(0, {str(Path(__file__).parent / "runtime")!r})
        import torch, attncc
        from attncc.runtime.artifact import read_artifact
        from attncc.runtime.kernel import Kernel
        from fake_driver import FakeDriver
        print(attncc.load({str(tmp_path / "out")!r}))
        driver = FakeDriver()
        kernel = Kernel(read_artifact({str(tmp_path / "out")!r}), driver)
        kernel(*(torch.zeros(1, 8, 2, 64, dtype=torch.bfloat16) for _ in range(3)))
        print(len(driver.launches), [m for m in sys.modules if m.startswith(("attncc.ir", "attncc.frontend"))])
    """)
    assert loaded == "<attncc.Kernel left() head_dim 64, bf16, sm_90a>\n1 []"


# ---------------------------------------------------------------------- show


def test_show_prints_what_each_stage_makes(builds):
    assert compiler.show(ONE, "ast").startswith("attention windowed")
    assert "right" not in compiler.show_ast(TWO, "left")
    ir = compiler.show(ONE, "ir", head_dim=64, const={"cap": 30.0})
    assert "attention windowed" in ir
    assert "tanh" not in ir  # soft is false, and const
    assert "tanh" in compiler.show(ONE, "ir", head_dim=64, const={"soft": True})
    assert "def " in compiler.show(ONE, "py", head_dim=64)
    assert builds == []
    assert compiler.show(ONE, "ptx", head_dim=64) == "// ptx"
    assert builds == ["windowed"]
    with pytest.raises(ValueError, match="stage: expected one of ast, ir, py, ptx, sass, found 'llvm'"):
        compiler.show(ONE, "llvm", head_dim=64)
    with pytest.raises(TypeError, match="head_dim: expected, found nothing"):
        compiler.show(ONE, "ir")


def test_show_py_imports_neither_torch_nor_cutlass():
    loaded = python(f"""
        import sys
        from attncc import compiler
        compiler.show({ONE!r}, "py", head_dim=64)
        print(sorted({{m.partition(".")[0] for m in sys.modules}} & {{"torch", "cutlass", "cuda", "filelock"}}))
    """)
    assert loaded == "[]"


# ---------------------------------------------------------------------- for real


@pytest.mark.slow
def test_a_real_build(tmp_path):
    """Text to cubin with cutlass, then through the cache in a process that has neither cutlass nor lark."""
    kernel = attncc.compile(ONE, head_dim=64)
    assert kernel.manifest["kernels"]["forward"]["spill_bytes"] == 0
    assert "HGMMA" in compiler.show(ONE, "sass", head_dim=64)
    driver = FakeDriver()
    again = type(kernel)(entry(), driver)
    q, k, v = (torch.zeros(2, 200, h, 64, dtype=torch.bfloat16) for h in (6, 3, 3))
    again(q, k, v, sink=torch.zeros(6), window=9)
    values = driver.launches[0].values
    assert (values["s.window"], values["group_size"]) == (9, 2)
    said = python(
        f"""
        import sys, time
        import attncc, attncc.compiler, attncc.cache, attncc.runtime.kernel
        for name in ("lark", "cutlass"):
            sys.modules[name] = None
        begun = time.perf_counter()
        kernel = attncc.compile({ONE!r}, head_dim=64)
        print(kernel.variant, time.perf_counter() - begun < 0.25)  # 3 ms; the bound is for a busy machine
        """
    )
    assert said == "windowed True"
