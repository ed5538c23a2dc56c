/* SPDX-License-Identifier: Apache-2.0 */
/* moerouter bench: times operations on the public suite's workloads, beside a copy and the two products alone. A case
 * is held to the double-precision loop first: what is wrong has no time. */
#define _POSIX_C_SOURCE 200809L /* ftruncate */
#include "bench.h"

#include "config.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "command.h"
#include "draw.h"

/* ---- The table -------------------------------------------------------------------------------------------------- */

/* Four digits, in the unit that fits. */
static const char *format_time(char text[16], double us) {
    static const char *const units[] = {"us", "ms", "s "};
    int unit = 0;
    for (; us >= 1000 && unit < 2; unit++)
        us /= 1000;
    snprintf(text, 16, "%#.4g %s", us, units[unit]);
    return text;
}

static const char *format_bytes(char text[16], size_t bytes) {
    static const char *const units[] = {"B  ", "KiB", "MiB", "GiB"};
    double value = (double)bytes;
    int unit = 0;
    for (; value >= 1024 && unit < 3; unit++)
        value /= 1024;
    snprintf(text, 16, "%.*f %s", unit > 0, value, units[unit]);
    return text;
}

static void print_heading(const struct bench *bench, const struct bench_suite *suite) {
    printf("\n%s, H = %lld, E = %lld, K = %lld, bfloat16\n", moer_operation_name(suite->operation),
           (long long)suite->dims.hidden, (long long)suite->dims.experts, (long long)suite->dims.top_k);
    printf("%10s  %10s  ", "tokens", "time");
    if (bench->peers->names[BENCH_LAUNCHED])
        printf("%10s  ", "launched");
    printf("%10s  %10s  %10s  %10s  %7s  ", "floor", "gemms", "time/floor", "time/gemms", "GB/s");
    if (bench->copy_speed > 0)
        printf("%7s  ", "of copy");
    printf("%10s\n", "workspace");
}

static void print_times(const struct bench *bench, const char *what, const double us[BENCH_TIMES]) {
    static const enum bench_time order[] = {BENCH_OURS, BENCH_LAUNCHED, BENCH_FLOOR, BENCH_GEMMS};
    char text[16];
    printf("%10s", what);
    for (int i = 0; i < BENCH_TIMES; i++)
        if (bench->peers->names[order[i]])
            printf("  %10s", format_time(text, us[order[i]]));
    printf("  %10.2f  %10.2f", us[BENCH_OURS] / us[BENCH_FLOOR], us[BENCH_OURS] / us[BENCH_GEMMS]);
}

static void print_case(const struct bench *bench, const struct bench_case *one,
                       const struct reference_report report[CALL_OUTPUTS]) {
    char text[256];
    snprintf(text, sizeof text, "%lld", (long long)one->tokens);
    if (one->checked) {
        const double speed = one->bytes / one->us[BENCH_OURS] * 1e-3;
        print_times(bench, text, one->us);
        printf("  %7.2f", speed);
        if (bench->copy_speed > 0)
            printf("  %6.1f%%", 100 * speed / bench->copy_speed);
        printf("  %10s\n", format_bytes(text, one->workspace_bytes));
        return;
    }
    printf("%10s  WRONG, and so not timed\n", text);
    for (int i = 0; i < CALL_OUTPUTS; i++)
        if (report[i].broken > 0) {
            reference_describe(&report[i], text, sizeof text);
            printf("            %s: %s\n", report[i].name, text);
        }
}

static void print_means(const struct bench *bench, const struct bench_suite *suite) {
    for (int geometric = 1; geometric >= 0; geometric--) {
        double us[BENCH_TIMES];
        for (int i = 0; i < BENCH_TIMES; i++)
            us[i] = bench_mean(suite, (enum bench_time)i, geometric);
        print_times(bench, geometric ? "geomean" : "mean", us);
        putchar('\n');
    }
}

/* ---- Suites ----------------------------------------------------------------------------------------------------- */

