/* Table-driven option parsing, and the options that several commands share. */
#ifndef STREAMKL_CLI_COMMON_OPTIONS_H
#define STREAMKL_CLI_COMMON_OPTIONS_H

#include "streamkl.h"
#include <argp.h>

/* Stores the value of `text`, or returns a description of the accepted values ("an integer"). */
typedef const char *option_parser(const char *text, void *value);

/* The destination of an option's value: `offset` bytes into the command's struct. */
typedef struct option_field {
    int key; /* as in the argp_option table */
    option_parser *parse;
    size_t offset;
} option_field;

option_parser parse_flag;   /* int32_t, set to 1; for options without an argument */
option_parser parse_string; /* const char *, not copied */
option_parser parse_float;  /* float, finite */
option_parser parse_int32;  /* int32_t, 0 or more */
option_parser parse_int64;  /* int64_t */
option_parser parse_count;  /* int64_t, 1 or more */
option_parser parse_direction;
option_parser parse_dtype;
option_parser parse_device; /* skl_options: its device and device_index */

/* For argp parsers: finds `key` in the table, which ends with key 0, and stores its value. Returns 0,
 * ARGP_ERR_UNKNOWN for a key that is not in the table, or EINVAL after printing one line that names the option. */
error_t options_store(const option_field *fields, const struct argp_option *options, int key, const char *text,
                      void *target);

/* Parses a command line into `request`. Prints why it failed, and returns an exit code. */
int options_parse(const struct argp *argp, int argc, char **argv, unsigned flags, void *request);

/* A child for a command's argp: masks, scales and direction. Input: the skl_problem to fill in. */
extern const struct argp problem_argp;

/* A child for a command's argp: device, threads and kernel. Input: the skl_options to fill in. */
extern const struct argp engine_argp;

/* Names in the spelling of the options. */
const char *direction_name(skl_direction direction);
const char *device_name(skl_device device);

const char *dtype_name(skl_dtype dtype);

/* Prints why no plan could be created, naming --device if that is the cause. Returns the exit code. */
int fail_plan(skl_status status, const skl_options *options);

/* Keys of options without a short form. Each module has its own range, so that argp can merge them. */
enum {
    OPTIONS_PROBLEM_KEYS = 0x100,
    OPTIONS_ENGINE_KEYS = 0x200,
    OPTIONS_INPUT_KEYS = 0x300,
    OPTIONS_COMMAND_KEYS = 0x400
};

#endif
