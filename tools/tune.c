/* SPDX-License-Identifier: Apache-2.0 */
/* moerouter tune: has the library check and time a GPU's fast path, and prints the verdict. */
#include "command.h"

#include <stdio.h>

#include <moerouter/moerouter.h>

enum { DEVICE, TIMEOUT, OPTIONS };

int tune_main(int argc, char **argv) {
    struct command_option options[OPTIONS] = {[DEVICE] = {"device", 0, 1, NULL}, [TIMEOUT] = {"timeout", 0, 1, NULL}};
    DLDevice device;
    int64_t seconds = 60;
    char text[4096] = "";
    if (parse_arguments(argc, argv, options, OPTIONS, NULL, NULL, 0) != 0)
        return EXIT_TROUBLE;
    if (!options[DEVICE].value)
        return complain("--device is missing");
    if (read_gpu(options[DEVICE].value, &device) != 0 || read_size(&options[TIMEOUT], 1, 3600, &seconds) != 0)
        return EXIT_TROUBLE;
    const enum moer_status status = moer_tune(device, (int)seconds * 1000, text, sizeof text);
    fputs(text, stdout);
    if (status == MOER_OK)
        return 0;
    complain("%s: %s", options[DEVICE].value, library_error(status));
    return status == MOER_DEVICE && *text ? EXIT_BROKEN : EXIT_TROUBLE;
}
