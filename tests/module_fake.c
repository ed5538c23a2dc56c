/* SPDX-License-Identifier: Apache-2.0 */
/* A module that stands in for a device: host memory under the name of cuda. FAKE_MODULE says what is wrong with it.
 * Where FAKE_PATH is set it has a fast path, fake_fast, of which that is the fault ("" for none; "generic " and one: of
 * the generic path, for 17 tokens); FAKE_PROVEN is its evidence, FAKE_DRIVER the driver, FAKE_BUILD the build. */
#define _DEFAULT_SOURCE /* usleep() */
#include "backend.h"
#include "tensor.h"
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int fake_is(const char *fault) {
    const char *value = getenv("FAKE_MODULE");
    return value && !strcmp(value, fault);
}

static const char *unavailable(void) {
    return fake_is("unavailable") ? "no such device today" : NULL;
}

static const char *build(void) {
    const char *value = getenv("FAKE_BUILD");
    return value ? value : "first";
}

static void info(char *text, size_t size) {
    if (getenv("FAKE_PATH"))
        snprintf(text, size, "build: %s\ncuda:0: fake, FAKE-0\n", build());
    else
        snprintf(text, size, "devices: none\n");
}

/* ---- An operation that is computed, as far as the self-check has it ---- */

enum { MOST_EXPERTS = 512, MOST_ELEMENTS = 1 << 15, SLOW_US = 200 };

