/* SPDX-License-Identifier: Apache-2.0 */
/* Both products of an operation by one kernel that reads the hidden states once, for sm_90a.
 *
 * A block has a slice of 80 columns, whose gate it keeps, and a group of the tokens, which it takes 64 at a time. The
 * four, or two, blocks of a cluster have the same slice, and each its group. Warps of a block:
 *
 * - One brings the gate and tiles of the hidden states by tensor copies, and does not wait for the kernel before.
 * - Others bring G, once that kernel is done: two of them tiles by cp.async, which it has left as they are to lie in
 *   shared memory; or four of them entries, K a token, which they scatter into tiles of zeros.
 * - A warpgroup for each 64 experts makes the weight gradient: G^T times hidden states, added up over all tiles.
 * - Two warpgroups make grad_hidden_states, every other tile each: G times the gate. Of few tiles, they let the weight
 *   gradient have the next one first: its end, below, then goes on while the last of them are stored.
 * - One stores those by tensor copies; stores of registers took three times as long as the products.
 *
 * In the end the blocks of a cluster send one another their sums of the weight gradient, a part of each warpgroup's
 * columns to each, which that one adds up in the order of the groups and stores.
 *
 * For H = 2048 there are 26 slices, for 5120, 64; clusters of four blocks fit 30 times, of two, 66. The kernel before
 * lets this one start first thing, and fits beside it: 72 registers and 216 KB, or as many threads with entries and
 * 208 KB, are few enough. */
#include "tiles.cuh"

#include <cuda.h>

