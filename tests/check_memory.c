/* SPDX-License-Identifier: Apache-2.0 */
/* Every allocation of the library's fails once: a status, outputs untouched, nothing left behind. The program is linked
 * with the static library, whose calls of the allocator the linker turns into those below (ld --wrap). */
#include "support.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void *__real_malloc(size_t size);
void *__real_calloc(size_t count, size_t size);
void *__real_aligned_alloc(size_t alignment, size_t size);
void __real_free(void *memory);
enum moer_status __real_call_run(const struct call *call);
void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t count, size_t size);
void *__wrap_aligned_alloc(size_t alignment, size_t size);
void __wrap_free(void *memory);
enum moer_status __wrap_call_run(const struct call *call);

/* While the library is watched: how often it asked for memory, how much of it is still there. The request of the number
 * failing is refused. */
static int watching, requests, live, failing;

static int granted(void) {
    if (!watching)
        return 1;
    requests++;
    live += requests != failing;
    return requests != failing;
}

void *__wrap_malloc(size_t size) {
    return granted() ? __real_malloc(size) : NULL;
}

void *__wrap_calloc(size_t count, size_t size) {
    return granted() ? __real_calloc(count, size) : NULL;
}

void *__wrap_aligned_alloc(size_t alignment, size_t size) {
    return granted() ? __real_aligned_alloc(alignment, size) : NULL;
}

void __wrap_free(void *memory) {
    live -= watching && memory;
    __real_free(memory);
}

static void watch(void) {
    requests = live = 0;
    watching = 1;
}

/* What support.c calls: it allocates too. */
enum moer_status __wrap_call_run(const struct call *call) {
    watch();
    const enum moer_status status = __real_call_run(call);
    watching = 0;
    return status;
}

static const struct plan plans[] = {
    {.dims = {600, 520, 40, 8}, .seed = 1},
    {.dims = {3, 40, 300, 260}, .absent = TO_WEIGHT, .seed = 2},
    {.dims = {70, 9, 4, 2}, .absent = TO_HIDDEN | TO_WEIGHT, .seed = 3},
    {.dims = {0, 16, 4, 2}, .accumulate = 1, .seed = 4},
};
enum { EACH = LENGTH(plans) * MOER_OPERATIONS * TYPES };

static struct trial *make_trial(int each) {
    struct plan plan = plans[each % LENGTH(plans)];
    plan.operation = (enum moer_operation)(each / LENGTH(plans) % MOER_OPERATIONS);
    plan.type = (enum type)(each / LENGTH(plans) / MOER_OPERATIONS);
    return trial_new(&plan);
}

START_TEST(calls) {
    struct trial *trial = make_trial(_i);
    enum moer_status status = MOER_NO_MEMORY;
    for (failing = 1; status != MOER_OK; failing++) {
        status = trial_run(trial, LIBRARY_SCRATCH);
        ck_assert_int_eq(live, 0);
        ck_assert_int_eq(status, requests < failing ? MOER_OK : MOER_NO_MEMORY);
        ck_assert(status == MOER_OK || strstr(moer_last_error(), "memory"));
    }
    ck_assert_int_gt(requests, 0);
    trial_free(trial);
}
END_TEST

START_TEST(calls_with_a_workspace) {
    struct trial *trial = make_trial(_i);
    trial_succeed(trial, OWN_SCRATCH);
    ck_assert_int_eq(requests, 0);
    trial_free(trial);
}
END_TEST

static enum moer_status new_tensor(DLTensor **tensor, int64_t rows) {
    watch();
    const enum moer_status status = moer_tensor_new(tensor, (DLDevice){kDLCPU, 0}, type_of[F16], 1, &rows);
    watching = 0;
    return status;
}

/* The struct; and data, where there is any. */
START_TEST(tensors) {
    DLTensor *tensor;
    for (failing = 1; failing <= 1 + _i; failing++) {
        ck_assert_int_eq(new_tensor(&tensor, _i), MOER_NO_MEMORY);
        ck_assert_ptr_nonnull(strstr(moer_last_error(), "memory"));
        ck_assert_ptr_null(tensor);
        ck_assert_int_eq(live, 0);
    }
    ck_assert_int_eq(new_tensor(&tensor, _i), MOER_OK);
    ck_assert_int_eq(live, 1 + _i);
    watching = 1;
    moer_tensor_free(tensor);
    watching = 0;
    ck_assert_int_eq(live, 0);
}
END_TEST

START_TEST(queries) {
    struct trial *trial = make_trial(_i);
    const DLTensor *tensor = trial_tensor(trial, "hidden_states");
    size_t bytes;
    char text[512];
    watch();
    const int failed = call_workspace_size(&trial->call, &bytes) || call_explain(&trial->call, text, sizeof text) ||
                       moer_backend_info(0, text, sizeof text) || moer_tensor_copy(tensor, tensor);
    watching = 0;
    ck_assert(!failed);
    ck_assert_int_eq(requests, 0);
    trial_free(trial);
}
END_TEST

int main(void) {
    const struct test tests[] = {{calls, EACH}, {calls_with_a_workspace, EACH}, {tensors, 2}, {queries, EACH}};
    DLTensor *tensor;
    unsetenv("MOER_TEST_DEVICE"); /* it is the host's memory that is watched */
    new_tensor(&tensor, 1);
    moer_tensor_free(tensor);
    if (requests == 0) {
        puts("SKIP: there is no static library, and what a shared one allocates cannot be watched");
        return 77;
    }
    return run_tests("memory", tests, LENGTH(tests));
}
