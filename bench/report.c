/* SPDX-License-Identifier: Apache-2.0 */
/* The medians and means of a benchmark's times, its date and commit, and its results as JSON. */
#define _XOPEN_SOURCE 700 /* gmtime_r() */
#include "bench.h"

#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <time.h>

#include "commit.h"

static int compare_doubles(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double bench_median(double *times, uint64_t count) {
    qsort(times, count, sizeof *times, compare_doubles);
    return (times[(count - 1) / 2] + times[count / 2]) / 2;
}

double bench_mean(const struct bench_suite *suite, enum bench_time time, int geometric) {
    double sum = 0;
    for (size_t i = 0; i < suite->count; i++)
        sum += geometric ? log(suite->cases[i].us[time]) : suite->cases[i].us[time];
    const double mean = sum / (double)suite->count;
    return geometric ? exp(mean) : mean;
}

const char *bench_setting(const struct bench *bench, char text[80]) {
    if (bench->driver[0])
        snprintf(text, 80, "driver %s", bench->driver);
    else
        snprintf(text, 80, "%d threads, OpenBLAS core %s", bench->threads, bench->blas_core);
    return text;
}

const char *bench_commit(void) {
    return MOER_COMMIT;
}

int bench_date(char *date, size_t size) {
    const char *epoch = getenv("SOURCE_DATE_EPOCH");
    char *end = NULL;
    const time_t now = epoch ? (time_t)strtoll(epoch, &end, 10) : time(NULL);
    struct tm tm;
    if (epoch && (end == epoch || *end != '\0'))
        return 0;
    return gmtime_r(&now, &tm) && strftime(date, size, "%Y-%m-%d", &tm) > 0;
}

/* A time; what was not timed is null. */
static json_t *json_time(double us) {
    return isnan(us) ? json_null() : json_real(us);
}

static json_t *json_case(const struct bench_case *one, const struct bench_peers *peers) {
    json_t *object = json_pack("{s:I, s:o, s:o, s:o, s:I, s:b}", "tokens", (json_int_t)one->tokens, "us",
                               json_time(one->us[BENCH_OURS]), "floor_us", json_time(one->us[BENCH_FLOOR]), "gemms_us",
                               json_time(one->us[BENCH_GEMMS]), "workspace_bytes", (json_int_t)one->workspace_bytes,
                               "checked", one->checked);
    if (peers->names[BENCH_LAUNCHED])
        json_object_set_new(object, "launched_us", json_time(one->us[BENCH_LAUNCHED]));
    return object;
}

static json_t *json_suite(const struct bench_suite *suite, const struct bench_peers *peers) {
    json_t *cases = json_array();
    for (size_t i = 0; i < suite->count; i++)
        json_array_append_new(cases, json_case(&suite->cases[i], peers));
    json_t *object = json_pack("{s:o, s:o, s:o, s:o}", "geomean_us", json_time(bench_mean(suite, BENCH_OURS, 1)),
                               "mean_us", json_time(bench_mean(suite, BENCH_OURS, 0)), "floor_geomean_us",
                               json_time(bench_mean(suite, BENCH_FLOOR, 1)), "gemms_geomean_us",
                               json_time(bench_mean(suite, BENCH_GEMMS, 1)));
    if (peers->names[BENCH_LAUNCHED])
        json_object_set_new(object, "launched_geomean_us", json_time(bench_mean(suite, BENCH_LAUNCHED, 1)));
    json_object_set_new(object, "cases", cases);
    return object;
}

void bench_write_json(const struct bench *bench, FILE *file) {
    json_t *suites = json_object();
    for (size_t i = 0; i < bench->count; i++)
        json_object_set_new(suites, moer_operation_name(bench->suites[i].operation),
                            json_suite(&bench->suites[i], bench->peers));
    json_t *root =
        json_pack("{s:s, s:s, s:s, s:s, s:i, s:s}", "library", moer_version(), "commit", bench_commit(), "date",
                  bench->date, "device", bench->device_name, "threads", bench->threads, "method", bench->method);
    if (bench->driver[0])
        json_object_set_new(root, "driver", json_string(bench->driver));
    if (bench->blas_core[0])
        json_object_set_new(root, "openblas_core", json_string(bench->blas_core));
    if (bench->copy_speed > 0)
        json_object_set_new(root, "copy_gb_s", json_real(bench->copy_speed));
    json_object_set_new(root, "suites", suites);
    json_dumpf(root, file, JSON_INDENT(2) | JSON_REAL_PRECISION(6));
    fputc('\n', file);
    json_decref(root);
}
