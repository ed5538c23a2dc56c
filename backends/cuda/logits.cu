/* SPDX-License-Identifier: Apache-2.0 */
/* G, the gradient of the router's logits: a warp a token, for every architecture and as the first kernel of every path.
 *
 * The formulas are the public header's. A lane keeps four neighbouring experts of every 128 in registers, and every
 * 32nd slot; slots are handed round in ascending k, so that repeated ids add up in one order. Softmax sums in float64
 * what cancels (the dot product of a row, whose terms are exact in it): a few hundred operations a token, which the
 * loads hide. Sigmoid rounds to T after each step, as the model does; the _rn intrinsics keep the compiler from fusing.
 *
 * Latency decides: all loads that need no id are issued first, then the gathers of m and p, then the result is stored.
 * Bytes, softmax, a token: 4 E of p, 2 E of d, about 64 a slot of m's gather, 2 E written. */
#include "common.cuh"

namespace {

enum { WARP = 32, MOST_SLOTS = 64, SLOTS_A_LANE = MOST_SLOTS / WARP, GROUP = 4, GROUP_STRIDE = GROUP * WARP };
constexpr unsigned ALL_LANES = 0xffffffffu;

/* Expert i of a lane's registers. */
__device__ __forceinline__ int expert_of(int lane, int i) {
    return i / GROUP * GROUP_STRIDE + lane * GROUP + i % GROUP;
}

/* A lane's part of a row; beyond the row it is zero. vector: rows begin at multiples of a group, and E is one. */
template <typename V, int EXPERTS>
__device__ __forceinline__ void load_row(float (&values)[EXPERTS], const rows &rows, int64_t token, int experts,
                                         int lane, bool vector) {
    struct alignas(GROUP * sizeof(V)) group {
        V value[GROUP];
    };
    const V *row = reinterpret_cast<const V *>(rows.data) + token * rows.stride;
#pragma unroll
    for (int i = 0; i < EXPERTS; i += GROUP) {
        int expert = expert_of(lane, i);
        if (vector && expert < experts) {
            group four = *reinterpret_cast<const group *>(row + expert);
#pragma unroll
            for (int j = 0; j < GROUP; j++)
                values[i + j] = to_float(four.value[j]);
        } else {
#pragma unroll
            for (int j = 0; j < GROUP; j++)
                values[i + j] = expert + j < experts ? to_float(row[expert + j]) : 0.0f;
        }
    }
}

template <typename V>
bool in_groups(const rows &rows, int experts) {
    return experts % GROUP == 0 && rows.stride % GROUP == 0 &&
           reinterpret_cast<uintptr_t>(rows.data) % (GROUP * sizeof(V)) == 0;
}

/* Stores a lane's part of a row of G, which ends in zeros, and of grad_logits. */
template <typename T, int EXPERTS>
__device__ __forceinline__ void store_row(const problem &problem, int64_t token, int lane, const T (&g)[EXPERTS]) {
    struct alignas(GROUP * sizeof(T)) group {
        T value[GROUP];
    };
    T *row = reinterpret_cast<T *>(problem.logits) + token * problem.logits_stride;
#pragma unroll
    for (int i = 0; i < EXPERTS; i += GROUP) {
        int expert = expert_of(lane, i);
        group four;
#pragma unroll
        for (int j = 0; j < GROUP; j++)
            four.value[j] = g[i + j];
        if (expert < problem.logits_stride)
            *reinterpret_cast<group *>(row + expert) = four;
    }
    if (!problem.grad_logits.data)
        return;
#pragma unroll
    for (int i = 0; i < EXPERTS; i++)
        if (expert_of(lane, i) < problem.experts)
            store_element(problem.grad_logits, token, expert_of(lane, i), to_float(g[i]));
}

/* A token's slots: lane l has slots l and l + 32. Empty and invalid slots are -1; the invalid are counted. */
struct slots {
    int id[SLOTS_A_LANE];
};

__device__ __forceinline__ slots load_slots(const problem &problem, int64_t token, int lane) {
    slots result;
    const char *row = problem.ids + token * problem.ids_stride;
#pragma unroll
    for (int i = 0; i < SLOTS_A_LANE; i++) {
        int slot = lane + i * WARP;
        int64_t id = -1;
        if (slot < problem.top_k)
            id = problem.wide_ids ? reinterpret_cast<const int64_t *>(row)[slot]
                                  : reinterpret_cast<const int32_t *>(row)[slot];
        bool valid = id >= 0 && id < problem.experts;
        if (!valid && id != -1 && problem.invalid_ids)
            atomicAdd(problem.invalid_ids, 1);
        result.id[i] = valid ? static_cast<int>(id) : -1;
    }
    return result;
}

template <typename T>
__device__ __forceinline__ void load_of_slots(float (&values)[SLOTS_A_LANE], const rows &rows, int64_t token, int lane,
                                              int top_k) {
    const T *row = reinterpret_cast<const T *>(rows.data) + token * rows.stride;
#pragma unroll
    for (int i = 0; i < SLOTS_A_LANE; i++)
        values[i] = lane + i * WARP < top_k ? to_float(row[lane + i * WARP]) : 0.0f;
}

__device__ __forceinline__ bool any_live(const slots &slots) {
    return __any_sync(ALL_LANES, slots.id[0] >= 0 || slots.id[1] >= 0);
}

/* The value of slot k, from the lane that has it. */
template <typename V>
__device__ __forceinline__ V of_slot(const V (&values)[SLOTS_A_LANE], int k) {
    return __shfl_sync(ALL_LANES, k < WARP ? values[0] : values[1], k % WARP);
}

__device__ __forceinline__ double warp_sum(double value) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2)
        value += __shfl_xor_sync(ALL_LANES, value, offset);
    return value;
}

