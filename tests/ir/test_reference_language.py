"""What language.md fixes, one rule a test: integers, guards, hidden lanes, empty rows, the scan, reads out of range."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch

from attncc.diagnostics import Source
from attncc.frontend import load
from attncc.ir.reference import Reference

MIN, MAX = -(2**31), 2**31 - 1


def oracle(text: str, head_dim: int = 4, **options) -> Reference:
    (variant,) = load(Source("t.attn", text))
    return Reference(variant, head_dim=head_dim, **options)


def ones(B=1, qo_len=1, kv_len=1, H=1, G=1, D=4):
    return torch.ones(B, qo_len, H, D), torch.ones(B, kv_len, G, D), torch.ones(B, kv_len, G, D)


@cache
def built(expression: str, declared: str) -> Reference:
    return oracle(f"attention t({declared}):\n    epilogue = o * 0.0 + {expression}\n")


def evaluate(expression: str, declared: str = "", **params) -> float:
    """The value of one scalar expression of row 0, head 0."""
    out = built(expression, declared)(*ones(), **params)
    assert (out == out[0, 0, 0, 0]).all()
    return float(out[0, 0, 0, 0])


def wrapped(n: int) -> int:
    return (n + 2**31) % 2**32 - 2**31


@pytest.mark.parametrize("a", [0, 1, -1, 7, -7, 46341, MIN, MAX])
@pytest.mark.parametrize("b", [1, -1, 3, -3, 46341, MIN, MAX])
def test_integers_wrap_and_floor(a, b):
    for sign, want in {"+": a + b, "-": a - b, "*": a * b, "//": a // b, "%": a % b}.items():
        assert evaluate(f"f32(x {sign} y)", "x: i32, y: i32", x=a, y=b) == wrapped(want), sign
    for expression, want in {"-x": -a, "abs(x)": abs(a), "x ** 3": a**3, "x ** 0": 1}.items():
        assert evaluate(f"f32({expression})", "x: i32", x=a) == wrapped(want), expression


@pytest.mark.parametrize(
    ("x", "want"),
    [(2.9, 2), (-2.9, -2), (0.0, 0), (1e12, MAX), (-1e12, MIN), (math.inf, MAX), (-math.inf, MIN), (math.nan, 0)],
)
def test_truncation(x, want):
    assert evaluate("f32(i32(x))", "x: f32", x=x) == want


@pytest.mark.parametrize(
    ("expression", "want"),
    [
        ("x // 2.0", -2.0), ("x % 2.0", 0.5), ("floor(x)", -4.0), ("x ** 2", 12.25), ("x / 2", -1.75),
        ("exp2(x)", 2**-3.5), ("log2(-x)", math.log2(3.5)), ("log1p(-x)", math.log(4.5)), ("sqrt(-x)", 3.5**0.5),
        ("rsqrt(-x)", 3.5**-0.5), ("tanh(x)", math.tanh(-3.5)), ("sin(x)", math.sin(-3.5)), ("cos(x)", math.cos(-3.5)),
        ("sigmoid(x)", 1 / (1 + math.exp(3.5))), ("logsigmoid(x)", -math.log1p(math.exp(3.5))),
        ("softplus(x)", math.log1p(math.exp(-3.5))), ("softplus(-10 * x)", 35.0), ("relu(x) + relu(-x)", 3.5),
        ("softplus(-6.0 * x)", 21 + math.log1p(math.exp(-21))), ("clamp(x, -1.0, 1.0)", -1.0), ("abs(x)", 3.5),
        ("min(x, 2.0, -5.0) + max(x, 1, 0.5)", -4.0), ("softcap(x, 2.0)", 2 * math.tanh(-1.75)),
        ("exp(x)", math.exp(-3.5)), ("log(-x)", math.log(3.5)),
        ("1.0 if x < 0 <= 1 else 2.0", 1.0), ("1.0 if not (x > 0 or x == -3.5) else 2.0", 2.0),
        ("0.1", 0.1), ("f32(head_dim_qk * 1000 + num_qo_heads * 100 + kv_len)", 4101.0),
    ],
)  # fmt: skip
def test_arithmetic(expression, want):
    assert evaluate(expression, "x: f32", x=-3.5) == pytest.approx(want, rel=1e-15, abs=1e-300)


def test_scalars_are_not_rounded():
    assert evaluate("x", "x: f32", x=1 / 3) == 1 / 3
    assert evaluate("x", "x: const f32 = 0.1") == 0.1


def test_bits():
    word = torch.tensor([0x80000001], dtype=torch.int64).to(torch.uint32)
    text = "attention t(n: i32):\n    tensor w[word]: u32\n    mask = bit(w[0], n)\n"
    for given in (word, word.view(torch.int32)):
        for n, want in {0: 1, 1: 0, 30: 0, 31: 1, 32: 0, -1: 0, 63: 0, MIN: 0}.items():
            assert oracle(text)(*ones(), n=n, w=given)[0, 0, 0, 0] == want, n
    text = "attention t():\n    tensor w[word]: u32\n    epilogue = o * 0.0 + f32(w[0])\n"
    assert oracle(text)(*ones(), w=word)[0, 0, 0, 0] == wrapped(0x80000001)


def test_positions_and_heads():
    text = "attention t():\n    epilogue = o * 0.0 + f32(((b * 10 + h) * 10 + g) * 100 + i * 10 + iq)\n"
    out = oracle(text)(*ones(B=2, qo_len=3, kv_len=5, H=4, G=2))
    for b in range(2):
        for iq in range(3):
            for h in range(4):
                assert (out[b, iq, h] == ((b * 10 + h) * 10 + h // 2) * 100 + (iq + 2) * 10 + iq).all()
    out = oracle("attention t():\n    epilogue = o * 0.0 + f32(e)\n", head_dim_vo=6)(
        *ones()[:2], torch.ones(1, 1, 1, 6)
    )
    assert out[0, 0, 0].tolist() == [0, 1, 2, 3, 4, 5]


def test_mask_and_kv_len_hide_reads():
    """The table ends where the mask does; nothing past it may be read, or it would be an error."""
    text = (
        "attention t():\n    tensor bias[pos, n]: f32\n    f_logits = s + bias[j, i - j]\n    mask = i - 3 < j <= i\n"
    )
    q, k, v = ones(qo_len=5, kv_len=5)
    out = oracle(text)(q, k, v, bias=torch.zeros(5, 3))
    assert out.isfinite().all()
    with pytest.raises(
        IndexError, match=r"tensor 'bias' .* index 1 \(n\) is 2, not in 0…1, at b=0 h=0 g=0 iq=2 i=2 j=0"
    ):
        oracle(text)(q, k, v, bias=torch.zeros(5, 2))


@pytest.mark.parametrize(
    ("mask", "fault"),
    [
        ("j < 2 or w[j - 2] == 0", False), ("w[j - 2] == 0 or j < 2", True), ("j >= 2 and w[j - 2] == 0", False),
        ("w[j - 2] == 0 and j >= 2", True), ("(w[j - 2] == 0 if j >= 2 else j == 1)", False),
        ("(j == 1 if j < 2 else w[j - 3] == 0)", True), ("not (j < 2 or w[j - 2] == 1)", False),
        ("j >= 2 and (j < 0 or w[j - 2] == 0) and w[j - 2] < 9", False),
    ],
)  # fmt: skip
def test_guards(mask, fault):
    """4 keys and a table that starts two keys late: `and`, `or` and `if` guard from left to right."""
    run = oracle(f"attention t():\n    tensor w[n]: i32\n    mask = {mask}\n")
    if fault:
        with pytest.raises(IndexError, match="tensor 'w' is read out of range"):
            run(*ones(kv_len=4), w=torch.zeros(2, dtype=torch.int32))
    else:
        assert run(*ones(kv_len=4), w=torch.zeros(2, dtype=torch.int32)).isfinite().all()


def test_guards_of_a_shared_value():
    """The same read under two guards: what one hides, the other may still need."""
    text = """
