/* SPDX-License-Identifier: Apache-2.0 */
/* libFuzzer: any call. What the library answers is foreseen from the rules of the public header about data; where a
 * rule about shapes, dtypes, strides or devices is broken, the query of the workspace's size must say so too. A refused
 * call changes nothing but the count of invalid ids; one that is accepted writes all of its outputs, nothing else, and
 * the same bits when it is made again. */
#include "fuzz.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

#define EACH_PART(name, fuzz)                                                                                          \
    const struct part *name = (fuzz)->parts;                                                                           \
    name < (fuzz)->parts + (fuzz)->count;                                                                              \
    name++

static void expect(int holds, const char *rule) {
    if (holds)
        return;
    fprintf(stderr, "broken: %s; status and message: %s\n", rule, moer_last_error());
    abort();
}

static enum moer_status with_message(enum moer_status status) {
    expect((status == MOER_OK) == !*moer_last_error(), "a message where there is an error, and only there");
    return status;
}

/* ---- What must come of it ---- */

static int is_output(const struct part *part) {
    return part->operand->kind == MOER_DTYPE_OUTPUT || part->operand->kind == MOER_DTYPE_COUNT;
}

static int overlap(const struct part *a, const struct part *b) {
    return a->owner == b->owner && a->shift < b->shift + b->span && b->shift < a->shift + a->span;
}

/* The rules that a query cannot check, for tensors. */
static int data_is_right(const struct fuzz_case *fuzz) {
    for (EACH_PART(a, fuzz)) {
        const uintptr_t data = (uintptr_t)a->tensor.data, start = data + a->tensor.byte_offset;
        if (!part_filled(fuzz, a))
            continue;
        if (data == 0 || start < data || start % dtype_size(a->tensor.dtype))
            return 0;
        for (EACH_PART(b, fuzz))
            if (a != b && part_filled(fuzz, b) && is_output(a) && overlap(a, b))
                return 0;
    }
    return 1;
}

static uint32_t invalid_ids(const struct fuzz_case *fuzz, int64_t experts) {
    uint32_t count = 0;
    for (EACH_PART(part, fuzz))
        for (int64_t i = 0; part->operand->kind == MOER_DTYPE_ID && i < part->shape[0] * part->shape[1]; i++) {
            const void *at = part_id(part, i / part->shape[1], i % part->shape[1]);
            const int64_t id = part->tensor.dtype.bits == 64 ? *(const int64_t *)at : *(const int32_t *)at;
            count += id < -1 || id >= experts;
        }
    return count;
}

/* Every tensor has its memory, and no loop will be long. */
static int can_run(const struct fuzz_case *fuzz, struct dims dims) {
    const int64_t most = 1 << 12;
    for (EACH_PART(part, fuzz))
        if (part_present(fuzz, part) && !part->describable)
            return 0;
    return dims.tokens <= most && dims.hidden <= most && dims.experts <= most && dims.top_k <= most;
}

/* ---- Running ---- */

/* Sets the workspace that the case asks for; returns its memory. */
static void *add_workspace(struct fuzz_case *fuzz, size_t needed) {
    static const size_t larger = 256;
    const size_t sizes[WORKSPACES] = {0, needed, needed + larger, needed - 1, needed}, size = sizes[fuzz->workspace];
    const size_t shift = fuzz->workspace == MISALIGNED ? 16 : 0;
    void *memory;
    if (fuzz->workspace == NONE)
        return NULL;
    expect(posix_memalign(&memory, 256, size + shift) == 0, "there is memory for a workspace");
    memset(memory, 0xFF, size + shift);
    fuzz->call->args.common.workspace = (char *)memory + shift;
    fuzz->call->args.common.workspace_size = size;
    return memory;
}

/* Where an output's rows lie in its block; none of any other tensor. */
struct rows {
    size_t first, stride, bytes, count;
};

