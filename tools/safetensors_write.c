/* SPDX-License-Identifier: Apache-2.0 */
/* Writes safetensors files, whole or not at all. */
#define _XOPEN_SOURCE 700 /* mkstemp(), realpath() */
#include "safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <jansson.h>

#include "call.h"
#include "command.h"

enum { MAX_ELEMENT = 8 }; /* bytes */

static size_t tensor_bytes(const DLTensor *tensor) {
    size_t bytes = dtype_size(tensor->dtype);
    for (int axis = 0; axis < tensor->ndim; axis++)
        bytes *= (size_t)tensor->shape[axis];
    return bytes;
}

/* Adds one tensor to the header. */
static int describe(json_t *header, const char *name, const DLTensor *tensor, size_t begin) {
    json_t *shape = json_array();
    for (int axis = 0; axis < tensor->ndim; axis++)
        if (json_array_append_new(shape, json_integer(tensor->shape[axis])) != 0)
            break;
    const size_t end = begin + tensor_bytes(tensor);
    if (json_array_size(shape) != (size_t)tensor->ndim) {
        json_decref(shape);
        return -1;
    }
    return json_object_set_new(header, name,
                               json_pack("{s:s, s:o, s:[I, I]}", "dtype", safetensors_dtype(tensor->dtype), "shape",
                                         shape, "data_offsets", (json_int_t)begin, (json_int_t)end));
}

/* The header's text, NULL where memory runs out. Large elements come first, so that with the data at a multiple of 8
 * every tensor is aligned, in a format that knows no padding. */
static char *make_header(const char *operation, const char *const *names, const DLTensor *const *tensors,
                         size_t count) {
    json_t *header = json_pack("{s:{s:s}}", "__metadata__", "op", operation);
    size_t end = 0;
    int failed = header == NULL;
    for (size_t size = MAX_ELEMENT; size > 0; size /= 2)
        for (size_t i = 0; i < count && !failed; i++)
            if (dtype_size(tensors[i]->dtype) == size) {
                failed = describe(header, names[i], tensors[i], end) != 0;
                end += tensor_bytes(tensors[i]);
            }
    char *text = failed ? NULL : json_dumps(header, JSON_COMPACT | JSON_PRESERVE_ORDER);
    json_decref(header);
    return text;
}

static int write_all(int fd, const void *data, size_t size) {
    while (size > 0) {
        const ssize_t written = write(fd, data, size);
        if (written < 0 && errno == EINTR)
            continue;
        if (written <= 0)
            return -1;
        data = (const char *)data + written;
        size -= (size_t)written;
    }
    return 0;
}

static int write_contents(int fd, const char *header, const DLTensor *const *tensors, size_t count) {
    const size_t length = strlen(header), padding = (MAX_ELEMENT - length % MAX_ELEMENT) % MAX_ELEMENT;
    unsigned char prefix[SAFETENSORS_PREFIX];
    for (int i = 0; i < SAFETENSORS_PREFIX; i++)
        prefix[i] = (unsigned char)((uint64_t)(length + padding) >> 8 * i);
    int failed =
        write_all(fd, prefix, sizeof prefix) || write_all(fd, header, length) || write_all(fd, "        ", padding);
    for (size_t size = MAX_ELEMENT; size > 0; size /= 2)
        for (size_t i = 0; i < count && !failed; i++)
            if (dtype_size(tensors[i]->dtype) == size && tensor_bytes(tensors[i]) > 0)
                failed =
                    write_all(fd, (const char *)tensors[i]->data + tensors[i]->byte_offset, tensor_bytes(tensors[i]));
    return failed ? -1 : 0;
}

/* A new file beside target, with the permissions of the one it replaces, or those that open() would have given it; its
 * name goes to *temporary. */
static int open_beside(const char *target, const struct stat *replaced, char **temporary) {
    static const char pattern[] = ".moerouter.XXXXXX";
    const char *slash = strrchr(target, '/');
    const size_t folder = slash ? (size_t)(slash - target) + 1 : 0;
    *temporary = malloc(folder + sizeof pattern);
    if (!*temporary)
        return -1;
    memcpy(*temporary, target, folder);
    memcpy(*temporary + folder, pattern, sizeof pattern);
    const int fd = mkstemp(*temporary);
    if (fd < 0) {
        free(*temporary);
        *temporary = NULL;
        return -1;
    }
    const mode_t mask = umask(0);
    umask(mask);
    fchmod(fd, replaced ? replaced->st_mode & 07777 : 0666 & ~mask);
    return fd;
}

int safetensors_write(const char *path, const char *operation, const char *const *names, const DLTensor *const *tensors,
                      size_t count) {
    char *header = make_header(operation, names, tensors, count);
    if (!header)
        return safetensors_no_memory(path);
    /* What stands there is asked for by its real name: renaming must replace the file, not a link to it. */
    char *real = realpath(path, NULL), *temporary = NULL;
    const char *target = real ? real : path;
    struct stat status;
    const int exists = stat(target, &status) == 0, in_place = exists && !S_ISREG(status.st_mode);
    const int fd =
        in_place ? open(target, O_WRONLY | O_CLOEXEC) : open_beside(target, exists ? &status : NULL, &temporary);
    int failed = fd < 0 || write_contents(fd, header, tensors, count) != 0;
    if (fd >= 0 && close(fd) != 0)
        failed = 1;
    if (temporary && !failed)
        failed = rename(temporary, target) != 0;
    const int result = failed ? complain("%s: cannot be written: %s", path, strerror(errno)) : 0;
    if (temporary && failed)
        unlink(temporary);
    free(temporary);
    free(real);
    free(header);
    return result;
}
