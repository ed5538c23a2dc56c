/* SPDX-License-Identifier: Apache-2.0 */
/* Products of bfloat16 operands, two terms at a time, by the processor's own instructions. A part of slice.c, compiled
 * for AVX-512 BF16 and, with it, for AMX.
 *
 * A pair is a term and the next, bfloat16 both. G lies as pairs twice: by token, pairs of experts, for
 * grad_hidden_states; by expert, pairs of tokens, for the weight gradient. Panels of W and X are pairs of rows, zeros
 * where there is none. A tile of PAIR_ROWS x TILE_COLUMNS sums takes PAIR_CHAIN terms in the registers, and its chains
 * are added as float32 where they are used. Chains are twice as long as the other kernels', since to end one costs as
 * much as half of its products; the suites hold both to the same bounds.
 *
 * These instructions take subnormals for zero and make none. So that nobody can tell, they get no operand that is too
 * small: with |G| from 2^-72 on and |W| and |X| from 2^-40 on, every product, and so every sum, is a multiple of
 * 2^-126. What is smaller, and not zero, is left to the float32 kernels: a token (grad_hidden_states), a block (the
 * weight gradient), or a strip of W or of a block's X. */
#include <immintrin.h>

_Static_assert((int)TILE_COLUMNS == (int)PAIR_STRIP_COLUMNS, "a strip is as wide as a tile");

enum {
#ifdef __AMX_BF16__
    PAIR_ROWS = 32, /* 2 x 2 tiles of 16 x 16 sums, 2 of each operand: all 8 */
#else
    PAIR_ROWS = 8,
#endif
    PAIR_CHAIN = 128,
    PAIR_CHAINS = (PANEL_EXPERTS > BLOCK_TOKENS ? PANEL_EXPERTS : BLOCK_TOKENS) / PAIR_CHAIN,
    LEAST_LOGIT = (127 - 72) << 7,  /* bfloat16 bits */
    LEAST_OPERAND = (127 - 40) << 7 /* the same */
};

/* Magnitudes less one, zeros the largest of them. */
static inline __m512i magnitudes(__m512i pairs) {
    return _mm512_sub_epi16(_mm512_and_si512(pairs, _mm512_set1_epi16(0x7fff)), _mm512_set1_epi16(1));
}

/* Whether one of them is of a number less than least and not zero. */
static inline int too_small(__m512i magnitudes, uint16_t least) {
    return _mm512_cmplt_epu16_mask(magnitudes, _mm512_set1_epi16((short)(least - 1))) != 0;
}

static inline __m512i load_columns(const struct rows *rows, int64_t row, int64_t column, int64_t valid) {
    const __mmask16 mask = valid >= LANES ? 0xffff : valid <= 0 ? 0 : (__mmask16)((1u << valid) - 1);
    return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, element_address(rows, row, column)));
}

/* For _mm512_permutex2var_epi16(): elements of two registers in turn, from one on. */
static inline __m512i alternate(int from) {
    _Alignas(64) uint16_t index[2 * LANES];
    for (int i = 0; i < LANES; i++) {
        index[2 * i] = (uint16_t)(from + i);
        index[2 * i + 1] = (uint16_t)(2 * LANES + from + i);
    }
    return _mm512_load_si512(index);
}

/* Makes pairs of two rows, TILE_COLUMNS of them. Lowers *least to what is in them. */
static inline __attribute__((always_inline)) void pack_pair(uint32_t *to, const char *row, const char *next,
                                                            __m512i lower, __m512i upper, __m512i *least) {
    const __m512i first = _mm512_loadu_si512(row), second = _mm512_loadu_si512(next);
    *least = _mm512_min_epu16(*least, _mm512_min_epu16(magnitudes(first), magnitudes(second)));
    _mm512_store_si512(to, _mm512_permutex2var_epi16(first, lower, second));
    _mm512_store_si512(to + LANES, _mm512_permutex2var_epi16(first, upper, second));
}

/* The same where there may be no second row, or fewer columns. */
static void pack_edge(uint32_t *to, const struct rows *rows, int64_t row, int64_t left, int64_t column, int64_t columns,
                      __m512i *least) {
    for (int64_t from = 0; from < TILE_COLUMNS; from += LANES) {
        __m512i both = _mm512_setzero_si512();
        if (left > 0)
            both = load_columns(rows, row, column + from, columns - from);
        if (left > 1)
            both = _mm512_or_si512(both,
                                   _mm512_slli_epi32(load_columns(rows, row + 1, column + from, columns - from), 16));
        *least = _mm512_min_epu16(*least, magnitudes(both));
        _mm512_store_si512(to + from, both);
    }
}

