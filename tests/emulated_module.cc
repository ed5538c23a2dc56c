/* SPDX-License-Identifier: Apache-2.0 */
/* The CUDA module on a machine without a GPU: backend.cu, the first kernels, those that make both products and the
 * reduction as they are, over an emulator (emulated_cuda.h), and a runtime whose device memory is the host's. It has
 * one device, of the compute capability that this is compiled for. The generic path's products are plain loops, so that
 * the self-check compares the fused kernel with those.
 *
 * PLANTED names a mistake, as in module_planted_cuda.cu: copies without the swizzle, a lost tail, a hang. */
#include "emulated_cuda.h"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define MOER_CUDA_SM90A
#else
#define MOER_CUDA_SM100F
#endif

/* ---- CUDA's runtime, but for launches ---- */

static bool planted(const char *fault) {
    const char *value = getenv("PLANTED");
    return value && strcmp(value, fault) == 0;
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
static const auto made = emulated::map_maker = encode_planted;
static cudaError_t properties_of(cudaDeviceProp *properties) {
    *properties = {};
    strcpy(properties->name, "an emulator");
    cudaDeviceGetAttribute(&properties->major, cudaDevAttrComputeCapabilityMajor, 0);
    cudaDeviceGetAttribute(&properties->minor, cudaDevAttrComputeCapabilityMinor, 0);
    cudaDeviceGetAttribute(&properties->multiProcessorCount, cudaDevAttrMultiProcessorCount, 0);
    properties->totalGlobalMem = size_t{1} << 30;
    return cudaSuccess;
}

static cudaError_t allocate_host(void **data, size_t bytes) {
    *data = aligned_alloc(256, (bytes + 511) / 256 * 256);
    return *data ? cudaSuccess : cudaErrorMemoryAllocation;
}

#undef cudaGetDeviceProperties
#define cudaGetDeviceProperties(properties, device) properties_of(properties)
#define cudaGetErrorString(error) "an error of the emulator"
#define cudaDriverGetVersion(version) (*(version) = 13000, cudaSuccess)
#define cudaRuntimeGetVersion(version) (*(version) = 13000, cudaSuccess)
#define cudaGetDeviceCount(count) (*(count) = 1, cudaSuccess)
#define cudaSetDevice(device) cudaSuccess
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
#include "reduce.cu"
#include "wide.cu"
#include "columns.cu"
#include "backend.cu"
#include "choice.cu"
#include "paths.cu"

const char moer_cuda_build[] = __DATE__ " " __TIME__;

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
    const emulated::launching now;
    if (problem.type == BF16)
        multiply_plainly<__nv_bfloat16>(problem);
    else if (problem.type == F16)
        multiply_plainly<__half>(problem);
    else
        multiply_plainly<float>(problem);
    return cudaSuccess;
}
