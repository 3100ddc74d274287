"""BatchAttention over a recording driver: what a launch finds in memory after a plan, and what a run passes on."""

from __future__ import annotations

import ctypes
import time

import numpy as np
import pytest
import torch
from fake_driver import FakeDriver, artifact, served_artifact

from attncc.runtime import plan as planning
from attncc.runtime import serving_arguments as serving
from attncc.runtime.batch import BatchAttention
from attncc.runtime.kernel import Kernel

BF16 = torch.bfloat16
CAUSAL = {"lo": None, "hi": ["add", ["leaf", "i1"], ["const", 1]]}
WINDOW = {
    "lo": ["add", ["sub", ["leaf", "i0"], ["param", "window"]], ["const", 1]],
    "hi": ["add", ["leaf", "i1"], ["const", 1]],
}


@pytest.fixture
def driver():
    return FakeDriver(sms=4)


def attention(driver, page_size: int | None = 16, heads=(8, 2), kernel=None, other=None, **options):
    named = {
        name: options.pop(name)
        for name in ("scalars", "tensors", "visible", "source", "scan", "positions", "emits")
        if name in options
    }
    kernel = kernel or Kernel(served_artifact(page_size=page_size, **named), driver)
    given = {"max_batch_size": 8, "max_qo_rows": 512, "device": "cpu", "driver": other, **options}
    return BatchAttention(kernel, num_qo_heads=heads[0], num_kv_heads=heads[1], page_size=page_size, **given)


def rows(*shape):
    return torch.randn(*shape).to(BF16)


def ints(address, *shape):
    count = int(np.prod(shape))
    return np.array((ctypes.c_int32 * count).from_address(address)).reshape(shape) if count else np.zeros(shape, int)


