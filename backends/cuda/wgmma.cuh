/* SPDX-License-Identifier: Apache-2.0 */
/* Hopper's asynchronous products of matrices in shared memory, for sm_90a alone (PTX ISA 9.0, chapter 9.7.15). */
#pragma once

#include "ptx.cuh"

enum swizzle : uint32_t { SWIZZLE_128 = 1, SWIZZLE_64 = 2 };

/* A matrix descriptor (9.7.15.5.1.2.2). The next matrix is an addition away: a product waits for all that is done to
 * its descriptors, so they are made beforehand, of what is the same for a warp. */
struct matrix {
    uint32_t low, high;

    __host__ __device__ constexpr matrix operator+(int bytes) const {
        return {low + bytes / 16, high};
    }
    __host__ __device__ constexpr operator uint64_t() const {
        return static_cast<uint64_t>(high) << 32 | low;
    }
};

/* Where it begins, and what lies how many bytes apart. along: blocks of 8 rows where rows are the terms' (K-major: 8
 * rows of the matrix). across: panels of a swizzle's width, for matrices whose rows are terms. Panels begin at
 * multiples of 8 rows. */
__host__ __device__ constexpr matrix matrix_at(uint32_t address, uint32_t along, uint32_t across, swizzle swizzle) {
    return {(address & 0x3ffff) >> 4 | across >> 4 << 16, along >> 4 | static_cast<uint32_t>(swizzle) << 30};
}

#if defined(__CUDACC__) && defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

/* Keeps the compiler from moving what it does with the sums across this point: they are written behind its back. */
template <int DOWN, int ACROSS>
__device__ __forceinline__ void hold(float (&sums)[DOWN][ACROSS][4]) {
#pragma unroll
    for (int i = 0; i < DOWN * ACROSS * 4; i++)
        asm volatile("" : "+f"(sums[i / 4 / ACROSS][i / 4 % ACROSS][i % 4])::"memory");
}

/* wgmma.mma_async.m64nNk16 (9.7.15.5.2): sums = a b, or += where add is not 0; float32 sums. TERM_ROWS_A: a's rows in
 * memory are terms, otherwise they are the product's rows; b's rows always are terms. Where a is in registers, as
 * mma.m16n8k16 has it in each warp, b's rows are the product's columns. */
#define MOER_R8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define MOER_R32                                                                                                       \
    MOER_R8 ", %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, "     \
            "%28, %29, %30, %31"
#define MOER_R48 MOER_R32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define MOER_R64                                                                                                       \
    MOER_R32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, "  \
             "%52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define MOER_R80 MOER_R64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define MOER_R128                                                                                                      \
    MOER_R80 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, "  \
             "%100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, "  \
             "%117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define MOER_D4(i) "+f"(sums[i][0]), "+f"(sums[i][1]), "+f"(sums[i][2]), "+f"(sums[i][3])
#define MOER_FOUR(i) MOER_D4(i), MOER_D4(i + 1), MOER_D4(i + 2), MOER_D4(i + 3)
#define MOER_D32 MOER_FOUR(0), MOER_FOUR(4)
#define MOER_D48 MOER_D32, MOER_FOUR(8)
#define MOER_D64 MOER_D32, MOER_FOUR(8), MOER_FOUR(12)
#define MOER_D80 MOER_D64, MOER_FOUR(16)
#define MOER_D128 MOER_D80, MOER_FOUR(20), MOER_FOUR(24), MOER_FOUR(28)
#define MOER_WGMMA(COLUMNS, SUMS, A, B, ADD, TRANSPOSE, ELEMENT, PTX)                                                  \
    template <bool TERM_ROWS_A>                                                                                        \
    __device__ __forceinline__ void wgmma(float(&sums)[COLUMNS / 8][4], uint64_t a, uint64_t b, int add, ELEMENT) {    \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, " ADD ", 0;\n"                                                    \
                     "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." PTX "." PTX " {" MOER_R##SUMS             \
                     "}, " A ", " B ", p, 1, 1, " TRANSPOSE ", 1; }"                                                   \
                     : MOER_D##SUMS                                                                                    \
                     : "l"(a), "l"(b), "r"(add), "n"(TERM_ROWS_A ? 1 : 0));                                            \
    }
#define MOER_WGMMA_BOTH(COLUMNS, SUMS, A, B, ADD, TRANSPOSE)                                                           \
    MOER_WGMMA(COLUMNS, SUMS, A, B, ADD, TRANSPOSE, __nv_bfloat16, "bf16")                                             \
    MOER_WGMMA(COLUMNS, SUMS, A, B, ADD, TRANSPOSE, __half, "f16")
MOER_WGMMA_BOTH(64, 32, "%32", "%33", "%34", "%35")
MOER_WGMMA_BOTH(96, 48, "%48", "%49", "%50", "%51")
MOER_WGMMA_BOTH(128, 64, "%64", "%65", "%66", "%67")
MOER_WGMMA_BOTH(160, 80, "%80", "%81", "%82", "%83")
MOER_WGMMA_BOTH(256, 128, "%128", "%129", "%130", "%131")

#define MOER_WGMMA_REGISTERS(ELEMENT, PTX)                                                                             \
    __device__ __forceinline__ void wgmma(float(&sums)[8][4], const uint32_t(&a)[4], uint64_t b, int add, ELEMENT) {   \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0;\n"                                                        \
                     "wgmma.mma_async.sync.aligned.m64n64k16.f32." PTX "." PTX " {" MOER_R32                           \
                     "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0; }"                                                     \
                     : MOER_D32                                                                                        \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));                                  \
    }
MOER_WGMMA_REGISTERS(__nv_bfloat16, "bf16")
MOER_WGMMA_REGISTERS(__half, "f16")

#endif
