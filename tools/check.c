/* SPDX-License-Identifier: Apache-2.0 */
/* moerouter check: holds operations on a device to the plain double-precision loop, a row a case. */
#include "command.h"

#include <stdio.h>

#include "check_cases.h"
#include "device.h"
#include "draw.h"
#include "reference.h"

struct tally {
    DLDevice device;
    const char *device_name;
    long passed, failed, unsupported;
};

/* The least share of an output's elements that the public suite wants within its tolerance. */
static const double suite_share = 0.99;

static void print_heading(void) {
    printf("%-21s  %-15s  %-8s  %-8s  %5s %5s %4s %4s  %-20s  %-20s  %-20s  %7s\n", "operation", "case", "inputs",
           "outputs", "N", "H", "E", "K", "grad_hidden_states", "weight gradient", "grad_logits", "suite's");
}

/* "0.5 at 12,3": the worst error as a share of its bound, and the row and column. */
static void print_worst(const struct reference_report *report) {
    char text[64] = "exact";
    if (report->elements == 0)
        text[0] = '\0';
    else if (report->worst > 0)
        snprintf(text, sizeof text, "%.3g at %lld,%lld", report->worst, (long long)report->row,
                 (long long)report->column);
    printf("  %-20s", text);
}

static double least_share(const struct reference_report report[CALL_OUTPUTS]) {
    double share = 1;
    for (int i = 0; i < CALL_OUTPUTS; i++)
        share = report[i].suite_matched < share ? report[i].suite_matched : share;
    return share;
}

static void print_case(const struct check_case *one) {
    printf("%-21s  %-15s  %-8s  %-8s  %5lld %5lld %4lld %4lld", moer_operation_name(one->operation), one->name,
           dtype_name(one->dtype), dtype_name(one->output_dtype), (long long)one->dims.tokens,
           (long long)one->dims.hidden, (long long)one->dims.experts, (long long)one->dims.top_k);
}

static void print_row(const struct check_case *one, const struct reference_report report[CALL_OUTPUTS], int passed) {
    print_case(one);
    for (int i = 0; i < CALL_OUTPUTS; i++)
        print_worst(&report[i]);
    printf("  %6.2f%%  %s\n", 100 * least_share(report), passed ? "pass" : "FAIL");
    for (int i = 0; i < CALL_OUTPUTS; i++)
        if (report[i].broken > 0) {
            char text[256];
            reference_describe(&report[i], text, sizeof text);
            printf("    %s: %s\n", report[i].name, text);
        }
}

/* How many elements of grad_hidden_states differ from those of grad_logits. */
static int64_t count_different(const struct call *call) {
    const DLTensor *hidden = call_tensor(call, "grad_hidden_states"), *logits = call_tensor(call, "grad_logits");
    int64_t different = 0;
    for (int64_t n = 0; n < logits->shape[0]; n++)
        for (int64_t e = 0; e < logits->shape[1]; e++)
            different += get_element(hidden, n, e, 0) != get_element(logits, n, e, 0);
    return different;
}

static int judge(struct tally *tally, const struct check_case *one, const struct call *call) {
    const struct reference_options options = {.gpu = tally->device.device_type == kDLCUDA,
                                              .exact = one->rule == CHECK_EXACT,
                                              .suite_atol = draw_suite_atol(one->operation, one->dims.tokens)};
    struct reference_report report[CALL_OUTPUTS];
    const int result = reference_compare(call, &options, report);
    if (result < 0)
        return complain("out of memory for the comparison");
    const int64_t different = one->rule == CHECK_IDENTITY ? count_different(call) : 0;
    const int within = one->rule != CHECK_SUITE || least_share(report) >= suite_share;
    const int passed = result == 0 && different == 0 && within;
    progress(NULL);
    print_row(one, report, passed);
    if (different > 0)
        printf("    %lld elements of grad_hidden_states differ from grad_logits\n", (long long)different);
    if (!within)
        printf("    less than %g%% of an output is within the suite's tolerance\n", 100 * suite_share);
    *(passed ? &tally->passed : &tally->failed) += 1;
    return 0;
}

/* A case that the device's backend says it cannot do. */
static void skip(struct tally *tally, const struct check_case *one) {
    progress(NULL);
    print_case(one);
    printf("  not supported: %s\n", library_error(MOER_UNSUPPORTED));
    tally->unsupported++;
}

static int check_one(const struct check_case *one, void *context) {
    struct tally *tally = context;
    struct call host, placed;
    progress("%s, %s, N = %lld", moer_operation_name(one->operation), one->name, (long long)one->dims.tokens);
    call_init(&placed, one->operation);
    enum moer_status status = check_case_draw(one, &host);
    if (status == MOER_OK)
        status = device_place(&host, tally->device, &placed);
    if (status == MOER_OK)
        status = call_run(&placed);
    if (status == MOER_OK)
        status = device_fetch(&host, &placed, MOER_DTYPE_OUTPUT);
    int result = 0;
    if (status == MOER_OK)
        result = judge(tally, one, &host);
    else if (status == MOER_UNSUPPORTED)
        skip(tally, one);
    else
        result = complain("%s on %s: %s, N = %lld: %s", moer_operation_name(one->operation), tally->device_name,
                          one->name, (long long)one->dims.tokens, library_error(status));
    device_release(&host, &placed);
    call_free(&host);
    return result;
}

enum { DEVICE, QUICK, OPTIONS };

int check_main(int argc, char **argv) {
    struct command_option options[OPTIONS] = {[DEVICE] = {"device", 0, 1, NULL}, [QUICK] = {"quick", 0, 0, NULL}};
    static const char *const names[] = {"[OPERATION]"};
    const char *name;
    enum moer_operation only = MOER_OPERATIONS;
    if (parse_arguments(argc, argv, options, OPTIONS, names, &name, 1) != 0 ||
        (name && read_operation(name, &only) != 0))
        return EXIT_TROUBLE;
    struct tally tally = {.device_name = options[DEVICE].value ? options[DEVICE].value : "cpu"};
    if (read_device(tally.device_name, &tally.device) != 0)
        return EXIT_TROUBLE;
    int result = 0;
    print_heading();
    for (int operation = 0; operation < MOER_OPERATIONS && result == 0; operation++)
        if (!name || operation == (int)only)
            result = check_cases((enum moer_operation)operation, options[QUICK].value != NULL, check_one, &tally);
    progress(NULL);
    if (tally.passed + tally.failed + tally.unsupported > 0) {
        printf("%ld passed, %ld failed", tally.passed, tally.failed);
        if (tally.unsupported > 0)
            printf(", %ld skipped", tally.unsupported);
        putchar('\n');
    }
    if (result == 0 && tally.passed + tally.failed == 0)
        return complain("nothing could be checked");
    return result == 0 && tally.failed > 0 ? EXIT_BROKEN : result;
}