static int time_suite(const struct bench *bench, struct bench_suite *suite) {
    int result = 0;
    print_heading(bench, suite);
    for (size_t i = 0; i < suite->count && result != EXIT_TROUBLE; i++) {
        struct bench_case *one = &suite->cases[i];
        struct reference_report report[CALL_OUTPUTS];
        suite->dims.tokens = one->tokens;
        progress("%s, N = %lld: checked, then timed", moer_operation_name(suite->operation), (long long)one->tokens);
        const int outcome = bench_measure(bench, suite, one, report);
        progress(NULL);
        if (outcome != EXIT_TROUBLE)
            print_case(bench, one, report);
        result = outcome > result ? outcome : result;
    }
    if (result == 0)
        print_means(bench, suite);
    return result;
}

/* ---- The command line ------------------------------------------------------------------------------------------- */

enum { DEVICE, TOKENS, HIDDEN, EXPERTS, TOP_K, REPEATS, JSON, PLOT, OPTIONS };

/* Numbers separated by commas, each as an option of its own. */
static int read_tokens(const struct command_option *option, struct bench_suite *suite) {
    const char *next = option->value;
    for (size_t i = 0; i < suite->count; i++) {
        char piece[32];
        const size_t length = strcspn(next, ",");
        if (length >= sizeof piece)
            return complain("--%s: '%.*s' is no number of tokens", option->name, (int)length, next);
        snprintf(piece, sizeof piece, "%.*s", (int)length, next);
        const struct command_option one = {.name = option->name, .value = piece};
        if (read_size(&one, 1, INT32_MAX, &suite->cases[i].tokens) != 0)
            return EXIT_TROUBLE;
        next += length + 1;
    }
    return 0;
}

static int compare_tokens(const void *a, const void *b) {
    const int64_t m = ((const struct bench_case *)a)->tokens, n = ((const struct bench_case *)b)->tokens;
    return (m > n) - (m < n);
}

static int add_suite(struct bench *bench, enum moer_operation operation, const struct command_option *options) {
    struct bench_suite *suite = &bench->suites[bench->count++];
    const int64_t *tokens = draw_suite_tokens(operation, &suite->count);
    suite->operation = operation;
    suite->dims = draw_suite_dims(operation);
    if (options[TOKENS].value) {
        suite->count = 1;
        for (const char *c = options[TOKENS].value; *c; c++)
            suite->count += *c == ',';
    }
    suite->cases = calloc(suite->count, sizeof *suite->cases);
    if (!suite->cases)
        return complain("out of memory");
    for (size_t i = 0; i < suite->count; i++) {
        suite->cases[i].tokens = options[TOKENS].value ? 0 : tokens[i];
        for (int time = 0; time < BENCH_TIMES; time++)
            suite->cases[i].us[time] = NAN;
    }
    if (options[TOKENS].value && read_tokens(&options[TOKENS], suite) != 0)
        return EXIT_TROUBLE;
    qsort(suite->cases, suite->count, sizeof *suite->cases, compare_tokens);
    return read_dims(&options[HIDDEN], 1, &suite->dims);
}

/* How the device is timed; NULL where this build cannot. */
static const struct bench_peers *find_peers(DLDevice device) {
    if (device.device_type == kDLCPU)
        return &bench_peers_cpu;
#ifdef MOER_CUDA_BENCH
    return &bench_peers_cuda;
#else
    return NULL;
#endif
}

/* What is to be timed, and how. */
static int plan_bench(struct bench *bench, const char *name, const struct command_option *options) {
    enum moer_operation only = MOER_OPERATIONS;
    const char *device_name = options[DEVICE].value ? options[DEVICE].value : "cpu";
    if ((name && read_operation(name, &only) != 0) || read_device(device_name, &bench->device) != 0)
        return EXIT_TROUBLE;
    bench->peers = find_peers(bench->device);
    if (!bench->peers)
        return complain("this build has no benchmark for cuda devices");
    bench->repeats = bench->peers->least_repeats;
    if (read_number(&options[REPEATS], bench->peers->least_repeats, 1000000, &bench->repeats) != 0)
        return EXIT_TROUBLE;
    for (int operation = 0; operation < MOER_OPERATIONS; operation++)
        if ((!name || operation == (int)only) && add_suite(bench, (enum moer_operation)operation, options) != 0)
            return EXIT_TROUBLE;
    if (!bench_date(bench->date, sizeof bench->date))
        return complain("SOURCE_DATE_EPOCH '%s' must be a number of seconds", getenv("SOURCE_DATE_EPOCH"));
    return bench->peers->open(bench);
}

