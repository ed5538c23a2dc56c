/* SPDX-License-Identifier: Apache-2.0 */
/* The CUDA backend: what its files share. A call becomes a struct problem, which goes to the kernels by value;
 * logits.cu or entries.cu makes G, products.cu, fused.cu, wide.cu or columns.cu multiplies it, launch order and memory
 * are backend.cu's. */
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include "backend.h"
#include "tensor.h"

/* What is compiled for sm_100 and its family. */
#if __CUDA_ARCH_FAMILY_SPECIFIC__ >= 1000 && __CUDA_ARCH_FAMILY_SPECIFIC__ < 1100
#define MOER_TCGEN05
#endif

enum element { BF16, F16, F32 };

/* Whose instructions a call's kernels are made of. */
enum kernels : unsigned char { GENERIC, HOPPER, BLACKWELL };

/* A matrix: rows of contiguous elements, stride elements apart. */
struct rows {
    char *data; /* NULL: absent */
    int64_t stride;
};

/* A gradient may be of another type than the operands. */
struct typed_rows : rows {
    enum element type;
};

/* The same of what only the first kernel reads. */
struct input {
    const char *data;
    int64_t stride; /* bytes */
};

/* A kernel waits a twentieth of a microsecond for each 64 bytes of its parameters that it has not read yet, a multiple
 * of that for the first: what is needed first stands first, and what is needed together, together. On Hopper the first
 * line ends after 48 bytes. */
struct problem {
    /* Softmax: p; d, g and z, then m. z, d and m may be absent. The mask's strides are in bytes. */
    struct input ids, probs;
    char *logits; /* G in the workspace: T, [tokens][logits_stride], zero beyond E */
    int logits_stride;
    bool wide_ids, accumulate;
    bool whole_rows; /* the fused kernel may store the weight gradient by chunks */
    /* Both products by one kernel, for which G is tiles of TILE_TOKENS, as they are to lie in shared memory, or, if a
     * token has so many entries, just those: where it lies in the tile, or NO_ENTRY, in the lower half of a word, and G
     * in the upper. */
    bool fused;
    int entries; /* a multiple of 4 */

    struct input direct, incoming, sum; /* incoming: sigmoid's g as well */
    int64_t tokens;
    int experts, top_k;

    const char *mask;
    int64_t mask_expert, mask_slot, mask_token;
    struct typed_rows grad_logits;
    int *invalid_ids;

    /* Sigmoid: s, w, z and f. */
    struct input scores, normalized, denominator;
    float scaling;
    enum element type; /* of the operands */

    struct rows hidden_states, weight;
    int64_t hidden;
    int64_t split_tokens, splits; /* of the weight gradient's sums */
    struct typed_rows grad_hidden, grad_weight;

    /* In the workspace: partial sums of the weight gradient, [splits][partial_rows][partial_stride], whole tiles of
     * them, weight_rows high. */
    float *partials;
    int64_t partial_rows, partial_stride;
    int weight_rows;
    /* Also there, for wide.cu: how many splits of a tile are stored, for each adder. The first kernel makes all of them
     * zero. */
    int arrival_count;
    int *arrivals;
    enum moer_operation operation;
    enum kernels kernels;
    bool wide, by_columns; /* both products by wide.cu's kernel, or by columns.cu's */
};

/* The products' G has rows of whole panels, and their tiles so many columns; the fused kernel's tiles of G have so many
 * tokens, by the architecture, and rows of whole blocks. */
enum {
#ifdef MOER_TCGEN05
    TILE_TOKENS = 128,
#else
    TILE_TOKENS = 64,
#endif
    LOGITS_MULTIPLE = 32,
    TILE_COLUMNS = 128,
    PADDED_TOKENS = 128, /* the fused kernel takes so many at once */
    FUSED_LOGITS_MULTIPLE = 64,
    FUSED_COLUMNS = 64,
    FUSED_EXPERTS = 128, /* at most, and where G comes as entries */
    FUSED_EXPERTS_SPARSE = 160,
    NO_ENTRY = 0xffff,
    LONGEST_CHAIN = 2048 /* additions of tensor cores, which round towards zero */
};