/* Named: nvcc would name an anonymous one after the file's path, and other folders would give other bytes. */
namespace moer_fused {

enum {
    TOKENS = TILE_TOKENS,
    BLOCK = 64, /* experts */
    COLUMNS = FUSED_COLUMNS,
    PANEL_COLUMNS = A_PANEL / 2,
    PANELS = (COLUMNS + PANEL_COLUMNS - 1) / PANEL_COLUMNS,
    WARPGROUP = 128,
    TURNS = 2
};

/* Sizes for so many experts at most, and so many groups of tokens. SPARSE: G comes as entries. Operands in shared
 * memory are panels of 32 columns. */
template <int MOST_EXPERTS, int TOKEN_GROUPS, bool SPARSE_LOGITS>
struct shape {
    static constexpr int EXPERTS = MOST_EXPERTS, GROUPS = TOKEN_GROUPS, BLOCKS = (EXPERTS + BLOCK - 1) / BLOCK;
    static constexpr bool SPARSE = SPARSE_LOGITS;
    static constexpr int LOADERS = SPARSE ? 128 : 64;
    static constexpr int THREADS = (BLOCKS + TURNS) * WARPGROUP + LOADERS + 2 * WARP;
    static constexpr int BOUND = SPARSE ? THREADS : 896; /* 72 registers, but for 128 experts with entries */
    static constexpr int GATE_BYTES = PANELS * EXPERTS * A_PANEL, HIDDEN_BYTES = PANELS * TOKENS * A_PANEL;
    static constexpr int LOGITS_BYTES = TOKENS * EXPERTS * 2, RESULT_BYTES = TOKENS * COLUMNS * 2,
                         RESULT_SLOTS = SPARSE ? 2 : 4;
    /* Sums travel in units of 8 columns, of which a thread has four. Of a block of experts, each group finishes so many
     * units; where that is no whole number, rounded up and down in turn, the other way in every other block. */
    static constexpr int UNITS = COLUMNS / 8, UNIT_BYTES = WARPGROUP * 16;
    static constexpr int MOST_UNITS = (UNITS + GROUPS - 1) / GROUPS, LEAST_UNITS = UNITS / GROUPS;
    static constexpr int PART = (BLOCKS + 1) / 2 * MOST_UNITS + BLOCKS / 2 * LEAST_UNITS;
    static constexpr int SUMS_BYTES = (GROUPS - 1) * PART * UNIT_BYTES;
    static __device__ __forceinline__ int first_unit(int block, int group) {
        return (UNITS * group + (block % 2 ? 0 : GROUPS - 1)) / GROUPS;
    }
    static __device__ __forceinline__ int owner_of(int block, int unit) {
        return (unit * GROUPS + (block % 2 ? GROUPS - 1 : 0)) / UNITS;
    }
    static __device__ __forceinline__ int units_of(int block, int group) {
        return first_unit(block, group + 1) - first_unit(block, group);
    }
    /* Where a block's units begin among those that a group is sent by another. */
    static __device__ __forceinline__ int place_of(int block, int group) {
        return block / 2 * (units_of(0, group) + units_of(1, group)) + block % 2 * units_of(0, group);
    }
    static __device__ __forceinline__ int warps_of(int block) { /* that have experts */
        const int warps = (EXPERTS - block * BLOCK) / 16;
        return warps < WARPGROUP / WARP ? warps : WARPGROUP / WARP;
    }
    static __device__ __forceinline__ int sent_bytes(int group) {
        int bytes = 0;
#pragma unroll
        for (int block = 0; block < BLOCKS; block++)
            bytes += units_of(block, group) * warps_of(block) * WARP * 16;
        return bytes;
    }
    static constexpr int ROOM = (SPARSE ? 208 : 216) * 1024 - GATE_BYTES - SUMS_BYTES - RESULT_SLOTS * RESULT_BYTES;
    static constexpr int LOGITS_ROOM = ROOM * (SPARSE ? 5 : 4) / 7 / LOGITS_BYTES / 2 * 2, MOST_LOGITS = SPARSE ? 4 : 6;
    static constexpr int LOGITS_SLOTS = LOGITS_ROOM < MOST_LOGITS ? LOGITS_ROOM : MOST_LOGITS;
    static constexpr int HIDDEN_ROOM = (ROOM - LOGITS_SLOTS * LOGITS_BYTES) / HIDDEN_BYTES;
    static constexpr int HIDDEN_SLOTS = HIDDEN_ROOM < 10 ? HIDDEN_ROOM : 10;
    /* Of few tiles, grad_hidden_states come so many after the weight gradient, whose end takes longer. */
    static constexpr int LAG = 1, FEW_TILES = 8;
    static_assert(LAG < LOGITS_SLOTS && LOGITS_SLOTS <= HIDDEN_SLOTS + LAG, "see make_grad_hidden()");
    static constexpr int BARRIERS = 2 * (HIDDEN_SLOTS + LOGITS_SLOTS + RESULT_SLOTS) + 2;
    static constexpr int BYTES = GATE_BYTES + SUMS_BYTES + RESULT_SLOTS * RESULT_BYTES + HIDDEN_SLOTS * HIDDEN_BYTES +
                                 LOGITS_SLOTS * LOGITS_BYTES + BARRIERS * 8;
    static_assert(HIDDEN_SLOTS >= 3 && LOGITS_SLOTS >= (SPARSE ? 2 : 4) && BYTES <= 227 * 1024,
                  "rings that keep memory busy");
    static_assert(LOGITS_SLOTS % TURNS == 0, "a warpgroup waits for every phase of its slots");
};

/* Tensor maps, of panels and of whole results. */
struct maps {
    CUtensorMap hidden_states, weight, grad_hidden;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/* ---- Rings ---- */

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
    /* A tile's slot, when it has come. */
    __device__ __forceinline__ int full_slot(int tile) const {
        barrier_wait(full(tile % SLOTS), tile / SLOTS % 2);
        return tile % SLOTS;
    }
    /* The slot for a tile, when the one before it has been read. */
    __device__ __forceinline__ int empty_slot(int tile) const {
        if (tile >= SLOTS)
            barrier_wait(empty(tile % SLOTS), (tile / SLOTS - 1) % 2);
        return tile % SLOTS;
    }
};

/* ---- Sums ---- */

/* Sums of 64 rows and a slice's columns, as wgmma has them: a warp has 16 rows, a thread pairs of columns. */
template <typename T>
struct sums_of : async_layout {
    static constexpr int ACROSS = COLUMNS / 8;
    float sums[1][ACROSS][4];

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
        for (int k = 0; k < TOKENS / 16; k++)
            wgmma<true>(sums[0], matrix_at(logits + k * 16 * A_PANEL, 8 * A_PANEL, TOKENS * A_PANEL, SWIZZLE_64),
                        matrix_at(hidden + k * 16 * A_PANEL, 8 * A_PANEL, TOKENS * A_PANEL, SWIZZLE_64), 1, T());
        wgmma_commit();
        wgmma_wait();
        hold(sums);
    }
};

