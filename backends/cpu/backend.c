/* SPDX-License-Identifier: Apache-2.0 */
/* The CPU backend's entry: what it has, which kernels it takes, and its memory. */
#include "config.h"
#include "products.h"
#include <dlfcn.h>
#include <omp.h>
#include <pthread.h>
#include <stdlib.h>
#ifdef MOER_X86_64
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

static int always(void) {
    return 1;
}

#ifdef MOER_X86_64
static int has_avx2(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

static int has_avx512(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

static int has_avx512bf16(void) {
    return has_avx512() && __builtin_cpu_supports("avx512bf16");
}

/* The Intel cores that were measured multiply float32 faster than pairs by vdpbf16ps
 * (bench/results/xeon-2026-11-30.md). */
static int has_fast_avx512bf16(void) {
    return !__builtin_cpu_is("intel");
}

/* The system lends a process AMX's registers when it asks for them. */
static int has_amx(void) {
    enum { AMX_BF16 = 1 << 22, AMX_TILE = 1 << 24, REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    unsigned a, b, c, d;
    return has_avx512bf16() && __get_cpuid_count(7, 0, &a, &b, &c, &d) && d & AMX_BF16 && d & AMX_TILE &&
           syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}
#endif

/* The last one that is supported and better than those before is taken. */
static const struct {
    const char *name;
    int (*supported)(void), (*better)(void);
    const struct slice_kernels *kernels;
} instruction_sets[] = {
    {"portable", always, always, &moer_slice_portable},
#ifdef MOER_X86_64
    {"avx2", has_avx2, always, &moer_slice_avx2},
    {"avx512", has_avx512, always, &moer_slice_avx512},
    {"avx512bf16", has_avx512bf16, has_fast_avx512bf16, &moer_slice_avx512bf16},
    {"amx", has_amx, always, &moer_slice_amx},
#endif
};
enum { INSTRUCTION_SETS = sizeof instruction_sets / sizeof *instruction_sets };

static struct settings settings;
static char kernel_names[64]; /* what this machine can run: "portable, avx2" */
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* An environment variable; NULL where it is unset or empty. */
static const char *variable(const char *name) {
    const char *value = getenv(name);
    return value && *value ? value : NULL;
}

static void refuse(const char *name, const char *value, const char *choices) {
    snprintf(settings.error, sizeof settings.error, "%s is %s but must be one of %s", name, value, choices);
}

static void choose_kernels(const char *wanted) {
    size_t length = 0;
    for (int i = 0; i < INSTRUCTION_SETS; i++)
        if (instruction_sets[i].supported()) {
            length += (size_t)snprintf(kernel_names + length, sizeof kernel_names - length, "%s%s", i ? ", " : "",
                                       instruction_sets[i].name);
            if (wanted ? !strcmp(wanted, instruction_sets[i].name) : instruction_sets[i].better()) {
                settings.kernels = instruction_sets[i].kernels;
                settings.kernels_name = instruction_sets[i].name;
            }
        }
    if (!settings.kernels)
        refuse("MOER_CPU_ISA", wanted, kernel_names);
}

static void read_settings(void) {
    const char *products = variable("MOER_CPU_PRODUCTS"), *deterministic = variable("MOER_DETERMINISTIC");
    choose_kernels(variable("MOER_CPU_ISA"));
    if (products && !strcmp(products, "own"))
        settings.products = PRODUCTS_OWN;
    else if (products && !strcmp(products, "openblas"))
        settings.products = PRODUCTS_OPENBLAS;
    else if (products)
        refuse("MOER_CPU_PRODUCTS", products, "openblas, own");
    settings.deterministic = deterministic && !strcmp(deterministic, "1");
    if (deterministic && !settings.deterministic && strcmp(deterministic, "0"))
        refuse("MOER_DETERMINISTIC", deterministic, "0, 1");
}

const struct settings *moer_cpu_settings(void) {
    pthread_once(&once, read_settings);
    return &settings;
}

struct rows moer_cpu_rows(const DLTensor *tensor) {
    static char nothing;
    if (!tensor)
        return (struct rows){0};
    int64_t size = moer_element_size(tensor);
    enum element type = size == 4 ? F32 : tensor->dtype.code == kDLBfloat ? BF16 : F16;
    char *data = moer_data(tensor);
    /* A single row may come with any stride. */
    int64_t stride = tensor->shape[0] > 1 ? moer_stride(tensor, 0) : tensor->shape[1];
    return (struct rows){data ? data : &nothing, stride * size, type};
}

struct ids moer_cpu_ids(const DLTensor *tensor, const char *name) {
    return (struct ids){name, moer_data(tensor), moer_stride(tensor, 0) * moer_element_size(tensor),
                        tensor->dtype.bits == 64};
}

static const char *unavailable(void) {
    return NULL;
}

static void info(char *text, size_t size) {
    const struct settings *current = moer_cpu_settings();
    char blas[512];
    Dl_info openmp; /* a process may hold two runtimes: the file whose threads are ours */
    if (!dladdr((void *)omp_get_max_threads, &openmp))
        openmp.dli_fname = "unknown";
    moer_blas_info(blas, sizeof blas);
    snprintf(text, size,
             "instruction sets: %s\n"
             "kernels: %s\n"
             "threads: %d (OpenMP, %s)\n"
             "BLAS: %s\n",
             kernel_names, current->error[0] ? current->error : current->kernels_name, omp_get_max_threads(),
             openmp.dli_fname, blas);
}

static enum moer_status allocate(DLDevice device, size_t bytes, void **data, struct moer_message *message) {
    if (device.device_type != kDLCPU)
        return moer_fail(message, MOER_UNSUPPORTED, "the cpu backend allocates on kDLCPU only, not on device type %d",
                         (int)device.device_type);
    if (bytes > SIZE_MAX - 255 || !(*data = aligned_alloc(256, (bytes + 255) / 256 * 256)))
        return moer_fail(message, MOER_NO_MEMORY, "no memory for %zu bytes", bytes);
    return MOER_OK;
}

static void release(DLDevice device, void *data) {
    (void)device;
    free(data);
}

static enum moer_status copy(void *to, DLDevice to_device, const void *from, DLDevice from_device, size_t bytes,
                             struct moer_message *message) {
    (void)to_device, (void)from_device, (void)message;
    memmove(to, from, bytes);
    return MOER_OK;
}

static struct problem (*const problems[MOER_OPERATIONS])(const void *args) = {
    [MOER_SOFTMAX_TOPK_BACKWARD] = moer_cpu_softmax_topk_backward,
    [MOER_SIGMOID_TOPK_BACKWARD] = moer_cpu_sigmoid_topk_backward,
};

static enum moer_status run(enum moer_operation operation, const void *args, struct moer_message *message) {
    struct problem problem = problems[operation](args);
    return moer_cpu_run(&problem, message);
}

static enum moer_status workspace_size(enum moer_operation operation, const void *args, size_t *bytes,
                                       struct moer_message *message) {
    struct problem problem = problems[operation](args);
    return moer_cpu_workspace_size(&problem, bytes, message);
}

static enum moer_status explain(enum moer_operation operation, const void *args, struct moer_message *message) {
    struct problem problem = problems[operation](args);
    return moer_cpu_explain(&problem, message);
}

const struct moer_backend moer_cpu_backend = {
    .abi = MOER_BACKEND_ABI,
    .name = "cpu",
    .unavailable = unavailable,
    .info = info,
    .run = run,
    .workspace_size = workspace_size,
    .explain = explain,
    .allocate = allocate,
    .release = release,
    .copy = copy,
};
