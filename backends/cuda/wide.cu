/* SPDX-License-Identifier: Apache-2.0 */
/* Both products of an operation by one kernel, for sm_90a and for shapes that fused.cu is not made for: many experts,
 * wide models, long batches.
 *
 * The weight gradient comes in tiles of 128 experts x 256 columns, terms over a split of the tokens: A = G^T, B =
 * hidden states, in memory both with rows of terms. With one split it is stored as it is, otherwise as partial sums for
 * reduce.cu; or, with two, where long runs follow and tensor copies could store the result, for warps that have nothing
 * else to do, adders: one that finds its part of a tile's other split stored adds both up, while the others go on.
 * Nobody waits for another block's sums. A step has 64 terms: two panels of A and four of B, 64 x 64 elements each,
 * which one thread has tensor copies bring into a ring of stages; what does not exist is zeros. Two warpgroups have 64
 * rows each.
 *
 * grad_hidden_states come in runs: a slice of columns, whose part of the gate the warpgroups hold in registers, 64 or
 * 128 columns each, and tiles of 64 tokens, one below the other. A stage has a tile of G, of all experts; the gate
 * times G is a tile's result, transposed. A product begins before the last one's results are stored.
 *
 * Clocks of a multiprocessor, for 64 tokens by 256 columns of 256 experts, of which tensor cores need 2048 for either:
 * through shared memory 2048 for the weight gradient, and 1790 for grad_hidden_states. From the second-level cache come
 * 48 KB a step, which all multiprocessors together cannot have in that time: two blocks, a cluster, work on tiles below
 * one another, or beside, and each copies half of what they share to both; of G for grad_hidden_states, too. That is a
 * unit. The host deals units so that all clusters have done at about the same time: first those of the weight gradient,
 * which are the longer ones, then runs.
 *
 * On an H200, 16384 tokens of H = 7168, E = 256: a step took 1190 to 1275 clocks instead of the 1024 of its products, a
 * run's tile 2500 to 2750 instead of 2048.
 *
 * Budget: 168 registers a thread, of which the warpgroup that copies and adds gives up most; 225 KB of shared memory.
 */
#include "fused.cuh"

