"""Bad arguments are refused by name, with what was expected and what was found."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attncc.diagnostics import Source
from attncc.frontend import load
from attncc.ir.reference import Reference

TEXT = """
attention t(window: i32, cap: const f32 = 5.0, slope: f32 = 1.0, flag: bool = false):
    tensor bias[h, pos]: f32
    tensor doc[b, pos]: i32
    tensor rows[iq, n]: u8
    tensor keys[j, g]: f16
    tensor table[3]: bool
    f_logits = softcap(s, cap) * slope + bias[h, j] + keys[j, g]
    mask     = (i - window < j and doc[b, j] == 0 and rows[iq, 0] != 1) or flag or table[0]
"""
NAMES = ("window", "bias", "doc", "rows", "keys", "table")


def oracle(text=TEXT, **options) -> Reference:
    (variant,) = load(Source("t.attn", text))
    return Reference(variant, **{"head_dim": 8, "head_dim_vo": 4, **options})


def qkv():
    return torch.ones(2, 3, 4, 8), torch.ones(2, 5, 2, 8), torch.ones(2, 5, 2, 4)


def params() -> dict:
    return {
        "window": 3, "bias": torch.zeros(4, 6), "doc": torch.zeros(2, 5, dtype=torch.int32),
        "rows": torch.zeros(2, 3, 1, dtype=torch.uint8), "keys": torch.zeros(2, 5, 2, dtype=torch.float16),
        "table": torch.zeros(3, dtype=torch.bool),
    }  # fmt: skip


def test_repr():
    assert repr(oracle(compute_dtype=torch.float32)) == (
        "<attncc.Reference t(window: i32, slope: f32 = 1.0, flag: bool = False, bias: f32[h, pos], doc: i32[b, pos], "
        "rows: u8[iq, n], keys: f16[j, g], table: bool[3], cap: const = 5.0) head_dim 8/4, in float32>"
    )
    assert "head_dim 8, in float64>" in repr(oracle(head_dim_vo=8))


def test_good_arguments():
    out = oracle()(*qkv(), **params())
    assert torch.allclose(out, torch.ones_like(out))
    for window in (torch.tensor(3), torch.tensor(3, dtype=torch.int32)):
        assert torch.equal(oracle()(*qkv(), **{**params(), "window": window}), out)
    for slope in (2, 2.0, torch.tensor(2.0)):
        assert oracle()(*qkv(), **params(), slope=slope).shape == out.shape


@pytest.mark.parametrize("name", NAMES)
def test_missing(name):
    with pytest.raises(ValueError, match=rf"^{name}: t needs .* missing"):
        oracle()(*qkv(), **{n: x for n, x in params().items() if n != name})


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("windw", 3, ValueError, "windw: t has no such parameter .it has: window, .*; did you mean 'window'"),
        ("cap", 3.0, ValueError, "cap: a const parameter of t is fixed at build"),
        ("window", True, TypeError, "window: expected i32, found bool True"),
        ("window", 3.0, TypeError, "window: expected i32, found float 3.0"),
        ("window", torch.tensor(3.0), TypeError, "window: expected i32, found float 3.0"),
        ("window", torch.tensor([3]), TypeError, r"window: expected a number .i32., found a tensor of shape \[1\]"),
        ("window", 2**31, ValueError, "window: expected an i32, found 2147483648"),
        ("window", "3", TypeError, "window: expected i32, found str '3'"),
        ("slope", True, TypeError, "slope: expected f32, found bool"),
        ("slope", torch.tensor(True), TypeError, "slope: expected f32, found bool"),
        ("flag", 1, TypeError, "flag: expected bool, found int 1"),
        ("bias", 1.0, TypeError, r"bias: expected a torch tensor for bias\[h, pos\]: f32, found float"),
        ("bias", torch.zeros(4, 6, dtype=torch.int32), TypeError, "bias: expected dtype .*float32.* found int32"),
        ("bias", torch.zeros(4, 4), ValueError, r"bias: expected shape \[4, at least 5\] .* found \[4, 4\]"),
        ("bias", torch.zeros(2, 6), ValueError, r"bias: expected shape \[4, at least 5\] .* found \[2, 6\]"),
        ("bias", torch.zeros(6), ValueError, r"bias: expected 2 dimensions \[4, at least 5\] .* found 1"),
        ("doc", torch.zeros(2, 5, dtype=torch.int64), TypeError, "doc: expected dtype int32 .* found int64"),
        ("doc", torch.zeros(1, 5, dtype=torch.int32), ValueError, r"doc: expected shape \[2, at least 5\]"),
        ("rows", torch.zeros(6, 1, dtype=torch.uint8), ValueError, r"rows: expected 3 dimensions \[2, 3, n\]"),
        ("keys", torch.zeros(2, 4, 2), ValueError, r"keys: expected shape \[2, 5, 2\] .* found \[2, 4, 2\]"),
        ("table", torch.zeros(4, dtype=torch.bool), ValueError, r"table: expected shape \[3\] .* found \[4\]"),
        ("table", torch.zeros(3, dtype=torch.uint8), TypeError, "table: expected dtype bool .* found uint8"),
    ],
)  # fmt: skip
def test_refused_parameters(name, value, error, message):
    with pytest.raises(error, match=message):
        oracle()(*qkv(), **{**params(), name: value})


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("q", torch.ones(3, 4, 8), ValueError, r"q: expected shape \[B, qo_len, .*\], found \[3, 4, 8\]"),
        ("q", torch.ones(2, 3, 4, 8, dtype=torch.int32), TypeError, "q: expected a float dtype, found int32"),
        ("q", [1.0], TypeError, "q: expected a torch tensor .* found list"),
        ("q", torch.ones(2, 3, 4, 6), ValueError, "q: expected a last dimension of 8, found shape"),
        ("q", torch.ones(2, 3, 3, 8), ValueError, "q: expected a multiple of k's 2 heads, found 3 heads"),
        ("q", torch.ones(2, 3, 0, 8), ValueError, "q: expected a multiple of k's 2 heads, found 0 heads"),
        ("k", torch.ones(3, 5, 2, 8), ValueError, "as k, found"),
        ("v", torch.ones(2, 4, 2, 4), ValueError, r"v: expected shape \[2, 5, 2, 4\], as k, found \[2, 4, 2, 4\]"),
        ("v", torch.ones(2, 5, 2, 8), ValueError, "v: expected a last dimension of 4, found shape"),
        ("q", torch.ones(1, 3, 4, 8), ValueError, "k: expected a batch of 1, as q, found shape"),
        ("k", torch.ones(2, 5, 2, 8, device="meta"), ValueError, "k: expected a tensor on cpu, .* found one on meta"),
    ],
)  # fmt: skip
def test_refused_qkv(name, value, error, message):
    given = dict(zip("qkv", qkv(), strict=True))
    with pytest.raises(error, match=message):
        oracle()(**{**given, name: value}, **params())


def test_const():
    text = """
