/* SPDX-License-Identifier: Apache-2.0 */
/* The fused kernel's products by Hopper's wgmma, for sm_90a. A tile has 64 tokens, a weight block 64 columns, and an
 * item's two warpgroups 64 columns each. What they are bound by is what passes through shared memory, 128 bytes a
 * clock, and memory's own pace. So a product's rows, 64 of them, are columns of the gate or of hidden states, and its
 * columns tokens or experts:
 * - of the gate, its rows lie in registers, and either warpgroup reads a tile of G once;
 * - of hidden states, they are read by two warpgroups, of which either reads only its own experts of G.
 * For 160 experts a tile of G costs 72 KB in an item and 36 KB in a weight block, beside what comes and goes, for 640
 * and 320 clocks of products. Where a warpgroup has 64 experts of a dense G, both ways cost the same, and experts as
 * rows are a little faster. A product waits for all that is done to its descriptors: they are an addition apart, in
 * registers that a warp shares. */
#pragma once

#include "fused.cuh"

#ifdef MOER_FUSED_WGMMA

namespace moer_fused {

/* Sums are in registers: nothing to set up. */
struct tensor_memory {};
template <typename shape>
__device__ __forceinline__ tensor_memory allocate(uint32_t) {
    return {};
}
__device__ __forceinline__ void open(tensor_memory *) {}
template <typename shape>
__device__ __forceinline__ void close(const tensor_memory &) {}

/* A weight block's experts: all, which two warpgroups share, if there are more than 64; or 64 of them. */
template <typename shape>
__device__ __forceinline__ weight_part part_of(const shares &shares, const problem &) {
    const bool apart = shares.parts > 1;
    weight_part result;
    result.warpgroups = apart || shape::BLOCKS == 1 ? 1 : WARPGROUPS;
    result.first = apart ? static_cast<int>(blockIdx.x) % shape::BLOCKS : 0; /* block */
    result.column = static_cast<int>(blockIdx.x) / (apart ? shape::BLOCKS : 1) * PANEL_COLUMNS;
    result.bytes = apart ? shape::BLOCK_BYTES : shape::LOGITS_BYTES;
    result.offset = result.first * shape::BLOCK_BYTES;
    constexpr int STEP = shape::STEP;
    result.slots = apart ? shape::ROOM / (STEP * (shape::HIDDEN_BYTES + shape::BLOCK_BYTES))
                         : shape::ROOM / (STEP * (shape::HIDDEN_BYTES + shape::LOGITS_BYTES));
    result.releases = result.warpgroups * (WARPGROUP / WARP);
    return result;
}

/* Sums of 64 rows, as wgmma has them: a warp has 16 rows, a thread pairs of columns. */
template <int COLUMNS>
struct sums_of : async_layout {
    static constexpr int DOWN = 1, ACROSS = COLUMNS / 8;
    float sums[1][ACROSS][4];

