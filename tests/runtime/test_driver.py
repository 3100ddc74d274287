"""runtime/driver.py through the real cuda.bindings, over a libcuda that records (stub_cuda.c): no GPU, no driver.

Each case runs in a process of its own, since cuda.bindings opens libcuda once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

HERE = Path(__file__).parent

PRELUDE = """
import ctypes, threading
import pytest, torch
from fake_driver import artifact
from attncc.runtime.driver import CudaError, Driver
from attncc.runtime.kernel import Kernel
from attncc.runtime.tensor_map import tensor_map

class Stub:
    lib = ctypes.CDLL("libcuda.so.1")
    def __getattr__(self, name):
        return ctypes.c_int.in_dll(self.lib, "stub_" + name).value
    def __setattr__(self, name, value):
        ctypes.c_int.in_dll(self.lib, "stub_" + name).value = value
    def expect(self, params):
        self.param_count = len(params)
        for field in ("offsets", "sizes"):
            array = (ctypes.c_size_t * 64).in_dll(self.lib, "stub_" + field)
            array[:len(params)] = [p[field[:-1]] for p in params]

class Last(ctypes.Structure):
    _fields_ = [("function", ctypes.c_size_t), ("stream", ctypes.c_size_t), ("context", ctypes.c_size_t),
                ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("smem", ctypes.c_uint),
                ("params", ctypes.c_ubyte * 4096)]

class Map(ctypes.Structure):
    _fields_ = [("dtype", ctypes.c_int), ("rank", ctypes.c_uint), ("address", ctypes.c_uint64),
                ("dims", ctypes.c_uint64 * 5), ("strides", ctypes.c_uint64 * 4), ("box", ctypes.c_uint32 * 5),
                ("swizzle", ctypes.c_int), ("l2", ctypes.c_int), ("oob", ctypes.c_int)]

stub = Stub()
last, last_map = Last.in_dll(stub.lib, "stub_last"), Map.in_dll(stub.lib, "stub_map")

class CpuDriver(Driver):
    device_type, streams = "cpu", {0: 5, 1: 6}
    def current_stream(self, device):
        return self.streams[device]

made = artifact(scalars=[("n", "i32", None)])
entry = made.manifest["kernels"]["forward"]
stub.expect(entry["params"])
driver = CpuDriver()
def inputs():
    return [torch.zeros(1, 64, 2, 128, dtype=torch.bfloat16) for _ in range(3)]
