/* SPDX-License-Identifier: Apache-2.0 */
#include "device.h"

enum moer_status device_place(const struct call *host, DLDevice device, struct call *placed) {
    size_t count;
    const struct moer_operand *operands = moer_operands(host->operation, &count);
    enum moer_status status = MOER_OK;
    *placed = *host;
    for (size_t i = 0; i < count && status == MOER_OK && device.device_type != kDLCPU; i++) {
        const DLTensor **field = call_field(placed, &operands[i]), *from = *field;
        DLTensor *to;
        if (!from)
            continue;
        status = moer_tensor_new(&to, device, from->dtype, from->ndim, from->shape);
        *field = to;
        if (status == MOER_OK)
            status = moer_tensor_copy(to, from);
    }
    return status;
}

enum moer_status device_fetch(const struct call *host, const struct call *placed, enum moer_kind kind) {
    size_t count;
    const struct moer_operand *operands = moer_operands(host->operation, &count);
    enum moer_status status = MOER_OK;
    for (size_t i = 0; i < count && status == MOER_OK; i++) {
        const DLTensor *to = call_tensor(host, operands[i].name), *from = call_tensor(placed, operands[i].name);
        if (operands[i].kind == kind && to != from)
            status = moer_tensor_copy(to, from);
    }
    return status;
}

void device_release(const struct call *host, struct call *placed) {
    size_t count;
    const struct moer_operand *operands = moer_operands(host->operation, &count);
    for (size_t i = 0; i < count; i++) {
        const DLTensor **field = call_field(placed, &operands[i]);
        if (*field != call_tensor(host, operands[i].name))
            moer_tensor_free((DLTensor *)*field);
        *field = NULL;
    }
}
