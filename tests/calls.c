/* SPDX-License-Identifier: Apache-2.0 */
/* What several suites make of a trial: copies of its outputs, a trial of some of its tokens; and calls without memory.
 */
#include "support.h"

void copy_outputs(struct trial *trial, DLTensor *copies[CALL_OUTPUTS]) {
    for (int i = 0; i < CALL_OUTPUTS; i++)
        copies[i] = copy_tensor(trial_output(trial, i));
}

void expect_outputs(struct trial *trial, DLTensor *const copies[CALL_OUTPUTS], const char *what) {
    for (int i = 0; i < CALL_OUTPUTS; i++)
        same_bits(trial_output(trial, i), copies[i], what);
}

void free_outputs(DLTensor *copies[CALL_OUTPUTS]) {
    for (int i = 0; i < CALL_OUTPUTS; i++)
        moer_tensor_free(copies[i]);
}

struct trial *trial_of_tokens(struct trial *from, const int64_t *tokens, int64_t count) {
    struct plan plan = from->plan;
    size_t operand_count;
    const struct moer_operand *operands = moer_operands(plan.operation, &operand_count);
    plan.dims.tokens = count;
    struct trial *trial = trial_new(&plan);
    for (size_t i = 0; i < operand_count; i++) {
        const DLTensor *to = *call_field(&trial->call, &operands[i]), *source = *call_field(&from->call, &operands[i]);
        int mask = operands[i].any_strides, by_token = operands[i].axes[0] == 'N';
        if (!to || operands[i].kind == MOER_DTYPE_OUTPUT)
            continue;
        for (int64_t n = 0; n < (mask ? count : to->shape[0]); n++) {
            int64_t of = mask || by_token ? tokens[n] : n;
            for (int64_t j = 0; j < to->shape[1]; j++)
                for (int64_t e = 0; mask && e < to->shape[0]; e++)
                    set_element(to, e, j, n, get_element(source, e, j, of));
            for (int64_t j = 0; !mask && j < to->shape[1]; j++)
                set_element(to, n, j, 0, get_element(source, of, j, 0));
        }
    }
    return trial;
}

void make_outline(struct outline *outline, enum moer_operation operation, struct dims dims, enum type type) {
    DLDevice device;
    size_t count;
    const struct moer_operand *operands = moer_operands(operation, &count);
    test_device(&device);
    call_init(&outline->call, operation);
    for (size_t i = 0; i < count; i++) {
        DLTensor *tensor = &outline->tensors[i];
        *tensor = (DLTensor){.device = device, .dtype = type_of[type], .shape = outline->shapes[i]};
        tensor->ndim = call_shape(&operands[i], dims, outline->shapes[i]);
        if (operands[i].kind == MOER_DTYPE_FLOAT)
            tensor->dtype = type_of[F32];
        if (operands[i].kind == MOER_DTYPE_ID || operands[i].kind == MOER_DTYPE_COUNT)
            tensor->dtype = (DLDataType){kDLInt, 32, 1};
        *call_field(&outline->call, &operands[i]) = tensor;
    }
}
