// A stand-in for the CUDA driver: what a launcher of Triton calls, built as libcuda.so.1.
//
// Nothing is computed. Each call that matters becomes a line of JSON in the file that
// STANDIN_CUDA_LOG names: code that is loaded, with the table of its parameters, tensor maps and
// launches, each with what is wrong about it ("" if nothing), and calls that a capture refuses. A
// wrong call returns the error that CUDA would return.
//
// The table of parameters is the cubin's own: notes in its section .nv.info.<kernel>, each a format,
// a number, and a length or a value. Rules are those of the CUDA driver API's manual.

#include "cuda.h"
#include <elf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PARAMETERS 1024
#define BLOCK_SHARED 49152    // bytes a kernel has without asking for more
#define OPTIN_SHARED 232448   // and where it asks: 227 KB on sm_90
#define LAUNCH_US 10          // that each launch takes, by the clock of events

typedef struct {
    char name[512];
    int count;                // parameters
    int size[PARAMETERS];     // bytes of each
    int threads;              // of a block (reqntid)
    int shared;               // bytes that the code itself declares
    int allowed;              // bytes that a launch may add
} Kernel;

static FILE *journal(void) {
    static FILE *file;
    if (!file) {
        const char *path = getenv("STANDIN_CUDA_LOG");
        file = path ? fopen(path, "a") : stderr;
        setvbuf(file, 0, _IOLBF, 0);
    }
    return file;
}

// -- the context and the device -------------------------------------------------------------------

static int current;

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { *version = 13000; return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { *device = ordinal; return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) { *device = 0; return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { current = 1; return CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *context) {
    *context = (CUcontext)(long)current;
    return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    *context = (CUcontext)1;
    return CUDA_SUCCESS;
}
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { *value = 0; return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult error, const char **text) {
    static char buffer[64];
    snprintf(buffer, sizeof buffer, "stand-in error %d", error);
    *text = buffer;
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = OPTIN_SHARED; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = 233472; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: *value = 65536; break;
    default: *value = 1;
    }
    return CUDA_SUCCESS;
}

// -- a capture, and what it refuses ---------------------------------------------------------------

static CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
static CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;  // of the thread

static CUresult unsafe(const char *call) {
    if (capture == CU_STREAM_CAPTURE_STATUS_NONE) {
        fprintf(journal(), "{\"waits\": \"%s\"}\n", call);
        return CUDA_SUCCESS;
    }
    capture = CU_STREAM_CAPTURE_STATUS_INVALIDATED;
    fprintf(journal(), "{\"refused\": \"%s\"}\n", call);
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *wanted) {
    CUstreamCaptureMode before = mode;
    mode = *wanted, *wanted = before;
    return CUDA_SUCCESS;
}
CUresult cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode wanted) {
    capture = CU_STREAM_CAPTURE_STATUS_ACTIVE;
    return CUDA_SUCCESS;
}
CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph) {
    CUresult result = capture == CU_STREAM_CAPTURE_STATUS_INVALIDATED
                          ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
    capture = CU_STREAM_CAPTURE_STATUS_NONE;
    return result;
}
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
    *status = capture;
    return CUDA_SUCCESS;
}
CUresult cuCtxSynchronize(void) { return unsafe("cuCtxSynchronize"); }
CUresult cuStreamSynchronize(CUstream stream) { return unsafe("cuStreamSynchronize"); }
CUresult cuEventSynchronize(CUevent event) { return unsafe("cuEventSynchronize"); }
CUresult cuEventQuery(CUevent event) { return unsafe("cuEventQuery"); }
CUresult cuStreamQuery(CUstream stream) { return unsafe("cuStreamQuery"); }
CUresult cuMemAlloc(CUdeviceptr *address, size_t bytes) { return unsafe("cuMemAlloc"); }
CUresult cuMemFree(CUdeviceptr address) { return unsafe("cuMemFree"); }
CUresult cuMemHostAlloc(void **address, size_t bytes, unsigned flags) {
    return unsafe("cuMemHostAlloc");
}
CUresult cuMemcpyHtoD(CUdeviceptr to, const void *from, size_t bytes) {
    return unsafe("cuMemcpyHtoD");
}
CUresult cuMemcpyDtoH(void *to, CUdeviceptr from, size_t bytes) { return unsafe("cuMemcpyDtoH"); }

