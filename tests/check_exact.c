/* SPDX-License-Identifier: Apache-2.0 */
/* Cases that leave no room: sums of small integers, which float32 holds exactly in any order, against integer
 * arithmetic; identity gates; gradients that are zero by the formula. A token, tail or tile that is lost shows. */
#include "support.h"

#include <stdlib.h>

static int64_t small_integer(struct draw *draw, int64_t most) {
    return (int64_t)(draw_integer(draw) % (uint64_t)(2 * most + 1)) - most;
}

/* Integers in [-most, most]. */
static void fill_integers(const DLTensor *tensor, int64_t most, struct draw *draw) {
    for (int64_t i = 0; i < tensor->shape[0]; i++)
        for (int64_t j = 0; j < tensor->shape[1]; j++)
            set_element(tensor, i, j, 0, (double)small_integer(draw, most));
}

static DLTensor *gate_of(struct trial *trial) {
    return trial_tensor(trial, trial->plan.operation == MOER_SOFTMAX_TOPK_BACKWARD ? "gate_weight" : "weight");
}

/* G[n, e] = d[n, e] / E: p = 1 / E, g = 0, and d sums to zero in each row. */
static void make_softmax(struct trial *trial, struct draw *draw) {
    DLTensor *direct = trial_tensor(trial, "grad_router_logits");
    int64_t experts = trial->plan.dims.experts;
    fill(trial_tensor(trial, "routing_probs"), 1.0 / (double)experts);
    fill(trial_tensor(trial, "routing_weights_sum"), 1.0);
    fill(trial_tensor(trial, "grad_routing_weights"), 0.0);
    fill(direct, 0.0);
    for (int64_t n = 0; n < trial->plan.dims.tokens; n++)
        for (int64_t i = 0; i < experts; i++) {
            int64_t from = (int64_t)(draw_integer(draw) % (uint64_t)experts), step = small_integer(draw, 1);
            set_element(direct, n, from, 0, get_element(direct, n, from, 0) - (double)step);
            set_element(direct, n, i, 0, get_element(direct, n, i, 0) + (double)step);
        }
}

/* G[n, e] = D[n, e] / 4: s = 1/2, w = 0, z = 1, f = 1. Ids repeat, and slots are empty. */
static void make_sigmoid(struct trial *trial, struct draw *draw) {
    DLTensor *ids = trial_tensor(trial, "topk_indices");
    trial->call.args.sigmoid.routed_scaling_factor = 1.0;
    fill(trial_tensor(trial, "scores"), 0.5);
    fill(trial_tensor(trial, "topk_weights_normalized"), 0.0);
    fill(trial_tensor(trial, "denominator"), 1.0);
    fill_integers(trial_tensor(trial, "grad_topk_weights"), 3, draw);
    for (int64_t n = 0; n < ids->shape[0]; n++)
        for (int64_t k = 0; k < ids->shape[1]; k++)
            set_element(ids, n, k, 0, (double)(draw_integer(draw) % (uint64_t)(trial->plan.dims.experts + 1)) - 1.0);
}

/* The integers that G is made of, and what they are divided by. */
static int64_t *integer_gradient(struct trial *trial, int64_t *divisor) {
    struct dims dims = trial->plan.dims;
    int64_t *D = calloc((size_t)(dims.tokens * dims.experts) + 1, sizeof *D);
    int softmax = trial->plan.operation == MOER_SOFTMAX_TOPK_BACKWARD;
    *divisor = softmax ? dims.experts : 4;
    for (int64_t n = 0; n < dims.tokens; n++) {
        for (int64_t e = 0; softmax && e < dims.experts; e++)
            D[n * dims.experts + e] = (int64_t)get_element(trial_tensor(trial, "grad_router_logits"), n, e, 0);
        for (int64_t k = 0; !softmax && k < dims.top_k; k++) {
            int64_t e = (int64_t)get_element(trial_tensor(trial, "topk_indices"), n, k, 0);
            if (e >= 0)
                D[n * dims.experts + e] += (int64_t)get_element(trial_tensor(trial, "grad_topk_weights"), n, k, 0);
        }
    }
    return D;
}

static void expect_exact(const DLTensor *output, int64_t i, int64_t j, int64_t sum, int64_t divisor, const char *name) {
    double expected = round_to(output->dtype, (double)sum / (double)divisor), value = get_element(output, i, j, 0);
    ck_assert_msg(value == expected, "%s[%lld, %lld] is %.9g instead of %lld/%lld = %.9g", name, (long long)i,
                  (long long)j, value, (long long)sum, (long long)divisor, expected);
}

