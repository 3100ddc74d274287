"""What kernels can't honour of a variant, as data: each limit says where it stands and what works instead.

`compiler.refuse` reports every one that applies; README.md shows the table (`as_table`).  A slot that kernels learn
loses its entry here, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from attncc.diagnostics import Diagnostic, Source, Span
from attncc.ir.nodes import Load, Variant, leaves, walk

from .vectors import own_names, ropes

Found = tuple[Span, str]  # where, and the name that the message puts there
REFERENCE = "attncc.reference(…) computes it"


@dataclass(frozen=True)
class Limit:
    """`what` a slot or function can't say in kernels of `layouts` (none: of any), as the README words it.  `found`:
    each place in a variant as compiler.for_kernels leaves it; `message` is formatted with the name found there;
    `instead`: the nearest thing that works, beside the reference."""

    slot: str
    what: str
    found: Callable[[Variant], Iterator[Found]]
    message: str
    instead: str = ""
    layouts: tuple[str, ...] = ()

    @property
    def hint(self) -> str:
        return f"nearest: {self.instead}, or {REFERENCE}" if self.instead else f"nearest: {REFERENCE}"


def lists_over_keys(v: Variant) -> Iterator[Found]:
    """A domain whose lists are found through a tensor over j: where that lies, only an item of attention knows."""
    if v.domain is None:
        return
    read = {x.tensor for e in v.domain.index if e is not None for x in walk(e) if isinstance(x, Load)}
    for t in v.tensors:
        if "j" in t.dims and t.name in {*read, v.domain.tensor}:
            yield v.domain.span, t.name


def kept_keys(v: Variant) -> Iterator[Found]:
    yield from ((emit.span, emit.name) for emit in v.emits if "j" in emit.index)


def emitted_lse(v: Variant) -> Iterator[Found]:
    yield from ((emit.span, emit.name) for emit in v.emits if "lse" in leaves(emit.value))


def untabulated(v: Variant) -> Iterator[Found]:
    yield from ((x.span, ", ".join(names)) for x in ropes(v) if (names := own_names(x)))


LIMITS: tuple[Limit, ...] = (
    Limit("domain", "lists found through a tensor over `j`", lists_over_keys,
          "kernels over pages, rows and blocks can't find lists through {}, a tensor over j", "a tensor over `pos`",
          ("ragged", "paged", "blocks")),
    Limit("emit", "an index `j`", kept_keys, "kernels can't keep a value for every key (emit {})",
          "leave j out of the index"),
    Limit("emit", "`lse` in the value", emitted_lse, "kernels know lse only after the last key (emit {})",
          "emit what l alone gives, and apply the call's lse to it"),
    Limit("rope", "a `theta` or `scaling` that rows, heads or requests differ in", untabulated,
          "kernels can't tabulate frequencies that depend on {}", "give `cos =` and `sin =` tables"),
)  # fmt: skip


def refused(variant: Variant, layout: str) -> list[Diagnostic]:
    """Every part of a variant, as compiler.for_kernels leaves it, that kernels of this layout can't honour, and where
    it stands."""
    src = variant.source or Source(variant.name, "")
    return [
        Diagnostic(limit.message.format(name), src, span, limit.hint)
        for limit in LIMITS
        if not limit.layouts or layout in limit.layouts
        for span, name in limit.found(variant)
    ]


def as_table() -> str:
    """The README's table."""
    rows = [(f"`{x.slot}`", x.what, ", ".join(x.layouts) or "any", x.instead or "the reference") for x in LIMITS]
    return "\n".join(f"| {' | '.join(row)} |" for row in (("slot", "what", "layouts", "instead"), ("---",) * 4, *rows))


if __name__ == "__main__":  # the table between the README's markers
    print(as_table())
