/* SPDX-License-Identifier: Apache-2.0 */
/* The CUDA module on a machine without a GPU: backend.cu, the first kernels and the fused kernel as they are, over an
 * emulator (emulated_cuda.h), and a runtime whose device memory is the host's. It has one device, of the compute
 * capability that this is compiled for. The generic path's products are plain loops, so that the self-check compares
 * the fused kernel with those.
 *
 * PLANTED names a mistake, as in module_planted_cuda.cu: copies without the swizzle, a lost tail, a hang. */
#include "emulated_cuda.h"

#include <fenv.h>
#include <mutex>

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
enum { MAJOR = 9, MINOR = 0, PROCESSORS = 12 };
#define MOER_CUDA_SM90A
#else
enum { MAJOR = 10, MINOR = 0, PROCESSORS = 12 };
#define MOER_CUDA_SM100F
#endif

/* ---- CUDA's runtime ---- */

static bool planted(const char *fault) {
    const char *value = getenv("PLANTED");
    return value && strcmp(value, fault) == 0;
}

/* One launch after the other, whoever calls, and in plain arithmetic, whatever the caller's is. */
struct launching {
    launching() {
        mutex.lock();
        fegetenv(&before);
        fesetenv(FE_DFL_ENV);
    }
    ~launching() {
        fesetenv(&before);
        mutex.unlock();
    }
    fenv_t before;
    static inline std::mutex mutex;
};
namespace moer_fused {
extern char shared[];
}

template <typename Kernel, typename... Arguments>
static cudaError_t launch_emulated(const cudaLaunchConfig_t *config, Kernel kernel, const Arguments &...arguments) {
    const launching now;
    if (config->dynamicSmemBytes > emulated::SHARED_BYTES || config->blockDim.x % emulated::LANES)
        return cudaErrorInvalidValue;
    emulated::shared = moer_fused::shared;
    emulated::run_grid(config->gridDim.x, config->blockDim.x, kernel, arguments...);
    return cudaSuccess;
}

/* What emulate.sh makes of <<<>>>. */
template <typename Kernel, typename... Arguments>
static void launch_plainly(unsigned blocks, int threads, Kernel kernel, const Arguments &...arguments) {
    cudaLaunchConfig_t config{};
    config.gridDim.x = blocks;
    config.blockDim.x = static_cast<unsigned>(threads);
    launch_emulated(&config, kernel, arguments...);
}

static CUresult get_current(CUcontext *context) {
    *context = nullptr;
    return CUDA_SUCCESS;
}
static CUresult set_current(CUcontext) {
    return CUDA_SUCCESS;
}

static CUresult encode_planted(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *data,
                               const cuuint64_t *size, const cuuint64_t *stride, const cuuint32_t *box,
                               const cuuint32_t *step, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                               CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
    static thread_local int maps; /* of a launch those of both operands are made first */
    if (planted("swizzle") && maps++ % 3 < 2)
        swizzle = CU_TENSOR_MAP_SWIZZLE_NONE;
    return emulated::encode(map, type, rank, data, size, stride, box, step, interleave, swizzle, promotion, fill);
}

static cudaError_t driver_entry(const char *name, void **function) {
    *function = strcmp(name, "cuTensorMapEncodeTiled") == 0 ? reinterpret_cast<void *>(encode_planted)
                : strcmp(name, "cuCtxGetCurrent") == 0      ? reinterpret_cast<void *>(get_current)
                : strcmp(name, "cuCtxSetCurrent") == 0      ? reinterpret_cast<void *>(set_current)
                                                            : nullptr;
    return *function ? cudaSuccess : cudaErrorSymbolNotFound;
}

static cudaError_t attribute_of(int *value, cudaDeviceAttr which) {
    *value = which == cudaDevAttrMultiProcessorCount            ? PROCESSORS
             : which == cudaDevAttrComputeCapabilityMajor       ? MAJOR
             : which == cudaDevAttrComputeCapabilityMinor       ? MINOR
             : which == cudaDevAttrMaxSharedMemoryPerBlockOptin ? emulated::SHARED_BYTES
                                                                : 0;
    return cudaSuccess;
}

static cudaError_t properties_of(cudaDeviceProp *properties) {
    *properties = {};
    strcpy(properties->name, "an emulator");
    properties->major = MAJOR, properties->minor = MINOR;
    properties->multiProcessorCount = PROCESSORS;
    properties->totalGlobalMem = size_t{1} << 30;
    return cudaSuccess;
}

