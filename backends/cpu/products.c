/* SPDX-License-Identifier: Apache-2.0 */
/* From a problem to its gradients, in turns of up to 4096 tokens:
 *
 *     1. G of the turn's tokens                      threads share the tokens
 *     2. the weight gradient's sums                  threads share slices of columns; a slice's owner rounds its sums
 *                                                    in the last turn
 *     3. grad_hidden_states, no barrier before       threads share slices of columns, which pairs of bfloat16 have
 *                                                    for few tokens at a time, so that threads end together
 *
 * A slice goes through its turn in blocks of 512 tokens, which fit its cache. No task's result depends on who does it,
 * so the number of threads moves no bit; few turns mean few barriers, where a busy machine loses most. Hidden states
 * are read once. What is allocated is G of a turn, float32 sums of the weight gradient, the gate as pairs, and a panel
 * or two for each thread. */
#include "products.h"
#include <fenv.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>

/* Memory: at most MOST_BYTES besides the sums, 4*E*H bytes. */
static const size_t MOST_BYTES = 64 << 20, LOGITS_BYTES = 8 << 20, SCRATCH_BYTES = 16 << 20, GATE_BYTES = 8 << 20;
/* With more, G of a single token, or the index by expert, would break the promise about memory. */
enum { MOST_EXPERTS = 1 << 22, MOST_TOP_K = 1 << 20, MOST_THREADS = 64 };
enum { TURN_TOKENS = 4096 };
/* Sums of so many blocks lose no more than a chain does; pairs have longer chains, and one. */
enum { PLAIN_BLOCKS = 8 };
/* A task of grad_hidden_states by pairs: G of so many tokens fits the L1 cache. */
enum { TASK_TOKENS = 64, TASK_COLUMNS = 512 };
/* Multiply-adds below which a second thread costs more than it saves. */
static const double WORTH_A_THREAD = 1e6;

static int64_t clamp(int64_t value, int64_t low, int64_t high) {
    return value < low ? low : value > high ? high : value;
}

/* Takes bytes from a layout, 256-aligned; returns the offset. */
static size_t take(size_t *total, size_t bytes) {
    size_t offset = *total;
    *total += (bytes + 255) / 256 * 256;
    return offset;
}

/* The gate as pairs, in strips. */
static size_t gate_bytes(const struct problem *problem) {
    int64_t strips = (problem->hidden + PAIR_STRIP_COLUMNS - 1) / PAIR_STRIP_COLUMNS;
    return (size_t)(strips * pair_stride(problem->experts) * PAIR_STRIP_COLUMNS) * sizeof(uint32_t);
}

/* Whether the kernels at hand multiply pairs of bfloat16, and this problem's products so. */
static int may_use_pairs(const struct problem *problem) {
    const struct slice_kernels *kernels = moer_cpu_settings()->kernels;
    return kernels->pair && !problem->sparse_row && problem->weight.type == BF16 && problem->experts <= PANEL_EXPERTS &&
           problem->hidden <= INT32_MAX && gate_bytes(problem) <= GATE_BYTES;
}

static struct plan make_plan(const struct problem *problem, int blas) {
    struct plan plan = {.blas = blas};
    int64_t entries = problem->sparse_row ? problem->top_k : 0;
    int dense = blas || !problem->sparse_row;
    plan.pairs = !blas && may_use_pairs(problem);
    /* A token's G: a float an expert, twice where there are pairs, or its entries twice, by token and by expert; and a
     * block's index by expert. */
    int64_t token_bytes =
        (dense ? (plan.pairs ? 8 : 4) * problem->experts : 0) + entries * (dense ? 8 : 16) + (plan.pairs ? 136 : 8);
    int64_t ends_bytes = dense ? 0 : (problem->experts + 2) * (int64_t)sizeof(int32_t);
    int64_t tokens = clamp((int64_t)LOGITS_BYTES / token_bytes, 1, clamp(problem->tokens, 1, TURN_TOKENS));
    plan.block = blas ? tokens : clamp(tokens, 1, BLOCK_TOKENS);
    int64_t blocks = clamp((int64_t)LOGITS_BYTES / (plan.block * token_bytes + ends_bytes), 1,
                           (tokens + plan.block - 1) / plan.block);
    plan.turn = blocks * plan.block;

