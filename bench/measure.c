/* SPDX-License-Identifier: Apache-2.0 */
/* A case of the benchmark: held to the double-precision loop first, then timed, then what it is compared with. */
#include "bench.h"

#include <string.h>

#include "check_cases.h"
#include "command.h"
#include "device.h"

/* A call as the suite makes it, with a workspace. */
struct trial {
    struct call host, placed;
    DLTensor *workspace;
};

static enum moer_status begin_trial(struct trial *trial, const struct bench_suite *suite, DLDevice device) {
    const DLDataType bfloat16 = {kDLBfloat, 16, 1}, byte = {kDLUInt, 8, 1};
    const struct check_case drawn = {
        .operation = suite->operation, .dims = suite->dims, .dtype = bfloat16, .output_dtype = bfloat16};
    size_t bytes = 0;
    trial->workspace = NULL;
    call_init(&trial->placed, suite->operation);
    enum moer_status status = check_case_draw(&drawn, &trial->host);
    if (status == MOER_OK) { /* the suite has no use for it */
        moer_tensor_free((DLTensor *)call_tensor(&trial->host, "grad_logits"));
        call_set(&trial->host, "grad_logits", NULL);
        status = device_place(&trial->host, device, &trial->placed);
    }
    if (status == MOER_OK)
        status = call_workspace_size(&trial->placed, &bytes);
    if (status == MOER_OK)
        status = moer_tensor_new(&trial->workspace, device, byte, 1, (int64_t[]){(int64_t)bytes});
    if (status == MOER_OK && bytes > 0) {
        trial->placed.args.common.workspace = trial->workspace->data;
        trial->placed.args.common.workspace_size = bytes;
    }
    return status;
}

static void end_trial(struct trial *trial) {
    moer_tensor_free(trial->workspace);
    device_release(&trial->host, &trial->placed);
    call_free(&trial->host);
}

/* Every element that is read, once, and every one that is written: of the mask, those of the chosen experts. */
static double bytes_to_move(const struct call *call) {
    double bytes = 0;
    size_t count;
    const struct moer_operand *operands = moer_operands(call->operation, &count);
    for (size_t i = 0; i < count; i++) {
        const DLTensor *tensor = call_tensor(call, operands[i].name);
        const int never_read =
            strcmp(operands[i].name, "router_logits") == 0 || strcmp(operands[i].name, "topk_weights") == 0;
        if (!tensor || never_read)
            continue;
        double elements = (double)dtype_size(tensor->dtype);
        for (int axis = strcmp(operands[i].name, "grad_expert_mask") == 0; axis < tensor->ndim; axis++)
            elements *= (double)tensor->shape[axis];
        bytes += elements;
    }
    return bytes;
}

/* Runs the call once and compares. */
static int check_trial(const struct bench *bench, struct trial *trial, struct reference_report report[CALL_OUTPUTS]) {
    const struct reference_options options = {.gpu = bench->device.device_type == kDLCUDA};
    enum moer_status status = call_run(&trial->placed);
    if (status == MOER_OK)
        status = device_fetch(&trial->host, &trial->placed, MOER_DTYPE_OUTPUT);
    if (status != MOER_OK)
        return complain("%s", library_error(status));
    const int result = reference_compare(&trial->host, &options, report);
    return result < 0 ? complain("out of memory for the comparison") : result;
}

int bench_measure(const struct bench *bench, const struct bench_suite *suite, struct bench_case *one,
                  struct reference_report report[CALL_OUTPUTS]) {
    struct trial trial;
    const enum moer_status status = begin_trial(&trial, suite, bench->device);
    int result = status == MOER_OK ? check_trial(bench, &trial, report) : complain("%s", library_error(status));
    one->checked = result == 0;
    if (result == 0) {
        one->bytes = bytes_to_move(&trial.host);
        one->workspace_bytes = trial.placed.args.common.workspace_size;
        result = bench->peers->time(&trial.host, &trial.placed, bench->repeats, one->us);
    }
    end_trial(&trial);
    return result;
}
