/* SPDX-License-Identifier: Apache-2.0 */
/* G of the sigmoid router, a token at a time: at most K of its E elements are not zero. Every intermediate is rounded
 * to T, in the order of the public header, and in float32 between; the compiler may not fuse or reorder any of it. */
#include "cpu.h"
#include <stdlib.h>

struct operation {
    int64_t top_k;
    float scaling;
    struct rows incoming, scores, normalized, denominator; /* g, s, w, z */
    struct ids ids;
};

/* By expert, then by slot. */
static int compare_keys(const void *a, const void *b) {
    uint64_t x = ((const union entry *)a)->key, y = ((const union entry *)b)->key;
    return (x > y) - (x < y);
}

static void sort_keys(union entry *entries, int32_t count) {
    if (count > 32) {
        qsort(entries, (size_t)count, sizeof *entries, compare_keys);
        return;
    }
    for (int32_t i = 1; i < count; i++) {
        union entry moving = entries[i];
        int32_t hole = i;
        for (; hole > 0 && entries[hole - 1].key > moving.key; hole--)
            entries[hole] = entries[hole - 1];
        entries[hole] = moving;
    }
}

/* R(g[k] * f) */
static float scaled(const struct operation *op, int64_t token, int64_t k) {
    return round_to(op->scores.type, element_at(&op->incoming, token, k) * op->scaling);
}

static int32_t sigmoid_row(const void *operation, int64_t token, union entry *entries) {
    const struct operation *op = operation;
    enum element type = op->scores.type;
    int32_t live = 0, count = 0;
    float c = 0;
    for (int64_t k = 0; k < op->top_k; k++) {
        int64_t id = id_at(&op->ids, token, k);
        if (id < 0)
            continue;
        entries[live++].key = (uint64_t)id << 32 | (uint64_t)k;
        c += round_to(type, scaled(op, token, k) * element_at(&op->normalized, token, k));
    }
    if (live == 0)
        return 0;
    c = round_to(type, c);
    float z = element_at(&op->denominator, token, 0);
    sort_keys(entries, live);
    /* Entries take the places of keys already read. */
    for (int32_t i = 0; i < live;) {
        int32_t expert = (int32_t)(entries[i].key >> 32);
        float d = 0;
        for (; i < live && (int32_t)(entries[i].key >> 32) == expert; i++) {
            float a = scaled(op, token, (int64_t)(entries[i].key & UINT32_MAX));
            d = round_to(type, d + round_to(type, round_to(type, a - c) / z));
        }
        float s = element_at(&op->scores, token, expert);
        float g = round_to(type, round_to(type, d * s) * round_to(type, 1 - s));
        entries[count++] = (union entry){{expert, g}};
    }
    return count;
}

static struct problem make_problem(const struct moer_sigmoid_topk_backward_args *args, struct operation *op) {
    double scaling = args->routed_scaling_factor;
    *op = (struct operation){.top_k = args->topk_indices->shape[1],
                             .scaling = (float)(scaling == 0 ? 1 : scaling),
                             .incoming = moer_cpu_rows(args->grad_topk_weights),
                             .scores = moer_cpu_rows(args->scores),
                             .normalized = moer_cpu_rows(args->topk_weights_normalized),
                             .denominator = moer_cpu_rows(args->denominator),
                             .ids = moer_cpu_ids(args->topk_indices, "topk_indices")};
    return (struct problem){.tokens = args->hidden_states->shape[0],
                            .hidden = args->hidden_states->shape[1],
                            .experts = args->weight->shape[0],
                            .top_k = op->top_k,
                            .hidden_states = moer_cpu_rows(args->hidden_states),
                            .weight = moer_cpu_rows(args->weight),
                            .grad_hidden = moer_cpu_rows(args->grad_hidden_states),
                            .grad_weight = moer_cpu_rows(args->grad_weight),
                            .grad_logits = moer_cpu_rows(args->grad_logits),
                            .accumulate = args->accumulate,
                            .ids = op->ids,
                            .invalid_ids = moer_data(args->invalid_ids),
                            .workspace = args->workspace,
                            .sparse_row = sigmoid_row,
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

const struct moer_implementation moer_cpu_sigmoid_topk_backward = {run, workspace_size, explain};
