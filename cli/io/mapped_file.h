/* A file in memory, mapped read-only.
 *
 * Other processes can change a file while it is mapped. A truncated file ends no process: its pages then read as
 * zeros. Call mapped_file_unchanged() after the last access and before the results are used. */
#ifndef STREAMKL_CLI_IO_MAPPED_FILE_H
#define STREAMKL_CLI_IO_MAPPED_FILE_H

#include "cli/io/tensor.h"

typedef struct mapped_file mapped_file;

/* The file must be a regular one and not empty. On failure returns NULL and sets a message. */
mapped_file *mapped_file_open(const char *path, tensor_error *error);

const unsigned char *mapped_file_bytes(const mapped_file *file);
size_t mapped_file_size(const mapped_file *file);

/* False with a message if the file was truncated or written since it was opened, by its size, modification time and
 * change time, or if a page could not be read. A new name or mode of the file counts as a change; a new or removed
 * link does not, and neither does another file under its name. `path` is for the message. */
bool mapped_file_unchanged(const mapped_file *file, const char *path, tensor_error *error);

void mapped_file_close(mapped_file *file); /* may be NULL */

#endif
