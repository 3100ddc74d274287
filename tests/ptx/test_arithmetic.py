"""One answer for every row of the instruction table, worked out here in Python or plain numpy."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest

from ptx import ops
from ptx.program import PtxError
from ptx.snippets import FORMS, lanewise

rng = np.random.default_rng(7)
ODD = np.arange(32) % 2 == 1
EDGES = {
    "s32": [0, 1, -1, 7, -7, 2**31 - 1, -(2**31), 12345],
    "u32": [0, 1, 2**32 - 1, 2**31, 7, 31, 32, 40],
    "s64": [0, 1, -1, 2**63 - 1, -(2**63), 10**12, -(10**12), 3],
    "u64": [0, 1, 2**64 - 1, 2**63, 2**32, 63, 64, 5],
    "s16": [0, 1, -1, 32767, -32768, 9, -9, 100],
    "u16": [0, 1, 65535, 32768, 9, 15, 16, 100],
    "f32": [0.0, -0.0, 1.0, -1.5, math.inf, -math.inf, math.nan, 1e-3],
    "f64": [0.0, 1.0, -1.5, math.inf, -math.inf, math.nan, 1e-300, 2.0],
}
DTYPE = {"f32": "f4", "f64": "f8", "b32": "u4", "b64": "u8", "b16": "u2", "pred": "?",
         **{f"{s}{b}": f"{'iu'[s == 'u']}{b // 8}" for s in "su" for b in (8, 16, 32, 64)}}  # fmt: skip


def sample(kind: str, k: int) -> np.ndarray:
    """32 values: the edges against each other, then random ones."""
    base = {"b32": "u32", "b64": "u64", "b16": "u16"}.get(kind, kind)
    if kind == "pred":
        return rng.random(32) < 0.5
    edges = np.array(EDGES[base], DTYPE[base])
    if base.startswith("f"):
        rest = (rng.standard_normal(16) * 3).astype(DTYPE[base])
    else:
        rest = rng.integers(0, 256, 16 * edges.itemsize, "u1").view(DTYPE[base])
    return np.concatenate([np.roll(edges, 3 * k), np.roll(edges, k), rest]).astype(DTYPE[kind])


def wrap(value: int, kind: str) -> int:
    bits = int(kind[1:])
    value &= (1 << bits) - 1
    return value - (1 << bits) if kind[0] == "s" and value >> bits - 1 else value


def trunc_div(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def reverse(a: int, bits: int) -> int:
    return int(f"{a:0{bits}b}"[::-1], 2)


def permute(a: int, b: int, select: int) -> int:
    data, out = struct.pack("<II", a, b), 0
    for k in range(4):
        nibble = select >> 4 * k & 15
        byte = data[nibble & 7]
        out |= ((0xFF if byte >> 7 else 0) if nibble & 8 else byte) << 8 * k
    return out


def extract(a: int, pos: int, length: int, kind: str) -> int:
    """PTX ISA, bfe: bits past the top repeat the sign (signed) or are zero."""
    bits, pos, length = int(kind[1:]), pos & 255, length & 255
    u = a & ((1 << bits) - 1)
    sign = 0 if kind[0] == "u" or length == 0 else u >> min(pos + length - 1, bits - 1) & 1
    out = sum((u >> pos + i & 1 if pos + i < bits else sign) << i for i in range(min(length, bits)))
    out |= sum(sign << i for i in range(length, bits))
    return wrap(out, kind)


INT_CASES = [
    ("add.s32", "s32 s32", lambda a, b: a + b), ("add.s64", "s64 s64", lambda a, b: a + b),
    ("sub.u16", "u16 u16", lambda a, b: a - b), ("sub.s32", "s32 s32", lambda a, b: a - b),
    ("mul.lo.s32", "s32 s32", lambda a, b: a * b), ("mul.lo.u64", "u64 u64", lambda a, b: a * b),
    ("mul.hi.s32", "s32 s32", lambda a, b: a * b >> 32), ("mul.hi.u32", "u32 u32", lambda a, b: a * b >> 32),
    ("mul.hi.u64", "u64 u64", lambda a, b: a * b >> 64), ("mul.hi.s64", "s64 s64", lambda a, b: a * b >> 64),
    ("mad.lo.s32", "s32 s32 s32", lambda a, b, c: a * b + c), ("mad.lo.u16", "u16 u16 u16", lambda a, b, c: a * b + c),
    ("mad.hi.u32", "u32 u32 u32", lambda a, b, c: (a * b >> 32) + c),
    ("min.s32", "s32 s32", min), ("max.u32", "u32 u32", max), ("max.s64", "s64 s64", max),
    ("min.relu.s32", "s32 s32", lambda a, b: max(min(a, b), 0)), ("max.relu.s32", "s32 s32", lambda a, b: max(a, b, 0)),
    ("abs.s32", "s32", abs), ("neg.s32", "s32", lambda a: -a), ("neg.s64", "s64", lambda a: -a),
    ("shl.b32", "b32 u32", lambda a, s: a << s if s < 32 else 0),
    ("shl.b64", "b64 u32", lambda a, s: a << s if s < 64 else 0),
    ("shr.u32", "u32 u32", lambda a, s: a >> s), ("shr.s32", "s32 u32", lambda a, s: a >> min(s, 31)),
    ("shr.s64", "s64 u32", lambda a, s: a >> min(s, 63)), ("shr.b16", "b16 u32", lambda a, s: a >> s),
    ("shf.l.wrap.b32", "b32 b32 u32", lambda lo, hi, s: (hi << 32 | lo) << (s & 31) >> 32),
    ("shf.r.wrap.b32", "b32 b32 u32", lambda lo, hi, s: (hi << 32 | lo) >> (s & 31)),
    ("shf.r.clamp.b32", "b32 b32 u32", lambda lo, hi, s: (hi << 32 | lo) >> min(s, 32)),
    ("shf.l.clamp.b32", "b32 b32 u32", lambda lo, hi, s: (hi << 32 | lo) << min(s, 32) >> 32),
    ("prmt.b32", "b32 b32 b32", permute),
    ("brev.b32", "b32", lambda a: reverse(a, 32)), ("brev.b64", "b64", lambda a: reverse(a, 64)),
    ("bfe.u32", "u32 u32 u32", lambda a, p, n: extract(a, p, n, "u32")),
    ("bfe.s32", "s32 u32 u32", lambda a, p, n: extract(a, p, n, "s32")),
    ("bfe.s64", "s64 u32 u32", lambda a, p, n: extract(a, p, n, "s64")),
    ("and.b32", "b32 b32", lambda a, b: a & b), ("or.b64", "b64 b64", lambda a, b: a | b),
    ("xor.b16", "b16 b16", lambda a, b: a ^ b), ("not.b32", "b32", lambda a: ~a),
    ("mov.b32", "b32", lambda a: a), ("mov.u64", "u64", lambda a: a),
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("op, kinds, answer", INT_CASES, ids=[c[0] for c in INT_CASES])
def test_integers(op, kinds, answer, form):
    kinds = kinds.split()
    out = op.split(".")[-1]
    args = [sample(kind, k) for k, kind in enumerate(kinds)]
    got = lanewise(
        f"{op} $d, {', '.join('$' + c for c in 'abc'[: len(kinds)])};", list(zip(kinds, args, strict=True)), out, form
    )
    base = out.replace("b", "u")
    want = [wrap(answer(*map(int, lane)), base) for lane in zip(*args, strict=True)]
    want = np.array(want, DTYPE[base]).view(DTYPE[out])
    assert (got == (want if form == "all" else np.where(ODD, want, 0))).all()


@pytest.mark.parametrize(
    "op, kind", [("div", "s32"), ("rem", "s32"), ("div", "u32"), ("rem", "u64"), ("div", "s64"), ("rem", "s16")]
)
def test_integer_division_is_toward_zero(op, kind):
    a, b = sample(kind, 0), sample(kind, 1)
    b = np.where(b == 0, 3, b).astype(b.dtype)
    got = lanewise(f"{op}.{kind} $d, $a, $b;", [(kind, a), (kind, b)], kind)
    for x, y, g in zip(a.tolist(), b.tolist(), got.tolist(), strict=True):
        q = trunc_div(x, y)
        assert g == wrap(q if op == "div" else x - q * y, kind)


@pytest.mark.parametrize("kind, wide", [("s32", "s64"), ("u32", "u64"), ("s16", "s32"), ("u16", "u32")])
def test_wide_products(kind, wide):
    a, b, c = sample(kind, 0), sample(kind, 1), sample(wide, 2)
    got = lanewise(f"mul.wide.{kind} $d, $a, $b;", [(kind, a), (kind, b)], wide)
    assert got.tolist() == [x * y for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    got = lanewise(f"mad.wide.{kind} $d, $a, $b, $c;", [(kind, a), (kind, b), (wide, c)], wide)
    assert got.tolist() == [wrap(x * y + z, wide) for x, y, z in zip(*(t.tolist() for t in (a, b, c)), strict=True)]


def test_counting_bits():
    a = sample("b32", 0)
    assert lanewise("popc.b32 $d, $a;", [("b32", a)], "u32").tolist() == [int(x).bit_count() for x in a]
    assert lanewise("clz.b32 $d, $a;", [("b32", a)], "u32").tolist() == [32 - int(x).bit_length() for x in a]
    b = sample("b64", 0)
    assert lanewise("popc.b64 $d, $a;", [("b64", b)], "u32").tolist() == [int(x).bit_count() for x in b]
    assert lanewise("clz.b64 $d, $a;", [("b64", b)], "u32").tolist() == [64 - int(x).bit_length() for x in b]
    found = [(int(x).bit_length() - 1) % 2**32 for x in a]
    assert lanewise("bfind.u32 $d, $a;", [("u32", a)], "u32").tolist() == found
    shift = [31 - f if f < 32 else f for f in found]
    assert lanewise("bfind.shiftamt.u32 $d, $a;", [("u32", a)], "u32").tolist() == shift
    s = sample("s32", 0)
    signed = [(int(x if x >= 0 else ~x).bit_length() - 1) % 2**32 for x in s.tolist()]
    assert lanewise("bfind.s32 $d, $a;", [("s32", s)], "u32").tolist() == signed


def test_bit_field_insert():
    a, b = sample("b32", 0), sample("b32", 1)
    got = lanewise("bfi.b32 $d, $a, $b, 5, 9;", [("b32", a), ("b32", b)], "b32")
    mask = 0x1FF << 5
    assert got.tolist() == [int(y) & ~mask & 0xFFFFFFFF | int(x) << 5 & mask for x, y in zip(a, b, strict=True)]


@pytest.mark.parametrize("table", [0x00, 0x80, 0xFE, 0x96, 0xE8, 0xCA, 0xFF, 0x1B])
def test_lop3_is_its_table(table):
    a, b, c = (sample("b32", k) for k in range(3))
    got = lanewise(f"lop3.b32 $d, $a, $b, $c, {table:#x};", [("b32", a), ("b32", b), ("b32", c)], "b32")
    for x, y, z, g in zip(a.tolist(), b.tolist(), c.tolist(), got.tolist(), strict=True):
        want = sum((table >> ((x >> k & 1) << 2 | (y >> k & 1) << 1 | z >> k & 1) & 1) << k for k in range(32))
        assert g == want


def close(got, want, kind="f32", rel=0.0):
    got, want = np.asarray(got, "f8"), np.asarray(want, "f8")
    np.testing.assert_allclose(got, want, rtol=rel, atol=0)


FLOAT_CASES = [
    ("add.f32", 2, lambda a, b: np.float32(a + b)), ("add.rn.ftz.f32", 2, lambda a, b: np.float32(a + b)),
    ("sub.f32", 2, lambda a, b: np.float32(a - b)), ("mul.f32", 2, lambda a, b: np.float32(a * b)),
    ("div.rn.f32", 2, lambda a, b: np.float32(a) / np.float32(b)), ("div.full.f32", 2, lambda a, b: a / b),
    ("fma.rn.f32", 3, lambda a, b, c: np.float32(np.longdouble(a) * b + c)),
    ("min.f32", 2, lambda a, b: np.fmin(a, b)), ("max.f32", 2, lambda a, b: np.fmax(a, b)),
    ("max.NaN.f32", 2, lambda a, b: math.nan if a != a or b != b else max(a, b)),
    ("min.NaN.f32", 2, lambda a, b: math.nan if a != a or b != b else min(a, b)),
    ("abs.f32", 1, abs), ("neg.f32", 1, lambda a: -a),
    ("copysign.f32", 2, lambda a, b: np.copysign(b, a)),
    ("sqrt.rn.f32", 1, np.sqrt), ("rsqrt.approx.ftz.f32", 1, lambda a: 1 / np.sqrt(a)),
    ("rcp.approx.ftz.f32", 1, lambda a: 1 / a), ("ex2.approx.ftz.f32", 1, np.exp2),
    ("lg2.approx.ftz.f32", 1, np.log2), ("tanh.approx.f32", 1, np.tanh),
    ("sin.approx.f32", 1, np.sin), ("cos.approx.f32", 1, np.cos),
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("op, n, answer", FLOAT_CASES, ids=[c[0] for c in FLOAT_CASES])
def test_floats(op, n, answer, form):
    args = [sample("f32", k) for k in range(n)]
    got = lanewise(f"{op} $d, {', '.join('$' + c for c in 'abc'[:n])};", [("f32", a) for a in args], "f32", form)
    with np.errstate(all="ignore"):
        want = np.array([answer(*lane) for lane in zip(*(a.astype("f8") for a in args), strict=True)], "f4")
    close(got, want if form == "all" else np.where(ODD, want, 0), rel=2e-6)


def test_fma_rounds_once():
    a = np.full(32, 1 + 2.0**-12, "f4")
    got = lanewise("fma.rn.f32 $d, $a, $a, $b;", [("f32", a), ("f32", np.full(32, -1 - 2.0**-11, "f4"))], "f32")
    assert (got == np.float32(2.0**-24)).all()  # rounding the product first would give 0


def test_fma_rounds_down():
    """Added to 1.5 * 2^23, whose last bit is worth 1, a number is floored: what precise exponentials are made of."""
    x = np.array([0.75, -0.75, 2.5, -3.0, 0.0, 100.999, -0.001, 3.999] * 4, "f4")
    args = [("f32", x), ("f32", np.ones(32, "f4")), ("f32", np.full(32, 1.5 * 2.0**23, "f4"))]
    assert (lanewise("fma.rm.f32 $d, $a, $b, $c;", args, "f32") - np.float32(1.5 * 2.0**23) == np.floor(x)).all()


ORDERED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


@pytest.mark.parametrize("compare", [*ORDERED, *(c + "u" for c in ORDERED), "num", "nan"])
def test_float_comparisons_and_nan(compare):
    a, b = sample("f32", 0), sample("f32", 1)
    got = lanewise(f"setp.{compare}.f32 $d, $a, $b;", [("f32", a), ("f32", b)], "pred")
    for x, y, g in zip(a.tolist(), b.tolist(), got.tolist(), strict=True):
        nan = x != x or y != y
        if compare in ("num", "nan"):
            want = nan == (compare == "nan")
        elif nan:
            want = compare not in ORDERED
        else:
            want = eval(f"x {ORDERED[compare.removesuffix('u') if compare not in ORDERED else compare]} y")
        assert g == want, (x, y)


@pytest.mark.parametrize(
    "compare, sign", [("lo", "<"), ("ls", "<="), ("hi", ">"), ("hs", ">="), ("lt", "<"), ("ge", ">=")]
)
def test_unsigned_comparisons(compare, sign):
    a, b = sample("u32", 0), sample("u32", 1)
    got = lanewise(f"setp.{compare}.u32 $d, $a, $b;", [("u32", a), ("u32", b)], "pred")
    assert got.tolist() == [eval(f"{x} {sign} {y}") for x, y in zip(a.tolist(), b.tolist(), strict=True)]


@pytest.mark.parametrize("form", FORMS)
def test_setp_with_a_third_predicate(form):
    a, b, c = sample("s32", 0), sample("s32", 1), sample("pred", 2)
    args = [("s32", a), ("s32", b), ("pred", c)]
    for word, f in (("and", np.logical_and), ("or", np.logical_or), ("xor", np.logical_xor)):
        for sign, third in (("", c), ("!", ~c)):
            got = lanewise(f"setp.lt.{word}.s32 $d, $a, $b, {sign}$c;", args, "pred", form)
            want = f(a < b, third)
            assert (got == (want if form == "all" else want & ODD)).all()


def test_setp_writes_both_destinations():
    a, b = sample("s32", 0), sample("s32", 1)
    got = lanewise("setp.lt.s32 %q0|$d, $a, $b;", [("s32", a), ("s32", b)], "pred")
    assert (got == ~(a < b)).all()


@pytest.mark.parametrize("form", FORMS)
def test_select_and_predicate_logic(form):
    a, b, c = sample("f32", 0), sample("f32", 1), sample("pred", 2)
    got = lanewise("selp.f32 $d, $a, $b, $c;", [("f32", a), ("f32", b), ("pred", c)], "f32", form)
    want = np.where(c, a, b)
    np.testing.assert_array_equal(got, want if form == "all" else np.where(ODD, want, 0))
    p, q = sample("pred", 0), sample("pred", 1)
    for word, f in (("and", np.logical_and), ("or", np.logical_or), ("xor", np.logical_xor)):
        got = lanewise(f"{word}.pred $d, $a, $b;", [("pred", p), ("pred", q)], "pred")
        assert (got == f(p, q)).all()
    assert (lanewise("not.pred $d, $a;", [("pred", p)], "pred") == ~p).all()


def test_words_and_halves():
    a, b = sample("b32", 0), sample("b32", 1)
    got = lanewise("mov.b64 $d, {$a, $b};", [("b32", a), ("b32", b)], "b64")
    assert (got == a.astype("u8") | b.astype("u8") << np.uint64(32)).all()
    d = sample("b64", 0)
    assert (lanewise("mov.b64 {%r40, $d}, $a;", [("b64", d)], "b32") == (d >> np.uint64(32)).astype("u4")).all()
    assert (lanewise("mov.b64 {$d, _}, $a;", [("b64", d)], "b32") == d.astype("u4")).all()
    assert (lanewise("mov.b32 {%h40, $d}, $a;", [("b32", a)], "b16") == (a >> np.uint32(16)).astype("u2")).all()
    h, g = sample("b16", 0), sample("b16", 1)
    got = lanewise("mov.b32 $d, {$a, $b};", [("b16", h), ("b16", g)], "b32")
    assert (got == h.astype("u4") | g.astype("u4") << np.uint32(16)).all()
    got = lanewise("mov.b64 $d, {$a, $b, $a, $a};", [("b16", h), ("b16", g)], "b64")
    parts = [x.astype("u8") << np.uint64(16 * k) for k, x in enumerate((h, g, h, h))]
    assert (got == parts[0] | parts[1] | parts[2] | parts[3]).all()


# ------------------------------------------------------------------------------------- conversions
def bf16(x) -> np.ndarray:
    """Round to nearest even, with Python's integers."""
    out = []
    for v in np.asarray(x, "f4"):
        if v != v:
            out.append(0x7FFF)
            continue
        bits = struct.unpack("<I", struct.pack("<f", v))[0]
        low, high = bits & 0xFFFF, bits >> 16
        out.append(high + (low > 0x8000 or (low == 0x8000 and high & 1)))
    return np.array(out, "u2")