/* Named: nvcc would name an anonymous one after the file's path, and other folders would give other bytes. */
namespace moer_wide {

using moer_fused::WARPGROUP;

enum {
    CLUSTER = 2,
    PANEL = 64, /* rows and columns; rows are of B_PANEL bytes */
    PANEL_BYTES = PANEL * B_PANEL,
    ROWS = 2 * PANEL, /* a warpgroup's each */
    COLUMNS = 4 * PANEL,
    WEIGHT_STEP_BYTES = 6 * PANEL_BYTES, /* A, then B */
    MULTIPLIERS = ROWS / PANEL,          /* warpgroups */
    THREADS = (MULTIPLIERS + 1) * WARPGROUP,
    ADDERS = WARPGROUP / WARP - 1, /* warps */
    STORED_SLOTS = 4,              /* tiles that adders may be behind, beside the one at hand */
    RESULT_SLOTS = 2,              /* panels of a warpgroup's results */
    MOST_STAGES = 4,
    STAGES_BYTES = 24 * PANEL_BYTES,
    ROOM = STAGES_BYTES + MULTIPLIERS * RESULT_SLOTS * PANEL_BYTES,
    BYTES = ROOM + (MOST_STAGES + STORED_SLOTS) * 16 /* barriers, at most */
};

/* For so many panels of experts at most. A stage has a step of the weight gradient or a tile of G for
 * grad_hidden_states, for which a warpgroup holds the gate of so many panels of columns in registers. */
template <int MOST_PANELS>
struct shape {
    static constexpr int PANELS = MOST_PANELS, STEPS = PANELS * PANEL / 16, BLOCKS = PANELS <= 4 ? 2 : 1;
    static constexpr int STAGE_BYTES = PANELS <= 6 ? int{WEIGHT_STEP_BYTES} : PANELS * PANEL_BYTES,
                         STAGES = STAGES_BYTES / STAGE_BYTES;
    static constexpr int G_BYTES = PANELS * PANEL_BYTES;
    static constexpr int GATE_PANELS = MULTIPLIERS * BLOCKS, HIDDEN_COLUMNS = GATE_PANELS * PANEL;
    static_assert(STAGES <= MOST_STAGES, "barriers fit");
};

/* What the kernel works on, by the host's choice. The first so many clusters have one unit of the weight gradient more
 * than the others, and runs of few units of grad_hidden_states, those of many. */
struct work {
    int weight_units, hidden_units;
    int first_clusters, few, many;
    int down, across, tiles; /* units of a split; units of grad_hidden_states below one another */
    bool beside;             /* units of the weight gradient are tiles beside one another */
    bool whole;              /* there is one split, and the weight gradient can be stored by tensor copies */
    bool adds;               /* partial sums, of two splits, are added up here */
    int tokens, split_tokens, experts, hidden;
    float *partials;
    int64_t partial_rows, partial_stride;
    int *arrivals; /* of a tile, for each adder: how many splits are stored */
    typed_rows grad_weight;
};

/* Tensor maps, of panels. */
struct all_maps {
    CUtensorMap logits, weight, hidden_states, grad_hidden, grad_weight;
};

#ifdef MOER_FUSED_WGMMA

using moer_fused::place;
using moer_fused::ring;
using moer_fused::uniform;

/* ---- A cluster's units ---- */

/* A block's tile: its first row and column, and its terms. */
struct tile {
    int row, column, first, steps, split;
};

__device__ __forceinline__ int rank() {
    return static_cast<int>(blockIdx.x) % CLUSTER;
}

__device__ __forceinline__ tile weight_tile(const work &work, int unit) {
    const int expert = unit % work.down, column = unit / work.down % work.across,
              split = unit / work.down / work.across;
    tile result;
    result.row = (work.beside ? expert : expert * CLUSTER + rank()) * ROWS;
    result.column = (work.beside ? column * CLUSTER + rank() : column) * COLUMNS;
    result.first = split * work.split_tokens;
    const int left = work.tokens - result.first;
    result.steps = ((left < work.split_tokens ? left : work.split_tokens) + PANEL - 1) / PANEL;
    result.split = split;
    return result;
}

/* Hands out tiles of the weight gradient, then runs of tiles of tokens: their cluster's slice of the columns, the first
 * one, and how many. */
template <typename Weight, typename Hidden>
__device__ __forceinline__ void each_unit(const work &work, Weight weight, Hidden hidden) {
    const int cluster = static_cast<int>(blockIdx.x) / CLUSTER, clusters = static_cast<int>(gridDim.x) / CLUSTER;
#pragma unroll 1
    for (int unit = cluster; unit < work.weight_units; unit += clusters)
        weight(weight_tile(work, unit));
    const int after = cluster - work.first_clusters;
    int unit = after < 0 ? cluster * work.few : work.first_clusters * work.few + after * work.many;
    int end = unit + (after < 0 ? work.few : work.many);
    if (end > work.hidden_units)
        end = work.hidden_units;
#pragma unroll 1
    while (unit < end) {
        const int slice = unit / work.tiles, first = unit - slice * work.tiles, below = work.tiles - first,
                  left = end - unit, count = left < below ? left : below;
        hidden(slice, first, count);
        unit += count;
    }
}

/* ---- Copies ---- */

/* Panels side by side; of what the cluster shares, a block copies its part to all. */
template <int PANELS, bool SHARED>
__device__ __forceinline__ void load_panels(uint32_t to, uint32_t barrier, const CUtensorMap &map, int column,
                                            int row) {
    constexpr int OWN = SHARED ? PANELS / CLUSTER : PANELS;
    const int first = SHARED ? rank() * OWN : 0;
#pragma unroll
    for (int i = first; i < first + OWN; i++)
        if (SHARED)
            copy_box_to_cluster<CLUSTER>(to + i * PANEL_BYTES, map, column + i * PANEL, row, barrier);
        else
            copy_box(to + i * PANEL_BYTES, map, column + i * PANEL, row, barrier);
}

/* A step's terms begin with the tile's first. */
__device__ __forceinline__ void load_left(const place &at, const work &work, const all_maps &maps, const tile &tile,
                                          int step) {
    const int terms = tile.first + step * PANEL;
    if (work.beside)
        load_panels<2, true>(at.memory(), at.full(), maps.logits, tile.row, terms);
    else
        load_panels<2, false>(at.memory(), at.full(), maps.logits, tile.row, terms);
}

__device__ __forceinline__ void load_right(const place &at, const work &work, const all_maps &maps, const tile &tile,
                                           int step) {
    const int terms = tile.first + step * PANEL;
    const uint32_t to = at.memory() + 2 * PANEL_BYTES;
    barrier_arrive_expecting(at.full(), WEIGHT_STEP_BYTES);
    if (work.beside)
        load_panels<4, false>(to, at.full(), maps.hidden_states, tile.column, terms);
    else
        load_panels<4, true>(to, at.full(), maps.hidden_states, tile.column, terms);
}

/* All copies of a block, by a single thread. Only G depends on the kernel before. */
template <typename shape>
__device__ __forceinline__ void load_all(const work &work, const all_maps &maps, const ring &stages) {
    place at(stages), early(stages);
    bool waited = false;
    prefetch_map(maps.hidden_states);
    prefetch_map(maps.weight);
    prefetch_map(maps.logits);
    const auto weight = [&](const tile &tile) {
        int ahead = 0;
        if (!waited) {
#pragma unroll 1
            for (; ahead < shape::STAGES && ahead < tile.steps; ahead++, early.advance())
                load_right(early, work, maps, tile, ahead);
            wait_for_last_kernel();
            waited = true;
        }
#pragma unroll 1
        for (int i = 0; i < tile.steps; i++, at.advance()) {
            if (i >= ahead) {
                at.wait_empty();
                load_right(at, work, maps, tile, i);
            }
            load_left(at, work, maps, tile, i);
        }
    };
    const auto hidden = [&](int slice, int first, int count) {
        const int column = (slice * CLUSTER + rank()) * shape::HIDDEN_COLUMNS;
#pragma unroll 1
        for (int i = 0; i < shape::GATE_PANELS; i++, at.advance()) {
            at.wait_empty();
            barrier_arrive_expecting(at.full(), shape::G_BYTES);
#pragma unroll
            for (int j = 0; j < shape::PANELS; j++)
                copy_box(at.memory() + j * PANEL_BYTES, maps.weight, column + i * PANEL, j * PANEL, at.full());
        }
        if (!waited)
            wait_for_last_kernel();
        waited = true;
#pragma unroll 1
        for (int i = first; i < first + count; i++, at.advance()) {
            at.wait_empty();
            barrier_arrive_expecting(at.full(), shape::G_BYTES);
#pragma unroll
            for (int j = 0; j < shape::PANELS; j++)
                if (j % CLUSTER == rank())
                    copy_box_to_cluster<CLUSTER>(at.memory() + j * PANEL_BYTES, maps.logits, j * PANEL, i * PANEL,
                                                 at.full());
        }
    };
    each_unit(work, weight, hidden);
#pragma unroll 1
    for (int i = 0; i < shape::STAGES;
         i++, at.advance()) /* until nobody copies to this block, or tells it of a stage */
        at.wait_empty();
}

/* ---- Products ---- */

/* A warpgroup's 64 x 256 sums, as wgmma has them. */
using tile_sums = float[1][COLUMNS / 8][4];

__device__ __forceinline__ void release(const place &at) {
    const int lane = threadIdx.x % WARP;
    if (lane < CLUSTER)
        barrier_arrive(at.empty(), lane);
}

/* A warpgroup's part of a tile. A step's products begin before those of the last are done, whose stage is then
 * released. */
template <typename T, typename shape>
__device__ __forceinline__ void multiply(tile_sums &sums, int steps, place &at, place &done, int role) {
    const matrix first_a = matrix_at(at.around.slots + role * PANEL_BYTES, 8 * B_PANEL, 0, SWIZZLE_128),
                 first_b = matrix_at(at.around.slots + 2 * PANEL_BYTES, 8 * B_PANEL, PANEL_BYTES, SWIZZLE_128);
    hold(sums);
#pragma unroll 1
    for (int i = 0; i < steps; i++) {
        at.wait_full();
        const matrix a = first_a + at.slot * shape::STAGE_BYTES, b = first_b + at.slot * shape::STAGE_BYTES;
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < PANEL / 16; k++)
            wgmma<true>(sums[0], a + k * 16 * B_PANEL, b + k * 16 * B_PANEL, k > 0 ? 1 : i, T());
        wgmma_commit();
        wgmma_wait<1>();
        if (i > 0) {
            release(done);
            done.advance();
        }
        at.advance();
    }
    wgmma_wait<0>();
    hold(sums);
    release(done);
    done.advance();
}

