/* SPDX-License-Identifier: Apache-2.0 */
/* Reading a DLTensor: inline, so that a backend may use it without calling the library. */
#ifndef MOER_TENSOR_H
#define MOER_TENSOR_H

#include <stddef.h>
#include <stdint.h>
#include <moerouter/moerouter.h>

static inline int moer_is_dtype(DLDataType dtype, int code, int bits) {
    return dtype.code == code && dtype.bits == bits && dtype.lanes == 1;
}

static inline int moer_same_dtype(DLDataType a, DLDataType b) {
    return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes;
}

/* Bytes of an element; legal dtypes are whole bytes wide. */
static inline int64_t moer_element_size(const DLTensor *tensor) {
    return tensor->dtype.bits / 8;
}

static inline int moer_has_elements(const DLTensor *tensor) {
    for (int32_t axis = 0; axis < tensor->ndim; axis++)
        if (tensor->shape[axis] == 0)
            return 0;
    return 1;
}

/* Distance of neighbours along an axis, in elements; 0 where there are none, for then the stride may be any number. */
static inline int64_t moer_stride(const DLTensor *tensor, int32_t axis) {
    if (tensor->shape[axis] <= 1 || !moer_has_elements(tensor))
        return 0;
    if (tensor->strides)
        return tensor->strides[axis];
    int64_t stride = 1;
    for (int32_t inner = axis + 1; inner < tensor->ndim; inner++)
        stride *= tensor->shape[inner];
    return stride;
}

/* The first element; NULL for a tensor that is absent or has no data. Where there is no element, and in a query, the
 * sum may be any address. */
static inline void *moer_data(const DLTensor *tensor) {
    return tensor && tensor->data ? (void *)((uintptr_t)tensor->data + (uintptr_t)tensor->byte_offset) : NULL;
}

#endif
