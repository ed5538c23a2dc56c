/* SPDX-License-Identifier: Apache-2.0 */
/* The fast paths, and what has proven each: the file with the results of the public suite's workloads, every one of
 * them held to the double-precision loop, on a device of that very compute capability. One that has none runs on a
 * device only where moer_tune() has found it right. */
#include "common.cuh"

const struct fast_path moer_cuda_paths[] = {
#ifdef MOER_CUDA_SM90A
    {"sm_90a", 9, 0, HOPPER, "bench/results/h200-2026-11-30.json"},
#endif
#ifdef MOER_CUDA_SM100F
    {"sm_100f", 10, 0, BLACKWELL, nullptr},
    {"sm_100f", 10, 3, BLACKWELL, nullptr},
#endif
    {},
};
