/* SPDX-License-Identifier: Apache-2.0 */
/* The moerouter command: finds the subcommand, and what all of them share: help, messages, options, exit status. */
#include "command.h"

#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const struct subcommand {
    const char *name;
    int (*main)(int argc, char **argv);
    const char *help;
} subcommands[] = {
    {"bench", bench_main,
     "Usage: moerouter bench [OPERATION] [OPTION]...\n"
     "\n"
     "Times an operation, or all of them, beside a plain copy of hidden_states (the floor) and the two matrix "
     "products\n"
     "alone (gemms). A case is held to a loop in double precision before it is timed. Sizes that are not given are\n"
     "those of the public benchmark suite.\n"
     "\n"
     "  --device DEVICE      cpu or cuda:N (cpu)\n"
     "  --tokens N[,N]...    numbers of tokens, a case each\n"
     "  --hidden H           hidden size\n"
     "  --experts E          number of experts\n"
     "  --top-k K            experts chosen for each token, at most E\n"
     "  --repeats R          times are medians of so many, at least 9 on a CPU, 50 on a GPU (as many)\n"
     "  --json FILE          write the results as JSON\n"
     "  --plot FILE          write a plot of the results as SVG\n"
     "\n"
     "OPERATION is softmax_topk_backward or sigmoid_topk_backward. The exit status is 1 where a case is wrong, 2 "
     "where\n"
     "something else is.\n"},
    {"check", check_main,
     "Usage: moerouter check [OPERATION] [OPTION]...\n"
     "\n"
     "Holds an operation, or all of them, to a loop in double precision: every workload of the public benchmark "
     "suite,\n"
     "and cases made to break it. Prints a row for each, with the errors that come closest to their bounds.\n"
     "\n"
     "  --device DEVICE    cpu or cuda:N (cpu)\n"
     "  --quick            leave out the suite's workloads of more than 2048 tokens\n"
     "\n"
     "OPERATION is softmax_topk_backward or sigmoid_topk_backward. The exit status is 1 where a case fails, 2 where\n"
     "something else is wrong.\n"},
    {"info", info_main,
     "Usage: moerouter info\n"
     "\n"
     "Prints the version and, of each backend, whether it can be used here, or why not, and what it says of itself.\n"},
    {"make", make_main,
     "Usage: moerouter make OPERATION --tokens N [OPTION]... -o FILE\n"
     "\n"
     "Draws the inputs of an operation at random and writes them to a safetensors file. The same options give the\n"
     "same bytes on every machine. Sizes that are not given are those of the public benchmark suite.\n"
     "\n"
     "  --tokens N           number of tokens\n"
     "  --hidden H           hidden size\n"
     "  --experts E          number of experts\n"
     "  --top-k K            experts chosen for each token, at most E\n"
     "  --seed S             seed of the random numbers, 0 to 2^64 - 1 (0)\n"
     "  --dtype DTYPE        bfloat16, float16 or float32 (bfloat16)\n"
     "  -o, --output FILE    the file to write\n"
     "\n"
     "OPERATION is softmax_topk_backward or sigmoid_topk_backward.\n"},
    {"run", run_main,
     "Usage: moerouter run OPERATION FILE [OPTION]...\n"
     "\n"
     "Runs an operation on the tensors of a safetensors file and writes its outputs to another. Where the file holds\n"
     "expected.NAME for an output, the result is held to it, within the bounds of the library's tests.\n"
     "\n"
     "  -o, --output FILE        the file to write; needed unless the result is held to something\n"
     "  --check                  hold the result to a loop in double precision\n"
     "  --device DEVICE          cpu or cuda:N (cpu)\n"
     "  --output-dtype DTYPE     float32, or the dtype of hidden_states, which is the default\n"
     "\n"
     "OPERATION is softmax_topk_backward or sigmoid_topk_backward. The exit status is 1 where a result is out of its\n"
     "bounds, 2 where something else is wrong.\n"},
    {"tune", tune_main,
     "Usage: moerouter tune --device cuda:N [OPTION]...\n"
     "\n"
     "Compares a GPU's fast path with its generic one, in a process of its own: their results must have the same "
     "bits.\n"
     "Times both, and keeps the verdict in the user's cache folder, for this GPU, driver, version of the library and\n"
     "build of its kernels. A path that is not proven on such GPUs runs only if found right, where it was faster.\n"
     "\n"
     "  --device DEVICE      cuda:N\n"
     "  --timeout SECONDS    how long that process may show no progress before it is ended, 1 to 3600 (60)\n"
     "\n"
     "The exit status is 1 where the path is wrong, 2 where there is no verdict, or one for the path is not stored.\n"},
};