/* Stores a warpgroup's rows of a tile by tensor copies, a panel at a time; rows and columns are those of the whole. */
template <typename T>
__device__ __forceinline__ void store_results(const tile_sums &sums, const CUtensorMap &map, const tile &tile,
                                              uint32_t slots, int role) {
    const int lane = threadIdx.x % WARP, row = async_layout::first_row() + lane % 16; /* a lane's */
    const bool leads = threadIdx.x % WARPGROUP == 0;
#pragma unroll
    for (int panel = 0; panel < COLUMNS / PANEL; panel++) {
        const uint32_t slot = slots + panel % RESULT_SLOTS * PANEL_BYTES, at = slot + row * B_PANEL;
        if (leads)
            store_bulk_wait<RESULT_SLOTS - 1>();
        synchronize(1 + role, WARPGROUP);
#pragma unroll
        for (int j = 0; j < PANEL / 8; j += 2) {
            const float(&first)[4] = sums[0][panel * 8 + j], (&beside)[4] = sums[0][panel * 8 + j + 1];
            store_matrices(at + ((j + lane / 16) ^ row % 8) * CHUNK_BYTES, packed(first[0], first[1], T()),
                           packed(first[2], first[3], T()), packed(beside[0], beside[1], T()),
                           packed(beside[2], beside[3], T()));
        }
        fence_asynchronous();
        synchronize(1 + role, WARPGROUP);
        if (leads)
            store_box(map, tile.column + panel * PANEL, tile.row + role * PANEL, slot);
    }
}

