"""Instructions that touch memory or other lanes.  Each maker returns f(context, mask or None)."""

from __future__ import annotations

import numpy as np

from .memory import UNSIGNED
from .ops import TYPES
from .program import CLASS_SIZE, Imm, Instr, Pair, PtxError, Vec
from .races import WIDE, scope_of
from .translate import Translator, effect

LANES = np.arange(32)


def active(c, m):
    """Numbers of the active lanes; None for all of them."""
    if m is None:
        return None
    lanes = np.flatnonzero(m)
    return None if lanes.size == c.n else lanes


def pick(row, lanes):
    return row if lanes is None else row[lanes]


def split_type(ins: Instr) -> tuple[str, int]:
    """(element type, elements) of a load or store."""
    many = [w for w in ins.words if w in ("v2", "v4", "v8")]
    return ins.words[-1], int(many[0][1:]) if many else 1


def space(ins: Instr) -> str:
    """The state space that a load, store or atomic names; "" for a generic address."""
    for w in ins.words[1:]:
        name = w.partition("::")[0]
        if name in ("global", "shared", "const", "local"):
            return name
    return ""


SHARED_WINDOW = 1 << 56  # generic addresses of shared memory: the window plus the offset


def shared_of(c):
    """The context's shared memory, told who writes."""
    c.cta.shared.who = c.group.number
    return c.cta.shared


def memory_of(c, where: str, addresses):
    """The memory that addresses of a space lie in, told whose accesses come, and the addresses there."""
    if where == "shared":
        return shared_of(c), addresses
    if where == "local":
        raise PtxError("local memory: the kernel spills or indexes registers")
    if where == "" and (inside := addresses >= SHARED_WINDOW).any():
        if not inside.all():
            raise PtxError("one generic access to shared and global memory at once")
        return shared_of(c), addresses - SHARED_WINDOW
    c.machine.memory.who = c.cta.index
    return c.machine.memory, addresses


def is_strong(ins: Instr) -> bool:
    """A load or store that other CTAs may race with."""
    return any(w in ("relaxed", "acquire", "release", "volatile") for w in ins.words)


@effect("ld")
def load(ins: Instr, t: Translator):
    kind, many = split_type(ins)
    targets = ins.args[0].items if isinstance(ins.args[0], Vec) else (ins.args[0],)
    writers = [t.writer(a, kind) for a in targets]
    address, where = t.address(ins.args[1]), space(ins)
    dtype = np.dtype(TYPES[kind][2])
    width = dtype.itemsize
    strong, constant = is_strong(ins), "nc" in ins.words

    def run(c, m):
        lanes = active(c, m)
        if lanes is not None and not lanes.size:
            return
        memory, at = memory_of(c, where, pick(address(c), lanes))
        if many > 1 and (at & (width * many - 1)).any():
            raise ins.fault(f"a vector load is not aligned to {width * many} bytes")
        if constant:
            memory.refuse_written(ins, at, width)
        if strong and memory is c.machine.memory:
            c.machine.synchronise(ins, c, at, reads=True)
        for k, write in enumerate(writers):
            write(c, memory.load(ins, at + k * width, width).view(dtype), lanes)

    return run


@effect("st")
def store(ins: Instr, t: Translator):
    kind, many = split_type(ins)
    sources = ins.args[1].items if isinstance(ins.args[1], Vec) else (ins.args[1],)
    readers = [t.reader(a, kind) for a in sources]
    address, where = t.address(ins.args[0]), space(ins)
    width = np.dtype(TYPES[kind][2]).itemsize
    strong = is_strong(ins)

    def run(c, m):
        lanes = active(c, m)
        if lanes is not None and not lanes.size:
            return
        memory, at = memory_of(c, where, pick(address(c), lanes))
        if many > 1 and (at & (width * many - 1)).any():
            raise ins.fault(f"a vector store is not aligned to {width * many} bytes")
        if strong and memory is c.machine.memory:
            c.machine.synchronise(ins, c, at, writes=True)
        for k, read in enumerate(readers):
            memory.store(ins, at + k * width, width, pick(read(c), lanes).view(UNSIGNED[width]))

    return run