enum { SUBCOMMANDS = sizeof subcommands / sizeof subcommands[0] };

static const char usage[] = "Usage: moerouter SUBCOMMAND [ARGUMENT]...\n"
                            "       moerouter --help | --version\n"
                            "\n"
                            "Backward passes of Mixture-of-Experts routers, from the command line.\n"
                            "\n"
                            "  bench   time operations beside a copy and the products alone\n"
                            "  check   hold operations on a device to a loop in double precision\n"
                            "  info    the version and the backends that can be used here\n"
                            "  make    draw the inputs of an operation into a file\n"
                            "  run     run an operation on a file, write or check the result\n"
                            "  tune    find out whether a GPU's fast path is right, and faster\n"
                            "\n"
                            "'moerouter SUBCOMMAND --help' says more.\n";

/* "moerouter make", once the subcommand is known: who speaks in a message. */
static char speaker[32] = "moerouter";

int complain(const char *format, ...) {
    char message[1024];
    va_list values;
    va_start(values, format);
    vsnprintf(message, sizeof message, format, values);
    va_end(values);
    for (char *c = message; *c; c++)
        if ((unsigned char)*c < ' ' || *c == 127)
            *c = '?';
    fprintf(stderr, "%s: %s\n", speaker, message);
    return EXIT_TROUBLE;
}

void progress(const char *format, ...) {
    char line[79] = "";
    if (format) {
        va_list values;
        va_start(values, format);
        vsnprintf(line, sizeof line, format, values);
        va_end(values);
    }
    if (isatty(STDERR_FILENO))
        fprintf(stderr, "\r%78s\r%s", "", line);
}

const char *library_error(enum moer_status status) {
    const char *error = moer_last_error(), *colon = strstr(error, ": ");
    return colon ? colon + 2 : moer_status_string(status); /* a tool may run out of memory where the library did not */
}

static int refuse_arguments(void) {
    fprintf(stderr, "Try '%s --help'.\n", speaker);
    return EXIT_TROUBLE;
}

int parse_arguments(int argc, char **argv, struct command_option *options, size_t option_count,
                    const char *const *names, const char **arguments, size_t count) {
    struct option table[COMMAND_MAX_OPTIONS + 1] = {0};
    char letters[2 * COMMAND_MAX_OPTIONS + 1] = "";
    for (size_t i = 0; i < option_count; i++) {
        /* getopt_long() answers with the option's position, or with its letter. */
        table[i] = (struct option){options[i].name, options[i].takes_value, NULL, (int)i};
        if (options[i].letter)
            snprintf(letters + strlen(letters), 3, "%c%s", options[i].letter, options[i].takes_value ? ":" : "");
    }
    argv[0] = speaker; /* getopt_long() begins its messages with it */
    for (int found; (found = getopt_long(argc, argv, letters, table, NULL)) != -1;) {
        if (found == '?')
            return refuse_arguments();
        struct command_option *option = options;
        while (option->letter != found && option - options != found)
            option++;
        if (option->value) {
            complain("--%s is given twice", option->name);
            return refuse_arguments();
        }
        option->value = optarg ? optarg : "";
    }
    for (size_t i = 0; i < count; i++) {
        if (optind == argc && names[i][0] == '[') {
            arguments[i] = NULL;
            continue;
        }
        if (optind == argc) {
            complain("%s is missing", names[i]);
            return refuse_arguments();
        }
        arguments[i] = argv[optind++];
    }
    if (optind < argc) {
        complain("'%s' is an argument too many", argv[optind]);
        return refuse_arguments();
    }
    return 0;
}

int read_operation(const char *name, enum moer_operation *operation) {
    *operation = call_find_operation(name);
    if (*operation == MOER_OPERATIONS)
        return complain("'%s' is no operation: there are %s and %s", name,
                        moer_operation_name(MOER_SOFTMAX_TOPK_BACKWARD),
                        moer_operation_name(MOER_SIGMOID_TOPK_BACKWARD));
    return 0;
}

int read_dtype(const struct command_option *option, const char *usual, DLDataType *dtype) {
    if (!dtype_parse(option->value ? option->value : usual, dtype) || dtype->code == kDLInt || dtype->bits > 32)
        return complain("--%s '%s' must be bfloat16, float16 or float32", option->name, option->value);
    return 0;
}

