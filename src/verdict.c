/* SPDX-License-Identifier: Apache-2.0 */
/* The policy for fast paths, and the verdicts it goes by.
 *
 * A path that the project has proven on a kind of device runs there. Any other runs on a device only after a self-check
 * there has found it right, and for the operations where it was faster than the generic path on the whole: not shape by
 * shape, since the bits of a token's row must not depend on how many others there are. A path that has been found wrong
 * does not run, proven or not.
 *
 * A verdict is a file in the user's cache folder, of one device, path, version of the library and build of its kernels,
 * which its name says; for any other driver than its own it does not count. A file that anybody else can have written,
 * or of which a byte makes no sense, is ignored. */
#include "config.h"
#include "internal.h"
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { MOST_DEVICES = 64, MOST_BYTES = 16384, MOST_PATH = 4096 };
static const char format[] = "moerouter verdict 2";

/* ---- Lines ------------------------------------------------------------------------------------------------------ */

/* "time OPERATION N H E K FAST GENERIC", the times in nanoseconds. */
static int read_timing(struct moer_timing *timing, const char *words) {
    int64_t *const fields[] = {&timing->tokens, &timing->hidden, &timing->experts,
                               &timing->top_k,  &timing->fast,   &timing->generic};
    const size_t length = strcspn(words, " ");
    int operation = 0;
    while (operation < MOER_OPERATIONS && (strlen(moer_operation_table[operation].name) != length ||
                                           strncmp(moer_operation_table[operation].name, words, length) != 0))
        operation++;
    timing->operation = (enum moer_operation)operation;
    words += length;
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        char *end;
        if (words[0] != ' ' || words[1] < '0' || words[1] > '9')
            return 0;
        errno = 0;
        *fields[i] = strtoll(words + 1, &end, 10);
        if (errno || *fields[i] == 0)
            return 0;
        words = end;
    }
    return operation < MOER_OPERATIONS && *words == '\0';
}

enum moer_line moer_read_verdict_line(struct moer_verdict *verdict, const char *line) {
    if (!strncmp(line, "time ", 5))
        return verdict->timing_count < MOER_MOST_TIMINGS &&
                       read_timing(&verdict->timings[verdict->timing_count], line + 5)
                   ? (verdict->timing_count++, MOER_LINE_TIME)
                   : MOER_LINE_SENSELESS;
    verdict->right = !strcmp(line, "right");
    if (verdict->right)
        return MOER_LINE_LAST;
    if (strncmp(line, "wrong ", 6) != 0 || line[6] == '\0' || strlen(line + 6) >= sizeof verdict->wrong)
        return MOER_LINE_SENSELESS;
    moer_copy_text(verdict->wrong, sizeof verdict->wrong, line + 6);
    return MOER_LINE_LAST;
}

/* What a verdict may hold beside the ends of its lines: nothing that a terminal obeys. */
static int is_plain(char c) {
    return c >= ' ' && c <= '~';
}

static void write_verdict(FILE *file, const struct moer_fast_path *path, const struct moer_verdict *verdict) {
    fprintf(file, "%s\nlibrary %s\nbuild %s\ndevice %s\npath %s\ndriver %s\ndate %s\n", format, PACKAGE_VERSION,
            path->build, path->device, path->name, path->driver, verdict->date);
    for (size_t i = 0; i < verdict->timing_count; i++) {
        const struct moer_timing *timing = &verdict->timings[i];
        fprintf(file, "time %s %lld %lld %lld %lld %lld %lld\n", moer_operation_table[timing->operation].name,
                (long long)timing->tokens, (long long)timing->hidden, (long long)timing->experts,
                (long long)timing->top_k, (long long)timing->fast, (long long)timing->generic);
    }
    fputs(verdict->right ? "right" : "wrong ", file);
    for (const char *c = verdict->wrong; *c; c++)
        fputc(is_plain(*c) ? *c : '?', file);
    fputc('\n', file);
}

/* How many times as fast as the generic path it was, by the geometric mean; 0 where it was not timed. */
static double speedup(const struct moer_verdict *verdict, int operation) {
    double sum = 0;
    int count = 0;
    for (size_t i = 0; i < verdict->timing_count; i++)
        if ((int)verdict->timings[i].operation == operation) {
            sum += log((double)verdict->timings[i].generic / (double)verdict->timings[i].fast);
            count++;
        }
    return count ? exp(sum / count) : 0;
}

void moer_describe_verdict(const struct moer_verdict *verdict, char *text, size_t size) {
    int length = snprintf(text, size, "found %s on %s", verdict->right ? "right" : "wrong", verdict->date);
    if (!verdict->right)
        snprintf(text + length, size - (size_t)length, ": %s", verdict->wrong);
    for (int i = 0; verdict->right && i < MOER_OPERATIONS && length < (int)size; i++)
        if (speedup(verdict, i) > 0)
            length += snprintf(text + length, size - (size_t)length, "; %s %.2f times as fast as the generic path",
                               moer_operation_table[i].name, speedup(verdict, i));
}

