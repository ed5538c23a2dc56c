/* SPDX-License-Identifier: Apache-2.0 */
/* G at random: slots come in pairs of neighbouring experts, whose gradients cancel, as those that reach the
 * probabilities directly do. So the sums inside the formulas are 0, and G is an integer times p, an eighth or a
 * sixteenth, or times s(1 - s), three or four sixteenths. */
#include "selfcheck_data.h"

#include <string.h>

#include "draw.h"

/* A value of a tensor, by its place. */
typedef double value_of(const struct selfcheck_case *one, int64_t i, int64_t j, int64_t k);

static int64_t integer(uint64_t tensor, int64_t i, int64_t j, int64_t most) {
    struct draw draw = {tensor << 56 ^ (uint64_t)i << 28 ^ (uint64_t)j, 0};
    return (int64_t)(draw_integer(&draw) % (uint64_t)(2 * most + 1)) - most;
}

/* 1 or -1, for the first or the second of a pair; 0 for the last of an odd number. */
static int sign(int64_t index, int64_t count) {
    return index % 2 ? -1 : index + 1 < count;
}

/* The expert for which a pattern's token has a 1, or -1. */
static int64_t hot(const struct selfcheck_case *one, int64_t token) {
    return token < one->first ? -1 : (token - one->first) % one->dims.experts;
}

static double factor(const struct selfcheck_case *one, uint64_t tensor, int64_t row, int64_t column) {
    switch (one->pattern) {
    case PATTERN_ROW_LOW:
        return (double)(row % 256);
    case PATTERN_ROW_HIGH:
        return (double)(row / 256);
    case PATTERN_COLUMN_LOW:
        return (double)(column % 256);
    case PATTERN_COLUMN_HIGH:
        return (double)(column / 256);
    default:
        return (double)integer(tensor, row, column, 3);
    }
}

static double hidden(const struct selfcheck_case *one, int64_t n, int64_t h, int64_t k) {
    (void)k;
    return factor(one, 1, n, h);
}

static double gate(const struct selfcheck_case *one, int64_t e, int64_t h, int64_t k) {
    (void)k;
    return factor(one, 2, e, h);
}

/* Pairs far apart; every 7th token has no first pair, every 11th the same one throughout. */
static double chosen(const struct selfcheck_case *one, int64_t n, int64_t k, int64_t unused) {
    const int64_t pairs = one->dims.experts / 2, slots = one->dims.top_k / 2;
    (void)unused;
    if (one->pattern)
        return k == 0 ? (double)hot(one, n) : -1;
    if (pairs == 0 || sign(k, one->dims.top_k) == 0 || (n % 7 == 0 && k < 2))
        return -1;
    const int64_t start = (integer(3, n, 0, 1 << 20) + (1 << 20)) % pairs, step = n % 11 ? k / 2 * (pairs / slots) : 0;
    return (double)((start + step) % pairs * 2 + k % 2);
}

static double incoming(const struct selfcheck_case *one, int64_t n, int64_t k, int64_t unused) {
    (void)unused;
    if (one->pattern)
        return one->operation == MOER_SIGMOID_TOPK_BACKWARD ? 4 : 0;
    return (double)(sign(k, one->dims.top_k) * integer(4, n, k / 2, 2));
}

static double probs(const struct selfcheck_case *one, int64_t n, int64_t e, int64_t k) {
    (void)k;
    if (one->pattern)
        return e == hot(one, n) ? 0.5 : 0;
    return e / 2 % 2 ? 0.125 : 0.0625;
}

static double mask(const struct selfcheck_case *one, int64_t e, int64_t k, int64_t n) {
    (void)e;
    return one->pattern ? 0 : (double)(sign(k, one->dims.top_k) * integer(5, n, k / 2, 1));
}

static double direct(const struct selfcheck_case *one, int64_t n, int64_t e, int64_t k) {
    (void)k;
    if (one->pattern)
        return e == hot(one, n) ? 4 : 0;
    return (double)(sign(e, one->dims.experts) * integer(6, n, e / 2, 2));
}

static double scores(const struct selfcheck_case *one, int64_t n, int64_t e, int64_t k) {
    (void)n, (void)k;
    return one->pattern || e / 2 % 2 ? 0.5 : e % 2 ? 0.25 : 0.75;
}

static double normalized(const struct selfcheck_case *one, int64_t n, int64_t k, int64_t unused) {
    (void)n, (void)k, (void)unused;
    return one->pattern ? 0 : 0.125;
}

/* It takes back what the scaling factor does. */
static double denominator(const struct selfcheck_case *one, int64_t n, int64_t k, int64_t unused) {
    (void)n, (void)k, (void)unused;
    return one->pattern ? 1 : 2;
}

