/* SPDX-License-Identifier: Apache-2.0 */
/* The public interface but for numbers: versions, statuses, args structs of any size, devices and backends, tensors
 * that need no data, masks of any strides, and tensors made by the library. */
#include "support.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

static const DLDevice cpu = {kDLCPU, 0};
static const DLDataType float32 = {kDLFloat, 32, 1};
static const struct dims small = {6, 40, 8, 2};

static struct trial *small_trial(int operation, int absent) {
    struct plan plan = {.operation = (enum moer_operation)operation,
                        .dims = small,
                        .type = F32,
                        .absent = absent,
                        .padding = 3,
                        .seed = 1};
    return trial_new(&plan);
}

START_TEST(version) {
    char text[32];
    snprintf(text, sizeof text, "%d.%d.%d", MOER_VERSION_MAJOR, MOER_VERSION_MINOR, MOER_VERSION_PATCH);
    ck_assert_str_eq(moer_version(), text);
}
END_TEST

START_TEST(statuses) {
    const char *seen[MOER_DEVICE + 1];
    for (int status = MOER_OK; status <= MOER_DEVICE; status++) {
        seen[status] = moer_status_string((enum moer_status)status);
        ck_assert(seen[status] && seen[status][0]);
        for (int other = 0; other < status; other++)
            ck_assert_str_ne(seen[status], seen[other]);
    }
    ck_assert_ptr_nonnull(moer_status_string((enum moer_status)99));
    ck_assert_ptr_nonnull(moer_status_string((enum moer_status) - 1));
    ck_assert_str_eq(moer_status_string(MOER_OK), "ok");
    ck_assert_str_eq(moer_status_string(MOER_INVALID), "invalid argument");
}
END_TEST

static void *fail_elsewhere(void *unused) {
    (void)unused;
    ck_assert_str_eq(moer_last_error(), "");
    ck_assert_int_eq(moer_sigmoid_topk_backward(NULL), MOER_INVALID);
    ck_assert_str_ne(moer_last_error(), "");
    return NULL;
}

START_TEST(last_error) {
    pthread_t thread;
    char mine[512];
    struct trial *trial = small_trial(0, 0);
    ck_assert_str_eq(moer_last_error(), "");
    ck_assert_int_eq(moer_softmax_topk_backward(NULL), MOER_INVALID);
    ck_assert_ptr_nonnull(strstr(moer_last_error(), "moer_softmax_topk_backward: args is NULL"));
    strcpy(mine, moer_last_error());
    ck_assert_int_eq(pthread_create(&thread, NULL, fail_elsewhere, NULL), 0);
    pthread_join(thread, NULL);
    ck_assert_str_eq(moer_last_error(), mine);
    ck_assert_int_eq(call_run(&trial->call), MOER_OK);
    ck_assert_str_eq(moer_last_error(), "");
    trial_free(trial);
}
END_TEST

START_TEST(null_arguments) {
    struct trial *trial = small_trial(_i, 0);
    size_t bytes;
    ck_assert_int_eq(_i ? moer_sigmoid_topk_backward_workspace_size(NULL, &bytes)
                        : moer_softmax_topk_backward_workspace_size(NULL, &bytes),
                     MOER_INVALID);
    ck_assert_int_eq(call_workspace_size(&trial->call, NULL), MOER_INVALID);
    ck_assert_ptr_nonnull(strstr(moer_last_error(), "bytes is NULL"));
    ck_assert_int_eq(call_explain(&trial->call, NULL, 10), MOER_INVALID);
    ck_assert_ptr_nonnull(strstr(moer_last_error(), "text is NULL"));
    trial_free(trial);
}
END_TEST

/* ---- args structs of other sizes ---- */

union stretched {
    union {
        struct moer_softmax_topk_backward_args softmax;
        struct moer_sigmoid_topk_backward_args sigmoid;
    } args;
    char bytes[sizeof(struct call) + 64];
};

static enum moer_status run_stretched(int operation, const union stretched *args) {
    return operation ? moer_sigmoid_topk_backward(&args->args.sigmoid)
                     : moer_softmax_topk_backward(&args->args.softmax);
}

