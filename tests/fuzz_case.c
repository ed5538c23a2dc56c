/* SPDX-License-Identifier: Apache-2.0 */
#include "fuzz.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_BYTES = 1 << 19, MOST_WORK = 1 << 16, MOST_CHANGES = 6 };

/* Bytes that get used up; zeros follow. */
struct source {
    const uint8_t *bytes;
    size_t left;
};

static unsigned next_byte(struct source *source) {
    if (source->left == 0)
        return 0;
    source->left--;
    return *source->bytes++;
}

#define PICK(source, table) (table)[next_byte(source) % (sizeof(table) / sizeof *(table))]

/* ---- A valid case ---- */

/* On both sides of every border in the kernels. */
static const int64_t tokens[] = {1, 2, 3, 5, 8, 17, 33, 65, 511, 513, 1030, 0};
static const int64_t hidden[] = {1, 2, 7, 8, 16, 31, 33, 64, 127, 128, 129, 260, 0};
static const int64_t experts[] = {1, 2, 3, 4, 8, 17, 33, 65, 130, 513, 2049, 0};
static const int64_t top_k[] = {1, 2, 3, 4, 8, 17, 32, 33, 40, 0};
static const DLDataType types[] = {{kDLBfloat, 16, 1}, {kDLFloat, 16, 1}, {kDLFloat, 32, 1}};
static const double factors[] = {0, 2.5, -1, 1e300, 1e-45, -0.0};

/* Up to 2^44. */
static int64_t any_size(struct source *source) {
    return INT64_C(1) << next_byte(source) % 45;
}

static struct dims make_dims(struct source *source) {
    if (next_byte(source) % 8 == 7) /* most have no memory, and are only asked about */
        return (struct dims){any_size(source), any_size(source), any_size(source), any_size(source)};
    struct dims dims = {PICK(source, tokens), PICK(source, hidden), PICK(source, experts), PICK(source, top_k)};
    while (dims.tokens * (dims.hidden + 1) * (dims.experts + 1) > MOST_WORK)
        *(dims.tokens > 4 ? &dims.tokens : &dims.hidden) /= 2;
    return dims;
}

static DLDataType make_dtype(enum moer_kind kind, DLDataType type, int other) {
    switch (kind) {
    case MOER_DTYPE_OUTPUT:
        return other ? types[2] : type;
    case MOER_DTYPE_FLOAT:
        return types[2];
    case MOER_DTYPE_ID:
        return (DLDataType){kDLInt, other ? 32 : 64, 1};
    case MOER_DTYPE_COUNT:
        return (DLDataType){kDLInt, 32, 1};
    default:
        return type;
    }
}

static void make_part(struct fuzz_case *fuzz, const struct moer_operand *operand, struct dims dims, DLDataType type,
                      struct source *source) {
    const unsigned flags = next_byte(source), padding = flags >> 2 & 3;
    struct part *part = &fuzz->parts[fuzz->count++];
    part->operand = operand;
    part->owner = part;
    part->tensor = (DLTensor){.device = {kDLCPU, 0}, .dtype = make_dtype(operand->kind, type, flags & 1)};
    part->tensor.ndim = call_shape(operand, dims, part->shape);
    part->no_strides = !(flags & 2);
    uint64_t stride = 1;
    for (int axis = part->tensor.ndim - 1; axis >= 0; axis--) {
        part->strides[axis] = (int64_t)stride;
        stride = stride * (uint64_t)part->shape[axis] + padding;
    }
    part->shift = (flags >> 4 & 3) * dtype_size(part->tensor.dtype);
    part->absent = !operand->required && flags >> 6 == 3;
}

/* ---- Changes ---- */

/* A number near the old one, or one that borders on something. */
static int64_t make_number(struct source *source, int64_t old) {
    static const int64_t borders[] = {0,
                                      1,
                                      -1,
                                      INT32_MAX,
                                      INT32_MIN,
                                      INT64_MAX,
                                      INT64_MIN,
                                      INT64_MAX / 2,
                                      INT64_MAX / 4,
                                      INT64_C(1) << 31,
                                      INT64_C(1) << 32,
                                      INT64_C(1) << 56,
                                      INT64_C(1) << 62};
    const unsigned how = next_byte(source);
    if (how & 1)
        return PICK(source, borders);
    const uint64_t distance = next_byte(source);
    return (int64_t)((uint64_t)old + (how & 2 ? distance : -distance));
}

enum field {
    ABSENT,
    NDIM,
    NO_SHAPE,
    NO_STRIDES,
    NO_DATA,
    CODE,
    BITS,
    LANES,
    DEVICE_TYPE,
    DEVICE_ID,
    BYTE_OFFSET,
    SHIFT,
    OWNER,
    SHAPE,
    STRIDE,
    FIELDS
};

