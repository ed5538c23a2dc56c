/* SPDX-License-Identifier: Apache-2.0 */
/* moer_tune(), its verdicts and what they permit, with the module that stands in for CUDA's and, in place of the
 * self-check, scripts that end in every way a process can; then the self-check itself, on kernels that are wrong. Each
 * test is a process of its own, with a cache folder of its own. */
#include <moerouter/moerouter.h>
#include <check.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define LENGTH(array) ((int)(sizeof(array) / sizeof *(array)))
#define HAS(text, words) ck_assert_msg(strstr(text, words) != NULL, "no '%s' in: %s", words, text)

enum { SHORT_MS = 400, LONG_MS = 60000, SKIPPED = 77 };
static const DLDevice device = {kDLCUDA, 0};

/* ---- A folder, with the module, a self-check and the cache ------------------------------------------------------- */

static char folder[64], verdict_file[128];

static const char *in_folder(const char *name) {
    static char path[192];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static void write_text(const char *path, const char *text, mode_t mode) {
    unlink(path);
    FILE *file = fopen(path, "we");
    ck_assert_ptr_nonnull(file);
    fputs(text, file);
    ck_assert_int_eq(fclose(file), 0);
    ck_assert_int_eq(chmod(path, mode), 0);
}

static char *read_text(const char *path) {
    static char text[32768];
    FILE *file = fopen(path, "re");
    ck_assert_msg(file != NULL, "%s: %s", path, strerror(errno));
    const size_t length = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[length] = '\0';
    return text;
}

static void set_up(void) {
    snprintf(folder, sizeof folder, "/tmp/moerouter-XXXXXX");
    ck_assert_ptr_nonnull(mkdtemp(folder));
    snprintf(verdict_file, sizeof verdict_file, "%s/cache/moerouter/FAKE-0.fake_fast.%s.first", folder, moer_version());
    ck_assert_int_eq(symlink(MODULE_FOLDER "/cuda.so", in_folder("cuda.so")), 0);
    setenv("MOER_BACKEND_PATH", folder, 1);
    setenv("XDG_CACHE_HOME", in_folder("cache"), 1);
    setenv("FAKE_PATH", "", 1);
    unsetenv("FAKE_PROVEN");
    unsetenv("FAKE_DRIVER");
    unsetenv("FAKE_BUILD");
    unsetenv("MOER_CUDA_ARCH");
}

static int remove_one(const char *path, const struct stat *status, int kind, struct FTW *walk) {
    (void)status, (void)kind, (void)walk;
    return remove(path);
}

static void tear_down(void) {
    nftw(folder, remove_one, 8, FTW_DEPTH | FTW_PHYS);
}

/* The self-check is that script. */
static void put_script(const char *body) {
    char text[4096];
    snprintf(text, sizeof text, "#!/bin/sh\n%s\n", body);
    write_text(in_folder("selfcheck"), text, 0755);
}

static const char good_script[] = "echo doing something\n"
                                  "echo time softmax_topk_backward 1024 2048 128 8 1000 2000\n"
                                  "echo time sigmoid_topk_backward 1024 5120 160 8 3000 2000\n"
                                  "echo right";

static int disk_is_full; /* no file takes a byte: only meanwhile, since the tests' own messages go to one */

static enum moer_status tune(char text[1024], int timeout_ms) {
    struct rlimit before, none;
    strcpy(text, "untouched");
    getrlimit(RLIMIT_FSIZE, &before);
    none = before;
    if (disk_is_full)
        none.rlim_cur = 0;
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &none);
    const enum moer_status status = moer_tune(device, timeout_ms, text, 1024);
    setrlimit(RLIMIT_FSIZE, &before);
    return status;
}

static void tune_well(void) {
    char text[1024];
    put_script(good_script);
    ck_assert_msg(tune(text, LONG_MS) == MOER_OK, "%s", moer_last_error());
}

/* What the backend has been told, "permit COUNT of operations BITS: REASON". */
static const char *explain(void) {
    static char text[1024];
    static int64_t shape[] = {1, 1};
    DLTensor tensor = {NULL, device, 2, {kDLFloat, 32, 1}, shape, NULL, 0}, ids = tensor;
    ids.dtype = (DLDataType){kDLInt, 64, 1};
    struct moer_softmax_topk_backward_args args = {.size = sizeof args,
                                                   .hidden_states = &tensor,
                                                   .gate_weight = &tensor,
                                                   .routing_probs = &tensor,
                                                   .selected_experts = &ids,
                                                   .grad_routing_weights = &tensor};
    ck_assert_msg(moer_softmax_topk_backward_explain(&args, text, sizeof text) == MOER_OK, "%s", moer_last_error());
    return text;
}

static int exists(const char *path) {
    struct stat status;
    return lstat(path, &status) == 0;
}

/* Runs a part of a test in a process of its own, as if the program had been started again; what it says on stderr. */
static char *in_another_process(void (*part)(void)) {
    static char path[192];
    snprintf(path, sizeof path, "%s", in_folder("stderr"));
    fflush(NULL);
    const pid_t child = fork();
    if (child == 0) {
        if (!freopen(path, "we", stderr))
            _exit(1);
        part();
        fflush(NULL);
        _exit(0);
    }
    int status = -1;
    ck_assert_int_eq(waitpid(child, &status, 0), child);
    ck_assert_msg(status == 0, "the other process ends with status %#x", status);
    return read_text(path);
}

