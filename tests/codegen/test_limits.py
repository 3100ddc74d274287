"""The table of what kernels can't honour: every entry applies somewhere, and only where it says."""

from __future__ import annotations

import pytest

from attncc import compiler
from attncc.codegen.limits import LIMITS, as_table, refused
from attncc.diagnostics import Source
from attncc.ir.nodes import EXPR_SLOTS, Variant

# for each entry of the table a body that breaks it, and nothing else
BREAKS = {
    ("domain", "lists found through a tensor over `j`"): (
        "tensor sel[n, 4]: i32\n    tensor which[j]: i32\n    domain = blocks(sel[which[max(i, 0)], :], size = 64)"
    ),
    ("emit", "an index `j`"): "emit column[j, h] = max(l)",
    ("emit", "`lse` in the value"): "emit peak[iq, h] = max(l - lse)",
    ("rope", "a `theta` or `scaling` that rows, heads or requests differ in"): "epilogue = rope(o, i, f32(kv_len))",
}


def variant(body: str) -> Variant:
    """As kernels get it."""
    (found,) = compiler.variants(Source("x.attn", f"attention x():\n    {body}\n    mask = j <= i\n"))
    return compiler.for_kernels(found)


def test_every_entry_is_broken_here() -> None:
    assert {(x.slot, x.what) for x in LIMITS} == set(BREAKS)
    assert len(LIMITS) == len(BREAKS)


@pytest.mark.parametrize("limit", LIMITS, ids=lambda x: f"{x.slot}: {x.what}")
@pytest.mark.parametrize("layout", compiler.LAYOUTS)
def test_an_entry_is_said_once_with_its_line(limit, layout: str) -> None:
    body = BREAKS[limit.slot, limit.what]
    found = refused(variant(body), layout)
    if limit.layouts and layout not in limit.layouts:
        assert found == []
        return
    (one,) = found
    assert one.span.line == 2 + body.count("\n") and one.hint == limit.hint
    assert "{" not in one.message and "attncc.reference" in limit.hint


def test_what_kernels_can_do_breaks_none() -> None:
    body = (
        "scale = 0.5\n    f_logits = softcap(s, 5.0)\n    scan = softmax(sink = 1.0)\n    emit a[h] = sum(l)\n"
        "    epilogue = o * sum(o * o)"
    )
    body += "\n    f_q = q * 2.0\n    f_k = -k\n    f_v = v / f32(j + 1)"
    body += "\n    tensor sel[iq, g, 4]: i32\n    domain = blocks(sel[iq, g, :], size = 64)"
    assert all(refused(variant(body), layout) == [] for layout in compiler.LAYOUTS)


def test_entries_are_worded_for_a_table() -> None:
    slots = {*EXPR_SLOTS, "scan", "domain", "emit", "rope"}
    for x in LIMITS:
        assert x.slot in slots and set(x.layouts) <= set(compiler.LAYOUTS)
        assert not {"|", "\n"} & set(x.what + x.instead)
    assert len(as_table().splitlines()) == 2 + len(LIMITS)
