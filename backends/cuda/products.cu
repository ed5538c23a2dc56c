/* SPDX-License-Identifier: Apache-2.0 */
/* Both products of an operation in one launch, for every architecture from sm_80.
 *
 *     grad_hidden_states   tiles of 128 tokens x 128 columns, terms over the experts:  A = G, rows of terms. A block
 * takes a run of tiles, one below the other, so that its columns of the gate stay in shared memory
 *     weight gradient      tiles of 64, 128 or 160 experts x 128 columns, terms over a split of the tokens:  A = G^T,
 * whose terms are the rows; float32 partial sums, which reduce.cu adds in the order of the splits
 *
 * B is the gate or the hidden states, rows of columns. A block of 4 warps takes 64 terms at a time from a ring of
 * buffers that cp.async fills, across the tiles of a run without a stop. 16-bit operands are multiplied by wgmma on
 * Hopper and by mma.sync m16n8k16, 2 x 2 warps over the tile, everywhere else; a row's chunks of 16 bytes are XORed
 * with its number, as wgmma wants it and so that ldmatrix meets no bank twice. B does not depend on the kernel before,
 * so it is on its way while that one ends. Budget: 113 KB of shared memory and 256 registers a thread, two blocks to a
 * multiprocessor; 80 bytes of shared memory a clock at the full rate of mma.sync. float32 operands go through the same
 * ring into fused multiply-adds.
 *
 * Splits depend on shapes alone, and a tile's terms are added in ascending order wherever it lies: the bits of a row of
 * grad_hidden_states depend on that token alone. */
#include "tiles.cuh"

/* Named: nvcc would name an anonymous one after the file's path, and other folders would give other bytes. */
namespace moer_products {

enum { THREADS = 128, COLUMNS = TILE_COLUMNS, HIDDEN_ROWS = 128 };

/* Where a tile's operands are and how much of them there is. */
struct operand {
    const char *data; /* its first element */
    int64_t stride;   /* elements */
    int64_t rows;     /* rows from data on that exist */
    int64_t columns;  /* the same of columns */
    bool aligned;     /* rows begin at multiples of 16 bytes */
};

/* A thread's chunks of a block of which so many rows and columns exist, from its first chunk on. */
template <typename T>
__device__ __noinline__ void load_partly(uint32_t to, const T *from, int64_t round_step, int rows, int columns,
                                         bool aligned, int rounds, int panels, int round, int panel_width,
                                         int round_bytes, int panel_bytes) {
    constexpr int elements = CHUNK_BYTES / sizeof(T);
#pragma unroll 1
    for (int i = 0; i < rounds; i++)
#pragma unroll 1
        for (int j = 0; j < panels; j++) {
            int count = i * round < rows ? columns - j * panel_width : 0;
            count = count < 0 ? 0 : count < elements ? count : elements;
            const T *chunk = from + i * round_step + j * panel_width;
            const uint32_t chunk_to = to + i * round_bytes + j * panel_bytes;
            if (aligned)
                copy_async(chunk_to, chunk, count * static_cast<int>(sizeof(T)));
            else
#pragma unroll 1
                for (int k = 0; k < elements; k++)
                    store_shared(chunk_to + k * sizeof(T), k < count ? chunk[k] : T(0.0f));
        }
}

/* Loads ROWS x WIDTH blocks of an operand, one after the other down its rows (DOWN) or along them. A thread has the
 * same chunks of every block. */
template <typename T, int ROWS, int WIDTH, int PANEL, bool DOWN>
class loader {
    static constexpr int ELEMENTS = CHUNK_BYTES / sizeof(T), PANEL_WIDTH = PANEL / sizeof(T);
    static constexpr int PANELS = WIDTH / PANEL_WIDTH, CHUNKS = PANEL / CHUNK_BYTES;
    static constexpr int ROUND = THREADS / CHUNKS, ROUNDS = ROWS / ROUND;
    static_assert(ROUND % 8 == 0 && ROWS % ROUND == 0 && WIDTH % PANEL_WIDTH == 0, "whole rounds of whole swizzles");
    const T *source;
    int64_t round_step;
    int rows, columns; /* that exist, from the block on */
    bool aligned;

    static __device__ __forceinline__ int row() {
        return threadIdx.x / CHUNKS;
    }
    static __device__ __forceinline__ int column() {
        return threadIdx.x % CHUNKS * ELEMENTS;
    }

