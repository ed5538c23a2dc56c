/* SPDX-License-Identifier: Apache-2.0 */
/* moer_tune(): the self-check of a device's fast path, in a child process, and what its end means.
 *
 * The child is a program that is installed beside the modules. It is spawned, not forked: a driver does not survive a
 * fork. Its report comes through a pipe, a line at a time:
 *
 *     fast WHAT                              what follows is about that, and the fast path's doing
 *     doing WHAT                             it is not: the generic path's, or that of neither
 *     time OPERATION N H E K FAST GENERIC    nanoseconds
 *     right | wrong WHY                      the verdict, and the end
 *     trouble WHY                            the end: there can be no verdict
 *
 * A line is progress, and starts the watchdog's time anew. A child that faults or falls silent under the fast path has
 * found it wrong. One that does so elsewhere, or ends in another way, has found out nothing. */
#include "config.h"
#include "internal.h"
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { USUAL_TIMEOUT_MS = 60000, SLICE_MS = 100, NAP_MS = 2, MOST_LINE = 512, MOST_PATH = 4096 };
static const char program[] = "selfcheck";

struct report {
    char doing[MOST_LINE], trouble[MOST_LINE];
    struct moer_verdict verdict;
    int is_fast; /* what it is doing is the fast path's */
    int ended;   /* the last line has come */
};

/* ---- The child -------------------------------------------------------------------------------------------------- */

static enum moer_status find_program(char *path, size_t size, struct moer_message *message) {
    const char *named = secure_getenv("MOER_BACKEND_PATH");
    int length = named && *named ? snprintf(path, size, "%s/%s", named, program) : (int)size;
    if (length >= (int)size || access(path, X_OK))
        length = moer_installed_file(path, size, program);
    if (length >= (int)size || access(path, X_OK))
        return moer_fail(message, MOER_UNAVAILABLE, "there is no self-check: %.400s: %s", path, strerror(errno));
    return MOER_OK;
}