static void change_part(struct fuzz_case *fuzz, struct part *part, struct source *source) {
    DLTensor *tensor = &part->tensor;
    const enum field field = (enum field)(next_byte(source) % FIELDS);
    int *const switches[] = {
        [ABSENT] = &part->absent,
        [NO_SHAPE] = &part->no_shape,
        [NO_STRIDES] = &part->no_strides,
        [NO_DATA] = &part->no_data,
        [FIELDS] = NULL,
    };
    if (switches[field])
        *switches[field] = !*switches[field];
    else if (field == NDIM)
        tensor->ndim = (int32_t)make_number(source, tensor->ndim);
    else if (field == CODE)
        tensor->dtype.code = (uint8_t)make_number(source, tensor->dtype.code);
    else if (field == BITS)
        tensor->dtype.bits = (uint8_t)make_number(source, tensor->dtype.bits);
    else if (field == LANES)
        tensor->dtype.lanes = (uint16_t)make_number(source, tensor->dtype.lanes);
    else if (field == DEVICE_TYPE)
        tensor->device.device_type = (DLDeviceType)make_number(source, kDLCPU);
    else if (field == DEVICE_ID)
        tensor->device.device_id = (int32_t)make_number(source, 0);
    else if (field == BYTE_OFFSET)
        tensor->byte_offset = (uint64_t)make_number(source, 0);
    else if (field == SHIFT)
        part->shift = next_byte(source);
    else if (field == OWNER)
        part->owner = &fuzz->parts[next_byte(source) % fuzz->count];
    else if (field == SHAPE || field == STRIDE) {
        int64_t *number = &(field == SHAPE ? part->shape : part->strides)[next_byte(source) % 3];
        *number = make_number(source, *number);
    }
}

/* ---- Memory ---- */

/* The bytes that a tensor covers, where that can be said and is little enough. */
static void measure(struct part *part) {
    const int ndim = part->tensor.ndim;
    __int128 low = 0, high = 0, compact = 1, elements = 1, size = (__int128)dtype_size(part->tensor.dtype);
    part->describable = ndim >= 0 && ndim <= MOST_AXES && !part->no_shape;
    for (int axis = 0; part->describable && axis < ndim; axis++) {
        elements *= part->shape[axis];
        part->describable = part->shape[axis] >= 0 && elements <= MOST_BYTES;
    }
    for (int axis = ndim; part->describable && elements > 0 && axis-- > 0;) {
        const __int128 stride = part->no_strides ? compact : part->strides[axis];
        const __int128 far = stride * (part->shape[axis] - 1);
        *(far < 0 ? &low : &high) += far;
        compact *= part->shape[axis];
        part->describable = high - low < MOST_BYTES && (high - low + 1) * size <= MOST_BYTES;
    }
    if (part->describable && elements > 0) {
        part->lowest = (size_t)(-low * size);
        part->span = (size_t)((high - low + 1) * size);
    }
}

static void *exactly(const void *from, size_t bytes) {
    void *copy = malloc(bytes);
    return bytes ? memcpy(copy, from, bytes) : copy;
}

/* Numbers of modest size, in all of the dtypes; or whatever is odd in one of them. */
static void fill(struct part *part, uint64_t *state, int odd) {
    static const uint16_t oddities[] = {0,      0x8000, 0x0001, 0x7F80, 0xFF80, 0x7C00, 0xFC00, 0x7FC0,
                                        0x7E00, 0x7F7F, 0x7BFF, 0x3F80, 0x3C00, 0x0080, 0x0400, 0xFFFF};
    for (size_t i = 0; i < part->bytes; i += 2) {
        *state = *state * 6364136223846793005u + 1442695040888963407u;
        const unsigned random = (unsigned)(*state >> 48);
        const uint16_t word = odd ? oddities[random % 16] : (random & 0x8FFF) | 0x3000;
        memcpy(part->block + i, &word, part->bytes - i < 2 ? 1 : 2);
    }
}

void *part_id(const struct part *part, int64_t token, int64_t slot) {
    const int64_t stride = part->no_strides ? part->shape[1] : part->strides[0];
    const int64_t element = (part->shape[0] > 1 ? token * stride : 0) + slot;
    return part->owner->block + part->shift + element * (int64_t)dtype_size(part->tensor.dtype);
}

/* Ids of experts and empty slots, and sometimes one that is neither. */
static void fill_ids(const struct part *part, int64_t expert_count, struct source *source) {
    const int64_t *shape = part->shape;
    const DLDataType dtype = part->tensor.dtype;
    const size_t size = dtype_size(dtype);
    const int tame = part->tensor.ndim == 2 && part->span > 0 &&
                     (shape[1] <= 1 || part->no_strides || part->strides[1] == 1) &&
                     (shape[0] <= 1 || part->no_strides || part->strides[0] >= 0) && (size == 4 || size == 8);
    for (int64_t i = 0; tame && i < shape[0] * shape[1]; i++) {
        const int64_t id = (i * 7 + shape[0]) % (expert_count + 1) - 1;
        memcpy(part_id(part, i / shape[1], i % shape[1]), &id, size);
    }
    if (tame && next_byte(source) % 4 == 3) {
        const int64_t at = next_byte(source) % (shape[0] * shape[1]), id = make_number(source, expert_count);
        memcpy(part_id(part, at / shape[1], at % shape[1]), &id, size);
    }
}

