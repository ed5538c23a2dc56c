/* SPDX-License-Identifier: Apache-2.0 */
/* Both products of an operation by one kernel that reads the hidden states once, for sm_90a.
 *
 * A block has a slice of COLUMNS columns, whose gate it keeps, and a group of the tokens, which it takes 64 at a time.
 * The blocks of a cluster have the same slice, and each its group:
 *
 *     a warp           brings tiles of G by bulk copies, once the kernel before is done; that one has left them as they
 *                      are to lie in shared memory
 *     two warps        bring tiles of the hidden states by cp.async, and do not wait for the kernel before
 *     two warpgroups   grad_hidden_states, every other tile each: G [64, E] times the gate [E, COLUMNS]; they need no
 *                      hidden states, and so are under way while those arrive
 *     one or two more  the weight gradient: G^T [E, 64] times hidden states [64, COLUMNS], added up in registers over
 *                      all tiles
 *
 * In the end the blocks of a cluster send one another their sums of the weight gradient, a part of them to each, which
 * that one adds up in the order of the groups and stores.
 *
 * What decides is how long the second-level cache takes to give every slice all of G. Wide slices read less; but then
 * more groups have to fill the device, whose sums take longer to exchange, and fewer clusters fit, 30 of four blocks,
 * 66 of two. For H = 2048 a small batch takes 64 slices of 32 columns and two groups, a larger one 26 slices of 80 and
 * four. Those of two leave so many registers that the kernel before, which lets this one start first thing, fits
 * beside them. Their loads of hidden states then go out early, but one after another: that kernel waits for memory
 * itself, and would end a microsecond later.
 */
#include "tiles.cuh"

namespace {

enum { TOKENS = TILE_TOKENS, BLOCK = 64 /* experts */, PANEL_COLUMNS = 32, WARPGROUP = 128, LOADERS = 64, TURNS = 2 };

/* Sizes for E of at most BLOCKS times 64. Everything in shared memory is panels of 32 columns, swizzled as wgmma wants
 * rows of 64 bytes. */
template <int BLOCKS, int COLUMNS, int GROUPS>
struct shape {
    static constexpr int EXPERTS = BLOCKS * BLOCK, PANELS = (COLUMNS + PANEL_COLUMNS - 1) / PANEL_COLUMNS;
    static constexpr int BLOCKS_EACH = COLUMNS > 64 ? 1 : COLUMNS > 32 ? 2 : 4; /* of a warpgroup */
    static constexpr int WARPGROUPS = (BLOCKS + BLOCKS_EACH - 1) / BLOCKS_EACH;
    static constexpr int THREADS = (WARPGROUPS + TURNS) * WARPGROUP + LOADERS + WARP;
    static constexpr int BOUND = 768; /* 80 registers */
    static constexpr int GATE_BYTES = PANELS * EXPERTS * A_PANEL, HIDDEN_BYTES = PANELS * TOKENS * A_PANEL;
    static constexpr int LOGITS_BYTES = TOKENS * EXPERTS * 2;
    /* Sums travel in units of what a warpgroup has in four registers. */
    static constexpr int UNIT_BYTES = WARPGROUP * 16, UNITS = BLOCKS * COLUMNS / 8;
    static constexpr int PART = (UNITS + GROUPS - 1) / GROUPS, SUMS_BYTES = (GROUPS - 1) * PART * UNIT_BYTES;
    static __device__ __forceinline__ int units_of(unsigned rank) { /* the last part may be smaller */
        const int left = UNITS - static_cast<int>(rank) * PART;
        return left < 0 ? 0 : left < PART ? left : PART;
    }
    static constexpr int ROOM = 222 * 1024 - GATE_BYTES - SUMS_BYTES;
    static constexpr int LOGITS_ROOM = ROOM * 5 / 8 / LOGITS_BYTES, LOGITS_SLOTS = LOGITS_ROOM < 7 ? LOGITS_ROOM : 7;
    static constexpr int HIDDEN_ROOM = (ROOM - LOGITS_SLOTS * LOGITS_BYTES) / HIDDEN_BYTES;
    static constexpr int HIDDEN_SLOTS = HIDDEN_ROOM < 16 ? HIDDEN_ROOM : 16;
    static constexpr int BARRIERS = 2 * (HIDDEN_SLOTS + LOGITS_SLOTS) + 1;
    static constexpr int BYTES =
        GATE_BYTES + SUMS_BYTES + HIDDEN_SLOTS * HIDDEN_BYTES + LOGITS_SLOTS * LOGITS_BYTES + BARRIERS * 8;
    static_assert(HIDDEN_SLOTS >= 3 && LOGITS_SLOTS >= 3 && BYTES <= 227 * 1024, "rings that keep memory busy");
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/* ---- Rings ---- */

/* A place in a ring: the slot, and the parity of the round. */
template <int SLOTS>
struct place {
    int slot = 0;
    uint32_t round = 0;

