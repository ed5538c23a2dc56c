/* SPDX-License-Identifier: Apache-2.0 */
/* Products of bfloat16 operands, two terms at a time, by the processor's own instructions. A part of slice.c, compiled
 * for AVX-512 BF16 and, with it, for AMX.
 *
 * A pair is a term and the next, bfloat16 both. G lies as pairs twice: by token, pairs of experts, for
 * grad_hidden_states; by expert, pairs of tokens, for the weight gradient. Panels of W and X are pairs of rows, zeros
 * where there is none. A tile of PAIR_ROWS x TILE_COLUMNS sums takes CHAIN terms in the registers before it adds them
 * to float32 sums, as the other kernels do.
 *
 * These instructions take subnormals for zero and make none. So that nobody can tell, they get no operand that is too
 * small: with |G| from 2^-72 on and |W| and |X| from 2^-40 on, every product, and so every sum, is a multiple of
 * 2^-126. What is smaller, and not zero, is left to the float32 kernels: a token (grad_hidden_states), a block's slice
 * (the weight gradient), or a slice of W. */
#include <immintrin.h>

enum {
#ifdef __AMX_BF16__
    PAIR_ROWS = 32, /* 2 x 2 tiles of 16 x 16 sums, 2 of each operand: all 8 */
#else
    PAIR_ROWS = 8,
#endif
    LEAST_LOGIT = (127 - 72) << 7,  /* bfloat16 bits */
    LEAST_OPERAND = (127 - 40) << 7 /* the same */
};

