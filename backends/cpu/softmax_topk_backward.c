/* SPDX-License-Identifier: Apache-2.0 */
/* G of the softmax router, a token at a time. The formula is the public header's; this is the oracle of every other
 * backend, so what is summed or divided is done in float64, and only D, a sum of few terms, is kept in float32. */
#include "cpu.h"
#include "slice.h"

static double mask_at(const struct problem *problem, int64_t expert, int64_t slot, int64_t token) {
    struct rows mask = problem->softmax.mask;
    if (!mask.data)
        return 0;
    mask.data +=
        expert * problem->softmax.mask_expert + slot * problem->softmax.mask_slot + token * problem->softmax.mask_token;
    return (double)element_at(&mask, 0, 0);
}

/* Slots of which one expert's gradients are summed in float64 before they reach the float32 row. */
enum { SLOTS = 256 };

/* The gradients of some slots' probabilities, scattered onto row. A slot's follow-ups add to it where an id repeats. */
static void scatter_slots(const struct problem *problem, int64_t token, int64_t first, double c, double z, float *row) {
    double v[SLOTS];
    int64_t ids[SLOTS], count = problem->top_k - first < SLOTS ? problem->top_k - first : SLOTS;
    for (int64_t i = 0; i < count; i++) { /* the mask by itself: reads that wait for memory, all at once */
        ids[i] = id_at(&problem->ids, token, first + i);
        v[i] = ids[i] < 0 ? 0 : mask_at(problem, ids[i], first + i, token);
    }
    for (int64_t i = 0; i < count; i++) {
        int64_t same = 0;
        if (ids[i] < 0)
            continue;
        double g = (double)element_at(&problem->softmax.incoming, token, first + i);
        v[i] += problem->softmax.sum.data ? (g - c) / z : g;
        while (ids[same] != ids[i])
            same++;
        if (same < i) {
            v[same] += v[i];
            ids[i] = -1;
        }
    }
    for (int64_t i = 0; i < count; i++)
        if (ids[i] >= 0)
            row[ids[i]] = (float)((double)row[ids[i]] + v[i]);
}

/* The gradients of the chosen probabilities, scattered onto row. */
static void scatter(const struct problem *problem, int64_t token, const float *p, float *row) {
    double z = 0, c = 0;
    for (int64_t k = 0; problem->softmax.sum.data && k < problem->top_k; k++) {
        int64_t id = id_at(&problem->ids, token, k);
        if (id < 0)
            continue;
        z = (double)element_at(&problem->softmax.sum, token, 0); /* looked at for a live slot only */
        c += (double)element_at(&problem->softmax.incoming, token, k) * ((double)p[id] / z);
    }
    for (int64_t first = 0; first < problem->top_k; first += SLOTS)
        scatter_slots(problem, token, first, c, z, row);
}

static void softmax_row(const struct problem *problem, int64_t token, float *row) {
    const float *p = (const float *)(problem->softmax.probs.data + token * problem->softmax.probs.stride);
    if (problem->softmax.direct.data)
        moer_cpu_settings()->kernels->widen(row, problem->softmax.direct.data + token * problem->softmax.direct.stride,
                                            problem->softmax.direct.type, problem->experts);
    else
        memset(row, 0, (size_t)problem->experts * sizeof *row);
    scatter(problem, token, p, row);
    moer_cpu_settings()->kernels->softmax(row, p, problem->softmax.incoming.type, problem->experts);
}

struct problem moer_cpu_softmax_topk_backward(const void *call) {
    const struct moer_softmax_topk_backward_args *args = call;
    struct problem problem = {.tokens = args->hidden_states->shape[0],
                              .hidden = args->hidden_states->shape[1],
                              .experts = args->gate_weight->shape[0],
                              .top_k = args->selected_experts->shape[1],
                              .hidden_states = moer_cpu_rows(args->hidden_states),
                              .weight = moer_cpu_rows(args->gate_weight),
                              .grad_hidden = moer_cpu_rows(args->grad_hidden_states),
                              .grad_weight = moer_cpu_rows(args->grad_gate_weight),
                              .grad_logits = moer_cpu_rows(args->grad_logits),
                              .accumulate = args->accumulate,
                              .ids = moer_cpu_ids(args->selected_experts, "selected_experts"),
                              .invalid_ids = moer_data(args->invalid_ids),
                              .workspace = args->workspace,
                              .dense_row = softmax_row};
    problem.softmax.probs = moer_cpu_rows(args->routing_probs);
    problem.softmax.sum = moer_cpu_rows(args->routing_weights_sum);
    problem.softmax.incoming = moer_cpu_rows(args->grad_routing_weights);
    problem.softmax.direct = moer_cpu_rows(args->grad_router_logits);
    problem.softmax.mask = moer_cpu_rows(args->grad_expert_mask);
    if (args->grad_expert_mask) {
        int64_t size = moer_element_size(args->grad_expert_mask);
        problem.softmax.mask_expert = moer_stride(args->grad_expert_mask, 0) * size;
        problem.softmax.mask_slot = moer_stride(args->grad_expert_mask, 1) * size;
        problem.softmax.mask_token = moer_stride(args->grad_expert_mask, 2) * size;
    }
    return problem;
}