// -- code -----------------------------------------------------------------------------------------

enum { SIZED = 4, KPARAM_INFO = 0x17, REQNTID = 0x10 };

static void read_notes(Kernel *kernel, const unsigned char *at, const unsigned char *end) {
    while (at < end) {
        int format = at[0], kind = at[1], length = at[2] | at[3] << 8;
        at += 4;
        if (format != SIZED) continue;
        unsigned words[3];
        memcpy(words, at, length < 12 ? length : 12);
        if (kind == KPARAM_INFO) {
            int ordinal = words[1] & 0xffff;
            if (ordinal < PARAMETERS) {
                kernel->size[ordinal] = words[2] >> 18;
                if (ordinal >= kernel->count) kernel->count = ordinal + 1;
            }
        } else if (kind == REQNTID) {
            kernel->threads = words[0];
        }
        at += length;
    }
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    if (capture != CU_STREAM_CAPTURE_STATUS_NONE && mode != CU_STREAM_CAPTURE_MODE_RELAXED)
        return unsafe("cuModuleLoadData");
    const char *base = image;
    const Elf64_Ehdr *header = image;
    if (memcmp(header->e_ident, ELFMAG, SELFMAG)) return CUDA_ERROR_INVALID_IMAGE;
    const Elf64_Shdr *sections = (const void *)(base + header->e_shoff);
    const char *names = base + sections[header->e_shstrndx].sh_offset;
    Kernel *kernel = calloc(1, sizeof *kernel);
    kernel->allowed = BLOCK_SHARED;
    for (int i = 0; i < header->e_shnum; i++) {
        const char *name = names + sections[i].sh_name;
        if (!strncmp(name, ".nv.shared.", 11) && strncmp(name + 11, "reserved", 8))
            kernel->shared = sections[i].sh_size;
        if (strncmp(name, ".nv.info.", 9)) continue;
        strncpy(kernel->name, name + 9, sizeof kernel->name - 1);
        const unsigned char *notes = (const void *)(base + sections[i].sh_offset);
        read_notes(kernel, notes, notes + sections[i].sh_size);
    }
    fprintf(journal(), "{\"load\": \"%s\", \"parameters\": %d, \"threads\": %d}\n", kernel->name,
            kernel->count, kernel->threads);
    *module = (CUmodule)kernel;
    return CUDA_SUCCESS;
}
CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    if (strcmp(name, ((Kernel *)module)->name)) return CUDA_ERROR_NOT_FOUND;
    *function = (CUfunction)module;
    return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    switch (attribute) {
    case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: *value = ((Kernel *)function)->shared; break;
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = 1024; break;
    default: *value = 0;
    }
    return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
    Kernel *kernel = (Kernel *)function;
    if (attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) {
        if (value + kernel->shared > OPTIN_SHARED) return CUDA_ERROR_INVALID_VALUE;
        kernel->allowed = value;
    } else if ((int)attribute > 15) {  // Triton 3.9: as much as there is
        kernel->allowed = OPTIN_SHARED;
    }
    return CUDA_SUCCESS;
}
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction function, const CUlaunchConfig *c) {
    *count = 1;
    return CUDA_SUCCESS;
}

// -- events ---------------------------------------------------------------------------------------

#undef cuEventElapsedTime  // newer headers give it a number
static unsigned long long now;  // microseconds of the device

CUresult cuEventCreate(CUevent *event, unsigned flags) {
    *event = calloc(1, sizeof now);
    return CUDA_SUCCESS;
}
CUresult cuEventRecord(CUevent event, CUstream stream) {
    fprintf(journal(), "{\"event\": %lu}\n", (unsigned long)stream);
    *(unsigned long long *)event = now;
    return CUDA_SUCCESS;
}
CUresult cuEventElapsedTime(float *ms, CUevent start, CUevent end) {
    *ms = (*(unsigned long long *)end - *(unsigned long long *)start) / 1e3f;
    return CUDA_SUCCESS;
}

// -- launches -------------------------------------------------------------------------------------

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr address) {
    fprintf(journal(), "{\"queried\": %llu}\n", (unsigned long long)address);
    *(CUdeviceptr *)value = address;
    return CUDA_SUCCESS;
}