/* Which of the 32 bfloat16 are less than least and not zero. */
static inline __mmask32 too_small(__m512i pairs, uint16_t least) {
    const __m512i magnitude = _mm512_and_si512(pairs, _mm512_set1_epi16(0x7fff));
    return _mm512_cmplt_epu16_mask(_mm512_sub_epi16(magnitude, _mm512_set1_epi16(1)),
                                   _mm512_set1_epi16((short)(least - 1)));
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

/* Makes a panel of pairs of rows, columns of TILE_COLUMNS one after the other, as pack() does. Returns whether nothing
 * in it is too small. */
static int pack_pairs(uint32_t *panel, int64_t pairs, const struct rows *rows, int64_t first, int64_t count,
                      int64_t column, int64_t columns) {
    __mmask32 small = 0;
    for (int64_t pair = 0; pair < pairs; pair++) {
        const int64_t upper = 2 * pair, left = count - upper;
        for (int64_t ahead = 0; ahead < 2 && upper + ahead + PREFETCH_ROWS < count; ahead++)
            for (int64_t byte = 0; byte < 2 * columns; byte += 64)
                __builtin_prefetch(element_address(rows, first + upper + ahead + PREFETCH_ROWS, column) + byte);
        int64_t from = 0;
        for (; left > 1 && from + TILE_COLUMNS <= columns; from += TILE_COLUMNS) { /* two whole registers */
            const __m512i first_row = _mm512_loadu_si512(element_address(rows, first + upper, column + from));
            const __m512i second_row = _mm512_loadu_si512(element_address(rows, first + upper + 1, column + from));
            uint32_t *to = panel + from * pairs + pair * TILE_COLUMNS;
            small |= too_small(first_row, LEAST_OPERAND) | too_small(second_row, LEAST_OPERAND);
            _mm512_store_si512(to, _mm512_permutex2var_epi16(first_row, alternate(0), second_row));
            _mm512_store_si512(to + LANES, _mm512_permutex2var_epi16(first_row, alternate(LANES), second_row));
        }
        for (; from < columns; from += LANES) {
            uint32_t *to =
                panel + from / TILE_COLUMNS * TILE_COLUMNS * pairs + pair * TILE_COLUMNS + from % TILE_COLUMNS;
            __m512i both = _mm512_setzero_si512();
            if (left > 0)
                both = load_columns(rows, first + upper, column + from, columns - from);
            if (left > 1)
                both = _mm512_or_si512(
                    both, _mm512_slli_epi32(load_columns(rows, first + upper + 1, column + from, columns - from), 16));
            small |= too_small(both, LEAST_OPERAND);
            _mm512_store_si512(to, both);
        }
        /* The last columns may end in the middle of a tile. */
        for (from = (columns + LANES - 1) / LANES * LANES; from % TILE_COLUMNS; from += LANES)
            _mm512_store_si512(panel + from / TILE_COLUMNS * TILE_COLUMNS * pairs + pair * TILE_COLUMNS +
                                   from % TILE_COLUMNS,
                               _mm512_setzero_si512());
    }
    return small == 0;
}

/* So many float32 from there on, at most a register full, and zeros. */
static inline __m512i load_floats(const float *from, int64_t count) {
    return _mm512_maskz_loadu_epi32(count >= LANES ? 0xffff : count <= 0 ? 0 : (__mmask16)((1u << count) - 1), from);
}

/* G's float32 are bfloat16 already. */
static void pair(const struct block_pairs *to, const float *dense, int64_t tokens, int64_t experts) {
    _Alignas(64) uint16_t upper_halves[2 * LANES];
    for (int i = 0; i < 2 * LANES; i++)
        upper_halves[i] = (uint16_t)(2 * i + 1);
    for (int64_t token = 0; token < tokens; token++) {
        const float *row = dense + token * experts;
        __mmask32 small = 0;
        for (int64_t i = 0; i < to->token_stride; i += LANES) {
            const __m512i pairs =
                _mm512_permutex2var_epi16(load_floats(row + 2 * i, experts - 2 * i), _mm512_load_si512(upper_halves),
                                          load_floats(row + 2 * i + LANES, experts - 2 * i - LANES));
            small |= too_small(pairs, LEAST_LOGIT);
            _mm512_storeu_si512(to->by_token + token * to->token_stride + i, pairs);
        }
        to->usual[token] = small == 0;
    }
    for (int64_t i = 0; i < to->expert_stride; i++)
        for (int64_t expert = 0; expert < experts; expert += LANES) {
            const float *low = dense + 2 * i * experts + expert;
            const __m512i first = load_floats(low, 2 * i < tokens ? experts - expert : 0);
            const __m512i second = load_floats(low + experts, 2 * i + 1 < tokens ? experts - expert : 0);
            _Alignas(64) uint32_t pairs[LANES];
            _mm512_store_si512(pairs, _mm512_or_si512(_mm512_srli_epi32(first, 16),
                                                      _mm512_and_si512(second, _mm512_set1_epi32(~0xffff))));
            for (int64_t j = 0; j < smaller(LANES, experts - expert); j++)
                to->by_expert[(expert + j) * to->expert_stride + i] = pairs[j];
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

/* sums[r][] = sum over i of g[r * stride + i] * panel[i][]. Whatever lies in rows beyond the given ones is read, and
 * what comes of it is not looked at. */
static void pair_tile(int64_t rows, int64_t pairs, const uint32_t *g, int64_t stride, const uint32_t *panel,
                      float sums[PAIR_ROWS][TILE_COLUMNS]) {
    _Alignas(64) float chain[PAIR_ROWS][TILE_COLUMNS];
    const int64_t bytes = stride * (int64_t)sizeof *g, panel_bytes = TILE_COLUMNS * (int64_t)sizeof *panel;
    __asm__ volatile("" ::: "memory"); /* nor is it told what loads of tiles read */
    if (pairs == 0)                    /* no experts */
        memset(sums, 0, sizeof chain);
    for (int64_t start = 0; start < pairs; start += CHAIN / 2) {
        const int64_t end = smaller(start + CHAIN / 2, pairs);
        float(*const to)[TILE_COLUMNS] = start == 0 ? sums : chain;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t i = start; i < end; i += 16) {
            _tile_loadd(6, panel + i * TILE_COLUMNS, panel_bytes);
            _tile_loadd(7, panel + i * TILE_COLUMNS + 16, panel_bytes);
            _tile_loadd(4, g + i, bytes);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            if (rows > 16) {
                _tile_loadd(5, g + 16 * stride + i, bytes);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        _tile_stored(0, to[0], sizeof to[0]);
        _tile_stored(1, to[0] + 16, sizeof to[0]);
        _tile_stored(2, to[16], sizeof to[0]);
        _tile_stored(3, to[16] + 16, sizeof to[0]);
        for (int64_t r = 0; start > 0 && r < rows; r++)
            for (int v = 0; v < TILE_VECTORS; v++)
                ((vector *)sums[r])[v] += ((vector *)chain[r])[v];
    }
}
#else
static void begin_pairs(void) {}
static void end_pairs(void) {}

static inline __attribute__((always_inline)) void pair_rows(const int rows, int64_t pairs, const uint32_t *g,
                                                            int64_t stride, const uint32_t *panel,
                                                            float sums[PAIR_ROWS][TILE_COLUMNS]) {
    for (int64_t start = 0; start < pairs; start += CHAIN / 2) {
        __m512 chain[PAIR_ROWS][TILE_VECTORS] = {{{0}}};
        const int64_t end = smaller(start + CHAIN / 2, pairs);
        for (int64_t i = start; i < end; i++) {
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
                ((vector *)sums[r])[v] += (vector)chain[r][v];
    }
}

/* sums[r][] = sum over i of g[r * stride + i] * panel[i][]. */
static void pair_tile(int64_t rows, int64_t pairs, const uint32_t *g, int64_t stride, const uint32_t *panel,
                      float sums[PAIR_ROWS][TILE_COLUMNS]) {
    memset(sums, 0, sizeof(float[PAIR_ROWS][TILE_COLUMNS]));
    if (rows == PAIR_ROWS) {
        pair_rows(PAIR_ROWS, pairs, g, stride, panel, sums);
        return;
    }
    for (; rows > 0; rows--, g += stride, sums++)
        pair_rows(1, pairs, g, stride, panel, sums);
}
#endif

/* TILE_COLUMNS float32 as float_to_bf16() has them, without the detour of a call for so few. */
static inline __m512i narrow_row(const float *from) {
    __m512i halves[TILE_VECTORS];
#pragma GCC unroll 2
    for (int v = 0; v < TILE_VECTORS; v++) {
        const __m512 value = _mm512_load_ps(from + v * LANES);
        const __m512i bits = _mm512_castps_si512(value), upper = _mm512_srli_epi32(bits, 16);
        const __m512i odd = _mm512_and_si512(upper, _mm512_set1_epi32(1));
        const __m512i rounded =
            _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
        halves[v] = _mm512_mask_or_epi32(rounded, _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q), upper,
                                         _mm512_set1_epi32(0x40));
    }
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(halves[0])),
                              _mm512_cvtepi32_epi16(halves[1]), 1);
}

/* grad_hidden_states of the block. gate_usual: nothing in the panel is too small. float_panel: room for the float32
 * kernels' panel, which a token with G that is too small needs. */
static void pair_hidden(const struct slice_job *job, const uint32_t *panel, float *float_panel) {
    const struct problem *problem = job->problem;
    const struct block_pairs *G = &job->logits.pairs;
    _Alignas(64) float sums[PAIR_ROWS][TILE_COLUMNS], exact[TILE_ROWS][TILE_COLUMNS];
    int packed = 0;
    for (int64_t token = 0; token < job->count && !packed; token++)
        if (!G->usual[token]) {
            pack(float_panel, TILE_COLUMNS, &problem->weight, 0, problem->experts, job->column, job->columns);
            packed = 1;
        }
    begin_pairs();
    /* The gate's panel and a tile's G fit the L1 cache. */
    for (int64_t token = 0; token < job->count; token += PAIR_ROWS)
        for (int64_t column = 0; column < job->columns; column += TILE_COLUMNS) {
            const int64_t rows = smaller(PAIR_ROWS, job->count - token);
            const int64_t valid = smaller(TILE_COLUMNS, job->columns - column);
            pair_tile(rows, G->token_stride, G->by_token + token * G->token_stride, G->token_stride,
                      panel + column * G->token_stride, sums);
            for (int64_t r = 0; r < rows; r++) {
                const float *result = sums[r];
                if (!G->usual[token + r]) {
                    tile(1, problem->experts, job->logits.dense + (token + r) * problem->experts, problem->experts, 1,
                         float_panel + column * problem->experts, exact);
                    result = exact[0];
                }
                char *to = element_address(&problem->grad_hidden, job->first + token + r, job->column + column);
                if (valid == TILE_COLUMNS && problem->grad_hidden.type == BF16)
                    _mm512_storeu_si512(to, narrow_row(result));
                else
                    narrow(to, problem->grad_hidden.type, result, valid);
            }
        }
    end_pairs();
}

/* The block's share of the weight gradient. */
static void pair_weight(const struct slice_job *job, const uint32_t *panel) {
    const struct block_pairs *G = &job->logits.pairs;
    _Alignas(64) float sums[PAIR_ROWS][TILE_COLUMNS];
    begin_pairs();
    for (int64_t column = 0; column < job->columns; column += TILE_COLUMNS)
        for (int64_t expert = 0; expert < job->problem->experts; expert += PAIR_ROWS) {
            const int64_t rows = smaller(PAIR_ROWS, job->problem->experts - expert);
            pair_tile(rows, G->expert_stride, G->by_expert + expert * G->expert_stride, G->expert_stride,
                      panel + column * G->expert_stride, sums);
            for (int64_t r = 0; r < rows; r++)
                add_to_weight(job, expert + r, column, sums[r], smaller(TILE_COLUMNS, job->columns - column));
        }
    end_pairs();
}

/* Both products of a slice; scratch is [gate's pairs][gate or hidden states as float32]. The first word of scratch says
 * whether the gate's pairs may be used. */
static void slice_of_pairs(const struct slice_job *job) {
    const struct problem *problem = job->problem;
    const struct block_pairs *G = &job->logits.pairs;
    int *gate_usual = (int *)job->scratch;
    uint32_t *gate = (uint32_t *)job->scratch + SLICE_COLUMNS;
    float *other = (float *)(gate + G->token_stride * SLICE_COLUMNS);
    int usual = 1;
    if (problem->grad_weight.data) {
        for (int64_t token = 0; token < job->count; token++)
            usual = usual && G->usual[token];
        if (usual && pack_pairs((uint32_t *)other, G->expert_stride, &problem->hidden_states, job->first, job->count,
                                job->column, job->columns))
            pair_weight(job, (uint32_t *)other);
        else
            dense_weight(job, other);
    }
    if (!problem->grad_hidden.data)
        return;
    if (!job->again)
        *gate_usual =
            pack_pairs(gate, G->token_stride, &problem->weight, 0, problem->experts, job->column, job->columns);
    if (*gate_usual) {
        pair_hidden(job, gate, other);
    } else {
        struct slice_job alone = *job;
        alone.again = 0;                    /* the panel has not been kept */
        dense_hidden(&alone, other, other); /* there is one panel, and so no partial sums */
    }
}
