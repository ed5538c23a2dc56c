/* SPDX-License-Identifier: Apache-2.0 */
/* moerouter run: an operation on the tensors of a file. They are used where the file is mapped, or copied to a device;
 * the outputs go to another file, and are held to what is known of them. */
#define _XOPEN_SOURCE 700 /* clock_gettime() */
#include "command.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "device.h"
#include "draw.h"
#include "reference.h"
#include "safetensors.h"

struct run {
    struct safetensors file;
    struct call host;   /* inputs belong to the file, outputs and invalid_ids to the call */
    struct call placed; /* the same on the device */
    const DLTensor *expected[CALL_OUTPUTS];
    int has_expected;
};

static int is_input(const struct moer_operand *operand) {
    return operand->kind != MOER_DTYPE_OUTPUT && operand->kind != MOER_DTYPE_COUNT;
}

/* ---- What the file holds ---------------------------------------------------------------------------------------- */

static int take_inputs(struct run *run) {
    char missing[512] = "";
    size_t count, length = 0;
    const struct moer_operand *operands = moer_operands(run->host.operation, &count);
    for (size_t i = 0; i < count; i++) {
        const DLTensor **field = call_field(&run->host, &operands[i]);
        if (!is_input(&operands[i]))
            continue;
        if (safetensors_take(&run->file, operands[i].name, field) != 0)
            return EXIT_TROUBLE;
        if (!*field && operands[i].required && length < sizeof missing)
            length += (size_t)snprintf(missing + length, sizeof missing - length, "%s %s", length ? "," : "",
                                       operands[i].name);
    }
    if (length > 0)
        return complain("%s: tensors that %s needs are missing:%s", run->file.path,
                        moer_operation_name(run->host.operation), missing);
    return 0;
}

/* In a file the scaling factor is a tensor of one element. */
static int take_scaling_factor(struct run *run) {
    static const char name[] = "routed_scaling_factor";
    const DLTensor *tensor;
    if (run->host.operation != MOER_SIGMOID_TOPK_BACKWARD)
        return 0;
    if (safetensors_take(&run->file, name, &tensor) != 0)
        return EXIT_TROUBLE;
    if (!tensor)
        return 0;
    if (tensor->ndim > 1 || (tensor->ndim == 1 && tensor->shape[0] != 1))
        return complain("%s: tensor '%s': shape must be [] or [1]", run->file.path, name);
    if (tensor->dtype.code != kDLFloat && tensor->dtype.code != kDLBfloat)
        return complain("%s: tensor '%s': dtype %s must be BF16, F16, F32 or F64", run->file.path, name,
                        safetensors_dtype(tensor->dtype));
    const double factor = get_element(tensor, 0, 0, 0);
    /* To the library 0 means 1; what is smaller than every float32 is its 0. */
    run->host.args.sigmoid.routed_scaling_factor = factor == 0 ? copysign(DBL_MIN, factor) : factor;
    return 0;
}

/* expected.NAME for each output; the inputs are known to be right. */
static int take_expected(struct run *run) {
    size_t count;
    int output = 0;
    const struct moer_operand *operands = moer_operands(run->host.operation, &count);
    for (size_t i = 0; i < count; i++) {
        char name[64];
        if (operands[i].kind != MOER_DTYPE_OUTPUT)
            continue;
        snprintf(name, sizeof name, "expected.%s", operands[i].name);
        const DLTensor **tensor = &run->expected[output++];
        if (safetensors_take(&run->file, name, tensor) != 0)
            return EXIT_TROUBLE;
        if (!*tensor)
            continue;
        run->has_expected = 1;
        int64_t shape[4];
        const int ndim = call_shape(&operands[i], call_dims(&run->host), shape);
        if ((*tensor)->dtype.code != kDLFloat || (*tensor)->dtype.bits != 32)
            return complain("%s: tensor '%s': dtype %s must be F32", run->file.path, name,
                            safetensors_dtype((*tensor)->dtype));
        if ((*tensor)->ndim != ndim || memcmp((*tensor)->shape, shape, sizeof *shape * (size_t)ndim) != 0)
            return complain("%s: tensor '%s': shape must be [%lld, %lld], as that of the output", run->file.path, name,
                            (long long)shape[0], (long long)shape[1]);
    }
    return 0;
}