/* v of the lane's slots: the gradients of the chosen probabilities. */
template <typename T>
__device__ __forceinline__ void softmax_slots(const problem &problem, int64_t token, int lane, const slots &slots,
                                              const float (&g)[SLOTS_A_LANE], float z, float (&v)[SLOTS_A_LANE]) {
    bool normalized = problem.sum.data != nullptr;
    const float *p = reinterpret_cast<const float *>(problem.probs.data) + token * problem.probs.stride;
    float q[SLOTS_A_LANE], m[SLOTS_A_LANE];
#pragma unroll
    for (int i = 0; i < SLOTS_A_LANE; i++) {
        int64_t id = slots.id[i], slot = lane + i * WARP;
        m[i] = q[i] = 0;
        if (id >= 0 && problem.mask.data)
            m[i] = to_float(reinterpret_cast<const T *>(
                problem.mask.data)[id * problem.mask_expert + slot * problem.mask_slot + token * problem.mask_token]);
        if (id >= 0 && normalized)
            q[i] = p[id];
    }
    double c = 0;
    if (normalized) {
#pragma unroll
        for (int i = 0; i < SLOTS_A_LANE; i++)
            if (slots.id[i] >= 0)
                c += static_cast<double>(g[i]) * (static_cast<double>(q[i]) / static_cast<double>(z));
        c = warp_sum(c);
    }
#pragma unroll
    for (int i = 0; i < SLOTS_A_LANE; i++) {
        double own = normalized ? (static_cast<double>(g[i]) - c) / static_cast<double>(z) : static_cast<double>(g[i]);
        v[i] = slots.id[i] >= 0 ? static_cast<float>(own + static_cast<double>(m[i])) : 0.0f;
    }
}

template <typename T, int EXPERTS>
__device__ __forceinline__ void softmax_row(const problem &problem, int64_t token, int lane, bool vector) {
    float p[EXPERTS], d[EXPERTS], g[SLOTS_A_LANE], v[SLOTS_A_LANE];
    slots slots = load_slots(problem, token, lane);
    load_of_slots<T>(g, problem.incoming, token, lane, problem.top_k);
    load_row<float>(p, problem.probs, token, problem.experts, lane, vector);
    if (problem.direct.data)
        load_row<T>(d, problem.direct, token, problem.experts, lane, vector);
    else
#pragma unroll
        for (int i = 0; i < EXPERTS; i++)
            d[i] = 0;
    float z = 1;
    if (problem.sum.data && any_live(slots))
        z = *(reinterpret_cast<const float *>(problem.sum.data) + token * problem.sum.stride);
    softmax_slots<T>(problem, token, lane, slots, g, z, v);
    for (int k = 0; k < problem.top_k; k++) {
        int id = of_slot(slots.id, k);
        float value = of_slot(v, k);
#pragma unroll
        for (int i = 0; i < EXPERTS; i++)
            if (id == expert_of(lane, i))
                d[i] += value;
    }
    double dot = 0;
#pragma unroll
    for (int i = 0; i < EXPERTS; i++)
        dot += static_cast<double>(d[i]) * static_cast<double>(p[i]);
    dot = warp_sum(dot);
    T result[EXPERTS];
#pragma unroll
    for (int i = 0; i < EXPERTS; i++) {
        float g = static_cast<float>(static_cast<double>(p[i]) * (static_cast<double>(d[i]) - dot));
        result[i] = from_float<T>(expert_of(lane, i) < problem.experts ? g : 0.0f);
    }
    store_row(problem, token, lane, result);
}

template <typename T>
__device__ __forceinline__ float rounded(float value) {
    return to_float(from_float<T>(value));
}

