/* SPDX-License-Identifier: Apache-2.0 */
/* Both products of an operation by one kernel, for sm_90a and for shapes that fused.cu is not made for: many experts,
 * wide models, long batches.
 *
 *     grad_hidden_states   tiles of 128 tokens x 256 columns, terms over the experts:  A = G, rows of terms
 *     weight gradient      tiles of 128 experts x 256 columns, terms over a split of the tokens:  A = G^T, whose terms
 * are the rows; with one split it is stored as it is, otherwise as partial sums for reduce.cu
 *
 * B is the gate or the hidden states, rows of columns. A step has 64 terms: two panels of A and four of B, 64 x 64
 * elements each, which one thread has tensor copies bring into a ring of stages; what does not exist is zeros. Two
 * warpgroups have 64 rows each, and one goes ahead of the other, so that when it stores its rows the other has the
 * tensor cores.
 *
 * A step takes the tensor cores 1024 clocks, and 48 KB from the second-level cache, which all multiprocessors together
 * cannot have in that time: two blocks, a cluster, work on tiles below one another, or beside, and each copies half of
 * what they share to both. That is a unit. The host deals units so that all clusters have done at about the same time:
 * first those of the weight gradient, which are the longer ones, then runs of the other kind, one below the other.
 *
 * Budget: 168 registers a thread, of which the warpgroup that copies gives up most; 225 KB of shared memory. */
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
    STAGES = 4,
    STAGE_BYTES = 6 * PANEL_BYTES, /* A, then B */
    MULTIPLIERS = ROWS / PANEL,    /* warpgroups */
    THREADS = (MULTIPLIERS + 1) * WARPGROUP,
    RESULT_SLOTS = 2, /* panels of a warpgroup's results */
    ROOM = STAGES * STAGE_BYTES + MULTIPLIERS * RESULT_SLOTS * PANEL_BYTES,
    BYTES =
        ROOM + STAGES * 24, /* barriers: of the ring, and one for each stage that the first warpgroup has taken up */
    LEAD = 2                /* steps of grad_hidden_states that the first warpgroup goes ahead */
};

/* What the kernel works on, by the host's choice. The first so many clusters have one unit of the weight gradient more
 * than the others, and runs of few units of grad_hidden_states, those of many. */
