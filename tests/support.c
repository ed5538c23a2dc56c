/* SPDX-License-Identifier: Apache-2.0 */
#include "support.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* What a block holds outside the tensor: an id that is no expert, a number no sum would survive. */
enum { GUARD = 64, FENCE = 0x7F, UNWRITTEN = 0xFF };

const DLDataType type_of[TYPES] = {{kDLBfloat, 16, 1}, {kDLFloat, 16, 1}, {kDLFloat, 32, 1}};

static const struct {
    const char *name;
    int part;
} parts[] = {
    {"grad_hidden_states", TO_HIDDEN}, {"grad_gate_weight", TO_WEIGHT}, {"grad_weight", TO_WEIGHT},
    {"grad_logits", TO_LOGITS},        {"routing_weights_sum", SUM},    {"grad_expert_mask", MASK},
    {"grad_router_logits", DIRECT},    {"router_logits", UNREAD},       {"topk_weights", UNREAD},
};

static int part_of(const char *name) {
    for (int i = 0; i < LENGTH(parts); i++)
        if (strcmp(parts[i].name, name) == 0)
            return parts[i].part;
    return 0;
}

static const char *describe(const struct plan *plan) {
    static char text[256];
    snprintf(text, sizeof text,
             "%s %s N=%lld H=%lld E=%lld K=%lld absent=%d wide=%d short_ids=%d padding=%d flush=%d accumulate=%d",
             moer_operation_name(plan->operation), dtype_name(type_of[plan->type]), (long long)plan->dims.tokens,
             (long long)plan->dims.hidden, (long long)plan->dims.experts, (long long)plan->dims.top_k, plan->absent,
             plan->wide, plan->short_ids, plan->padding, plan->flush, plan->accumulate);
    return text;
}

/* ---- Blocks ---- */

static int64_t element_count(const DLTensor *tensor) {
    int64_t count = 1;
    for (int axis = 0; axis < tensor->ndim; axis++)
        count *= tensor->shape[axis];
    return count;
}

/* Memory followed by a page that must not be touched; *bytes is rounded up to whole pages. */
static unsigned char *map_block(size_t *bytes) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    *bytes = (*bytes + page - 1) / page * page;
    unsigned char *block = mmap(NULL, *bytes + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ck_assert_msg(block != MAP_FAILED, "no memory for a block of %zu bytes", *bytes);
    mprotect(block + *bytes, page, PROT_NONE);
    memset(block, FENCE, *bytes);
    return block;
}

static void unmap_block(unsigned char *block, size_t bytes) {
    munmap(block, bytes + (size_t)sysconf(_SC_PAGESIZE));
}

static void set_strides(struct fenced *fenced, const struct plan *plan) {
    const int64_t *shape = fenced->shape;
    int64_t *strides = fenced->strides;
    if (plan->padding == 0)
        return;
    fenced->tensor.strides = strides;
    strides[fenced->tensor.ndim - 1] = 1;
    if (fenced->tensor.ndim == 2)
        strides[0] = shape[1] + plan->padding;
    if (fenced->tensor.ndim == 3) {
        strides[0] = 1;
        strides[1] = shape[0];
        strides[2] = shape[0] * shape[1] + plan->padding;
    }
}

/* Gives the tensor a block; every other one reaches its data by byte_offset. */
static void give_block(struct fenced *fenced, const struct plan *plan, int by_offset) {
    DLTensor *tensor = &fenced->tensor;
    size_t size = dtype_size(tensor->dtype), span = 0;
    if (element_count(tensor) > 0) {
        int64_t last = tensor->strides ? 0 : element_count(tensor) - 1;
        for (int axis = 0; tensor->strides && axis < tensor->ndim; axis++)
            last += (tensor->shape[axis] - 1) * tensor->strides[axis];
        span = (size_t)(last + 1) * size;
    }
    fenced->bytes = span + 2 * GUARD;
    fenced->block = map_block(&fenced->bytes);
    fenced->before = malloc(fenced->bytes);
    unsigned char *start = plan->flush ? fenced->block + fenced->bytes - span : fenced->block + GUARD;
    tensor->byte_offset = by_offset ? size : 0;
    tensor->data = start - tensor->byte_offset;
}

