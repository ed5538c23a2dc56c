/* SPDX-License-Identifier: Apache-2.0 */
/* What the parts of the benchmark share: cases and their times, what a device brings to be compared with, reports. */
#ifndef MOER_BENCH_BENCH_H
#define MOER_BENCH_BENCH_H

#include <stdio.h>

#include "reference.h"

/* What is timed of a case: the call; the floor, a plain copy of hidden_states to its gradient; the two matrix products
 * alone. */
enum bench_time { BENCH_OURS, BENCH_FLOOR, BENCH_GEMMS, BENCH_TIMES };

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
    char device_name[128], date[16];
    int threads;
    uint64_t repeats;
    size_t count;
    struct bench_suite suites[MOER_OPERATIONS];
};

typedef enum moer_status bench_work(void *context);

/* How a kind of device is timed, and what its calls are compared with. */
struct bench_peers {
    const char *names[BENCH_TIMES]; /* of what is timed */
    const char *method;             /* "warm, after 2 calls" */
    uint64_t least_repeats;         /* also the usual number */
    /* The device's name; returns the number of threads that work on the host. */
    int (*describe)(DLDevice device, char *name, size_t size);
    /* The operands of floor and gemms, for a call on the host and the same on the device. end() is due where begin()
     * succeeds. */
    enum moer_status (*begin)(const struct call *host, const struct call *placed, void **context);
    void (*end)(void *context);
    bench_work *floor, *gemms;
    /* The median time of work(context). */
    enum moer_status (*time)(bench_work *work, void *context, uint64_t repeats, double *us);
};

extern const struct bench_peers bench_peers_cpu;

/* Holds a case of a suite to the loop and, if it is right, times it. Returns 0; EXIT_BROKEN where it is wrong, which
 * the report tells of; EXIT_TROUBLE after a message. */
int bench_measure(const struct bench *bench, const struct bench_suite *suite, struct bench_case *one,
                  struct reference_report report[CALL_OUTPUTS]);

/* The mean of a suite's times; NaN where one is missing. */
double bench_mean(const struct bench_suite *suite, enum bench_time time, int geometric);

/* The commit that was built; the date as of SOURCE_DATE_EPOCH where that is set, 0 where it is no number. */
const char *bench_commit(void);
int bench_date(char *date, size_t size);

/* Write what was found; errors are the stream's. */
void bench_write_json(const struct bench *bench, FILE *file);
void bench_write_plot(const struct bench *bench, FILE *file);

#endif
