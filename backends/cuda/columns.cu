/* SPDX-License-Identifier: Apache-2.0 */
/* Both products of an operation by one kernel, for sm_90a and long batches of up to 128 experts: what a block has of G
 * and of hidden states it uses for both, so that memory's pace is all that is left.
 *
 * A block has 128 columns, whose part of the gate its warps hold in registers, and goes down a split of the
 * tokens, 64 at a time: the gate times G becomes grad_hidden_states, transposed; the hidden states' transpose times G
 * is added to these columns' weight gradient, all experts of it, in registers, which at the end are left to reduce.cu.
 * Two warpgroups have 64 columns each, and begin a tile's products before they store the last one's results.
 *
 * Two blocks, a cluster, have 256 columns, a slice, and each copies half of a tile of G to both. Blocks of all slices
 * go down together: clusters with twice the columns and a stretch of tiles each, wherever it began, took up to a fifth
 * longer.
 *
 * Bytes, of 64 tokens by 128 columns of 128 experts: from the second-level cache 16 KB of hidden states and 8 of G, to
 * it 16 KB. Through shared memory 150 KB, 1200 clocks, for 1024 of products; memory takes 1700, or a tenth more where
 * reads and writes mix like this.
 *
 * Budget: 168 registers a thread, of which the warpgroup that copies gives up most; 225 KB of shared memory. */
#include "fused.cuh"

