/* Replaces files together: either all of them appear under their final names, or none, and the old ones stay.
 *
 *     file_set set = {0};
 *     const int fd = file_set_add(&set, "out", &error);      a temporary file next to "out"
 *     ... write to fd; more files ...
 *     if (!file_set_close(&set, &error) || !file_set_commit(&set, &error)) ...
 *     file_set_free(&set);                                   removes the temporary files of what was not committed
 *
 * A temporary file has a unique name and is locked while its writer lives, so that file_set_clean() can distinguish
 * it from one that a killed process left. */
#ifndef STREAMKL_CLI_IO_FILE_SET_H
#define STREAMKL_CLI_IO_FILE_SET_H

#include "cli/io/tensor.h"

typedef struct file_set {
    struct new_file *first, *last;
} file_set;

/* A file descriptor for the contents of `path`, valid until file_set_close(); -1 with a message. An existing `path`
 * must be a regular file, because rename() would replace a link or a device. Respects the umask. */
int file_set_add(file_set *set, const char *path, tensor_error *error);

/* Closes the last file that was added: network file systems report a full disk here. */
bool file_set_close(file_set *set, tensor_error *error);

/* Renames all files. If one cannot be renamed, restores those before it; the message names every old file that cannot
 * be restored, and its backup. Otherwise only a kill within this call can leave some of the files new and others
 * old. */
bool file_set_commit(file_set *set, tensor_error *error);

void file_set_free(file_set *set);

/* Removes what killed processes left in the folder of `path`: temporary files that are unlocked and an hour old, and
 * links to old files that a commit made more than an hour ago, unless such a link is the only name of its file. */
void file_set_clean(const char *path);

#endif
