"""Rewrite rules as data: what an expression may be replaced by, written in the language itself.

In a pattern, a letter stands for any expression (the same letter twice: the same expression), `c1 c2 …` for
literals, a number for a literal of that value; `a if c else b` is a select, `min(x, y)` the op of that name.
A replacement is built from what the pattern bound; where its arithmetic is on literals alone it is folded.

Every rule keeps each f32 result as IEEE arithmetic gives it, inf and nan included, with two liberties: a zero may
change its sign (`x + 0`), and the powers marked `exact=False` may round differently.  An i32 wraps at 32 bits, so
its sums and products may be regrouped at will; an f32's may not.  Nothing under a guard leaves it: an expression
moves only to where it is evaluated for the same lanes or fewer.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

from attncc.ir.nodes import Const, Expr, Leaf, Op, Type, make

Pattern = tuple  # as the matcher walks it: ("any", name), ("literal", name), ("value", number) or (op, part, …)
Bound = dict[str, Expr]
Finish = Callable[[Op], Expr]  # what a rule does with an op it makes
Replacement = Callable[[Bound, Finish], Expr]


@dataclass(frozen=True)
class Rule:
    """`pattern` -> `replacement`, where `x` has an element type in `on` and `when`, given what the pattern bound,
    holds.  A replacement of another type than the node's (a scalar for a vector) is not made."""

    pattern: str
    replacement: str | Replacement
    on: str = "i32 f32 bool"
    when: Callable[[Bound], bool] | None = None
    exact: bool = True

    @cached_property
    def compiled(self) -> tuple[Pattern, Pattern | Replacement]:
        return read_pattern(self.pattern), (
            read_pattern(self.replacement) if isinstance(self.replacement, str) else self.replacement
        )

    def apply(self, e: Op, finish: Finish) -> Expr | None:
        """What the rule makes of `e`, in which equal nodes are one object; None where it does not fire.  `finish` sees
        every op it makes."""
        pattern, replacement = self.compiled
        bound: Bound = {}
        if not match(pattern, e, bound) or bound["x"].type.elem not in self.on:
            return None
        if self.when is not None and not self.when(bound):
            return None
        new = replacement(bound, finish) if callable(replacement) else build(replacement, bound, e.type.elem, finish)
        return new if new.type == e.type else None


def value(b: Bound, name: str) -> float:
    """The value of the literal that `name` is bound to."""
    c = b[name]
    assert isinstance(c, Const)
    return c.value


def not_literal(b: Bound) -> bool:
    return not isinstance(b["x"], Const)


def exact_reciprocal(b: Bound) -> bool:
    """Is 1 / c1 exact in f32, without a subnormal on either side?"""
    c = value(b, "c1")
    return math.isfinite(c) and abs(math.frexp(c)[0]) == 0.5 and 2.0**-126 <= abs(c) <= 2.0**126


def small_power(b: Bound) -> bool:
    """Exponents that square-and-multiply serves better than a library's pow; an i32 has no other."""
    c = value(b, "c1")
    return 2 <= c <= (16 if b["x"].type.elem == "f32" else 2**31) and c == int(c)


def power_chain(b: Bound, finish: Finish) -> Expr:
    """x ** c1 by square and multiply."""
    n, square, result = int(value(b, "c1")), b["x"], None
    while n:
        if n & 1:
            result = square if result is None else finish(make("mul", result, square))
        n >>= 1
        square = finish(make("mul", square, square)) if n else square
    assert result is not None
    return result


def fits_f32(b: Bound) -> bool:
    """Is the i32 x so small that f32 holds it exactly?"""
    x = b["x"]
    if isinstance(x, Leaf):
        return x.name in ("d", "e", "h", "g", "group_size", "head_dim_qk", "head_dim_vo")
    if isinstance(x, Op) and x.op == "mod" and isinstance(x.args[1], Const):
        return abs(x.args[1].value) <= 2**24
    return False