/* ---- Endings of the self-check ---------------------------------------------------------------------------------- */

static const struct {
    const char *script;
    enum moer_status status;
    const char *words; /* in the error, or in the verdict */
    int timeout_ms;
} endings[] = {
    {good_script, MOER_OK, "softmax_topk_backward 2.00 times as fast", LONG_MS},
    {"echo fast it; echo right", MOER_OK, "found right", LONG_MS},
    {"echo fast it; printf 'rig'; sleep 0.1; echo ht", MOER_OK, "found right", LONG_MS},
    {"echo fast it; echo wrong by a hair", MOER_DEVICE, "fake_fast is wrong: by a hair", LONG_MS},
    {"echo fast it; echo wrong by a hair; exit 3", MOER_DEVICE, "is wrong: by a hair", LONG_MS},
    {"echo fast it; echo wrong by a hair; exec sleep 1000", MOER_DEVICE, "is wrong: by a hair", SHORT_MS},
    {"echo doing it; echo wrong by a hair; kill -SEGV $$", MOER_DEVICE, "is wrong: by a hair", LONG_MS},
    {"echo fast it; echo trouble and strife; exec sleep 1000", MOER_UNAVAILABLE, "do its work: and strife", SHORT_MS},
    {"echo fast it; echo trouble and strife; kill -SEGV $$", MOER_UNAVAILABLE, "do its work: and strife", LONG_MS},
    {"echo fast this; kill -STOP $$", MOER_UNAVAILABLE, "could not do its work: it was stopped: this", SHORT_MS},
    /* Another process, which this one knows nothing of, has the pipe open. */
    {"echo fast this; sleep 3 & echo right", MOER_OK, "found right", SHORT_MS},
    {"echo fast this; kill -SEGV $$", MOER_DEVICE, "signal 11 (Segmentation fault): this", LONG_MS},
    {"echo fast this; echo fast that; kill -ABRT $$", MOER_DEVICE, "signal 6 (Aborted): that", LONG_MS},
    {"echo fast this; echo right; kill -BUS $$", MOER_DEVICE, "signal 7 (Bus error): this", LONG_MS},
    {"echo fast this; printf righ; kill -SEGV $$", MOER_DEVICE, "signal 11 (Segmentation fault): this", LONG_MS},
    {"echo doing this; echo fast that; kill -SEGV $$", MOER_DEVICE, "signal 11 (Segmentation fault): that", LONG_MS},
    {"echo fast this; echo doing that; kill -SEGV $$", MOER_UNAVAILABLE, "signal 11 (Segmentation fault): that",
     LONG_MS},
    {"kill -SEGV $$", MOER_UNAVAILABLE, "ended by signal 11", LONG_MS},
    {"echo fast this; kill -TERM $$", MOER_UNAVAILABLE, "ended by signal 15", LONG_MS},
    {"echo fast this; kill -KILL $$", MOER_UNAVAILABLE, "ended by signal 9", LONG_MS},
    {"echo fast this; exec sleep 1000", MOER_DEVICE, "no progress in 400 ms: this", SHORT_MS},
    {"trap '' TERM INT HUP; echo fast this; exec sleep 1000", MOER_DEVICE, "no progress in 400 ms", SHORT_MS},
    {"echo fast this; echo right; exec >&-; exec sleep 1000", MOER_DEVICE, "no progress in 400 ms", SHORT_MS},
    {"echo fast this; printf right; exec sleep 1000", MOER_DEVICE, "no progress in 400 ms: this", SHORT_MS},
    {"echo doing this; echo fast that; exec sleep 1000", MOER_DEVICE, "no progress in 400 ms: that", SHORT_MS},
    {"echo fast this; echo doing that; exec sleep 1000", MOER_UNAVAILABLE,
     "no progress in 400 ms, but not under the fast path: that", SHORT_MS},
    {"exec sleep 1000", MOER_UNAVAILABLE, "did not begin in 400 ms", SHORT_MS},
    {"echo fast it; echo trouble and strife", MOER_UNAVAILABLE, "could not do its work: and strife", LONG_MS},
    {"echo fast it; exit 127", MOER_UNAVAILABLE, "status 127", LONG_MS},
    {"true", MOER_UNAVAILABLE, "makes no sense", LONG_MS},
    {"echo fast it", MOER_UNAVAILABLE, "makes no sense", LONG_MS},
    {"echo fast it; printf right", MOER_UNAVAILABLE, "makes no sense", LONG_MS},
    {"echo right; echo right", MOER_UNAVAILABLE, "makes no sense", LONG_MS},
    {"echo right; printf more", MOER_UNAVAILABLE, "makes no sense", LONG_MS},
    {"echo hello", MOER_UNAVAILABLE, "makes no sense", LONG_MS},
    {"echo wrong; echo right", MOER_UNAVAILABLE, "makes no sense", LONG_MS},
    {"printf 'fast a\\033[1m\\n'; echo right", MOER_UNAVAILABLE, "makes no sense", LONG_MS},
    {"printf 'fast a\\0\\n'; echo right", MOER_UNAVAILABLE, "makes no sense", LONG_MS},
    {"cat /dev/zero", MOER_UNAVAILABLE, "makes no sense", LONG_MS},
    {"yes | tr '\\n' y", MOER_UNAVAILABLE, "makes no sense", LONG_MS},
    {"yes", MOER_UNAVAILABLE, "makes no sense", LONG_MS},
    {"echo time softmax_topk_backward 1 2 3 4 5; echo right", MOER_UNAVAILABLE, "makes no sense", LONG_MS},
    {"echo time softmax_topk_backward 1 2 3 4 5 6 7; echo right", MOER_UNAVAILABLE, "makes no sense", LONG_MS},
    {"echo time softmax_topk_backward 1 2 3 4 0 6; echo right", MOER_UNAVAILABLE, "makes no sense", LONG_MS},
    {"echo time softmax_topk_backward 1 2 3 4 -5 6; echo right", MOER_UNAVAILABLE, "makes no sense", LONG_MS},
    {"echo time softmax_topk_backward 1 2 3 4 5 99999999999999999999; echo right", MOER_UNAVAILABLE, "makes no sense",
     LONG_MS},
    {"echo time softmax_topk 1 2 3 4 5 6; echo right", MOER_UNAVAILABLE, "makes no sense", LONG_MS},
    {"for i in $(seq 17); do echo time softmax_topk_backward 1 2 3 4 5 6; done; echo right", MOER_UNAVAILABLE,
     "makes no sense", LONG_MS},
};