/* ---- The kernel ---- */

/* What a block works on, and its shared memory. */
template <typename Shape>
struct job {
    using shape = Shape;
    int first, column; /* token, column */
    int tiles;
    unsigned rank; /* in the cluster, and the group's number */
    uint32_t gate;
    uint32_t sums; /* a part from each other block of the cluster, in the order of their ranks */
    ring<shape::LOGITS_SLOTS, shape::LOGITS_BYTES> logits;
    ring<shape::HIDDEN_SLOTS, shape::HIDDEN_BYTES> hidden;
    ring<shape::RESULT_SLOTS, shape::RESULT_BYTES> results;
    uint32_t gate_comes, sums_come;

    __device__ __forceinline__ explicit job(char *shared) {
        rank = blockIdx.x % shape::GROUPS;
        column = static_cast<int>(blockIdx.x / shape::GROUPS) * COLUMNS;
        logits.slots = shared_address(shared);
        hidden.slots = logits.slots + shape::LOGITS_SLOTS * shape::LOGITS_BYTES;
        gate = hidden.slots + shape::HIDDEN_SLOTS * shape::HIDDEN_BYTES;
        results.slots = gate + shape::GATE_BYTES;
        sums = results.slots + shape::RESULT_SLOTS * shape::RESULT_BYTES;
        logits.barriers = sums + shape::SUMS_BYTES;
        hidden.barriers = logits.barriers + 2 * shape::LOGITS_SLOTS * 8;
        results.barriers = hidden.barriers + 2 * shape::HIDDEN_SLOTS * 8;
        sums_come = results.barriers + 2 * shape::RESULT_SLOTS * 8;
        gate_comes = sums_come + 8;
    }

    __device__ __forceinline__ void choose_tokens(const problem &problem) {
        const int tokens = static_cast<int>(problem.tokens), split = static_cast<int>(problem.split_tokens);
        first = static_cast<int>(rank) * split;
        const int rest = tokens - first;
        tiles = rest <= 0 ? 0 : ((rest < split ? rest : split) + TOKENS - 1) / TOKENS;
    }
};

template <typename shape>
__device__ __forceinline__ void load_operands(const job<shape> &job, const maps &maps) {
    barrier_arrive_expecting(job.gate_comes, shape::GATE_BYTES);
#pragma unroll
    for (int i = 0; i < PANELS; i++)
        copy_box(job.gate + i * shape::EXPERTS * A_PANEL, maps.weight, job.column + i * PANEL_COLUMNS, 0,
                 job.gate_comes);
#pragma unroll 1
    for (int i = 0; i < job.tiles; i++) {
        const int slot = job.hidden.empty_slot(i);
        barrier_arrive_expecting(job.hidden.full(slot), shape::HIDDEN_BYTES);
#pragma unroll
        for (int j = 0; j < PANELS; j++)
            copy_box(job.hidden.at(slot) + j * TOKENS * A_PANEL, maps.hidden_states, job.column + j * PANEL_COLUMNS,
                     job.first + i * TOKENS, job.hidden.full(slot));
    }
}

template <typename shape>
__device__ __forceinline__ void load_logits(const job<shape> &job, const char *logits, int thread) {
    constexpr int BYTES = shape::LOGITS_BYTES;
    const char *from = logits + static_cast<int64_t>(job.first) / TOKENS * BYTES + thread * CHUNK_BYTES;
    wait_for_last_kernel();
#pragma unroll 1
    for (int i = 0; i < job.tiles; i++, from += BYTES) {
        const int slot = job.logits.empty_slot(i);
        const uint32_t to = job.logits.at(slot) + thread * CHUNK_BYTES;
#pragma unroll
        for (int j = 0; j < BYTES; j += shape::LOADERS * CHUNK_BYTES)
            copy_async(to + j, from + j);
        barrier_arrive_when_copied(job.logits.full(slot));
    }
}

