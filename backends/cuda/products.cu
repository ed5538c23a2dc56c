/* SPDX-License-Identifier: Apache-2.0 */
/* Both products of an operation in one launch, for every architecture from sm_80, and the reduction of the second.
 *
 *     grad_hidden_states   tiles of 128 tokens x 128 columns, terms over the experts:  A = G, rows of terms
 *     weight gradient      tiles of 64 experts x 128 columns, terms over a split of the tokens:  A = G^T, whose terms are
 *                          the rows; float32 partial sums, which reduce_kernel adds in the order of the splits
 *
 * B is the gate or the hidden states, rows of columns. 16-bit operands are multiplied by mma.sync m16n8k16: a block of 8
 * warps, 2 x 4 over the tile, takes STEP terms at a time from a ring of STAGES buffers that cp.async fills; chunks of 16
 * bytes are XORed with their row's number so that ldmatrix meets no bank twice. Budget: 64 KB of shared memory, at most
 * 128 registers, so that two blocks share a multiprocessor. float32 operands go through the same ring into fused
 * multiply-adds.
 *
 * Splits depend on the number of tokens alone, and a tile's terms are added in ascending order wherever it lies: the bits
 * of a row of grad_hidden_states depend on that token alone. */
#include "common.cuh"
#include "ptx.cuh"

