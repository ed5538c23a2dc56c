/* SPDX-License-Identifier: Apache-2.0 */
/* Errors of CUDA's runtime, and libraries of the toolkit that are looked for when the benchmark runs. */
#include "cuda.h"

#include "config.h"

#include <dlfcn.h>
#include <stdlib.h>

#include "command.h"

int cuda_failed(cudaError_t error, const char *call) {
    return error == cudaSuccess ? 0 : complain("%s: %s", call, cudaGetErrorString(error));
}

/* dlopen() in a folder, NULL where the folder is. */
static void *open_in(const char *root, const char *folder, const char *name) {
    char path[4096];
    if (!root || !*root)
        return NULL;
    snprintf(path, sizeof path, "%s/%s/%s", root, folder, name);
    return dlopen(path, RTLD_NOW | RTLD_LOCAL);
}

void *cuda_open_library(const char *name, char *reason, size_t size) {
    const char *const roots[] = {getenv("CUDA_HOME"), getenv("CUDA_PATH"), MOER_CUDA_ROOT};
    void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (library)
        return library;
    /* The reason of the plain name: the other folders are guesses. */
    const char *error = dlerror();
    snprintf(reason, size, "%s", error ? error : name);
    for (size_t i = 0; i < sizeof roots / sizeof roots[0] && !library; i++) {
        library = open_in(roots[i], "lib64", name);
        if (!library)
            library = open_in(roots[i], "extras/CUPTI/lib64", name);
    }
    return library;
}

const char *cuda_find_functions(void *library, const char *const *names, void **functions) {
    for (size_t i = 0; names[i]; i++) {
        functions[i] = dlsym(library, names[i]);
        if (!functions[i])
            return names[i];
    }
    return NULL;
}
