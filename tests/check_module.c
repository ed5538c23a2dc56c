/* SPDX-License-Identifier: Apache-2.0 */
/* The module loader: a backend dropped into a folder gets the calls of its devices; one that does not fit is refused
 * with the reason. Each test is a process of its own, so that each loads afresh. */
#include <moerouter/moerouter.h>
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPECT_ERROR(text) ck_assert_msg(strstr(moer_last_error(), text), "no '%s' in: %s", text, moer_last_error())

static const DLDevice device = {kDLCUDA, 0};
static const DLDataType float32 = {kDLFloat, 32, 1}, int64 = {kDLInt, 64, 1};

static DLTensor *on_device(DLDataType dtype, int64_t rows, int64_t columns) {
    DLTensor *tensor;
    ck_assert_int_eq(moer_tensor_new(&tensor, device, dtype, 2, (int64_t[]){rows, columns}), MOER_OK);
    return tensor;
}

static struct moer_softmax_topk_backward_args softmax_call(void) {
    return (struct moer_softmax_topk_backward_args){.size = sizeof(struct moer_softmax_topk_backward_args),
                                                    .hidden_states = on_device(float32, 4, 8),
                                                    .gate_weight = on_device(float32, 6, 8),
                                                    .routing_probs = on_device(float32, 4, 6),
                                                    .selected_experts = on_device(int64, 4, 2),
                                                    .grad_routing_weights = on_device(float32, 4, 2),
                                                    .grad_hidden_states = on_device(float32, 4, 8)};
}

START_TEST(calls_reach_the_module) {
    struct moer_softmax_topk_backward_args args = softmax_call(), seen;
    args.stream = &seen;
    ck_assert_int_eq(moer_softmax_topk_backward(&args), MOER_OK);
    ck_assert_mem_eq(&seen, &args, sizeof args);
    ck_assert_str_eq(moer_last_error(), "");
    char text[64];
    ck_assert_int_eq(moer_softmax_topk_backward_explain(&args, text, sizeof text), MOER_OK);
    ck_assert_str_eq(text, "fake kernel");
    ck_assert_ptr_null(moer_backend_unavailable(1));
    ck_assert_int_eq(moer_backend_info(1, text, sizeof text), MOER_OK);
    ck_assert_str_eq(text, "devices: none\n");
}
END_TEST

START_TEST(older_callers_are_extended) {
    struct moer_softmax_topk_backward_args args = softmax_call(), seen;
    args.stream = &seen;
    args.size = offsetof(struct moer_softmax_topk_backward_args, grad_hidden_states);
    ck_assert_int_eq(moer_softmax_topk_backward(&args), MOER_OK);
    ck_assert_uint_eq(seen.size, sizeof seen);
    ck_assert_ptr_eq(seen.hidden_states, args.hidden_states);
    ck_assert_ptr_null(seen.grad_hidden_states);
}
END_TEST

START_TEST(workspace_is_checked_before_the_module) {
    static _Alignas(256) char workspace[1000];
    struct moer_softmax_topk_backward_args args = softmax_call(), seen;
    args.stream = &seen;
    args.workspace = workspace;
    args.workspace_size = 999;
    ck_assert_int_eq(moer_softmax_topk_backward(&args), MOER_INVALID);
    EXPECT_ERROR("workspace_size is 999 but this call needs 1000 bytes");
    args.workspace_size = 1000;
    ck_assert_int_eq(moer_softmax_topk_backward(&args), MOER_OK);
}
END_TEST

START_TEST(missing_operations_are_unsupported) {
    struct moer_sigmoid_topk_backward_args args = {.size = sizeof args,
                                                   .hidden_states = on_device(float32, 4, 8),
                                                   .weight = on_device(float32, 6, 8),
                                                   .grad_topk_weights = on_device(float32, 4, 2),
                                                   .scores = on_device(float32, 4, 6),
                                                   .topk_indices = on_device(int64, 4, 2),
                                                   .topk_weights_normalized = on_device(float32, 4, 2),
                                                   .denominator = on_device(float32, 4, 1)};
    ck_assert_int_eq(moer_sigmoid_topk_backward(&args), MOER_UNSUPPORTED);
    EXPECT_ERROR("moer_sigmoid_topk_backward: this device has no such operation");
}
END_TEST