    if (dense)
        plan.dense = take(&plan.bytes, (size_t)plan.turn * (size_t)problem->experts * sizeof(float));
    if (plan.pairs) {
        int64_t blocks_of_turn = plan.turn / plan.block;
        plan.token_pairs = take(&plan.bytes, (size_t)((plan.turn + PAIR_ROWS_READ) * pair_stride(problem->experts)) *
                                                 sizeof(uint32_t));
        plan.expert_pairs =
            take(&plan.bytes, (size_t)((blocks_of_turn * problem->experts + PAIR_ROWS_READ) * pair_stride(plan.block)) *
                                  sizeof(uint32_t));
        plan.usual = take(&plan.bytes, (size_t)plan.turn);
        plan.gate = take(&plan.bytes, gate_bytes(problem));
        plan.usual_gate = take(&plan.bytes, (size_t)problem->hidden / PAIR_STRIP_COLUMNS + 1);
    }
    if (entries > 0)
        plan.sparse = take(&plan.bytes, (size_t)(plan.turn * entries) * sizeof(union entry));
    plan.counts = take(&plan.bytes, (size_t)plan.turn * sizeof(int32_t));
    if (!dense) {
        plan.by_expert = take(&plan.bytes, (size_t)(plan.turn * entries) * sizeof(union entry));
        plan.expert_ends = take(&plan.bytes, (size_t)(blocks * ends_bytes));
    }
    if (blas) {
        size_t column_bytes = moer_blas_column_bytes(problem, plan.block);
        plan.columns =
            clamp(column_bytes ? (int64_t)(SCRATCH_BYTES / column_bytes) : problem->hidden, 1, problem->hidden);
        plan.scratch = take(&plan.bytes, column_bytes * (size_t)plan.columns);
    } else {
        int64_t slices = (problem->hidden + LEAST_COLUMNS - 1) / LEAST_COLUMNS;
        plan.columns = dense ? SLICE_COLUMNS : SPARSE_SLICE_COLUMNS;
        plan.thread_bytes = slice_scratch(problem, plan.block, plan.pairs);
        int64_t fit = plan.thread_bytes ? (int64_t)(SCRATCH_BYTES / plan.thread_bytes) : MOST_THREADS;
        plan.threads = (int)clamp(clamp(slices, 1, fit > 0 ? fit : 1), 1, MOST_THREADS);
        plan.scratch = take(&plan.bytes, plan.thread_bytes * (size_t)plan.threads);
    }
    if (problem->grad_weight.data) {
        size_t sums_bytes = (size_t)problem->experts * (size_t)problem->hidden * sizeof(float);
        int64_t plain = (plan.pairs ? 1 : PLAIN_BLOCKS) * clamp(plan.block, 1, BLOCK_TOKENS);
        plan.compensated = problem->tokens > plain && plan.bytes + sums_bytes + 512 < MOST_BYTES;
        plan.sums = take(&plan.bytes, sums_bytes);
        plan.lost = take(&plan.bytes, plan.compensated ? sums_bytes : 0);
    }
    return plan;
}

/* Whether OpenBLAS may do this problem's products, leaving aside where it is called from. */
static int may_use_blas(const struct problem *problem) {
    const struct settings *settings = moer_cpu_settings();
    if (settings->deterministic || settings->products == PRODUCTS_OWN || !moer_blas_can(problem))
        return 0;
    /* A sparse G is no matrix product: even dense float32 loses to its few non-zeros. */
    return settings->products == PRODUCTS_OPENBLAS || (problem->weight.type == F32 && !problem->sparse_row);
}