/* A newer caller: its new fields must be unset. */
START_TEST(larger_args) {
    struct trial *trial = small_trial(_i, 0);
    union stretched args;
    size_t size = trial->call.args.common.size;
    memset(&args, 0, sizeof args);
    memcpy(&args, &trial->call.args, size);
    args.args.softmax.size = size + 64;
    ck_assert_int_eq(run_stretched(_i, &args), MOER_OK);
    args.bytes[size + 63] = 1;
    ck_assert_int_eq(run_stretched(_i, &args), MOER_UNSUPPORTED);
    ck_assert_ptr_nonnull(strstr(moer_last_error(), "size"));
    /* Beyond size nothing is looked at. */
    args.args.softmax.size = size + 56;
    ck_assert_int_eq(run_stretched(_i, &args), MOER_OK);
    args.args.softmax.size = size + 60;
    ck_assert_int_eq(run_stretched(_i, &args), MOER_INVALID);
    args.args.softmax.size = 0;
    ck_assert_int_eq(run_stretched(_i, &args), MOER_INVALID);
    args.args.softmax.size = SIZE_MAX;
    ck_assert_int_eq(run_stretched(_i, &args), MOER_INVALID);
    trial_free(trial);
}
END_TEST

/* An older caller: the field behind the end of its struct is not read. */
START_TEST(smaller_args) {
    struct trial *trial = small_trial(_i, 0);
    size_t count;
    const struct moer_operand *operand = moer_operands((enum moer_operation)_i, &count);
    while (strcmp(operand->name, "grad_logits") != 0)
        operand++;
    trial->call.args.common.size = operand->offset;
    trial_succeed(trial, LIBRARY_SCRATCH);
    const unsigned char *logits = trial_output(trial, 2)->data;
    ck_assert_msg(logits[0] == 0xFF && logits[1] == 0xFF, "a tensor past the end of the struct was written");
    call_set(&trial->call, "grad_logits", NULL);
    trial_compare(trial);
    trial_free(trial);
}
END_TEST

/* ---- Tables ---- */

START_TEST(operand_table) {
    size_t count = 0, none = 99;
    struct call call;
    const struct moer_operand *operands = moer_operands((enum moer_operation)_i, &count);
    call_init(&call, (enum moer_operation)_i);
    ck_assert_uint_gt(count, 8);
    ck_assert_str_eq(operands[count - 1].name, "invalid_ids");
    for (size_t i = 0; i < count; i++) {
        ck_assert_uint_le(operands[i].offset + sizeof(DLTensor *), call.args.common.size);
        ck_assert_uint_eq(strspn(operands[i].axes, "NHEK1"), strlen(operands[i].axes));
        ck_assert_int_eq(operands[i].any_strides, strcmp(operands[i].name, "grad_expert_mask") == 0);
        for (size_t j = 0; j < i; j++) {
            ck_assert_str_ne(operands[i].name, operands[j].name);
            ck_assert_uint_ne(operands[i].offset, operands[j].offset);
        }
        if (operands[i].kind == MOER_DTYPE_OUTPUT || operands[i].kind == MOER_DTYPE_COUNT)
            ck_assert_int_eq(operands[i].required, 0);
    }
    ck_assert_ptr_null(moer_operands(MOER_OPERATIONS, &none));
    ck_assert_uint_eq(none, 0);
    ck_assert_ptr_null(moer_operation_name(MOER_OPERATIONS));
    ck_assert_str_eq(moer_operation_name((enum moer_operation)_i),
                     _i ? "sigmoid_topk_backward" : "softmax_topk_backward");
}
END_TEST

