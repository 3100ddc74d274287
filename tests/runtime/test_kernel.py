"""What a call launches: parameter bytes, bindings, streams, devices, copies; seen through a recording driver."""

from __future__ import annotations

import ctypes
import threading

import pytest
import torch
from fake_driver import FakeDriver, artifact

from attncc.runtime import kernel as kernel_module
from attncc.runtime import workspace
from attncc.runtime.kernel import Kernel

BF16 = torch.bfloat16
SCALARS = [("window", "i32", None), ("cap", "f32", 50.0), ("flag", "bool", False)]
TENSORS = [("sink", ["h"], "f32"), ("gate", ["iq", "h", "e"], "bf16")]


@pytest.fixture
def driver():
    return FakeDriver()


def rows(b, s, h, d=128, **options):
    return torch.randn(b, s, h, d, **options).to(BF16)


def qkv(b=2, qo=300, kv=500, heads=8, kv_heads=2, d=128, e=128):
    return rows(b, qo, heads, d), rows(b, kv, kv_heads, d), rows(b, kv, kv_heads, e)


def fill(value):
    """A kernel that writes `value` to every element of a contiguous out and lse."""

    def run(values):
        n = values["qo_len"] * values["num_heads_batch"]
        out = (ctypes.c_uint16 * (n * 128)).from_address(values["map_o"][0])
        out[:] = [torch.tensor(value, dtype=BF16).view(torch.int16).item()] * (n * 128)
        if values["lse"]:
            (ctypes.c_float * n).from_address(values["lse"])[:] = [value] * n

    return run


def test_every_parameter_of_a_call(driver):
    kernel = Kernel(artifact(scalars=SCALARS, tensors=TENSORS), driver)
    q, k, v = qkv()
    sink, gate = torch.zeros(8), torch.zeros(2, 300, 16, 128, dtype=BF16)[:, :, ::2]
    out, lse = kernel(q, k, v, window=-5, cap=2.5, flag=True, sink=sink, gate=gate, return_lse=True)
    assert out.shape == q.shape
    assert out.dtype == BF16
    assert (lse.shape, lse.dtype) == ((2, 300, 8), torch.float32)
    (launch,) = driver.launches
    values = launch.values
    assert launch.grid == 3 * 16
    assert [values[f"map_{x}"][0] for x in "qkvo"] == [t.data_ptr() for t in (q, k, v, out)]
    assert values["lse"] == lse.data_ptr()
    assert {n: values[n] for n in ("qo_len", "kv_len", "num_qo_heads", "num_kv_heads", "group_size")} == {
        "qo_len": 300, "kv_len": 500, "num_qo_heads": 8, "num_kv_heads": 2, "group_size": 4,
    }  # fmt: skip
    assert (values["num_tiles_q"], values["num_heads_batch"]) == (3, 16)
    assert (values["section_heads"], values["late_tiles"]) == (1, 0)
    assert (values["s.window"], values["s.cap"], values["s.flag"]) == (-5, 2.5, 1)
    assert (values["t.sink"], values["t.gate"]) == (sink.data_ptr(), gate.data_ptr())
    assert [values[f"t.gate.stride.{k}"] for k in range(4)] == [300 * 16 * 128, 16 * 128, 256, 1]
    assert [values[f"t.gate.size.{k}"] for k in range(4)] == [2, 300, 8, 128]
    assert (values["t.sink.stride.0"], values["t.sink.size.0"]) == (1, 8)


def test_a_repeated_signature_rewrites_pointers_and_scalars_only(driver):
    kernel = Kernel(artifact(scalars=SCALARS, tensors=TENSORS[:1]), driver)
    sink = torch.zeros(8)
    first = kernel(*qkv(), window=1, sink=sink)
    encoded = len(driver.encoded)
    q, k, v = qkv()
    sink = torch.ones(8)
    second = kernel(q, k, v, window=2, sink=sink, cap=1.0)
    assert len(driver.encoded) == encoded
    assert len(driver.loads) == 1
    a, b = (launch.values for launch in driver.launches)
    assert b["map_q"] == (q.data_ptr(), a["map_q"][1])
    assert b["map_v"] == (v.data_ptr(), a["map_v"][1])
    assert b["map_o"] == (second.data_ptr(), a["map_o"][1])
    assert second.data_ptr() != first.data_ptr()
    assert (b["s.window"], b["s.cap"], b["t.sink"]) == (2, 1.0, sink.data_ptr())
    assert a["s.cap"] == 50.0
    assert b["lse"] == 0