static void name_ignored(const struct safetensors *file) {
    const char *before = "ignored: ";
    char names[900] = "";
    size_t length = 0;
    for (size_t i = 0; i < file->count && length < sizeof names; i++)
        if (!file->tensors[i].taken) {
            length += (size_t)snprintf(names + length, sizeof names - length, "%s%s", before, file->tensors[i].name);
            before = ", ";
        }
    if (length > 0)
        complain("%s: %s%s", file->path, names, length < sizeof names ? "" : "...");
}

static int read_file(struct run *run, const char *path) {
    size_t unused;
    if (safetensors_open(&run->file, path) != 0 || take_inputs(run) != 0 || take_scaling_factor(run) != 0)
        return EXIT_TROUBLE;
    /* Holds every shape and dtype to the rules before anything is allocated by them. */
    const enum moer_status status = call_workspace_size(&run->host, &unused);
    if (status != MOER_OK)
        return complain("%s: %s", path, library_error(status));
    if (take_expected(run) != 0)
        return EXIT_TROUBLE;
    name_ignored(&run->file);
    return 0;
}

/* ---- The call --------------------------------------------------------------------------------------------------- */

/* Outputs and invalid_ids on the host, and the call on the device. */
static enum moer_status add_tensors(struct run *run, DLDevice device, DLDataType output_dtype) {
    int64_t one = 1;
    DLTensor *invalid_ids;
    enum moer_status status =
        moer_tensor_new(&invalid_ids, (DLDevice){kDLCPU, 0}, (DLDataType){kDLInt, 32, 1}, 1, &one);
    run->host.args.common.invalid_ids = invalid_ids;
    if (status == MOER_OK) {
        set_element(invalid_ids, 0, 0, 0, 0);
        status = draw_outputs(&run->host, output_dtype);
    }
    return status == MOER_OK ? device_place(&run->host, device, &run->placed) : status;
}

static double now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec * 1e-6;
}

/* The L2 norm of a matrix, which may be 2^50 rows of nothing. */
static double norm(const DLTensor *tensor) {
    double sum = 0;
    for (int64_t i = 0; tensor->shape[1] > 0 && i < tensor->shape[0]; i++)
        for (int64_t j = 0; j < tensor->shape[1]; j++) {
            const double value = get_element(tensor, i, j, 0);
            sum += value * value;
        }
    return sqrt(sum);
}

static void print_summary(struct run *run, const char *device, const char *kernel, double ms) {
    const struct dims dims = call_dims(&run->host);
    const int invalid_ids = (int)get_element(run->host.args.common.invalid_ids, 0, 0, 0);
    printf("operation    %s\n", moer_operation_name(run->host.operation));
    printf("sizes        N = %lld, H = %lld, E = %lld, K = %lld\n", (long long)dims.tokens, (long long)dims.hidden,
           (long long)dims.experts, (long long)dims.top_k);
    printf("dtype        %s, outputs %s\n", dtype_name(call_tensor(&run->host, "hidden_states")->dtype),
           dtype_name(call_tensor(&run->host, "grad_hidden_states")->dtype));
    printf("device       %s\n", device);
    printf("kernel       %s\n", kernel);
    printf("time         %.3f ms, of a single call that nothing warmed up\n", ms);
    if (invalid_ids > 0)
        printf("invalid ids  %d, which were skipped\n", invalid_ids);
    size_t count;
    const struct moer_operand *operands = moer_operands(run->host.operation, &count);
    for (size_t i = 0; i < count; i++)
        if (operands[i].kind == MOER_DTYPE_OUTPUT)
            printf("norm         %.9g  %s\n", norm(*call_field(&run->host, &operands[i])), operands[i].name);
}

static int execute(struct run *run, const char *device_name, DLDevice device, DLDataType output_dtype) {
    char kernel[512];
    enum moer_status status = add_tensors(run, device, output_dtype);
    if (status == MOER_OK)
        status = call_explain(&run->placed, kernel, sizeof kernel);
    const double start = now_ms();
    if (status == MOER_OK)
        status = call_run(&run->placed);
    if (status == MOER_OK) /* the call is asynchronous: this waits for it */
        status = device_fetch(&run->host, &run->placed, MOER_DTYPE_COUNT);
    const double ms = now_ms() - start;
    if (status == MOER_OK)
        status = device_fetch(&run->host, &run->placed, MOER_DTYPE_OUTPUT);
    if (status != MOER_OK)
        return complain("%s on %s: %s", run->file.path, device_name, library_error(status));
    print_summary(run, device_name, kernel, ms);
    return 0;
}

/* ---- What becomes of the result --------------------------------------------------------------------------------- */

