/* SPDX-License-Identifier: Apache-2.0 */
/* G, the gradient of the router's logits: a warp a token, for every architecture and as the first kernel of every path.
 *
 * The formulas are the public header's. A lane has every 32nd slot, and four neighbouring experts of every 128; a row
 * in shared memory is where slots meet experts, in ascending k, so that repeated ids add up in one order. Softmax sums
 * the dot product of a row in float64, since that is what cancels. Sigmoid rounds to T after each step, as the model
 * does; the _rn intrinsics keep the compiler from fusing.
 *
 * Latency decides a small batch: all loads that need no id are issued first, then the gathers of m and p. A large one
 * is decided by bytes and, nearly, by the instructions of a token. Bytes, softmax, a token: 4 E of p, 2 E of d, about
 * 64 a slot of m's gather, 2 E written. */
#include "tiles.cuh"

namespace {

enum { GROUP = 4, GROUP_STRIDE = GROUP * WARP, MOST_RESIDENT = 64 /* warps a multiprocessor */ };
constexpr unsigned ALL_LANES = 0xffffffffu;

/* Expert i of a lane's registers. */
__device__ __forceinline__ int expert_of(int lane, int i) {
    return i / GROUP * GROUP_STRIDE + lane * GROUP + i % GROUP;
}

/* A lane's experts as they lie in memory, in whole registers until all loads are under way: to take them apart would
 * wait for them. */
template <typename V, int EXPERTS>
struct lane_row {
    static constexpr int GROUP_WORDS = GROUP * sizeof(V) / 4, PER_WORD = 4 / sizeof(V);
    struct alignas(4 * GROUP_WORDS) group {
        uint32_t words[GROUP_WORDS];
    } groups[EXPERTS / GROUP];