ATOMIC = {
    "add": lambda old, a, b: old + a,
    "min": lambda old, a, b: min(old, a),
    "max": lambda old, a, b: max(old, a),
    "and": lambda old, a, b: old & a,
    "or": lambda old, a, b: old | a,
    "xor": lambda old, a, b: old ^ a,
    "exch": lambda old, a, b: a,
    "cas": lambda old, a, b: b if old == a else old,
    "inc": lambda old, a, b: old * 0 if old >= a else old + old.dtype.type(1),
    "dec": lambda old, a, b: a if old == 0 or old > a else old - old.dtype.type(1),
}


@effect("fence.acq_rel", "fence.sc", "membar", "fence.acquire", "fence.release", alone=True)
def memory_fence(ins: Instr, t: Translator):
    """One-sided fences (acquire, release) count as no fence: their forms with a scope are not used."""
    wide = scope_of(ins.words) in WIDE and ins.words[1] not in ("acquire", "release")

    def run(c, m):
        lanes = active(c, m)
        if wide and (lanes is None or lanes.size):
            c.machine.memory.races.fence(c.cta.index)
            c.machine.may_switch()

    return run


@effect("atom", "red", alone=True)
def atomic(ins: Instr, t: Translator):
    kind, returns = ins.words[-1], ins.words[0] == "atom"
    args = ins.args if returns else (None, *ins.args)
    update = next((ATOMIC[w] for w in ins.words if w in ATOMIC), None)
    if update is None or kind not in ("u32", "s32", "b32", "u64", "s64", "b64", "f32", "f64"):
        raise PtxError(f"atomic not understood: {ins}")
    address, where = t.address(args[1]), space(ins)
    readers = [t.reader(a, kind) for a in args[2:4]]
    write = t.writer(args[0], kind) if returns else None
    dtype = np.dtype(TYPES[kind][2])
    raw = UNSIGNED[dtype.itemsize]

    def run(c, m):
        lanes = active(c, m)
        at = pick(address(c), lanes)
        if not at.size:
            return
        memory, at = memory_of(c, where, at)
        if memory is c.machine.memory:
            memory.who = None  # atomics race with nobody
            c.machine.synchronise(ins, c, at, reads=returns, writes=True)
        values = [pick(r(c), lanes) for r in readers]
        before = np.empty(at.size, dtype)
        for k in range(at.size):  # in lane order: each lane sees what the lanes before it left
            one = at[k : k + 1]
            before[k] = memory.load(ins, one, dtype.itemsize).view(dtype)[0]
            new = update(before[k], values[0][k], values[-1][k])
            memory.store(ins, one, dtype.itemsize, np.array([new], dtype).view(raw))
        if write:
            write(c, before, lanes)

    return run


# ------------------------------------------------------------------------------------- other lanes
def by_warp(row):
    return row.reshape(-1, 32)


