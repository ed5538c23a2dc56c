/* SPDX-License-Identifier: Apache-2.0 */
/* Cases on the device: each run begins with outputs and workspace full of NaN, and ends with a look behind the
 * workspace. */
#define _XOPEN_SOURCE 700 /* setenv() */
#include "selfcheck.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "device.h"

enum { GUARD_BYTES = 4096 };

/* ---- The report ------------------------------------------------------------------------------------------------- */

static void print_line(const char *word, const char *format, va_list values) {
    char line[400];
    vsnprintf(line, sizeof line, format, values);
    printf("%s %s\n", word, line);
    fflush(stdout);
}

void report(const char *word, const char *format, ...) {
    va_list values;
    va_start(values, format);
    print_line(word, format, values);
    va_end(values);
}

/* After a fault the driver may not be asked for anything, not even to say goodbye. */
void report_end(const char *word, const char *format, ...) {
    va_list values;
    va_start(values, format);
    print_line(word, format, values);
    va_end(values);
    _exit(EXIT_SUCCESS);
}

void selfcheck_describe(const struct selfcheck_case *one, char text[CASE_TEXT]) {
    snprintf(text, CASE_TEXT, "%s, %s%s%s%s, N = %lld, H = %lld, E = %lld, K = %lld",
             moer_operation_name(one->operation), dtype_name(one->dtype),
             one->output_dtype.bits != one->dtype.bits ? " to float32" : "", one->accumulate ? ", accumulated" : "",
             one->padding ? ", strided" : "", (long long)one->dims.tokens, (long long)one->dims.hidden,
             (long long)one->dims.experts, (long long)one->dims.top_k);
}

/* What is done now is the fast path's doing; that has been found wrong already, if there are words for it. */
static int is_fast;
static const char *found = "";

void blame(const char *difference) {
    found = difference;
}

/* A device that fails under the fast path is the path's doing; anything else is not. */
void need(enum moer_status status, const struct selfcheck_case *one) {
    char text[CASE_TEXT];
    if (status == MOER_OK)
        return;
    if (*found)
        report_end("wrong", "%s", found);
    selfcheck_describe(one, text);
    report_end(status == MOER_DEVICE && is_fast ? "wrong" : "trouble", "%s: %s", text,
               *moer_last_error() ? moer_last_error() : moer_status_string(status));
}

/* ---- Calls ------------------------------------------------------------------------------------------------------ */

void trial_choose(const struct trial *trial, const char *path, const char *how) {
    char text[CASE_TEXT];
    selfcheck_describe(trial->one, text);
    is_fast = *found || strcmp(path, "generic") != 0;
    report(is_fast ? "fast" : "doing", "%s%s%s", text, how, is_fast ? "" : ", generic path");
    setenv("MOER_CUDA_ARCH", path, 1);
}

/* Makes the call, of views where there is padding. */
static void make_call(struct trial *trial) {
    size_t count;
    const struct moer_operand *operands = moer_operands(trial->one->operation, &count);
    const int64_t hidden = trial->one->dims.hidden;
    trial->call = trial->placed;
    trial->strides[0] = hidden + trial->one->padding;
    trial->strides[1] = 1;
    for (size_t i = 0; i < count && trial->one->padding; i++) {
        const DLTensor **field = call_field(&trial->call, &operands[i]);
        if (!*field || operands[i].axes[1] != 'H')
            continue;
        trial->views[i] = **field;
        trial->shapes[i][0] = (*field)->shape[0];
        trial->shapes[i][1] = hidden;
        trial->views[i].shape = trial->shapes[i];
        trial->views[i].strides = trial->strides;
        *field = &trial->views[i];
    }
}

void trial_begin(struct trial *trial, const struct selfcheck_case *one) {
    char text[CASE_TEXT];
    selfcheck_describe(one, text);
    is_fast = *found != '\0';
    report(is_fast ? "fast" : "doing", "%s, prepared", text);
    trial->one = one;
    call_init(&trial->placed, one->operation);
    need(selfcheck_draw(one, &trial->host), one);
    need(device_place(&trial->host, selfcheck_device, &trial->placed), one);
    make_call(trial);
    need(call_workspace_size(&trial->call, &trial->workspace_size), one);
    const int64_t bytes = (int64_t)trial->workspace_size + GUARD_BYTES;
    const DLDataType byte = {kDLUInt, 8, 1};
    need(moer_tensor_new(&trial->workspace, selfcheck_device, byte, 1, &bytes), one);
    need(moer_tensor_new(&trial->scratch, (DLDevice){kDLCPU, 0}, byte, 1, &bytes), one);
    memset(trial->scratch->data, 0xFF, (size_t)bytes);
    trial->call.args.common.workspace = trial->workspace->data;
    trial->call.args.common.workspace_size = trial->workspace_size;
}

void trial_end(struct trial *trial) {
    device_release(&trial->host, &trial->placed);
    call_free(&trial->host);
    moer_tensor_free(trial->workspace);
    moer_tensor_free(trial->scratch);
}

static int is_output(const struct moer_operand *operand) {
    return operand->kind == MOER_DTYPE_OUTPUT;
}

/* Fills what the call is to write with NaN, on the device. */
void trial_poison(const struct trial *trial) {
    size_t count;
    const struct moer_operand *operands = moer_operands(trial->one->operation, &count);
    selfcheck_poison(trial->one, &trial->host);
    for (size_t i = 0; i < count; i++)
        if (is_output(&operands[i]))
            need(moer_tensor_copy(call_tensor(&trial->placed, operands[i].name),
                                  call_tensor(&trial->host, operands[i].name)),
                 trial->one);
    need(moer_tensor_copy(trial->workspace, trial->scratch), trial->one);
}

/* Takes the outputs back, which waits for the call; nothing may be written behind the workspace. */
void trial_fetch(const struct trial *trial) {
    static unsigned char guard[GUARD_BYTES];
    int64_t bytes = GUARD_BYTES;
    char text[CASE_TEXT];
    DLTensor from = *trial->workspace, to = *trial->scratch;
    need(device_fetch(&trial->host, &trial->placed, MOER_DTYPE_OUTPUT), trial->one);
    from.shape = to.shape = &bytes;
    from.byte_offset += trial->workspace_size;
    to.data = guard;
    to.byte_offset = 0;
    need(moer_tensor_copy(&to, &from), trial->one);
    selfcheck_describe(trial->one, text);
    for (int i = 0; i < GUARD_BYTES; i++)
        if (guard[i] != 0xFF)
            report_end("wrong", "%s: byte %d behind the workspace was written", text, i);
}

void trial_run(const struct trial *trial, const char *path, const char *how) {
    trial_poison(trial);
    trial_choose(trial, path, how);
    need(call_run(&trial->call), trial->one);
    trial_fetch(trial);
}

/* ---- Results ---------------------------------------------------------------------------------------------------- */

void results_take(struct results *results, const struct trial *trial) {
    size_t count;
    int output = 0;
    const struct moer_operand *operands = moer_operands(trial->one->operation, &count);
    for (size_t i = 0; i < count; i++)
        if (is_output(&operands[i])) {
            const DLTensor *from = call_tensor(&trial->host, operands[i].name);
            DLTensor *to;
            need(moer_tensor_new(&to, from->device, from->dtype, from->ndim, from->shape), trial->one);
            need(moer_tensor_copy(to, from), trial->one);
            results->names[output] = operands[i].name;
            results->outputs[output++] = to;
        }
}

void results_free(struct results *results) {
    for (int i = 0; i < CALL_OUTPUTS; i++)
        moer_tensor_free(results->outputs[i]);
}