/* A verdict is stored where there is one, and text says what is in it; else both are untouched. */
START_TEST(endings_of_the_check) {
    char text[1024];
    put_script(endings[_i].script);
    const enum moer_status status = tune(text, endings[_i].timeout_ms);
    ck_assert_msg(status == endings[_i].status, "%s: status %d, %s", endings[_i].script, status, moer_last_error());
    HAS(status == MOER_OK ? text : moer_last_error(), endings[_i].words);
    if (status == MOER_UNAVAILABLE) {
        ck_assert_str_eq(text, "untouched");
        ck_assert(!exists(verdict_file));
        HAS(explain(), "there is no verdict");
    } else {
        HAS(text, status == MOER_OK ? "fake_fast: found right on " : "fake_fast: found wrong on ");
        HAS(text, verdict_file);
        HAS(read_text(verdict_file), status == MOER_OK ? "\nright\n" : "\nwrong ");
        HAS(explain(), status == MOER_OK ? "found right" : "operations 0: not proven on such devices; found wrong");
    }
    /* No child is left, and nothing beside the verdict. */
    ck_assert_int_eq(waitpid(-1, NULL, WNOHANG), -1);
    ck_assert_int_eq(errno, ECHILD);
    DIR *own = opendir(in_folder("cache/moerouter"));
    for (struct dirent *entry; own && (entry = readdir(own));)
        ck_assert_msg(entry->d_name[0] == '.' || !strcmp(entry->d_name, strrchr(verdict_file, '/') + 1), "%s",
                      entry->d_name);
    if (own)
        closedir(own);
}
END_TEST

/* The time in which this process is stopped does not count. */
START_TEST(stopped_meanwhile) {
    char text[1024], script[128];
    const int own = (int)getpid();
    snprintf(script, sizeof script,
             "echo fast it; sleep 0.2; kill -STOP %d; sleep 3.5; kill -CONT %d; sleep 0.2; echo right", own, own);
    put_script(script);
    ck_assert_msg(tune(text, 3000) == MOER_OK, "%s", moer_last_error());
}
END_TEST

/* Progress is what counts, not time. */
START_TEST(slow_progress) {
    char text[1024];
    put_script("for i in 1 2 3 4 5 6; do echo doing $i; sleep 0.2; done; echo right");
    ck_assert_msg(tune(text, 1000) == MOER_OK, "%s", moer_last_error());
}
END_TEST

START_TEST(no_check_to_run) {
    char text[1024];
    setenv("PATH", "/nowhere", 1);
    write_text(in_folder("selfcheck"), "\177ELF, but not for long", 0755);
    ck_assert_int_eq(tune(text, LONG_MS), MOER_UNAVAILABLE);
    /* Under valgrind a spawned child shares no memory with its parent, and has its status alone to say so. */
    if (!strstr(moer_last_error(), "ended with status 127"))
        HAS(moer_last_error(), "selfcheck does not run: Exec format error");
    ck_assert_str_eq(text, "untouched");
}
END_TEST

/* What the child is given: its arguments, standard streams alone, no signal blocked or ignored, but for two that are
 * the C library's own. */