RULES: tuple[Rule, ...] = (
    # Literals go right, once, so that the rules below need one form.
    *(Rule(f"c1 {op} x", f"x {op} c1", when=not_literal) for op in ("+", "*", "==", "!=")),
    *(Rule(f"{op}(c1, x)", f"{op}(x, c1)", when=not_literal) for op in ("min", "max")),
    Rule("x - c1", "x + -c1", on="i32"),
    # Sums.
    Rule("x + 0", "x"),
    Rule("x - 0", "x"),
    Rule("0 - x", "-x"),
    Rule("x + -y", "x - y"),
    Rule("-x + y", "y - x"),
    Rule("x - -y", "x + y"),
    Rule("-(-x)", "x"),
    Rule("-(x - y)", "y - x", on="i32"),
    Rule("-(x + c1)", "-c1 - x", on="i32"),
    Rule("x - x", "0", on="i32"),
    Rule("(x - y) + y", "x", on="i32"),
    Rule("y + (x - y)", "x", on="i32"),
    Rule("(x + y) - y", "x", on="i32"),
    Rule("(x + y) - x", "y", on="i32"),
    Rule("(x - y) - x", "-y", on="i32"),
    Rule("x - (x - y)", "y", on="i32"),
    Rule("x - (x + y)", "-y", on="i32"),
    Rule("x - (y + x)", "-y", on="i32"),
    # Literals of an i32 sum or product gather outside.
    Rule("(x + c1) + c2", "x + (c1 + c2)", on="i32"),
    Rule("(c1 - x) + c2", "(c1 + c2) - x", on="i32"),
    Rule("(x + c1) + y", "(x + y) + c1", on="i32"),
    Rule("x + (y + c1)", "(x + y) + c1", on="i32"),
    Rule("(x + c1) - y", "(x - y) + c1", on="i32"),
    Rule("x - (y + c1)", "(x - y) + -c1", on="i32"),
    Rule("c1 - (c2 - x)", "x + (c1 - c2)", on="i32"),
    Rule("(x * c1) * c2", "x * (c1 * c2)", on="i32"),
    # Products and quotients.
    Rule("x * 1", "x"),
    Rule("x * 0", "0", on="i32"),
    Rule("x * -1", "-x"),
    Rule("-x * c1", "x * -c1"),
    Rule("-x * -y", "x * y"),
    Rule("x / 1", "x"),
    Rule("x / c1", "x * (1 / c1)", when=exact_reciprocal),
    Rule("x // 1", "x", on="i32"),
    Rule("x % 1", "0", on="i32"),
    Rule("(x % c1) % c1", "x % c1", on="i32"),
    Rule(
        "(x // c1) // c2", "x // (c1 * c2)", on="i32",
        when=lambda b: value(b, "c1") > 0 and value(b, "c2") > 0 and value(b, "c1") * value(b, "c2") < 2**31,
    ),
    Rule("(x % c1) // c2", "0", on="i32", when=lambda b: 0 < value(b, "c1") <= value(b, "c2")),
    # Powers.
    Rule("x ** 0", "1"),
    Rule("x ** 1", "x"),
    Rule("x ** -1", "1 / x", on="f32", exact=False),
    Rule("x ** c1", power_chain, when=small_power, exact=False),
    # Signs, rounding, casts.
    Rule("abs(-x)", "abs(x)"),
    Rule("abs(abs(x))", "abs(x)"),
    Rule("floor(floor(x))", "floor(x)"),
    Rule("floor(f32(x))", "f32(x)"),
    Rule("i32(f32(x))", "x", when=fits_f32),
    Rule("bit(x, c1)", "False", when=lambda b: not 0 <= value(b, "c1") < 32),
    # Minimum and maximum.
    *(
        Rule(pattern.replace("op", op), replacement.replace("op", op))
        for op in ("min", "max")
        for pattern, replacement in (
            ("op(x, x)", "x"),
            ("op(op(x, c1), c2)", "op(x, op(c1, c2))"),
            ("op(op(x, y), y)", "op(x, y)"),
            ("op(op(x, y), x)", "op(x, y)"),
            ("op(x, op(x, y))", "op(x, y)"),
            ("op(y, op(x, y))", "op(x, y)"),
        )
    ),
    Rule("min(max(x, c1), c2)", "c2", on="i32", when=lambda b: value(b, "c2") <= value(b, "c1")),
    Rule("max(min(x, c1), c2)", "c2", on="i32", when=lambda b: value(b, "c1") <= value(b, "c2")),
    # Comparisons; `not x < y` is `y <= x` only where there is no nan.
    Rule("x < x", "False"),
    Rule("x <= x", "True", on="i32"),
    Rule("x == x", "True", on="i32 bool"),
    Rule("x != x", "False", on="i32 bool"),
    Rule("x == True", "x"),
    Rule("x == False", "not x"),
    Rule("x != True", "not x"),
    Rule("x != False", "x"),
    Rule("not not x", "x"),
    Rule("not x == y", "x != y"),
    Rule("not x != y", "x == y"),
    Rule("not x < y", "y <= x", on="i32"),
    Rule("not x <= y", "y < x", on="i32"),
    # Logic: the left argument guards the right one, so only the left may be moved or copied.
    Rule("x and True", "x"),
    Rule("True and x", "x"),
    Rule("x and False", "False"),
    Rule("False and x", "False"),
    Rule("x or False", "x"),
    Rule("False or x", "x"),
    Rule("x or True", "True"),
    Rule("True or x", "True"),
    *(
        Rule(pattern.replace("OP", op).replace("CO", co), replacement.replace("OP", op))
        for op, co in (("and", "or"), ("or", "and"))
        for pattern, replacement in (
            ("x OP x", "x"),
            ("x OP (x OP y)", "x OP y"),
            ("(x OP y) OP x", "x OP y"),
            ("(x OP y) OP y", "x OP y"),
            ("x OP (x CO y)", "x"),
            ("(x CO y) OP x", "x"),
            ("x OP (not x CO y)", "x OP y"),
        )
    ),
    Rule("x and not x", "False"),
    Rule("not x and x", "False"),
    Rule("x or not x", "True"),
    Rule("not x or x", "True"),
    # Selection.
    Rule("x if True else y", "x"),
    Rule("x if False else y", "y"),
    Rule("x if c else x", "x"),
    Rule("x if not c else y", "y if c else x"),
    Rule("(x if c else y) if c else z", "x if c else z"),
    Rule("x if c else (y if c else z)", "x if c else z"),
    Rule("True if c else x", "c or x"),
    Rule("False if c else x", "not c and x"),
    Rule("x if c else False", "c and x"),
    Rule("x if c else True", "not c or x"),
)  # fmt: skip


