/* SPDX-License-Identifier: Apache-2.0 */
/* Products with a sparse G, a part of slice.c. Both are the same loop: a row of sums in registers, a non-zero of G at a
 * time, each picking a row of a panel: grad_hidden_states picks rows of the gate by the experts of a token, the weight
 * gradient rows of hidden states by the tokens of an expert.
 *
 * A slice is done in strips as wide as the sums. A strip's panel of the gate stays in the L1 cache while the tokens go
 * by, that of hidden states in the L2 cache while the experts do. A block's strips lie in the same pages, whose
 * addresses are looked up once for all of them.
 *
 * bfloat16 stays as it is in a panel: a 32-bit lane holds two elements, of which a shift makes one a float32, a mask
 * the other. A panel is half as large, and rounding two registers of sums to one of bfloat16 moves nothing across
 * lanes. The sums are then in the order of pairs: a register of even columns, one of odd ones. Other types are widened.
 *
 * Budget, for a non-zero and 64 columns, AVX2: 8 multiply-adds, 8 shifts and masks, 128 bytes. With 160 experts and 512
 * tokens a strip's panels are 20 and 64 KiB. */

enum {
    SPARSE_VECTORS = VECTOR_BYTES == 64 ? 4 : 8, /* 8 sums, a value and a pair of registers: of 16 */
    SPARSE_COLUMNS = SPARSE_VECTORS * LANES,
    SPARSE_PREFETCH_ROWS = 16
};
_Static_assert((int)SPARSE_COLUMNS <= (int)STRIP_COLUMNS, "scratch is for strips of so many columns");

typedef uint32_t words __attribute__((vector_size(VECTOR_BYTES), may_alias));
typedef words unaligned_words __attribute__((aligned(1)));

/* Asks for the cache lines of a strip's row. */
static inline void foresee(const struct rows *rows, int64_t row, int64_t column) {
    const char *later = element_address(rows, row, column);
    for (int64_t byte = 0; byte < SPARSE_COLUMNS * element_size(rows->type); byte += 64)
        __builtin_prefetch(later + byte);
}

/* A row of a strip into its panel. */
static inline __attribute__((always_inline)) void pack_row(const int halves, char *panel, const struct rows *rows,
                                                           int64_t row, int64_t column, int64_t valid) {
    const char *from = element_address(rows, row, column);
    if (halves && valid == SPARSE_COLUMNS) {
        memcpy(panel, from, 2 * SPARSE_COLUMNS);
    } else if (halves) {
        memset(panel, 0, 2 * SPARSE_COLUMNS);
        memcpy(panel, from, (size_t)(2 * valid));
    } else {
        widen((float *)panel, from, rows->type, valid);
        memset((float *)panel + valid, 0, (size_t)(SPARSE_COLUMNS - valid) * sizeof(float));
    }
}

static inline __attribute__((always_inline)) void pack_strip(const int halves, char *panel, const struct rows *rows,
                                                             int64_t first, int64_t count, int64_t column,
                                                             int64_t valid) {
    for (int64_t row = 0; row < count; row++) {
        foresee(rows, first + smaller(row + SPARSE_PREFETCH_ROWS, count - 1), column);
        pack_row(halves, panel + row * SPARSE_COLUMNS * (halves ? 2 : 4), rows, first + row, column, valid);
    }
}

/* chain[] += value * row[]. */
static inline __attribute__((always_inline)) void add_row(const int halves, float value, const char *row,
                                                          vector chain[SPARSE_VECTORS]) {
#pragma GCC unroll 8
    for (int v = 0; v < SPARSE_VECTORS; v += 2) {
        if (halves) {
            const words pairs = ((const words *)row)[v / 2];
            chain[v] += value * (vector)(pairs << 16);
            chain[v + 1] += value * (vector)(pairs & 0xffff0000);
        } else {
            chain[v] += value * ((const vector *)row)[v];
            chain[v + 1] += value * ((const vector *)row)[v + 1];
        }
    }
}

