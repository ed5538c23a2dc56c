/* SPDX-License-Identifier: Apache-2.0 */
/* Laws that hold whatever the numbers are: what a gradient is, by finite differences; what must not change a bit. */
#include "support.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { EACH = MOER_OPERATIONS * TYPES };

/* float32 outputs: rounding to 16 bits would hide most differences. */
static struct plan plan_of(int each, struct dims dims, uint64_t seed) {
    return (struct plan){.operation = (enum moer_operation)(each % MOER_OPERATIONS),
                         .dims = dims,
                         .type = (enum type)(each / MOER_OPERATIONS),
                         .wide = OUTPUTS,
                         .seed = seed};
}

static void copy_matrix(const DLTensor *to, const DLTensor *from) {
    for (int64_t i = 0; i < to->shape[0]; i++)
        for (int64_t j = 0; j < to->shape[1]; j++)
            set_element(to, i, j, 0, get_element(from, i, j, 0));
}

static int64_t *iota(int64_t first, int64_t count) {
    int64_t *numbers = malloc((size_t)count * sizeof *numbers);
    for (int64_t i = 0; i < count; i++)
        numbers[i] = first + i;
    return numbers;
}

/* ---- What a gradient is ---- */

/* The loss whose gradient the operation is, in float64, with the choice of experts held fixed. hidden and gate are
 * moved by step times the given directions. */
struct forward {
    struct trial *trial;
    const double *hidden_direction, *gate_direction;
    double step;
};

static double moved(const DLTensor *tensor, int64_t i, int64_t h, const double *direction, double step) {
    return get_element(tensor, i, h, 0) + step * direction[i * tensor->shape[1] + h];
}

/* p or s of token n. */
static void forward_scores(const struct forward *forward, int64_t n, double *scores) {
    struct trial *trial = forward->trial;
    int softmax = trial->plan.operation == MOER_SOFTMAX_TOPK_BACKWARD;
    const DLTensor *hidden = trial_tensor(trial, "hidden_states"),
                   *gate = trial_tensor(trial, softmax ? "gate_weight" : "weight");
    double total = 0.0;
    for (int64_t e = 0; e < trial->plan.dims.experts; e++) {
        double logit = 0.0;
        for (int64_t h = 0; h < trial->plan.dims.hidden; h++)
            logit += moved(hidden, n, h, forward->hidden_direction, forward->step) *
                     moved(gate, e, h, forward->gate_direction, forward->step);
        scores[e] = softmax ? exp(logit) : 1.0 / (1.0 + exp(-logit));
        total += scores[e];
    }
    for (int64_t e = 0; softmax && e < trial->plan.dims.experts; e++)
        scores[e] /= total;
}

static double loss(const struct forward *forward) {
    struct call *call = &forward->trial->call;
    struct dims dims = forward->trial->plan.dims;
    int softmax = call->operation == MOER_SOFTMAX_TOPK_BACKWARD;
    const DLTensor *ids = call_tensor(call, softmax ? "selected_experts" : "topk_indices"),
                   *g = call_tensor(call, softmax ? "grad_routing_weights" : "grad_topk_weights"),
                   *m = call_tensor(call, "grad_expert_mask"), *d = call_tensor(call, "grad_router_logits");
    int normalised = !softmax || call->args.softmax.routing_weights_sum;
    double scores[64], factor = softmax ? 1.0 : call->args.sigmoid.routed_scaling_factor, result = 0.0;
    for (int64_t n = 0; n < dims.tokens; n++) {
        double sum = 0.0;
        forward_scores(forward, n, scores);
        for (int64_t k = 0; k < dims.top_k; k++)
            sum += scores[(int64_t)get_element(ids, n, k, 0)];
        for (int64_t k = 0; k < dims.top_k; k++) {
            int64_t e = (int64_t)get_element(ids, n, k, 0);
            result += get_element(g, n, k, 0) * factor * scores[e] / (normalised ? sum : 1.0);
            result += m ? get_element(m, e, k, n) * scores[e] : 0.0;
        }
        for (int64_t e = 0; d && e < dims.experts; e++)
            result += get_element(d, n, e, 0) * scores[e];
    }
    return result;
}