START_TEST(errors_of_the_module_arrive) {
    setenv("FAKE_MODULE", "fault", 1);
    struct moer_softmax_topk_backward_args args = softmax_call();
    ck_assert_int_eq(moer_softmax_topk_backward(&args), MOER_DEVICE);
    ck_assert_str_eq(moer_last_error(), "moer_softmax_topk_backward: the device is on fire");
    DLTensor *tensor = (DLTensor *)&args;
    ck_assert_int_eq(moer_tensor_new(&tensor, (DLDevice){kDLCUDA, 7}, float32, 0, NULL), MOER_UNAVAILABLE);
    ck_assert_ptr_null(tensor);
    EXPECT_ERROR("there is no device 7");
}
END_TEST

START_TEST(tensors_travel) {
    DLTensor *there = on_device(float32, 2, 3), *here;
    ck_assert_int_eq(moer_tensor_new(&here, (DLDevice){kDLCPU, 0}, float32, 2, (int64_t[]){2, 3}), MOER_OK);
    float *values = here->data;
    for (int i = 0; i < 6; i++)
        values[i] = (float)i;
    ck_assert_int_eq(moer_tensor_copy(there, here), MOER_OK);
    memset(values, 0, 6 * sizeof *values);
    ck_assert_int_eq(moer_tensor_copy(here, there), MOER_OK);
    for (int i = 0; i < 6; i++)
        ck_assert_float_eq(values[i], (float)i);
    moer_tensor_free(there);
    moer_tensor_free(here);
}
END_TEST

static const struct {
    const char *fault, *reason;
} misfits[] = {{"abi", "backend ABI"}, {"name", "a backend called npu"}, {"unavailable", "no such device today"}};

static void expect_unavailable(const char *reason) {
    DLTensor *tensor;
    ck_assert_int_eq(moer_tensor_new(&tensor, device, float32, 1, (int64_t[]){1}), MOER_UNAVAILABLE);
    EXPECT_ERROR("the cuda backend is not available");
    EXPECT_ERROR(reason);
    ck_assert_ptr_nonnull(strstr(moer_backend_unavailable(1), reason));
}

START_TEST(misfits_are_refused) {
    setenv("FAKE_MODULE", misfits[_i].fault, 1);
    expect_unavailable(misfits[_i].reason);
}
END_TEST

START_TEST(no_module_is_said) {
    setenv("MOER_BACKEND_PATH", "/nonexistent", 1);
    expect_unavailable("/nonexistent/cuda.so");
}
END_TEST

START_TEST(what_is_no_module_is_refused) {
    char folder[] = "/tmp/moerouter-XXXXXX", file[sizeof folder + 8];
    ck_assert_ptr_nonnull(mkdtemp(folder));
    snprintf(file, sizeof file, "%s/cuda.so", folder);
    FILE *text = fopen(file, "w");
    fputs("not a shared object, however long it may be, and it is longer than an ELF header: 64 bytes\n", text);
    fclose(text);
    setenv("MOER_BACKEND_PATH", folder, 1);
    expect_unavailable("cuda.so");
    unlink(file);
    rmdir(folder);
}
END_TEST

#ifdef REAL_MODULE
/* The CUDA module that was built: it loads on any machine, and without a driver or a device it says so. */
START_TEST(real_module_is_polite) {
    setenv("MOER_BACKEND_PATH", REAL_MODULE, 1);
    const char *reason = moer_backend_unavailable(1);
    ck_assert_msg(!reason || !strstr(reason, "module"), "%s", reason);
    printf("cuda: %s\n", reason ? reason : "available");
}
END_TEST
#endif

int main(void) {
    if (access(MODULE_FOLDER "/cuda.so", R_OK)) {
        puts("SKIP: no shared objects were built");
        return 77;
    }
    setenv("MOER_BACKEND_PATH", MODULE_FOLDER, 1);
    Suite *suite = suite_create("module");
    TCase *tests = tcase_create("loader");
    tcase_add_test(tests, calls_reach_the_module);
    tcase_add_test(tests, older_callers_are_extended);
    tcase_add_test(tests, workspace_is_checked_before_the_module);
    tcase_add_test(tests, missing_operations_are_unsupported);
    tcase_add_test(tests, errors_of_the_module_arrive);
    tcase_add_test(tests, tensors_travel);
    tcase_add_loop_test(tests, misfits_are_refused, 0, sizeof misfits / sizeof *misfits);
    tcase_add_test(tests, no_module_is_said);
    tcase_add_test(tests, what_is_no_module_is_refused);
#ifdef REAL_MODULE
    tcase_add_test(tests, real_module_is_polite);
#endif
    suite_add_tcase(suite, tests);
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    int failed = srunner_ntests_failed(runner), ran = srunner_ntests_run(runner);
    srunner_free(runner);
    return failed || !ran;
}