static struct plan choose_plan(const struct problem *problem) {
    /* OpenBLAS can deadlock when called from inside a parallel region (OpenBLAS issues 2197, 5947). */
    return make_plan(problem, may_use_blas(problem) && !omp_in_parallel());
}

static void *at(const struct problem *problem, size_t offset) {
    return (char *)problem->workspace + offset;
}

/* G of a token of the turn that begins at first: into the turn's dense or sparse form, and into grad_logits. */
static void make_row(const struct problem *problem, const struct plan *plan, int64_t first, int64_t token) {
    const struct rows *out = &problem->grad_logits;
    float *dense = (float *)at(problem, plan->dense) + token * problem->experts;
    union entry *entries = (union entry *)at(problem, plan->sparse) + token * problem->top_k;
    int32_t *count = (int32_t *)at(problem, plan->counts) + token;
    char *to = out->data ? out->data + (first + token) * out->stride : NULL;
    if (problem->dense_row) {
        problem->dense_row(problem, first + token, dense);
        if (to)
            moer_cpu_settings()->kernels->narrow(to, out->type, dense, problem->experts);
        return;
    }
    *count = problem->sparse_row(problem, first + token, entries);
    if (plan->blas) {
        memset(dense, 0, (size_t)problem->experts * sizeof *dense);
        for (int32_t i = 0; i < *count; i++)
            dense[entries[i].index] = entries[i].value;
    }
    if (to) {
        int64_t size = out->type == F32 ? 4 : 2;
        memset(to, 0, (size_t)(problem->experts * size));
        for (int32_t i = 0; i < *count; i++)
            moer_cpu_settings()->kernels->narrow(to + entries[i].index * size, out->type, &entries[i].value, 1);
    }
}

/* G of the block that begins at that token of the turn; what goes by token may begin anywhere. */
static struct block_logits block_at(const struct problem *problem, const struct plan *plan, int64_t token) {
    int64_t entries = token * problem->top_k, index = token / plan->block * (problem->experts + 2);
    struct block_pairs pairs = {0};
    if (plan->pairs) {
        pairs.token_stride = pair_stride(problem->experts);
        pairs.expert_stride = pair_stride(plan->block);
        pairs.by_token = (uint32_t *)at(problem, plan->token_pairs) + token * pairs.token_stride;
        pairs.by_expert =
            (uint32_t *)at(problem, plan->expert_pairs) + token / plan->block * problem->experts * pairs.expert_stride;
        pairs.usual = (unsigned char *)at(problem, plan->usual) + token;
        pairs.gate = at(problem, plan->gate);
        pairs.usual_gate = at(problem, plan->usual_gate);
    }
    return (struct block_logits){.pairs = pairs,
                                 .dense = (float *)at(problem, plan->dense) + token * problem->experts,
                                 .sparse = (union entry *)at(problem, plan->sparse) + entries,
                                 .counts = (int32_t *)at(problem, plan->counts) + token,
                                 .by_expert = (union entry *)at(problem, plan->by_expert) + entries,
                                 .expert_ends = (int32_t *)at(problem, plan->expert_ends) + index};
}

/* G of some tokens of a block, at most PAIR_TOKENS, from such a multiple on. */
static void make_rows(const struct problem *problem, const struct plan *plan, int64_t first, int64_t token,
                      int64_t count) {
    for (int64_t i = 0; i < count; i++)
        make_row(problem, plan, first, token + i);
    if (plan->pairs) {
        const int64_t place = token % plan->block;
        const struct block_logits block = block_at(problem, plan, token - place);
        moer_cpu_settings()->kernels->pair(&block.pairs, block.dense, place, place + count, problem->experts);
    }
}

/* Sorts a block's entries by expert: count, add up, place; tokens stay in ascending order. There is one end to spare,
 * so that placing moves each expert's start to its end, which is the next one's start. */
