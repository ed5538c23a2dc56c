/* SPDX-License-Identifier: Apache-2.0 */
/* What must not move a bit: another run, more threads, another address, rows far apart, calls side by side, how the
 * caller has set its arithmetic. */
#include "support.h"

#include <dlfcn.h>
#include <fenv.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>

enum { EACH = MOER_OPERATIONS * TYPES, REPEATS = 20, CALLERS = 4 };

/* Large enough for several blocks of tokens, slices of columns, and threads. float32 outputs: rounding to 16 bits would
 * hide most differences. */
static struct plan large_plan(int each) {
    return (struct plan){.operation = (enum moer_operation)(each % MOER_OPERATIONS),
                         .dims = {600, 520, 40, 8},
                         .type = (enum type)(each / MOER_OPERATIONS),
                         .wide = OUTPUTS,
                         .seed = 1};
}

START_TEST(every_run) {
    struct plan plan = large_plan(_i);
    struct trial *trial = trial_new(&plan);
    DLTensor *first[CALL_OUTPUTS];
    trial_check(trial);
    copy_outputs(trial, first);
    for (int n = 0; n < REPEATS; n++) {
        trial_succeed(trial, n % 2 ? OWN_SCRATCH : LIBRARY_SCRATCH);
        expect_outputs(trial, first, "another run");
    }
    free_outputs(first);
    trial_free(trial);
}
END_TEST

/* The OpenMP runtime is the library's affair; it is asked for by name. */
static void set_threads(int count) {
    void (*set)(int);
    *(void **)&set = dlsym(RTLD_DEFAULT, "omp_set_num_threads");
    ck_assert_msg(set != NULL, "the OpenMP runtime has no omp_set_num_threads");
    set(count);
}

START_TEST(number_of_threads) {
    static const int counts[] = {1, 2, 3, 16};
    struct plan plan = large_plan(_i);
    struct trial *trial = trial_new(&plan);
    DLTensor *first[CALL_OUTPUTS];
    for (int n = 0; n < LENGTH(counts); n++) {
        set_threads(counts[n]);
        trial_succeed(trial, OWN_SCRATCH);
        if (n == 0)
            copy_outputs(trial, first);
        else if (own_products(plan.type))
            expect_outputs(trial, first, "another number of threads");
    }
    trial_compare(trial);
    free_outputs(first);
    trial_free(trial);
}
END_TEST

/* With grad_hidden_states in float32, and in the type of the hidden states: kernels differ. */
START_TEST(address) {
    struct plan plan = large_plan(_i % EACH);
    if (_i >= EACH)
        plan.wide = TO_WEIGHT | TO_LOGITS;
    struct trial *aligned = trial_new(&plan);
    plan.flush = 1;
    struct trial *flush = trial_new(&plan);
    trial_check(aligned);
    trial_check(flush);
    for (int i = 0; i < CALL_OUTPUTS; i++)
        same_bits(trial_output(aligned, i), trial_output(flush, i), "another address");
    trial_free(aligned);
    trial_free(flush);
}
END_TEST

/* ---- Far apart ---- */

static void copy_elements(const DLTensor *to, const DLTensor *from) {
    for (int64_t i = 0; i < to->shape[0]; i++)
        for (int64_t j = 0; j < to->shape[1]; j++)
            for (int64_t k = 0; k < (to->ndim > 2 ? to->shape[2] : 1); k++)
                set_element(to, i, j, k, get_element(from, i, j, k));
}

/* Every tensor in turn with more than 2^31 elements between its rows, in memory of which only the rows are touched. */
START_TEST(rows_far_apart) {
    struct plan plan = {
        .operation = (enum moer_operation)_i, .dims = {3, 40, 4, 2}, .type = BF16, .padding = 1, .seed = 2};
    struct trial *trial = trial_new(&plan);
    DLTensor *expected[CALL_OUTPUTS];
    int64_t far = (INT64_C(1) << 31) + 11;
    trial_check(trial);
    copy_outputs(trial, expected);
    for (size_t i = 0; i < trial->count; i++) {
        DLTensor *tensor = &trial->tensors[i].tensor, near = *tensor;
        int axis = tensor->ndim == 3 ? 2 : 0;
        size_t bytes = (size_t)(tensor->shape[axis] * far + 64) * dtype_size(tensor->dtype);
        void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        ck_assert_msg(memory != MAP_FAILED, "%zu bytes of address space are not to be had", bytes);
        int64_t strides[3];
        memcpy(strides, tensor->strides, sizeof strides);
        strides[axis] = far;
        tensor->strides = strides;
        tensor->data = memory;
        tensor->byte_offset = 0;
        copy_elements(tensor, &near);
        ck_assert_msg(call_run(&trial->call) == MOER_OK, "%s", moer_last_error());
        expect_outputs(trial, expected, trial->tensors[i].operand->name);
        *tensor = near;
        munmap(memory, bytes);
    }
    free_outputs(expected);
    trial_free(trial);
}
END_TEST

