"""Factors that all features of a vector share, taken out of f_q, f_k and f_v: they cost a number a row or a key then,
and the tile in shared memory stays as it came.

    f_q = q * a,  f_k = k * c  ->  f_q = q, f_k = k, and f_logits in terms of (s * a) * c, (dot * a) * c
    f_v = v * c                ->  epilogue in terms of o * c, where c is the same for all keys, and only where o is
                                   not 0: a row that sees no key asks for no c; else f_v = v * c, so written, which
                                   kernels apply to a key's weight (`weight_of`)

A slot of which something else is left (a rotation, a norm) keeps its factors: a transform of the vector applies them
for nothing, and a factor of its own would cost every score.  Where few rows meet a key, though, its factor is applied
to their scores rather than to all of its features: `apart`, which sees through rotations and finds a norm's scale.
"""

from __future__ import annotations

from dataclasses import replace

from attncc.ir.nodes import F32, Const, Expr, Leaf, Op, Rope, Variant, leaves, make, objects, transform, walk

ONE = Const(1.0, F32)


def fold_vectors(v: Variant) -> Variant:
    """`v`, with what is only a factor in f_q, f_k and f_v taken out of them."""
    for slot, vector in (("f_q", "q"), ("f_k", "k")):
        factor = factor_of(getattr(v, slot), vector)
        if factor is not None and factor != ONE:
            v = replace(v, f_logits=times(v.f_logits, ("s", "dot"), factor), **{slot: Leaf(vector)})
    factor = factor_of(v.f_v, "v")
    if factor is None or factor == ONE:
        return v
    if "j" in leaves(factor):
        return replace(v, f_v=make("mul", Leaf("v"), factor, span=v.f_v.span))
    whole = make("mul", Leaf("o"), factor)
    if not isinstance(factor, Const):
        whole = make("select", make("ne", Leaf("o"), Const(0.0, F32)), whole, Leaf("o"))
    return replace(v, f_v=Leaf("v"), epilogue=transform(v.epilogue, lambda x: whole if x == Leaf("o") else x))


def of_keys(v: Variant) -> dict[str, Expr | None]:
    """The slots f_k and f_v that make something of each key, and, where that is only a factor, which fold_vectors takes
    out, this.  (Not a factor that keys share: it costs nothing a key.)"""
    factors = {slot: factor_of(getattr(v, slot), vector) for slot, vector in (("f_k", "k"), ("f_v", "v"))}
    return {slot: c for slot, c in factors.items() if c is None or "j" in leaves(c)}


def weight_of(v: Variant) -> Expr | None:
    """What a key's weight is multiplied by where it meets v, in a variant that fold_vectors made; None: by nothing, or
    f_v is something else."""
    factor = factor_of(v.f_v, "v")
    return None if factor == ONE else factor


def times(e: Expr, names: tuple[str, ...], factor: Expr) -> Expr:
    """`e` with name * factor for each leaf of these names."""
    return transform(e, lambda x: make("mul", x, factor) if isinstance(x, Leaf) and x.name in names else x)


def factor_of(e: Expr, vector: str) -> Expr | None:
    """The scalar c where the vector `e` is `vector` times c; None where it is anything else."""
    known: dict[int, Expr | None] = {}
    for x in objects(e):
        known[id(x)] = _factor(x, vector, known)
    return known[id(e)]


def _factor(x: Expr, vector: str, known: dict[int, Expr | None]) -> Expr | None:
    if x == Leaf(vector):
        return ONE
    if not isinstance(x, Op) or x.type.space is None:
        return None
    parts = [known[id(a)] for a in x.args]
    match x.op, x.args, parts:
        case "neg", _, [c] if c is not None:
            return make("neg", c, span=x.span)
        case "mul", (a, b), [c, d]:
            for by, rest in ((b, c), (a, d)):
                if rest is not None and is_scalar(by):
                    return by if rest == ONE else make("mul", rest, by, span=x.span)
        case "div", (_, by), [c, _] if c is not None and is_scalar(by):
            return make("div", c, by, span=x.span)
        case "select", (when, _, _), [_, c, d] if c is not None and d is not None and is_scalar(when):
            return make("select", when, c, d, span=x.span)
    return None


def is_scalar(e: Expr) -> bool:
    """One value for all features, that needs none of them."""
    return not any(x.type.space is not None for x in objects(e))


def apart(e: Expr) -> tuple[Expr, Expr]:
    """(c, rest), where the vector `e` is c times `rest`: c is all that is found of what a row multiplies each of its
    features by and other rows do not share; 1.0 where there is nothing."""
    known: dict[int, tuple[Expr, Expr]] = {}
    for x in objects(e):
        known[id(x)] = _apart(x, known)
    return known[id(e)]


def _apart(x: Expr, known: dict[int, tuple[Expr, Expr]]) -> tuple[Expr, Expr]:
    if x.type.space is None:
        return (x, ONE) if of_row(x) else (ONE, x)
    match x:
        case Rope():
            c, rest = known[id(x.x)]
            found = c, replace(x, x=rest)
        case Op("neg", (a,)):
            c, rest = known[id(a)]
            found = c, make("neg", rest, span=x.span)
        case Op("mul", (a, b)):
            (c, rest), (d, other) = known[id(a)], known[id(b)]
            found = product(c, d, x), product(rest, other, x)
        case Op("div", (a, b)):
            (c, rest), (d, other) = known[id(a)], known[id(b)]
            by_row = other == ONE
            found = (make("div", c, d), rest) if by_row else (c, make("div", rest, b, span=x.span))
        case _:
            return ONE, x
    return (ONE, x) if found[0] == ONE else found


def product(a: Expr, b: Expr, x: Expr) -> Expr:
    return b if a == ONE else a if b == ONE else make("mul", a, b, span=x.span)


def of_row(e: Expr) -> bool:
    """One value for all features, which rows of keys do not share, and for which nothing is turned."""
    parts = list(walk(e))
    own = "j" in leaves(e) or any(isinstance(x, Op) and x.op == "sum" for x in parts)
    return e.type.space is None and own and not any(isinstance(x, Rope) for x in parts)
