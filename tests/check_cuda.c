/* SPDX-License-Identifier: Apache-2.0 */
/* What the CUDA backend owes beside right numbers: the CPU's results, the caller's context and device, sentences about
 * devices, ids and memory, and a next call that works. Its behaviour in time is in check_cuda_streams.c.
 *
 * CK_RUN_CASE=name runs one test by itself, as in
 *     CK_RUN_CASE=bad_ids compute-sanitizer tests/check_cuda
 */
#include "support_cuda.h"

#include <cuda.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

static const struct dims small = {70, 40, 12, 4};
/* No machine has as many. */
enum { NO_DEVICE = 63 };

static void expect_message(const char *words) {
    ck_assert_msg(strstr(moer_last_error(), words) != NULL, "\"%s\" is not in \"%s\"", words, moer_last_error());
}

static DLTensor *ids_of(struct trial *trial) {
    return trial_tensor(trial,
                        trial->plan.operation == MOER_SOFTMAX_TOPK_BACKWARD ? "selected_experts" : "topk_indices");
}

/* ---- The other backend ---- */

static const struct dims compared[] = {{1, 40, 8, 2}, {129, 131, 60, 8}, {1025, 264, 160, 8}, {5000, 72, 24, 4}};

/* Products within their bounds around the CPU's; grad_logits of sigmoid, whose every rounding is given, bit for bit. */
START_TEST(like_the_cpu) {
    struct plan plan = each_plan(_i % EACH, compared[_i / EACH], 1);
    struct trial *trial = trial_new(&plan);
    DLTensor *cpu[CALL_OUTPUTS];
    must_run(&trial->call);
    copy_outputs(trial, cpu);
    trial_check(trial);
    trial_compare_to(trial, (DLTensor *[CALL_OUTPUTS]){cpu[0], cpu[1], NULL});
    if (plan.operation == MOER_SIGMOID_TOPK_BACKWARD)
        same_bits(trial_output(trial, 2), cpu[2], "grad_logits of the two backends");
    free_outputs(cpu);
    trial_free(trial);
}
END_TEST

/* ---- Contexts and devices ---- */

/* The driver's functions, which no library is linked for. */
static void *driver_function(const char *name) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW), *function = library ? dlsym(library, name) : NULL;
    ck_assert_msg(function != NULL, "the driver has no %s", name);
    return function;
}

static struct {
    CUresult (*get_current)(CUcontext *);
    CUresult (*create)(CUcontext *, unsigned, CUdevice);
    CUresult (*destroy)(CUcontext);
} driver;

static void find_driver(void) {
    *(void **)&driver.get_current = driver_function("cuCtxGetCurrent");
    *(void **)&driver.create = driver_function("cuCtxCreate_v2");
    *(void **)&driver.destroy = driver_function("cuCtxDestroy_v2");
}

static CUcontext current_context(void) {
    CUcontext context = NULL;
    return driver.get_current(&context) == CUDA_SUCCESS ? context : (CUcontext)&driver;
}

/* A thread that has a context of its own, or none, and what it found wrong. */
struct visitor {
    int own_context;
    struct call good, refused;
    enum moer_status refusal;
    const char *wrong;
};

static const char *call_everything(const struct visitor *visitor, CUcontext before) {
    DLTensor *tensor;
    if (call_run(&visitor->good) != MOER_OK)
        return "the call failed";
    if (current_context() != before)
        return "a call that succeeds changes the context";
    if (call_run(&visitor->refused) != visitor->refusal)
        return "the other call was not refused";
    if (current_context() != before)
        return "a call that is refused changes the context";
    if (moer_tensor_new(&tensor, gpu(), type_of[F32], 0, NULL) != MOER_OK || current_context() != before)
        return "moer_tensor_new fails or changes the context";
    if (moer_tensor_copy(tensor, tensor) != MOER_OK || current_context() != before)
        return "moer_tensor_copy fails or changes the context";
    moer_tensor_free(tensor);
    if (current_context() != before)
        return "moer_tensor_free changes the context";
    if (moer_tensor_new(&tensor, (DLDevice){kDLCUDA, NO_DEVICE}, type_of[F32], 0, NULL) != MOER_UNAVAILABLE)
        return "there is a device that should not be there";
    return current_context() == before ? NULL : "a device that is not there changes the context";
}