/* What the forward pass hands to the backward pass. */
static void save_forward(const struct forward *forward) {
    struct trial *trial = forward->trial;
    int softmax = trial->plan.operation == MOER_SOFTMAX_TOPK_BACKWARD;
    const DLTensor *ids = trial_tensor(trial, softmax ? "selected_experts" : "topk_indices");
    const DLTensor *divisor = call_tensor(&trial->call, softmax ? "routing_weights_sum" : "denominator");
    double scores[64];
    for (int64_t n = 0; n < trial->plan.dims.tokens; n++) {
        double sum = 0.0;
        forward_scores(forward, n, scores);
        for (int64_t e = 0; e < trial->plan.dims.experts; e++)
            set_element(trial_tensor(trial, softmax ? "routing_probs" : "scores"), n, e, 0, scores[e]);
        for (int64_t k = 0; k < trial->plan.dims.top_k; k++)
            sum += scores[(int64_t)get_element(ids, n, k, 0)];
        if (divisor)
            set_element(divisor, n, 0, 0, sum);
        for (int64_t k = 0; !softmax && k < trial->plan.dims.top_k; k++)
            set_element(trial_tensor(trial, "topk_weights_normalized"), n, k, 0,
                        scores[(int64_t)get_element(ids, n, k, 0)] / sum);
    }
}

static double *random_direction(const DLTensor *tensor, struct draw *draw) {
    double *direction = malloc((size_t)(tensor->shape[0] * tensor->shape[1]) * sizeof *direction);
    for (int64_t i = 0; i < tensor->shape[0] * tensor->shape[1]; i++)
        direction[i] = draw_normal(draw);
    return direction;
}

/* The gradient along a direction; *magnitude grows by that of its terms. */
static double along(const DLTensor *gradient, const double *direction, double *magnitude) {
    double sum = 0.0;
    for (int64_t i = 0; i < gradient->shape[0]; i++)
        for (int64_t j = 0; j < gradient->shape[1]; j++) {
            double term = get_element(gradient, i, j, 0) * direction[i * gradient->shape[1] + j];
            sum += term;
            *magnitude += fabs(term);
        }
    return sum;
}

/* Central differences of float64 losses: their own error is about step^2, far below float32's. */
START_TEST(finite_differences) {
    static const int absent[] = {0, SUM, MASK, DIRECT, MASK | DIRECT, SUM | MASK | DIRECT};
    for (int n = 0; n < LENGTH(absent); n++) {
        struct plan plan = {.operation = (enum moer_operation)_i,
                            .dims = {17, 24, 12, 3},
                            .type = F32,
                            .absent = absent[n],
                            .seed = 10 + (uint64_t)n};
        struct trial *trial = trial_new(&plan);
        struct draw draw = {plan.seed, 0};
        const DLTensor *hidden = trial_tensor(trial, "hidden_states"),
                       *gate = trial_tensor(trial, _i ? "weight" : "gate_weight");
        for (int64_t e = 0; e < gate->shape[0]; e++)
            for (int64_t h = 0; h < gate->shape[1]; h++)
                set_element(gate, e, h, 0, 0.2 * draw_normal(&draw));
        double *hidden_direction = random_direction(hidden, &draw), *gate_direction = random_direction(gate, &draw);
        struct forward forward = {trial, hidden_direction, gate_direction, 0.0};
        save_forward(&forward);
        trial_check(trial);

        double magnitude = 0.0, step = 1e-4;
        double gradient = along(trial_output(trial, 0), hidden_direction, &magnitude) +
                          along(trial_output(trial, 1), gate_direction, &magnitude);
        forward.step = step;
        double above = loss(&forward);
        forward.step = -step;
        double difference = (above - loss(&forward)) / (2.0 * step);
        ck_assert_msg(fabs(gradient - difference) <= 1e-5 * magnitude,
                      "absent=%d: along a direction %.9g, differences %.9g", absent[n], gradient, difference);
        free(hidden_direction);
        free(gate_direction);
        trial_free(trial);
    }
}
END_TEST