/* Writes entries into a tile of G, or zeros where those were. */
__device__ __forceinline__ void put_entries(uint32_t tile, uint4 entries, bool zeros) {
    for (uint32_t entry : {entries.x, entries.y, entries.z, entries.w})
        if ((entry & 0xffff) != NO_ENTRY)
            store_shared(tile + (entry & 0xffff), static_cast<unsigned short>(zeros ? 0 : entry >> 16));
}

/* G from its entries. Neighbouring threads have a token of each tile, and every other four entries: they clear what
 * they wrote into the slot before, and write what there is now. Each thread's first four are loaded so many tiles ahead
 * as there are slots, and kept as long. */
template <typename shape>
__device__ __forceinline__ void make_logits(const job<shape> &job, const problem &problem, int thread) {
    constexpr int SLOTS = shape::LOGITS_SLOTS, SHARE = shape::LOADERS / TOKENS;
    const int chunks = problem.entries / 4, first = thread % SHARE;
    const int64_t tile = static_cast<int64_t>(TOKENS) * chunks;
    const uint4 *from =
        reinterpret_cast<const uint4 *>(problem.logits) + static_cast<int64_t>(job.first + thread / SHARE) * chunks;
    for (int i = thread * CHUNK_BYTES; i < SLOTS * shape::LOGITS_BYTES; i += shape::LOADERS * CHUNK_BYTES)
        store_shared(job.logits.slots + i, {0, 0, 0, 0});
    synchronize(2, shape::LOADERS);
    wait_for_last_kernel();
    const int tiles = first < chunks ? job.tiles : 0; /* of which there are entries */
    const uint4 none = make_uint4(NO_ENTRY, NO_ENTRY, NO_ENTRY, NO_ENTRY);
    uint4 next[SLOTS], last[SLOTS];
#pragma unroll
    for (int s = 0; s < SLOTS; s++) {
        last[s] = none;
        next[s] = s < tiles ? __ldcg(from + s * tile + first) : none;
    }
#pragma unroll 1
    for (int i = 0; i < job.tiles; i += SLOTS)
#pragma unroll
        for (int s = 0; s < SLOTS && i + s < job.tiles; s++, from += tile) {
            const uint32_t to = job.logits.at(job.logits.empty_slot(i + s));
            put_entries(to, last[s], true);
#pragma unroll 1
            for (int j = first + SHARE; j < chunks && i > 0; j += SHARE)
                put_entries(to, __ldcg(from - SLOTS * tile + j), true);
            __syncwarp();
            put_entries(to, next[s], false);
#pragma unroll 1
            for (int j = first + SHARE; j < chunks; j += SHARE)
                put_entries(to, __ldcg(from + j), false);
            fence_asynchronous();
            barrier_arrive(job.logits.full(s));
            last[s] = next[s];
            if (i + s + SLOTS < tiles)
                next[s] = __ldcg(from + SLOTS * tile + first);
        }
}

template <typename T, typename shape>
__device__ __forceinline__ void make_grad_hidden(const job<shape> &job, int turn) {
    const int lane = threadIdx.x % WARP;
    sums_of<T> result;
    result.clear();
    /* A lane's row, in a slot. */
    const int at = (result.first_row() + lane % 16) * COLUMNS * 2 + lane / 16 * CHUNK_BYTES;
    barrier_wait(job.gate_comes, 0);
#pragma unroll 1
    for (int i = turn; i < job.tiles; i += TURNS) {
        const int slot = job.logits.full_slot(i), read = i + shape::LAG < job.tiles ? i + shape::LAG : job.tiles - 1;
        /* The slot is not read twice before this looks: there is room for no more tiles of G. */
        if (job.tiles <= shape::FEW_TILES)
            barrier_wait(job.hidden.empty(read % shape::HIDDEN_SLOTS), read / shape::HIDDEN_SLOTS % 2);
        fence_asynchronous();
        result.template multiply_gate<shape::EXPERTS>(job.logits.at(slot), job.gate);
        job.logits.release(slot);
        const int to = job.results.empty_slot(i);
        const uint32_t row = job.results.at(to) + at;
#pragma unroll
        for (int j = 0; j < result.ACROSS; j += 2) {
            const float(&sums)[4] = result.sums[0][j], (&next)[4] = result.sums[0][j + 1];
            store_matrices(row + j * CHUNK_BYTES, packed(sums[0], sums[1], T()), packed(sums[2], sums[3], T()),
                           packed(next[0], next[1], T()), packed(next[2], next[3], T()));
        }
        fence_asynchronous();
        __syncwarp();
        if (lane == 0)
            barrier_arrive(job.results.full(to));
    }
}