/* "cuda:N"; 0 where it is not. */
static int parse_gpu(const char *name, DLDevice *device) {
    char *end;
    if (strncmp(name, "cuda:", 5) != 0 || name[5] < '0' || name[5] > '9')
        return 0;
    const unsigned long number = strtoul(name + 5, &end, 10);
    *device = (DLDevice){kDLCUDA, (int)number};
    return *end == '\0' && number <= INT32_MAX;
}

int read_device(const char *name, DLDevice *device) {
    *device = (DLDevice){kDLCPU, 0};
    if (strcmp(name, "cpu") == 0 || parse_gpu(name, device))
        return 0;
    return complain("--device '%s' must be cpu or cuda:N", name);
}

int read_gpu(const char *name, DLDevice *device) {
    return parse_gpu(name, device) ? 0 : complain("--device '%s' must be cuda:N", name);
}

int read_number(const struct command_option *option, uint64_t min, uint64_t max, uint64_t *value) {
    if (!option->value)
        return 0;
    errno = 0;
    char *end;
    const unsigned long long number = strtoull(option->value, &end, 10);
    /* strtoull() would take signs and spaces too. */
    if (option->value[0] < '0' || option->value[0] > '9' || *end != '\0' || errno != 0 || number < min || number > max)
        return complain("--%s '%s' must be a number from %llu to %llu", option->name, option->value,
                        (unsigned long long)min, (unsigned long long)max);
    *value = number;
    return 0;
}

int read_size(const struct command_option *option, int64_t min, int64_t max, int64_t *size) {
    uint64_t value = (uint64_t)*size;
    const int result = read_number(option, (uint64_t)min, (uint64_t)max, &value);
    *size = (int64_t)value;
    return result;
}

int read_dims(const struct command_option options[3], int64_t min, struct dims *dims) {
    if (read_size(&options[0], min, INT64_MAX, &dims->hidden) != 0 ||
        read_size(&options[1], min, INT32_MAX - 1, &dims->experts) != 0 ||
        read_size(&options[2], min, INT32_MAX - 1, &dims->top_k) != 0)
        return EXIT_TROUBLE;
    if (dims->top_k > dims->experts)
        return complain("--top-k is %lld, but there are only %lld experts", (long long)dims->top_k,
                        (long long)dims->experts);
    return 0;
}

static int print(const char *text) {
    fputs(text, stdout);
    return 0;
}

static int run_subcommand(const struct subcommand *subcommand, int argc, char **argv) {
    snprintf(speaker, sizeof speaker, "moerouter %s", subcommand->name);
    for (int i = 1; i < argc && strcmp(argv[i], "--") != 0; i++)
        if (strcmp(argv[i], "--help") == 0)
            return print(subcommand->help);
    return subcommand->main(argc, argv);
}

static int run_command(int argc, char **argv) {
    if (argc < 2) {
        complain("a subcommand is missing");
        return refuse_arguments();
    }
    for (int i = 0; i < SUBCOMMANDS; i++)
        if (strcmp(argv[1], subcommands[i].name) == 0)
            return run_subcommand(&subcommands[i], argc - 1, argv + 1);
    const int help = strcmp(argv[1], "--help") == 0, version = strcmp(argv[1], "--version") == 0;
    if (!help && !version) {
        complain("there is no subcommand '%s'", argv[1]);
        return refuse_arguments();
    }
    if (argc > 2) {
        complain("'%s' is an argument too many", argv[2]);
        return refuse_arguments();
    }
    if (help)
        return print(usage);
    printf("moerouter %s\n", moer_version());
    return 0;
}

/* A standard stream that was closed must not become the first file that is opened. */
static void fill_standard_streams(void) {
    for (int fd = 0; fd < 3; fd++)
        if (fcntl(fd, F_GETFD) < 0)
            open("/dev/null", fd == 0 ? O_WRONLY : O_RDONLY); /* so that its use fails, as before */
}

int main(int argc, char **argv) {
    fill_standard_streams();
    setvbuf(stdout, NULL, _IOLBF, 0); /* rows can be read as they come, in a pipe too */
    const int status = run_command(argc, argv);
    if (fflush(stdout) != 0 || ferror(stdout))
        return complain("cannot write to standard output: %s", strerror(errno));
    return status;
}