/* ---- Side by side ---- */

static void *call_often(void *call) {
    enum moer_status status = MOER_OK;
    for (int n = 0; n < REPEATS && status == MOER_OK; n++)
        status = call_run(call);
    return status == MOER_OK ? call : NULL;
}

START_TEST(several_callers) {
    struct plan plan = large_plan(_i);
    struct trial *trials[CALLERS];
    pthread_t threads[CALLERS];
    DLTensor *expected[CALLERS][CALL_OUTPUTS];
    for (int i = 0; i < CALLERS; i++) {
        plan.seed = (uint64_t)i;
        trials[i] = trial_new(&plan);
        trial_check(trials[i]);
        copy_outputs(trials[i], expected[i]);
    }
    for (int i = 0; i < CALLERS; i++)
        ck_assert_int_eq(pthread_create(&threads[i], NULL, call_often, trial_place(trials[i])), 0);
    for (int i = 0; i < CALLERS; i++) {
        void *result;
        pthread_join(threads[i], &result);
        ck_assert_ptr_nonnull(result);
    }
    for (int i = 0; i < CALLERS; i++) {
        trial_fetch(trials[i], MOER_OK);
        if (own_products(plan.type))
            expect_outputs(trials[i], expected[i], "calls side by side");
        trial_compare(trials[i]);
        free_outputs(expected[i]);
        trial_free(trials[i]);
    }
}
END_TEST

#ifdef __x86_64__
/* Flush subnormal results to zero, and take subnormal operands for zero: what -ffast-math sets for a whole process. */
static void flush_subnormals(int on) {
    unsigned control = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(on ? control | 0x8040 : control & ~0x8040u);
}
static int flushes_subnormals(void) {
    return (__builtin_ia32_stmxcsr() & 0x8040) != 0;
}
#else
static void flush_subnormals(int on) {
    (void)on;
}
static int flushes_subnormals(void) {
    return 0;
}
#endif

START_TEST(caller_s_arithmetic) {
    struct plan plan = large_plan(_i);
    struct trial *trial = trial_new(&plan);
    DLTensor *expected[CALL_OUTPUTS];
    const DLTensor *gradient =
        trial_tensor(trial, plan.operation == MOER_SOFTMAX_TOPK_BACKWARD ? "grad_router_logits" : "grad_topk_weights");
    for (int64_t n = 0; n < gradient->shape[0]; n++)
        for (int64_t e = 0; e < gradient->shape[1]; e++) /* so that float16 has subnormals */
            set_element(gradient, n, e, 0, get_element(gradient, n, e, 0) * 1e-3);
    if (plan.operation == MOER_SIGMOID_TOPK_BACKWARD) /* no float32 */
        trial->call.args.sigmoid.routed_scaling_factor = 0.7;
    trial_check(trial);
    copy_outputs(trial, expected);
    const int roundings[] = {FE_TONEAREST, FE_UPWARD, FE_TOWARDZERO};
    for (int i = 0; i < LENGTH(roundings); i++) {
        fesetround(roundings[i]);
        flush_subnormals(1);
        int before = flushes_subnormals();
        enum moer_status status = trial_run(trial, LIBRARY_SCRATCH);
        ck_assert_int_eq(fegetround(), roundings[i]);
        ck_assert_int_eq(flushes_subnormals(), before);
        flush_subnormals(0);
        fesetround(FE_TONEAREST);
        ck_assert_int_eq(status, MOER_OK);
        if (own_products(plan.type)) /* OpenBLAS's threads are not ours to set */
            expect_outputs(trial, expected, "the caller's arithmetic");
    }
    free_outputs(expected);
    trial_free(trial);
}
END_TEST

int main(void) {
    const struct test tests[] = {
        {every_run, EACH},
        {number_of_threads, host_only(EACH, "number_of_threads", "threads are the CPU's")},
        {address, 2 * EACH},
        {rows_far_apart, host_only(MOER_OPERATIONS, "rows_far_apart", "reserved memory is the host's; see check_cuda")},
        {several_callers, EACH},
        {caller_s_arithmetic, EACH},
    };
    return run_tests("bits", tests, LENGTH(tests));
}