template <typename T, int EXPERTS>
__device__ __forceinline__ void sigmoid_row(const problem &problem, int64_t token, int lane, bool vector) {
    float s[EXPERTS], d[EXPERTS], a[SLOTS_A_LANE], w[SLOTS_A_LANE], u[SLOTS_A_LANE], c = 0;
    slots slots = load_slots(problem, token, lane);
    load_of_slots<T>(a, problem.incoming, token, lane, problem.top_k);
    load_of_slots<T>(w, problem.normalized, token, lane, problem.top_k);
    load_row<T>(s, problem.scores, token, problem.experts, lane, vector);
    float z = 1;
    if (any_live(slots))
        z = to_float(*(reinterpret_cast<const T *>(problem.denominator.data) + token * problem.denominator.stride));
#pragma unroll
    for (int i = 0; i < SLOTS_A_LANE; i++) {
        a[i] = rounded<T>(__fmul_rn(a[i], problem.scaling));
        w[i] = rounded<T>(__fmul_rn(a[i], w[i]));
    }
    for (int k = 0; k < problem.top_k; k++) {
        float term = of_slot(w, k);
        if (of_slot(slots.id, k) >= 0)
            c = __fadd_rn(c, term);
    }
    c = rounded<T>(c);
#pragma unroll
    for (int i = 0; i < SLOTS_A_LANE; i++)
        u[i] = rounded<T>(__fdiv_rn(rounded<T>(__fsub_rn(a[i], c)), z));
    unsigned chosen = 0; /* bit i: the lane's expert i */
#pragma unroll
    for (int i = 0; i < EXPERTS; i++)
        d[i] = 0;
    for (int k = 0; k < problem.top_k; k++) {
        int id = of_slot(slots.id, k);
        float value = of_slot(u, k);
#pragma unroll
        for (int i = 0; i < EXPERTS; i++)
            if (id == expert_of(lane, i)) {
                d[i] = rounded<T>(__fadd_rn(d[i], value));
                chosen |= 1u << i;
            }
    }
    T result[EXPERTS];
#pragma unroll
    for (int i = 0; i < EXPERTS; i++) {
        float g = __fmul_rn(rounded<T>(__fmul_rn(d[i], s[i])), rounded<T>(__fsub_rn(1.0f, s[i])));
        result[i] = from_float<T>(chosen >> i & 1 ? g : 0.0f);
    }
    store_row(problem, token, lane, result);
}

enum { WARPS = 4 };

template <typename T, int EXPERTS, bool SOFTMAX>
__global__ void __launch_bounds__(WARPS *WARP) logits_kernel(const __grid_constant__ problem problem, bool vector) {
    allow_next_kernel();
    int lane = threadIdx.x % WARP;
    int64_t token = static_cast<int64_t>(blockIdx.x) * WARPS + threadIdx.x / WARP;
    if (token >= problem.tokens)
        return;
    if (SOFTMAX)
        softmax_row<T, EXPERTS>(problem, token, lane, vector);
    else
        sigmoid_row<T, EXPERTS>(problem, token, lane, vector);
}

template <typename T, int EXPERTS>
void launch_for(const problem &problem, cudaStream_t stream) {
    auto blocks = static_cast<unsigned>((problem.tokens + WARPS - 1) / WARPS);
    if (problem.operation == MOER_SOFTMAX_TOPK_BACKWARD) {
        bool vector = in_groups<float>(problem.probs, problem.experts) &&
                      (!problem.direct.data || in_groups<T>(problem.direct, problem.experts));
        logits_kernel<T, EXPERTS, true><<<blocks, WARPS * WARP, 0, stream>>>(problem, vector);
    } else {
        bool vector = in_groups<T>(problem.scores, problem.experts);
        logits_kernel<T, EXPERTS, false><<<blocks, WARPS * WARP, 0, stream>>>(problem, vector);
    }
}

template <typename T>
void launch(const problem &problem, cudaStream_t stream) {
    if (problem.experts <= GROUP_STRIDE)
        launch_for<T, GROUP>(problem, stream);
    else if (problem.experts <= 2 * GROUP_STRIDE)
        launch_for<T, 2 * GROUP>(problem, stream);
    else if (problem.experts <= 4 * GROUP_STRIDE)
        launch_for<T, 4 * GROUP>(problem, stream);
    else
        launch_for<T, 8 * GROUP>(problem, stream); /* 1024 */
}

} // namespace

cudaError_t launch_logits(const problem &problem, cudaStream_t stream) {
    switch (problem.weight.type) {
    case BF16:
        launch<__nv_bfloat16>(problem, stream);
        break;
    case F16:
        launch<__half>(problem, stream);
        break;
    case F32:
        launch<float>(problem, stream);
        break;
    }
    return cudaGetLastError();
}
