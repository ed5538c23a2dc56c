/* SPDX-License-Identifier: Apache-2.0 */
/* The loop of reference.h, token by token: only blocks of tokens and E*H sums are ever in memory, so that the largest
 * case of the suite fits anywhere. Three sums belong to an element of a product: the product itself, the sum of the
 * terms' magnitudes (what rounding in float32 is measured by), and the sum of what the terms may be off by. */
#include "reference.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    BLOCK = 32, /* tokens at once: a block's rows stay in the second-level cache */
    /* Rows are padded to multiples of this many doubles: a constant length lets every compiler vectorise at -O2. */
    CHUNK = 256
};

/* ---- G ---- */

/* The inputs that G is made of, under the roles they share in both operations. */
struct loop {
    enum moer_operation operation;
    struct dims dims;
    DLDataType dtype; /* T */
    float scale;
    const DLTensor *scores, *ids, *weights, *sum, *gradient, *mask, *direct; /* p or s, s or i, w, z, g, m, d */
};

static struct loop loop_of(const struct call *call) {
    struct loop loop = {
        .operation = call->operation, .dims = call_dims(call), .dtype = call_tensor(call, "hidden_states")->dtype};
    if (call->operation == MOER_SOFTMAX_TOPK_BACKWARD) {
        const struct moer_softmax_topk_backward_args *args = &call->args.softmax;
        loop.scores = args->routing_probs;
        loop.ids = args->selected_experts;
        loop.sum = args->routing_weights_sum;
        loop.gradient = args->grad_routing_weights;
        loop.mask = args->grad_expert_mask;
        loop.direct = args->grad_router_logits;
    } else {
        const struct moer_sigmoid_topk_backward_args *args = &call->args.sigmoid;
        loop.scores = args->scores;
        loop.ids = args->topk_indices;
        loop.weights = args->topk_weights_normalized;
        loop.sum = args->denominator;
        loop.gradient = args->grad_topk_weights;
        loop.scale = args->routed_scaling_factor == 0.0 ? 1.0f : (float)args->routed_scaling_factor;
    }
    return loop;
}

/* The expert in slot k, or -1 for a slot that contributes nothing: empty, or not an expert. */
static int64_t slot_expert(const struct loop *loop, int64_t n, int64_t k) {
    double id = get_element(loop->ids, n, k, 0);
    return id >= 0.0 && id < (double)loop->dims.experts ? (int64_t)id : -1;
}

static double itself(double x) {
    return x;
}

/* G* of token n; or, every term replaced by its magnitude and every difference by a sum, what delta is made of. */
static void softmax_row(const struct loop *loop, int64_t n, int magnitudes, double *row) {
    double (*const of)(double) = magnitudes ? fabs : itself;
    double minus = magnitudes ? 1.0 : -1.0, z = loop->sum ? of(get_element(loop->sum, n, 0, 0)) : 1.0;
    double c = 0.0, sum = 0.0;
    for (int64_t e = 0; e < loop->dims.experts; e++)
        row[e] = loop->direct ? of(get_element(loop->direct, n, e, 0)) : 0.0;
    for (int64_t k = 0; loop->sum && k < loop->dims.top_k; k++) {
        int64_t e = slot_expert(loop, n, k);
        if (e >= 0)
            c += of(get_element(loop->gradient, n, k, 0)) * (get_element(loop->scores, n, e, 0) / z);
    }
    for (int64_t k = 0; k < loop->dims.top_k; k++) {
        int64_t e = slot_expert(loop, n, k);
        if (e < 0)
            continue;
        row[e] += (of(get_element(loop->gradient, n, k, 0)) + minus * c) / z;
        row[e] += loop->mask ? of(get_element(loop->mask, e, k, n)) : 0.0;
    }
    for (int64_t e = 0; e < loop->dims.experts; e++)
        sum += row[e] * get_element(loop->scores, n, e, 0);
    for (int64_t e = 0; e < loop->dims.experts; e++)
        row[e] = get_element(loop->scores, n, e, 0) * (row[e] + minus * sum);
}

/* R of a float32 result. */
static float rounded(const struct loop *loop, float x) {
    return (float)round_to(loop->dtype, x);
}

static float scaled_gradient(const struct loop *loop, int64_t n, int64_t k) {
    return rounded(loop, (float)get_element(loop->gradient, n, k, 0) * loop->scale);
}