namespace {

enum { THREADS = 256, WARP = 32, WARPS_DOWN = 2, WARPS_ACROSS = 4 };
enum { COLUMNS = 128, STAGES = 4, CHUNK_BYTES = 16 };

/* Where a tile's operands are and how much of them there is. */
struct operand {
    const char *data; /* its first element */
    int64_t stride;   /* elements */
    int64_t rows;     /* rows from data on that exist */
    int64_t columns;  /* the same of columns */
    bool aligned;     /* rows begin at multiples of 16 bytes */
};

/* Loads a chunk of a row into shared memory; what does not exist is zero. */
template <typename T>
__device__ __forceinline__ void load_chunk(T *to, const operand &from, int64_t row, int64_t column) {
    constexpr int elements = CHUNK_BYTES / sizeof(T);
    int64_t left = row < from.rows ? from.columns - column : 0;
    int valid = left < 0 ? 0 : left > elements ? elements : static_cast<int>(left);
    const T *source = reinterpret_cast<const T *>(from.data) + (valid > 0 ? row * from.stride + column : 0);
    if (from.aligned) {
        copy_async(to, source, valid * static_cast<int>(sizeof(T)));
        return;
    }
#pragma unroll
    for (int i = 0; i < elements; i++)
        to[i] = i < valid ? source[i] : T(0.0f);
}

/* A block of rows x width elements in shared memory, width a power of two; element (row, column) is at swizzled(). */
template <typename T, int WIDTH> __device__ __forceinline__ int swizzled(int row, int column) {
    constexpr int elements = CHUNK_BYTES / sizeof(T), chunks = WIDTH / elements;
    /* A row shorter than 128 bytes shares its banks with its neighbours. */
    constexpr int rows_a_line = chunks >= 8 ? 1 : 8 / chunks;
    int chunk = column / elements ^ row / rows_a_line % (chunks < 8 ? chunks : 8);
    return row * WIDTH + chunk * elements + column % elements;
}

template <typename T, int ROWS, int WIDTH>
__device__ __forceinline__ void load_block(T *to, const operand &from, int64_t row, int64_t column) {
    constexpr int elements = CHUNK_BYTES / sizeof(T), chunks = ROWS * WIDTH / elements;
#pragma unroll
    for (int i = 0; i < chunks / THREADS; i++) {
        int chunk = i * THREADS + threadIdx.x;
        int r = chunk / (WIDTH / elements), c = chunk % (WIDTH / elements) * elements;
        load_chunk(to + swizzled<T, WIDTH>(r, c), from, row + r, column + c);
    }
}

/* The sums of a tile, as the threads have them, and how a step of terms is added: by tensor cores for 16-bit types. */
template <typename T, int ROWS, bool TERMS_ARE_ROWS> struct tile {
    static constexpr int STEP = 32, WARP_ROWS = ROWS / WARPS_DOWN, WARP_COLUMNS = COLUMNS / WARPS_ACROSS;
    static constexpr int DOWN = WARP_ROWS / 16, ACROSS = WARP_COLUMNS / 8;
    float sums[DOWN][ACROSS][4];

    static __device__ __forceinline__ int first_row() {
        return threadIdx.x / WARP / WARPS_ACROSS * WARP_ROWS;
    }
    static __device__ __forceinline__ int first_column() {
        return threadIdx.x / WARP % WARPS_ACROSS * WARP_COLUMNS;
    }

    __device__ __forceinline__ void add(const T *a, const T *b) {
        int lane = threadIdx.x % WARP, matrix = lane / 8, row = lane % 8;
#pragma unroll
        for (int term = 0; term < STEP; term += 16) {
            uint32_t left[DOWN][4], right[ACROSS / 2][4];
#pragma unroll
            for (int i = 0; i < DOWN; i++) {
                int down = first_row() + 16 * i;
                if (TERMS_ARE_ROWS)
                    load_matrices_transposed(
                        left[i], a + swizzled<T, ROWS>(term + row + matrix / 2 * 8, down + matrix % 2 * 8));
                else
                    load_matrices(left[i], a + swizzled<T, STEP>(down + row + matrix % 2 * 8, term + matrix / 2 * 8));
            }
#pragma unroll
            for (int i = 0; i < ACROSS / 2; i++)
                load_matrices_transposed(right[i], b + swizzled<T, COLUMNS>(term + row + matrix % 2 * 8,
                                                                            first_column() + 16 * i + matrix / 2 * 8));
#pragma unroll
            for (int i = 0; i < DOWN; i++)
#pragma unroll
                for (int j = 0; j < ACROSS; j++)
                    multiply(sums[i][j], left[i], right[j / 2][j % 2 * 2], right[j / 2][j % 2 * 2 + 1], T());
        }
    }

    /* Hands pairs of neighbouring sums to visit(row, column, first, second). */
    template <typename Visit> __device__ __forceinline__ void each(Visit visit) const {
        int lane = threadIdx.x % WARP;
#pragma unroll
        for (int i = 0; i < DOWN; i++)
#pragma unroll
            for (int j = 0; j < ACROSS; j++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    visit(first_row() + 16 * i + 8 * half + lane / 4, first_column() + 8 * j + lane % 4 * 2,
                          sums[i][j][2 * half], sums[i][j][2 * half + 1]);
    }
};

/* float32: a thread has ROWS / 16 rows, 16 apart, and 4 pairs of columns, 32 apart. */
template <int ROWS, bool TERMS_ARE_ROWS> struct tile<float, ROWS, TERMS_ARE_ROWS> {
    static constexpr int STEP = 16, DOWN = ROWS / 16, ACROSS = 4;
    float sums[DOWN][ACROSS][2];

    __device__ __forceinline__ void add(const float *a, const float *b) {
        int down = threadIdx.x / 16, across = threadIdx.x % 16 * 2;
#pragma unroll 4
        for (int term = 0; term < STEP; term++) {
            float left[DOWN];
#pragma unroll
            for (int i = 0; i < DOWN; i++)
                left[i] = TERMS_ARE_ROWS ? a[swizzled<float, ROWS>(term, down + 16 * i)]
                                         : a[swizzled<float, STEP>(down + 16 * i, term)];
#pragma unroll
            for (int j = 0; j < ACROSS; j++) {
                float2 right = *reinterpret_cast<const float2 *>(b + swizzled<float, COLUMNS>(term, across + 32 * j));
#pragma unroll
                for (int i = 0; i < DOWN; i++) {
                    sums[i][j][0] = fmaf(left[i], right.x, sums[i][j][0]);
                    sums[i][j][1] = fmaf(left[i], right.y, sums[i][j][1]);
                }
            }
        }
    }

    template <typename Visit> __device__ __forceinline__ void each(Visit visit) const {
#pragma unroll
        for (int i = 0; i < DOWN; i++)
#pragma unroll
            for (int j = 0; j < ACROSS; j++)
                visit(threadIdx.x / 16 + 16 * i, threadIdx.x % 16 * 2 + 32 * j, sums[i][j][0], sums[i][j][1]);
    }
};

/* The sums over terms of A's tile times B's: A and B are operands whose first element is the tile's. */
template <typename T, int ROWS, bool TERMS_ARE_ROWS>
__device__ __forceinline__ void multiply_tile(tile<T, ROWS, TERMS_ARE_ROWS> &result, const operand &a,
                                              const operand &b, int64_t terms, char *shared) {
    constexpr int STEP = tile<T, ROWS, TERMS_ARE_ROWS>::STEP, A = ROWS * STEP, B = STEP * COLUMNS;
    T *ring = reinterpret_cast<T *>(shared);
    int64_t steps = (terms + STEP - 1) / STEP;
    auto load = [&](int64_t step) {
        T *stage = ring + step % STAGES * (A + B);
        if (step < steps) {
            if (TERMS_ARE_ROWS)
                load_block<T, STEP, ROWS>(stage, a, step * STEP, 0);
            else
                load_block<T, ROWS, STEP>(stage, a, 0, step * STEP);
            load_block<T, STEP, COLUMNS>(stage + A, b, step * STEP, 0);
        }
        copy_async_commit();
    };
    memset(result.sums, 0, sizeof result.sums);
#pragma unroll
    for (int step = 0; step < STAGES - 1; step++)
        load(step);
    for (int64_t step = 0; step < steps; step++) {
        copy_async_wait<STAGES - 2>();
        __syncthreads();
        load(step + STAGES - 1); /* into the buffer that the last step has read */
        const T *stage = ring + step % STAGES * (A + B);
        result.add(stage, stage + A);
    }
    copy_async_wait<0>();
    __syncthreads();
}

template <typename T> constexpr bool is_16_bit = sizeof(T) == 2;
enum { HIDDEN_ROWS = 128, WEIGHT_ROWS = 64 };
template <typename T> constexpr int step_of = is_16_bit<T> ? 32 : 16;
template <typename T> constexpr size_t shared_bytes = STAGES *(HIDDEN_ROWS + COLUMNS) * step_of<T> * sizeof(T);

__device__ bool is_aligned(const rows &rows, int size) {
    return reinterpret_cast<uintptr_t>(rows.data) % CHUNK_BYTES == 0 && rows.stride * size % CHUNK_BYTES == 0;
}

/* Rounds a tile of grad_hidden_states, through shared memory where whole chunks can be stored. */
template <typename T>
__device__ void store_hidden(const tile<T, HIDDEN_ROWS, false> &sums, const problem &problem, int64_t token,
                             int64_t column, char *shared) {
    const rows &out = problem.grad_hidden;
    constexpr int width = COLUMNS + 8; /* so that neighbouring rows begin in other banks */
    if (!is_16_bit<T> || out.type == F32 || !is_aligned(out, sizeof(T)) || problem.hidden % 8) {
        sums.each([&](int i, int j, float first, float second) {
            if (token + i < problem.tokens && column + j < problem.hidden)
                store_element(out, token + i, column + j, first);
            if (token + i < problem.tokens && column + j + 1 < problem.hidden)
                store_element(out, token + i, column + j + 1, second);
        });
        return;
    }
    T *staged = reinterpret_cast<T *>(shared);
    sums.each([&](int i, int j, float first, float second) {
        staged[i * width + j] = from_float<T>(first);
        staged[i * width + j + 1] = from_float<T>(second);
    });
    __syncthreads();
    for (int chunk = threadIdx.x; chunk < HIDDEN_ROWS * COLUMNS / 8; chunk += THREADS) {
        int i = chunk / (COLUMNS / 8), j = chunk % (COLUMNS / 8) * 8;
        if (token + i < problem.tokens && column + j < problem.hidden)
            *reinterpret_cast<uint4 *>(reinterpret_cast<T *>(out.data) + (token + i) * out.stride + column + j) =
                *reinterpret_cast<const uint4 *>(staged + i * width + j);
    }
}

template <typename T> __device__ void hidden_tile(const problem &problem, int64_t index, char *shared) {
    int64_t across = (problem.hidden + COLUMNS - 1) / COLUMNS;
    int64_t token = index / across * HIDDEN_ROWS, column = index % across * COLUMNS;
    operand g = {problem.logits + token * problem.logits_stride * sizeof(T), problem.logits_stride,
                 problem.tokens - token, problem.logits_stride, true};
    operand w = {problem.weight.data + column * sizeof(T), problem.weight.stride, problem.experts,
                 problem.hidden - column, is_aligned(problem.weight, sizeof(T))};
    tile<T, HIDDEN_ROWS, false> sums;
    multiply_tile(sums, g, w, problem.experts, shared);
    store_hidden(sums, problem, token, column, shared);
}

template <typename T> __device__ void weight_tile(const problem &problem, int64_t index, char *shared) {
    int64_t down = (problem.experts + WEIGHT_ROWS - 1) / WEIGHT_ROWS, across = (problem.hidden + COLUMNS - 1) / COLUMNS;
    int64_t expert = index % down * WEIGHT_ROWS, column = index / down % across * COLUMNS;
    int64_t split = index / down / across, token = split * problem.split_tokens;
    int64_t tokens = problem.tokens - token < problem.split_tokens ? problem.tokens - token : problem.split_tokens;
    operand g = {problem.logits + (token * problem.logits_stride + expert) * sizeof(T), problem.logits_stride, tokens,
                 problem.logits_stride - expert, true};
    const rows &hidden = problem.hidden_states;
    operand x = {hidden.data + (token * hidden.stride + column) * sizeof(T), hidden.stride, tokens,
                 problem.hidden - column, is_aligned(hidden, sizeof(T))};
    tile<T, WEIGHT_ROWS, true> sums;
    multiply_tile(sums, g, x, tokens, shared);
    float *out = problem.partials + split * problem.experts * problem.hidden;
    sums.each([&](int i, int j, float first, float second) {
        float *to = out + (expert + i) * problem.hidden + column + j;
        if (expert + i >= problem.experts || column + j >= problem.hidden)
            return;
        if (problem.hidden % 2 == 0) {
            *reinterpret_cast<float2 *>(to) = make_float2(first, second);
            return;
        }
        to[0] = first;
        if (column + j + 1 < problem.hidden)
            to[1] = second;
    });
}

/* Weight tiles come first: they are the longer ones. */
template <typename T>
__global__ void __launch_bounds__(THREADS, 2)
    products_kernel(const __grid_constant__ problem problem, int64_t weight_tiles) {
    extern __shared__ __align__(128) char shared[];
    if (blockIdx.x < weight_tiles)
        weight_tile<T>(problem, blockIdx.x, shared);
    else
        hidden_tile<T>(problem, blockIdx.x - weight_tiles, shared);
}

/* The weight gradient from its partial sums: added in order, to the old value once, rounded once. */
__global__ void reduce_kernel(const __grid_constant__ problem problem) {
    int64_t elements = problem.experts * problem.hidden;
    int64_t at = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
    if (at >= elements)
        return;
    float sum = 0;
    for (int64_t split = 0; split < problem.splits; split++)
        sum = __fadd_rn(sum, problem.partials[split * elements + at]);
    int64_t expert = at / problem.hidden, column = at % problem.hidden;
    if (problem.accumulate)
        sum = __fadd_rn(load_element(problem.grad_weight, expert, column), sum);
    store_element(problem.grad_weight, expert, column, sum);
}

template <typename T> cudaError_t launch(const problem &problem, cudaStream_t stream) {
    int64_t across = (problem.hidden + COLUMNS - 1) / COLUMNS;
    int64_t weight_tiles = problem.grad_weight.data
                               ? (problem.experts + WEIGHT_ROWS - 1) / WEIGHT_ROWS * across * problem.splits
                               : 0;
    int64_t hidden_tiles =
        problem.grad_hidden.data ? (problem.tokens + HIDDEN_ROWS - 1) / HIDDEN_ROWS * across : 0;
    if (weight_tiles + hidden_tiles > 0) {
        cudaError_t error = cudaFuncSetAttribute(products_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                 static_cast<int>(shared_bytes<T>));
        if (error != cudaSuccess)
            return error;
        products_kernel<T><<<static_cast<unsigned>(weight_tiles + hidden_tiles), THREADS, shared_bytes<T>, stream>>>(
            problem, weight_tiles);
        error = cudaGetLastError();
        if (error != cudaSuccess)
            return error;
    }
    int64_t elements = problem.experts * problem.hidden;
    if (!problem.grad_weight.data || elements == 0 || (problem.accumulate && problem.tokens == 0))
        return cudaSuccess;
    reduce_kernel<<<static_cast<unsigned>((elements + THREADS - 1) / THREADS), THREADS, 0, stream>>>(problem);
    return cudaGetLastError();
}

} // namespace

cudaError_t launch_products(const problem &problem, cudaStream_t stream) {
    switch (problem.weight.type) {
    case BF16:
        return launch<__nv_bfloat16>(problem, stream);
    case F16:
        return launch<__half>(problem, stream);
    default:
        return launch<float>(problem, stream);
    }
}