/* sums[] = at most a chain of value * strip[index][]. */
static inline __attribute__((always_inline)) void chain_sum(const int halves, const union entry *entries, int64_t count,
                                                            const char *strip, vector sums[SPARSE_VECTORS]) {
    vector chain[SPARSE_VECTORS];
#pragma GCC unroll 8
    for (int v = 0; v < SPARSE_VECTORS; v++)
        chain[v] = (vector){0};
    for (int64_t i = 0; i < count; i++)
        add_row(halves, entries[i].value, strip + (int64_t)entries[i].index * SPARSE_COLUMNS * (halves ? 2 : 4), chain);
#pragma GCC unroll 8
    for (int v = 0; v < SPARSE_VECTORS; v++)
        sums[v] = chain[v];
}

/* Where the rows of a sum come from: a strip or, without one, the source. */
struct terms {
    const char *strip;
    const struct rows *source;
    int64_t column, valid;
};

/* The same, of rows of the source. */
static void source_sum(const int halves, const union entry *entries, int64_t count, const struct terms *terms,
                       vector sums[SPARSE_VECTORS]) {
    _Alignas(64) char row[SPARSE_COLUMNS * sizeof(float)];
    memset(sums, 0, sizeof(vector[SPARSE_VECTORS]));
    for (int64_t i = 0; i < count; i++) {
        pack_row(halves, row, terms->source, entries[i].index, terms->column, terms->valid);
        add_row(halves, entries[i].value, row, sums);
    }
}

/* Chains to sums, in groups of as many terms as a dense panel has. */
static void long_sum(const int halves, const union entry *entries, int64_t count, const struct terms *terms,
                     vector sums[SPARSE_VECTORS]) {
    vector before[SPARSE_VECTORS] = {{0}}, lost[SPARSE_VECTORS] = {{0}};
    for (int64_t start = 0; start < count; start += PANEL_EXPERTS) {
        const int64_t end = smaller(start + PANEL_EXPERTS, count);
        vector group[SPARSE_VECTORS] = {{0}}, chain[SPARSE_VECTORS];
        for (int64_t from = start; from < end; from += CHAIN) {
            if (terms->strip)
                chain_sum(halves, entries + from, smaller(CHAIN, end - from), terms->strip, chain);
            else
                source_sum(halves, entries + from, smaller(CHAIN, end - from), terms, chain);
            for (int v = 0; v < SPARSE_VECTORS; v++)
                group[v] += chain[v];
        }
        accumulate((float *)before, (float *)lost, (const float *)group, SPARSE_COLUMNS);
    }
    total((float *)sums, (const float *)before, (const float *)lost, SPARSE_COLUMNS);
}

static inline __attribute__((always_inline)) void sparse_sum(const int halves, const union entry *entries,
                                                             int64_t count, const struct terms *terms,
                                                             vector sums[SPARSE_VECTORS]) {
    if (terms->strip && count <= CHAIN)
        chain_sum(halves, entries, count, terms->strip, sums);
    else
        long_sum(halves, entries, count, terms, sums);
}

/* From the order of pairs to that of columns. */
static inline void part_pairs(float *restrict to, const float *restrict pairs) {
    for (int column = 0; column < SPARSE_COLUMNS; column += 2 * LANES)
#pragma omp simd
        for (int i = 0; i < LANES; i++) {
            to[column + 2 * i] = pairs[column + i];
            to[column + 2 * i + 1] = pairs[column + LANES + i];
        }
}

/* To bfloat16 in the upper half. A NaN's lower half is zero, since it came from a bfloat16 or was made by the
 * processor: nothing is carried out of it. */
static inline words rounded(vector sums) {
    const words bits = (words)sums;
    return bits + 0x7fff + (bits >> 16 & 1);
}

