/* SPDX-License-Identifier: Apache-2.0 */
/* What the parts of the benchmark share: cases and their times, what a device brings to be compared with, reports. */
#ifndef MOER_BENCH_BENCH_H
#define MOER_BENCH_BENCH_H

#include <stdio.h>

#include "reference.h"

/* What is timed of a case: the call; the floor, a plain copy of hidden_states to its gradient; the two matrix products
 * alone; the call as a program makes it, where that is not the same as the first. */
enum bench_time { BENCH_OURS, BENCH_FLOOR, BENCH_GEMMS, BENCH_LAUNCHED, BENCH_TIMES };

struct bench_case {
    int64_t tokens;
    int checked;            /* it keeps the loop's bounds; otherwise it is not timed */
    double us[BENCH_TIMES]; /* medians; NaN: not timed */
    double bytes;           /* what the call has to read and write */
    size_t workspace_bytes;
};

struct bench_suite {
    enum moer_operation operation;
    struct dims dims; /* tokens: of the case at hand */
    size_t count;
    struct bench_case *cases;
};

struct bench {
    DLDevice device;
    const struct bench_peers *peers;
    char date[16];
    uint64_t repeats;
    /* What the peers say of the device and of themselves. */
    char device_name[128];
    char driver[64];    /* of a GPU, else empty */
    char blas_core[32]; /* which of OpenBLAS's kernels a CPU is compared with, else empty */
    int threads;        /* that work on the host */
    char method[64];    /* "warm" */
    char notes[384];    /* on the method, where there is more to say */
    double copy_speed;  /* GB/s that a large copy reads and writes, 0: not measured */
    size_t count;
    struct bench_suite suites[MOER_OPERATIONS];
};

/* How a kind of device is timed, and what its calls are compared with. Both functions return 0, or EXIT_TROUBLE after a
 * message. */
struct bench_peers {
    const char *names[BENCH_TIMES]; /* of what is timed; NULL: not on this device */
    uint64_t least_repeats;         /* also the usual number */
    /* Makes the device ready and describes it in bench. */
    int (*open)(struct bench *bench);
    /* The median times of a call that was found right, on the host and the same on the device, and of its peers. */
    int (*time)(const struct call *host, const struct call *placed, uint64_t repeats, double us[BENCH_TIMES]);
};

extern const struct bench_peers bench_peers_cpu, bench_peers_cuda;

/* Holds a case of a suite to the loop and, if it is right, times it. Returns 0; EXIT_BROKEN where it is wrong, which
 * the report tells of; EXIT_TROUBLE after a message. */
int bench_measure(const struct bench *bench, const struct bench_suite *suite, struct bench_case *one,
                  struct reference_report report[CALL_OUTPUTS]);

/* The median; sorts the times. */
double bench_median(double *times, uint64_t count);

/* The mean of a suite's times; NaN where one is missing. */
double bench_mean(const struct bench_suite *suite, enum bench_time time, int geometric);

/* What a time depends on beside the device: "2 threads, OpenBLAS core Zen" or the driver. */
const char *bench_setting(const struct bench *bench, char text[80]);

/* The commit that was built; the date as of SOURCE_DATE_EPOCH where that is set, 0 where it is no number. */
const char *bench_commit(void);
int bench_date(char *date, size_t size);

/* Write what was found; errors are the stream's. */
void bench_write_json(const struct bench *bench, FILE *file);
void bench_write_plot(const struct bench *bench, FILE *file);

#endif