attention t(last: i32):
    tensor w[n]: f32
    let x = w[j]
    f_logits = (x if j < 2 else 0.0) + (x if j == last else 0.0)
"""
    run = oracle(text)
    assert run(*ones(kv_len=5), w=torch.zeros(3), last=2).isfinite().all()
    with pytest.raises(IndexError, match=r"is 3, not in 0…2, at .* j=3"):
        run(*ones(kv_len=5), w=torch.zeros(3), last=3)


def test_deep_lets_take_linear_time():
    lines = "".join(f"    let x{n + 1} = x{n} + 1.0 if j < {n} else x{n} * 1.0\n" for n in range(90))
    text = f"attention t():\n    tensor w[n]: f32\n    let x0 = w[j]\n{lines}    f_logits = x90 * 0.0\n"
    assert oracle(text)(*ones(kv_len=3), w=torch.zeros(3))[0, 0, 0, 0] == 1


def test_division_by_zero():
    run = oracle("attention t(n: i32):\n    mask = n != 0 and j % n == 0\n")
    assert run(*ones(kv_len=4), n=0)[0, 0, 0, 0] == 0
    with pytest.raises(ZeroDivisionError, match="integer division by zero at b=0 h=0 g=0 iq=0 i=3 j=0, line 2"):
        oracle("attention t(n: i32):\n    mask = j // n == 0\n")(*ones(kv_len=4), n=0)


def test_rows_before_the_first_position():
    """f_q and epilogue of a row before position 0 may read by it only under a guard (the frontend knows `i` alone)."""
    table = torch.ones(8)
    guarded = "attention t():\n    tensor w[pos]: f32\n    f_q = q * (w[i] if i >= 0 else 1.0)\n    mask = j <= i\n"
    assert oracle(guarded)(*ones(qo_len=6, kv_len=4), w=table).isfinite().all()
    for slot in ("f_q = q * w[iq + kv_len - qo_len]", "epilogue = o * w[iq + kv_len - qo_len]"):
        run = oracle(f"attention t():\n    tensor w[pos]: f32\n    {slot}\n    mask = j <= i\n")
        assert run(*ones(qo_len=4, kv_len=6), w=table).isfinite().all()
        with pytest.raises(
            IndexError, match=r"tensor 'w' .* index 0 \(pos\) is -2, not in 0…7, at b=0 h=0 g=0 iq=0 i=-2, line 3"
        ):
            run(*ones(qo_len=6, kv_len=4), w=table)


@pytest.mark.parametrize("use", ["w[h, e]", "sum(w[h, e])", "(w[h, e] if e > 1 else 0.0)"])
def test_vector_reads_out_of_range(use):
    run = oracle(f"attention t():\n    tensor w[h, n]: f32\n    epilogue = o * 0.0 + {use}\n")
    want = {"w[h, e]": [1, 2, 3, 4], "sum(w[h, e])": [10] * 4}.get(use, [0, 0, 3, 4])
    assert run(*ones(), w=torch.tensor([[1.0, 2, 3, 4]]))[0, 0, 0].tolist() == want
    with pytest.raises(
        IndexError, match=r"tensor 'w' is read out of range: index 1 \(n\) is 3, not in 0…2, at b=0 h=0"
    ):
        run(*ones(), w=torch.zeros(1, 3))


def test_nothing_is_read_where_nothing_exists():
    text = """
