"""The only caller of the CUDA API.

`cuda.bindings` and torch are imported when a `Driver` is made, so reading artifacts and checking arguments work on a
machine with no driver.  Everything the runtime needs of a device stands in this one class: tests hand `Kernel` another
object with the same methods and see what would be launched.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attncc.runtime.artifact import ARCHITECTURES
from attncc.runtime.tensor_map import TensorMap

# CUTLASS clears bit 21 of the second word for tensors that span less than 128 KiB, on drivers up to 13.1.
BIT_21_LAST_DRIVER = 13010
BIT_21_SPAN = 128 << 10


class CudaError(RuntimeError):
    """A CUDA call failed; `name` is the driver's name of the error, e.g. CUDA_ERROR_INVALID_VALUE."""

    def __init__(self, call: str, name: str, detail: str = ""):
        self.call, self.name = call, name
        super().__init__(f"{call}: {name}" + (f": {detail}" if detail else ""))


@dataclass(frozen=True)
class Function:
    """A kernel loaded in a device's primary context, ready to launch."""

    handle: Any
    context: int
    block: tuple[int, int, int]
    smem: int
    early: bool  # it may start while the kernel before it still runs, and waits itself for what that one writes
    library: Any  # keeps the code loaded


@dataclass(frozen=True)
class Event:
    """A point of a stream in a device's primary context, set by `Driver.upload`."""

    handle: Any
    context: Any


