/* SPDX-License-Identifier: Apache-2.0 */
/* moerouter make: draws a case and writes it to a file. */
#include "command.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "draw.h"
#include "safetensors.h"

enum { TOKENS, HIDDEN, EXPERTS, TOP_K, SEED, DTYPE, OUTPUT, OPTIONS };

/* A whole number from 0 to max in decimal digits; an option that is not given leaves *value as it is. */
static int read_number(const struct command_option *option, uint64_t max, uint64_t *value) {
    if (!option->value)
        return 0;
    errno = 0;
    char *end;
    const unsigned long long number = strtoull(option->value, &end, 10);
    /* strtoull() would take signs and spaces too. */
    if (option->value[0] < '0' || option->value[0] > '9' || *end != '\0' || errno != 0 || number > max)
        return complain("--%s '%s' must be a number from 0 to %llu", option->name, option->value,
                        (unsigned long long)max);
    *value = number;
    return 0;
}

static int read_size(const struct command_option *option, uint64_t max, int64_t *size) {
    uint64_t value = (uint64_t)*size;
    const int result = read_number(option, max, &value);
    *size = (int64_t)value;
    return result;
}

static int read_sizes(const struct command_option *options, struct dims *dims) {
    if (!options[TOKENS].value)
        return complain("--tokens is missing");
    const int wrong = read_size(&options[TOKENS], INT64_MAX, &dims->tokens) != 0 ||
                      read_size(&options[HIDDEN], INT64_MAX, &dims->hidden) != 0 ||
                      read_size(&options[EXPERTS], INT32_MAX - 1, &dims->experts) != 0 ||
                      read_size(&options[TOP_K], INT32_MAX - 1, &dims->top_k) != 0;
    if (wrong)
        return EXIT_TROUBLE;
    if (dims->top_k > dims->experts)
        return complain("--top-k is %lld, but there are only %lld experts", (long long)dims->top_k,
                        (long long)dims->experts);
    return 0;
}

/* The inputs, and the scaling factor where the operation has one, which in a file is a tensor. */
static int write_case(const char *path, struct call *call, DLDataType dtype) {
    const char *names[CALL_MAX_OPERANDS + 1];
    const DLTensor *tensors[CALL_MAX_OPERANDS + 1];
    size_t operand_count, count = 0;
    const struct moer_operand *operands = moer_operands(call->operation, &operand_count);
    for (size_t i = 0; i < operand_count; i++)
        if (*call_field(call, &operands[i])) {
            names[count] = operands[i].name;
            tensors[count++] = *call_field(call, &operands[i]);
        }
    int64_t shape[1] = {1};
    double data[1];
    const DLTensor factor = {.data = data, .device = {kDLCPU, 0}, .ndim = 1, .dtype = dtype, .shape = shape};
    if (call->operation == MOER_SIGMOID_TOPK_BACKWARD) {
        set_element(&factor, 0, 0, 0, call->args.sigmoid.routed_scaling_factor);
        names[count] = "routed_scaling_factor";
        tensors[count++] = &factor;
    }
    return safetensors_write(path, moer_operation_name(call->operation), names, tensors, count);
}

int make_main(int argc, char **argv) {
    struct command_option options[OPTIONS] = {
        [TOKENS] = {"tokens", 0, 1, NULL},  [HIDDEN] = {"hidden", 0, 1, NULL}, [EXPERTS] = {"experts", 0, 1, NULL},
        [TOP_K] = {"top-k", 0, 1, NULL},    [SEED] = {"seed", 0, 1, NULL},     [DTYPE] = {"dtype", 0, 1, NULL},
        [OUTPUT] = {"output", 'o', 1, NULL}};
    static const char *const names[] = {"OPERATION"};
    const char *name;
    if (parse_arguments(argc, argv, options, OPTIONS, names, &name, 1) != 0)
        return EXIT_TROUBLE;
    enum moer_operation operation;
    DLDataType dtype;
    uint64_t seed = 0;
    if (read_operation(name, &operation) != 0 || read_dtype(&options[DTYPE], "bfloat16", &dtype) != 0 ||
        read_number(&options[SEED], UINT64_MAX, &seed) != 0)
        return EXIT_TROUBLE;
    struct dims dims = draw_suite_dims(operation);
    if (read_sizes(options, &dims) != 0)
        return EXIT_TROUBLE;
    if (!options[OUTPUT].value)
        return complain("-o FILE is missing");
    struct call call;
    const enum moer_status status = draw_inputs(&call, operation, dims, dtype, seed, 1);
    if (status != MOER_OK)
        return complain("%s", library_error(status));
    const int result = write_case(options[OUTPUT].value, &call, dtype);
    call_free(&call);
    return result;
}
