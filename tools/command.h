/* SPDX-License-Identifier: Apache-2.0 */
/* What the parts of the command share: the subcommands, their messages and their options. */
#ifndef MOER_TOOLS_COMMAND_H
#define MOER_TOOLS_COMMAND_H

#include <stddef.h>

#include "call.h"

/* The command's exit status; 0 where all is well. */
enum { EXIT_BROKEN = 1, EXIT_TROUBLE = 2 };

/* The subcommands; each returns the exit status. */
int bench_main(int argc, char **argv);
int check_main(int argc, char **argv);
int info_main(int argc, char **argv);
int make_main(int argc, char **argv);
int run_main(int argc, char **argv);
int tune_main(int argc, char **argv);

/* Prints "moerouter SUBCOMMAND: " and the message as one line on stderr; returns EXIT_TROUBLE. Control characters,
 * which a file's names may hold, come out as '?'. */
#if defined __GNUC__
__attribute__((format(printf, 1, 2)))
#endif
int complain(const char *format, ...);

/* Where stderr is a terminal, shows a line there in place of the last one; NULL for none. */
#if defined __GNUC__
__attribute__((format(printf, 1, 2)))
#endif
void progress(const char *format, ...);

/* What the library has to say of a status, without the name of its function. */
const char *library_error(enum moer_status status);

/* An option of a subcommand, and what the command line said of it. */
struct command_option {
    const char *name;
    char letter;       /* 0: long only */
    int takes_value;   /* 0: a switch */
    const char *value; /* NULL: not given; "" for a switch that is */
};

enum { COMMAND_MAX_OPTIONS = 8 };

/* Sorts a subcommand's arguments into options and exactly count others, called names in messages. One whose name is in
 * brackets may be missing: NULL. Returns 0, or EXIT_TROUBLE after a message. An option is given once at most. */
int parse_arguments(int argc, char **argv, struct command_option *options, size_t option_count,
                    const char *const *names, const char **arguments, size_t count);

/* The values of arguments and options; an option that is not given leaves a number as it is, and is the usual one of
 * dtypes. Return 0, or EXIT_TROUBLE after a message. */
int read_operation(const char *name, enum moer_operation *operation);
int read_dtype(const struct command_option *option, const char *usual, DLDataType *dtype);
/* "cpu" or "cuda:N". */
int read_device(const char *name, DLDevice *device);
/* "cuda:N" alone. */
int read_gpu(const char *name, DLDevice *device);
int read_number(const struct command_option *option, uint64_t min, uint64_t max, uint64_t *value);
int read_size(const struct command_option *option, int64_t min, int64_t max, int64_t *size);
/* Three options: hidden size, experts and top_k. */
int read_dims(const struct command_option options[3], int64_t min, struct dims *dims);

#endif