START_TEST(child_is_clean) {
    char text[1024];
    sigset_t all;
    write_text(in_folder("input"), "a line\n", 0600);
    const int input = open(in_folder("input"), O_RDONLY); /* not closed on exec */
    ck_assert_int_ge(input, 0);
    dup2(input, 0);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, NULL);
    signal(SIGPIPE, SIG_IGN);
    put_script("echo \"doing $*\"\n"
               "for i in 3 4 5 6 7 8 9; do test -e /proc/self/fd/$i && echo wrong $i is open; done\n"
               "read line && echo wrong input\n"
               "test \"$*\" = \"0 fake_fast FAKE-0 $VERSION first\" || echo wrong arguments\n"
               "echo right");
    setenv("VERSION", moer_version(), 1);
    ck_assert_msg(tune(text, LONG_MS) == MOER_OK, "%s", moer_last_error());
    /* A shell has a mask of its own. */
    write_text(in_folder("selfcheck"),
               "#!/usr/bin/awk -f\n"
               "BEGIN {\n"
               "    print \"doing it\"\n"
               "    while ((getline line < \"/proc/self/status\") > 0) {\n"
               "        if (line ~ /^SigBlk:.*[1-9a-f]/) print \"wrong signals are blocked\"\n"
               "        if (line ~ /^SigIgn:/ && line !~ /[08]0000000$/) print \"wrong signals are ignored\"\n"
               "    }\n"
               "    print \"right\"\n"
               "}\n",
               0755);
    ck_assert_msg(tune(text, LONG_MS) == MOER_OK, "%s", moer_last_error());
}
END_TEST

static int count_open(void) {
    int count = 0;
    DIR *own = opendir("/proc/self/fd");
    while (readdir(own))
        count++;
    closedir(own);
    return count;
}

START_TEST(nothing_is_left_open) {
    char text[1024];
    tune_well();
    const int before = count_open();
    for (int i = 0; i < 3; i++) {
        put_script(i == 0 ? good_script : i == 1 ? "echo hello" : "echo doing it; exec sleep 1000");
        tune(text, SHORT_MS);
        ck_assert_int_eq(count_open(), before);
    }
}
END_TEST

/* A program that does not want to hear of its children. */
START_TEST(children_that_are_ignored) {
    char text[1024];
    signal(SIGCHLD, SIG_IGN);
    tune_well();
    put_script("echo doing it; echo wrong as ever");
    ck_assert_int_eq(tune(text, LONG_MS), MOER_DEVICE);
}
END_TEST

/* Signals that come in between, and standard streams that are closed. */
static void ignore_alarm(int signal) {
    (void)signal;
}

START_TEST(interrupted_and_without_streams) {
    const struct itimerval often = {{0, 3000}, {0, 3000}}, never = {{0, 0}, {0, 0}};
    struct sigaction action = {.sa_handler = ignore_alarm};
    char text[1024];
    sigaction(SIGALRM, &action, NULL);
    put_script("echo doing it; sleep 0.3; echo right");
    const int in = dup(0), out = dup(1);
    close(0);
    close(1);
    setitimer(ITIMER_REAL, &often, NULL);
    const enum moer_status status = tune(text, LONG_MS);
    setitimer(ITIMER_REAL, &never, NULL);
    dup2(in, 0);
    dup2(out, 1);
    ck_assert_msg(status == MOER_OK, "%s", moer_last_error());
}
END_TEST

static void *tune_once(void *text) {
    return (void *)(uintptr_t)tune(text, LONG_MS);
}

static void *explain_often(void *stop) {
    while (!*(volatile int *)stop) {
        moer_backend_info(1, (char[1024]){0}, 1024);
        usleep(1000); /* one that never sleeps keeps the others from running where threads take turns, as in valgrind */
    }
    return NULL;
}

START_TEST(threads) {
    enum { THREADS = 4 };
    static char texts[THREADS][1024];
    pthread_t threads[THREADS], reader;
    int stop = 0;
    put_script(good_script);
    pthread_create(&reader, NULL, explain_often, &stop);
    for (int i = 0; i < THREADS; i++)
        ck_assert_int_eq(pthread_create(&threads[i], NULL, tune_once, texts[i]), 0);
    for (int i = 0; i < THREADS; i++) {
        void *status;
        pthread_join(threads[i], &status);
        ck_assert_int_eq((int)(uintptr_t)status, MOER_OK);
        HAS(texts[i], "found right");
    }
    stop = 1;
    pthread_join(reader, NULL);
}
END_TEST

/* ---- Arguments and folders -------------------------------------------------------------------------------------- */

static void mark(void) {
    char script[256];
    snprintf(script, sizeof script, "touch %s/ran; echo doing it; echo right", folder);
    put_script(script);
}