static struct fenced *add_fenced(struct trial *trial, const struct moer_operand *operand, DLDataType dtype) {
    int by_offset = trial->plan.flush && trial->count % 2;
    struct fenced *fenced = &trial->tensors[trial->count++];
    fenced->operand = operand;
    fenced->tensor = (DLTensor){.device = {kDLCPU, 0}, .dtype = dtype, .shape = fenced->shape};
    fenced->tensor.ndim = call_shape(operand, trial->plan.dims, fenced->shape);
    set_strides(fenced, &trial->plan);
    give_block(fenced, &trial->plan, by_offset);
    place_add(&trial->place, fenced->block, fenced->bytes);
    *call_field(&trial->call, operand) = &fenced->tensor;
    return fenced;
}

static void copy_elements(const DLTensor *to, const DLTensor *from) {
    const int64_t *shape = to->shape;
    for (int64_t i = 0; i < shape[0]; i++)
        for (int64_t j = 0; j < (to->ndim > 1 ? shape[1] : 1); j++)
            for (int64_t k = 0; k < (to->ndim > 2 ? shape[2] : 1); k++)
                set_element(to, i, j, k, get_element(from, i, j, k));
}

void fill(const DLTensor *tensor, double value) {
    for (int64_t i = 0; i < tensor->shape[0]; i++)
        for (int64_t j = 0; j < (tensor->ndim > 1 ? tensor->shape[1] : 1); j++)
            set_element(tensor, i, j, 0, value);
}

/* ---- Rows as bytes ---- */

static int64_t row_count(const DLTensor *tensor) {
    return tensor->ndim == 2 ? tensor->shape[0] : 1;
}

/* The rows that have data. */
static int64_t filled_rows(const DLTensor *tensor) {
    return element_count(tensor) > 0 ? row_count(tensor) : 0;
}

static size_t row_bytes(const DLTensor *tensor) {
    return (size_t)tensor->shape[tensor->ndim - 1] * dtype_size(tensor->dtype);
}

/* A row of a tensor of one or two axes, the last contiguous. */
static unsigned char *row_at(const DLTensor *tensor, int64_t i) {
    size_t stride = tensor->strides ? (size_t)tensor->strides[0] * dtype_size(tensor->dtype) : row_bytes(tensor);
    return (unsigned char *)tensor->data + tensor->byte_offset + (size_t)i * stride;
}

void same_rows(const DLTensor *a, int64_t row_a, const DLTensor *b, int64_t row_b, const char *what) {
    size_t size = dtype_size(a->dtype);
    ck_assert_msg(row_bytes(a) == row_bytes(b), "%s: the rows differ in size", what);
    for (int64_t j = 0; j < a->shape[a->ndim - 1]; j++)
        if (memcmp(row_at(a, row_a) + (size_t)j * size, row_at(b, row_b) + (size_t)j * size, size))
            ck_abort_msg("%s: element (%lld, %lld) is %.9g, but (%lld, %lld) of the other is %.9g", what,
                         (long long)row_a, (long long)j, get_element(a, row_a, j, 0), (long long)row_b, (long long)j,
                         get_element(b, row_b, j, 0));
}

void same_bits(const DLTensor *a, const DLTensor *b, const char *what) {
    ck_assert_int_eq(row_count(a), row_count(b));
    for (int64_t i = 0; i < row_count(a); i++)
        same_rows(a, i, b, i, what);
}

