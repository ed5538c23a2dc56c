/* SPDX-License-Identifier: Apache-2.0 */
/* What the parts of the self-check share: its report, and cases that run by one path or the other. Whatever goes wrong
 * is reported, and ends the process. */
#ifndef MOER_TOOLS_SELFCHECK_H
#define MOER_TOOLS_SELFCHECK_H

#include "selfcheck_data.h"

extern DLDevice selfcheck_device;
extern const char *selfcheck_path; /* the fast one */

/* A line of the report: src/tune.c says what they mean. */
#if defined __GNUC__
__attribute__((format(printf, 2, 3)))
#endif
void report(const char *word, const char *format, ...);
/* The last one. */
#if defined __GNUC__
__attribute__((format(printf, 2, 3), noreturn))
#endif
void report_end(const char *word, const char *format, ...);

/* "softmax_topk_backward, bfloat16, N = 1087, H = 2048, E = 128, K = 8" */
enum { CASE_TEXT = 160 };
void selfcheck_describe(const struct selfcheck_case *one, char text[CASE_TEXT]);
/* The fast path has been found wrong, in these words: whatever happens from now on is its doing. */
void blame(const char *difference);
/* MOER_OK, or the end. */
void need(enum moer_status status, const struct selfcheck_case *one);

/* A case's call on the device, with a workspace that ends in bytes that nobody may write. Tensors with padding are
 * whole on the host and where they are placed, so that outputs are compared with what lies between their rows; the call
 * has views of them. */
struct trial {
    const struct selfcheck_case *one;
    struct call host, placed, call;
    DLTensor views[CALL_MAX_OPERANDS];
    int64_t shapes[CALL_MAX_OPERANDS][2], strides[2];
    DLTensor *workspace, *scratch; /* scratch: the workspace's bytes, on the host */
    size_t workspace_size;
};
/* Reports that the case is prepared, which is no path's doing. */
void trial_begin(struct trial *trial, const struct selfcheck_case *one);
void trial_end(struct trial *trial);
/* Which path calls take from now on, and reports it; how says what is special, as ", two streams". */
void trial_choose(const struct trial *trial, const char *path, const char *how);
/* Fills what the call is to write with NaN, on the device. */
void trial_poison(const struct trial *trial);
/* Takes the outputs back, which waits for the call. */
void trial_fetch(const struct trial *trial);
/* All of these. */
void trial_run(const struct trial *trial, const char *path, const char *how);

/* Copies of a case's outputs. */
struct results {
    DLTensor *outputs[CALL_OUTPUTS];
    const char *names[CALL_OUTPUTS];
};
void results_take(struct results *results, const struct trial *trial);
void results_free(struct results *results);

/* The outputs must have the results' bits. */
void trial_compare(const struct trial *trial, const struct results *must, const char *how);

#endif
