/* SPDX-License-Identifier: Apache-2.0 */
/* G of the sigmoid operation as entries for the fused kernel, a lane a slot: neighbouring lanes have a token, so that
 * there are few threads, beside which that kernel finds room, and a token takes no longer than its two loads: the ids,
 * then the scores that they name. All the rest but the last step is done while those are under way. */
#include "sigmoid.cuh"
#include "tiles.cuh"

/* Named: nvcc would name an anonymous one after the file's path, and other folders would give other bytes. */
namespace moer_entries {

enum { THREADS = 128, FEWEST_BLOCKS = 16 }; /* 32 registers: as many as the fused kernel leaves to one block */

/* LANES: as many as entries, rounded up to a power of two. */
template <typename T, int LANES>
__global__ void __launch_bounds__(THREADS, FEWEST_BLOCKS) entries_kernel(const __grid_constant__ problem problem) {
    using slot = sigmoid_slot<T>;
    allow_next_kernel();
    const int lane = threadIdx.x % LANES;
    const int64_t row = (static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x) / LANES;
    const bool exists = row < problem.tokens, is_slot = exists && lane < problem.top_k;
    const int64_t token = exists ? row : problem.tokens - 1;
    int low = -1, high = -1;
    T g = T(0.0f), w = T(0.0f), s = T(0.0f);
    if (is_slot) {
        const char *ids = problem.ids.data + token * problem.ids.stride;
        low = reinterpret_cast<const int *>(ids)[problem.wide_ids ? 2 * lane : lane];
        if (problem.wide_ids)
            high = reinterpret_cast<const int *>(ids)[2 * lane + 1];
        g = reinterpret_cast<const T *>(problem.incoming.data + token * problem.incoming.stride)[lane];
        w = reinterpret_cast<const T *>(problem.normalized.data + token * problem.normalized.stride)[lane];
    }
    const T z = *reinterpret_cast<const T *>(problem.denominator.data + token * problem.denominator.stride);
    if (!problem.wide_ids)
        high = low >> 31;
    const bool valid = high == 0 && low >= 0 && low < problem.experts;
    if (valid)
        s = reinterpret_cast<const T *>(problem.scores.data + token * problem.scores.stride)[low];
    else if (is_slot && !(high == -1 && low == -1) && problem.invalid_ids)
        atomicAdd(problem.invalid_ids, 1);
    const int id = valid ? low : -1;

    /* Sums over slots, in ascending order; to add zero changes none that began with zero. */
    const float scaled = slot::scaled(g, problem.scaling), term = valid ? slot::term(scaled, w) : 0.0f;
    float c = 0, sum = 0;
#pragma unroll
    for (int k = 0; k < LANES; k++)
        c = __fadd_rn(c, __shfl_sync(0xffffffffu, term, k, LANES));
    const float quotient = slot::quotient(scaled, slot::rounded(c), z);
#pragma unroll
    for (int k = 0; k < LANES; k++) {
        const float other = __shfl_sync(0xffffffffu, quotient, k, LANES);
        if (__shfl_sync(0xffffffffu, id, k, LANES) == id) /* where ids repeat, so do entries */
            sum = slot::added(sum, other);
    }
    const T result = slot::result(sum, to_float(s));
    uint16_t bits;
    memcpy(&bits, &result, sizeof bits);
    if (lane < problem.entries)
        reinterpret_cast<uint32_t *>(problem.logits)[row * problem.entries + lane] =
            valid ? swizzled<T, TILE_TOKENS, A_PANEL>(static_cast<int>(row % TILE_TOKENS), id) |
                        static_cast<uint32_t>(bits) << 16
                  : NO_ENTRY;
    if (problem.grad_logits.data) {
        for (int expert = lane; expert < problem.experts && exists; expert += LANES)
            store_element(problem.grad_logits, token, expert, 0);
        __syncwarp();
        if (valid)
            store_element(problem.grad_logits, token, id, to_float(result));
    }
}

template <typename T, int LANES>
cudaError_t launch_with(const problem &problem, cudaStream_t stream) {
    const int64_t blocks = divide_up(problem.tokens, PADDED_TOKENS) * (PADDED_TOKENS * LANES / THREADS);
    return launch_first(entries_kernel<T, LANES>, blocks, THREADS, true, stream, problem);
}

template <typename T>
cudaError_t launch(const problem &problem, cudaStream_t stream) {
    if (problem.entries <= 4)
        return launch_with<T, 4>(problem, stream);
    if (problem.entries <= 8)
        return launch_with<T, 8>(problem, stream);
    return launch_with<T, 16>(problem, stream);
}

} // namespace moer_entries

cudaError_t launch_entries(const problem &problem, cudaStream_t stream) {
    return problem.type == BF16 ? moer_entries::launch<__nv_bfloat16>(problem, stream)
                                : moer_entries::launch<__half>(problem, stream);
}