    __device__ __forceinline__ void next() {
        if (++slot == SLOTS)
            slot = 0, round ^= 1;
    }
};

/* A ring's slots, and its barriers: one of each slot for full, then one of each for empty. */
template <int SLOTS, int BYTES>
struct ring {
    uint32_t slots, barriers;

    __device__ __forceinline__ uint32_t at(int slot) const {
        return slots + slot * BYTES;
    }
    __device__ __forceinline__ uint32_t full(int slot) const {
        return barriers + slot * 8;
    }
    __device__ __forceinline__ uint32_t empty(int slot) const {
        return barriers + (SLOTS + slot) * 8;
    }
    __device__ __forceinline__ void init(int producers, int consumers) const {
        for (int slot = 0; slot < SLOTS; slot++) {
            barrier_init(full(slot), producers);
            barrier_init(empty(slot), consumers);
        }
    }
    /* A warp has read the slot. */
    __device__ __forceinline__ void release(int slot) const {
        if (threadIdx.x % WARP == 0)
            barrier_arrive(empty(slot));
    }
    /* Hands the slots of so many tiles to load(tile, slot), each when it is empty. */
    template <typename Load>
    __device__ __forceinline__ void produce(int tiles, Load load) const {
        place<SLOTS> next;
#pragma unroll 1
        for (int i = 0; i < tiles; i++, next.next()) {
            if (i >= SLOTS)
                barrier_wait(empty(next.slot), next.round ^ 1);
            load(i, next.slot);
        }
    }
};

/* THREADS threads copy blocks of ROWS rows and COLUMNS columns into panels, one below the other; what does not exist is
 * zeros. A thread has one chunk of each panel, of every so many rows. */
template <int ROWS, int COLUMNS, int THREADS>
class panel_loader {
    static constexpr int CHUNKS = A_PANEL / CHUNK_BYTES, ROUND = THREADS / CHUNKS, ROUNDS = ROWS / ROUND;
    static constexpr int PANELS = (COLUMNS + PANEL_COLUMNS - 1) / PANEL_COLUMNS;
    static_assert(ROUND % 8 == 0 && ROWS % ROUND == 0, "whole rounds of whole swizzles");
    const char *from;
    int64_t round_stride;
    int at;       /* in a block in shared memory */
    int columns;  /* that exist, from the thread's chunk on, at most */
    int64_t left; /* the same of rows */

  public:
    __device__ __forceinline__ panel_loader(const struct rows &matrix, int64_t row, int64_t all_rows, int64_t column,
                                            int64_t all_columns, int thread) {
        const int down = thread / CHUNKS, chunk = thread % CHUNKS;
        const int64_t width = all_columns - column < COLUMNS ? all_columns - column : COLUMNS;
        from = matrix.data + ((row + down) * matrix.stride + column + chunk * 8) * 2;
        round_stride = ROUND * matrix.stride * 2;
        at = swizzled<__half, ROWS, A_PANEL>(down, chunk * 8);
        columns = static_cast<int>(width) - chunk * 8;
        left = all_rows - row - down;
    }

