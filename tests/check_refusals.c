/* SPDX-License-Identifier: Apache-2.0 */
/* Every rule of a call, broken one at a time: the status, and a message that names function, tensor, rule and value.
 * That nothing was written is checked along with it. */
#include "support.h"

#include <stdio.h>
#include <string.h>

/* What a refusal changes in a call that is otherwise right. */
enum change { ABSENT, NDIM, SHAPE_0, SHAPE_1, NO_SHAPE, DTYPE, STRIDE_0, STRIDE_1, NO_DATA, SHIFTED, DEVICE };

enum { SOFTMAX = MOER_SOFTMAX_TOPK_BACKWARD, SIGMOID = MOER_SIGMOID_TOPK_BACKWARD, WORDS = 4 };

/* N = 6, H = 40, E = 8, K = 2, all float32 and padded by 8. */
static const struct dims small = {6, 40, 8, 2};

#define FLOAT64                                                                                                        \
    { kDLFloat, 64, 1 }
#define BFLOAT16                                                                                                       \
    { kDLBfloat, 16, 1 }
#define INT16                                                                                                          \
    { kDLInt, 16, 1 }
#define UINT64                                                                                                         \
    { kDLUInt, 64, 1 }
#define FLOAT32                                                                                                        \
    { kDLFloat, 32, 1 }
#define INT64X2                                                                                                        \
    { kDLInt, 64, 2 }
#define FLOAT32X2                                                                                                      \
    { kDLFloat, 32, 2 }

