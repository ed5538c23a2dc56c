/* SPDX-License-Identifier: Apache-2.0 */
/* G of the sigmoid router, a token at a time: at most K of its E elements are not zero. Every intermediate is rounded
 * to T, in the order of the public header, and in float32 between; the compiler may not fuse or reorder any of it. */
#include "cpu.h"

/* Moves an entry of a heap, greatest first, down to where it belongs. */
static void sift(union entry *heap, int32_t place, int32_t count) {
    union entry moving = heap[place];
    for (int32_t child; (child = 2 * place + 1) < count; place = child) {
        child += child + 1 < count && heap[child + 1].key > heap[child].key;
        if (heap[child].key <= moving.key)
            break;
        heap[place] = heap[child];
    }
    heap[place] = moving;
}

/* A few keys, no two alike: each goes to where the lesser ones leave it, without a branch to guess. */
enum { FEW = 16 };

static void rank_keys(union entry *entries, int32_t count) {
    union entry keys[FEW];
    memcpy(keys, entries, (size_t)count * sizeof *keys);
    for (int32_t i = 0; i < count; i++) {
        int32_t rank = 0;
        for (int32_t j = 0; j < count; j++)
            rank += keys[j].key < keys[i].key;
        entries[rank] = keys[i];
    }
}

/* By expert, then by slot. Not qsort(), which may allocate. */
static void sort_keys(union entry *entries, int32_t count) {
    if (count <= FEW) {
        rank_keys(entries, count);
        return;
    }
    for (int32_t place = count / 2 - 1; place >= 0; place--)
        sift(entries, place, count);
    for (int32_t last = count - 1; last > 0; last--) {
        union entry greatest = entries[0];
        entries[0] = entries[last];
        entries[last] = greatest;
        sift(entries, 0, last);
    }
}

static inline struct rows of_type(struct rows rows, enum element type) {
    rows.type = type;
    return rows;
}

static inline __attribute__((always_inline)) int32_t row_of(const enum element type, const struct problem *problem,
                                                            int64_t token, union entry *entries) {
    /* All four have this type; the compiler is told. */
    const struct rows incoming = of_type(problem->sigmoid.incoming, type);
    const struct rows scores = of_type(problem->sigmoid.scores, type);
    const struct rows normalized = of_type(problem->sigmoid.normalized, type);
    const struct rows denominator = of_type(problem->sigmoid.denominator, type);
    /* Converted here, since the caller's arithmetic may be another than a row's. */
    const float f = (float)(problem->sigmoid.scaling == 0 ? 1 : problem->sigmoid.scaling);
    int32_t live = 0, count = 0;
    float c = 0;
    for (int64_t k = 0; k < problem->top_k; k++) {
        int64_t id = id_at(&problem->ids, token, k);
        if (id < 0)
            continue;
        entries[live++].key = (uint64_t)id << 32 | (uint64_t)k;
        float a = round_to(type, element_at(&incoming, token, k) * f);
        c += round_to(type, a * element_at(&normalized, token, k));
    }
    if (live == 0)
        return 0;
    c = round_to(type, c);
    float z = element_at(&denominator, token, 0);
    sort_keys(entries, live);
    /* Entries take the places of keys already read. */
    for (int32_t i = 0; i < live;) {
        int32_t expert = (int32_t)(entries[i].key >> 32);
        float d = 0;
        for (; i < live && (int32_t)(entries[i].key >> 32) == expert; i++) {
            float a = round_to(type, element_at(&incoming, token, (int64_t)(entries[i].key & UINT32_MAX)) * f);
            d = round_to(type, d + round_to(type, round_to(type, a - c) / z));
        }
        float s = element_at(&scores, token, expert);
        float g = round_to(type, round_to(type, d * s) * round_to(type, 1 - s));
        entries[count++] = (union entry){{expert, g}};
    }
    return count;
}

static int32_t sigmoid_row(const struct problem *problem, int64_t token, union entry *entries) {
    const enum element type = problem->sigmoid.scores.type;
    if (type == BF16)
        return row_of(BF16, problem, token, entries);
    return type == F16 ? row_of(F16, problem, token, entries) : row_of(F32, problem, token, entries);
}

struct problem moer_cpu_sigmoid_topk_backward(const void *call) {
    const struct moer_sigmoid_topk_backward_args *args = call;
    struct problem problem = {.tokens = args->hidden_states->shape[0],
                              .hidden = args->hidden_states->shape[1],
                              .experts = args->weight->shape[0],
                              .top_k = args->topk_indices->shape[1],
                              .hidden_states = moer_cpu_rows(args->hidden_states),
                              .weight = moer_cpu_rows(args->weight),
                              .grad_hidden = moer_cpu_rows(args->grad_hidden_states),
                              .grad_weight = moer_cpu_rows(args->grad_weight),
                              .grad_logits = moer_cpu_rows(args->grad_logits),
                              .accumulate = args->accumulate,
                              .ids = moer_cpu_ids(args->topk_indices, "topk_indices"),
                              .invalid_ids = moer_data(args->invalid_ids),
                              .workspace = args->workspace,
                              .sparse_row = sigmoid_row};
    problem.sigmoid.scaling = args->routed_scaling_factor;
    problem.sigmoid.incoming = moer_cpu_rows(args->grad_topk_weights);
    problem.sigmoid.scores = moer_cpu_rows(args->scores);
    problem.sigmoid.normalized = moer_cpu_rows(args->topk_weights_normalized);
    problem.sigmoid.denominator = moer_cpu_rows(args->denominator);
    return problem;
}