/* Makes a panel of pairs of rows, in strips of TILE_COLUMNS. Returns those in which something is too small: a bit each.
 */
static uint32_t pack_pairs(uint32_t *panel, int64_t pairs, const struct rows *rows, int64_t first, int64_t count,
                           int64_t column, int64_t columns) {
    const __m512i lower = alternate(0), upper = alternate(LANES);
    __m512i least[SLICE_COLUMNS / TILE_COLUMNS];
    uint32_t small = 0;
    for (int strip = 0; strip < SLICE_COLUMNS / TILE_COLUMNS; strip++)
        least[strip] = _mm512_set1_epi16(-1);
    for (int64_t pair = 0; pair < pairs; pair++) {
        const int64_t left = count - 2 * pair, row = first + 2 * pair;
        for (int64_t ahead = PREFETCH_ROWS; ahead < smaller(PREFETCH_ROWS + 2, left); ahead++)
            for (int64_t byte = 0; byte < 2 * columns; byte += 64)
                __builtin_prefetch(element_address(rows, row + ahead, column) + byte);
        for (int64_t from = 0; from < columns; from += TILE_COLUMNS) {
            uint32_t *to = panel + from * pairs + pair * TILE_COLUMNS;
            if (left > 1 && columns - from >= TILE_COLUMNS)
                pack_pair(to, element_address(rows, row, column + from), element_address(rows, row + 1, column + from),
                          lower, upper, &least[from / TILE_COLUMNS]);
            else
                pack_edge(to, rows, row, left, column + from, columns - from, &least[from / TILE_COLUMNS]);
        }
    }
    for (int strip = 0; strip < SLICE_COLUMNS / TILE_COLUMNS; strip++)
        small |= (uint32_t)too_small(least[strip], LEAST_OPERAND) << strip;
    return small;
}

static void pair_gate(const struct block_pairs *to, const struct problem *problem, int64_t column) {
    const int64_t strip = column / TILE_COLUMNS;
    to->usual_gate[strip] =
        !pack_pairs(to->gate + strip * to->token_stride * TILE_COLUMNS, to->token_stride, &problem->weight, 0,
                    problem->experts, column, smaller(TILE_COLUMNS, problem->hidden - column));
}

/* So many float32 from there on, at most a register full, and zeros. */
static inline __m512i load_floats(const float *from, int64_t count) {
    return _mm512_maskz_loadu_epi32(count >= LANES ? 0xffff : count <= 0 ? 0 : (__mmask16)((1u << count) - 1), from);
}