/* ---- Files ------------------------------------------------------------------------------------------------------ */

/* The user's cache folder by the XDG base directory specification, which wants absolute paths; 0 where there is none.
 */
static int cache_folder(char *folder, size_t size) {
    const char *cache = secure_getenv("XDG_CACHE_HOME"), *home = secure_getenv("HOME");
    int length = 0;
    if (cache && cache[0] == '/')
        length = snprintf(folder, size, "%s", cache);
    else if (home && home[0] == '/')
        length = snprintf(folder, size, "%s/.cache", home);
    return length > 0 && length < (int)size;
}

static int name_file(const struct moer_fast_path *path, const char *folder, char *file, size_t size) {
    return snprintf(file, size, "%s/" PACKAGE "/%s.%s.%s.%s", folder, path->device, path->name, PACKAGE_VERSION,
                    path->build) < (int)size;
}

/* Under another name first, so that nobody ever reads half of it. */
enum moer_status moer_store_verdict(const struct moer_fast_path *path, const struct moer_verdict *verdict,
                                    struct moer_message *place) {
    char folder[MOST_PATH], own[MOST_PATH + sizeof PACKAGE], file[MOST_PATH], temporary[MOST_PATH + 8];
    if (!cache_folder(folder, sizeof folder) || !name_file(path, folder, file, sizeof file))
        return moer_fail(place, MOER_UNAVAILABLE, "not stored: neither XDG_CACHE_HOME nor HOME is an absolute path");
    snprintf(own, sizeof own, "%s/" PACKAGE, folder);
    snprintf(temporary, sizeof temporary, "%s.XXXXXX", file);
    mkdir(folder, 0700); /* where one is missing, the file's opening says so */
    mkdir(own, 0700);
    const int fd = mkostemp(temporary, O_CLOEXEC);
    FILE *stream = fd < 0 ? NULL : fdopen(fd, "w");
    if (stream) {
        write_verdict(stream, path, verdict);
        int failed = fflush(stream) || fsync(fd);
        failed |= fclose(stream);
        if (!failed && !rename(temporary, file))
            return moer_fail(place, MOER_OK, "stored in %s", file);
    }
    moer_fail(place, MOER_UNAVAILABLE, "not stored: %s: %s", strerror(errno), file);
    if (fd >= 0)
        unlink(temporary);
    if (!verdict->right && !path->evidence)
        unlink(file); /* an older one, by which the path would run in the next process */
    return MOER_UNAVAILABLE;
}

/* The whole file as a string; NULL where it is not there or, with the reason, not to be trusted. */
static char *read_file(const char *file, char *text, const char **ignored) {
    struct stat status;
    size_t length = 0;
    ssize_t got = 0;
    const int fd = open(file, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0) {
        if (errno != ENOENT && errno != ENOTDIR)
            *ignored = "it cannot be opened";
        return NULL;
    }
    if (fstat(fd, &status) || !S_ISREG(status.st_mode))
        *ignored = "it is no regular file";
    else if (status.st_uid != geteuid() || status.st_mode & (S_IWGRP | S_IWOTH))
        *ignored = "it is not this user's alone to write";
    while (!*ignored && length < MOST_BYTES && (got = read(fd, text + length, MOST_BYTES - length)) > 0)
        length += (size_t)got;
    close(fd);
    int damaged = got < 0 || length == MOST_BYTES;
    for (size_t i = 0; i < length && !damaged; i++)
        damaged = !is_plain(text[i]) && text[i] != '\n';
    if (!*ignored && damaged)
        *ignored = "it is damaged";
    text[*ignored ? 0 : length] = '\0';
    return *ignored ? NULL : text;
}

/* Cuts the next line off; NULL where there is no whole one. */
static char *next_line(char **text) {
    char *line = *text, *end = strchr(line, '\n');
    if (!end)
        return NULL;
    *end = '\0';
    *text = end + 1;
    return line;
}

/* The word behind a name in the next line; NULL where that is not the line's name. */
static const char *next_value(char **text, const char *name) {
    const char *line = next_line(text);
    const size_t length = strlen(name);
    return line && !strncmp(line, name, length) && line[length] == ' ' ? line + length + 1 : NULL;
}

enum found { NONE, STALE, UNKNOWN, DAMAGED, FOUND };