/* Named: nvcc would name an anonymous one after the file's path, and other folders would give other bytes. */
namespace moer_columns {

using moer_fused::WARPGROUP;

enum {
    CLUSTER = 2,
    PANEL = 64, /* rows and columns; rows are of B_PANEL bytes */
    PANEL_BYTES = PANEL * B_PANEL,
    MULTIPLIERS = 2, /* warpgroups, and panels that a block has side by side */
    COLUMNS = MULTIPLIERS * PANEL,
    CLUSTERS = 132 / CLUSTER,    /* as many multiprocessors as most devices have: bits are not to depend on it */
    HALF_ROWS = PANEL / CLUSTER, /* of a tile of G, that a block copies */
    THREADS = (MULTIPLIERS + 1) * WARPGROUP,
    SLOTS = 2, /* for a warpgroup's results */
    RESULT_BYTES = SLOTS * MULTIPLIERS * PANEL_BYTES,
    MOST_BYTES = 226 * 1024
};

/* For so many experts at most. */
template <int MOST_EXPERTS>
struct shape {
    static constexpr int EXPERTS = MOST_EXPERTS, G_PANELS = EXPERTS / PANEL;
    static constexpr int GATE_PANEL = EXPERTS * B_PANEL, GATE_BYTES = MULTIPLIERS * GATE_PANEL;
    static constexpr int STAGE_BYTES = (G_PANELS + MULTIPLIERS) * PANEL_BYTES;
    static constexpr int STAGES = (MOST_BYTES - RESULT_BYTES) / (STAGE_BYTES + 16);
    static constexpr int ROOM = RESULT_BYTES + STAGES * STAGE_BYTES, BYTES = ROOM + STAGES * 16; /* and barriers */
    static_assert(GATE_BYTES <= STAGE_BYTES, "a unit's first stage is its part of the gate");
};

/* What the kernel works on: units, each a cluster's columns of a split. */
struct work {
    int units, slices, tokens, split_tokens;
    int experts, hidden;
    float *partials;
    int64_t partial_rows, partial_stride;
};

/* Tensor maps, of panels. */
struct all_maps {
    CUtensorMap logits, weight, hidden_states, grad_hidden;
};

#ifdef MOER_FUSED_WGMMA

using moer_fused::place;
using moer_fused::ring;
using moer_fused::uniform;

__device__ __forceinline__ int rank() {
    return static_cast<int>(blockIdx.x) % CLUSTER;
}

/* A block's units: the first column, the split, and its tiles of tokens. */
template <typename Each>
__device__ __forceinline__ void each_unit(const work &work, Each each) {
#pragma unroll 1
    for (int unit = blockIdx.x / CLUSTER; unit < work.units; unit += gridDim.x / CLUSTER) {
        const int split = unit / work.slices, slice = unit - split * work.slices;
        const int first = split * work.split_tokens, left = work.tokens - first;
        each((slice * CLUSTER + rank()) * COLUMNS, split, first,
             ((left < work.split_tokens ? left : work.split_tokens) + PANEL - 1) / PANEL);
    }
}

/* All copies of a block, by a single thread. Only G depends on the kernel before. */
template <typename shape>
__device__ __forceinline__ void load_all(const work &work, const all_maps &maps, const ring &stages) {
    place at(stages);
    bool waited = false;
    prefetch_map(maps.weight);
    prefetch_map(maps.hidden_states);
    prefetch_map(maps.logits);
    const auto load_hidden = [&](const place &at, int column, int token) {
        barrier_arrive_expecting(at.full(), shape::STAGE_BYTES);
#pragma unroll
        for (int i = 0; i < MULTIPLIERS; i++)
            copy_box(at.memory() + (shape::G_PANELS + i) * PANEL_BYTES, maps.hidden_states, column + i * PANEL, token,
                     at.full());
    };
    each_unit(work, [&](int column, int, int first, int tiles) {
        at.wait_empty();
        barrier_arrive_expecting(at.full(), shape::GATE_BYTES);
#pragma unroll
        for (int i = 0; i < MULTIPLIERS; i++)
            copy_box(at.memory() + i * shape::GATE_PANEL, maps.weight, column + i * PANEL, 0, at.full());
        at.advance();
        int ahead = 0;
        if (!waited) {
            place early = at;
#pragma unroll 1
            for (; ahead < shape::STAGES - 1 && ahead < tiles; ahead++, early.advance())
                load_hidden(early, column, first + ahead * PANEL);
            wait_for_last_kernel();
            waited = true;
        }
#pragma unroll 1
        for (int i = 0; i < tiles; i++, at.advance()) {
            if (i >= ahead) {
                at.wait_empty();
                load_hidden(at, column, first + i * PANEL);
            }
#pragma unroll
            for (int j = 0; j < shape::G_PANELS; j++)
                copy_box_to_cluster<CLUSTER>(at.memory() + j * PANEL_BYTES + rank() * HALF_ROWS * B_PANEL, maps.logits,
                                             j * PANEL, first + i * PANEL + rank() * HALF_ROWS, at.full());
        }
    });
    /* Until nobody copies to this block, or tells it of a stage. */
#pragma unroll 1
    for (int i = 0; i < shape::STAGES; i++, at.advance())
        at.wait_empty();
}

/* A warpgroup's sums: its columns by all experts, and 64 tokens by its columns. */
template <typename shape>
using weight_sums = float[1][shape::EXPERTS / 8][4];
using hidden_sums = float[1][PANEL / 8][4];

__device__ __forceinline__ void release(const place &at) {
    const int lane = threadIdx.x % WARP;
    if (lane < CLUSTER)
        barrier_arrive(at.empty(), lane);
}

/* Stores a warpgroup's sums, from a column on, as a split's partial sums; neighbours of eight lanes have a sector. */
template <typename shape>
__device__ __forceinline__ void store_partials(const weight_sums<shape> &sums, const work &work, int split,
                                               int column) {
    const int lane = threadIdx.x % WARP, left = work.experts - lane % 4 * 2;
    column += async_layout::first_row() + lane / 4;
    float *to = work.partials + (split * work.partial_rows + lane % 4 * 2) * work.partial_stride + column;
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int j = 0; j < shape::EXPERTS / 8; j++)
#pragma unroll
            for (int k = 0; k < 2; k++)
                if (8 * j + k < left && column + 8 * half < work.hidden)
                    to[(8 * j + k) * work.partial_stride + 8 * half] = sums[0][j][half * 2 + k];
}

