/* SPDX-License-Identifier: Apache-2.0 */
/* The products of a block of tokens and a slice of hidden columns, compiled once for each instruction set.
 *
 *     dense G    grad_hidden_states = G . W and grad_weight += G^T . X are the same loop: a tile of TILE_ROWS x
 *                TILE_COLUMNS sums in registers, one term at a time, G broadcast, W or X from a panel. The panel is the
 *                slice of W or X as float32, in columns as wide as the loop takes them, so that it is read front to
 *                back; widening costs one pass for 100 or more products an element, and spares the loops all knowledge
 *                of dtypes.
 *     sparse G   sparse.h.
 *
 * Each lane of a vector does what a scalar would do, whatever the slice's width or the tile's height: the bits of a sum
 * depend on its terms alone. Terms are added in ascending order, in chains of CHAIN, and the chains to their sum in
 * order: a long chain of float32 additions would lose more than the bounds allow. */
#include "slice.h"

#if defined __AVX512F__
enum { VECTOR_BYTES = 64, TILE_ROWS = 8 }; /* 16 sums, 2 of the panel, 1 of G: of 32 registers */
#elif defined __AVX2__
enum { VECTOR_BYTES = 32, TILE_ROWS = 6 }; /* 12 + 2 + 1 of 16 registers */
#else
enum { VECTOR_BYTES = 16, TILE_ROWS = 6 };
#endif
enum {
    LANES = VECTOR_BYTES / (int)sizeof(float),
    TILE_VECTORS = 2,
    TILE_COLUMNS = TILE_VECTORS * LANES,
    CHAIN = 64,
    PREFETCH_ROWS = 8
};

typedef float vector __attribute__((vector_size(VECTOR_BYTES), may_alias));

static void widen(float *restrict to, const void *restrict from, enum element type, int64_t count) {
    const uint16_t *bits = from;
    switch (type) {
    case BF16:
#pragma omp simd
        for (int64_t i = 0; i < count; i++)
            to[i] = bf16_to_float(bits[i]);
        break;
    case F16:
#pragma omp simd
        for (int64_t i = 0; i < count; i++)
            to[i] = f16_to_float(bits[i]);
        break;
    case F32:
        memcpy(to, from, (size_t)count * sizeof *to);
    }
}

static void narrow(void *restrict to, enum element type, const float *restrict from, int64_t count) {
    uint16_t *bits = to;
    switch (type) {
    case BF16:
#pragma omp simd
        for (int64_t i = 0; i < count; i++)
            bits[i] = float_to_bf16(from[i]);
        break;
    case F16:
#pragma omp simd
        for (int64_t i = 0; i < count; i++)
            bits[i] = float_to_f16(from[i]);
        break;
    case F32:
        memcpy(to, from, (size_t)count * sizeof *from);
    }
}

static void add(float *restrict to, const float *restrict from, int64_t count) {
#pragma omp simd
    for (int64_t i = 0; i < count; i++)
        to[i] += from[i];
}

/* to + lost is the sum so far, lost what rounding took from it (Knuth's two-sum): without it the error of a sum over
 * blocks would grow with their number. */
static void accumulate(float *restrict to, float *restrict lost, const float *restrict from, int64_t count) {
    if (!lost) {
        add(to, from, count);
        return;
    }
#pragma omp simd
    for (int64_t i = 0; i < count; i++) {
        float sum = to[i] + from[i], taken = sum - to[i];
        lost[i] += (to[i] - (sum - taken)) + (from[i] - taken);
        to[i] = sum;
    }
}

/* What a sum comes to; of an infinite one, what it has lost is NaN. */
static void total(float *restrict to, const float *restrict sums, const float *restrict lost, int64_t count) {
#pragma omp simd
    for (int64_t i = 0; i < count; i++)
        to[i] = sums[i] + (lost[i] == lost[i] ? lost[i] : 0);
}

static void softmax(float *restrict row, const float *restrict p, enum element type, int64_t count) {
    double dot = 0;
#pragma omp simd reduction(+ : dot)
    for (int64_t i = 0; i < count; i++)
        dot += (double)row[i] * (double)p[i];
#pragma omp simd
    for (int64_t i = 0; i < count; i++)
        row[i] = (float)((double)p[i] * ((double)row[i] - dot));
    if (type == BF16)
#pragma omp simd
        for (int64_t i = 0; i < count; i++)
            row[i] = bf16_to_float(float_to_bf16(row[i]));
    else if (type == F16)
#pragma omp simd
        for (int64_t i = 0; i < count; i++)
            row[i] = f16_to_float(float_to_f16(row[i]));
}

