/* SPDX-License-Identifier: Apache-2.0 */
/* The self-check of a GPU's fast path, which moer_tune() runs as a process of its own:
 *
 *     selfcheck DEVICE PATH UUID VERSION BUILD
 *
 * Every case runs by the generic path once, and by the other one several times, each time with outputs and workspace
 * full of NaN; then in two streams at once. The sums are exact, so that all results must have the same bits. Where they
 * have not, patterns tell what the path has put where. When all is well both are timed. */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

#include "draw.h"
#include "selfcheck.h"

DLDevice selfcheck_device = {kDLCUDA, 0};
const char *selfcheck_path;

enum { REPEATS = 3, STREAMS = 2 };

/* ---- Cases ------------------------------------------------------------------------------------------------------ */

/* Calls in a stream of the thread's own. */
struct runner {
    struct trial trial;
    pthread_barrier_t *start;
    enum moer_status status;
    char error[300];
};

static void *run_in_stream(void *data) {
    struct runner *runner = data;
    runner->trial.call.args.common.stream = (void *)2; /* cudaStreamPerThread */
    pthread_barrier_wait(runner->start);
    for (int i = 0; i < REPEATS * STREAMS && runner->status == MOER_OK; i++)
        runner->status = call_run(&runner->trial.call);
    snprintf(runner->error, sizeof runner->error, "%s", moer_last_error());
    return NULL;
}

static void run_in_streams(const struct selfcheck_case *one, const struct results *must) {
    static const char two_streams[] = ", two streams";
    struct runner runners[STREAMS] = {{.error = ""}};
    pthread_t threads[STREAMS];
    pthread_barrier_t start;
    pthread_barrier_init(&start, NULL, STREAMS);
    for (int i = 0; i < STREAMS; i++) {
        runners[i].start = &start;
        trial_begin(&runners[i].trial, one);
        trial_poison(&runners[i].trial);
    }
    trial_choose(&runners[0].trial, selfcheck_path, two_streams);
    for (int i = 0; i < STREAMS; i++)
        if (pthread_create(&threads[i], NULL, run_in_stream, &runners[i]))
            report_end("trouble", "there is no thread to be had");
    for (int i = 0; i < STREAMS; i++)
        pthread_join(threads[i], NULL);
    pthread_barrier_destroy(&start);
    for (int i = 0; i < STREAMS; i++) {
        if (runners[i].status != MOER_OK)
            report_end(runners[i].status == MOER_DEVICE ? "wrong" : "trouble", "%s", runners[i].error);
        trial_fetch(&runners[i].trial);
        trial_compare(&runners[i].trial, must, two_streams);
        trial_end(&runners[i].trial);
    }
}

static void check_case(const struct selfcheck_case *one, int streams) {
    struct trial trial;
    struct results must;
    trial_begin(&trial, one);
    trial_run(&trial, "generic", "");
    results_take(&must, &trial);
    for (int i = 0; i < REPEATS; i++) {
        trial_run(&trial, selfcheck_path, "");
        trial_compare(&trial, &must, "");
    }
    trial_end(&trial);
    if (streams)
        run_in_streams(one, &must);
    results_free(&must);
}

/* Of T and of outputs. */
static const DLDataType dtypes[][2] = {
    {BFLOAT16, BFLOAT16}, {FLOAT16, FLOAT16}, {BFLOAT16, FLOAT32}, {FLOAT16, FLOAT32}, {FLOAT32, FLOAT32}};

enum { SMALL_DTYPES = sizeof dtypes / sizeof *dtypes, LARGE_DTYPES = 2 };

/* Every number of tokens next to those of tiles; widths that are no multiple of a slice's 64 columns, a tile's 128, or
 * a chunk's 8; numbers of experts that are none of 16. The last have rows that are further apart. */
static const int64_t edges[] = {0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 300, 513, 300, 257};
static const struct dims small[] = {{0, 256, 128, 8}, {0, 640, 160, 8}, {0, 136, 60, 4},
                                    {0, 80, 16, 2},   {0, 131, 7, 3},   {0, 264, 257, 8}};
/* Wide and narrow, few tokens and many, around the numbers that decide whether one kernel makes both products, how its
 * blocks share them, and where a chain of sums ends; the first run in two streams at once. */
static const struct dims large[] = {{1087, 2048, 128, 8}, {1087, 5120, 160, 8}, {1163, 2400, 96, 6},
                                    {8257, 200, 128, 8},  {777, 2408, 64, 8},   {1025, 5000, 100, 6},
                                    {2131, 1000, 130, 8}, {513, 6408, 128, 8},  {4100, 320, 40, 33},
                                    {8192, 640, 128, 8},  {8200, 512, 160, 8},  {257, 2048, 512, 10}};
enum {
    EDGES = sizeof edges / sizeof *edges,
    STRIDED = 2,
    SMALL = sizeof small / sizeof *small,
    LARGE = sizeof large / sizeof *large,
    IN_STREAMS = 3
};