__host__ __device__ inline int64_t divide_up(int64_t value, int64_t by) {
    return (value + by - 1) / by;
}

/* Tokens of a chain of the weight gradient's sums, at most, for wide.cu and columns.cu. What tensor cores lose by
 * truncation may add up where terms are alike; a result that is rounded to 16 bits allows for four times as much. */
inline int64_t longest_chain(const struct problem &problem) {
    return problem.grad_weight.type != F32 && !problem.accumulate ? 4 * LONGEST_CHAIN : LONGEST_CHAIN;
}

/* Whether rows, of elements of so many bytes, can be copied in chunks. */
enum { CHUNK_BYTES = 16 };

__host__ __device__ __forceinline__ bool is_aligned(const struct rows &rows, int size) {
    return reinterpret_cast<uintptr_t>(rows.data) % CHUNK_BYTES == 0 && rows.stride * size % CHUNK_BYTES == 0;
}

/* The height of a weight gradient's tile: what leaves the fewest rows empty, the tallest of equals. */
inline int choose_weight_rows(int experts, enum element type) {
    int best = 64;
    for (int rows : {128, 160})
        if (type != F32 && divide_up(experts, rows) * rows <= divide_up(experts, best) * best)
            best = rows;
    return best;
}

/* Kernels for devices of one compute capability alone. */
struct fast_path {
    const char *name; /* NULL: the end of the list */
    int major, minor;
    enum kernels kernels;
    const char *evidence; /* see struct moer_fast_path */
};
extern const struct fast_path moer_cuda_paths[];

/* A digest of the compiled kernels, see struct moer_fast_path; the makefile's. */
extern "C" const char moer_cuda_build[];

enum { MOST_DEVICES = 64 };

/* The list's path for a device, its end where there is none. */
const struct fast_path *path_of(int device);

/* The path that a call takes, and why. MOER_CUDA_ARCH, looked at in every call, comes before the permit. */
struct choice {
    const struct fast_path *path; /* the device's */
    enum kernels kernels;
    bool forced;
    const moer_permit *permit;
};
enum moer_status choose_path(enum moer_operation operation, int device, struct choice *choice, moer_message *message);

/* What the library permits, by device. */
void permit_path(int device, const moer_permit *permit);

/* Each launches on the stream; no synchronisation. */
cudaError_t launch_logits(const struct problem &problem, cudaStream_t stream);
cudaError_t launch_entries(const struct problem &problem, cudaStream_t stream);
cudaError_t launch_products(const struct problem &problem, cudaStream_t stream);
cudaError_t launch_fused(const struct problem &problem, cudaStream_t stream);
cudaError_t launch_wide(const struct problem &problem, cudaStream_t stream);
cudaError_t launch_columns(const struct problem &problem, cudaStream_t stream);

/* The weight gradient from its partial sums, of which there is at least one. */
cudaError_t launch_reduction(const struct problem &problem, cudaStream_t stream);

/* Tokens of a split for launch_wide() and launch_columns(), by shapes and by how the weight gradient is rounded; and
 * whether columns.cu's slices leave few multiprocessors idle. */
int64_t choose_wide_split(const struct problem &problem);
int64_t choose_columns_split(const struct problem &problem);
bool columns_keep_busy(const struct problem &problem);

/* How many arrivals launch_wide() may need. */
int64_t count_wide_arrivals(const struct problem &problem);

/* The launchers hand dtypes to templates. */
template <typename T>
__device__ __forceinline__ float to_float(T value) {
    return static_cast<float>(value);
}
template <typename T>
__device__ __forceinline__ T from_float(float value);
template <>
__device__ __forceinline__ float from_float<float>(float value) {
    return value;
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
    return __float2bfloat16_rn(value);
}
template <>
__device__ __forceinline__ __half from_float<__half>(float value) {
    return __float2half_rn(value);
}

