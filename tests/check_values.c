/* SPDX-License-Identifier: Apache-2.0 */
/* Values from the edge of their range: peaked routers, scores of 0 and 1, sums that are zero or nearly so, NaN and Inf
 * that must stay where they are; and ids that repeat, mark an empty slot or are no experts. */
#include "support.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* The tensors that play the same part in both operations. */
enum role { SCORES, IDS, GRADIENT, DIVISOR };
static const char *const role_names[MOER_OPERATIONS][4] = {
    {"routing_probs", "selected_experts", "grad_routing_weights", "routing_weights_sum"},
    {"scores", "topk_indices", "grad_topk_weights", "denominator"}};

static DLTensor *role(struct trial *trial, enum role role) {
    return trial_tensor(trial, role_names[trial->plan.operation][role]);
}

/* A test runs once for each operation and dtype. */
enum { EACH = MOER_OPERATIONS * TYPES };

static struct plan plan_of(int each, struct dims dims, uint64_t seed) {
    return (struct plan){.operation = (enum moer_operation)(each % MOER_OPERATIONS),
                         .dims = dims,
                         .type = (enum type)(each / MOER_OPERATIONS),
                         .seed = seed};
}

static int64_t chosen(struct trial *trial, int64_t n, int64_t k) {
    return (int64_t)get_element(role(trial, IDS), n, k, 0);
}

/* ---- Values ---- */

/* Routers that are all but certain: p from nearly 1 down to far below float32's smallest number. */
START_TEST(peaked_routers) {
    struct plan plan = {
        .operation = MOER_SOFTMAX_TOPK_BACKWARD, .dims = {65, 40, 48, 4}, .type = (enum type)_i, .wide = OUTPUTS};
    struct trial *trial = trial_new(&plan);
    struct draw draw = {1, 0};
    DLTensor *probs = role(trial, SCORES), *sums = role(trial, DIVISOR);
    for (int64_t n = 0; n < plan.dims.tokens; n++) {
        double logits[48], total = 0.0;
        float z = 0.0f;
        for (int e = 0; e < 48; e++)
            total += exp(logits[e] = (double)(n % 4 + 1) * 12.0 * draw_normal(&draw));
        for (int e = 0; e < 48; e++)
            set_element(probs, n, e, 0, exp(logits[e]) / total);
        /* Whichever is the largest, it is chosen, so that z is not tiny. */
        int largest = 0;
        for (int e = 0; e < 48; e++)
            largest = logits[e] > logits[largest] ? e : largest;
        for (int64_t k = 0; k < plan.dims.top_k; k++) {
            set_element(role(trial, IDS), n, k, 0, (double)((largest + 7 * k) % 48));
            z += (float)get_element(probs, n, chosen(trial, n, k), 0);
        }
        set_element(sums, n, 0, 0, z);
    }
    trial_check(trial);
    trial_free(trial);
}
END_TEST

/* A saturated sigmoid has no slope: nothing divides by it. */
START_TEST(saturated_scores) {
    struct plan plan = {
        .operation = MOER_SIGMOID_TOPK_BACKWARD, .dims = {40, 24, 12, 4}, .type = (enum type)_i, .wide = OUTPUTS};
    struct trial *trial = trial_new(&plan);
    for (int64_t n = 0; n < plan.dims.tokens; n++)
        for (int64_t e = 0; e < plan.dims.experts; e++)
            if ((n + e) % 3 < 2)
                set_element(role(trial, SCORES), n, e, 0, (n + e) % 3);
    trial_check(trial);
    for (int64_t n = 0; n < plan.dims.tokens; n++)
        for (int64_t e = 0; e < plan.dims.experts; e++)
            if ((n + e) % 3 < 2)
                ck_assert(get_element(trial_output(trial, 2), n, e, 0) == 0.0);
    trial_free(trial);
}
END_TEST

/* Every chosen score is tiny, and so is their sum: g / z is huge but finite, 1 / (z z) is not. */
START_TEST(tiny_sums) {
    static const enum type types[] = {F32, BF16};
    struct plan plan = {.operation = (enum moer_operation)(_i % MOER_OPERATIONS),
                        .dims = {33, 24, 16, 4},
                        .type = types[_i / MOER_OPERATIONS],
                        .absent = MASK | DIRECT,
                        .wide = OUTPUTS};
    struct trial *trial = trial_new(&plan);
    for (int64_t n = 0; n < plan.dims.tokens; n++) {
        for (int64_t k = 0; k < plan.dims.top_k; k++)
            set_element(role(trial, SCORES), n, chosen(trial, n, k), 0, 1e-31 * (double)(k + 1));
        set_element(role(trial, DIVISOR), n, 0, 0, 1e-30);
        for (int64_t k = 0; k < plan.dims.top_k && plan.operation == MOER_SIGMOID_TOPK_BACKWARD; k++)
            set_element(trial_tensor(trial, "topk_weights_normalized"), n, k, 0, 0.1 * (double)(k + 1));
    }
    trial_check(trial);
    ck_assert(isfinite(get_element(trial_output(trial, 0), 0, 0, 0)));
    ck_assert(get_element(trial_output(trial, 2), 0, chosen(trial, 0, 0), 0) != 0.0);
    trial_free(trial);
}
END_TEST

