/* SPDX-License-Identifier: Apache-2.0 */
/* How a problem is cut up, and the products by OpenBLAS. */
#ifndef MOER_CPU_PRODUCTS_H
#define MOER_CPU_PRODUCTS_H

#include "slice.h"

struct plan {
    int blas;                              /* OpenBLAS does the products */
    int64_t turn;                          /* tokens whose G is made at a time, whole blocks */
    int64_t block;                         /* tokens whose products are made at a time */
    int64_t columns;                       /* hidden columns at a time */
    int64_t hidden_columns, hidden_tokens; /* the same of grad_hidden_states, and tokens, when they are our own */
    int threads;                           /* at most so many, when the products are our own */
    size_t thread_bytes;                   /* scratch of each */
    int compensated;                       /* the sums of the weight gradient keep what rounding takes */
    int pairs;                             /* G is there as pairs of bfloat16 too */
    size_t bytes;                          /* all of the workspace; offsets in it: */
    size_t dense, sparse, counts, by_expert, expert_ends, sums, lost, scratch;
    size_t token_pairs, expert_pairs, usual, gate, usual_gate;
};

/* blas.c. Sizes within its int arguments. */
int moer_blas_can(const struct problem *problem);
/* Bytes of scratch for each hidden column of a block. */
size_t moer_blas_column_bytes(const struct problem *problem, int64_t block);
/* Both products of a block of tokens for columns of hidden; G is dense. Not from inside a parallel region. */
void moer_blas_products(const struct problem *problem, const struct plan *plan, int64_t first, int64_t count,
                        int64_t column, int64_t columns);
/* "OpenBLAS 0.3.21 ..., 2 threads (pthreads)". */
void moer_blas_info(char *text, size_t size);

/* The sums of the weight gradient lie slice by slice, [E][columns of the slice] each: where those from column begin. */
static inline float *slice_sums(const struct problem *problem, const struct plan *plan, int64_t column) {
    return (float *)((char *)problem->workspace + plan->sums) + problem->experts * column;
}

/* What they lost, NULL where that is not kept. */
static inline float *slice_lost(const struct problem *problem, const struct plan *plan, int64_t column) {
    return plan->compensated ? (float *)((char *)problem->workspace + plan->lost) + problem->experts * column : NULL;
}

#endif
