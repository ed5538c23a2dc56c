/* SPDX-License-Identifier: Apache-2.0 */
/* G, the gradient of the router's logits: a warp a token, or two where a batch is large, for every architecture and as
 * the first kernel of most paths.
 *
 * The formulas are the public header's. A lane of 32 has every 32nd slot, and four neighbouring experts of every 128; a
 * row in shared memory is where slots meet experts, in ascending k, so that repeated ids add up in one order. Softmax
 * sums the dot product of a row in float64, since that is what cancels. Sigmoid rounds to T after each step, as the
 * model does; the _rn intrinsics keep the compiler from fusing.
 *
 * Latency decides a small batch: all loads that need no id are issued first, then the gathers of m and p, or of the
 * scores. A large one is decided by bytes and, nearly, by the instructions of a token. Bytes, softmax, a token: 4 E of
 * p, 2 E of d, about 64 a slot of m's gather, 2 E written; sigmoid, about 64 a slot of the scores', 2 E written. */
#include "sigmoid.cuh"
#include "tiles.cuh"

#include <type_traits>

/* Named: nvcc would name an anonymous one after the file's path, and other folders would give other bytes. */
namespace moer_logits {

enum { GROUP = 4, MOST_RESIDENT = 64 /* warps a multiprocessor */, MOST_NEAR = 1 << 28 };
constexpr unsigned ALL_LANES = 0xffffffffu;

/* A batch is plain if its rows can be loaded in groups, it has at most 32 slots, 32 bits do for its tokens and strides,
 * and grad_logits are not wanted: the loads of a small one wait for instructions too, most of all where those are not
 * the next in memory. Other batches have room for 64 slots. PAIRS: plain, with 16 lanes a token, for large batches of
 * few slots: most instructions are the same whatever a lane's experts are. */
enum way { ANY, PLAIN, PAIRS };
template <way WAY>
constexpr int slots_of = WAY == ANY ? 2 : 1;
template <way WAY>
constexpr int lanes_of = WAY == PAIRS ? WARP / 2 : WARP;
template <way WAY>
using token_of = std::conditional_t<WAY == ANY, int64_t, uint32_t>;

/* Expert i of a lane's registers. */
template <int LANES>
__device__ __forceinline__ int expert_of(int lane, int i) {
    return i / GROUP * GROUP * LANES + lane * GROUP + i % GROUP;
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

/* Has a pointer to global memory worked out here, whether or not it will be used: a parameter that is read under a
 * condition is waited for longer. */
template <typename V>
__device__ __forceinline__ void settle(const V *&pointer) {
    keep_here(pointer);
    __builtin_assume(__isGlobal(pointer));
}

/* What lies so many strides on. Where 32 bits do for all, a batch is plain, and its tokens are of such a type. */
template <typename V>
__device__ __forceinline__ const V *strides_on(const void *first, int64_t index, int64_t stride) {
    return reinterpret_cast<const V *>(static_cast<const char *>(first) + index * stride);
}

template <typename V>
__device__ __forceinline__ const V *strides_on(const void *first, uint32_t index, int64_t stride) {
    const uint64_t offset = static_cast<uint64_t>(index) * static_cast<uint32_t>(stride);
    return reinterpret_cast<const V *>(static_cast<const char *>(first) + offset);
}

/* A lane's part of a row; beyond the row it is zero. VECTOR: rows begin at multiples of a group, and E is one. */
template <int LANES, bool VECTOR, typename V, int EXPERTS, typename Token>
__device__ __forceinline__ void load_row(lane_row<V, EXPERTS> &result, const input &rows, Token token, int experts,
                                         int lane) {
    const V *row = strides_on<V>(rows.data, token, rows.stride);
    settle(row);
    result.clear();
#pragma unroll
    for (int i = 0; i < EXPERTS; i += VECTOR ? GROUP : 1) {
        const int expert = expert_of<LANES>(lane, i);
        if (expert < experts && VECTOR)
            result.groups[i / GROUP] = *reinterpret_cast<const typename lane_row<V, EXPERTS>::group *>(row + expert);
        else if (expert < experts)
            result.set(i, row[expert]);
    }
}

template <typename V>
bool in_groups(const input &rows, int experts) {
    return experts % GROUP == 0 && rows.stride % (GROUP * sizeof(V)) == 0 &&
           reinterpret_cast<uintptr_t>(rows.data) % (GROUP * sizeof(V)) == 0;
}

/* Rows of G, with those that fill up the last tiles. */
template <typename Token>
__host__ __device__ __forceinline__ Token rows_of_logits(bool fused, Token tokens) {
    return fused ? (tokens + PADDED_TOKENS - 1) / PADDED_TOKENS * PADDED_TOKENS : tokens;
}

/* Stores a lane's part of a row of G, which ends in zeros. */
template <int LANES, typename T, int EXPERTS, typename Token>
__device__ __forceinline__ void store_row(const problem &problem, Token token, int lane,
                                          const lane_row<T, EXPERTS> &g) {
    const uint32_t stride = problem.logits_stride;
    using group = typename lane_row<T, EXPERTS>::group;
    if (problem.fused) {
        char *tile = problem.logits + static_cast<uint64_t>(token / TILE_TOKENS) * (TILE_TOKENS * stride * sizeof(T));
#pragma unroll
        for (int i = 0; i < EXPERTS; i += GROUP)
            if (expert_of<LANES>(lane, i) < stride)
                *reinterpret_cast<group *>(
                    tile + swizzled<T, TILE_TOKENS, A_PANEL>(static_cast<int>(token % TILE_TOKENS),
                                                             expert_of<LANES>(lane, i))) = g.groups[i / GROUP];
    } else {
        T *to = reinterpret_cast<T *>(problem.logits) + static_cast<uint64_t>(token) * stride;
#pragma unroll
        for (int i = 0; i < EXPERTS; i += GROUP)
            if (expert_of<LANES>(lane, i) < stride)
                *reinterpret_cast<group *>(to + expert_of<LANES>(lane, i)) = g.groups[i / GROUP];
    }
}

/* A token's slots: a lane has its own and, of more than there are lanes, one as many on. Empty and invalid slots are
 * -1; the invalid are counted. */
template <int SLOTS>
struct raw_ids {
    int low[SLOTS], high[SLOTS];
};

template <int SLOTS, typename Token>
__device__ __forceinline__ void load_ids(raw_ids<SLOTS> &raw, const problem &problem, Token token, int lane,
                                         int top_k) {
    const char *row = strides_on<char>(problem.ids.data, token, problem.ids.stride);
    settle(row);
#pragma unroll
    for (int i = 0; i < SLOTS; i++) {
        const int slot = lane + i * WARP;
        const int *id = reinterpret_cast<const int *>(row + slot * (problem.wide_ids ? 8 : 4));
        raw.low[i] = slot < top_k ? id[0] : -1;
        raw.high[i] = slot < top_k && problem.wide_ids ? id[1] : -1;
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

template <typename T, int SLOTS, typename Token>
__device__ __forceinline__ void load_of_slots(T (&values)[SLOTS], const input &rows, Token token, int lane, int top_k) {
    const T *row = strides_on<T>(rows.data, token, rows.stride);
    settle(row);
    memset(values, 0, sizeof values);
#pragma unroll
    for (int i = 0; i < SLOTS; i++)
        if (lane + i * WARP < top_k)
            values[i] = row[lane + i * WARP];
}

/* Of a token's lanes. */
template <int LANES, typename V>
__device__ __forceinline__ V sum_up(V value) {
#pragma unroll
    for (int offset = LANES / 2; offset > 0; offset /= 2)
        value += __shfl_xor_sync(ALL_LANES, value, offset);
    return value;
}

/* Whether no id repeats among a token's slots, or those of two: a lane finds its own number where it wrote it. */
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
        if (!distinct) {
#pragma unroll 1
            for (int turn = 0; turn < WARP; turn++) {
                if (turn == lane && ids[i] >= 0)
                    row[ids[i]] = add(row[ids[i]], values[i]);
                __syncwarp();
            }
        } else {
            if (ids[i] >= 0)
                row[ids[i]] = add(row[ids[i]], values[i]);
            __syncwarp();
        }
}

/* A lane's experts of a row in shared memory. */
template <int LANES, typename V, int EXPERTS>
__device__ __forceinline__ void to_shared(float *row, const lane_row<V, EXPERTS> &values, int lane) {
#pragma unroll
    for (int i = 0; i < EXPERTS; i += GROUP)
        *reinterpret_cast<float4 *>(row + expert_of<LANES>(lane, i)) =
            make_float4(values[i], values[i + 1], values[i + 2], values[i + 3]);
}

template <int LANES, int EXPERTS>
__device__ __forceinline__ void from_shared(float (&values)[EXPERTS], const float *row, int lane) {
#pragma unroll
    for (int i = 0; i < EXPERTS; i += GROUP) {
        const float4 four = *reinterpret_cast<const float4 *>(row + expert_of<LANES>(lane, i));
        values[i] = four.x, values[i + 1] = four.y, values[i + 2] = four.z, values[i + 3] = four.w;
    }
}

/* A token takes as long as its loads: the gathers of m wait for the ids, and everything that can be done without m is
 * done while they are on their way. */
template <typename T, int EXPERTS, way WAY>
__device__ __forceinline__ void softmax_row(const problem &problem, token_of<WAY> token, int top_k, int lane,
                                            float *row, lane_row<T, EXPERTS> &result) {
    constexpr int SLOTS = slots_of<WAY>, LANES = lanes_of<WAY>;
    const bool normalized = problem.sum.data != nullptr;
    raw_ids<SLOTS> raw;
    lane_row<float, EXPERTS> p;
    lane_row<T, EXPERTS> direct;
    T g[SLOTS], m[SLOTS];
    float d[EXPERTS], q[SLOTS], v[SLOTS], z = 1, c = 0;
    int ids[SLOTS];
    load_ids(raw, problem, token, lane, top_k);
    load_row<LANES, WAY != ANY>(p, problem.probs, token, problem.experts, lane);
    load_row<LANES, WAY != ANY>(direct, problem.direct, token, problem.direct.data ? problem.experts : 0, lane);
    load_of_slots(g, problem.incoming, token, lane, top_k);
    const float *sum = strides_on<float>(problem.sum.data, token, problem.sum.stride);
    settle(sum);
    if (normalized)
        z = *sum;
    const char *mask = strides_on<char>(problem.mask, token, problem.mask_token);
    mask = strides_on<char>(mask, token_of<WAY>(lane), problem.mask_slot);
    settle(mask);
    check_ids(ids, raw, problem);
    /* The gathers go out when the loads have come: to wait for those later would be to wait for both. */
    to_shared<LANES>(row, p, lane);
    __syncwarp();
    memset(m, 0, sizeof m);
#pragma unroll
    for (int i = 0; i < SLOTS; i++)
        if (ids[i] >= 0 && problem.mask)
            m[i] = *strides_on<T>(mask + i * WARP * problem.mask_slot, token_of<WAY>(ids[i]), problem.mask_expert);

#pragma unroll
    for (int i = 0; i < SLOTS; i++)
        q[i] = ids[i] >= 0 ? row[ids[i]] : 0;
    __syncwarp();
    const bool distinct = all_distinct(row, ids, lane);
    to_shared<LANES>(row, direct, lane);
    if (normalized) {
#pragma unroll
        for (int i = 0; i < SLOTS; i++)
            c = __fadd_rn(c, ids[i] >= 0 ? __fmul_rn(to_float(g[i]), __fdiv_rn(q[i], z)) : 0.0f);
        c = sum_up<LANES>(c);
    }
#pragma unroll
    for (int i = 0; i < SLOTS; i++)
        v[i] = normalized ? __fdiv_rn(__fsub_rn(to_float(g[i]), c), z) : to_float(g[i]);
    /* In the same order, whether 32 lanes have them or 16. */
    double dots[2] = {};
#pragma unroll
    for (int i = 0; i < EXPERTS; i++)
        dots[WAY == PAIRS ? i / GROUP % 2 : 0] += static_cast<double>(direct[i]) * static_cast<double>(p[i]);

#pragma unroll
    for (int i = 0; i < SLOTS; i++) {
        v[i] = __fadd_rn(v[i], to_float(m[i]));
        if (ids[i] >= 0)
            dots[0] += static_cast<double>(v[i]) * static_cast<double>(q[i]);
    }
    scatter(row, ids, v, distinct, lane, [](float sum, float value) { return __fadd_rn(sum, value); });
    from_shared<LANES>(d, row, lane);
    const float mean = static_cast<float>(sum_up<LANES>(WAY == PAIRS ? dots[0] + dots[1] : dots[0]));
    result.clear();
#pragma unroll
    for (int i = 0; i < EXPERTS; i++)
        result.set(i, from_float<T>(expert_of<LANES>(lane, i) < problem.experts ? __fmul_rn(p[i], __fsub_rn(d[i], mean))
                                                                                : 0.0f));
}

/* The chosen experts' G is worked out by their slots' lanes. */
template <typename T, int EXPERTS, way WAY>
__device__ __forceinline__ void sigmoid_row(const problem &problem, token_of<WAY> token, int top_k, int lane,
                                            float *row, lane_row<T, EXPERTS> &result) {
    constexpr int SLOTS = slots_of<WAY>, LANES = lanes_of<WAY>;
    using slot = sigmoid_slot<T>;
    raw_ids<SLOTS> raw;
    T g[SLOTS], w[SLOTS], z;
    float s[SLOTS], u[SLOTS], terms[SLOTS], dense[EXPERTS], c = 0;
    int ids[SLOTS];
    load_ids(raw, problem, token, lane, top_k);
    load_of_slots(g, problem.incoming, token, lane, top_k);
    load_of_slots(w, problem.normalized, token, lane, top_k);
    z = *strides_on<T>(problem.denominator.data, token, problem.denominator.stride);
    const T *scores = strides_on<T>(problem.scores.data, token, problem.scores.stride);
    settle(scores);
    check_ids(ids, raw, problem);
#pragma unroll
    for (int i = 0; i < SLOTS; i++)
        s[i] = ids[i] >= 0 ? to_float(scores[ids[i]]) : 0.0f;
    const bool distinct = all_distinct(row, ids, lane);
#pragma unroll
    for (int i = 0; i < SLOTS; i++) {
        u[i] = slot::scaled(g[i], problem.scaling);
        terms[i] = ids[i] >= 0 ? slot::term(u[i], w[i]) : 0.0f;
    }
    /* In ascending k; an empty slot's zero changes nothing. */
    for (int k = 0; k < problem.top_k; k++)
        c = __fadd_rn(c, __shfl_sync(ALL_LANES, k < WARP ? terms[0] : terms[SLOTS - 1], k % WARP, LANES));
    c = slot::rounded(c);
#pragma unroll
    for (int i = 0; i < SLOTS; i++)
        u[i] = slot::quotient(u[i], c, z);
    __syncwarp();
    result.clear();
    to_shared<LANES>(row, result, lane);
    scatter(row, ids, u, distinct, lane, slot::added);
#pragma unroll
    for (int i = 0; i < SLOTS; i++)
        if (ids[i] >= 0)
            u[i] = to_float(slot::result(row[ids[i]], s[i]));
    __syncwarp();
#pragma unroll
    for (int i = 0; i < SLOTS; i++)
        if (ids[i] >= 0)
            row[ids[i]] = u[i];
    __syncwarp();
    from_shared<LANES>(dense, row, lane);
    result.clear();
#pragma unroll
    for (int i = 0; i < EXPERTS; i++)
        result.set(i, from_float<T>(dense[i]));
}

/* Rows of more than 512 experts leave room for fewer warps. */
template <int EXPERTS>
constexpr int warps_of = EXPERTS > 16 ? 4 : 8;

/* Warps for which there are to be registers, if there is something to choose: all that a multiprocessor has room for.
 */
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ >= 1100 || (__CUDA_ARCH__ > 800 && __CUDA_ARCH__ < 900))
enum { ROOM = 48 };
#else
enum { ROOM = MOST_RESIDENT };
#endif
template <int EXPERTS, way WAY>
constexpr int resident_of = WAY == PLAIN &&EXPERTS == GROUP       ? ROOM
                            : WAY == PAIRS &&EXPERTS == 2 * GROUP ? ROOM / 16 * 12
                            : WAY == PAIRS &&EXPERTS == 4 * GROUP ? MOST_RESIDENT / 2
                                                                  : warps_of<EXPERTS>;
template <int EXPERTS, way WAY>
constexpr int tokens_of = warps_of<EXPERTS> *WARP / lanes_of<WAY>; /* of a block */

template <typename T, int EXPERTS, bool SOFTMAX, way WAY>
__global__ void __launch_bounds__(warps_of<EXPERTS> *WARP, resident_of<EXPERTS, WAY> / warps_of<EXPERTS>)
    logits_kernel(const __grid_constant__ problem problem) {
    constexpr int LANES = lanes_of<WAY>;
    __shared__ __align__(16) float memory[tokens_of<EXPERTS, WAY>][EXPERTS * LANES];
    allow_next_kernel();
    const int lane = threadIdx.x % LANES, number = threadIdx.x / LANES;
    using Token = token_of<WAY>;
    const Token first = static_cast<Token>(blockIdx.x) * tokens_of<EXPERTS, WAY>, row = first + number,
                tokens = problem.tokens, rows = rows_of_logits(problem.fused, tokens);
    if (first + threadIdx.x / WARP * (WARP / LANES) >= rows)
        return;
    /* A row of zeros is the last token's, without its slots, but for what is stored: to jump would cost more. */
    const bool exists = row < tokens;
    const Token token = exists ? row : tokens - 1;
    const int top_k = exists ? problem.top_k : 0;
    lane_row<T, EXPERTS> g;
    if constexpr (SOFTMAX)
        softmax_row<T, EXPERTS, WAY>(problem, token, top_k, lane, memory[number], g);
    else
        sigmoid_row<T, EXPERTS, WAY>(problem, token, top_k, lane, memory[number], g);
    if (!exists)
        g.clear();
    if (WAY != PAIRS || row < rows)
        store_row<LANES>(problem, row, lane, g);
    if (WAY == ANY && problem.grad_logits.data && exists) {
#pragma unroll
        for (int i = 0; i < EXPERTS; i++)
            if (expert_of<LANES>(lane, i) < problem.experts)
                store_element(problem.grad_logits, token, expert_of<LANES>(lane, i), g[i]);
    }
    if (blockIdx.x == 0 && threadIdx.x < WARP) /* other warps may have no token, and have left */
        for (int i = threadIdx.x; i < problem.arrival_count; i += WARP)
            problem.arrivals[i] = 0;
}

template <typename T, int EXPERTS, bool SOFTMAX, way WAY>
cudaError_t launch_with(const problem &problem, bool few, cudaStream_t stream) {
    const int64_t blocks = divide_up(rows_of_logits(problem.fused, problem.tokens), tokens_of<EXPERTS, WAY>);
    return launch_first(logits_kernel<T, EXPERTS, SOFTMAX, WAY>, blocks, warps_of<EXPERTS> * WARP, few, stream,
                        problem);
}

/* EXPERTS of a lane, where 32 have a token. */
template <typename T, int EXPERTS, bool SOFTMAX>
cudaError_t launch_for(const problem &problem, cudaStream_t stream) {
    const bool vector = !SOFTMAX || (in_groups<float>(problem.probs, problem.experts) &&
                                     (!problem.direct.data || in_groups<T>(problem.direct, problem.experts)));
    bool plain = vector && problem.top_k <= WARP && !problem.grad_logits.data && problem.tokens < MOST_NEAR;
    for (int64_t stride : {problem.ids.stride, problem.probs.stride, problem.direct.stride, problem.incoming.stride,
                           problem.sum.stride, problem.scores.stride, problem.normalized.stride,
                           problem.denominator.stride, problem.mask_expert, problem.mask_slot, problem.mask_token})
        plain = plain && stride >= 0 && stride < MOST_NEAR;
    /* A large batch does better with the cache than with shared memory set aside. */
    const bool few = problem.tokens <= MOST_RESIDENT / 2 * attribute(cudaDevAttrMultiProcessorCount);
    if (!plain)
        return launch_with<T, EXPERTS, SOFTMAX, ANY>(problem, few, stream);
    if constexpr (EXPERTS <= 2 * GROUP)
        if (!few && problem.top_k <= lanes_of<PAIRS>)
            return launch_with<T, 2 * EXPERTS, SOFTMAX, PAIRS>(problem, few, stream);
    return launch_with<T, EXPERTS, SOFTMAX, PLAIN>(problem, few, stream);
}

template <typename T, bool SOFTMAX>
cudaError_t launch_operation(const problem &problem, cudaStream_t stream) {
    if (problem.experts <= GROUP * WARP)
        return launch_for<T, GROUP, SOFTMAX>(problem, stream);
    if (problem.experts <= 2 * GROUP * WARP)
        return launch_for<T, 2 * GROUP, SOFTMAX>(problem, stream);
    if (problem.experts <= 3 * GROUP * WARP)
        return launch_for<T, 3 * GROUP, SOFTMAX>(problem, stream);
    if (problem.experts <= 4 * GROUP * WARP)
        return launch_for<T, 4 * GROUP, SOFTMAX>(problem, stream);
    return launch_for<T, 8 * GROUP, SOFTMAX>(problem, stream); /* 1024 */
}

template <typename T>
cudaError_t launch(const problem &problem, cudaStream_t stream) {
    return problem.operation == MOER_SOFTMAX_TOPK_BACKWARD ? launch_operation<T, true>(problem, stream)
                                                           : launch_operation<T, false>(problem, stream);
}

} // namespace moer_logits

cudaError_t launch_logits(const problem &problem, cudaStream_t stream) {
    switch (problem.type) {
    case BF16:
        return moer_logits::launch<__nv_bfloat16>(problem, stream);
    case F16:
        return moer_logits::launch<__half>(problem, stream);
    default:
        return moer_logits::launch<float>(problem, stream);
    }
}
