/* SPDX-License-Identifier: Apache-2.0 */
/* The self-check of a GPU's fast path, on kernels that are right and on such that are wrong, from a program whose own
 * work on that GPU goes on. With MOER_TEST_DEVICE=cuda:1 on that one.
 *
 * A verdict is read once in a process, and a module loaded once: what the next process makes of them this program asks
 * itself, started as
 *     check_cuda_tune explain     prints which path each operation would take, and why
 *     check_cuda_tune tune        checks the fast path
 */
#include "support_cuda.h"

#include <ftw.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define HAS(text, words) ck_assert_msg(strstr(text, words) != NULL, "no '%s' in: %s", words, text)

enum { SKIPPED = 77, HANG_MS = 15000 };
/* A shape that the fast path has a kernel of its own for. */
static const struct dims fast = {1087, 2048, 128, 8};
static char folder[64];

static void explain(enum moer_operation operation, char text[1024]) {
    struct outline outline;
    make_outline(&outline, operation, fast, BF16);
    ck_assert_msg(call_explain(&outline.call, text, 1024) == MOER_OK, "%s", moer_last_error());
}

/* Tests, too, since only those may assert. */
START_TEST(print_explanation) {
    char text[1024];
    explain((enum moer_operation)_i, text);
    puts(text);
}
END_TEST

START_TEST(print_verdict) {
    char text[4096] = "";
    const enum moer_status status = moer_tune(gpu(), 0, text, sizeof text);
    printf("status %d\n%s%s\n", status, text, moer_last_error());
}
END_TEST

/* What this program prints when it is started with that argument, and modules from that folder. */
static const char *in_another_process(const char *argument, const char *modules) {
    static char text[8192];
    char self[4096], command[8192];
    const ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
    ck_assert_int_gt(length, 0);
    self[length] = '\0';
    snprintf(command, sizeof command, "MOER_BACKEND_PATH='%s' '%s' %s 2>&1", modules, self, argument);
    FILE *output = popen(command, "r");
    ck_assert_ptr_nonnull(output);
    const size_t got = fread(text, 1, sizeof text - 1, output);
    text[got] = '\0';
    const int status = pclose(output);
    ck_assert_msg(status == 0, "%s ends with status %#x: %s", command, status, text);
    printf("%s of %s:\n%s", argument, modules, text);
    return text;
}

/* ---- Verdicts ---------------------------------------------------------------------------------------------------- */

/* Not proven, no verdict: the generic path. */
START_TEST(no_verdict) {
    char text[1024];
    explain((enum moer_operation)_i, text);
    HAS(text, "generic path: mma.sync");
    HAS(text, "sm_90a: not proven on such devices; there is no verdict");
    struct plan plan = each_plan(_i, fast, 1);
    plan_check(&plan);
}
END_TEST

static const struct {
    const char *fault;
    const char *words[2];
    int timeout_ms;
} faults[] = {
    {"swizzle", {"grad_hidden_states[", "as by a wrong swizzle"}, 0},
    {"tail", {"N = 65, ", "a lost tail"}, 0},
    {"address", {"_backward, ", "an illegal memory access"}, 0},
    {"hang", {"no progress in 15000 ms: ", "_backward, "}, HANG_MS},
};