def test_lse_pointer_does_not_outlive_its_call(driver):
    kernel = Kernel(artifact(), driver)
    inputs = qkv()
    kernel(*inputs, return_lse=True)
    kernel(*inputs)
    given = torch.empty(2, 300, 8)
    kernel(*inputs, lse=given)
    assert [bool(launch.values["lse"]) for launch in driver.launches] == [True, False, True]
    assert driver.launches[2].values["lse"] == given.data_ptr()


def test_other_shapes_and_strides_bind_anew(driver):
    kernel = Kernel(artifact(), driver)
    q, k, v = qkv()
    kernel(q, k, v)
    kernel(q[:, :299], k, v)
    kernel(q, k[:, :499], v[:, :499])
    transposed = rows(2, 8, 300).transpose(1, 2)
    kernel(transposed, k, v)
    values = [launch.values for launch in driver.launches]
    assert [x["qo_len"] for x in values] == [300, 299, 300, 300]
    assert [x["kv_len"] for x in values] == [500, 500, 499, 500]
    assert len({x["map_q"][1] for x in values}) == 3
    assert len({x["map_k"][1] for x in values}) == 2
    assert driver.encoded[-1].strides == (256, 300 * 256, 8 * 300 * 256)


def test_a_packed_qkv_tensor_needs_no_copy(driver):
    kernel = Kernel(artifact(), driver)
    packed = rows(2, 300, 12)
    kernel(packed[:, :, :8], packed[:, :, 8:10], packed[:, :, 10:])
    at = [driver.launches[0].values[f"map_{x}"][0] - packed.data_ptr() for x in "qkv"]
    assert at == [0, 8 * 256, 10 * 256]