@pytest.mark.parametrize("kind", ["s32", "u32", "s64", "u64", "s16", "u16"])
@pytest.mark.parametrize("mode, f", [("rzi", math.trunc), ("rmi", math.floor), ("rpi", math.ceil), ("rni", round)])
def test_float_to_integer_saturates(kind, mode, f):
    a = np.array(
        [*EDGES["f32"], 0.5, 1.5, 2.5, -0.5, -2.5, 3e9, -3e9, 1e30, -1e30, 2.0**31, -(2.0**31), 65535.5] + [7.25] * 12,
        "f4",
    )
    bits, signed = int(kind[1:]), kind[0] == "s"
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    got = lanewise(f"cvt.{mode}.{kind}.f32 $d, $a;", [("f32", a)], kind)
    for x, g in zip(a.tolist(), got.tolist(), strict=True):
        want = 0 if x != x else low if x == -math.inf else high if x == math.inf else min(max(f(x), low), high)
        assert g == want, x


def test_float_to_rounded_float():
    a = np.array([0.5, 1.5, -0.5, -2.25] * 8, "f4")
    for mode, f in (("rmi", np.floor), ("rpi", np.ceil), ("rzi", np.trunc), ("rni", np.rint)):
        assert (lanewise(f"cvt.{mode}.f32.f32 $d, $a;", [("f32", a)], "f32") == f(a)).all()