/* With signals as a program expects them, and no open file but the standard streams. */
static int spawn(const char *path, char *const arguments[], int report, pid_t *child) {
    posix_spawn_file_actions_t files;
    posix_spawnattr_t attributes;
    sigset_t none, all;
    sigemptyset(&none);
    sigfillset(&all);
    int error = posix_spawn_file_actions_init(&files);
    if (error)
        return error;
    error = posix_spawnattr_init(&attributes);
    if (!error) {
        error = posix_spawn_file_actions_adddup2(&files, report, STDOUT_FILENO);
        if (!error)
            error = posix_spawn_file_actions_addopen(&files, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
#ifdef HAVE_POSIX_SPAWN_FILE_ACTIONS_ADDCLOSEFROM_NP
        if (!error)
            error = posix_spawn_file_actions_addclosefrom_np(&files, STDERR_FILENO + 1);
#endif
        posix_spawnattr_setsigmask(&attributes, &none);
        posix_spawnattr_setsigdefault(&attributes, &all);
        posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
        if (!error)
            error = posix_spawn(child, path, &files, &attributes, arguments, environ);
        posix_spawnattr_destroy(&attributes);
    }
    posix_spawn_file_actions_destroy(&files);
    return error;
}

static int64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* ---- Its report ------------------------------------------------------------------------------------------------- */

/* Takes a line; 0 where it makes no sense. */
static int read_line(struct report *report, char *line) {
    for (char *c = line; *c; c++)
        if ((unsigned char)*c < ' ' || *c == 127)
            return 0;
    if (report->ended)
        return 0;
    const int is_fast = !strncmp(line, "fast ", 5);
    if (is_fast || !strncmp(line, "doing ", 6)) {
        moer_copy_text(report->doing, sizeof report->doing, strchr(line, ' ') + 1);
        report->is_fast = is_fast;
        return 1;
    }
    if (!strncmp(line, "trouble ", 8)) {
        moer_copy_text(report->trouble, sizeof report->trouble, line + 8);
        return report->ended = 1;
    }
    const enum moer_line kind = moer_read_verdict_line(&report->verdict, line);
    report->ended = kind == MOER_LINE_LAST;
    return kind != MOER_LINE_SENSELESS;
}

enum ending { CLOSED, SILENT, SENSELESS };

/* Reads the report until the child closes it, or has ended it: others may hold the pipe open. Of a wait that takes
 * longer than it was to, as when this process is stopped, no more counts than that. */
static enum ending read_report(int from, int timeout_ms, struct report *report) {
    char text[MOST_LINE];
    size_t length = 0;
    for (int left = timeout_ms; left > 0;) {
        struct pollfd ready = {from, POLLIN, 0};
        const int slice = left < SLICE_MS ? left : SLICE_MS;
        const int64_t begin = now_ms();
        const int count = poll(&ready, 1, slice), taken = (int)(now_ms() - begin);
        left -= count && taken < slice ? taken : slice;
        const ssize_t got = count > 0 ? read(from, text + length, sizeof text - length) : -1;
        if (count == 0 || (got < 0 && errno == EINTR))
            continue;
        if (got < 0)
            return SENSELESS;
        if (got == 0) {
            report->ended &= length == 0; /* a line was begun */
            return CLOSED;
        }
        length += (size_t)got;
        for (char *end; (end = memchr(text, '\n', length));) {
            *end = '\0';
            if (memchr(text, '\0', length) != end || !read_line(report, text))
                return SENSELESS;
            length -= (size_t)(end + 1 - text);
            memmove(text, end + 1, length);
            left = report->ended && timeout_ms > SLICE_MS ? SLICE_MS : timeout_ms;
        }
        if (length == sizeof text)
            return SENSELESS;
    }
    return report->ended && length == 0 ? CLOSED : SILENT;
}

/* Waits for the child's end, so long at most: 1 and its status, 0 where it does not end, -1 where the program's own
 * handling of its children has taken it away. */
static int await(pid_t child, int timeout_ms, int *status) {
    for (pid_t ended; (ended = waitpid(child, status, WNOHANG)) != child; timeout_ms -= NAP_MS) {
        if (ended < 0 || timeout_ms <= 0)
            return (int)ended;
        nanosleep(&(struct timespec){0, NAP_MS * 1000000}, NULL);
    }
    return 1;
}

/* ---- What it means ---------------------------------------------------------------------------------------------- */

/* A signal that a process brings upon itself. */
static int is_fault(int signal) {
    return signal == SIGSEGV || signal == SIGBUS || signal == SIGILL || signal == SIGFPE || signal == SIGABRT ||
           signal == SIGTRAP || signal == SIGSYS;
}

/* The child broke over what the fast path was doing. */
__attribute__((format(printf, 2, 3))) static enum moer_status broke(struct report *report, const char *format, ...) {
    struct moer_verdict *verdict = &report->verdict;
    va_list values;
    va_start(values, format);
    const int length = vsnprintf(verdict->wrong, sizeof verdict->wrong, format, values);
    va_end(values);
    snprintf(verdict->wrong + length, sizeof verdict->wrong - (size_t)length, ": %.300s", report->doing);
    verdict->right = 0;
    verdict->timing_count = 0;
    return MOER_OK;
}

/* MOER_OK: there is a verdict. */
static enum moer_status judge(struct report *report, enum ending ending, int timeout_ms, int waited, int status,
                              struct moer_message *message) {
    const int killed = waited > 0 && WIFSIGNALED(status) ? WTERMSIG(status) : 0;
    /* What it has said counts, however it ends; but that the path is right, only where it ends well. */
    if (report->ended && *report->verdict.wrong && ending != SENSELESS)
        return MOER_OK;
    if (*report->trouble)
        return moer_fail(message, MOER_UNAVAILABLE, "the self-check could not do its work: %.400s", report->trouble);
    if (ending == SILENT && report->is_fast)
        return broke(report, "no progress in %d ms", timeout_ms);
    if (ending == SILENT)
        return moer_fail(message, MOER_UNAVAILABLE, "the self-check %s in %d ms%s%.300s",
                         *report->doing ? "made no progress" : "did not begin", timeout_ms,
                         *report->doing ? ", but not under the fast path: " : "", report->doing);
    if (is_fault(killed) && report->is_fast)
        return broke(report, "ended by signal %d (%s)", killed, strsignal(killed));
    if (killed)
        return moer_fail(message, MOER_UNAVAILABLE, "the self-check was ended by signal %d (%s)%s%.300s", killed,
                         strsignal(killed), *report->doing ? ": " : "", report->doing);
    if (waited > 0 && WEXITSTATUS(status))
        return moer_fail(message, MOER_UNAVAILABLE, "the self-check ended with status %d", WEXITSTATUS(status));
    if (ending == SENSELESS || !report->ended)
        return moer_fail(message, MOER_UNAVAILABLE, "the self-check's report makes no sense");
    return MOER_OK;
}

static enum moer_status self_check(int device, const struct moer_fast_path *path, int timeout_ms, struct report *report,
                                   struct moer_message *message) {
    char program_path[MOST_PATH], number[16];
    int ends[2], status = 0;
    pid_t child;
    enum moer_status result = find_program(program_path, sizeof program_path, message);
    if (result)
        return result;
    snprintf(number, sizeof number, "%d", device);
    char *const arguments[] = {
        program_path,        number, (char *)path->name, (char *)path->device, (char *)moer_version(),
        (char *)path->build, NULL};
    if (pipe2(ends, O_CLOEXEC))
        return moer_fail(message, MOER_UNAVAILABLE, "there is no pipe to the self-check: %s", strerror(errno));
    const int error = spawn(program_path, arguments, ends[1], &child);
    close(ends[1]);
    if (error) {
        close(ends[0]);
        return moer_fail(message, MOER_UNAVAILABLE, "%.400s does not run: %s", program_path, strerror(error));
    }
    enum ending ending = read_report(ends[0], timeout_ms, report);
    close(ends[0]);
    int waited = ending == CLOSED ? await(child, timeout_ms, &status) : 0;
    if (waited == 0) {
        siginfo_t stopped = {.si_pid = 0};
        waitid(P_PID, (id_t)child, &stopped, WSTOPPED | WNOHANG | WNOWAIT);
        if (stopped.si_pid == child)
            snprintf(report->trouble, sizeof report->trouble, "it was stopped: %.300s", report->doing);
        ending = ending == CLOSED ? SILENT : ending;
        /* A child that the driver holds back may take its time even so. */
        kill(child, SIGKILL);
        await(child, USUAL_TIMEOUT_MS, &status);
    }
    return judge(report, ending, timeout_ms, waited, status, message);
}

/* The verdict, where it is, and a line a timing. */
static void describe(const struct moer_verdict *verdict, const char *name, const char *place, char *text, size_t size) {
    char words[512];
    moer_describe_verdict(verdict, words, sizeof words);
    int length = snprintf(text, size, "%s: %s\n%s\n", name, words, place);
    for (size_t i = 0; i < verdict->timing_count && (size_t)length < size; i++) {
        const struct moer_timing *timing = &verdict->timings[i];
        length +=
            snprintf(text + length, size - (size_t)length,
                     "%s, N = %lld, H = %lld, E = %lld, K = %lld: %.1f us, generic %.1f us, %.2f times as fast\n",
                     moer_operation_table[timing->operation].name, (long long)timing->tokens, (long long)timing->hidden,
                     (long long)timing->experts, (long long)timing->top_k, (double)timing->fast / 1000,
                     (double)timing->generic / 1000, (double)timing->generic / (double)timing->fast);
    }
}

static enum moer_status tune(DLDevice device, int timeout_ms, char *text, size_t size, struct moer_message *message) {
    struct moer_fast_path path = {.name = NULL};
    struct moer_message place;
    enum moer_status status = MOER_OK;
    if (!text && size > 0)
        return moer_fail(message, MOER_INVALID, "text is NULL");
    if (timeout_ms < 0)
        return moer_fail(message, MOER_INVALID, "timeout_ms is %d but must not be negative", timeout_ms);
    const struct moer_backend *backend = moer_find_backend(device, &status, message);
    if (backend && backend->fast_path)
        status = backend->fast_path(device.device_id, &path, message);
    if (!status && !path.name)
        return moer_fail(message, MOER_UNSUPPORTED, "the %s backend has no fast path on device %d", backend->name,
                         device.device_id);
    if (status)
        return status;
    struct report report = {.ended = 0};
    status = self_check(device.device_id, &path, timeout_ms ? timeout_ms : USUAL_TIMEOUT_MS, &report, message);
    if (status)
        return status;
    const time_t now = time(NULL);
    struct tm date;
    strftime(report.verdict.date, sizeof report.verdict.date, "%Y-%m-%d", gmtime_r(&now, &date));
    status = moer_store_verdict(&path, &report.verdict, &place);
    /* One that is not stored counts against the path alone. */
    if (!status || !report.verdict.right)
        moer_settle(backend, device.device_id, &report.verdict);
    describe(&report.verdict, path.name, place.text, text, size);
    if (report.verdict.right)
        return status
                   ? moer_fail(message, status, "%s was found right, but the verdict is %.400s", path.name, place.text)
                   : MOER_OK;
    return moer_fail(message, MOER_DEVICE, "%s is wrong: %.*s%s%s", path.name, status ? 280 : 400, report.verdict.wrong,
                     status ? "; the verdict is " : "", status ? place.text : "");
}

enum moer_status moer_tune(DLDevice device, int timeout_ms, char *text, size_t size) {
    struct moer_message message;
    const enum moer_status status = tune(device, timeout_ms, text, size, &message);
    return moer_report(__func__, status, &message);
}
