// CUDA's driver, and what stands for the functions of its runtime, cuBLAS and NCCL, on a machine without a GPU.
//
// A device's memory is addresses that the host can neither read nor write, as with a GPU; what is copied from there is
// zeros. Kernels do nothing, and all else is done at once. Refused are: memory that is not there, or not so long; an
// event or a kernel of one device on a stream of another; IPC within one process. While a stream is captured: to wait for
// it, for its device or for what it has recorded, or to ask; that it waits for what is not captured; the default stream,
// where that would wait for it. What is refused so ends the capture, too.
// Names, numbers of errors and of attributes are CUDA's. `fake_gpu.py` says how this gets under CuPy.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef int Status;
enum {
    OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101, INVALID_CONTEXT = 201,
    FILE_NOT_FOUND = 301, INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_SUPPORTED = 801, CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901, CAPTURE_ISOLATION = 905, CAPTURE_IMPLICIT = 906, CAPTURED_EVENT = 907,
};
enum { NON_BLOCKING_STREAM = 1, NON_TIMING_EVENT = 2, INTERPROCESS_EVENT = 4 };

typedef struct Stream {
    int device, flags;
    long capture;  // which one is under way; 0: none
    int is_spoilt;
    struct Stream *next;  // that is captured
} Stream;
typedef struct { int device, flags, opened, is_recorded; long capture; } Event;
typedef struct { char *image; size_t size; int device; } Module;
typedef struct { Module *module; char name[256]; } Function;
typedef struct { char bytes[64]; } Handle;
typedef struct { int process; size_t size; } MemoryHandle;
typedef enum { ON_DEVICE, ON_HOST, OF_ANOTHER_PROCESS } Kind;
typedef struct Block {
    char *begin;
    size_t size;
    int device;
    Kind kind;
    struct Block *next;
} Block;

static __thread int current;
static Block *blocks;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

// How often the host has waited for the device: waits for streams, events and devices, copies that are not
// asynchronous, and giving back memory, for which CUDA waits as well.
static long waits;
long fake_waits(void) { return __atomic_load_n(&waits, __ATOMIC_SEQ_CST); }
static void waited(void) { __atomic_add_fetch(&waits, 1, __ATOMIC_SEQ_CST); }

static int devices(void) {
    const char *text = getenv("FAKE_GPUS");
    return text ? atoi(text) : 4;
}

// The default streams are the addresses 0, 1 and 2.
static int made(const Stream *stream) { return (uintptr_t)stream > 2; }
static int foreign(const Stream *stream) { return made(stream) && stream->device != current; }

static Stream *captured;
static long captures;
static int is_captured(const Stream *stream) { return made(stream) && stream->capture; }
static Status spoilt(Stream *stream, Status why) {
    stream->is_spoilt = 1;
    return why;
}
// Spoils the captures of all streams of the current device but those with `flags`; `why`, if there were some.
static Status spoil_all(int but, Status why) {
    Status found = OK;
    pthread_mutex_lock(&lock);
    for (Stream *each = captured; each; each = each->next)
        if (each->device == current && !(each->flags & but)) found = spoilt(each, why);
    pthread_mutex_unlock(&lock);
    return found;
}
// Whether work may be given to a stream.
static Status taken(Stream *stream) {
    if (!made(stream)) return spoil_all(NON_BLOCKING_STREAM, CAPTURE_IMPLICIT);
    return stream->capture && stream->is_spoilt ? CAPTURE_INVALIDATED : OK;
}

static Block *find(const void *at) {
    pthread_mutex_lock(&lock);
    Block *block = blocks;
    while (block && !((char *)at >= block->begin && (char *)at < block->begin + block->size)) block = block->next;
    pthread_mutex_unlock(&lock);
    return block;
}

static int on_device(const void *at, size_t size) {
    Block *block = find(at);
    return size == 0 || (block && block->kind != ON_HOST && (char *)at + size <= block->begin + block->size);
}

