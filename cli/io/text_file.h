/* Writes text files: all or nothing, so that a reader never sees half a file under the final name. */
#ifndef STREAMKL_CLI_IO_TEXT_FILE_H
#define STREAMKL_CLI_IO_TEXT_FILE_H

#include <stdbool.h>
#include <stdio.h>

/* Prints why a file could not be written there, before the work that would fill it. Returns an exit code. */
int text_file_check(const char *path);

/* Writes what `write` prints of `content` to a temporary file beside `path`, and renames it. False from `write`
 * stands for out of memory. Prints why it failed and returns an exit code; the temporary is gone then. */
typedef bool text_writer(FILE *stream, const void *content);
int text_file_write(const char *path, text_writer *write, const void *content);

#endif