static inline int64_t smaller(int64_t a, int64_t b) {
    return a < b ? a : b;
}

static inline int64_t element_size(enum element type) {
    return type == F32 ? 4 : 2;
}

static inline char *element_address(const struct rows *rows, int64_t row, int64_t column) {
    return rows->data + row * rows->stride + column * element_size(rows->type);
}

/* Makes a panel of count rows from first: columns of the given width, one after the other, the last filled with zeros.
 */
static void pack(float *panel, int64_t width, const struct rows *rows, int64_t first, int64_t count, int64_t column,
                 int64_t columns) {
    for (int64_t row = 0; row < count; row++) {
        /* Rows lie too far apart for the hardware to foresee the next. */
        const char *later = element_address(rows, first + smaller(row + PREFETCH_ROWS, count - 1), column);
        for (int64_t byte = 0; byte < columns * element_size(rows->type); byte += 64)
            __builtin_prefetch(later + byte);
        for (int64_t from = 0; from < columns; from += width) {
            float *to = panel + from * count + row * width;
            int64_t valid = smaller(width, columns - from);
            widen(to, element_address(rows, first + row, column + from), rows->type, valid);
            memset(to + valid, 0, (size_t)(width - valid) * sizeof *to);
        }
    }
}

/* sums[r][] += sum over i of g[r * row + i * term] * panel[i][]. */
static inline __attribute__((always_inline)) void tile_rows(const int rows, int64_t terms, const float *g, int64_t row,
                                                            int64_t term, const float *panel,
                                                            float sums[TILE_ROWS][TILE_COLUMNS]) {
    for (int64_t start = 0; start < terms; start += CHAIN) {
        vector chain[TILE_ROWS][TILE_VECTORS] = {{{0}}};
        int64_t end = smaller(start + CHAIN, terms);
        for (int64_t i = start; i < end; i++) {
            const vector *columns = (const vector *)(panel + i * TILE_COLUMNS);
            const float *factors = g + i * term;
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
                for (int v = 0; v < TILE_VECTORS; v++)
                    chain[r][v] += factors[r * row] * columns[v];
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
            for (int v = 0; v < TILE_VECTORS; v++)
                ((vector *)sums[r])[v] += chain[r][v];
    }
}

static void tile(int64_t rows, int64_t terms, const float *g, int64_t row, int64_t term, const float *panel,
                 float sums[TILE_ROWS][TILE_COLUMNS]) {
    memset(sums, 0, sizeof(float[TILE_ROWS][TILE_COLUMNS]));
    if (rows == TILE_ROWS) {
        /* One of the strides is 1, which spares the loop address registers. */
        if (row == 1)
            tile_rows(TILE_ROWS, terms, g, 1, term, panel, sums);
        else
            tile_rows(TILE_ROWS, terms, g, row, term, panel, sums);
        return;
    }
    for (; rows >= 4; rows -= 4, g += 4 * row, sums += 4)
        tile_rows(4, terms, g, row, term, panel, sums);
    for (; rows > 0; rows--, g += row, sums++)
        tile_rows(1, terms, g, row, term, panel, sums);
}

static inline void add_to_weight(const struct slice_job *job, int64_t expert, int64_t column, const float *from,
                                 int64_t count) {
    float *sums = job->sums + expert * job->sums_stride + column;
    float *lost = job->lost ? job->lost + expert * job->sums_stride + column : NULL;
    if (job->first > 0) {
        accumulate(sums, lost, from, count);
        return;
    }
    memcpy(sums, from, (size_t)count * sizeof *sums);
    if (lost)
        memset(lost, 0, (size_t)count * sizeof *lost);
}

/* grad_hidden_states of the block, dense G: tokens x experts times experts x columns. */
static void dense_hidden(const struct slice_job *job, float *panel, float *partial) {
    const struct problem *problem = job->problem;
    int64_t experts = problem->experts;
    _Alignas(64) float sums[TILE_ROWS][TILE_COLUMNS];
    for (int64_t first = 0; first == 0 || first < experts; first += PANEL_EXPERTS) {
        int64_t terms = smaller(PANEL_EXPERTS, experts - first);
        int last = first + terms == experts;
        if (!job->again || terms < experts)
            pack(panel, TILE_COLUMNS, &problem->weight, first, terms, job->column, job->columns);
        for (int64_t column = 0; column < job->columns; column += TILE_COLUMNS)
            for (int64_t token = 0; token < job->count; token += TILE_ROWS) {
                int64_t rows = smaller(TILE_ROWS, job->count - token);
                int64_t valid = smaller(TILE_COLUMNS, job->columns - column);
                tile(rows, terms, job->logits.dense + token * experts + first, experts, 1, panel + column * terms,
                     sums);
                for (int64_t r = 0; r < rows; r++) {
                    float *before = partial + 2 * ((token + r) * SLICE_COLUMNS + column), *lost = before + TILE_COLUMNS;
                    if (first > 0) {
                        accumulate(before, lost, sums[r], TILE_COLUMNS);
                        if (last)
                            total(sums[r], before, lost, TILE_COLUMNS);
                    } else if (!last) {
                        memcpy(before, sums[r], sizeof sums[r]);
                        memset(lost, 0, sizeof sums[r]);
                    }
                    if (last)
                        narrow(element_address(&problem->grad_hidden, job->first + token + r, job->column + column),
                               problem->grad_hidden.type, sums[r], valid);
                }
            }
    }
}

/* The block's share of the weight gradient, dense G: experts x tokens times tokens x columns. */
static void dense_weight(const struct slice_job *job, float *panel) {
    const struct problem *problem = job->problem;
    int64_t experts = problem->experts;
    _Alignas(64) float sums[TILE_ROWS][TILE_COLUMNS];
    pack(panel, TILE_COLUMNS, &problem->hidden_states, job->first, job->count, job->column, job->columns);
    for (int64_t column = 0; column < job->columns; column += TILE_COLUMNS)
        for (int64_t expert = 0; expert < experts; expert += TILE_ROWS) {
            int64_t rows = smaller(TILE_ROWS, experts - expert);
            tile(rows, job->count, job->logits.dense + expert, 1, experts, panel + column * job->count, sums);
            for (int64_t r = 0; r < rows; r++)
                add_to_weight(job, expert + r, column, sums[r], smaller(TILE_COLUMNS, job->columns - column));
        }
}

#include "sparse.h"

#ifdef __AVX512BF16__
#include "pairs.h"
#endif

static void hidden(const struct slice_job *job) {
#ifdef __AVX512BF16__
    if (job->logits.pairs.by_token) {
        pair_hidden(job);
        return;
    }
#endif
    if (job->problem->sparse_row)
        sparse_hidden(job);
    else
        dense_hidden(job, job->scratch, job->scratch + slice_panel_experts(job->problem) * SLICE_COLUMNS);
}

static void weight(const struct slice_job *job) {
#ifdef __AVX512BF16__
    if (job->logits.pairs.by_token) {
        pair_weight(job);
        return;
    }
#endif
    if (job->problem->sparse_row)
        sparse_weight(job);
    else
        dense_weight(job, job->scratch);
}

static void finish(const struct problem *problem, const float *sums, const float *lost, int64_t expert, int64_t column,
                   int64_t columns) {
    enum element type = problem->grad_weight.type;
    for (int64_t from = 0; from < columns; from += SLICE_COLUMNS) {
        char *to = element_address(&problem->grad_weight, expert, column + from);
        int64_t count = smaller(SLICE_COLUMNS, columns - from);
        float result[SLICE_COLUMNS], old[SLICE_COLUMNS];
        if (lost)
            total(result, sums + from, lost + from, count);
        else
            memcpy(result, sums + from, (size_t)count * sizeof *result);
        if (problem->accumulate) {
            widen(old, to, type, count);
            add(result, old, count);
        }
        narrow(to, type, result, count);
    }
}

const struct slice_kernels SLICE_KERNELS = {
    .hidden = hidden,
    .weight = weight,
    .finish = finish,
    .accumulate = accumulate,
    .widen = widen,
    .narrow = narrow,
    .softmax = softmax,
#ifdef __AVX512BF16__
    .pair = pair,
    .pair_gate = pair_gate,
#endif
};