template <typename T, typename shape>
__device__ __forceinline__ void multiply_all(const work &work, const all_maps &maps, const ring &stages,
                                             uint32_t results, int role) {
    weight_sums<shape> weights;
    hidden_sums sums, others;
    memset(weights, 0, sizeof weights);
    memset(sums, 0, sizeof sums);
    memset(others, 0, sizeof others);
    constexpr int STEPS = shape::EXPERTS / 16;
    const int lane = threadIdx.x % WARP, row = lane % 8 + lane / 16 * 8;
    /* Where a lane finds the gate's matrices, of 8 experts by 8 of its warp's 16 columns, and leaves results'. */
    const uint32_t own = row * B_PANEL + (threadIdx.x / WARP % 4 * 2 + lane / 8 % 2 ^ row % 8) * CHUNK_BYTES;
    uint32_t columns[STEPS][4], slot = results + role * SLOTS * PANEL_BYTES, other_slot = slot + PANEL_BYTES;
    place next(stages), at(stages);
    const matrix first_g = matrix_at(stages.slots, 8 * B_PANEL, PANEL_BYTES, SWIZZLE_128),
                 first_x =
                     matrix_at(stages.slots + (shape::G_PANELS + role) * PANEL_BYTES, 8 * B_PANEL, 0, SWIZZLE_128);
    const auto begin = [&](hidden_sums &sums) {
        next.wait_full();
        const matrix g = first_g + next.slot * shape::STAGE_BYTES;
        hold(sums);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < STEPS; k++)
            wgmma(sums[0], columns[k], g + (k / 4 * PANEL_BYTES + k % 4 * 32), k > 0, T());
        wgmma_commit();
        next.advance();
    };
    const auto add = [&](int link) {
        const matrix g = first_g + at.slot * shape::STAGE_BYTES, x = first_x + at.slot * shape::STAGE_BYTES;
        hold(weights);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < PANEL / 16; k++)
            wgmma<true>(weights[0], x + k * 16 * B_PANEL, g + k * 16 * B_PANEL, k > 0 ? 1 : link, T());
        wgmma_commit();
    };
    const auto store = [&](const hidden_sums &sums, int column, int token) {
        const bool leads = threadIdx.x % WARPGROUP == 0;
        if (leads)
            store_bulk_wait<SLOTS - 1>();
        synchronize(1 + role, WARPGROUP);
#pragma unroll
        for (int j = 0; j < PANEL / 8; j += 2) {
            const float(&first)[4] = sums[0][j], (&second)[4] = sums[0][j + 1];
            store_matrices_transposed(slot + own + j * 8 * B_PANEL, packed(first[0], first[1], T()),
                                      packed(first[2], first[3], T()), packed(second[0], second[1], T()),
                                      packed(second[2], second[3], T()));
        }
        fence_asynchronous();
        synchronize(1 + role, WARPGROUP);
        if (leads)
            store_box(maps.grad_hidden, column, token, slot);
        const uint32_t stored = slot;
        slot = other_slot;
        other_slot = stored;
    };
    const auto leave = [&] {
        hold(weights);
        release(at);
        at.advance();
    };
    each_unit(work, [&](int column, int split, int first, int tiles) {
        column += role * PANEL;
        next.wait_full();
#pragma unroll
        for (int k = 0; k < STEPS; k++)
            load_matrices_transposed(columns[k], next.memory() + role * shape::GATE_PANEL + own + k * 16 * B_PANEL);
        __syncwarp();
        release(next);
        next.advance();
        at.advance();
        const auto step = [&](hidden_sums &sums, hidden_sums &others, int i) {
            add(i);
            wgmma_wait<1>();
            hold(sums);
            begin(others);
            store(sums, column, first + i * PANEL);
            wgmma_wait<1>();
            leave();
        };
        const auto last = [&](hidden_sums &sums) {
            add(tiles - 1);
            wgmma_wait<1>();
            hold(sums);
            store(sums, column, first + (tiles - 1) * PANEL);
            wgmma_wait<0>();
            leave();
        };
        begin(sums);
        int i = 0;
#pragma unroll 1
        for (; i + 2 < tiles; i += 2) {
            step(sums, others, i);
            step(others, sums, i + 1);
        }
        if (i + 2 == tiles) {
            step(sums, others, i);
            last(others);
        } else {
            last(sums);
        }
        store_partials<shape>(weights, work, split, column);
    });
    if (threadIdx.x % WARPGROUP == 0)
        store_bulk_wait<0>();
}

