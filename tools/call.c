/* SPDX-License-Identifier: Apache-2.0 */
/* Calls reached by the names of their tensors, and host tensors read and written element by element. What the library
 * says of its operations (moer_operands) does the work; only the three functions of each are named here. */
#include "call.h"

#include <string.h>

/* ---- Calls ------------------------------------------------------------------------------------------------------ */

static enum moer_status softmax_run(const struct call *call) {
    return moer_softmax_topk_backward(&call->args.softmax);
}

static enum moer_status softmax_workspace_size(const struct call *call, size_t *bytes) {
    return moer_softmax_topk_backward_workspace_size(&call->args.softmax, bytes);
}

static enum moer_status softmax_explain(const struct call *call, char *text, size_t size) {
    return moer_softmax_topk_backward_explain(&call->args.softmax, text, size);
}

static enum moer_status sigmoid_run(const struct call *call) {
    return moer_sigmoid_topk_backward(&call->args.sigmoid);
}

static enum moer_status sigmoid_workspace_size(const struct call *call, size_t *bytes) {
    return moer_sigmoid_topk_backward_workspace_size(&call->args.sigmoid, bytes);
}

static enum moer_status sigmoid_explain(const struct call *call, char *text, size_t size) {
    return moer_sigmoid_topk_backward_explain(&call->args.sigmoid, text, size);
}

static const struct {
    size_t size; /* of the args struct */
    enum moer_status (*run)(const struct call *call);
    enum moer_status (*workspace_size)(const struct call *call, size_t *bytes);
    enum moer_status (*explain)(const struct call *call, char *text, size_t size);
} functions[MOER_OPERATIONS] = {
    [MOER_SOFTMAX_TOPK_BACKWARD] = {sizeof(struct moer_softmax_topk_backward_args), softmax_run, softmax_workspace_size,
                                    softmax_explain},
    [MOER_SIGMOID_TOPK_BACKWARD] = {sizeof(struct moer_sigmoid_topk_backward_args), sigmoid_run, sigmoid_workspace_size,
                                    sigmoid_explain},
};

void call_init(struct call *call, enum moer_operation operation) {
    memset(call, 0, sizeof *call);
    call->operation = operation;
    call->args.common.size = functions[operation].size;
}

enum moer_status call_run(const struct call *call) {
    return functions[call->operation].run(call);
}

enum moer_status call_workspace_size(const struct call *call, size_t *bytes) {
    return functions[call->operation].workspace_size(call, bytes);
}

enum moer_status call_explain(const struct call *call, char *text, size_t size) {
    return functions[call->operation].explain(call, text, size);
}

enum moer_operation call_find_operation(const char *name) {
    int operation = 0;
    while (operation < MOER_OPERATIONS && strcmp(moer_operation_name((enum moer_operation)operation), name) != 0)
        operation++;
    return (enum moer_operation)operation;
}

const DLTensor **call_field(struct call *call, const struct moer_operand *operand) {
    return (const DLTensor **)((char *)&call->args + operand->offset);
}

/* The same for a call that is only read. */
static const DLTensor *operand_tensor(const struct call *call, const struct moer_operand *operand) {
    return *(const DLTensor *const *)((const char *)&call->args + operand->offset);
}

static const struct moer_operand *find_operand(enum moer_operation operation, const char *name) {
    size_t count;
    const struct moer_operand *operands = moer_operands(operation, &count);
    for (size_t i = 0; i < count; i++)
        if (strcmp(operands[i].name, name) == 0)
            return &operands[i];
    return NULL;
}

const DLTensor *call_tensor(const struct call *call, const char *name) {
    const struct moer_operand *operand = find_operand(call->operation, name);
    return operand ? operand_tensor(call, operand) : NULL;
}

int call_set(struct call *call, const char *name, const DLTensor *tensor) {
    const struct moer_operand *operand = find_operand(call->operation, name);
    if (operand)
        *call_field(call, operand) = tensor;
    return operand != NULL;
}