/* Row i to column i. */
static inline void transpose(__m512i rows[LANES]) {
    __m512i halves[LANES];
    for (int i = 0; i < LANES; i += 2) { /* pairs of rows: elements in turn */
        halves[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        halves[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < LANES; i += 4) /* fours of rows: column 4q + j in quarter q of rows[i + j] */
        for (int j = 0; j < 2; j++) {
            rows[i + 2 * j] = _mm512_unpacklo_epi64(halves[i + j], halves[i + 2 + j]);
            rows[i + 2 * j + 1] = _mm512_unpackhi_epi64(halves[i + j], halves[i + 2 + j]);
        }
    for (int j = 0; j < 4; j++) { /* quarters to their places */
        const __m512i even_low = _mm512_shuffle_i32x4(rows[j], rows[j + 4], 0x88);
        const __m512i odd_low = _mm512_shuffle_i32x4(rows[j], rows[j + 4], 0xdd);
        const __m512i even_high = _mm512_shuffle_i32x4(rows[j + 8], rows[j + 12], 0x88);
        const __m512i odd_high = _mm512_shuffle_i32x4(rows[j + 8], rows[j + 12], 0xdd);
        halves[j] = _mm512_shuffle_i32x4(even_low, even_high, 0x88);
        halves[j + 4] = _mm512_shuffle_i32x4(odd_low, odd_high, 0x88);
        halves[j + 8] = _mm512_shuffle_i32x4(even_low, even_high, 0xdd);
        halves[j + 12] = _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd);
    }
    memcpy(rows, halves, sizeof halves);
}

/* G's float32 are bfloat16 already. */
static void pair(const struct block_pairs *to, const float *dense, int64_t token, int64_t tokens, int64_t experts) {
    const int64_t end = token + PAIR_TOKENS;
    _Alignas(64) uint16_t upper_halves[2 * LANES];
    for (int i = 0; i < 2 * LANES; i++)
        upper_halves[i] = (uint16_t)(2 * i + 1);
    for (int64_t t = token; t < smaller(end, tokens); t++) {
        const float *row = dense + t * experts;
        __m512i least = _mm512_set1_epi16(-1);
        for (int64_t i = 0; i < to->token_stride; i += LANES) {
            const __m512i pairs =
                _mm512_permutex2var_epi16(load_floats(row + 2 * i, experts - 2 * i), _mm512_load_si512(upper_halves),
                                          load_floats(row + 2 * i + LANES, experts - 2 * i - LANES));
            least = _mm512_min_epu16(least, magnitudes(pairs));
            _mm512_storeu_si512(to->by_token + t * to->token_stride + i, pairs);
        }
        to->usual[t] = !too_small(least, LEAST_LOGIT);
    }
    for (int64_t expert = 0; expert < experts; expert += LANES) {
        __m512i pairs[LANES];
        for (int i = 0; i < LANES; i++) {
            const float *low = dense + (token + 2 * i) * experts + expert;
            const __m512i first = load_floats(low, token + 2 * i < tokens ? experts - expert : 0);
            const __m512i second = load_floats(low + experts, token + 2 * i + 1 < tokens ? experts - expert : 0);
            pairs[i] =
                _mm512_or_si512(_mm512_srli_epi32(first, 16), _mm512_and_si512(second, _mm512_set1_epi32(~0xffff)));
        }
        transpose(pairs);
        for (int i = 0; i < smaller(LANES, experts - expert); i++)
            _mm512_storeu_si512(to->by_expert + (expert + i) * to->expert_stride + token / 2, pairs[i]);
    }
}

#ifdef __AMX_BF16__
static void begin_pairs(void) {
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } configuration = {.palette = 1};
    for (int i = 0; i < 8; i++)
        configuration.bytes[i] = 64, configuration.rows[i] = 16;
    /* gcc is told of the first 8 bytes alone that the instruction reads them, and may leave the others unwritten. */
    __asm__ volatile("" ::"m"(configuration));
    _tile_loadconfig(&configuration);
}

static void end_pairs(void) {
    _tile_release();
}