static void *visit(void *data) {
    struct visitor *visitor = data;
    CUcontext own = NULL, before;
    if (visitor->own_context && driver.create(&own, 0, gpu().device_id) != CUDA_SUCCESS) {
        visitor->wrong = "no context can be made";
        return NULL;
    }
    before = current_context();
    visitor->wrong = before == own ? call_everything(visitor, before) : "the thread begins with another context";
    if (own)
        driver.destroy(own);
    return NULL;
}

/* Twice: the call that is refused fails before the backend has looked at the device, and behind it. */
START_TEST(contexts) {
    struct plan plan = each_plan(_i % MOER_OPERATIONS, small, 2);
    struct trial *trial = trial_new(&plan);
    struct visitor visitor = {.own_context = _i / MOER_OPERATIONS};
    pthread_t thread;
    cudaStream_t stream = new_stream();
    cudaGraph_t graph;
    find_driver();
    trial_check(trial);
    for (int late = 0; late < 2; late++) {
        visitor.good = visitor.refused = *trial_place(trial);
        visitor.refusal = MOER_INVALID;
        if (late) { /* a stream that captures needs a workspace */
            visitor.refused.args.common.stream = stream;
            CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
        } else {
            call_set(&visitor.refused, "hidden_states", NULL);
        }
        ck_assert_int_eq(pthread_create(&thread, NULL, visit, &visitor), 0);
        pthread_join(thread, NULL);
        if (late) {
            /* Whether the capture has survived what the thread did is not the question here. */
            if (cudaStreamEndCapture(stream, &graph) == cudaSuccess)
                CUDA(cudaGraphDestroy(graph));
            cudaGetLastError();
        }
        ck_assert_msg(visitor.wrong == NULL, "%s", visitor.wrong);
        trial_fetch(trial, MOER_OK);
        trial_compare(trial);
    }
    CUDA(cudaStreamDestroy(stream));
    trial_free(trial);
}
END_TEST

/* One tensor on the host, or on another GPU, whether or not there is one. */
START_TEST(devices_that_differ) {
    struct plan plan = each_plan(_i, small, 3);
    struct trial *trial = trial_new(&plan);
    const DLDevice others[] = {{kDLCPU, 0}, {kDLCUDAHost, 0}, {kDLCUDA, gpu().device_id + 1}};
    char first[64], other[3][64];
    snprintf(first, sizeof first, "hidden_states is on cuda:%d", gpu().device_id);
    for (size_t i = 1; i < trial->count; i++) {
        const char *name = trial->tensors[i].operand->name;
        snprintf(other[0], sizeof other[0], "%s is on the CPU", name);
        snprintf(other[1], sizeof other[1], "%s is on the CPU", name);
        snprintf(other[2], sizeof other[2], "%s is on cuda:%d", name, gpu().device_id + 1);
        for (int n = 0; n < LENGTH(others); n++) {
            struct call *call = trial_place(trial);
            ((DLTensor *)call_tensor(call, name))->device = others[n];
            ck_assert_int_eq(call_run(call), MOER_INVALID);
            expect_message(first);
            expect_message(other[n]);
            trial_fetch(trial, MOER_INVALID);
        }
    }
    trial_free(trial);
}
END_TEST

/* The call as it runs, with every tensor said to be on another device. */
static struct call *place_as(struct trial *trial, DLDevice device) {
    struct call *call = trial_place(trial);
    for (int i = 0; i < CALL_MAX_OPERANDS; i++)
        trial->place.tensors[i].device = device;
    return call;
}

START_TEST(devices_that_are_missing) {
    static const int missing[] = {NO_DEVICE, 1000000, INT32_MAX, -1, INT32_MIN};
    struct plan plan = each_plan(_i, small, 4);
    struct trial *trial = trial_new(&plan);
    for (int n = 0; n < LENGTH(missing); n++) {
        DLDevice device = {kDLCUDA, missing[n]};
        DLTensor *tensor = ids_of(trial);
        char name[32];
        snprintf(name, sizeof name, "cuda:%d", missing[n]);
        ck_assert_int_eq(call_run(place_as(trial, device)), MOER_UNAVAILABLE);
        expect_message(name);
        trial_fetch(trial, MOER_UNAVAILABLE);
        ck_assert_int_eq(moer_tensor_new(&tensor, device, type_of[F32], 0, NULL), MOER_UNAVAILABLE);
        expect_message(name);
        ck_assert_ptr_null(tensor);
    }
    trial_check(trial);
    trial_free(trial);
}
END_TEST