START_TEST(refusals) {
    char text[1024] = "untouched";
    mark();
    ck_assert_int_eq(moer_tune(device, -1, text, sizeof text), MOER_INVALID);
    ck_assert_str_eq(moer_last_error(), "moer_tune: timeout_ms is -1 but must not be negative");
    ck_assert_int_eq(moer_tune(device, 0, NULL, 1), MOER_INVALID);
    ck_assert_str_eq(moer_last_error(), "moer_tune: text is NULL");
    ck_assert_int_eq(moer_tune((DLDevice){kDLCPU, 0}, 0, text, sizeof text), MOER_UNSUPPORTED);
    HAS(moer_last_error(), "the cpu backend has no fast path");
    ck_assert_int_eq(moer_tune((DLDevice){kDLMetal, 0}, 0, text, sizeof text), MOER_UNSUPPORTED);
    ck_assert_int_eq(moer_tune((DLDevice){kDLCUDA, 1}, 0, text, sizeof text), MOER_UNSUPPORTED);
    HAS(moer_last_error(), "no fast path on device 1");
    ck_assert_int_eq(moer_tune((DLDevice){kDLCUDA, 7}, 0, text, sizeof text), MOER_UNAVAILABLE);
    ck_assert_int_eq(moer_tune((DLDevice){kDLCUDA, -1}, 0, text, sizeof text), MOER_UNAVAILABLE);
    ck_assert_str_eq(text, "untouched");
    ck_assert(!exists(in_folder("ran")));
    ck_assert_int_eq(moer_tune(device, 0, NULL, 0), MOER_OK);
    ck_assert(exists(in_folder("ran")));
    for (size_t size = 1; size < 200; size += 13) {
        memset(text, 'x', sizeof text);
        ck_assert_int_eq(moer_tune(device, 0, text, size), MOER_OK);
        ck_assert_uint_eq(strlen(text), strlen(text) < size ? strlen(text) : size - 1);
        ck_assert_int_eq(text[size], 'x');
    }
}
END_TEST

/* ---- Verdicts that cannot be stored ----------------------------------------------------------------------------- */

static void set_cache(const char *path) {
    unsetenv("HOME");
    unsetenv("XDG_CACHE_HOME");
    if (path)
        setenv("XDG_CACHE_HOME", path, 1);
}

static void no_cache(void) {
    set_cache(NULL);
}

static void relative_cache(void) {
    set_cache("relative/cache");
}

static void no_folder_there(void) {
    set_cache("/dev/null/cache");
}

static void read_only_folder(void) {
    set_cache("/proc/moerouter");
}

static void folder_of_that_name(void) {
    mkdir(in_folder("cache"), 0700);
    mkdir(in_folder("cache/moerouter"), 0700);
    ck_assert_int_eq(mkdir(verdict_file, 0700), 0);
}

static void full_disk(void) {
    disk_is_full = 1;
}

static const struct {
    void (*prepare)(void);
    const char *words;
} obstacles[] = {
    {no_cache, "not stored: neither XDG_CACHE_HOME nor HOME is an absolute path"},
    {relative_cache, "not stored: neither XDG_CACHE_HOME nor HOME is an absolute path"},
    {no_folder_there, "not stored: Not a directory: /dev/null/cache/moerouter/FAKE-0"},
    {read_only_folder, "not stored: No such file or directory: /proc/moerouter"},
    {folder_of_that_name, "not stored: Is a directory: "},
    {full_disk, "not stored: File too large: "},
};

/* A path that is wrong, or hangs, is named all the same, and runs no more in this process. */
START_TEST(wrong_but_not_stored) {
    static const char *const scripts[][2] = {{"echo fast it; echo wrong by a hair", "by a hair"},
                                             {"echo fast it; exec sleep 1000", "no progress in 400 ms: it"}};
    const int obstacle = _i / 2;
    char text[1024], words[128];
    setenv("FAKE_PROVEN", "here.json", 1);
    put_script(scripts[_i % 2][0]);
    obstacles[obstacle].prepare();
    HAS(explain(), "operations 3: proven by here.json");
    ck_assert_msg(tune(text, SHORT_MS) == MOER_DEVICE, "%s", moer_last_error());
    snprintf(words, sizeof words, "fake_fast is wrong: %s; the verdict is not stored: ", scripts[_i % 2][1]);
    HAS(moer_last_error(), words);
    HAS(moer_last_error(), obstacles[obstacle].words);
    HAS(text, "found wrong on ");
    HAS(text, obstacles[obstacle].words);
    HAS(explain(), "permit 2 of operations 0: proven by here.json; found wrong");
}
END_TEST

/* One for a path that is not proven permits nothing. */
START_TEST(right_but_not_stored) {
    char text[1024];
    put_script(good_script);
    obstacles[_i].prepare();
    ck_assert_int_eq(tune(text, LONG_MS), MOER_UNAVAILABLE);
    HAS(moer_last_error(), "fake_fast was found right, but the verdict is not stored: ");
    HAS(moer_last_error(), obstacles[_i].words);
    HAS(text, "found right on ");
    HAS(text, obstacles[_i].words);
    HAS(explain(), "permit 1 of operations 0: not proven on such devices");
}
END_TEST

/* One for the path does not outlive one against it. */
START_TEST(older_verdict) {
    char text[1024];
    tune_well();
    HAS(explain(), "operations 1");
    full_disk();
    ck_assert_int_eq(tune(text, LONG_MS), MOER_UNAVAILABLE);
    ck_assert(exists(verdict_file));
    HAS(explain(), "permit 1 of operations 1");
    put_script("echo fast it; echo wrong as ever");
    ck_assert_int_eq(tune(text, LONG_MS), MOER_DEVICE);
    ck_assert(!exists(verdict_file));
    HAS(explain(), "permit 2 of operations 0");
}
END_TEST

