/* SPDX-License-Identifier: Apache-2.0 */
/* G, the gradient of the router's logits: a warp a token, for every architecture and as the first kernel of every path.
 *
 * The formulas are the public header's. A lane has every 32nd expert of the row and every 32nd slot; D is gathered in
 * shared memory, slot after slot in ascending k, so that repeated ids add up in one order. Softmax sums in float64 what
 * cancels (the dot product of a row, whose terms are exact in it): a few hundred operations a token that the loads hide.
 * Sigmoid rounds to T after each step, as the model does; every _rn intrinsic keeps the compiler from fusing.
 *
 * Budget, softmax, a token: 4 E bytes of p, 2 E of d, about 64 bytes a slot of m's gather, 2 E written. */
#include "common.cuh"

namespace {

enum { WARP = 32, MOST_SLOTS = 64, SLOTS_A_LANE = MOST_SLOTS / WARP };
constexpr unsigned ALL_LANES = 0xffffffffu;

/* A token's slots: lane l has slots l and l + 32. Empty and invalid slots are -1; the invalid are counted. */
struct slots {
    int id[SLOTS_A_LANE];
};

__device__ slots load_slots(const problem &problem, int64_t token, int lane) {
    slots result;
    int invalid = 0;
#pragma unroll
    for (int i = 0; i < SLOTS_A_LANE; i++) {
        int slot = lane + i * WARP;
        int64_t id = -1;
        if (slot < problem.top_k) {
            const char *row = problem.ids + token * problem.ids_stride;
            id = problem.wide_ids ? reinterpret_cast<const int64_t *>(row)[slot]
                                  : reinterpret_cast<const int32_t *>(row)[slot];
        }
        bool valid = id >= 0 && id < problem.experts;
        invalid += !valid && id != -1;
        result.id[i] = valid ? static_cast<int>(id) : -1;
    }
    if (problem.invalid_ids && invalid > 0)
        atomicAdd(problem.invalid_ids, invalid);
    return result;
}

__device__ bool any_live(const slots &slots) {
    return __any_sync(ALL_LANES, slots.id[0] >= 0 || slots.id[1] >= 0);
}

/* The value of slot k, from the lane that has it. */
template <typename V> __device__ __forceinline__ V of_slot(const V (&values)[SLOTS_A_LANE], int k) {
    return __shfl_sync(ALL_LANES, k < WARP ? values[0] : values[1], k % WARP);
}

__device__ __forceinline__ double warp_sum(double value) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2)
        value += __shfl_xor_sync(ALL_LANES, value, offset);
    return value;
}

template <typename T> __device__ void store_logit(const problem &problem, int64_t token, int expert, T value) {
    reinterpret_cast<T *>(problem.logits)[token * problem.logits_stride + expert] = value;
    if (problem.grad_logits.data && expert < problem.experts)
        store_element(problem.grad_logits, token, expert, to_float(value));
}

/* v of the lane's slots: the gradients of the chosen probabilities. */
__device__ void softmax_slots(const problem &problem, int64_t token, int lane, const slots &slots, float *v) {
    bool live = any_live(slots), normalized = problem.sum.data != nullptr;
    double z = live && normalized ? static_cast<double>(load_element(problem.sum, token, 0)) : 1.0;
    double g[SLOTS_A_LANE], c = 0, m[SLOTS_A_LANE];
#pragma unroll
    for (int i = 0; i < SLOTS_A_LANE; i++) {
        int id = slots.id[i], slot = lane + i * WARP;
        g[i] = m[i] = 0;
        if (id < 0)
            continue;
        g[i] = load_element(problem.incoming, token, slot);
        if (problem.mask.data)
            m[i] = load_element(problem.mask, 0,
                                id * problem.mask_expert + slot * problem.mask_slot + token * problem.mask_token);
        if (normalized)
            c += g[i] * (static_cast<double>(load_element(problem.probs, token, id)) / z);
    }
    if (normalized)
        c = warp_sum(c);
#pragma unroll
    for (int i = 0; i < SLOTS_A_LANE; i++)
        v[i] = static_cast<float>((normalized ? (g[i] - c) / z : g[i]) + m[i]);
}