/* Managed memory is as good as the device's, under either name. */
START_TEST(managed_memory) {
    struct plan plan = each_plan(_i, small, 5);
    struct trial *trial = trial_new(&plan);
    place_move(&trial->place, (DLDevice){kDLCUDAManaged, gpu().device_id});
    trial_check(trial);
    trial_clear(trial);
    struct call *call = trial_place(trial);
    for (int i = 0; i < CALL_MAX_OPERANDS; i += 2)
        trial->place.tensors[i].device.device_type = kDLCUDA;
    must_run(call);
    trial_fetch(trial, MOER_OK);
    trial_compare(trial);
    trial_free(trial);
}
END_TEST

/* Calls on a device that is not the current one, which stays the current one. */
START_TEST(second_device) {
    struct plan plan = each_plan(_i, (struct dims){1025, 136, 40, 4}, 6);
    struct trial *trial = trial_new(&plan);
    int device = -1;
    find_driver();
    CUDA(cudaSetDevice(0));
    CUcontext before = current_context();
    place_move(&trial->place, (DLDevice){kDLCUDA, 1});
    for (int n = 0; n < 3; n++) {
        trial_check(trial);
        CUDA(cudaGetDevice(&device));
        ck_assert_int_eq(device, 0);
        ck_assert_ptr_eq(current_context(), before);
    }
    trial_free(trial);
}
END_TEST

static int gpu_count(void) {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess)
        cudaGetLastError();
    return count;
}

/* ---- Ids ---- */

static const int64_t bad[] = {12,
                              13,
                              4000,
                              -2,
                              INT32_MAX,
                              INT32_MIN, /* and what int32 cannot hold: */
                              INT64_MAX,
                              INT64_MIN,
                              INT64_C(1) << 32,
                              (INT64_C(1) << 32) + 3,
                              -(INT64_C(1) << 32)};
enum { BAD_SHORT = 6 };

static void set_id(const DLTensor *ids, int64_t slot, int64_t id) {
    char *data = (char *)ids->data + ids->byte_offset;
    if (ids->dtype.bits == 64)
        ((int64_t *)data)[slot] = id;
    else
        ((int32_t *)data)[slot] = (int32_t)id;
}

/* Three slots of four hold no expert: each is counted, and what it would lead to is neither read nor written. The
 * answer is that of empty slots. */
START_TEST(bad_ids) {
    struct plan plan = each_plan(_i % EACH, small, 7);
    plan.short_ids = _i / EACH;
    plan.flush = 1; /* the compute sanitizer sees a read behind the end */
    struct trial *invalid = trial_new(&plan), *empty = trial_new(&plan);
    const DLTensor *count = trial_add(invalid, "invalid_ids", (DLDataType){kDLInt, 32, 1}, 1000.0);
    int64_t slots = small.tokens * small.top_k, expected = 0;
    for (int64_t slot = 0; slot < slots; slot++)
        if (slot % 4) {
            set_id(ids_of(invalid), slot, bad[expected++ % (plan.short_ids ? BAD_SHORT : LENGTH(bad))]);
            set_id(ids_of(empty), slot, -1);
        }
    trial_succeed(empty, OWN_SCRATCH);
    trial_succeed(invalid, OWN_SCRATCH);
    ck_assert_double_eq(get_element(count, 0, 0, 0), 1000.0 + (double)expected);
    trial_succeed(invalid, LIBRARY_SCRATCH);
    ck_assert_double_eq(get_element(count, 0, 0, 0), 1000.0 + 2.0 * (double)expected);
    trial_compare(invalid);
    for (int i = 0; i < CALL_OUTPUTS; i++)
        same_bits(trial_output(invalid, i), trial_output(empty, i), "bad ids and empty slots");
    /* Nobody has to count. */
    call_set(&invalid->call, "invalid_ids", NULL);
    trial_succeed(invalid, OWN_SCRATCH);
    trial_compare(invalid);
    trial_free(invalid);
    trial_free(empty);
}
END_TEST

/* ---- Memory ---- */

/* Elements between rows; and bytes enough for two rows of ids, or three of 16 bits. */
static const int64_t far = (INT64_C(1) << 31) + 11, far_bytes = ((INT64_C(1) << 31) + 64) * 8;

/* The axis whose stride can be anything, and what lies contiguous inside it. */
static int outer_axis(const DLTensor *tensor) {
    return tensor->ndim == 3 ? 2 : 0;
}

