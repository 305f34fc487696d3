/* Tensors in safetensors and .npy files, which are mapped read-only. Headers are validated before they are used.
 *
 *     tensor_error error;
 *     tensor_file *file = tensor_file_open("qk.safetensors", &error);
 *     const stored_tensor *q_t = tensor_file_find(file, "q_t", &error);
 *     const void *data = tensor_file_data(file, q_t, &error);
 *     tensor_file_close(file);
 *
 * On failure a call returns NULL and sets a message that names the file, the field, its value and the accepted
 * values.
 */
#ifndef STREAMKL_CLI_IO_TENSOR_FILE_H
#define STREAMKL_CLI_IO_TENSOR_FILE_H

#include "cli/io/tensor.h"

typedef struct tensor_file tensor_file;

/* The file is mapped: see tensor_file_unchanged(). */
tensor_file *tensor_file_open(const char *path, tensor_error *error);

/* Call it before results are used. False with a message if the file has changed since it was opened, or could not be
 * read: its tensors may be neither the old nor the new ones. */
bool tensor_file_unchanged(const tensor_file *file, tensor_error *error);

/* The same for a file in memory, which must outlive the result. `path` is only for messages. */
tensor_file *tensor_file_parse(const void *bytes, size_t size, const char *path, tensor_error *error);

void tensor_file_close(tensor_file *file); /* may be NULL */

/* The tensors in the order of their data; NULL after the last one. */
const stored_tensor *tensor_file_at(const tensor_file *file, size_t index);

/* The tensor of that name, of any dtype. `error` may be NULL if a missing tensor is no error. */
const stored_tensor *tensor_file_find(const tensor_file *file, const char *name, tensor_error *error);

/* The elements of a tensor, aligned to their size: a misaligned tensor is copied once. Refuses an unsupported dtype.
 * Valid until the file is closed. */
const void *tensor_file_data(tensor_file *file, const stored_tensor *tensor, tensor_error *error);

#endif