/* Adding the same number to all logits of a token changes nothing. */
START_TEST(rows_sum_to_zero) {
    struct plan plan = {.dims = {129, 8, 128, 8}, .type = F32, .absent = _i * MASK, .seed = 1};
    struct trial *trial = trial_new(&plan);
    trial_check(trial);
    for (int64_t n = 0; n < plan.dims.tokens; n++) {
        double sum = 0.0, magnitude = 0.0;
        for (int64_t e = 0; e < plan.dims.experts; e++) {
            sum += get_element(trial_output(trial, 2), n, e, 0);
            magnitude += fabs(get_element(trial_output(trial, 2), n, e, 0));
        }
        ck_assert_msg(fabs(sum) <= 1e-5 * magnitude, "row %lld sums to %g", (long long)n, sum);
    }
    trial_free(trial);
}
END_TEST

/* Twice the gradient in, twice the gradient out, bit for bit: only the exponents change. */
START_TEST(linear) {
    static const enum type types[] = {BF16, F32};
    static const char *const incoming[] = {"grad_routing_weights", "grad_expert_mask", "grad_router_logits",
                                           "grad_topk_weights"};
    struct plan plan = {.operation = (enum moer_operation)(_i % MOER_OPERATIONS),
                        .dims = {130, 40, 24, 4},
                        .type = types[_i / MOER_OPERATIONS],
                        .seed = 2};
    struct trial *once = trial_new(&plan), *twice = trial_new(&plan);
    for (int i = 0; i < LENGTH(incoming); i++) {
        const DLTensor *tensor = call_tensor(&twice->call, incoming[i]);
        int mask = i == 1;
        for (int64_t a = 0; tensor && a < tensor->shape[0]; a++)
            for (int64_t b = 0; b < tensor->shape[1]; b++)
                for (int64_t c = 0; c < (mask ? tensor->shape[2] : 1); c++)
                    set_element(tensor, a, b, c, 2.0 * get_element(tensor, a, b, c));
    }
    trial_check(once);
    trial_check(twice);
    for (int i = 0; i < CALL_OUTPUTS; i++) {
        const DLTensor *output = trial_output(once, i);
        for (int64_t a = 0; a < output->shape[0]; a++)
            for (int64_t b = 0; b < output->shape[1]; b++)
                set_element(output, a, b, 0, 2.0 * get_element(output, a, b, 0));
        same_bits(output, trial_output(twice, i), "twice");
    }
    trial_free(once);
    trial_free(twice);
}
END_TEST

/* Rounding is to nearest even: products of two bfloat16, exact in float32, lie halfway between two once in 256 times.
 */
START_TEST(ties_to_even) {
    struct plan plan = {.operation = MOER_SIGMOID_TOPK_BACKWARD, .dims = {130, 200, 24, 1}, .type = BF16, .seed = 7};
    struct trial *narrow = trial_new(&plan);
    struct trial *expected = trial_new(&plan);
    plan.wide = OUTPUTS;
    struct trial *wide = trial_new(&plan);
    for (int64_t n = 0; n < plan.dims.tokens; n++) { /* with a weight of 1 G would be zero */
        set_element(call_tensor(&narrow->call, "topk_weights_normalized"), n, 0, 0, 0.5);
        set_element(call_tensor(&wide->call, "topk_weights_normalized"), n, 0, 0, 0.5);
    }
    trial_check(narrow);
    trial_check(wide);
    copy_matrix(trial_output(expected, 0), trial_output(wide, 0));
    same_bits(trial_output(narrow, 0), trial_output(expected, 0), "rounded");
    trial_free(narrow);
    trial_free(expected);
    trial_free(wide);
}
END_TEST