__device__ __forceinline__ void store_partials(const tile_sums &sums, const work &work, const tile &tile, int role) {
    const int lane = threadIdx.x % WARP, row = tile.row + role * PANEL + async_layout::first_row() + lane / 4;
    const int columns = work.hidden - tile.column;
    float *to =
        work.partials + (tile.split * work.partial_rows + row) * work.partial_stride + tile.column + lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; j++)
            if (row + 8 * half < work.experts && 8 * j < columns)
                *reinterpret_cast<float2 *>(to + 8 * half * work.partial_stride + 8 * j) =
                    make_float2(sums[0][j][2 * half], sums[0][j][2 * half + 1]);
}

/* A warpgroup's sums of grad_hidden_states: 64 of its columns by 64 tokens. */
using hidden_sums = float[1][PANEL / 8][4];

/* grad_hidden_states of a run of tiles, transposed: the gate, in registers, times G. A product begins before the last
 * one's results are stored. */
template <typename T, typename shape>
__device__ __forceinline__ void multiply_hidden(const all_maps &maps, place &next, place &done, uint32_t slots,
                                                int role, int column, int first, int tiles) {
    constexpr int BLOCKS = shape::BLOCKS;
    uint32_t gate[BLOCKS][shape::STEPS][4];
    hidden_sums sums, others;
    memset(sums, 0, sizeof sums);
    memset(others, 0, sizeof others);
    const int lane = threadIdx.x % WARP, row = lane % 8 + lane / 16 * 8;
    /* Where a lane finds the gate's matrices, of 8 experts by 8 of its warp's 16 columns, and leaves results'. */
    const uint32_t own = row * B_PANEL + (threadIdx.x / WARP % 4 * 2 + lane / 8 % 2 ^ row % 8) * CHUNK_BYTES;
    const matrix first_g = matrix_at(next.around.slots, 8 * B_PANEL, PANEL_BYTES, SWIZZLE_128);
    uint32_t slot = slots, other_slot = slots + PANEL_BYTES;
    const auto leave = [&] {
        release(done);
        done.advance();
    };
    if (threadIdx.x % WARPGROUP == 0) /* the last run may have ended with either slot */
        store_bulk_wait<0>();
#pragma unroll
    for (int i = 0; i < shape::GATE_PANELS; i++) {
        next.wait_full();
        if (i / BLOCKS == role)
#pragma unroll
            for (int k = 0; k < shape::STEPS; k++)
                load_matrices_transposed(gate[i % BLOCKS][k], next.memory() + own + k * 16 * B_PANEL);
        __syncwarp();
        next.advance();
        leave();
    }
    const auto begin = [&](auto block, hidden_sums &sums) {
        constexpr int BLOCK = decltype(block)::value;
        if (BLOCK == 0)
            next.wait_full();
        const matrix g = first_g + next.slot * shape::STAGE_BYTES;
        hold(sums);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < shape::STEPS; k++)
            wgmma(sums[0], gate[BLOCK][k], g + (k / 4 * PANEL_BYTES + k % 4 * 32), k > 0, T());
        if (BLOCK == BLOCKS - 1)
            next.advance();
        wgmma_commit();
    };
    const auto store = [&](auto block, const hidden_sums &sums, int tile) {
        const bool leads = threadIdx.x % WARPGROUP == 0;
        if (leads)
            store_bulk_wait<RESULT_SLOTS - 1>();
        synchronize(1 + role, WARPGROUP);
#pragma unroll
        for (int j = 0; j < PANEL / 8; j += 2) {
            const float(&left)[4] = sums[0][j], (&right)[4] = sums[0][j + 1];
            store_matrices_transposed(slot + own + j * 8 * B_PANEL, packed(left[0], left[1], T()),
                                      packed(left[2], left[3], T()), packed(right[0], right[1], T()),
                                      packed(right[2], right[3], T()));
        }
        fence_asynchronous();
        synchronize(1 + role, WARPGROUP);
        if (leads)
            store_box(maps.grad_hidden, column + (role * BLOCKS + decltype(block)::value) * PANEL,
                      (first + tile) * PANEL, slot);
        const uint32_t stored = slot;
        slot = other_slot;
        other_slot = stored;
    };
    const std::integral_constant<int, 0> even;
    const std::integral_constant<int, BLOCKS - 1> odd;
    const auto step = [&](auto block, auto other, hidden_sums &sums, hidden_sums &others, int item) {
        begin(other, others);
        wgmma_wait<1>();
        hold(sums);
        if (decltype(block)::value == BLOCKS - 1)
            leave();
        store(block, sums, item / BLOCKS);
    };
    const auto last = [&](auto block, hidden_sums &sums, int item) {
        wgmma_wait<0>();
        hold(sums);
        leave();
        store(block, sums, item / BLOCKS);
    };
    int items = tiles * BLOCKS;
    asm volatile("" : "+r"(items)); /* were it known to be even, nvcc would serialise the products */
    begin(even, sums);
    int i = 0;