static int write_outputs(struct run *run, const char *path) {
    const char *names[CALL_OUTPUTS];
    const DLTensor *tensors[CALL_OUTPUTS];
    size_t operand_count, count = 0;
    const struct moer_operand *operands = moer_operands(run->host.operation, &operand_count);
    for (size_t i = 0; i < operand_count; i++)
        if (operands[i].kind == MOER_DTYPE_OUTPUT) {
            names[count] = operands[i].name;
            tensors[count++] = *call_field(&run->host, &operands[i]);
        }
    return safetensors_write(path, moer_operation_name(run->host.operation), names, tensors, count);
}

/* Compares the outputs with the loop, or with what is expected of them; says what of each comes closest to its bound.
 */
static int compare(const struct run *run, const DLTensor *const *expected, int gpu) {
    struct reference_options options = {.gpu = gpu};
    struct reference_report report[CALL_OUTPUTS];
    char text[256];
    for (int i = 0; i < CALL_OUTPUTS && expected; i++)
        options.expected[i] = expected[i];
    const int result = reference_compare(&run->host, &options, report);
    if (result < 0)
        return complain("%s: out of memory for the comparison", run->file.path);
    for (int i = 0; i < CALL_OUTPUTS; i++) {
        const struct reference_report *of = &report[i];
        printf("%s  %s, by %s: ", of->broken ? "BROKEN" : "ok    ", of->name,
               options.expected[i] ? "the file" : "the loop");
        reference_describe(of, text, sizeof text);
        puts(text);
    }
    return result;
}

static void release(struct run *run) {
    size_t count;
    device_release(&run->host, &run->placed);
    const struct moer_operand *operands = moer_operands(run->host.operation, &count);
    for (size_t i = 0; i < count; i++)
        if (!is_input(&operands[i]))
            moer_tensor_free((DLTensor *)*call_field(&run->host, &operands[i]));
    safetensors_close(&run->file);
}

enum { DEVICE, OUTPUT_DTYPE, CHECK, OUTPUT, OPTIONS };

static int read_output_dtype(const struct command_option *option, DLDataType own, DLDataType *dtype) {
    if (read_dtype(option, dtype_name(own), dtype) != 0)
        return EXIT_TROUBLE;
    if (dtype->bits != 32 && strcmp(dtype_name(*dtype), dtype_name(own)) != 0)
        return complain("--output-dtype %s must be float32 or %s, as hidden_states is", option->value, dtype_name(own));
    return 0;
}

static int run_file(struct run *run, const char *path, const struct command_option *options) {
    const char *output = options[OUTPUT].value, *device_name = options[DEVICE].value ? options[DEVICE].value : "cpu";
    DLDevice device;
    DLDataType dtype;
    if (read_device(device_name, &device) != 0 || read_file(run, path) != 0)
        return EXIT_TROUBLE;
    if (read_output_dtype(&options[OUTPUT_DTYPE], call_tensor(&run->host, "hidden_states")->dtype, &dtype) != 0)
        return EXIT_TROUBLE;
    if (!output && !options[CHECK].value && !run->has_expected)
        return complain("%s: holds nothing that is expected of the result: say -o FILE to write it, or --check", path);
    if (execute(run, device_name, device, dtype) != 0 || (output && write_outputs(run, output) != 0))
        return EXIT_TROUBLE;
    const int gpu = device.device_type == kDLCUDA;
    const int by_file = run->has_expected ? compare(run, run->expected, gpu) : 0;
    const int by_loop = options[CHECK].value ? compare(run, NULL, gpu) : 0;
    return by_file > by_loop ? by_file : by_loop;
}

int run_main(int argc, char **argv) {
    struct command_option options[OPTIONS] = {[DEVICE] = {"device", 0, 1, NULL},
                                              [OUTPUT_DTYPE] = {"output-dtype", 0, 1, NULL},
                                              [CHECK] = {"check", 0, 0, NULL},
                                              [OUTPUT] = {"output", 'o', 1, NULL}};
    static const char *const names[] = {"OPERATION", "FILE"};
    const char *arguments[2];
    enum moer_operation operation;
    if (parse_arguments(argc, argv, options, OPTIONS, names, arguments, 2) != 0 ||
        read_operation(arguments[0], &operation) != 0)
        return EXIT_TROUBLE;
    struct run run = {0};
    call_init(&run.host, operation);
    call_init(&run.placed, operation);
    const int status = run_file(&run, arguments[1], options);
    release(&run);
    return status;
}