    __device__ __forceinline__ float operator[](int i) const {
        const uint32_t word = groups[i / GROUP].words[i % GROUP / PER_WORD] >> i % PER_WORD * 16;
        V value;
        memcpy(&value, &word, sizeof value);
        return to_float(value);
    }
    __device__ __forceinline__ void clear() {
        memset(groups, 0, sizeof groups);
    }
    /* Once, where it was zero. */
    __device__ __forceinline__ void set(int i, V value) {
        uint32_t word = 0;
        memcpy(&word, &value, sizeof value);
        groups[i / GROUP].words[i % GROUP / PER_WORD] |= word << i % PER_WORD * 16;
    }
};

/* A lane's part of a row; beyond the row it is zero. vector: rows begin at multiples of a group, and E is one. */
template <typename V, int EXPERTS>
__device__ __forceinline__ void load_row(lane_row<V, EXPERTS> &result, const rows &rows, int64_t token, int experts,
                                         int lane, bool vector) {
    const V *row = reinterpret_cast<const V *>(rows.data) + token * rows.stride;
    result.clear();
#pragma unroll
    for (int i = 0; i < EXPERTS / GROUP; i++) {
        const int expert = expert_of(lane, i * GROUP);
        if (vector) {
            if (expert < experts)
                result.groups[i] = *reinterpret_cast<const typename lane_row<V, EXPERTS>::group *>(row + expert);
        } else {
#pragma unroll
            for (int j = 0; j < GROUP; j++)
                if (expert + j < experts)
                    result.set(i * GROUP + j, row[expert + j]);
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
__device__ __forceinline__ void store_row(const problem &problem, int64_t token, int lane,
                                          const lane_row<T, EXPERTS> &g) {
    const int64_t stride = problem.logits_stride, first = problem.fused ? token / TILE_TOKENS * TILE_TOKENS : token;
    char *rows = problem.logits + first * stride * sizeof(T);
#pragma unroll
    for (int i = 0; i < EXPERTS; i += GROUP) {
        const int expert = expert_of(lane, i);
        const int at = problem.fused ? swizzled<T, TILE_TOKENS, A_PANEL>(static_cast<int>(token % TILE_TOKENS), expert)
                                     : expert * static_cast<int>(sizeof(T));
        if (expert < stride)
            *reinterpret_cast<typename lane_row<T, EXPERTS>::group *>(rows + at) = g.groups[i / GROUP];
    }
    if (token >= problem.tokens || !problem.grad_logits.data)
        return;
#pragma unroll
    for (int i = 0; i < EXPERTS; i++)
        if (expert_of(lane, i) < problem.experts)
            store_element(problem.grad_logits, token, expert_of(lane, i), g[i]);
}

/* A token's slots: lane l has slots l and, where there are more than 32, l + 32. Empty and invalid slots are -1; the
 * invalid are counted. */
template <int SLOTS>
struct raw_ids {
    int low[SLOTS], high[SLOTS];
};

template <int SLOTS>
__device__ __forceinline__ void load_ids(raw_ids<SLOTS> &raw, const problem &problem, int64_t token, int lane) {
    const char *row = problem.ids + token * problem.ids_stride;
#pragma unroll
    for (int i = 0; i < SLOTS; i++) {
        const int slot = lane + i * WARP;
        raw.low[i] = raw.high[i] = -1;
        if (slot < problem.top_k && problem.wide_ids) {
            const int2 id = reinterpret_cast<const int2 *>(row)[slot];
            raw.low[i] = id.x, raw.high[i] = id.y;
        } else if (slot < problem.top_k) {
            raw.low[i] = reinterpret_cast<const int *>(row)[slot];
        }
    }
}

template <int SLOTS>
__device__ __forceinline__ void check_ids(int (&ids)[SLOTS], const raw_ids<SLOTS> &raw, const problem &problem) {
#pragma unroll
    for (int i = 0; i < SLOTS; i++) {
        const int high = problem.wide_ids ? raw.high[i] : raw.low[i] < 0 ? -1 : 0;
        const bool valid = high == 0 && raw.low[i] >= 0 && raw.low[i] < problem.experts;
        if (!valid && !(high == -1 && raw.low[i] == -1) && problem.invalid_ids)
            atomicAdd(problem.invalid_ids, 1);
        ids[i] = valid ? raw.low[i] : -1;
    }
}

template <typename T, int SLOTS>
__device__ __forceinline__ void load_of_slots(T (&values)[SLOTS], const rows &rows, int64_t token, int lane,
                                              int top_k) {
    const T *row = reinterpret_cast<const T *>(rows.data) + token * rows.stride;
    memset(values, 0, sizeof values);
#pragma unroll
    for (int i = 0; i < SLOTS; i++)
        if (lane + i * WARP < top_k)
            values[i] = row[lane + i * WARP];
}

template <typename V>
__device__ __forceinline__ V warp_sum(V value) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2)
        value += __shfl_xor_sync(ALL_LANES, value, offset);
    return value;
}

/* Whether no id repeats among 32 slots: a lane finds its own number where it wrote it. */
template <int SLOTS>
__device__ __forceinline__ bool all_distinct(float *row, const int (&ids)[SLOTS], int lane) {
    int *marks = reinterpret_cast<int *>(row);
    bool own = true;
#pragma unroll
    for (int i = 0; i < SLOTS; i++) {
        if (ids[i] >= 0)
            marks[ids[i]] = lane;
        __syncwarp();
        own = own && (ids[i] < 0 || marks[ids[i]] == lane);
        __syncwarp();
    }
    return __all_sync(ALL_LANES, own);
}

/* For each live slot, in ascending order where ids repeat: row[id] = add(row[id], value). Before and after, the warp
 * sees what its lanes have written. */
template <int SLOTS, typename Add>
__device__ __forceinline__ void scatter(float *row, const int (&ids)[SLOTS], const float (&values)[SLOTS],
                                        bool distinct, int lane, Add add) {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < SLOTS; i++)
        if (distinct) {
            if (ids[i] >= 0)
                row[ids[i]] = add(row[ids[i]], values[i]);
            __syncwarp();
        } else {
#pragma unroll 1
            for (int turn = 0; turn < WARP; turn++) {
                if (turn == lane && ids[i] >= 0)
                    row[ids[i]] = add(row[ids[i]], values[i]);
                __syncwarp();
            }
        }
}

/* A lane's experts of a row in shared memory. */
template <typename V, int EXPERTS>
__device__ __forceinline__ void to_shared(float *row, const lane_row<V, EXPERTS> &values, int lane) {
#pragma unroll
    for (int i = 0; i < EXPERTS; i += GROUP)
        *reinterpret_cast<float4 *>(row + expert_of(lane, i)) =
            make_float4(values[i], values[i + 1], values[i + 2], values[i + 3]);
}

template <int EXPERTS>
__device__ __forceinline__ void from_shared(float (&values)[EXPERTS], const float *row, int lane) {
#pragma unroll
    for (int i = 0; i < EXPERTS; i += GROUP) {
        const float4 four = *reinterpret_cast<const float4 *>(row + expert_of(lane, i));
        values[i] = four.x, values[i + 1] = four.y, values[i + 2] = four.z, values[i + 3] = four.w;
    }
}

/* v of the lane's slots: the gradients of the chosen probabilities. */
template <typename T, int SLOTS>
__device__ __forceinline__ void softmax_slots(const problem &problem, int64_t token, int lane, const int (&ids)[SLOTS],
                                              const T (&incoming)[SLOTS], float z, float (&v)[SLOTS]) {
    const bool normalized = problem.sum.data != nullptr;
    const float *p = reinterpret_cast<const float *>(problem.probs.data) + token * problem.probs.stride;
    float q[SLOTS], g[SLOTS], c = 0;
    T m[SLOTS];
    memset(m, 0, sizeof m);
#pragma unroll
    for (int i = 0; i < SLOTS; i++) {
        const int64_t id = ids[i], slot = lane + i * WARP;
        q[i] = 0;
        if (id >= 0 && problem.mask.data)
            m[i] = reinterpret_cast<const T *>(
                problem.mask.data)[id * problem.mask_expert + slot * problem.mask_slot + token * problem.mask_token];
        if (id >= 0 && normalized)
            q[i] = p[id];
    }
#pragma unroll
    for (int i = 0; i < SLOTS; i++)
        g[i] = to_float(incoming[i]);
    if (normalized) {
#pragma unroll
        for (int i = 0; i < SLOTS; i++)
            if (ids[i] >= 0)
                c = __fadd_rn(c, __fmul_rn(g[i], __fdiv_rn(q[i], z)));
        c = warp_sum(c);
    }
#pragma unroll
    for (int i = 0; i < SLOTS; i++)
        v[i] = __fadd_rn(normalized ? __fdiv_rn(__fsub_rn(g[i], c), z) : g[i], to_float(m[i]));
}

template <typename T, int EXPERTS, int SLOTS>
__device__ __forceinline__ void softmax_row(const problem &problem, int64_t token, int lane, bool vector, float *row) {
    raw_ids<SLOTS> raw;
    lane_row<float, EXPERTS> p;
    lane_row<T, EXPERTS> direct, result;
    T g[SLOTS];
    float d[EXPERTS], v[SLOTS], z = 1;
    int ids[SLOTS];
    load_ids(raw, problem, token, lane);
    load_row(p, problem.probs, token, problem.experts, lane, vector);
    direct.clear();
    if (problem.direct.data)
        load_row(direct, problem.direct, token, problem.experts, lane, vector);
    load_of_slots(g, problem.incoming, token, lane, problem.top_k);
    if (problem.sum.data)
        z = *(reinterpret_cast<const float *>(problem.sum.data) + token * problem.sum.stride);
    check_ids(ids, raw, problem);
    const bool distinct = all_distinct(row, ids, lane);
    softmax_slots(problem, token, lane, ids, g, z, v);
    to_shared(row, direct, lane);
    scatter(row, ids, v, distinct, lane, [](float sum, float value) { return __fadd_rn(sum, value); });
    from_shared(d, row, lane);
    double dot = 0;
#pragma unroll
    for (int i = 0; i < EXPERTS; i++)
        dot += static_cast<double>(d[i]) * static_cast<double>(p[i]);
    const float mean = static_cast<float>(warp_sum(dot));
    result.clear();
#pragma unroll
    for (int i = 0; i < EXPERTS; i++)
        result.set(i,
                   from_float<T>(expert_of(lane, i) < problem.experts ? __fmul_rn(p[i], __fsub_rn(d[i], mean)) : 0.0f));
    store_row(problem, token, lane, result);
}

template <typename T>
__device__ __forceinline__ float rounded(float value) {
    return to_float(from_float<T>(value));
}

/* The chosen experts' G is worked out by their slots' lanes. */
template <typename T, int EXPERTS, int SLOTS>
__device__ __forceinline__ void sigmoid_row(const problem &problem, int64_t token, int lane, bool vector, float *row) {
    raw_ids<SLOTS> raw;
    lane_row<T, EXPERTS> scores, result;
    T g[SLOTS], w[SLOTS], z;
    float s[SLOTS], u[SLOTS], terms[SLOTS], dense[EXPERTS], c = 0;
    int ids[SLOTS];
    load_ids(raw, problem, token, lane);
    load_row(scores, problem.scores, token, problem.experts, lane, vector);
    load_of_slots(g, problem.incoming, token, lane, problem.top_k);
    load_of_slots(w, problem.normalized, token, lane, problem.top_k);
    z = *(reinterpret_cast<const T *>(problem.denominator.data) + token * problem.denominator.stride);
    check_ids(ids, raw, problem);
    const bool distinct = all_distinct(row, ids, lane);
#pragma unroll
    for (int i = 0; i < SLOTS; i++) {
        u[i] = rounded<T>(__fmul_rn(to_float(g[i]), problem.scaling));
        terms[i] = ids[i] >= 0 ? rounded<T>(__fmul_rn(u[i], to_float(w[i]))) : 0.0f;
    }
    /* In ascending k; an empty slot's zero changes nothing. */
    for (int k = 0; k < problem.top_k; k++)
        c = __fadd_rn(c, __shfl_sync(ALL_LANES, k < WARP ? terms[0] : terms[SLOTS - 1], k % WARP));
    c = rounded<T>(c);
    to_shared(row, scores, lane);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < SLOTS; i++) {
        u[i] = rounded<T>(__fdiv_rn(rounded<T>(__fsub_rn(u[i], c)), to_float(z)));
        s[i] = ids[i] >= 0 ? row[ids[i]] : 0.0f;
    }
    __syncwarp();
    result.clear();
    to_shared(row, result, lane);
    scatter(row, ids, u, distinct, lane, [](float sum, float value) { return rounded<T>(__fadd_rn(sum, value)); });
#pragma unroll
    for (int i = 0; i < SLOTS; i++)
        if (ids[i] >= 0)
            u[i] = __fmul_rn(rounded<T>(__fmul_rn(row[ids[i]], s[i])), rounded<T>(__fsub_rn(1.0f, s[i])));
    __syncwarp();
#pragma unroll
    for (int i = 0; i < SLOTS; i++)
        if (ids[i] >= 0)
            row[ids[i]] = u[i];
    __syncwarp();
    from_shared(dense, row, lane);
    result.clear();
#pragma unroll
    for (int i = 0; i < EXPERTS; i++)
        result.set(i, from_float<T>(dense[i]));
    store_row(problem, token, lane, result);
}