DLTensor *copy_tensor(const DLTensor *tensor) {
    DLTensor *copy;
    ck_assert_int_eq(moer_tensor_new(&copy, (DLDevice){kDLCPU, 0}, tensor->dtype, tensor->ndim, tensor->shape),
                     MOER_OK);
    for (int64_t i = 0; i < filled_rows(tensor); i++)
        memcpy(row_at(copy, i), row_at(tensor, i), row_bytes(tensor));
    return copy;
}

/* ---- Building ---- */

static int is_output(const struct moer_operand *operand) {
    return operand->kind == MOER_DTYPE_OUTPUT;
}

DLTensor *trial_tensor(struct trial *trial, const char *name) {
    const DLTensor *tensor = call_tensor(&trial->call, name);
    ck_assert_msg(tensor != NULL, "%s: there is no %s", describe(&trial->plan), name);
    return (DLTensor *)tensor;
}

DLTensor *trial_output(struct trial *trial, int index) {
    size_t count;
    const struct moer_operand *operand = moer_operands(trial->plan.operation, &count);
    for (;; operand++)
        if (is_output(operand) && index-- == 0)
            return (DLTensor *)*call_field(&trial->call, operand);
}

void trial_clear(struct trial *trial) {
    for (int index = 0; index < CALL_OUTPUTS; index++) {
        const DLTensor *output = trial_output(trial, index);
        for (int64_t i = 0; output && i < filled_rows(output); i++)
            if (index == 1 && trial->old_weight)
                memcpy(row_at(output, i), row_at(trial->old_weight, i), row_bytes(output));
            else
                memset(row_at(output, i), UNWRITTEN, row_bytes(output));
    }
}

/* What accumulate adds to: about as large as the sums themselves, so that neither is lost in the other. */
static void make_old_weight(struct trial *trial) {
    const DLTensor *weight = trial_output(trial, 1);
    struct draw draw = {trial->plan.seed + 1, 0};
    ck_assert_int_eq(moer_tensor_new(&trial->old_weight, weight->device, weight->dtype, 2, weight->shape), MOER_OK);
    for (int64_t e = 0; e < weight->shape[0]; e++)
        for (int64_t h = 0; h < weight->shape[1]; h++)
            set_element(trial->old_weight, e, h, 0, draw_normal(&draw));
}

struct trial *trial_new(const struct plan *plan) {
    static const DLDataType short_id = {kDLInt, 32, 1};
    struct trial *trial = calloc(1, sizeof *trial);
    struct call drawn;
    size_t count;
    const struct moer_operand *operands = moer_operands(plan->operation, &count);
    trial->plan = *plan;
    place_init(&trial->place);
    call_init(&trial->call, plan->operation);
    call_init(&drawn, plan->operation);
    ck_assert_msg(draw_inputs(&drawn, plan->operation, plan->dims, type_of[plan->type], plan->seed, 1) == MOER_OK,
                  "%s: no inputs", describe(plan));
    if (plan->operation == MOER_SIGMOID_TOPK_BACKWARD)
        trial->call.args.sigmoid.routed_scaling_factor = drawn.args.sigmoid.routed_scaling_factor;
    for (size_t i = 0; i < count; i++) {
        int part = part_of(operands[i].name);
        const DLTensor *from = call_tensor(&drawn, operands[i].name);
        if (operands[i].kind == MOER_DTYPE_COUNT || (part & plan->absent))
            continue;
        if (is_output(&operands[i])) {
            add_fenced(trial, &operands[i], type_of[part & plan->wide ? F32 : plan->type]);
            continue;
        }
        ck_assert_msg(from != NULL, "%s: %s was not drawn", describe(plan), operands[i].name);
        int shorten = operands[i].kind == MOER_DTYPE_ID && plan->short_ids;
        copy_elements(&add_fenced(trial, &operands[i], shorten ? short_id : from->dtype)->tensor, from);
    }
    call_free(&drawn);
    trial->call.args.common.accumulate = plan->accumulate;
    if (plan->accumulate && trial_output(trial, 1))
        make_old_weight(trial);
    trial_clear(trial);
    return trial;
}

