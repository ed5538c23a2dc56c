/* SPDX-License-Identifier: Apache-2.0 */
/* Where a test's call runs. Without MOER_TEST_DEVICE it runs on the host's own memory. With MOER_TEST_DEVICE=cuda:0, or
 * cpu, every block of host memory (guard bytes and all) has a copy on that device, made by the public functions; the
 * call's pointers into blocks become pointers into the copies, and what the call has done comes back, so that a test
 * looks at host memory only, and sees every byte that was written. */
#ifndef MOER_TESTS_PLACE_H
#define MOER_TESTS_PLACE_H

#include "call.h"

/* The device of MOER_TEST_DEVICE. Returns 1; 0 where it is not set, and -1 where it names none. */
int test_device(DLDevice *device);
/* Whether that is a GPU. */
int on_gpu(void);

/* Uninitialised memory of a device, for moer_tensor_free(). */
DLTensor *new_bytes(DLDevice device, size_t bytes);

struct block {
    unsigned char *host;
    size_t bytes;
    DLTensor *copy;
};

enum { PLACE_MAX_BLOCKS = CALL_MAX_OPERANDS + 2 }; /* the tensors, a workspace, and one more */

struct place {
    int copies; /* 0: the call runs on the host's memory */
    DLDevice device;
    struct block blocks[PLACE_MAX_BLOCKS];
    int count;
    struct call call; /* as it runs */
    DLTensor tensors[CALL_MAX_OPERANDS];
};

/* The place that the environment asks for. */
void place_init(struct place *place);
/* Gives a block its copy; takes it away. */
void place_add(struct place *place, void *host, size_t bytes);
void place_remove(struct place *place, const void *host);
void place_free(struct place *place);

/* Takes all copies to another device. */
void place_move(struct place *place, DLDevice device);

/* The call as it runs there, until the next one. Pointers into no block stay as they are. */
struct call *place_call(struct place *place, const struct call *call);
/* Copies all blocks there, and back. */
void place_upload(const struct place *place);
void place_fetch(const struct place *place);

#endif