/* Rows of more than 512 experts leave room for fewer warps. */
template <int EXPERTS>
constexpr int warps_of = EXPERTS > 16 ? 4 : 8;

template <typename T, int EXPERTS, int SLOTS, bool SOFTMAX>
__global__ void __launch_bounds__(warps_of<EXPERTS> *WARP)
    logits_kernel(const __grid_constant__ problem problem, bool vector) {
    __shared__ __align__(16) float rows[warps_of<EXPERTS>][EXPERTS * WARP];
    allow_next_kernel();
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int64_t token = static_cast<int64_t>(blockIdx.x) * warps_of<EXPERTS> + warp;
    if (token >= problem.tokens) {
        lane_row<T, EXPERTS> zeros;
        zeros.clear();
        if (problem.fused && token < divide_up(problem.tokens, TILE_TOKENS) * TILE_TOKENS)
            store_row(problem, token, lane, zeros);
        return;
    }
    if (SOFTMAX)
        softmax_row<T, EXPERTS, SLOTS>(problem, token, lane, vector, rows[warp]);
    else
        sigmoid_row<T, EXPERTS, SLOTS>(problem, token, lane, vector, rows[warp]);
}

template <typename T, int EXPERTS, int SLOTS, bool SOFTMAX>
cudaError_t launch_with(const problem &problem, bool vector, cudaStream_t stream) {
    auto kernel = logits_kernel<T, EXPERTS, SLOTS, SOFTMAX>;
    /* The products want much shared memory and start beside this kernel only where it is set aside already; a large
     * batch does better with the cache. */
    const bool few = problem.tokens <= MOST_RESIDENT / 2 * attribute(cudaDevAttrMultiProcessorCount);
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                             few ? cudaSharedmemCarveoutMaxShared : cudaSharedmemCarveoutDefault);
    if (error != cudaSuccess)
        return error;
    const int64_t tokens = divide_up(problem.tokens, TILE_TOKENS) * TILE_TOKENS; /* of whole tiles */
    const int64_t blocks = divide_up(problem.fused ? tokens : problem.tokens, warps_of<EXPERTS>);
    kernel<<<static_cast<unsigned>(blocks), warps_of<EXPERTS> * WARP, 0, stream>>>(problem, vector);
    return cudaGetLastError();
}