    __device__ __forceinline__ void next(uint32_t to) {
        const char *source = from;
        to += at;
        if (left > ROWS - ROUND) {
#pragma unroll
            for (int i = 0; i < ROUNDS; i++, source += round_stride)
#pragma unroll
                for (int j = 0; j < PANELS; j++)
                    copy(to + (j * ROWS + i * ROUND) * A_PANEL, source + j * A_PANEL, columns > j * PANEL_COLUMNS);
        } else {
#pragma unroll 1
            for (int i = 0; i < ROUNDS; i++, source += round_stride)
#pragma unroll 1
                for (int j = 0; j < PANELS; j++)
                    copy(to + (j * ROWS + i * ROUND) * A_PANEL, source + j * A_PANEL,
                         columns > j * PANEL_COLUMNS && left > i * ROUND);
        }
        from += ROUNDS * round_stride;
        left -= ROWS;
    }

  private:
    static __device__ __forceinline__ void copy(uint32_t to, const char *source, bool exists) {
        copy_async(to, source, exists ? CHUNK_BYTES : 0);
    }
};

/* ---- Sums ---- */

/* Sums of DOWN times 64 rows, as wgmma has them: a warp has 16 of each 64 rows, a thread pairs of columns. */
template <typename T, int DOWN_, int COLUMNS>
struct sums_of : async_layout {
    static constexpr int DOWN = DOWN_, ACROSS = COLUMNS / 8;
    float sums[DOWN][ACROSS][4];

    __device__ __forceinline__ void clear() {
        memset(sums, 0, sizeof sums);
    }

    /* G [64, EXPERTS] times the gate. */
    template <int EXPERTS>
    __device__ __forceinline__ void multiply_gate(uint32_t logits, uint32_t gate) {
        hold(sums);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < EXPERTS / 16; k++)
            wgmma<false>(sums[0],
                         matrix_at(logits + k / 2 * TOKENS * A_PANEL + k % 2 * A_PANEL / 2, 8 * A_PANEL, 0, SWIZZLE_64),
                         matrix_at(gate + k * 16 * A_PANEL, 8 * A_PANEL, EXPERTS * A_PANEL, SWIZZLE_64), k > 0, T());
        wgmma_commit();
        wgmma_wait();
        hold(sums);
    }

    /* Adds G^T, from a block of experts on, times hidden states. */
    __device__ __forceinline__ void add_hidden(uint32_t logits, uint32_t hidden) {
        hold(sums);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < TOKENS / 16; k++) {
            const uint64_t x = matrix_at(hidden + k * 16 * A_PANEL, 8 * A_PANEL, TOKENS * A_PANEL, SWIZZLE_64);
#pragma unroll
            for (int i = 0; i < DOWN; i++)
                wgmma<true>(sums[i],
                            matrix_at(logits + k * 16 * A_PANEL + i * (BLOCK / PANEL_COLUMNS) * TOKENS * A_PANEL,
                                      8 * A_PANEL, TOKENS * A_PANEL, SWIZZLE_64),
                            x, 1, T());
        }
        wgmma_commit();
        wgmma_wait();
        hold(sums);
    }
};

/* ---- The kernel ---- */

/* What a block works on, and its shared memory. */
template <int BLOCKS, int COLUMNS, int GROUPS>
struct job {
    using shape = ::shape<BLOCKS, COLUMNS, GROUPS>;
    int64_t first, column; /* token, column */
    int tiles;
    unsigned rank;           /* in the cluster, and the group's number */
    uint32_t gate, sums;     /* sums: from the other blocks, a part from each in the order of their ranks */
    const char *sums_memory; /* the same */
    ring<shape::LOGITS_SLOTS, shape::LOGITS_BYTES> logits;
    ring<shape::HIDDEN_SLOTS, shape::HIDDEN_BYTES> hidden;
    uint32_t sums_come;