#pragma unroll 1
    for (; i + 2 < items; i += 2) {
        step(even, odd, sums, others, i);
        step(odd, even, others, sums, i + 1);
    }
    if (i + 2 == items) {
        step(even, odd, sums, others, i);
        last(odd, others, i + 1);
    } else {
        last(even, sums, i);
    }
}

template <typename T, typename shape>
__device__ __forceinline__ void multiply_all(const work &work, const all_maps &maps, const ring &stages,
                                             const ring &stored, uint32_t slots, int role) {
    place at(stages), done(stages), partials(stored);
    each_unit(
        work,
        [&](const tile &tile) {
            tile_sums sums;
            memset(sums, 0, sizeof sums);
            multiply<T, shape>(sums, tile.steps, at, done, role);
            if (work.whole)
                store_results<T>(sums, maps.grad_weight, tile, slots, role);
            else
                store_partials(sums, work, tile, role);
            if (work.adds) {
                partials.wait_empty();
                __syncwarp();
                if (threadIdx.x % WARP == 0)
                    barrier_arrive(partials.full());
                partials.advance();
            }
        },
        [&](int slice, int first, int count) {
            multiply_hidden<T, shape>(maps, at, done, slots, role, (slice * CLUSTER + rank()) * shape::HIDDEN_COLUMNS,
                                      first, count);
        });
    if (threadIdx.x % WARPGROUP == 0)
        store_bulk_wait<0>();
}

/* ---- Adders ---- */

/* Whether a tile's split is the last one to be stored, by what an adder has seen; then it sees all of them: a fence
 * after the barrier makes visible to others what the barrier made visible to it. */
