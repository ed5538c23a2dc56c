/* SPDX-License-Identifier: Apache-2.0 */
/* The CPU's benchmark: wall-clock time of warm calls, beside a memcpy() of hidden_states, and OpenBLAS on float32
 * copies of the operands, one sgemm for each product. */
#define _XOPEN_SOURCE 700 /* clock_gettime(), nanosleep() */
#include "bench.h"

#include <cblas.h>
#include <limits.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "command.h"

enum { WARM_UPS = 2, LEAST_REPEATS = 9 };

struct peers {
    const DLTensor *hidden_states, *grad_hidden_states;
    size_t bytes; /* of each */
    int tokens, hidden, experts;
    float *logits, *gate, *states, *grad_states, *grad_gate; /* [N, E], [E, H], [N, H], [N, H], [E, H] */
};

static void find_name(char *name, size_t size) {
    FILE *file = fopen("/proc/cpuinfo", "r");
    char line[256];
    snprintf(name, size, "unknown CPU");
    while (file && fgets(line, sizeof line, file)) {
        const char *colon = strchr(line, ':');
        if (strncmp(line, "model name", 10) == 0 && colon) {
            snprintf(name, size, "%s", colon + 1 + strspn(colon + 1, " "));
            name[strcspn(name, "\n")] = '\0';
            break;
        }
    }
    if (file)
        fclose(file);
}

static int open_device(struct bench *bench) {
    find_name(bench->device_name, sizeof bench->device_name);
    snprintf(bench->method, sizeof bench->method, "warm");
    snprintf(bench->blas_core, sizeof bench->blas_core, "%s", openblas_get_corename());
    bench->threads = omp_get_max_threads();
    return 0;
}

static void widen(float *to, const DLTensor *from) {
    for (int64_t i = 0; i < from->shape[0]; i++)
        for (int64_t j = 0; j < from->shape[1]; j++)
            *to++ = (float)get_element(from, i, j, 0);
}

static void end(struct peers *peers) {
    free(peers->logits);
    free(peers->gate);
    free(peers->states);
    free(peers->grad_states);
    free(peers->grad_gate);
    free(peers);
}

/* The floats of a matrix, or NULL. */
static float *matrix(int64_t rows, int64_t columns) {
    return malloc((size_t)(rows * columns) * sizeof(float));
}

/* The operands of floor and gemms. end() is due where it succeeds. */
static enum moer_status begin(const struct call *host, const struct call *placed, struct peers **result) {
    const struct dims dims = call_dims(host);
    const DLTensor *gate = call_tensor(host, "gate_weight");
    if (dims.hidden > INT_MAX || dims.tokens > INT_MAX)
        return MOER_UNSUPPORTED;
    struct peers *peers = calloc(1, sizeof *peers);
    if (!peers)
        return MOER_NO_MEMORY;
    *peers = (struct peers){.hidden_states = call_tensor(placed, "hidden_states"),
                            .grad_hidden_states = call_tensor(placed, "grad_hidden_states"),
                            .tokens = (int)dims.tokens,
                            .hidden = (int)dims.hidden,
                            .experts = (int)dims.experts,
                            .logits = matrix(dims.tokens, dims.experts),
                            .gate = matrix(dims.experts, dims.hidden),
                            .states = matrix(dims.tokens, dims.hidden),
                            .grad_states = matrix(dims.tokens, dims.hidden),
                            .grad_gate = matrix(dims.experts, dims.hidden)};
    double *row = malloc((size_t)dims.experts * sizeof *row);
    if (!row || !peers->logits || !peers->gate || !peers->states || !peers->grad_states || !peers->grad_gate) {
        free(row);
        end(peers);
        return MOER_NO_MEMORY;
    }
    peers->bytes = (size_t)(dims.tokens * dims.hidden) * dtype_size(peers->hidden_states->dtype);
    widen(peers->gate, gate ? gate : call_tensor(host, "weight"));
    widen(peers->states, peers->hidden_states);
    for (int64_t n = 0; n < dims.tokens; n++) {
        reference_logits_row(host, n, row);
        for (int64_t e = 0; e < dims.experts; e++)
            peers->logits[n * dims.experts + e] = (float)row[e];
    }
    free(row);
    openblas_set_num_threads(omp_get_max_threads());
    *result = peers;
    return MOER_OK;
}

typedef enum moer_status work(void *context);

static enum moer_status ours_work(void *call) {
    return call_run(call);
}

static enum moer_status floor_work(void *context) {
    const struct peers *peers = context;
    memcpy(peers->grad_hidden_states->data, peers->hidden_states->data, peers->bytes);
    return MOER_OK;
}

static enum moer_status gemms_work(void *context) {
    const struct peers *peers = context;
    const int N = peers->tokens, H = peers->hidden, E = peers->experts;
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, N, H, E, 1, peers->logits, E, peers->gate, H, 0,
                peers->grad_states, H);
    cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, E, H, N, 1, peers->logits, E, peers->states, H, 0,
                peers->grad_gate, H);
    return MOER_OK;
}

static double now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec * 1e-3;
}

static enum moer_status time_work(work *work, void *context, uint64_t repeats, double *us) {
    /* Threads that wait by spinning, OpenMP's or OpenBLAS's, would hold the cores of those that come after them. */
    const struct timespec pause = {.tv_nsec = 20000000};
    double *times = calloc(repeats, sizeof *times);
    enum moer_status status = times ? MOER_OK : MOER_NO_MEMORY;
    nanosleep(&pause, NULL);
    for (uint64_t i = 0; i < WARM_UPS + repeats && status == MOER_OK; i++) {
        const double start = now_us();
        status = work(context);
        if (i >= WARM_UPS)
            times[i - WARM_UPS] = now_us() - start;
    }
    if (status == MOER_OK)
        *us = bench_median(times, repeats);
    free(times);
    return status;
}

static int time_case(const struct call *host, const struct call *placed, uint64_t repeats, double us[BENCH_TIMES]) {
    struct call ours = *placed;
    struct peers *peers = NULL;
    enum moer_status status = time_work(ours_work, &ours, repeats, &us[BENCH_OURS]);
    if (status == MOER_OK)
        status = begin(host, placed, &peers);
    if (status == MOER_OK)
        status = time_work(floor_work, peers, repeats, &us[BENCH_FLOOR]);
    if (status == MOER_OK)
        status = time_work(gemms_work, peers, repeats, &us[BENCH_GEMMS]);
    if (peers)
        end(peers);
    return status == MOER_OK ? 0 : complain("%s", library_error(status));
}

const struct bench_peers bench_peers_cpu = {
    .names = {[BENCH_OURS] = "moerouter", [BENCH_FLOOR] = "memcpy", [BENCH_GEMMS] = "OpenBLAS sgemm"},
    .least_repeats = LEAST_REPEATS,
    .open = open_device,
    .time = time_case};