  public:
    __device__ __forceinline__ void seat(const operand &from) {
        source = reinterpret_cast<const T *>(from.data) + row() * from.stride + column();
        round_step = ROUND * from.stride;
        rows = static_cast<int>(from.rows < 1 << 30 ? from.rows : 1 << 30);
        columns = static_cast<int>(from.columns < 1 << 30 ? from.columns : 1 << 30);
        aligned = from.aligned;
    }

    /* Loads the next block; what does not exist is zero, and its address is not looked at. */
    __device__ __forceinline__ void next(char *block) {
        const uint32_t to = shared_address(block) + swizzled<T, ROWS, PANEL>(row(), column());
        if (aligned && rows >= ROWS && columns >= WIDTH) {
            const T *from = source;
#pragma unroll
            for (int i = 0; i < ROUNDS; i++, from += round_step)
#pragma unroll
                for (int j = 0; j < PANELS; j++)
                    copy_async(to + (i * ROUND + j * ROWS) * PANEL, from + j * PANEL_WIDTH);
        } else {
            load_partly(to, source, round_step, rows - row(), columns - column(), aligned, ROUNDS, PANELS, ROUND,
                        PANEL_WIDTH, ROUND * PANEL, ROWS * PANEL);
        }
        if (DOWN) {
            source += ROUNDS * round_step;
            rows -= ROWS;
        } else {
            source += WIDTH;
            columns -= WIDTH;
        }
    }
};

/* The sums of a tile, as the threads have them, and how terms are added. publish() comes between the arrival of a step
 * and the barrier. Here: 16-bit types, by tensor cores of every architecture. */
template <typename T, int ROWS, bool TERMS_ARE_ROWS>
struct tile {
    static constexpr int STEP = step_of<T>, WARP_ROWS = ROWS / 2, WARP_COLUMNS = COLUMNS / 2;
    static constexpr int DOWN = WARP_ROWS / 16, ACROSS = WARP_COLUMNS / 8;
    /* Bytes from 16 terms, or 16 rows, to the next. */
    static constexpr int A_GROUP = 16 * A_PANEL, B_GROUP = 16 * B_PANEL;
    static constexpr int GROUPS_A_PANEL = A_PANEL / sizeof(T) / 16;
    static __device__ constexpr bool pairs_below() {
        return false;
    }
    float sums[DOWN][ACROSS][4];

    static __device__ constexpr int row_step() {
        return 16;
    }
    static __device__ __forceinline__ int first_row() {
        return threadIdx.x / WARP / 2 * WARP_ROWS;
    }
    static __device__ __forceinline__ int first_column() {
        return threadIdx.x / WARP % 2 * WARP_COLUMNS;
    }

    /* Where the lane's rows of 8 x 8 matrices begin, in bytes from the beginning of a block: of A by 16 rows of the
     * tile where its terms are rows, otherwise by 16 terms of a panel; of B by 16 columns. */
    int left_offsets[TERMS_ARE_ROWS ? DOWN : GROUPS_A_PANEL], right_offsets[ACROSS / 2];

    __device__ __forceinline__ tile() {
        int lane = threadIdx.x % WARP, matrix = lane / 8, row = lane % 8;
        clear();
#pragma unroll
        for (int i = 0; i < (TERMS_ARE_ROWS ? DOWN : GROUPS_A_PANEL); i++)
            left_offsets[i] =
                TERMS_ARE_ROWS
                    ? swizzled<T, STEP, A_PANEL>(row + matrix / 2 * 8, first_row() + 16 * i + matrix % 2 * 8)
                    : swizzled<T, ROWS, A_PANEL>(first_row() + row + matrix % 2 * 8, 16 * i + matrix / 2 * 8);
#pragma unroll
        for (int i = 0; i < ACROSS / 2; i++)
            right_offsets[i] =
                swizzled<T, STEP, B_PANEL>(row + matrix % 2 * 8, first_column() + 16 * i + matrix / 2 * 8);
    }

    __device__ __forceinline__ void clear() {
        memset(sums, 0, sizeof sums);
    }