@pytest.mark.parametrize(("heads", "kv_heads"), [(12, 2), (28, 4), (5, 1), (7, 1), (8, 8)])
def test_group_sizes(driver, heads, kv_heads):
    Kernel(artifact(), driver)(*qkv(heads=heads, kv_heads=kv_heads))
    values = driver.launches[0].values
    assert (values["group_size"], values["num_heads_batch"]) == (heads // kv_heads, 2 * heads)


def test_head_dims_that_differ(driver):
    out = Kernel(artifact(head_dim=192, head_dim_vo=128), driver)(*qkv(d=192, e=128))
    assert out.shape == (2, 300, 8, 128)
    assert [m.dims[0] for m in driver.encoded] == [192, 192, 128, 128]


def test_the_grid_is_at_most_the_device(driver):
    kernel = Kernel(artifact(), driver)
    kernel(*qkv(b=1, qo=1, heads=4, kv_heads=4))
    kernel(*qkv(b=4, qo=1000))
    assert [launch.grid for launch in driver.launches] == [4, 132]


def test_causal_kernels_get_sections_and_late_tiles(driver):
    kernel = Kernel(artifact(causal_like=True), driver)
    kernel(*qkv(b=2, qo=1024, kv=16384, heads=32, kv_heads=8))
    kernel(*qkv(b=1, qo=1, kv=1))
    a, b = (launch.values for launch in driver.launches)
    assert (a["num_tiles_q"], a["late_tiles"]) == (8, 2)
    assert a["section_heads"] == (16 << 20) // (16384 * 512) * 4
    assert (b["section_heads"], b["late_tiles"]) == (8, 0)  # never more than there are heads


@pytest.mark.parametrize(("b", "qo", "heads"), [(2, 300, 8), (1, 1, 1), (1, 5, 1), (3, 1, 1), (1, 1, 2)])
def test_results_are_contiguous_whatever_the_inputs_are(driver, b, qo, heads):
    q, k, v = qkv(b=b, qo=qo, heads=heads, kv_heads=1)
    out, lse = Kernel(artifact(), driver)(q.transpose(1, 2).contiguous().transpose(1, 2), k, v, return_lse=True)
    assert out.stride() == torch.empty(b, qo, heads, 128).stride()
    assert lse.stride() == torch.empty(b, qo, heads).stride()


def test_a_call_is_told_apart_by_what_it_gives(driver):
    """Calls with the same tensors in other roles, and with None for a tensor, never share a binding."""
    kernel = Kernel(artifact(tensors=[("a", ["h", "e"], "f32"), ("c", ["x"], "f32")]), driver)
    inputs, a, c = qkv(), torch.zeros(8, 128), torch.zeros(4)
    lse = torch.zeros(2, 300, 8)
    for _ in range(2):
        kernel(*inputs, a=a, c=c)
        kernel(*inputs, a=a, c=c, lse=lse)
        kernel(*inputs, a=a, c=c, out=torch.zeros(2, 300, 8, 128, dtype=BF16))
        with pytest.raises(ValueError, match="out: expected shape"):
            kernel(*inputs, a=a, c=c, out=lse)
        with pytest.raises(TypeError, match=r"c: expected a torch\.Tensor, found NoneType"):
            kernel(*inputs, a=a, c=None, lse=c)
        with pytest.raises(TypeError, match=r"a: expected a torch\.Tensor, found NoneType"):
            kernel(*inputs, a=None, c=a)
    assert len(kernel._bindings) == 3
    assert [bool(launch.values["lse"]) for launch in driver.launches] == [False, True, False] * 2
    assert {launch.values["t.a"] for launch in driver.launches} == {a.data_ptr()}
    assert {launch.values["t.c"] for launch in driver.launches} == {c.data_ptr()}


# ---------------------------------------------------------------------- memory that the caller gives


def test_out_and_lse_are_written_in_place(driver):
    kernel = Kernel(artifact(), driver)
    driver.on_launch = fill(3.0)
    out, lse = torch.zeros(2, 300, 8, 128, dtype=BF16), torch.zeros(2, 300, 8)
    result = kernel(*qkv(), out=out, lse=lse)
    assert result is out
    assert bool((out == 3).all())
    assert bool((lse == 3).all())
    a, b = kernel(*qkv(), out=out, lse=lse, return_lse=True)
    assert a is out
    assert b is lse


def test_out_and_lse_that_a_kernel_cannot_address_are_written_through_copies(driver):
    kernel = Kernel(artifact(), driver)
    driver.on_launch = fill(4.0)
    odd = torch.zeros(2, 300, 8, 132, dtype=BF16)[..., 2:130]  # neither base nor strides are multiples of 16 bytes
    lse = torch.zeros(2, 8, 300).transpose(1, 2)
    a, b = kernel(*qkv(), out=odd, lse=lse, return_lse=True)
    assert a is odd
    assert b is lse
    assert bool((odd == 4).all())
    assert bool((lse == 4).all())
    assert kernel(*qkv(), lse=lse).dtype == BF16  # one result: the lse was given but not asked back


def test_misaligned_and_odd_inputs_are_copied(driver):
    kernel = Kernel(artifact(), driver)
    q, k, v = qkv()
    shifted = torch.empty(q.numel() + 1, dtype=BF16)[1:].view(q.shape).copy_(q)
    odd = torch.zeros(2, 500, 2, 132, dtype=BF16)[..., :128].copy_(v)
    seen = {}

    def read(values):
        for name, shape in (("q", q.shape), ("v", v.shape)):
            n = torch.Size(shape).numel()
            raw = ctypes.string_at(values[f"map_{name}"][0], 2 * n)
            seen[name] = torch.frombuffer(bytearray(raw), dtype=BF16).view(shape)

    driver.on_launch = read
    for _ in range(2):  # a cached signature still sees where its tensors start
        kernel(q, k, v)
        kernel(shifted, k, odd)
        assert torch.equal(seen["q"], q)
        assert torch.equal(seen["v"], v)
    assert all(launch.values["map_q"][0] % 16 == 0 for launch in driver.launches)


@pytest.mark.parametrize("stride_zero", [True, False])
def test_broadcast_batches_and_heads(stride_zero):
    """Encoded where the driver takes stride 0, copied where it doesn't."""
    driver = FakeDriver(stride_zero=stride_zero)
    kernel = Kernel(artifact(), driver)
    q, k, v = qkv(b=3)
    kernel(q, k[:1].expand(3, -1, -1, -1), v[:, :, :1].expand(-1, -1, 2, -1))
    kernel(q, k[:1].expand(3, -1, -1, -1), v[:, :, :1].expand(-1, -1, 2, -1))
    for launch in driver.launches:
        assert (launch.values["map_k"][0] == k.data_ptr()) is stride_zero
        assert (launch.values["map_v"][0] == v.data_ptr()) is stride_zero
    assert any(0 in m.strides for m in driver.encoded) is stride_zero


def test_an_encoding_that_fails_for_another_reason_is_an_error(driver):
    from attncc.runtime.driver import CudaError

    def encode(wanted, address):
        raise CudaError("cuTensorMapEncodeTiled", "CUDA_ERROR_INVALID_VALUE")

    driver.encode = encode
    with pytest.raises(CudaError, match="cuTensorMapEncodeTiled: CUDA_ERROR_INVALID_VALUE"):
        Kernel(artifact(), driver)(*qkv())


def test_inference_mode_and_normal_calls_share_a_binding(driver):
    kernel = Kernel(artifact(), driver)
    inputs = qkv()
    with torch.inference_mode():
        kernel(*inputs)
    out = kernel(*inputs, return_lse=True)[0]
    assert not out.is_inference()
    with torch.inference_mode():
        assert kernel(*inputs, return_lse=True)[1].is_inference()


# ---------------------------------------------------------------------- nothing to do, nothing to see


@pytest.mark.parametrize("empty", [{"b": 0}, {"qo": 0}, {"heads": 0}, {"heads": 0, "kv_heads": 0}, {"qo": 0, "kv": 0}])
def test_a_call_without_rows_launches_nothing(driver, empty):
    kernel = Kernel(artifact(), driver)
    q, k, v = qkv(**empty)
    for _ in range(2):
        out, lse = kernel(q, k, v, return_lse=True)
        assert out.shape == q.shape
        assert lse.shape == q.shape[:3]
    given = torch.empty_like(q)
    assert kernel(q, k, v, out=given) is given
    assert driver.launches == []


def test_without_keys_the_maps_show_zeros(driver):
    seen = []

    def read(values):
        seen.append([ctypes.string_at(values[f"map_{x}"][0], 16) for x in "kv"])

    driver.on_launch = read
    q, k, v = qkv(kv=0)
    assert k.data_ptr() == 0
    kernel = Kernel(artifact(), driver)
    kernel(q, k, v)
    kernel(q, k, v)
    assert seen == [[bytes(16)] * 2] * 2
    assert driver.launches[1].values["kv_len"] == 0
    assert (8, 1, 1, 1) in {m.dims for m in driver.encoded}


# ---------------------------------------------------------------------- streams, devices, graphs, threads


def test_a_launch_goes_to_the_current_stream_with_that_streams_counters(driver):
    kernel = Kernel(artifact(), driver)
    inputs = qkv()
    for stream in (7, 9, 7):
        driver.stream[0] = stream
        kernel(*inputs)
    assert [launch.stream for launch in driver.launches] == [7, 9, 7]
    a, b, c = (launch.values["tickets"] for launch in driver.launches)
    assert a == c != b
    assert ctypes.string_at(a, 8) == bytes(8)
    assert abs(a - b) >= 8


def test_every_captured_launch_has_counters_of_its_own(driver):
    kernel = Kernel(artifact(), driver)
    inputs = qkv()
    kernel(*inputs)
    driver.capturing = {0}
    kernel(*inputs)
    kernel(*inputs)
    driver.capturing = set()
    kernel(*inputs)
    a, b, c, d = (launch.values["tickets"] for launch in driver.launches)
    assert a == d
    assert len({a, b, c}) == 3


def test_counters_of_a_first_captured_launch_are_zeroed_in_the_graph(driver, monkeypatch):
    driver.capturing = {0}
    seen = []
    driver.on_launch = lambda values: seen.append(ctypes.string_at(values["tickets"], 8))
    kernel = Kernel(artifact(), driver)
    kernel(*qkv())
    assert seen == [bytes(8)]
    driver.capturing = set()
    kernel(*qkv())
    monkeypatch.setattr(workspace, "PAIRS", 1)
    driver.capturing = {0}
    kernel(*qkv())  # the slab is used up
    assert len({launch.values["tickets"] for launch in driver.launches[1:]}) == 2
    assert seen[2] == bytes(8)


class SecondDevice(torch.Tensor):
    """A tensor that says it lies on device 1 (torch itself knows one CPU)."""

    device = torch.device("cpu", 1)


def test_each_device_loads_the_kernel_once_and_uses_its_own_stream(driver):
    driver.stream = {0: 11, 1: 22}
    kernel = Kernel(artifact(), driver)
    inputs = qkv()
    there = [t.as_subclass(SecondDevice) for t in inputs]
    for tensors in (inputs, there, there, inputs):
        kernel(*tensors)
    assert driver.loads == [0, 1]
    assert [launch.stream for launch in driver.launches] == [11, 22, 22, 11]
    assert [launch.function[1] for launch in driver.launches] == [0, 1, 1, 0]
    with pytest.raises(ValueError, match="v: expected a tensor on cpu:1 as q is, found cpu"):
        kernel(there[0], there[1], inputs[2])


def test_threads_share_a_kernel(driver):
    """Each launch must see the pointers and scalars of one call, never a mixture."""
    kernel = Kernel(artifact(scalars=[("n", "i32", None)], tensors=[("t", ["x"], "i32")]), driver)
    q, k, v = qkv(b=1, qo=8, kv=8, heads=2, kv_heads=2)
    wrong = []

    def work(n):
        t = torch.full((4,), n, dtype=torch.int32)
        for _ in range(200):
            kernel(q, k, v, n=n, t=t)

    driver.on_launch = lambda values: (
        wrong.append(values) if ctypes.c_int32.from_address(values["t.t"]).value != values["s.n"] else None
    )
    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(driver.launches) == 1200
    assert wrong == []


def test_bindings_are_bounded(driver, monkeypatch):
    monkeypatch.setattr(kernel_module, "MAX_BINDINGS", 4)
    kernel = Kernel(artifact(), driver)
    for n in range(1, 10):
        kernel(*qkv(b=1, qo=1, kv=n))
    assert len(kernel._bindings) == 4
    kernel(*qkv(b=1, qo=1, kv=1))
    assert driver.launches[-1].values["kv_len"] == 1


# ---------------------------------------------------------------------- what a kernel says of itself


def test_introspection(driver):
    kernel = Kernel(artifact(scalars=SCALARS[:2], tensors=TENSORS[:1], const={"soft": 2.0}), driver)
    assert kernel.variant == "test"
    assert kernel.params == {"window": "i32", "cap": "f32 = 50.0", "sink": "f32[h]"}
    assert kernel.manifest["head_dim_qk"] == 128
    assert repr(kernel) == (
        "<attncc.Kernel test(window: i32, cap: f32 = 50.0, sink: f32[h], soft: const = 2.0) head_dim 128, bf16, sm_90a>"
    )


@pytest.mark.parametrize(("kind", "value"), [("i32", 1), ("f32", 2.5), ("bool", True)])
def test_a_parameter_the_kernel_does_not_read_is_still_checked(driver, kind, value):
    made = artifact(scalars=[("n", kind, None)])
    params = made.manifest["kernels"]["forward"]["params"]
    params[:] = [p for p in params if p["name"] != "s.n"]
    kernel = Kernel(made, driver)
    kernel(*qkv(), n=value)
    assert "s.n" not in driver.launches[0].values
    with pytest.raises(TypeError, match=f"missing parameter n: {kind}"):
        kernel(*qkv())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"name": "t.other"}, "kernel parameter t.other"),
        ({"offset": 64}, "kernel parameter map_k: offset 64, size 128"),
        ({"size": 64}, "kernel parameter map_k: offset 176, size 64"),
    ],
)
def test_a_manifest_that_this_runtime_cannot_serve_is_refused(driver, change, says):
    made = artifact()
    made.manifest["kernels"]["forward"]["params"][1].update(change)
    with pytest.raises(ValueError, match=says):
        Kernel(made, driver)


@pytest.mark.parametrize("change", [{"layout": "paged"}, {"dtype": "e4m3"}, {"kernels": {}}])
def test_a_kind_of_kernel_that_this_runtime_does_not_know_is_refused(driver, change):
    made = artifact()
    made.manifest.update(change)
    with pytest.raises(ValueError, match="not a kind of kernel that this attncc runs"):
        Kernel(made, driver)