static void sort_by_expert(const struct problem *problem, struct block_logits block, int64_t tokens) {
    int32_t *starts = block.expert_ends + 1;
    memset(block.expert_ends, 0, (size_t)(problem->experts + 2) * sizeof *starts);
    for (int64_t token = 0; token < tokens; token++)
        for (int32_t i = 0; i < block.counts[token]; i++)
            starts[block.sparse[token * problem->top_k + i].index + 1]++;
    for (int64_t expert = 0; expert < problem->experts; expert++)
        starts[expert + 1] += starts[expert];
    for (int64_t token = 0; token < tokens; token++)
        for (int32_t i = 0; i < block.counts[token]; i++) {
            union entry entry = block.sparse[token * problem->top_k + i];
            block.by_expert[starts[entry.index]++] = (union entry){{(int32_t)token, entry.value}};
        }
}

/* Rounds a slice's sums into the weight gradient. */
static void finish(const struct problem *problem, const struct plan *plan, int64_t column) {
    int64_t columns = clamp(problem->hidden - column, 0, plan->columns);
    const float *sums = slice_sums(problem, plan, column), *lost = slice_lost(problem, plan, column);
    for (int64_t expert = 0; problem->grad_weight.data && expert < problem->experts; expert++)
        moer_cpu_settings()->kernels->finish(problem, sums + expert * columns, lost ? lost + expert * columns : NULL,
                                             expert, column, columns);
}

static struct slice_job make_job(const struct problem *problem, const struct plan *plan, int64_t column,
                                 int64_t columns) {
    return (struct slice_job){.problem = problem,
                              .column = column,
                              .columns = clamp(problem->hidden - column, 0, columns),
                              .scratch =
                                  at(problem, plan->scratch + (size_t)omp_get_thread_num() * plan->thread_bytes)};
}

/* A slice's share of a turn's weight gradient. */
static void run_weight(const struct problem *problem, const struct plan *plan, int64_t first, int64_t count,
                       int64_t column) {
    struct slice_job job = make_job(problem, plan, column, plan->columns);
    job.sums = slice_sums(problem, plan, column);
    job.lost = slice_lost(problem, plan, column);
    job.sums_stride = job.columns;
    for (int64_t token = 0; token < count; token += plan->block) {
        job.first = first + token;
        job.count = clamp(count - token, 0, plan->block);
        job.logits = block_at(problem, plan, token);
        moer_cpu_settings()->kernels->weight(&job);
    }
    if (first + count == problem->tokens)
        finish(problem, plan, column);
}

/* Columns of grad_hidden_states for some tokens of a turn. */
static void run_hidden(const struct problem *problem, const struct plan *plan, int64_t first, int64_t token,
                       int64_t end, int64_t column) {
    struct slice_job job = make_job(problem, plan, column, plan->hidden_columns);
    for (; token < end; token += plan->block) {
        job.first = first + token;
        job.count = clamp(end - token, 0, plan->block);
        job.logits = block_at(problem, plan, token);
        moer_cpu_settings()->kernels->hidden(&job);
        job.again = 1;
    }
}

/* The gate as pairs. */
static void pair_gate(const struct problem *problem, const struct plan *plan) {
    const struct block_pairs pairs = block_at(problem, plan, 0).pairs;
#pragma omp for schedule(static) nowait
    for (int64_t column = 0; column < problem->hidden; column += PAIR_STRIP_COLUMNS)
        moer_cpu_settings()->kernels->pair_gate(&pairs, problem, column);
}

/* Round to nearest, keep subnormals, trap nothing: whatever the caller, or an OpenMP thread's last work, has set.
 * Returns what that was. */
static fenv_t plain_arithmetic(void) {
    fenv_t before;
    fegetenv(&before);
    fesetenv(FE_DFL_ENV);
    return before;
}

