/* Shows the launches of an operation and the reason for each choice: --explain of several commands. */
#ifndef STREAMKL_CLI_COMMON_EXPLAIN_H
#define STREAMKL_CLI_COMMON_EXPLAIN_H

#include "device/device.h"
#include <jansson.h>
#include <stdio.h>

/* Prints the operation and its launches, one per line. `text` is that of explain_plan(). */
void explain_print(FILE *stream, skl_op op, const char *text);

/* Adds the launches to `object`, as an array of lines under the name of the operation. */
void explain_add_json(json_t *object, skl_op op, const char *text);

#endif
