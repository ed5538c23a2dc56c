/* SPDX-License-Identifier: Apache-2.0 */
/* The CPU backend: what its files share. An operation turns a call into a struct problem, which says what the two
 * products are made of and how a row of G comes to be; products.c does the rest, for all operations. */
#ifndef MOER_CPU_CPU_H
#define MOER_CPU_CPU_H

#include "backend.h"
#include "tensor.h"
#include "convert.h"

enum element { BF16, F16, F32 };

/* A matrix: rows of contiguous elements, stride bytes apart. */
struct rows {
    char *data;
    int64_t stride;
    enum element type;
};

/* Top-k ids, int32 or int64. */
struct ids {
    const char *name, *data;
    int64_t stride;
    int wide;
};

/* A non-zero of G: an expert (or token) and its value. While a row is made the key sorts its slots. */
union entry {
    struct {
        int32_t index;
        float value;
    };
    uint64_t key;
};

struct problem {
    int64_t tokens, hidden, experts, top_k;
    struct rows hidden_states, weight;
    struct rows grad_hidden, grad_weight, grad_logits; /* data is NULL where the output is absent */
    int accumulate;
    struct ids ids;
    int32_t *invalid_ids;
    void *workspace;

    /* G of a token, rounded to T. Exactly one is set: row[E], or the entries with a live slot in ascending order of
     * expert (room for K), of which it returns the number. */
    void (*dense_row)(const struct problem *problem, int64_t token, float *row);
    int32_t (*sparse_row)(const struct problem *problem, int64_t token, union entry *entries);

    /* What those read, by operation. */
    union {
        struct {
            struct rows probs, sum, incoming, direct, mask; /* p, z, g, d, m; z, d and m may be absent */
            int64_t mask_expert, mask_slot, mask_token;     /* m's strides in bytes */
        } softmax;
        struct {
            double scaling;                                        /* f, as it was given */
            struct rows incoming, scores, normalized, denominator; /* g, s, w, z */
        } sigmoid;
    };
};

static inline int64_t id_at(const struct ids *ids, int64_t token, int64_t slot) {
    const char *row = ids->data + token * ids->stride;
    return ids->wide ? ((const int64_t *)row)[slot] : ((const int32_t *)row)[slot];
}

static inline float element_at(const struct rows *rows, int64_t row, int64_t column) {
    const char *data = rows->data + row * rows->stride;
    if (rows->type == F32)
        return ((const float *)data)[column];
    uint16_t bits = ((const uint16_t *)data)[column];
    return rows->type == BF16 ? bf16_to_float(bits) : f16_to_float(bits);
}

static inline float round_to(enum element type, float value) {
    if (type == BF16)
        return bf16_to_float(float_to_bf16(value));
    return type == F16 ? f16_to_float(float_to_f16(value)) : value;
}

/* Views of tensors. An absent one has no data; one without data, as in a query, has some address. */
struct rows moer_cpu_rows(const DLTensor *tensor);
struct ids moer_cpu_ids(const DLTensor *tensor, const char *name);

/* The operations' files: the problem of a call. */
struct problem moer_cpu_softmax_topk_backward(const void *args);
struct problem moer_cpu_sigmoid_topk_backward(const void *args);

/* products.c. What the backend does with it. */
enum moer_status moer_cpu_run(const struct problem *problem, struct moer_message *message);
enum moer_status moer_cpu_workspace_size(const struct problem *problem, size_t *bytes, struct moer_message *message);
enum moer_status moer_cpu_explain(const struct problem *problem, struct moer_message *message);

/* backend.c. What the environment says, read once. */
struct settings {
    const struct slice_kernels *kernels;
    const char *kernels_name;
    enum { PRODUCTS_DEFAULT, PRODUCTS_OWN, PRODUCTS_OPENBLAS } products;
    int deterministic;
    char error[256]; /* not empty: a variable says what it cannot say; calls are refused with this */
};
const struct settings *moer_cpu_settings(void);

#endif
