/* SPDX-License-Identifier: Apache-2.0 */
/* Running the tests of a program, and what the environment has asked of the library. */
#include "support.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { SKIPPED = 77, TIMEOUT = 300 }; /* what automake takes for skipped; seconds, of a test in a slow build */

static int environment_is(const char *name, const char *value) {
    const char *set = getenv(name);
    return set && strcmp(set, value) == 0;
}

int own_products(enum type type) {
    if (on_gpu() || environment_is("MOER_DETERMINISTIC", "1") || environment_is("MOER_CPU_PRODUCTS", "own"))
        return 1;
    return type != F32 && !environment_is("MOER_CPU_PRODUCTS", "openblas");
}

/* Whether MOER_CPU_ISA names kernels that this machine cannot run. Asked in a process of its own: the one that forks
 * the tests must not start any threads. */
static int kernels_missing(void) {
    int status = 0;
    pid_t child = fork();
    if (child == 0) {
        char text[4096] = "";
        moer_backend_info(0, text, sizeof text);
        _exit(strstr(text, "kernels: MOER_CPU_ISA is ") != NULL);
    }
    return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 1;
}

/* Whether the device that MOER_TEST_DEVICE asks for can be used: EXIT_SUCCESS, EXIT_FAILURE or SKIPPED. */
static int device_status(void) {
    DLDevice device;
    DLTensor *tensor;
    int asked = test_device(&device);
    if (asked == 0)
        return EXIT_SUCCESS;
    if (asked < 0) {
        printf("MOER_TEST_DEVICE=%s is neither cpu nor cuda:0, cuda:1, ...\n", getenv("MOER_TEST_DEVICE"));
        return EXIT_FAILURE;
    }
    enum moer_status status = moer_tensor_new(&tensor, device, type_of[F32], 0, NULL);
    moer_tensor_free(tensor);
    if (status == MOER_OK)
        return EXIT_SUCCESS;
    const char *skip = status == MOER_UNAVAILABLE ? "SKIP: " : "";
    printf("%s%s: %s\n", skip, getenv("MOER_TEST_DEVICE"), moer_last_error());
    return status == MOER_UNAVAILABLE ? SKIPPED : EXIT_FAILURE;
}

int host_only(int count, const char *test, const char *why) {
    if (!on_gpu())
        return count;
    printf("SKIP: %s: %s\n", test, why);
    return 0;
}

int run_tests(const char *name, const struct test *tests, int count) {
    if (!on_gpu() && kernels_missing()) {
        puts("SKIP: this machine cannot run the kernels that MOER_CPU_ISA asks for");
        return SKIPPED;
    }
    int device = device_status();
    if (device != EXIT_SUCCESS)
        return device;
    Suite *suite = suite_create(name);
    for (int i = 0; i < count; i++) {
        TCase *group = tcase_create(tests[i].test->name);
        tcase_set_timeout(group, TIMEOUT);
        tcase_set_tags(group, tests[i].test->name); /* CK_EXCLUDE_TAGS names what is left out. */
        tcase_add_loop_test(group, tests[i].test, 0, tests[i].count);
        suite_add_tcase(suite, group);
    }
    SRunner *runner = srunner_create(suite);
    /* A driver does not survive a fork. */
    srunner_set_fork_status(runner, on_gpu() ? CK_NOFORK : CK_FORK);
    srunner_run_all(runner, CK_NORMAL);
    int run = srunner_ntests_run(runner), failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return run > 0 && failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