    /* Adds the first GROUPS times 16 terms of a step. */
    template <int GROUPS>
    __device__ __forceinline__ void add_groups(uint32_t a, uint32_t b) {
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
            uint32_t left[DOWN][4];
#pragma unroll
            for (int i = 0; i < DOWN; i++)
                if (TERMS_ARE_ROWS)
                    load_matrices_transposed(left[i], a + left_offsets[i] + group * A_GROUP);
                else
                    load_matrices(left[i], a + left_offsets[group % GROUPS_A_PANEL] + i * A_GROUP +
                                               group / GROUPS_A_PANEL * ROWS * A_PANEL);
#pragma unroll
            for (int j = 0; j < ACROSS / 2; j++) {
                uint32_t right[4];
                load_matrices_transposed(right, b + right_offsets[j] + group * B_GROUP);
#pragma unroll
                for (int i = 0; i < DOWN; i++) {
                    multiply(sums[i][2 * j], left[i], right[0], right[1], T());
                    multiply(sums[i][2 * j + 1], left[i], right[2], right[3], T());
                }
            }
        }
    }

    /* Adds a step of which the first so many terms exist; the others are zero. */
    __device__ __forceinline__ void add(const char *a, const char *b, int terms) {
        if (terms > STEP / 2)
            add_groups<STEP / 16>(shared_address(a), shared_address(b));
        else
            add_groups<STEP / 32>(shared_address(a), shared_address(b));
    }

    __device__ __forceinline__ void publish() const {}

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
    static constexpr int STEP = step_of<float>, DOWN = ROWS / 8, ACROSS = 4;
    static __device__ constexpr bool pairs_below() {
        return false;
    }
    float sums[DOWN][ACROSS][2];

    __device__ __forceinline__ tile() {
        clear();
    }

    __device__ __forceinline__ void clear() {
        memset(sums, 0, sizeof sums);
    }

    __device__ __forceinline__ void add(const char *a, const char *b, int terms) {
        int down = threadIdx.x / 16, across = threadIdx.x % 16 * 2;
#pragma unroll 2
        for (int term = 0; term < STEP; term++) {
            float left[DOWN];
#pragma unroll
            for (int i = 0; i < DOWN; i++)
                left[i] = *reinterpret_cast<const float *>(
                    a + (TERMS_ARE_ROWS ? swizzled<float, STEP, A_PANEL>(term, down + 8 * i)
                                        : swizzled<float, ROWS, A_PANEL>(down + 8 * i, term)));
#pragma unroll
            for (int j = 0; j < ACROSS; j++) {
                float2 right =
                    *reinterpret_cast<const float2 *>(b + swizzled<float, STEP, B_PANEL>(term, across + 32 * j));
#pragma unroll
                for (int i = 0; i < DOWN; i++) {
                    sums[i][j][0] = fmaf(left[i], right.x, sums[i][j][0]);
                    sums[i][j][1] = fmaf(left[i], right.y, sums[i][j][1]);
                }
            }
        }
    }

    __device__ __forceinline__ void publish() const {}

    template <typename Visit>
    __device__ __forceinline__ void each(Visit visit) const {
#pragma unroll
        for (int i = 0; i < DOWN; i++)
#pragma unroll
            for (int j = 0; j < ACROSS; j++)
                visit(threadIdx.x / 16 + 8 * i, threadIdx.x % 16 * 2 + 32 * j, sums[i][j][0], sums[i][j][1]);
    }
};