/* G of token n: the chain of roundings, in float32. */
static void sigmoid_row(const struct loop *loop, int64_t n, double *G) {
    int64_t K = loop->dims.top_k;
    float c = 0.0f;
    memset(G, 0, (size_t)loop->dims.experts * sizeof *G);
    for (int64_t k = 0; k < K; k++)
        if (slot_expert(loop, n, k) >= 0)
            c += rounded(loop, scaled_gradient(loop, n, k) * (float)get_element(loop->weights, n, k, 0));
    c = rounded(loop, c);
    for (int64_t k = 0; k < K; k++) {
        int64_t e = slot_expert(loop, n, k), first = 0;
        while (first < k && slot_expert(loop, n, first) != e)
            first++;
        if (e < 0 || first < k)
            continue;
        float z = (float)get_element(loop->sum, n, 0, 0), s = (float)get_element(loop->scores, n, e, 0), D = 0.0f;
        for (int64_t j = k; j < K; j++)
            if (slot_expert(loop, n, j) == e)
                D = rounded(loop, D + rounded(loop, rounded(loop, scaled_gradient(loop, n, j) - c) / z));
        G[e] = rounded(loop, rounded(loop, D * s) * rounded(loop, 1.0f - s));
    }
}

/* R(G*) and the least and the greatest value that is right. */
static void logits_row(const struct loop *loop, int64_t n, double *G, double *low, double *high) {
    if (loop->operation == MOER_SIGMOID_TOPK_BACKWARD) {
        sigmoid_row(loop, n, G);
        memcpy(low, G, (size_t)loop->dims.experts * sizeof *G);
        memcpy(high, G, (size_t)loop->dims.experts * sizeof *G);
        return;
    }
    softmax_row(loop, n, 0, G);
    softmax_row(loop, n, 1, low);
    for (int64_t e = 0; e < loop->dims.experts; e++) {
        double exact = G[e], delta = 0x1p-21 * low[e];
        G[e] = round_to(loop->dtype, exact);
        low[e] = round_to(loop->dtype, exact - delta);
        high[e] = round_to(loop->dtype, exact + delta);
    }
}

/* ---- Products ---- */

/* Rows of the sums that make up a product. */
struct sums {
    double *product, *magnitude, *spread;
};

/* Adds the terms of g * x to a chunk of a row, g being off by spread at most. A factor that is not zero counts as least
 * at least in their magnitudes. */
static void add_terms(struct sums to, int64_t at, double g, double spread, double least, const double *restrict x) {
    double *restrict product = to.product + at, *restrict magnitude = to.magnitude + at;
    for (int i = 0; i < CHUNK; i++) {
        product[i] += g * x[i];
        magnitude[i] += fabs(g * x[i]);
    }
    if (least > 0.0) {
        const double size = fabs(g) < least ? least : fabs(g);
        for (int i = 0; i < CHUNK; i++) {
            const double other = fabs(x[i]) < least ? least : fabs(x[i]);
            magnitude[i] += x[i] == 0.0 || g == 0.0 ? 0.0 : size * other - fabs(g * x[i]);
        }
    }
    if (spread == 0.0)
        return;
    double *restrict spreads = to.spread + at;
    for (int i = 0; i < CHUNK; i++)
        spreads[i] += spread * fabs(x[i]);
}

/* Everything in memory: gate and the weight gradient's sums are [E, width], the rest is a block of tokens. */
struct work {
    int64_t width; /* H, padded */
    double least;  /* the magnitude that factors count as at least */
    double *gate, *hidden, *G, *low, *high, *spread;
    struct sums to_hidden, to_weight;
    void *memory;
};

static int work_new(struct work *work, struct dims dims) {
    work->width = (dims.hidden + CHUNK - 1) / CHUNK * CHUNK;
    size_t experts = (size_t)(dims.experts * work->width), tokens = (size_t)(BLOCK * work->width);
    size_t logits = (size_t)(BLOCK * dims.experts);
    double *next = work->memory = calloc(4 * experts + 4 * tokens + 4 * logits + 1, sizeof *next);
    if (!next)
        return -1;
    double **const parts[] = {&work->gate,
                              &work->to_weight.product,
                              &work->to_weight.magnitude,
                              &work->to_weight.spread,
                              &work->hidden,
                              &work->to_hidden.product,
                              &work->to_hidden.magnitude,
                              &work->to_hidden.spread,
                              &work->G,
                              &work->low,
                              &work->high,
                              &work->spread};
    const size_t sizes[] = {experts, tokens, logits};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        *parts[i] = next;
        next += sizes[i / 4];
    }
    return 0;
}

static void load_rows(double *rows, int64_t width, const DLTensor *from, int64_t first, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        for (int64_t j = 0; j < from->shape[1]; j++)
            rows[i * width + j] = get_element(from, first + i, j, 0);
}

