/* A libcuda that launches nothing: it records what the runtime asks of the driver, so that runtime/driver.py is tested
   through the real cuda.bindings on a machine with no GPU.  Two devices; a handle is a small number. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { INVALID_VALUE = 1, INVALID_CONTEXT = 201, NOT_FOUND = 500 };

static _Thread_local uintptr_t contexts[8];
static _Thread_local int depth;
static _Thread_local int mode;

/* What a test sets and reads through ctypes. */
int stub_version = 13000, stub_major = 9, stub_fail_launch, stub_refuse_zero_stride, stub_capturing_stream = -1;
int stub_fail_copy, stub_copies, stub_events, stub_waits;
uintptr_t stub_copy_stream, stub_record_stream;
int stub_loads, stub_launches, stub_early_launches, stub_load_mode, stub_param_count, stub_smem_attribute;
size_t stub_offsets[64], stub_sizes[64];
struct { uintptr_t function, stream, context; unsigned grid[3], block[3], smem; unsigned char params[4096]; } stub_last;
struct { int dtype; unsigned rank; uint64_t address, dims[5], strides[4]; uint32_t box[5]; int swizzle, l2, oob; } stub_map;
int stub_depth(void) { return depth; }
void stub_make_current(uintptr_t context) { contexts[0] = context; depth = 1; }

