"""What the arithmetic instructions mean: one row an instruction.

A row says: opcode, the types it takes, the modifiers that change nothing here, its operands' types ("T": the
instruction's own), and its value.  The value is the name of a numpy ufunc, or an expression over the operands `$a $b $c
$d`, which are arrays of one element a lane in the operand's type (bf16: its bits).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# type -> (class of its register, name of the list of typed register rows, numpy type)
TYPES = {
    "pred": ("P", "P", "?"),
    "u8": ("H", "U2", "u1"), "s8": ("H", "I2", "i1"), "b8": ("H", "U2", "u1"),
    "u16": ("H", "U2", "u2"), "s16": ("H", "I2", "i2"), "b16": ("H", "U2", "u2"),
    "f16": ("H", "F2", "f2"), "bf16": ("H", "U2", "u2"),
    "u32": ("R", "U4", "u4"), "s32": ("R", "I4", "i4"), "b32": ("R", "U4", "u4"), "f32": ("R", "F4", "f4"),
    "f16x2": ("R", "U4", "u4"), "bf16x2": ("R", "U4", "u4"),
    "u64": ("D", "U8", "u8"), "s64": ("D", "I8", "i8"), "b64": ("D", "U8", "u8"), "f64": ("D", "F8", "f8"),
}  # fmt: skip
INTS = "s16 u16 s32 u32 s64 u64"
HALVES = "f16 bf16 f16x2 bf16x2"
BITS = "b16 b32 b64"


@dataclass(frozen=True)
class Rule:
    words: tuple[str, ...]
    types: frozenset[str]
    ignored: frozenset[str]
    operands: tuple[str, ...]  # destination first
    value: str

    @property
    def is_ufunc(self) -> bool:
        return "$" not in self.value


def rule(op: str, types: str, ignored: str, operands: str, value: str) -> Rule:
    words = tuple(op.split("."))
    return Rule(words, frozenset(types.split()), frozenset(ignored.split()), tuple(operands.split()), value)


RULES = [
    # ---- arithmetic
    rule("add", INTS, "", "T T T", "add"),
    rule("sub", INTS, "", "T T T", "subtract"),
    rule("mul.lo", INTS, "", "T T T", "multiply"),
    rule("mul.hi", INTS, "", "T T T", "mul_hi($a, $b)"),
    rule("mul.wide", "s16 u16 s32 u32", "", "W T T", "wide($a) * $b"),
    rule("mad.lo", INTS, "", "T T T T", "$a * $b + $c"),
    rule("mad.hi", INTS, "", "T T T T", "mul_hi($a, $b) + $c"),
    rule("mad.wide", "s16 u16 s32 u32", "", "W T T W", "wide($a) * $b + $c"),
    rule("div", INTS, "", "T T T", "int_div($a, $b)"),
    rule("rem", INTS, "", "T T T", "int_rem($a, $b)"),
    rule("min", INTS, "", "T T T", "minimum"),
    rule("max", INTS, "", "T T T", "maximum"),
    rule("min.relu", "s32", "", "T T T", "maximum(minimum($a, $b), 0)"),
    rule("max.relu", "s32", "", "T T T", "maximum(maximum($a, $b), 0)"),
    rule("abs", "s16 s32 s64", "", "T T", "absolute"),
    rule("neg", "s16 s32 s64", "", "T T", "negative"),
    rule("add", "f32 f64", "rn ftz", "T T T", "add"),
    rule("add.rz", "f32", "ftz", "T T T", "toward_zero($a.astype(f8) + $b)"),
    rule("mul.rz", "f32", "ftz", "T T T", "toward_zero($a.astype(f8) * $b)"),
    rule("sub", "f32 f64", "rn ftz", "T T T", "subtract"),
    rule("mul", "f32 f64", "rn ftz", "T T T", "multiply"),
    rule("fma", "f32", "rn ftz", "T T T T", "$a.astype(f8) * $b + $c"),
    rule("fma.rm", "f32", "ftz", "T T T T", "downward($a.astype(f8) * $b + $c)"),
    rule("fma", "f64", "rn", "T T T T", "$a * $b + $c"),
    rule("div", "f32 f64", "rn ftz full approx", "T T T", "divide"),
    rule("min", "f32 f64", "ftz", "T T T", "fmin"),
    rule("max", "f32 f64", "ftz", "T T T", "fmax"),
    rule("min.NaN", "f32", "ftz", "T T T", "minimum"),
    rule("max.NaN", "f32", "ftz", "T T T", "maximum"),
    rule("abs", "f32 f64", "ftz", "T T", "absolute"),
    rule("neg", "f32 f64", "ftz", "T T", "negative"),
    rule("copysign", "f32 f64", "", "T T T", "copysign($b, $a)"),
    rule("sqrt", "f32 f64", "rn approx ftz", "T T", "sqrt"),
    rule("rsqrt", "f32 f64", "approx ftz", "T T", "1 / sqrt($a)"),
    rule("rcp", "f32 f64", "rn approx ftz", "T T", "reciprocal"),
    rule("ex2", "f32", "approx ftz", "T T", "exp2"),
    rule("lg2", "f32", "approx ftz", "T T", "log2"),
    rule("sin", "f32", "approx ftz", "T T", "sin"),
    rule("cos", "f32", "approx ftz", "T T", "cos"),
    rule("tanh", "f32", "approx", "T T", "tanh"),
    rule("testp.finite", "f32 f64", "", "pred T", "isfinite"),
    rule("testp.infinite", "f32 f64", "", "pred T", "isinf"),
    rule("testp.notanumber", "f32 f64", "", "pred T", "isnan"),
    # ---- two bytes a number: computed in float32, rounded once
    *(rule(op, HALVES, "rn ftz", "T T T", f"half_op('$T', {f}, $a, $b)")
      for op, f in (("add", "add"), ("sub", "subtract"), ("mul", "multiply"), ("min", "fmin"), ("max", "fmax"))),
    rule("fma", HALVES, "rn ftz", "T T T T", "half_op('$T', fused, $a, $b, $c)"),
    rule("neg", HALVES, "ftz", "T T", "half_op('$T', negative, $a)"),
    rule("abs", HALVES, "ftz", "T T", "half_op('$T', absolute, $a)"),
    rule("ex2", HALVES, "approx ftz", "T T", "half_op('$T', exp2, $a)"),
    rule("tanh", HALVES, "approx", "T T", "half_op('$T', tanh, $a)"),
    # ---- bits
    rule("and", BITS + " pred", "", "T T T", "bitwise_and"),
    rule("or", BITS + " pred", "", "T T T", "bitwise_or"),
    rule("xor", BITS + " pred", "", "T T T", "bitwise_xor"),
    rule("not", BITS + " pred", "", "T T", "invert"),
    rule("shl", BITS, "", "T T u32", "shift_left($a, $b)"),
    rule("shr", BITS + " " + INTS, "", "T T u32", "shift_right($a, $b)"),
    rule("shf.l.wrap", "b32", "", "T T T u32", "funnel($a, $b, $c & 31, True)"),
    rule("shf.l.clamp", "b32", "", "T T T u32", "funnel($a, $b, minimum($c, 32), True)"),
    rule("shf.r.wrap", "b32", "", "T T T u32", "funnel($a, $b, $c & 31, False)"),
    rule("shf.r.clamp", "b32", "", "T T T u32", "funnel($a, $b, minimum($c, 32), False)"),
    rule("lop3", "b32", "", "T T T T u32", "lop3($a, $b, $c, $d)"),
    rule("prmt", "b32", "", "T T T u32", "prmt($a, $b, $c)"),
    rule("popc", "b32 b64", "", "u32 T", "bitwise_count($a)"),
    rule("clz", "b32 b64", "", "u32 T", "clz($a)"),
    rule("brev", "b32 b64", "", "T T", "brev($a)"),
    rule("bfind", "u32 s32 u64 s64", "", "u32 T", "bfind($a)"),
    rule("bfind.shiftamt", "u32 s32", "", "u32 T", "bfind_shift($a)"),
    rule("bfe", "u32 s32 u64 s64", "", "T T u32 u32", "bfe($a, $b, $c)"),
    rule("bfi", "b32 b64", "", "T T T u32 u32", "bfi($a, $b, $c, $d)"),
    # ---- moves
    rule("mov", BITS + " pred f32 f64 " + INTS, "", "T T", "$a"),
    rule("selp", BITS + " f32 f64 " + INTS, "", "T T T pred", "where($c, $a, $b)"),
    rule("slct.s32", BITS + " f32 f64 " + INTS, "", "T T T s32", "where($c >= 0, $a, $b)"),
    rule("slct.f32", BITS + " f32 f64 " + INTS, "", "T T T f32", "where($c >= 0, $a, $b)"),
]  # fmt: skip

COMPARE = {
    "eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal",
    "lo": "less", "ls": "less_equal", "hi": "greater", "hs": "greater_equal",
}  # fmt: skip
# true where an operand is NaN; `ne` alone of the ordered ones must be told that NaN compares false
COMPARE_NAN = {
    "equ": "~(($a < $b) | ($a > $b))", "neu": "$a != $b", "ltu": "~($a >= $b)", "leu": "~($a > $b)",
    "gtu": "~($a <= $b)", "geu": "~($a < $b)", "nan": "isnan($a) | isnan($b)", "num": "~(isnan($a) | isnan($b))",
    "ne": "($a < $b) | ($a > $b)",
}  # fmt: skip


def find(words: tuple[str, ...]) -> tuple[Rule, str] | None:
    """The row for an opcode, and its type."""
    *head, kind = words
    if words[:2] == ("lop3", "b32") or words[:2] == ("prmt", "b32"):
        head, kind = [words[0]], words[1]
        if len(words) > 2:
            return None
    if words[0] == "slct":
        head, kind = ["slct", words[-1]], words[1]
    for r in RULES:
        if r.words[0] == words[0] and kind in r.types and tuple(w for w in head if w not in r.ignored) == r.words:
            return r, kind
    return None


def comparison(compare: str, kind: str) -> str:
    """A ufunc's name or an expression, as in a Rule."""
    if kind.startswith(("f", "bf")):
        return COMPARE_NAN.get(compare) or COMPARE[compare]
    return COMPARE[compare]