/* Both products of a block of tokens; a chunk of all rows at a time, so that it stays in the cache. Chunks share no
 * sums. */
static void add_block(struct work *work, struct dims dims, int64_t tokens, int want_hidden, int want_weight) {
    enum { WORTH_THREADS = 1 << 20 };
#pragma omp parallel for if (tokens * dims.experts * work->width >= WORTH_THREADS)
    for (int64_t at = 0; at < work->width; at += CHUNK)
        for (int64_t n = 0; n < tokens; n++)
            for (int64_t e = 0; e < dims.experts; e++) {
                double g = work->G[n * dims.experts + e], spread = work->spread[n * dims.experts + e];
                if (g == 0.0 && spread == 0.0)
                    continue;
                if (want_hidden)
                    add_terms(work->to_hidden, n * work->width + at, g, spread, work->least,
                              work->gate + e * work->width + at);
                if (want_weight)
                    add_terms(work->to_weight, e * work->width + at, g, spread, work->least,
                              work->hidden + n * work->width + at);
            }
}

/* ---- Comparison ---- */

struct check {
    struct reference_report *report;
    const DLTensor *output, *expected;
    double u, c, h, atol;
    int exact;
    int64_t matched;
};

static struct check check_of(const struct call *call, const struct reference_options *options, int index,
                             struct reference_report *report) {
    static const char *const names[MOER_OPERATIONS][CALL_OUTPUTS] = {
        {"grad_hidden_states", "grad_gate_weight", "grad_logits"},
        {"grad_hidden_states", "grad_weight", "grad_logits"}};
    const char *name = names[call->operation][index];
    struct check check = {.report = report, .output = call_tensor(call, name)};
    *report = (struct reference_report){.name = check.output ? name : NULL, .suite_matched = 1.0};
    if (!check.output)
        return check;
    struct dims dims = call_dims(call);
    int64_t terms = index == 0 ? dims.experts : dims.tokens;
    check.expected = options->expected[index];
    check.exact = options->exact;
    DLDataType dtype = check.output->dtype;
    int half = dtype.code == kDLFloat && dtype.bits == 16;
    check.atol = options->suite_atol == 0.0 ? 1e-5 : options->suite_atol;
    check.u = dtype.bits == 32 ? 0x1p-23 : half ? 0x1p-11 : 0x1p-8;
    check.h = half ? 0x1p-25 : 0x1p-126;
    check.c = options->gpu ? 0x1p-20 * (1.0 + (double)terms / 512.0) : 0x1p-20;
    return check;
}

/* How far off value is, as a share of the bound. */
static double share_of_bound(const struct check *check, double value, double expected, double bound) {
    if (isnan(expected) || isnan(value))
        return isnan(expected) && isnan(value) ? 0.0 : INFINITY;
    if (value == expected)
        return 0.0;
    /* The bound does not know overflow: infinity is right where a value within the bound rounds to it. */
    if (isinf(value) && round_to(check->output->dtype, expected + copysign(bound, value)) == value)
        return 0.0;
    double share = fabs(value - expected) / bound;
    return isnan(share) ? INFINITY : share;
}

static void record(struct check *check, int64_t i, int64_t j, double value, double expected, double bound) {
    struct reference_report *report = check->report;
    double share = share_of_bound(check, value, expected, bound);
    if (share > report->worst || report->elements == 0) {
        report->worst = share;
        report->row = i;
        report->column = j;
        report->value = value;
        report->expected = expected;
        report->bound = bound;
    }
    report->elements++;
    report->broken += share > 1.0;
    check->matched += value == expected || (isnan(value) && isnan(expected)) ||
                      fabs(value - expected) <= check->atol + 0.05 * fabs(expected);
    report->suite_matched = (double)check->matched / (double)report->elements;
}

static void compare_logits(struct check *check, DLDataType T, int64_t n, const double *G, const double *low,
                           const double *high) {
    for (int64_t e = 0; check->output && e < check->output->shape[1]; e++) {
        double value = get_element(check->output, n, e, 0);
        double expected = check->expected ? get_element(check->expected, n, e, 0) : G[e];
        double bound = value > G[e] ? high[e] - G[e] : G[e] - low[e];
        /* A float32 tensor holds the values of T too. */
        record(check, n, e, value, expected, round_to(T, value) == value && !check->exact ? bound : 0.0);
    }
}

