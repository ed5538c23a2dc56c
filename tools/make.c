/* SPDX-License-Identifier: Apache-2.0 */
/* moerouter make: draws a case and writes it to a file. */
#include "command.h"

#include "draw.h"
#include "safetensors.h"

enum { TOKENS, HIDDEN, EXPERTS, TOP_K, SEED, DTYPE, OUTPUT, OPTIONS };

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
        read_number(&options[SEED], 0, UINT64_MAX, &seed) != 0)
        return EXIT_TROUBLE;
    struct dims dims = draw_suite_dims(operation);
    if (!options[TOKENS].value)
        return complain("--tokens is missing");
    if (read_size(&options[TOKENS], 0, INT64_MAX, &dims.tokens) != 0 || read_dims(&options[HIDDEN], 0, &dims) != 0)
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
