/* SPDX-License-Identifier: Apache-2.0 */
/* The plain double-precision loop, and how far from it a result may be. It shares no code with the library: it is the
 * first link of the chain of trust (loop and golden vectors -> CPU backend -> CUDA backend).
 *
 * Bounds. G, softmax: with G* the formula in float64 and delta[e] = 2^-21 p[e] (Dh[e] + sum_j Dh[j] p[j]), Dh being D
 * with every term replaced by its magnitude, any G with R(G* - delta) <= G <= R(G* + delta) is right. G, sigmoid: the
 * bits of the chain. Products: with G = R(G*), y its exact product, A = |G| |W| (|G|^T |X|), S = max |R(G* +- delta) -
 * R(G*)| (0 for sigmoid), sigma = S |W| (S^T |X|): |out - y| <= 1.01 sigma + u |y| + c A + h, u = 2^-8 (bfloat16),
 * 2^-11 (float16), 2^-23 (float32), h = 2^-126 (float16: 2^-25), c = 2^-20 on the CPU and 2^-20 (1 + n/512) on a GPU, n
 * terms summed. Tensor cores take float16's subnormals as they are stored, not normalized, and cut a product off where
 * they would cut off one of factors of 2^-14: on a GPU, float16 factors count as 2^-14 at least in A, unless they are
 * zero. With accumulate, y is the old value plus the product and A gains |old|. No element is excused. */
#ifndef MOER_TOOLS_REFERENCE_H
#define MOER_TOOLS_REFERENCE_H

#include "call.h"

struct reference_options {
    int gpu;                    /* the bound c of a GPU instead of a CPU's */
    int exact;                  /* all sums are exact in float32: the bounds are 0 */
    const DLTensor *old_weight; /* accumulate: what the weight gradient's tensor held before the call */
    /* Results to compare with instead of the loop's own (float32, unrounded; NULL: the loop's), in the order of the
     * outputs: grad_hidden_states, weight gradient, grad_logits. */
    const DLTensor *expected[CALL_OUTPUTS];
    double suite_atol; /* absolute tolerance of the public suite, 0: 1e-5 */
};

/* What was found of one output. */
struct reference_report {
    const char *name;              /* NULL: the call has no such output */
    int64_t elements;              /* compared */
    int64_t broken;                /* beyond their bound */
    double worst;                  /* largest |error| / bound */
    int64_t row, column;           /* where */
    double value, expected, bound; /* there */
    double suite_matched;          /* share of elements within the public suite's atol + 0.05 |expected| */
};

/* Compares the outputs of a call that has run with the loop; all tensors on the host. Returns 0 where every element
 * keeps its bound, 1 where one does not, -1 where memory ran out. Where the loop's own value is NaN (or infinite) the
 * output must be NaN (or the same infinity). */
int reference_compare(const struct call *call, const struct reference_options *options,
                      struct reference_report report[CALL_OUTPUTS]);

/* A report in words: "512 elements, all exact", or how far off the worst is, where, and its value. */
void reference_describe(const struct reference_report *report, char *text, size_t size);

/* G of token n as the loop has it, rounded to T: row[E]. */
void reference_logits_row(const struct call *call, int64_t n, double *row);

#endif
