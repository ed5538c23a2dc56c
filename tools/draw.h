/* SPDX-License-Identifier: Apache-2.0 */
/* Cases drawn as the public benchmark suite (SOL-ExecBench L2/011 and L1/093) draws them, from a seed: the same bytes
 * on every machine, since no libm function and no compiler choice is in the way of the data. */
#ifndef MOER_TOOLS_DRAW_H
#define MOER_TOOLS_DRAW_H

#include "call.h"

/* The dtypes of operations. */
#define BFLOAT16                                                                                                       \
    { kDLBfloat, 16, 1 }
#define FLOAT16                                                                                                        \
    { kDLFloat, 16, 1 }
#define FLOAT32                                                                                                        \
    { kDLFloat, 32, 1 }

/* The sizes the suite uses for the operation: Qwen3-Coder-30B-A3B (H=2048, E=128, K=8), GLM-4.7 (H=5120, E=160, K=8).
 */
struct dims draw_suite_dims(enum moer_operation operation);

/* The suite's token counts; *count of them. */
const int64_t *draw_suite_tokens(enum moer_operation operation, size_t *count);

/* The suite's absolute tolerance at so many tokens; the relative one is 0.05. */
double draw_suite_atol(enum moer_operation operation, int64_t tokens);

/* Makes the call's inputs (on the host, by moer_tensor_new) and fills them. optional = 0 leaves the optional inputs
 * out. Free with call_free(). Outputs stay NULL. */
enum moer_status draw_inputs(struct call *call, enum moer_operation operation, struct dims dims, DLDataType dtype,
                             uint64_t seed, int optional);

/* Adds the outputs that are missing, of that dtype, uninitialised, on the host. */
enum moer_status draw_outputs(struct call *call, DLDataType dtype);

/* The generator behind it, for tests: a counter-based integer generator, normal numbers. */
struct draw {
    uint64_t key, counter;
};
uint64_t draw_integer(struct draw *draw);
double draw_normal(struct draw *draw);

#endif
