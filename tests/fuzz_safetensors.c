/* SPDX-License-Identifier: Apache-2.0 */
/* libFuzzer: any bytes as a file for "moerouter run". The file is opened, every tensor taken and read, and both
 * operations asked about those that have the names of their inputs. A file that is refused must come with a message;
 * one that is accepted, with tensors that lie inside it, aligned, and as large as they say. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "call.h"
#include "command.h"
#include "safetensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

static int complaints;

/* In place of the command's, which prints. */
int complain(const char *format, ...) {
    char text[8192];
    va_list values;
    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
    complaints++;
    return EXIT_TROUBLE;
}

static void expect(int holds, const char *rule) {
    if (holds)
        return;
    fprintf(stderr, "broken: %s\n", rule);
    abort();
}

/* Reads all of a tensor, so that a byte outside the file is noticed. */
static void read_bytes(const DLTensor *tensor) {
    size_t bytes = dtype_size(tensor->dtype);
    for (int axis = 0; axis < tensor->ndim; axis++)
        bytes *= (size_t)tensor->shape[axis];
    for (size_t i = 0; i < bytes; i++)
        (void)((const volatile unsigned char *)tensor->data)[i];
    expect(bytes == 0 || (uintptr_t)tensor->data % dtype_size(tensor->dtype) == 0, "data is aligned");
}

static void take_all(struct safetensors *file) {
    const DLTensor *tensor;
    for (size_t i = 0; i < file->count; i++) {
        expect(safetensors_take(file, file->tensors[i].name, &tensor) == 0, "a tensor of the file can be taken");
        expect(tensor == &file->tensors[i].tensor, "the tensor taken is the one of that name");
        read_bytes(tensor);
    }
    expect(safetensors_take(file, "no such tensor, for this has\nan odd name", &tensor) == 0,
           "a tensor that is not there is no trouble");
}

/* What the command asks before it allocates anything by the file's shapes. */
static void ask(struct safetensors *file, enum moer_operation operation) {
    struct call call;
    size_t count, bytes;
    const struct moer_operand *operands = moer_operands(operation, &count);
    call_init(&call, operation);
    for (size_t i = 0; i < count; i++)
        safetensors_take(file, operands[i].name, call_field(&call, &operands[i]));
    const enum moer_status status = call_workspace_size(&call, &bytes);
    expect((status == MOER_OK) == !*moer_last_error(), "a message where there is an error, and only there");
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    char path[64];
    struct safetensors file;
    const int fd = memfd_create("safetensors", MFD_CLOEXEC);
    expect(fd >= 0 && write(fd, bytes, size) == (ssize_t)size, "the file can be made");
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    complaints = 0;
    const int result = safetensors_open(&file, path);
    expect(complaints == (result != 0), "one message where a file is refused");
    if (result == 0) {
        take_all(&file);
        ask(&file, MOER_SOFTMAX_TOPK_BACKWARD);
        ask(&file, MOER_SIGMOID_TOPK_BACKWARD);
    }
    safetensors_close(&file);
    close(fd);
    return 0;
}
