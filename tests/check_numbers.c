/* SPDX-License-Identifier: Apache-2.0 */
/* Right numbers for every shape, layout, dtype and choice of tensors, by the double-precision loop. */
#include "support.h"

#include <math.h>
#include <string.h>

static const struct dims edges[] = {
    {0, 0, 0, 0},        {0, 40, 8, 2},       {0, 2048, 128, 8},  {4, 0, 8, 2},        {4, 16, 8, 0},
    {4, 8, 0, 0},        {1, 1, 1, 1},        {1, 8, 257, 8},     {1, 33, 60, 8},      {1, 2048, 128, 8},
    {1, 5120, 160, 8},   {2, 7, 3, 2},        {2, 16, 512, 1},    {2, 40, 512, 512},   {2, 5120, 96, 8},
    {15, 8, 8, 2},       {15, 131, 60, 8},    {15, 2048, 3, 3},   {16, 16, 8, 8},      {16, 40, 128, 1},
    {16, 5120, 1, 1},    {17, 33, 96, 2},     {17, 131, 512, 10}, {17, 2048, 160, 8},  {31, 7, 257, 2},
    {31, 40, 60, 60},    {31, 5120, 8, 2},    {33, 1, 160, 1},    {33, 8, 128, 8},     {33, 2048, 512, 8},
    {127, 16, 96, 96},   {127, 40, 257, 8},   {127, 131, 128, 8}, {128, 8, 512, 2},    {128, 33, 8, 2},
    {128, 2048, 128, 8}, {129, 7, 60, 1},     {129, 131, 257, 2}, {129, 5120, 160, 8}, {1023, 1, 512, 8},
    {1023, 16, 3, 2},    {1023, 40, 128, 8},  {1023, 2048, 8, 2}, {1025, 8, 1, 1},     {1025, 33, 160, 8},
    {1025, 131, 60, 8},  {1025, 1024, 96, 8}, {5, 40, 600, 8},    {70, 24, 1100, 40},  {9, 136, 2100, 8},
    {600, 8, 3000, 2},   {9, 136, 1024, 64},  {70, 24, 1000, 40},
};

/* The nth of the combinations of everything a plan leaves open; neighbours differ in all of it. */
static struct plan vary(enum moer_operation operation, struct dims dims, enum type type, int n) {
    struct draw draw = {(uint64_t)n, 0};
    struct plan plan = {.operation = operation, .dims = dims, .type = type, .seed = (uint64_t)n};
    uint64_t bits = draw_integer(&draw);
    plan.wide = bits & OUTPUTS;
    plan.padding = (bits >> 8 & 1) * (1 + (int)(bits >> 9 & 15));
    plan.flush = bits >> 16 & 1;
    plan.short_ids = bits >> 17 & 1;
    plan.accumulate = (bits >> 18 & 3) == 0;
    if (bits >> 20 & 1)
        plan.absent = (int)(bits >> 24) & (SUM | MASK | DIRECT | UNREAD);
    return plan;
}

START_TEST(edge_shapes) {
    for (int operation = 0; operation < MOER_OPERATIONS; operation++)
        for (int type = 0; type < TYPES; type++) {
            struct plan plan =
                vary((enum moer_operation)operation, edges[_i], (enum type)type, 8 * _i + 4 * operation + type);
            plan_check(&plan);
        }
}
END_TEST

/* More than one tile of experts, or of columns with a tail, or splits of the weight gradient. Every layout that a
 * kernel may make something of: rows padded by whole chunks, both outputs of either type, accumulation. */
START_TEST(tiles_of_experts) {
    static const struct dims shapes[] = {{1, 8, 65, 8},      {200, 264, 144, 8}, {129, 520, 384, 8},
                                         {1087, 24, 136, 8}, {70, 72, 1024, 64}, {8500, 8, 72, 4}};
    for (int n = 0; n < 2 * MOER_OPERATIONS; n++) {
        struct plan plan = {.operation = (enum moer_operation)(n % MOER_OPERATIONS),
                            .dims = shapes[_i],
                            .type = (enum type)(n / MOER_OPERATIONS),
                            .wide = (n + _i) % 3 == 1 ? TO_WEIGHT : 0,
                            .padding = (n + _i) % 2 * 8,
                            .accumulate = (n + _i) % 3 == 2,
                            .seed = 9};
        plan_check(&plan);
    }
}
END_TEST