/* Runs the case as drawn and with another value in one row of a tensor: no other row may change. */
static void disturb(const struct plan *plan, const char *name, int64_t row, int64_t column, double value) {
    struct trial *clean = trial_new(plan), *dirty = trial_new(plan);
    int mask = strcmp(name, "grad_expert_mask") == 0;
    set_element(trial_tensor(dirty, name), mask ? chosen(dirty, row, 1) : row, mask ? 1 : column, mask ? row : 0,
                value);
    trial_succeed(clean, LIBRARY_SCRATCH);
    trial_check(dirty);
    for (int64_t n = 0; n < plan->dims.tokens; n++)
        if (n != row)
            for (int i = 0; i < CALL_OUTPUTS; i += 2)
                same_rows(trial_output(dirty, i), n, trial_output(clean, i), n, name);
    for (int64_t h = 0; h < plan->dims.hidden; h++)
        ck_assert_msg(!isfinite(get_element(trial_output(dirty, 0), row, h, 0)), "%s: no trace in column %lld", name,
                      (long long)h);
    /* Through G, every chosen expert's weights hear of it. */
    for (int64_t k = 0; k < plan->dims.top_k; k++)
        ck_assert_msg(!isfinite(get_element(trial_output(dirty, 1), chosen(dirty, row, k), 0, 0)), "%s: no trace",
                      name);
    trial_free(clean);
    trial_free(dirty);
}

static const struct {
    enum moer_operation operation;
    const char *name;
} disturbed[] = {
    {MOER_SOFTMAX_TOPK_BACKWARD, "grad_routing_weights"}, {MOER_SOFTMAX_TOPK_BACKWARD, "grad_expert_mask"},
    {MOER_SOFTMAX_TOPK_BACKWARD, "grad_router_logits"},   {MOER_SOFTMAX_TOPK_BACKWARD, "routing_weights_sum"},
    {MOER_SIGMOID_TOPK_BACKWARD, "grad_topk_weights"},    {MOER_SIGMOID_TOPK_BACKWARD, "topk_weights_normalized"},
    {MOER_SIGMOID_TOPK_BACKWARD, "denominator"},
};

/* NaN and Inf, and a sum of zero, in one row. */
START_TEST(one_bad_row) {
    static const struct dims dims = {67, 24, 16, 4};
    static const int64_t rows[] = {0, 31, 66};
    for (int type = 0; type < TYPES; type++)
        for (int i = 0; i < LENGTH(rows); i++) {
            struct plan plan = {
                .operation = disturbed[_i].operation, .dims = dims, .type = (enum type)type, .wide = i, .seed = 2};
            int sum = strstr("routing_weights_sum denominator", disturbed[_i].name) != NULL;
            disturb(&plan, disturbed[_i].name, rows[i], 0, NAN);
            disturb(&plan, disturbed[_i].name, rows[i], 0, sum ? 0.0 : INFINITY);
            disturb(&plan, disturbed[_i].name, rows[i], 0, sum ? -0.0 : -INFINITY);
        }
}
END_TEST

/* NaN with every bit set: rounding it as if it were a number would carry into the sign, and make it zero. */
static void fill_with_ones(const DLTensor *compact, int64_t row) {
    size_t bytes = (size_t)compact->shape[1] * dtype_size(compact->dtype);
    memset((char *)compact->data + (size_t)row * bytes, 0xFF, bytes);
}

/* A token whose router is nothing but NaN, repeated ids and empty slots included. */
START_TEST(row_of_nan) {
    struct plan plan = plan_of(_i, (struct dims){67, 24, 16, 4}, 3);
    struct trial *clean = trial_new(&plan), *dirty = trial_new(&plan);
    int64_t row = 40;
    fill_with_ones(role(dirty, SCORES), row);
    fill_with_ones(role(dirty, DIVISOR), row);
    for (int64_t k = 0; k < plan.dims.top_k; k++)
        set_element(role(dirty, IDS), row, k, 0, k < 2 ? 5.0 : -1.0);
    trial_succeed(clean, LIBRARY_SCRATCH);
    trial_succeed(dirty, OWN_SCRATCH);
    for (int64_t n = 0; n < plan.dims.tokens; n++)
        for (int i = 0; i < CALL_OUTPUTS && n != row; i += 2)
            same_rows(trial_output(dirty, i), n, trial_output(clean, i), n, "the row of another token");
    for (int64_t h = 0; h < plan.dims.hidden; h++)
        ck_assert(isnan(get_element(trial_output(dirty, 0), row, h, 0)));
    for (int64_t e = 0; e < plan.dims.experts; e++)
        if (e == 5 || plan.operation == MOER_SOFTMAX_TOPK_BACKWARD)
            ck_assert_msg(isnan(get_element(trial_output(dirty, 2), row, e, 0)), "grad_logits of expert %d", (int)e);
    trial_free(clean);
    trial_free(dirty);
}
END_TEST

