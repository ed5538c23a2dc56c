/* SPDX-License-Identifier: Apache-2.0 */
/* Cases begin as the suite's are drawn; those made to break something then have tensors changed. */
#include "check_cases.h"

#include <math.h>
#include <string.h>

#include "draw.h"

#define LENGTH(array) (sizeof(array) / sizeof *(array))

/* ---- Tensors by the part they play in both operations ----------------------------------------------------------- */

enum role { GATE, SCORES, IDS, GRADIENT, SUM };
static const char *const role_names[MOER_OPERATIONS][5] = {
    [MOER_SOFTMAX_TOPK_BACKWARD] = {"gate_weight", "routing_probs", "selected_experts", "grad_routing_weights",
                                    "routing_weights_sum"},
    [MOER_SIGMOID_TOPK_BACKWARD] = {"weight", "scores", "topk_indices", "grad_topk_weights", "denominator"}};

static const DLTensor *role(const struct call *call, enum role role) {
    return call_tensor(call, role_names[call->operation][role]);
}

/* Sets every element of a matrix to an integer in [least, least + range). */
static void fill_integers(const DLTensor *tensor, int64_t least, uint64_t range, struct draw *draw) {
    for (int64_t i = 0; i < tensor->shape[0]; i++)
        for (int64_t j = 0; j < tensor->shape[1]; j++)
            set_element(tensor, i, j, 0, (double)(least + (int64_t)(draw_integer(draw) % range)));
}

static void fill(const DLTensor *tensor, double value) {
    for (int64_t i = 0; i < tensor->shape[0]; i++)
        for (int64_t j = 0; j < tensor->shape[1]; j++)
            set_element(tensor, i, j, 0, value);
}

/* Puts another tensor, or none, in the place of one. */
static void replace(struct call *call, const char *name, DLTensor *tensor) {
    moer_tensor_free((DLTensor *)call_tensor(call, name));
    call_set(call, name, tensor);
}

/* ---- Changes ---------------------------------------------------------------------------------------------------- */

static enum moer_status shorten_ids(struct call *call, struct dims dims) {
    const DLTensor *ids = role(call, IDS);
    DLTensor *narrow;
    const enum moer_status status = moer_tensor_new(&narrow, ids->device, (DLDataType){kDLInt, 32, 1}, 2, ids->shape);
    if (status != MOER_OK)
        return status;
    for (int64_t n = 0; n < dims.tokens; n++)
        for (int64_t k = 0; k < dims.top_k; k++)
            set_element(narrow, n, k, 0, get_element(ids, n, k, 0));
    replace(call, role_names[call->operation][IDS], narrow);
    return MOER_OK;
}

/* Every id twice in a row, or in each seventh row the same one in all slots. */
static enum moer_status repeat_ids(struct call *call, struct dims dims) {
    const DLTensor *ids = role(call, IDS);
    for (int64_t n = 0; n < dims.tokens; n++)
        for (int64_t k = 0; k < dims.top_k; k++)
            set_element(ids, n, k, 0, get_element(ids, n, n % 7 == 0 ? 0 : k / 2, 0));
    return MOER_OK;
}

/* A third of the slots, and all of each seventh row. */
static enum moer_status empty_slots(struct call *call, struct dims dims) {
    for (int64_t n = 0; n < dims.tokens; n++)
        for (int64_t k = 0; k < dims.top_k; k++)
            if (n % 7 == 0 || (n + k) % 3 == 0)
                set_element(role(call, IDS), n, k, 0, -1);
    return MOER_OK;
}

/* Logits thirty times as large. */
static void peak_probs(const struct call *call, struct dims dims, int64_t n) {
    const DLTensor *logits = call->args.softmax.router_logits;
    double largest = -INFINITY, total = 0;
    for (int64_t e = 0; e < dims.experts; e++)
        largest = fmax(largest, get_element(logits, n, e, 0));
    for (int64_t e = 0; e < dims.experts; e++)
        total += exp(30 * (get_element(logits, n, e, 0) - largest));
    for (int64_t e = 0; e < dims.experts; e++)
        set_element(role(call, SCORES), n, e, 0, exp(30 * (get_element(logits, n, e, 0) - largest)) / total);
}

/* Logits four times as large. */
static void peak_scores(const struct call *call, struct dims dims, int64_t n) {
    for (int64_t e = 0; e < dims.experts; e++) {
        const double s = get_element(role(call, SCORES), n, e, 0);
        set_element(role(call, SCORES), n, e, 0, 1 / (1 + pow((1 - s) / s, 4)));
    }
}