def plan_of(values):
    """(items, targets' first word, page ids of every item) as a kernel would find them."""
    tickets, lanes, *_ = ints(values["header"], 4)
    items = ints(values["items"], tickets // lanes, planning.ITEM)
    size = values["page_size"]
    pages = [
        ints(values["kv_indices"] + 4 * int(x[planning.TABLE]), -(-int(x[planning.KEYS]) // size)) if size else x[:0]
        for x in items
    ]
    return items, pages


TABLE = ([0, 1, 1, 6], [0, 3, 4, 6], [7, 2, 9, 4, 0, 5, -1, -1], [16, 1, 3])  # kv_len 48, 1, 19


# ---------------------------------------------------------------------- plan and run


def test_what_a_launch_finds(driver):
    attn = attention(driver)
    q, k, v = rows(6, 8, 128), rows(10, 16, 2, 128), rows(10, 16, 2, 128)
    seen = []
    driver.on_launch = lambda values: seen.append(plan_of(values))
    attn.plan(*TABLE)
    out, lse = attn.run(q, (k, v), return_lse=True)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((6, 8, 128), BF16, (6, 8), torch.float32)
    (launch,) = driver.launches
    values = launch.values
    assert launch.grid == 4
    assert (values["q"], values["out"], values["lse"]) == (q.data_ptr(), out.data_ptr(), lse.data_ptr())
    assert (values["map_k"][0], values["map_v"][0]) == (k.data_ptr(), v.data_ptr())
    assert {n: values[n] for n in ("num_qo_heads", "num_kv_heads", "group_size", "page_size")} == {
        "num_qo_heads": 8, "num_kv_heads": 2, "group_size": 4, "page_size": 16,
    }  # fmt: skip
    assert (values["q_row_stride"], values["q_head_stride"]) == (8 * 128, 128)
    assert (values["out_row_stride"], values["out_head_stride"]) == (8 * 128, 128)
    assert driver.encoded[0].dims == (128, 16, 2, 10)
    assert driver.encoded[0].strides == (2 * 128 * 2, 128 * 2, 16 * 2 * 128 * 2)
    ((items, pages),) = seen
    assert sorted(items[:, planning.REQUEST]) == [0, 2]  # the second has no row
    for item, ids in zip(items, pages, strict=True):
        assert ids.tolist() == ([7, 2, 9] if item[planning.REQUEST] == 0 else [0, 5])
        assert item[planning.KEYS] == (48 if item[planning.REQUEST] == 0 else 19)
    assert ints(values["tickets"], 2).tolist() == [0, 0]
    assert len({values[n] for n in ("header", "items", "targets", "sources", "part_o", "part_lse", "counters")}) == 7


@pytest.mark.parametrize("make", [
    lambda x: torch.tensor(x, dtype=torch.int32), lambda x: torch.tensor(x), lambda x: np.array(x, np.int32),
    lambda x: torch.tensor([x, x]).t()[:, 1], lambda x: np.array([x, x]).T[:, 0], tuple,
])  # fmt: skip
def test_indices_of_any_kind_make_the_same_plan(driver, make):
    found = []
    driver.on_launch = lambda values: found.append(plan_of(values))
    attn = attention(driver)
    q, kv = rows(6, 8, 128), (rows(10, 16, 2, 128), rows(10, 16, 2, 128))
    for table in (TABLE, [make(x) for x in TABLE]):
        attn.plan(*table)
        attn.run(q, kv)
    (items, pages), (other, same) = found
    assert (items == other).all()
    assert [x.tolist() for x in pages] == [x.tolist() for x in same]


def test_addresses_stay_and_plans_change(driver):
    attn = attention(driver)
    seen = []
    driver.on_launch = lambda values: seen.append((plan_of(values)[0][:, planning.KEYS].tolist(), values))
    k = rows(40, 16, 2, 128)
    for n in range(1, 8):
        attn.plan([0, 1], [0, n], list(range(n)), [5])
        attn.run(rows(1, 8, 128), (k, k))
    assert [x for x, _ in seen] == [[16 * (n - 1) + 5] for n in range(1, 8)]
    fixed = ("header", "items", "targets", "sources", "requests", "row_request", "kv_indices", "part_o", "counters")
    assert all(len({values[name] for _, values in seen}) == 1 for name in fixed)


def test_a_gathering_kernel_gets_strides_in_units_of_16_bytes(driver):
    attn = attention(driver, page_size=5, source="gather")
    combined = rows(10, 2, 2, 5, 128).transpose(2, 3)  # HND pages, K and V of a page together
    k, v = combined[:, 0], rows(10, 5, 2, 128)
    attn.plan([0, 1], [0, 2], [3, 9], [2])
    attn.run(rows(1, 8, 128), (k, v))
    values = driver.launches[0].values
    assert (values["k"], values["v"]) == (k.data_ptr(), v.data_ptr())
    assert [values[f"k_{x}_stride"] for x in ("page", "row", "head")] == [2 * 2 * 5 * 16, 16, 5 * 16]
    assert [values[f"v_{x}_stride"] for x in ("page", "row", "head")] == [2 * 5 * 16, 2 * 16, 16]


def test_counts_may_be_numpy_integers(driver):
    attn = attention(driver, page_size=np.int64(16), heads=(np.int64(8), np.int32(2)), max_qo_rows=np.int64(64))
    attn.plan(*TABLE)
    k = rows(10, 16, 2, 128)
    attn.run(rows(6, 8, 128), (k, k))
    assert driver.launches[0].values["group_size"] == 4


def test_ragged_keys(driver):
    attn = attention(driver, page_size=None, tensors=[("bias", ["j", "g"], "f32"), ("w", ["iq", "h"], "f32")])
    k, bias, w = rows(90, 2, 128), torch.zeros(90, 2), torch.zeros(7, 8)
    attn.plan([0, 2, 7], [0, 60, 90])
    seen = []
    driver.on_launch = lambda values: seen.append(plan_of(values)[0])
    attn.run(rows(7, 8, 128), (k, k), bias=bias, w=w)
    values = driver.launches[0].values
    assert values["page_size"] == 0
    assert driver.encoded[0].dims == (128, 90, 2, 1)
    assert [values[f"t.bias.size.{n}"] for n in range(3)] == [1, 90, 2]
    assert [values[f"t.bias.stride.{n}"] for n in range(3)] == [0, 2, 1]
    assert [values[f"t.w.size.{n}"] for n in range(2)] == [7, 8]
    starts = {int(x[planning.REQUEST]): int(x[planning.TABLE]) for x in seen[0]}
    assert starts == {0: 0, 1: 60}


def test_paged_tensors_over_keys_lie_as_the_caches(driver):
    attn = attention(driver, tensors=[("bias", ["j", "g"], "f32")])
    k, bias = rows(10, 16, 2, 128), torch.zeros(10, 16, 2)
    attn.plan([0, 1], [0, 1], [9], [1])
    attn.run(rows(1, 8, 128), (k, k), bias=bias)
    assert [driver.launches[0].values[f"t.bias.stride.{n}"] for n in range(3)] == [32, 2, 1]
    with pytest.raises(ValueError, match=r"bias: expected shape \[num_pages, page_size, g\] = \[10, 16, 2\], found"):
        attn.run(rows(1, 8, 128), (k, k), bias=torch.zeros(160, 2))


def test_scalars_given_to_a_plan_cut_its_work_and_bind_its_runs(driver):
    attn = attention(driver, scalars=[("window", "i32", 100)], visible=WINDOW)
    k, q = rows(100, 16, 2, 128), rows(1, 8, 128)
    table = ([0, 1], [0, 100], list(range(100)), [16])
    keys = []

    def count(values):
        items = plan_of(values)[0]
        keys.append(int((items[:, planning.END] - items[:, planning.BEGIN]).sum()))

    driver.on_launch = count
    attn.plan(*table)
    attn.run(q, (k, k), window=7)
    attn.plan(*table, window=100)
    attn.run(q, (k, k))  # the default
    with pytest.raises(ValueError, match="window: expected 100 as in the plan, found 7"):
        attn.run(q, (k, k), window=7)
    assert keys == [1600, 128]
    assert driver.launches[1].values["s.window"] == 100


def test_results_go_where_they_are_told(driver):
    attn = attention(driver)
    k = rows(10, 16, 2, 128)
    attn.plan(*TABLE)
    q = rows(6, 8, 128)
    out, lse = torch.zeros(6, 8, 128, dtype=BF16), torch.zeros(6, 8)
    assert attn.run(q, (k, k), out=out) is out
    found = attn.run(q, (k, k), out=out, lse=lse, return_lse=True)
    assert found[0] is out and found[1] is lse
    assert [launch.values["lse"] for launch in driver.launches] == [0, lse.data_ptr()]
    assert [launch.values["out"] for launch in driver.launches] == [out.data_ptr()] * 2


def test_rows_that_a_kernel_cannot_address_go_through_copies(driver):
    attn = attention(driver)
    k = rows(10, 16, 2, 128)
    attn.plan(*TABLE)
    odd = torch.zeros(6, 8, 132, dtype=BF16)[..., 2:130]
    lse = torch.zeros(8, 6).t()
    seen = {}

    def write(values):
        seen["q"] = torch.frombuffer(bytearray(ctypes.string_at(values["q"], 2 * 6 * 8 * 128)), dtype=BF16)
        (ctypes.c_uint16 * (6 * 8 * 128)).from_address(values["out"])[:] = [0x4040] * (6 * 8 * 128)  # 3.0
        (ctypes.c_float * 48).from_address(values["lse"])[:] = [4.0] * 48

    driver.on_launch = write
    q = torch.randn(6, 8, 130).to(BF16)[..., 1:129]
    result = attn.run(q, (k, k), out=odd, lse=lse, return_lse=True)
    assert result[0] is odd and result[1] is lse
    assert bool((odd == 3).all()) and bool((lse == 4).all())
    assert torch.equal(seen["q"].view(6, 8, 128), q)
    aligned = torch.zeros(6, 8, 128, dtype=BF16)
    shifted = torch.zeros(6 * 8 * 128 + 1, dtype=BF16)[1:].view(6, 8, 128)
    for out in (aligned, shifted):  # one signature
        attn.run(q, (k, k), out=out, lse=torch.zeros(6, 8))
        assert bool((out == 3).all())


def test_no_rows_no_launch(driver):
    attn = attention(driver)
    k = rows(10, 16, 2, 128)
    attn.plan([0, 0, 0], [0, 1, 1], [0], [4, 0])
    out, lse = attn.run(rows(0, 8, 128), (k, k), return_lse=True)
    assert (out.shape, lse.shape) == ((0, 8, 128), (0, 8))
    attn.plan([0], [0], [], [])
    assert attn.run(rows(0, 8, 128), (k, k)).shape == (0, 8, 128)
    assert driver.launches == []


def test_no_keys_at_all(driver):
    attn = attention(driver)
    attn.plan([0, 1], [0, 0], [], [0])
    empty = rows(0, 16, 2, 128)
    seen = []
    driver.on_launch = lambda values: seen.append(ctypes.string_at(values["map_k"][0], 16))
    attn.run(rows(1, 8, 128), (empty, empty))
    assert seen == [bytes(16)]


# ---------------------------------------------------------------------- shared keys


def rows_of_requests(values):
    """row_request and requests, as far as a plan with rows of several requests fills them."""
    return ints(values["row_request"], 2).tolist(), ints(values["requests"], 2, 4).tolist()


def test_a_cascade_finds_the_pages_of_every_level(driver):
    """Two requests of one row that share two pages, each with a page and a bit of its own."""
    attn = attention(driver)
    k = rows(10, 16, 2, 128)
    seen = []
    driver.on_launch = lambda values: seen.append((*plan_of(values), rows_of_requests(values)))
    attn.plan_cascade([([0, 2], [0, 2], [7, 3, -1], [16]), ([0, 1, 2], [0, 1, 3], torch.tensor([5, 2, 9]), [4, 1])])
    attn.run(rows(2, 8, 128), (k, k))
    items, pages, (row_request, requests) = seen[0]
    by_request = {int(x[planning.REQUEST]): (x, ids.tolist()) for x, ids in zip(items, pages, strict=True)}
    assert {b: ids for b, (_, ids) in by_request.items()} == {-1: [7, 3], 0: [5], 1: [2, 9]}
    assert {b: int(x[planning.OFFSET]) for b, (x, _) in by_request.items()} == {-1: 0, 0: 32, 1: 32}
    assert row_request == [0, 1]
    assert [x[:3] for x in requests] == [[0, 1, 36], [1, 1, 49]]
    attn.plan([0, 1, 2], [0, 3, 6], [7, 3, 5, 7, 3, 2], [4, 4])
    attn.run(rows(2, 8, 128), (k, k))
    assert sorted(x.tolist() for x in seen[1][1]) == [[7, 3, 2], [7, 3, 5]]


def test_a_ragged_cascade(driver):
    attn = attention(driver, page_size=None)
    k = rows(60, 2, 128)
    seen = []
    driver.on_launch = lambda values: seen.append(plan_of(values)[0])
    attn.plan_cascade([([0, 2], [0, 40]), ([0, 1, 2], [40, 50, 60])])
    attn.run(rows(2, 8, 128), (k, k))
    assert sorted((int(x[planning.TABLE]), int(x[planning.KEYS])) for x in seen[0]) == [(0, 40), (40, 10), (50, 10)]
    with pytest.raises(ValueError, match=r"k: expected at least 60 rows"):
        attn.run(rows(2, 8, 128), (k[:59], k[:59]))
    with pytest.raises(ValueError, match=r"levels\[0\].kv_indptr: expected offsets from 0, found -1"):
        attn.plan_cascade([([0, 2], [-1, 40])])


def test_a_prefix_that_pays_is_found(driver):
    """Eight requests with 200 pages in common: read once for all of them, and only where it is asked for."""
    attn = attention(driver)
    k = rows(220, 16, 2, 128)
    seen = []
    driver.on_launch = lambda values: seen.append(plan_of(values)[1])
    ids = [page for b in range(8) for page in (*range(200), 200 + b)]
    table = (list(range(9)), [201 * b for b in range(9)], ids, [7] * 8)
    for shared_prefix in (None, "auto"):
        attn.plan(*table, shared_prefix=shared_prefix)
        attn.run(rows(8, 8, 128), (k, k))
    lists = [{tuple(x.tolist()) for x in found} for found in seen]
    assert lists[0] == {(*range(200), 200 + b) for b in range(8)}
    assert lists[1] == {tuple(range(200)), *((200 + b,) for b in range(8))}


@pytest.mark.parametrize("kv_len", ["8192", "1 to 8192"])
def test_a_plan_takes_as_long_as_some_hundred_numpy_operations(kv_len):
    """From the arguments to the staged copy, B = 128 at page 16; most of it is the start of operations on few numbers,
    so these are the clock."""
    attn = attention(
        FakeDriver(), heads=(32, 8), visible=CAUSAL, max_batch_size=128, max_qo_rows=128, partial_rows=1 << 13
    )  # fmt: skip
    kv = np.full(128, 8192) if kv_len == "8192" else np.random.default_rng(3).integers(1, 8192, 128)
    pages = -(-kv // 16)
    ids = np.random.default_rng(0).permutation(int(pages.sum()))
    arrays = (np.arange(129), np.append(0, pages.cumsum()), ids, kv - 16 * (pages - 1))
    table = [torch.from_numpy(a).int() for a in arrays]
    few, took, threads = np.arange(129), [], torch.get_num_threads()
    torch.set_num_threads(1)  # the copy that the device would make waits for no other thread
    for _ in range(300):
        begun = time.perf_counter()
        attn.plan(*table)
        planned = time.perf_counter()
        for _ in range(20):
            few + 1
        took.append(20 * (planned - begun) / (time.perf_counter() - planned))
    torch.set_num_threads(threads)
    assert np.median(took) < 400  # half of it as this is written


# ---------------------------------------------------------------------- memory, graphs, streams


def test_the_index_buffer_grows(driver):
    attn = attention(driver)
    k = rows(4, 16, 2, 128)
    seen = []
    driver.on_launch = lambda values: seen.append(plan_of(values))
    for pages in (3, 50_000, 3):
        ids = [n % 4 for n in range(pages)]
        attn.plan([0, 1], [0, pages], ids, [16])
        attn.run(rows(1, 8, 128), (k, k))
        found = seen[-1][1]
        assert all(x.tolist() == ids for x in found)
    assert driver.launches[0].values["items"] != driver.launches[1].values["items"]
    assert driver.launches[1].values["items"] == driver.launches[2].values["items"]


def test_a_graph_holds_the_index_buffer(driver):
    attn = attention(driver, max_kv_pages=None)
    k = rows(4, 16, 2, 128)
    attn.plan([0, 1], [0, 3], [0, 1, 2], [16])
    driver.capturing = {0}
    attn.run(rows(1, 8, 128), (k, k))
    driver.capturing = set()
    with pytest.raises(ValueError, match="kv_indices: expected at most 16384 page ids, since a captured run holds"):
        attn.plan([0, 1], [0, 50_000], [0] * 50_000, [16])
    attn.run(rows(1, 8, 128), (k, k))
    with pytest.raises(
        ValueError, match=r"k: expected at least 8 pages, since .* id 7, found 4; a captured run holds it"
    ):
        attn.plan([0, 1], [0, 3], [0, 7, 2], [16])


def test_a_captured_run_may_have_rows_to_spare(driver):
    attn = attention(driver)
    k, q = rows(4, 16, 2, 128), rows(8, 8, 128)
    attn.plan([0, 1], [0, 3], [0, 1, 2], [16])
    with pytest.raises(ValueError, match=r"q: expected 1 rows, qo_indptr\[-1\] of the plan, found 8"):
        attn.run(q, (k, k))
    driver.capturing = {0}
    attn.run(q, (k, k))
    with pytest.raises(ValueError, match="plan: expected outside a graph capture, found one"):
        attn.plan([0, 1], [0, 3], [0, 1, 2], [16])
    driver.capturing = set()
    with pytest.raises(ValueError, match="q: expected 1 rows"):
        attn.run(q, (k, k))
    attn.plan([0, 8], [0, 3], [0, 1, 2], [16])
    attn.run(q, (k, k))


def test_a_captured_run_knows_its_rows_and_a_plan_its_own(driver):
    """With these a launch tells that it has too few; decode by a graph and prefill without take turns."""
    attn = attention(driver)
    k, q = rows(4, 16, 2, 128), rows(8, 8, 128)
    attn.plan([0, 2], [0, 3], [0, 1, 2], [16])
    driver.capturing = {0}
    attn.run(q[:4], (k, k))
    driver.capturing = set()
    captured = driver.launches[-1].values
    assert captured["rows"] == 4 and ints(captured["header"], 4)[2] == 2
    attn.plan([0, 8], [0, 3], [0, 1, 2], [16])
    attn.run(q, (k, k))
    assert driver.launches[-1].values["rows"] == 8
    assert ints(captured["header"], 4)[2] == 8 > captured["rows"]


def test_a_plan_relies_on_the_scalars_of_captured_runs(driver):
    attn = attention(driver, scalars=[("window", "i32", None)], visible=WINDOW)
    k, q = rows(4, 16, 2, 128), rows(1, 8, 128)
    table = ([0, 1], [0, 3], [0, 1, 2], [16])

    def capture(*windows, **planned):
        attn.plan(*table, **planned)
        driver.capturing = {0}
        for window in windows:
            attn.run(q, (k, k), window=window)
        driver.capturing = set()

    capture(30, window=30)
    attn.plan(*table)
    attn.plan(*table, window=30)
    with pytest.raises(ValueError, match="window: expected 30 as in a captured run, found 20"):
        attn.plan(*table, window=20)
    capture(8, 9)  # two layers of one graph
    attn.plan(*table, window=30)
    with pytest.raises(ValueError, match="window: expected 9 as in a captured run, found 8"):
        attn.plan(*table, window=8)


def test_objects_share_no_memory(driver):
    kernel = Kernel(served_artifact(), driver)
    a, b = (attention(driver, kernel=kernel) for _ in range(2))
    k = rows(10, 16, 2, 128)
    for stream, attn in ((7, a), (9, b)):
        driver.stream[0] = stream
        attn.plan(*TABLE)
        attn.run(rows(6, 8, 128), (k, k))
    first, second = (launch.values for launch in driver.launches)
    assert [launch.stream for launch in driver.launches] == [7, 9]
    for name in ("header", "tickets", "items", "targets", "sources", "part_o", "part_lse", "counters", "kv_indices"):
        assert first[name] != second[name]


def test_objects_of_a_kernel_load_it_once(driver):
    kernel = Kernel(served_artifact(), driver)
    for _ in range(3):
        attention(driver, kernel=kernel)
    assert driver.loads == [0]
    other = FakeDriver()
    attention(other, kernel=kernel, other=other)
    assert (driver.loads, other.loads) == ([0], [0])


def test_an_object_lies_on_its_own_device(driver, monkeypatch):
    """On device 1 while torch's current device is 0: its stream, its copy of the kernel."""
    monkeypatch.setattr(serving, "device_of", lambda given, kind: torch.device("cpu", given))
    monkeypatch.setattr("attncc.runtime.arena.torch.zeros", on_any_cpu(torch.zeros))
    monkeypatch.setattr("attncc.runtime.results.torch.empty", on_any_cpu(torch.empty))
    driver.stream = {0: 11, 1: 22}
    kernel = Kernel(served_artifact(), driver)
    a, b = attention(driver, kernel=kernel, device=0), attention(driver, kernel=kernel, device=1)
    q, k = rows(6, 8, 128), rows(10, 16, 2, 128)
    there = [t.as_subclass(SecondDevice) for t in (q, k)]
    a.plan(*TABLE)
    b.plan(*TABLE)
    b.run(there[0], (there[1], there[1]))
    assert driver.loads == [0, 1]
    assert [(launch.stream, launch.function[1]) for launch in driver.launches] == [(22, 1)]
    with pytest.raises(ValueError, match="q: expected a tensor on cpu:1 as the BatchAttention is, found cpu"):
        b.run(q, (k, k))


class SecondDevice(torch.Tensor):
    """A tensor that says it lies on device 1 (torch itself knows one CPU)."""

    device = torch.device("cpu", 1)


def on_any_cpu(make):
    def made(*shape, device=None, **options):
        return make(*shape, device=None if device is None else torch.device(device).type, **options)

    return made


# ---------------------------------------------------------------------- where the kernel comes from


def test_any_layout_is_built_when_it_is_asked_for(driver):
    asked = []

    def build(layout, page_size):
        asked.append((layout, page_size))
        return artifact() if layout == "dense" else served_artifact(page_size=page_size)

    kernel = Kernel(served_artifact(page_size=16), driver, build=build)
    for page_size in (16, 8, 8, None):
        attention(driver, kernel=kernel, page_size=page_size)
    assert asked == [("paged", 8), ("ragged", None)]
    kernel(rows(1, 5, 8, 128), rows(1, 5, 2, 128), rows(1, 5, 2, 128))
    assert asked[2:] == [("dense", None)]
    assert driver.launches[0].values["qo_len"] == 5


def test_an_artifact_serves_what_it_was_built_for(driver):
    paged = Kernel(served_artifact(page_size=16), driver)
    with pytest.raises(ValueError) as e:
        attention(driver, kernel=paged, page_size=8)
    assert str(e.value) == (
        "kernel: expected an artifact for layout 'paged', page_size 8, found one for layout 'paged', page_size 16; "
        "`attncc build FILE:test --layout paged --page-size 8` builds it, and attncc.compile makes kernels for any "
        "layout"
    )
    with pytest.raises(ValueError, match="expected an artifact for layout 'dense', found one for layout 'paged'"):
        paged(rows(1, 5, 8, 128), rows(1, 5, 2, 128), rows(1, 5, 2, 128))
    with pytest.raises(ValueError, match="expected an artifact for layout 'ragged', found one for layout 'dense'"):
        attention(driver, kernel=Kernel(artifact(), driver), page_size=None)


def test_the_old_plan_runs_on_where_memory_runs_out(driver, monkeypatch):
    """The index buffer grows: whichever of its allocations fails, nothing has changed, and the next try works."""
    zeros, left = torch.zeros, 0

    def scarce(*args, **kwargs):
        nonlocal left
        left -= 1
        if left == 0:
            raise RuntimeError("out of memory")
        return zeros(*args, **kwargs)

    monkeypatch.setattr("attncc.runtime.arena.torch.zeros", scarce)
    q, k = rows(5, 8, 128), rows(4, 16, 2, 128)
    for fails in range(1, 5):
        attn = attention(driver)
        attn.plan([0, 5], [0, 1], [0], [16])
        left = fails
        with pytest.raises(RuntimeError, match="out of memory"):
            attn.plan([0, 5], [0, 40000], [0] * 40000, [16])
        left = 0
        attn.run(q, (k, k))
        assert ints(driver.launches[-1].values["header"], 4)[0] > 0
        attn.plan([0, 5], [0, 40000], [0] * 40000, [16])
        attn.run(q, (k, k))