/* A chain of both or one half of the rows. */
static inline __attribute__((always_inline)) void pair_chain(const int halves, int64_t pairs, const uint32_t *g,
                                                             int64_t stride, const uint32_t *panel,
                                                             float to[PAIR_ROWS][TILE_COLUMNS]) {
    const int64_t bytes = stride * (int64_t)sizeof *g, panel_bytes = TILE_COLUMNS * (int64_t)sizeof *panel;
    _tile_zero(0);
    _tile_zero(1);
    if (halves > 1) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t i = 0; i < pairs; i += 16) {
        _tile_loadd(6, panel + i * TILE_COLUMNS, panel_bytes);
        _tile_loadd(4, g + i, bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, panel + i * TILE_COLUMNS + 16, panel_bytes);
        _tile_dpbf16ps(1, 4, 7);
        if (halves > 1) {
            _tile_loadd(5, g + 16 * stride + i, bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, to[0], sizeof to[0]);
    _tile_stored(1, to[0] + 16, sizeof to[0]);
    if (halves > 1) {
        _tile_stored(2, to[16], sizeof to[0]);
        _tile_stored(3, to[16] + 16, sizeof to[0]);
    }
}

/* chains[][r][]: sums over i of g[r * stride + i] * panel[i][], PAIR_CHAIN terms each. Whatever lies in rows beyond the
 * given ones is read, and what comes of it is not looked at. */
static void pair_tile(int64_t rows, int64_t pairs, const uint32_t *g, int64_t stride, const uint32_t *panel,
                      float chains[][PAIR_ROWS][TILE_COLUMNS]) {
    __asm__ volatile("" ::: "memory"); /* nor is the compiler told what loads of tiles read */
    for (int64_t start = 0; start < pairs; start += PAIR_CHAIN / 2, chains++) {
        const int64_t count = smaller(PAIR_CHAIN / 2, pairs - start);
        if (rows > 16)
            pair_chain(2, count, g + start, stride, panel + start * TILE_COLUMNS, *chains);
        else
            pair_chain(1, count, g + start, stride, panel + start * TILE_COLUMNS, *chains);
    }
    __asm__ volatile("" ::: "memory");
}
#else
static void begin_pairs(void) {}
static void end_pairs(void) {}

static inline __attribute__((always_inline)) void pair_chain(const int rows, int64_t pairs, const uint32_t *g,
                                                             int64_t stride, const uint32_t *panel,
                                                             float to[PAIR_ROWS][TILE_COLUMNS]) {
    __m512 chain[PAIR_ROWS][TILE_VECTORS] = {{{0}}};
    for (int64_t i = 0; i < pairs; i++) {
        __m512i columns[TILE_VECTORS];
#pragma GCC unroll 2
        for (int v = 0; v < TILE_VECTORS; v++)
            columns[v] = _mm512_load_si512(panel + i * TILE_COLUMNS + v * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            const __m512i factor = _mm512_set1_epi32((int)g[r * stride + i]);
#pragma GCC unroll 2
            for (int v = 0; v < TILE_VECTORS; v++)
                chain[r][v] = _mm512_dpbf16_ps(chain[r][v], (__m512bh)factor, (__m512bh)columns[v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < TILE_VECTORS; v++)
            _mm512_store_ps(to[r] + v * LANES, chain[r][v]);
}

/* chains[][r][]: sums over i of g[r * stride + i] * panel[i][], PAIR_CHAIN terms each. */
static void pair_tile(int64_t rows, int64_t pairs, const uint32_t *g, int64_t stride, const uint32_t *panel,
                      float chains[][PAIR_ROWS][TILE_COLUMNS]) {
    for (int64_t start = 0; start < pairs; start += PAIR_CHAIN / 2, chains++) {
        const int64_t count = smaller(PAIR_CHAIN / 2, pairs - start);
        const uint32_t *terms = panel + start * TILE_COLUMNS;
        if (rows == PAIR_ROWS)
            pair_chain(PAIR_ROWS, count, g + start, stride, terms, *chains);
        else
            for (int64_t r = 0; r < rows; r++)
                pair_chain(1, count, g + start + r * stride, stride, terms, *chains + r);
    }
}
#endif

/* Part of a row: its chains' sum. */
static inline __m512 sum_chains(int64_t count, float chains[][PAIR_ROWS][TILE_COLUMNS], int64_t row, int v) {
    __m512 sum = _mm512_setzero_ps();
    if (count > 0)
        sum = _mm512_load_ps(chains[0][row] + v * LANES);
    for (int64_t i = 1; i < count; i++)
        sum = _mm512_add_ps(sum, _mm512_load_ps(chains[i][row] + v * LANES));
    return sum;
}

static inline int64_t count_chains(int64_t pairs) {
    return (pairs + PAIR_CHAIN / 2 - 1) / (PAIR_CHAIN / 2);
}

/* The job of a strip of its columns, for the float32 kernels. */
static struct slice_job strip_of(const struct slice_job *job, int64_t column) {
    struct slice_job strip = *job;
    strip.column += column;
    strip.columns = smaller(TILE_COLUMNS, job->columns - column);
    strip.again = 0;
    strip.sums += job->sums ? column : 0;
    strip.lost += job->lost ? column : 0;
    return strip;
}

/* A row of a tile of grad_hidden_states. Sums of usual operands are no subnormals, which the conversion would lose. */
static inline void store_hidden(const struct rows *to, int64_t row, int64_t column, __m512 low, __m512 high,
                                int64_t valid) {
    char *address = element_address(to, row, column);
    if (valid == TILE_COLUMNS && to->type == BF16) {
        _mm512_storeu_si512(address, (__m512i)_mm512_cvtne2ps_pbh(high, low));
        return;
    }
    _Alignas(64) float result[TILE_COLUMNS];
    _mm512_store_ps(result, low);
    _mm512_store_ps(result + LANES, high);
    narrow(address, to->type, result, valid);
}

/* A strip of grad_hidden_states, as if all tokens and the gate were usual. */
static void pair_hidden_strip(const struct slice_job *job, int64_t column) {
    const struct block_pairs *G = &job->logits.pairs;
    const int64_t count = count_chains(G->token_stride), valid = smaller(TILE_COLUMNS, job->columns - column);
    const uint32_t *gate = G->gate + (job->column + column) * G->token_stride;
    _Alignas(64) float chains[PAIR_CHAINS][PAIR_ROWS][TILE_COLUMNS];
    for (int64_t token = 0; token < job->count; token += PAIR_ROWS) {
        const int64_t rows = smaller(PAIR_ROWS, job->count - token);
        pair_tile(rows, G->token_stride, G->by_token + token * G->token_stride, G->token_stride, gate, chains);
        for (int64_t r = 0; r < rows; r++)
            store_hidden(&job->problem->grad_hidden, job->first + token + r, job->column + column,
                         sum_chains(count, chains, r, 0), sum_chains(count, chains, r, 1), valid);
    }
}

/* What of it is not usual, by the float32 kernels; there is one panel of the gate, and so no partial sums. */
static void unusual_hidden_strip(const struct slice_job *job, int64_t column, int usual_gate) {
    struct slice_job strip = strip_of(job, column);
    for (int64_t token = 0; token < job->count; token++)
        if (!usual_gate || !job->logits.pairs.usual[token]) {
            strip.first = job->first + token;
            strip.count = 1;
            strip.logits.dense = job->logits.dense + token * job->problem->experts;
            dense_hidden(&strip, job->scratch, job->scratch);
            strip.again = 1;
        }
}

/* grad_hidden_states of the block. */
static void pair_hidden(const struct slice_job *job) {
    int usual = 1;
    for (int64_t token = 0; token < job->count; token++)
        usual = usual && job->logits.pairs.usual[token];
    begin_pairs();
    for (int64_t column = 0; column < job->columns; column += TILE_COLUMNS) {
        const int usual_gate = job->logits.pairs.usual_gate[(job->column + column) / TILE_COLUMNS];
        if (usual_gate)
            pair_hidden_strip(job, column);
        if (!usual || !usual_gate)
            unusual_hidden_strip(job, column, usual_gate);
    }
    end_pairs();
}

/* add_to_weight() of a row of a tile, without the detours that a call for so few takes. */
static inline void add_tile_row(const struct slice_job *job, int64_t expert, int64_t column,
                                const __m512 row[TILE_VECTORS]) {
    const int64_t place = expert * job->sums_stride + column;
#pragma GCC unroll 2
    for (int v = 0; v < TILE_VECTORS; v++) {
        float *sums = job->sums + place + v * LANES, *lost = job->lost ? job->lost + place + v * LANES : NULL;
        if (job->first == 0) {
            _mm512_storeu_ps(sums, row[v]);
            if (lost)
                _mm512_storeu_ps(lost, _mm512_setzero_ps());
            continue;
        }
        const __m512 before = _mm512_loadu_ps(sums), sum = _mm512_add_ps(before, row[v]);
        _mm512_storeu_ps(sums, sum);
        if (lost) {
            const __m512 taken = _mm512_sub_ps(sum, before);
            const __m512 error =
                _mm512_add_ps(_mm512_sub_ps(before, _mm512_sub_ps(sum, taken)), _mm512_sub_ps(row[v], taken));
            _mm512_storeu_ps(lost, _mm512_add_ps(_mm512_loadu_ps(lost), error));
        }
    }
}

/* A strip of the block's share of the weight gradient. */
static void pair_weight_strip(const struct slice_job *job, const uint32_t *panel, int64_t pairs, int64_t column) {
    const struct block_pairs *G = &job->logits.pairs;
    const int64_t count = count_chains(pairs), valid = smaller(TILE_COLUMNS, job->columns - column);
    _Alignas(64) float chains[PAIR_CHAINS][PAIR_ROWS][TILE_COLUMNS];
    for (int64_t expert = 0; expert < job->problem->experts; expert += PAIR_ROWS) {
        const int64_t rows = smaller(PAIR_ROWS, job->problem->experts - expert);
        pair_tile(rows, pairs, G->by_expert + expert * G->expert_stride, G->expert_stride, panel + column * pairs,
                  chains);
        for (int64_t r = 0; r < rows; r++) {
            const __m512 row[TILE_VECTORS] = {sum_chains(count, chains, r, 0), sum_chains(count, chains, r, 1)};
            if (valid == TILE_COLUMNS)
                add_tile_row(job, expert + r, column, row);
            else
                add_to_weight(job, expert + r, column, (const float *)row, valid);
        }
    }
}

/* The block's share of the weight gradient. Scratch is [pairs of hidden states][a strip of them as float32]. */
static void pair_weight(const struct slice_job *job) {
    const int64_t pairs = pair_stride(job->count);
    uint32_t *panel = (uint32_t *)job->scratch, small = 0;
    for (int64_t token = 0; token < job->count; token++)
        small |= job->logits.pairs.usual[token] ? 0 : UINT32_MAX;
    if (!small)
        small =
            pack_pairs(panel, pairs, &job->problem->hidden_states, job->first, job->count, job->column, job->columns);
    begin_pairs();
    for (int64_t column = 0; column < job->columns; column += TILE_COLUMNS) {
        if (small >> column / TILE_COLUMNS & 1) {
            const struct slice_job strip = strip_of(job, column);
            dense_weight(&strip, job->scratch + pairs * SLICE_COLUMNS);
        } else {
            pair_weight_strip(job, panel, pairs, column);
        }
    }
    end_pairs();
}