/* A router that is all but certain. The order of its scores, and with it the selection, is as drawn. */
static enum moer_status peak_router(struct call *call, struct dims dims) {
    const DLTensor *weights = call_tensor(call, "topk_weights_normalized");
    for (int64_t n = 0; n < dims.tokens; n++) {
        float z = 0;
        (call->operation == MOER_SOFTMAX_TOPK_BACKWARD ? peak_probs : peak_scores)(call, dims, n);
        for (int64_t k = 0; k < dims.top_k; k++)
            z += (float)get_element(role(call, SCORES), n, (int64_t)get_element(role(call, IDS), n, k, 0), 0);
        set_element(role(call, SUM), n, 0, 0, z);
        for (int64_t k = 0; k < dims.top_k && weights; k++)
            set_element(weights, n, k, 0,
                        get_element(role(call, SCORES), n, (int64_t)get_element(role(call, IDS), n, k, 0), 0) / z);
    }
    return MOER_OK;
}

/* Nothing cancels, so that what rounding takes adds up. */
static enum moer_status same_signs(struct call *call, struct dims dims) {
    const DLTensor *hidden = call_tensor(call, "hidden_states");
    for (int64_t h = 0; h < dims.hidden; h++) {
        for (int64_t n = 0; n < dims.tokens; n++)
            set_element(hidden, n, h, 0, fabs(get_element(hidden, n, h, 0)));
        for (int64_t e = 0; e < dims.experts; e++)
            set_element(role(call, GATE), e, h, 0, fabs(get_element(role(call, GATE), e, h, 0)));
    }
    return MOER_OK;
}

/* p = 1 / E, z = 1, g = 0, no m; the integers d add up to 0 in each row: G = d / E. */
static void make_softmax_exact(struct call *call, struct dims dims, struct draw *draw) {
    const DLTensor *direct = call->args.softmax.grad_router_logits;
    fill(role(call, SCORES), 1.0 / (double)dims.experts);
    replace(call, "grad_expert_mask", NULL);
    fill(direct, 0);
    for (int64_t n = 0; n < dims.tokens; n++)
        for (int64_t e = 0; e < dims.experts; e++) {
            const int64_t from = (int64_t)(draw_integer(draw) % (uint64_t)dims.experts);
            const int64_t moved = (int64_t)(draw_integer(draw) % 3) - 1;
            set_element(direct, n, from, 0, get_element(direct, n, from, 0) - (double)moved);
            set_element(direct, n, e, 0, get_element(direct, n, e, 0) + (double)moved);
        }
    fill(role(call, GRADIENT), 0);
}

/* s = 1/2, w = 0, z = 1, f = 1, g integers, ids that repeat and empty slots: G = (sum of g) / 4. */
static void make_sigmoid_exact(struct call *call, struct dims dims, struct draw *draw) {
    call->args.sigmoid.routed_scaling_factor = 1;
    fill(role(call, SCORES), 0.5);
    fill(call->args.sigmoid.topk_weights_normalized, 0);
    fill_integers(role(call, IDS), -1, (uint64_t)dims.experts + 1, draw);
    fill_integers(role(call, GRADIENT), -3, 7, draw);
}

/* Small integers, of which every sum is exact in float32, in any order. */
static enum moer_status make_exact(struct call *call, struct dims dims) {
    struct draw draw = {(uint64_t)dims.tokens, 0};
    fill(role(call, SUM), 1);
    fill_integers(call_tensor(call, "hidden_states"), -3, 7, &draw);
    fill_integers(role(call, GATE), -3, 7, &draw);
    (call->operation == MOER_SOFTMAX_TOPK_BACKWARD ? make_softmax_exact : make_sigmoid_exact)(call, dims, &draw);
    return MOER_OK;
}

static enum moer_status make_identity(struct call *call, struct dims dims) {
    fill(role(call, GATE), 0);
    for (int64_t e = 0; e < dims.experts; e++)
        set_element(role(call, GATE), e, e, 0, 1);
    return MOER_OK;
}

/* ---- Cases ------------------------------------------------------------------------------------------------------ */

/* Of T and of outputs. */
static const DLDataType dtypes[][2] = {
    {BFLOAT16, BFLOAT16}, {BFLOAT16, FLOAT32}, {FLOAT16, FLOAT16}, {FLOAT16, FLOAT32}, {FLOAT32, FLOAT32}};

static const int64_t edge_tokens[] = {0, 1, 2, 15, 16, 17, 31, 33, 127, 128, 129, 1023, 1025};
static const int64_t edge_experts[] = {1, 3, 8, 60, 96, 128, 160, 257, 512};
static const int64_t edge_hidden[] = {1, 7, 8, 16, 40, 131, 2048, 2049, 5120};

/* Sizes without a factor in common with those of any tile. */
static const struct dims odd = {129, 131, 60, 8};

/* E a power of two, so that 1/E is exact. */
static const struct dims exact_dims[] = {
    {1, 8, 1, 1},    {15, 33, 2, 1},  {17, 7, 64, 8},   {31, 40, 128, 8},  {33, 131, 8, 2}, {128, 8, 256, 8},
    {129, 40, 4, 4}, {511, 65, 8, 2}, {1023, 9, 16, 8}, {1025, 17, 32, 8}, {2049, 8, 8, 2}, {257, 2048, 128, 8},
};