_OPERATORS = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.FloorDiv: "floordiv", ast.Mod: "mod",
    ast.Pow: "pow", ast.Lt: "lt", ast.LtE: "le", ast.Eq: "eq", ast.NotEq: "ne", ast.And: "and", ast.Or: "or",
    ast.USub: "neg", ast.Not: "not",
}  # fmt: skip


def read_pattern(text: str) -> Pattern:
    """The pattern that `text` writes, read with Python's own precedence."""

    def go(n: ast.expr) -> Pattern:
        match n:
            case ast.Constant(number):
                return "value", number
            case ast.UnaryOp(ast.USub(), ast.Constant(int(number))):
                return "value", -number
            case ast.Name(name):
                return "literal" if name[1:].isdecimal() else "any", name
            case ast.UnaryOp(op, x):
                return _OPERATORS[type(op)], go(x)
            case ast.BinOp(x, op, y) | ast.Compare(x, [op], [y]) | ast.BoolOp(op, [x, y]):
                return _OPERATORS[type(op)], go(x), go(y)
            case ast.IfExp(c, x, y):
                return "select", go(c), go(x), go(y)
            case ast.Call(ast.Name(op), args):
                return op, *map(go, args)
        raise ValueError(f"not a pattern: {text}")

    return go(ast.parse(text, mode="eval").body)


def match(p: Pattern, e: Expr, bound: Bound) -> bool:
    """Does `e`, in which equal nodes are one object, have the form `p`?  Fills `bound`."""
    kind, *parts = p
    if kind == "any" or kind == "literal":
        return (kind == "any" or isinstance(e, Const)) and bound.setdefault(parts[0], e) is e
    if kind == "value":
        return isinstance(e, Const) and isinstance(e.value, bool) == isinstance(parts[0], bool) and e.value == parts[0]
    return isinstance(e, Op) and e.op == kind and all(match(q, a, bound) for q, a in zip(parts, e.args, strict=True))


def build(p: Pattern, bound: Bound, elem: str, finish: Finish) -> Expr:
    """The expression `p` stands for.  Literals that `p` itself gives have the element type `elem`."""
    kind, *parts = p
    if kind in ("any", "literal"):
        return bound[parts[0]]
    if kind == "value":
        n = parts[0]
        return Const(n, Type("bool")) if isinstance(n, bool) else Const({"i32": int, "f32": float}[elem](n), Type(elem))
    return finish(make(kind, *(build(q, bound, elem, finish) for q in parts)))


@cache
def rules_of(op: str) -> tuple[Rule, ...]:
    """The rules whose pattern is rooted at `op`."""
    return tuple(r for r in RULES if r.compiled[0][0] == op)