int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *v) { *v = stub_version; return 0; }
int cuGetErrorName(int e, const char **s) { *s = e == INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE" : "CUDA_ERROR_OTHER"; return 0; }
int cuGetErrorString(int e, const char **s) { *s = "said by the stub"; return 0; }
int cuDeviceGet(int *d, int ordinal) { *d = ordinal; return 0; }
int cuDeviceGetAttribute(int *v, int attribute, int device) {
    *v = attribute == 16 ? 132 + device : attribute == 75 ? stub_major : 0;
    return 0;
}
int cuDevicePrimaryCtxRetain(uintptr_t *c, int device) { *c = 0x1000 + device; return 0; }
int cuCtxGetCurrent(uintptr_t *c) { *c = depth ? contexts[depth - 1] : 0; return 0; }
int cuCtxPushCurrent_v2(uintptr_t c) { contexts[depth++] = c; return 0; }
int cuCtxPopCurrent_v2(uintptr_t *c) {
    if (!depth) return INVALID_CONTEXT;
    *c = contexts[--depth];
    return 0;
}
int cuThreadExchangeStreamCaptureMode(int *m) { int old = mode; mode = *m; *m = old; return 0; }
int cuStreamIsCapturing(uintptr_t stream, int *status) { *status = (int)stream == stub_capturing_stream; return 0; }

static int is_current(uintptr_t event) { return depth && contexts[depth - 1] - 0x1000 == event - 0x5000; }
int cuEventCreate(uintptr_t *e, unsigned flags) {
    if (!depth || flags != 2) return INVALID_CONTEXT;
    stub_events++;
    *e = 0x5000 + contexts[depth - 1] - 0x1000;
    return 0;
}
int cuEventRecord(uintptr_t e, uintptr_t stream) {
    stub_record_stream = stream;
    return is_current(e) ? 0 : INVALID_CONTEXT;
}
int cuEventSynchronize(uintptr_t e) {
    stub_waits++;
    return is_current(e) ? 0 : INVALID_CONTEXT;
}
int cuEventDestroy_v2(uintptr_t e) {
    stub_events--;
    return is_current(e) ? 0 : INVALID_CONTEXT;
}
int cuMemcpyHtoDAsync_v2(uintptr_t to, const void *from, size_t bytes, uintptr_t stream) {
    if (stub_fail_copy) return INVALID_VALUE;
    stub_copies++;
    stub_copy_stream = stream;
    memcpy((void *)to, from, bytes);
    return 0;
}

int cuLibraryLoadData(uintptr_t *l, const void *code, void *a, void *b, unsigned n, void *c, void *d, unsigned m) {
    if (memcmp(code, "cubin", 5)) return INVALID_VALUE;
    stub_loads++;
    stub_load_mode = mode;
    *l = 0x2000;
    return 0;
}
int cuLibraryGetKernel(uintptr_t *k, uintptr_t library, const char *name) {
    *k = 0x3000;
    return strcmp(name, "attncc_test_0") ? NOT_FOUND : 0;
}
int cuKernelGetFunction(uintptr_t *f, uintptr_t kernel) {
    if (!depth) return INVALID_CONTEXT;
    *f = 0x4000 + (contexts[depth - 1] & 15);
    return 0;
}
int cuFuncGetParamInfo(uintptr_t f, size_t index, size_t *offset, size_t *size) {
    if (index >= (size_t)stub_param_count) return INVALID_VALUE;
    *offset = stub_offsets[index];
    *size = stub_sizes[index];
    return 0;
}
int cuFuncSetAttribute(uintptr_t f, int attribute, int value) {
    if (attribute == 8) stub_smem_attribute = value;
    return 0;
}
int cuLaunchKernel(uintptr_t f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned smem, uintptr_t stream, void **params, void **extra) {
    if (stub_fail_launch) return INVALID_VALUE;
    uintptr_t context;
    cuCtxGetCurrent(&context);
    if (f - 0x4000 != context - 0x1000) return INVALID_CONTEXT;
    stub_launches++;
    stub_last.function = f, stub_last.stream = stream, stub_last.context = context, stub_last.smem = smem;
    stub_last.grid[0] = gx, stub_last.grid[1] = gy, stub_last.grid[2] = gz;
    stub_last.block[0] = bx, stub_last.block[1] = by, stub_last.block[2] = bz;
    for (int i = 0; i < stub_param_count; i++) memcpy(stub_last.params + stub_offsets[i], params[i], stub_sizes[i]);
    return 0;
}
struct config { // CUlaunchConfig, CUlaunchAttribute
    unsigned grid[3], block[3], smem;
    uintptr_t stream;
    struct { int id, pad; int value[16]; } *attrs;
    unsigned attr_count;
};
int cuLaunchKernelEx(const struct config *c, uintptr_t f, void **params, void **extra) {
    if (c->attr_count != 1 || c->attrs->id != 6 || c->attrs->value[0] != 1) return INVALID_VALUE; // early start
    int failed = cuLaunchKernel(f, c->grid[0], c->grid[1], c->grid[2], c->block[0], c->block[1], c->block[2], c->smem,
                                c->stream, params, extra);
    stub_early_launches += !failed;
    return failed;
}
int cuTensorMapEncodeTiled(void *map, int dtype, unsigned rank, void *address, const uint64_t *dims,
                           const uint64_t *strides, const uint32_t *box, const uint32_t *steps, int interleave,
                           int swizzle, int l2, int oob) {
    for (unsigned i = 0; i + 1 < rank; i++)
        if (strides[i] % 16 || (stub_refuse_zero_stride && !strides[i])) return INVALID_VALUE;
    stub_map.dtype = dtype, stub_map.rank = rank, stub_map.address = (uint64_t)address;
    memcpy(stub_map.dims, dims, rank * 8), memcpy(stub_map.strides, strides, (rank - 1) * 8);
    memcpy(stub_map.box, box, rank * 4);
    stub_map.swizzle = swizzle, stub_map.l2 = l2, stub_map.oob = oob;
    memset(map, 0xff, 128);
    memcpy(map, &stub_map.address, 8);
    return 0;
}

int cuGetProcAddress_v2(const char *symbol, void **found, int version, uint64_t flags, int *status) {
    char v2[128];
    Dl_info self;
    dladdr((void *)cuInit, &self);
    void *handle = dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    strcat(strcpy(v2, symbol), "_v2");
    *found = dlsym(handle, v2);
    if (!*found) *found = dlsym(handle, symbol);
    if (status) *status = *found ? 0 : 1;
    return *found ? 0 : NOT_FOUND;
}
