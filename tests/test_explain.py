"""`attncc explain`: the text and the picture of a mask's tiles."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from attncc import frontend
from attncc.diagnostics import Source
from attncc.explain import explain
from attncc.ir.nodes import Variant
from attncc.runtime import routes

EXAMPLES = Path(__file__).parent.parent / "examples"


def variant(body: str, scalars: str = "") -> Variant:
    return frontend.load(Source("test.attn", f"attention under_test({scalars}):\n{body}"))[0]


def test_text():
    v = variant("    mask = i - window < j <= i\n", "window: i32")
    assert (
        explain(v, 8, 8, 2, 2, {"window": 4}).text()
        == """\
under_test: 8 queries x 8 keys in 4 x 4 tiles of 2 x 2
  mask = i - window < j <= i
  window = 4

  ▒···
  █▒··
  ▒█▒·
  ·▒█▒

  · empty  ▒ partial  █ full   (a character: a tile; rows: queries, columns: keys)

  empty            7   43.8%  skipped
  full             3   18.8%  no mask code
  partial          6   37.5%  run mask code
  skipped: 43.8% of the work; of the tiles computed, 66.7% run mask code

  the whole mask was analysed
  each row sees one run of keys: the kernel loops over its tiles and tests none
"""
    )


def test_what_transformed_keys_cost():
    """A row reads each key once; a row of 4096 tiles, half of them hidden, sixteen times and a half."""
    body = "    f_k = rope(k, j)\n    mask = j <= i\n"
    few = explain(variant(body), 1, 1000).text()
    assert "f_k: each key is read 1.0 times a query head" in few and "keys go through the kernel;" in few
    many = explain(variant(body), 4096, 4096).text()
    assert "f_k: each key is read 16.5 times a query head" in many and "keys go through a pre-pass;" in many
    assert "of 128 features for 32 heads over 8 and batch 1 on 132 SMs: " in many
    assert "f_k: each key is read 1.0 times a query head" in explain(variant(body), 1, 5).text()  # of a tile of 128
    assert "pre-pass" not in explain(variant("    f_k = k * 2.0\n    f_v = v / f32(kv_len)\n"), 4096, 4096).text()
    assert "f_k and f_v: each" in explain(variant("    f_k = l2norm(k)\n    f_v = v * v\n"), 8, 8).text()


def test_factors_cost_less_in_the_kernel():
    body = "    f_k = rope(k, j)\n    f_v = v * f32(j)\n    mask = j <= i\n"
    assert "f_k and f_v (a factor): each key" in explain(variant(body), 8, 8).text()
    factors = variant("    f_k = -k * f32(j)\n    f_v = v * f32(j)\n    mask = j <= i\n")
    for length, way in ((1024, "have them in scores and weights"), (4096, "are multiplied once, by the kernel")):
        assert f"dense or ragged keys {way}" in explain(factors, length, length).text()
    assert "keys go through a pre-pass;" in explain(variant(body), 1024, 1024).text()


def test_costs_are_those_that_a_call_counts():
    """Blocks that a tile of queries can see, with these scalars; const ones are those of the build."""
    window = "    f_k = rope(k, j)\n    mask = i - w < j <= i\n"
    for arguments in ("w: i32", "w: const i32 = 4000"):
        found = variant(window, arguments)
        near, far = (explain(found, 256, 8192, values={"w": w}) for w in (128, 8192))
        assert "f_k: each key is read 0.1 times" in near.text() and "keys go through the kernel;" in near.text()
        assert "f_k: each key is read 2.0 times" in far.text() and "keys go through a pre-pass;" in far.text()
        reads = routes.dense_reads((128, 128), 1, 256, 8192, 32, lambda i0, i1, *_: (i0 - 127, i1 + 1))
        c = routes.costs(keys=8 * 8192, reads=reads, features=128, sm_count=132)
        assert f"{1e6 * c.fused:.1f} µs in the kernel, {1e6 * c.prepass:.1f} µs by a pre-pass" in near.text()


def test_large_map_is_cut_down():
    e = explain(variant("    mask = j <= i\n"), 32768, 32768)
    assert e.classes.shape == (256, 256)
    assert e.counts == {"empty": 256 * 255 // 2, "full": 256 * 255 // 2, "partial": 256}
    assert e.skipped == pytest.approx(255 / 512) and e.masked == pytest.approx(2 / 257)
    lines = e.text().splitlines()
    assert max(map(len, lines)) < 100 and len(lines) < 50
    assert "  " + "█" * 62 + "▒▒" in lines and "  ▒▒" + "·" * 62 in lines
    assert "(a character: 8 x 4 tiles;" in e.text()


@pytest.mark.parametrize("qo_len, kv_len", [(1, 100_000), (100_000, 1), (300, 5000), (5000, 300), (1, 1)])
def test_map_of_any_shape_fits(qo_len, kv_len):
    lines = explain(variant("    mask = j <= i\n"), qo_len, kv_len).text().splitlines()
    shown = [line for line in lines if line.strip() and set(line.strip()) <= set("·▒█")]
    assert 1 <= len(shown) <= 32 and max(map(len, shown)) <= 66


def test_scalars_that_are_not_given():
    v = variant("    mask = i - window < j <= i + ahead\n", "window: i32, ahead: i32 = 3, other: f32")
    e = explain(v, 64, 64, 8, 8)
    assert e.values["window"] == 8 and e.values["ahead"] == 3
    assert "window = 8   (assumed; --set window=VALUE)\n  ahead = 3\n" in e.text()
    assert "other" not in e.text()
    assert "assumed" not in explain(v, 64, 64, 8, 8, {"window": 8}).text()


def test_tensors_that_are_not_given():
    v = variant("    tensor doc[b, pos]: i32 sorted\n    mask = j <= i and doc[b, i] == doc[b, j]\n")
    e = explain(v, 4, 4, 2, 2)
    assert e.counts == {"empty": 1, "full": 0, "partial": 3}
    assert "tensor doc: not given" in e.text() and "doc[b, i] == doc[b, j]" in e.text().split("unknown")[1]
    e = explain(v, 4, 4, 2, 2, {"doc": np.array([[0, 0, 1, 1]])})
    assert e.counts == {"empty": 2, "full": 0, "partial": 2}
    assert "the whole mask was analysed" in e.text() and "tests each tile" in e.text()


def test_what_is_not_understood_is_shown_as_it_is_written():
    v = variant("    tensor words[iq, w]: u32\n    mask = j <= i and bit(words[iq, j // 32], j % 32)\n")
    text = explain(v, 64, 64, 16, 16, {"words": np.zeros((64, 2), int)}).text()
    assert "does not know (counted as partial where it decides):\n    bit(words[iq, j // 32], j % 32)\n" in text
    assert "loops over one run of tiles" in text


def test_picture(tmp_path):
    path = tmp_path / "tiles.png"
    explain(variant("    mask = j <= i\n"), 1000, 1500).png(str(path))
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) > 5000


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"qo_len": 0}, "qo_len: expected at least 1, found 0"),
        ({"tile_kv": -1}, "tile_kv: expected at least 1, found -1"),
        ({"values": {"windw": 3}}, "windw: no scalar or tensor of under_test; there is: doc, window"),
        ({"values": {"doc": [[0, 1]]}}, "doc: index .* of dimension 1, which has 2"),
    ],
)
def test_bad_input(arguments, message):
    v = variant("    tensor doc[b, pos]: i32 sorted\n    mask = i - window < j <= doc[b, i]\n", "window: i32")
    with pytest.raises(ValueError, match=message):
        explain(v, **{"qo_len": 8, "kv_len": 8, "tile_q": 4, "tile_kv": 4} | arguments)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.attn")), ids=lambda p: p.stem)
def test_every_example_is_explained(path):
    for v in frontend.load(Source.read(path)):
        e = explain(v, 512, 512, 64, 64)
        assert sum(e.counts.values()) == 64
        assert v.name in e.text()


def test_nothing_heavy_is_imported():
    code = "import sys, attncc.explain; print(sorted({'torch', 'cutlass', 'matplotlib', 'numpy'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
