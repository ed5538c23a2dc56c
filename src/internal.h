/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of the dispatch layer share. */
#ifndef MOER_INTERNAL_H
#define MOER_INTERNAL_H

#include "backend.h"
#include "tensor.h"

/* The fields every args struct begins with. */
struct moer_common_args {
    MOER_COMMON_FIELDS;
};

/* The args of any operation. */
union moer_args {
    struct moer_common_args common;
    struct moer_softmax_topk_backward_args softmax;
    struct moer_sigmoid_topk_backward_args sigmoid;
};

/* What the dispatch layer knows of an operation: the rules of validate.c are read off its operands. */
struct moer_operation_info {
    const char *name;
    size_t args_size;
    const struct moer_operand *operands;
    size_t operand_count;
};
extern const struct moer_operation_info moer_operation_table[MOER_OPERATIONS];

/* validate.c. How much of a call is there to be checked. */
enum moer_scope {
    MOER_SHAPES, /* a query: data pointers and the workspace are not looked at */
    MOER_ALL
};
/* Checks the caller's args and copies them, extended with zeros, into *args. */
enum moer_status moer_validate(enum moer_operation operation, const void *caller, enum moer_scope scope,
                               union moer_args *args, struct moer_message *message);
/* The tensor of an operand. */
const DLTensor *moer_operand_tensor(const union moer_args *args, const struct moer_operand *operand);
/* The device of a call; the CPU's where it has no tensor. */
DLDevice moer_args_device(enum moer_operation operation, const union moer_args *args);

/* registry.c. The backend for a device, or NULL with the status and the reason. */
const struct moer_backend *moer_find_backend(DLDevice device, enum moer_status *status, struct moer_message *message);

/* error.c. Remember the outcome of a public function for moer_last_error() and return its status. */
enum moer_status moer_report(const char *function, enum moer_status status, const struct moer_message *message);

/* Copies text as a C string, cut to size. */
void moer_copy_text(char *to, size_t size, const char *text);

#endif