attention t(cap: const f32 = 5.0, n: const i32, flag: const bool = true):
    f_logits = softcap(s, cap) * n
"""
    with pytest.raises(ValueError, match="n: t needs this i32 parameter, and it is missing"):
        oracle(text)
    with pytest.raises(ValueError, match=r"const: t has no const parameter 'm' \(it has: cap, n, flag\)"):
        oracle(text, const={"n": 1, "m": 2})
    with pytest.raises(TypeError, match="n: expected i32, found float"):
        oracle(text, const={"n": 1.0})
    with pytest.raises(TypeError, match="flag: expected bool, found int"):
        oracle(text, const={"n": 1, "flag": 1})
    q, k, v = (torch.randn(1, 2, 1, d) for d in (8, 8, 4))
    a, b = (oracle(text, const={"n": 2, "cap": c})(q, k, v) for c in (5.0, 0.5))
    assert not torch.allclose(a, b)
    assert torch.equal(a, oracle(text, const={"n": 2})(q, k, v))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"head_dim": 0}, ValueError, "head_dim: expected a positive int, found 0"),
        ({"head_dim_vo": 4.0}, ValueError, "head_dim_vo: expected a positive int, found 4.0"),
        ({"dtype": torch.int32}, TypeError, "dtype: expected a torch float dtype"),
        ({"compute_dtype": "f64"}, TypeError, "compute_dtype: expected a torch float dtype"),
    ],
)
def test_refused_options(options, error, message):
    with pytest.raises(error, match=message):
        oracle("attention t():\n    mask = j <= i\n", **options)


ROPE = """
attention t():
    tensor c[pos, n]: f32
    tensor s2[pos, n2]: f32
    f_q = rope(q, max(i, 0), dims = 4, cos = c, sin = s2)