static const struct {
    const char *name;
    enum moer_status (*change)(struct call *call, struct dims dims);
    int required_only;
} variations[] = {
    {"required inputs", NULL, 1},    {"int32 ids", shorten_ids, 0},     {"repeated ids", repeat_ids, 0},
    {"empty slots", empty_slots, 0}, {"peaked router", peak_router, 0}, {"same signs", same_signs, 0},
};

/* Where the cases of an operation go; none does once one has had another result than 0. */
struct walk {
    enum moer_operation operation;
    int (*visit)(const struct check_case *one, void *context);
    void *context;
    int result;
};

static void visit(struct walk *walk, struct check_case one, const DLDataType dtype[2]) {
    one.operation = walk->operation;
    one.dtype = dtype[0];
    one.output_dtype = dtype[1];
    if (walk->result == 0)
        walk->result = walk->visit(&one, walk->context);
}

static void visit_dtypes(struct walk *walk, struct check_case one) {
    for (size_t i = 0; i < LENGTH(dtypes); i++)
        visit(walk, one, dtypes[i]);
}

/* The case in the suite's sizes and dtype, with so many tokens. */
static void visit_real(struct walk *walk, struct check_case one, int64_t tokens) {
    one.dims = draw_suite_dims(walk->operation);
    one.dims.tokens = tokens;
    visit(walk, one, dtypes[0]);
}

static void visit_suite(struct walk *walk, int quick) {
    size_t count;
    const int64_t *tokens = draw_suite_tokens(walk->operation, &count);
    for (size_t i = 0; i < count; i++)
        if (!quick || tokens[i] <= 2048)
            visit_real(walk, (struct check_case){.name = "suite", .rule = CHECK_SUITE}, tokens[i]);
}

static void visit_edges(struct walk *walk) {
    struct check_case one = {.name = "edges of N", .dims = {0, 40, odd.experts, odd.top_k}};
    for (size_t i = 0; i < LENGTH(edge_tokens); i++) {
        one.dims.tokens = edge_tokens[i];
        visit_real(walk, one, edge_tokens[i]);
        visit_dtypes(walk, one);
    }
    one.name = "edges of H";
    one.dims.tokens = 33;
    for (size_t i = 0; i < LENGTH(edge_hidden); i++) {
        one.dims.hidden = edge_hidden[i];
        visit_dtypes(walk, one);
    }
    one.name = "edges of E, K";
    for (size_t i = 0; i < LENGTH(edge_experts); i++) {
        const int64_t experts = edge_experts[i], top_k[] = {1, 2, 8, experts};
        for (size_t j = 0; j < LENGTH(top_k); j++) {
            one.dims = (struct dims){33, 40, experts, top_k[j]};
            if (top_k[j] < experts || j == LENGTH(top_k) - 1)
                visit_dtypes(walk, one);
        }
    }
}

static void visit_variations(struct walk *walk) {
    for (size_t i = 0; i < LENGTH(variations); i++) {
        const struct check_case one = {.name = variations[i].name,
                                       .dims = odd,
                                       .required_only = variations[i].required_only,
                                       .change = variations[i].change};
        visit_real(walk, one, odd.tokens);
        visit_dtypes(walk, one);
    }
    struct check_case one = {.name = "exact integers", .rule = CHECK_EXACT, .change = make_exact};
    for (size_t i = 0; i < LENGTH(exact_dims); i++) {
        one.dims = exact_dims[i];
        visit_dtypes(walk, one);
    }
    one = (struct check_case){.name = "identity gate", .rule = CHECK_IDENTITY, .change = make_identity};
    for (size_t i = 0; i < LENGTH(edge_experts); i++) {
        const int64_t experts = edge_experts[i];
        one.dims = (struct dims){67, experts, experts, experts < 8 ? experts : 8};
        visit_dtypes(walk, one);
    }
}

int check_cases(enum moer_operation operation, int quick, int (*visitor)(const struct check_case *one, void *context),
                void *context) {
    struct walk walk = {operation, visitor, context, 0};
    visit_suite(&walk, quick);
    visit_edges(&walk);
    visit_variations(&walk);
    return walk.result;
}

/* No element of an output is right unless it is written. */
static void fill_outputs(struct call *call) {
    size_t count;
    const struct moer_operand *operands = moer_operands(call->operation, &count);
    for (size_t i = 0; i < count; i++) {
        const DLTensor *tensor = *call_field(call, &operands[i]);
        if (operands[i].kind == MOER_DTYPE_OUTPUT && tensor->data)
            memset(tensor->data, 0xFF, (size_t)(tensor->shape[0] * tensor->shape[1]) * dtype_size(tensor->dtype));
    }
}

enum moer_status check_case_draw(const struct check_case *one, struct call *call) {
    enum { SEED = 1 };
    enum moer_status status = draw_inputs(call, one->operation, one->dims, one->dtype, SEED, !one->required_only);
    if (status == MOER_OK && one->change)
        status = one->change(call, one->dims);
    if (status == MOER_OK)
        status = draw_outputs(call, one->output_dtype);
    if (status == MOER_OK)
        fill_outputs(call);
    return status;
}