# ------------------------------------------------------------------------------------- helpers of the table
_WIDER = {"i2": "i4", "u2": "u4", "i4": "i8", "u4": "u8"}


def wide(a):
    return a.astype(_WIDER[a.dtype.str[1:]])


def toward_zero(exact):
    near = exact.astype("f4")
    return np.where(np.abs(near) > np.abs(exact), np.nextafter(near, np.float32(0)), near)


def downward(exact):
    """To float32, toward -inf."""
    near = exact.astype("f4")
    return np.where(near > exact, np.nextafter(near, np.float32(-np.inf)), near)


def mul_hi(a, b):
    if a.dtype.itemsize < 8:
        return (wide(a) * b >> a.dtype.itemsize * 8).astype(a.dtype)
    high = [(int(x) * int(y) >> 64) & 0xFFFF_FFFF_FFFF_FFFF for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    return np.array(high, "u8").view(a.dtype)


def int_div(a, b):
    """Toward zero; division by zero gives all ones."""
    safe = np.where(b == 0, b.dtype.type(1), b)
    q = a // safe
    if a.dtype.kind == "i":
        q += ((a % safe != 0) & ((a < 0) != (safe < 0))).astype(a.dtype)
    return np.where(b == 0, np.full_like(a, -1) if a.dtype.kind == "i" else ~np.zeros_like(a), q)


def int_rem(a, b):
    return np.where(b == 0, a, a - int_div(a, b) * b)


def shift_left(a, s):
    bits = a.dtype.itemsize * 8
    return np.where(s >= bits, a.dtype.type(0), a << np.minimum(s, bits - 1).astype(a.dtype))


def shift_right(a, s):
    bits = a.dtype.itemsize * 8
    moved = a >> np.minimum(s, bits - 1).astype(a.dtype)
    return moved if a.dtype.kind == "i" else np.where(s >= bits, a.dtype.type(0), moved)


def funnel(low, high, s, left):
    both, s = (high.astype("u8") << np.uint64(32)) | low, s.astype("u8")
    # from the left the answer is the high word after the shift; a full 64-bit value cannot be lost that way
    return ((both << s) >> np.uint64(32) if left else both >> s).astype("u4")


def lop3(a, b, c, table):
    t, out = int(table[0]), np.zeros_like(a)
    for k in range(8):
        if t >> k & 1:
            out |= (a if k & 4 else ~a) & (b if k & 2 else ~b) & (c if k & 1 else ~c)
    return out


def prmt(a, b, select):
    source = np.stack([a, b]).T.copy().view("u1")  # [lane, 8]
    out = np.zeros((a.size, 4), "u1")
    lanes = np.arange(a.size)
    for k in range(4):
        nibble = select >> np.uint32(4 * k) & np.uint32(15)
        byte = source[lanes, nibble & 7]
        out[:, k] = np.where(nibble & 8, np.where(byte & 0x80, 0xFF, 0), byte)
    return out.view("u4")[:, 0]


def clz(a):
    return (a.dtype.itemsize * 8 - _length(a)).astype("u4")


def _length(a):
    """Bits up to and including the highest one."""
    bits = np.zeros(a.shape, "i8")
    for k in range(a.dtype.itemsize * 8):
        bits[(a >> a.dtype.type(k)) & a.dtype.type(1) != 0] = k + 1
    return bits


def brev(a):
    bits = np.unpackbits(a.view("u1").reshape(a.size, -1), axis=1, bitorder="little")[:, ::-1]
    return np.packbits(bits, axis=1, bitorder="little").copy().view(a.dtype)[:, 0]


def bfind(a):
    flipped = np.where(a < 0, ~a, a) if a.dtype.kind == "i" else a
    return (_length(flipped.view("u" + a.dtype.str[2:])) - 1).astype("u4")


def bfind_shift(a):
    found = bfind(a)
    return np.where(found == 0xFFFF_FFFF, found, np.uint32(31) - found)


def bfe(a, pos, length):
    bits = a.dtype.itemsize * 8
    pos, length = (pos & np.uint32(255)).astype("i8"), (length & np.uint32(255)).astype("i8")
    out = []
    for x, p, n in zip(a.view("u" + a.dtype.str[2:]).tolist(), pos.tolist(), length.tolist(), strict=True):
        field = (x >> p) & ((1 << n) - 1) if n else 0
        if a.dtype.kind == "i" and n and x >> min(p + n - 1, bits - 1) & 1:
            field |= -1 << max(0, min(n, bits - p))
        out.append(field & ((1 << bits) - 1))
    return np.array(out, "u" + a.dtype.str[2:]).view(a.dtype)


def bfi(a, b, pos, length):
    bits = a.dtype.itemsize * 8
    out = []
    for x, y, p, n in zip(a.tolist(), b.tolist(), (pos & 255).tolist(), (length & 255).tolist(), strict=True):
        mask = ((1 << n) - 1) << p & ((1 << bits) - 1)
        out.append(y & ~mask | (x << p) & mask)
    return np.array(out, a.dtype)


def from_bf16(bits):
    return (bits.astype("u4") << np.uint32(16)).view("f4")


def to_bf16(x, toward_zero: bool = False):
    """Bits of x as bf16, rounded to nearest even."""
    x = np.asarray(x, "f4")
    bits = x.view("u4")
    if toward_zero:
        return (bits >> np.uint32(16)).astype("u2")
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(x != x, np.uint32(0x7FFF), rounded).astype("u2")


def pack_bf16(high, low, toward_zero: bool = False):
    """Two float32 to one word of bf16."""
    both = np.empty((low.size, 2), "f4")
    both[:, 0], both[:, 1] = low, high
    bits = both.view("u4")
    if not toward_zero:
        nan = np.isnan(both)
        up = bits >> 16
        up &= 1
        up += 0x7FFF
        bits += up
        if nan.any():
            bits[nan] = 0x7FFF_0000
    return bits.view("u2")[:, 1::2].copy().view("u4")[:, 0]


def pack(low, high):
    """Two arrays of 16 bits to one of 32."""
    return low.view("u2").astype("u4") | (high.view("u2").astype("u4") << np.uint32(16))


def fused(a, b, c):
    return (a.astype("f8") * b + c).astype("f4")


def half_op(kind, f, *args):
    """f in float32 on f16 or bf16 numbers, two a word for the x2 types."""
    halves = [a.view("u2") for a in args]
    if kind.startswith("bf16"):
        out = to_bf16(f(*map(from_bf16, halves)))
    else:
        out = f(*(h.view("f2").astype("f4") for h in halves)).astype("f2")
    return out.view(args[0].dtype)


def to_int(x, dtype):
    """A rounded float as an integer: NaN is 0, what is out of range the nearest integer in it."""
    info = np.iinfo(dtype)
    x = np.asarray(x, "f8")
    inside = np.where((x >= float(info.min)) & (x < float(info.max) + 1), x, 0).astype(dtype)
    big = x >= float(info.max) + 1 if info.max > 2**53 else x > info.max
    return np.where(big, info.max, np.where(x < info.min, info.min, inside)).astype(dtype)


def saturated(x):
    """To [0, 1]; NaN becomes 0."""
    return np.fmin(np.fmax(x, np.zeros_like(x)), np.ones_like(x))


UFUNCS = """add subtract multiply divide minimum maximum fmin fmax absolute negative copysign sqrt reciprocal exp2 log2
    sin cos tanh isfinite isinf isnan bitwise_and bitwise_or bitwise_xor invert bitwise_count equal not_equal less
    less_equal greater greater_equal where copyto rint trunc floor ceil
    left_shift right_shift"""
HELPERS = {f.__name__: f for f in (
    wide, toward_zero, downward, mul_hi, int_div, int_rem, shift_left, shift_right, funnel, lop3, prmt, clz, brev,
    bfind, bfind_shift, bfe, bfi, from_bf16, to_bf16, pack_bf16, pack, fused, half_op, to_int, saturated)}  # fmt: skip
HELPERS.update({name: getattr(np, name) for name in UFUNCS.split()})
HELPERS.update({t: np.dtype(t) for t in ("f2", "f4", "f8", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8")})
