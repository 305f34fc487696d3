/* Writes files: all or nothing, so that a reader never sees half a file under the final name. */
#ifndef STREAMKL_CLI_IO_FILE_WRITE_H
#define STREAMKL_CLI_IO_FILE_WRITE_H

#include "cli/io/file_set.h"
#include "view/bytes.h"

/* A file that a command is going to write, and the option that asks for it ("--out"). */
typedef struct output_file {
    const char *option, *path;
} output_file;

/* Call it before the work whose results the files get: refuses an output that is one of the inputs or a link to one,
 * and two outputs that are one file. A missing input is no error here. Removes temporary files that killed processes
 * left in the folders of the outputs. Prints why, and returns an exit code. */
int file_outputs_check(const output_file *outputs, size_t output_count, const char *const *inputs,
                       size_t input_count);

/* Call it before the work whose result the file gets: prints why the file could not be written, and returns an exit
 * code. */
int file_write_check(const char *path);

/* Adds a file with that content to `set`. On failure prints why and returns an exit code. */
int file_write_into(file_set *set, const char *path, const bytes *content);

/* Gives all files of the set their names, or none, and frees the set. Does only the latter if `exit_code` is not
 * CLI_OK. Prints why it failed, and returns an exit code. */
int file_write_commit(file_set *set, int exit_code);

#endif