static struct rows output_rows(const struct fuzz_case *fuzz, const struct part *part) {
    const size_t size = dtype_size(part->tensor.dtype), bytes = (size_t)part->shape[1] * size;
    if (part->operand->kind != MOER_DTYPE_OUTPUT || !part_filled(fuzz, part))
        return (struct rows){0};
    return (struct rows){.first = part->shift,
                         .stride = part->no_strides ? bytes : (size_t)part->strides[0] * size,
                         .bytes = bytes,
                         .count = (size_t)part->shape[0]};
}

static void expect_memory(const struct fuzz_case *fuzz, const char *rule) {
    for (EACH_PART(part, fuzz))
        expect(part->bytes == 0 || !memcmp(part->block, part->expected, part->bytes), rule);
}

static void expect_ids_counted(const struct fuzz_case *fuzz, uint32_t count) {
    for (EACH_PART(part, fuzz))
        if (part->operand->kind == MOER_DTYPE_COUNT && part_filled(fuzz, part)) {
            unsigned char *at = part->owner->expected + part->shift;
            uint32_t sum;
            memcpy(&sum, at, sizeof sum);
            sum += count;
            memcpy(at, &sum, sizeof sum);
        }
    expect_memory(fuzz, "a call that is refused changes only the count of invalid ids");
}

/* What the outputs hold is right; nothing else has changed. */
static void expect_outputs_written(const struct fuzz_case *fuzz) {
    for (EACH_PART(part, fuzz)) {
        const struct rows rows = output_rows(fuzz, part);
        for (size_t at = rows.first, row = 0; row < rows.count; row++, at += rows.stride)
            memcpy(part->owner->expected + at, part->owner->block + at, rows.bytes);
    }
    expect_memory(fuzz, "a call writes to its outputs only");
}

/* The outputs hold something else than before the last call, except where the call adds to it. */
static void change_outputs(const struct fuzz_case *fuzz) {
    for (EACH_PART(part, fuzz))
        if (part->bytes > 0)
            memcpy(part->block, part->original, part->bytes);
    for (EACH_PART(part, fuzz)) {
        const struct rows rows = output_rows(fuzz, part);
        if (fuzz->whole.args.common.accumulate && strcmp(part->operand->axes, "EH") == 0)
            continue;
        for (size_t at = rows.first, row = 0; row < rows.count; row++, at += rows.stride)
            for (size_t byte = 0; byte < rows.bytes; byte++)
                part->owner->block[at + byte] ^= 0xFF;
    }
}

/* A call of which the query has no complaints. */
static void run_answered(struct fuzz_case *fuzz, size_t needed, int64_t experts) {
    const int right = data_is_right(fuzz) && fuzz->workspace != TOO_SMALL && fuzz->workspace != MISALIGNED;
    const uint32_t invalid = right ? invalid_ids(fuzz, experts) : 0;
    void *workspace = add_workspace(fuzz, needed);
    const enum moer_status status = with_message(call_run(fuzz->call));
    expect(status == (right && !invalid ? MOER_OK : MOER_INVALID),
           "a call succeeds if it keeps the rules, and only then");
    if (status == MOER_OK) {
        expect_outputs_written(fuzz);
        change_outputs(fuzz);
        expect(with_message(call_run(fuzz->call)) == MOER_OK, "a call that succeeded succeeds again");
        expect_memory(fuzz, "a call gives the same bits again");
    } else {
        expect_ids_counted(fuzz, invalid);
    }
    free(workspace);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count) {
    struct fuzz_case fuzz;
    char text[256];
    size_t needed = 0;
    case_make(&fuzz, bytes, count);
    const enum moer_status status = with_message(call_workspace_size(fuzz.call, &needed));
    expect(with_message(call_explain(fuzz.call, text, sizeof text)) == status, "both queries have the same answer");
    if (status != MOER_OK) {
        expect(with_message(call_run(fuzz.call)) != MOER_OK, "a call is refused where the query is");
        expect_memory(&fuzz, "a call that is refused changes nothing");
    } else if (can_run(&fuzz, call_dims(&fuzz.whole))) {
        run_answered(&fuzz, needed, call_dims(&fuzz.whole).experts);
    }
    case_free(&fuzz);
    return 0;
}
