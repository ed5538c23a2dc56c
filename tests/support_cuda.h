/* SPDX-License-Identifier: Apache-2.0 */
/* What the tests of the CUDA backend share: trials whose calls go to a stream. */
#ifndef MOER_TESTS_SUPPORT_CUDA_H
#define MOER_TESTS_SUPPORT_CUDA_H

#include <cuda_runtime_api.h>
#include <stdlib.h>
#include "support.h"

enum { EACH = MOER_OPERATIONS * TYPES };

/* A call of the runtime's that must succeed. */
#define CUDA(call)                                                                                                     \
    do {                                                                                                               \
        cudaError_t error_ = (call);                                                                                   \
        ck_assert_msg(error_ == cudaSuccess, "%s: %s", #call, cudaGetErrorString(error_));                             \
    } while (0)

static inline DLDevice gpu(void) {
    DLDevice device;
    test_device(&device);
    return device;
}

/* float32 outputs: rounding to 16 bits would hide most differences. */
static inline struct plan each_plan(int each, struct dims dims, uint64_t seed) {
    return (struct plan){.operation = (enum moer_operation)(each % MOER_OPERATIONS),
                         .dims = dims,
                         .type = (enum type)(each / MOER_OPERATIONS),
                         .wide = OUTPUTS,
                         .seed = seed};
}

/* A stream that does not wait for the default one. */
static inline cudaStream_t new_stream(void) {
    cudaStream_t stream;
    CUDA(cudaSetDevice(gpu().device_id));
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return stream;
}

/* Gives a call on the device a workspace of the size that it asks for, full of NaN. */
static inline DLTensor *give_workspace(struct call *call) {
    size_t bytes = 0;
    ck_assert_msg(call_workspace_size(call, &bytes) == MOER_OK, "%s", moer_last_error());
    DLTensor *workspace = new_bytes(gpu(), bytes);
    CUDA(cudaMemset(workspace->data, 0xFF, bytes));
    CUDA(cudaDeviceSynchronize());
    call->args.common.workspace = workspace->data;
    call->args.common.workspace_size = bytes;
    return workspace;
}

static inline void must_run(const struct call *call) {
    enum moer_status status = call_run(call);
    ck_assert_msg(status == MOER_OK, "status %d, %s", status, moer_last_error());
}

/* run_tests() on the first GPU, or the one that MOER_TEST_DEVICE names, with the module of this build. */
static inline int run_cuda_tests(const char *suite, const struct test *tests, int count) {
    const char *device = getenv("MOER_TEST_DEVICE");
    setenv("MOER_TEST_DEVICE", "cuda:0", !device || strncmp(device, "cuda:", 5) != 0);
    return run_tests(suite, tests, count);
}

#endif