def present(c, m):
    """Active lanes as [warp, 32]."""
    return np.ones((c.n // 32, 32), bool) if m is None else by_warp(m)


@effect("shfl.sync", together=True)
def shuffle(ins: Instr, t: Translator):
    """shfl.sync.mode.b32 d[|p], a, b, c, membermask"""
    mode = ins.words[2]
    target, flag = ins.args[0].items if isinstance(ins.args[0], Pair) else (ins.args[0], None)
    write, write_flag = t.writer(target, "b32"), flag and t.writer(flag, "pred")
    read, amount, clamp = (t.reader(a, "b32") for a in ins.args[1:4])
    fixed = isinstance(ins.args[2], Imm) and isinstance(ins.args[3], Imm)
    cache: dict[int, tuple] = {}

    def sources(c):
        b, limit = by_warp(amount(c)).astype("i8") & 31, by_warp(clamp(c)).astype("i8")
        segment = limit >> 8 & 31
        limit = limit & 31
        last, first = LANES & segment | limit & ~segment, LANES & segment
        if mode == "up":
            j = LANES - b
            good = j >= last
        else:
            j = {"down": LANES + b, "bfly": LANES ^ b, "idx": first | b & ~segment}[mode]
            good = j <= last
        return np.where(good, j, LANES), good

    def run(c, m):
        if fixed:
            if c.n not in cache:
                cache[c.n] = sources(c)
            j, good = cache[c.n]
        else:
            j, good = sources(c)
        if m is not None and not np.take_along_axis(present(c, m), j, 1)[present(c, m)].all():
            raise ins.fault("a lane reads a lane that takes no part")
        lanes = active(c, m)
        write(c, pick(np.take_along_axis(by_warp(read(c)), j, 1).reshape(-1), lanes), lanes)
        if write_flag:
            write_flag(c, pick(good.reshape(-1), lanes), lanes)

    return run


@effect("vote.sync", together=True)
def vote(ins: Instr, t: Translator):
    mode, read = ins.words[2], t.reader(ins.args[1], "pred")
    write = t.writer(ins.args[0], "b32" if mode == "ballot" else "pred")

    def run(c, m):
        here, p = present(c, m), by_warp(read(c))
        if mode == "any":
            out = (p & here).any(1)
        elif mode == "all":
            out = (p | ~here).all(1)
        elif mode == "uni":
            out = (p | ~here).all(1) | ~(p & here).any(1)
        else:
            out = bits_of(p & here)
        lanes = active(c, m)
        write(c, pick(out.repeat(32), lanes), lanes)

    return run


def bits_of(p):
    """[warp, 32] booleans to words."""
    return (p.astype("u4") << LANES.astype("u4")).sum(1, dtype="u4")


@effect("activemask")
def active_mask(ins: Instr, t: Translator):
    write = t.writer(ins.args[0], "b32")

    def run(c, m):
        lanes = active(c, m)
        write(c, pick(bits_of(present(c, m)).repeat(32), lanes), lanes)

    return run


@effect("elect.sync", together=True)
def elect(ins: Instr, t: Translator):
    target, flag = ins.args[0].items
    write, write_flag = t.writer(target, "b32"), t.writer(flag, "pred")

    def run(c, m):
        first = present(c, m).argmax(1)
        lanes = active(c, m)
        write(c, pick(first.repeat(32), lanes), lanes)
        write_flag(c, pick((first[:, None] == LANES).reshape(-1), lanes), lanes)

    return run


@effect("match", together=True)
def match(ins: Instr, t: Translator):
    """match.any.sync.b32 d, a, mask; match.all.sync.b32 d|p, a, mask"""
    kind, every = ins.words[-1], "all" in ins.words
    target, flag = ins.args[0].items if isinstance(ins.args[0], Pair) else (ins.args[0], None)
    write, write_flag = t.writer(target, "b32"), flag and t.writer(flag, "pred")
    read = t.reader(ins.args[1], kind)

    def run(c, m):
        here, a, lanes = present(c, m), by_warp(read(c)), active(c, m)
        same = (a[:, :, None] == a[:, None, :]) & here[:, None, :]
        words = np.stack([bits_of(same[:, k]) for k in range(32)], 1)
        if every:
            whole = (same | ~here[:, None, :]).all(2)
            words = np.where(whole, bits_of(here)[:, None], 0)
            if write_flag:
                write_flag(c, pick(whole.reshape(-1), lanes), lanes)
        write(c, pick(words.reshape(-1), lanes), lanes)

    return run


REDUCE = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
          "xor": np.bitwise_xor}  # fmt: skip


@effect("redux.sync", together=True)
def reduce_warp(ins: Instr, t: Translator):
    kind, f = ins.words[-1], REDUCE[ins.words[2]]
    read, write = t.reader(ins.args[1], kind), t.writer(ins.args[0], kind)

    def run(c, m):
        here, a, lanes = present(c, m), by_warp(read(c)), active(c, m)
        out = np.array([f.reduce(row[on]) if on.any() else 0 for row, on in zip(a, here, strict=True)], a.dtype)
        write(c, pick(out.repeat(32), lanes), lanes)

    return run


@effect("bar.warp.sync", together=True)
def warp_barrier(ins: Instr, t: Translator):
    return lambda c, m: None


# ------------------------------------------------------------------------------------- 8x8 matrices
def matrix_form(ins: Instr) -> tuple[int, bool]:
    if "m8n8" not in ins.words or ins.words[-1] != "b16":
        raise PtxError(f"matrix form not understood: {ins}")
    return next(int(w[1:]) for w in ins.words if w in ("x1", "x2", "x4")), "trans" in ins.words


def rows_of(addresses, count):
    """Lane addresses to [warp, matrix, row] addresses: lane 8 k + r points at row r of matrix k."""
    return by_warp(addresses)[:, : 8 * count].reshape(-1, count, 8)


@effect("stmatrix", together=True)
def store_matrix(ins: Instr, t: Translator):
    count, trans = matrix_form(ins)
    address = t.address(ins.args[0])
    readers = [t.reader(a, "b32") for a in ins.args[1].items]

    def run(c, m):
        if m is not None and not m.all():
            raise ins.fault("stmatrix with inactive lanes")
        # lane l holds elements (l // 4, 2 (l % 4)) and the next one, of the matrix or of its transpose
        a = np.stack([by_warp(r(c)) for r in readers], 1).view("u2").reshape(-1, count, 8, 8)
        words = np.ascontiguousarray(a.swapaxes(2, 3) if trans else a).view("u4")
        to = rows_of(address(c), count)[..., None] + 4 * np.arange(4)
        if (rows_of(address(c), count) & 15).any():
            raise ins.fault("a matrix row is not aligned to 16 bytes")
        shared_of(c).store(ins, to.reshape(-1), 4, words.reshape(-1))

    return run


@effect("ldmatrix", together=True)
def load_matrix(ins: Instr, t: Translator):
    count, trans = matrix_form(ins)
    address = t.address(ins.args[1])
    writers = [t.writer(a, "b32") for a in ins.args[0].items]

    def run(c, m):
        if m is not None and not m.all():
            raise ins.fault("ldmatrix with inactive lanes")
        rows = rows_of(address(c), count)
        if (rows & 15).any():
            raise ins.fault("a matrix row is not aligned to 16 bytes")
        at = rows[..., None] + 4 * np.arange(4)
        a = c.cta.shared.load(ins, at.reshape(-1), 4, matrix=True).view("u2").reshape(-1, count, 8, 8)
        words = np.ascontiguousarray(a.swapaxes(2, 3) if trans else a).view("u4").reshape(-1, count, 32)
        for k, write in enumerate(writers):
            write(c, words[:, k].reshape(-1), None)

    return run


@effect("movmatrix", together=True)
def move_matrix(ins: Instr, t: Translator):
    if ins.words[2:] != ("aligned", "m8n8", "trans", "b16"):
        raise PtxError(f"matrix form not understood: {ins}")
    read, write = t.reader(ins.args[1], "b32"), t.writer(ins.args[0], "b32")

    def run(c, m):
        if m is not None and not m.all():
            raise ins.fault("movmatrix with inactive lanes")
        a = read(c).copy().view("u2").reshape(-1, 8, 8)
        write(c, np.ascontiguousarray(a.swapaxes(1, 2)).view("u4").reshape(-1), None)

    return run


@effect("trap", "brkpt")
def trap(ins: Instr, t: Translator):
    def run(c, m):
        raise ins.fault("trap")

    return run


@effect("cvta.shared")
def to_generic(ins: Instr, t: Translator):
    read, write = t.reader(ins.args[1], ins.words[-1]), t.writer(ins.args[0], ins.words[-1])
    if CLASS_SIZE[TYPES[ins.words[-1]][0]] != 8:
        raise PtxError(f"32-bit generic address: {ins}")

    def run(c, m):
        lanes = active(c, m)
        write(c, pick(read(c), lanes) + np.uint64(SHARED_WINDOW), lanes)

    return run


@effect("cvta.to.shared")
def from_generic(ins: Instr, t: Translator):
    read, write = t.reader(ins.args[1], "u64"), t.writer(ins.args[0], "u64")

    def run(c, m):
        lanes = active(c, m)
        write(c, pick(read(c), lanes) - np.uint64(SHARED_WINDOW), lanes)

    return run
