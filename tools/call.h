/* SPDX-License-Identifier: Apache-2.0 */
/* A call in the making: the args struct of any operation, reached by the names of its tensors. What the command, the
 * tests and the benchmark share, so that none of them needs a case for each operation. Public header only. */
#ifndef MOER_TOOLS_CALL_H
#define MOER_TOOLS_CALL_H

#include <moerouter/moerouter.h>

struct call {
    enum moer_operation operation;
    union {
        struct {
            MOER_COMMON_FIELDS;
        } common;
        struct moer_softmax_topk_backward_args softmax;
        struct moer_sigmoid_topk_backward_args sigmoid;
    } args;
};

enum { CALL_MAX_OPERANDS = 16, CALL_OUTPUTS = 3 };

/* The sizes of a case. */
struct dims {
    int64_t tokens, hidden, experts, top_k;
};

/* An empty call: every tensor NULL, size set. */
void call_init(struct call *call, enum moer_operation operation);

/* The operation of that name, or MOER_OPERATIONS. */
enum moer_operation call_find_operation(const char *name);

/* The field of a tensor; the operand comes from moer_operands(). */
const DLTensor **call_field(struct call *call, const struct moer_operand *operand);
/* The tensor called name, NULL where it is absent or the operation has none of that name. */
const DLTensor *call_tensor(const struct call *call, const char *name);
/* Puts the tensor under name; 0 where the operation has no such tensor. */
int call_set(struct call *call, const char *name, const DLTensor *tensor);

/* N, H, E, K, from the tensors of the call. */
struct dims call_dims(const struct call *call);
/* Shape of an operand: its axes with their sizes; returns ndim. */
int call_shape(const struct moer_operand *operand, struct dims dims, int64_t shape[4]);

/* The three functions of the operation. */
enum moer_status call_run(const struct call *call);
enum moer_status call_workspace_size(const struct call *call, size_t *bytes);
enum moer_status call_explain(const struct call *call, char *text, size_t size);

/* moer_tensor_free() for every tensor of the call. */
void call_free(struct call *call);

/* "bfloat16", "float16", "float32", "int64", "int32", ...; a dtype from such a name (0 where there is none). */
const char *dtype_name(DLDataType dtype);
int dtype_parse(const char *name, DLDataType *dtype);
size_t dtype_size(DLDataType dtype);

/* Elements of host tensors as numbers, whatever the dtype, by indices along the axes (unused ones 0); strides and
 * byte_offset are honoured. set_element() rounds to nearest even. */
double get_element(const DLTensor *tensor, int64_t i, int64_t j, int64_t k);
void set_element(const DLTensor *tensor, int64_t i, int64_t j, int64_t k, double value);
/* The elements [first, first + count) of a compact tensor, counted in memory order; rounded likewise. */
void set_elements(const DLTensor *tensor, int64_t first, int64_t count, const double *values);
/* What is left of a number in a tensor of that floating-point dtype. */
double round_to(DLDataType dtype, double value);

#endif