/* A row of sums to a row of grad_hidden_states. */
static inline __attribute__((always_inline)) void store_row(const int halves, char *to, enum element type,
                                                            const vector sums[SPARSE_VECTORS], int64_t valid) {
    if (halves && type == BF16 && valid == SPARSE_COLUMNS) {
#pragma GCC unroll 4
        for (int v = 0; v < SPARSE_VECTORS; v += 2)
            ((unaligned_words *)to)[v / 2] = rounded(sums[v]) >> 16 | (rounded(sums[v + 1]) & 0xffff0000);
        return;
    }
    float row[SPARSE_COLUMNS];
    if (halves)
        part_pairs(row, (const float *)sums);
    else
        memcpy(row, sums, sizeof row);
    narrow(to, type, row, valid);
}

static inline __attribute__((always_inline)) void hidden_strip(const int halves, const struct slice_job *job,
                                                               const struct terms *terms) {
    const struct problem *problem = job->problem;
    const struct rows *grad_hidden = &problem->grad_hidden;
    const int64_t end = job->first + job->count;
    for (int64_t token = job->first; token < end; token++) {
        const int64_t place = token - job->first;
        vector sums[SPARSE_VECTORS];
        foresee(grad_hidden, smaller(token + SPARSE_PREFETCH_ROWS, end - 1), terms->column);
        sparse_sum(halves, job->logits.sparse + place * problem->top_k, job->logits.counts[place], terms, sums);
        store_row(halves, element_address(grad_hidden, token, terms->column), grad_hidden->type, sums, terms->valid);
    }
}

static inline __attribute__((always_inline)) void weight_strip(const int halves, const struct slice_job *job,
                                                               const struct terms *terms) {
    const int32_t *ends = job->logits.expert_ends;
    for (int64_t expert = 0; expert < job->problem->experts; expert++) {
        const int64_t count = ends[expert + 1] - ends[expert];
        vector sums[SPARSE_VECTORS];
        _Alignas(64) float row[SPARSE_COLUMNS];
        if (count == 0 && job->first > 0)
            continue;
        sparse_sum(halves, job->logits.by_expert + ends[expert], count, terms, sums);
        if (halves)
            part_pairs(row, (const float *)sums);
        else
            memcpy(row, sums, sizeof row);
        if (terms->valid == SPARSE_COLUMNS)
            add_to_weight(job, expert, terms->column - job->column, row, SPARSE_COLUMNS);
        else
            add_to_weight(job, expert, terms->column - job->column, row, terms->valid);
    }
}

/* Scratch is the gate's strips or a strip of hidden states. */
static inline __attribute__((always_inline)) void hidden_strips(const int halves, const struct slice_job *job) {
    const struct problem *problem = job->problem;
    const int64_t experts = slice_panel_experts(problem);
    char *gate = (char *)job->scratch;
    for (int64_t strip = 0; strip < job->columns; strip += SPARSE_COLUMNS) {
        const int64_t column = job->column + strip, valid = smaller(SPARSE_COLUMNS, job->columns - strip);
        const struct terms terms = {experts > 0 ? gate : NULL, &problem->weight, column, valid};
        if (!job->again)
            pack_strip(halves, gate, terms.source, 0, experts, column, valid);
        hidden_strip(halves, job, &terms);
        gate += experts * SPARSE_COLUMNS * (halves ? 2 : 4);
    }
}

static inline __attribute__((always_inline)) void weight_strips(const int halves, const struct slice_job *job) {
    const struct problem *problem = job->problem;
    char *hidden_states = (char *)job->scratch;
    for (int64_t strip = 0; strip < job->columns; strip += SPARSE_COLUMNS) {
        const int64_t column = job->column + strip, valid = smaller(SPARSE_COLUMNS, job->columns - strip);
        const struct terms terms = {hidden_states, &problem->hidden_states, column, valid};
        pack_strip(halves, hidden_states, terms.source, job->first, job->count, column, valid);
        weight_strip(halves, job, &terms);
    }
}

static void sparse_hidden(const struct slice_job *job) {
    if (has_halves(&job->problem->weight))
        hidden_strips(1, job);
    else
        hidden_strips(0, job);
}

static void sparse_weight(const struct slice_job *job) {
    if (has_halves(&job->problem->weight))
        weight_strips(1, job);
    else
        weight_strips(0, job);
}