static void compare_product(struct check *check, int64_t i, struct sums sums, int64_t row, const DLTensor *old) {
    for (int64_t j = 0; check->output && j < check->output->shape[1]; j++) {
        double before = old ? get_element(old, i, j, 0) : 0.0;
        double expected = check->expected ? get_element(check->expected, i, j, 0) : sums.product[row + j] + before;
        double bound = 1.01 * sums.spread[row + j] + check->u * fabs(expected) +
                       check->c * (sums.magnitude[row + j] + fabs(before)) + check->h;
        if (check->exact) {
            expected = round_to(check->output->dtype, expected);
            bound = 0.0;
        }
        record(check, i, j, get_element(check->output, i, j, 0), expected, bound);
    }
}

/* ---- Entry points ---- */

static void compare_block(const struct loop *loop, struct work *work, struct check check[CALL_OUTPUTS],
                          const DLTensor *hidden, int64_t first, int64_t tokens) {
    int64_t E = loop->dims.experts;
    size_t bytes = (size_t)(BLOCK * work->width) * sizeof(double);
    for (int64_t n = 0; n < tokens; n++) {
        double *G = work->G + n * E, *low = work->low + n * E, *high = work->high + n * E;
        logits_row(loop, first + n, G, low, high);
        compare_logits(&check[2], loop->dtype, first + n, G, low, high);
        /* Equal infinities are off by nothing. */
        for (int64_t e = 0; e < E; e++)
            work->spread[n * E + e] = low[e] == high[e] ? 0.0 : fmax(high[e] - G[e], G[e] - low[e]);
    }
    load_rows(work->hidden, work->width, hidden, first, tokens);
    memset(work->to_hidden.product, 0, bytes);
    memset(work->to_hidden.magnitude, 0, bytes);
    memset(work->to_hidden.spread, 0, bytes);
    add_block(work, loop->dims, tokens, check[0].output != NULL, check[1].output != NULL);
    for (int64_t n = 0; n < tokens; n++)
        compare_product(&check[0], first + n, work->to_hidden, n * work->width, NULL);
}

int reference_compare(const struct call *call, const struct reference_options *options,
                      struct reference_report report[CALL_OUTPUTS]) {
    struct loop loop = loop_of(call);
    struct check check[CALL_OUTPUTS];
    struct work work;
    int64_t broken = 0;
    for (int i = 0; i < CALL_OUTPUTS; i++)
        check[i] = check_of(call, options, i, &report[i]);
    int some = 0; /* of 2^50 rows of nothing there is nothing to compare */
    for (int i = 0; i < CALL_OUTPUTS; i++)
        some |= check[i].output && check[i].output->shape[0] > 0 && check[i].output->shape[1] > 0;
    if (!some)
        return 0;
    if (work_new(&work, loop.dims))
        return -1;
    work.least = options->gpu && loop.dtype.code == kDLFloat && loop.dtype.bits == 16 ? 0x1p-14 : 0.0;
    const DLTensor *hidden = call_tensor(call, "hidden_states"), *gate = call_tensor(call, "gate_weight");
    load_rows(work.gate, work.width, gate ? gate : call_tensor(call, "weight"), 0, loop.dims.experts);
    for (int64_t first = 0; first < loop.dims.tokens; first += BLOCK) {
        int64_t left = loop.dims.tokens - first;
        compare_block(&loop, &work, check, hidden, first, left < BLOCK ? left : BLOCK);
    }
    for (int64_t e = 0; e < loop.dims.experts; e++)
        compare_product(&check[1], e, work.to_weight, e * work.width, options->old_weight);
    for (int i = 0; i < CALL_OUTPUTS; i++)
        broken += report[i].broken;
    free(work.memory);
    return broken != 0;
}

void reference_describe(const struct reference_report *report, char *text, size_t size) {
    char broken[64] = "";
    if (report->worst == 0.0) {
        snprintf(text, size, "%lld elements, all exact", (long long)report->elements);
        return;
    }
    if (report->broken > 0)
        snprintf(broken, sizeof broken, "%lld of %lld elements out of bounds, ", (long long)report->broken,
                 (long long)report->elements);
    snprintf(text, size, "%s%.3g of the bound (1 is allowed) at worst: [%lld, %lld] is %.9g, expected %.9g, bound %.3g",
             broken, report->worst, (long long)report->row, (long long)report->column, report->value, report->expected,
             report->bound);
}

void reference_logits_row(const struct call *call, int64_t n, double *row) {
    struct loop loop = loop_of(call);
    if (loop.operation == MOER_SIGMOID_TOPK_BACKWARD)
        sigmoid_row(&loop, n, row);
    else
        softmax_row(&loop, n, 0, row);
    for (int64_t e = 0; e < loop.dims.experts; e++)
        row[e] = round_to(loop.dtype, row[e]);
}