static void numbers(const char *name, const unsigned long long *values, int count) {
    fprintf(journal(), ", \"%s\": [", name);
    for (int i = 0; i < count; i++) fprintf(journal(), "%s%llu", i ? ", " : "", values[i]);
    fprintf(journal(), "]");
}

CUresult cuTensorMapEncodeTiled(
    CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
    const cuuint64_t *extents, const cuuint64_t *strides, const cuuint32_t *box,
    const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
    CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
    static const int bytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
    static const unsigned widest[] = {1 << 30, 32, 64, 128};  // bytes of a swizzled row
    const char *wrong = "";
    unsigned long long sides[5] = {0}, rows[5] = {0}, tile[5] = {0};
    if ((unsigned long)map % 64) wrong = "the map is not aligned to 64 bytes";
    if ((unsigned long)address % 16) wrong = "the address is not aligned to 16 bytes";
    if (rank < 1 || rank > 5) wrong = "the rank is not 1 to 5", rank = 0;
    for (unsigned i = 0; i < rank; i++) {
        sides[i] = extents[i], tile[i] = box[i];
        if (extents[i] < 1 || extents[i] > 1ull << 32) wrong = "an extent is not 1 to 2^32";
        if (box[i] < 1 || box[i] > 256) wrong = "a side of the box is not 1 to 256";
        if (steps[i] < 1 || steps[i] > 8) wrong = "a step between elements is not 1 to 8";
        if (i + 1 == rank) break;
        rows[i] = strides[i];
        if (strides[i] % 16 || strides[i] >= 1ull << 40)
            wrong = "a stride is no multiple of 16 bytes below 2^40";
    }
    unsigned width = (type < 13 ? bytes[type] : 1) * tile[0];
    if (width % 16) wrong = "a row of the box is no multiple of 16 bytes";
    if (swizzle < 4 && width > widest[swizzle]) wrong = "a row of the box is wider than the swizzle";
    fprintf(journal(), "{\"map\": %lu", (unsigned long)address);
    numbers("extents", sides, rank);
    numbers("strides", rows, rank ? rank - 1 : 0);
    numbers("box", tile, rank);
    fprintf(journal(), ", \"wrong\": \"%s\"}\n", wrong);
    memset(map, 0, sizeof *map);
    memcpy(map, &address, sizeof address);  // by which a launch's parameter is recognised
    return *wrong ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters,
                          void **extra) {
    const Kernel *kernel = (const Kernel *)function;
    const char *wrong = "";
    now += LAUNCH_US;
    if (!config->gridDimX || !config->gridDimY || !config->gridDimZ) wrong = "an empty grid";
    if (config->gridDimX > 0x7fffffffu || config->gridDimY > 65535 || config->gridDimZ > 65535)
        wrong = "a grid that is too long";
    if ((int)config->blockDimX != kernel->threads || config->blockDimY != 1)
        wrong = "a block of other threads than the code was compiled for";
    if ((int)config->sharedMemBytes > kernel->allowed) wrong = "more shared memory than allowed";
    fprintf(journal(), "{\"launch\": \"%s\"", kernel->name);
    unsigned long long grid[] = {config->gridDimX, config->gridDimY, config->gridDimZ};
    numbers("grid", grid, 3);
    fprintf(journal(), ", \"threads\": %u, \"shared\": %u, \"stream\": %lu, \"attributes\": %u",
            config->blockDimX, config->sharedMemBytes, (unsigned long)config->hStream,
            config->numAttrs);
    fprintf(journal(), ", \"captured\": %d, \"parameters\": [",
            capture != CU_STREAM_CAPTURE_STATUS_NONE);
    for (int i = 0; i < kernel->count; i++) {
        fprintf(journal(), "%s\"", i ? ", " : "");
        const unsigned char *bytes = parameters[i];
        if (kernel->size[i] == sizeof(CUtensorMap) && (unsigned long)bytes % 64)
            wrong = "a tensor map that is not aligned to 64 bytes";
        for (int k = 0; k < kernel->size[i]; k++) fprintf(journal(), "%02x", bytes[k]);
        fprintf(journal(), "\"");
    }
    fprintf(journal(), "], \"wrong\": \"%s\"}\n", wrong);
    return *wrong ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