/* The tensor as the library gets it. */
static void place(struct part *part) {
    DLTensor *tensor = &part->tensor;
    const int numbers = tensor->ndim < 0 ? 0 : tensor->ndim > MOST_AXES ? MOST_AXES : tensor->ndim;
    const uintptr_t start = (uintptr_t)part->owner->block + part->shift + part->lowest;
    tensor->shape = part->no_shape ? NULL : exactly(part->shape, (size_t)numbers * sizeof *part->shape);
    tensor->strides = part->no_strides ? NULL : exactly(part->strides, (size_t)numbers * sizeof *part->strides);
    tensor->data = part->no_data ? NULL : (void *)(start - (uintptr_t)tensor->byte_offset);
}

static void make_blocks(struct fuzz_case *fuzz, int64_t expert_count, struct source *source) {
    const int odd = next_byte(source) % 4 == 3;
    uint64_t state = next_byte(source);
    for (struct part *part = fuzz->parts; part < fuzz->parts + fuzz->count; part++) {
        measure(part);
        if (part->owner->bytes < part->shift + part->span)
            part->owner->bytes = part->shift + part->span;
    }
    for (struct part *part = fuzz->parts; part < fuzz->parts + fuzz->count; part++) {
        part->block = malloc(part->bytes);
        fill(part, &state, odd);
    }
    for (struct part *part = fuzz->parts; part < fuzz->parts + fuzz->count; part++) {
        if (part->operand->kind == MOER_DTYPE_ID)
            fill_ids(part, expert_count, source);
        place(part);
        *call_field(&fuzz->whole, part->operand) = part->absent ? NULL : &part->tensor;
    }
    for (struct part *part = fuzz->parts; part < fuzz->parts + fuzz->count; part++) {
        part->original = exactly(part->block, part->bytes);
        part->expected = exactly(part->block, part->bytes);
    }
}

int part_present(const struct fuzz_case *fuzz, const struct part *part) {
    return !part->absent && part->operand->offset + sizeof(void *) <= fuzz->whole.args.common.size;
}

/* The args in a block that ends where their size says: a program compiled against another header has no more. */
static void cut(struct fuzz_case *fuzz, size_t size) {
    enum { MOST_EXTRA = 8192 };
    const size_t known = fuzz->whole.args.common.size, head = offsetof(struct call, args);
    const size_t bytes = size < sizeof size ? sizeof size : size > known + MOST_EXTRA ? known + MOST_EXTRA : size;
    fuzz->whole.args.common.size = size;
    fuzz->call = malloc(head + bytes);
    memset(fuzz->call, fuzz->extra, head + bytes);
    memcpy(fuzz->call, &fuzz->whole, head + (bytes < known ? bytes : known));
    for (struct part *part = fuzz->parts; part < fuzz->parts + fuzz->count; part++)
        if (!part_present(fuzz, part))
            *call_field(&fuzz->whole, part->operand) = NULL;
}

void case_make(struct fuzz_case *fuzz, const uint8_t *bytes, size_t count) {
    struct source source = {bytes, count};
    *fuzz = (struct fuzz_case){0};
    call_init(&fuzz->whole, (enum moer_operation)(next_byte(&source) % MOER_OPERATIONS));
    const DLDataType type = PICK(&source, types);
    const struct dims dims = make_dims(&source);
    const struct moer_operand *operands = moer_operands(fuzz->whole.operation, &count);
    for (size_t i = 0; i < count; i++)
        make_part(fuzz, &operands[i], dims, type, &source);
    fuzz->workspace = (enum workspace)(next_byte(&source) % WORKSPACES);
    fuzz->whole.args.common.accumulate = next_byte(&source) % 4 == 3;
    if (fuzz->whole.operation == MOER_SIGMOID_TOPK_BACKWARD)
        fuzz->whole.args.sigmoid.routed_scaling_factor = PICK(&source, factors);
    size_t size = fuzz->whole.args.common.size;
    for (unsigned changes = next_byte(&source) % MOST_CHANGES; changes > 0; changes--) {
        const size_t which = next_byte(&source) % (fuzz->count + 1);
        if (which < fuzz->count) {
            change_part(fuzz, &fuzz->parts[which], &source);
        } else {
            size = (size_t)make_number(&source, (int64_t)size);
            fuzz->extra = next_byte(&source) % 4 == 3;
        }
    }
    make_blocks(fuzz, dims.experts, &source);
    cut(fuzz, size);
}

void case_free(struct fuzz_case *fuzz) {
    for (struct part *part = fuzz->parts; part < fuzz->parts + fuzz->count; part++) {
        free(part->tensor.shape);
        free(part->tensor.strides);
        free(part->block);
        free(part->original);
        free(part->expected);
    }
    free(fuzz->call);
}

int part_filled(const struct fuzz_case *fuzz, const struct part *part) {
    return part_present(fuzz, part) && part->span > 0;
}
