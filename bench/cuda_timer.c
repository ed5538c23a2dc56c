/* SPDX-License-Identifier: Apache-2.0 */
/* Times work on a CUDA device as the public suite does: ten calls that do not count, then the median of the others; in
 * front of each a write to twice the L2, with nothing between the two but their order in the stream; other operands at
 * each call. A time is CUPTI's span of the call's activities or, where CUPTI is missing or refuses, the time between
 * two events, which is a few microseconds more. */
#include "cuda.h"

#include <stdlib.h>

#include "command.h"

enum { WARM_UPS = 10, COPY_REPEATS = 50, COPY_BYTES = 256 << 20 };

static struct {
    cudaStream_t stream;
    void *flush;
    size_t flush_bytes;
    int by_spans;
    cudaEvent_t begin, end;
} timer;

static int flush_cache(void) {
    return cuda_failed(cudaMemsetAsync(timer.flush, 0, timer.flush_bytes, timer.stream),
                       "cudaMemsetAsync of the flush");
}

static int wait_for_device(void) {
    return cuda_failed(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

/* ---- Opening ---------------------------------------------------------------------------------------------------- */

static int allocate(int device) {
    struct cudaDeviceProp properties;
    if (cuda_failed(cudaSetDevice(device), "cudaSetDevice") ||
        cuda_failed(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties") ||
        cuda_failed(cudaStreamCreateWithFlags(&timer.stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags") ||
        cuda_failed(cudaEventCreate(&timer.begin), "cudaEventCreate") ||
        cuda_failed(cudaEventCreate(&timer.end), "cudaEventCreate"))
        return EXIT_TROUBLE;
    timer.flush_bytes = 2 * (size_t)properties.l2CacheSize;
    return cuda_failed(cudaMalloc(&timer.flush, timer.flush_bytes), "cudaMalloc of the flush");
}

/* Whether a flush leaves its record: CUPTI may be there, and agree to everything, and record nothing. */
static int probe_spans(int *works) {
    uint64_t count = 0;
    const int result = wait_for_device() || spans_reset() || flush_cache() || wait_for_device() ||
                       spans_count(timer.flush_bytes, &count);
    *works = count == 1;
    return result ? EXIT_TROUBLE : 0;
}

int timer_open(int device, char *method, size_t method_size, char *notes, size_t notes_size) {
    char reason[160] = "it does not record memsets";
    timer.by_spans = spans_open(reason, sizeof reason) == 0; /* before there is a context, so that it sees all of it */
    if (allocate(device) != 0)
        return EXIT_TROUBLE;
    if (timer.by_spans) {
        if (probe_spans(&timer.by_spans) != 0)
            return EXIT_TROUBLE;
        if (!timer.by_spans)
            spans_close();
    }
    snprintf(method, method_size, "%s, dirty L2", timer.by_spans ? "CUPTI spans" : "CUDA events");
    snprintf(notes, notes_size, "time and gemms as captured graphs, floor as launched%s%s",
             timer.by_spans ? "" : "; events, not CUPTI: ", timer.by_spans ? "" : reason);
    return 0;
}

/* ---- Timing ----------------------------------------------------------------------------------------------------- */

static int capture(const struct cuda_work *work, int copy, cudaGraphExec_t *result) {
    cudaGraph_t graph = NULL;
    if (cuda_failed(cudaStreamBeginCapture(timer.stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture"))
        return EXIT_TROUBLE;
    const int enqueued = work->enqueue(work->context, copy, timer.stream);
    const cudaError_t captured = cudaStreamEndCapture(timer.stream, &graph);
    if (enqueued != 0 || cuda_failed(captured, "cudaStreamEndCapture"))
        return EXIT_TROUBLE;
    const cudaError_t instantiated = cudaGraphInstantiate(result, graph, 0);
    cudaGraphDestroy(graph);
    if (instantiated != cudaSuccess) {
        *result = NULL;
        return cuda_failed(instantiated, "cudaGraphInstantiate");
    }
    return cuda_failed(cudaGraphUpload(*result, timer.stream), "cudaGraphUpload");
}

/* A flush, a call, and the wait for both. graph: NULL where the call is not captured. */
static int call_once(const struct cuda_work *work, int copy, cudaGraphExec_t graph) {
    if (flush_cache() != 0)
        return EXIT_TROUBLE;
    if (!timer.by_spans && cuda_failed(cudaEventRecord(timer.begin, timer.stream), "cudaEventRecord"))
        return EXIT_TROUBLE;
    const int launched = graph ? cuda_failed(cudaGraphLaunch(graph, timer.stream), "cudaGraphLaunch")
                               : work->enqueue(work->context, copy, timer.stream);
    if (launched != 0)
        return launched;
    if (!timer.by_spans && cuda_failed(cudaEventRecord(timer.end, timer.stream), "cudaEventRecord"))
        return EXIT_TROUBLE;
    return cuda_failed(cudaStreamSynchronize(timer.stream), "cudaStreamSynchronize");
}

static int time_calls(const struct cuda_work *work, const cudaGraphExec_t *graphs, uint64_t count, double *times) {
    if (timer.by_spans && spans_reset() != 0)
        return EXIT_TROUBLE;
    for (uint64_t i = 0; i < count; i++) {
        const int copy = (int)(i % (uint64_t)work->copies);
        if (call_once(work, copy, graphs[copy]) != 0)
            return EXIT_TROUBLE;
        float ms = 0;
        if (!timer.by_spans && cuda_failed(cudaEventElapsedTime(&ms, timer.begin, timer.end), "cudaEventElapsedTime"))
            return EXIT_TROUBLE;
        times[i] = (double)ms * 1e3;
    }
    return timer.by_spans ? wait_for_device() || spans_read(timer.flush_bytes, count, times) : 0;
}

int timer_time(const struct cuda_work *work, int captured, uint64_t repeats, double *us) {
    const uint64_t count = WARM_UPS + repeats;
    cudaGraphExec_t graphs[CUDA_MOST_COPIES] = {NULL};
    double *times = calloc(count, sizeof *times);
    int result = times ? 0 : complain("out of memory");
    /* What is loaded on first use must not be loaded during a capture. */
    if (result == 0)
        result = work->enqueue(work->context, 0, timer.stream) || wait_for_device();
    for (int copy = 0; copy < work->copies && captured && result == 0; copy++)
        result = capture(work, copy, &graphs[copy]);
    if (result == 0)
        result = wait_for_device() || time_calls(work, graphs, count, times);
    if (result == 0)
        *us = bench_median(times + WARM_UPS, repeats);
    for (int copy = 0; copy < CUDA_MOST_COPIES; copy++)
        if (graphs[copy])
            cudaGraphExecDestroy(graphs[copy]);
    free(times);
    return result ? EXIT_TROUBLE : 0;
}

/* ---- The speed of a copy ---------------------------------------------------------------------------------------- */

static int enqueue_copy(void *context, int copy, cudaStream_t stream) {
    char *buffers = context;
    (void)copy;
    return cuda_failed(cudaMemcpyAsync(buffers, buffers + COPY_BYTES, COPY_BYTES, cudaMemcpyDeviceToDevice, stream),
                       "cudaMemcpyAsync");
}

int timer_copy_speed(double *speed) {
    void *buffers = NULL;
    double us = 0;
    if (cuda_failed(cudaMalloc(&buffers, 2 * (size_t)COPY_BYTES), "cudaMalloc of 512 MiB"))
        return EXIT_TROUBLE;
    const struct cuda_work work = {enqueue_copy, buffers, 1};
    const int result = cuda_failed(cudaMemset(buffers, 0, 2 * (size_t)COPY_BYTES), "cudaMemset") ||
                       timer_time(&work, 0, COPY_REPEATS, &us);
    cudaFree(buffers);
    *speed = 2.0 * COPY_BYTES / us * 1e-3;
    return result ? EXIT_TROUBLE : 0;
}
