/* SPDX-License-Identifier: Apache-2.0 */
/* Calls from inside a parallel region of the caller's: each of its threads has a call of its own. The region is opened
 * in the process of the test, never before a fork. */
#include "support.h"

enum { CALLERS = 3, REPEATS = 10 };

START_TEST(inside_a_region) {
    struct plan plan = {.operation = (enum moer_operation)(_i % MOER_OPERATIONS),
                        .dims = {400, 520, 40, 8},
                        .type = (enum type)(_i / MOER_OPERATIONS),
                        .wide = OUTPUTS,
                        .seed = 1};
    struct trial *trials[CALLERS];
    enum moer_status status[CALLERS];
    for (int i = 0; i < CALLERS; i++)
        trials[i] = trial_new(&plan);
    trial_check(trials[0]);
    DLTensor *outside = copy_tensor(trial_output(trials[0], 0));
#pragma omp parallel for num_threads(CALLERS) schedule(static)
    for (int i = 0; i < CALLERS; i++) {
        status[i] = MOER_OK;
        for (int n = 0; n < REPEATS && status[i] == MOER_OK; n++)
            status[i] = call_run(&trials[i]->call);
    }
    for (int i = 0; i < CALLERS; i++) {
        ck_assert_int_eq(status[i], MOER_OK);
        trial_compare(trials[i]);
        for (int output = 0; output < CALL_OUTPUTS; output++)
            same_bits(trial_output(trials[i], output), trial_output(trials[0], output), "another thread's");
    }
    if (own_products(plan.type))
        same_bits(trial_output(trials[0], 0), outside, "inside a region");
    moer_tensor_free(outside);
    for (int i = 0; i < CALLERS; i++)
        trial_free(trials[i]);
}
END_TEST

int main(void) {
    const struct test tests[] = {{inside_a_region, MOER_OPERATIONS * TYPES}};
    return run_tests("openmp", tests, LENGTH(tests));
}