__device__ __forceinline__ bool arrives_last(const work &work, const tile &tile, int adder) {
    const int across = (work.hidden + COLUMNS - 1) / COLUMNS, number = tile.row / ROWS * across + tile.column / COLUMNS;
    int before = 0;
    if (threadIdx.x % WARP == 0) {
        __threadfence();
        before = atomicAdd(work.arrivals + number * ADDERS + adder, 1);
        __threadfence();
    }
    __syncwarp();
    return uniform(before) > 0;
}

/* Adds up an adder's rows of a tile, half a warp each, as reduce.cu does. */
template <typename T>
__device__ __forceinline__ void add_splits(const work &work, const tile &tile, int adder) {
    enum { LANES = WARP / 2, WIDTH = 4, APART = LANES * WIDTH, GROUPS = COLUMNS / APART };
    const int lane = threadIdx.x % WARP, first = tile.column + lane % LANES * WIDTH, there = work.hidden - first,
              end = tile.row + ROWS < work.experts ? tile.row + ROWS : work.experts;
    const int64_t split_stride = work.partial_rows * work.partial_stride;
#pragma unroll 1
    for (int row = tile.row + adder * 2 + lane / LANES; row < end; row += ADDERS * 2) {
        asm volatile("" : "+r"(row)); /* what is worked out ahead takes registers */
        const float *from = work.partials + row * work.partial_stride + first;
        float4 parts[2][GROUPS] = {};
#pragma unroll
        for (int split = 0; split < 2; split++) {
#pragma unroll
            for (int i = 0; i < GROUPS; i++)
                if (i * APART < there)
                    parts[split][i] = __ldcg(reinterpret_cast<const float4 *>(from + i * APART));
            from += split_stride;
            keep_here(from);
        }
        T *to = reinterpret_cast<T *>(work.grad_weight.data) + row * work.grad_weight.stride + first;
#pragma unroll
        for (int i = 0; i < GROUPS; i++) {
            const float4 &a = parts[0][i], &b = parts[1][i];
            const auto sum = [](float a, float b) { return __fadd_rn(__fadd_rn(0.0f, a), b); };
            if (i * APART < there)
                *reinterpret_cast<uint2 *>(to + i * APART) =
                    make_uint2(packed(sum(a.x, b.x), sum(a.y, b.y), T()), packed(sum(a.z, b.z), sum(a.w, b.w), T()));
        }
    }
}

template <typename T>
__device__ __forceinline__ void add_all(const work &work, const ring &stored, int adder) {
    place at(stored);
    wait_for_last_kernel();
    each_unit(
        work,
        [&](const tile &tile) {
            at.wait_full();
            __syncwarp();
            at.release();
            at.advance();
            if (tile.row < work.experts && tile.column < work.hidden && arrives_last(work, tile, adder))
                add_splits<T>(work, tile, adder);
        },
        [](int, int, int) {});
}

template <typename T, typename shape>
__device__ __forceinline__ void wide(const work &work, const all_maps &maps, uint32_t shared) {
    enum { LEFT_REGISTERS = 56, MULTIPLIERS_REGISTERS = 224 };
    if (!work.whole && !work.adds)
        allow_next_kernel();
    const ring stages{shared, shared + ROOM, shape::STAGE_BYTES, shape::STAGES};
    const int role = uniform(threadIdx.x / WARPGROUP);
    const ring stored{0, shared + ROOM + MOST_STAGES * 16, 0, STORED_SLOTS};
    stages.init(1, CLUSTER * MULTIPLIERS * (WARPGROUP / WARP));
    stored.init(MULTIPLIERS * (WARPGROUP / WARP), ADDERS);
    barrier_init_done();
    cluster_synchronize();
    if (role == MULTIPLIERS) {
        give_registers<LEFT_REGISTERS>();
        const int adder = uniform(threadIdx.x / WARP % (WARPGROUP / WARP)) - 1;
        if (threadIdx.x == MULTIPLIERS * WARPGROUP)
            load_all<shape>(work, maps, stages);
        else if (adder >= 0 && work.adds)
            add_all<T>(work, stored, adder);
    } else {
        take_registers<MULTIPLIERS_REGISTERS>();
        multiply_all<T, shape>(work, maps, stages, stored, shared + STAGES_BYTES + role * RESULT_SLOTS * PANEL_BYTES,
                               role);
    }
}
#endif

