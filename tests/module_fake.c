/* SPDX-License-Identifier: Apache-2.0 */
/* A module that stands in for a device: host memory under the name of cuda. FAKE_MODULE says what is wrong with it. */
#include "backend.h"
#include <stdlib.h>
#include <string.h>

static int fake_is(const char *fault) {
    const char *value = getenv("FAKE_MODULE");
    return value && !strcmp(value, fault);
}

static const char *unavailable(void) {
    return fake_is("unavailable") ? "no such device today" : NULL;
}

static void info(char *text, size_t size) {
    snprintf(text, size, "devices: none\n");
}

/* The stream is where the caller wants its copy of the args. */
static enum moer_status run(enum moer_operation operation, const void *args, struct moer_message *message) {
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
    return moer_fail(message, MOER_OK, "fake kernel");
}

static enum moer_status allocate(DLDevice device, size_t bytes, void **data, struct moer_message *message) {
    if (device.device_id > 0)
        return moer_fail(message, MOER_UNAVAILABLE, "there is no device %d", device.device_id);
    *data = malloc(bytes);
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
    if (fake_is("abi"))
        backend.abi = MOER_BACKEND_ABI + 1;
    if (fake_is("name"))
        backend.name = "npu";
    return &backend;
}
