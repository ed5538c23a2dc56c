/* SPDX-License-Identifier: Apache-2.0 */
/* Whether the fast path's results have the bits of the generic one's and, where they have not, what has gone wrong: a
 * pattern shows which element of the other factor an element of a product is. */
#include "selfcheck.h"

#include <stdio.h>
#include <string.h>

/* ---- Results ---------------------------------------------------------------------------------------------------- */

/* An element's bits, those of either zero alike: a sum of nothing but zeros may have either sign. */
static uint32_t bits_of(const DLTensor *tensor, int64_t index) {
    if (tensor->dtype.bits == 32) {
        const uint32_t bits = ((const uint32_t *)tensor->data)[index];
        return bits << 1 ? bits : 0;
    }
    const uint16_t bits = ((const uint16_t *)tensor->data)[index];
    return (uint16_t)(bits << 1) ? bits : 0;
}

static int is_poison(const DLTensor *tensor, int64_t index) {
    return bits_of(tensor, index) == UINT32_MAX >> (32 - tensor->dtype.bits);
}

/* How many elements differ, and the first of them. */
static int64_t count_wrong(const DLTensor *is, const DLTensor *must, int64_t *first) {
    const int64_t count = is->shape[0] * is->shape[1];
    int64_t wrong = 0;
    if (count == 0 || memcmp(is->data, must->data, (size_t)count * dtype_size(is->dtype)) == 0)
        return 0;
    for (int64_t i = 0; i < count; i++)
        if (bits_of(is, i) != bits_of(must, i) && wrong++ == 0)
            *first = i;
    return wrong;
}

/* ---- What the path has put where -------------------------------------------------------------------------------- */

/* The case as patterns run it: with a token for every expert. Each row of the weight gradient is one token's; the last
 * tokens have the tail. */
static struct selfcheck_case pattern_case(const struct selfcheck_case *one, int output) {
    struct selfcheck_case with = *one;
    struct dims *dims = &with.dims;
    with.accumulate = 0;
    if (dims->tokens < dims->experts)
        dims->tokens = dims->experts;
    with.first = output == 1 ? dims->tokens - dims->experts : 0;
    return with;
}

/* Runs the four patterns of a case; their outputs of that number. */
static void run_patterns(struct selfcheck_case with, int output, DLTensor *codes[PATTERNS]) {
    for (int pattern = PATTERN_ROW_LOW; pattern < PATTERNS; pattern++) {
        struct trial trial;
        struct results results;
        with.pattern = (enum pattern)pattern;
        trial_begin(&trial, &with);
        trial_run(&trial, selfcheck_path, ", a pattern");
        results_take(&results, &trial);
        trial_end(&trial);
        codes[pattern] = results.outputs[output];
        results.outputs[output] = NULL;
        results_free(&results);
    }
}

/* Which element of the other factor a pattern's element is, "row R, column C"; 0 where it is none. */
static int decode(DLTensor *const codes[PATTERNS], int64_t i, int64_t j, int64_t *row, int64_t *column) {
    double code[PATTERNS];
    for (int pattern = PATTERN_ROW_LOW; pattern < PATTERNS; pattern++) {
        code[pattern] = get_element(codes[pattern], i, j, 0);
        if (!(code[pattern] >= 0 && code[pattern] < 256 && code[pattern] == (double)(int)code[pattern]))
            return 0;
    }
    *row = (int64_t)(code[PATTERN_ROW_HIGH] * 256 + code[PATTERN_ROW_LOW]);
    *column = (int64_t)(code[PATTERN_COLUMN_HIGH] * 256 + code[PATTERN_COLUMN_LOW]);
    return 1;
}

/* What kind of mistake puts column there instead of another: chunks are 8 columns, of which a swizzle exchanges those
 * of a panel, of 32 or 64. */
static const char *name_column(int64_t is, int64_t must) {
    if ((is ^ must) % 8)
        return "columns within a chunk of 8 are exchanged";
    return is / 64 == must / 64 ? "chunks of 8 columns are exchanged within a panel, as by a wrong swizzle"
                                : "columns of another panel, as by a wrong stride";
}

/* Names the wrong field; leaves text where the patterns come out right. */
static void explain(const struct selfcheck_case *one, int output, char *text, size_t size) {
    const struct selfcheck_case with = pattern_case(one, output);
    const int64_t rows = output == 0 ? with.dims.tokens : with.dims.experts;
    const char *factor = output == 1 ? "hidden_states" : "the gate";
    DLTensor *codes[PATTERNS];
    int found = 0;
    run_patterns(with, output, codes);
    for (int64_t i = 0; i < rows && !found; i++)
        for (int64_t j = 0; j < with.dims.hidden && !found; j++) {
            const int64_t must = output == 0 ? i % with.dims.experts : with.first + i;
            int64_t row = -1, column = -1;
            const int is_code = decode(codes, i, j, &row, &column);
            found = !is_code || row != must || column != j;
            if (found && !is_code)
                snprintf(text, size, "with a pattern, element %lld,%lld is not a single element of %s", (long long)i,
                         (long long)j, factor);
            else if (found)
                snprintf(text, size, "with a pattern, element %lld,%lld is that of row %lld, column %lld of %s: %s",
                         (long long)i, (long long)j, (long long)row, (long long)column, factor,
                         row == must ? name_column(column, j) : "another row than its own, or none");
        }
    for (int pattern = PATTERN_ROW_LOW; pattern < PATTERNS; pattern++)
        moer_tensor_free(codes[pattern]);
}

/* Says what is wrong with an output, and ends. */
static void name_fault(const struct selfcheck_case *one, const struct results *must, int output, const DLTensor *is,
                       int64_t count, int64_t first, const char *how) {
    char text[CASE_TEXT], difference[300], why[240] = "with patterns it is right: it depends on the data, or on time";
    const int64_t width = is->shape[1], i = first / width, j = first % width;
    selfcheck_describe(one, text);
    snprintf(difference, sizeof difference, "%s%s: %s[%lld,%lld] is %g, not %g, one of %lld", text, how,
             must->names[output], (long long)i, (long long)j, get_element(is, i, j, 0),
             get_element(must->outputs[output], i, j, 0), (long long)count);
    blame(difference);
    if (is_poison(is, first)) {
        snprintf(why, sizeof why, "it was not written%s",
                 first % width == 0 && count == (is->shape[0] - i) * width ? ", nor was any behind it: a lost tail"
                                                                           : "");
    } else if (output == 2) {
        why[0] = '\0';
    } else {
        explain(one, output, why, sizeof why);
    }
    report_end("wrong", "%s%s%s", difference, *why ? "; " : "", why);
}

void trial_compare(const struct trial *trial, const struct results *must, const char *how) {
    for (int output = 0; output < CALL_OUTPUTS; output++) {
        const DLTensor *is = call_tensor(&trial->host, must->names[output]);
        int64_t first = 0;
        const int64_t count = count_wrong(is, must->outputs[output], &first);
        if (count > 0)
            name_fault(trial->one, must, output, is, count, first, how);
    }
}