void trial_free(struct trial *trial) {
    place_free(&trial->place);
    for (size_t i = 0; i < trial->count; i++) {
        unmap_block(trial->tensors[i].block, trial->tensors[i].bytes);
        free(trial->tensors[i].before);
    }
    moer_tensor_free(trial->old_weight);
    free(trial);
}

DLTensor *trial_add(struct trial *trial, const char *name, DLDataType dtype, double value) {
    size_t count;
    const struct moer_operand *operand = moer_operands(trial->plan.operation, &count);
    while (strcmp(operand->name, name) != 0)
        operand++;
    DLTensor *tensor = &add_fenced(trial, operand, dtype)->tensor;
    fill(tensor, value);
    return tensor;
}

/* ---- Running ---- */

/* What a call may change of a tensor: the count of bad ids always, an output where it succeeds. */
static int may_change(const struct fenced *fenced, enum moer_status status) {
    return fenced->operand->kind == MOER_DTYPE_COUNT || (status == MOER_OK && is_output(fenced->operand));
}

/* Every byte that the call may not change is as before. */
static void check_fences(struct trial *trial, enum moer_status status) {
    for (size_t i = 0; i < trial->count; i++) {
        struct fenced *fenced = &trial->tensors[i];
        const DLTensor *tensor = &fenced->tensor;
        for (int64_t row = 0; may_change(fenced, status) && row < filled_rows(tensor); row++) {
            ptrdiff_t offset = row_at(tensor, row) - fenced->block;
            memcpy(fenced->before + offset, fenced->block + offset, row_bytes(tensor));
        }
        size_t at = 0;
        while (at < fenced->bytes && fenced->block[at] == fenced->before[at])
            at++;
        ck_assert_msg(at == fenced->bytes, "%s: status %d, but byte %td of %s was written", describe(&trial->plan),
                      status, fenced->block + at - ((unsigned char *)tensor->data + tensor->byte_offset),
                      fenced->operand->name);
    }
}

/* Gives the call a workspace of exactly the size it asks for, which ends where memory ends; where calls run elsewhere,
 * which has no such end, with guard bytes behind it. */
static unsigned char *map_workspace(struct trial *trial, size_t *mapped) {
    size_t size = 0;
    ck_assert_msg(call_workspace_size(place_call(&trial->place, &trial->call), &size) == MOER_OK, "%s: %s",
                  describe(&trial->plan), moer_last_error());
    *mapped = size + 1 + (trial->place.copies ? 512 : 0);
    unsigned char *block = map_block(mapped);
    unsigned char *start = block + (trial->place.copies ? 256 : (*mapped - size) / 256 * 256);
    memset(start, UNWRITTEN, size);
    trial->call.args.common.workspace = start;
    trial->call.args.common.workspace_size = size;
    place_add(&trial->place, block, *mapped);
    return block;
}

static void unmap_workspace(struct trial *trial, unsigned char *block, size_t mapped) {
    size_t first = (size_t)((unsigned char *)trial->call.args.common.workspace - block), at = 0;
    size_t end = first + trial->call.args.common.workspace_size;
    while (at < mapped && ((at >= first && at < end) || block[at] == FENCE))
        at++;
    ck_assert_msg(at == mapped, "%s: byte %td of the workspace was written", describe(&trial->plan),
                  (ptrdiff_t)(at - first));
    place_remove(&trial->place, block);
    unmap_block(block, mapped);
    trial->call.args.common.workspace = NULL;
    trial->call.args.common.workspace_size = 0;
}

struct call *trial_place(struct trial *trial) {
    for (size_t i = 0; i < trial->count; i++)
        memcpy(trial->tensors[i].before, trial->tensors[i].block, trial->tensors[i].bytes);
    place_upload(&trial->place);
    return place_call(&trial->place, &trial->call);
}