/* Reads a verdict; what is STALE is right but for the driver, which why names. */
static enum found parse(char *text, const struct moer_fast_path *path, struct moer_verdict *verdict,
                        struct moer_message *why) {
    const char *const first = next_line(&text), *const named[][2] = {{"library", PACKAGE_VERSION},
                                                                     {"build", path->build},
                                                                     {"device", path->device},
                                                                     {"path", path->name}};
    if (first && strcmp(first, format) != 0)
        return UNKNOWN;
    for (size_t i = 0; i < sizeof named / sizeof *named; i++) {
        const char *value = next_value(&text, named[i][0]);
        if (!value || strcmp(value, named[i][1]) != 0)
            return DAMAGED;
    }
    const char *driver = next_value(&text, "driver"), *date = next_value(&text, "date"), *line = NULL;
    enum moer_line kind = MOER_LINE_TIME;
    if (!driver || !date || strlen(date) >= sizeof verdict->date)
        return DAMAGED;
    moer_copy_text(verdict->date, sizeof verdict->date, date);
    while (kind == MOER_LINE_TIME)
        kind = (line = next_line(&text)) ? moer_read_verdict_line(verdict, line) : MOER_LINE_SENSELESS;
    if (kind == MOER_LINE_SENSELESS || *text)
        return DAMAGED;
    if (strcmp(driver, path->driver) == 0)
        return FOUND;
    moer_fail(why, MOER_OK, "the verdict of %s does not count: it is of driver %.64s", date, driver);
    return STALE;
}

static enum found load(const struct moer_fast_path *path, struct moer_verdict *verdict, struct moer_message *why) {
    static const char *const senseless[FOUND + 1] = {
        [UNKNOWN] = "it is of another format", [DAMAGED] = "it is damaged"};
    char folder[MOST_PATH], file[MOST_PATH], text[MOST_BYTES + 1];
    const char *ignored = NULL;
    enum found found = NONE;
    if (!cache_folder(folder, sizeof folder) || !name_file(path, folder, file, sizeof file))
        return NONE;
    if (read_file(file, text, &ignored)) {
        found = parse(text, path, verdict, why);
        ignored = senseless[found];
    }
    if (!ignored)
        return found;
    fprintf(stderr, "moerouter: %s is ignored: %s\n", file, ignored);
    moer_fail(why, MOER_OK, "the stored verdict is ignored: %s", ignored);
    return DAMAGED;
}

/* ---- The policy ------------------------------------------------------------------------------------------------- */

static void decide(const struct moer_fast_path *path, const struct moer_verdict *now, struct moer_permit *permit) {
    struct moer_verdict verdict = now ? *now : (struct moer_verdict){0};
    struct moer_message why = {"there is no verdict"};
    const enum found found = now ? FOUND : load(path, &verdict, &why);
    const int counts = found == FOUND;
    if (counts)
        moer_describe_verdict(&verdict, why.text, sizeof why.text);
    for (int i = 0; i < MOER_OPERATIONS; i++)
        if ((!counts || verdict.right) && (path->evidence || (counts && speedup(&verdict, i) > 1)))
            permit->operations |= 1u << i;
    if (!path->evidence)
        snprintf(permit->reason, sizeof permit->reason, "not proven on such devices; %.340s", why.text);
    else if (found == NONE)
        snprintf(permit->reason, sizeof permit->reason, "proven by %.64s", path->evidence);
    else
        snprintf(permit->reason, sizeof permit->reason, "proven by %.64s; %.340s", path->evidence, why.text);
}

/* A permit, and the one before it, at which calls may still be. */
struct kept {
    struct moer_permit permit;
    const struct kept *before;
};
static const struct kept no_path;
/* By the device's number; one backend alone has fast paths. */
static const struct kept *_Atomic settled[MOST_DEVICES];

static void settle(const struct moer_backend *backend, int device, const struct moer_verdict *now) {
    struct moer_fast_path path;
    struct moer_message message;
    struct kept *kept = NULL;
    if (backend->fast_path(device, &path, &message))
        return;
    if (path.name && !(kept = calloc(1, sizeof *kept)))
        return;
    if (path.name) {
        kept->before = atomic_load(&settled[device]);
        decide(&path, now, &kept->permit);
        backend->permit(device, &kept->permit);
    }
    atomic_store(&settled[device], path.name ? kept : &no_path);
}

void moer_settle(const struct moer_backend *backend, int device, const struct moer_verdict *now) {
    static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    if (!backend->fast_path || device < 0 || device >= MOST_DEVICES || (atomic_load(&settled[device]) && !now))
        return;
    pthread_mutex_lock(&mutex);
    if (!atomic_load(&settled[device]) || now)
        settle(backend, device, now);
    pthread_mutex_unlock(&mutex);
}

const char *moer_settled_reason(int device) {
    const struct kept *kept = device >= 0 && device < MOST_DEVICES ? atomic_load(&settled[device]) : NULL;
    return kept && kept != &no_path ? kept->permit.reason : NULL;
}