static Status keep(void **result, size_t size, Kind kind) {
    int access = kind == ON_HOST ? PROT_READ | PROT_WRITE : PROT_NONE;
    *result = mmap(NULL, size, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (*result == MAP_FAILED) return OUT_OF_MEMORY;
    Block *block = calloc(1, sizeof *block);
    *block = (Block){.begin = *result, .size = size, .device = current, .kind = kind};
    pthread_mutex_lock(&lock);
    block->next = blocks;
    blocks = block;
    pthread_mutex_unlock(&lock);
    return OK;
}

static Status drop(void *begin, Kind kind) {
    Block *found = NULL;
    pthread_mutex_lock(&lock);
    for (Block **at = &blocks; *at; at = &(*at)->next)
        if ((*at)->begin == begin && (*at)->kind == kind) {
            found = *at;
            *at = found->next;
            break;
        }
    pthread_mutex_unlock(&lock);
    if (!found) return INVALID_VALUE;
    munmap(found->begin, found->size);
    free(found);
    return OK;
}

// ---- devices

Status cudaGetDeviceCount(int *count) { *count = devices(); return OK; }
Status cudaGetDevice(int *device) { *device = current; return OK; }
Status cudaSetDevice(int device) {
    if (device < 0 || device >= devices()) return INVALID_DEVICE;
    current = device;
    return OK;
}
Status cudaDriverGetVersion(int *version) { *version = 13000; return OK; }
Status cudaDeviceGetAttribute(int *value, int attribute, int device) {
    switch (attribute) {
    case 1: *value = 1024; break;    // threads a block
    case 8: *value = 48 << 10; break;  // shared memory a block
    case 10: *value = 32; break;     // threads a warp
    case 16: *value = 132; break;    // multiprocessors
    case 39: *value = 2048; break;   // threads a multiprocessor
    case 75: *value = 9; break;      // compute capability
    case 76: *value = 0; break;
    case 97: *value = 227 << 10; break;  // shared memory a block, if asked for
    default: *value = 1;
    }
    return OK;
}
Status cudaGetDeviceProperties(char *properties, int device) {
    memset(properties, 0, 960);  // less than the structure of CUDA 12 and 13
    strcpy(properties, "fake GPU");
    *(size_t *)(properties + 288) = 80ull << 30;  // totalGlobalMem
    *(int *)(properties + 308) = 32;  // warpSize, from which CuPy writes its scan
    *(int *)(properties + 320) = 1024;  // maxThreadsPerBlock
    return OK;
}
Status cudaDeviceSynchronize(void) { waited(); return spoil_all(0, CAPTURE_UNSUPPORTED); }
Status cudaDeviceCanAccessPeer(int *can, int device, int peer) { *can = 1; return OK; }
enum { MOST_DEVICES = 16 };
static char sees[MOST_DEVICES][MOST_DEVICES];  // by a device the others whose memory it reaches
Status cudaDeviceEnablePeerAccess(int peer, unsigned flags) { sees[current][peer] = 1; return OK; }
Status cudaGetLastError(void) { return OK; }
Status cudaPeekAtLastError(void) { return OK; }

// ---- memory

Status cudaMemGetInfo(size_t *free_, size_t *total) { *free_ = 64ull << 30; *total = 80ull << 30; return OK; }
Status cudaMalloc(void **result, size_t size) {
    *result = NULL;
    return size ? keep(result, size, ON_DEVICE) : OK;
}
Status cudaFree(void *begin) {
    if (!begin) return OK;
    waited();
    return drop(begin, ON_DEVICE);
}
Status cudaHostAlloc(void **result, size_t size, unsigned flags) { return keep(result, size ? size : 1, ON_HOST); }
Status cudaMallocHost(void **result, size_t size) { return cudaHostAlloc(result, size, 0); }
Status cudaFreeHost(void *begin) { return drop(begin, ON_HOST); }
struct attributes { int type, device; void *on_device, *on_host; };
Status cudaPointerGetAttributes(struct attributes *result, void *at) {
    Block *block = find(at);
    int on_host = block && block->kind == ON_HOST;
    *result = block ? (struct attributes){on_host ? 1 : 2, block->device, at, on_host ? at : NULL}
                    : (struct attributes){0, -2, NULL, at};
    return OK;
}
// How often something was copied between devices of which neither sees the other: CUDA brings it through the host.
static long detours;
long fake_detours(void) { return __atomic_load_n(&detours, __ATOMIC_SEQ_CST); }
static Status copy(char *to, const char *from, size_t size, int kind) {
    enum { HOST_TO_DEVICE = 1, DEVICE_TO_HOST, DEVICE_TO_DEVICE };  // or what they are
    const char *last = from + size - 1;
    int from_device = on_device(from, size), to_device = on_device(to, size);
    if ((kind == DEVICE_TO_HOST || kind == DEVICE_TO_DEVICE) && !from_device) return INVALID_VALUE;
    if ((kind == HOST_TO_DEVICE || kind == DEVICE_TO_DEVICE) && !to_device) return INVALID_VALUE;
    if (size && from_device && to_device) {
        int giving = find(from)->device, taking = find(to)->device;
        int far = giving != taking && !sees[giving][taking] && !sees[taking][giving];
        if (far) __atomic_add_fetch(&detours, 1, __ATOMIC_SEQ_CST);
    }
    // Where the host's memory is not there, either of these ends the process.
    if (!to_device) memset(to, 0, size);
    if (!from_device) (void)(*(volatile const char *)from + *(volatile const char *)last);
    return OK;
}
Status cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, Stream *stream) {
    Status status = taken(stream);
    return status ? status : copy(to, from, size, kind);
}
Status cudaMemcpy(void *to, const void *from, size_t size, int kind) {
    waited();
    return cudaMemcpyAsync(to, from, size, kind, NULL);
}
Status cudaMemsetAsync(void *to, int value, size_t size, Stream *stream) {
    Status status = taken(stream);
    return status ? status : on_device(to, size) ? OK : INVALID_VALUE;
}
Status cudaMemset(void *to, int value, size_t size) { return cudaMemsetAsync(to, value, size, NULL); }