START_TEST(home_is_next) {
    setenv("XDG_CACHE_HOME", "relative/cache", 1);
    setenv("HOME", folder, 1);
    tune_well();
    static const char *const folders[] = {".cache", ".cache/moerouter"};
    char file[128];
    struct stat status;
    snprintf(file, sizeof file, ".cache/moerouter%s", strrchr(verdict_file, '/'));
    ck_assert(exists(in_folder(file)));
    for (int i = 0; i < LENGTH(folders); i++) {
        ck_assert_int_eq(stat(in_folder(folders[i]), &status), 0);
        ck_assert_int_eq(status.st_mode & 0777, 0700);
    }
}
END_TEST

/* ---- The policy ------------------------------------------------------------------------------------------------- */

static const struct {
    const char *proven, *script; /* NULL: no verdict */
    const char *words;
} policies[] = {
    {NULL, NULL, "operations 0: not proven on such devices; there is no verdict"},
    {NULL, good_script, "operations 1: not proven on such devices; found right"},
    {NULL, "echo doing it; echo right", "operations 0: not proven on such devices; found right"},
    {NULL, "echo doing it; echo wrong as ever", "operations 0: not proven on such devices; found wrong"},
    {"here.json", NULL, "operations 3: proven by here.json"},
    {"here.json", good_script, "operations 3: proven by here.json; found right"},
    {"here.json", "echo doing it; echo wrong as ever", "operations 0: proven by here.json; found wrong"},
};

static const char *expected;

static void expect_explanation(void) {
    char info[1024];
    ck_assert_int_eq(moer_backend_info(1, info, sizeof info), MOER_OK);
    HAS(explain(), expected);
    HAS(explain(), "permit 1 of"); /* once in a process */
    HAS(info, "cuda:0's path fake_fast: ");
    HAS(info, strstr(expected, ": ") + 2);
}

static void tune_in_vain(void) {
    char text[1024];
    tune(text, LONG_MS);
}

/* A verdict is there for the program that is started next. */
START_TEST(policy) {
    if (policies[_i].proven)
        setenv("FAKE_PROVEN", policies[_i].proven, 1);
    if (policies[_i].script) {
        put_script(policies[_i].script);
        in_another_process(tune_in_vain);
    }
    expected = policies[_i].words;
    ck_assert_str_eq(in_another_process(expect_explanation), "");
}
END_TEST

/* In the process that has tuned it counts at once, and the next verdict in its place. */
START_TEST(at_once) {
    char text[1024];
    HAS(explain(), "permit 1 of operations 0");
    tune_well();
    HAS(explain(), "permit 2 of operations 1");
    put_script("echo doing it; echo wrong as ever");
    ck_assert_int_eq(tune(text, LONG_MS), MOER_DEVICE);
    HAS(explain(), "permit 3 of operations 0: not proven on such devices; found wrong");
}
END_TEST

START_TEST(another_driver) {
    in_another_process(tune_well);
    setenv("FAKE_DRIVER", "2.0", 1);
    expected = "operations 0: not proven on such devices; the verdict of 20";
    ck_assert_str_eq(in_another_process(expect_explanation), "");
    setenv("FAKE_DRIVER", "1.0", 1);
    expected = "operations 1: not proven on such devices; found right";
    ck_assert_str_eq(in_another_process(expect_explanation), "");
    setenv("FAKE_DRIVER", "3.0", 1);
    HAS(explain(), "does not count: it is of driver 1.0");
}
END_TEST

/* The same version with other kernels: its verdict is another file, and neither takes the other's place. */
START_TEST(another_build) {
    put_script("echo fast it; echo wrong as ever");
    in_another_process(tune_in_vain);
    setenv("FAKE_BUILD", "second", 1);
    expected = "operations 0: not proven on such devices; there is no verdict";
    ck_assert_str_eq(in_another_process(expect_explanation), "");
    in_another_process(tune_well);
    expected = "operations 1: not proven on such devices; found right";
    ck_assert_str_eq(in_another_process(expect_explanation), "");
    setenv("FAKE_BUILD", "first", 1);
    expected = "operations 0: not proven on such devices; found wrong";
    ck_assert_str_eq(in_another_process(expect_explanation), "");
}
END_TEST

/* The stored text with the first of some words in place of others. */
static void edit(const char *words, const char *others) {
    char text[4096];
    const char *before = read_text(verdict_file), *at = strstr(before, words);
    ck_assert_ptr_nonnull(at);
    snprintf(text, sizeof text, "%.*s%s%s", (int)(at - before), before, others, at + strlen(words));
    write_text(verdict_file, text, 0600);
}

/* So is another version's. */
START_TEST(another_library) {
    char older[192];
    in_another_process(tune_well);
    edit("\nlibrary ", "\nlibrary 9");
    snprintf(older, sizeof older, "%s/cache/moerouter/FAKE-0.fake_fast.9%s.first", folder, moer_version());
    ck_assert_int_eq(rename(verdict_file, older), 0);
    expected = "operations 0: not proven on such devices; there is no verdict";
    ck_assert_str_eq(in_another_process(expect_explanation), "");
    in_another_process(tune_well);
    ck_assert(exists(older));
}
END_TEST