/* A thread's part of a turn. */
static void run_turn(const struct problem *problem, const struct plan *plan, int64_t first) {
    const int64_t count = clamp(problem->tokens - first, 0, plan->turn);
    if (plan->pairs && first == 0 && problem->grad_hidden.data)
        pair_gate(problem, plan);
#pragma omp for schedule(static)
    for (int64_t token = 0; token < count; token += PAIR_TOKENS)
        make_rows(problem, plan, first, token, clamp(count - token, 0, PAIR_TOKENS));
    if (problem->sparse_row && problem->grad_weight.data) {
#pragma omp for schedule(static)
        for (int64_t token = 0; token < count; token += plan->block)
            sort_by_expert(problem, block_at(problem, plan, token), clamp(count - token, 0, plan->block));
    }
    if (problem->grad_weight.data) {
#pragma omp for schedule(dynamic) nowait
        for (int64_t column = 0; column < problem->hidden; column += plan->columns)
            run_weight(problem, plan, first, count, column);
    }
    const int64_t slices = (problem->hidden + plan->hidden_columns - 1) / plan->hidden_columns;
    const int64_t parts = (count + plan->hidden_tokens - 1) / plan->hidden_tokens;
    const int64_t tasks = problem->grad_hidden.data ? slices * parts : 0;
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < tasks; task++) {
        const int64_t token = task / slices * plan->hidden_tokens;
        run_hidden(problem, plan, first, token, clamp(token + plan->hidden_tokens, 0, count),
                   task % slices * plan->hidden_columns);
    }
}

static void run_own(const struct problem *problem, struct plan *plan) {
    double terms = (double)problem->tokens * (double)problem->hidden *
                   (double)(problem->sparse_row ? problem->top_k : problem->experts);
    int threads = (int)clamp(omp_get_max_threads(), 1, terms < WORTH_A_THREAD ? 1 : plan->threads);
    /* Some slices for each thread. */
    const int64_t each = problem->hidden / (4 * threads) / LEAST_COLUMNS * LEAST_COLUMNS;
    plan->columns = clamp(each, LEAST_COLUMNS, plan->columns);
    plan->hidden_columns = plan->pairs ? TASK_COLUMNS : plan->columns;
    plan->hidden_tokens = plan->pairs ? TASK_TOKENS : plan->turn;
#pragma omp parallel num_threads(threads)
    {
        fenv_t before = plain_arithmetic();
        for (int64_t first = 0; first < problem->tokens; first += plan->turn)
            run_turn(problem, plan, first);
        fesetenv(&before);
    }
}

static void run_blas(const struct problem *problem, const struct plan *plan) {
    for (int64_t first = 0; first < problem->tokens; first += plan->turn) {
        int64_t count = clamp(problem->tokens - first, 0, plan->turn);
        for (int64_t token = 0; token < count; token++)
            make_row(problem, plan, first, token);
        for (int64_t column = 0; column < problem->hidden; column += plan->columns)
            moer_blas_products(problem, plan, first, count, column, clamp(problem->hidden - column, 0, plan->columns));
    }
    for (int64_t column = 0; column < problem->hidden; column += plan->columns)
        finish(problem, plan, column);
}

/* No tokens: the weight gradient is zero, or what it was. */
static void run_empty(const struct problem *problem, const struct plan *plan) {
    if (!problem->grad_weight.data || problem->accumulate)
        return;
    memset(at(problem, plan->sums), 0, (size_t)problem->experts * (size_t)problem->hidden * sizeof(float));
    for (int64_t column = 0; column < problem->hidden; column += plan->columns)
        finish(problem, plan, column);
}

/* Whether a row of ids has one outside [-1, E). */
static int has_bad_id(const char *row, int wide, int64_t count, int64_t experts) {
    int bad = 0;
    for (int64_t slot = 0; slot < count; slot++) {
        int64_t id = wide ? ((const int64_t *)row)[slot] : ((const int32_t *)row)[slot];
        bad |= (uint64_t)id + 1 > (uint64_t)experts;
    }
    return bad;
}

