/* SPDX-License-Identifier: Apache-2.0 */
/* Reads safetensors files. A file is nobody's friend: until check_layout() is through, no number of its
 * header is used for an address. (That it shrinks while it is mapped cannot be guarded against.) */
#define _XOPEN_SOURCE 700
#include "safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <jansson.h>

#include "call.h"
#include "command.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
               "the tensors of a file are little-endian and are used in place: configure with --disable-command");

static const uint64_t max_header = 100000000; /* the format's own limit */

/* Those that no operation takes are here for the sake of their size: tensors that are ignored are checked too. */
static const struct {
    const char *name;
    DLDataType dtype;
} dtypes[] = {
    {"BF16", {kDLBfloat, 16, 1}},
    {"F16", {kDLFloat, 16, 1}},
    {"F32", {kDLFloat, 32, 1}},
    {"F64", {kDLFloat, 64, 1}},
    {"I64", {kDLInt, 64, 1}},
    {"I32", {kDLInt, 32, 1}},
    {"I16", {kDLInt, 16, 1}},
    {"I8", {kDLInt, 8, 1}},
    {"U64", {kDLUInt, 64, 1}},
    {"U32", {kDLUInt, 32, 1}},
    {"U16", {kDLUInt, 16, 1}},
    {"U8", {kDLUInt, 8, 1}},
    {"BOOL", {kDLOpaqueHandle, 8, 1}},
    {"F8_E4M3", {kDLOpaqueHandle, 8, 1}},
    {"F8_E5M2", {kDLOpaqueHandle, 8, 1}},
    {"F8_E8M0", {kDLOpaqueHandle, 8, 1}},
    {"C64", {kDLComplex, 64, 1}},
};

enum { DTYPES = sizeof dtypes / sizeof dtypes[0] };

const char *safetensors_dtype(DLDataType dtype) {
    for (int i = 0; i < DTYPES; i++)
        if (memcmp(&dtypes[i].dtype, &dtype, sizeof dtype) == 0)
            return dtypes[i].name;
    return NULL;
}

static int find_dtype(const char *name, DLDataType *dtype) {
    for (int i = 0; i < DTYPES; i++)
        if (strcmp(dtypes[i].name, name) == 0) {
            *dtype = dtypes[i].dtype;
            return 1;
        }
    return 0;
}

/* "FILE: tensor 'NAME': " and the message. A name can be as long as the header: its beginning must do. */
static int bad_tensor(const struct safetensors *file, const char *name, const char *format, ...) {
    char message[512];
    va_list values;
    va_start(values, format);
    vsnprintf(message, sizeof message, format, values);
    va_end(values);
    return complain("%s: tensor '%.100s': %s", file->path, name, message);
}

int safetensors_no_memory(const char *path) {
    return complain("%s: out of memory", path);
}

/* Jansson takes most failures to allocate for mistakes in the text, so they are noted here. */
static int jansson_ran_out;

static void *jansson_malloc(size_t size) {
    void *memory = malloc(size);
    if (!memory)
        jansson_ran_out = 1;
    return memory;
}

