/* SPDX-License-Identifier: Apache-2.0 */
/* The tensors of a call several times over, so that calls in turn find theirs at other addresses. A copy is one
 * allocation; its tensors begin on multiples of 256 bytes, and the first of them 256 bytes later than that of the copy
 * before, or else the allocator's own alignment would give all copies the same low bits. */
#include "cuda.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "command.h"

enum { ALIGNMENT = 256, LEAST_COPIES = 2 };

static const char *const hidden_gradient = "grad_hidden_states";

static size_t tensor_bytes(const DLTensor *tensor) {
    size_t bytes = dtype_size(tensor->dtype);
    for (int axis = 0; axis < tensor->ndim; axis++)
        bytes *= (size_t)tensor->shape[axis];
    return bytes;
}

static size_t padded(size_t bytes) {
    return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

static size_t logits_bytes(struct dims dims) {
    return (size_t)(dims.tokens * dims.experts) * 2;
}

/* The tensor that has one name in one operation and another in the other. */
static const DLTensor *either(const struct call *call, const char *name, const char *other) {
    const DLTensor *tensor = call_tensor(call, name);
    return tensor ? tensor : call_tensor(call, other);
}

static const DLTensor *weight_gradient(const struct call *call) {
    return either(call, "grad_gate_weight", "grad_weight");
}

/* ---- Making copies ---------------------------------------------------------------------------------------------- */

/* How many bytes a copy takes at most. */
static size_t copy_bytes(const struct call *placed) {
    size_t count, bytes = padded(logits_bytes(call_dims(placed))) + CUDA_MOST_COPIES * ALIGNMENT;
    const struct moer_operand *operands = moer_operands(placed->operation, &count);
    for (size_t i = 0; i < count; i++) {
        const DLTensor *tensor = call_tensor(placed, operands[i].name);
        bytes += tensor ? padded(tensor_bytes(tensor)) : 0;
    }
    return bytes;
}

static int make_copy(struct ring_copy *copy, const struct call *placed, size_t bytes, size_t offset) {
    size_t count;
    const struct moer_operand *operands = moer_operands(placed->operation, &count);
    if (cuda_failed(cudaMalloc(&copy->memory, bytes), "cudaMalloc of a copy of the tensors"))
        return EXIT_TROUBLE;
    char *next = (char *)copy->memory + offset;
    copy->call = *placed;
    for (size_t i = 0; i < count; i++) {
        const DLTensor *from = call_tensor(placed, operands[i].name);
        if (!from)
            continue;
        copy->tensors[i] = *from;
        copy->tensors[i].data = next;
        copy->tensors[i].byte_offset = 0;
        *call_field(&copy->call, &operands[i]) = &copy->tensors[i];
        if (cuda_failed(
                cudaMemcpy(next, (char *)from->data + from->byte_offset, tensor_bytes(from), cudaMemcpyDeviceToDevice),
                "cudaMemcpy"))
            return EXIT_TROUBLE;
        next += padded(tensor_bytes(from));
    }
    copy->logits = next;
    copy->hidden_states = call_tensor(&copy->call, "hidden_states")->data;
    copy->weight = either(&copy->call, "gate_weight", "weight")->data;
    copy->grad_hidden_states = call_tensor(&copy->call, hidden_gradient)->data;
    copy->grad_weight = weight_gradient(&copy->call)->data;
    return 0;
}

/* G of every copy, from a call that is asked for it. That call takes a workspace of its own: it may need another. */
static int make_logits(struct ring *ring) {
    struct call call = ring->copies[0].call;
    int64_t shape[2] = {ring->dims.tokens, ring->dims.experts};
    const DLTensor logits = {.data = ring->copies[0].logits,
                             .device = call_tensor(&call, hidden_gradient)->device,
                             .ndim = 2,
                             .dtype = {kDLBfloat, 16, 1},
                             .shape = shape};
    call_set(&call, "grad_logits", &logits);
    call.args.common.workspace = NULL;
    call.args.common.workspace_size = 0;
    const enum moer_status status = call_run(&call);
    if (status != MOER_OK)
        return complain("%s", library_error(status));
    int result = cuda_failed(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    for (int i = 1; i < ring->count && result == 0; i++)
        result = cuda_failed(
            cudaMemcpy(ring->copies[i].logits, logits.data, logits_bytes(ring->dims), cudaMemcpyDeviceToDevice),
            "cudaMemcpy");
    return result;
}

int ring_make(struct ring *ring, const struct call *placed) {
    const size_t bytes = copy_bytes(placed);
    size_t free_bytes = 0, total_bytes = 0;
    *ring = (struct ring){.dims = call_dims(placed)};
    if (cuda_failed(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo"))
        return EXIT_TROUBLE;
    const size_t room = free_bytes / 4 * 3 / bytes; /* a quarter is left for others */
    if (room < LEAST_COPIES)
        return complain("the device has no memory for %d copies of %zu bytes", LEAST_COPIES, bytes);
    ring->count = room < CUDA_MOST_COPIES ? (int)room : CUDA_MOST_COPIES;
    int result = 0;
    for (int i = 0; i < ring->count && result == 0; i++)
        result = make_copy(&ring->copies[i], placed, bytes, (size_t)i * ALIGNMENT);
    return result == 0 ? make_logits(ring) : result;
}

void ring_free(struct ring *ring) {
    for (int i = 0; i < ring->count; i++)
        cudaFree(ring->copies[i].memory);
}

/* ---- Judging copies --------------------------------------------------------------------------------------------- */

int ring_spoil(const struct ring *ring) {
    for (int i = 0; i < ring->count; i++) {
        const DLTensor *weight = weight_gradient(&ring->copies[i].call);
        const DLTensor *hidden = call_tensor(&ring->copies[i].call, hidden_gradient);
        if (cuda_failed(cudaMemset(weight->data, 0xff, tensor_bytes(weight)), "cudaMemset") ||
            cuda_failed(cudaMemset(hidden->data, 0xff, tensor_bytes(hidden)), "cudaMemset"))
            return EXIT_TROUBLE;
    }
    return cuda_failed(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

static double widen(uint16_t bfloat16) {
    const uint32_t bits = (uint32_t)bfloat16 << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The first element of a row that is not near the expected one, or columns. Near: both are rounded to 8 bits, and sums
 * of float32 in two orders differ by far less than 2^-7 of the row's root mean square; an operand in a wrong layout
 * moves elements by all of it. */
static int64_t find_far(const uint16_t *row, const uint16_t *expected, int64_t columns) {
    double squares = 0;
    for (int64_t j = 0; j < columns; j++)
        squares += widen(expected[j]) * widen(expected[j]);
    const double slack = sqrt(squares / (double)columns);
    for (int64_t j = 0; j < columns; j++)
        if (!(fabs(widen(row[j]) - widen(expected[j])) <= 0x1p-7 * (fabs(widen(expected[j])) + slack)))
            return j;
    return columns;
}

static int64_t find_different(const uint16_t *row, const uint16_t *expected, int64_t columns) {
    int64_t j = 0;
    while (j < columns && row[j] == expected[j])
        j++;
    return j;
}

/* Both tensors have two axes; found is a host copy of the device's. */
static int compare(const DLTensor *expected, const uint16_t *found, int exact, const char *what, const char *name) {
    const int64_t rows = expected->shape[0], columns = expected->shape[1];
    const uint16_t *wanted = (const void *)((const char *)expected->data + expected->byte_offset);
    for (int64_t i = 0; i < rows; i++, found += columns, wanted += columns) {
        const int64_t j = exact ? find_different(found, wanted, columns) : find_far(found, wanted, columns);
        if (j < columns)
            return complain("%s: %s[%lld, %lld] is %g where a result that was found right has %g", what, name,
                            (long long)i, (long long)j, widen(found[j]), widen(wanted[j]));
    }
    return 0;
}

int ring_compare(const struct ring *ring, const struct call *host, int exact, const char *what) {
    const DLTensor *const hidden = call_tensor(host, hidden_gradient), *const weight = weight_gradient(host);
    const size_t hidden_bytes = tensor_bytes(hidden), weight_bytes = tensor_bytes(weight);
    uint16_t *found = malloc(hidden_bytes > weight_bytes ? hidden_bytes : weight_bytes);
    int result = found ? 0 : complain("out of memory for the comparison");
    for (int i = 0; i < ring->count && result == 0; i++) {
        const struct ring_copy *copy = &ring->copies[i];
        result = cuda_failed(cudaMemcpy(found, copy->grad_hidden_states, hidden_bytes, cudaMemcpyDeviceToHost),
                             "cudaMemcpy");
        if (result == 0)
            result = compare(hidden, found, exact, what, hidden_gradient);
        if (result == 0)
            result =
                cuda_failed(cudaMemcpy(found, copy->grad_weight, weight_bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
        if (result == 0)
            result = compare(weight, found, exact, what, "the weight gradient");
    }
    free(found);
    return result;
}
