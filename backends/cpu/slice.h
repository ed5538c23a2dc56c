/* SPDX-License-Identifier: Apache-2.0 */
/* Either product of an operation for a block of tokens and a slice of the hidden columns: the unit of parallel work.
 * slice.c implements it, once for each instruction set. */
#ifndef MOER_CPU_SLICE_H
#define MOER_CPU_SLICE_H

#include "cpu.h"

enum {
    LEAST_COLUMNS = 64,         /* of a slice, but for the last one: a multiple of those that kernels take */
    SLICE_COLUMNS = 128,        /* most columns of a slice: with a block's tokens it fits the L2 cache as float32 */
    SPARSE_SLICE_COLUMNS = 256, /* the same for sparse G: wider, so that fewer pages are visited */
    STRIP_COLUMNS = 64,         /* at most: what is done of such a slice at a time */
    PAIR_STRIP_COLUMNS = 32,    /* the same of products of pairs */
    BLOCK_TOKENS = 512,         /* most tokens of a block */
    PANEL_EXPERTS = 512,        /* rows of the gate held as float32 at a time, dense G */
    SPARSE_EXPERTS = 2048       /* the same for sparse G; with more experts than this, rows are widened one by one */
};

/* Dense G of a block once more, as pairs of bfloat16 (pairs.h): strides are in pairs, whole multiples of PAIR_MULTIPLE
 * so that what is read beyond the last pair is zero; PAIR_ROWS_READ rows may be read beyond the last. With them comes
 * the gate, as pairs too, in strips. */
enum { PAIR_MULTIPLE = 16, PAIR_ROWS_READ = 32, PAIR_TOKENS = 2 * PAIR_MULTIPLE };
struct block_pairs {
    uint32_t *by_token;  /* [count][token_stride], pairs of experts; NULL: there are none */
    uint32_t *by_expert; /* [E][expert_stride], pairs of tokens */
    int64_t token_stride, expert_stride;
    unsigned char *usual;      /* [count]: whether a token's G may be taken from here */
    uint32_t *gate;            /* [strips][token_stride][PAIR_STRIP_COLUMNS] */
    unsigned char *usual_gate; /* [strips]: whether it may be taken from here */
};

/* G of a block, in one of two forms. */
struct block_logits {
    const float *dense;        /* [count][E] */
    const union entry *sparse; /* [count][K]: a token's live experts in ascending order */
    const int32_t *counts;     /* [count]: how many */
    union entry *by_expert;    /* the same entries, by expert; index is the token's place in the block */
    int32_t *expert_ends;      /* [E + 1]: expert e has by_expert[expert_ends[e] .. expert_ends[e + 1]) */
    struct block_pairs pairs;
};

struct slice_job {
    const struct problem *problem;
    int64_t first, count;    /* the block's tokens */
    int64_t column, columns; /* the slice */
    struct block_logits logits;
    int again;           /* the slice's last hidden() has left its panel of the gate in scratch */
    int64_t sums_stride; /* from an expert's sums to the next's */
    float *sums;         /* the weight gradient so far; the first block starts it */
    float *lost;         /* what rounding took from the sums; NULL where that is not kept */
    float *scratch;      /* slice_scratch() bytes, aligned to 64 */
};

struct slice_kernels {
    /* Writes the block's rows of grad_hidden_states. */
    void (*hidden)(const struct slice_job *job);
    /* Adds the block's share of the weight gradient to the sums. */
    void (*weight)(const struct slice_job *job);
    /* Rounds sums (and what they lost) of an expert into columns of the weight gradient. */
    void (*finish)(const struct problem *problem, const float *sums, const float *lost, int64_t expert, int64_t column,
                   int64_t columns);
    /* sums += from; *lost, where there is one, keeps what rounding took. */
    void (*accumulate)(float *sums, float *lost, const float *from, int64_t count);
    /* count elements, as float32 and back. */
    void (*widen)(float *to, const void *from, enum element type, int64_t count);
    void (*narrow)(void *to, enum element type, const float *from, int64_t count);
    /* D, in row, to G: p * (D - <D, p>) by float64, rounded to the type. */
    void (*softmax)(float *row, const float *p, enum element type, int64_t count);
    /* Dense G as pairs: PAIR_TOKENS of a block's tokens, from such a multiple on, or as many as there are. NULL: these
     * kernels have no use for them. */
    void (*pair)(const struct block_pairs *to, const float *dense, int64_t token, int64_t tokens, int64_t experts);
    /* The gate's strip that begins at column. */
    void (*pair_gate)(const struct block_pairs *to, const struct problem *problem, int64_t column);
};

extern const struct slice_kernels moer_slice_portable, moer_slice_avx2, moer_slice_avx512, moer_slice_avx512bf16,
    moer_slice_amx;

static inline int64_t pair_stride(int64_t terms) {
    return (terms + 2 * PAIR_MULTIPLE - 1) / (2 * PAIR_MULTIPLE) * PAIR_MULTIPLE;
}

/* Whether sparse.h takes elements as they are, two in a word. */
static inline int has_halves(const struct rows *rows) {
    return rows->type == BF16 && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__;
}

/* Rows of the gate that hidden() holds at a time; 0: none. */
static inline int64_t slice_panel_experts(const struct problem *problem) {
    if (!problem->grad_hidden.data)
        return 0;
    if (problem->sparse_row)
        return problem->experts <= SPARSE_EXPERTS ? problem->experts : 0;
    return problem->experts < PANEL_EXPERTS ? problem->experts : PANEL_EXPERTS;
}

/* Bytes of scratch for blocks of so many tokens. */
static inline size_t slice_scratch(const struct problem *problem, int64_t tokens, int pairs) {
    int64_t rows = slice_panel_experts(problem);
    if (pairs) /* hidden states; a strip of what the float32 kernels want of them or of the gate */
        return (size_t)(pair_stride(tokens) * SLICE_COLUMNS +
                        (problem->experts > tokens ? problem->experts : tokens) * PAIR_STRIP_COLUMNS) *
               sizeof(float);
    if (problem->sparse_row) /* the gate, and a strip of hidden states */
        return (size_t)(rows * SPARSE_SLICE_COLUMNS + tokens * STRIP_COLUMNS) * (has_halves(&problem->weight) ? 2 : 4);
    if (problem->grad_weight.data)
        rows += tokens; /* hidden states */
    if (problem->grad_hidden.data && problem->experts > PANEL_EXPERTS)
        rows += 2 * tokens; /* sums of grad_hidden_states over the panels, and what they lost */
    return (size_t)rows * SLICE_COLUMNS * sizeof(float);
}

#endif