"""


def test_rope_tables_of_the_wrong_shape():
    q, k, v = qkv()
    good = torch.zeros(5, 2)
    assert oracle(ROPE)(q, k, v, c=good, s2=good).shape == (2, 3, 4, 4)
    with pytest.raises(ValueError, match=r"s2: expected a last dimension of 2 \(dims // 2\), found shape \[5, 3\]"):
        oracle(ROPE)(q, k, v, c=good, s2=torch.zeros(5, 3))
    with pytest.raises(IndexError, match=r"tensor 'c' is read out of range: index 0 \(pos\) is 7, not in 0…4"):
        oracle(ROPE.replace("max(i, 0)", "i + 5"))(q, k, v, c=good, s2=good)
    with pytest.raises(ValueError, match="rope: expected an even dims of at most 8 features, found 10"):
        oracle(ROPE.replace("dims = 4", "dims = 10"))(q, k, v, c=good, s2=good)


def ragged(**changes):
    given = {
        "q": torch.ones(4, 2, 8), "k": torch.ones(6, 2, 8), "v": torch.ones(6, 2, 4),
        "qo_indptr": torch.tensor([0, 1, 4]), "kv_indptr": torch.tensor([0, 6, 6]),
    }  # fmt: skip
    return oracle("attention t():\n    mask = j <= i\n").ragged(**{**given, **changes})


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"qo_indptr": torch.tensor([0, 1, 3])}, ValueError, "qo_indptr: expected the last offset to be .* 4, found 3"),
        ({"kv_indptr": torch.tensor([0, 6])}, ValueError, "kv_indptr: expected 3 offsets, as qo_indptr, found 2"),
        ({"kv_indptr": torch.tensor([0, 7, 6])}, ValueError, "kv_indptr: expected offsets that .* found 7, 6"),
        ({"kv_indptr": torch.tensor([1, 6, 6])}, ValueError, "kv_indptr: expected B . 1 offsets that start at 0"),
        ({"kv_indptr": 6}, TypeError, "kv_indptr: expected integers in a list, an array or a tensor, found int"),
        ({"kv_indptr": [0.5, 6]}, TypeError, "kv_indptr: expected int32 or int64, found float32"),
        ({"kv_indptr": torch.tensor([0.0, 6, 6])}, TypeError, "kv_indptr: expected int32 or int64, found float32"),
        ({"kv_indptr": torch.tensor([[0, 6, 6]])}, ValueError, "kv_indptr: expected one dimension, found shape"),
        ({"q": torch.ones(1, 4, 2, 8)}, ValueError, r"q: expected shape \[nnz_qo, num_qo_heads, head_dim_qk\]"),
    ],
)  # fmt: skip
def test_refused_ragged(changes, error, message):
    assert ragged().shape == (4, 2, 4)
    assert ragged(qo_indptr=[0, 1, 4], kv_indptr=np.array([0, 6, 6])).shape == (4, 2, 4)
    with pytest.raises(error, match=message):
        ragged(**changes)


def paged(**changes):
    given = {
        "q": torch.ones(4, 2, 8), "kv": (torch.ones(3, 4, 2, 8), torch.ones(3, 4, 2, 4)),
        "qo_indptr": torch.tensor([0, 1, 4]), "kv_indptr": torch.tensor([0, 2, 2]),
        "kv_indices": torch.tensor([2, 0, -1]), "last_page_len": torch.tensor([3, 0]),
    }  # fmt: skip
    return oracle("attention t():\n    mask = j <= i\n").paged(**{**given, **changes})


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"kv_indices": torch.tensor([2, 3])}, ValueError, "kv_indices: expected page ids in 0…2, found 3 at 1"),
        ({"kv_indices": torch.tensor([-1, 0])}, ValueError, "kv_indices: expected page ids in 0…2, found -1 at 0"),
        ({"kv_indices": torch.tensor([2])}, ValueError, "kv_indices: expected at least 2 page ids .* found 1"),
        ({"last_page_len": torch.tensor([5, 0])}, ValueError, "last_page_len: expected 1…4 .* found 5 for request 0"),
        ({"last_page_len": torch.tensor([0, 1])}, ValueError, "last_page_len: expected 1…4 .* found 0 for request 0"),
        ({"last_page_len": torch.tensor([1])}, ValueError, "last_page_len: expected 2 lengths, one a request, found 1"),
        ({"kv": torch.ones(2)}, TypeError, r"kv: expected \(k_cache, v_cache\), found Tensor"),
        ({"kv_indptr": torch.tensor([0, 2])}, ValueError, "kv_indptr: expected 3 offsets, as qo_indptr, found 2"),
    ],
)  # fmt: skip
def test_refused_paged(changes, error, message):
    assert paged().shape == (4, 2, 4)
    with pytest.raises(error, match=message):
        paged(**changes)
