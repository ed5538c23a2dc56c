/* SPDX-License-Identifier: Apache-2.0 */
/* The CUDA backend, in time: calls obey their stream and wait for nothing, can be captured and replayed, share
 * workspaces, run side by side; and whatever else the device does, the bits are the same.
 *
 * CK_RUN_CASE=name runs one test by itself. */
#include "support_cuda.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

enum { ROUNDS = 20, REPEATS = 100 };

/* ---- Order ---- */

/* Holds a stream up until it is opened: a call that waits for its stream would never return. So that the test ends even
 * then, it opens by itself after a while, and says so. */
struct barrier {
    atomic_int open, gave_up;
};

static void CUDART_CB wait_at(void *data) {
    struct barrier *barrier = data;
    const struct timespec millisecond = {0, 1000000};
    for (int waited = 0; !atomic_load(&barrier->open); waited++) {
        nanosleep(&millisecond, NULL);
        if (waited == 20000) {
            atomic_store(&barrier->gave_up, 1);
            return;
        }
    }
}

static int is_output(const struct trial *trial, size_t i) {
    return trial->tensors[i].operand->kind == MOER_DTYPE_OUTPUT;
}

/* Pinned copies of a trial's blocks. Inputs get NaN and -1 on the device. */
static void hide_inputs(struct trial *trial, void *pinned[CALL_MAX_OPERANDS]) {
    for (size_t i = 0; i < trial->count; i++) {
        const struct block *block = &trial->place.blocks[i];
        CUDA(cudaMallocHost(&pinned[i], block->bytes));
        memcpy(pinned[i], block->host, block->bytes);
        if (!is_output(trial, i))
            CUDA(cudaMemset(block->copy->data, 0xFF, block->bytes));
    }
    CUDA(cudaDeviceSynchronize());
}

/* Queues the copies of the inputs to the device, or of the outputs from there. */
static void queue_copies(struct trial *trial, void *const pinned[CALL_MAX_OPERANDS], int outputs, cudaStream_t stream) {
    for (size_t i = 0; i < trial->count; i++) {
        const struct block *block = &trial->place.blocks[i];
        if (is_output(trial, i) == outputs)
            CUDA(cudaMemcpyAsync(outputs ? pinned[i] : block->copy->data, outputs ? block->copy->data : pinned[i],
                                 block->bytes, cudaMemcpyDefault, stream));
    }
}

/* Behind a stream that is held up, the true inputs arrive, the call runs, and the outputs leave. The kernels are loaded
 * before: that may wait for the device. */
START_TEST(obeys_its_stream) {
    struct plan plan = each_plan(_i % EACH, (struct dims){300, 136, 40, 4}, 1);
    struct trial *trial = trial_new(&plan);
    static struct barrier barrier; /* it may outlive a test that fails */
    atomic_store(&barrier.open, 0);
    atomic_store(&barrier.gave_up, 0);
    void *pinned[CALL_MAX_OPERANDS];
    cudaStream_t stream = new_stream();
    struct call *call = trial_place(trial);
    DLTensor *workspace = _i < EACH ? give_workspace(call) : NULL;
    call->args.common.stream = stream;
    must_run(call);
    CUDA(cudaStreamSynchronize(stream));
    place_upload(&trial->place);
    hide_inputs(trial, pinned);

    CUDA(cudaLaunchHostFunc(stream, wait_at, &barrier));
    queue_copies(trial, pinned, 0, stream);
    must_run(call);
    int ready = cudaStreamQuery(stream);
    int gave_up = atomic_load(&barrier.gave_up);
    queue_copies(trial, pinned, 1, stream);
    atomic_store(&barrier.open, 1);
    CUDA(cudaStreamSynchronize(stream));
    cudaGetLastError(); /* not ready */

    ck_assert_msg(!gave_up, "the call waited for what was before it in the stream");
    ck_assert_int_eq(ready, cudaErrorNotReady);
    trial_fetch(trial, MOER_OK);
    trial_compare(trial);
    for (size_t i = 0; i < trial->count; i++) {
        ck_assert_msg(!memcmp(pinned[i], trial->place.blocks[i].host, trial->place.blocks[i].bytes),
                      "%s was not there in its turn", trial->tensors[i].operand->name);
        CUDA(cudaFreeHost(pinned[i]));
    }
    moer_tensor_free(workspace);
    CUDA(cudaStreamDestroy(stream));
    trial_free(trial);
}
END_TEST