/* A file for results, opened before the work is done, and kept as it is until there are results. stream is NULL where
 * none is asked for. */
struct file {
    FILE *stream;
    int created;
};

static int open_file(const struct command_option *option, struct file *file) {
    file->created = option->value && access(option->value, F_OK) != 0;
    file->stream = option->value ? fopen(option->value, "a") : NULL;
    return option->value && !file->stream ? complain("%s: cannot be written: %s", option->value, strerror(errno)) : 0;
}

static int close_file(const struct command_option *option, struct file *file, const struct bench *bench,
                      void (*write)(const struct bench *, FILE *)) {
    if (!file->stream)
        return 0;
    if (write) {
        if (ftruncate(fileno(file->stream), 0) != 0)
            errno = 0; /* a pipe or a device, which has nothing to take away */
        write(bench, file->stream);
    } else if (file->created) {
        remove(option->value);
    }
    const int failed = fflush(file->stream) != 0 || ferror(file->stream), reason = errno;
    fclose(file->stream);
    return failed ? complain("%s: cannot be written: %s", option->value, strerror(reason)) : 0;
}

static int same_file(FILE *a, FILE *b) {
    struct stat one, other;
    return fstat(fileno(a), &one) == 0 && fstat(fileno(b), &other) == 0 && one.st_dev == other.st_dev &&
           one.st_ino == other.st_ino;
}

static int run_bench(struct bench *bench) {
    int result = 0;
    char setting[80];
    printf("%s, %s; %s, median of %llu; floor: %s, gemms: %s\n", bench->device_name, bench_setting(bench, setting),
           bench->method, (unsigned long long)bench->repeats, bench->peers->names[BENCH_FLOOR],
           bench->peers->names[BENCH_GEMMS]);
    if (bench->notes[0])
        printf("%s\n", bench->notes);
    for (size_t i = 0; i < bench->count && result != EXIT_TROUBLE; i++) {
        const int outcome = time_suite(bench, &bench->suites[i]);
        result = outcome > result ? outcome : result;
    }
    return result;
}

int bench_main(int argc, char **argv) {
    struct command_option options[OPTIONS] = {
        [DEVICE] = {"device", 0, 1, NULL},   [TOKENS] = {"tokens", 0, 1, NULL}, [HIDDEN] = {"hidden", 0, 1, NULL},
        [EXPERTS] = {"experts", 0, 1, NULL}, [TOP_K] = {"top-k", 0, 1, NULL},   [REPEATS] = {"repeats", 0, 1, NULL},
        [JSON] = {"json", 0, 1, NULL},       [PLOT] = {"plot", 0, 1, NULL}};
    static const char *const names[] = {"[OPERATION]"};
    const char *name;
    if (parse_arguments(argc, argv, options, OPTIONS, names, &name, 1) != 0)
        return EXIT_TROUBLE;
    struct bench bench = {0};
    struct file json = {0}, plot = {0};
    int result = plan_bench(&bench, name, options);
    if (result == 0)
        result = open_file(&options[JSON], &json);
    if (result == 0)
        result = open_file(&options[PLOT], &plot);
    if (result == 0 && json.stream && plot.stream && same_file(json.stream, plot.stream))
        result = complain("--json and --plot name one file, %s", options[JSON].value);
    if (result == 0)
        result = run_bench(&bench);
    const int write = result != EXIT_TROUBLE;
    if (close_file(&options[JSON], &json, &bench, write ? bench_write_json : NULL) != 0)
        result = EXIT_TROUBLE;
    if (close_file(&options[PLOT], &plot, &bench, write ? bench_write_plot : NULL) != 0)
        result = EXIT_TROUBLE;
    for (size_t i = 0; i < bench.count; i++)
        free(bench.suites[i].cases);
    return result;
}