static const struct refusal {
    int operation;
    const char *tensor;
    enum change change;
    int64_t value;
    DLDataType dtype;
    const char *words[WORDS];
} refusals[] = {
    {SOFTMAX, "hidden_states", ABSENT, .words = {"hidden_states", "NULL"}},
    {SOFTMAX, "gate_weight", ABSENT, .words = {"gate_weight", "NULL"}},
    {SOFTMAX, "routing_probs", ABSENT, .words = {"routing_probs", "NULL"}},
    {SOFTMAX, "selected_experts", ABSENT, .words = {"selected_experts", "NULL"}},
    {SOFTMAX, "grad_routing_weights", ABSENT, .words = {"grad_routing_weights", "NULL"}},
    {SIGMOID, "grad_topk_weights", ABSENT, .words = {"grad_topk_weights", "NULL"}},
    {SIGMOID, "weight", ABSENT, .words = {"weight", "NULL"}},
    {SIGMOID, "scores", ABSENT, .words = {"scores", "NULL"}},
    {SIGMOID, "topk_indices", ABSENT, .words = {"topk_indices", "NULL"}},
    {SIGMOID, "topk_weights_normalized", ABSENT, .words = {"topk_weights_normalized", "NULL"}},
    {SIGMOID, "denominator", ABSENT, .words = {"denominator", "NULL"}},

    {SOFTMAX, "hidden_states", NDIM, 3, .words = {"hidden_states.ndim is 3", "2"}},
    {SOFTMAX, "grad_expert_mask", NDIM, 2, .words = {"grad_expert_mask.ndim is 2", "3"}},
    {SIGMOID, "denominator", NDIM, 1, .words = {"denominator.ndim is 1", "2"}},
    {SIGMOID, "grad_weight", NDIM, 0, .words = {"grad_weight.ndim is 0", "2"}},
    {SIGMOID, "scores", NDIM, -1, .words = {"scores.ndim is -1", "2"}},
    {SOFTMAX, "gate_weight", NO_SHAPE, .words = {"gate_weight.shape is NULL"}},

    {SOFTMAX, "hidden_states", SHAPE_0, -1, .words = {"hidden_states.shape[0] is -1", "negative"}},
    {SOFTMAX, "gate_weight", SHAPE_1, 41, .words = {"gate_weight.shape[1] is 41", "hidden_states.shape[1] is 40"}},
    {SOFTMAX, "routing_probs", SHAPE_1, 9, .words = {"routing_probs.shape[1] is 9", "gate_weight.shape[0] is 8"}},
    {SOFTMAX, "routing_probs", SHAPE_0, 5, .words = {"routing_probs.shape[0] is 5", "hidden_states.shape[0] is 6"}},
    {SOFTMAX, "router_logits", SHAPE_1, 7, .words = {"router_logits.shape[1] is 7", "gate_weight.shape[0] is 8"}},
    {SOFTMAX, "grad_routing_weights", SHAPE_1, 3, .words = {"grad_routing_weights.shape[1] is 3", "is 2"}},
    {SOFTMAX, "routing_weights_sum", SHAPE_1, 2, .words = {"routing_weights_sum.shape[1] is 2", "1"}},
    {SOFTMAX, "grad_expert_mask", SHAPE_0, 9, .words = {"grad_expert_mask.shape[0] is 9", "gate_weight.shape[0] is 8"}},
    {SOFTMAX, "grad_gate_weight", SHAPE_0, 7, .words = {"grad_gate_weight.shape[0] is 7", "gate_weight.shape[0] is 8"}},
    {SIGMOID, "grad_hidden_states", SHAPE_1, 39, .words = {"grad_hidden_states.shape[1] is 39", "is 40"}},
    {SIGMOID, "grad_logits", SHAPE_1, 9, .words = {"grad_logits.shape[1] is 9", "weight.shape[0] is 8"}},
    {SIGMOID, "topk_weights", SHAPE_1, 1, .words = {"topk_weights.shape[1] is 1", "is 2"}},
    {SIGMOID, "denominator", SHAPE_1, 0, .words = {"denominator.shape[1] is 0", "1"}},

    {SOFTMAX, "hidden_states", SHAPE_0, INT64_MAX, .words = {"hidden_states.shape[0] is 9223372036854775807"}},
    {SOFTMAX, "hidden_states", SHAPE_1, INT64_MAX, .words = {"hidden_states.shape[1] is 9223372036854775807"}},
    {SIGMOID, "weight", SHAPE_0, INT64_C(1) << 62, .words = {"weight.shape"}},
    {SOFTMAX, "hidden_states", STRIDE_0, INT64_MAX / 2, .words = {"hidden_states.strides[0] is"}},
    {SIGMOID, "grad_logits", STRIDE_0, INT64_C(1) << 60, .words = {"grad_logits"}},

    {SOFTMAX, "hidden_states", DTYPE, 0, FLOAT64, {"hidden_states.dtype is float64", "bfloat16"}},
    {SOFTMAX, "gate_weight", DTYPE, 0, BFLOAT16, {"gate_weight.dtype is bfloat16", "hidden_states.dtype is float32"}},
    {SOFTMAX, "router_logits", DTYPE, 0, BFLOAT16, {"router_logits.dtype is bfloat16", "float32"}},
    {SOFTMAX, "routing_probs", DTYPE, 0, BFLOAT16, {"routing_probs.dtype is bfloat16", "float32"}},
    {SOFTMAX, "routing_weights_sum", DTYPE, 0, FLOAT64, {"routing_weights_sum.dtype is float64", "float32"}},
    {SOFTMAX, "grad_expert_mask", DTYPE, 0, BFLOAT16, {"grad_expert_mask.dtype is bfloat16", "float32"}},
    {SOFTMAX, "selected_experts", DTYPE, 0, INT16, {"selected_experts.dtype is int16", "int32 or int64"}},
    {SOFTMAX, "selected_experts", DTYPE, 0, UINT64, {"selected_experts.dtype is uint64", "int32 or int64"}},
    {SIGMOID, "topk_indices", DTYPE, 0, FLOAT32, {"topk_indices.dtype is float32", "int32 or int64"}},
    {SIGMOID, "scores", DTYPE, 0, BFLOAT16, {"scores.dtype is bfloat16", "float32"}},
    {SIGMOID, "denominator", DTYPE, 0, BFLOAT16, {"denominator.dtype is bfloat16", "float32"}},
    {SIGMOID, "hidden_states", DTYPE, 0, FLOAT32X2, {"hidden_states.dtype is", "2 lanes"}},
    {SIGMOID, "grad_logits", DTYPE, 0, FLOAT32X2, {"grad_logits.dtype is", "2 lanes"}},
    {SOFTMAX, "routing_probs", DTYPE, 0, FLOAT32X2, {"routing_probs.dtype is", "2 lanes"}},
    {SOFTMAX, "selected_experts", DTYPE, 0, INT64X2, {"selected_experts.dtype is", "2 lanes"}},
    {SIGMOID, "grad_hidden_states", DTYPE, 0, FLOAT64, {"grad_hidden_states.dtype is float64", "float32"}},
    {SIGMOID, "grad_weight", DTYPE, 0, BFLOAT16, {"grad_weight.dtype is bfloat16", "float32"}},

    {SOFTMAX, "hidden_states", STRIDE_0, 39, .words = {"hidden_states.strides[0] is 39", "40"}},
    {SOFTMAX, "hidden_states", STRIDE_0, 0, .words = {"hidden_states.strides[0] is 0", "40"}},
    {SOFTMAX, "hidden_states", STRIDE_0, -48, .words = {"hidden_states.strides[0] is -48", "40"}},
    {SOFTMAX, "hidden_states", STRIDE_1, 2, .words = {"hidden_states.strides[1] is 2", "contiguous"}},
    {SOFTMAX, "gate_weight", STRIDE_1, -1, .words = {"gate_weight.strides[1] is -1", "contiguous"}},
    {SOFTMAX, "routing_weights_sum", STRIDE_0, 0, .words = {"routing_weights_sum.strides[0] is 0"}},
    {SIGMOID, "topk_indices", STRIDE_0, 1, .words = {"topk_indices.strides[0] is 1", "2"}},
    {SIGMOID, "grad_weight", STRIDE_1, 0, .words = {"grad_weight.strides[1] is 0", "contiguous"}},
    {SIGMOID, "grad_hidden_states", STRIDE_0, 0, .words = {"grad_hidden_states.strides[0] is 0", "40"}},

    {SOFTMAX, "hidden_states", NO_DATA, .words = {"hidden_states.data is NULL"}},
    {SOFTMAX, "grad_expert_mask", NO_DATA, .words = {"grad_expert_mask.data is NULL"}},
    {SIGMOID, "grad_weight", NO_DATA, .words = {"grad_weight.data is NULL"}},
    {SOFTMAX, "hidden_states", SHIFTED, 2, .words = {"hidden_states", "multiple"}},
    {SOFTMAX, "selected_experts", SHIFTED, 4, .words = {"selected_experts", "multiple"}},
    {SOFTMAX, "grad_expert_mask", SHIFTED, 1, .words = {"grad_expert_mask", "multiple"}},
    {SIGMOID, "grad_logits", SHIFTED, 3, .words = {"grad_logits", "multiple"}},
};

