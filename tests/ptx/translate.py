"""Straight runs of PTX as Python functions over numpy rows.

A register is a row of one element a lane; a context (`machine.Lanes`) holds the rows of one warp or of a whole
warpgroup, so the same function runs 32 or 128 lanes.  Each block exists in two forms, made when first needed: for all
lanes, and for the lanes of a mask.  Arithmetic is written out from the table in ops.py; what touches memory or other
lanes is a call of a closure made once an instruction (effects.py and others).

A function returns the next instruction's number, or one of the codes below.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from . import ops
from .program import CLASS_SIZE, Imm, Instr, Label, Mem, Pair, Program, PtxError, Reg, Sink, Special, Sym, Vec

BLOCKED = -1  # waits for another warp or a copy
APART = -2  # waits for the other lanes of its warp, or the other warps of its warpgroup
SPLIT = -3  # lanes went different ways; the context has noted where

SIGNED = {"H": "I2", "R": "I4", "D": "I8"}
RAW = {"P": "P", "H": "U2", "R": "U4", "D": "U8"}
NO_EFFECT = (
    "fence.mbarrier_init", "fence.proxy.tensormap", "fence.proxy.alias", "prefetch", "prefetchu", "griddepcontrol",
    "nanosleep", "setmaxnreg", "wgmma.fence", "discard", "applypriority", "cp.async.bulk.prefetch",
)  # fmt: skip


@dataclass(frozen=True)
class Effect:
    """How an instruction with effects is made: `make(ins, translator)` gives f(context, mask or None), which returns
    None, BLOCKED or APART.  `alone` instructions are a block of their own; `together` ones need every live lane."""

    make: Callable
    alone: bool = False
    together: bool = False


EFFECTS: dict[str, Effect] = {}


def effect(*names: str, alone: bool = False, together: bool = False):
    """Register a maker for opcodes that start with these words."""

    def register(make):
        for name in names:
            EFFECTS[name] = Effect(make, alone, together)
        return make

    return register


def _by_prefix(table, words):
    for n in range(min(len(words), 5), 0, -1):
        if (name := ".".join(words[:n])) in table:
            return name
    return None


@dataclass
class Pool:
    """Rows that are not registers: numbers, special registers, addresses, parameters.  They follow the registers."""

    first: dict[str, int]
    specs: dict[str, list] = field(default_factory=lambda: {c: [] for c in CLASS_SIZE})
    rows: int = 0

    def row(self, cls: str, spec) -> int:
        if spec not in self.specs[cls]:
            self.specs[cls].append(spec)
            self.rows += 1
        return self.first[cls] + self.specs[cls].index(spec)


class Translator:
    """The blocks of one program.  `full[pc]` and `masked[pc]` are (function, instructions) pairs, or None so far."""

    def __init__(self, program: Program):
        self.program = program
        self.pool = Pool(program.registers)
        self.end = len(program.code)
        self.full: list[tuple[Callable, int] | None] = [None] * self.end
        self.masked: list[tuple[Callable, int] | None] = [None] * self.end
        self.scope: dict[str, object] = dict(ops.HELPERS)
        self.calls: dict[int, Callable] = {}

    # --------------------------------------------------------------------------------- blocks
    def block(self, pc: int, masked: bool) -> tuple[Callable, int]:
        lines, at = [], pc
        while True:
            ins = self.program.code[at]
            made = _by_prefix(EFFECTS, ins.words)
            kind = EFFECTS[made] if made and ins.words[:2] != ("ld", "param") else None
            if at != pc and (at in self.program.leaders or (kind and (kind.alone or (masked and kind.together)))):
                lines.append(f"return {at}")
                break
            if masked and kind and kind.together:
                lines.append(f"if not c.joined(m): return {APART}")
            jump = ins.op in ("bra", "bra.uni", "ret", "exit")
            lines += self.jump(ins, masked) if jump else self.instruction(ins, kind, "m" if masked else None)
            at += 1
            if jump and ins.guard is None:
                break
            if jump or at == self.end or (kind and kind.alone):
                lines.append(f"return {at}")
                break
        body = "\n    ".join(lines)
        used = ";".join(f"{n}=c.{n}" for n in dict.fromkeys(re.findall(r"\b(P|[UIF][248])\[", body)))
        source = f"def block(c{', m' if masked else ''}):\n    {used}\n    {body}\n"
        exec(compile(source, f"<block {pc}, line {self.program.code[pc].line}>", "exec"), self.scope)
        made_block = (self.scope.pop("block"), at - pc)
        (self.masked if masked else self.full)[pc] = made_block  # type: ignore[call-overload]
        return made_block

    def jump(self, ins: Instr, masked: bool) -> list[str]:
        target = self.end if ins.op in ("ret", "exit") else ins.args[0]
        if isinstance(target, Label):
            target = target.pc
        if not isinstance(target, int):
            raise PtxError(f"jump not understood: {ins}")
        if ins.guard is None:
            return [f"return {target}"]
        yes, no = (ins.pc + 1, target) if ins.guard.negated else (target, ins.pc + 1)
        p = f"P[{ins.guard.index}]"
        if masked:
            return [f"return c.split({p}, {yes}, {no}, m)"]
        return [
            f"t = {p}.tobytes()",
            f"return {yes} if t == c.ones else {no} if t == c.zeros else c.split({p}, {yes}, {no}, None)",
        ]

    def instruction(self, ins: Instr, kind: Effect | None, mask: str | None) -> list[str]:
        """Lines for one instruction; `mask` names the active lanes, None for all."""
        lines = []
        if ins.guard is not None:
            p = f"{'~' if ins.guard.negated else ''}P[{ins.guard.index}]"
            if mask:
                lines, mask = [f"g = m & {p}"], "g"
            else:
                mask = p
        if kind is not None:
            if ins.pc not in self.calls:
                self.calls[ins.pc] = self.scope[f"k{ins.pc}"] = kind.make(ins, self)
            call = f"k{ins.pc}(c, {mask})"
            return [*lines, f"r = {call}", "if r: return r"] if kind.alone else [*lines, call]
        if _by_prefix(NO_EFFECT, ins.words):
            return []
        try:
            return lines + self.arithmetic(ins, mask)
        except (KeyError, IndexError, ValueError):
            raise PtxError(f"instruction not understood: {ins}") from None

    # --------------------------------------------------------------------------------- arithmetic
    def arithmetic(self, ins: Instr, mask: str | None) -> list[str]:
        words, args = ins.words, ins.args
        if words[0] == "setp":
            return self.setp(ins, mask)
        if words[0] == "cvt":
            return self.cvt(ins, mask)
        if words[:2] == ("ld", "param"):
            mem = args[1]
            spec = ("param", mem.base.name, mem.base.offset + mem.offset, ops.TYPES[words[-1]][2])
            return self.assign(args[0], words[-1], self.constant(words[-1], spec), mask)
        if words[0] == "cvta":
            return self.assign(args[0], words[-1], self.source(args[1], words[-1]), mask)
        if words[0] == "mov" and isinstance(args[0], Vec):
            return self.unpack(args, words[1], mask)
        if words[0] == "mov" and isinstance(args[1], Vec):
            return self.pack(args, words[1], mask)
        found = ops.find(words)
        if found is None:
            raise KeyError(ins.op)
        rule, kind = found
        wide = {"s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64"}.get(kind, kind)
        types = [{"T": kind, "W": wide}.get(t, t) for t in rule.operands]
        value = rule.value.replace("$T", kind)
        if (
            words[0] in ("shl", "shr")
            and isinstance(args[2], Imm)
            and int(args[2].text, 0) < 8 * CLASS_SIZE[args[0].cls]
        ):
            types[2], value = kind, "left_shift" if words[0] == "shl" else "right_shift"
        sources = [self.source(a, t) for a, t in zip(args[1:], types[1:], strict=True)]
        return self.value(args[0], types[0], value, sources, mask)

    def value(self, target, kind: str, value: str, sources: list[str], mask: str | None) -> list[str]:
        """target = value(sources), where value is a ufunc's name or an expression."""
        if "$" not in value and isinstance(target, Reg):
            where = f", where={mask}" if mask else ""
            return [f"{value}({', '.join(sources)}, out={self.target(target, kind)}{where})"]
        if "$" not in value:
            value = f"{value}({', '.join(sources)})"
        for name, s in zip("abcd", sources, strict=False):
            value = value.replace(f"${name}", s)
        return self.assign(target, kind, value, mask)

    def assign(self, target, kind: str, value: str, mask: str | None) -> list[str]:
        if isinstance(target, Sink):
            return []
        return [f"copyto({self.target(target, kind)}, {value}, 'unsafe'{', ' + mask if mask else ''})"]

    def target(self, reg, kind: str) -> str:
        """The row to write: of the register's own width, sign-extending for signed types."""
        if not isinstance(reg, Reg):
            raise ValueError(reg)
        if ops.TYPES[kind][0] == reg.cls:
            return f"{ops.TYPES[kind][1]}[{reg.index}]"
        if CLASS_SIZE[reg.cls] < CLASS_SIZE[ops.TYPES[kind][0]]:
            raise ValueError(reg)
        return f"{(SIGNED if kind[0] == 's' else RAW)[reg.cls]}[{reg.index}]"

    def source(self, operand, kind: str) -> str:
        """An operand as an expression of the type."""
        rows, index, narrow = self.place(operand, kind)
        if narrow:
            return f"{rows}[{index}].astype({narrow})"
        return f"{'~' if self.negated(operand) else ''}{rows}[{index}]"

    @staticmethod
    def negated(operand) -> bool:
        return isinstance(operand, Reg) and operand.negated

    def place(self, operand, kind: str) -> tuple[str, int, str | None]:
        """(list of rows, row, numpy type to narrow to) of a source operand."""
        cls, rows, dtype = ops.TYPES[kind]
        if isinstance(operand, Reg):
            if operand.cls == cls and kind not in ("u8", "s8", "b8"):
                return rows, operand.index, None
            if CLASS_SIZE[operand.cls] < CLASS_SIZE[cls] or kind[0] == "f" or "P" in (operand.cls, cls):
                raise ValueError(f"{operand} is no {kind}")
            return RAW[operand.cls], operand.index, dtype
        if kind in ("u8", "s8", "b8"):
            return *self.place(operand, "b16")[:2], dtype
        m = re.fullmatch(r"([UIFP][248]?)\[(\d+)\]", self.constant(kind, self.spec(operand, kind)))
        return m.group(1), int(m.group(2)), None  # type: ignore[union-attr]

    def constant(self, kind: str, spec) -> str:
        cls, rows, _ = ops.TYPES[kind]
        return f"{rows}[{self.pool.row(cls, spec)}]"

    def spec(self, operand, kind: str):
        if isinstance(operand, Special):
            return ("special", operand.name)
        if isinstance(operand, Sym):
            return ("address", operand.name, operand.offset)
        if not isinstance(operand, Imm):
            raise ValueError(operand)
        text, size = operand.text, CLASS_SIZE[ops.TYPES[kind][0]]
        if m := re.fullmatch(r"0([fdFD])([0-9a-fA-F]+)", text):
            number = struct.unpack(">f" if m.group(1) in "fF" else ">d", bytes.fromhex(m.group(2)))[0]
            if kind not in ("f32", "f64"):
                return ("bits", int(m.group(2), 16))
        elif kind in ("f32", "f64"):
            number = float(text)
        else:
            return ("bits", int(text.rstrip("U"), 0) & ((1 << 8 * size) - 1))
        return ("bits", int.from_bytes(struct.pack("<f" if kind == "f32" else "<d", number), "little"))

    # --------------------------------------------------------------------------------- special forms
    def setp(self, ins: Instr, mask: str | None) -> list[str]:
        """setp.compare[.bool][.ftz].type p[|q], a, b[, c]"""
        words = [w for w in ins.words if w != "ftz"]
        kind, args = words[-1], ins.args
        sources = [self.source(a, kind) for a in args[1:3]]
        value = ops.comparison(words[1], kind)
        targets = args[0].items if isinstance(args[0], Pair) else (args[0],)
        if len(words) == 3 and len(targets) == 1:
            return self.value(targets[0], "pred", value, sources, mask)
        if "$" not in value:
            value = f"{value}($a, $b)"
        value = value.replace("$a", sources[0]).replace("$b", sources[1])
        lines, both = [f"t = {value}"], ["t", "~t"]
        if len(words) == 4:
            sign = {"and": "&", "or": "|", "xor": "^"}[words[2]]
            c = self.source(args[3], "pred")
            lines.append(f"u = {c}.copy()")
            both = [f"t {sign} u", f"~t {sign} u"]
        for target, v in zip(targets, both, strict=False):
            lines += self.assign(target, "pred", v, mask)
        return lines

    def cvt(self, ins: Instr, mask: str | None) -> list[str]:
        """cvt[.rounding][.ftz][.sat].to.from d, a[, b]"""
        to, kind = ins.words[-2:]
        how = [w for w in ins.words[1:-2] if w != "ftz"]
        if len(ins.args) == 3:
            if to not in ("bf16x2", "f16x2") or kind != "f32" or how not in (["rn"], ["rz"]):
                raise ValueError(ins.op)
            high, low = (self.source(a, kind) for a in ins.args[1:])
            if to == "bf16x2":
                return self.assign(ins.args[0], "b32", f"pack_bf16({high}, {low}, {how == ['rz']})", mask)
            high, low = (self._round_half(x, "f16", how) for x in (high, low))
            return self.assign(ins.args[0], "b32", f"pack({low}, {high})", mask)
        x = self.source(ins.args[1], kind)
        if kind == "bf16":
            x = f"from_bf16({x})"
        if "sat" in how:
            if to not in ("f32", "f64") or kind not in ("f32", "f64"):
                raise ValueError(ins.op)
            how.remove("sat")
            x = f"saturated({x})"
        whole = {"rni": "rint", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}
        is_float, to_float = (k.startswith(("f", "bf")) for k in (kind, to))
        if how and how[0] in whole and is_float:
            x = f"{whole[how.pop(0)]}({x})"
        if is_float and not to_float:
            x = f"to_int({x}, '{ops.TYPES[to][2]}')"
        elif to in ("bf16", "f16"):
            x, how = self._round_half(x, to, how or ["rn"]), []
        elif to_float and not is_float:
            x = f"{x}.astype({ops.TYPES[to][2]})"
        elif not to_float and ops.TYPES[to][2][1] < ops.TYPES[kind][2][1]:
            x = f"{x}.astype({ops.TYPES[to][2]})"  # narrowed first, then extended to the register
        if how not in ([], ["rn"]):
            raise ValueError(ins.op)
        return self.assign(ins.args[0], to, x, mask)

    @staticmethod
    def _round_half(x: str, to: str, how: list[str]) -> str:
        if to == "bf16":
            return f"to_bf16({x}, {how == ['rz']})"
        if how != ["rn"]:
            raise ValueError(how)
        return f"{x}.astype(f2)"

    def unpack(self, args, kind: str, mask: str | None) -> list[str]:
        parts = args[0].items
        width = CLASS_SIZE[ops.TYPES[kind][0]] // len(parts)
        part = {1: "b8", 2: "b16", 4: "b32"}[width]
        lines = [f"t = {self.source(args[1], kind)}.copy().view(u{width})"]
        for k, p in enumerate(parts):
            lines += self.assign(p, part, f"t[{k}::{len(parts)}]", mask)
        return lines

    def pack(self, args, kind: str, mask: str | None) -> list[str]:
        parts = args[1].items
        size = CLASS_SIZE[ops.TYPES[kind][0]]
        part = {1: "b8", 2: "b16", 4: "b32"}[size // len(parts)]
        shift = 8 * size // len(parts)
        terms = [f"({self.source(p, part)}.astype(u{size}) << {shift * k})" for k, p in enumerate(parts)]
        return self.assign(args[0], kind, " | ".join(terms), mask)

    # --------------------------------------------------------------------------------- for the makers of effects
    def reader(self, operand, kind: str) -> Callable:
        """f(context) -> the operand's row, as the type."""
        rows, index, narrow = self.place(operand, kind)
        negate = self.negated(operand)

        def read(c):
            row = getattr(c, rows)[index]
            return row.astype(narrow) if narrow else ~row if negate else row

        return read

    def writer(self, operand, kind: str) -> Callable:
        """f(context, values, lanes or None): set a register; values of active lanes only."""
        if isinstance(operand, Sink):
            return lambda c, values, lanes: None
        m = re.fullmatch(r"(\w+)\[(\d+)\]", self.target(operand, kind))
        rows, index = m.group(1), int(m.group(2))  # type: ignore[union-attr]

        def write(c, values, lanes):
            getattr(c, rows)[index][slice(None) if lanes is None else lanes] = values

        return write

    def address(self, mem: Mem) -> Callable:
        """f(context) -> int64 byte addresses."""
        cls = mem.base.cls if isinstance(mem.base, Reg) else "D"
        rows, index, _ = self.place(mem.base, "b64" if cls == "D" else "b32")
        offset = mem.offset
        return lambda c: getattr(c, rows)[index].astype("i8") + offset
