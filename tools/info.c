/* SPDX-License-Identifier: Apache-2.0 */
/* moerouter info: the version, and what each backend is or why it is missing. */
#include "command.h"

#include <stdio.h>
#include <string.h>

#include <moerouter/moerouter.h>

/* The backend's own lines, indented. */
static int print_backend_info(size_t backend) {
    char text[8192];
    if (moer_backend_info(backend, text, sizeof text) != MOER_OK)
        return complain("%s: %s", moer_backend_name(backend), moer_last_error());
    for (const char *line = text; *line;) {
        const size_t length = strcspn(line, "\n");
        printf("    %.*s\n", (int)length, line);
        line += length + (line[length] == '\n');
    }
    return 0;
}

int info_main(int argc, char **argv) {
    int status = parse_arguments(argc, argv, NULL, 0, NULL, NULL, 0);
    if (status != 0)
        return status;
    printf("moerouter %s\n", moer_version());
    for (size_t backend = 0; backend < moer_backend_count() && status == 0; backend++) {
        const char *reason = moer_backend_unavailable(backend);
        printf("%s: %s%s\n", moer_backend_name(backend), reason ? "unavailable: " : "available", reason ? reason : "");
        if (!reason)
            status = print_backend_info(backend);
    }
    return status;
}