"""

CASES = {
    "a call arrives": """
        kernel = Kernel(made, driver)
        q, k, v = inputs()
        out = kernel(q, k, v, n=77)
        assert stub.launches == stub.loads == 1
        assert list(last.grid) == [2, 1, 1] and list(last.block) == [384, 1, 1]
        assert last.smem == stub.smem_attribute == 230400
        assert (last.stream, last.context, last.function) == (5, 0x1000, 0x4000)
        at = {p["name"]: p["offset"] for p in entry["params"]}
        value = lambda name, kind: kind.from_buffer_copy(bytes(last.params), at[name]).value
        assert value("s.n", ctypes.c_int32) == 77
        assert value("qo_len", ctypes.c_int32) == 64
        assert value("map_q", ctypes.c_uint64) == q.data_ptr()
        assert value("map_o", ctypes.c_uint64) == out.data_ptr()
        assert driver.sm_count(1) == 133
    """,
    "the context is the device's, and the caller's is left as it was": """
        function = driver.load(b"cubin", entry, "sm_90a", 1)
        buffers = [(ctypes.c_byte * p["size"])() for p in entry["params"]]
        array = (ctypes.c_void_p * len(buffers))(*map(ctypes.addressof, buffers))
        assert stub.lib.stub_depth() == 0
        driver.launch(function, 1, 6, ctypes.addressof(array))
        assert (last.context, last.function) == (0x1001, 0x4001)
        assert stub.lib.stub_depth() == 0
        stub.lib.stub_make_current(ctypes.c_size_t(0x1000))
        driver.launch(function, 1, 6, ctypes.addressof(array))
        assert last.context == 0x1001 and stub.lib.stub_depth() == 1
        stub.fail_launch = 1
        with pytest.raises(CudaError, match="cuLaunchKernel: CUDA_ERROR_INVALID_VALUE: said by the stub") as e:
            driver.launch(function, 1, 6, ctypes.addressof(array))
        assert e.value.name == "CUDA_ERROR_INVALID_VALUE" and stub.lib.stub_depth() == 1
    """,
    "a kernel that may start early": """
        function = driver.load(b"cubin", {**entry, "starts_early": True}, "sm_90a", 1)
        buffers = [(ctypes.c_byte * p["size"])(n + 1) for n, p in enumerate(entry["params"])]
        array = (ctypes.c_void_p * len(buffers))(*map(ctypes.addressof, buffers))
        driver.launch(function, 132, 6, ctypes.addressof(array))
        assert stub.launches == stub.early_launches == 1
        assert list(last.grid) == [132, 1, 1] and list(last.block) == [384, 1, 1]
        assert (last.stream, last.context, last.function, last.smem) == (6, 0x1001, 0x4001, 230400)
        assert [last.params[p["offset"]] for p in entry["params"]] == list(range(1, len(buffers) + 1))
        stub.fail_launch = 1
        with pytest.raises(CudaError, match="cuLaunchKernel: CUDA_ERROR_INVALID_VALUE: said by the stub"):
            driver.launch(function, 132, 6, ctypes.addressof(array))
    """,
    "a thread without a context": """
        kernel = Kernel(made, driver)
        stub.lib.stub_make_current(ctypes.c_size_t(0x1000))
        kernel(*inputs(), n=1)
        failed = []
        def work():
            try:
                kernel(*inputs(), n=2)
            except BaseException as e:
                failed.append(e)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert failed == [] and stub.launches == 2 and stub.loads == 1
    """,
    "loading is allowed while a graph is captured": """
        driver.load(b"cubin", entry, "sm_90a", 0)
        assert stub.load_mode == 2  # relaxed
        old = driver._cu.cuThreadExchangeStreamCaptureMode(driver._cu.CUstreamCaptureMode(0))[1]
        assert int(old) == 0  # and put back
    """,
    "copies, in the context of their event": """
        from_, to = (ctypes.c_int * 8)(*range(8)), (ctypes.c_int * 8)()
        at, there = ctypes.addressof(from_), ctypes.addressof(to)
        for current in (None, 0x1000, 0x1001):
            if current is not None:
                stub.lib.stub_make_current(ctypes.c_size_t(current))
            depth = stub.lib.stub_depth()
            event = driver.make_event(1)
            driver.wait(event)
            stub.copies = 0
            driver.upload([(there, at + 8, 8), (there + 12, at + 12, 16)], 6, event)
            driver.wait(event)
            assert list(to) == [2, 3, 0, 3, 4, 5, 6, 0]
            streams = [ctypes.c_size_t.in_dll(stub.lib, f"stub_{x}_stream").value for x in ("copy", "record")]
            assert (stub.copies, streams) == (2, [6, 6])
            stub.fail_copy = 1
            with pytest.raises(CudaError, match="cuMemcpyHtoDAsync: CUDA_ERROR_INVALID_VALUE"):
                driver.upload([(there, at, 4)], 6, event)
            stub.fail_copy = 0
            driver.destroy(event)
            assert stub.lib.stub_depth() == depth and stub.events == 0
        assert stub.waits == 9
    """,
    "capture is asked of the stream": """
        stub.capturing_stream = 9
        assert driver.is_capturing(9) is True and driver.is_capturing(5) is False
    """,
    "a layout that isn't the manifest's": """
        offsets = (ctypes.c_size_t * 64).in_dll(stub.lib, "stub_offsets")
        offsets[4] += 8
        with pytest.raises(ValueError, match="attncc_test_0: parameter 4 .lse.: the manifest says offset and size"):
            driver.load(b"cubin", entry, "sm_90a", 0)
        offsets[4] -= 8
        stub.param_count += 1
        with pytest.raises(ValueError, match="more parameters than the manifest"):
            driver.load(b"cubin", entry, "sm_90a", 0)
        stub.param_count -= 2
        with pytest.raises(CudaError, match="cuFuncGetParamInfo"):
            driver.load(b"cubin", entry, "sm_90a", 0)
        assert stub.lib.stub_depth() == 0
    """,
    "another device, another cubin": """
        stub.major = 8
        with pytest.raises(ValueError, match="the kernel is built for sm_90a, cuda:0 is sm_80"):
            Kernel(made, driver)(*inputs(), n=1)
        stub.major = 9
        with pytest.raises(CudaError, match="cuLibraryLoadData"):
            driver.load(b"other", entry, "sm_90a", 0)
        assert stub.lib.stub_depth() == 0
    """,
    "a tensor map": """
        q = torch.zeros(2, 300, 8, 128, dtype=torch.bfloat16)
        wanted = tensor_map(q.shape, q.stride(), "bf16", (64, 128, 1, 1), 3)
        raw = driver.encode(wanted, q.data_ptr())
        assert len(raw) == 128 and last_map.rank == 4 and last_map.address == q.data_ptr()
        assert tuple(last_map.dims)[:4] == wanted.dims and tuple(last_map.strides)[:3] == wanted.strides
        assert tuple(last_map.box)[:4] == (64, 128, 1, 1)
        assert (last_map.dtype, last_map.swizzle, last_map.l2, last_map.oob) == (9, 3, 2, 0)
        driver.encode(tensor_map(q.shape, q.stride(), "f16", (32, 64, 1, 1), 2), 0)
        assert (last_map.dtype, last_map.swizzle) == (6, 2)
    """,
    "bit 21 of a small tensor's map": """
        small = torch.zeros(1, 8, 2, 128, dtype=torch.bfloat16)
        large = torch.zeros(1, 600, 2, 128, dtype=torch.bfloat16)
        encode = lambda d, t: d.encode(tensor_map(t.shape, t.stride(), "bf16", (64, 128, 1, 1), 3), 0)
        assert encode(driver, small)[8:16] == bytes([255, 255, 0xDF, 255, 255, 255, 255, 255])
        assert encode(driver, large)[8:] == b"\\xff" * 120
        stub.version = 13020
        assert encode(CpuDriver(), small)[8:] == b"\\xff" * 120
    """,
    "broadcast strides that the driver refuses": """
        stub.refuse_zero_stride = 1
        q, k, v = inputs()
        Kernel(made, driver)(q, k[:, :, :1].expand(-1, -1, 2, -1), v, n=1)
        assert stub.launches == 1
    """,
}


# Imports torch once, then runs each case in a fork of itself.
RUNNER = """
import json, os, sys, traceback
import torch, attncc.runtime.kernel, fake_driver, pytest
prelude, cases = json.load(sys.stdin)
failures = {}
for name, body in cases.items():
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            exec(compile(prelude + body, name, "exec"), {})
        except BaseException:
            os.write(write, traceback.format_exc()[-4000:].encode())
        os._exit(0)
    os.close(write)
    with open(read) as said:
        failures[name] = said.read()
    if os.waitpid(pid, 0)[1]:
        failures[name] += "the process died"
print(json.dumps(failures))
"""


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("libcuda")
    command = ["gcc", "-O1", "-shared", "-fPIC", "-o", folder / "libcuda.so.1", HERE / "stub_cuda.c", "-ldl"]
    subprocess.run(command, check=True)
    given = json.dumps([PRELUDE, {name: textwrap.dedent(body) for name, body in CASES.items()}])
    environment = {**os.environ, "PYTHONPATH": str(HERE), "LD_LIBRARY_PATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", RUNNER], env=environment, input=given, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", CASES)
def test_driver(failures, case):
    assert failures[case] == ""


def test_a_machine_without_a_driver_is_told_so():
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("this machine has a driver")
    body = """
    from attncc.runtime.driver import CudaError, driver
    try:
        driver()
    except CudaError as e:
        assert "this machine has no NVIDIA driver" in str(e), e
    else:
        raise AssertionError("expected CudaError")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(body)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
