"""PTX text to a list of instructions with parsed operands.

One entry function with its module's variables.  Registers become (class, index) pairs, names in nested `{ }` scopes
(inline assembly) stay apart, labels become instruction numbers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field


class PtxError(Exception):
    """Text that this interpreter does not understand."""


class Fault(Exception):
    """A program did something that a GPU would reject, or answer with garbage or a hang."""


# bits a register of a class holds -> how many bytes
CLASS_SIZE = {"P": 1, "H": 2, "R": 4, "D": 8}
CLASS_OF_BITS = {"pred": "P", "8": "H", "16": "H", "32": "R", "64": "D"}


@dataclass(frozen=True)
class Reg:
    cls: str  # a key of CLASS_SIZE
    index: int
    negated: bool = False


@dataclass(frozen=True)
class Special:
    """%tid.x and the like."""

    name: str


@dataclass(frozen=True)
class Imm:
    text: str


@dataclass(frozen=True)
class Sym:
    """A variable or parameter, plus an offset in bytes."""

    name: str
    offset: int = 0


@dataclass(frozen=True)
class Label:
    pc: int


@dataclass(frozen=True)
class Vec:
    items: tuple


@dataclass(frozen=True)
class Pair:
    """`a|b`: two destinations."""

    items: tuple


@dataclass(frozen=True)
class Mem:
    """`[base + offset]`, and for tensor copies `[base, {coordinates}]`."""

    base: Reg | Sym | Imm
    offset: int
    coords: Vec | None = None


@dataclass(frozen=True)
class Sink:
    """`_`: a destination that nobody wants."""


Operand = Reg | Special | Imm | Sym | Label | Vec | Pair | Mem | Sink


@dataclass(eq=False)
class Instr:
    pc: int
    op: str
    args: tuple
    guard: Reg | None
    line: int
    text: str
    words: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        return f"line {self.line}: {self.text if len(self.text) < 160 else self.text[:150] + ' ...'}"

    def fault(self, message: str) -> Fault:
        return Fault(f"{message}\n  at {self}")


@dataclass(frozen=True)
class Variable:
    """A module variable: `space` is shared, global or const; `size` None for `extern` arrays."""

    name: str
    space: str
    align: int
    size: int | None
    data: bytes | None = None


@dataclass(frozen=True)
class Parameter:
    name: str
    size: int
    align: int
    is_float: bool = False


@dataclass
class Program:
    name: str
    block: tuple[int, int, int]
    params: tuple[Parameter, ...]
    variables: tuple[Variable, ...]
    code: list[Instr]
    leaders: frozenset[int]  # instruction numbers that labels name
    registers: dict[str, int]  # class -> how many


_BYTES = {"8": 1, "16": 2, "32": 4, "64": 8}
_ENTRY = re.compile(r"\.entry\s+(\w+)\s*\(")
_LABEL = re.compile(r"\s*([$%]?[A-Za-z_$][\w$]*)\s*:(?!:)")
_VARIABLE = re.compile(
    r"\.(shared|global|const)\s+(?:\.align\s+(\d+)\s+)?\.[busf](\d+)\s+([\w$]+)(?:\[(\d*)\])?(?:\s*=\s*\{([^}]*)\})?\s*;"
)
_PARAM = re.compile(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.([busf])(\d+)\s+.*?([\w$]+)(?:\[(\d+)\])?\s*$", re.S)


def parse(text: str) -> Program:
    """The one `.entry` of a PTX module.  Raises PtxError."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", lambda m: "\n" * m.group().count("\n"), text, flags=re.S)
    entries = list(_ENTRY.finditer(text))
    if len(entries) != 1:
        raise PtxError(f"expected one .entry, found {len(entries)}")
    entry = entries[0]
    close = text.index(")", entry.end())
    opening = text.index("{", close)
    params = tuple(_parameter(p) for p in text[entry.end() : close].split(",") if p.strip())
    shape = re.search(r"\.reqntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", text[close:opening])
    block = tuple(int(x or 1) for x in shape.groups()) if shape else (32, 1, 1)
    body = _Body(text, opening + 1)
    outside = text[: entry.start()] + text[body.end :]
    variables = tuple(_variable(m) for m in _VARIABLE.finditer(outside + body.variables))
    code = [body.instruction(pc, *statement) for pc, statement in enumerate(body.statements)]
    leaders = frozenset(label.pc for label in body.names.values() if isinstance(label, Label))
    return Program(entry.group(1), block, params, variables, code, leaders, dict(body.counts))  # type: ignore[arg-type]


def _parameter(text: str) -> Parameter:
    m = _PARAM.search(text.strip())
    if m is None:
        raise PtxError(f"parameter not understood: {text.strip()!r}")
    align, kind, bits, name, count = m.groups()
    size = _BYTES[bits] * int(count or 1)
    return Parameter(name, size, int(align or _BYTES[bits]) if count else _BYTES[bits], kind == "f")


def _variable(m: re.Match) -> Variable:
    space, align, bits, name, count, values = m.groups()
    width = _BYTES[bits]
    data = None
    if values is not None:
        data = b"".join((int(v, 0) % (1 << 8 * width)).to_bytes(width, "little") for v in values.split(","))
    size = None if count == "" and data is None else width * int(count or 1)
    return Variable(name, space, int(align or width), len(data) if data else size, data)