// ---- streams, events and graphs

Status cudaStreamCreateWithPriority(Stream **result, unsigned flags, int priority) {
    *result = calloc(1, sizeof **result);
    **result = (Stream){.device = current, .flags = flags};
    return OK;
}
Status cudaStreamCreateWithFlags(Stream **result, unsigned flags) {
    return cudaStreamCreateWithPriority(result, flags, 0);
}
Status cudaStreamCreate(Stream **result) { return cudaStreamCreateWithPriority(result, 0, 0); }
Status cudaStreamDestroy(Stream *stream) {
    if (made(stream)) free(stream);
    return OK;
}
Status cudaStreamQuery(Stream *stream) {
    return is_captured(stream) ? spoilt(stream, CAPTURE_UNSUPPORTED) : taken(stream);
}
Status cudaStreamSynchronize(Stream *stream) { waited(); return cudaStreamQuery(stream); }
Status cudaStreamGetFlags(Stream *stream, unsigned *flags) { *flags = made(stream) ? stream->flags : 0; return OK; }
// One that is not captured would become part of the capture, and had to be joined with it before its end.
Status cudaStreamWaitEvent(Stream *stream, Event *event, unsigned flags) {
    if (!event) return INVALID_HANDLE;
    if (!is_captured(stream)) return event->capture ? CAPTURED_EVENT : taken(stream);
    int is_foreign = event->is_recorded && event->capture != stream->capture;
    return is_foreign ? spoilt(stream, CAPTURE_ISOLATION) : taken(stream);
}
Status cudaStreamBeginCapture(Stream *stream, int mode) {
    if (!made(stream) || stream->capture) return CAPTURE_UNSUPPORTED;
    pthread_mutex_lock(&lock);
    stream->capture = ++captures;
    stream->is_spoilt = 0;
    stream->next = captured;
    captured = stream;
    pthread_mutex_unlock(&lock);
    return OK;
}
Status cudaStreamEndCapture(Stream *stream, void **graph) {
    if (!is_captured(stream)) return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    stream->capture = 0;
    Stream **at = &captured;
    while (*at != stream) at = &(*at)->next;
    *at = stream->next;
    pthread_mutex_unlock(&lock);
    *graph = stream->is_spoilt ? NULL : calloc(1, 1);
    return stream->is_spoilt ? CAPTURE_INVALIDATED : OK;
}
Status cudaStreamIsCapturing(Stream *stream, int *result) {
    *result = is_captured(stream) ? 1 + stream->is_spoilt : 0;
    return made(stream) ? OK : taken(stream);
}
Status cudaEventCreateWithFlags(Event **result, unsigned flags) {
    if ((flags & INTERPROCESS_EVENT) && !(flags & NON_TIMING_EVENT)) return INVALID_VALUE;
    *result = calloc(1, sizeof **result);
    **result = (Event){.device = current, .flags = flags};
    return OK;
}
Status cudaEventCreate(Event **result) { return cudaEventCreateWithFlags(result, 0); }
Status cudaEventRecord(Event *event, Stream *stream) {
    if (!event) return INVALID_HANDLE;
    int device = made(stream) ? stream->device : current;
    if (!event->opened && event->device != device) return INVALID_HANDLE;
    event->is_recorded = 1;
    event->capture = made(stream) ? stream->capture : 0;
    return taken(stream);
}
Status cudaEventQuery(Event *event) { return event->capture ? CAPTURED_EVENT : OK; }
Status cudaEventSynchronize(Event *event) { waited(); return cudaEventQuery(event); }
Status cudaEventDestroy(Event *event) { free(event); return OK; }
Status cudaEventElapsedTime(float *ms, Event *begin, Event *end) {
    if ((begin->flags | end->flags) & NON_TIMING_EVENT) return INVALID_HANDLE;
    if (begin->capture || end->capture) return CAPTURED_EVENT;
    *ms = 1;
    return OK;
}
Status cudaEventElapsedTime_v2(float *ms, Event *begin, Event *end) { return cudaEventElapsedTime(ms, begin, end); }
Status cudaGraphInstantiate(void **result, void *graph, unsigned long long flags) {
    *result = calloc(1, 1);
    return OK;
}
Status cudaGraphLaunch(void *graph, Stream *stream) { return foreign(stream) ? INVALID_HANDLE : taken(stream); }
Status cudaGraphUpload(void *graph, Stream *stream) { return OK; }
Status cudaGraphDestroy(void *graph) { free(graph); return OK; }
Status cudaGraphExecDestroy(void *graph) { free(graph); return OK; }