/* The member of dims that an axis letter stands for. */
static int64_t *axis_size(struct dims *dims, char axis) {
    switch (axis) {
    case 'N':
        return &dims->tokens;
    case 'H':
        return &dims->hidden;
    case 'E':
        return &dims->experts;
    case 'K':
        return &dims->top_k;
    default:
        return NULL;
    }
}

struct dims call_dims(const struct call *call) {
    struct dims dims = {0};
    size_t count;
    const struct moer_operand *operands = moer_operands(call->operation, &count);
    for (size_t i = count; i-- > 0;) { /* backwards: where tensors disagree, the first one counts */
        const DLTensor *tensor = operand_tensor(call, &operands[i]);
        if (!tensor || tensor->ndim != (int)strlen(operands[i].axes))
            continue;
        for (int axis = 0; axis < tensor->ndim; axis++) {
            int64_t *size = axis_size(&dims, operands[i].axes[axis]);
            if (size)
                *size = tensor->shape[axis];
        }
    }
    return dims;
}

int call_shape(const struct moer_operand *operand, struct dims dims, int64_t shape[4]) {
    int ndim = 0;
    for (const char *axis = operand->axes; *axis; axis++) {
        const int64_t *size = axis_size(&dims, *axis);
        shape[ndim++] = size ? *size : 1;
    }
    return ndim;
}

void call_free(struct call *call) {
    size_t count;
    const struct moer_operand *operands = moer_operands(call->operation, &count);
    for (size_t i = 0; i < count; i++) {
        const DLTensor **field = call_field(call, &operands[i]);
        moer_tensor_free((DLTensor *)*field);
        *field = NULL;
    }
}

/* ---- dtypes ----------------------------------------------------------------------------------------------------- */

static const struct {
    const char *name;
    DLDataType dtype;
} dtypes[] = {
    {"bfloat16", {kDLBfloat, 16, 1}}, {"float16", {kDLFloat, 16, 1}}, {"float32", {kDLFloat, 32, 1}},
    {"float64", {kDLFloat, 64, 1}},   {"int32", {kDLInt, 32, 1}},     {"int64", {kDLInt, 64, 1}},
};

enum { DTYPES = sizeof dtypes / sizeof dtypes[0] };

const char *dtype_name(DLDataType dtype) {
    for (int i = 0; i < DTYPES; i++)
        if (dtypes[i].dtype.code == dtype.code && dtypes[i].dtype.bits == dtype.bits && dtype.lanes == 1)
            return dtypes[i].name;
    return "another dtype";
}

int dtype_parse(const char *name, DLDataType *dtype) {
    for (int i = 0; i < DTYPES; i++)
        if (strcmp(dtypes[i].name, name) == 0) {
            *dtype = dtypes[i].dtype;
            return 1;
        }
    return 0;
}

size_t dtype_size(DLDataType dtype) {
    return (size_t)dtype.bits * dtype.lanes / 8;
}

/* ---- Elements --------------------------------------------------------------------------------------------------- */

/* A binary format of 16 bits: a sign, so many bits of exponent, so many of fraction. */
struct format {
    int exponent_bits, fraction_bits;
};

static struct format format_of(DLDataType dtype) {
    return dtype.code == kDLBfloat ? (struct format){8, 7} : (struct format){5, 10};
}

static double decode(uint16_t bits, struct format format) {
    const int bias = (1 << (format.exponent_bits - 1)) - 1, last = 2 * bias + 1;
    const int exponent = (bits >> format.fraction_bits) & last;
    const uint64_t fraction = bits & ((1u << format.fraction_bits) - 1);
    /* A double with the same fields, rebiased. Subnormals: the same without the leading one, taken off as a number. */
    const uint64_t rebiased = exponent == last ? 2047 : (uint64_t)((exponent ? exponent : 1) - bias + 1023);
    const uint64_t wide = rebiased << 52 | fraction << (52 - format.fraction_bits), lead = rebiased << 52;
    double value, one;
    memcpy(&value, &wide, sizeof value);
    memcpy(&one, &lead, sizeof one);
    if (exponent == 0)
        value -= one;
    return bits & 0x8000 ? -value : value;
}