    __device__ __forceinline__ void clear() {
        memset(sums, 0, sizeof sums);
    }
    __device__ __forceinline__ void add(const sums_of &more) {
#pragma unroll
        for (int i = 0; i < ACROSS; i++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                sums[0][i][j] = __fadd_rn(sums[0][i][j], more.sums[0][i][j]);
    }
};

/* Stores an element of the weight gradient. Out of the way of the code that stores more at once. */
__device__ __noinline__ void store_apart(const problem &problem, int64_t expert, int64_t column, float sum) {
    if (problem.accumulate)
        sum = __fadd_rn(load_element(problem.grad_weight, expert, column), sum);
    store_element(problem.grad_weight, expert, column, sum);
}

/* Stores sums from an expert and a column on; TURNED: experts are the sums' columns. Of the 16 columns of such an
 * expert that a warp has, 4 lanes have two pairs each, 8 columns apart; after an exchange with its neighbour a lane has
 * 4 columns, and the lanes have whole sectors. */
template <typename T, bool TURNED, int COLUMNS>
__device__ __forceinline__ void store_weights(const sums_of<COLUMNS> &result, const problem &problem, int expert,
                                              int column) {
    const int lane = threadIdx.x % WARP, odd = lane % 2;
    if (!problem.whole_rows) {
#pragma unroll
        for (int j = 0; j < result.ACROSS; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int down = result.first_row() + lane / 4 + i / 2 * 8, across = 8 * j + lane % 4 * 2 + i % 2;
                const int at = expert + (TURNED ? across : down), beside = column + (TURNED ? down : across);
                if (at < problem.experts && beside < problem.hidden)
                    store_apart(problem, at, beside, result.sums[0][j][i]);
            }
    } else if constexpr (!TURNED) {
        store_sectors<T>(result, problem.grad_weight, expert, problem.experts, column, problem.hidden);
    } else {
        column += result.first_row() + odd * 8 + lane % 4 / 2 * 4;
        expert += lane / 4;
        const int64_t stride = problem.grad_weight.stride;
        T *to = reinterpret_cast<T *>(problem.grad_weight.data) + expert * stride + column;
#pragma unroll
        for (int j = 0; j < result.ACROSS; j++) {
            const float(&sums)[4] = result.sums[0][j];
            const uint32_t first = transposed(packed(sums[0], sums[1], T())),
                           second = transposed(packed(sums[2], sums[3], T()));
            const uint32_t other = __shfl_xor_sync(0xffffffffu, odd ? first : second, 1);
            if (expert + 8 * j < problem.experts && column < problem.hidden)
                *reinterpret_cast<uint2 *>(to + 8 * j * stride) =
                    odd ? make_uint2(other, second) : make_uint2(first, other);
        }
    }
}

/* A warpgroup's experts, from one on and, in a tile of G, from an offset on. A step's products begin before those of
 * the last are done, whose slots are then released. The first turn has no step and stores nothing: it is for the
 * instructions, which are then at hand when the last step is done. */
template <typename T, typename shape, int EXPERTS>
__device__ __forceinline__ void add_up_experts(const problem &problem, const job &job, const ring &hidden,
                                               const weight_part &part, int expert, int offset) {
    constexpr int STEP = shape::STEP, TOKENS = shape::TOKENS, HIDDEN_BYTES = shape::HIDDEN_BYTES;
    constexpr bool TURNED = shape::SPARSE;
    const int part_bytes = part.bytes;
    sums_of<TURNED ? EXPERTS : PANEL_COLUMNS> chain, total;
    total.clear();
    chain.clear();
    const matrix first_x = matrix_at(hidden.slots, 8 * B_PANEL, 0, SWIZZLE_128),
                 first_g = matrix_at(job.logits.slots + offset, 8 * A_PANEL, TOKENS * A_PANEL, SWIZZLE_64);
    place logits(job.logits), hidden_states(hidden), last_logits(job.logits), last_hidden(hidden);
#pragma unroll 1
    for (int turn = 0; turn < 2; turn++) {
        const int steps = turn * job.steps;
#pragma unroll 1
        for (int i = 0; i < steps; i++) {
            if (shape::SPARSE)
                logits.wait_full();
            hidden_states.wait_full();
            const matrix x = first_x + hidden_states.slot * hidden.bytes, g = first_g + logits.slot * job.logits.bytes;
            const int first = i % (LONGEST_CHAIN / TOKENS / STEP);
            if (first == 0 && i > 0) {
                wgmma_wait<0>();
                hold(chain.sums);
                total.add(chain);
                hold(chain.sums);
            }
            wgmma_fence();
#pragma unroll
            for (int j = 0; j < STEP; j++)
#pragma unroll
                for (int k = 0; k < TOKENS / 16; k++) {
                    const matrix columns = x + (j * HIDDEN_BYTES + k * 16 * B_PANEL),
                                 experts = g + j * part_bytes + k * 16 * A_PANEL;
                    wgmma<true>(chain.sums[0], TURNED ? columns : experts, TURNED ? experts : columns,
                                j + k > 0 ? 1 : first, T());
                }
            wgmma_commit();
            wgmma_wait<1>();
            if (i > 0) {
                last_hidden.release();
                last_hidden.advance();
                if (shape::SPARSE) {
                    last_logits.release();
                    last_logits.advance();
                }
            }
            logits.advance();
            hidden_states.advance();
        }
        wgmma_wait<0>();
        hold(chain.sums);
        total.add(chain);
        store_weights<T, TURNED>(total, problem, turn ? expert : problem.experts, part.column);
    }
}

template <typename T, typename shape>
__device__ __forceinline__ void add_up(const problem &problem, const job &job, const ring &hidden,
                                       const weight_part &part, const tensor_memory &, int role) {
    constexpr int HALF = (shape::EXPERTS / A_EXPERTS + 1) / 2 * A_EXPERTS, REST = shape::EXPERTS - HALF;
    if (role >= part.warpgroups)
        return;
    if (!shape::SPARSE || part.warpgroups == 1) {
        const int block = part.first + role;
        add_up_experts<T, shape, BLOCK>(problem, job, hidden, part, block * BLOCK,
                                        (shape::SPARSE ? block : role) * shape::BLOCK_BYTES);
    } else if constexpr (shape::SPARSE) {
        if (role == 0)
            add_up_experts<T, shape, HALF>(problem, job, hidden, part, 0, 0);
        else
            add_up_experts<T, shape, REST>(problem, job, hidden, part, HALF, HALF * shape::TOKENS * 2);
    }
}

/* Items, of which a warpgroup has 64 columns, those of the gate in registers. It begins an item before it stores the
 * last. */
template <typename T, typename shape>
__device__ __forceinline__ void multiply_gate(const job &job, const ring &gate, const ring &results,
                                              const tensor_memory &, int role) {
    constexpr int TOKENS = shape::TOKENS, STEPS = shape::EXPERTS / 16;
    const int lane = threadIdx.x % WARP, row = lane % 8 + lane / 16 * 8;
    /* Where a lane finds the gate's matrices, of 8 experts by 8 of its warp's 16 columns, and leaves results'. */
    const uint32_t own = row * B_PANEL + (threadIdx.x / WARP % 4 * 2 + lane / 8 % 2 ^ row % 8) * CHUNK_BYTES;
    const matrix first_b = matrix_at(job.logits.slots, 8 * A_PANEL, 0, SWIZZLE_64);
    place logits(job.logits), last_logits(job.logits), to(results), weight(gate);
    uint32_t columns[STEPS][4];
    sums_of<TOKENS> sums, others;
    sums.clear();
    others.clear();
    const auto begin = [&](sums_of<TOKENS> &sums) {
        logits.wait_full();
        const matrix b = first_b + logits.slot * shape::LOGITS_BYTES;
        hold(sums.sums);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < STEPS; k++)
            wgmma(sums.sums[0], columns[k], b + (k / 2 * TOKENS * A_PANEL + k % 2 * A_PANEL / 2), k > 0, T());
        wgmma_commit();
        logits.advance();
    };
    const auto end = [&](sums_of<TOKENS> &sums) {
        hold(sums.sums);
        last_logits.release();
        last_logits.advance();
        to.wait_empty();
        const uint32_t at = to.memory() + role * TOKENS * B_PANEL + own;
#pragma unroll
        for (int j = 0; j < TOKENS / 8; j += 2) {
            const float(&first)[4] = sums.sums[0][j], (&second)[4] = sums.sums[0][j + 1];
            store_matrices_transposed(at + j * 8 * B_PANEL, packed(first[0], first[1], T()),
                                      packed(first[2], first[3], T()), packed(second[0], second[1], T()),
                                      packed(second[2], second[3], T()));
        }
        fence_asynchronous();
        __syncwarp();
        if (lane == 0)
            barrier_arrive(to.full());
        to.advance();
    };
    int left = job.steps, tiles = job.tiles - job.first; /* of this slice */
#pragma unroll 1
    for (; left > 0; left -= tiles, tiles = job.tiles) {
        tiles = tiles < left ? tiles : left;
        weight.wait_full();
#pragma unroll
        for (int k = 0; k < STEPS; k++)
            load_matrices_transposed(columns[k],
                                     weight.memory() + role * shape::EXPERTS * B_PANEL + own + k * 16 * B_PANEL);
        __syncwarp();
        weight.release();
        weight.advance();
        begin(sums);
        int i = 2;
#pragma unroll 1
        for (; i < tiles; i += 2) {
            begin(others);
            wgmma_wait<1>();
            end(sums);
            begin(sums);
            wgmma_wait<1>();
            end(others);
        }
        if (i == tiles) {
            begin(others);
            wgmma_wait<1>();
            end(sums);
            wgmma_wait<0>();
            end(others);
        } else {
            wgmma_wait<0>();
            end(sums);
        }
    }
}

} // namespace moer_fused

#endif
