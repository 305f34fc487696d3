/* Writes safetensors files: all or nothing, so that a reader never sees half a file under the final name. */
#ifndef STREAMKL_CLI_IO_TENSOR_WRITE_H
#define STREAMKL_CLI_IO_TENSOR_WRITE_H

#include "cli/io/file_set.h"

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

/* Writes a temporary file next to `path`, flushes it to disk and renames it. On failure returns false with a message,
 * removes the temporary file and leaves `path` unchanged. An existing `path` must be a regular file, because rename()
 * would replace a link or a device. Equal arguments give equal bytes. */
bool tensor_write(const char *path, const output_tensor *tensors, size_t tensor_count,
                  const output_metadata *metadata, size_t metadata_count, tensor_error *error);

/* The same for one of several files that appear together: file_set_commit() renames it. */
bool tensor_write_into(file_set *set, const char *path, const output_tensor *tensors, size_t tensor_count,
                       const output_metadata *metadata, size_t metadata_count, tensor_error *error);

#endif