/* Straight from the double, so that it is rounded once. */
static uint16_t encode(double value, struct format format) {
    const int bias = (1 << (format.exponent_bits - 1)) - 1;
    const uint64_t infinity = (uint64_t)(2 * bias + 1) << format.fraction_bits;
    uint64_t wide;
    memcpy(&wide, &value, sizeof wide);
    const uint16_t sign = (uint16_t)(wide >> 63 << 15);
    if (value != value)
        return (uint16_t)(sign | infinity | 1u << (format.fraction_bits - 1));
    int exponent = (int)(wide >> 52 & 2047) - 1023 + bias, shift = 52 - format.fraction_bits;
    if (exponent < 1) { /* subnormal: fewer bits are kept; 54 already leaves none and rounds to zero */
        shift = 1 - exponent < 54 - shift ? shift + 1 - exponent : 54;
        exponent = 1;
    }
    const uint64_t significand = (wide & (UINT64_MAX >> 12)) | UINT64_C(1) << 52;
    const uint64_t kept = significand >> shift, half = UINT64_C(1) << (shift - 1), rest = significand & (2 * half - 1);
    const uint64_t up = rest > half || (rest == half && (kept & 1));
    /* kept has the leading one, which adds itself to the exponent, and so does a carry out of the fraction. */
    const uint64_t bits = ((uint64_t)(exponent - 1) << format.fraction_bits) + kept + up;
    return (uint16_t)(sign | (bits < infinity ? bits : infinity));
}

double round_to(DLDataType dtype, double value) {
    if (dtype.bits == 16)
        return decode(encode(value, format_of(dtype)), format_of(dtype));
    return dtype.bits == 32 ? (double)(float)value : value;
}

/* The bytes of an element. */
static void *element(const DLTensor *tensor, int64_t i, int64_t j, int64_t k) {
    const int64_t index[3] = {i, j, k};
    int64_t offset = 0, compact = 1;
    for (int axis = tensor->ndim - 1; axis >= 0; axis--) {
        offset += index[axis] * (tensor->strides ? tensor->strides[axis] : compact);
        compact *= tensor->shape[axis];
    }
    return (char *)tensor->data + tensor->byte_offset + offset * (int64_t)dtype_size(tensor->dtype);
}

double get_element(const DLTensor *tensor, int64_t i, int64_t j, int64_t k) {
    const void *at = element(tensor, i, j, k);
    const int integer = tensor->dtype.code == kDLInt;
    switch (tensor->dtype.bits) {
    case 16:
        return decode(*(const uint16_t *)at, format_of(tensor->dtype));
    case 32:
        return integer ? (double)*(const int32_t *)at : (double)*(const float *)at;
    default:
        return integer ? (double)*(const int64_t *)at : *(const double *)at;
    }
}

void set_element(const DLTensor *tensor, int64_t i, int64_t j, int64_t k, double value) {
    const DLTensor one = {.data = element(tensor, i, j, k), .dtype = tensor->dtype};
    set_elements(&one, 0, 1, &value);
}

void set_elements(const DLTensor *tensor, int64_t first, int64_t count, const double *values) {
    char *data = (char *)tensor->data + tensor->byte_offset;
    const struct format format = format_of(tensor->dtype);
    const int integer = tensor->dtype.code == kDLInt;
    for (int64_t i = 0; i < count; i++)
        switch (tensor->dtype.bits) {
        case 16:
            ((uint16_t *)data)[first + i] = encode(values[i], format);
            break;
        case 32:
            if (integer)
                ((int32_t *)data)[first + i] = (int32_t)values[i];
            else
                ((float *)data)[first + i] = (float)values[i];
            break;
        default:
            if (integer)
                ((int64_t *)data)[first + i] = (int64_t)values[i];
            else
                ((double *)data)[first + i] = values[i];
        }
}
