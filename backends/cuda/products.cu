/* SPDX-License-Identifier: Apache-2.0 */
/* Both products of an operation in one launch, for every architecture from sm_80, and the reduction of the second.
 *
 *     grad_hidden_states   tiles of 128 tokens x 128 columns, terms over the experts:  A = G, rows of terms
 *     weight gradient      tiles of 64 experts x 128 columns, terms over a split of the tokens:  A = G^T, whose terms
 * are the rows; float32 partial sums, which reduce_kernel adds in the order of the splits
 *
 * B is the gate or the hidden states, rows of columns. 16-bit operands are multiplied by mma.sync m16n8k16: a block of
 * 4 warps, 2 x 2 over the tile, takes 32 terms at a time from a ring of STAGES buffers that cp.async fills; chunks of
 * 16 bytes are XORed with their row's number so that ldmatrix meets no bank twice. B does not depend on the kernel
 * before, so it is on its way while that one ends. Budget: 64 KB of shared memory and 256 registers a thread, two
 * blocks to a multiprocessor. float32 operands go through the same ring into fused multiply-adds.
 *
 * Splits depend on the number of tokens alone, and a tile's terms are added in ascending order wherever it lies: the
 * bits of a row of grad_hidden_states depend on that token alone. */
#include "common.cuh"
#include "ptx.cuh"

namespace {

enum { THREADS = 128, WARP = 32, WARPS_ACROSS = 2, COLUMNS = 128, STAGES = 4, CHUNK_BYTES = 16 };

/* Where a tile's operands are and how much of them there is. */
struct operand {
    const char *data; /* its first element */
    int64_t stride;   /* elements */
    int64_t rows;     /* rows from data on that exist */
    int64_t columns;  /* the same of columns */
    bool aligned;     /* rows begin at multiples of 16 bytes */
};

/* A block of rows x WIDTH elements in shared memory: where element (row, column) lies. */
template <typename T, int WIDTH>
__device__ __forceinline__ int swizzled(int row, int column) {
    constexpr int elements = CHUNK_BYTES / sizeof(T), chunks = WIDTH / elements;
    /* A row shorter than 128 bytes shares its banks with its neighbours. */
    constexpr int rows_a_line = chunks >= 8 ? 1 : 8 / chunks;
    int chunk = column / elements ^ row / rows_a_line % (chunks < 8 ? chunks : 8);
    return row * WIDTH + chunk * elements + column % elements;
}

/* Loads ROWS x WIDTH blocks of an operand, one after the other down its rows (DOWN) or along them. A thread has the
 * same chunks of every block, so that addresses and limits are worked out once. */
template <typename T, int ROWS, int WIDTH, bool DOWN>
class loader {
    static constexpr int ELEMENTS = CHUNK_BYTES / sizeof(T), CHUNKS_A_ROW = WIDTH / ELEMENTS;
    static constexpr int COUNT = ROWS * CHUNKS_A_ROW / THREADS, ROW_STEP = THREADS / CHUNKS_A_ROW;
    const T *source;
    int64_t row_step;
    int rows_left, columns_left, offsets[COUNT];
    bool aligned;

    static __device__ __forceinline__ int offset(int i) {
        return swizzled<T, WIDTH>(threadIdx.x / CHUNKS_A_ROW + i * ROW_STEP, threadIdx.x % CHUNKS_A_ROW * ELEMENTS);
    }

  public:
    __device__ __forceinline__ explicit loader(const operand &from) : aligned(from.aligned) {
        int row = threadIdx.x / CHUNKS_A_ROW, column = threadIdx.x % CHUNKS_A_ROW * ELEMENTS;
        source = reinterpret_cast<const T *>(from.data) + row * from.stride + column;
        row_step = ROW_STEP * from.stride;
        rows_left = static_cast<int>(from.rows < 1 << 30 ? from.rows : 1 << 30) - row;
        columns_left = static_cast<int>(from.columns < 1 << 30 ? from.columns : 1 << 30) - column;
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            offsets[i] = offset(i);
    }

