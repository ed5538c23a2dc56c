/* SPDX-License-Identifier: Apache-2.0 */
/* The sigmoid operation's G for a slot, as the public header has it: each step is rounded to T, as the model
 * does; the _rn intrinsics keep the compiler from fusing. */
#pragma once

#include "common.cuh"

template <typename T>
struct sigmoid_slot {
    static __device__ __forceinline__ float rounded(float value) {
        return to_float(from_float<T>(value));
    }
    static __device__ __forceinline__ float scaled(T g, float factor) {
        return rounded(__fmul_rn(to_float(g), factor));
    }
    static __device__ __forceinline__ float term(float scaled, T w) {
        return rounded(__fmul_rn(scaled, to_float(w)));
    }
    static __device__ __forceinline__ float quotient(float scaled, float sum, T z) {
        return rounded(__fdiv_rn(rounded(__fsub_rn(scaled, sum)), to_float(z)));
    }
    static __device__ __forceinline__ float added(float sum, float value) {
        return rounded(__fadd_rn(sum, value));
    }
    static __device__ __forceinline__ T result(float sum, float score) {
        return from_float<T>(__fmul_rn(rounded(__fmul_rn(sum, score)), rounded(__fsub_rn(1.0f, score))));
    }
};