template <typename T> __device__ void softmax_row(const problem &problem, int64_t token, int lane, float *d) {
    slots slots = load_slots(problem, token, lane);
    for (int e = lane; e < problem.experts; e += WARP)
        d[e] = problem.direct.data ? load_element(problem.direct, token, e) : 0.0f;
    float v[SLOTS_A_LANE];
    softmax_slots(problem, token, lane, slots, v);
    __syncwarp();
    for (int k = 0; k < problem.top_k; k++) {
        int id = of_slot(slots.id, k);
        float value = of_slot(v, k);
        if (id >= 0 && id % WARP == lane)
            d[id] += value;
    }
    /* Each lane reads what it alone has written. */
    double dot = 0;
    for (int e = lane; e < problem.experts; e += WARP)
        dot += static_cast<double>(d[e]) * static_cast<double>(load_element(problem.probs, token, e));
    dot = warp_sum(dot);
    for (int e = lane; e < problem.logits_stride; e += WARP) {
        double g = 0;
        if (e < problem.experts)
            g = static_cast<double>(load_element(problem.probs, token, e)) * (static_cast<double>(d[e]) - dot);
        store_logit(problem, token, e, from_float<T>(static_cast<float>(g)));
    }
}

template <typename T> __device__ __forceinline__ float rounded(float value) {
    return to_float(from_float<T>(value));
}

template <typename T> __device__ void sigmoid_row(const problem &problem, int64_t token, int lane, float *d) {
    slots slots = load_slots(problem, token, lane);
    float a[SLOTS_A_LANE], w[SLOTS_A_LANE], u[SLOTS_A_LANE], c = 0;
    for (int e = lane; e < problem.experts; e += WARP)
        d[e] = 0;
#pragma unroll
    for (int i = 0; i < SLOTS_A_LANE; i++) {
        int slot = lane + i * WARP;
        a[i] = w[i] = 0;
        if (slots.id[i] < 0)
            continue;
        a[i] = rounded<T>(__fmul_rn(load_element(problem.incoming, token, slot), problem.scaling));
        w[i] = rounded<T>(__fmul_rn(a[i], load_element(problem.normalized, token, slot)));
    }
    for (int k = 0; k < problem.top_k; k++)
        if (of_slot(slots.id, k) >= 0)
            c = __fadd_rn(c, of_slot(w, k));
    c = rounded<T>(c);
    float z = any_live(slots) ? load_element(problem.denominator, token, 0) : 1.0f;
#pragma unroll
    for (int i = 0; i < SLOTS_A_LANE; i++)
        u[i] = rounded<T>(__fdiv_rn(rounded<T>(__fsub_rn(a[i], c)), z));
    __syncwarp();
    unsigned chosen = 0; /* bit j: expert lane + 32 j */
    for (int k = 0; k < problem.top_k; k++) {
        int id = of_slot(slots.id, k);
        float value = of_slot(u, k);
        if (id >= 0 && id % WARP == lane) {
            d[id] = rounded<T>(__fadd_rn(d[id], value));
            chosen |= 1u << id / WARP;
        }
    }
    for (int e = lane; e < problem.logits_stride; e += WARP) {
        float g = 0;
        if (chosen >> e / WARP & 1) {
            float s = load_element(problem.scores, token, e);
            g = __fmul_rn(rounded<T>(__fmul_rn(d[e], s)), rounded<T>(__fsub_rn(1.0f, s)));
        }
        store_logit(problem, token, e, from_float<T>(g));
    }
}

template <typename T> __global__ void logits_kernel(const __grid_constant__ problem problem) {
    extern __shared__ float shared[];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    int64_t token = static_cast<int64_t>(blockIdx.x) * warps + warp;
    if (token >= problem.tokens)
        return;
    float *d = shared + warp * problem.experts;
    if (problem.operation == MOER_SOFTMAX_TOPK_BACKWARD)
        softmax_row<T>(problem, token, lane, d);
    else
        sigmoid_row<T>(problem, token, lane, d);
}

} // namespace

cudaError_t launch_logits(const problem &problem, cudaStream_t stream) {
    constexpr int warps = 4; /* 1024 experts take 16 KB of shared memory */
    size_t shared = warps * static_cast<size_t>(problem.experts) * sizeof(float);
    auto blocks = static_cast<unsigned>((problem.tokens + warps - 1) / warps);
    switch (problem.weight.type) {
    case BF16:
        logits_kernel<__nv_bfloat16><<<blocks, warps * WARP, shared, stream>>>(problem);
        break;
    case F16:
        logits_kernel<__half><<<blocks, warps * WARP, shared, stream>>>(problem);
        break;
    case F32:
        logits_kernel<float><<<blocks, warps * WARP, shared, stream>>>(problem);
        break;
    }
    return cudaGetLastError();
}