/* ---- Graphs ---- */

/* Other data at the same addresses; outputs are NaN again. */
static void redraw(struct trial *trial, uint64_t seed) {
    struct plan plan = trial->plan;
    plan.seed = seed;
    struct trial *other = trial_new(&plan);
    for (size_t i = 0; i < trial->count; i++)
        memcpy(trial->tensors[i].block, other->tensors[i].block, other->tensors[i].bytes);
    trial_free(other);
}

/* The strictest mode: nothing that could wait for the device may be called. */
static void begin_capture(cudaStream_t stream) {
    CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
}

static cudaGraphExec_t end_capture(cudaStream_t stream) {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CUDA(cudaStreamEndCapture(stream, &graph));
    CUDA(cudaGraphInstantiate(&exec, graph, 0));
    CUDA(cudaGraphDestroy(graph));
    return exec;
}

static void replay(struct trial *trial, cudaGraphExec_t graph, cudaStream_t stream, const DLTensor *workspace) {
    for (uint64_t seed = 10; seed < 13; seed++) {
        redraw(trial, seed);
        trial_place(trial);
        CUDA(cudaMemsetAsync(workspace->data, 0xFF, (size_t)workspace->shape[0], stream));
        CUDA(cudaGraphLaunch(graph, stream));
        CUDA(cudaStreamSynchronize(stream));
        trial_fetch(trial, MOER_OK);
        trial_compare(trial);
    }
}

/* Capturing does nothing yet; each replay reads what is there then. */
START_TEST(graphs) {
    struct plan plan = each_plan(_i, (struct dims){700, 136, 40, 4}, 2);
    struct trial *trial = trial_new(&plan);
    cudaStream_t stream = new_stream();
    struct call *call = trial_place(trial);
    DLTensor *workspace = give_workspace(call);
    call->args.common.stream = stream;
    begin_capture(stream);
    enum moer_status status = call_run(call);
    cudaGraphExec_t graph = end_capture(stream);
    ck_assert_msg(status == MOER_OK, "%s", moer_last_error());
    trial_fetch(trial, MOER_INVALID); /* not a byte has changed */
    replay(trial, graph, stream, workspace);
    CUDA(cudaGraphExecDestroy(graph));
    CUDA(cudaStreamDestroy(stream));
    moer_tensor_free(workspace);
    trial_free(trial);
}
END_TEST

/* Refused with the way out, and the capture goes on. */
START_TEST(capture_without_workspace) {
    struct plan plan = each_plan(_i, (struct dims){70, 136, 40, 4}, 3);
    struct trial *trial = trial_new(&plan);
    cudaStream_t stream = new_stream();
    struct call *call = trial_place(trial), without = *call;
    DLTensor *workspace = give_workspace(call);
    enum cudaStreamCaptureStatus capturing;
    without.args.common.stream = call->args.common.stream = stream;
    begin_capture(stream);
    enum moer_status refused = call_run(&without);
    char message[512];
    snprintf(message, sizeof message, "%s", moer_last_error());
    cudaError_t asked = cudaStreamIsCapturing(stream, &capturing);
    enum moer_status status = call_run(call);
    cudaGraphExec_t graph = end_capture(stream);
    ck_assert_int_eq(refused, MOER_INVALID);
    ck_assert_msg(strstr(message, "workspace_size()") != NULL, "%s", message);
    ck_assert_int_eq(asked, cudaSuccess);
    ck_assert_int_eq(capturing, cudaStreamCaptureStatusActive);
    ck_assert_int_eq(status, MOER_OK);
    trial_fetch(trial, MOER_INVALID);
    replay(trial, graph, stream, workspace);
    CUDA(cudaGraphExecDestroy(graph));
    CUDA(cudaStreamDestroy(stream));
    moer_tensor_free(workspace);
    trial_free(trial);
}
END_TEST

/* ---- Workspaces ---- */