/* Each is caught and named; the generic path runs; and what this program has on the GPU is as it was. */
START_TEST(planted_faults) {
    char text[4096], explanation[1024];
    struct plan plan = each_plan(MOER_SOFTMAX_TOPK_BACKWARD, fast, 2);
    struct trial *trial = trial_new(&plan);
    DLTensor *before[CALL_OUTPUTS];
    int *memory, value = 0;
    trial_check(trial);
    copy_outputs(trial, before);
    CUDA(cudaMalloc((void **)&memory, sizeof *memory));
    CUDA(cudaMemset(memory, 0x5A, sizeof *memory));

    setenv("PLANTED", faults[_i].fault, 1);
    const enum moer_status status = moer_tune(gpu(), faults[_i].timeout_ms, text, sizeof text);
    unsetenv("PLANTED");
    printf("%s: %s\n", faults[_i].fault, moer_last_error());
    ck_assert_int_eq(status, MOER_DEVICE);
    HAS(moer_last_error(), "moer_tune: sm_90a is wrong: ");
    for (int i = 0; i < LENGTH(faults[_i].words); i++)
        HAS(moer_last_error(), faults[_i].words[i]);
    HAS(text, "found wrong");
    explain(plan.operation, explanation);
    HAS(explanation, "generic path");
    HAS(explanation, "found wrong");

    CUDA(cudaMemcpy(&value, memory, sizeof value, cudaMemcpyDeviceToHost));
    ck_assert_int_eq(value, 0x5A5A5A5A);
    CUDA(cudaFree(memory));
    trial_clear(trial);
    trial_check(trial);
    expect_outputs(trial, before, "before and after");
    CUDA(cudaDeviceSynchronize());
    free_outputs(before);
    trial_free(trial);
}
END_TEST

/* A path that is right runs from then on, here and in the processes that come; not with another driver, library or
 * build. */
START_TEST(right_path) {
    char text[4096], explanation[1024], file[256];
    const enum moer_status status = moer_tune(gpu(), 0, text, sizeof text);
    printf("%s", text);
    ck_assert_msg(status == MOER_OK, "%s", moer_last_error());
    for (int operation = 0; operation < MOER_OPERATIONS; operation++) {
        struct plan plan = {.operation = (enum moer_operation)operation, .dims = fast, .type = BF16, .seed = 3};
        explain(plan.operation, explanation);
        HAS(explanation, "sm_90a path: wgmma products by one kernel");
        HAS(explanation, "not proven on such devices; found right on 20");
        plan_check(&plan);
    }
    const char *again = in_another_process("explain", PLANTED_FOLDER);
    HAS(again, "sm_90a path: wgmma products by one kernel");
    ck_assert_ptr_null(strstr(again, "generic path: mma.sync"));

    char info[8192];
    ck_assert_int_eq(moer_backend_info(1, info, sizeof info), MOER_OK);
    HAS(info, "'s path sm_90a: not proven on such devices; found right on 20");

    ck_assert_int_eq(sscanf(strstr(text, "stored in "), "stored in %255s", file), 1);
    static const char *const bound[][2] = {{"driver", "does not count: it is of driver 9"},
                                           {"library", "the stored verdict is ignored: it is damaged"},
                                           {"build", "the stored verdict is ignored: it is damaged"}};
    char command[1024];
    for (int i = 0; i < LENGTH(bound); i++) {
        snprintf(command, sizeof command, "cp '%s' '%s/kept' && sed -i 's/^%s /&9/' '%s'", file, folder, bound[i][0],
                 file);
        ck_assert_int_eq(system(command), 0);
        again = in_another_process("explain", PLANTED_FOLDER);
        HAS(again, "generic path: mma.sync");
        HAS(again, bound[i][1]);
        ck_assert_ptr_null(strstr(again, "sm_90a path"));
        snprintf(command, sizeof command, "mv '%s/kept' '%s'", folder, file);
        ck_assert_int_eq(system(command), 0);
    }
    HAS(in_another_process("explain", PLANTED_FOLDER), "sm_90a path: wgmma products by one kernel");
    /* Of the module as it is that verdict says nothing. */
    ck_assert_ptr_null(strstr(in_another_process("explain", REAL_FOLDER), "found right"));
}
END_TEST

