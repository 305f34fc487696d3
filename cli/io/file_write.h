/* Writes files: all or nothing, so that a reader never sees half a file under the final name. */
#ifndef STREAMKL_CLI_IO_FILE_WRITE_H
#define STREAMKL_CLI_IO_FILE_WRITE_H

#include "view/bytes.h"

/* Call it before the work whose result the file gets: prints why the file could not be written, and returns an exit
 * code. */
int file_write_check(const char *path);

/* Writes a temporary file next to `path`, and renames it. On failure prints why, removes the temporary file and
 * returns an exit code. */
int file_write(const char *path, const bytes *content);

#endif
