/* SPDX-License-Identifier: Apache-2.0 */
/* What the parts of the CUDA benchmark share. The functions return 0, or EXIT_TROUBLE after a message that names the
 * call that failed, so that they can be chained by ||. What they open stays open for as long as the command runs. */
#ifndef MOER_BENCH_CUDA_H
#define MOER_BENCH_CUDA_H

#include <cuda_runtime_api.h>

#include "bench.h"

/* cuda_common.c ---------------------------------------------------------------------------------------------------- */

int cuda_failed(cudaError_t error, const char *call);

/* A library of the CUDA toolkit, "libcupti.so.13": the benchmark alone needs it, so it is looked for when it runs.
 * NULL: reason says why. */
void *cuda_open_library(const char *name, char *reason, size_t size);
/* Its functions: for each name the address, in the order of names (NULL ends them). NULL, or the name that is missing.
 */
const char *cuda_find_functions(void *library, const char *const *names, void **functions);

/* cuda_spans.c: how long the device worked, by CUPTI's activity records ---------------------------------------------
 */

/* Has CUPTI record kernels, copies and memsets. Not 0: it does not, and reason says why. No message. */
int spans_open(char *reason, size_t size);
void spans_close(void);
/* Forgets what has been recorded; the device must be idle, here and below. */
int spans_reset(void);
/* How many memsets of so many bytes have been recorded. */
int spans_count(size_t flush_bytes, uint64_t *count);
/* The spans in us of so many calls: each from the start of the first activity to the end of the last between one memset
 * of flush_bytes and the next. */
int spans_read(size_t flush_bytes, uint64_t calls, double *us);

/* cuda_timer.c ----------------------------------------------------------------------------------------------------- */

enum { CUDA_MOST_COPIES = 8 };

/* Work to be timed: enqueue puts it on a stream, with the operands of one of the copies. */
struct cuda_work {
    int (*enqueue)(void *context, int copy, cudaStream_t stream);
    void *context;
    int copies;
};

/* Makes the device current and says how its work is timed. */
int timer_open(int device, char *method, size_t method_size, char *notes, size_t notes_size);
/* The median time of a call. Each has the next copy's operands and stands right behind a write to twice the L2, which
 * leaves it full of dirty lines. captured: the call is a CUDA graph. */
int timer_time(const struct cuda_work *work, int captured, uint64_t repeats, double *us);
/* GB/s that a large copy reads and writes. */
int timer_copy_speed(double *speed);

/* cuda_ring.c: the tensors of a call several times over, none at another's address -----------------------------------
 */

struct ring_copy {
    void *memory;
    struct call call;
    DLTensor tensors[CALL_MAX_OPERANDS];
    void *hidden_states, *weight, *logits, *grad_hidden_states, *grad_weight; /* logits: G, in bfloat16 */
};

struct ring {
    struct dims dims;
    int count;
    struct ring_copy copies[CUDA_MOST_COPIES];
};

/* As many copies of a call on the device as there is room for, with its workspace for all. ring_free() is due either
 * way. */
int ring_make(struct ring *ring, const struct call *placed);
void ring_free(struct ring *ring);
/* Fills the gradients of the hidden states and of the weight with NaN. */
int ring_spoil(const struct ring *ring);
/* Holds these gradients of every copy to those of the call on the host: exact, the same bits; otherwise as near as two
 * orders of summation leave them. what names their maker in messages. */
int ring_compare(const struct ring *ring, const struct call *host, int exact, const char *what);

/* cuda_gemms.c: the two products alone, by cuBLASLt ------------------------------------------------------------------
 */

/* version: of cuBLASLt, 130100 for 13.1.0. */
int gemms_open(size_t *version);
/* Finds the fastest way to make them of the ring's operands, and times both in one graph. */
int gemms_time(const struct ring *ring, const struct call *host, uint64_t repeats, double *us);

#endif
