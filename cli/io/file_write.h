/* The outputs of a command: all of them get their names when the command has succeeded, or none.
 *
 *     file_outputs_check(outputs, 2, inputs, 1);          before the work
 *     file_write_tensors("rows.safetensors", ...);        temporary files
 *     FILE *const page = file_write_begin();
 *     fprintf(page, ...);
 *     file_write_end(page, "report.html");
 *     file_write_commit();                                the files get their names
 *
 * Every call fails by cli_fail(). Temporary files that are not committed are removed when the process exits. */
#ifndef STREAMKL_CLI_IO_FILE_WRITE_H
#define STREAMKL_CLI_IO_FILE_WRITE_H

#include "cli/io/tensor_write.h"

#include <stdio.h>

/* A file that a command is going to write, and the option that asks for it ("--out"). */
typedef struct output_file {
    const char *option, *path;
} output_file;

/* Call it before the work whose results the files get. Refuses an output that cannot be written, one that is an input
 * or a link to one, and two outputs that are one file. A missing input is no error here. Removes temporary files that
 * killed processes left in the folders of the outputs. */
void file_outputs_check(const output_file *outputs, size_t output_count, const char *const *inputs,
                        size_t input_count);

/* A stream in memory, which file_write_end() makes an output. */
FILE *file_write_begin(void);
void file_write_end(FILE *stream, const char *path);

void file_write_tensors(const char *path, const output_tensor *tensors, size_t tensor_count,
                        const output_metadata *metadata, size_t metadata_count);

void file_write_commit(void);

#endif
