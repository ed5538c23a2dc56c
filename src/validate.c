/* SPDX-License-Identifier: Apache-2.0 */
/* Every rule that a call must keep before a backend sees it, for all operations: the rules are read off the table of
 * operands, one sentence each, and name the tensor, the rule and the value. */
#include "internal.h"
#include <string.h>

/* No tensor has more elements, no axis is longer: sizes in bytes, and sums of a few, stay far from 2^63. */
static const int64_t LARGEST = INT64_C(1) << 56;
/* A newer header may have more fields than this one, but not this many. */
enum { MOST_UNKNOWN_BYTES = 4096 };

/* First and last byte of a tensor or of the workspace. */
struct range {
    const char *name;
    uintptr_t first, last;
    int output;
};

struct check {
    enum moer_scope scope;
    struct moer_message *message;
    /* The first tensor that has an axis of this letter, which axis it is, and how long. */
    struct {
        const char *owner;
        int32_t axis;
        int64_t size;
    } axes['Z' + 1];
    /* The first tensor of dtype T, and the first tensor of all. */
    const char *dtype_owner, *device_owner;
    DLDataType dtype;
    DLDevice device;
    struct range ranges[16];
    size_t range_count;
};

#define REFUSE(...) return moer_fail(check->message, MOER_INVALID, __VA_ARGS__)

static const char *dtype_text(DLDataType dtype, char text[40]) {
    static const char *const codes[] = {"int", "uint", "float", "handle", "bfloat", "complex"};
    if (dtype.code < sizeof codes / sizeof *codes && dtype.lanes == 1)
        snprintf(text, 40, "%s%d", codes[dtype.code], dtype.bits);
    else
        snprintf(text, 40, "code %d, %d bits, %d lanes", dtype.code, dtype.bits, dtype.lanes);
    return text;
}

static const char *device_text(DLDevice device, char text[40]) {
    switch ((int)device.device_type) {
    case kDLCPU:
    case kDLCUDAHost:
        snprintf(text, 40, "the CPU");
        break;
    case kDLCUDA:
    case kDLCUDAManaged:
        snprintf(text, 40, "cuda:%d", device.device_id);
        break;
    default:
        snprintf(text, 40, "DLPack device type %d", (int)device.device_type);
    }
    return text;
}

/* Pinned host memory is as good as host memory, managed memory as good as the device's. */
static DLDevice plain_device(DLDevice device) {
    if (device.device_type == kDLCUDAHost)
        device.device_type = kDLCPU;
    if (device.device_type == kDLCUDAManaged)
        device.device_type = kDLCUDA;
    if (device.device_type == kDLCPU)
        device.device_id = 0;
    return device;
}

static enum moer_status check_shape(struct check *check, const struct moer_operand *operand, const DLTensor *tensor) {
    int32_t ndim = (int32_t)strlen(operand->axes);
    if (tensor->ndim != ndim)
        REFUSE("%s.ndim is %d but must be %d", operand->name, tensor->ndim, ndim);
    if (!tensor->shape)
        REFUSE("%s.shape is NULL", operand->name);
    int64_t elements = 1;
    for (int32_t axis = 0; axis < ndim; axis++) {
        int64_t size = tensor->shape[axis];
        if (size < 0)
            REFUSE("%s.shape[%d] is %lld but must not be negative", operand->name, axis, (long long)size);
        if (size > LARGEST || (size > 0 && __builtin_mul_overflow(elements, size, &elements)) || elements > LARGEST)
            REFUSE("%s.shape[%d] is %lld, which makes the tensor larger than 2^56 elements", operand->name, axis,
                   (long long)size);
    }
    for (int32_t axis = 0; axis < ndim; axis++) {
        int64_t size = tensor->shape[axis];
        unsigned char letter = (unsigned char)operand->axes[axis];
        if (letter == '1') {
            if (size != 1)
                REFUSE("%s.shape[%d] is %lld but must be 1", operand->name, axis, (long long)size);
        } else if (!check->axes[letter].owner) {
            check->axes[letter].owner = operand->name;
            check->axes[letter].axis = axis;
            check->axes[letter].size = size;
        } else if (size != check->axes[letter].size) {
            REFUSE("%s.shape[%d] is %lld but %s.shape[%d] is %lld", operand->name, axis, (long long)size,
                   check->axes[letter].owner, check->axes[letter].axis, (long long)check->axes[letter].size);
        }
    }
    return MOER_OK;
}

