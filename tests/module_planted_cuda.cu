/* SPDX-License-Identifier: Apache-2.0 */
/* The CUDA module with a fast path that is proven nowhere, and that has the mistake that PLANTED names, where it names
 * one:
 *
 *     swizzle   operands come into shared memory without the swizzle that wgmma reads them by
 *     tail      tokens behind the last whole tile are left out
 *     address   G is read where there is no memory
 *     hang      the stream never gets to the kernel */
#include "../backends/cuda/tiles.cuh"

#include <cuda.h>
#include <stdlib.h>
#include <string.h>

static bool planted(const char *fault) {
    const char *value = getenv("PLANTED");
    return value && strcmp(value, fault) == 0;
}

/* Of a launch, the maps of both operands are made first. */
static thread_local int operand_maps;

static CUtensorMapSwizzle swizzle(CUtensorMapSwizzle right) {
    return operand_maps-- > 0 && planted("swizzle") ? CU_TENSOR_MAP_SWIZZLE_NONE : right;
}

#define CU_TENSOR_MAP_SWIZZLE_128B swizzle(CU_TENSOR_MAP_SWIZZLE_128B)
#define launch_fused launch_right
#include "../backends/cuda/fused.cu"
#undef launch_fused

/* A loop without an effect, the compiler would leave out. */
static __global__ void never_ends() {
    for (;;)
        __nanosleep(1000);
}

cudaError_t launch_fused(const struct problem &right, cudaStream_t stream) {
    struct problem wrong = right;
    operand_maps = 2;
    if (planted("tail") && right.tokens > TILE_TOKENS)
        wrong.tokens = right.tokens / TILE_TOKENS * TILE_TOKENS;
    if (planted("address"))
        wrong.logits = reinterpret_cast<char *>(4096);
    if (planted("hang"))
        never_ends<<<1, 1, 0, stream>>>();
    return launch_right(wrong, stream);
}

const struct fast_path moer_cuda_paths[] = {
#ifdef MOER_CUDA_SM90A
    {"sm_90a", 9, 0, HOPPER, nullptr},
#endif
    {},
};

/* Its verdicts are those of one run of a test. */
const char moer_cuda_build[] = "planted";
