"""Rotary position embedding: angles that are exact at any position, and the turning of a row.

A pair of features turns by `position * frequency`.  In float32 that product is off by 0.06 at position 1,000,000.  So a
CTA computes once, in float64, what part of a whole turn a position adds, as a 64-bit fraction; the low 64 bits of
position * fraction are the angle, whole turns gone, and its upper half is as many bits as sin and cos can use.
"""

import math
import struct

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Float64, Int32, Int64
from cutlass._mlir.dialects import llvm

from .features import words


def allocate_tables(p, smem):
    """Shared memory for every table of frequencies: half as many words of 64 bits as features turn; and behind these
    for those of features (features.py).  None: no table."""
    count = pairs_before(p, len(p.turnings)) + -(-words(p) // 2)
    return smem.allocate_array(Int64, count, byte_alignment=16) if count else None


def pairs_before(p, number: int) -> int:
    return sum(dims // 2 for _, dims in p.turnings[:number])


def table_of(p, turnings, number: int):
    """Where table `number` begins."""
    return turnings + pairs_before(p, number)


def features_of(p, turnings):
    """The shared address of the first table of features."""
    return table_of(p, turnings, len(p.turnings)).toint() if p.features else Int32(0)


@cute.jit
def fill_turnings(p: cutlass.Constexpr, fn: cutlass.Constexpr, turnings: cutlass.Constexpr, env, t: Int32, w: Int32):
    """By all consumers, while the first loads are on their way; fill_features, which follows, ends with a barrier."""
    threads = 128 * p.warpgroups
    for number in cutlass.range_constexpr(len(p.turnings)):
        pairs = cutlass.const_expr(p.turnings[number][1] // 2)
        for first in cutlass.range_constexpr(0, pairs, threads):
            pair = first + w * 128 + t
            if pair < pairs:
                put_fraction(p, fn, turnings, number, pair, env)


def put_fraction(p, fn, turnings, number: int, pair, env) -> None:
    """What part of a turn a position adds, in units of 2^-64.  The lower word counts from -2^31 on, so that it may be
    multiplied by a position of either sign."""
    scaling, dims = p.turnings[number]
    turns = frequency(scaling, dims, getattr(fn, f"turning_{number}")(env), pair) * (0.5 / math.pi)
    rest = turns - Float64(Int64(turns))
    part = Int64(rest * 2.0**63) << 1
    part = part + ((part & 0x80000000) << 1)
    cute.make_tensor(table_of(p, turnings, number) + pair, cute.make_layout(1))[0] = part


# ------------------------------------------------------------------------------------- float64
def inverse(x):
    """1 / x by Newton's method: a division is a call, which makes ptxas wary of wgmma."""
    y = Float64(cute.arch.rcp_approx(Float32(x)))
    for _ in range(3):
        y = y * (2.0 - x * y)
    return y


def polynomial(x, coefficients):
    """By Horner's scheme, the highest power first."""
    value = Float64(coefficients[0])
    for c in coefficients[1:]:
        value = value * x + c
    return value


def log2(x):
    """Of a positive normal number: its exponent, and 2 artanh((m - 1) / (m + 1)) of its mantissa m near 1."""
    bits = Int64(llvm.bitcast(Int64.mlir_type, x.ir_value()))
    # the exponent that leaves the mantissa between sqrt(1/2) and sqrt(2)
    exponent = (bits - Int64(0x3FE6A09E667F3BCD)) >> 52
    mantissa = Float64(llvm.bitcast(Float64.mlir_type, (bits - (exponent << 52)).ir_value()))
    z = (mantissa - 1.0) * inverse(mantissa + 1.0)
    series = polynomial(z * z, [1.0 / (2 * k + 1) for k in range(11, -1, -1)])
    return Float64(exponent) + z * series * (2.0 / math.log(2.0))


def exp2(x):
    whole = Int64(round_to_even(x))
    series = polynomial((x - Float64(whole)) * math.log(2.0), [1.0 / math.factorial(k) for k in range(14, -1, -1)])
    return series * Float64(llvm.bitcast(Float64.mlir_type, ((whole + 1023) << 52).ir_value()))


def round_to_even(x):
    """To the nearest whole number, where |x| < 2^51."""
    magic = 1.5 * 2.0**52
    return (x + magic) - magic


def floor(x):
    whole = Float64(Int64(x))
    return cutlass.select_(whole > x, whole - 1.0, whole)


def clamp(x, low: float, high: float):
    x = cutlass.select_(x < low, Float64(low), x)
    return cutlass.select_(x > high, Float64(high), x)


def frequency(scaling: str, dims: int, values, pair):
    """Angle a position of a pair of features (ir/reference_eval.py has the sources)."""
    theta, *rest = values
    k, log_theta = Float64(pair), log2(theta)
    freq = exp2(k * (-2.0 / dims) * log_theta)
    if scaling == "none":
        return freq
    factor, *rest = rest
    slow = freq * inverse(factor)
    if scaling == "linear":
        return slow
    if scaling == "llama31":
        low, high, original = rest
        keep = clamp((original * freq * (0.5 / math.pi) - low) * inverse(high - low), 0.0, 1.0)
        return freq * keep + slow * (1.0 - keep)
    original, beta_fast, beta_slow = rest
    per_octave = dims * 0.5 * inverse(log_theta)
    first, last = (per_octave * (log2(original) - log2(beta * (2 * math.pi))) for beta in (beta_fast, beta_slow))
    first, last = clamp(floor(first), 0.0, math.inf), clamp(-floor(-last), -math.inf, dims - 1.0)
    last = cutlass.select_(first == last, last + 0.001, last)
    interpolate = clamp((k - first) * inverse(last - first), 0.0, 1.0)
    return slow * interpolate + freq * (1.0 - interpolate)


# ------------------------------------------------------------------------------------- a row
def cos_sin(address, position):
    """Of the angle at a position, whose fraction of a turn a position lies at a shared address."""
    fraction = cute.arch.inline_ptx("ld.shared.b64 {$w0}, [{$r0}];", write_only_types=[Int64], read_only_args=[address])
    # bits 32 … 63 of position * fraction; the upper 23 become the mantissa of a number from 1 to 2: a conversion would
    # take the unit that has to make sines and cosines
    angle = Float32(llvm.inline_asm(
        Float32.mlir_type, [fraction.ir_value(), Int32(position).ir_value()],
        "{ .reg .b32 low, high, part; mov.b64 {low, high}, $1;"
        " mul.hi.s32 part, low, $2; mad.lo.u32 part, high, $2, part;"
        f" shf.r.clamp.b32 part, part, 0x7f, 9; fma.rn.f32 $0, part, {as_hex(2 * math.pi)}, {as_hex(-2 * math.pi)}; }}",
        "=f,l,r", has_side_effects=False,
    ))  # fmt: skip
    return cute.math.cos(angle, fastmath=True), cute.math.sin(angle, fastmath=True)


def as_hex(x: float) -> str:
    """A float32 literal of PTX."""
    return f"0f{struct.unpack('>I', struct.pack('>f', x))[0]:08X}"


def further(first, more):
    """(cos, sin) of the sums of angles, from those of each, as far as there are both."""
    return [(a * c - b * d, b * c + a * d) for (a, b), (c, d) in zip(first, more, strict=False)]


def shifted(values, distance: int, t):
    """(n, c) -> of feature c of a lane's in eight n of a row's list (vectors.py) the one `distance` further on; past
    either end, anything.  What other lanes of the quad hold comes by shuffle, when it is first asked for."""
    lane, count = cute.arch.lane_idx(), len(values) // 2
    there: dict = {}

    def moved(n: int, other: int, lanes: int):
        n = min(max(n, 0), count - 1)
        if (n, other, lanes) not in there:
            source = (lane & ~3) + ((lane + lanes) & 3)
            there[n, other, lanes] = cute.arch.shuffle_sync(values[2 * n + other], source)
        return there[n, other, lanes]

    def at(n: int, c: int):
        lanes, other = divmod(c + distance, 2)
        blocks, lanes = divmod(lanes, 4)
        n = n + blocks
        if lanes == 0:
            return values[2 * min(max(n, 0), count - 1) + other]
        return cutlass.select_((t % 4) + lanes >= 4, moved(n + 1, other, lanes), moved(n, other, lanes))

    return at


def turn(values, dims: int, style: str, angle, t):
    """A row's list with its first `dims` features turned.  `angle(pair)`: (cos, sin) of a pair of features, where
    `pair` may differ from lane to lane."""
    c_in, half = (t % 4) * 2, dims // 2
    turned = list(values)
    if style == "interleaved":
        for n in range(-(-dims // 8)):
            a, b = values[2 * n], values[2 * n + 1]
            pair = 4 * n + t % 4
            cos, sin = angle(pair if 8 * n + 8 <= dims else cutlass.min(pair, half - 1))
            both = a * cos - b * sin, b * cos + a * sin
            turned[2 * n : 2 * n + 2] = (
                both
                if 8 * n + 8 <= dims
                else [cutlass.select_(pair < half, x, y) for x, y in zip(both, (a, b), strict=True)]
            )
        return turned
    if half % 8 == 0:
        for n in range(half // 8):
            for c in range(2):
                at, to = 2 * n + c, 2 * n + c + half // 4
                cos, sin = angle(8 * n + c + c_in)
                turned[at] = values[at] * cos - values[to] * sin
                turned[to] = values[to] * cos + values[at] * sin
        return turned
    head = values[: 2 * -(-dims // 8)]
    above, below = shifted(head, half, t), shifted(head, -half, t)
    # an eight after its partner: few features are then needed both as they were and turned
    for n in sorted(range(-(-dims // 8)), key=lambda n: n if 8 * n < half else n - half / 8):
        for c in range(2):
            at, feature = 2 * n + c, 8 * n + c + c_in
            first = feature < half
            cos, sin = angle(cutlass.min(cutlass.select_(first, feature, feature - half), half - 1))
            up = values[at] * cos - above(n, c) * sin if 8 * n < half else None
            down = values[at] * cos + below(n, c) * sin if 8 * n + 8 > half else None
            x = down if up is None else up if down is None else cutlass.select_(first, up, down)
            turned[at] = cutlass.select_(feature < dims, x, values[at])
    return turned


def turn_part(values, style: str, angle, n, t):
    """Eight features of a row that turn with one another, from 8 n on (interleaved), or those and their partners."""
    turned = list(values)
    for c in range(1 if style == "interleaved" else 2):
        at, to = (0, 1) if style == "interleaved" else (c, 2 + c)
        cos, sin = angle(4 * n + t % 4 if style == "interleaved" else 8 * n + c + (t % 4) * 2)
        turned[at] = values[at] * cos - values[to] * sin
        turned[to] = values[to] * cos + values[at] * sin
    return turned