class Driver:
    """CUDA as the runtime sees it.  Devices are torch's indices; streams are torch's raw handles."""

    device_type = "cuda"

    def __init__(self) -> None:
        try:
            import cuda.bindings.driver as cu

            self._cu: Any = cu
            self._check("cuInit", cu.cuInit(0))
        except ImportError as e:
            raise CudaError("import cuda.bindings", "missing", f"{e}; install cuda-bindings") from None
        except RuntimeError as e:
            if isinstance(e, CudaError):
                raise
            raise CudaError("cuInit", "no driver", f"this machine has no NVIDIA driver ({e})") from None
        import torch

        # The public call builds a Stream object (1 µs); this is what torch's own compiled code uses.
        self._raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (
            lambda index: torch.cuda.current_stream(index).cuda_stream
        )
        self._contexts: dict[int, Any] = {}
        self._lock = threading.Lock()
        self._version = int(self._check("cuDriverGetVersion", self._cu.cuDriverGetVersion()))
        early = cu.CUlaunchAttribute()
        early.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        early.value.programmaticStreamSerializationAllowed = 1
        self._early = [early]

    def _check(self, call: str, result: tuple) -> Any:
        """The payload of a cuda.bindings result; CudaError unless it says success."""
        if int(result[0]) != 0:
            _, name = self._cu.cuGetErrorName(result[0])
            _, text = self._cu.cuGetErrorString(result[0])
            raise CudaError(call, _text(name), _text(text))
        return result[1] if len(result) == 2 else result[1:]

    # ------------------------------------------------------------------ devices and streams

    def sm_count(self, device: int) -> int:
        return self._attribute(device, "MULTIPROCESSOR_COUNT")

    def capability(self, device: int) -> tuple[int, int]:
        return (
            self._attribute(device, "COMPUTE_CAPABILITY_MAJOR"),
            self._attribute(device, "COMPUTE_CAPABILITY_MINOR"),
        )

    def _attribute(self, device: int, name: str) -> int:
        attribute = getattr(self._cu.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        handle = self._check("cuDeviceGet", self._cu.cuDeviceGet(device))
        return int(self._check("cuDeviceGetAttribute", self._cu.cuDeviceGetAttribute(attribute, handle)))

    def current_stream(self, device: int) -> int:
        """torch's current stream on that device, whatever torch's current device is."""
        return self._raw_stream(device)

    def is_capturing(self, stream: int) -> bool:
        """Is a CUDA graph being captured from that stream?"""
        error, status = self._cu.cuStreamIsCapturing(stream)
        if error:
            self._check("cuStreamIsCapturing", (error, status))
        return bool(status)

    def _context(self, device: int) -> Any:
        """The device's primary context, the one that torch uses; retained for the life of the process."""
        if device not in self._contexts:
            handle = self._check("cuDeviceGet", self._cu.cuDeviceGet(device))
            retained = self._cu.cuDevicePrimaryCtxRetain(handle)
            self._contexts[device] = self._check("cuDevicePrimaryCtxRetain", retained)
        return self._contexts[device]

    # ------------------------------------------------------------------ copies

    def make_event(self, device: int) -> Event:
        """An event of that device, for `upload`; waiting for it before that takes no time."""
        cu, context = self._cu, self._context(device)
        pushed = self._push(context)
        try:
            made = cu.cuEventCreate(int(cu.CUevent_flags.CU_EVENT_DISABLE_TIMING))
        finally:
            self._pop(pushed)
        return Event(self._check("cuEventCreate", made), context)

    def upload(self, copies: Sequence[tuple[int, int, int]], stream: int, event: Event) -> None:
        """Copy (address on the device, address in pinned memory, bytes) in the order of `stream`, without waiting;
        `event` tells when it is done."""
        cu = self._cu
        pushed = self._push(event.context)
        try:
            for destination, source, size in copies:
                copied = cu.cuMemcpyHtoDAsync(destination, source, size, stream)
                if copied[0]:
                    self._check("cuMemcpyHtoDAsync", copied)
            recorded = cu.cuEventRecord(event.handle, stream)
        finally:
            self._pop(pushed)
        if recorded[0]:
            self._check("cuEventRecord", recorded)

    def wait(self, event: Event) -> None:
        """Wait on the host until the last `upload` with that event is done."""
        pushed = self._push(event.context)
        try:
            done = self._cu.cuEventSynchronize(event.handle)
        finally:
            self._pop(pushed)
        if done[0]:
            self._check("cuEventSynchronize", done)

    def destroy(self, event: Event) -> None:
        """Wait for an event and give it back: from the garbage collector, and so perhaps while a graph is captured,
        which waiting would end unless the thread says that it knows what it does."""
        cu = self._cu
        relaxed = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        mode = self._check("cuThreadExchangeStreamCaptureMode", cu.cuThreadExchangeStreamCaptureMode(relaxed))
        try:
            self.wait(event)
            pushed = self._push(event.context)
            try:
                done = cu.cuEventDestroy(event.handle)
            finally:
                self._pop(pushed)
        finally:
            self._check("cuThreadExchangeStreamCaptureMode", cu.cuThreadExchangeStreamCaptureMode(mode))
        self._check("cuEventDestroy", done)

    def _push(self, context: Any) -> bool:
        """Make a context current; False where it is.  torch's current device decides which one is, and a new thread
        has none."""
        if int(self._cu.cuCtxGetCurrent()[1]) == int(context):
            return False
        self._check("cuCtxPushCurrent", self._cu.cuCtxPushCurrent(context))
        return True

    def _pop(self, pushed: bool) -> None:
        if pushed:
            self._check("cuCtxPopCurrent", self._cu.cuCtxPopCurrent())

    # ------------------------------------------------------------------ kernels

    def load(self, cubin: bytes, kernel: Mapping[str, Any], arch: str, device: int) -> Function:
        """Load a kernel of an artifact on a device.

        Raises ValueError where the device can't run `arch` or where the driver's parameter layout isn't the
        manifest's, CudaError where the driver refuses the code.
        """
        found = self.capability(device)
        if found != ARCHITECTURES[arch]:
            raise ValueError(f"the kernel is built for {arch}, cuda:{device} is sm_{found[0]}{found[1]}")
        cu = self._cu
        with self._lock:
            # Loading may allocate, which a capturing thread is refused unless it says that it knows what it does.
            relaxed = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
            mode = self._check("cuThreadExchangeStreamCaptureMode", cu.cuThreadExchangeStreamCaptureMode(relaxed))
            context = self._context(device)
            self._check("cuCtxPushCurrent", cu.cuCtxPushCurrent(context))
            try:
                return self._load(cubin, kernel, int(context))
            finally:
                self._check("cuCtxPopCurrent", cu.cuCtxPopCurrent())
                self._check("cuThreadExchangeStreamCaptureMode", cu.cuThreadExchangeStreamCaptureMode(mode))

    def _load(self, cubin: bytes, kernel: Mapping[str, Any], context: int) -> Function:
        cu = self._cu
        library = self._check("cuLibraryLoadData", cu.cuLibraryLoadData(cubin, [], [], 0, [], [], 0))
        found = self._check("cuLibraryGetKernel", cu.cuLibraryGetKernel(library, kernel["entry"].encode()))
        function = self._check("cuKernelGetFunction", cu.cuKernelGetFunction(found))
        for index, param in enumerate(kernel["params"]):
            layout = self._check("cuFuncGetParamInfo", cu.cuFuncGetParamInfo(function, index))
            if tuple(map(int, layout)) != (param["offset"], param["size"]):
                raise ValueError(
                    f"{kernel['entry']}: parameter {index} ({param['name']}): the manifest says offset and size "
                    f"{(param['offset'], param['size'])}, the driver {tuple(map(int, layout))}"
                )
        if int(cu.cuFuncGetParamInfo(function, len(kernel["params"]))[0]) == 0:
            raise ValueError(f"{kernel['entry']}: the kernel has more parameters than the manifest")
        limit = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._check("cuFuncSetAttribute", cu.cuFuncSetAttribute(function, limit, kernel["smem"]))
        early = bool(kernel.get("starts_early"))
        return Function(function, context, tuple(kernel["block"]), kernel["smem"], early, library)

    def launch(self, function: Function, grid: int, stream: int, arguments: int) -> None:
        """Launch `grid` blocks; `arguments` is the address of an array of pointers to the parameters, which the
        driver copies before this returns."""
        cu = self._cu
        # The current context follows torch's current device, and a new thread has none: only this call tells.
        foreign = int(cu.cuCtxGetCurrent()[1]) != function.context
        if foreign:
            self._check("cuCtxPushCurrent", cu.cuCtxPushCurrent(cu.CUcontext(function.context)))
        try:
            if function.early:
                config = self._early_config(function, grid, stream)
                result = cu.cuLaunchKernelEx(config, function.handle, arguments, 0)
            else:
                x, y, z = function.block
                result = cu.cuLaunchKernel(function.handle, grid, 1, 1, x, y, z, function.smem, stream, arguments, 0)
        finally:
            if foreign:
                self._check("cuCtxPopCurrent", cu.cuCtxPopCurrent())
        if result[0]:
            self._check("cuLaunchKernel", result)

    def _early_config(self, function: Function, grid: int, stream: int) -> Any:
        """Programmatic dependent launch (CUDA programming guide): no gap between this kernel and the one before."""
        config = self._cu.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = function.block
        config.sharedMemBytes, config.hStream = function.smem, stream
        config.attrs, config.numAttrs = self._early, 1
        return config

    def encode(self, tensor_map: TensorMap, address: int) -> bytes:
        """The 128 bytes of a CUtensorMap.  Out-of-range elements read as zero."""
        cu, enums = self._cu, tensor_map
        u64, u32 = cu.cuuint64_t, cu.cuuint32_t
        dtype = {"bf16": "BFLOAT16", "f16": "FLOAT16"}[enums.dtype]
        swizzle = ("NONE", "32B", "64B", "128B")[enums.swizzle]
        result = cu.cuTensorMapEncodeTiled(
            getattr(cu.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{dtype}"),
            len(enums.dims),
            address,
            [u64(n) for n in enums.dims],
            [u64(n) for n in enums.strides],
            [u32(n) for n in enums.box],
            [u32(1)] * len(enums.dims),
            cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            getattr(cu.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{swizzle}"),
            # A row of a box is one 128-byte line; a wider promotion would fetch the neighbouring head with it.
            cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        encoded = self._check("cuTensorMapEncodeTiled", result)
        raw = bytearray(ctypes.string_at(encoded.getPtr(), 128))
        if self._version <= BIT_21_LAST_DRIVER and enums.span < BIT_21_SPAN:
            (word,) = struct.unpack_from("<Q", raw, 8)
            struct.pack_into("<Q", raw, 8, word & ~(1 << 21))
        return bytes(raw)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


@functools.cache
def driver() -> Driver:
    """The process's driver, made at the first call on a CUDA tensor."""
    return Driver()
