/* SPDX-License-Identifier: Apache-2.0 */
/* Statuses and the last error of each thread. */
#include "internal.h"

static _Thread_local char last_error[sizeof(struct moer_message) + 64];

const char *moer_last_error(void) {
    return last_error;
}

const char *moer_status_string(enum moer_status status) {
    switch (status) {
    case MOER_OK:
        return "ok";
    case MOER_INVALID:
        return "invalid argument";
    case MOER_UNSUPPORTED:
        return "not supported";
    case MOER_UNAVAILABLE:
        return "backend not available";
    case MOER_NO_MEMORY:
        return "out of memory";
    case MOER_DEVICE:
        return "device error";
    }
    return "unknown status";
}

enum moer_status moer_report(const char *function, enum moer_status status, const struct moer_message *message) {
    if (status == MOER_OK)
        last_error[0] = '\0';
    else
        snprintf(last_error, sizeof last_error, "%s: %s", function, message->text);
    return status;
}

void moer_copy_text(char *to, size_t size, const char *text) {
    if (size > 0)
        snprintf(to, size, "%s", text);
}