START_TEST(backends) {
    char text[2048], cut[8];
    ck_assert_uint_eq(moer_backend_count(), 2);
    ck_assert_str_eq(moer_backend_name(0), "cpu");
    ck_assert_str_eq(moer_backend_name(1), "cuda");
    ck_assert_ptr_null(moer_backend_name(2));
    ck_assert_ptr_null(moer_backend_unavailable(0));
    ck_assert_ptr_nonnull(moer_backend_unavailable(2));
    ck_assert_int_eq(moer_backend_info(0, text, sizeof text), MOER_OK);
    ck_assert_ptr_nonnull(strstr(text, "instruction sets: portable"));
    ck_assert_ptr_nonnull(strstr(text, "\nkernels: "));
    ck_assert_int_eq(moer_backend_info(0, cut, sizeof cut), MOER_OK);
    ck_assert_uint_eq(strlen(cut), sizeof cut - 1);
    ck_assert_int_eq(strncmp(cut, text, sizeof cut - 1), 0);
    ck_assert_int_eq(moer_backend_info(0, NULL, 0), MOER_OK);
    ck_assert_int_eq(moer_backend_info(0, NULL, 8), MOER_INVALID);
    ck_assert_int_eq(moer_backend_info(2, text, sizeof text), MOER_INVALID);
}
END_TEST

START_TEST(explains) {
    struct trial *trial = small_trial(_i, 0);
    char text[256] = "", cut[4] = "xxx";
    ck_assert_int_eq(call_explain(&trial->call, text, sizeof text), MOER_OK);
    ck_assert_ptr_nonnull(strstr(text, "cpu"));
    ck_assert_int_eq(call_explain(&trial->call, cut, sizeof cut), MOER_OK);
    ck_assert_int_eq(strncmp(cut, text, 3), 0);
    ck_assert_int_eq(cut[3], '\0');
    ck_assert_int_eq(call_explain(&trial->call, NULL, 0), MOER_OK);
    trial_free(trial);
}
END_TEST

/* ---- Devices ---- */

static void move_to(struct trial *trial, int type) {
    for (size_t i = 0; i < trial->count; i++)
        trial->tensors[i].tensor.device.device_type = (DLDeviceType)type;
}

START_TEST(devices) {
    struct trial *trial = small_trial(_i, 0);
    move_to(trial, kDLCUDAHost);
    trial_check(trial);
    trial->tensors[1].tensor.device.device_type = kDLCPU;
    trial_check(trial);
    move_to(trial, kDLMetal);
    trial_fails(trial, MOER_UNSUPPORTED, (const char *[]){"device type 8", NULL});
    move_to(trial, kDLCUDA);
    if (moer_backend_unavailable(1))
        trial_fails(trial, MOER_UNAVAILABLE, (const char *[]){"cuda", moer_backend_unavailable(1), NULL});
    move_to(trial, kDLCUDAManaged);
    if (moer_backend_unavailable(1))
        trial_fails(trial, MOER_UNAVAILABLE, (const char *[]){"cuda", NULL});
    trial_free(trial);
}
END_TEST

/* ---- Tensors of the library ---- */

START_TEST(new_tensors) {
    DLTensor *tensor;
    int64_t shape[2] = {3, 5}, empty[2] = {0, 5}, negative[2] = {3, -5}, huge[2] = {INT64_C(1) << 40, INT64_C(1) << 40};
    ck_assert_int_eq(moer_tensor_new(&tensor, cpu, float32, 2, shape), MOER_OK);
    ck_assert_uint_eq((uintptr_t)tensor->data % 256, 0);
    ck_assert_int_eq(tensor->ndim, 2);
    ck_assert_int_eq(tensor->shape[1], 5);
    memset(tensor->data, 1, 60);
    moer_tensor_free(tensor);
    ck_assert_int_eq(moer_tensor_new(&tensor, cpu, float32, 2, empty), MOER_OK);
    moer_tensor_free(tensor);
    ck_assert_int_eq(moer_tensor_new(&tensor, cpu, float32, 0, NULL), MOER_OK);
    moer_tensor_free(tensor);
    moer_tensor_free(NULL);

    ck_assert_int_eq(moer_tensor_new(&tensor, cpu, float32, 2, negative), MOER_INVALID);
    ck_assert_ptr_null(tensor);
    ck_assert_ptr_nonnull(strstr(moer_last_error(), "shape[1] is -5"));
    ck_assert_int_eq(moer_tensor_new(&tensor, cpu, float32, 2, huge), MOER_INVALID);
    ck_assert_int_eq(moer_tensor_new(&tensor, cpu, float32, 2, NULL), MOER_INVALID);
    ck_assert_int_eq(moer_tensor_new(&tensor, cpu, (DLDataType){kDLInt, 4, 1}, 2, shape), MOER_INVALID);
    ck_assert_int_eq(moer_tensor_new(NULL, cpu, float32, 2, shape), MOER_INVALID);
    ck_assert_int_eq(moer_tensor_new(&tensor, (DLDevice){kDLVulkan, 0}, float32, 2, shape), MOER_UNSUPPORTED);
    if (moer_backend_unavailable(1))
        ck_assert_int_eq(moer_tensor_new(&tensor, (DLDevice){kDLCUDA, 0}, float32, 2, shape), MOER_UNAVAILABLE);
}
END_TEST