/* A tensor on another device than the first. */
static const struct refusal elsewhere[] = {
    {SOFTMAX, "gate_weight", DEVICE, kDLCUDA, .words = {"gate_weight is on cuda:0", "hidden_states is on the CPU"}},
    {SIGMOID, "grad_logits", DEVICE, kDLMetal, .words = {"grad_logits is on", "hidden_states is on the CPU"}},
};

static void apply(struct trial *trial, const struct refusal *refusal) {
    DLTensor *tensor = trial_tensor(trial, refusal->tensor);
    switch (refusal->change) {
    case ABSENT:
        call_set(&trial->call, refusal->tensor, NULL);
        break;
    case NDIM:
        tensor->ndim = (int)refusal->value;
        break;
    case SHAPE_0:
    case SHAPE_1:
        tensor->shape[refusal->change - SHAPE_0] = refusal->value;
        break;
    case NO_SHAPE:
        tensor->shape = NULL;
        break;
    case DTYPE:
        tensor->dtype = refusal->dtype;
        break;
    case STRIDE_0:
    case STRIDE_1:
        tensor->strides[refusal->change - STRIDE_0] = refusal->value;
        break;
    case NO_DATA:
        tensor->data = NULL;
        break;
    case SHIFTED:
        tensor->byte_offset = (uint64_t)refusal->value;
        break;
    case DEVICE:
        tensor->device.device_type = (DLDeviceType)refusal->value;
        break;
    }
}