static void check_operation(enum moer_operation operation) {
    struct selfcheck_case one = {.operation = operation};
    for (int i = 0; i < SMALL * SMALL_DTYPES; i++)
        for (int n = 0; n < EDGES; n++) {
            one.dims = small[i % SMALL];
            one.dims.tokens = edges[n];
            one.dtype = dtypes[i / SMALL][0];
            one.output_dtype = dtypes[i / SMALL][1];
            one.accumulate = n % 2;
            one.padding = n < EDGES - STRIDED ? 0 : 8; /* rows begin at multiples of 16 bytes if they do without it */
            check_case(&one, 0);
        }
    one.padding = 0;
    for (int i = 0; i < LARGE * LARGE_DTYPES; i++) {
        one.dims = large[i % LARGE];
        one.dtype = dtypes[i / LARGE][0];
        one.output_dtype = dtypes[i / LARGE][1];
        one.accumulate = 0;
        check_case(&one, i % LARGE < IN_STREAMS);
    }
}

/* ---- Times ------------------------------------------------------------------------------------------------------ */

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static int compare_times(const void *a, const void *b) {
    const int64_t first = *(const int64_t *)a, second = *(const int64_t *)b;
    return (first > second) - (first < second);
}

/* Nanoseconds of a call: of some in a row, and of a copy of nothing much, which waits for them. */
static int64_t time_calls(const struct trial *trial, const char *path) {
    enum { WARM = 3, CALLS = 20 };
    int64_t one = 1, start = 0;
    DLTensor from = *trial->workspace, to = *trial->scratch;
    from.shape = to.shape = &one;
    trial_choose(trial, path, ", timed");
    for (int i = 0; i < WARM + CALLS; i++) {
        if (i == WARM) {
            need(moer_tensor_copy(&to, &from), trial->one);
            start = now_ns();
        }
        need(call_run(&trial->call), trial->one);
    }
    need(moer_tensor_copy(&to, &from), trial->one);
    return (now_ns() - start) / CALLS;
}

/* Medians, by turns, so that both have the same clocks. */
static void time_case(const struct selfcheck_case *one) {
    enum { BATCHES = 9 };
    int64_t fast[BATCHES], generic[BATCHES];
    struct trial trial;
    trial_begin(&trial, one);
    for (int i = 0; i < BATCHES; i++) {
        generic[i] = time_calls(&trial, "generic");
        fast[i] = time_calls(&trial, selfcheck_path);
    }
    trial_end(&trial);
    qsort(fast, BATCHES, sizeof *fast, compare_times);
    qsort(generic, BATCHES, sizeof *generic, compare_times);
    report("time", "%s %lld %lld %lld %lld %lld %lld", moer_operation_name(one->operation), (long long)one->dims.tokens,
           (long long)one->dims.hidden, (long long)one->dims.experts, (long long)one->dims.top_k,
           (long long)fast[BATCHES / 2], (long long)generic[BATCHES / 2]);
}

/* The public suite's sizes, few tokens and many. */
static void time_operation(enum moer_operation operation) {
    static const int64_t tokens[] = {1024, 2048, 8192, 16384};
    struct selfcheck_case one = {
        .operation = operation, .dims = draw_suite_dims(operation), .dtype = BFLOAT16, .output_dtype = BFLOAT16};
    for (size_t i = 0; i < sizeof tokens / sizeof *tokens; i++) {
        one.dims.tokens = tokens[i];
        time_case(&one);
    }
}

/* ---- The program ------------------------------------------------------------------------------------------------ */

/* The kernels must be the parent's, and the device of that number the one that it means, whatever has become of the
 * module's file and the environment. */
static void check_device(const char *number, const char *uuid, const char *build) {
    char text[16384], name[32], built[96];
    snprintf(name, sizeof name, "cuda:%s: ", number);
    snprintf(built, sizeof built, "build: %s\n", build);
    for (size_t i = 0; i < moer_backend_count(); i++) {
        if (strcmp(moer_backend_name(i), "cuda") != 0 || moer_backend_info(i, text, sizeof text) != MOER_OK)
            continue;
        if (!strstr(text, built))
            report_end("trouble", "it has another build of the kernels, not %s", build);
        const char *line = strstr(text, name);
        const char *found = line ? strstr(line, uuid) : NULL;
        if (found && memchr(line, '\n', (size_t)(found - line)) == NULL)
            return;
    }
    report_end("trouble", "cuda:%s is not %s here; %s", number, uuid, moer_last_error());
}

int main(int argc, char **argv) {
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* nobody else would end it, should it hang */
    if (argc != 6) {
        fputs("Usage: selfcheck DEVICE PATH UUID VERSION BUILD\n\nFor moer_tune(), see moerouter(3).\n", stderr);
        return 2;
    }
    selfcheck_device.device_id = atoi(argv[1]);
    selfcheck_path = argv[2];
    if (strcmp(argv[4], moer_version()) != 0)
        report_end("trouble", "it has version %s of the library, not %s", moer_version(), argv[4]);
    unsetenv("MOER_VERBOSE");
    check_device(argv[1], argv[3], argv[5]);
    for (int operation = 0; operation < MOER_OPERATIONS; operation++)
        check_operation((enum moer_operation)operation);
    for (int operation = 0; operation < MOER_OPERATIONS; operation++)
        time_operation((enum moer_operation)operation);
    puts("right");
    return fflush(stdout) ? EXIT_FAILURE : EXIT_SUCCESS;
}