template <typename shape>
__device__ __forceinline__ void store_grad_hidden(const job<shape> &job, const maps &maps) {
    constexpr int SLOTS = shape::RESULT_SLOTS;
#pragma unroll 1
    for (int i = 0; i < job.tiles; i++) {
        const int slot = job.results.full_slot(i);
        store_box(maps.grad_hidden, job.column, job.first + i * TOKENS, job.results.at(slot));
        store_bulk_wait<SLOTS - 1>();
        if (i >= SLOTS - 1)
            barrier_arrive(job.results.empty((i + 1) % SLOTS));
    }
    store_bulk_wait<0>();
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

/* What a group finishes of a block of experts: units side by side, of which a thread has its four sums. */
template <typename T, typename shape>
struct part_of {
    static constexpr int MOST = shape::MOST_UNITS, GROUPS = shape::GROUPS;
    float sums[MOST][4];
    int first, units, expert, rank; /* expert: the warp's first */
    uint32_t from;                  /* the first other group's, for this warp */

    __device__ __forceinline__ part_of(const job<shape> &job, int block) {
        rank = static_cast<int>(job.rank);
        first = shape::first_unit(block, rank);
        units = shape::units_of(block, rank);
        expert = block * BLOCK + async_layout::first_row();
        from = job.sums + shape::place_of(block, rank) * shape::UNIT_BYTES + threadIdx.x % WARPGROUP / WARP * WARP * 16;
    }

    /* Keeps the group's own. */
    __device__ __forceinline__ void keep(const float (&all)[shape::UNITS][4]) {
#pragma unroll
        for (int j = 0; j < MOST; j++)
#pragma unroll
            for (int i = 0; i < shape::UNITS; i++)
                if (i == first + j)
#pragma unroll
                    for (int k = 0; k < 4; k++)
                        sums[j][k] = all[i][k];
    }

    /* Adds the other groups', in order. */
    __device__ __forceinline__ void add_others() {
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int j = 0; j < MOST; j++) {
            if (j >= units)
                continue;
            float sum[4] = {}; /* to add zero changes no sum that began with zero */
#pragma unroll
            for (int group = 0; group < GROUPS; group++) {
                float4 part = make_float4(sums[j][0], sums[j][1], sums[j][2], sums[j][3]);
                if (group != rank)
                    part = load_shared(from + ((group - (group > rank)) * shape::PART + j) * shape::UNIT_BYTES +
                                       lane * 16);
                sum[0] = __fadd_rn(sum[0], part.x), sum[1] = __fadd_rn(sum[1], part.y);
                sum[2] = __fadd_rn(sum[2], part.z), sum[3] = __fadd_rn(sum[3], part.w);
            }
#pragma unroll
            for (int k = 0; k < 4; k++)
                sums[j][k] = sum[k];
        }
    }

    /* Rows of 8 columns, through where the others' sums were: half a warp stores a unit, 16 rows. */
    __device__ __forceinline__ void store_rows(const problem &problem, int64_t column) {
        const int lane = threadIdx.x % WARP, row = lane % 16, odd = lane / 16;
        __syncwarp();
#pragma unroll
        for (int j = 0; j < MOST; j++)
            if (j < units)
                store_matrices(from + j * shape::UNIT_BYTES + row * CHUNK_BYTES, packed(sums[j][0], sums[j][1], T()),
                               packed(sums[j][2], sums[j][3], T()));
        __syncwarp();
        char *to = problem.grad_weight.data + ((expert + row) * problem.grad_weight.stride + column) * sizeof(T);
#pragma unroll
        for (int j = 0; j < MOST; j += 2)
            if (j + odd < units && expert + row < problem.experts && column + (first + j + odd) * 8 < problem.hidden)
                *reinterpret_cast<float4 *>(to + (first + j + odd) * CHUNK_BYTES) =
                    load_shared(from + (j + odd) * shape::UNIT_BYTES + row * CHUNK_BYTES);
    }

    __device__ __forceinline__ void store(const problem &problem, int64_t column) {
        if (problem.whole_rows) {
            store_rows(problem, column);
            return;
        }
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int j = 0; j < MOST; j++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int row = expert + lane / 4 + 8 * half;
                const int64_t at = column + (first + j) * 8 + lane % 4 * 2;
                if (j < units && row < problem.experts && at < problem.hidden)
                    store_apart(problem, row, at, sums[j][2 * half], sums[j][2 * half + 1]);
            }
    }
};