template <typename T, int ROWS, bool TERMS_ARE_ROWS, bool ASYNC>
struct choose {
    using tile = moer_products::tile<T, ROWS, TERMS_ARE_ROWS>;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
template <typename T, int ROWS, bool TERMS_ARE_ROWS>
struct choose<T, ROWS, TERMS_ARE_ROWS, true> {
    using tile = async_tile<T, ROWS, COLUMNS, TERMS_ARE_ROWS>;
};
#endif

/* ---- A run of tiles ---- */

/* How shared memory is used, by the host's choice: a ring of slots for blocks of A, and one for B; where B is kept, its
 * ring has a slot for each step and is filled once. */
struct ring {
    int slots, kept_steps; /* kept_steps: 0 where B is not kept */
};

enum { B_BYTES = COLUMNS * STEP_BYTES };

/* Multiplies tiles below one another: A's are ROWS rows apart, B's are the same; finish(tile's number) takes the sums.
 * A is what the kernel before has made, B is an input. */
template <typename T, int ROWS, bool TERMS_ARE_ROWS, typename Tile, typename Finish>
__device__ __forceinline__ void multiply_tiles(Tile &result, operand a, const operand &b, int terms, int tiles,
                                               const ring &ring, char *shared, Finish finish) {
    constexpr int STEP = step_of<T>, A = ROWS * STEP_BYTES, B = B_BYTES;
    loader<T, TERMS_ARE_ROWS ? STEP : ROWS, TERMS_ARE_ROWS ? ROWS : STEP, A_PANEL, TERMS_ARE_ROWS> load_a;
    loader<T, STEP, COLUMNS, B_PANEL, true> load_b;
    char *ring_a = shared, *ring_b = shared + ring.slots * A;
    const int steps = terms > 0 ? (terms + STEP - 1) / STEP : 1; /* of no terms: a step of zeros */
    const int total = steps * tiles;
    const int slots_b = ring.kept_steps ? ring.kept_steps : ring.slots;
    int ahead = 0, ahead_step = 0, slot_a = 0, slot_b = 0; /* of the next block to load */

    load_a.seat(a);
    load_b.seat(b);
    const int early = ring.slots - 1 < steps ? ring.slots - 1 : steps;
#pragma unroll 1
    for (int i = 0; i < early; i++)
        load_b.next(ring_b + i * B);
    wait_for_last_kernel();

    int used_a = 0, used_b = 0, step = 1 - ring.slots, number = 0; /* of the tile at hand; before the first: filling */
#pragma unroll 1
    while (number < tiles) {
        if (step >= 0) {
            if (ring.slots > 2)
                copy_async_wait<1>();
            else
                copy_async_wait<0>();
            result.publish();
            __syncthreads();
        }
        if (ahead < total) { /* into the buffer that the last step has read */
            if (ahead_step == steps) {
                ahead_step = 0;
                a.data += ROWS * a.stride * sizeof(T);
                a.rows -= ROWS;
                load_a.seat(a);
                load_b.seat(b);
            }
            load_a.next(ring_a + slot_a * A);
            if (ahead >= early && (!ring.kept_steps || ahead < steps))
                load_b.next(ring_b + slot_b * B);
            slot_a = slot_a + 1 < ring.slots ? slot_a + 1 : 0;
            slot_b = slot_b + 1 < slots_b ? slot_b + 1 : 0;
            ahead++, ahead_step++;
        }
        copy_async_commit();
        if (step >= 0) {
            result.add(ring_a + used_a * A, ring_b + used_b * B, terms - step * STEP);
            used_a = used_a + 1 < ring.slots ? used_a + 1 : 0;
            used_b = used_b + 1 < slots_b ? used_b + 1 : 0;
            if (step == steps - 1) {
                finish(number++);
                result.clear();
                step = -1;
            }
        }
        step++;
    }
    copy_async_wait<0>();
}

/* ---- grad_hidden_states ---- */

/* One by one, through shared memory that nothing else uses any more: where elements are of another type, or rows do not
 * begin or end at multiples of 16 bytes. */
template <typename Tile>
__device__ __forceinline__ void store_elements(const Tile &result, const typed_rows &out, int64_t row, int64_t rows,
                                               int64_t column, int64_t columns, float *shared) {
    keep_here(shared);
    asm volatile("" : "+l"(row), "+l"(column));
    __syncthreads();
    result.each([&](int i, int j, float first, float second) {
        *reinterpret_cast<float2 *>(shared + i * COLUMNS + j) = make_float2(first, second);
    });
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < HIDDEN_ROWS * COLUMNS; i += THREADS)
        if (row + i / COLUMNS < rows && column + i % COLUMNS < columns)
            store_element(out, row + i / COLUMNS, column + i % COLUMNS, shared[i]);
}

enum { TILE_BYTES = HIDDEN_ROWS * COLUMNS * sizeof(float) }; /* what that takes */

/* What a launch is made of, by the host's choice. */
struct plan {
    unsigned weight_tiles, across; /* columns of tiles */
    int64_t run;                   /* tiles of grad_hidden_states a block */
    ring weight, hidden;
    bool whole; /* grad_hidden_states in sectors; otherwise a run is one tile */
};