static int map_file(struct safetensors *file) {
    const int fd = open(file->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a pipe must not keep us waiting */
    if (fd < 0)
        return complain("%s: %s", file->path, strerror(errno));
    struct stat status;
    int result = 0;
    if (fstat(fd, &status) != 0) {
        result = complain("%s: %s", file->path, strerror(errno));
    } else if (!S_ISREG(status.st_mode)) {
        result = complain("%s: is not a regular file", file->path);
    } else if (status.st_size < SAFETENSORS_PREFIX) {
        result = complain("%s: has %lld bytes, fewer than the 8 that every safetensors file begins with", file->path,
                          (long long)status.st_size);
    } else {
        void *map = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (map == MAP_FAILED) {
            result = complain("%s: cannot be mapped: %s", file->path, strerror(errno));
        } else {
            file->map = map;
            file->size = (size_t)status.st_size;
        }
    }
    close(fd);
    return result;
}

/* Parses the header; *data_begin is where it ends. */
static int parse_header(struct safetensors *file, size_t *data_begin) {
    const unsigned char *bytes = file->map;
    uint64_t length = 0;
    for (int i = SAFETENSORS_PREFIX; i-- > 0;)
        length = length << 8 | bytes[i];
    if (length > max_header)
        return complain("%s: a header of %llu bytes: the format allows %llu", file->path, (unsigned long long)length,
                        (unsigned long long)max_header);
    if (length > file->size - SAFETENSORS_PREFIX)
        return complain("%s: a header of %llu bytes, but the file ends %zu bytes after its length", file->path,
                        (unsigned long long)length, file->size - SAFETENSORS_PREFIX);
    if (length == 0 || bytes[SAFETENSORS_PREFIX] != '{')
        return complain("%s: the header is not a JSON object, it does not begin with '{'", file->path);
    json_error_t error;
    json_set_alloc_funcs(jansson_malloc, free);
    file->header = json_loadb((const char *)bytes + SAFETENSORS_PREFIX, (size_t)length, JSON_REJECT_DUPLICATES, &error);
    if (!file->header && jansson_ran_out)
        return safetensors_no_memory(file->path);
    if (!file->header)
        return complain("%s: the header is not valid JSON: byte %d: %s", file->path, error.position, error.text);
    *data_begin = SAFETENSORS_PREFIX + (size_t)length;
    return 0;
}

static int check_metadata(const struct safetensors *file, json_t *metadata) {
    if (!json_is_object(metadata))
        return complain("%s: __metadata__ must be an object", file->path);
    for (void *at = json_object_iter(metadata); at; at = json_object_iter_next(metadata, at))
        if (!json_is_string(json_object_iter_value(at)))
            return complain("%s: __metadata__: '%.100s' must be a string", file->path, json_object_iter_key(at));
    return 0;
}

/* The shape; *bytes is the size of the data it asks for. */
static int read_shape(const struct safetensors *file, struct safetensors_tensor *tensor, const json_t *shape,
                      uint64_t *bytes) {
    DLTensor *dl = &tensor->tensor;
    if (!json_is_array(shape))
        return bad_tensor(file, tensor->name, "shape must be an array");
    dl->ndim = (int)json_array_size(shape);
    dl->shape = malloc(sizeof *dl->shape * ((size_t)dl->ndim + 1)); /* never 0 bytes */
    if (!dl->shape)
        return safetensors_no_memory(file->path);
    uint64_t size = dtype_size(dl->dtype);
    for (int axis = 0; axis < dl->ndim; axis++) {
        const json_t *length = json_array_get(shape, (size_t)axis);
        if (!json_is_integer(length) || json_integer_value(length) < 0)
            return bad_tensor(file, tensor->name, "shape[%d] must be an integer that is not negative", axis);
        dl->shape[axis] = json_integer_value(length);
        if (dl->shape[axis] > 0 && size > INT64_MAX / (uint64_t)dl->shape[axis])
            return bad_tensor(file, tensor->name, "shape[%d] is %lld, which makes more than 2^63 bytes", axis,
                              (long long)dl->shape[axis]);
        size *= (uint64_t)dl->shape[axis];
    }
    *bytes = size;
    return 0;
}

/* data_offsets, which must hold that many bytes, among the data_size bytes after the header. */
static int read_offsets(const struct safetensors *file, struct safetensors_tensor *tensor, const json_t *offsets,
                        uint64_t bytes, size_t data_size) {
    const json_t *first = json_array_get(offsets, 0), *last = json_array_get(offsets, 1);
    if (json_array_size(offsets) != 2 || !json_is_integer(first) || !json_is_integer(last))
        return bad_tensor(file, tensor->name, "data_offsets must be an array of two integers");
    const long long begin = json_integer_value(first), end = json_integer_value(last);
    if (begin < 0 || end < begin)
        return bad_tensor(file, tensor->name, "data_offsets [%lld, %lld] must not be negative nor reversed", begin,
                          end);
    if ((unsigned long long)end > data_size)
        return bad_tensor(file, tensor->name, "data_offsets [%lld, %lld] end past the file's %zu bytes of data", begin,
                          end, data_size);
    if ((uint64_t)(end - begin) != bytes)
        return bad_tensor(file, tensor->name,
                          "data_offsets [%lld, %lld] hold %lld bytes, but dtype and shape ask for %llu", begin, end,
                          end - begin, (unsigned long long)bytes);
    tensor->begin = (uint64_t)begin;
    tensor->end = (uint64_t)end;
    return 0;
}

static int read_tensor(const struct safetensors *file, struct safetensors_tensor *tensor, const json_t *entry,
                       size_t data_begin) {
    const json_t *dtype = json_object_get(entry, "dtype");
    uint64_t bytes = 0;
    if (!json_is_object(entry))
        return bad_tensor(file, tensor->name, "must be an object");
    if (!json_is_string(dtype))
        return bad_tensor(file, tensor->name, "dtype must be a string");
    if (!find_dtype(json_string_value(dtype), &tensor->tensor.dtype))
        return bad_tensor(file, tensor->name, "dtype '%.20s' is not known", json_string_value(dtype));
    int result = read_shape(file, tensor, json_object_get(entry, "shape"), &bytes);
    if (result == 0)
        result = read_offsets(file, tensor, json_object_get(entry, "data_offsets"), bytes, file->size - data_begin);
    if (result == 0) {
        tensor->tensor.device = (DLDevice){kDLCPU, 0};
        tensor->tensor.data = (char *)file->map + data_begin + tensor->begin;
    }
    return result;
}

static int compare_tensors(const void *a, const void *b) {
    const struct safetensors_tensor *x = a, *y = b;
    if (x->begin != y->begin)
        return x->begin < y->begin ? -1 : 1;
    return (x->end > y->end) - (x->end < y->end);
}

/* The tensors must follow one another from the first byte of the data to the last. */
static int check_layout(struct safetensors *file, size_t data_size) {
    uint64_t end = 0;
    if (file->count > 0)
        qsort(file->tensors, file->count, sizeof *file->tensors, compare_tensors);
    for (size_t i = 0; i < file->count; i++) {
        const struct safetensors_tensor *tensor = &file->tensors[i];
        const unsigned long long from = tensor->begin, to = tensor->end;
        if (tensor->begin < end)
            return bad_tensor(file, tensor->name, "data_offsets [%llu, %llu] overlap those of '%.100s'", from, to,
                              tensor[-1].name);
        if (tensor->begin > end)
            return bad_tensor(file, tensor->name, "data_offsets [%llu, %llu] leave a gap of %llu bytes before them",
                              from, to, from - end);
        end = tensor->end;
    }
    if (end < data_size)
        return complain("%s: the last %llu bytes belong to no tensor", file->path,
                        (unsigned long long)(data_size - end));
    return 0;
}

int safetensors_open(struct safetensors *file, const char *path) {
    *file = (struct safetensors){.path = path};
    size_t data_begin;
    int result = map_file(file);
    if (result == 0)
        result = parse_header(file, &data_begin);
    if (result != 0)
        return result;
    file->tensors = calloc(json_object_size(file->header) + 1, sizeof *file->tensors);
    if (!file->tensors)
        return safetensors_no_memory(path);
    for (void *at = json_object_iter(file->header); at && result == 0; at = json_object_iter_next(file->header, at)) {
        const char *name = json_object_iter_key(at);
        if (strcmp(name, "__metadata__") == 0) {
            result = check_metadata(file, json_object_iter_value(at));
        } else {
            file->tensors[file->count].name = name;
            result = read_tensor(file, &file->tensors[file->count++], json_object_iter_value(at), data_begin);
        }
    }
    return result == 0 ? check_layout(file, file->size - data_begin) : result;
}

void safetensors_close(struct safetensors *file) {
    for (size_t i = 0; i < file->count; i++) {
        free(file->tensors[i].tensor.shape);
        free(file->tensors[i].copy);
    }
    free(file->tensors);
    json_decref(file->header);
    if (file->map)
        munmap(file->map, file->size);
    *file = (struct safetensors){0};
}

int safetensors_take(struct safetensors *file, const char *name, const DLTensor **tensor) {
    size_t i = 0;
    while (i < file->count && strcmp(file->tensors[i].name, name) != 0)
        i++;
    *tensor = NULL;
    if (i == file->count)
        return 0;
    struct safetensors_tensor *found = &file->tensors[i];
    const size_t bytes = (size_t)(found->end - found->begin);
    if ((uintptr_t)found->tensor.data % dtype_size(found->tensor.dtype) != 0 && bytes > 0) {
        found->copy = malloc(bytes);
        if (!found->copy)
            return bad_tensor(file, name, "out of memory for %zu bytes", bytes);
        found->tensor.data = memcpy(found->copy, found->tensor.data, bytes);
    }
    found->taken = 1;
    *tensor = &found->tensor;
    return 0;
}
