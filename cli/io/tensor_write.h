/* Writes safetensors files: all or nothing, so that a reader never sees half a file under the final name. */
#ifndef STREAMKL_CLI_IO_TENSOR_WRITE_H
#define STREAMKL_CLI_IO_TENSOR_WRITE_H

#include "cli/io/tensor.h"

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

/* Writes a temporary file beside `path`, flushes it to disk and renames it. On failure returns false with a message;
 * the temporary is gone and whatever was at `path` is untouched. What is there already must be a regular file: a link
 * or a device would be replaced, not written to. Equal arguments give equal bytes. */
bool tensor_write(const char *path, const output_tensor *tensors, size_t tensor_count,
                  const output_metadata *metadata, size_t metadata_count, tensor_error *error);

#endif