template <typename T, bool ASYNC>
__device__ __forceinline__ void hidden_run(const problem &problem, const plan &plan, unsigned index, char *shared) {
    const int64_t first = index / plan.across * plan.run, column = static_cast<int64_t>(index % plan.across) * COLUMNS;
    const int64_t all = (problem.tokens + HIDDEN_ROWS - 1) / HIDDEN_ROWS, token = first * HIDDEN_ROWS;
    const int tiles = static_cast<int>(all - first < plan.run ? all - first : plan.run);
    operand g = {problem.logits + token * problem.logits_stride * sizeof(T), problem.logits_stride,
                 problem.tokens - token, problem.logits_stride, true};
    operand w = {problem.weight.data + column * sizeof(T), problem.weight.stride, problem.experts,
                 problem.hidden - column, is_aligned(problem.weight, sizeof(T))};
    typename choose<T, HIDDEN_ROWS, false, ASYNC>::tile result;
    multiply_tiles<T, HIDDEN_ROWS, false>(result, g, w, problem.experts, tiles, plan.hidden, shared, [&](int number) {
        if constexpr (is_16_bit<T>)
            if (plan.whole) {
                store_sectors<T>(result, problem.grad_hidden, token + number * HIDDEN_ROWS, problem.tokens, column,
                                 problem.hidden);
                return;
            }
        store_elements(result, problem.grad_hidden, token, problem.tokens, column, problem.hidden,
                       reinterpret_cast<float *>(shared));
    });
}

/* ---- The weight gradient ---- */

/* Partial sums, whole sectors of them; there is room for whole tiles. */
template <typename Tile>
__device__ __forceinline__ void store_partials(const Tile &result, float *corner, int64_t stride) {
    keep_here(corner);
    asm volatile("" : "+l"(stride));
    result.each([&](int i, int j, float first, float second) {
        float *to = corner + i * stride + j;
        if (Tile::pairs_below())
            to[0] = first, to[stride] = second;
        else
            *reinterpret_cast<float2 *>(to) = make_float2(first, second);
    });
}

template <typename T, int ROWS, bool ASYNC>
__device__ __forceinline__ void weight_tile(const problem &problem, const plan &plan, unsigned index, char *shared) {
    const unsigned down = (problem.experts + ROWS - 1) / ROWS;
    const int expert = index % down * ROWS;
    const int64_t column = static_cast<int64_t>(index / down % plan.across) * COLUMNS;
    const int64_t split = index / down / plan.across, token = split * problem.split_tokens;
    int64_t tokens = problem.tokens - token < problem.split_tokens ? problem.tokens - token : problem.split_tokens;
    operand g = {problem.logits + (token * problem.logits_stride + expert) * sizeof(T), problem.logits_stride, tokens,
                 problem.logits_stride - expert, true};
    const rows &hidden = problem.hidden_states;
    operand x = {hidden.data + (token * hidden.stride + column) * sizeof(T), hidden.stride, tokens,
                 problem.hidden - column, is_aligned(hidden, sizeof(T))};
    typename choose<T, ROWS, true, ASYNC>::tile result;
    multiply_tiles<T, ROWS, true>(result, g, x, static_cast<int>(tokens), 1, plan.weight, shared, [&](int) {
        store_partials(result,
                       problem.partials + (split * problem.partial_rows + expert) * problem.partial_stride + column,
                       problem.partial_stride);
    });
}

/* Weight tiles come first: they are the longer ones. ASYNC: for sm_90a alone. */
template <typename T, int WEIGHT_ROWS, bool ASYNC>
__global__ void __launch_bounds__(THREADS, 2)
    products_kernel(const __grid_constant__ problem problem, const __grid_constant__ plan plan) {
#ifndef __CUDA_ARCH_FEAT_SM90_ALL
    if constexpr (ASYNC)
        __trap();
    else
#endif
    {
        extern __shared__ __align__(1024) char shared[];
        allow_next_kernel();
        if (blockIdx.x < plan.weight_tiles)
            weight_tile<T, WEIGHT_ROWS, ASYNC>(problem, plan, blockIdx.x, shared);
        else
            hidden_run<T, ASYNC>(problem, plan, blockIdx.x - plan.weight_tiles, shared);
    }
}

/* ---- Launches ---- */

/* As many slots as two blocks to a multiprocessor leave room for, at least two, at most three. */
ring choose_ring(int rows, int kept_steps, int *bytes) {
    const int half =
        attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor) / 2 - attribute(cudaDevAttrReservedSharedMemoryPerBlock);
    for (int slots = 3;; slots--) {
        *bytes = slots * (rows * STEP_BYTES + (kept_steps ? 0 : B_BYTES)) + kept_steps * B_BYTES;
        if (*bytes <= half || slots == 2)
            return ring{slots, kept_steps};
    }
}

/* Tiles a run. A small batch: two, if then most multiprocessors have one block, since the reduction's blocks wait
 * beside one but not beside two. Otherwise so many that the blocks fill the device once or, if runs of 8 are too short
 * for that, a whole number of times: a last few blocks would leave most of it idle. */
