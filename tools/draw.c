/* SPDX-License-Identifier: Apache-2.0 */
/* Cases as the public suite draws them. Every tensor has a stream of its own, keyed by the seed and its name, so that
 * leaving one out changes no other; and a case of fewer tokens is the beginning of a longer one, but for
 * grad_expert_mask, in which tokens run fastest.
 *
 * The bits are the same on every machine that computes in IEEE doubles: sums, products, quotients and square roots are
 * exact by IEEE 754, and the logarithm and the exponential below, good to 1e-10, are made of nothing else. */
#include "draw.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCK = 512 }; /* numbers drawn before they are rounded and stored: 4 KiB of stack */

/* ---- The generator ---------------------------------------------------------------------------------------------- */

/* A bijection of 64-bit integers in which every bit of the input moves every bit of the output: the finaliser of
 * SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014). */
static uint64_t mix(uint64_t bits) {
    bits = (bits ^ bits >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    bits = (bits ^ bits >> 27) * UINT64_C(0x94d049bb133111eb);
    return bits ^ bits >> 31;
}

uint64_t draw_integer(struct draw *draw) {
    return mix(draw->key + ++draw->counter * UINT64_C(0x9e3779b97f4a7c15)); /* 2^64 over the golden ratio, as there */
}

/* An integer in [0, n), n < 2^32. */
static int64_t draw_below(struct draw *draw, int64_t n) {
    return (int64_t)((draw_integer(draw) >> 32) * (uint64_t)n >> 32);
}

/* The natural logarithm of a normal positive number: 2^e m with m in [1/sqrt 2, sqrt 2), and log m = 2 atanh t. */
static double logarithm(double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    const uint64_t fraction = bits & (UINT64_MAX >> 12);
    const int high = fraction > UINT64_C(0x6a09e667f3bcd); /* of sqrt 2 */
    const int exponent = (int)(bits >> 52) - 1023 + high;
    const uint64_t scaled = (uint64_t)(1023 - high) << 52 | fraction;
    double m;
    memcpy(&m, &scaled, sizeof m);
    const double t = (m - 1) / (m + 1), s = t * t;
    const double series = 1 + s * (1. / 3 + s * (1. / 5 + s * (1. / 7 + s * (1. / 9 + s * (1. / 11 + s / 13)))));
    return exponent * 0.69314718055994530942 + 2 * t * series;
}

/* e^x for |x| < 700: 2^k e^r with |r| <= log(2) / 2, and Taylor's series for e^r. */
static double exponential(double x) {
    const int k = (int)(x * 1.44269504088896340736 + (x < 0 ? -0.5 : 0.5)); /* 1 / log 2 */
    const double r = x - k * 0.69314718055994530942;
    double series = 1;
    for (int n = 12; n > 0; n--)
        series = 1 + series * r / n;
    const uint64_t bits = (uint64_t)(1023 + k) << 52;
    double power;
    memcpy(&power, &bits, sizeof power);
    return power * series;
}

/* The quantile of a uniform number, by the rational functions of Wichura's AS 241, PPND7 (Applied Statistics 37, 1988;
 * accurate to 1e-7). Of 35 bits the probability of a tail is never below 2^-36 > e^-25, where the second of his three
 * regions ends, so the third is not needed; |x| < 6.7. */
double draw_normal(struct draw *draw) {
    const double u = ((double)(draw_integer(draw) >> 29) + 0.5) * 0x1p-35, q = u - 0.5;
    if (q >= -0.425 && q <= 0.425) {
        const double r = 0.180625 - q * q;
        return q * (((59.109374720 * r + 159.29113202) * r + 50.434271938) * r + 3.3871327179) /
               (((67.187563600 * r + 78.757757664) * r + 17.895169469) * r + 1);
    }
    const double r = sqrt(-logarithm(q < 0 ? u : 1 - u)) - 1.6;
    const double x = (((0.17023821103 * r + 1.3067284816) * r + 2.7568153900) * r + 1.4234372777) /
                     ((0.12021132975 * r + 0.73700164250) * r + 1);
    return q < 0 ? -x : x;
}

static struct draw stream(uint64_t seed, const char *name) {
    struct draw draw = {.key = mix(seed)};
    for (; *name; name++)
        draw.key = mix(draw.key ^ (unsigned char)*name);
    return draw;
}

/* ---- The suite's sizes ------------------------------------------------------------------------------------------ */

enum { WORKLOADS = 16 };

static const struct {
    struct dims dims;
    int64_t tokens[WORKLOADS];
} suite[MOER_OPERATIONS] = {
    [MOER_SOFTMAX_TOPK_BACKWARD] = {{0, 2048, 128, 8},
                                    {1024, 1056, 1087, 1088, 1120, 1152, 1163, 1184, 1216, 1248, 1249, 1280, 2048, 3557,
                                     8192, 65536}},
    [MOER_SIGMOID_TOPK_BACKWARD] = {{0, 5120, 160, 8},
                                    {1280, 1312, 1321, 1344, 1376, 1408, 1440, 1721, 2048, 2131, 2521, 3011, 3072, 3557,
                                     6144, 8192}},
};

struct dims draw_suite_dims(enum moer_operation operation) {
    return suite[operation].dims;
}

const int64_t *draw_suite_tokens(enum moer_operation operation, size_t *count) {
    *count = WORKLOADS;
    return suite[operation].tokens;
}

double draw_suite_atol(enum moer_operation operation, int64_t tokens) {
    if (operation == MOER_SOFTMAX_TOPK_BACKWARD && tokens == 65536)
        return 1.1e-4;
    return operation == MOER_SOFTMAX_TOPK_BACKWARD && tokens == 3557 ? 3.2e-5 : 1e-5;
}

/* ---- Tensors of independent normal numbers ---------------------------------------------------------------------- */

static const struct {
    const char *name;
    double scale;
} normal_tensors[] = {
    {"hidden_states", 1},       {"gate_weight", 0.02},       {"weight", 0.02},         {"grad_routing_weights", 0.1},
    {"grad_expert_mask", 0.01}, {"grad_router_logits", 0.1}, {"grad_topk_weights", 1},
};

static int64_t elements(const DLTensor *tensor) {
    int64_t count = 1;
    for (int axis = 0; axis < tensor->ndim; axis++)
        count *= tensor->shape[axis];
    return count;
}

static void fill_normal(const DLTensor *tensor, struct draw draw, double scale) {
    double values[BLOCK];
    const int64_t count = elements(tensor);
    for (int64_t first = 0; first < count; first += BLOCK) {
        const int64_t length = count - first < BLOCK ? count - first : BLOCK;
        for (int64_t i = 0; i < length; i++)
            values[i] = scale * draw_normal(&draw);
        set_elements(tensor, first, length, values);
    }
}

static void fill_normal_tensors(const struct call *call, uint64_t seed) {
    for (size_t i = 0; i < sizeof normal_tensors / sizeof normal_tensors[0]; i++) {
        const DLTensor *tensor = call_tensor(call, normal_tensors[i].name);
        if (tensor)
            fill_normal(tensor, stream(seed, normal_tensors[i].name), normal_tensors[i].scale);
    }
}

/* ---- What the forward passes would have saved ------------------------------------------------------------------- */

/* The indices of the top_k largest, largest first, of equal ones the lowest first. */
static void select_largest(const double *values, int64_t count, int64_t top_k, double *indices) {
    int64_t chosen = 0;
    for (int64_t i = 0; i < count && top_k > 0; i++) {
        if (chosen == top_k && values[i] <= values[(int64_t)indices[top_k - 1]])
            continue;
        int64_t at = chosen < top_k ? chosen++ : top_k - 1;
        for (; at > 0 && values[(int64_t)indices[at - 1]] < values[i]; at--)
            indices[at] = indices[at - 1];
        indices[at] = (double)i;
    }
}

/* router_logits, routing_probs, selected_experts and routing_weights_sum; row holds 3 E numbers. */
static void fill_softmax_forward(struct call *call, struct dims dims, uint64_t seed, double *row) {
    const DLDataType dtype = call->args.softmax.hidden_states->dtype;
    const DLTensor *router_logits = call->args.softmax.router_logits;
    const DLTensor *weights_sum = call->args.softmax.routing_weights_sum;
    double *logits = row, *probs = row + dims.experts, *selected = row + 2 * dims.experts;
    struct draw draw = stream(seed, "router_logits");
    for (int64_t n = 0; n < dims.tokens; n++) {
        double sum = 0;
        for (int64_t e = 0; e < dims.experts; e++) { /* no maximum to take off: the logits are below 6.7 */
            logits[e] = round_to(dtype, draw_normal(&draw));
            probs[e] = exponential(logits[e]);
            sum += probs[e];
        }
        for (int64_t e = 0; e < dims.experts; e++)
            probs[e] = (float)(probs[e] / sum);
        select_largest(probs, dims.experts, dims.top_k, selected);
        float chosen_sum = 0;
        for (int64_t k = 0; k < dims.top_k; k++)
            chosen_sum += (float)probs[(int64_t)selected[k]];

        if (router_logits)
            set_elements(router_logits, n * dims.experts, dims.experts, logits);
        set_elements(call->args.softmax.routing_probs, n * dims.experts, dims.experts, probs);
        set_elements(call->args.softmax.selected_experts, n * dims.top_k, dims.top_k, selected);
        if (weights_sum)
            set_element(weights_sum, n, 0, 0, chosen_sum);
    }
}

/* scores, topk_indices, topk_weights, topk_weights_normalized, denominator and the scaling factor; row holds 3 E
 * numbers. The permutation of one row starts from that of the row before, which is as random as starting anew. */
static void fill_sigmoid_forward(struct call *call, struct dims dims, uint64_t seed, double *row) {
    const DLDataType dtype = call->args.sigmoid.hidden_states->dtype;
    const DLTensor *topk_weights = call->args.sigmoid.topk_weights;
    double *scores = row, *indices = row + dims.experts, *weights = row + 2 * dims.experts;
    struct draw draw = stream(seed, "scores"), shuffle = stream(seed, "topk_indices");
    call->args.sigmoid.routed_scaling_factor = 2.5;
    for (int64_t e = 0; e < dims.experts; e++)
        indices[e] = (double)e;
    for (int64_t n = 0; n < dims.tokens; n++) {
        for (int64_t e = 0; e < dims.experts; e++)
            scores[e] = round_to(dtype, 1 / (1 + exponential(-round_to(dtype, draw_normal(&draw)))));
        float sum = 0;
        for (int64_t k = 0; k < dims.top_k; k++) {
            const int64_t other = k + draw_below(&shuffle, dims.experts - k);
            const double index = indices[other];
            indices[other] = indices[k];
            indices[k] = index;
            weights[k] = scores[(int64_t)index];
            sum += (float)weights[k];
        }
        const double denominator = round_to(dtype, sum + 1e-20f);

        set_elements(call->args.sigmoid.scores, n * dims.experts, dims.experts, scores);
        set_elements(call->args.sigmoid.topk_indices, n * dims.top_k, dims.top_k, indices);
        set_element(call->args.sigmoid.denominator, n, 0, 0, denominator);
        if (topk_weights)
            set_elements(topk_weights, n * dims.top_k, dims.top_k, weights);
        for (int64_t k = 0; k < dims.top_k; k++)
            weights[k] = (float)weights[k] / (float)denominator;
        set_elements(call->args.sigmoid.topk_weights_normalized, n * dims.top_k, dims.top_k, weights);
    }
}

static void (*const forward_passes[MOER_OPERATIONS])(struct call *call, struct dims dims, uint64_t seed,
                                                     double *row) = {
    [MOER_SOFTMAX_TOPK_BACKWARD] = fill_softmax_forward,
    [MOER_SIGMOID_TOPK_BACKWARD] = fill_sigmoid_forward,
};

/* ---- Cases ------------------------------------------------------------------------------------------------------ */

static const DLDataType float32 = {kDLFloat, 32, 1}, int64 = {kDLInt, 64, 1};

/* A new host tensor under the operand's name. */
static enum moer_status add_tensor(struct call *call, const struct moer_operand *operand, struct dims dims,
                                   DLDataType dtype) {
    int64_t shape[4];
    const int ndim = call_shape(operand, dims, shape);
    DLTensor *tensor;
    const enum moer_status status = moer_tensor_new(&tensor, (DLDevice){kDLCPU, 0}, dtype, ndim, shape);
    *call_field(call, operand) = tensor;
    return status;
}

static enum moer_status add_inputs(struct call *call, struct dims dims, DLDataType dtype, int optional) {
    size_t count;
    const struct moer_operand *operands = moer_operands(call->operation, &count);
    enum moer_status status = MOER_OK;
    for (size_t i = 0; i < count && status == MOER_OK; i++) {
        const enum moer_kind kind = operands[i].kind;
        if (kind == MOER_DTYPE_OUTPUT || kind == MOER_DTYPE_COUNT || !(operands[i].required || optional))
            continue;
        status = add_tensor(call, &operands[i], dims,
                            kind == MOER_DTYPE_FLOAT ? float32
                            : kind == MOER_DTYPE_ID  ? int64
                                                     : dtype);
    }
    return status;
}

enum moer_status draw_inputs(struct call *call, enum moer_operation operation, struct dims dims, DLDataType dtype,
                             uint64_t seed, int optional) {
    call_init(call, operation);
    const int possible = dims.tokens >= 0 && dims.hidden >= 0 && dims.top_k >= 0 && dims.top_k <= dims.experts &&
                         dims.experts < INT32_MAX;
    if (!possible)
        return MOER_INVALID;
    double *row = malloc(sizeof *row * 3 * ((size_t)dims.experts + 1)); /* never 0 bytes */
    enum moer_status status = row ? add_inputs(call, dims, dtype, optional) : MOER_NO_MEMORY;
    if (status == MOER_OK) {
        fill_normal_tensors(call, seed);
        forward_passes[operation](call, dims, seed, row);
    } else {
        call_free(call);
    }
    free(row);
    return status;
}

enum moer_status draw_outputs(struct call *call, DLDataType dtype) {
    size_t count;
    const struct moer_operand *operands = moer_operands(call->operation, &count);
    const struct dims dims = call_dims(call);
    enum moer_status status = MOER_OK;
    for (size_t i = 0; i < count && status == MOER_OK; i++)
        if (operands[i].kind == MOER_DTYPE_OUTPUT && !*call_field(call, &operands[i]))
            status = add_tensor(call, &operands[i], dims, dtype);
    return status;
}