    __device__ __forceinline__ job(const problem &problem, char *shared) {
        rank = blockIdx.x % GROUPS;
        first = rank * problem.split_tokens;
        const int64_t rest = problem.tokens - first;
        tiles = rest <= 0
                    ? 0
                    : static_cast<int>(divide_up(rest < problem.split_tokens ? rest : problem.split_tokens, TOKENS));
        column = static_cast<int64_t>(blockIdx.x / GROUPS) * COLUMNS;
        logits.slots = shared_address(shared);
        hidden.slots = logits.slots + shape::LOGITS_SLOTS * shape::LOGITS_BYTES;
        gate = hidden.slots + shape::HIDDEN_SLOTS * shape::HIDDEN_BYTES;
        sums = gate + shape::GATE_BYTES;
        sums_memory = shared + (sums - logits.slots);
        logits.barriers = sums + shape::SUMS_BYTES;
        hidden.barriers = logits.barriers + 2 * shape::LOGITS_SLOTS * 8;
        sums_come = hidden.barriers + 2 * shape::HIDDEN_SLOTS * 8;
    }
};

template <int BLOCKS, int COLUMNS, int GROUPS>
__device__ __forceinline__ void load_hidden(const job<BLOCKS, COLUMNS, GROUPS> &job, const problem &problem,
                                            int thread) {
    panel_loader<TOKENS, COLUMNS, LOADERS> loader(problem.hidden_states, job.first, problem.tokens, job.column,
                                                  problem.hidden, thread);
    using shape = ::shape<BLOCKS, COLUMNS, GROUPS>;
    constexpr int PACE = COLUMNS > 32 ? 0 : 600; /* clocks from one tile to the next, at first */
    const long long begin = clock64();
    job.hidden.produce(job.tiles, [&](int i, int slot) {
        if (i < shape::HIDDEN_SLOTS)
            while (clock64() - begin < static_cast<long long>(i) * PACE)
                ;
        loader.next(job.hidden.at(slot));
        barrier_arrive_when_copied(job.hidden.full(slot));
    });
}

template <int BLOCKS, int COLUMNS, int GROUPS>
__device__ __forceinline__ void load_logits(const job<BLOCKS, COLUMNS, GROUPS> &job, const problem &problem) {
    constexpr int BYTES = shape<BLOCKS, COLUMNS, GROUPS>::LOGITS_BYTES;
    const char *from = problem.logits + job.first / TOKENS * BYTES;
    wait_for_last_kernel();
    fence_asynchronous_all();
    job.logits.produce(job.tiles, [&](int i, int slot) {
        barrier_arrive_expecting(job.logits.full(slot), BYTES);
        copy_bulk(job.logits.at(slot), from + static_cast<int64_t>(i) * BYTES, BYTES, job.logits.full(slot));
    });
}

template <typename T, int BLOCKS, int COLUMNS, int GROUPS>
__device__ __forceinline__ void make_grad_hidden(const job<BLOCKS, COLUMNS, GROUPS> &job, const problem &problem,
                                                 int turn) {
    using shape = ::shape<BLOCKS, COLUMNS, GROUPS>;
    panel_loader<shape::EXPERTS, COLUMNS, TURNS * WARPGROUP>(problem.weight, 0, problem.experts, job.column,
                                                             problem.hidden, turn * WARPGROUP + threadIdx.x % WARPGROUP)
        .next(job.gate);
    copy_async_commit();
    copy_async_wait<0>();
    fence_asynchronous();
    synchronize(1, TURNS * WARPGROUP);
    sums_of<T, 1, COLUMNS> result;
    result.clear();
    place<shape::LOGITS_SLOTS> at;
#pragma unroll 1
    for (int i = 0; i < job.tiles; i++, at.next()) {
        if (i % TURNS != turn)
            continue;
        barrier_wait(job.logits.full(at.slot), at.round);
        result.template multiply_gate<shape::EXPERTS>(job.logits.at(at.slot), job.gate);
        job.logits.release(at.slot);
        store_sectors<T>(result, problem.grad_hidden, job.first + static_cast<int64_t>(i) * TOKENS, problem.tokens,
                         job.column, problem.hidden);
    }
}

