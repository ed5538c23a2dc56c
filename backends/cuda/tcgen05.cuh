/* SPDX-License-Identifier: Apache-2.0 */
/* Blackwell's products of matrices in shared memory, with sums in tensor memory, for the family of sm_100 alone (PTX
 * ISA 9.0, chapter 9.7.16). Descriptors are plain arithmetic, which a test compares with a model of the tables there.
 */
#pragma once

#include "common.cuh"
#include "ptx.cuh"
#include "wgmma.cuh"

/* A matrix descriptor (9.7.16.4.1): bits 0-13 where it begins, 16-29 and 32-45 the two distances, all in units of 16
 * bytes; 46-48 are 1; 61-63 the swizzle. What is not named is 0: the swizzle's pattern begins where addresses are
 * multiples of it, and distances are relative. along: from 8 rows to the next 8. across: from panel to panel of a
 * swizzle's width, of a matrix whose rows are terms; of others, a product of 16 terms stays in a panel. */
enum tensor_swizzle : uint32_t { TENSOR_SWIZZLE_128 = 2, TENSOR_SWIZZLE_64 = 4 };

__host__ __device__ constexpr matrix tensor_matrix_at(uint32_t address, uint32_t along, uint32_t across,
                                                      tensor_swizzle swizzle) {
    return {(address & 0x3ffff) >> 4 | across >> 4 << 16, along >> 4 | 1 << 14 | static_cast<uint32_t>(swizzle) << 29};
}

/* An instruction descriptor (9.7.16.4.2) of kind::f16: bits 4-5 float32 sums; 7-9 and 10-12 the operands' type, 1 is
 * bfloat16; 15 and 16 whether a's rows and b's are terms; 17-22 columns, in units of 8; 24-28 rows, in units of 16. */
__host__ __device__ constexpr uint32_t tensor_product(bool bfloat16, bool term_rows_a, bool term_rows_b, int rows,
                                                      int columns) {
    return 1u << 4 | static_cast<uint32_t>(bfloat16) << 7 | static_cast<uint32_t>(bfloat16) << 10 |
           static_cast<uint32_t>(term_rows_a) << 15 | static_cast<uint32_t>(term_rows_b) << 16 |
           static_cast<uint32_t>(columns / 8) << 17 | static_cast<uint32_t>(rows / 16) << 24;
}

/* Tensor memory has 128 lanes of 512 columns. An address: the column, and above it the lane; a warp reaches the 32
 * lanes of its place in a warpgroup. A product of 128 rows has a row in each lane. */
enum { TENSOR_COLUMNS = 512, TENSOR_LANES = 128 };

__host__ __device__ constexpr uint32_t own_lanes(uint32_t memory, int warp) {
    return memory + (static_cast<uint32_t>(warp % 4 * 32) << 16);
}

#if defined(__CUDACC__) && defined(MOER_TCGEN05)

/* tcgen05.alloc and .dealloc (9.7.16.7.1): all columns, by a warp, which finds their address in shared memory. What
 * another block has, it waits for. */
__device__ __forceinline__ void tensor_allocate(uint32_t to) {
    asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;\n"
                 "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;" ::"r"(to),
                 "n"(int{TENSOR_COLUMNS})
                 : "memory");
}

__device__ __forceinline__ void tensor_free(uint32_t memory) {
    asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(memory), "n"(int{TENSOR_COLUMNS})
                 : "memory");
}

/* tcgen05.fence (9.7.16.11.1): around what threads wait for one another with. */
__device__ __forceinline__ void tensor_before_sync() {
    asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}

__device__ __forceinline__ void tensor_after_sync() {
    asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
}

/* elect.sync (9.7.13.14): one lane of a warp, the same every time, and the compiler knows that it is one. */
__device__ __forceinline__ bool elected() {
    uint32_t result;
    asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(result)::"memory");
    return result;
}

/* tcgen05.mma (9.7.16.10.9.1), of 16 terms, by a single thread: sums = a b, or += where add is not 0. */
__device__ __forceinline__ void tensor_multiply(uint32_t sums, uint64_t a, uint64_t b, uint32_t product, int add) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %4, 0;\n"
                 "tcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, %3, p; }" ::"r"(sums),
                 "l"(a), "l"(b), "r"(product), "r"(add)
                 : "memory");
}

/* tcgen05.commit (9.7.16.12.1): arrives at a barrier when what this thread has begun is done. */
__device__ __forceinline__ void tensor_commit(uint32_t barrier) {
    asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(barrier)
                 : "memory");
}

/* tcgen05.ld and .st (9.7.16.8.3, 9.7.16.8.4), 32x32b: 32 columns of the lane of each of a warp's threads. */
#define MOER_T8(b, i)                                                                                                  \
    b(values[i]), b(values[i + 1]), b(values[i + 2]), b(values[i + 3]), b(values[i + 4]), b(values[i + 5]),            \
        b(values[i + 6]), b(values[i + 7])
#define MOER_T32(b) MOER_T8(b, 0), MOER_T8(b, 8), MOER_T8(b, 16), MOER_T8(b, 24)
#define MOER_OUT(value) "=f"(value)
#define MOER_IN(value) "f"(value)
__device__ __forceinline__ void tensor_load(float (&values)[32], uint32_t from) {
    asm volatile("tcgen05.ld.sync.aligned.32x32b.x32.b32 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, "
                 "%14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, [%32];"
                 : MOER_T32(MOER_OUT)
                 : "r"(from)
                 : "memory");
}

__device__ __forceinline__ void tensor_store(uint32_t to, const float (&values)[32]) {
    asm volatile(
        "tcgen05.st.sync.aligned.32x32b.x32.b32 [%32], {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
        "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31};" ::
            MOER_T32(MOER_IN),
        "r"(to)
        : "memory");
}

/* tcgen05.wait (9.7.16.8.5): what this thread loads is there. Nothing that uses it may stand before this. */
__device__ __forceinline__ void tensor_load_wait(float (&values)[32]) {
    asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
#pragma unroll
    for (float &value : values)
        asm volatile("" : "+f"(value)::"memory");
}

__device__ __forceinline__ void tensor_store_wait() {
    asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory");
}

#endif