def test_integer_to_float_and_between_floats():
    for kind in ("s32", "u32", "s64", "u16"):
        a = sample(kind, 0)
        got = lanewise(f"cvt.rn.f32.{kind} $d, $a;", [(kind, a)], "f32")
        assert (got == a.astype("f4")).all()
    a = sample("f32", 0)
    np.testing.assert_array_equal(lanewise("cvt.f64.f32 $d, $a;", [("f32", a)], "f64"), a.astype("f8"))
    d = sample("f64", 0)
    np.testing.assert_array_equal(lanewise("cvt.rn.f32.f64 $d, $a;", [("f64", d)], "f32"), d.astype("f4"))
    np.testing.assert_array_equal(lanewise("cvt.rn.f16.f32 $d, $a;", [("f32", a)], "f16"), a.astype("f2"))
    np.testing.assert_array_equal(
        lanewise("cvt.f32.f16 $d, $a;", [("f16", a.astype("f2"))], "f32"), a.astype("f2").astype("f4")
    )
    assert (lanewise("cvt.rn.bf16.f32 $d, $a;", [("f32", a)], "bf16") == bf16(a)).all()
    assert (lanewise("cvt.rz.bf16.f32 $d, $a;", [("f32", a)], "bf16") == (a.view("u4") >> 16).astype("u2")).all()
    np.testing.assert_array_equal(
        lanewise("cvt.sat.f32.f32 $d, $a;", [("f32", a)], "f32"), np.where(a == a, np.clip(a, 0, 1), 0)
    )
    got = lanewise("cvt.f32.bf16 $d, $a;", [("bf16", bf16(a))], "f32")
    np.testing.assert_array_equal(got, (bf16(a).astype("u4") << 16).view("f4"))