/* hidden_states have no part in their own gradient. */
START_TEST(bad_hidden_states) {
    struct plan plan = plan_of(_i, (struct dims){67, 24, 16, 4}, 4);
    struct trial *clean = trial_new(&plan), *dirty = trial_new(&plan);
    set_element(trial_tensor(dirty, "hidden_states"), 30, 7, 0, NAN);
    trial_succeed(clean, LIBRARY_SCRATCH);
    trial_succeed(dirty, OWN_SCRATCH);
    same_bits(trial_output(dirty, 0), trial_output(clean, 0), "grad_hidden_states");
    for (int64_t e = 0; e < plan.dims.experts; e++)
        for (int64_t h = 0; h < plan.dims.hidden; h++)
            if (h != 7)
                ck_assert(isfinite(get_element(trial_output(dirty, 1), e, h, 0)));
    ck_assert(isnan(get_element(trial_output(dirty, 1), chosen(dirty, 30, 0), 7, 0)));
    trial_free(clean);
    trial_free(dirty);
}
END_TEST

/* Numbers that float16 cannot hold become infinite, small ones are rounded among its subnormals. */
START_TEST(float16_range) {
    static const double scales[] = {1e-7, 3e-6, 60000.0};
    struct plan plan = plan_of(MOER_OPERATIONS * F16 + _i, (struct dims){67, 24, 16, 4}, 5);
    for (int i = 0; i < LENGTH(scales); i++) {
        struct trial *trial = trial_new(&plan);
        DLTensor *gradient = role(trial, GRADIENT);
        for (int64_t n = 0; n < plan.dims.tokens; n++)
            for (int64_t k = 0; k < plan.dims.top_k; k++)
                set_element(gradient, n, k, 0, scales[i] * (k % 2 ? 1.0 : -1.0));
        trial_check(trial);
        trial_free(trial);
    }
}
END_TEST

/* Every so many rows of a tensor are scaled by a power of two, exactly as far as its dtype goes. */
static void scale_rows(const DLTensor *tensor, int step, int exponent) {
    for (int64_t i = 0; i < tensor->shape[0]; i += step)
        for (int64_t j = 0; j < tensor->shape[1]; j++)
            set_element(tensor, i, j, 0, ldexp(get_element(tensor, i, j, 0), exponent));
}

/* bfloat16 goes as far down as float32: operands, products and sums may be subnormal, and count for what they are. The
 * bounds excuse 2^-126; what one operand loses the other brings back above that. */
START_TEST(bfloat16_range) {
    static const struct {
        int step, hidden, gate, gradient; /* exponents */
    } far[] = {{1, -128, 0, 20},   {1, 0, -128, 20},   {1, 30, 30, -128},  {1, -64, -64, -60},
               {3, -120, 0, 0},    {3, 0, 0, -100},    {3, 40, 40, -128},  {3, -128, -128, 20},
               {1, -38, -38, -75}, {1, -45, -45, -76}, {3, -20, -20, -90}, {1, -120, -120, 0}};
    struct plan plan = plan_of(MOER_OPERATIONS * BF16 + _i % MOER_OPERATIONS, (struct dims){131, 72, 40, 4}, 5);
    const int row = _i / MOER_OPERATIONS;
    ck_assert_int_lt(row, LENGTH(far));
    plan.wide = OUTPUTS, plan.absent = MASK | DIRECT;
    struct trial *trial = trial_new(&plan);
    const char *gate = plan.operation == MOER_SOFTMAX_TOPK_BACKWARD ? "gate_weight" : "weight";
    scale_rows(trial_tensor(trial, "hidden_states"), far[row].step, far[row].hidden);
    scale_rows(trial_tensor(trial, gate), far[row].step, far[row].gate);
    scale_rows(role(trial, GRADIENT), far[row].step, far[row].gradient);
    trial_check(trial);
    trial_free(trial);
}
END_TEST

/* ---- Ids ---- */