/* The sums of a block of experts. */
template <typename T, typename shape>
__device__ __forceinline__ void make_grad_weight(const job<shape> &job, const problem &problem, int block) {
    const uint32_t blocks_at = block * BLOCK * 2 * TOKENS;
    sums_of<T> result;
    result.clear();
#pragma unroll 1
    for (int i = 0; i < job.tiles; i++) {
        const int slot = job.logits.full_slot(i), hidden_slot = job.hidden.full_slot(i);
        fence_asynchronous();
        result.add_hidden(job.logits.at(slot) + blocks_at, job.hidden.at(hidden_slot));
        job.logits.release(slot);
        job.hidden.release(hidden_slot);
    }
    part_of<T, shape> part(job, block);
    part.keep(result.sums[0]);
    constexpr int GROUPS = shape::GROUPS;
    const int thread = threadIdx.x % WARPGROUP;
    const bool any = thread / WARP < shape::warps_of(block), odd = block % 2;
    uint32_t to[GROUPS], come[GROUPS]; /* where each group's units are sent, as if from the first on */
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
        const int place = (part.rank - (part.rank > group)) * shape::PART + shape::place_of(block, group) -
                          shape::first_unit(block, group);
        to[group] = of_block(job.sums + thread * 16, group) + place * shape::UNIT_BYTES;
        come[group] = of_block(job.sums_come, group);
    }
    cluster_wait();
#pragma unroll
    for (int i = 0; i < shape::UNITS; i++) {
        const int even_owner = shape::owner_of(0, i), odd_owner = shape::owner_of(1, i);
        if ((odd ? odd_owner : even_owner) != part.rank && any)
            store_to_block((odd ? to[odd_owner] : to[even_owner]) + i * shape::UNIT_BYTES, result.sums[0][i],
                           odd ? come[odd_owner] : come[even_owner]);
    }
    barrier_wait_cluster(job.sums_come, 0);
    if (any) {
        part.add_others();
        part.store(problem, job.column);
    }
}

template <typename T, typename shape>
__device__ __forceinline__ void fused(const problem &problem, const maps &maps, char *shared) {
    constexpr int BLOCKS = shape::BLOCKS;
    const int role = threadIdx.x / WARPGROUP;
    const int thread = threadIdx.x - (BLOCKS + TURNS) * WARPGROUP; /* of those that load */
    const bool leads = thread == shape::LOADERS;
    if (leads) {
        prefetch_map(maps.weight);
        prefetch_map(maps.hidden_states);
        prefetch_map(maps.grad_hidden);
    }
    moer_fused::job<shape> job(shared);
    if (leads) {
        job.logits.init(shape::LOADERS, (BLOCKS + 1) * WARPGROUP / WARP);
        job.hidden.init(1, BLOCKS * WARPGROUP / WARP);
        job.results.init(WARPGROUP / WARP, 1);
        barrier_init(job.gate_comes, 1);
        barrier_init(job.sums_come, 1);
        barrier_init_done();
        barrier_arrive_expecting(job.sums_come, (shape::GROUPS - 1) * shape::sent_bytes(job.rank));
    }
    __syncthreads();
    cluster_arrive();
    job.choose_tokens(problem);
    if (role < BLOCKS) {
        make_grad_weight<T>(job, problem, role);
        return;
    }
    if (role < BLOCKS + TURNS) {
        make_grad_hidden<T>(job, role - BLOCKS);
    } else if (thread < shape::LOADERS) {
        if constexpr (shape::SPARSE)
            make_logits(job, problem, thread);
        else
            load_logits(job, problem.logits, thread);
    } else if (leads) {
        load_operands(job, maps);
    } else if (thread == shape::LOADERS + WARP) {
        store_grad_hidden(job, maps);
    }
    __syncwarp();
    cluster_wait();
}
#endif

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define MOER_CLUSTER(BLOCKS)
#else
#define MOER_CLUSTER(BLOCKS) __cluster_dims__(BLOCKS, 1, 1)
#endif