attention t():
    tensor w[n]: f32
    f_k = k * w[g]
    f_v = v * w[g]
    f_logits = s + w[i]
    mask = w[i] < 1.0
"""
    run = oracle(text)
    for qo_len, kv_len in ((0, 3), (0, 0)):
        assert run(*ones(qo_len=qo_len, kv_len=kv_len), w=torch.zeros(0)).shape == (1, qo_len, 1, 4)
    out, lse = run(*ones(qo_len=3, kv_len=0), w=torch.zeros(0), return_lse=True)
    assert not out.any() and (lse == -torch.inf).all()


def test_hidden_nan_stays_hidden():
    """Key 1 is hidden from row 0 and visible to row 1, which alone turns NaN."""
    run = oracle("attention t():\n    mask = j == 0 or i > 1\n")
    for n in (1, 2):
        q, k, v = ones(qo_len=2, kv_len=3)
        (k if n == 1 else v)[0, 1, 0, 2] = torch.nan
        out, lse = run(q, k, v, return_lse=True)
        assert out[0, 0, 0].tolist() == [1.0] * 4 and lse[0, 0, 0].isfinite()
        assert out[0, 1, 0, 2].isnan()
        if n == 2:  # a NaN value spoils its own feature
            assert out[0, 1, 0, [0, 1, 3]].tolist() == pytest.approx([1.0] * 3)


def test_infinite_value_of_a_visible_key():
    q, k, v = ones(qo_len=1, kv_len=3, H=4, G=2)
    v[0, 2, 1, 3] = -torch.inf
    out = oracle("attention t():\n    mask = true\n")(q, k, v)
    assert out[0, 0, 2:, 3].tolist() == [-torch.inf] * 2 and out[0, 0, :2].isfinite().all()
    assert out[0, 0, :, :3].isfinite().all()


@pytest.mark.parametrize(("scan", "lse"), [("softmax()", -math.inf), ("softmax(sink = 0.25 * h)", 0.5)])
def test_row_without_keys(scan, lse):
    run = oracle(f"attention t():\n    mask = j < 0\n    scan = {scan}\n    epilogue = o + 3.0\n")
    out, found = run(*ones(qo_len=2, kv_len=5, H=3), return_lse=True)
    assert (out == 3).all() and found[0, 0, 2] == lse
    out, found = run(*ones(qo_len=2, kv_len=0, H=3), return_lse=True)
    assert (out == 3).all() and found[0, 1, 2] == lse


def test_logits_of_minus_infinity():
    run = oracle("attention t():\n    tensor bias[pos]: f32\n    f_logits = s + bias[j]\n")
    q, k, v = ones(kv_len=3)
    out, lse = run(q, k, v, bias=torch.full((3,), -torch.inf), return_lse=True)
    assert not out.any() and lse.item() == -torch.inf
    out, lse = run(q, k, v, bias=torch.tensor([-torch.inf, 0.0, -torch.inf]), return_lse=True)
    assert (out == 1).all() and lse.item() == 2.0
    out, lse = run(q, k, v, bias=torch.full((3,), -5e4), return_lse=True)
    assert torch.allclose(out, torch.ones_like(out)) and lse.item() == pytest.approx(2 - 5e4 + math.log(3))


def test_extreme_logits():
    q, k, v = torch.full((1, 1, 1, 128), 64.0), torch.full((1, 2, 1, 128), -64.0), torch.randn(1, 2, 1, 128)
    k[0, 1] = 64.0
    out = oracle("attention t():\n    mask = true\n", head_dim=128)(q, k, v)
    assert torch.equal(out[0, 0, 0], v[0, 1, 0].double())
    assert torch.equal(
        oracle("attention t():\n    mask = true\n", head_dim=128)(q, k[:, :1], v[:, :1]), v[:, :1].double()
    )


def test_sink_far_above_the_logits():
    out, lse = oracle("attention t():\n    scan = softmax(sink = 5000.0)\n")(*ones(kv_len=2), return_lse=True)
    assert not out.any() and lse.item() == 5000


def test_scan_none_has_no_lse():
    run = oracle("attention t():\n    mask = j < 2\n    scan = none\n")
    out = run(*ones(kv_len=3))
    assert (out == 2 * 4 * 0.5).all()
    with pytest.raises(ValueError, match="return_lse: t has scan = none"):
        run(*ones(kv_len=3), return_lse=True)


def test_domain_and_mask_hide_reads_of_each_other():
    text = """