template <typename T, typename shape>
__global__ void __launch_bounds__(THREADS, 1)
    wide_kernel(const __grid_constant__ work work, const __grid_constant__ all_maps maps) {
#ifdef MOER_FUSED_WGMMA
    extern __shared__ __align__(1024) char shared[];
    wide<T, shape>(work, maps, shared_address(shared));
#else
    __trap();
#endif
}

/* ---- The host's choice ---- */

/* Units and what they cost, in eighths of a step: a step's products, and what a tile's results add. Estimates. */
enum {
    STEP_COST = 8,
    HIDDEN_COST = 1,
    STORE_COST = 4,
    PARTIALS_COST = 32,
    REDUCTION_COST = 40,
    REDUCED_AT_ONCE = 80000,
    ADDERS_COST = 500, /* until adders are done with a tile */
    LONGER = 10        /* 64ths that units of the weight gradient took more than this, beside others */
};

struct units {
    int64_t count, cost;
};

/* Those of a split of the weight gradient; below one another, or beside, whichever makes fewer. */
units weight_units(const problem &problem, int64_t tokens, bool partials, work *work) {
    const int64_t down = divide_up(problem.experts, ROWS), across = divide_up(problem.hidden, COLUMNS);
    const bool beside = down * divide_up(across, CLUSTER) < divide_up(down, CLUSTER) * across;
    work->beside = beside;
    work->down = static_cast<int>(beside ? down : divide_up(down, CLUSTER));
    work->across = static_cast<int>(beside ? divide_up(across, CLUSTER) : across);
    return {int64_t{work->down} * work->across,
            divide_up(tokens, PANEL) * STEP_COST + STORE_COST + (partials ? PARTIALS_COST : 0)};
}

template <typename shape>
units hidden_units(const problem &problem, work *work) {
    work->tiles = static_cast<int>(divide_up(problem.tokens, PANEL));
    return {work->tiles * divide_up(problem.hidden, CLUSTER * shape::HIDDEN_COLUMNS),
            shape::BLOCKS * (shape::PANELS * STEP_COST / 4 + HIDDEN_COST)};
}

/* Calls with the shape for so many experts. */
template <typename Call>
auto with_shape(int experts, Call call) {
    const int64_t panels = divide_up(experts, PANEL);
    return panels <= 2   ? call(shape<2>())
           : panels <= 3 ? call(shape<3>())
           : panels <= 4 ? call(shape<4>())
           : panels <= 6 ? call(shape<6>())
                         : call(shape<8>());
}

/* Deals units to clusters: finds the lowest level that all can be filled up to. */
void deal(const units &weight, const units &hidden, int clusters, work *work) {
    const int64_t each = weight.count / clusters, first = weight.count % clusters;
    const auto fit = [&](int64_t level, int64_t units) {
        return level > units * weight.cost ? (level - units * weight.cost) / hidden.cost : 0;
    };
    int64_t low = 0, high = (each + 1) * weight.cost + divide_up(hidden.count, clusters) * hidden.cost;
    while (low < high) {
        const int64_t level = (low + high) / 2;
        if (first * fit(level, each + 1) + (clusters - first) * fit(level, each) >= hidden.count)
            high = level;
        else
            low = level + 1;
    }
    work->weight_units = static_cast<int>(weight.count);
    work->hidden_units = static_cast<int>(hidden.count);
    work->first_clusters = static_cast<int>(first);
    work->few = static_cast<int>(fit(low, each + 1));
    work->many = static_cast<int>(fit(low, each));
}