__device__ __forceinline__ float load_element(const struct typed_rows &rows, int64_t row, int64_t column) {
    int64_t at = row * rows.stride + column;
    if (rows.type == F32)
        return reinterpret_cast<const float *>(rows.data)[at];
    if (rows.type == BF16)
        return to_float(reinterpret_cast<const __nv_bfloat16 *>(rows.data)[at]);
    return to_float(reinterpret_cast<const __half *>(rows.data)[at]);
}

__device__ __forceinline__ void store_element(const struct typed_rows &rows, int64_t row, int64_t column, float value) {
    int64_t at = row * rows.stride + column;
    if (rows.type == F32)
        reinterpret_cast<float *>(rows.data)[at] = value;
    else if (rows.type == BF16)
        reinterpret_cast<__nv_bfloat16 *>(rows.data)[at] = from_float<__nv_bfloat16>(value);
    else
        reinterpret_cast<__half *>(rows.data)[at] = from_float<__half>(value);
}

/* Keeps the compiler from working out addresses that depend on a pointer before this point, from holding them, and from
 * working out the pointer after it. */
template <typename V>
__device__ __forceinline__ void keep_here(V *&pointer) {
    asm volatile("" : "+l"(pointer));
}

/* Programmatic dependent launch, from Hopper on: a kernel lets the next one start beside it, which waits for its
 * results before it touches them. */
__device__ __forceinline__ void allow_next_kernel() {
#if __CUDA_ARCH__ >= 900
    cudaTriggerProgrammaticLaunchCompletion();
#endif
}

__device__ __forceinline__ void wait_for_last_kernel() {
#if __CUDA_ARCH__ >= 900
    cudaGridDependencySynchronize();
#endif
}

/* Of the current device. */
inline int attribute(cudaDeviceAttr which) {
    int device = 0, value = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&value, which, device);
    return value;
}

/* A function of the driver, to which nothing here links; NULL where it has none of the name. */
template <typename Function>
Function driver_function(const char *name) {
    void *function = nullptr;
    cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, nullptr);
    return reinterpret_cast<Function>(function);
}

/* Whether what runs on the device was compiled for an architecture where wait_for_last_kernel() waits. */
template <typename... Parameters>
bool can_wait(void (*kernel)(Parameters...)) {
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, reinterpret_cast<const void *>(kernel)) == cudaSuccess &&
           attributes.ptxVersion >= 90;
}

/* Launches a kernel that lets the next one start beside it. Where that wants much shared memory, it does so only if
 * this is set aside already. */
inline cudaError_t launch_first(void (*kernel)(struct problem), int64_t blocks, int threads, bool set_aside,
                                cudaStream_t stream, const struct problem &problem) {
    cudaLaunchAttribute room{};
    room.id = cudaLaunchAttributePreferredSharedMemoryCarveout;
    room.val.sharedMemCarveout = cudaSharedmemCarveoutMaxShared;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(threads);
    config.stream = stream;
    config.attrs = &room;
    config.numAttrs = set_aside;
    return cudaLaunchKernelEx(&config, kernel, problem);
}

/* Launches a kernel that calls wait_for_last_kernel(), so that it may start early where it can do that; in clusters of
 * so many blocks. */
template <typename... Parameters, typename... Arguments>
cudaError_t launch_clusters(void (*kernel)(Parameters...), int cluster, int64_t blocks, int threads, size_t shared,
                            cudaStream_t stream, const Arguments &...arguments) {
    cudaLaunchAttribute attributes[2]{};
    unsigned count = 0;
    if (cluster > 1) {
        attributes[count].id = cudaLaunchAttributeClusterDimension;
        attributes[count++].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
    }
    if (can_wait(kernel)) {
        attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[count++].val.programmaticStreamSerializationAllowed = 1;
    }
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = count;
    return cudaLaunchKernelEx(&config, kernel, arguments...);
}

template <typename... Parameters, typename... Arguments>
cudaError_t launch_early(void (*kernel)(Parameters...), int64_t blocks, int threads, size_t shared, cudaStream_t stream,
                         const Arguments &...arguments) {
    return launch_clusters(kernel, 1, blocks, threads, shared, stream, arguments...);
}
