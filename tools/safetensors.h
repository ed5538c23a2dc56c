/* SPDX-License-Identifier: Apache-2.0 */
/* Files in the safetensors format: eight bytes with the length of a header (little-endian), the header, which is a JSON
 * object that names tensors, and their data without gaps. Whoever calls prints nothing: a file that cannot be read or
 * written, or that breaks a rule, is complained about here, by its name, the tensor's, the rule and the value. */
#ifndef MOER_TOOLS_SAFETENSORS_H
#define MOER_TOOLS_SAFETENSORS_H

#include <moerouter/moerouter.h>

enum { SAFETENSORS_PREFIX = 8 }; /* bytes before the header */

struct safetensors_tensor {
    const char *name;
    uint64_t begin, end; /* data_offsets: bytes from the end of the header */
    DLTensor tensor;     /* its data lies in the map */
    void *copy;          /* or here, if it is not aligned there */
    int taken;           /* asked for by safetensors_take() */
};

struct safetensors {
    const char *path;
    void *map;
    size_t size;
    void *header; /* the JSON object, which owns the names */
    size_t count;
    struct safetensors_tensor *tensors; /* in the order of their data */
};

/* Maps a file and checks all of it but the values. Returns 0, or EXIT_TROUBLE after a message. safetensors_close() is
 * due either way. */
int safetensors_open(struct safetensors *file, const char *path);
void safetensors_close(struct safetensors *file);

/* The tensor of that name, NULL where the file has none. It belongs to the file. The format knows no alignment: data
 * that is not aligned to its elements is copied to memory that is. Returns 0, or EXIT_TROUBLE after a message. */
int safetensors_take(struct safetensors *file, const char *name, const DLTensor **tensor);

/* The format's name of a dtype, NULL where it has none. */
const char *safetensors_dtype(DLDataType dtype);

/* Writes compact host tensors, and the operation's name beside them. The file appears under its name when it is
 * complete, so that it may replace one that is open; a device or a pipe is written to as it is. Returns 0, or
 * EXIT_TROUBLE after a message. */
int safetensors_write(const char *path, const char *operation, const char *const *names, const DLTensor *const *tensors,
                      size_t count);

/* The message where memory runs out; returns EXIT_TROUBLE. */
int safetensors_no_memory(const char *path);

#endif
