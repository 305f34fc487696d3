/* The outputs of a command: either all of them appear under their final names, or none, and the old ones stay.
 *
 *     file_outputs_check(outputs, 2, inputs, 1);          before the work
 *     file_write_tensors("rows.safetensors", ...);        temporary files
 *     FILE *const page = file_write_begin();
 *     fprintf(page, ...);
 *     file_write_end(page, "report.html");
 *     file_write_commit();                                the files get their names
 *
 * Every call fails by cli_fail(). A temporary file has a unique name, is next to its output, and is locked while its
 * writer lives, so that it can be distinguished from one that a killed process left. */
#ifndef STREAMKL_CLI_IO_FILE_WRITE_H
#define STREAMKL_CLI_IO_FILE_WRITE_H

#include "cli/io/tensor_file.h"

#include <stdio.h>

/* A file that a command is going to write, and the option that asks for it ("--out"). */
typedef struct output_file {
    const char *option, *path;
} output_file;

/* Call it before the work whose results the files get. Refuses an output that cannot be written, one that is an input
 * or a link to one, and two outputs that are one file. A missing input is no error here. Removes what killed
 * processes left in the folders of the outputs: temporary files that are unlocked and an hour old, and links to old
 * files that a commit made more than an hour ago, unless such a link is the only name of its file. */
void file_outputs_check(const output_file *outputs, size_t output_count, const char *const *inputs,
                        size_t input_count);

/* A stream in memory, which file_write_end() makes an output. */
FILE *file_write_begin(void);
void file_write_end(FILE *stream, const char *path);

typedef struct output_tensor {
    const char *name;
    skl_dtype dtype;
    int rank;
    int64_t shape[TENSOR_RANK_MAX];
    const void *data; /* row-major, contiguous */
} output_tensor;

typedef struct output_metadata {
    const char *key;
    const char *value;
} output_metadata;

/* A safetensors file. Equal arguments give equal bytes. */
void file_write_tensors(const char *path, const output_tensor *tensors, size_t tensor_count,
                        const output_metadata *metadata, size_t metadata_count);

/* Writes the parts of a file, one after the other, to a temporary file next to `path`, and flushes them to the disk.
 * An existing `path` must be a regular file, because rename() would replace a link or a device. Respects the umask.
 */
typedef struct file_part {
    const void *data;
    size_t size;
} file_part;
void file_write_parts(const char *path, const file_part *parts, size_t count);

/* Renames all files. If one cannot be renamed, restores those before it; the message names every old file that cannot
 * be restored, and its backup. Otherwise only a kill within this call can leave some of the files new and others
 * old. */
void file_write_commit(void);

/* Removes the temporary files of what was not committed. The end of the process does it, too. */
void file_write_abandon(void);

#endif