// ---- memory and events of other processes

Status cudaIpcGetMemHandle(Handle *handle, void *at) {
    Block *block = find(at);
    if (!block || block->kind != ON_DEVICE) return INVALID_VALUE;
    memset(handle, 0, sizeof *handle);
    MemoryHandle found = {.process = getpid(), .size = block->size};
    memcpy(handle, &found, sizeof found);
    return OK;
}
Status cudaIpcOpenMemHandle(void **result, Handle handle, unsigned flags) {
    MemoryHandle found;
    memcpy(&found, &handle, sizeof found);
    return found.process == getpid() ? INVALID_CONTEXT : keep(result, found.size, OF_ANOTHER_PROCESS);
}
Status cudaIpcCloseMemHandle(void *begin) { return drop(begin, OF_ANOTHER_PROCESS); }
Status cudaIpcGetEventHandle(Handle *handle, Event *event) {
    int process = getpid();
    if (!(event->flags & INTERPROCESS_EVENT)) return INVALID_VALUE;
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &process, sizeof process);
    return OK;
}
Status cudaIpcOpenEventHandle(Event **result, Handle handle) {
    int process;
    memcpy(&process, &handle, sizeof process);
    if (process == getpid()) return INVALID_CONTEXT;
    *result = calloc(1, sizeof **result);
    **result = (Event){.device = current, .flags = NON_TIMING_EVENT | INTERPROCESS_EVENT, .opened = 1};
    return OK;
}

// ---- the driver: of this library, which programs open by its name

static int contexts[64];
Status cuInit(unsigned flags) { return OK; }
Status cuDriverGetVersion(int *version) { return cudaDriverGetVersion(version); }
Status cuDeviceGetCount(int *count) { return cudaGetDeviceCount(count); }
Status cuDeviceGet(int *device, int number) { *device = number; return OK; }
Status cuDeviceGetName(char *name, int size, int device) { snprintf(name, size, "fake GPU"); return OK; }
Status cuDeviceGetPCIBusId(char *id, int size, int device) {
    snprintf(id, size, "0000:%02X:00.0", 1 + device);
    return OK;
}
Status cuDeviceGetUuid_v2(char *uuid, int device) { memset(uuid, 1 + device, 16); return OK; }
Status cuGetErrorName(int error, const char **text) { *text = "FAKE_ERROR"; return OK; }
Status cuGetErrorString(int error, const char **text) { *text = "error of the fake GPU"; return OK; }
Status cuDevicePrimaryCtxRelease_v2(int device) { return OK; }
Status cuCtxGetCurrent(void **context) { *context = &contexts[current]; return OK; }
Status cuCtxSetCurrent(int *context) { return context ? cudaSetDevice(context - contexts) : OK; }
Status cuCtxGetDevice(int *device) { return cudaGetDevice(device); }
Status cuStreamGetCtx(Stream *stream, void **context) { return cuCtxGetCurrent(context); }