template <typename T, typename shape>
__device__ __forceinline__ void columns(const work &work, const all_maps &maps, uint32_t shared) {
    enum { LEFT_REGISTERS = 40, MULTIPLIERS_REGISTERS = 232 };
    allow_next_kernel();
    const ring stages{shared + RESULT_BYTES, shared + shape::ROOM, shape::STAGE_BYTES, shape::STAGES};
    const int role = uniform(threadIdx.x / WARPGROUP);
    stages.init(1, CLUSTER * MULTIPLIERS * (WARPGROUP / WARP));
    barrier_init_done();
    cluster_synchronize();
    if (role < MULTIPLIERS) {
        take_registers<MULTIPLIERS_REGISTERS>();
        multiply_all<T, shape>(work, maps, stages, shared, role);
    } else {
        give_registers<LEFT_REGISTERS>();
        if (threadIdx.x == MULTIPLIERS * WARPGROUP)
            load_all<shape>(work, maps, stages);
    }
}
#endif

template <typename T, typename shape>
__global__ void __launch_bounds__(THREADS, 1)
    columns_kernel(const __grid_constant__ work work, const __grid_constant__ all_maps maps) {
#ifdef MOER_FUSED_WGMMA
    extern __shared__ __align__(1024) char shared[];
    columns<T, shape>(work, maps, shared_address(shared));
#else
    __trap();
#endif
}

/* ---- Launches ---- */

template <typename T, typename shape>
cudaError_t launch_with(const problem &problem, cudaStream_t stream) {
    work work{};
    work.slices = static_cast<int>(divide_up(problem.hidden, CLUSTER * COLUMNS));
    work.units = work.slices * static_cast<int>(problem.splits);
    work.tokens = static_cast<int>(problem.tokens);
    work.split_tokens = static_cast<int>(problem.split_tokens);
    work.experts = problem.experts;
    work.hidden = static_cast<int>(problem.hidden);
    work.partials = problem.partials;
    work.partial_rows = problem.partial_rows;
    work.partial_stride = problem.partial_stride;
    const rows logits = {problem.logits, problem.logits_stride};
    all_maps maps{};
    const auto kernel = columns_kernel<T, shape>;
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape::BYTES);
    const auto map = [&](CUtensorMap *made, const rows &matrix, int64_t rows, int box_rows) {
        if (error == cudaSuccess)
            error = moer_fused::make_map(made, problem.type, matrix, rows,
                                         made == &maps.logits ? problem.experts : problem.hidden, box_rows);
    };
    map(&maps.logits, logits, problem.tokens, HALF_ROWS);
    map(&maps.weight, problem.weight, problem.experts, shape::EXPERTS);
    map(&maps.hidden_states, problem.hidden_states, problem.tokens, PANEL);
    map(&maps.grad_hidden, problem.grad_hidden, problem.tokens, PANEL);
    if (error == cudaSuccess)
        error = launch_clusters(kernel, CLUSTER, int64_t{work.units < CLUSTERS ? work.units : int{CLUSTERS}} * CLUSTER,
                                THREADS, shape::BYTES, stream, work, maps);
    return error == cudaSuccess ? launch_reduction(problem, stream) : error;
}

template <typename T>
cudaError_t launch(const problem &problem, cudaStream_t stream) {
    return problem.experts <= 64 ? launch_with<T, shape<64>>(problem, stream)
                                 : launch_with<T, shape<128>>(problem, stream);
}

} // namespace moer_columns

/* Clusters' slices, and splits that clusters work on at once. */
static int64_t slices_of(const problem &problem) {
    return divide_up(problem.hidden, moer_columns::CLUSTER * moer_columns::COLUMNS);
}

static int64_t splits_at_once(const problem &problem) {
    const int64_t slices = slices_of(problem);
    return slices < moer_columns::CLUSTERS ? moer_columns::CLUSTERS / slices : 1;
}

bool columns_keep_busy(const problem &problem) {
    return 3 * slices_of(problem) * splits_at_once(problem) >= 2 * moer_columns::CLUSTERS;
}

/* As many splits as give most clusters a unit, or a multiple of that. */
int64_t choose_columns_split(const problem &problem) {
    using moer_columns::PANEL;
    const int64_t together = splits_at_once(problem),
                  splits = together * divide_up(problem.tokens, together * longest_chain(problem));
    return divide_up(divide_up(problem.tokens, splits), PANEL) * PANEL;
}

cudaError_t launch_columns(const problem &problem, cudaStream_t stream) {
    return problem.type == BF16 ? moer_columns::launch<__nv_bfloat16>(problem, stream)
                                : moer_columns::launch<__half>(problem, stream);
}