/* Whatever another operation, shape and dtype has left in it. */
START_TEST(used_workspace) {
    static const struct dims dims[] = {{1500, 264, 40, 4}, {33, 40, 128, 8}, {600, 131, 257, 2}};
    enum { PLANS = LENGTH(dims) * MOER_OPERATIONS };
    struct trial *trials[PLANS];
    DLTensor *expected[PLANS][CALL_OUTPUTS], *workspace = new_bytes(gpu(), 64 << 20);
    for (int i = 0; i < PLANS; i++) {
        struct plan plan = each_plan((i + 2 * _i) % EACH, dims[i / MOER_OPERATIONS], 4);
        trials[i] = trial_new(&plan);
        trial_check(trials[i]);
        copy_outputs(trials[i], expected[i]);
    }
    for (int n = 0; n < 3 * PLANS; n++) {
        struct trial *trial = trials[n * 5 % PLANS];
        trial_clear(trial);
        struct call *call = trial_place(trial);
        call->args.common.workspace = workspace->data;
        call->args.common.workspace_size = (size_t)workspace->shape[0];
        must_run(call);
        trial_fetch(trial, MOER_OK);
        expect_outputs(trial, expected[n * 5 % PLANS], "a used workspace");
    }
    for (int i = 0; i < PLANS; i++) {
        free_outputs(expected[i]);
        trial_free(trials[i]);
    }
    moer_tensor_free(workspace);
}
END_TEST

/* ---- Side by side ---- */

/* A call with a stream and a workspace of its own. */
struct lane {
    struct trial *trial;
    struct call *call;
    cudaStream_t stream;
    DLTensor *workspace, *expected[CALL_OUTPUTS];
};

static void lane_new(struct lane *lane, struct plan plan) {
    lane->trial = trial_new(&plan);
    trial_check(lane->trial);
    copy_outputs(lane->trial, lane->expected);
    lane->call = trial_place(lane->trial);
    lane->workspace = give_workspace(lane->call);
    lane->stream = new_stream();
}

/* Outputs are NaN again. */
static void lane_reset(struct lane *lane) {
    trial_clear(lane->trial);
    trial_place(lane->trial);
    lane->call->args.common.workspace = lane->workspace->data;
    lane->call->args.common.workspace_size = (size_t)lane->workspace->shape[0];
    lane->call->args.common.stream = lane->stream;
}

static void lane_expect(struct lane *lane, const char *what) {
    CUDA(cudaStreamSynchronize(lane->stream));
    trial_fetch(lane->trial, MOER_OK);
    expect_outputs(lane->trial, lane->expected, what);
}

static void lane_free(struct lane *lane) {
    CUDA(cudaStreamSynchronize(lane->stream));
    CUDA(cudaStreamDestroy(lane->stream));
    free_outputs(lane->expected);
    moer_tensor_free(lane->workspace);
    trial_free(lane->trial);
}

START_TEST(two_streams) {
    struct lane lanes[2];
    for (int i = 0; i < 2; i++)
        lane_new(&lanes[i], each_plan((_i + i) % EACH, (struct dims){900 + 300 * i, 520, 40, 4}, 5));
    for (int round = 0; round < ROUNDS; round++) {
        for (int i = 0; i < 2; i++)
            lane_reset(&lanes[i]);
        for (int n = 0; n < 6; n++)
            must_run(lanes[n % 2].call);
        for (int i = 0; i < 2; i++)
            lane_expect(&lanes[i], "another stream at work");
    }
    for (int i = 0; i < 2; i++)
        lane_free(&lanes[i]);
}
END_TEST

static void *call_often(void *data) {
    enum moer_status status = MOER_OK;
    for (int n = 0; n < ROUNDS && status == MOER_OK; n++)
        status = call_run(data);
    return status == MOER_OK ? data : NULL;
}

/* Each thread on a stream of its own, every other round with the library's workspace. */
START_TEST(two_threads) {
    struct lane lanes[2];
    pthread_t threads[2];
    for (int i = 0; i < 2; i++)
        lane_new(&lanes[i], each_plan((_i + i) % EACH, (struct dims){500 + 100 * i, 264, 40, 4}, 6));
    for (int round = 0; round < ROUNDS; round++) {
        void *done[2];
        for (int i = 0; i < 2; i++) {
            lane_reset(&lanes[i]);
            if (round % 2)
                lanes[i].call->args.common.workspace = NULL;
        }
        for (int i = 0; i < 2; i++)
            ck_assert_int_eq(pthread_create(&threads[i], NULL, call_often, lanes[i].call), 0);
        for (int i = 0; i < 2; i++)
            pthread_join(threads[i], &done[i]);
        ck_assert(done[0] && done[1]);
        for (int i = 0; i < 2; i++)
            lane_expect(&lanes[i], "another thread at work");
    }
    for (int i = 0; i < 2; i++)
        lane_free(&lanes[i]);
}
END_TEST