// An image is an ELF file (a cubin) or text (PTX); a kernel is there where its name is.
static size_t size_of(const char *image) {
    if (memcmp(image, "\177ELF", 4)) return strlen(image) + 1;
    uint64_t segments, sections;
    uint16_t segment_size, segment_count, section_size, section_count;
    memcpy(&segments, image + 32, 8);
    memcpy(&sections, image + 40, 8);
    memcpy(&segment_size, image + 54, 2);
    memcpy(&segment_count, image + 56, 2);
    memcpy(&section_size, image + 58, 2);
    memcpy(&section_count, image + 60, 2);
    size_t a = segments + (size_t)segment_size * segment_count, b = sections + (size_t)section_size * section_count;
    return a > b ? a : b;
}
Status cuModuleLoadData(Module **result, const char *image) {
    size_t size = size_of(image);
    *result = calloc(1, sizeof **result);
    **result = (Module){.image = memcpy(malloc(size), image, size), .size = size, .device = current};
    return OK;
}
Status cuModuleLoad(Module **result, const char *path) { return FILE_NOT_FOUND; }
Status cuModuleUnload(Module *module) { return OK; }
Status cuModuleGetFunction(Function **result, Module *module, const char *name) {
    if (!memmem(module->image, module->size, name, strlen(name) + 1)) return NOT_FOUND;
    *result = calloc(1, sizeof **result);
    (*result)->module = module;
    strncpy((*result)->name, name, sizeof (*result)->name - 1);
    return OK;
}
Status cuLaunchKernel(Function *kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                      unsigned block_y, unsigned block_z, unsigned shared, Stream *stream, void **arguments,
                      void **more) {
    if (!grid_x || !grid_y || !grid_z || !block_x || !block_y || !block_z) return INVALID_VALUE;
    if ((size_t)block_x * block_y * block_z > 1024) return INVALID_VALUE;
    if (kernel->module->device == current && !foreign(stream)) return taken(stream);
    fprintf(stderr, "fake GPU: kernel %s of device %d is launched on device %d, on a stream of device %d\n",
            kernel->name, kernel->module->device, current, made(stream) ? stream->device : current);
    return INVALID_HANDLE;
}
Status cuFuncGetAttribute(int *value, int attribute, Function *kernel) { *value = 0; return OK; }
Status cuFuncSetAttribute(Function *kernel, int attribute, int value) { return OK; }
Status cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks_, Function *kernel, int threads, size_t shared) {
    *blocks_ = 8;
    return OK;
}
Status cuOccupancyMaxPotentialBlockSize(int *grid, int *block, Function *kernel, void *of_block, size_t shared,
                                        int most) {
    *grid = 132;
    *block = 256;
    return OK;
}
// CUDA's runtime asks for functions so, also where all that CuPy calls of it is replaced.
Status cuGetExportTable(const void **table, const void *id) { static long none[64] = {8}; *table = none; return OK; }
Status cuGetProcAddress_v2(const char *name, void **result, int version, uint64_t flags, int *why) {
    *result = NULL;
    if (why) *why = 1;
    return NOT_FOUND;
}
Status cuGetProcAddress(const char *name, void **result, int version, uint64_t flags) {
    return cuGetProcAddress_v2(name, result, version, flags, NULL);
}

// ---- cuBLAS and NCCL

Status fake_done(void) { return OK; }
Status fake_not_supported(void) { return NOT_SUPPORTED; }
Status cublasCreate_v2(void **handle) { *handle = calloc(1, 1); return OK; }
Status cublasGetVersion_v2(void *handle, int *version) { *version = 130000; return OK; }
Status cublasGetMathMode(void *handle, int *mode) { *mode = 0; return OK; }
Status cublasGetPointerMode_v2(void *handle, int *mode) { *mode = 0; return OK; }
typedef struct { int size; } Communicator;
typedef struct { char bytes[128]; } UniqueId;
enum { NCCL_INVALID_ARGUMENT = 4 };
Status ncclGetUniqueId(UniqueId *id) { memset(id, 1, sizeof *id); return OK; }
Status ncclCommInitRank(Communicator **result, int size, UniqueId id, int rank) {
    if (rank < 0 || rank >= size) return NCCL_INVALID_ARGUMENT;
    *result = calloc(1, sizeof **result);
    (*result)->size = size;
    return OK;
}
Status ncclCommInitRankConfig(Communicator **result, int size, UniqueId id, int rank, void *config) {
    return ncclCommInitRank(result, size, id, rank);
}
Status ncclCommGetAsyncError(Communicator *communicator, int *error) { *error = OK; return OK; }
Status ncclReduce(const void *from, void *to, size_t count, int type, int op, int root, Communicator *communicator,
                  Stream *stream) {
    return root < 0 || root >= communicator->size ? NCCL_INVALID_ARGUMENT : OK;
}