    /* Loads the next block; what does not exist is zero, and its address is not looked at. */
    __device__ __forceinline__ void next(T *block) {
        int valid = columns_left < 0 ? 0 : columns_left < ELEMENTS ? columns_left : ELEMENTS;
        const T *from = source;
        if (aligned) {
            uint32_t to = shared_address(block);
#pragma unroll
            for (int i = 0; i < COUNT; i++, from += row_step)
                copy_async(to + offsets[i] * sizeof(T), from,
                           i * ROW_STEP < rows_left ? valid * static_cast<int>(sizeof(T)) : 0);
        } else {
#pragma unroll 1
            for (int i = 0; i < COUNT; i++, from += row_step)
                for (int j = 0; j < ELEMENTS; j++)
                    block[offset(i) + j] = i * ROW_STEP < rows_left && j < valid ? from[j] : T(0.0f);
        }
        if (DOWN) {
            source += COUNT * row_step;
            rows_left -= ROWS;
        } else {
            source += WIDTH;
            columns_left -= WIDTH;
        }
    }
};

/* The sums of a tile, as the threads have them, and how a step of terms is added: by tensor cores for 16-bit types. */
template <typename T, int ROWS, bool TERMS_ARE_ROWS>
struct tile {
    static constexpr int STEP = 32, WARP_ROWS = ROWS / 2, WARP_COLUMNS = COLUMNS / WARPS_ACROSS;
    static constexpr int DOWN = WARP_ROWS / 16, ACROSS = WARP_COLUMNS / 8;
    float sums[DOWN][ACROSS][4];

    static __device__ __forceinline__ int first_row() {
        return threadIdx.x / WARP / WARPS_ACROSS * WARP_ROWS;
    }
    static __device__ __forceinline__ int first_column() {
        return threadIdx.x / WARP % WARPS_ACROSS * WARP_COLUMNS;
    }

    /* Where the lane's rows of 8 x 8 matrices begin, in bytes from the beginning of a block: of A by 16 rows of the
     * tile, or by 16 terms where the rows of A are the tile's; of B by 16 columns. */
    uint32_t left_offsets[TERMS_ARE_ROWS ? DOWN : STEP / 16], right_offsets[ACROSS / 2];

    __device__ __forceinline__ tile() {
        int lane = threadIdx.x % WARP, matrix = lane / 8, row = lane % 8;
        memset(sums, 0, sizeof sums);
#pragma unroll
        for (int i = 0; i < (TERMS_ARE_ROWS ? DOWN : STEP / 16); i++)
            left_offsets[i] =
                sizeof(T) * (TERMS_ARE_ROWS
                                 ? swizzled<T, ROWS>(row + matrix / 2 * 8, first_row() + 16 * i + matrix % 2 * 8)
                                 : swizzled<T, STEP>(first_row() + row + matrix % 2 * 8, 16 * i + matrix / 2 * 8));
#pragma unroll
        for (int i = 0; i < ACROSS / 2; i++)
            right_offsets[i] =
                sizeof(T) * swizzled<T, COLUMNS>(row + matrix % 2 * 8, first_column() + 16 * i + matrix / 2 * 8);
    }

    /* 16 rows further on a swizzled block looks the same. */
    __device__ __forceinline__ void add(const T *a, const T *b) {
        uint32_t from_a = shared_address(a), from_b = shared_address(b);
#pragma unroll
        for (int term = 0; term < STEP; term += 16) {
            uint32_t left[DOWN][4], right[ACROSS / 2][4];
#pragma unroll
            for (int i = 0; i < DOWN; i++)
                if (TERMS_ARE_ROWS)
                    load_matrices_transposed(left[i], from_a + left_offsets[i] + term * ROWS * sizeof(T));
                else
                    load_matrices(left[i], from_a + left_offsets[term / 16] + 16 * i * STEP * sizeof(T));
#pragma unroll
            for (int i = 0; i < ACROSS / 2; i++)
                load_matrices_transposed(right[i], from_b + right_offsets[i] + term * COLUMNS * sizeof(T));
#pragma unroll
            for (int i = 0; i < DOWN; i++)
#pragma unroll
                for (int j = 0; j < ACROSS; j++)
                    multiply(sums[i][j], left[i], right[j / 2][j % 2 * 2], right[j / 2][j % 2 * 2 + 1], T());
        }
    }

