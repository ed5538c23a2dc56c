/* SPDX-License-Identifier: Apache-2.0 */
#include "place.h"

#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const DLDataType byte_type = {kDLUInt, 8, 1};

int test_device(DLDevice *device) {
    const char *name = getenv("MOER_TEST_DEVICE");
    int end = 0;
    *device = (DLDevice){kDLCPU, 0};
    if (!name || !*name)
        return 0;
    if (strcmp(name, "cpu") == 0)
        return 1;
    device->device_type = kDLCUDA;
    return sscanf(name, "cuda:%d%n", &device->device_id, &end) == 1 && name[end] == '\0' ? 1 : -1;
}

int on_gpu(void) {
    DLDevice device;
    return test_device(&device) == 1 && device.device_type != kDLCPU;
}

void place_init(struct place *place) {
    memset(place, 0, sizeof *place);
    place->copies = test_device(&place->device) == 1;
}

DLTensor *new_bytes(DLDevice device, size_t bytes) {
    DLTensor *tensor;
    int64_t shape = (int64_t)bytes;
    ck_assert_msg(moer_tensor_new(&tensor, device, byte_type, 1, &shape) == MOER_OK, "%s", moer_last_error());
    return tensor;
}

void place_add(struct place *place, void *host, size_t bytes) {
    ck_assert_int_lt(place->count, PLACE_MAX_BLOCKS);
    place->blocks[place->count++] = (struct block){host, bytes, place->copies ? new_bytes(place->device, bytes) : NULL};
}

void place_remove(struct place *place, const void *host) {
    int i = 0;
    while (place->blocks[i].host != host)
        i++;
    moer_tensor_free(place->blocks[i].copy);
    place->blocks[i] = place->blocks[--place->count];
}

void place_free(struct place *place) {
    while (place->count > 0)
        place_remove(place, place->blocks[0].host);
}

void place_move(struct place *place, DLDevice device) {
    place->copies = 1;
    place->device = device;
    for (int i = 0; i < place->count; i++) {
        moer_tensor_free(place->blocks[i].copy);
        place->blocks[i].copy = new_bytes(device, place->blocks[i].bytes);
    }
}

/* ---- Pointers ---- */

/* How far the copy of the block around an address is from it; 0 where there is no such block. */
static uintptr_t distance(const struct place *place, uintptr_t address) {
    for (int i = 0; i < place->count && place->copies; i++) {
        uintptr_t host = (uintptr_t)place->blocks[i].host;
        if (address - host < place->blocks[i].bytes)
            return (uintptr_t)place->blocks[i].copy->data - host;
    }
    return 0;
}

static void *moved(const struct place *place, const void *address) {
    return (void *)((uintptr_t)address + distance(place, (uintptr_t)address));
}

/* A matrix may begin before the block that it ends in. Wrong shapes, which a call is to refuse, lead to any address. */
static uintptr_t last_element(const DLTensor *tensor) {
    uintptr_t last = (uintptr_t)tensor->data + tensor->byte_offset;
    if (tensor->ndim == 2 && tensor->shape && tensor->strides)
        last += (((uintptr_t)tensor->shape[0] - 1) * (uintptr_t)tensor->strides[0] + (uintptr_t)tensor->shape[1] - 1) *
                dtype_size(tensor->dtype);
    return last;
}

static void move_tensor(const struct place *place, DLTensor *tensor) {
    if (tensor->device.device_type == kDLCPU)
        tensor->device = place->device;
    if (!tensor->data)
        return;
    uintptr_t by = distance(place, (uintptr_t)tensor->data);
    if (by == 0)
        by = distance(place, last_element(tensor));
    tensor->data = (void *)((uintptr_t)tensor->data + by);
}

struct call *place_call(struct place *place, const struct call *call) {
    size_t count;
    const struct moer_operand *operands = moer_operands(call->operation, &count);
    place->call = *call;
    for (size_t i = 0; i < count && place->copies; i++) {
        const DLTensor **field = call_field(&place->call, &operands[i]);
        if (!*field)
            continue;
        place->tensors[i] = **field;
        move_tensor(place, &place->tensors[i]);
        *field = &place->tensors[i];
    }
    place->call.args.common.workspace = moved(place, call->args.common.workspace);
    return &place->call;
}

/* ---- Copies ---- */

static void copy_blocks(const struct place *place, int there) {
    for (int i = 0; i < place->count && place->copies; i++) {
        const struct block *block = &place->blocks[i];
        const DLTensor host = {
            .data = block->host, .device = {kDLCPU, 0}, .ndim = 1, .dtype = byte_type, .shape = block->copy->shape};
        enum moer_status status = moer_tensor_copy(there ? block->copy : &host, there ? &host : block->copy);
        ck_assert_msg(status == MOER_OK, "%s", moer_last_error());
    }
}

void place_upload(const struct place *place) {
    copy_blocks(place, 1);
}

void place_fetch(const struct place *place) {
    copy_blocks(place, 0);
}