/* ---- Files that are not to be trusted --------------------------------------------------------------------------- */

static void expect_ignored(const char *words) {
    expected = "operations 0: not proven on such devices; the stored verdict is ignored";
    const char *warning = in_another_process(expect_explanation);
    HAS(warning, verdict_file);
    HAS(warning, words);
    ck_assert_ptr_eq(strchr(warning, '\n'), strrchr(warning, '\n')); /* said once */
}

static const struct {
    const char *words, *others;
} damages[] = {
    {"FAKE-0", "FAKE-1"},
    {"path fake_fast", "path faker_fast"},
    {"library", "librarian"},
    {"\nlibrary ", "\nlibrary 9"},
    {"build first", "build second"},
    {"\ndriver ", "\ndriver \033]0;"},
    {"\ndate ", "\ndate \r"},
    {"\ndate ", "\ndate \177"},
    {"\ndate ", "\ndate \302\233"},
    {"\nright\n", "\nright\nright\n"},
    {"\nright\n", "\nright\n "},
    {"\nright\n", "\nwrong\n"},
    {"\nright\n", "\nwrong \n"},
    {"1024", "-1024"},
    {"1024", ""},
    {"1024", "1024x"},
    {"softmax_topk_backward", "relu"},
    {"\ndate ", "\ndate 2026-11-30T00:00:00Z"},
    {"\ndriver ", "\n"},
    {"\nbuild ", "\n"},
};

START_TEST(damaged) {
    in_another_process(tune_well);
    edit(damages[_i].words, damages[_i].others);
    expect_ignored("it is damaged");
}
END_TEST

/* By another version of this file's subject. */
START_TEST(another_format) {
    in_another_process(tune_well);
    edit("moerouter verdict 2", "moerouter verdict 1");
    expect_ignored("it is of another format");
}
END_TEST

/* No byte that a terminal obeys gets into a file: such a verdict would not count. */
START_TEST(plain_text) {
    put_script("printf 'fast it\nwrong as \302\233 ever\n'");
    in_another_process(tune_in_vain);
    HAS(read_text(verdict_file), "\nwrong as ?? ever\n");
    expected = "operations 0: not proven on such devices; found wrong";
    ck_assert_str_eq(in_another_process(expect_explanation), "");
}
END_TEST

/* Each beginning of a file. */
START_TEST(cut_short) {
    in_another_process(tune_well);
    char text[4096];
    snprintf(text, sizeof text, "%s", read_text(verdict_file));
    for (size_t length = strlen(text) - 1;; length--) {
        text[length] = '\0';
        write_text(verdict_file, text, 0600);
        expect_ignored("it is damaged");
        if (length == 0)
            break;
    }
}
END_TEST

START_TEST(too_long) {
    in_another_process(tune_well);
    FILE *file = fopen(verdict_file, "ae");
    for (int i = 0; i < 20000; i++)
        fputc(i % 80 ? 'x' : '\n', file);
    fclose(file);
    expect_ignored("it is damaged");
}
END_TEST

START_TEST(foreign) {
    in_another_process(tune_well);
    chmod(verdict_file, 0620);
    expect_ignored("not this user's alone");
    chmod(verdict_file, 0602);
    expect_ignored("not this user's alone");
    chmod(verdict_file, 0600);
    if (geteuid() == 0) {
        ck_assert_int_eq(chown(verdict_file, 12345, 0), 0);
        expect_ignored("not this user's alone");
        ck_assert_int_eq(chown(verdict_file, 0, 0), 0);
    }
    expected = "operations 1: not proven on such devices; found right";
    ck_assert_str_eq(in_another_process(expect_explanation), "");
    rename(verdict_file, in_folder("elsewhere"));
    ck_assert_int_eq(symlink(in_folder("elsewhere"), verdict_file), 0);
    expect_ignored("cannot be opened");
    unlink(verdict_file);
    ck_assert_int_eq(mkfifo(verdict_file, 0600), 0);
    expect_ignored("no regular file");
    unlink(verdict_file);
    ck_assert_int_eq(mkdir(verdict_file, 0700), 0);
    expect_ignored("no regular file");
    char text[1024];
    put_script(good_script);
    ck_assert_int_eq(tune(text, LONG_MS), MOER_UNAVAILABLE);
    HAS(moer_last_error(), "not stored: Is a directory");
}
END_TEST

/* ---- The self-check itself -------------------------------------------------------------------------------------- */