static enum moer_status check_dtype(struct check *check, const struct moer_operand *operand, const DLTensor *tensor) {
    char is[40], other[40];
    DLDataType dtype = tensor->dtype;
    int float32 = moer_is_dtype(dtype, kDLFloat, 32);
    dtype_text(dtype, is);
    switch (operand->kind) {
    case MOER_DTYPE_T:
        if (!float32 && !moer_is_dtype(dtype, kDLFloat, 16) && !moer_is_dtype(dtype, kDLBfloat, 16))
            REFUSE("%s.dtype is %s but must be bfloat16, float16 or float32", operand->name, is);
        if (!check->dtype_owner) {
            check->dtype_owner = operand->name;
            check->dtype = dtype;
        } else if (!moer_same_dtype(dtype, check->dtype)) {
            REFUSE("%s.dtype is %s but %s.dtype is %s", operand->name, is, check->dtype_owner,
                   dtype_text(check->dtype, other));
        }
        break;
    case MOER_DTYPE_OUTPUT:
        if (!float32 && !moer_same_dtype(dtype, check->dtype))
            REFUSE("%s.dtype is %s but must be %s, as %s.dtype is, or float32", operand->name, is,
                   dtype_text(check->dtype, other), check->dtype_owner);
        break;
    case MOER_DTYPE_FLOAT:
        if (!float32)
            REFUSE("%s.dtype is %s but must be float32", operand->name, is);
        break;
    case MOER_DTYPE_ID:
        if (!moer_is_dtype(dtype, kDLInt, 32) && !moer_is_dtype(dtype, kDLInt, 64))
            REFUSE("%s.dtype is %s but must be int32 or int64", operand->name, is);
        break;
    case MOER_DTYPE_COUNT:
        if (!moer_is_dtype(dtype, kDLInt, 32))
            REFUSE("%s.dtype is %s but must be int32", operand->name, is);
        break;
    }
    return MOER_OK;
}

static enum moer_status check_device(struct check *check, const struct moer_operand *operand, const DLTensor *tensor) {
    char is[40], other[40];
    DLDevice device = plain_device(tensor->device);
    if (!check->device_owner) {
        check->device_owner = operand->name;
        check->device = device;
    } else if (device.device_type != check->device.device_type || device.device_id != check->device.device_id) {
        REFUSE("%s is on %s but %s is on %s", operand->name, device_text(device, is), check->device_owner,
               device_text(check->device, other));
    }
    return MOER_OK;
}

/* The last axis is contiguous, and an outer one at least as wide as what it holds. */
static enum moer_status check_strides(struct check *check, const struct moer_operand *operand, const DLTensor *tensor) {
    int64_t width = 1;
    for (int32_t axis = tensor->ndim - 1; axis >= 0; axis--) {
        int64_t stride = moer_stride(tensor, axis);
        if (tensor->shape[axis] <= 1)
            continue;
        if (axis == tensor->ndim - 1 && stride != 1)
            REFUSE("%s.strides[%d] is %lld but the last axis must be contiguous", operand->name, axis,
                   (long long)stride);
        if (stride < width)
            REFUSE("%s.strides[%d] is %lld but a row is %lld elements wide", operand->name, axis, (long long)stride,
                   (long long)width);
        if (__builtin_mul_overflow(stride, tensor->shape[axis], &width))
            REFUSE("%s.strides[%d] is %lld, which spans more than the address space", operand->name, axis,
                   (long long)stride);
    }
    return MOER_OK;
}

/* Where the tensor's bytes lie; data must be there and aligned to an element. */
static enum moer_status check_data(struct check *check, const struct moer_operand *operand, const DLTensor *tensor) {
    int64_t size = moer_element_size(tensor), lowest = 0, highest = 0;
    int wraps = 0;
    for (int32_t axis = 0; axis < tensor->ndim; axis++) {
        int64_t span, stride = tensor->shape[axis] > 1 ? moer_stride(tensor, axis) : 0;
        wraps |= __builtin_mul_overflow(tensor->shape[axis] - 1, stride, &span);
        wraps |= __builtin_mul_overflow(span, size, &span);
        wraps |= __builtin_add_overflow(span < 0 ? lowest : highest, span, span < 0 ? &lowest : &highest);
    }
    if (wraps)
        REFUSE("%s: its strides span more than the address space", operand->name);
    if (check->scope == MOER_SHAPES)
        return MOER_OK;
    uintptr_t first, last, start;
    if (!tensor->data)
        REFUSE("%s.data is NULL but the tensor has elements", operand->name);
    wraps |= __builtin_add_overflow((uintptr_t)tensor->data, tensor->byte_offset, &start);
    wraps |= __builtin_sub_overflow(start, -(uint64_t)lowest, &first);
    wraps |= __builtin_add_overflow(start, (uint64_t)highest + (uint64_t)size - 1, &last);
    if (wraps)
        REFUSE("%s: data, byte_offset and strides reach past the address space", operand->name);
    if (start % (uintptr_t)size)
        REFUSE("%s: data + byte_offset is %#zx but must be a multiple of the element's %d bytes", operand->name,
               (size_t)start, (int)size);
    int output = operand->kind == MOER_DTYPE_OUTPUT || operand->kind == MOER_DTYPE_COUNT;
    check->ranges[check->range_count++] = (struct range){operand->name, first, last, output};
    return MOER_OK;
}

