/* SPDX-License-Identifier: Apache-2.0 */
/* G of the softmax router, a token at a time. The formula is the public header's; this is the oracle of every other
 * backend, so what is summed or divided is done in float64, and only D, a sum of few terms, is kept in float32. */
#include "cpu.h"
#include "slice.h"

struct operation {
    int64_t experts, top_k;
    struct rows probs, sum, incoming, direct; /* p, z, g, d; z and d may be absent */
    struct ids ids;
    const DLTensor *mask; /* m, or NULL: its data, and strides in bytes */
    struct rows mask_data;
    int64_t mask_expert, mask_slot, mask_token;
};

static double mask_at(const struct operation *op, int64_t expert, int64_t slot, int64_t token) {
    if (!op->mask)
        return 0;
    struct rows element = op->mask_data;
    element.data += expert * op->mask_expert + slot * op->mask_slot + token * op->mask_token;
    return (double)element_at(&element, 0, 0);
}

/* The gradients of the chosen probabilities, scattered onto row. */
static void scatter(const struct operation *op, int64_t token, const float *p, float *row) {
    double z = 0, c = 0;
    int live = 0;
    for (int64_t k = 0; k < op->top_k; k++) {
        int64_t id = id_at(&op->ids, token, k);
        if (id < 0)
            continue;
        if (op->sum.data) {
            if (!live++)
                z = (double)element_at(&op->sum, token, 0);
            c += (double)element_at(&op->incoming, token, k) * ((double)p[id] / z);
        }
    }
    for (int64_t k = 0; k < op->top_k; k++) {
        int64_t id = id_at(&op->ids, token, k);
        if (id < 0)
            continue;
        double v = (double)element_at(&op->incoming, token, k);
        if (op->sum.data)
            v = (v - c) / z;
        row[id] = (float)((double)row[id] + v + mask_at(op, id, k, token));
    }
}

static void softmax_row(const void *operation, int64_t token, float *row) {
    const struct operation *op = operation;
    const float *p = (const float *)(op->probs.data + token * op->probs.stride);
    if (op->direct.data)
        moer_cpu_settings()->kernels->widen(row, op->direct.data + token * op->direct.stride, op->direct.type,
                                            op->experts);
    else
        memset(row, 0, (size_t)op->experts * sizeof *row);
    scatter(op, token, p, row);
    double dot = 0;
#pragma omp simd reduction(+ : dot)
    for (int64_t e = 0; e < op->experts; e++)
        dot += (double)row[e] * (double)p[e];
#pragma omp simd
    for (int64_t e = 0; e < op->experts; e++)
        row[e] = (float)((double)p[e] * ((double)row[e] - dot));
    enum element type = op->incoming.type;
    if (type == BF16)
#pragma omp simd
        for (int64_t e = 0; e < op->experts; e++)
            row[e] = bf16_to_float(float_to_bf16(row[e]));
    else if (type == F16)
#pragma omp simd
        for (int64_t e = 0; e < op->experts; e++)
            row[e] = f16_to_float(float_to_f16(row[e]));
}

static struct problem make_problem(const struct moer_softmax_topk_backward_args *args, struct operation *op) {
    const DLTensor *mask = args->grad_expert_mask;
    *op = (struct operation){.experts = args->gate_weight->shape[0],
                             .top_k = args->selected_experts->shape[1],
                             .probs = moer_cpu_rows(args->routing_probs),
                             .sum = moer_cpu_rows(args->routing_weights_sum),
                             .incoming = moer_cpu_rows(args->grad_routing_weights),
                             .direct = moer_cpu_rows(args->grad_router_logits),
                             .ids = moer_cpu_ids(args->selected_experts, "selected_experts"),
                             .mask = mask};
    if (mask) {
        op->mask_data = moer_cpu_rows(mask);
        op->mask_expert = moer_stride(mask, 0) * moer_element_size(mask);
        op->mask_slot = moer_stride(mask, 1) * moer_element_size(mask);
        op->mask_token = moer_stride(mask, 2) * moer_element_size(mask);
    }
    return (struct problem){.tokens = args->hidden_states->shape[0],
                            .hidden = args->hidden_states->shape[1],
                            .experts = op->experts,
                            .top_k = op->top_k,
                            .hidden_states = moer_cpu_rows(args->hidden_states),
                            .weight = moer_cpu_rows(args->gate_weight),
                            .grad_hidden = moer_cpu_rows(args->grad_hidden_states),
                            .grad_weight = moer_cpu_rows(args->grad_gate_weight),
                            .grad_logits = moer_cpu_rows(args->grad_logits),
                            .accumulate = args->accumulate,
                            .ids = op->ids,
                            .invalid_ids = moer_data(args->invalid_ids),
                            .workspace = args->workspace,
                            .dense_row = softmax_row,
                            .operation = op};
}

static enum moer_status run(const void *args, struct moer_message *message) {
    struct operation op;
    struct problem problem = make_problem(args, &op);
    return moer_cpu_run(&problem, message);
}

static enum moer_status workspace_size(const void *args, size_t *bytes, struct moer_message *message) {
    struct operation op;
    struct problem problem = make_problem(args, &op);
    return moer_cpu_workspace_size(&problem, bytes, message);
}

static enum moer_status explain(const void *args, struct moer_message *message) {
    struct operation op;
    struct problem problem = make_problem(args, &op);
    return moer_cpu_explain(&problem, message);
}

const struct moer_implementation moer_cpu_softmax_topk_backward = {run, workspace_size, explain};