START_TEST(copied_tensors) {
    DLTensor *from, *to, *other;
    int64_t shape[2] = {3, 5}, longer[2] = {3, 6}, strides[2] = {9, 1};
    ck_assert_int_eq(moer_tensor_new(&from, cpu, float32, 2, shape), MOER_OK);
    ck_assert_int_eq(moer_tensor_new(&to, cpu, float32, 2, shape), MOER_OK);
    ck_assert_int_eq(moer_tensor_new(&other, cpu, float32, 2, longer), MOER_OK);
    fill(from, 7.0);
    fill(to, 8.0);
    ck_assert_int_eq(moer_tensor_copy(to, from), MOER_OK);
    same_bits(to, from, "copy");
    ck_assert_int_eq(moer_tensor_copy(NULL, from), MOER_INVALID);
    ck_assert_int_eq(moer_tensor_copy(to, NULL), MOER_INVALID);
    ck_assert_int_eq(moer_tensor_copy(to, other), MOER_INVALID);
    ck_assert_ptr_nonnull(strstr(moer_last_error(), "shape[1]"));
    from->strides = strides;
    ck_assert_int_eq(moer_tensor_copy(to, from), MOER_INVALID);
    from->strides = NULL;
    int64_t *from_shape = from->shape;
    from->shape = NULL;
    ck_assert_int_eq(moer_tensor_copy(to, from), MOER_INVALID);
    from->shape = from_shape;
    from->dtype.code = kDLInt;
    ck_assert_int_eq(moer_tensor_copy(to, from), MOER_INVALID);
    moer_tensor_free(from);
    moer_tensor_free(to);
    moer_tensor_free(other);
}
END_TEST

/* Any number of rows without an element: done at once. */
START_TEST(nothing_to_do) {
    int64_t many = INT64_C(1) << 56, wide[] = {many, 0}, none[] = {0, 0}, high[] = {0, many};
    int tokens = _i; /* or hidden columns */
    DLTensor hidden = {NULL, {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, tokens ? wide : high, NULL, 0}, gate = hidden,
             rest = hidden, ids = hidden;
    gate.shape = tokens ? none : high;
    ids.shape = rest.shape = tokens ? wide : none;
    ids.dtype = (DLDataType){kDLInt, 64, 1};
    struct moer_softmax_topk_backward_args args = {.size = sizeof args,
                                                   .hidden_states = &hidden,
                                                   .gate_weight = &gate,
                                                   .routing_probs = &rest,
                                                   .selected_experts = &ids,
                                                   .grad_routing_weights = &rest,
                                                   .grad_hidden_states = &hidden,
                                                   .grad_gate_weight = &gate,
                                                   .grad_logits = &rest};
    ck_assert_msg(moer_softmax_topk_backward(&args) == MOER_OK, "%s", moer_last_error());
}
END_TEST

int main(void) {
    const struct test tests[] = {
        {version, 1},
        {statuses, 1},
        {last_error, 1},
        {null_arguments, MOER_OPERATIONS},
        {larger_args, MOER_OPERATIONS},
        {smaller_args, MOER_OPERATIONS},
        {operand_table, MOER_OPERATIONS},
        {backends, 1},
        {explains, MOER_OPERATIONS},
        {nothing_to_do, 2},
        {devices, MOER_OPERATIONS},
        {new_tensors, 1},
        {copied_tensors, 1},
    };
    return run_tests("api", tests, LENGTH(tests));
}
