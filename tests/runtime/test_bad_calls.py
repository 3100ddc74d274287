"""Bad calls: each is refused before any launch, naming the argument, what was expected and what was found; and the
kernel still works afterwards, with nothing written."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fake_driver import FakeDriver, artifact

from attncc.runtime.kernel import Kernel

BF16 = torch.bfloat16


def good():
    q, k, v = (torch.zeros(2, s, h, d, dtype=BF16) for s, h, d in ((30, 8, 128), (50, 2, 128), (50, 2, 64)))
    return {"q": q, "k": k, "v": v, "window": 5, "sink": torch.zeros(8), "table": torch.zeros(2, 30, 4)}


def zeros(*shape, dtype=BF16, **options):
    return torch.zeros(*shape, dtype=dtype, **options)


LAST_STRIDE_2 = torch.zeros(2, 30, 8, 256, dtype=BF16)[..., ::2]
CASES = [
    # rank, type, layout
    ({"q": zeros(30, 8, 128)}, ValueError, "q: expected rank 4, [B, qo_len, num_qo_heads, head_dim_qk], found shape "
     "[30, 8, 128]"),
    ({"k": zeros(1, 2, 50, 2, 128)}, ValueError, "k: expected rank 4, [B, kv_len, num_kv_heads, head_dim_qk], found"),
    ({"v": zeros(2, 50, 64)}, ValueError, "v: expected rank 4, [B, kv_len, num_kv_heads, head_dim_vo], found"),
    ({"q": None}, TypeError, "q: expected a torch.Tensor, found NoneType"),
    ({"k": np.zeros((2, 50, 2, 128))}, TypeError, "k: expected a torch.Tensor, found ndarray"),
    ({"v": [1]}, TypeError, "v: expected a torch.Tensor, found list"),
    ({"q": zeros(2, 30, 8, 128).to_sparse()}, TypeError, "q: expected a strided tensor, found layout torch.sparse"),
    # device
    ({"q": zeros(2, 30, 8, 128, device="meta")}, ValueError, "q: expected a tensor on a cpu device, found meta; "
     "attncc.reference(…) computes the same anywhere"),
    ({"k": zeros(2, 50, 2, 128, device="meta")}, ValueError, "k: expected a tensor on a cpu device, found meta"),
    ({"sink": torch.zeros(8, device="meta")}, ValueError, "sink: expected a tensor on a cpu device, found meta"),
    # dtype
    ({"q": zeros(2, 30, 8, 128, dtype=torch.float16)}, TypeError, "q: expected dtype bfloat16 (what the kernel was "
     "compiled for), found float16"),
    ({"k": zeros(2, 50, 2, 128, dtype=torch.float32)}, TypeError, "k: expected dtype bfloat16"),
    ({"sink": torch.zeros(8, dtype=BF16)}, TypeError, "sink: expected dtype float32, found bfloat16"),
    # sizes
    ({"q": zeros(2, 30, 8, 64)}, ValueError, "q: expected head_dim_qk 128 (what the kernel was compiled for) in the "
     "last dimension, found shape [2, 30, 8, 64]"),
    ({"v": zeros(2, 50, 2, 128)}, ValueError, "v: expected head_dim_vo 64"),
    ({"q": zeros(2, 30, 7, 128)}, ValueError, "q: expected num_qo_heads a multiple of num_kv_heads, found 7 query "
     "heads and 2 kv heads"),
    ({"k": zeros(2, 50, 0, 128), "v": zeros(2, 50, 0, 64)}, ValueError, "found 8 query heads and 0 kv heads"),
    ({"k": zeros(3, 50, 2, 128)}, ValueError, "k: expected batch 2 as in q, found shape [3, 50, 2, 128]"),
    ({"v": zeros(1, 50, 2, 64)}, ValueError, "v: expected batch 2 as in q, found shape [1, 50, 2, 64]"),
    ({"v": zeros(2, 49, 2, 64)}, ValueError, "v: expected kv_len 50 as in k, found shape [2, 49, 2, 64]"),
    ({"v": zeros(2, 50, 1, 64)}, ValueError, "v: expected num_kv_heads 2 as in k, found shape [2, 50, 1, 64]"),
    ({"sink": torch.zeros(7)}, ValueError, "sink: expected shape [h] = [8], found shape [7]"),
    ({"table": torch.zeros(2, 31, 4)}, ValueError, "table: expected shape [B, qo_len, 4] = [2, 30, 4], found shape"),
    # strides
    ({"q": LAST_STRIDE_2}, ValueError, "q: expected a contiguous last dimension (stride 1), found strides "
     "[61440, 2048, 256, 2]"),
    # parameters
    ({"window": torch.tensor(5)}, TypeError, "window: expected a Python number, found a tensor of shape []"),
    ({"window": 5.0}, TypeError, "window: expected an int (i32), found float 5.0"),
    ({"window": True}, TypeError, "window: expected an int (i32), found bool True"),
    ({"window": 2**31}, ValueError, "window: expected an i32"),
    ({"sink": 1.0}, TypeError, "sink: expected a torch.Tensor, found float"),
    ({"sinc": 1.0}, TypeError, "sinc: unknown parameter; test takes sink, table, window; did you mean 'sink'?"),
    ({"cap": 1.0}, TypeError, "cap: a const parameter of test, cap = 50.0 in this kernel; expected in attncc.compile"),
    ({"self": 1.0}, TypeError, "self: unknown parameter"),
    # results
    ({"return_lse": 1}, TypeError, "return_lse: expected a bool, found int"),
    ({"out": zeros(2, 30, 8, 128)}, ValueError, "out: expected shape [2, 30, 8, 64], found shape [2, 30, 8, 128]"),
    ({"out": zeros(2, 30, 8, 64, dtype=torch.float32)}, TypeError, "out: expected dtype bfloat16, found float32"),
    ({"out": zeros(2, 30, 8, 64, device="meta")}, ValueError, "out: expected a tensor on a cpu device, found meta"),
    ({"out": zeros(2, 30, 8, 128)[..., ::2]}, ValueError, "out: expected a contiguous last dimension"),
    ({"out": zeros(1, 30, 8, 64).expand(2, -1, -1, -1)}, ValueError, "out: expected elements that don't overlap"),
    ({"out": 5}, TypeError, "out: expected a torch.Tensor, found int"),
    ({"lse": torch.zeros(2, 8, 30)}, ValueError, "lse: expected shape [2, 30, 8], found shape [2, 8, 30]"),
    ({"lse": zeros(2, 30, 8)}, TypeError, "lse: expected dtype float32, found bfloat16"),
    # gradients
    ({"q": zeros(2, 30, 8, 128, requires_grad=True)}, ValueError, "q: expected a tensor that needs no gradient, found "
     "requires_grad=True; attncc has no backward yet: call under torch.no_grad(), or pass q.detach()"),
    ({"sink": torch.zeros(8, requires_grad=True)}, ValueError, "sink: expected a tensor that needs no gradient"),
    ({"out": zeros(2, 30, 8, 64, requires_grad=True)}, ValueError, "out: expected a tensor that needs no gradient"),
]  # fmt: skip


def call(kernel, arguments):
    rest = dict(arguments)
    return kernel(rest.pop("q"), rest.pop("k"), rest.pop("v"), **rest)


@pytest.fixture(scope="module")
def kernel():
    tensors = [("sink", ["h"], "f32"), ("table", ["iq", 4], "f32")]
    return Kernel(
        artifact(scalars=[("window", "i32", None)], tensors=tensors, const={"cap": 50.0}, head_dim=128, head_dim_vo=64),
        FakeDriver(),
    )


@pytest.mark.parametrize(("change", "error", "says"), CASES, ids=lambda x: None)
def test_a_bad_call_is_refused(kernel, change, error, says):
    arguments = good() | change
    launches = len(kernel._driver.launches)
    for _ in range(2):  # and again: a refused signature must not become a known one
        with pytest.raises(error) as e:
            call(kernel, arguments)
        assert says in str(e.value)
    assert len(kernel._driver.launches) == launches
    assert call(kernel, good()).shape == (2, 30, 8, 64)
    assert len(kernel._driver.launches) == launches + 1


@pytest.mark.parametrize("missing", ["window", "sink", "table"])
def test_a_missing_parameter_is_named(kernel, missing):
    arguments = good()
    del arguments[missing]
    with pytest.raises(TypeError, match=f"test: missing parameter {missing}"):
        call(kernel, arguments)


def test_gradients_are_refused_by_a_known_signature_too(kernel):
    arguments = good() | {"k": zeros(2, 50, 2, 128, requires_grad=True)}
    with torch.no_grad():
        call(kernel, arguments)
    with pytest.raises(ValueError, match="k: expected a tensor that needs no gradient"):
        call(kernel, arguments)
    with torch.inference_mode():
        call(kernel, arguments)


def test_scan_none_has_no_lse():
    kernel = Kernel(artifact(scan="none"), FakeDriver())
    q, k, v = (zeros(1, 8, 2, 128) for _ in range(3))
    kernel(q, k, v)
    for argument in ({"return_lse": True}, {"lse": torch.zeros(1, 8, 2)}):
        with pytest.raises(ValueError, match=f"{next(iter(argument))}: expected none, since test has scan = none"):
            kernel(q, k, v, **argument)


def test_cpu_tensors_are_refused_by_a_real_kernel():
    """With no driver at hand: the message comes before anything asks for one."""
    kernel = Kernel(artifact())
    q, k, v = (zeros(1, 8, 2, 128) for _ in range(3))
    with pytest.raises(ValueError, match="q: expected a tensor on a cuda device, found cpu; attncc"):
        kernel(q, k, v)


def test_more_tiles_than_fit_are_refused():
    from attncc.runtime import launch
    from attncc.runtime.arguments import Sizes, Spec

    made = artifact().manifest
    entry, spec = made["kernels"]["forward"], Spec.of(made, "cuda")
    launch.geometry(entry, spec, Sizes(1, 2**31 - 1, 1, 100, 100))
    with pytest.raises(ValueError, match="q: expected fewer than 2³¹ tiles of 128 rows"):
        launch.geometry(entry, spec, Sizes(1, 2**31 - 1, 1, 128, 128))