static double one_everywhere(const struct selfcheck_case *one, int64_t n, int64_t k, int64_t unused) {
    (void)one, (void)n, (void)k, (void)unused;
    return 1;
}

static double old_weight(const struct selfcheck_case *one, int64_t e, int64_t h, int64_t k) {
    (void)one, (void)k;
    return (double)integer(7, e, h, 3);
}

static const struct {
    const char *name;
    value_of *value;
} inputs[] = {
    {"hidden_states", hidden},
    {"gate_weight", gate},
    {"weight", gate},
    {"routing_probs", probs},
    {"selected_experts", chosen},
    {"routing_weights_sum", one_everywhere},
    {"grad_routing_weights", incoming},
    {"grad_expert_mask", mask},
    {"grad_router_logits", direct},
    {"grad_topk_weights", incoming},
    {"scores", scores},
    {"topk_indices", chosen},
    {"topk_weights_normalized", normalized},
    {"denominator", denominator},
};

/* Row by row. What is drawn at random repeats, or drawing would take longer than all else: a matrix after a prime
 * number of rows, the mask, which is the same for every expert, with the next one. */
static void fill(const struct selfcheck_case *one, const DLTensor *tensor, value_of *value) {
    enum { BLOCK = 256, PERIOD = 509 };
    const int64_t width = tensor->shape[tensor->ndim - 1], middle = tensor->ndim == 3 ? tensor->shape[1] : 1;
    const int64_t period = tensor->ndim == 3 ? middle : one->pattern ? INT64_MAX : PERIOD;
    const size_t bytes = (size_t)width * dtype_size(tensor->dtype);
    double values[BLOCK];
    for (int64_t row = 0; row < tensor->shape[0] * middle; row++) {
        if (row >= period) {
            char *to = (char *)tensor->data + (size_t)row * bytes;
            memcpy(to, to - (size_t)period * bytes, bytes);
            continue;
        }
        for (int64_t first = 0; first < width; first += BLOCK) {
            const int64_t count = width - first < BLOCK ? width - first : BLOCK;
            for (int64_t i = 0; i < count; i++)
                values[i] = tensor->ndim == 3 ? value(one, row / middle, row % middle, first + i)
                                              : value(one, row, first + i, 0);
            set_elements(tensor, row * width + first, count, values);
        }
    }
}

static DLDataType dtype_of(const struct selfcheck_case *one, enum moer_kind kind) {
    switch (kind) {
    case MOER_DTYPE_OUTPUT:
        return one->output_dtype;
    case MOER_DTYPE_FLOAT:
        return (DLDataType){kDLFloat, 32, 1};
    case MOER_DTYPE_ID:
        return (DLDataType){kDLInt, one->dims.tokens % 2 ? 32 : 64, 1};
    default:
        return one->dtype;
    }
}

enum moer_status selfcheck_draw(const struct selfcheck_case *one, struct call *call) {
    size_t count;
    const struct moer_operand *operands = moer_operands(one->operation, &count);
    struct dims dims = one->dims;
    dims.hidden += one->padding;
    call_init(call, one->operation);
    for (size_t i = 0; i < count; i++) {
        value_of *value = NULL;
        for (size_t j = 0; j < sizeof inputs / sizeof *inputs; j++)
            if (!strcmp(inputs[j].name, operands[i].name))
                value = inputs[j].value;
        if (!value && operands[i].kind != MOER_DTYPE_OUTPUT)
            continue;
        int64_t shape[4];
        DLTensor *tensor;
        const enum moer_status status = moer_tensor_new(&tensor, (DLDevice){kDLCPU, 0}, dtype_of(one, operands[i].kind),
                                                        call_shape(&operands[i], dims, shape), shape);
        if (status != MOER_OK)
            return status;
        *call_field(call, &operands[i]) = tensor;
        if (value)
            fill(one, tensor, value);
    }
    if (one->operation == MOER_SIGMOID_TOPK_BACKWARD)
        call->args.sigmoid.routed_scaling_factor = one->pattern ? 1 : 2;
    call->args.common.accumulate = one->accumulate;
    return MOER_OK;
}

void selfcheck_poison(const struct selfcheck_case *one, const struct call *call) {
    size_t count;
    const struct moer_operand *operands = moer_operands(one->operation, &count);
    for (size_t i = 0; i < count; i++) {
        const DLTensor *tensor = *call_field((struct call *)call, &operands[i]);
        if (operands[i].kind != MOER_DTYPE_OUTPUT)
            continue;
        if (one->accumulate && operands[i].axes[0] == 'E')
            fill(one, tensor, old_weight);
        else if (tensor->shape[0] * tensor->shape[1] > 0)
            memset(tensor->data, 0xFF, (size_t)(tensor->shape[0] * tensor->shape[1]) * dtype_size(tensor->dtype));
    }
}
