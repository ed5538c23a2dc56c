/* SPDX-License-Identifier: Apache-2.0 */
/* Which backends there are. The CPU's is part of the library. CUDA's is a module, a shared object of one symbol, looked
 * for on first need and never unloaded; so a machine without CUDA has nothing to load, and says why. */
#include "config.h"
#include "internal.h"
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { CPU, CUDA, BACKENDS };
static const char *const names[BACKENDS] = {"cpu", "cuda"};

static const struct moer_backend *found[BACKENDS];
static struct moer_message missing[BACKENDS];
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void accept(int slot, const struct moer_backend *backend) {
    const char *reason = NULL;
    if (backend->abi != MOER_BACKEND_ABI)
        moer_fail(&missing[slot], MOER_UNAVAILABLE, "the %s module has backend ABI %u, this library needs %u",
                  names[slot], backend->abi, MOER_BACKEND_ABI);
    else if (strcmp(backend->name, names[slot]))
        moer_fail(&missing[slot], MOER_UNAVAILABLE, "the %s module holds a backend called %s", names[slot],
                  backend->name);
    else if ((reason = backend->unavailable()))
        moer_fail(&missing[slot], MOER_UNAVAILABLE, "%s", reason);
    else
        found[slot] = backend;
}

/* Where the library lies, without its name; "" where that is not known. */
static void own_folder(char *folder, size_t size) {
    Dl_info info;
    const char *slash = dladdr((const void *)(uintptr_t)moer_find_backend, &info) && info.dli_fname
                            ? strrchr(info.dli_fname, '/')
                            : NULL;
    if (!slash || (size_t)(slash - info.dli_fname) >= size)
        folder[0] = '\0';
    else
        snprintf(folder, size, "%.*s", (int)(slash - info.dli_fname), info.dli_fname);
}

int moer_installed_file(char *path, size_t size, const char *file) {
    char folder[4096];
    own_folder(folder, sizeof folder);
    for (int own = 1; *folder && own >= 0; own--) {
        const int length = snprintf(path, size, "%s%s/%s", folder, own ? "/" PACKAGE : "", file);
        if (length < (int)size && access(path, R_OK) == 0)
            return length;
    }
    return snprintf(path, size, "%s/%s", MOER_MODULE_DIR, file);
}

#ifndef MOER_CUDA_BUILTIN
static void load_module(int slot, const char *file) {
    const char *named = secure_getenv("MOER_BACKEND_PATH");
    char path[4096];
    const int length = named && *named ? snprintf(path, sizeof path, "%s/%s", named, file)
                                       : moer_installed_file(path, sizeof path, file);
    if (length >= (int)sizeof path) {
        moer_fail(&missing[slot], MOER_UNAVAILABLE, "MOER_BACKEND_PATH is longer than %zu bytes", sizeof path);
        return;
    }
    void *module = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    const struct moer_backend *(*entry)(void) = NULL;
    if (module)
        *(void **)&entry = dlsym(module, "moer_backend_entry");
    if (entry)
        accept(slot, entry());
    else
        moer_fail(&missing[slot], MOER_UNAVAILABLE, "no %s module: %s", names[slot], dlerror());
}
#endif

static void find_all(void) {
    accept(CPU, &moer_cpu_backend);
#ifdef MOER_CUDA_BUILTIN
    accept(CUDA, moer_backend_entry());
#else
    load_module(CUDA, MOER_CUDA_MODULE);
#endif
}

static int slot_of(DLDevice device) {
    switch ((int)device.device_type) {
    case kDLCPU:
    case kDLCUDAHost:
        return CPU;
    case kDLCUDA:
    case kDLCUDAManaged:
        return CUDA;
    }
    return BACKENDS;
}

const struct moer_backend *moer_find_backend(DLDevice device, enum moer_status *status, struct moer_message *message) {
    int slot = slot_of(device);
    if (slot == BACKENDS) {
        *status = moer_fail(message, MOER_UNSUPPORTED, "there is no backend for DLPack device type %d",
                            (int)device.device_type);
        return NULL;
    }
    pthread_once(&once, find_all);
    if (!found[slot])
        *status = moer_fail(message, MOER_UNAVAILABLE, "the %s backend is not available: %s", names[slot],
                            missing[slot].text);
    return found[slot];
}

size_t moer_backend_count(void) {
    return BACKENDS;
}

const char *moer_backend_name(size_t backend) {
    return backend < BACKENDS ? names[backend] : NULL;
}

const char *moer_backend_unavailable(size_t backend) {
    if (backend >= BACKENDS)
        return "there is no such backend";
    pthread_once(&once, find_all);
    return found[backend] ? NULL : missing[backend].text;
}

/* What the backend says of itself, and what has become of its devices' fast paths. */
static void print_info(const struct moer_backend *backend, char *text, size_t size) {
    struct moer_fast_path path;
    struct moer_message message;
    backend->info(text, size);
    for (int device = 0; backend->fast_path && !backend->fast_path(device, &path, &message); device++) {
        const size_t length = strlen(text);
        moer_settle(backend, device, NULL);
        if (path.name && moer_settled_reason(device))
            snprintf(text + length, size - length, "%s:%d's path %s: %s\n", backend->name, device, path.name,
                     moer_settled_reason(device));
    }
}

enum moer_status moer_backend_info(size_t backend, char *text, size_t size) {
    struct moer_message message;
    enum moer_status status = MOER_OK;
    if (backend >= BACKENDS)
        status = moer_fail(&message, MOER_INVALID, "backend is %zu but there are %d", backend, BACKENDS);
    else if (!text && size > 0)
        status = moer_fail(&message, MOER_INVALID, "text is NULL");
    else if (moer_backend_unavailable(backend))
        status = moer_fail(&message, MOER_UNAVAILABLE, "the %s backend is not available: %s", names[backend],
                           missing[backend].text);
    else if (size > 0)
        print_info(found[backend], text, size);
    return moer_report("moer_backend_info", status, &message);
}