START_TEST(repeated_ids) {
    struct plan plan = plan_of(_i, (struct dims){70, 40, 12, 6}, 6);
    for (plan.short_ids = 0; plan.short_ids < 2; plan.short_ids++) {
        struct trial *trial = trial_new(&plan);
        for (int64_t n = 0; n < plan.dims.tokens; n++)
            for (int64_t k = 0; k < plan.dims.top_k; k++)
                set_element(role(trial, IDS), n, k, 0, (double)((n + k % (1 + n % 4)) % plan.dims.experts));
        trial_check(trial);
        trial_free(trial);
    }
}
END_TEST

/* Nothing of an empty slot is looked at, nor the sum of a row without live slots. */
START_TEST(empty_slots) {
    struct plan plan = plan_of(_i, (struct dims){70, 40, 12, 4}, 7);
    for (plan.short_ids = 0; plan.short_ids < 2; plan.short_ids++) {
        struct trial *trial = trial_new(&plan);
        for (int64_t n = 0; n < plan.dims.tokens; n++) {
            for (int64_t k = 0; k < plan.dims.top_k; k++) {
                if (n % 5 && (n >> k & 1))
                    continue;
                set_element(role(trial, IDS), n, k, 0, -1.0);
                set_element(role(trial, GRADIENT), n, k, 0, NAN);
                if (plan.operation == MOER_SIGMOID_TOPK_BACKWARD)
                    set_element(trial_tensor(trial, "topk_weights_normalized"), n, k, 0, NAN);
            }
            if (n % 5 == 0)
                set_element(role(trial, DIVISOR), n, 0, 0, n % 2 ? NAN : 0.0);
        }
        trial_check(trial);
        for (int64_t h = 0; h < plan.dims.hidden; h++)
            ck_assert(isfinite(get_element(trial_output(trial, 0), 0, h, 0)));
        trial_free(trial);
    }
}
END_TEST

static const struct {
    int64_t id;
    const char *text;
    int fits_short;
} bad_ids[] = {
    {12, "12", 1},
    {4000, "4000", 1},
    {-2, "-2", 1},
    {INT32_MAX, "2147483647", 1},
    {INT32_MIN, "-2147483648", 1},
    {INT64_C(1) << 32, "4294967296", 0},
    {(INT64_C(1) << 32) - 1, "4294967295", 0},
    {INT64_C(1) << 40, "1099511627776", 0},
    {-(INT64_C(1) << 33) + 3, "-8589934589", 0},
};

/* The call names row and value and writes nothing; on a GPU it passes over the slot. Either counts every bad id. */
START_TEST(invalid_ids) {
    static const int64_t rows[] = {0, 512, 1024};
    for (int each = 0; each < 2 * MOER_OPERATIONS; each++) {
        struct plan plan = plan_of(each % MOER_OPERATIONS, (struct dims){1025, 16, 12, 4}, 8);
        plan.short_ids = each / MOER_OPERATIONS;
        if (plan.short_ids && !bad_ids[_i].fits_short)
            continue;
        struct trial *trial = trial_new(&plan);
        const DLTensor *count = trial_add(trial, "invalid_ids", (DLDataType){kDLInt, 32, 1}, 5.0);
        trial_succeed(trial, OWN_SCRATCH);
        ck_assert(get_element(count, 0, 0, 0) == 5.0);
        for (int i = 0; i < LENGTH(rows); i++) {
            char row[32];
            snprintf(row, sizeof row, "[%lld, %d]", (long long)rows[i], i);
            set_element(role(trial, IDS), rows[i], i, 0, (double)bad_ids[_i].id);
            set_element(count, 0, 0, 0, 5.0);
            if (on_gpu()) {
                trial_succeed(trial, OWN_SCRATCH);
                trial_compare(trial);
            } else {
                const char *const words[] = {role_names[plan.operation][IDS], i == 0 ? row : "", bad_ids[_i].text,
                                             NULL};
                trial_fails(trial, MOER_INVALID, words);
            }
            ck_assert(get_element(count, 0, 0, 0) == 6.0 + i);
        }
        trial_free(trial);
    }
}
END_TEST

int main(void) {
    const struct test tests[] = {
        {peaked_routers, TYPES},
        {saturated_scores, TYPES},
        {tiny_sums, 2 * MOER_OPERATIONS},
        {one_bad_row, LENGTH(disturbed)},
        {row_of_nan, EACH},
        {bad_hidden_states, EACH},
        {float16_range, MOER_OPERATIONS},
        {bfloat16_range, 12 * MOER_OPERATIONS},
        {repeated_ids, EACH},
        {empty_slots, EACH},
        {invalid_ids, LENGTH(bad_ids)},
    };
    return run_tests("values", tests, LENGTH(tests));
}
