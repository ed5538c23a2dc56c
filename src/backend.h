/* SPDX-License-Identifier: Apache-2.0 */
/* What a backend is: the one contract between the dispatcher and every backend.
 *
 * A backend is a constant struct of functions. The dispatcher has checked a call against every rule of the public
 * header before a backend sees it: shapes agree, dtypes are legal, all tensors are on one device of the backend's, none
 * overlaps an output, the workspace is absent or large enough and aligned. The args struct is the caller's own,
 * extended with zeros to the size this library knows. What the backend must still look at is the data: the ids.
 *
 * A backend calls nothing of the library, so that the same object serves a module, the shared and the static library;
 * it explains itself through struct moer_message. A case it cannot do is MOER_UNSUPPORTED with a sentence. */
#ifndef MOER_BACKEND_H
#define MOER_BACKEND_H

#include <stdarg.h>
#include <stdio.h>
#include <moerouter/moerouter.h>

/* Goes up with every change to this file or to an args struct. */
#define MOER_BACKEND_ABI 3

/* A sentence without function name or full stop. */
struct moer_message {
    char text[512];
};

__attribute__((format(printf, 3, 4))) static inline enum moer_status
moer_fail(struct moer_message *message, enum moer_status status, const char *format, ...) {
    va_list values;
    va_start(values, format);
    vsnprintf(message->text, sizeof message->text, format, values);
    va_end(values);
    return status;
}

/* A device's fast path: kernels for its kind alone, beside the generic path, which runs on every device. */
struct moer_fast_path {
    const char *name;     /* "sm_90a"; NULL: the device has none */
    const char *evidence; /* the file of the project that proves it on devices of this kind; NULL: there is none */
    const char *build;    /* another one after every change of the compiled kernels; and in info(), "build: " */
    char device[64];      /* tells this very device from all others: "GPU-", and its UUID. Letters, digits and '-' */
    char driver[64];      /* another one after every change of the driver */
};

/* What the library lets a device's fast path do, and why. Never freed. */
struct moer_permit {
    unsigned operations; /* 1 << operation, for each that it may run */
    char reason[448];
};

struct moer_backend {
    unsigned abi; /* MOER_BACKEND_ABI it was compiled with */
    const char *name;
    /* NULL where this machine can run it, else the reason; called once, before anything else. */
    const char *(*unavailable)(void);
    /* Lines "name: value" about devices and kernels, cut to size. */
    void (*info)(char *text, size_t size);
    /* Does an operation, whose struct of the public header args is. May use args->workspace where there is one; takes
     * and frees its own where there is none. */
    enum moer_status (*run)(enum moer_operation operation, const void *args, struct moer_message *message);
    /* A function of shapes, dtypes and device alone. */
    enum moer_status (*workspace_size)(enum moer_operation operation, const void *args, size_t *bytes,
                                       struct moer_message *message);
    /* Names the kernel that run() would take. */
    enum moer_status (*explain)(enum moer_operation operation, const void *args, struct moer_message *message);
    /* Memory of a device, aligned to 256 bytes. */
    enum moer_status (*allocate)(DLDevice device, size_t bytes, void **data, struct moer_message *message);
    void (*release)(DLDevice device, void *data);
    /* Between the backend's devices and the host, either way; done on return. */
    enum moer_status (*copy)(void *to, DLDevice to_device, const void *from, DLDevice from_device, size_t bytes,
                             struct moer_message *message);
    /* A device's fast path. This and the next are NULL in a backend of which no device has one. */
    enum moer_status (*fast_path)(int device, struct moer_fast_path *path, struct moer_message *message);
    /* From now on the device's fast path runs what the permit says; nothing before the first one. */
    void (*permit)(int device, const struct moer_permit *permit);
};

#ifdef __cplusplus
extern "C" {
#endif
/* The backend inside the library. */
extern const struct moer_backend moer_cpu_backend;

/* The one symbol of a module (or of a backend built in): its backend. */
#ifdef MOER_MODULE
__attribute__((visibility("default")))
#endif
const struct moer_backend *
moer_backend_entry(void);
#ifdef __cplusplus
}
#endif

#endif