static void expect_refusal(const struct refusal *refusal) {
    struct plan plan = {
        .operation = (enum moer_operation)refusal->operation, .dims = small, .type = F32, .padding = 8, .seed = 1};
    struct trial *trial = trial_new(&plan);
    char function[64];
    size_t bytes = 77;
    apply(trial, refusal);
    snprintf(function, sizeof function, "moer_%s: ", moer_operation_name(plan.operation));
    trial_fails(trial, MOER_INVALID, (const char *[]){function, NULL});
    trial_fails(trial, MOER_INVALID, refusal->words);
    /* A query does not look at data, and says the same of all else. */
    enum moer_status query = call_workspace_size(place_call(&trial->place, &trial->call), &bytes);
    int about_data = refusal->change == NO_DATA || refusal->change == SHIFTED;
    ck_assert_msg(query == (about_data ? MOER_OK : MOER_INVALID), "%s: the query returns %d", refusal->tensor, query);
    ck_assert(about_data || strstr(moer_last_error(), refusal->words[0]) != NULL);
    trial_free(trial);
}

START_TEST(broken_rules) {
    expect_refusal(&refusals[_i]);
}
END_TEST

START_TEST(other_devices) {
    expect_refusal(&elsewhere[_i]);
}
END_TEST

START_TEST(example_of_the_header) {
    struct plan plan = {.dims = {4, 8, 128, 2}, .seed = 2};
    struct trial *trial = trial_new(&plan);
    call_set(&trial->call, "router_logits", NULL);
    trial_tensor(trial, "routing_probs")->shape[1] = 64;
    ck_assert_int_eq(trial_run(trial, LIBRARY_SCRATCH), MOER_INVALID);
    ck_assert_str_eq(trial->message,
                     "moer_softmax_topk_backward: routing_probs.shape[1] is 64 but gate_weight.shape[0] is 128");
    trial_free(trial);
}
END_TEST

/* ---- Memory ---- */

static char *first_byte(const DLTensor *tensor) {
    return (char *)tensor->data + tensor->byte_offset;
}

static char *last_element(const DLTensor *tensor) {
    int64_t last = (tensor->shape[0] - 1) * tensor->strides[0] + tensor->shape[1] - 1;
    return first_byte(tensor) + last * (int64_t)dtype_size(tensor->dtype);
}

static const struct {
    const char *output, *other;
} overlaps[] = {
    {"grad_hidden_states", "hidden_states"},    {"grad_hidden_states", "grad_router_logits"},
    {"grad_gate_weight", "gate_weight"},        {"grad_logits", "routing_probs"},
    {"grad_logits", "selected_experts"},        {"grad_hidden_states", "grad_expert_mask"},
    {"grad_hidden_states", "grad_gate_weight"}, {"grad_gate_weight", "grad_logits"},
};

/* Wholly, and by a single element at either end. */
START_TEST(overlapping_tensors) {
    struct plan plan = {.dims = small, .type = F32, .padding = 8, .seed = 3};
    struct trial *trial = trial_new(&plan);
    DLTensor *output = trial_tensor(trial, overlaps[_i].output);
    const DLTensor *other = trial_tensor(trial, overlaps[_i].other);
    const char *const words[] = {overlaps[_i].output, overlaps[_i].other, "overlaps", NULL};
    ptrdiff_t span = last_element(output) - first_byte(output);
    char *end = other->ndim == 2 ? last_element(other) : first_byte(other);
    char *const places[] = {first_byte(other), end, first_byte(other) - span};
    for (int i = 0; i < LENGTH(places); i++) {
        output->data = places[i];
        trial_fails(trial, MOER_INVALID, words);
    }
    trial_free(trial);
}
END_TEST