template <typename T, typename shape>
__global__ void MOER_CLUSTER(shape::GROUPS) __launch_bounds__(shape::BOUND, 1)
    fused_kernel(const __grid_constant__ problem problem, const __grid_constant__ maps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) char shared[];
    fused<T, shape>(problem, maps, shared);
#else
    __trap();
#endif
}

/* ---- Launches ---- */

/* A map of a matrix of 16-bit elements, for boxes of so many rows and columns. */
cudaError_t make_map(CUtensorMap *map, element type, const rows &matrix, int64_t rows, int64_t columns, int box_rows,
                     int box_columns, CUtensorMapSwizzle swizzle) {
    static const auto encode = driver_function<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
    if (!encode)
        return cudaErrorSymbolNotFound;
    const cuuint64_t size[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
    const cuuint64_t stride = static_cast<cuuint64_t>(matrix.stride) * 2;
    const cuuint32_t box[] = {static_cast<cuuint32_t>(box_columns), static_cast<cuuint32_t>(box_rows)}, step[] = {1, 1};
    const CUresult result =
        encode(map, type == BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, matrix.data,
               size, &stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

template <typename T, typename shape>
cudaError_t launch_with(const problem &problem, cudaStream_t stream) {
    const typed_rows &out = problem.grad_weight;
    struct problem with = problem;
    with.whole_rows = !problem.accumulate && out.type == problem.type && is_aligned(out, 2);
    auto kernel = fused_kernel<T, shape>;
    maps maps;
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape::BYTES);
    if (error == cudaSuccess)
        error = make_map(&maps.hidden_states, problem.type, problem.hidden_states, problem.tokens, problem.hidden,
                         TOKENS, PANEL_COLUMNS, CU_TENSOR_MAP_SWIZZLE_64B);
    if (error == cudaSuccess)
        error = make_map(&maps.weight, problem.type, problem.weight, problem.experts, problem.hidden, shape::EXPERTS,
                         PANEL_COLUMNS, CU_TENSOR_MAP_SWIZZLE_64B);
    if (error == cudaSuccess)
        error = make_map(&maps.grad_hidden, problem.type, problem.grad_hidden, problem.tokens, problem.hidden, TOKENS,
                         COLUMNS, CU_TENSOR_MAP_SWIZZLE_NONE);
    return error == cudaSuccess ? launch_early(kernel, divide_up(problem.hidden, COLUMNS) * shape::GROUPS,
                                               shape::THREADS, shape::BYTES, stream, with, maps)
                                : error;
}

template <typename T, int EXPERTS, bool SPARSE>
cudaError_t launch_for(const problem &problem, cudaStream_t stream) {
    return problem.groups == 4 ? launch_with<T, shape<EXPERTS, 4, SPARSE>>(problem, stream)
                               : launch_with<T, shape<EXPERTS, 2, SPARSE>>(problem, stream);
}

template <typename T>
cudaError_t launch(const problem &problem, cudaStream_t stream) {
    if (problem.entries)
        return problem.experts <= 128 ? launch_for<T, 128, true>(problem, stream)
                                      : launch_for<T, FUSED_EXPERTS_SPARSE, true>(problem, stream);
    return problem.experts <= 64 ? launch_for<T, 64, false>(problem, stream)
                                 : launch_for<T, FUSED_EXPERTS, false>(problem, stream);
}

} // namespace moer_fused

cudaError_t launch_fused(const problem &problem, cudaStream_t stream) {
    return problem.type == BF16 ? moer_fused::launch<__nv_bfloat16>(problem, stream)
                                : moer_fused::launch<__half>(problem, stream);
}