/* Every combination of row padding, alignment and id size. */
START_TEST(layouts) {
    for (int n = 0; n < 8; n++) {
        struct plan plan = {.operation = (enum moer_operation)(_i % MOER_OPERATIONS),
                            .dims = {37, 72, 24, 4},
                            .type = (enum type)(_i / MOER_OPERATIONS),
                            .padding = n & 1 ? 13 : 0,
                            .flush = n >> 1 & 1,
                            .short_ids = n >> 2 & 1,
                            .seed = 1};
        plan_check(&plan);
    }
}
END_TEST

/* The mask as a broadcast, backwards, and with its axes in any order. */
START_TEST(mask_strides) {
    static const int orders[][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
    struct plan plan = {.dims = {20, 24, 6, 3}, .type = (enum type)_i, .wide = OUTPUTS, .seed = 2};
    struct trial *trial = trial_new(&plan);
    DLTensor *mask = trial_tensor(trial, "grad_expert_mask");
    char *start = mask->data;
    int64_t strides[3] = {0, 0, 0};
    mask->strides = strides;
    trial_check(trial);
    for (int broadcast = 0; broadcast < 3; broadcast++) {
        int64_t compact[3] = {60, 20, 1};
        memcpy(strides, compact, sizeof strides);
        strides[broadcast] = 0;
        trial_check(trial);
    }
    for (int order = 0; order < LENGTH(orders); order++)
        for (int sign = 0; sign < 8; sign++) {
            int64_t stride = 1, first = 0;
            for (int axis = 2; axis >= 0; axis--) {
                int along = orders[order][axis];
                strides[along] = sign >> along & 1 ? -stride : stride;
                first += strides[along] < 0 ? (mask->shape[along] - 1) * stride : 0;
                stride *= mask->shape[along];
            }
            mask->data = start + first * (int64_t)dtype_size(mask->dtype);
            trial_check(trial);
        }
    trial_free(trial);
}
END_TEST

/* Where an axis has length 1 its stride is never taken. */
START_TEST(strides_of_single_rows) {
    struct plan plan = {
        .operation = (enum moer_operation)_i, .dims = {1, 40, 8, 1}, .type = F32, .padding = 3, .seed = 3};
    struct trial *trial = trial_new(&plan);
    for (size_t i = 0; i < trial->count; i++)
        for (int axis = 0; axis < trial->tensors[i].tensor.ndim; axis++)
            if (trial->tensors[i].shape[axis] == 1)
                trial->tensors[i].strides[axis] = axis ? 77 : -5;
    trial_check(trial);
    trial_free(trial);
}
END_TEST

/* Tensors without elements need no data, and may have any strides. */
START_TEST(no_data) {
    static const struct dims empty[] = {{0, 40, 8, 2}, {6, 0, 8, 2}, {6, 40, 8, 0}, {6, 40, 0, 0}, {0, 0, 0, 0}};
    for (int n = 0; n < LENGTH(empty); n++) {
        struct plan plan = {
            .operation = (enum moer_operation)_i, .dims = empty[n], .type = F32, .padding = 1, .seed = 4};
        struct trial *trial = trial_new(&plan);
        for (size_t i = 0; i < trial->count; i++) {
            DLTensor *tensor = &trial->tensors[i].tensor;
            if (tensor->shape[0] && tensor->shape[1] && (tensor->ndim < 3 || tensor->shape[2]))
                continue;
            tensor->data = NULL;
            tensor->strides[0] = -3;
        }
        trial_check(trial);
        trial_free(trial);
    }
}
END_TEST

/* Every combination of outputs that are there, each with some of them float32. */
START_TEST(outputs) {
    for (int n = 0; n < 16; n++) {
        struct plan plan = {.operation = (enum moer_operation)(_i % MOER_OPERATIONS),
                            .dims = {70, 48, 24, 4},
                            .type = (enum type)(_i / MOER_OPERATIONS),
                            .absent = n & OUTPUTS,
                            .wide = n & 8 ? OUTPUTS : n >> 1,
                            .seed = 2};
        plan_check(&plan);
    }
}
END_TEST

START_TEST(optional_inputs) {
    for (int n = 0; n < 16; n++) {
        struct plan plan = {.operation = (enum moer_operation)(_i % MOER_OPERATIONS),
                            .dims = {70, 48, 24, 4},
                            .type = (enum type)(_i / MOER_OPERATIONS),
                            .absent = n * SUM,
                            .wide = OUTPUTS,
                            .padding = n & 1,
                            .seed = 3};
        plan_check(&plan);
    }
}
END_TEST

/* What the answer does not depend on is not looked at. */
START_TEST(unread_inputs) {
    static const char *const names[MOER_OPERATIONS] = {"router_logits", "topk_weights"};
    struct plan plan = {.operation = (enum moer_operation)_i, .dims = {33, 40, 16, 4}, .seed = 4};
    struct trial *with = trial_new(&plan);
    plan.absent = UNREAD;
    struct trial *without = trial_new(&plan);
    fill(trial_tensor(with, names[_i]), NAN);
    trial_check(with);
    trial_check(without);
    for (int i = 0; i < CALL_OUTPUTS; i++)
        same_bits(trial_output(with, i), trial_output(without, i), names[_i]);
    trial_free(with);
    trial_free(without);
}
END_TEST

/* Adds to the weight gradient, and to nothing else. */
START_TEST(accumulates) {
    struct plan plan = {.operation = (enum moer_operation)(_i % MOER_OPERATIONS),
                        .dims = {130, 48, 24, 4},
                        .type = (enum type)(_i / MOER_OPERATIONS),
                        .seed = 5};
    struct trial *fresh = trial_new(&plan);
    trial_check(fresh);
    for (int wide = 0; wide < 2; wide++) {
        plan.accumulate = 1;
        plan.wide = wide * TO_WEIGHT;
        struct trial *added = trial_new(&plan);
        trial_check(added);
        same_bits(trial_output(added, 0), trial_output(fresh, 0), "grad_hidden_states");
        same_bits(trial_output(added, 2), trial_output(fresh, 2), "grad_logits");
        trial_free(added);
    }
    trial_free(fresh);
}
END_TEST

/* No tokens: the weight gradient is zero, or what it was, bit for bit. */
START_TEST(no_tokens) {
    struct plan plan = {.operation = (enum moer_operation)(_i % MOER_OPERATIONS),
                        .dims = {0, 48, 24, 4},
                        .type = (enum type)(_i / MOER_OPERATIONS),
                        .seed = 6};
    struct trial *zero = trial_new(&plan);
    trial_check(zero);
    for (int64_t e = 0; e < plan.dims.experts; e++)
        for (int64_t h = 0; h < plan.dims.hidden; h++)
            ck_assert(get_element(trial_output(zero, 1), e, h, 0) == 0.0);
    plan.accumulate = 1;
    struct trial *old = trial_new(&plan);
    set_element(old->old_weight, 3, 5, 0, -0.0);
    set_element(old->old_weight, 4, 6, 0, NAN);
    trial_succeed(old, LIBRARY_SCRATCH);
    same_bits(trial_output(old, 1), old->old_weight, "the weight gradient of no tokens");
    trial_free(zero);
    trial_free(old);
}
END_TEST

/* Nothing cancels: all hidden states and all direct gradients of an expert have one sign, so that a sum in float32
 * without blocks would drift past its bound. */
START_TEST(one_sign) {
    struct plan plan = {.operation = (enum moer_operation)(_i % MOER_OPERATIONS),
                        .dims = {4096, 64, 32, 4},
                        .type = (enum type)(_i / MOER_OPERATIONS),
                        .wide = OUTPUTS,
                        .seed = 7};
    struct trial *trial = trial_new(&plan);
    DLTensor *hidden = trial_tensor(trial, "hidden_states");
    const char *incoming = plan.operation == MOER_SOFTMAX_TOPK_BACKWARD ? "grad_router_logits" : "grad_topk_weights";
    DLTensor *gradient = trial_tensor(trial, incoming);
    for (int64_t n = 0; n < plan.dims.tokens; n++) {
        for (int64_t h = 0; h < plan.dims.hidden; h++)
            set_element(hidden, n, h, 0, 1.0 + fabs(get_element(hidden, n, h, 0)));
        for (int64_t i = 0; i < gradient->shape[1]; i++)
            set_element(gradient, n, i, 0, (i % 2 ? 1.0 : -1.0) * (3.0 + fabs(get_element(gradient, n, i, 0))));
    }
    trial_check(trial);
    trial_free(trial);
}
END_TEST

/* The same token over and over: what rounding takes from a running sum is then the same each time, and adds up. */
START_TEST(repeated_token) {
    static const struct {
        struct dims dims;
        int wide;
    } cases[] = {{{40000, 40, 8, 2}, OUTPUTS}, {{8192, 40, 136, 2}, OUTPUTS}, {{8192, 40, 136, 2}, 0}};
    struct plan plan = {.operation = (enum moer_operation)(_i % MOER_OPERATIONS),
                        .dims = cases[_i / MOER_OPERATIONS / TYPES].dims,
                        .type = (enum type)(_i / MOER_OPERATIONS % TYPES),
                        .absent = MASK,
                        .wide = cases[_i / MOER_OPERATIONS / TYPES].wide,
                        .seed = 9};
    struct trial *trial = trial_new(&plan);
    for (size_t i = 0; i < trial->count; i++) {
        const DLTensor *tensor = &trial->tensors[i].tensor;
        if (trial->tensors[i].operand->axes[0] != 'N' || trial->tensors[i].operand->kind == MOER_DTYPE_OUTPUT)
            continue;
        for (int64_t n = 1; n < plan.dims.tokens; n++)
            for (int64_t j = 0; j < tensor->shape[1]; j++)
                set_element(tensor, n, j, 0, get_element(tensor, 0, j, 0));
    }
    trial_check(trial);
    trial_free(trial);
}
END_TEST

/* More experts than any model has: blocks of few tokens. */
START_TEST(many_experts) {
    struct plan plan = {
        .operation = (enum moer_operation)_i, .dims = {270, 4, 16384, 2}, .absent = MASK | UNREAD, .seed = 10};
    plan_check(&plan);
}
END_TEST

/* The scaling factor is used as float32, and 0 means 1. */
START_TEST(scaling_factor) {
    static const double factors[] = {1.0, 2.5, 16.0, 0.1, -1.0, 1e-3};
    struct plan plan = {
        .operation = MOER_SIGMOID_TOPK_BACKWARD, .dims = {20, 24, 16, 4}, .type = (enum type)_i, .seed = 8};
    struct trial *trial = trial_new(&plan);
    for (int i = 0; i < LENGTH(factors); i++) {
        trial->call.args.sigmoid.routed_scaling_factor = factors[i];
        trial_check(trial);
    }
    trial->call.args.sigmoid.routed_scaling_factor = 1.0;
    trial_check(trial);
    DLTensor *one = copy_tensor(trial_output(trial, 0));
    trial->call.args.sigmoid.routed_scaling_factor = 0.0;
    trial_check(trial);
    same_bits(one, trial_output(trial, 0), "factor 0");
    moer_tensor_free(one);
    trial_free(trial);
}
END_TEST

/* Sums of equal terms, where every rounding may go the same way: a thousand slots of one expert, and a thousand
 * experts. */
START_TEST(equal_terms) {
    struct plan plan = {.operation = (enum moer_operation)_i, .dims = {2, 3, 1024, 1024}, .type = F32, .seed = 5};
    struct trial *trial = trial_new(&plan);
    int softmax = plan.operation == MOER_SOFTMAX_TOPK_BACKWARD;
    fill(trial_tensor(trial, softmax ? "grad_routing_weights" : "grad_topk_weights"), 1.23456);
    fill(trial_tensor(trial, softmax ? "gate_weight" : "weight"), 1.68965793);
    if (softmax) {
        fill(trial_tensor(trial, "selected_experts"), 7);
        fill(trial_tensor(trial, "routing_weights_sum"), 3);
    } else {
        fill(trial_tensor(trial, "scores"), 0.5);
        fill(trial_tensor(trial, "topk_weights_normalized"), 0);
    }
    trial_check(trial);
    trial_free(trial);
}
END_TEST

int main(void) {
    const struct test tests[] = {
        {edge_shapes, LENGTH(edges)},
        {tiles_of_experts, 6},
        {layouts, MOER_OPERATIONS * TYPES},
        {mask_strides, TYPES},
        {strides_of_single_rows, MOER_OPERATIONS},
        {no_data, MOER_OPERATIONS},
        {outputs, MOER_OPERATIONS * TYPES},
        {optional_inputs, MOER_OPERATIONS * TYPES},
        {unread_inputs, MOER_OPERATIONS},
        {accumulates, MOER_OPERATIONS * TYPES},
        {no_tokens, MOER_OPERATIONS * TYPES},
        {one_sign, MOER_OPERATIONS * TYPES},
        {repeated_token, 3 * MOER_OPERATIONS * TYPES},
        {many_experts, MOER_OPERATIONS},
        {equal_terms, MOER_OPERATIONS},
        {scaling_factor, TYPES},
    };
    return run_tests("numbers", tests, LENGTH(tests));
}