    /* Hands pairs of neighbouring sums to visit(row, column, first, second). */
    template <typename Visit>
    __device__ __forceinline__ void each(Visit visit) const {
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

/* float32: a thread has ROWS / 8 rows, 8 apart, and 4 pairs of columns, 32 apart. */
template <int ROWS, bool TERMS_ARE_ROWS>
struct tile<float, ROWS, TERMS_ARE_ROWS> {
    static constexpr int STEP = 16, DOWN = ROWS / 8, ACROSS = 4;
    float sums[DOWN][ACROSS][2];

    __device__ __forceinline__ tile() {
        memset(sums, 0, sizeof sums);
    }

    __device__ __forceinline__ void add(const float *a, const float *b) {
        int down = threadIdx.x / 16, across = threadIdx.x % 16 * 2;
#pragma unroll 2
        for (int term = 0; term < STEP; term++) {
            float left[DOWN];
#pragma unroll
            for (int i = 0; i < DOWN; i++)
                left[i] = TERMS_ARE_ROWS ? a[swizzled<float, ROWS>(term, down + 8 * i)]
                                         : a[swizzled<float, STEP>(down + 8 * i, term)];
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

    template <typename Visit>
    __device__ __forceinline__ void each(Visit visit) const {
#pragma unroll
        for (int i = 0; i < DOWN; i++)
#pragma unroll
            for (int j = 0; j < ACROSS; j++)
                visit(threadIdx.x / 16 + 8 * i, threadIdx.x % 16 * 2 + 32 * j, sums[i][j][0], sums[i][j][1]);
    }
};

/* The sums over terms of A's tile times B's: A and B are operands whose first element is the tile's. A is what the
 * kernel before has made, B is an input. */
template <typename T, int ROWS, bool TERMS_ARE_ROWS>
__device__ __forceinline__ void multiply_tile(tile<T, ROWS, TERMS_ARE_ROWS> &result, const operand &a, const operand &b,
                                              int64_t terms, char *shared) {
    constexpr int STEP = tile<T, ROWS, TERMS_ARE_ROWS>::STEP, A = ROWS * STEP, B = STEP * COLUMNS;
    loader<T, TERMS_ARE_ROWS ? STEP : ROWS, TERMS_ARE_ROWS ? ROWS : STEP, TERMS_ARE_ROWS> load_a(a);
    loader<T, STEP, COLUMNS, true> load_b(b);
    T *ring_a = reinterpret_cast<T *>(shared), *ring_b = ring_a + STAGES * A;
    int steps = static_cast<int>((terms + STEP - 1) / STEP);
#pragma unroll
    for (int step = 0; step < STAGES - 1; step++)
        if (step < steps)
            load_b.next(ring_b + step * B);
    wait_for_last_kernel();
#pragma unroll
    for (int step = 0; step < STAGES - 1; step++) {
        if (step < steps)
            load_a.next(ring_a + step * A);
        copy_async_commit();
    }
    for (int step = 0; step < steps; step++) {
        copy_async_wait<STAGES - 2>();
        __syncthreads();
        int ahead = step + STAGES - 1;
        if (ahead < steps) { /* into the buffer that the last step has read */
            load_a.next(ring_a + ahead % STAGES * A);
            load_b.next(ring_b + ahead % STAGES * B);
        }
        copy_async_commit();
        result.add(ring_a + step % STAGES * A, ring_b + step % STAGES * B);
    }
    copy_async_wait<0>();
    __syncthreads();
}

template <typename T>
constexpr bool is_16_bit = sizeof(T) == 2;
enum { HIDDEN_ROWS = 128, WEIGHT_ROWS = 64 };
template <typename T>
constexpr int step_of = is_16_bit<T> ? 32 : 16;
template <typename T>
constexpr size_t shared_bytes = STAGES *(HIDDEN_ROWS + COLUMNS) * step_of<T> * sizeof(T);

__device__ bool is_aligned(const rows &rows, int size) {
    return reinterpret_cast<uintptr_t>(rows.data) % CHUNK_BYTES == 0 && rows.stride * size % CHUNK_BYTES == 0;
}

__device__ __forceinline__ void store_pair(__nv_bfloat16 *to, float first, float second) {
    *reinterpret_cast<__nv_bfloat162 *>(to) = __floats2bfloat162_rn(first, second);
}
__device__ __forceinline__ void store_pair(__half *to, float first, float second) {
    *reinterpret_cast<__half2 *>(to) = __floats2half2_rn(first, second);
}
__device__ __forceinline__ void store_pair(float *to, float first, float second) {
    to[0] = first, to[1] = second;
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
    sums.each([&](int i, int j, float first, float second) { store_pair(staged + i * width + j, first, second); });
    __syncthreads();
    constexpr int chunks = COLUMNS / 8, rows_a_round = THREADS / chunks;
    int row = threadIdx.x / chunks, across = threadIdx.x % chunks * 8;
    int rows = problem.tokens - token < HIDDEN_ROWS ? static_cast<int>(problem.tokens - token) : HIDDEN_ROWS;
    if (column + across >= problem.hidden)
        return;
    T *to = reinterpret_cast<T *>(out.data) + (token + row) * out.stride + column + across;
    const T *from = staged + row * width + across;
#pragma unroll
    for (int i = 0; i < HIDDEN_ROWS; i += rows_a_round)
        if (i + row < rows)
            *reinterpret_cast<uint4 *>(to + i * out.stride) = *reinterpret_cast<const uint4 *>(from + i * width);
}

template <typename T>
__device__ __forceinline__ void hidden_tile(const problem &problem, unsigned index, unsigned across, char *shared) {
    int64_t token = static_cast<int64_t>(index / across) * HIDDEN_ROWS;
    int64_t column = static_cast<int64_t>(index % across) * COLUMNS;
    operand g = {problem.logits + token * problem.logits_stride * sizeof(T), problem.logits_stride,
                 problem.tokens - token, problem.logits_stride, true};
    operand w = {problem.weight.data + column * sizeof(T), problem.weight.stride, problem.experts,
                 problem.hidden - column, is_aligned(problem.weight, sizeof(T))};
    tile<T, HIDDEN_ROWS, false> sums;
    multiply_tile(sums, g, w, problem.experts, shared);
    store_hidden(sums, problem, token, column, shared);
}

template <typename T>
__device__ __forceinline__ void weight_tile(const problem &problem, unsigned index, unsigned across, char *shared) {
    unsigned down = (problem.experts + WEIGHT_ROWS - 1) / WEIGHT_ROWS;
    int expert = index % down * WEIGHT_ROWS;
    int64_t column = static_cast<int64_t>(index / down % across) * COLUMNS, split = index / down / across;
    int64_t token = split * problem.split_tokens;
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
    products_kernel(const __grid_constant__ problem problem, unsigned weight_tiles, unsigned across) {
    extern __shared__ __align__(128) char shared[];
    allow_next_kernel();
    if (blockIdx.x < weight_tiles)
        weight_tile<T>(problem, blockIdx.x, across, shared);
    else
        hidden_tile<T>(problem, blockIdx.x - weight_tiles, across, shared);
}

/* The weight gradient from its partial sums: added in order, to the old value once, rounded once. A thread has WIDTH
 * neighbours; unless WIDTH is 1, rows are whole numbers of those. */
template <int WIDTH>
__global__ void __launch_bounds__(THREADS) reduce_kernel(const __grid_constant__ problem problem) {
    struct alignas(WIDTH * sizeof(float)) group {
        float value[WIDTH];
    };
    wait_for_last_kernel();
    int64_t elements = problem.experts * problem.hidden;
    int64_t at = (blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x) * WIDTH;
    if (at >= elements)
        return;
    float sum[WIDTH] = {};
#pragma unroll 8
    for (int64_t split = 0; split < problem.splits; split++) {
        group part = *reinterpret_cast<const group *>(problem.partials + split * elements + at);
#pragma unroll
        for (int i = 0; i < WIDTH; i++)
            sum[i] = __fadd_rn(sum[i], part.value[i]);
    }
    int64_t expert = at / problem.hidden, column = at % problem.hidden;
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
        if (problem.accumulate)
            sum[i] = __fadd_rn(load_element(problem.grad_weight, expert, column + i), sum[i]);
        store_element(problem.grad_weight, expert, column + i, sum[i]);
    }
}

template <int WIDTH>
cudaError_t launch_reduce(const problem &problem, cudaStream_t stream) {
    int64_t threads = problem.experts * problem.hidden / WIDTH;
    return launch_early(reduce_kernel<WIDTH>, (threads + THREADS - 1) / THREADS, THREADS, 0, stream, problem);
}

template <typename T>
cudaError_t launch(const problem &problem, cudaStream_t stream) {
    int64_t across = (problem.hidden + COLUMNS - 1) / COLUMNS;
    int64_t weight_tiles =
        problem.grad_weight.data ? (problem.experts + WEIGHT_ROWS - 1) / WEIGHT_ROWS * across * problem.splits : 0;
    int64_t hidden_tiles = problem.grad_hidden.data ? (problem.tokens + HIDDEN_ROWS - 1) / HIDDEN_ROWS * across : 0;
    if (weight_tiles + hidden_tiles > 0) {
        cudaError_t error = cudaFuncSetAttribute(products_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                 static_cast<int>(shared_bytes<T>));
        if (error != cudaSuccess)
            return error;
        error = launch_early(products_kernel<T>, weight_tiles + hidden_tiles, THREADS, shared_bytes<T>, stream, problem,
                             static_cast<unsigned>(weight_tiles), static_cast<unsigned>(across));
        if (error != cudaSuccess)
            return error;
    }
    int64_t elements = problem.experts * problem.hidden;
    if (!problem.grad_weight.data || elements == 0 || (problem.accumulate && problem.tokens == 0))
        return cudaSuccess;
    return problem.hidden % 4 == 0 ? launch_reduce<4>(problem, stream) : launch_reduce<1>(problem, stream);
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
