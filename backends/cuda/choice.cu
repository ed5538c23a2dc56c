/* SPDX-License-Identifier: Apache-2.0 */
/* Which kernels a call takes: those of the device's fast path where the library has permitted it, or MOER_CUDA_ARCH
 * asks for it; the generic ones otherwise. */
#include "common.cuh"

#include <stdlib.h>
#include <string.h>

/* The list's path for a device, its end where there is none. */
const fast_path *path_of(int device) {
    int major = 0, minor = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    cudaGetLastError();
    const fast_path *path = moer_cuda_paths;
    while (path->name && (path->major != major || path->minor != minor))
        path++;
    return path;
}

/* What the library has permitted, by device. */
static const moer_permit *permits[MOST_DEVICES];

void permit_path(int device, const moer_permit *permit) {
    if (device >= 0 && device < MOST_DEVICES)
        __atomic_store_n(&permits[device], permit, __ATOMIC_RELEASE);
}

enum moer_status choose_path(enum moer_operation operation, int device, choice *choice, moer_message *message) {
    const char *const arch = getenv("MOER_CUDA_ARCH");
    const bool generic = arch && strcmp(arch, "generic") == 0;
    choice->path = path_of(device);
    choice->forced = arch && *arch;
    choice->permit =
        device >= 0 && device < MOST_DEVICES ? __atomic_load_n(&permits[device], __ATOMIC_ACQUIRE) : nullptr;
    const bool permitted = choice->path->name && choice->permit && choice->permit->operations >> operation & 1;
    const bool named = choice->forced && choice->path->name && strcmp(arch, choice->path->name) == 0;
    choice->kernels = (choice->forced ? named : permitted) ? choice->path->kernels : GENERIC;
    if (!choice->forced || generic || named)
        return MOER_OK;
    if (strcmp(arch, "sm_90a") == 0 || strcmp(arch, "sm_100f") == 0)
        return moer_fail(message, MOER_UNSUPPORTED,
                         "MOER_CUDA_ARCH is %s, but cuda:%d is no such device, or this build has no such kernels", arch,
                         device);
    return moer_fail(message, MOER_INVALID, "MOER_CUDA_ARCH is %.32s but must be one of generic, sm_90a, sm_100f",
                     arch);
}