attention t():
    tensor sel[n, m]: i32
    tensor keep[n2]: i32
    domain = blocks(sel[iq, :], size = 2)
    mask   = i < 2 and keep[j] == 1
"""
    run = oracle(text)
    keep = torch.ones(4, dtype=torch.int32)
    chosen = torch.tensor([[1, -1, 1], [0, 7, -1]], dtype=torch.int32)
    q, k, v = ones(qo_len=4, kv_len=6, D=4)
    with pytest.raises(IndexError, match="tensor 'keep'"):
        oracle(text.replace("i < 2 and ", ""))(q, k, v, sel=torch.tensor([[2]] * 4, dtype=torch.int32), keep=keep)
    assert run(q[:, :2], k[:, :2], v[:, :2], sel=chosen, keep=keep).isfinite().all()
    short = torch.zeros(4, 1, dtype=torch.int32)  # selects keys 0 and 1 alone
    assert oracle(text.replace("i < 2 and ", ""))(q, k, v, sel=short, keep=keep[:2]).isfinite().all()
    with pytest.raises(IndexError, match=r"tensor 'sel' is read out of range: index 0 \(n\) is 1, not in 0…0"):
        run(q[:, :2], k[:, :2], v[:, :2], sel=chosen[:1], keep=keep)
    late = oracle(text.replace("i < 2 and ", "iq < 1 and "))
    assert late(q[:, :2], k[:, :2], v[:, :2], sel=chosen[:1], keep=keep).isfinite().all()


def test_a_domain_of_no_key():
    """Nothing is asked of the size of its blocks."""
    text = "attention t():\n    tensor sel[m]: i32\n    domain = blocks(sel[:], size = %s)\n"
    sel = torch.zeros(1, dtype=torch.int32)
    for size in ("kv_len", "1000 // kv_len"):
        assert (oracle(text % size)(*ones(qo_len=2, kv_len=0), sel=sel) == 0).all()
    with pytest.raises(ValueError, match="domain: expected a block size of at least 1, found 0"):
        oracle(text % "kv_len // 4")(*ones(qo_len=2, kv_len=3), sel=sel)


def test_emits_over_no_key():
    text = "attention t():\n    mask = j < 0\n" + "".join(
        f"    emit {n}[iq, h] = {r}(l)\n" for n, r in (("a", "max"), ("b2", "min"), ("c", "sum"))
    )
    _, lse, found = oracle(text)(*ones(qo_len=2, kv_len=2), return_lse=True)
    assert [found[n].unique().tolist() for n in ("a", "b2", "c")] == [[-torch.inf], [torch.inf], [0.0]]
    assert lse.shape == (1, 2, 1)


def test_compute_dtype():
    run = oracle("attention t():\n    mask = j <= i\n", compute_dtype=torch.float32, dtype=torch.bfloat16)
    assert run(*ones(qo_len=2, kv_len=2)).dtype == torch.float32