/* ---- Tokens ---- */

/* Reversed and rotated: every token meets other neighbours. */
START_TEST(token_order) {
    enum { N = 131 };
    struct plan plan = plan_of(_i, (struct dims){N, 72, 24, 4}, 3);
    struct trial *trial = trial_new(&plan);
    int64_t order[N];
    for (int64_t n = 0; n < N; n++)
        order[n] = (2 * N - n - 40) % N;
    struct trial *shuffled = trial_of_tokens(trial, order, N);
    trial_check(trial);
    trial_check(shuffled);
    for (int64_t n = 0; n < N; n++) {
        same_rows(trial_output(shuffled, 2), n, trial_output(trial, 2), order[n], "grad_logits");
        if (own_products(plan.type))
            same_rows(trial_output(shuffled, 0), n, trial_output(trial, 0), order[n], "grad_hidden_states");
    }
    trial_free(trial);
    trial_free(shuffled);
}
END_TEST

/* Batches, from a token on so many, give those the bits that they have among all. */
static void check_batches(const struct plan *plan, const int64_t batches[][2], int count) {
    struct trial *all = trial_new(plan);
    trial_check(all);
    for (int i = 0; i < count; i++) {
        int64_t *tokens = iota(batches[i][0], batches[i][1]);
        struct trial *some = trial_of_tokens(all, tokens, batches[i][1]);
        trial_check(some);
        for (int64_t n = 0; n < batches[i][1]; n++) {
            same_rows(trial_output(some, 2), n, trial_output(all, 2), tokens[n], "grad_logits");
            if (own_products(plan->type))
                same_rows(trial_output(some, 0), n, trial_output(all, 0), tokens[n], "grad_hidden_states");
        }
        trial_free(some);
        free(tokens);
    }
    trial_free(all);
}

/* A token by itself, and in batches of some sizes. */
START_TEST(token_alone) {
    static const int64_t batches[][2] = {{0, 1}, {77, 1}, {130, 1}, {3, 2}, {50, 15}, {20, 64}, {1, 130}};
    struct plan plan = plan_of(_i, (struct dims){131, 300, 24, 4}, 4);
    check_batches(&plan, batches, LENGTH(batches));
}
END_TEST

/* In batches so different in size that different kernels take them. */
START_TEST(token_in_any_batch) {
    static const int64_t batches[][2] = {{8999, 1}, {70, 1500}, {1000, 1700}};
    struct plan plan = plan_of(_i, (struct dims){9000, 40, 24, 4}, 6);
    plan.wide = TO_WEIGHT | TO_LOGITS;
    check_batches(&plan, batches, LENGTH(batches));
}
END_TEST

/* A second batch accumulated onto the first is the gradient of both together. */
START_TEST(batches_add_up) {
    struct plan plan = plan_of(_i, (struct dims){150, 40, 24, 4}, 5);
    struct trial *all = trial_new(&plan);
    int64_t *tokens = iota(0, 150);
    struct trial *first = trial_of_tokens(all, tokens, 61), *second = trial_of_tokens(all, tokens + 61, 89);
    trial_check(all);
    trial_check(first);
    copy_matrix(trial_output(second, 1), trial_output(first, 1));
    second->call.args.common.accumulate = 1;
    ck_assert_int_eq(trial_run(second, LIBRARY_SCRATCH), MOER_OK);
    copy_matrix(trial_output(all, 1), trial_output(second, 1));
    trial_compare(all);
    trial_free(all);
    trial_free(first);
    trial_free(second);
    free(tokens);
}
END_TEST

int main(void) {
    const struct test tests[] = {
        {finite_differences, MOER_OPERATIONS},
        {rows_sum_to_zero, 4},
        {linear, 2 * MOER_OPERATIONS},
        {ties_to_even, 1},
        {token_order, EACH},
        {token_alone, EACH},
        {token_in_any_batch, EACH},
        {batches_add_up, EACH},
    };
    return run_tests("laws", tests, LENGTH(tests));
}
