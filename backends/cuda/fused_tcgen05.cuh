/* SPDX-License-Identifier: Apache-2.0 */
/* The fused kernel's products by Blackwell's tcgen05, for sm_100 and its family. Tiles are of 128 tokens, since a
 * product has 128 rows: a weight block's are hidden columns, so that its experts may be any multiple of 32; an item's
 * are tokens. Sums are in tensor memory: a thread begins products, and the barrier that it names says when they are
 * done. */
#pragma once

#include "fused.cuh"
#include "tcgen05.cuh"

namespace moer_fused {

/* The operands of products as they lie in slots, for the first 16 terms, and how far the next 16 are; and the products.
 */
template <typename Shape>
struct operands {
    static constexpr int TOKENS = Shape::TOKENS;
    static constexpr int HIDDEN_STEP = 16 * B_PANEL, LOGITS_STEP = 16 * A_PANEL, GATE_STEP = 16 * B_PANEL;

    /* A weight block's: hidden states and G, both transposed. */
    static __host__ __device__ constexpr matrix hidden_states(uint32_t slot) {
        return tensor_matrix_at(slot, 8 * B_PANEL, TOKENS * B_PANEL, TENSOR_SWIZZLE_128);
    }
    static __host__ __device__ constexpr matrix logits_across(uint32_t slot) {
        return tensor_matrix_at(slot, 8 * A_PANEL, TOKENS * A_PANEL, TENSOR_SWIZZLE_64);
    }
    static __host__ __device__ constexpr uint32_t weight_product(bool bfloat16, int experts) {
        return tensor_product(bfloat16, true, true, Shape::WEIGHT_COLUMNS, experts);
    }
    /* A hidden block's: G, and the gate, whose rows are terms. */
    static __host__ __device__ constexpr matrix logits(uint32_t slot) {
        return tensor_matrix_at(slot, 8 * A_PANEL, 0, TENSOR_SWIZZLE_64);
    }
    static __host__ __device__ constexpr int logits_step(int k) {
        return k / 2 * TOKENS * A_PANEL + k % 2 * A_PANEL / 2;
    }
    static __host__ __device__ constexpr matrix gate(uint32_t slot) {
        return tensor_matrix_at(slot, 8 * B_PANEL, Shape::EXPERTS * B_PANEL, TENSOR_SWIZZLE_128);
    }
    static __host__ __device__ constexpr uint32_t item_product(bool bfloat16) {
        return tensor_product(bfloat16, false, true, TOKENS, HIDDEN_COLUMNS);
    }
};

/* Where sums are in tensor memory: a weight block's totals, then two chains; a hidden block's items of either turn. */
__host__ __device__ constexpr uint32_t chain_sums(uint32_t memory, int turn, int experts) {
    return memory + static_cast<uint32_t>((1 + turn) * experts);
}
__host__ __device__ constexpr uint32_t item_sums(uint32_t memory, int turn) {
    return memory + static_cast<uint32_t>(turn * HIDDEN_COLUMNS);
}

#ifdef MOER_FUSED_TCGEN05

/* The last of the block's barriers are for this: two whose phases end with products, two for those who have read sums.
 * Behind them a word for the address of tensor memory. */
struct tensor_memory {
    uint32_t barriers, sums;

