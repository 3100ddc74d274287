"""Device helpers that generated modules may need: each is copied into the modules that use it, so that these import
cutlass alone.

Loads are inline PTX that LLVM may share, move and drop (no side effects): a predicate, not a branch, keeps a hidden
lane from reading.  The DSL's own `inline_ptx` counts as a side effect, and its precise sin, cos keep a stack frame.
"""

from __future__ import annotations

import re

IMPORTS = """\
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Float64, Int32, Int64
from cutlass._mlir.dialects import llvm
"""


def _load(name: str, width: str) -> str:
    return f'''
def {name}(address, ok):
    """{width} bits at an address where ok, else 0."""
    asm = "{{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0; @p ld.global.nc.{width} $0, [$1]; }}"
    word = llvm.inline_asm(Int32.mlir_type, [Int64(address).ir_value(), Int32(ok).ir_value()], asm, "=r,l,r",
                           has_side_effects=False)
    return Int32(word)
'''


HELPERS: dict[str, str] = {
    "load_b32": _load("load_b32", "b32"),
    "load_u16": _load("load_u16", "u16"),
    "load_u8": _load("load_u8", "u8"),
    "as_f32": """
def as_f32(word):
    return Float32(llvm.bitcast(Float32.mlir_type, Int32(word).ir_value()))
""",
    "f16_as_f32": """
def f16_as_f32(word):
    asm = "{ .reg .b16 h; cvt.u16.u32 h, $1; cvt.f32.f16 $0, h; }"
    return Float32(llvm.inline_asm(Float32.mlir_type, [Int32(word).ir_value()], asm, "=f,r", has_side_effects=False))
""",
    # a served key at position j: the Env says where the keys of its level lie
    "key_is_here": """
def key_is_here(x, j):
    return (j >= x.key_offset) & (j < x.key_stop)
""",
    "key_page": '''
def key_page(x, j):
    """The page of key j; 0 where there are none, and for keys that are elsewhere."""
    page = cutlass.Uint32(j - x.key_offset) // cutlass.Uint32(cutlass.max(x.page_size, 1))
    return load_b32(x.kv_indices + Int64(x.table + Int32(page)) * 4, key_is_here(x, j) & (x.page_size > 0))
''',
    "key_row": '''
def key_row(x, j):
    """The row of key j in its page, or in k and v."""
    local = j - x.key_offset
    in_page = Int32(cutlass.Uint32(local) % cutlass.Uint32(cutlass.max(x.page_size, 1)))
    return cutlass.select_(x.page_size > 0, in_page, x.table + local)
''',
    "bit": """
def bit(word, n):
    return (((word >> (n & 31)) & 1) != 0) & ((n & ~31) == 0)
""",
    "exp": """
def exp(x):
    return cute.math.exp2(x * 1.4426950408889634, fastmath=True)
""",
    "log": """
def log(x):
    return cute.math.log2(x, fastmath=True) * 0.6931471805599453
""",
    "sigmoid": """
def sigmoid(x):
    return cute.arch.rcp_approx(1.0 + cute.math.exp2(x * -1.4426950408889634, fastmath=True))
""",
    "softplus": """
def softplus(x):
    small = cute.math.exp2(cute.arch.fmax(x, -x) * -1.4426950408889634, fastmath=True)
    return cute.arch.fmax(x, Float32(0.0)) + cute.math.log2(1.0 + small, fastmath=True) * 0.6931471805599453
""",
    "turn": '''
def turn(x):
    """x less the nearest multiple of 2 pi, in three steps (Cody and Waite)."""
    n = cute.math.floor(x * 0.15915494309189535 + 0.5)
    return ((x - n * 6.28125) - n * 0.0019350051879882812) - n * 3.01991598195675e-07
''',
    "sin": """
def sin(x):
    return cute.math.sin(turn(x), fastmath=True)
""",
    "cos": """
def cos(x):
    return cute.math.cos(turn(x), fastmath=True)
""",
    "power": '''
def power(x, y):
    """x ** y as C's pow: a negative x has a value for integer y only."""
    size = cute.math.exp2(y * cute.math.log2(cute.arch.fmax(x, -x), fastmath=True), fastmath=True)
    whole = cute.math.floor(y) == y
    odd = cute.math.floor(y * 0.5) * 2.0 != y
    signed = cutlass.select_(whole, cutlass.select_(odd, -size, size), Float32(float("nan")))
    return cutlass.select_(y == 0.0, Float32(1.0), cutlass.select_(x < 0.0, signed, size))
''',
}
NEEDS = {"sin": ("turn",), "cos": ("turn",), "key_page": ("key_is_here", "load_b32")}


def helpers_for(body: str) -> str:
    """The helpers that `body` calls, in a fixed order."""
    used = {name for name in HELPERS if re.search(rf"(?<![\w.]){name}\(", body)}
    used |= {need for name in used for need in NEEDS.get(name, ())}
    return "\n".join(HELPERS[name].strip("\n") + "\n\n" for name in HELPERS if name in used)
