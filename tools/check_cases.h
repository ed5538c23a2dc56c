/* SPDX-License-Identifier: Apache-2.0 */
/* The cases of moerouter check: the public suite's workloads, and those made to break an operation. */
#ifndef MOER_TOOLS_CHECK_CASES_H
#define MOER_TOOLS_CHECK_CASES_H

#include "call.h"

/* What a result is held to, beside the loop's bounds. */
enum check_rule {
    CHECK_BOUNDS,
    CHECK_SUITE,   /* the public suite's tolerance too */
    CHECK_EXACT,   /* bounds of 0: every sum is exact */
    CHECK_IDENTITY /* the gate is the identity: grad_hidden_states is grad_logits */
};

struct check_case {
    const char *name;
    enum moer_operation operation;
    struct dims dims;
    DLDataType dtype, output_dtype;
    enum check_rule rule;
    int required_only;                                               /* no optional inputs */
    enum moer_status (*change)(struct call *call, struct dims dims); /* of what was drawn; NULL: nothing */
};

/* Calls visitor for each case until it returns something else than 0, and returns that. */
int check_cases(enum moer_operation operation, int quick, int (*visitor)(const struct check_case *one, void *context),
                void *context);

/* Draws the inputs of a case, adds the outputs, filled with NaN. All on the host; call_free() is due either way. */
enum moer_status check_case_draw(const struct check_case *one, struct call *call);

#endif
