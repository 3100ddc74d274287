"""The launch that turns a domain's lists into bits: what it is given, and what attention is given of it."""

from __future__ import annotations

import ctypes

import pytest
import torch
from fake_driver import FakeDriver, artifact, served_artifact, with_lists

from attncc.runtime import listing
from attncc.runtime.batch import BatchAttention
from attncc.runtime.kernel import Kernel

BF16, I32 = torch.bfloat16, torch.int32
SELECTED = [("selected", ["iq", "g", "top"], "i32")]


@pytest.fixture
def driver():
    return FakeDriver(sms=4)


def rows(*shape):
    return torch.zeros(*shape, dtype=BF16)


def dense(driver, by="g", block=64, dims=("iq", "g", "top"), scalars=()):
    made = artifact(tensors=[("selected", list(dims), "i32")], scalars=scalars)
    return Kernel(with_lists(made, "selected", by, block), driver)


def strides(values):
    return [values[f"t.domain.stride.{k}"] for k in range(sum(f"t.domain.stride.{k}" in values for k in range(4)))]


@pytest.mark.parametrize("by, lines", [("g", 2), ("h", 8), ("row", 1)])
def test_two_launches_of_a_dense_call(driver, by, lines):
    q, k, v = rows(3, 70, 8, 128), rows(3, 5000, 2, 128), rows(3, 5000, 2, 128)
    lists = torch.zeros(3, 70, 2, 16, dtype=I32)
    driver.stream[0] = 77
    dense(driver, by)(q, k, v, selected=lists)
    first, second = driver.launches
    assert [x.function[2]["cubin"] for x in (first, second)] == ["listing.cubin", "forward.cubin"]
    assert first.stream == second.stream == 77
    given, main = first.values, second.values
    words = 3  # 79 blocks
    assert (given["rows"], given["lines"], given["words"], given["team"]) == (210, lines, words, words)
    assert (given["qo_len"], given["kv_len"], given["group_size"]) == (70, 5000, 4)
    assert first.grid == -(-210 * lines * words // 256)
    assert given["t.selected"] == lists.data_ptr() and given["t.selected.stride.1"] == 32
    assert given["t.domain"] == main["t.domain"] != 0
    one = 0 if lines == 1 else words  # of one element no index reads the stride
    assert strides(given) == strides(main) == [70 * lines * words, lines * words, one, 1]
    assert main["t.domain.size.3"] == words


@pytest.mark.parametrize("heads, kv_heads, most, shift", [
    (8, 2, 16, 2), (8, 1, 16, 3), (32, 1, 16, 4), (12, 1, 16, 2), (6, 1, 16, 1), (3, 1, 16, 0), (2, 2, 16, 0),
    (8, 1, 4, 2), (8, 1, 1, 0),
])  # fmt: skip
def test_tiles_of_several_heads(driver, heads, kv_heads, most, shift):
    """As many heads as the kernel allows, of a power of two that divides a group; boxes and counts follow."""
    made = artifact(tensors=[("selected", ["iq", "g", "top"], "i32")], packs=most)
    q, k, v = rows(3, 70, heads, 128), rows(3, 500, kv_heads, 128), rows(3, 500, kv_heads, 128)
    kernel = Kernel(with_lists(made, "selected", "g", 64), driver)
    kernel(q, k, v, selected=torch.zeros(3, 70, kv_heads, 4, dtype=I32))
    values, tiles = driver.launches[1].values, -(-70 // (128 >> shift))
    assert values.get("pack_shift", 0) == shift
    assert (values["num_tiles_q"], values["num_heads_batch"]) == (tiles, 3 * heads)
    assert driver.launches[1].grid == min(4, tiles * 3 * heads >> shift)
    boxes = {tuple(x.box) for x in driver.encoded}
    assert boxes == {(64, 64 >> shift, 1 << shift, 1), (64, 64, 1, 1)}


def test_a_block_that_a_scalar_says(driver):
    kernel = dense(driver, block="size", scalars=[("size", "i32", None)])
    x = (rows(1, 4, 2, 128), rows(1, 1000, 2, 128), rows(1, 1000, 2, 128))
    lists = torch.zeros(1, 4, 2, 3, dtype=I32)
    for size, words in ((1, 32), (10, 4), (32, 1), (10, 4), (2**31 - 1, 1)):
        kernel(*x, selected=lists, size=size)
        given, main = (launch.values for launch in driver.launches[-2:])
        assert (given["s.size"], given["words"], given["team"]) == (size, words, min(words, 32))
        assert strides(main)[1] == 2 * words
    for size in (0, -5):
        with pytest.raises(ValueError, match=rf"size: expected at least 1, the keys of a block .*, found {size}"):
            kernel(*x, selected=lists, size=size)
    assert len(driver.launches) == 10


def test_calls_without_keys_or_rows(driver):
    kernel = dense(driver)
    lists = torch.zeros(1, 4, 2, 3, dtype=I32)
    kernel(rows(1, 4, 2, 128), rows(1, 0, 2, 128), rows(1, 0, 2, 128), selected=lists)
    assert [x.values["words"] for x in driver.launches[:1]] == [1] and len(driver.launches) == 2
    kernel(rows(1, 0, 2, 128), rows(1, 9, 2, 128), rows(1, 9, 2, 128), selected=lists[:, :0])
    assert len(driver.launches) == 2


@pytest.mark.parametrize("lists, error, message", [
    (torch.zeros(1, 4, 2, 3), TypeError, "selected: expected dtype int32, found float32"),
    (torch.zeros(1, 4, 2, 3, dtype=torch.int64), TypeError, "selected: expected dtype int32, found int64"),
    (torch.zeros(1, 5, 2, 3, dtype=I32), ValueError, r"selected: expected shape .* = \[1, 4, 2, any\]"),
    (torch.zeros(1, 4, 1, 3, dtype=I32), ValueError, r"selected: expected shape .* found shape \[1, 4, 1, 3\]"),
    (torch.zeros(1, 4, 2, dtype=I32), ValueError, "selected: expected shape"),
    ([[0]], TypeError, "selected: expected a torch.Tensor, found list"),
    (None, TypeError, "selected: expected a torch.Tensor, found NoneType"),
])  # fmt: skip
def test_lists_that_do_not_fit(driver, lists, error, message):
    with pytest.raises(error, match=message):
        dense(driver)(rows(1, 4, 2, 128), rows(1, 9, 2, 128), rows(1, 9, 2, 128), selected=lists)
    assert not driver.launches


def test_lists_are_needed(driver):
    with pytest.raises(TypeError, match=r"missing parameter selected\[iq, g, top\]: i32"):
        dense(driver)(rows(1, 4, 2, 128), rows(1, 9, 2, 128), rows(1, 9, 2, 128))


def test_more_bits_than_kernels_count(driver, monkeypatch):
    monkeypatch.setattr(listing, "I32_MAX", 1000)
    with pytest.raises(
        ValueError, match="selected: expected lists whose bits take fewer than 2³¹ words, found 8 lines"
    ):
        dense(driver, block=1)(
            rows(1, 4, 2, 128), rows(1, 9000, 2, 128), rows(1, 9000, 2, 128),
            selected=torch.zeros(1, 4, 2, 3, dtype=I32),
        )  # fmt: skip


# ---------------------------------------------------------------------- served batches

TABLE = ([0, 1, 1, 6], [0, 3, 4, 6], [7, 2, 9, 4, 0, 5, -1, -1], [16, 1, 3])  # kv_len 48, 1, 19


def served(driver, page_size=16, block=4, **options):
    made = with_lists(served_artifact(page_size=page_size, tensors=SELECTED), "selected", "g", block)
    given = {"max_batch_size": 8, "max_qo_rows": 512, "device": "cpu", **options}
    return BatchAttention(Kernel(made, driver), num_qo_heads=8, num_kv_heads=2, page_size=page_size, **given)


def ints(address, count):
    return list((ctypes.c_int32 * count).from_address(address))


def test_two_launches_of_a_run(driver):
    attn, lists = served(driver), torch.zeros(6, 2, 16, dtype=I32)
    attn.plan(*TABLE)
    attn.run(rows(6, 8, 128), (rows(10, 16, 2, 128), rows(10, 16, 2, 128)), selected=lists)
    first, second = driver.launches
    given, main = first.values, second.values
    assert [x.function[2]["cubin"] for x in (first, second)] == ["listing.cubin", "serve.cubin"]
    assert (given["rows"], given["lines"], given["words"]) == (6, 2, 1)
    assert given["t.domain"] == main["t.domain"] and strides(main) == [2, 1, 0]
    assert all(given[n] == main[n] for n in ("header", "row_request", "requests"))
    assert ints(given["header"], 3)[2] == 6
    assert ints(given["row_request"], 6) == [0, 2, 2, 2, 2, 2]
    assert ints(given["requests"], 12) == [0, 1, 48, 0, 1, 0, 1, 0, 1, 5, 19, 0]


def test_rows_of_a_cascade_have_the_keys_of_all_levels(driver):
    attn = served(driver, None)
    attn.plan_cascade([([0, 2], [0, 100]), ([0, 1, 2], [100, 105, 105])])
    attn.run(rows(2, 8, 128), (rows(105, 2, 128), rows(105, 2, 128)), selected=torch.zeros(2, 2, 3, dtype=I32))
    assert ints(driver.launches[0].values["requests"], 8) == [0, 1, 105, 0, 1, 1, 100, 0]
    attn.plan_cascade([([0, 1, 2], [0, 50, 80]), ([0, 1, 2], [80, 85, 85])])  # nothing is shared
    attn.run(rows(2, 8, 128), (rows(105, 2, 128), rows(105, 2, 128)), selected=torch.zeros(2, 2, 3, dtype=I32))
    assert ints(driver.launches[2].values["requests"], 8) == [0, 1, 55, 0, 1, 1, 30, 0]


def test_lines_are_as_long_as_the_plan_needs(driver):
    attn = served(driver)
    lists, kv = torch.zeros(1, 2, 3, dtype=I32), (rows(100, 16, 2, 128), rows(100, 16, 2, 128))
    for keys in (5, 128, 129, 1600, 5):
        pages = -(-keys // 16)
        attn.plan([0, 1], [0, pages], list(range(pages)), [(keys - 1) % 16 + 1])
        attn.run(rows(1, 8, 128), kv, selected=lists)
        assert driver.launches[-1].values["t.domain.size.2"] == -(-keys // 128)


def test_a_graph_has_room_for_requests_that_grow(driver, monkeypatch):
    """For all keys of the cache where that is little, else for what its plan needs; later plans are held to it."""
    lists, kv = torch.zeros(1, 2, 3, dtype=I32), (rows(100, 16, 2, 128), rows(100, 16, 2, 128))

    def capture(attn):
        attn.plan([0, 1], [0, 9], list(range(9)), [2])  # 130 keys
        driver.capturing = {0}
        attn.run(rows(1, 8, 128), kv, selected=lists)
        driver.capturing = set()
        return driver.launches[-1].values["t.domain.size.2"]

    attn = served(driver)
    assert capture(attn) == 13  # 1600 keys
    attn.plan([0, 1], [0, 100], list(range(100)), [16])
    monkeypatch.setattr(listing, "CAPTURED_BYTES", 2 * 4 * 3)
    attn = served(driver)
    assert capture(attn) == 3  # 384 keys
    attn.plan([0, 1], [0, 24], list(range(24)), [16])
    with pytest.raises(
        ValueError, match=r"domain: expected at least 385 positions, .* found 384; a captured run holds"
    ):
        attn.plan([0, 1], [0, 25], list(range(25)), [1])
    monkeypatch.setattr(listing, "CAPTURED_BYTES", 0)
    assert capture(served(driver)) == 2  # 256 keys: never less than the plan needs


def test_a_block_sparse_plan(driver):
    made = {
        blocks: with_lists(
            served_artifact(page_size=16, tensors=SELECTED, blocks=blocks, source="gather"), "selected", "g", 64
        )
        for blocks in (False, True)
    }
    kernel = Kernel(made[False], driver, build=lambda layout, size: made[layout == "blocks"])
    attn = BatchAttention(kernel, num_qo_heads=8, num_kv_heads=2, page_size=16, max_batch_size=8, max_qo_rows=64,
                          device="cpu")  # fmt: skip
    attn.plan_block_sparse([0, 2, 3], [0, 5, 1], block_rows=4, block_cols=16, kv_len=90)
    attn.run(rows(8, 8, 128), (rows(90, 2, 128), rows(90, 2, 128)), selected=torch.zeros(8, 2, 3, dtype=I32))
    given = driver.launches[0].values
    assert ints(given["row_request"], 8) == [0] * 8 and ints(given["requests"], 4) == [0, 8, 90, 0]


def test_an_artifact_must_have_both_kernels(driver):
    whole = with_lists(artifact(tensors=SELECTED), "selected")
    for name in ("listing", "forward"):
        rest = {n: k for n, k in whole.manifest["kernels"].items() if n != name}
        with pytest.raises(ValueError, match="not a kind of kernel that this attncc runs"):
            Kernel(type(whole)({**whole.manifest, "kernels": rest}, whole.cubins, whole.path), driver)
    manifest = {n: x for n, x in whole.manifest.items() if n != "domain"}
    with pytest.raises(ValueError, match="not a kind of kernel that this attncc runs"):
        Kernel(type(whole)(manifest, whole.cubins, whole.path), driver)
