/* SPDX-License-Identifier: Apache-2.0 */
/* Instructions that CUDA C++ has no words for, each a function of its name. Chapters are those of the PTX ISA 9.0. */
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

__device__ __forceinline__ uint32_t shared_address(const void *pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

/* cp.async (9.7.9.25): 16 bytes from global to shared memory, those past valid are zeros. */
__device__ __forceinline__ void copy_async(uint32_t to, const void *from, int valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid) : "memory");
}

__device__ __forceinline__ void copy_async(uint32_t to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void copy_async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int PENDING>
__device__ __forceinline__ void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t to, float value) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(value) : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t to, const float (&values)[4]) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(values[0]), "f"(values[1]), "f"(values[2]),
                 "f"(values[3])
                 : "memory");
}
template <typename T>
__device__ __forceinline__ void store_shared(uint32_t to, T value) {
    asm volatile("st.shared.b16 [%0], %1;" ::"r"(to), "h"(reinterpret_cast<const unsigned short &>(value)) : "memory");
}

__device__ __forceinline__ uint4 load_words(uint32_t from) {
    uint4 value;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(from)
                 : "memory");
    return value;
}

__device__ __forceinline__ uint32_t load_word(uint32_t from) {
    uint32_t value;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(from) : "memory");
    return value;
}

__device__ __forceinline__ void store_words(uint32_t to, uint4 value) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(value.x), "r"(value.y), "r"(value.z),
                 "r"(value.w)
                 : "memory");
}

/* ldmatrix (9.7.14.5.15): four 8 x 8 matrices of 16-bit elements, a row's address from each lane. */
__device__ __forceinline__ void load_matrices(uint32_t (&matrices)[4], uint32_t row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                 : "r"(row)
                 : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(uint32_t (&matrices)[4], uint32_t row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                 : "r"(row)
                 : "memory");
}

/* movmatrix (9.7.14.5.17): an 8 x 8 matrix of 16-bit elements, of which a lane has two, becomes its transpose. */
__device__ __forceinline__ uint32_t transposed(uint32_t matrix) {
    uint32_t result;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(matrix));
    return result;
}

/* mma.sync.m16n8k16 (9.7.14.5.8): sums += a b, float32 sums. */
__device__ __forceinline__ void multiply(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                         __nv_bfloat16) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void multiply(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, __half) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* bar.sync (9.7.13.1) among so many threads; 0 is __syncthreads()'s. */
__device__ __forceinline__ void synchronize(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

#if __CUDA_ARCH__ >= 900

/* mbarrier (9.7.13.15): a phase ends when as many have arrived as init says, and all expected bytes have come. Whoever
 * waits for the end of the phase of a parity sees what was written before the arrivals. */
__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

/* For the asynchronous copies. */
__device__ __forceinline__ void barrier_init_done() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_arrive_expecting(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
    asm volatile("{ .reg .pred done;\n"
                 "again_%=: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
                 "@!done bra again_%=; }" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}

/* barrier.cluster (9.7.13.4): all threads of all blocks of a cluster, who see each other's barrier_init_done(). */
__device__ __forceinline__ void cluster_synchronize() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\n"
                 "barrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
}

/* At the same barrier of a block of the cluster. What was written to memory before, it need not see. */
__device__ __forceinline__ void barrier_arrive(uint32_t barrier, int block) {
    asm volatile("{ .reg .b32 there;\n"
                 "mapa.shared::cluster.u32 there, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(barrier),
                 "r"(block)
                 : "memory");
}

/* What threads have written to shared memory, the asynchronous instructions shall read. */
__device__ __forceinline__ void fence_asynchronous() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* prefetch.tensormap (9.7.9.16): a map will be needed soon. */
__device__ __forceinline__ void prefetch_map(const CUtensorMap &map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

/* cp.async.bulk (9.7.9.25.4.1): bytes side by side, a multiple of 16. */
__device__ __forceinline__ void copy_bulk(uint32_t to, const void *from, int bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

/* cp.async.bulk.tensor (9.7.9.27.1): a box of a matrix, from a column and a row on. What does not exist is zeros, and
 * is not stored. */
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap &map, int column, int row, uint32_t barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
                 "[%4];" ::"r"(to),
                 "l"(&map), "r"(column), "r"(row), "r"(barrier)
                 : "memory");
}

/* The same to the same place of the cluster's first so many blocks, each of whose barriers it tells. */
template <int BLOCKS>
__device__ __forceinline__ void copy_box_to_cluster(uint32_t to, const CUtensorMap &map, int column, int row,
                                                    uint32_t barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
                 "[%1, {%2, %3}], [%4], %5;" ::"r"(to),
                 "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"(static_cast<unsigned short>((1 << BLOCKS) - 1))
                 : "memory");
}

__device__ __forceinline__ void store_box(const CUtensorMap &map, int column, int row, uint32_t from) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];\n"
                 "cp.async.bulk.commit_group;" ::"l"(&map),
                 "r"(column), "r"(row), "r"(from)
                 : "memory");
}

/* Until of what this thread stores by store_box() only so many boxes have still to be read. */
template <int PENDING>
__device__ __forceinline__ void store_bulk_wait() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

/* stmatrix (9.7.14.5.16): four 8 x 8 matrices of 16-bit elements, a row's address from each lane. */
__device__ __forceinline__ void store_matrices_transposed(uint32_t row, uint32_t a, uint32_t b, uint32_t c,
                                                          uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(a), "r"(b),
                 "r"(c), "r"(d)
                 : "memory");
}
__device__ __forceinline__ void store_matrices(uint32_t row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(a), "r"(b), "r"(c),
                 "r"(d)
                 : "memory");
}

/* setmaxnreg (9.7.19.5), by all of a warpgroup: so many registers a thread from here on. Whoever takes some waits until
 * others have given them. */
template <int REGISTERS>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

#endif