@pytest.mark.parametrize("form", FORMS)
def test_pairs_of_halves(form):
    a, b = sample("f32", 0), sample("f32", 1)
    args = [("f32", a), ("f32", b)]
    got = lanewise("cvt.rn.bf16x2.f32 $d, $a, $b;", args, "b32", form)
    want = bf16(a).astype("u4") << 16 | bf16(b)
    assert (got == (want if form == "all" else np.where(ODD, want, 0))).all()
    got = lanewise("cvt.rn.f16x2.f32 $d, $a, $b;", args, "b32", form)
    want = a.astype("f2").view("u2").astype("u4") << 16 | b.astype("f2").view("u2")
    assert (got == (want if form == "all" else np.where(ODD, want, 0))).all()


def test_half_arithmetic():
    a, b, c = ((rng.standard_normal((32, 2)) * 4).astype("f4") for _ in range(3))
    words = [bf16(x.reshape(-1)).reshape(32, 2).copy().view("u4")[:, 0] for x in (a, b, c)]
    fa, fb, fc = ((bf16(x.reshape(-1)).astype("u4") << 16).view("f4").reshape(32, 2) for x in (a, b, c))
    args = [("bf16x2", w) for w in words]
    for op, want in (("add.rn.bf16x2 $d, $a, $b;", fa + fb), ("max.bf16x2 $d, $a, $b;", np.maximum(fa, fb))):
        got = lanewise(op, args[:2], "bf16x2")
        assert (got == bf16(want.reshape(-1)).reshape(32, 2).copy().view("u4")[:, 0]).all()
    got = lanewise("fma.rn.bf16x2 $d, $a, $b, $c;", args, "bf16x2")
    want = (fa.astype("f8") * fb + fc).astype("f4")
    assert (got == bf16(want.reshape(-1)).reshape(32, 2).copy().view("u4")[:, 0]).all()
    ha, hb = a[:, 0].astype("f2"), b[:, 0].astype("f2")
    got = lanewise("mul.f16 $d, $a, $b;", [("f16", ha), ("f16", hb)], "f16")
    assert (got == (ha.astype("f4") * hb.astype("f4")).astype("f2")).all()


