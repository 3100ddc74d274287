"""Checks of arguments as pure functions: scalars, names, index spaces."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from fake_driver import manifest

from attncc.runtime import arguments as check

I32, F32, BOOL = (check.scalar_check(check.Scalar(n, t, None)) for n, t in (("n", "i32"), ("x", "f32"), ("on", "bool")))


@pytest.mark.parametrize(
    ("convert", "given", "taken"),
    [
        (I32, 5, 5),
        (I32, -(2**31), -(2**31)),
        (I32, 2**31 - 1, 2**31 - 1),
        (I32, np.int64(7), 7),
        (I32, np.uint8(7), 7),
        (F32, 2.5, 2.5),
        (F32, 3, 3.0),
        (F32, np.float32(0.5), 0.5),
        (F32, np.int32(4), 4.0),
        (F32, math.inf, math.inf),
        (F32, -math.inf, -math.inf),
        (F32, 3.4028235e38, 3.4028235e38),
        (BOOL, True, 1),
        (BOOL, False, 0),
        (BOOL, np.bool_(True), 1),
    ],
)
def test_a_scalar_is_taken(convert, given, taken):
    assert convert(given) == taken


def test_nan_is_a_float_like_any_other():
    assert math.isnan(F32(math.nan))


@pytest.mark.parametrize(
    ("convert", "given", "error", "says"),
    [
        (I32, 2**31, ValueError, "n: expected an i32"),
        (I32, np.int64(2**40), ValueError, "n: expected an i32"),
        (I32, True, TypeError, "n: expected an int (i32), found bool True"),
        (I32, np.bool_(True), TypeError, "n: expected an int (i32), found bool"),
        (I32, 1.0, TypeError, "n: expected an int (i32), found float 1.0"),
        (I32, np.float64(1.0), TypeError, "n: expected an int (i32), found float64 1.0"),
        (I32, "5", TypeError, "n: expected an int (i32), found str '5'"),
        (I32, None, TypeError, "n: expected an int (i32), found NoneType"),
        (I32, torch.tensor(5), TypeError, "n: expected a Python number, found a tensor of shape [] on cpu"),
        (F32, torch.tensor(5.0), TypeError, "pass x.item()"),
        (F32, True, TypeError, "x: expected a float (f32), found bool True"),
        (F32, 1e39, ValueError, "x: expected an f32"),
        (F32, 10**400, ValueError, "x: expected an f32, found an int that is larger than any"),
        (F32, 1j, TypeError, "x: expected a float (f32), found complex"),
        (BOOL, 1, TypeError, "on: expected a bool, found int 1"),
        (BOOL, torch.tensor(True), TypeError, "on: expected a Python number, found a tensor"),
    ],
)
def test_a_scalar_is_refused(convert, given, error, says):
    with pytest.raises(error) as e:
        convert(given)
    assert says in str(e.value)


SPEC = check.Spec.of(
    manifest(
        scalars=[("window", "i32", None), ("cap", "f32", 50.0)], tensors=[("sink", ["h"], "f32")], const={"soft": 2}
    ),
    "cpu",
)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"window", "cap"}, "test: missing parameter sink[h]: f32"),
        ({"cap"}, "test: missing parameters window: i32; sink[h]: f32"),
        ({"window", "cap", "sink", "windw"}, "windw: unknown parameter; test takes cap, sink, window; did you mean"),
        ({"window", "cap", "sink", "retrun_lse"}, "did you mean 'return_lse'?"),
        ({"window", "cap", "sink", "zz"}, "zz: unknown parameter"),
        ({"window", "cap", "sink", "soft"}, "soft: a const parameter of test, soft = 2 in this kernel"),
        ({"window", "cap", "sink", "soft"}, "attncc.compile(…, const={'soft': …})"),
    ],
)
def test_names_are_refused(given, says):
    with pytest.raises(TypeError) as e:
        check.refuse_names(SPEC, given)
    assert says in str(e.value)


SIZES = check.Sizes(batch=3, qo_len=5, kv_len=7, num_qo_heads=8, num_kv_heads=2)


@pytest.mark.parametrize(
    ("dims", "shape"),
    [
        (["b"], (3,)),
        (["h", "g"], (8, 2)),
        (["iq"], (3, 5)),
        (["iq", "h", "e"], (3, 5, 8, 128)),
        (["j"], (3, 7)),
        (["b", "pos"], (3, 7)),
        (["pos"], (70,)),
        (["d"], (128,)),
        (["h", 32], (8, 32)),
        (["anything", 4], (0, 4)),
        (["anything", 4], (1000, 4)),
    ],
)
def test_a_tensor_parameter_has_the_shape_of_its_index_spaces(dims, shape):
    param = check.TensorParam("t", tuple(dims), "f32")
    check.check_tensor(param, torch.empty(shape), SIZES, SPEC, torch.device("cpu"))


@pytest.mark.parametrize(
    ("dims", "shape", "says"),
    [
        (["b"], (4,), "t: expected shape [b] = [3], found shape [4]"),
        (["iq"], (15,), "t: expected shape [B, qo_len] = [3, 5], found shape [15]"),
        (["b", "pos"], (3, 6), "t: expected shape [b, pos] = [3, ≥ 7], found shape [3, 6]"),
        (["h", 32], (8, 33), "t: expected shape [h, 32] = [8, 32], found shape [8, 33]"),
        (["x", "e"], (2, 64), "t: expected shape [x, e] = [any, 128], found shape [2, 64]"),
    ],
)
def test_a_tensor_parameter_of_another_shape_is_refused(dims, shape, says):
    param = check.TensorParam("t", tuple(dims), "f32")
    with pytest.raises(ValueError) as e:
        check.check_tensor(param, torch.empty(shape), SIZES, SPEC, torch.device("cpu"))
    assert str(e.value) == says


@pytest.mark.parametrize(
    ("declared", "given", "fits"),
    [
        ("u32", torch.int32, True),
        ("u32", torch.uint32, True),
        ("i32", torch.int64, False),
        ("u8", torch.bool, False),
        ("bool", torch.bool, True),
        ("f32", torch.bfloat16, False),
        ("f16", torch.float16, True),
    ],
)
def test_dtypes_of_tensor_parameters(declared, given, fits):
    call = lambda: check.check_tensor(  # noqa: E731
        check.TensorParam("t", ("b",), declared), torch.empty(3, dtype=given), SIZES, SPEC, torch.device("cpu")
    )
    if fits:
        call()
    else:
        with pytest.raises(TypeError, match="t: expected dtype "):
            call()


def test_strides_and_sizes_of_2_31_are_refused_but_not_that_many_elements():
    spec = check.Spec.of(manifest(), "meta")
    sizes = check.Sizes(batch=2, qo_len=1, kv_len=1, num_qo_heads=8, num_kv_heads=2)
    param = check.TensorParam("t", ("b", "x"), "f32")
    meta = torch.device("meta")
    check.check_tensor(param, torch.empty(2, 2**31 - 1, device=meta), sizes, spec, meta)
    for shape in ((2, 2**31), (2, 2**32)):
        with pytest.raises(ValueError, match="t: expected sizes and strides below 2³¹ elements"):
            check.check_tensor(param, torch.empty(shape, device=meta), sizes, spec, meta)
    one = torch.empty_strided((2, 1), (1, 2**40), device=meta)  # the one element's stride is never used
    check.check_tensor(param, one, sizes, spec, meta)