/* Inputs may share memory; an output may begin right behind another tensor. */
START_TEST(neighbours) {
    static float memory[2 * 6 * 8];
    struct plan plan = {.dims = small, .type = F32, .padding = 8, .absent = DIRECT, .seed = 4};
    struct trial *trial = trial_new(&plan);
    DLTensor *before = trial_tensor(trial, "router_logits"), *output = trial_tensor(trial, "grad_logits");
    before->data = memory;
    output->data = memory + 6 * 8;
    before->strides = output->strides = NULL;
    trial->call.args.softmax.grad_router_logits = before;
    place_add(&trial->place, memory, sizeof memory);
    ck_assert_msg(trial_call(trial) == MOER_OK, "%s", trial->message);
    trial_compare(trial);
    trial_free(trial);
}
END_TEST

START_TEST(workspaces) {
    struct plan plan = {.operation = (enum moer_operation)_i, .dims = {64, 256, 8, 2}, .type = F32, .seed = 5};
    struct trial *trial = trial_new(&plan);
    size_t needed = 0, with_null = 0;
    char is[32], must[32];
    ck_assert_int_eq(call_workspace_size(place_call(&trial->place, &trial->call), &needed), MOER_OK);
    ck_assert_uint_gt(needed, 0);
    snprintf(is, sizeof is, "%zu", needed - 1);
    snprintf(must, sizeof must, "%zu", needed);

    _Alignas(256) static char memory[1 << 23];
    ck_assert_uint_lt(needed, sizeof memory - 256);
    place_add(&trial->place, memory, sizeof memory);
    trial->call.args.common.workspace = memory;
    trial->call.args.common.workspace_size = needed - 1;
    trial_fails(trial, MOER_INVALID, (const char *[]){"workspace_size", is, must, NULL});
    trial->call.args.common.workspace_size = 0;
    trial_fails(trial, MOER_INVALID, (const char *[]){"workspace_size is 0", must, NULL});
    trial->call.args.common.workspace = memory + 128;
    trial->call.args.common.workspace_size = needed;
    trial_fails(trial, MOER_INVALID, (const char *[]){"workspace", "256", NULL});
    trial->call.args.common.workspace = trial->tensors[0].block + 256;
    trial_fails(trial, MOER_INVALID, (const char *[]){"workspace", "hidden_states", "overlaps", NULL});
    trial->call.args.common.workspace = (void *)(UINTPTR_MAX - 255);
    trial_fails(trial, MOER_INVALID, (const char *[]){"workspace", NULL});

    /* A tensor right behind it, and one byte nearer. */
    trial_output(trial, 2)->data = memory + needed;
    trial->call.args.common.workspace = memory;
    ck_assert_msg(trial_call(trial) == MOER_OK, "%s", trial->message);
    trial->call.args.common.workspace_size = needed + 1;
    ck_assert_int_eq(trial_call(trial), MOER_INVALID);
    ck_assert_ptr_nonnull(strstr(trial->message, "overlaps"));
    trial->call.args.common.workspace = NULL;

    /* A tracing compiler has shapes before it has memory. */
    for (size_t i = 0; i < trial->count; i++)
        trial->tensors[i].tensor.data = NULL;
    ck_assert_int_eq(call_workspace_size(place_call(&trial->place, &trial->call), &with_null), MOER_OK);
    ck_assert_uint_eq(with_null, needed);
    trial_free(trial);
}
END_TEST

int main(void) {
    const struct test tests[] = {
        {broken_rules, LENGTH(refusals)},
        {other_devices, host_only(LENGTH(elsewhere), "other_devices", "the host is the first device; see check_cuda")},
        {example_of_the_header, 1},
        {overlapping_tensors, LENGTH(overlaps)},
        {neighbours, 1},
        {workspaces, MOER_OPERATIONS},
    };
    return run_tests("refusals", tests, LENGTH(tests));
}