static cudaError_t allocate_host(void **data, size_t bytes) {
    *data = aligned_alloc(256, (bytes + 511) / 256 * 256);
    return *data ? cudaSuccess : cudaErrorMemoryAllocation;
}

#define cudaFuncSetAttribute(...) cudaSuccess
#define cudaFuncGetAttributes(attributes, kernel) ((attributes)->ptxVersion = 90, cudaSuccess)
#define cudaGetDriverEntryPointByVersion(name, function, version, flags, status) driver_entry(name, function)
#define cudaLaunchKernelEx launch_emulated
#define cudaGetLastError() cudaSuccess
#define cudaGetErrorString(error) "an error of the emulator"
#define cudaDriverGetVersion(version) (*(version) = 13000, cudaSuccess)
#define cudaRuntimeGetVersion(version) (*(version) = 13000, cudaSuccess)
#define cudaGetDeviceCount(count) (*(count) = 1, cudaSuccess)
#define cudaGetDevice(device) (*(device) = 0, cudaSuccess)
#define cudaSetDevice(device) cudaSuccess
#define cudaDeviceGetAttribute(value, which, device) attribute_of(value, which)
#undef cudaGetDeviceProperties
#define cudaGetDeviceProperties(properties, device) properties_of(properties)
#define cudaStreamIsCapturing(stream, status) (*(status) = cudaStreamCaptureStatusNone, cudaSuccess)
#define cudaMemPoolCreate(pool, properties) cudaSuccess
#define cudaMemPoolSetAttribute(pool, which, value) cudaSuccess
#define cudaMallocFromPoolAsync(data, bytes, pool, stream) allocate_host(data, bytes)
#define cudaMalloc(data, bytes) allocate_host(data, bytes)
#define cudaMallocManaged(data, bytes) allocate_host(data, bytes)
#define cudaFree(data) (free(data), cudaSuccess)
#define cudaFreeAsync(data, stream) (free(data), cudaSuccess)
#define cudaMemcpy(to, from, bytes, kind) (memcpy(to, from, bytes), cudaSuccess)
#define cudaStreamSynchronize(stream) cudaSuccess

/* ---- The module ---- */

#undef __shared__
#define __shared__ static
#include "entries.cu"
#include "logits.cu"
#undef __shared__
#define __shared__
#define launch_fused launch_right
#include "fused.cu"
#undef launch_fused
namespace moer_fused {
alignas(1024) char shared[emulated::SHARED_BYTES];
}
#include "backend.cu"
#include "paths.cu"

cudaError_t launch_fused(const struct problem &right, cudaStream_t stream) {
    struct problem wrong = right;
    if (planted("tail") && right.tokens > TILE_TOKENS)
        wrong.tokens = right.tokens / TILE_TOKENS * TILE_TOKENS;
    while (planted("hang"))
        ;
    return launch_right(wrong, stream);
}

template <typename T>
static float element_at(const rows &matrix, int64_t row, int64_t column) {
    return static_cast<float>(reinterpret_cast<const T *>(matrix.data)[row * matrix.stride + column]);
}

template <typename T>
static void multiply_plainly(const problem &problem) {
    const rows logits = {problem.logits, problem.logits_stride};
    const auto sum = [&](auto left, auto right, int64_t terms) {
        float result = 0;
        for (int64_t i = 0; i < terms; i++)
            result += left(i) * right(i);
        return result;
    };
    for (int64_t n = 0; n < problem.tokens && problem.grad_hidden.data; n++)
        for (int64_t h = 0; h < problem.hidden; h++)
            store_element(problem.grad_hidden, n, h,
                          sum([&](int64_t e) { return element_at<T>(logits, n, e); },
                              [&](int64_t e) { return element_at<T>(problem.weight, e, h); }, problem.experts));
    for (int64_t e = 0; e < problem.experts && problem.grad_weight.data; e++)
        for (int64_t h = 0; h < problem.hidden; h++)
            store_element(problem.grad_weight, e, h,
                          (problem.accumulate ? load_element(problem.grad_weight, e, h) : 0) +
                              sum([&](int64_t n) { return element_at<T>(logits, n, e); },
                                  [&](int64_t n) { return element_at<T>(problem.hidden_states, n, h); },
                                  problem.tokens));
}

cudaError_t launch_products(const problem &problem, cudaStream_t) {
    const launching now;
    if (problem.type == BF16)
        multiply_plainly<__nv_bfloat16>(problem);
    else if (problem.type == F16)
        multiply_plainly<__half>(problem);
    else
        multiply_plainly<float>(problem);
    return cudaSuccess;
}