/* Copies a tensor on the host to or from rows that are far apart on the device. */
static void copy_far(const DLTensor *host, const DLTensor *memory, int there) {
    int axis = outer_axis(host);
    int64_t width = host->ndim == 3 ? host->shape[0] * host->shape[1] : host->shape[1];
    for (int64_t i = 0; i < host->shape[axis]; i++) {
        DLTensor near = *host, apart = *memory;
        near.ndim = apart.ndim = 1;
        near.shape = apart.shape = &width;
        near.strides = apart.strides = NULL;
        apart.dtype = host->dtype;
        near.byte_offset += (uint64_t)(i * host->strides[axis]) * dtype_size(host->dtype);
        apart.byte_offset = (uint64_t)(i * far) * dtype_size(host->dtype);
        ck_assert_msg(moer_tensor_copy(there ? &apart : &near, there ? &near : &apart) == MOER_OK, "%s",
                      moer_last_error());
    }
}

/* Every tensor in turn with more than 2^31 elements between its rows; between them is NaN. */
START_TEST(rows_far_apart) {
    struct plan plan = {
        .operation = (enum moer_operation)_i, .dims = {2, 40, 3, 2}, .type = BF16, .padding = 1, .seed = 8};
    struct trial *trial = trial_new(&plan);
    DLTensor *expected[CALL_OUTPUTS], *memory = new_bytes(gpu(), (size_t)far_bytes);
    trial_check(trial);
    copy_outputs(trial, expected);
    for (size_t i = 0; i < trial->count; i++) {
        const DLTensor *host = &trial->tensors[i].tensor;
        int64_t strides[3];
        trial_clear(trial);
        struct call *call = trial_place(trial);
        DLTensor *apart = (DLTensor *)*call_field(call, trial->tensors[i].operand);
        CUDA(cudaMemset(memory->data, 0xFF, (size_t)memory->shape[0]));
        copy_far(host, memory, 1);
        memcpy(strides, host->strides, sizeof strides);
        strides[outer_axis(host)] = far;
        apart->strides = strides;
        apart->data = memory->data;
        apart->byte_offset = 0;
        must_run(call);
        place_fetch(&trial->place);
        if (trial->tensors[i].operand->kind == MOER_DTYPE_OUTPUT)
            copy_far(host, memory, 0);
        expect_outputs(trial, expected, trial->tensors[i].operand->name);
    }
    moer_tensor_free(memory);
    free_outputs(expected);
    trial_free(trial);
}
END_TEST

static size_t free_memory(void) {
    size_t available = 0, total;
    if (cudaMemGetInfo(&available, &total) != cudaSuccess)
        cudaGetLastError();
    return available;
}

/* More than any device has: the tensor, and the workspace of a call whose data is never reached. */
START_TEST(no_memory) {
    struct plan plan = each_plan(_i, small, 9);
    struct trial *trial = trial_new(&plan);
    struct outline outline;
    DLTensor *tensor;
    ck_assert_int_eq(moer_tensor_new(&tensor, gpu(), type_of[F32], 1, (int64_t[]){INT64_C(1) << 44}), MOER_NO_MEMORY);
    ck_assert_ptr_null(tensor);
    make_outline(&outline, plan.operation, (struct dims){1 << 22, 1 << 16, 1024, 8}, F32);
    for (int i = 0; i < CALL_MAX_OPERANDS; i++)
        outline.tensors[i].data = (void *)((uintptr_t)(i + 1) << 44);
    enum moer_status status = call_run(&outline.call);
    ck_assert_msg(status == MOER_NO_MEMORY, "status %d, %s", status, moer_last_error());
    trial_check(trial);
    trial_free(trial);
}
END_TEST

/* ---- Queries ---- */

/* Shapes are enough: data that is not there, or is no memory, is not looked at. */
START_TEST(queries) {
    struct outline outline;
    size_t bytes[2] = {0, 1};
    char text[256];
    make_outline(&outline, (enum moer_operation)(_i % MOER_OPERATIONS), (struct dims){5000, 520, 40, 4},
                 (enum type)(_i / MOER_OPERATIONS));
    for (int garbage = 0; garbage < 2; garbage++) {
        for (int i = 0; i < CALL_MAX_OPERANDS; i++)
            outline.tensors[i].data = garbage ? (void *)(uintptr_t)(4096 * (i + 1)) : NULL;
        text[0] = '\0';
        ck_assert_int_eq(call_workspace_size(&outline.call, &bytes[garbage]), MOER_OK);
        ck_assert_int_eq(call_explain(&outline.call, text, sizeof text), MOER_OK);
        ck_assert_str_ne(text, "");
    }
    ck_assert_uint_gt(bytes[0], 0);
    ck_assert_uint_eq(bytes[0], bytes[1]);
}
END_TEST

