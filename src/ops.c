/* SPDX-License-Identifier: Apache-2.0 */
/* The operations: what each is made of, and its public functions. A call is checked, its tensors' device picks the
 * backend, and the same struct goes on to the kernel. */
#include "config.h"
#include "internal.h"
#include <stdlib.h>
#include <string.h>

#define REQUIRED 1, 0
#define OPTIONAL 0, 0
#define COUNT_OF(table) (sizeof(table) / sizeof *(table))

#define SOFTMAX(name, axes, kind, flags)                                                                               \
    { #name, axes, offsetof(struct moer_softmax_topk_backward_args, name), kind, flags }
static const struct moer_operand softmax_operands[] = {
    SOFTMAX(hidden_states, "NH", MOER_DTYPE_T, REQUIRED),
    SOFTMAX(gate_weight, "EH", MOER_DTYPE_T, REQUIRED),
    SOFTMAX(router_logits, "NE", MOER_DTYPE_T, OPTIONAL),
    SOFTMAX(routing_probs, "NE", MOER_DTYPE_FLOAT, REQUIRED),
    SOFTMAX(selected_experts, "NK", MOER_DTYPE_ID, REQUIRED),
    SOFTMAX(routing_weights_sum, "N1", MOER_DTYPE_FLOAT, OPTIONAL),
    SOFTMAX(grad_routing_weights, "NK", MOER_DTYPE_T, REQUIRED),
    {"grad_expert_mask", "EKN", offsetof(struct moer_softmax_topk_backward_args, grad_expert_mask), MOER_DTYPE_T, 0, 1},
    SOFTMAX(grad_router_logits, "NE", MOER_DTYPE_T, OPTIONAL),
    SOFTMAX(grad_hidden_states, "NH", MOER_DTYPE_OUTPUT, OPTIONAL),
    SOFTMAX(grad_gate_weight, "EH", MOER_DTYPE_OUTPUT, OPTIONAL),
    SOFTMAX(grad_logits, "NE", MOER_DTYPE_OUTPUT, OPTIONAL),
    SOFTMAX(invalid_ids, "1", MOER_DTYPE_COUNT, OPTIONAL),
};

#define SIGMOID(name, axes, kind, flags)                                                                               \
    { #name, axes, offsetof(struct moer_sigmoid_topk_backward_args, name), kind, flags }
static const struct moer_operand sigmoid_operands[] = {
    SIGMOID(hidden_states, "NH", MOER_DTYPE_T, REQUIRED),
    SIGMOID(weight, "EH", MOER_DTYPE_T, REQUIRED),
    SIGMOID(grad_topk_weights, "NK", MOER_DTYPE_T, REQUIRED),
    SIGMOID(scores, "NE", MOER_DTYPE_T, REQUIRED),
    SIGMOID(topk_indices, "NK", MOER_DTYPE_ID, REQUIRED),
    SIGMOID(topk_weights, "NK", MOER_DTYPE_T, OPTIONAL),
    SIGMOID(topk_weights_normalized, "NK", MOER_DTYPE_T, REQUIRED),
    SIGMOID(denominator, "N1", MOER_DTYPE_T, REQUIRED),
    SIGMOID(grad_hidden_states, "NH", MOER_DTYPE_OUTPUT, OPTIONAL),
    SIGMOID(grad_weight, "EH", MOER_DTYPE_OUTPUT, OPTIONAL),
    SIGMOID(grad_logits, "NE", MOER_DTYPE_OUTPUT, OPTIONAL),
    SIGMOID(invalid_ids, "1", MOER_DTYPE_COUNT, OPTIONAL),
};

const struct moer_operation_info moer_operation_table[MOER_OPERATIONS] = {
    [MOER_SOFTMAX_TOPK_BACKWARD] = {"softmax_topk_backward", sizeof(struct moer_softmax_topk_backward_args),
                                    softmax_operands, COUNT_OF(softmax_operands)},
    [MOER_SIGMOID_TOPK_BACKWARD] = {"sigmoid_topk_backward", sizeof(struct moer_sigmoid_topk_backward_args),
                                    sigmoid_operands, COUNT_OF(sigmoid_operands)},
};

/* Checks a call and finds the backend that will take it. */
static enum moer_status choose(enum moer_operation operation, const void *caller, enum moer_scope scope,
                               union moer_args *args, const struct moer_backend **backend,
                               struct moer_message *message) {
    enum moer_status status = moer_validate(operation, caller, scope, args, message);
    if (status)
        return status;
    *backend = moer_find_backend(moer_args_device(operation, args), &status, message);
    return status;
}

/* MOER_VERBOSE=1: a line a call on stderr. */
static void print_call(enum moer_operation operation, const union moer_args *args, const struct moer_backend *backend) {
    const struct moer_operation_info *info = &moer_operation_table[operation];
    struct moer_message kernel = {""};
    char shapes[128] = "";
    for (size_t i = 0, length = 0; i < info->operand_count && i < 2; i++) { /* hidden states and gate: N, H, E */
        const DLTensor *tensor = moer_operand_tensor(args, &info->operands[i]);
        length += (size_t)snprintf(shapes + length, sizeof shapes - length, " %s [%lld, %lld]", info->operands[i].name,
                                   (long long)tensor->shape[0], (long long)tensor->shape[1]);
    }
    backend->explain(operation, args, &kernel);
    fprintf(stderr, "moerouter: %s:%s: %s\n", info->name, shapes, kernel.text);
}

static enum moer_status run(enum moer_operation operation, const char *function, const void *caller) {
    struct moer_message message;
    union moer_args args;
    const struct moer_backend *backend = NULL;
    size_t needed = 0;
    enum moer_status status = choose(operation, caller, MOER_ALL, &args, &backend, &message);
    if (!status && args.common.workspace)
        status = backend->workspace_size(operation, &args, &needed, &message);
    if (!status && args.common.workspace && args.common.workspace_size < needed)
        status = moer_fail(&message, MOER_INVALID, "workspace_size is %zu but this call needs %zu bytes",
                           args.common.workspace_size, needed);
    if (!status) {
        moer_settle(backend, moer_args_device(operation, &args).device_id, NULL);
        const char *verbose = getenv("MOER_VERBOSE");
        if (verbose && !strcmp(verbose, "1"))
            print_call(operation, &args, backend);
        status = backend->run(operation, &args, &message);
    }
    return moer_report(function, status, &message);
}

static enum moer_status workspace_size(enum moer_operation operation, const char *function, const void *caller,
                                       size_t *bytes) {
    struct moer_message message;
    union moer_args args;
    const struct moer_backend *backend = NULL;
    enum moer_status status = bytes ? choose(operation, caller, MOER_SHAPES, &args, &backend, &message)
                                    : moer_fail(&message, MOER_INVALID, "bytes is NULL");
    if (!status)
        status = backend->workspace_size(operation, &args, bytes, &message);
    return moer_report(function, status, &message);
}

static enum moer_status explain(enum moer_operation operation, const char *function, const void *caller, char *text,
                                size_t size) {
    struct moer_message message;
    union moer_args args;
    const struct moer_backend *backend = NULL;
    enum moer_status status = text || !size ? choose(operation, caller, MOER_SHAPES, &args, &backend, &message)
                                            : moer_fail(&message, MOER_INVALID, "text is NULL");
    if (!status)
        moer_settle(backend, moer_args_device(operation, &args).device_id, NULL);
    if (!status)
        status = backend->explain(operation, &args, &message);
    if (!status)
        moer_copy_text(text, size, message.text);
    return moer_report(function, status, &message);
}

enum moer_status moer_softmax_topk_backward(const struct moer_softmax_topk_backward_args *args) {
    return run(MOER_SOFTMAX_TOPK_BACKWARD, __func__, args);
}

enum moer_status moer_softmax_topk_backward_workspace_size(const struct moer_softmax_topk_backward_args *args,
                                                           size_t *bytes) {
    return workspace_size(MOER_SOFTMAX_TOPK_BACKWARD, __func__, args, bytes);
}

enum moer_status moer_softmax_topk_backward_explain(const struct moer_softmax_topk_backward_args *args, char *text,
                                                    size_t size) {
    return explain(MOER_SOFTMAX_TOPK_BACKWARD, __func__, args, text, size);
}

enum moer_status moer_sigmoid_topk_backward(const struct moer_sigmoid_topk_backward_args *args) {
    return run(MOER_SIGMOID_TOPK_BACKWARD, __func__, args);
}

enum moer_status moer_sigmoid_topk_backward_workspace_size(const struct moer_sigmoid_topk_backward_args *args,
                                                           size_t *bytes) {
    return workspace_size(MOER_SIGMOID_TOPK_BACKWARD, __func__, args, bytes);
}

enum moer_status moer_sigmoid_topk_backward_explain(const struct moer_sigmoid_topk_backward_args *args, char *text,
                                                    size_t size) {
    return explain(MOER_SIGMOID_TOPK_BACKWARD, __func__, args, text, size);
}

const char *moer_version(void) {
    return PACKAGE_VERSION;
}

const char *moer_operation_name(enum moer_operation operation) {
    return (unsigned)operation < MOER_OPERATIONS ? moer_operation_table[operation].name : NULL;
}

const struct moer_operand *moer_operands(enum moer_operation operation, size_t *count) {
    int known = (unsigned)operation < MOER_OPERATIONS;
    if (count)
        *count = known ? moer_operation_table[operation].operand_count : 0;
    return known ? moer_operation_table[operation].operands : NULL;
}
