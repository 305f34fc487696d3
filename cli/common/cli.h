/* Shared by all commands: exit codes, one-line errors, JSON on stdout.
 *
 * A command that cannot go on prints one line and exits: cli_fail() does not return. Outputs appear under their names
 * only when a command has succeeded (cli/io/file_write.h), so there is nothing to undo. */
#ifndef STREAMKL_CLI_COMMON_CLI_H
#define STREAMKL_CLI_COMMON_CLI_H

#include "streamkl.h"
#include <jansson.h>

/* Documented in `streamkl --help`; scripts rely on them. */
enum {
    CLI_OK = 0,
    CLI_CHECK_FAILED = 1, /* `check`: a kernel disagrees with the oracle */
    CLI_BAD_INPUT = 2,    /* a wrong argument or input file; argp uses the same code */
    CLI_NO_MEMORY = 3,
    CLI_NO_DEVICE = 4, /* the device is absent, failed, or does not support the request */
    CLI_WRITE_FAILED = 5
};

/* A command gets argv[0] = "streamkl NAME" and returns an exit code. */
int cmd_info(int argc, char **argv);
int cmd_kl(int argc, char **argv);
int cmd_distill(int argc, char **argv);
int cmd_map(int argc, char **argv);
int cmd_stats(int argc, char **argv);
int cmd_check(int argc, char **argv);
int cmd_bench(int argc, char **argv);
int cmd_demo(int argc, char **argv);

/* Prints one line, "streamkl NAME: MESSAGE", on stderr and exits:
 * `cli_fail(CLI_BAD_INPUT, "--window=%s: must be LEFT,RIGHT", text);` */
_Noreturn void cli_fail(int exit_code, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Prints the same line and goes on. */
void cli_warn(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Returns if the status is SKL_OK. Otherwise fails with the error text of the library or the device layer, whichever
 * failed, and the exit code for the status. */
void cli_check(skl_status status);

/* Like malloc() and calloc(), but fails with "out of memory: WHAT needs N bytes". */
void *cli_allocate(size_t size, const char *what);
void *cli_allocate_zeros(size_t count, size_t size, const char *what);

/* JSON numbers are finite: other values become the strings "NaN", "Infinity" and "-Infinity", which float() of Python
 * and Number() of JavaScript accept. */
json_t *cli_json_number(double value);

/* Nested arrays of `rank` dimensions, of doubles or, if their size is that of a float, of floats. */
json_t *cli_json_array(const void *values, size_t size, int rank, const int64_t *shape);

/* The name of a file. JSON is UTF-8: in a name that is not, bytes beyond ASCII become '?'. */
json_t *cli_json_path(const char *path);

/* Add `value`, which becomes a part of the array or object. NULL stands for out of memory, and fails. */
void cli_json_append(json_t *array, json_t *value);
void cli_json_set(json_t *object, const char *key, json_t *value);

/* Prints an object on one line of stdout and frees it. NULL stands for out of memory. */
void cli_print_json(json_t *object);

/* "12.5 MiB", "3.1 ms" */
typedef struct cli_text {
    char text[32];
} cli_text;
cli_text cli_bytes_text(double bytes);
cli_text cli_seconds_text(double seconds);

/* "s", or "" for 1. */
const char *cli_plural(int64_t count);

#endif