/* Stores neighbours of the weight gradient one by one. Out of the way of the code that stores pairs. */
__device__ __noinline__ void store_apart(const problem &problem, int64_t expert, int64_t column, float first,
                                         float second) {
    if (problem.accumulate) {
        first = __fadd_rn(load_element(problem.grad_weight, expert, column), first);
        second = __fadd_rn(load_element(problem.grad_weight, expert, column + 1), second);
    }
    store_element(problem.grad_weight, expert, column, first);
    store_element(problem.grad_weight, expert, column + 1, second);
}

/* The sums of DOWN blocks of experts from one on. */
template <typename T, int DOWN, int BLOCKS, int COLUMNS, int GROUPS>
__device__ __forceinline__ void make_grad_weight(const job<BLOCKS, COLUMNS, GROUPS> &job, const problem &problem,
                                                 bool pairs, int block) {
    using shape = ::shape<BLOCKS, COLUMNS, GROUPS>;
    const uint32_t blocks_at = block * (BLOCK / PANEL_COLUMNS) * TOKENS * A_PANEL;
    sums_of<T, DOWN, COLUMNS> result;
    result.clear();
    place<shape::LOGITS_SLOTS> at;
    place<shape::HIDDEN_SLOTS> at_hidden;
#pragma unroll 1
    for (int i = 0; i < job.tiles; i++, at.next(), at_hidden.next()) {
        barrier_wait(job.logits.full(at.slot), at.round);
        barrier_wait(job.hidden.full(at_hidden.slot), at_hidden.round);
        fence_asynchronous();
        result.add_hidden(job.logits.at(at.slot) + blocks_at, job.hidden.at(at_hidden.slot));
        job.logits.release(at.slot);
        job.hidden.release(at_hidden.slot);
    }

    constexpr int ACROSS = COLUMNS / 8, PART = shape::PART;
    const int thread = threadIdx.x % WARPGROUP, lane = thread % WARP;
    const int expert = block * BLOCK + result.first_row() + lane / 4;
    const int64_t column = job.column + lane % 4 * 2, row_stride = problem.grad_weight.stride;
    T *const to = reinterpret_cast<T *>(problem.grad_weight.data) + expert * row_stride + column;
    cluster_wait();
#pragma unroll
    for (int i = 0; i < DOWN * ACROSS; i++) {
        const unsigned unit = block * ACROSS + i, owner = unit / PART;
        if (owner != job.rank) {
            const unsigned at = (job.rank - (job.rank > owner)) * PART + unit % PART;
            store_to_block(of_block(job.sums + at * shape::UNIT_BYTES + thread * 16, owner),
                           result.sums[i / ACROSS][i % ACROSS], of_block(job.sums_come, owner));
        }
    }
    barrier_wait_cluster(job.sums_come, 0);
#pragma unroll
    for (int i = 0; i < DOWN * ACROSS; i++) {
        const unsigned unit = block * ACROSS + i;
        if (unit / PART != job.rank)
            continue;
        const char *from = job.sums_memory + unit % PART * shape::UNIT_BYTES + thread * 16;
        const float *own = result.sums[i / ACROSS][i % ACROSS];
        float sums[4] = {};
#pragma unroll
        for (unsigned rank = 0; rank < GROUPS; rank++) { /* to add zero changes no sum that began with zero */
            float4 part = make_float4(own[0], own[1], own[2], own[3]);
            if (rank != job.rank)
                part = *reinterpret_cast<const float4 *>(from + (rank - (rank > job.rank)) * PART * shape::UNIT_BYTES);
            sums[0] = __fadd_rn(sums[0], part.x), sums[1] = __fadd_rn(sums[1], part.y);
            sums[2] = __fadd_rn(sums[2], part.z), sums[3] = __fadd_rn(sums[3], part.w);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int down = i / ACROSS * BLOCK + 8 * half, across = i % ACROSS * 8;
            if (expert + down >= problem.experts || column + across >= problem.hidden)
                continue;
            if (pairs)
                *reinterpret_cast<uint32_t *>(to + down * row_stride + across) =
                    packed(sums[2 * half], sums[2 * half + 1], T());
            else
                store_apart(problem, expert + down, column + across, sums[2 * half], sums[2 * half + 1]);
        }
    }
}

