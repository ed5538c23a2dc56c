/* SPDX-License-Identifier: Apache-2.0 */
/* The weight gradient from the partial sums that products.cu, wide.cu (but where that adds up itself) and columns.cu
 * leave: added in order, to the old value once, rounded once. */
#include "common.cuh"

/* Named: nvcc would name an anonymous one after the file's path, and other folders would give other bytes. */
namespace moer_reduce {

enum { THREADS = 128 };

/* A thread has WIDTH neighbours; unless WIDTH is 1, rows are whole numbers of those. */
template <int WIDTH>
__global__ void __launch_bounds__(THREADS) reduce_kernel(const __grid_constant__ problem problem) {
    struct alignas(WIDTH * sizeof(float)) group {
        float value[WIDTH];
    };
    wait_for_last_kernel();
    int64_t elements = problem.experts * problem.hidden;
    int64_t at = (blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x) * WIDTH;
    if (at >= elements)
        return;
    const int64_t expert = at / problem.hidden, column = at % problem.hidden;
    const int64_t all = problem.partial_rows * problem.partial_stride;
    const float *partials = problem.partials + expert * problem.partial_stride + column;
    float sum[WIDTH] = {};
    constexpr int BATCH = 8; /* loads under way */
    for (int64_t split = 0; split < problem.splits; split += BATCH) {
        group parts[BATCH] = {};
#pragma unroll
        for (int j = 0; j < BATCH; j++)
            if (split + j < problem.splits)
                parts[j] = *reinterpret_cast<const group *>(partials + (split + j) * all);
#pragma unroll
        for (int j = 0; j < BATCH; j++)
#pragma unroll
            for (int i = 0; i < WIDTH; i++) /* to add zero changes no sum that began with zero */
                sum[i] = __fadd_rn(sum[i], parts[j].value[i]);
    }
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
        if (problem.accumulate)
            sum[i] = __fadd_rn(load_element(problem.grad_weight, expert, column + i), sum[i]);
        store_element(problem.grad_weight, expert, column + i, sum[i]);
    }
}

template <int WIDTH>
cudaError_t launch_reduce(const problem &problem, cudaStream_t stream) {
    int64_t threads = problem.experts * problem.hidden / WIDTH;
    return launch_early(reduce_kernel<WIDTH>, (threads + THREADS - 1) / THREADS, THREADS, 0, stream, problem);
}

} // namespace moer_reduce

cudaError_t launch_reduction(const problem &problem, cudaStream_t stream) {
    return problem.hidden % 4 == 0 ? moer_reduce::launch_reduce<4>(problem, stream)
                                   : moer_reduce::launch_reduce<1>(problem, stream);
}
