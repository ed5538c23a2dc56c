/* SPDX-License-Identifier: Apache-2.0 */
/* How a problem is cut up, and the products by OpenBLAS. */
#ifndef MOER_CPU_PRODUCTS_H
#define MOER_CPU_PRODUCTS_H

#include "slice.h"

struct plan {
    int blas;            /* OpenBLAS does the products */
    int64_t block;       /* tokens at a time */
    int64_t columns;     /* hidden columns at a time */
    int threads;         /* at most so many, when the products are our own */
    size_t thread_bytes; /* scratch of each */
    size_t bytes;        /* all of the workspace; offsets in it: */
    size_t dense, sparse, counts, by_expert, expert_ends, sums, scratch;
};

/* blas.c. Sizes within its int arguments. */
int blas_can(const struct problem *problem);
/* Bytes of scratch for each hidden column of a block. */
size_t blas_column_bytes(const struct problem *problem, int64_t block);
/* Both products of a block of tokens for columns of hidden; G is dense. Not from inside a parallel region. */
void blas_products(const struct problem *problem, const struct plan *plan, int64_t first, int64_t count, int64_t column,
                   int64_t columns);
/* "OpenBLAS 0.3.21 ..., 2 threads (pthreads)". */
void blas_info(char *text, size_t size);

#endif