template <typename T, int BLOCKS, int COLUMNS, int GROUPS>
__device__ __forceinline__ void fused(const problem &problem, bool pairs, char *shared) {
    using shape = ::shape<BLOCKS, COLUMNS, GROUPS>;
    constexpr int EACH = shape::BLOCKS_EACH, REST = BLOCKS - (shape::WARPGROUPS - 1) * EACH;
    const job<BLOCKS, COLUMNS, GROUPS> job(problem, shared);
    allow_next_kernel();
    if (threadIdx.x == 0) {
        job.logits.init(1, (shape::WARPGROUPS + 1) * WARPGROUP / WARP);
        job.hidden.init(LOADERS, shape::WARPGROUPS * WARPGROUP / WARP);
        barrier_init(job.sums_come, 1);
        barrier_init_done();
        barrier_arrive_expecting(job.sums_come, (GROUPS - 1) * shape::units_of(job.rank) * shape::UNIT_BYTES);
    }
    __syncthreads();
    cluster_arrive();
    const int role = threadIdx.x / WARPGROUP, thread = threadIdx.x % WARPGROUP;
    if (role < shape::WARPGROUPS - 1) {
        make_grad_weight<T, EACH>(job, problem, pairs, role * EACH);
        return;
    }
    if (role < shape::WARPGROUPS) {
        make_grad_weight<T, REST>(job, problem, pairs, role * EACH);
        return;
    }
    if (role < shape::WARPGROUPS + TURNS)
        make_grad_hidden<T>(job, problem, role - shape::WARPGROUPS);
    else if (thread < LOADERS)
        load_hidden(job, problem, thread);
    else if (thread == LOADERS)
        load_logits(job, problem);
    __syncwarp();
    cluster_wait();
}
#endif

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define MOER_CLUSTER(BLOCKS)
#else
#define MOER_CLUSTER(BLOCKS) __cluster_dims__(BLOCKS, 1, 1)
#endif

template <typename T, int BLOCKS, int COLUMNS, int GROUPS>
__global__ void MOER_CLUSTER(GROUPS) __launch_bounds__(shape<BLOCKS, COLUMNS, GROUPS>::BOUND, 1)
    fused_kernel(const __grid_constant__ problem problem, bool pairs) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) char shared[];
    fused<T, BLOCKS, COLUMNS, GROUPS>(problem, pairs, shared);
#else
    __trap();
#endif
}

/* ---- Launches ---- */

template <typename T, int BLOCKS, int COLUMNS, int GROUPS>
cudaError_t launch_with(const problem &problem, cudaStream_t stream) {
    using shape = ::shape<BLOCKS, COLUMNS, GROUPS>;
    const rows &out = problem.grad_weight;
    /* Whether neighbours of the weight gradient can be stored together. */
    const bool pairs = !problem.accumulate && out.type == problem.weight.type && out.stride % 2 == 0 &&
                       reinterpret_cast<uintptr_t>(out.data) % 4 == 0;
    auto kernel = fused_kernel<T, BLOCKS, COLUMNS, GROUPS>;
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape::BYTES);
    return error == cudaSuccess ? launch_early(kernel, divide_up(problem.hidden, COLUMNS) * GROUPS, shape::THREADS,
                                               shape::BYTES, stream, problem, pairs)
                                : error;
}

template <typename T>
cudaError_t launch(const problem &problem, cudaStream_t stream) {
    const bool one = problem.logits_stride == BLOCK;
    if (problem.fused == 2)
        return one ? launch_with<T, 1, 32, 2>(problem, stream) : launch_with<T, 2, 32, 2>(problem, stream);
    return one ? launch_with<T, 1, 80, 4>(problem, stream) : launch_with<T, 2, 80, 4>(problem, stream);
}

} // namespace

cudaError_t launch_fused(const problem &problem, cudaStream_t stream) {
    return problem.weight.type == BF16 ? launch<__nv_bfloat16>(problem, stream) : launch<__half>(problem, stream);
}
