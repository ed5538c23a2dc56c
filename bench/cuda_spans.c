/* SPDX-License-Identifier: Apache-2.0 */
/* How long the device worked on a call, by CUPTI's activity records.
 *
 * Every kernel, copy and memset leaves a record of its start and end, those that are nodes of a graph too. One stream
 * does all the work, so the records sorted by start are a sequence: the memset that flushes the L2, known by its size,
 * then a call's activities, then the next memset. Nothing is taken on trust: there must be as many of these memsets as
 * calls, and every call must have the same number of activities. */
#include "cuda.h"

#include <cupti.h>
#include <pthread.h>
#include <stdlib.h>

#include "command.h"

/* ---- CUPTI, loaded at run time ---------------------------------------------------------------------------------- */

static union {
    struct {
        __typeof__(&cuptiActivityRegisterCallbacks) register_callbacks;
        __typeof__(&cuptiActivityEnable) enable;
        __typeof__(&cuptiActivityDisable) disable;
        __typeof__(&cuptiActivityFlushAll) flush_all;
        __typeof__(&cuptiActivityGetNextRecord) next_record;
        __typeof__(&cuptiActivityGetNumDroppedRecords) dropped_records;
        __typeof__(&cuptiGetResultString) result_string;
    };
    void *addresses[7];
} cupti;

static const char *const cupti_names[] = {"cuptiActivityRegisterCallbacks", "cuptiActivityEnable",
                                          "cuptiActivityDisable",           "cuptiActivityFlushAll",
                                          "cuptiActivityGetNextRecord",     "cuptiActivityGetNumDroppedRecords",
                                          "cuptiGetResultString",           NULL};

static const CUpti_ActivityKind kinds[] = {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY,
                                           CUPTI_ACTIVITY_KIND_MEMSET};

enum { KINDS = sizeof kinds / sizeof kinds[0], BUFFER_BYTES = 1 << 20 };

static const char *result_text(CUptiResult result) {
    const char *text = NULL;
    cupti.result_string(result, &text);
    return text ? text : "unknown error";
}

static int cupti_failed(CUptiResult result, const char *call) {
    return result == CUPTI_SUCCESS ? 0 : complain("%s: %s", call, result_text(result));
}

/* ---- Records ---------------------------------------------------------------------------------------------------- */

struct record {
    uint64_t start, end; /* ns */
    uint64_t set_bytes;  /* of a memset outside graphs, else 0 */
};

/* What CUPTI has delivered; its own thread may be the one that delivers. */
static struct {
    pthread_mutex_t lock;
    struct record *records;
    size_t count, capacity, lost;
} found = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* The lock is held. Without a start and an end a record is as good as lost. */
static void keep(struct record record) {
    if (found.count == found.capacity) {
        const size_t capacity = found.capacity ? 2 * found.capacity : 1024;
        struct record *records = realloc(found.records, capacity * sizeof *records);
        if (records) {
            found.records = records;
            found.capacity = capacity;
        }
    }
    if (found.count < found.capacity && record.start > 0 && record.end >= record.start)
        found.records[found.count++] = record;
    else
        found.lost++;
}

static void take(const CUpti_Activity *activity) {
    if (activity->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL || activity->kind == CUPTI_ACTIVITY_KIND_KERNEL) {
        const CUpti_ActivityKernel10 *kernel = (const void *)activity;
        keep((struct record){kernel->start, kernel->end, 0});
    } else if (activity->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
        const CUpti_ActivityMemcpy6 *copy = (const void *)activity;
        keep((struct record){copy->start, copy->end, 0});
    } else if (activity->kind == CUPTI_ACTIVITY_KIND_MEMSET) {
        const CUpti_ActivityMemset4 *set = (const void *)activity;
        keep((struct record){set->start, set->end, set->graphNodeId == 0 ? set->bytes : 0});
    }
}

/* CUPTI asks for a buffer; without one it drops records, and says so when asked. */
static void CUPTIAPI lend_buffer(uint8_t **buffer, size_t *size, size_t *most_records) {
    *size = BUFFER_BYTES;
    *most_records = 0; /* as many as fit */
    *buffer = aligned_alloc(64, BUFFER_BYTES);
}

static void CUPTIAPI take_buffer(CUcontext context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid) {
    CUpti_Activity *activity = NULL;
    (void)context, (void)stream, (void)size;
    pthread_mutex_lock(&found.lock);
    while (valid > 0 && cupti.next_record(buffer, valid, &activity) == CUPTI_SUCCESS)
        take(activity);
    pthread_mutex_unlock(&found.lock);
    free(buffer);
}