struct work {
    int weight_units, hidden_units;
    int first_clusters, few, many;
    int down, across, tokens_down; /* units of a split; units of grad_hidden_states below one another */
    bool beside;                   /* units of the weight gradient are tiles beside one another */
    bool whole;                    /* there is one split, and the weight gradient can be stored by tensor copies */
    int tokens, split_tokens, experts, hidden;
    float *partials;
    int64_t partial_rows, partial_stride;
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

__device__ __forceinline__ tile hidden_tile(const work &work, int tokens, int column) {
    tile result;
    result.row = (tokens * CLUSTER + rank()) * ROWS;
    result.column = column * COLUMNS;
    result.first = 0;
    result.steps = (work.experts + PANEL - 1) / PANEL;
    result.split = 0;
    return result;
}

template <typename Weight, typename Hidden>
__device__ __forceinline__ void each_tile(const work &work, Weight weight, Hidden hidden) {
    const int cluster = static_cast<int>(blockIdx.x) / CLUSTER, clusters = static_cast<int>(gridDim.x) / CLUSTER;
#pragma unroll 1
    for (int unit = cluster; unit < work.weight_units; unit += clusters)
        weight(weight_tile(work, unit));
    const int after = cluster - work.first_clusters;
    int unit = after < 0 ? cluster * work.few : work.first_clusters * work.few + after * work.many;
    int end = unit + (after < 0 ? work.few : work.many);
    if (end > work.hidden_units)
        end = work.hidden_units;
    int tokens = unit % work.tokens_down, column = unit / work.tokens_down;
#pragma unroll 1
    for (; unit < end; unit++) {
        hidden(hidden_tile(work, tokens, column));
        if (++tokens == work.tokens_down) {
            tokens = 0;
            column++;
        }
    }
}

/* ---- Copies ---- */

/* Panels side by side or below one another; of what the cluster shares, a block copies its part to all. */
template <int PANELS, bool SHARED>
__device__ __forceinline__ void load_panels(uint32_t to, uint32_t barrier, const CUtensorMap &map, int column, int row,
                                            bool beside) {
    constexpr int OWN = SHARED ? PANELS / CLUSTER : PANELS;
    const int first = SHARED ? rank() * OWN : 0;
#pragma unroll
    for (int i = first; i < first + OWN; i++)
        if (SHARED && CLUSTER > 1)
            copy_box_to_cluster<CLUSTER>(to + i * PANEL_BYTES, map, column + (beside ? i * PANEL : 0),
                                         row + (beside ? 0 : i * PANEL), barrier);
        else
            copy_box(to + i * PANEL_BYTES, map, column + (beside ? i * PANEL : 0), row + (beside ? 0 : i * PANEL),
                     barrier);
}

/* A step's terms begin with the tile's first. */
template <bool WEIGHT>
__device__ __forceinline__ void load_left(const place &at, const work &work, const all_maps &maps, const tile &tile,
                                          int step) {
    const int terms = tile.first + step * PANEL;
    if (!WEIGHT)
        load_panels<2, false>(at.memory(), at.full(), maps.logits, terms, tile.row, false);
    else if (work.beside)
        load_panels<2, true>(at.memory(), at.full(), maps.logits, tile.row, terms, true);
    else
        load_panels<2, false>(at.memory(), at.full(), maps.logits, tile.row, terms, true);
}

template <bool WEIGHT>
__device__ __forceinline__ void load_right(const place &at, const work &work, const all_maps &maps, const tile &tile,
                                           int step) {
    const int terms = tile.first + step * PANEL;
    const uint32_t to = at.memory() + 2 * PANEL_BYTES;
    barrier_arrive_expecting(at.full(), STAGE_BYTES);
    if (!WEIGHT)
        load_panels<4, true>(to, at.full(), maps.weight, tile.column, terms, true);
    else if (work.beside)
        load_panels<4, false>(to, at.full(), maps.hidden_states, tile.column, terms, true);
    else
        load_panels<4, true>(to, at.full(), maps.hidden_states, tile.column, terms, true);
}

/* All copies of a block, by a single thread. B does not depend on the kernel before. */
__device__ __forceinline__ void load_all(const work &work, const all_maps &maps, const ring &stages) {
    place at(stages), early(stages);
    bool waited = false;
    prefetch_map(maps.hidden_states);
    prefetch_map(maps.weight);
    prefetch_map(maps.logits);
    const auto load = [&](auto weight, const tile &tile) {
        constexpr bool WEIGHT = decltype(weight)::value;
        int ahead = 0;
        if (!waited) {
#pragma unroll 1
            for (; ahead < STAGES && ahead < tile.steps; ahead++, early.advance())
                load_right<WEIGHT>(early, work, maps, tile, ahead);
            wait_for_last_kernel();
            waited = true;
        }
#pragma unroll 1
        for (int i = 0; i < tile.steps; i++, at.advance()) {
            if (i >= ahead) {
                at.wait_empty();
                load_right<WEIGHT>(at, work, maps, tile, i);
            }
            load_left<WEIGHT>(at, work, maps, tile, i);
        }
    };
    each_tile(
        work, [&](const tile &tile) { load(std::true_type(), tile); },
        [&](const tile &tile) { load(std::false_type(), tile); });
#pragma unroll 1
    for (int i = 0; i < STAGES; i++, at.advance()) /* until nobody copies to this block, or tells it of a stage */
        at.wait_empty();
}

/* ---- Products ---- */

/* A warpgroup's 64 x 256 sums, as wgmma has them. */
using tile_sums = float[1][COLUMNS / 8][4];

__device__ __forceinline__ void release(const place &at) {
    const int lane = threadIdx.x % WARP;
    if (CLUSTER == 1)
        at.release();
    else if (lane < CLUSTER)
        barrier_arrive(at.empty(), lane);
}

/* Tells that the first warpgroup has taken up a stage. A stage's phases are those of the ring: neither warpgroup can be
 * a round ahead. */
__device__ __forceinline__ uint32_t taken(const place &at) {
    return at.around.barriers + STAGES * 16 + at.slot * 8;
}

/* A warpgroup's part of a tile. A step's products begin before those of the last are done, whose stage is then
 * released. */
template <typename T, bool WEIGHT>
__device__ __forceinline__ void multiply(tile_sums &sums, int steps, place &at, place &done, int role) {
    const matrix first_a = matrix_at(at.around.slots + role * PANEL_BYTES, 8 * B_PANEL, 0, SWIZZLE_128),
                 first_b = matrix_at(at.around.slots + 2 * PANEL_BYTES, 8 * B_PANEL, PANEL_BYTES, SWIZZLE_128);
    if (!WEIGHT && role > 0 && LEAD > 0) {
        place ahead = at;
        ahead.advance(LEAD < steps ? LEAD - 1 : steps - 1);
        barrier_wait(taken(ahead), ahead.parity);
    }
    hold(sums);
#pragma unroll 1
    for (int i = 0; i < steps; i++) {
        at.wait_full();
        const matrix a = first_a + at.slot * STAGE_BYTES, b = first_b + at.slot * STAGE_BYTES;
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < PANEL / 16; k++)
            wgmma<WEIGHT>(sums[0], a + k * (WEIGHT ? 16 * B_PANEL : 32), b + k * 16 * B_PANEL, k > 0 ? 1 : i, T());
        wgmma_commit();
        if (threadIdx.x == 0)
            barrier_arrive(taken(at));
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

template <typename T>
__device__ __forceinline__ void multiply_all(const work &work, const all_maps &maps, const ring &stages, uint32_t slots,
                                             int role) {
    tile_sums sums;
    memset(sums, 0, sizeof sums);
    place at(stages), done(stages);
    each_tile(
        work,
        [&](const tile &tile) {
            multiply<T, true>(sums, tile.steps, at, done, role);
            if (work.whole)
                store_results<T>(sums, maps.grad_weight, tile, slots, role);
            else
                store_partials(sums, work, tile, role);
        },
        [&](const tile &tile) {
            multiply<T, false>(sums, tile.steps, at, done, role);
            store_results<T>(sums, maps.grad_hidden, tile, slots, role);
        });
    if (threadIdx.x % WARPGROUP == 0)
        store_bulk_wait<0>();
}

template <typename T>
__device__ __forceinline__ void wide(const work &work, const all_maps &maps, uint32_t shared) {
    enum { LEFT_REGISTERS = 40, MULTIPLIERS_REGISTERS = 232 };
    if (!work.whole)
        allow_next_kernel();
    const ring stages{shared, shared + ROOM, STAGE_BYTES, STAGES};
    const int role = uniform(threadIdx.x / WARPGROUP);
    stages.init(1, CLUSTER * MULTIPLIERS * (WARPGROUP / WARP));
    if (threadIdx.x < STAGES)
        barrier_init(stages.barriers + STAGES * 16 + threadIdx.x * 8, 1);
    barrier_init_done();
    if (CLUSTER > 1)
        cluster_synchronize();
    else
        __syncthreads();
    if (role == MULTIPLIERS) {
        give_registers<LEFT_REGISTERS>();
        if (threadIdx.x == MULTIPLIERS * WARPGROUP)
            load_all(work, maps, stages);
    } else {
        take_registers<MULTIPLIERS_REGISTERS>();
        multiply_all<T>(work, maps, stages, shared + STAGES * STAGE_BYTES + role * RESULT_SLOTS * PANEL_BYTES, role);
    }
}
#endif

template <typename T>
__global__ void __launch_bounds__(THREADS, 1)
    wide_kernel(const __grid_constant__ work work, const __grid_constant__ all_maps maps) {
#ifdef MOER_FUSED_WGMMA
    extern __shared__ __align__(1024) char shared[];
    wide<T>(work, maps, shared_address(shared));
#else
    __trap();
#endif
}

/* ---- The host's choice ---- */

/* Units and what they cost, in eighths of a step: a step's products, and what a tile's results add. Estimates. */
enum { STEP_COST = 8, STORE_COST = 4, PARTIALS_COST = 32, REDUCTION_COST = 40, REDUCED_AT_ONCE = 80000 };

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

units hidden_units(const problem &problem, work *work) {
    work->tokens_down = static_cast<int>(divide_up(problem.tokens, ROWS * CLUSTER));
    return {work->tokens_down * divide_up(problem.hidden, COLUMNS),
            divide_up(problem.experts, PANEL) * STEP_COST + STORE_COST};
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

template <typename T>
cudaError_t launch(const problem &problem, cudaStream_t stream) {
    const typed_rows &out = problem.grad_weight;
    const int64_t experts = problem.experts;
    const int pairs = attribute(cudaDevAttrMultiProcessorCount) / CLUSTER, clusters = pairs > 0 ? pairs : 1;
    work work{};
    work.whole = problem.splits == 1 && !problem.accumulate && out.type == problem.type && is_aligned(out, 2) &&
                 out.stride >= problem.hidden;
    units weight = weight_units(problem, problem.split_tokens, !work.whole, &work);
    weight.count *= problem.splits;
    deal(weight, hidden_units(problem, &work), clusters, &work);
    work.tokens = static_cast<int>(problem.tokens);
    work.split_tokens = static_cast<int>(problem.split_tokens);
    work.experts = problem.experts;
    work.hidden = static_cast<int>(problem.hidden);
    work.partials = problem.partials;
    work.partial_rows = problem.partial_rows;
    work.partial_stride = problem.partial_stride;
    const rows logits = {problem.logits, problem.logits_stride};
    all_maps maps{};
    const auto kernel = wide_kernel<T>;
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
    return error != cudaSuccess || work.whole ? error : launch_reduction(problem, stream);
}

} // namespace moer_wide

/* As few as a chain may be long, or more of them, where that shares the work out so much better that it pays for the
 * partial sums. For as many multiprocessors as most devices have: bits are not to depend on it. */
int64_t choose_wide_split(const problem &problem) {
    using namespace moer_wide;
    enum { CLUSTERS = 132 / CLUSTER, FEWEST = 512, MOST_SPLITS = 64 };
    int64_t best = 0, best_cost = 0;
    work work;
    const units hidden = hidden_units(problem, &work);
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

cudaError_t launch_wide(const problem &problem, cudaStream_t stream) {
    return problem.type == BF16 ? moer_wide::launch<__nv_bfloat16>(problem, stream)
                                : moer_wide::launch<__half>(problem, stream);
}