void trial_fetch(struct trial *trial, enum moer_status status) {
    place_fetch(&trial->place);
    check_fences(trial, status);
}

enum moer_status trial_call(struct trial *trial) {
    enum moer_status status = call_run(trial_place(trial));
    snprintf(trial->message, sizeof trial->message, "%s", moer_last_error());
    place_fetch(&trial->place);
    return status;
}

enum moer_status trial_run(struct trial *trial, enum scratch scratch) {
    unsigned char *block = NULL;
    size_t mapped = 0;
    if (scratch == OWN_SCRATCH)
        block = map_workspace(trial, &mapped);
    enum moer_status status = trial_call(trial);
    if (block)
        unmap_workspace(trial, block, mapped);
    check_fences(trial, status);
    ck_assert_msg((status == MOER_OK) == (trial->message[0] == '\0'), "%s: status %d with message \"%s\"",
                  describe(&trial->plan), status, trial->message);
    return status;
}

void trial_compare(struct trial *trial) {
    trial_compare_to(trial, (DLTensor *[CALL_OUTPUTS]){NULL});
}

void trial_compare_to(struct trial *trial, DLTensor *const expected[CALL_OUTPUTS]) {
    struct reference_options options = {.gpu = on_gpu(), .old_weight = trial->old_weight};
    struct reference_report report[CALL_OUTPUTS];
    for (int i = 0; i < CALL_OUTPUTS; i++)
        options.expected[i] = expected[i];
    ck_assert_int_ge(reference_compare(&trial->call, &options, report), 0);
    for (int i = 0; i < CALL_OUTPUTS; i++)
        if (report[i].broken)
            ck_abort_msg(
                "%s: %s: %lld of %lld elements are wrong; worst, by %.3g bounds, is (%lld, %lld): %.9g instead "
                "of %.9g +- %.3g",
                describe(&trial->plan), report[i].name, (long long)report[i].broken, (long long)report[i].elements,
                report[i].worst, (long long)report[i].row, (long long)report[i].column, report[i].value,
                report[i].expected, report[i].bound);
}

void trial_succeed(struct trial *trial, enum scratch scratch) {
    trial_clear(trial);
    enum moer_status status = trial_run(trial, scratch);
    ck_assert_msg(status == MOER_OK, "%s: status %d, %s", describe(&trial->plan), status, trial->message);
}

/* What the header lets a backend refuse: more than CUDA's takes. */
static int is_beyond(const struct plan *plan) {
    return on_gpu() && (plan->dims.experts > 1024 || plan->dims.top_k > 64);
}

void trial_check(struct trial *trial) {
    DLTensor *first[CALL_OUTPUTS] = {NULL};
    if (is_beyond(&trial->plan)) {
        trial_fails(trial, MOER_UNSUPPORTED, (const char *[]){"the cuda backend", NULL});
        return;
    }
    trial_succeed(trial, LIBRARY_SCRATCH);
    for (int i = 0; i < CALL_OUTPUTS; i++)
        if (trial_output(trial, i))
            first[i] = copy_tensor(trial_output(trial, i));
    trial_succeed(trial, OWN_SCRATCH);
    for (int i = 0; i < CALL_OUTPUTS; i++) {
        if (first[i])
            same_bits(first[i], trial_output(trial, i), describe(&trial->plan));
        moer_tensor_free(first[i]);
    }
    trial_compare(trial);
}

void plan_check(const struct plan *plan) {
    struct trial *trial = trial_new(plan);
    trial_check(trial);
    trial_free(trial);
}

void trial_fails(struct trial *trial, enum moer_status status, const char *const *words) {
    enum moer_status got = trial_run(trial, LIBRARY_SCRATCH);
    ck_assert_msg(got == status, "status %d instead of %d, message \"%s\"", got, status, trial->message);
    for (; *words; words++)
        ck_assert_msg(strstr(trial->message, *words) != NULL, "\"%s\" is not in \"%s\"", *words, trial->message);
}