static void check_products(struct trial *trial, const int64_t *D, int64_t divisor) {
    struct dims dims = trial->plan.dims;
    const DLTensor *hidden = trial_tensor(trial, "hidden_states"), *gate = gate_of(trial);
    for (int64_t n = 0; n < dims.tokens; n++) {
        for (int64_t e = 0; e < dims.experts; e++)
            expect_exact(trial_output(trial, 2), n, e, D[n * dims.experts + e], divisor, "grad_logits");
        for (int64_t h = 0; h < dims.hidden; h++) {
            int64_t sum = 0;
            for (int64_t e = 0; e < dims.experts; e++)
                if (D[n * dims.experts + e])
                    sum += D[n * dims.experts + e] * (int64_t)get_element(gate, e, h, 0);
            expect_exact(trial_output(trial, 0), n, h, sum, divisor, "grad_hidden_states");
        }
    }
    for (int64_t e = 0; e < dims.experts; e++)
        for (int64_t h = 0; h < dims.hidden; h++) {
            int64_t sum = 0;
            for (int64_t n = 0; n < dims.tokens; n++)
                if (D[n * dims.experts + e])
                    sum += D[n * dims.experts + e] * (int64_t)get_element(hidden, n, h, 0);
            expect_exact(trial_output(trial, 1), e, h, sum, divisor, "the weight gradient");
        }
}

/* Powers of two of experts: 1/E is exact. */
static const struct dims shapes[] = {
    {1, 8, 1, 1},     {2, 1, 8, 2},      {15, 33, 2, 1},   {16, 16, 16, 8},   {17, 7, 64, 8},     {31, 40, 128, 8},
    {33, 131, 8, 2},  {127, 16, 32, 4},  {128, 8, 256, 8}, {129, 40, 4, 4},   {257, 24, 64, 8},   {511, 65, 8, 2},
    {1023, 9, 16, 8}, {1025, 17, 32, 8}, {2049, 8, 8, 2},  {3, 2056, 128, 8}, {200, 264, 256, 8}, {70, 8, 1024, 8},
};

/* Integers small enough for float16 to hold D / E as a normal number. */
START_TEST(integers) {
    for (int n = 0; n < MOER_OPERATIONS * TYPES; n++) {
        struct plan plan = {.operation = (enum moer_operation)(n % MOER_OPERATIONS),
                            .dims = shapes[_i],
                            .type = (enum type)(n / MOER_OPERATIONS),
                            .absent = MASK,
                            .wide = _i & 1 ? TO_HIDDEN | TO_WEIGHT : TO_LOGITS,
                            .padding = _i % 3,
                            .seed = 1};
        struct trial *trial = trial_new(&plan);
        struct draw draw = {(uint64_t)_i, 0};
        int64_t divisor;
        fill_integers(trial_tensor(trial, "hidden_states"), 3, &draw);
        fill_integers(gate_of(trial), 3, &draw);
        if (plan.operation == MOER_SOFTMAX_TOPK_BACKWARD)
            make_softmax(trial, &draw);
        else
            make_sigmoid(trial, &draw);
        trial_check(trial);
        int64_t *D = integer_gradient(trial, &divisor);
        check_products(trial, D, divisor);
        free(D);
        trial_free(trial);
    }
}
END_TEST

/* With the identity for a gate, grad_hidden_states is G. */
START_TEST(identity_gate) {
    static const int64_t experts[] = {1, 3, 8, 60, 96, 128, 257, 264};
    for (int n = 0; n < LENGTH(experts); n++) {
        int64_t E = experts[n];
        struct plan plan = {.operation = (enum moer_operation)(_i % MOER_OPERATIONS),
                            .dims = {67, E, E, E < 8 ? E : 8},
                            .type = (enum type)(_i / MOER_OPERATIONS),
                            .wide = n & 1 ? OUTPUTS : 0,
                            .seed = 2};
        struct trial *trial = trial_new(&plan);
        DLTensor *gate = gate_of(trial);
        fill(gate, 0.0);
        for (int64_t e = 0; e < E; e++)
            set_element(gate, e, e, 0, 1.0);
        trial_check(trial);
        for (int64_t i = 0; i < plan.dims.tokens; i++)
            for (int64_t e = 0; e < E; e++)
                ck_assert(get_element(trial_output(trial, 0), i, e, 0) == get_element(trial_output(trial, 2), i, e, 0));
        trial_free(trial);
    }
}
END_TEST

/* One expert a token, renormalised: its weight is 1 whatever the router says, so nothing is learnt through it. */
START_TEST(one_renormalised_expert) {
    struct plan plan = {.operation = MOER_SOFTMAX_TOPK_BACKWARD,
                        .dims = {129, 40, 60, 1},
                        .type = (enum type)_i,
                        .absent = MASK | DIRECT,
                        .wide = OUTPUTS,
                        .seed = 3};
    struct trial *trial = trial_new(&plan);
    trial_check(trial);
    for (int i = 0; i < CALL_OUTPUTS; i++) {
        const DLTensor *output = trial_output(trial, i);
        for (int64_t row = 0; row < output->shape[0]; row++)
            for (int64_t j = 0; j < output->shape[1]; j++)
                ck_assert_msg(get_element(output, row, j, 0) == 0.0, "output %d, (%lld, %lld) is %g", i, (long long)row,
                              (long long)j, get_element(output, row, j, 0));
    }
    trial_free(trial);
}
END_TEST

int main(void) {
    const struct test tests[] = {
        {integers, LENGTH(shapes)},
        {identity_gate, MOER_OPERATIONS * TYPES},
        {one_renormalised_expert, TYPES},
    };
    return run_tests("exact cases", tests, LENGTH(tests));
}