template <typename T, int EXPERTS, int SLOTS>
cudaError_t launch_of(const problem &problem, cudaStream_t stream) {
    if (problem.operation == MOER_SIGMOID_TOPK_BACKWARD)
        return launch_with<T, EXPERTS, SLOTS, false>(problem, in_groups<T>(problem.scores, problem.experts), stream);
    return launch_with<T, EXPERTS, SLOTS, true>(
        problem,
        in_groups<float>(problem.probs, problem.experts) &&
            (!problem.direct.data || in_groups<T>(problem.direct, problem.experts)),
        stream);
}

template <typename T, int EXPERTS>
cudaError_t launch_for(const problem &problem, cudaStream_t stream) {
    return problem.top_k <= WARP ? launch_of<T, EXPERTS, 1>(problem, stream)
                                 : launch_of<T, EXPERTS, 2>(problem, stream); /* 64 */
}

template <typename T>
cudaError_t launch(const problem &problem, cudaStream_t stream) {
    if (problem.experts <= GROUP_STRIDE)
        return launch_for<T, GROUP>(problem, stream);
    if (problem.experts <= 2 * GROUP_STRIDE)
        return launch_for<T, 2 * GROUP>(problem, stream);
    if (problem.experts <= 4 * GROUP_STRIDE)
        return launch_for<T, 4 * GROUP>(problem, stream);
    return launch_for<T, 8 * GROUP>(problem, stream); /* 1024 */
}

} // namespace

cudaError_t launch_logits(const problem &problem, cudaStream_t stream) {
    switch (problem.weight.type) {
    case BF16:
        return launch<__nv_bfloat16>(problem, stream);
    case F16:
        return launch<__half>(problem, stream);
    default:
        return launch<float>(problem, stream);
    }
}
