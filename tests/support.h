/* SPDX-License-Identifier: Apache-2.0 */
/* Trials: a case is planned in a line, built with every tensor in a fenced block of its own, run, and compared with the
 * double-precision loop. Whatever a call must not do (write to an input, between rows or outside a tensor, leave an
 * element out, touch an output before it fails) ends the test with a message. */
#ifndef MOER_TESTS_SUPPORT_H
#define MOER_TESTS_SUPPORT_H

#include <check.h>
#include "call.h"
#include "draw.h"
#include "place.h"
#include "reference.h"

enum type { BF16, F16, F32, TYPES };
extern const DLDataType type_of[TYPES];

/* Parts of a call, as bits of a plan. */
enum {
    TO_HIDDEN = 1,
    TO_WEIGHT = 2,
    TO_LOGITS = 4, /* outputs */
    SUM = 8,
    MASK = 16,
    DIRECT = 32,
    UNREAD = 64, /* optional inputs: z, m, d, what the answer does not depend on */
    OUTPUTS = TO_HIDDEN | TO_WEIGHT | TO_LOGITS
};

struct plan {
    enum moer_operation operation;
    struct dims dims;
    enum type type;
    int absent;    /* parts left out */
    int wide;      /* outputs that are float32, whatever the type */
    int short_ids; /* int32 */
    int padding;   /* elements between rows; not 0: the mask's axes are permuted, as autograd hands it over */
    int flush; /* data that ends where memory ends, and so is aligned to one element only, half of it by byte_offset */
    int accumulate;
    uint64_t seed;
};

/* A tensor inside a block whose every other byte must keep its value. */
struct fenced {
    DLTensor tensor;
    int64_t shape[4], strides[4];
    const struct moer_operand *operand;
    unsigned char *block, *before; /* before: the block's bytes when the call began */
    size_t bytes;
};

struct trial {
    struct plan plan;
    struct call call;
    struct fenced tensors[CALL_MAX_OPERANDS];
    size_t count;
    DLTensor *old_weight; /* accumulate: what the weight gradient holds before each call */
    struct place place;
    char message[1024]; /* of the last call that ran */
};

enum scratch { LIBRARY_SCRATCH, OWN_SCRATCH };

/* Draws the inputs. Outputs hold NaN, or what a call is to accumulate to. */
struct trial *trial_new(const struct plan *plan);
void trial_free(struct trial *trial);
/* The tensor called name, which must be there. */
DLTensor *trial_tensor(struct trial *trial, const char *name);
/* The nth output: grad_hidden_states, the weight gradient, grad_logits; NULL where absent. */
DLTensor *trial_output(struct trial *trial, int index);
/* Adds a tensor that the plan does not know, such as invalid_ids, filled with value. */
DLTensor *trial_add(struct trial *trial, const char *name, DLDataType dtype, double value);

/* Gives the outputs what trial_new() gave them. */
void trial_clear(struct trial *trial);

/* The parts of a run, for tests that do something in between. The call as it stands, copied to where it runs; and all
 * that it wrote, copied back and held against what a call of that status may write. */
struct call *trial_place(struct trial *trial);
void trial_fetch(struct trial *trial, enum moer_status status);
/* Runs the call as it stands, without a check. */
enum moer_status trial_call(struct trial *trial);
/* Runs the call as it stands, and checks everything that must not change: after an error that includes the outputs. */
enum moer_status trial_run(struct trial *trial, enum scratch scratch);
/* The call must succeed, on outputs that hold what trial_new() gave them. */
void trial_succeed(struct trial *trial, enum scratch scratch);
/* The outputs must keep the reference's bounds. */
void trial_compare(struct trial *trial);
/* Those that are not NULL in expected, float32, must keep them around that instead. */
void trial_compare_to(struct trial *trial, DLTensor *const expected[CALL_OUTPUTS]);
/* The call must succeed with a workspace and without, with the same bits, within the reference's bounds; or, where its
 * shape is more than the backend takes, be refused. */
void trial_check(struct trial *trial);
/* trial_new, trial_check, trial_free. */
void plan_check(const struct plan *plan);
/* The call must fail with that status and a message that has all of the words, up to a NULL. */
void trial_fails(struct trial *trial, enum moer_status status, const char *const *words);

/* The same bits in a row of each of two tensors; in all rows. */
void same_rows(const DLTensor *a, int64_t row_a, const DLTensor *b, int64_t row_b, const char *what);
void same_bits(const DLTensor *a, const DLTensor *b, const char *what);
/* A compact copy of a tensor of one or two axes, for moer_tensor_free(). */
DLTensor *copy_tensor(const DLTensor *tensor);
/* Sets every element of a tensor of one or two axes. */
void fill(const DLTensor *tensor, double value);

/* ---- Calls made from others: calls.c ---- */

/* Copies of the outputs; the same bits in them; moer_tensor_free() for each. */
void copy_outputs(struct trial *trial, DLTensor *copies[CALL_OUTPUTS]);
void expect_outputs(struct trial *trial, DLTensor *const copies[CALL_OUTPUTS], const char *what);
void free_outputs(DLTensor *copies[CALL_OUTPUTS]);
/* A trial of some tokens of another one. */
struct trial *trial_of_tokens(struct trial *from, const int64_t *tokens, int64_t count);

/* A call that has shapes but no memory, on the device where tests run. */
struct outline {
    struct call call;
    DLTensor tensors[CALL_MAX_OPERANDS];
    int64_t shapes[CALL_MAX_OPERANDS][4];
};
void make_outline(struct outline *outline, enum moer_operation operation, struct dims dims, enum type type);

/* ---- Suites: suite.c ---- */

/* Whether the bits of a token's row depend on that token alone: not where the environment gives products to OpenBLAS.
 */
int own_products(enum type type);

/* A test, run with _i = 0 ... count - 1. */
struct test {
    const TTest *test;
    int count;
};
/* count; 0, and a line that says why, where tests run on a GPU. */
int host_only(int count, const char *test, const char *why);
/* Runs tests: on the host each in a process of its own, on a GPU all in this one. EXIT_FAILURE where one fails or none
 * ran, 77 where this machine does not have the kernels or the device that the environment asks for. */
int run_tests(const char *suite, const struct test *tests, int count);

#define LENGTH(array) ((int)(sizeof(array) / sizeof *(array)))

#endif