def test_integer_widths():
    s, u = sample("s32", 0), sample("u32", 1)
    assert (lanewise("cvt.s64.s32 $d, $a;", [("s32", s)], "s64") == s.astype("i8")).all()
    assert (lanewise("cvt.u64.u32 $d, $a;", [("u32", u)], "u64") == u.astype("u8")).all()
    assert (lanewise("cvt.u32.u64 $d, $a;", [("u64", sample("u64", 0) * 0 + 2**40 + 5)], "u32") == 5).all()
    assert (lanewise("cvt.u16.u32 $d, $a;", [("u32", u)], "u16") == u.astype("u2")).all()
    assert (lanewise("cvt.s32.s8 $d, $a;", [("u32", u)], "s32") == u.astype("i1").astype("i4")).all()
    assert (lanewise("cvt.u32.u8 $d, $a;", [("u32", u)], "u32") == u.astype("u1")).all()
    h = sample("s16", 0)
    assert (lanewise("cvt.s32.s16 $d, $a;", [("s16", h)], "s32") == h.astype("i4")).all()


def test_immediates():
    assert (lanewise("mov.b32 $d, 0f3F800000;", [], "f32") == 1.0).all()
    assert (lanewise("mov.f64 $d, 0d4000000000000000;", [], "f64") == 2.0).all()
    assert (lanewise("add.s32 $d, -5, 0x10;", [], "s32") == 11).all()
    assert (lanewise("mov.b64 $d, -1;", [], "u64") == 2**64 - 1).all()


@pytest.mark.parametrize(
    "op", ["add.rm.f32 $d, $a, $b;", "frobnicate.f32 $d, $a, $b;", "add.cc.u32 $d, $a, $b;", "cvt.sat.s32.f32 $d, $a;"]
)
def test_what_is_not_known_is_refused_with_its_line(op):
    a = sample("f32", 0)
    kind = "u32" if "u32" in op else "f32"
    with pytest.raises(PtxError, match=r"line \d+: " + op.split()[0].replace(".", r"\.")):
        lanewise(op, [(kind, a.view("u4") if kind == "u32" else a)] * 2, kind)


def test_the_table_has_no_unreachable_row():
    """Every row is found under its own name: none is hidden by an earlier one."""
    for r in ops.RULES:
        for kind in r.types:
            words = (r.words[0], kind, r.words[1]) if r.words[0] == "slct" else (*r.words, kind)
            assert ops.find(words) == (r, kind)