/* Refuses ids outside [-1, E), and counts them. */
static enum moer_status check_ids(const struct problem *problem, struct moer_message *message) {
    int64_t bad = 0, token_of_first = 0, slot_of_first = 0;
    for (int64_t token = 0; problem->top_k > 0 && token < problem->tokens; token++) {
        if (!has_bad_id(problem->ids.data + token * problem->ids.stride, problem->ids.wide, problem->top_k,
                        problem->experts))
            continue;
        for (int64_t slot = 0; slot < problem->top_k; slot++) {
            int64_t id = id_at(&problem->ids, token, slot);
            if ((id < -1 || id >= problem->experts) && bad++ == 0) {
                token_of_first = token;
                slot_of_first = slot;
            }
        }
    }
    if (bad == 0)
        return MOER_OK;
    if (problem->invalid_ids)
        *problem->invalid_ids = (int32_t)((uint32_t)*problem->invalid_ids + (uint32_t)bad);
    return moer_fail(message, MOER_INVALID, "%s[%lld, %lld] is %lld but must be -1 or in [0, %lld); %lld such ids",
                     problem->ids.name, (long long)token_of_first, (long long)slot_of_first,
                     (long long)id_at(&problem->ids, token_of_first, slot_of_first), (long long)problem->experts,
                     (long long)bad);
}

static enum moer_status check_problem(const struct problem *problem, struct moer_message *message) {
    const struct settings *settings = moer_cpu_settings();
    if (settings->error[0])
        return moer_fail(message, MOER_UNSUPPORTED, "%s", settings->error);
    if (problem->experts > MOST_EXPERTS || problem->top_k > MOST_TOP_K)
        return moer_fail(message, MOER_UNSUPPORTED,
                         "%lld experts of which %lld are chosen; at most %d and %d are supported",
                         (long long)problem->experts, (long long)problem->top_k, MOST_EXPERTS, MOST_TOP_K);
    return MOER_OK;
}

enum moer_status moer_cpu_workspace_size(const struct problem *problem, size_t *bytes, struct moer_message *message) {
    enum moer_status status = check_problem(problem, message);
    if (status)
        return status;
    /* Where the call will come from is not known: room for either way. */
    *bytes = make_plan(problem, 0).bytes;
    if (may_use_blas(problem)) {
        size_t blas = make_plan(problem, 1).bytes;
        *bytes = blas > *bytes ? blas : *bytes;
    }
    return MOER_OK;
}

enum moer_status moer_cpu_explain(const struct problem *problem, struct moer_message *message) {
    enum moer_status status = check_problem(problem, message);
    if (!status)
        moer_fail(message, MOER_OK, "cpu, %s G, %s products", problem->sparse_row ? "sparse" : "dense",
                  choose_plan(problem).blas ? "OpenBLAS" : moer_cpu_settings()->kernels_name);
    return status;
}

/* Whether there is an element to be written: a call without one may have any number of empty rows. */
static int has_outputs(const struct problem *problem) {
    return (problem->grad_hidden.data && problem->tokens && problem->hidden) ||
           (problem->grad_weight.data && problem->experts && problem->hidden) ||
           (problem->grad_logits.data && problem->tokens && problem->experts);
}

enum moer_status moer_cpu_run(const struct problem *caller, struct moer_message *message) {
    struct problem copy = *caller, *problem = &copy;
    void *allocated = NULL;
    enum moer_status status = check_problem(problem, message);
    if (!status)
        status = check_ids(problem, message);
    if (status)
        return status;
    if (!has_outputs(problem))
        return MOER_OK;
    struct plan plan = choose_plan(problem);
    if (!problem->workspace) {
        if (!(allocated = aligned_alloc(256, plan.bytes)))
            return moer_fail(message, MOER_NO_MEMORY, "no memory for a workspace of %zu bytes", plan.bytes);
        problem->workspace = allocated;
    }
    fenv_t before = plain_arithmetic();
    if (problem->tokens == 0)
        run_empty(problem, &plan);
    else if (plan.blas)
        run_blas(problem, &plan);
    else
        run_own(problem, &plan);
    fesetenv(&before);
    free(allocated);
    return MOER_OK;
}
