/* SPDX-License-Identifier: Apache-2.0 */
/* How much memory a call takes, what it does when there is none, and what the environment may ask for. */
#include "support.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

/* Where this is built with AddressSanitizer, its allocator must fail as others do. */
const char *__asan_default_options(void);
__attribute__((visibility("default"))) const char *__asan_default_options(void) {
    return "allocator_may_return_null=1";
}

/* ---- Memory ---- */

static const struct dims shapes[] = {
    {0, 0, 0, 0},
    {1, 1, 1, 1},
    {65536, 2048, 128, 8},
    {8192, 5120, 160, 8},
    {1 << 20, 7168, 256, 8},
    {INT64_C(1) << 40, 7168, 256, 8},
    {4096, 7168, 896, 22},
    {4096, 64, 4096, 4096},
    {1 << 20, 16, 65536, 65536},
    {1 << 10, 16, 1 << 20, 8},
    {1 << 10, 16, 1 << 20, 1 << 18},
    {1 << 10, 1, 1 << 20, 1 << 20},
    {100, 1 << 24, 8, 2},
    {1 << 20, 1 << 24, 512, 512},
    {1 << 20, 1 << 20, 1, 1},
    {INT64_C(1) << 50, 1, 1, 1},
};

/* 64 MiB and the float32 sums of the weight gradient, whatever the number of tokens or threads. */
START_TEST(workspace_bound) {
    struct dims dims = shapes[_i];
    double bound = 0x1p26 + 4.0 * (double)dims.experts * (double)dims.hidden;
    for (int n = 0; n < MOER_OPERATIONS * TYPES * 4; n++) {
        struct outline outline;
        size_t bytes = 0;
        enum moer_operation operation = (enum moer_operation)(n % MOER_OPERATIONS);
        make_outline(&outline, operation, dims, (enum type)(n / MOER_OPERATIONS % TYPES));
        if (n / MOER_OPERATIONS / TYPES & 1)
            call_set(&outline.call, "grad_hidden_states", NULL);
        if (n / MOER_OPERATIONS / TYPES & 2)
            call_set(&outline.call, "grad_logits", NULL);
        enum moer_status status = call_workspace_size(&outline.call, &bytes);
        ck_assert_msg(status == MOER_OK, "%s: %s", moer_operation_name(operation), moer_last_error());
        ck_assert_msg((double)bytes <= bound, "%s, %s: %zu bytes, but %.0f are the most",
                      moer_operation_name(operation), dtype_name(outline.tensors[0].dtype), bytes, bound);
    }
}
END_TEST

static rlim_t address_space(void) {
    unsigned long pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    ck_assert_msg(file && fscanf(file, "%lu", &pages) == 1, "/proc/self/statm is not there");
    fclose(file);
    return (rlim_t)pages * (rlim_t)sysconf(_SC_PAGESIZE);
}

/* The sums alone need more than what is left: a status, and nothing written. */
START_TEST(no_memory) {
    struct plan plan = {.operation = (enum moer_operation)_i, .dims = {2, 8192, 2048, 2}, .type = F32, .seed = 1};
    struct trial *trial = trial_new(&plan);
    struct rlimit before, tight;
    DLTensor *tensor;
    getrlimit(RLIMIT_AS, &before);
    tight = before;
    tight.rlim_cur = address_space() + (8 << 20);
    ck_assert_int_eq(setrlimit(RLIMIT_AS, &tight), 0);
    trial_fails(trial, MOER_NO_MEMORY, (const char *[]){"memory", NULL});
    ck_assert_int_eq(moer_tensor_new(&tensor, (DLDevice){kDLCPU, 0}, type_of[F32], 1, (int64_t[]){64 << 20}),
                     MOER_NO_MEMORY);
    ck_assert_ptr_null(tensor);
    setrlimit(RLIMIT_AS, &before);
    trial_check(trial);
    trial_free(trial);
}
END_TEST

/* ---- Environment ---- */

static const struct {
    const char *name, *value;
    enum moer_status status;
} settings[] = {
    {"MOER_CPU_ISA", "portable", MOER_OK},        {"MOER_CPU_ISA", "", MOER_OK},
    {"MOER_DETERMINISTIC", "0", MOER_OK},         {"MOER_DETERMINISTIC", "yes", MOER_UNSUPPORTED},
    {"MOER_CPU_ISA", "sparc", MOER_UNSUPPORTED},  {"MOER_CPU_PRODUCTS", "own", MOER_OK},
    {"MOER_CPU_PRODUCTS", "openblas", MOER_OK},   {"MOER_CPU_PRODUCTS", "", MOER_OK},
    {"MOER_CPU_PRODUCTS", "x", MOER_UNSUPPORTED}, {"MOER_DETERMINISTIC", "1", MOER_OK},
    {"MOER_DETERMINISTIC", "0", MOER_OK},         {"MOER_VERBOSE", "1", MOER_OK},
};

/* Read before the first call of a process. A name that means nothing here is refused, never passed over. */
START_TEST(environment) {
    struct plan plan = {.dims = {130, 72, 24, 4}, .type = F32, .seed = 2};
    setenv(settings[_i].name, settings[_i].value, 1);
    struct trial *trial = trial_new(&plan);
    if (settings[_i].status == MOER_OK)
        trial_check(trial);
    else
        trial_fails(trial, settings[_i].status, (const char *[]){settings[_i].name, settings[_i].value, NULL});
    trial_free(trial);
}
END_TEST

/* What the call says of its kernels is what was asked for. */
START_TEST(explained_kernels) {
    static const char *const wanted[][3] = {{"MOER_CPU_ISA", "portable", "portable"},
                                            {"MOER_CPU_PRODUCTS", "openblas", "OpenBLAS"}};
    struct outline outline;
    char text[256];
    unsetenv("MOER_DETERMINISTIC");
    unsetenv("MOER_CPU_PRODUCTS");
    setenv(wanted[_i][0], wanted[_i][1], 1);
    make_outline(&outline, MOER_SOFTMAX_TOPK_BACKWARD, (struct dims){16, 16, 8, 2}, BF16);
    ck_assert_int_eq(call_explain(&outline.call, text, sizeof text), MOER_OK);
    ck_assert_msg(strstr(text, wanted[_i][2]) != NULL, "\"%s\" does not name %s", text, wanted[_i][2]);
}
END_TEST

int main(void) {
    const struct test tests[] = {
        {workspace_bound, LENGTH(shapes)},
        {no_memory, MOER_OPERATIONS},
        {environment, LENGTH(settings)},
        {explained_kernels, 2},
    };
    return run_tests("limits", tests, LENGTH(tests));
}
