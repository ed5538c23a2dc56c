/* SPDX-License-Identifier: Apache-2.0 */
/* The weight gradient from its partial sums: added in the order of the splits, to the old value once, rounded once.
 * By reduce.cu's kernel, and by wide.cu's, which stores some itself. */
#pragma once

#include "common.cuh"

#include <type_traits>

/* Rows are stride apart, splits split_stride; and what they become. */
struct partial_sums {
    float *data;
    int64_t stride, split_stride;
    unsigned hidden;
    int splits, experts;
    bool accumulate;
    bool by_fours; /* the weight gradient's elements can be loaded and stored so */
    struct typed_rows out;
};

inline partial_sums partial_sums_of(const problem &problem) {
    const typed_rows &out = problem.grad_weight;
    return {problem.partials,
            problem.partial_stride,
            problem.partial_rows * problem.partial_stride,
            static_cast<unsigned>(problem.hidden),
            static_cast<int>(problem.splits),
            problem.experts,
            problem.accumulate,
            problem.hidden % 4 == 0 && reinterpret_cast<uintptr_t>(out.data) % (out.type == F32 ? 16 : 8) == 0 &&
                out.stride % 4 == 0,
            out};
}

template <typename V, int WIDTH>
struct alignas(WIDTH * sizeof(V)) neighbours {
    V value[WIDTH];
};

/* A thread's sums of a row. */
template <int WIDTH, int GROUPS>
using sum_groups = float[GROUPS][WIDTH];

/* Adds the old values, if they are to be added, and stores sums. Unless ANY, they are not to be. */
template <typename V, int WIDTH, int GROUPS, int APART, bool ANY>
__device__ __forceinline__ void store_sums(sum_groups<WIDTH, GROUPS> &sums, const partial_sums &partials, int row,
                                           unsigned column) {
    using group = neighbours<V, WIDTH>;
    V *const to = reinterpret_cast<V *>(partials.out.data) + row * partials.out.stride + column;
    const unsigned there = partials.hidden - column;
    if (ANY && partials.accumulate) {
        group values[GROUPS] = {};
#pragma unroll
        for (int i = 0; i < GROUPS; i++)
            if (i * APART < there)
                values[i] = *reinterpret_cast<const group *>(to + i * APART);
#pragma unroll
        for (int i = 0; i < GROUPS; i++)
#pragma unroll
            for (int j = 0; j < WIDTH; j++)
                sums[i][j] = __fadd_rn(to_float(values[i].value[j]), sums[i][j]);
    }
#pragma unroll
    for (int i = 0; i < GROUPS; i++)
        if (i * APART < there) {
            group rounded;
#pragma unroll
            for (int j = 0; j < WIDTH; j++)
                rounded.value[j] = from_float<V>(sums[i][j]);
            *reinterpret_cast<group *>(to + i * APART) = rounded;
        }
}

/* A thread's part of a row: groups of WIDTH neighbours, 1 or, if the weight gradient is by_fours, 4, which begin APART
 * from one another. Loads of a batch of splits are under way at once. Unless ANY, there are just as many splits, and no
 * old values. */
template <int WIDTH, int GROUPS, int APART, int BATCH, bool ANY>
__device__ __forceinline__ void add_up(const partial_sums &partials, int row, unsigned column) {
    using group = std::conditional_t<WIDTH == 4, float4, float>;
    asm volatile("" : "+r"(row), "+r"(column)); /* what is worked out ahead takes registers */
    const float *from = partials.data + row * partials.stride + column;
    const unsigned there = partials.hidden - column;
    sum_groups<WIDTH, GROUPS> sums = {};
    int left = partials.splits;
#pragma unroll 1
    do {
        group parts[BATCH][GROUPS] = {};
#pragma unroll
        for (int split = 0; split < BATCH; split++) {
#pragma unroll
            for (int i = 0; i < GROUPS; i++)
                if (i * APART < there && (!ANY || split < left))
                    parts[split][i] = __ldcg(reinterpret_cast<const group *>(from + i * APART));
            from += partials.split_stride;
            keep_here(from);
        }
#pragma unroll
        for (int split = 0; split < BATCH; split++)
#pragma unroll
            for (int i = 0; i < GROUPS; i++) {
                const float(&part)[WIDTH] = reinterpret_cast<const float(&)[WIDTH]>(parts[split][i]);
#pragma unroll
                for (int j = 0; j < WIDTH; j++) /* to add zero changes no sum that began with zero */
                    sums[i][j] = __fadd_rn(sums[i][j], part[j]);
            }
        left -= BATCH;
    } while (ANY && left > 0);
    if (partials.out.type == F32)
        store_sums<float, WIDTH, GROUPS, APART, ANY>(sums, partials, row, column);
    else if (partials.out.type == BF16)
        store_sums<__nv_bfloat16, WIDTH, GROUPS, APART, ANY>(sums, partials, row, column);
    else
        store_sums<__half, WIDTH, GROUPS, APART, ANY>(sums, partials, row, column);
}