/* MOER_CUDA_ARCH comes before everything. */
START_TEST(overridden) {
    static const char *const paths[] = {"generic", "sm_90a"};
    char text[1024], info[8192], line[128];
    for (int i = 0; i < LENGTH(paths); i++) {
        setenv("MOER_CUDA_ARCH", paths[i], 1);
        explain((enum moer_operation)_i, text);
        ck_assert_int_eq(moer_backend_info(1, info, sizeof info), MOER_OK);
        unsetenv("MOER_CUDA_ARCH");
        snprintf(line, sizeof line, "cuda:%d by MOER_CUDA_ARCH: %s path, whatever is proven or found\n",
                 gpu().device_id, paths[i]);
        HAS(info, line);
        HAS(text, i ? "sm_90a path: wgmma" : "generic path: mma.sync");
        HAS(text, "; by MOER_CUDA_ARCH");
    }
    /* A call that the path does not take says why. */
    struct outline outline;
    setenv("MOER_CUDA_ARCH", "sm_90a", 1);
    make_outline(&outline, (enum moer_operation)_i, fast, F32);
    ck_assert_msg(call_explain(&outline.call, text, sizeof text) == MOER_OK, "%s", moer_last_error());
    HAS(text, "generic path: float32 products, ");
    HAS(text, "; not for sm_90a: float32; by MOER_CUDA_ARCH");
    setenv("MOER_CUDA_ARCH", "sm_100f", 1);
    ck_assert_int_eq(moer_backend_info(1, info, sizeof info), MOER_OK);
    HAS(info, " by MOER_CUDA_ARCH: calls are refused: MOER_CUDA_ARCH is sm_100f, but cuda:");
    unsetenv("MOER_CUDA_ARCH");
    ck_assert_int_eq(moer_backend_info(1, info, sizeof info), MOER_OK);
    ck_assert_ptr_null(strstr(info, "MOER_CUDA_ARCH"));
}
END_TEST

/* The module as it is: its path is proven, and found right. A verdict against it is heeded all the same. */
START_TEST(proven_path) {
    char cache[128], command[512];
    snprintf(cache, sizeof cache, "%s/proven", folder);
    setenv("XDG_CACHE_HOME", cache, 1);
    HAS(in_another_process("explain", REAL_FOLDER), "; sm_90a: proven by bench/results/");
    const char *verdict = in_another_process("tune", REAL_FOLDER);
    HAS(verdict, "status 0\nsm_90a: found right on 20");
    const char *explanation = in_another_process("explain", REAL_FOLDER);
    HAS(explanation, "sm_90a path: wgmma products by one kernel");
    HAS(explanation, "proven by bench/results/");
    HAS(explanation, "found right on 20");
    snprintf(command, sizeof command, "sed -i 's/^right$/wrong as a test has it/' '%s'/moerouter/*.sm_90a.*", cache);
    ck_assert_int_eq(system(command), 0);
    explanation = in_another_process("explain", REAL_FOLDER);
    HAS(explanation, "generic path: mma.sync");
    HAS(explanation, "found wrong on 20");
    setenv("XDG_CACHE_HOME", folder, 1);
}
END_TEST

/* ---- Running them ------------------------------------------------------------------------------------------------ */

static int remove_one(const char *path, const struct stat *status, int kind, struct FTW *walk) {
    (void)status, (void)kind, (void)walk;
    return remove(path);
}

int main(int argc, char **argv) {
    setenv("MOER_TEST_DEVICE", "cuda:0", 0);
    if (argc > 1) {
        const struct test prints[] = {{print_explanation, MOER_OPERATIONS}, {print_verdict, 1}};
        return run_cuda_tests(argv[1], &prints[strcmp(argv[1], "tune") == 0], 1);
    }
    setenv("MOER_BACKEND_PATH", PLANTED_FOLDER, 1);
    unsetenv("MOER_CUDA_ARCH");
    char text[8192] = "";
    if (moer_backend_info(1, text, sizeof text) == MOER_OK && !strstr(text, "'s path sm_90a: ")) {
        puts("SKIP: no device has a fast path");
        return SKIPPED;
    }
    snprintf(folder, sizeof folder, "/tmp/moerouter-XXXXXX");
    if (!mkdtemp(folder))
        return EXIT_FAILURE;
    setenv("XDG_CACHE_HOME", folder, 1);
    const struct test tests[] = {
        {no_verdict, MOER_OPERATIONS},
        {planted_faults, LENGTH(faults)},
        {right_path, 1},
        {overridden, MOER_OPERATIONS},
        {proven_path, 1},
    };
    const int result = run_cuda_tests("CUDA tune", tests, LENGTH(tests));
    nftw(folder, remove_one, 8, FTW_DEPTH | FTW_PHYS);
    return result;
}
