/* SPDX-License-Identifier: Apache-2.0 */
/* The products by OpenBLAS: float32 operands as they are, 16-bit ones widened a block at a time. A call sums 64 terms
 * at most, as our own kernels do: in a longer chain of float32 additions, equal terms (padding, a token seen again and
 * again) round the same way each time and drift out of bounds. OpenBLAS has threads of its own; what is done beside it
 * stays on the calling thread, for OpenMP's threads go on spinning after a parallel region and would take the cores
 * from it (three times slower, measured on two cores). */
#include "products.h"
#include <cblas.h>
#include <limits.h>

enum { TERMS = 64 };
/* With more, the sums of calls for grad_hidden_states would drift in the same way. */
enum { MOST_BLAS_EXPERTS = 512 };

static int64_t smaller(int64_t a, int64_t b) {
    return a < b ? a : b;
}

static int64_t row_elements(const struct rows *rows) {
    return rows->type == F32 ? rows->stride / 4 : 0;
}

int moer_blas_can(const struct problem *problem) {
    int64_t largest = problem->hidden > problem->experts ? problem->hidden : problem->experts;
    const struct rows *direct[] = {&problem->hidden_states, &problem->weight, &problem->grad_hidden};
    for (int i = 0; i < 3; i++)
        if (row_elements(direct[i]) > largest)
            largest = row_elements(direct[i]);
    return largest <= INT_MAX && problem->hidden > 0 && problem->experts > 0 && problem->experts <= MOST_BLAS_EXPERTS;
}

size_t moer_blas_column_bytes(const struct problem *problem, int64_t block) {
    int64_t floats = 0;
    if (problem->grad_weight.data)
        floats += problem->experts; /* the block's sums */
    if (problem->grad_weight.data && problem->hidden_states.type != F32)
        floats += block;
    if (problem->grad_hidden.data && problem->weight.type != F32)
        floats += problem->experts;
    if (problem->grad_hidden.data && problem->grad_hidden.type != F32)
        floats += block;
    return (size_t)floats * sizeof(float);
}

/* Columns of a matrix as float32: the matrix itself, or a widened copy in *scratch, which moves on. */
static const float *as_float(const struct rows *rows, int64_t first, int64_t count, int64_t column, int64_t columns,
                             float **scratch, int *leading) {
    if (rows->type == F32) {
        *leading = (int)row_elements(rows);
        return (const float *)(rows->data + first * rows->stride) + column;
    }
    float *copy = *scratch;
    *scratch += count * columns;
    *leading = (int)columns;
    for (int64_t row = 0; row < count; row++)
        moer_cpu_settings()->kernels->widen(
            copy + row * columns, rows->data + (first + row) * rows->stride + column * 2, rows->type, columns);
    return copy;
}

static void hidden_product(const struct problem *problem, const float *logits, int64_t first, int64_t count,
                           int64_t column, int64_t columns, float *scratch) {
    const struct rows *out = &problem->grad_hidden;
    int weight_leading, out_leading = (int)columns, experts = (int)problem->experts;
    const float *weight = as_float(&problem->weight, 0, experts, column, columns, &scratch, &weight_leading);
    float *product = scratch;
    if (out->type == F32) {
        product = (float *)(out->data + first * out->stride) + column;
        out_leading = (int)row_elements(out);
    }
    for (int from = 0; from == 0 || from < experts; from += TERMS)
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)count, (int)columns,
                    (int)smaller(TERMS, experts - from), 1, logits + from, experts,
                    weight + (int64_t)from * weight_leading, weight_leading, from > 0, product, out_leading);
    if (out->type == F32)
        return;
    for (int64_t row = 0; row < count; row++)
        moer_cpu_settings()->kernels->narrow(out->data + (first + row) * out->stride + column * 2, out->type,
                                             product + row * columns, columns);
}

static void weight_product(const struct problem *problem, const struct plan *plan, const float *logits, int64_t first,
                           int64_t count, int64_t column, int64_t columns, float *scratch) {
    float *sums = slice_sums(problem, plan, column), *lost = slice_lost(problem, plan, column);
    float *block_sums = scratch;
    int leading, experts = (int)problem->experts;
    int64_t elements = problem->experts * columns;
    scratch += elements;
    const float *hidden = as_float(&problem->hidden_states, first, count, column, columns, &scratch, &leading);
    if (first == 0)
        memset(sums, 0, (size_t)elements * sizeof *sums);
    if (first == 0 && lost)
        memset(lost, 0, (size_t)elements * sizeof *lost);
    for (int64_t from = 0; from < count; from += TERMS) {
        cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, experts, (int)columns, (int)smaller(TERMS, count - from),
                    1, logits + from * experts, experts, hidden + from * leading, leading, 0, block_sums, (int)columns);
        moer_cpu_settings()->kernels->accumulate(sums, lost, block_sums, elements);
    }
}

void moer_blas_products(const struct problem *problem, const struct plan *plan, int64_t first, int64_t count,
                        int64_t column, int64_t columns) {
    const float *logits = (const float *)((char *)problem->workspace + plan->dense);
    float *scratch = (float *)((char *)problem->workspace + plan->scratch);
    if (problem->grad_weight.data)
        weight_product(problem, plan, logits, first, count, column, columns, scratch);
    if (problem->grad_hidden.data)
        hidden_product(problem, logits, first, count, column, columns, scratch);
}

void moer_blas_info(char *text, size_t size) {
    static const char *const parallel[] = {"sequential", "pthreads", "OpenMP"};
    int kind = openblas_get_parallel();
    snprintf(text, size, "%s; core %s, %d threads (%s)", openblas_get_config(), openblas_get_corename(),
             openblas_get_num_threads(), kind >= 0 && kind < 3 ? parallel[kind] : "unknown");
}
