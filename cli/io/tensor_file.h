/* Tensors in files: safetensors and .npy, mapped read-only and checked before anything they claim is believed.
 *
 *     tensor_error error;
 *     tensor_file *file = tensor_file_open("qk.safetensors", &error);
 *     const stored_tensor *q_t = tensor_file_find(file, "q_t", &error);
 *     const void *data = tensor_file_data(file, q_t, &error);
 *     tensor_file_close(file);
 *
 * A call that fails returns NULL and leaves a message that names the file, the field, its value and what is accepted.
 */
#ifndef STREAMKL_CLI_IO_TENSOR_FILE_H
#define STREAMKL_CLI_IO_TENSOR_FILE_H

#include "cli/io/tensor.h"

typedef struct tensor_file tensor_file;

/* The file must not shrink while it is open: it is mapped, not read. */
tensor_file *tensor_file_open(const char *path, tensor_error *error);

/* The same for a file in memory, which must outlive the result. `path` is only for messages. */
tensor_file *tensor_file_parse(const void *bytes, size_t size, const char *path, tensor_error *error);

void tensor_file_close(tensor_file *file); /* NULL is fine */

/* Every tensor, in the order of their data. NULL past the last one. */
const stored_tensor *tensor_file_at(const tensor_file *file, size_t index);

/* The tensor of that name, of whatever dtype. `error` may be NULL where absence is no error. */
const stored_tensor *tensor_file_find(const tensor_file *file, const char *name, tensor_error *error);

/* The elements of a tensor of `file`, aligned to their size; a tensor at an odd address is copied once. Refuses a
 * dtype that is not supported. Valid until the file is closed. */
const void *tensor_file_data(tensor_file *file, const stored_tensor *tensor, tensor_error *error);

/* What a safetensors file says of itself under that name; NULL: nothing. */
const char *tensor_file_metadata(const tensor_file *file, const char *key);

#endif