/* What the backend takes, and the first sizes that it does not, which the call, the query and the explanation refuse
 * alike. */
START_TEST(largest_shapes) {
    static const struct {
        int64_t experts, top_k;
        enum moer_status status;
    } shapes[] = {{1024, 64, MOER_OK}, {64, 64, MOER_OK}, {1025, 8, MOER_UNSUPPORTED}, {128, 65, MOER_UNSUPPORTED}};
    struct outline outline;
    size_t bytes;
    char text[256];
    for (int n = 0; n < LENGTH(shapes); n++) {
        struct plan plan = {.operation = (enum moer_operation)_i,
                            .dims = {5, 24, shapes[n].experts, shapes[n].top_k},
                            .type = F16,
                            .absent = MASK,
                            .seed = 10};
        make_outline(&outline, plan.operation, plan.dims, plan.type);
        ck_assert_int_eq(call_workspace_size(&outline.call, &bytes), shapes[n].status);
        ck_assert_int_eq(call_explain(&outline.call, text, sizeof text), shapes[n].status);
        plan_check(&plan); /* checks a refusal, too */
    }
}
END_TEST

/* ---- Errors ---- */

static enum moer_status break_shape(struct trial *trial) {
    call_tensor(trial_place(trial), "hidden_states")->shape[1]++;
    enum moer_status status = call_run(&trial->place.call);
    trial_tensor(trial, "hidden_states")->shape[1]--;
    return status;
}

static enum moer_status break_device(struct trial *trial) {
    return call_run(place_as(trial, (DLDevice){kDLCUDA, NO_DEVICE}));
}

static enum moer_status break_workspace(struct trial *trial) {
    struct call *call = trial_place(trial);
    call->args.common.workspace = trial->place.blocks[0].copy->data;
    return call_run(call);
}

static enum moer_status break_experts(struct trial *trial) {
    struct outline outline;
    size_t bytes;
    make_outline(&outline, trial->plan.operation, (struct dims){8, 8, 2000, 2}, BF16);
    return call_workspace_size(&outline.call, &bytes);
}

static enum moer_status break_memory(struct trial *trial) {
    DLTensor *tensor;
    (void)trial;
    return moer_tensor_new(&tensor, gpu(), type_of[F32], 1, (int64_t[]){INT64_C(1) << 44});
}

/* Refusals leave nothing behind: the next call is right, and no error waits for whoever asks next. */
START_TEST(errors_do_not_stick) {
    static const struct {
        enum moer_status (*run)(struct trial *trial);
        enum moer_status status;
    } broken[] = {{break_shape, MOER_INVALID},
                  {break_device, MOER_UNAVAILABLE},
                  {break_workspace, MOER_INVALID},
                  {break_experts, MOER_UNSUPPORTED},
                  {break_memory, MOER_NO_MEMORY}};
    struct plan plan = each_plan(_i, small, 11);
    struct trial *trial = trial_new(&plan);
    for (int n = 0; n < LENGTH(broken); n++) {
        ck_assert_int_eq(broken[n].run(trial), broken[n].status);
        ck_assert_str_ne(moer_last_error(), "");
        CUDA(cudaGetLastError());
        trial_check(trial);
        ck_assert_str_eq(trial->message, "");
        CUDA(cudaGetLastError());
    }
    CUDA(cudaDeviceSynchronize());
    trial_free(trial);
}
END_TEST

int main(void) {
    int gpus = gpu_count(), roomy = free_memory() > (size_t)far_bytes + (1 << 30);
    const struct test tests[] = {
        {like_the_cpu, LENGTH(compared) * EACH},
        {contexts, 2 * MOER_OPERATIONS},
        {devices_that_differ, MOER_OPERATIONS},
        {devices_that_are_missing, MOER_OPERATIONS},
        {managed_memory, EACH},
        {second_device, gpus >= 2 ? EACH : 0},
        {bad_ids, 2 * EACH},
        {rows_far_apart, roomy ? MOER_OPERATIONS : 0},
        {no_memory, MOER_OPERATIONS},
        {queries, EACH},
        {largest_shapes, MOER_OPERATIONS},
        {errors_do_not_stick, EACH},
    };
    if (gpus == 1)
        puts("SKIP: second_device: it takes two GPUs");
    if (gpus > 0 && !roomy)
        puts("SKIP: rows_far_apart: it takes 17 GiB of the GPU's memory");
    return run_cuda_tests("CUDA", tests, LENGTH(tests));
}
