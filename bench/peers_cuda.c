/* SPDX-License-Identifier: Apache-2.0 */
/* A CUDA device's benchmark: ours as a captured graph and as launched, beside a copy of hidden_states on the device and
 * cuBLASLt's two products. After its time was taken every copy of the results is held to the one that was checked. */
#include "cuda.h"

#include <string.h>

#include "command.h"

enum { LEAST_REPEATS = 50 };

/* ---- The device ------------------------------------------------------------------------------------------------- */

/* Why the library cannot use CUDA here, or NULL. */
static const char *backend_unavailable(void) {
    for (size_t i = 0; i < moer_backend_count(); i++)
        if (strcmp(moer_backend_name(i), "cuda") == 0)
            return moer_backend_unavailable(i);
    return "this library has no CUDA backend";
}

/* The driver's version: its own where the kernel tells, and that of the CUDA it brings. */
static int find_driver(char *text, size_t size) {
    int version = 0;
    char line[256] = "", number[32] = "";
    if (cuda_failed(cudaDriverGetVersion(&version), "cudaDriverGetVersion"))
        return EXIT_TROUBLE;
    FILE *file = fopen("/proc/driver/nvidia/version", "r");
    if (file) { /* "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Wed ..." */
        if (fgets(line, sizeof line, file))
            for (const char *word = strtok(line, " \t\n"); word && !number[0]; word = strtok(NULL, " \t\n"))
                if (strspn(word, "0123456789.") == strlen(word) && strchr(word, '.'))
                    snprintf(number, sizeof number, "%s, ", word);
        fclose(file);
    }
    snprintf(text, size, "%sCUDA %d.%d", number, version / 1000, version % 1000 / 10);
    return 0;
}

static int open_device(struct bench *bench) {
    const int number = bench->device.device_id;
    const char *reason = backend_unavailable();
    struct cudaDeviceProp properties;
    size_t version = 0;
    int count = 0;
    if (reason)
        return complain("cuda:%d: the cuda backend is not available: %s", number, reason);
    if (cuda_failed(cudaGetDeviceCount(&count), "cudaGetDeviceCount"))
        return EXIT_TROUBLE;
    if (number >= count)
        return complain("there is no device cuda:%d, only %d", number, count);
    if (cuda_failed(cudaGetDeviceProperties(&properties, number), "cudaGetDeviceProperties") ||
        find_driver(bench->driver, sizeof bench->driver) ||
        timer_open(number, bench->method, sizeof bench->method, bench->notes, sizeof bench->notes) ||
        gemms_open(&version) || timer_copy_speed(&bench->copy_speed))
        return EXIT_TROUBLE;
    snprintf(bench->device_name, sizeof bench->device_name, "%.127s", properties.name);
    snprintf(bench->notes + strlen(bench->notes), sizeof bench->notes - strlen(bench->notes),
             "; cuBLASLt %zu.%zu.%zu; a copy of 256 MiB reads and writes %.0f GB/s", version / 10000,
             version / 100 % 100, version % 100, bench->copy_speed);
    bench->threads = 1; /* the one that launches */
    return 0;
}

/* ---- A case ----------------------------------------------------------------------------------------------------- */

static int enqueue_ours(void *ring, int copy, cudaStream_t stream) {
    struct call call = ((const struct ring *)ring)->copies[copy].call;
    call.args.common.stream = stream;
    const enum moer_status status = call_run(&call);
    return status == MOER_OK ? 0 : complain("%s", library_error(status));
}

static int enqueue_floor(void *context, int copy, cudaStream_t stream) {
    const struct ring *ring = context;
    const size_t bytes = (size_t)(ring->dims.tokens * ring->dims.hidden) * 2;
    return cuda_failed(cudaMemcpyAsync(ring->copies[copy].grad_hidden_states, ring->copies[copy].hidden_states, bytes,
                                       cudaMemcpyDeviceToDevice, stream),
                       "cudaMemcpyAsync");
}

static int time_ours(struct ring *ring, const struct call *host, int captured, uint64_t repeats, double *us) {
    const struct cuda_work ours = {enqueue_ours, ring, ring->count};
    if (ring_spoil(ring) != 0 || timer_time(&ours, captured, repeats, us) != 0)
        return EXIT_TROUBLE;
    return ring_compare(ring, host, 1, captured ? "as a graph" : "as launched");
}

static int time_case(const struct call *host, const struct call *placed, uint64_t repeats, double us[BENCH_TIMES]) {
    struct ring ring;
    int result = ring_make(&ring, placed);
    const struct cuda_work floor = {enqueue_floor, &ring, ring.count};
    if (result == 0)
        result = time_ours(&ring, host, 1, repeats, &us[BENCH_OURS]);
    if (result == 0)
        result = time_ours(&ring, host, 0, repeats, &us[BENCH_LAUNCHED]);
    if (result == 0)
        result = timer_time(&floor, 0, repeats, &us[BENCH_FLOOR]);
    if (result == 0)
        result = gemms_time(&ring, host, repeats, &us[BENCH_GEMMS]);
    ring_free(&ring);
    return result;
}

const struct bench_peers bench_peers_cuda = {.names = {[BENCH_OURS] = "moerouter",
                                                       [BENCH_FLOOR] = "cudaMemcpyAsync",
                                                       [BENCH_GEMMS] = "cuBLASLt",
                                                       [BENCH_LAUNCHED] = "moerouter as launched"},
                                             .least_repeats = LEAST_REPEATS,
                                             .open = open_device,
                                             .time = time_case};