class _Body:
    """Statements of a function, with the scopes that its names live in."""

    def __init__(self, text: str, start: int):
        self.names: dict[tuple[int, str], Reg | Label] = {}
        self.counts = dict.fromkeys(CLASS_SIZE, 0)
        self.statements: list[tuple[tuple[int, ...], str, int]] = []
        self.variables = ""
        self.end = self._scan(text, start)

    def _scan(self, text: str, start: int) -> int:
        line, scopes, fresh, depth, at, pending = text.count("\n", 0, start) + 1, (0,), 0, 0, 0, ""
        for m in re.compile(r"[{};\n]|[^{};\n]+").finditer(text, start):
            piece = m.group()
            if piece == "\n":
                line += 1
                pending = "" if pending.lstrip().startswith(".loc") else pending and pending + " "
            elif piece == "{":
                if pending.strip():
                    depth, pending = depth + 1, pending + piece
                else:
                    fresh += 1
                    scopes = (*scopes, fresh)
            elif piece == "}":
                if depth:
                    depth, pending = depth - 1, pending + piece
                elif len(scopes) == 1:
                    return m.end()
                else:
                    scopes = scopes[:-1]
            elif piece == ";":
                self._statement(scopes, " ".join(pending.split()), at)
                pending = ""
            else:
                if not pending.strip():
                    at = line
                    while label := _LABEL.match(piece):
                        self.names[scopes[-1], label.group(1)] = Label(len(self.statements))
                        piece = piece[label.end() :]
                pending += piece
        raise PtxError("the entry's body does not end")

    def _statement(self, scopes: tuple[int, ...], text: str, line: int) -> None:
        if text.startswith(".reg"):
            kind, _, names = text[4:].strip().partition(" ")
            cls = CLASS_OF_BITS[re.sub(r"\D", "", kind) or kind.lstrip(".")]
            for name in names.split(","):
                self._declare(scopes[-1], cls, name.strip())
        elif text.startswith((".shared", ".global", ".const")):
            self.variables += text + ";\n"
        elif text.startswith(".pragma") or not text:
            pass
        elif text.startswith("."):
            raise PtxError(f"line {line}: directive not understood: {text}")
        else:
            self.statements.append((scopes, text, line))

    def _declare(self, scope: int, cls: str, name: str) -> None:
        many = re.fullmatch(r"([%\w$]+)<(\d+)>", name)
        for n in [f"{many.group(1)}{i}" for i in range(int(many.group(2)))] if many else [name]:
            self.names[scope, n] = Reg(cls, self.counts[cls])
            self.counts[cls] += 1

    def instruction(self, pc: int, scopes: tuple[int, ...], text: str, line: int) -> Instr:
        rest, guard = text, None
        try:
            if m := re.match(r"@(!?)\s*([%\w$]+)\s+(.*)$", text):
                guard, rest = self._operand(m.group(1) + m.group(2), scopes), m.group(3)
            op, _, tail = rest.partition(" ")
            args = tuple(self._operand(a, scopes) for a in _split(tail))
        except (PtxError, ValueError) as e:
            raise PtxError(f"line {line}: {text}: {e}") from None
        return Instr(pc, op, args, guard, line, text, tuple(op.split(".")))  # type: ignore[arg-type]

    def _operand(self, text: str, scopes: tuple[int, ...]) -> Operand:
        if text.startswith("{"):
            return Vec(tuple(self._operand(a, scopes) for a in _split(text[1:-1])))
        if text.startswith("["):
            return self._memory(text[1:-1], scopes)
        if "|" in text:
            return Pair(tuple(self._operand(a.strip(), scopes) for a in text.split("|")))
        if text == "_":
            return Sink()
        negated = text.startswith("!")
        name = text.lstrip("! ")
        for scope in reversed(scopes):
            found = self.names.get((scope, name))
            if found is not None:
                return Reg(found.cls, found.index, True) if negated else found  # type: ignore[union-attr]
        if name.startswith("%"):
            return Special(name)
        if re.match(r"[-+]?\d", name):
            return Imm(name)
        m = re.fullmatch(r"([A-Za-z_$][\w$]*)(?:\s*\+\s*(-?\d+))?", name)
        if m is None:
            raise PtxError(f"operand not understood: {text!r}")
        return Sym(m.group(1), int(m.group(2) or 0))

    def _memory(self, text: str, scopes: tuple[int, ...]) -> Mem:
        parts = _split(text)
        m = re.fullmatch(r"([%\w$]+)\s*(?:([+-])\s*(-?\w+))?", parts[0])
        if m is None:
            raise PtxError(f"address not understood: [{text}]")
        base, sign, offset = m.groups()
        coords = self._operand(parts[1], scopes) if len(parts) > 1 else None
        number = int(offset or "0", 0) * (-1 if sign == "-" else 1)
        return Mem(self._operand(base, scopes), number, coords)  # type: ignore[arg-type]


def _split(text: str) -> list[str]:
    """The operands of a list, at commas outside brackets."""
    out, depth, start = [], 0, 0
    for m in re.finditer(r"[\[{(,)}\]]", text):
        c = m.group()
        if c == "," and depth == 0:
            out.append(text[start : m.start()].strip())
            start = m.end()
        elif c in "[{(":
            depth += 1
        elif c != ",":
            depth -= 1
    if text[start:].strip():
        out.append(text[start:].strip())
    return out
