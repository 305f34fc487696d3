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

/* Adds a file to a set: writes it next to `path` and flushes it to disk; file_set_commit() renames it. On failure
 * returns false with a message, and `path` is unchanged. Equal arguments give equal bytes. */
bool tensor_write_into(file_set *set, const char *path, const output_tensor *tensors, size_t tensor_count,
                       const output_metadata *metadata, size_t metadata_count, tensor_error *error);

#endif