template <typename T, typename shape>
cudaError_t launch(const problem &problem, cudaStream_t stream) {
    const typed_rows &out = problem.grad_weight;
    const int64_t experts = problem.experts;
    const int pairs = attribute(cudaDevAttrMultiProcessorCount) / CLUSTER, clusters = pairs > 0 ? pairs : 1;
    work work{};
    const bool mapped =
        !problem.accumulate && out.type == problem.type && is_aligned(out, 2) && out.stride >= problem.hidden;
    work.whole = mapped && problem.splits == 1;
    units weight = weight_units(problem, problem.split_tokens, !work.whole, &work);
    weight.count *= problem.splits;
    weight.cost += weight.cost * LONGER / 64;
    const units hidden = hidden_units<shape>(problem, &work);
    deal(weight, hidden, clusters, &work);
    work.adds = mapped && problem.splits == 2 && work.few * hidden.cost >= ADDERS_COST;
    work.arrivals = problem.arrivals;
    work.grad_weight = out;
    work.tokens = static_cast<int>(problem.tokens);
    work.split_tokens = static_cast<int>(problem.split_tokens);
    work.experts = problem.experts;
    work.hidden = static_cast<int>(problem.hidden);
    work.partials = problem.partials;
    work.partial_rows = problem.partial_rows;
    work.partial_stride = problem.partial_stride;
    const rows logits = {problem.logits, problem.logits_stride};
    all_maps maps{};
    const auto kernel = wide_kernel<T, shape>;
    const auto map = [&](CUtensorMap *made, const rows &matrix, int64_t rows, int64_t columns) {
        return moer_fused::make_map(made, problem.type, matrix, rows, columns, PANEL);
    };
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES);
    if (error == cudaSuccess)
        error = map(&maps.logits, logits, problem.tokens, experts);
    if (error == cudaSuccess)
        error = map(&maps.weight, problem.weight, experts, problem.hidden);
    if (error == cudaSuccess)
        error = map(&maps.hidden_states, problem.hidden_states, problem.tokens, problem.hidden);
    if (error == cudaSuccess)
        error = map(&maps.grad_hidden, problem.grad_hidden, problem.tokens, problem.hidden);
    if (error == cudaSuccess && work.whole)
        error = map(&maps.grad_weight, out, experts, problem.hidden);
    if (error == cudaSuccess)
        error = launch_clusters(kernel, CLUSTER, int64_t{clusters} * CLUSTER, THREADS, BYTES, stream, work, maps);
    return error != cudaSuccess || work.whole || work.adds ? error : launch_reduction(problem, stream);
}

} // namespace moer_wide

/* As few as a chain may be long, or more of them, where that shares the work out so much better that it pays for the
 * partial sums. For as many multiprocessors as most devices have: bits are not to depend on it. */
int64_t choose_wide_split(const problem &problem) {
    using namespace moer_wide;
    enum { CLUSTERS = 132 / CLUSTER, FEWEST = 512, MOST_SPLITS = 64 };
    int64_t best = 0, best_cost = 0;
    work work;
    const units hidden =
        with_shape(problem.experts, [&](auto shape) { return hidden_units<decltype(shape)>(problem, &work); });
    const int64_t fewest = divide_up(problem.tokens, longest_chain(problem));
    for (int64_t splits = fewest; splits <= fewest * MOST_SPLITS; splits += divide_up(splits, 2)) {
        const int64_t tokens = divide_up(divide_up(problem.tokens, splits), PANEL) * PANEL;
        if (best && tokens < FEWEST)
            break;
        const units weight = weight_units(problem, tokens, splits > 1, &work);
        const int64_t count = weight.count * divide_up(problem.tokens, tokens);
        const int64_t all = divide_up(count * weight.cost + hidden.count * hidden.cost, CLUSTERS),
                      longest = divide_up(count, CLUSTERS) * weight.cost;
        const int64_t reduction =
            splits > 1 ? REDUCTION_COST + splits * problem.experts * problem.hidden / REDUCED_AT_ONCE : 0;
        const int64_t cost = (all > longest ? all : longest) + reduction;
        if (!best || cost < best_cost) {
            best = tokens;
            best_cost = cost;
        }
    }
    return best;
}

int64_t count_wide_arrivals(const problem &problem) {
    using namespace moer_wide;
    return divide_up(problem.experts, ROWS) * divide_up(problem.hidden, COLUMNS) * ADDERS;
}

cudaError_t launch_wide(const problem &problem, cudaStream_t stream) {
    return moer_wide::with_shape(problem.experts, [&](auto shape) {
        return problem.type == BF16 ? moer_wide::launch<__nv_bfloat16, decltype(shape)>(problem, stream)
                                    : moer_wide::launch<__half, decltype(shape)>(problem, stream);
    });
}