    __device__ __forceinline__ uint32_t done(int which) const {
        return barriers + which * 8;
    }
    __device__ __forceinline__ uint32_t read(int which) const {
        return barriers + 16 + which * 8;
    }
};

/* By the block's last warp: from before __syncthreads(), after which open() has the address, to the block's end. */
template <typename shape>
__device__ __forceinline__ tensor_memory allocate(uint32_t shared) {
    const tensor_memory memory = {shared + shape::BYTES - OWN_BARRIERS * 8, 0};
    if (threadIdx.x >= shape::THREADS - WARP) {
        if (threadIdx.x % WARP == 0)
            for (int i = 0; i < 2; i++) {
                barrier_init(memory.done(i), 1);
                barrier_init(memory.read(i), WARPGROUP / WARP);
            }
        __syncwarp();
        tensor_allocate(memory.barriers + 32);
        tensor_before_sync();
    }
    return memory;
}

__device__ __forceinline__ void open(tensor_memory *memory) {
    tensor_after_sync();
    memory->sums = load_word(memory->barriers + 32);
}

template <typename shape>
__device__ __forceinline__ void close(const tensor_memory &memory) {
    __syncwarp();
    tensor_before_sync();
    __syncthreads();
    if (threadIdx.x >= shape::THREADS - WARP) {
        tensor_after_sync();
        tensor_free(memory.sums);
    }
}

/* A weight block's experts, and where their part of a tile of G begins. */
template <typename shape>
__device__ __forceinline__ weight_part part_of(const shares &shares, const problem &problem) {
    const int number = static_cast<int>(blockIdx.x), part = number % shares.parts, first = part * shares.part_experts;
    const int left = (problem.experts - first + A_EXPERTS - 1) / A_EXPERTS * A_EXPERTS;
    const int experts = left < shares.part_experts ? left : shares.part_experts;
    weight_part result;
    result.column = number / shares.parts * shape::WEIGHT_COLUMNS;
    result.first = first;
    result.experts = experts;
    result.offset = first / A_EXPERTS * shape::TOKENS * A_PANEL;
    result.bytes = experts / A_EXPERTS * shape::TOKENS * A_PANEL;
    result.slots = shape::ROOM / (shape::HIDDEN_BYTES + result.bytes);
    result.releases = 1;
    return result;
}

/* Out of the way of the code that stores what needs no thought. */
__device__ __noinline__ void store_sum(const problem &problem, int64_t expert, int64_t column, float sum) {
    if (problem.accumulate)
        sum = __fadd_rn(load_element(problem.grad_weight, expert, column), sum);
    store_element(problem.grad_weight, expert, column, sum);
}

/* Products of a weight block, by a single thread: hidden states, transposed, times G. Chains take turns in two parts of
 * tensor memory, behind that of the totals. */
template <typename T, typename shape>
__device__ __forceinline__ void begin_chains(const job &job, const ring &hidden, const weight_part &part,
                                             const tensor_memory &memory) {
    using of = operands<shape>;
    constexpr int TOKENS = shape::TOKENS, LINKS = LONGEST_CHAIN / TOKENS;
    const uint32_t product = of::weight_product(std::is_same<T, __nv_bfloat16>::value, part.experts);
    const matrix first_a = of::hidden_states(hidden.slots),
                 first_b = of::logits_across(job.logits.slots + (shape::SPARSE ? part.offset : 0));
    place g(job.logits), x(hidden);
#pragma unroll 1
    for (int i = 0; i < job.steps; i++) {
        const int chain = i / LINKS, link = i % LINKS, turn = chain % 2;
        if (link == 0)
            barrier_wait(memory.read(turn), (chain / 2 + 1) % 2); /* the first time, at once */
        if (shape::SPARSE)
            g.wait_full();
        x.wait_full();
        tensor_after_sync();
        const matrix a = first_a + x.slot * hidden.bytes, b = first_b + g.slot * job.logits.bytes;
#pragma unroll
        for (int k = 0; k < TOKENS / 16; k++)
            tensor_multiply(chain_sums(memory.sums, turn, part.experts), a + k * of::HIDDEN_STEP,
                            b + k * of::LOGITS_STEP, product, k > 0 ? 1 : link);
        tensor_commit(x.empty());
        if (shape::SPARSE)
            tensor_commit(g.empty());
        if (link == LINKS - 1 || i == job.steps - 1)
            tensor_commit(memory.done(turn));
        g.advance();
        x.advance();
    }
}

/* Chains' sums, added up by a warpgroup; a thread has a hidden column. The last stores what there is. */
template <typename T, typename shape>
__device__ __forceinline__ void add_chains(const problem &problem, const job &job, const weight_part &part,
                                           const tensor_memory &memory) {
    constexpr int LINKS = LONGEST_CHAIN / shape::TOKENS, COLUMNS = 32;
    const int warp = threadIdx.x / WARP, chains = (job.steps + LINKS - 1) / LINKS;
    const int64_t column = part.column + static_cast<int>(threadIdx.x % WARPGROUP);
    const uint32_t totals = own_lanes(memory.sums, warp);
#pragma unroll 1
    for (int chain = 0; chain < chains; chain++) {
        const int turn = chain % 2;
        barrier_wait(memory.done(turn), chain / 2 % 2);
        __syncwarp();
        tensor_after_sync();
#pragma unroll 1
        for (int first = 0; first < part.experts; first += COLUMNS) {
            float sums[COLUMNS], more[COLUMNS];
            __syncwarp(); /* some may not have stored */
            tensor_load(sums, chain_sums(totals, turn, part.experts) + first);
            tensor_load_wait(sums);
            if (chain > 0) {
                tensor_load(more, totals + first);
                tensor_load_wait(more);
#pragma unroll
                for (int j = 0; j < COLUMNS; j++)
                    sums[j] = __fadd_rn(more[j], sums[j]);
            }
            if (chain < chains - 1) {
                tensor_store(totals + first, sums);
                continue;
            }
#pragma unroll
            for (int j = 0; j < COLUMNS; j++) {
                const int64_t expert = part.first + first + j;
                if (expert >= problem.experts || column >= problem.hidden)
                    continue;
                if (problem.whole_rows)
                    reinterpret_cast<T *>(problem.grad_weight.data)[expert * problem.grad_weight.stride + column] =
                        from_float<T>(sums[j]);
                else
                    store_sum(problem, expert, column, sums[j]);
            }
        }
        __syncwarp();
        tensor_store_wait();
        tensor_before_sync();
        if (threadIdx.x % WARP == 0)
            barrier_arrive(memory.read(turn));
    }
}

template <typename T, typename shape>
__device__ __forceinline__ void add_up(const problem &problem, const job &job, const ring &hidden,
                                       const weight_part &part, const tensor_memory &memory, int warpgroup) {
    if (warpgroup == 0)
        add_chains<T, shape>(problem, job, part, memory);
    else if (threadIdx.x % WARPGROUP < WARP && elected())
        begin_chains<T, shape>(job, hidden, part, memory);
}

/* Items, of which a warpgroup has every other; a thread has a token. */
template <typename T, typename shape>
__device__ __forceinline__ void multiply_gate(const job &job, const ring &gate, const ring &results,
                                              const tensor_memory &memory, int turn) {
    using of = operands<shape>;
    constexpr int COLUMNS = 32;
    const int row = threadIdx.x % WARPGROUP;
    const uint32_t product = of::item_product(std::is_same<T, __nv_bfloat16>::value);
    const uint32_t sums = item_sums(memory.sums, turn), own = own_lanes(sums, threadIdx.x / WARP);
    const matrix first_a = of::logits(job.logits.slots), first_b = of::gate(gate.slots);
    place g(job.logits), w(gate), to(results);
    g.advance(turn);
    to.advance(turn * shape::RESULTS_AN_ITEM);
    int tile = job.first + turn;
    uint32_t parity = 0;
    w.wait_full();
#pragma unroll 1
    for (int i = turn; i < job.steps; i += WARPGROUPS, tile += WARPGROUPS, parity ^= 1) {
        for (; tile >= job.tiles; tile -= job.tiles) {
            w.release();
            w.advance();
            w.wait_full();
        }
        g.wait_full();
        if (row < WARP && elected()) {
            tensor_after_sync();
            const matrix a = first_a + g.slot * shape::LOGITS_BYTES, b = first_b + w.slot * shape::GATE_BYTES;
#pragma unroll
            for (int k = 0; k < shape::EXPERTS / 16; k++)
                tensor_multiply(sums, a + of::logits_step(k), b + k * of::GATE_STEP, product, k > 0);
            tensor_commit(memory.done(turn));
        }
        __syncwarp();
        barrier_wait(memory.done(turn), parity);
        __syncwarp();
        tensor_after_sync();
        g.release();
#pragma unroll
        for (int half = 0; half < shape::RESULTS_AN_ITEM; half++) {
            to.wait_empty();
#pragma unroll
            for (int first = 0; first < PANEL_COLUMNS; first += COLUMNS) {
                float values[COLUMNS];
                __syncwarp();
                tensor_load(values, own + half * PANEL_COLUMNS + first);
                tensor_load_wait(values);
#pragma unroll
                for (int j = 0; j < COLUMNS; j += 8)
                    store_words(to.memory() + row * B_PANEL + ((first + j) / 8 ^ row % 8) * CHUNK_BYTES,
                                make_uint4(packed(values[j], values[j + 1], T()),
                                           packed(values[j + 2], values[j + 3], T()),
                                           packed(values[j + 4], values[j + 5], T()),
                                           packed(values[j + 6], values[j + 7], T())));
            }
            fence_asynchronous();
            __syncwarp();
            if (row % WARP == 0)
                barrier_arrive(to.full());
            to.advance();
        }
        g.advance(WARPGROUPS);
        to.advance((WARPGROUPS - 1) * shape::RESULTS_AN_ITEM);
        __syncwarp();
        tensor_before_sync();
        synchronize(3 + turn, WARPGROUP); /* all have read the sums */
    }
}

#endif

} // namespace moer_fused
