/* SPDX-License-Identifier: Apache-2.0 */
/* What the self-check runs an operation on. Every sum is of small integers, or sixteenths, and exact in any order: of
 * less than 2^24 units, whatever the sizes below. */
#ifndef MOER_TOOLS_SELFCHECK_DATA_H
#define MOER_TOOLS_SELFCHECK_DATA_H

#include "call.h"

/* Integers at random, for finding out whether something is wrong; and patterns, for finding out what. In a pattern a
 * token's G is 1 for one expert and 0 for all others, or 0 altogether, so that every element of a product is one of its
 * other factor, the gate or the hidden states; and these hold their own row or column, the low or the high byte. */
enum pattern { PATTERN_RANDOM, PATTERN_ROW_LOW, PATTERN_ROW_HIGH, PATTERN_COLUMN_LOW, PATTERN_COLUMN_HIGH, PATTERNS };

struct selfcheck_case {
    enum moer_operation operation;
    struct dims dims;
    DLDataType dtype, output_dtype;
    int accumulate;
    enum pattern pattern;
    int64_t first;   /* pattern: tokens from this one on have a 1, one after the other for each expert in turn */
    int64_t padding; /* columns of memory behind each row of hidden states, the gate and their gradients */
};

/* Makes the call's tensors on the host, but for what is never read, and fills the inputs; those with padding have so
 * many columns more. call_free() is due either way. */
enum moer_status selfcheck_draw(const struct selfcheck_case *one, struct call *call);

/* What outputs hold before a call: NaN, in which no element is right; what is accumulated to, integers. */
void selfcheck_poison(const struct selfcheck_case *one, const struct call *call);

#endif