int64_t choose_run(int64_t weight_tiles, int64_t down, int64_t across) {
    enum { LONGEST = 8 };
    const int64_t multiprocessors = attribute(cudaDevAttrMultiProcessorCount), places = 2 * multiprocessors;
    if (weight_tiles + down * across <= multiprocessors)
        return 1;
    if (weight_tiles + divide_up(down, 2) * across <= multiprocessors + multiprocessors / 4)
        return 2;
    const int64_t least = weight_tiles + divide_up(down, LONGEST) * across;
    const int64_t room = divide_up(least, places) * places - weight_tiles;
    return divide_up(down, room / across);
}

template <typename T, int WEIGHT_ROWS, bool ASYNC>
cudaError_t launch_tiles(const problem &problem, cudaStream_t stream) {
    plan plan{};
    int weight_bytes = 0, hidden_bytes = 0;
    const int64_t across = divide_up(problem.hidden, COLUMNS), all = divide_up(problem.tokens, HIDDEN_ROWS);
    plan.across = static_cast<unsigned>(across);
    if (problem.grad_weight.data)
        plan.weight_tiles = static_cast<unsigned>(divide_up(problem.experts, WEIGHT_ROWS) * across * problem.splits);
    plan.weight = choose_ring(WEIGHT_ROWS, 0, &weight_bytes);
    /* The gate is kept where that costs the second block no room. */
    const int steps = static_cast<int>(divide_up(problem.experts, step_of<T>));
    plan.hidden = choose_ring(HIDDEN_ROWS, steps, &hidden_bytes);
    if (hidden_bytes > weight_bytes || plan.hidden.slots < plan.weight.slots)
        plan.hidden = choose_ring(HIDDEN_ROWS, 0, &hidden_bytes);
    int shared = weight_bytes > hidden_bytes ? weight_bytes : hidden_bytes;
    plan.whole = is_16_bit<T> && problem.grad_hidden.type == problem.type && problem.hidden % 8 == 0 &&
                 is_aligned(problem.grad_hidden, sizeof(T));
    plan.run = plan.whole && all > 0 && across > 0 ? choose_run(plan.weight_tiles, all, across) : 1;
    if (!plan.whole && shared < TILE_BYTES)
        shared = TILE_BYTES;
    const int64_t blocks = plan.weight_tiles + (problem.grad_hidden.data ? divide_up(all, plan.run) * across : 0);
    if (blocks == 0)
        return cudaSuccess;
    auto kernel = products_kernel<T, WEIGHT_ROWS, ASYNC>;
    /* The same for every call: others may set it between here and the launch. */
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                             attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin));
    return error == cudaSuccess ? launch_early(kernel, blocks, THREADS, shared, stream, problem, plan) : error;
}

template <typename T, int WEIGHT_ROWS>
cudaError_t launch_with(const problem &problem, cudaStream_t stream) {
    if constexpr (is_16_bit<T>)
        if (problem.kernels == HOPPER)
            return launch_tiles<T, WEIGHT_ROWS, true>(problem, stream);
    return launch_tiles<T, WEIGHT_ROWS, false>(problem, stream);
}

template <typename T>
cudaError_t launch_products_of(const problem &problem, cudaStream_t stream) {
    if constexpr (is_16_bit<T>) {
        if (problem.weight_rows == 160)
            return launch_with<T, 160>(problem, stream);
        if (problem.weight_rows == 128)
            return launch_with<T, 128>(problem, stream);
    }
    return launch_with<T, 64>(problem, stream);
}

template <typename T>
cudaError_t launch(const problem &problem, cudaStream_t stream) {
    cudaError_t error = launch_products_of<T>(problem, stream);
    int64_t elements = problem.experts * problem.hidden;
    if (error != cudaSuccess || !problem.grad_weight.data || elements == 0 ||
        (problem.accumulate && problem.tokens == 0))
        return error;
    return launch_reduction(problem, stream);
}

} // namespace moer_products

cudaError_t launch_products(const problem &problem, cudaStream_t stream) {
    switch (problem.type) {
    case BF16:
        return moer_products::launch<__nv_bfloat16>(problem, stream);
    case F16:
        return moer_products::launch<__half>(problem, stream);
    default:
        return moer_products::launch<float>(problem, stream);
    }
}