static const struct {
    const char *fault;
    enum moer_status status;
    const char *words[3];
} faults[] = {
    {"", MOER_OK, {"found right", "softmax_topk_backward, N = 1024", "sigmoid_topk_backward, N = 16384"}},
    {"swizzle", MOER_DEVICE, {"softmax_topk_backward, bfloat16", "grad_hidden_states[", "a wrong swizzle"}},
    {"row", MOER_DEVICE, {"grad_hidden_states[", "row 1, column 0 of the gate", "another row"}},
    {"stride", MOER_DEVICE, {"grad_gate_weight[0,64]", "column 0 of hidden_states", "a wrong stride"}},
    {"tail", MOER_DEVICE, {"grad_hidden_states[0,0]", "was not written", "a lost tail"}},
    {"packed", MOER_DEVICE, {"bfloat16, strided, N = 300", "grad_gate_weight[", "another row than its own"}},
    {"beside", MOER_DEVICE, {"bfloat16, strided, N = 300, H = 80", "grad_hidden_states[0,80]", "is 1, not "}},
    {"many", MOER_DEVICE, {"N = 8257, H = 200, E = 128", "grad_hidden_states[8256,0]", "is 1, not "}},
    {"swizzle, crash", MOER_DEVICE, {"signal 11", "softmax_topk_backward, bfloat16", ", a pattern"}},
    {"swizzle, no memory", MOER_DEVICE, {"softmax_topk_backward, bfloat16", "grad_hidden_states[", "one of "}},
    {"crash", MOER_DEVICE, {"signal 11", "softmax_topk_backward, bfloat16", "N = 0"}},
    {"device", MOER_DEVICE, {"an illegal address", "softmax_topk_backward, bfloat16", "N = 0"}},
    {"hang", MOER_DEVICE, {"no progress in 3000 ms: ", "softmax_topk_backward, bfloat16", "N = 0"}},
    {"generic hang", MOER_UNAVAILABLE, {"but not under the fast path: softmax", "N = 17", "generic path"}},
    {"generic crash", MOER_UNAVAILABLE, {"ended by signal 11", "N = 17", "generic path"}},
    {"generic device", MOER_UNAVAILABLE, {"could not do its work", "N = 17", "an illegal address"}},
};

START_TEST(the_check_itself) {
    char text[4096];
    setenv("FAKE_PATH", faults[_i].fault, 1);
    ck_assert_int_eq(symlink(SELFCHECK, in_folder("selfcheck")), 0);
    const int hangs = strstr(faults[_i].fault, "hang") != NULL;
    const enum moer_status status = moer_tune(device, hangs ? 3000 : LONG_MS, text, sizeof text);
    ck_assert_msg(status == faults[_i].status, "status %d, %s", status, moer_last_error());
    for (int i = 0; i < LENGTH(faults[_i].words); i++)
        HAS(status == MOER_OK ? text : moer_last_error(), faults[_i].words[i]);
    HAS(explain(), status == MOER_OK ? "operations 3" : "operations 0");
    ck_assert_int_eq(exists(verdict_file), status != MOER_UNAVAILABLE);
}
END_TEST

/* A module that has been replaced since the parent loaded it. */
START_TEST(the_check_of_another_build) {
    char script[512], text[1024];
    snprintf(script, sizeof script, "FAKE_BUILD=second exec %s \"$@\"", SELFCHECK);
    put_script(script);
    ck_assert_int_eq(tune(text, LONG_MS), MOER_UNAVAILABLE);
    HAS(moer_last_error(), "could not do its work: it has another build of the kernels, not first");
    ck_assert(!exists(verdict_file));
}
END_TEST

/* ---- Running them ----------------------------------------------------------------------------------------------- */

static int can_spawn(void) {
    pid_t child;
    int status = -1;
    return posix_spawn(&child, "/bin/sh", NULL, NULL, (char *[]){"sh", "-c", "exit 7", NULL}, environ) == 0 &&
           waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 7;
}

int main(void) {
    const struct {
        const TTest *test;
        int count;
    } tests[] = {
        {endings_of_the_check, LENGTH(endings)},
        {stopped_meanwhile, 1},
        {slow_progress, 1},
        {no_check_to_run, 1},
        {child_is_clean, 1},
        {nothing_is_left_open, 1},
        {children_that_are_ignored, 1},
        {interrupted_and_without_streams, 1},
        {threads, 1},
        {refusals, 1},
        {wrong_but_not_stored, 2 * LENGTH(obstacles)},
        {right_but_not_stored, LENGTH(obstacles)},
        {older_verdict, 1},
        {home_is_next, 1},
        {policy, LENGTH(policies)},
        {at_once, 1},
        {another_driver, 1},
        {another_build, 1},
        {another_library, 1},
        {damaged, LENGTH(damages)},
        {another_format, 1},
        {plain_text, 1},
        {cut_short, 1},
        {too_long, 1},
        {foreign, 1},
        {the_check_itself, LENGTH(faults)},
        {the_check_of_another_build, 1},
    };
    if (access(MODULE_FOLDER "/cuda.so", R_OK) || access(SELFCHECK, X_OK)) {
        puts("SKIP: no shared objects were built");
        return SKIPPED;
    }
    if (!can_spawn()) {
        puts("SKIP: no program can be started here");
        return SKIPPED;
    }
    Suite *suite = suite_create("tune");
    for (int i = 0; i < LENGTH(tests); i++) {
        TCase *group = tcase_create(tests[i].test->name);
        tcase_set_timeout(group, 300);
        tcase_add_checked_fixture(group, set_up, tear_down);
        tcase_add_loop_test(group, tests[i].test, 0, tests[i].count);
        suite_add_tcase(suite, group);
    }
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    const int failed = srunner_ntests_failed(runner), ran = srunner_ntests_run(runner);
    srunner_free(runner);
    return failed || !ran;
}