static float load(const DLTensor *tensor, int64_t i, int64_t j) {
    const int64_t at = i * moer_stride(tensor, 0) + j;
    uint32_t bits;
    if (tensor->dtype.bits == 32)
        return ((const float *)moer_data(tensor))[at];
    bits = (uint32_t)((const uint16_t *)moer_data(tensor))[at] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* bfloat16 is cut: what is exact stays so. */
static void store(const DLTensor *tensor, int64_t i, int64_t j, float value) {
    const int64_t at = i * moer_stride(tensor, 0) + j;
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (tensor->dtype.bits == 32)
        ((float *)moer_data(tensor))[at] = value;
    else
        ((uint16_t *)moer_data(tensor))[at] = (uint16_t)(bits >> 16);
}

static int64_t id(const DLTensor *ids, int64_t n, int64_t k) {
    const int64_t at = n * moer_stride(ids, 0) + k;
    return ids->dtype.bits == 64 ? ((const int64_t *)moer_data(ids))[at] : ((const int32_t *)moer_data(ids))[at];
}

/* What both operations have in common. */
struct product {
    const DLTensor *hidden, *gate, *grad_hidden, *grad_weight, *grad_logits;
    int accumulate;
    int swizzle, row, stride, tail, packed; /* faults */
};

/* z is 1, and the gradients that come through the selection cancel. */
static void softmax_row(const struct moer_softmax_topk_backward_args *args, int64_t n, float *g) {
    float mean = 0;
    const int64_t experts = args->gate_weight->shape[0];
    for (int64_t e = 0; e < experts; e++)
        g[e] = load(args->grad_router_logits, n, e);
    for (int64_t k = 0; k < args->selected_experts->shape[1]; k++)
        if (id(args->selected_experts, n, k) >= 0)
            g[id(args->selected_experts, n, k)] += load(args->grad_routing_weights, n, k);
    for (int64_t e = 0; e < experts; e++)
        mean += g[e] * load(args->routing_probs, n, e);
    for (int64_t e = 0; e < experts; e++)
        g[e] = load(args->routing_probs, n, e) * (g[e] - mean);
}

static void sigmoid_row(const struct moer_sigmoid_topk_backward_args *args, int64_t n, float *g) {
    memset(g, 0, sizeof *g * (size_t)args->weight->shape[0]);
    for (int64_t k = 0; k < args->topk_indices->shape[1]; k++)
        if (id(args->topk_indices, n, k) >= 0)
            g[id(args->topk_indices, n, k)] += load(args->grad_topk_weights, n, k);
    for (int64_t e = 0; e < args->weight->shape[0]; e++)
        g[e] *= load(args->scores, n, e) * (1 - load(args->scores, n, e));
}

static int path_is(const char *fault) {
    const char *value = getenv("FAKE_PATH");
    return value && !strcmp(value, fault);
}

/* A product's element comes from here in the other factor. */
static void misplace(const struct product *with, int weight, int64_t *row, int64_t *column) {
    if (with->swizzle && (*column ^ 8) < with->hidden->shape[1])
        *column ^= 8;
    if (with->row && !weight && (*row ^ 1) < with->gate->shape[0])
        *row ^= 1;
    if (with->stride && weight && *column >= 64)
        *column -= 64;
    if (with->packed && weight && *row > 0) { /* as if row followed upon row */
        const int64_t at = *row * with->hidden->shape[1] + *column, width = moer_stride(with->hidden, 0);
        *row = at / width;
        *column = at % width;
    }
}

/* Adds a token's G to both products. */
static void add_token(const struct product *with, int64_t n, const float *g) {
    static _Thread_local float sums[MOST_ELEMENTS];
    const int64_t hidden = with->hidden->shape[1], experts = with->gate->shape[0];
    memset(sums, 0, sizeof *sums * (size_t)hidden);
    for (int64_t e = 0; e < experts; e++) {
        store(with->grad_logits, n, e, g[e]);
        for (int64_t h = 0; h < hidden && g[e] != 0; h++) {
            int64_t row = e, column = h;
            misplace(with, 0, &row, &column);
            sums[h] += g[e] * load(with->gate, row, column);
            row = n, column = h;
            misplace(with, 1, &row, &column);
            store(with->grad_weight, e, h, load(with->grad_weight, e, h) + g[e] * load(with->hidden, row, column));
        }
    }
    for (int64_t h = 0; h < hidden && (!with->tail || n < with->hidden->shape[0] / 16 * 16); h++)
        store(with->grad_hidden, n, h, sums[h]);
}

static enum moer_status break_path(const char *path, struct moer_message *message) {
    const char *value = getenv("FAKE_PATH");
    const char *fault = value && !strncmp(value, path, strlen(path)) ? value + strlen(path) : "";
    if (!strcmp(fault, "crash"))
        raise(SIGSEGV);
    while (!strcmp(fault, "hang"))
        pause();
    return strcmp(fault, "device") ? MOER_OK : moer_fail(message, MOER_DEVICE, "an illegal address");
}

/* Where it would take too long, or is of float16, nothing is written; nor with a fault that only many tokens show. */
static enum moer_status compute(enum moer_operation operation, const void *args, struct moer_message *message) {
    const char *arch = getenv("MOER_CUDA_ARCH");
    const struct moer_softmax_topk_backward_args *softmax = args;
    const struct moer_sigmoid_topk_backward_args *sigmoid = args;
    const int is_fast = arch && !strcmp(arch, "fake_fast"), is_softmax = operation == MOER_SOFTMAX_TOPK_BACKWARD;
    const struct product with = {
        is_softmax ? softmax->hidden_states : sigmoid->hidden_states,
        is_softmax ? softmax->gate_weight : sigmoid->weight,
        is_softmax ? softmax->grad_hidden_states : sigmoid->grad_hidden_states,
        is_softmax ? softmax->grad_gate_weight : sigmoid->grad_weight,
        is_softmax ? softmax->grad_logits : sigmoid->grad_logits,
        is_softmax ? softmax->accumulate : sigmoid->accumulate,
        is_fast && (path_is("swizzle") || path_is("swizzle, crash") || path_is("swizzle, no memory")),
        is_fast && path_is("row"),
        is_fast && path_is("stride"),
        is_fast && path_is("tail"),
        is_fast && path_is("packed"),
    };
    const int64_t tokens = with.hidden->shape[0], hidden = with.hidden->shape[1], experts = with.gate->shape[0];
    const int computed = tokens * hidden <= MOST_ELEMENTS &&
                         (with.hidden->dtype.code == kDLBfloat || with.hidden->dtype.bits == 32) && !path_is("many");
    float g[MOST_EXPERTS];
    if ((is_fast || tokens == 17) && break_path(is_fast ? "" : "generic ", message))
        return MOER_DEVICE;
    static int misplaced; /* what is wrong once breaks the next time */
    if (with.swizzle && tokens > 0 && !path_is("swizzle") && misplaced++ > 0 && path_is("swizzle, crash"))
        raise(SIGSEGV);
    if (misplaced > 1)
        return moer_fail(message, MOER_NO_MEMORY, "nothing is left");
    if (!is_fast && tokens >= 1024) /* the slower path */
        usleep(SLOW_US);
    if (is_fast && path_is("many") && tokens > 8200)
        store(with.grad_hidden, tokens - 1, 0, 1);
    if (is_fast && path_is("beside") && computed && moer_stride(with.grad_hidden, 0) > hidden)
        store(with.grad_hidden, 0, hidden, 1);
    for (int64_t e = 0; e < experts && computed && !with.accumulate; e++)
        for (int64_t h = 0; h < hidden; h++)
            store(with.grad_weight, e, h, 0);
    for (int64_t n = 0; n < tokens && computed; n++) {
        if (is_softmax)
            softmax_row(softmax, n, g);
        else
            sigmoid_row(sigmoid, n, g);
        add_token(&with, n, g);
    }
    return MOER_OK;
}

/* ---- The backend ---- */

static const struct moer_permit *permit_now;
static int permits;

static enum moer_status fast_path(int device, struct moer_fast_path *path, struct moer_message *message) {
    const char *driver = getenv("FAKE_DRIVER");
    if (device < 0 || device > 1)
        return moer_fail(message, MOER_UNAVAILABLE, "there is no device %d", device);
    *path = (struct moer_fast_path){
        .name = device == 0 ? "fake_fast" : NULL, .evidence = getenv("FAKE_PROVEN"), .build = build()};
    snprintf(path->device, sizeof path->device, "FAKE-%d", device);
    snprintf(path->driver, sizeof path->driver, "%s", driver ? driver : "1.0");
    return MOER_OK;
}

static void permit(int device, const struct moer_permit *permit) {
    (void)device;
    permit_now = permit;
    permits++;
}

/* The stream is where the caller wants its copy of the args. */
static enum moer_status run(enum moer_operation operation, const void *args, struct moer_message *message) {
    if (getenv("FAKE_PATH"))
        return compute(operation, args, message);
    if (operation != MOER_SOFTMAX_TOPK_BACKWARD)
        return moer_fail(message, MOER_UNSUPPORTED, "this device has no such operation");
    if (fake_is("fault"))
        return moer_fail(message, MOER_DEVICE, "the device is on fire");
    const struct moer_softmax_topk_backward_args *softmax = args;
    memcpy(softmax->stream, softmax, sizeof *softmax);
    return MOER_OK;
}

static enum moer_status workspace_size(enum moer_operation operation, const void *args, size_t *bytes,
                                       struct moer_message *message) {
    (void)operation, (void)args, (void)message;
    *bytes = 1000;
    return MOER_OK;
}

static enum moer_status explain(enum moer_operation operation, const void *args, struct moer_message *message) {
    (void)operation, (void)args;
    if (permit_now)
        return moer_fail(message, MOER_OK, "fake kernel, permit %d of operations %u: %s", permits,
                         permit_now->operations, permit_now->reason);
    return moer_fail(message, MOER_OK, "fake kernel");
}

static enum moer_status allocate(DLDevice device, size_t bytes, void **data, struct moer_message *message) {
    if (device.device_id > 0)
        return moer_fail(message, MOER_UNAVAILABLE, "there is no device %d", device.device_id);
    *data = aligned_alloc(256, (bytes + 255) / 256 * 256);
    return *data ? MOER_OK : moer_fail(message, MOER_NO_MEMORY, "no memory for %zu bytes", bytes);
}

static void release(DLDevice device, void *data) {
    (void)device;
    free(data);
}

static enum moer_status copy(void *to, DLDevice to_device, const void *from, DLDevice from_device, size_t bytes,
                             struct moer_message *message) {
    (void)to_device, (void)from_device, (void)message;
    memcpy(to, from, bytes);
    return MOER_OK;
}

const struct moer_backend *moer_backend_entry(void) {
    static struct moer_backend backend = {
        .abi = MOER_BACKEND_ABI,
        .name = "cuda",
        .unavailable = unavailable,
        .info = info,
        .run = run,
        .workspace_size = workspace_size,
        .explain = explain,
        .allocate = allocate,
        .release = release,
        .copy = copy,
    };
    if (getenv("FAKE_PATH")) {
        backend.fast_path = fast_path;
        backend.permit = permit;
    }
    if (fake_is("abi"))
        backend.abi = MOER_BACKEND_ABI + 1;
    if (fake_is("name"))
        backend.name = "npu";
    return &backend;
}