static enum moer_status check_tensor(struct check *check, const struct moer_operand *operand, const DLTensor *tensor) {
    enum moer_status status = check_shape(check, operand, tensor);
    if (!status)
        status = check_dtype(check, operand, tensor);
    if (!status)
        status = check_device(check, operand, tensor);
    if (status || !moer_has_elements(tensor))
        return status;
    if (!operand->any_strides)
        status = check_strides(check, operand, tensor);
    return status ? status : check_data(check, operand, tensor);
}

static enum moer_status check_overlap(struct check *check) {
    for (size_t i = 0; i < check->range_count; i++)
        for (size_t j = 0; j < check->range_count; j++) {
            const struct range *a = &check->ranges[i], *b = &check->ranges[j];
            if (i != j && a->output && a->first <= b->last && b->first <= a->last)
                REFUSE("%s overlaps %s in memory", a->name, b->name);
        }
    return MOER_OK;
}

static enum moer_status check_workspace(struct check *check, const struct moer_common_args *args) {
    uintptr_t first = (uintptr_t)args->workspace, last;
    if (!args->workspace)
        return MOER_OK;
    if (first % 256)
        REFUSE("workspace is %#zx but must be aligned to 256 bytes", (size_t)first);
    if (args->workspace_size == 0)
        return MOER_OK;
    if (__builtin_add_overflow(first, args->workspace_size - 1, &last))
        REFUSE("workspace_size is %zu, which reaches past the address space", args->workspace_size);
    check->ranges[check->range_count++] = (struct range){"workspace", first, last, 1};
    return MOER_OK;
}

/* Callers may be older (a smaller struct) or newer (a larger one, whose new fields must be unset). */
static enum moer_status copy_args(struct check *check, const struct moer_operation_info *info, const void *caller,
                                  union moer_args *args) {
    if (!caller)
        REFUSE("args is NULL");
    size_t size;
    memcpy(&size, caller, sizeof size);
    /* No struct of pointers has another size; half a pointer must not be taken for one. */
    if (size < sizeof size || size % sizeof size || size > info->args_size + MOST_UNKNOWN_BYTES)
        REFUSE("args->size is %zu; set it to sizeof *args, here %zu", size, info->args_size);
    for (size_t byte = info->args_size; byte < size; byte++)
        if (((const unsigned char *)caller)[byte])
            return moer_fail(check->message, MOER_UNSUPPORTED,
                             "args->size is %zu and a field past the %zu bytes that this library knows is set", size,
                             info->args_size);
    memset(args, 0, sizeof *args);
    memcpy(args, caller, size < info->args_size ? size : info->args_size);
    args->common.size = info->args_size;
    return MOER_OK;
}

const DLTensor *moer_operand_tensor(const union moer_args *args, const struct moer_operand *operand) {
    const DLTensor *tensor;
    memcpy(&tensor, (const char *)args + operand->offset, sizeof tensor);
    return tensor;
}

DLDevice moer_args_device(enum moer_operation operation, const union moer_args *args) {
    const struct moer_operation_info *info = &moer_operation_table[operation];
    for (size_t i = 0; i < info->operand_count; i++) {
        const DLTensor *tensor = moer_operand_tensor(args, &info->operands[i]);
        if (tensor)
            return tensor->device;
    }
    return (DLDevice){kDLCPU, 0};
}

enum moer_status moer_validate(enum moer_operation operation, const void *caller, enum moer_scope scope,
                               union moer_args *args, struct moer_message *message) {
    const struct moer_operation_info *info = &moer_operation_table[operation];
    struct check state = {.scope = scope, .message = message}, *check = &state;
    enum moer_status status = copy_args(check, info, caller, args);
    for (size_t i = 0; i < info->operand_count && !status; i++) {
        const struct moer_operand *operand = &info->operands[i];
        const DLTensor *tensor = moer_operand_tensor(args, operand);
        if (tensor)
            status = check_tensor(check, operand, tensor);
        else if (operand->required)
            REFUSE("%s is NULL but is required", operand->name);
    }
    if (!status && scope == MOER_ALL)
        status = check_workspace(check, &args->common);
    return status ? status : check_overlap(check);
}
