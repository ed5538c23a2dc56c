/* SPDX-License-Identifier: Apache-2.0 */
/* Tensors on any backend's device. */
#include "internal.h"
#include <stdlib.h>
#include <string.h>

/* Bytes of a compact tensor; 0 and a message where there is no such tensor. */
static enum moer_status compact_size(int32_t ndim, const int64_t *shape, DLDataType dtype, size_t *bytes,
                                     struct moer_message *message) {
    *bytes = dtype.bits / 8 * dtype.lanes;
    if (dtype.bits % 8 || *bytes == 0)
        return moer_fail(message, MOER_INVALID, "dtype has %d bits and %d lanes but must be whole bytes", dtype.bits,
                         dtype.lanes);
    if (ndim < 0 || (ndim > 0 && !shape))
        return moer_fail(message, MOER_INVALID, "ndim is %d and shape is %s", ndim, shape ? "given" : "NULL");
    for (int32_t axis = 0; axis < ndim; axis++)
        if (shape[axis] < 0 || __builtin_mul_overflow(*bytes, (size_t)shape[axis], bytes) || *bytes > PTRDIFF_MAX)
            return moer_fail(message, MOER_INVALID, "shape[%d] is %lld, which no tensor can have", axis,
                             (long long)shape[axis]);
    return MOER_OK;
}

enum moer_status moer_tensor_new(DLTensor **result, DLDevice device, DLDataType dtype, int32_t ndim,
                                 const int64_t *shape) {
    struct moer_message message;
    size_t bytes = 0;
    if (!result)
        return moer_report(__func__, moer_fail(&message, MOER_INVALID, "tensor is NULL"), &message);
    *result = NULL;
    enum moer_status status = compact_size(ndim, shape, dtype, &bytes, &message);
    const struct moer_backend *backend = status ? NULL : moer_find_backend(device, &status, &message);
    if (!backend)
        return moer_report(__func__, status, &message);

    /* The shape lies behind the struct. */
    DLTensor *tensor = calloc(1, sizeof *tensor + (size_t)ndim * sizeof *shape);
    if (!tensor)
        return moer_report(__func__, moer_fail(&message, MOER_NO_MEMORY, "no memory for a DLTensor"), &message);
    *tensor = (DLTensor){.device = device, .ndim = ndim, .dtype = dtype, .shape = (int64_t *)(tensor + 1)};
    if (ndim > 0)
        memcpy(tensor->shape, shape, (size_t)ndim * sizeof *shape);
    if (bytes > 0)
        status = backend->allocate(device, bytes, &tensor->data, &message);
    if (status)
        free(tensor);
    else
        *result = tensor;
    return moer_report(__func__, status, &message);
}

void moer_tensor_free(DLTensor *tensor) {
    struct moer_message message;
    enum moer_status status;
    const struct moer_backend *backend = tensor ? moer_find_backend(tensor->device, &status, &message) : NULL;
    if (backend && tensor->data)
        backend->release(tensor->device, tensor->data);
    free(tensor);
}

static int is_compact(const DLTensor *tensor) {
    int64_t width = 1;
    for (int32_t axis = tensor->ndim - 1; axis >= 0; axis--) {
        if (tensor->shape[axis] > 1 && moer_stride(tensor, axis) != width)
            return 0;
        width *= tensor->shape[axis];
    }
    return 1;
}

static enum moer_status check_copy(const DLTensor *to, const DLTensor *from, size_t *bytes,
                                   struct moer_message *message) {
    if (!to || !from)
        return moer_fail(message, MOER_INVALID, "%s is NULL", to ? "from" : "to");
    if (!moer_same_dtype(to->dtype, from->dtype))
        return moer_fail(message, MOER_INVALID, "the dtypes differ");
    if (to->ndim != from->ndim)
        return moer_fail(message, MOER_INVALID, "to.ndim is %d but from.ndim is %d", to->ndim, from->ndim);
    enum moer_status status = compact_size(to->ndim, to->shape, to->dtype, bytes, message);
    if (!status)
        status = compact_size(from->ndim, from->shape, from->dtype, bytes, message);
    for (int32_t axis = 0; axis < to->ndim && !status; axis++)
        if (to->shape[axis] != from->shape[axis])
            status = moer_fail(message, MOER_INVALID, "to.shape[%d] is %lld but from.shape[%d] is %lld", axis,
                               (long long)to->shape[axis], axis, (long long)from->shape[axis]);
    if (!status && *bytes > 0 && (!is_compact(to) || !is_compact(from)))
        status = moer_fail(message, MOER_INVALID, "%s is not compact", is_compact(to) ? "from" : "to");
    if (!status && *bytes > 0 && (!to->data || !from->data))
        status = moer_fail(message, MOER_INVALID, "%s.data is NULL", to->data ? "from" : "to");
    return status;
}

enum moer_status moer_tensor_copy(const DLTensor *to, const DLTensor *from) {
    struct moer_message message;
    size_t bytes = 0;
    enum moer_status status = check_copy(to, from, &bytes, &message);
    if (status || bytes == 0)
        return moer_report(__func__, status, &message);
    /* A device's backend can reach the host; the host's cannot reach a device. */
    int on_host = from->device.device_type == kDLCPU || from->device.device_type == kDLCUDAHost;
    const struct moer_backend *backend = moer_find_backend(on_host ? to->device : from->device, &status, &message);
    if (backend)
        status = backend->copy(moer_data(to), to->device, moer_data(from), from->device, bytes, &message);
    return moer_report(__func__, status, &message);
}