/* ---- Bits ---- */

static const struct dims repeated[] = {{1056, 520, 128, 8}, {4100, 131, 60, 4}};

/* With the device kept busy by another stream, so that blocks of the grid run in any order. */
START_TEST(repeats) {
    struct lane lane, busy;
    lane_new(&lane, each_plan(_i % EACH, repeated[_i / EACH], 7));
    lane_new(&busy, each_plan(MOER_SOFTMAX_TOPK_BACKWARD, (struct dims){4096, 512, 64, 8}, 8));
    lane_reset(&busy);
    for (int n = 0; n < REPEATS; n++) {
        lane_reset(&lane);
        for (int i = 0; i < 4; i++)
            must_run(busy.call);
        must_run(lane.call);
        lane_expect(&lane, "another run");
    }
    lane_expect(&busy, "the other stream");
    lane_free(&lane);
    lane_free(&busy);
}
END_TEST

/* Around numbers of tokens where the backend changes its mind, which is by those of experts and slots, too, and at the
 * edges of tiles. */
static const struct {
    int64_t tokens, experts, top_k;
} batches[] = {{1, 24, 4},     {2, 24, 4},     {3, 24, 4},     {15, 24, 4},    {127, 24, 4},
               {128, 24, 4},   {129, 24, 4},   {1000, 24, 4},  {1000, 24, 9},  {8192, 24, 9},
               {4095, 24, 4},  {4096, 24, 4},  {4097, 24, 4},  {4225, 72, 16}, {4225, 72, 17},
               {16384, 24, 4}, {16385, 24, 4}, {40000, 24, 4}, {8191, 72, 4},  {8192, 72, 4},
               {8193, 72, 4},  {8193, 136, 4}, {1000, 144, 9}, {4097, 264, 4}, {1000, 500, 4}};

/* Every row of a batch is one of 61 tokens, which meet other neighbours at other places: the rows of grad_hidden_states
 * and of grad_logits are the same bits. Of the latter half of the runs all that is fastest can be had:
 * grad_hidden_states of the inputs' type, and no grad_logits. */
START_TEST(rows_of_any_batch) {
    enum { TOKENS = 61, RUNS = LENGTH(batches) * EACH };
    const int run = _i % RUNS;
    struct plan plan =
        each_plan(run % EACH, (struct dims){TOKENS, 72, batches[run / EACH].experts, batches[run / EACH].top_k}, 9);
    if (_i >= RUNS) {
        plan.wide = TO_WEIGHT;
        plan.absent = TO_LOGITS;
    }
    int64_t count = batches[run / EACH].tokens, *tokens = malloc((size_t)count * sizeof *tokens);
    struct trial *few = trial_new(&plan);
    for (int64_t n = 0; n < count; n++)
        tokens[n] = (7 * n + 3) % TOKENS;
    struct trial *many = trial_of_tokens(few, tokens, count);
    trial_check(few);
    trial_succeed(many, OWN_SCRATCH);
    for (int64_t n = 0; n < count; n++)
        for (int i = 0; i < CALL_OUTPUTS; i += _i < RUNS ? 2 : CALL_OUTPUTS)
            same_rows(trial_output(many, i), n, trial_output(few, i), tokens[n], "a row of another batch");
    free(tokens);
    trial_free(few);
    trial_free(many);
}
END_TEST

int main(void) {
    const struct test tests[] = {
        {obeys_its_stream, 2 * EACH},
        {graphs, EACH},
        {capture_without_workspace, MOER_OPERATIONS},
        {used_workspace, TYPES},
        {two_streams, EACH},
        {two_threads, EACH},
        {repeats, LENGTH(repeated) * EACH},
        {rows_of_any_batch, 2 * LENGTH(batches) * EACH},
    };
    return run_cuda_tests("CUDA, in time", tests, LENGTH(tests));
}
