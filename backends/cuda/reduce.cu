/* SPDX-License-Identifier: Apache-2.0 */
/* The kernel that makes the weight gradient of the partial sums that products.cu and columns.cu leave. */
#include "reduce.cuh"

/* Named: nvcc would name an anonymous one after the file's path, and other folders would give other bytes. */
namespace moer_reduce {

enum { THREADS = 128, LOADS = 8 /* under way */ };

/* A thread has WIDTH neighbours. */
template <int WIDTH>
__global__ void __launch_bounds__(THREADS) reduce_kernel(const __grid_constant__ partial_sums partials) {
    wait_for_last_kernel();
    const int64_t at = (blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x) * WIDTH,
                  expert = at / partials.hidden;
    if (expert < partials.experts)
        add_up<WIDTH, 1, 0, LOADS, true>(partials, static_cast<int>(expert),
                                         static_cast<unsigned>(at % partials.hidden));
}

template <int WIDTH>
cudaError_t launch_reduce(const partial_sums &partials, cudaStream_t stream) {
    const int64_t threads = int64_t{partials.experts} * partials.hidden / WIDTH;
    return launch_early(reduce_kernel<WIDTH>, divide_up(threads, THREADS), THREADS, 0, stream, partials);
}

} // namespace moer_reduce

cudaError_t launch_reduction(const problem &problem, cudaStream_t stream) {
    const partial_sums partials = partial_sums_of(problem);
    return partials.by_fours ? moer_reduce::launch_reduce<4>(partials, stream)
                             : moer_reduce::launch_reduce<1>(partials, stream);
}
