/* SPDX-License-Identifier: Apache-2.0 */
/* Calls made of arbitrary bytes: a valid case, of which a few fields are then changed. Every tensor has a block of
 * memory exactly as large as its description says, so that AddressSanitizer sees whatever reads or writes elsewhere. */
#ifndef MOER_TESTS_FUZZ_H
#define MOER_TESTS_FUZZ_H

#include "call.h"

enum { MOST_AXES = 8 };

/* What a tensor says of itself, and its memory. */
struct part {
    const struct moer_operand *operand;
    DLTensor tensor;
    int64_t shape[MOST_AXES], strides[MOST_AXES]; /* the tensor has copies of exactly ndim numbers */
    int absent, no_shape, no_strides, no_data;
    struct part *owner;  /* whose block it lies in: its own, or another's */
    size_t shift;        /* from the block's first byte to its own */
    size_t lowest, span; /* from there to element 0, and to the end */
    int describable;     /* there is a block of that size */
    unsigned char *block, *original, *expected;
    size_t bytes; /* of the block */
};

enum workspace { NONE, EXACT, LARGER, TOO_SMALL, MISALIGNED, WORKSPACES };

struct fuzz_case {
    struct part parts[CALL_MAX_OPERANDS];
    size_t count;
    enum workspace workspace;
    unsigned char extra; /* what the bytes hold by which size is too large */
    struct call whole;   /* the call, and the same in a block that ends after args.common.size bytes */
    struct call *call;
};

void case_make(struct fuzz_case *fuzz, const uint8_t *bytes, size_t size);
void case_free(struct fuzz_case *fuzz);

/* The library can see the tensor: it is not NULL and not cut off by size; and it has elements. */
int part_present(const struct fuzz_case *fuzz, const struct part *part);
int part_filled(const struct fuzz_case *fuzz, const struct part *part);
/* An id, of a tensor that has the shape and dtype for it. */
void *part_id(const struct part *part, int64_t token, int64_t slot);

#endif
