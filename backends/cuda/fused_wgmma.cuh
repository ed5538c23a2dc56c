/* SPDX-License-Identifier: Apache-2.0 */
/* The fused kernel's products by Hopper's wgmma, for sm_90a. A tile has 64 tokens, a slice 64 columns; a weight block
 * has a warpgroup for each 64 experts. A product waits for all that is done to its descriptors: they are an addition
 * apart, in registers that a warp shares. */
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

/* A weight block's experts: all, or 64 of them, for each of which there is a warpgroup. */
template <typename shape>
__device__ __forceinline__ weight_part part_of(const shares &shares, const problem &) {
    const bool apart = shares.parts > 1;
    weight_part result;
    result.warpgroups = apart ? 1 : shape::BLOCKS;
    result.first = apart ? static_cast<int>(blockIdx.x) % shape::BLOCKS : 0; /* block */
    result.column = static_cast<int>(blockIdx.x) / (apart ? shape::BLOCKS : 1) * PANEL_COLUMNS;
    result.bytes = result.warpgroups * shape::BLOCK_BYTES;
    result.offset = result.first * shape::BLOCK_BYTES;
    constexpr int STEP = shape::STEP;
    result.slots = apart ? shape::ROOM / (STEP * (shape::HIDDEN_BYTES + shape::BLOCK_BYTES))
                         : shape::ROOM / (STEP * (shape::HIDDEN_BYTES + shape::BLOCKS * shape::BLOCK_BYTES));
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

/* Stores neighbours of the weight gradient one by one. Out of the way of the code that stores more at once. */
__device__ __noinline__ void store_apart(const problem &problem, int64_t expert, int64_t column, float first,
                                         float second) {
    if (problem.accumulate) {
        first = __fadd_rn(load_element(problem.grad_weight, expert, column), first);
        second = __fadd_rn(load_element(problem.grad_weight, expert, column + 1), second);
    }
    store_element(problem.grad_weight, expert, column, first);
    store_element(problem.grad_weight, expert, column + 1, second);
}

/* A warpgroup's 64 experts. A step's products begin before those of the last are done, whose slots are then released.
 */
template <typename T, typename shape>
__device__ __forceinline__ void add_up(const problem &problem, const job &job, const ring &hidden,
                                       const weight_part &part, const tensor_memory &, int role) {
    if (role >= part.warpgroups)
        return;
    constexpr int STEP = shape::STEP, TOKENS = shape::TOKENS, HIDDEN_BYTES = shape::HIDDEN_BYTES;
    const int block = part.first * part.warpgroups + role, column = part.column, part_bytes = part.bytes;
    const uint32_t offset = (shape::SPARSE ? block : role) * shape::BLOCK_BYTES;
    sums_of<PANEL_COLUMNS> chain, total;
    total.clear();
    chain.clear();
    const matrix first_a = matrix_at(job.logits.slots + offset, 8 * A_PANEL, TOKENS * A_PANEL, SWIZZLE_64),
                 first_b = matrix_at(hidden.slots, 8 * B_PANEL, 0, SWIZZLE_128);
    place logits(job.logits), hidden_states(hidden), last_logits(job.logits), last_hidden(hidden);
#pragma unroll 1
    for (int i = 0; i < job.steps; i++) {
        if (shape::SPARSE)
            logits.wait_full();
        hidden_states.wait_full();
        const matrix a = first_a + logits.slot * job.logits.bytes, b = first_b + hidden_states.slot * hidden.bytes;
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
            for (int k = 0; k < TOKENS / 16; k++)
                wgmma<true>(chain.sums[0], a + j * part_bytes + k * 16 * A_PANEL,
                            b + (j * HIDDEN_BYTES + k * 16 * B_PANEL), j + k > 0 ? 1 : first, T());
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
    if (problem.whole_rows) {
        store_sectors<T>(total, problem.grad_weight, block * BLOCK, problem.experts, column, problem.hidden);
        return;
    }
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int j = 0; j < total.ACROSS; j++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = block * BLOCK + total.first_row() + lane / 4 + 8 * half, at = column + j * 8 + lane % 4 * 2;
            if (row < problem.experts && at < problem.hidden)
                store_apart(problem, row, at, total.sums[0][j][2 * half], total.sums[0][j][2 * half + 1]);
        }
}

/* Items, of which a warpgroup has every other. */
template <typename T, typename shape>
__device__ __forceinline__ void multiply_gate(const job &job, const ring &gate, const ring &results,
                                              const tensor_memory &, int role) {
    constexpr int TOKENS = shape::TOKENS;
    const int tiles = job.tiles, steps = job.steps;
    const int lane = threadIdx.x % WARP;
    sums_of<HIDDEN_COLUMNS> result;
    result.clear();
    const int row = result.first_row() + lane % 16; /* a lane's, of stores */
    const uint32_t row_at = row * B_PANEL;
    const matrix first_a = matrix_at(job.logits.slots, 8 * A_PANEL, 0, SWIZZLE_64),
                 first_b = matrix_at(gate.slots, 8 * B_PANEL, shape::EXPERTS * B_PANEL, SWIZZLE_128);
    place logits(job.logits), to(results), weight(gate);
    if (role == 1) {
        logits.advance();
        to.advance();
    }
    int slice = 0, next = job.first + role;
    weight.wait_full();
#pragma unroll 1
    for (int i = role; i < steps; i += TURNS, next += TURNS) {
        for (; next >= tiles; next -= tiles, slice++) {
            weight.release();
            weight.advance();
            weight.wait_full();
        }
        logits.wait_full();
        const matrix a = first_a + logits.slot * shape::LOGITS_BYTES, b = first_b + weight.slot * shape::GATE_BYTES;
        hold(result.sums);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < shape::EXPERTS / 16; k++)
            wgmma<false>(result.sums[0], a + (k / 2 * TOKENS * A_PANEL + k % 2 * A_PANEL / 2), b + k * 16 * B_PANEL,
                         k > 0, T());
        wgmma_commit();
        wgmma_wait<0>();
        hold(result.sums);
        logits.release();
        to.wait_empty();
        const uint32_t at = to.memory() + row_at;
#pragma unroll
        for (int j = 0; j < result.ACROSS; j += 2) {
            const float(&sums)[4] = result.sums[0][j], (&beside)[4] = result.sums[0][j + 1];
            store_matrices(at + j / 8 * TOKENS * B_PANEL + ((j % 8 + lane / 16) ^ row % 8) * CHUNK_BYTES,
                           packed(sums[0], sums[1], T()), packed(sums[2], sums[3], T()),
                           packed(beside[0], beside[1], T()), packed(beside[2], beside[3], T()));
        }
        fence_asynchronous();
        __syncwarp();
        if (lane == 0)
            barrier_arrive(to.full());
        logits.advance(), logits.advance();
        to.advance(), to.advance();
    }
    /* The slices that are left have no item of this warpgroup's. */
}

} // namespace moer_fused

#endif
