/* The options of a command, each declared once, and those that several commands share. */
#ifndef STREAMKL_CLI_COMMON_OPTIONS_H
#define STREAMKL_CLI_COMMON_OPTIONS_H

#include "streamkl.h"
#include <argp.h>
#include <stdbool.h>
#include <stddef.h>

/* Stores the value of `text`, or returns a description of the accepted values ("an integer"). */
typedef const char *option_parser(const char *text, void *value);

#define PARSE_WORD NULL

typedef struct cli_option {
    const char *name;     /* without the dashes; NULL ends a table */
    const char *argument; /* as the help shows it ("N"); NULL: a flag */
    option_parser
        *parse; /* PARSE_WORD: the argument is one of the words of `argument`, "f32|f16", and stored as its index */
    size_t offset; /* of the value in the target of its group */
    const char *doc;
    int64_t initial;     /* an int64_t before the command line is read; the help names it; 0: as it was */
    int64_t least, most; /* limits of an int64_t; 0, 0: those of the parser */
} cli_option;

/* Options that the help shows together, and whose values are in one struct. */
typedef struct option_group {
    const char *title;
    const cli_option *options; /* NULL ends the list of groups */
    size_t target;             /* offset of the struct in the request */
} option_group;

typedef struct command_line {
    const char *doc;
    const option_group *groups;
    const char *arguments; /* "FILE...": at least one must be given; NULL: none is accepted */
} command_line;

/* Stores the initial values, then parses a command line into `request`, or fails. Returns the number of arguments,
 * which are then the last of argv.
 */
int options_parse(const command_line *command, int argc, char **argv, void *request);

extern const cli_option mask_options[];   /* masks of an skl_problem */
extern const cli_option logit_options[];  /* scales, softcaps and direction of an skl_problem */
extern const cli_option engine_options[]; /* device, threads and kernel of an skl_options */

option_parser parse_flag;   /* int32_t, set to 1; for options without an argument */
option_parser parse_string; /* const char *, not copied */
option_parser parse_float;  /* float, finite; refuses what rounds to 0 without being 0 */
option_parser parse_int32;  /* int32_t, 0 or more */
option_parser parse_int64;  /* int64_t */
option_parser parse_count;  /* int64_t, 1 or more */
option_parser parse_device; /* skl_options: its device and device_index */

/* "FIRST,SECOND", both at least `least`. False: the text is another one. */
bool pair_from_text(const char *text, int64_t least, int64_t *first, int64_t *second);

/* Names in the spelling of the options. */
extern const char *const direction_names[], *const device_names[], *const dtype_names[];
const char *direction_formula(skl_direction direction); /* "teacher || student", "student || teacher" */

skl_options options_watched(void); /* the default, with a line of progress on the terminal */

/* Creates a plan, or fails with the reason, naming --device if that is the cause. */
skl_plan *plan_create(const skl_problem *problem, const skl_options *options);
void plan_check(skl_status status, const skl_options *options); /* ends the command if a call of the library failed */

#endif