/* ---- Recording -------------------------------------------------------------------------------------------------- */

int spans_open(char *reason, size_t size) {
    char soname[32];
    snprintf(soname, sizeof soname, "libcupti.so.%d", CUDART_VERSION / 1000); /* they are numbered alike */
    void *library = cuda_open_library(soname, reason, size);
    if (!library)
        return 1;
    const char *missing = cuda_find_functions(library, cupti_names, cupti.addresses);
    if (missing) {
        snprintf(reason, size, "%s has no %s", soname, missing);
        return 1;
    }
    const char *call = "cuptiActivityRegisterCallbacks";
    CUptiResult result = cupti.register_callbacks(lend_buffer, take_buffer);
    for (int i = 0; i < KINDS && result == CUPTI_SUCCESS; i++) {
        call = "cuptiActivityEnable";
        result = cupti.enable(kinds[i]);
    }
    if (result != CUPTI_SUCCESS) {
        snprintf(reason, size, "%s: %s", call, result_text(result));
        spans_close();
    }
    return result != CUPTI_SUCCESS;
}

void spans_close(void) {
    for (int i = 0; i < KINDS; i++)
        cupti.disable(kinds[i]);
}

/* Has CUPTI deliver everything. */
static int collect(void) {
    return cupti_failed(cupti.flush_all(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED), "cuptiActivityFlushAll");
}

int spans_reset(void) {
    size_t dropped; /* asking resets the count */
    if (collect() != 0 ||
        cupti_failed(cupti.dropped_records(NULL, 0, &dropped), "cuptiActivityGetNumDroppedRecords") != 0)
        return EXIT_TROUBLE;
    pthread_mutex_lock(&found.lock);
    found.count = found.lost = 0;
    pthread_mutex_unlock(&found.lock);
    return 0;
}

int spans_count(size_t flush_bytes, uint64_t *count) {
    const int result = collect();
    *count = 0;
    pthread_mutex_lock(&found.lock);
    for (size_t i = 0; i < found.count; i++)
        *count += found.records[i].set_bytes == flush_bytes;
    pthread_mutex_unlock(&found.lock);
    return result;
}

/* ---- Spans ------------------------------------------------------------------------------------------------------ */

static int compare_starts(const void *a, const void *b) {
    const struct record *x = a, *y = b;
    return (x->start > y->start) - (x->start < y->start);
}

/* Sorts the records into calls. The lock is held. */
static int read_records(size_t flush_bytes, uint64_t calls, double *us) {
    uint64_t flushes = 0, start = 0, end = 0;
    size_t activities = 0, least = SIZE_MAX, most = 0;
    qsort(found.records, found.count, sizeof *found.records, compare_starts);
    for (size_t i = 0; i <= found.count; i++) {
        const struct record *record = i < found.count ? &found.records[i] : NULL;
        if (record && record->set_bytes != flush_bytes) {
            start = activities == 0 ? record->start : start;
            end = activities == 0 || record->end > end ? record->end : end;
            activities++;
            continue;
        }
        if (flushes > 0) { /* a call ends where the next one's flush begins, or with the last record */
            least = activities < least ? activities : least;
            most = activities > most ? activities : most;
            if (flushes <= calls)
                us[flushes - 1] = (double)(end - start) * 1e-3;
        }
        activities = 0;
        flushes += record != NULL;
    }
    if (flushes == calls && least > 0 && least == most && found.lost == 0)
        return 0;
    return complain("CUPTI's records do not make sense: %llu calls, %llu memsets of %zu bytes, %zu to %zu activities "
                    "after each, %zu records in all, %zu without times",
                    (unsigned long long)calls, (unsigned long long)flushes, flush_bytes, flushes ? least : 0, most,
                    found.count, found.lost);
}

int spans_read(size_t flush_bytes, uint64_t calls, double *us) {
    size_t dropped = 0;
    if (collect() != 0 ||
        cupti_failed(cupti.dropped_records(NULL, 0, &dropped), "cuptiActivityGetNumDroppedRecords") != 0)
        return EXIT_TROUBLE;
    if (dropped > 0)
        return complain("CUPTI has dropped %zu records", dropped);
    pthread_mutex_lock(&found.lock);
    const int result = read_records(flush_bytes, calls, us);
    pthread_mutex_unlock(&found.lock);
    return result;
}
