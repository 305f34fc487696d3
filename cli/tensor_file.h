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
#ifndef STREAMKL_CLI_TENSOR_FILE_H
#define STREAMKL_CLI_TENSOR_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "streamkl.h"

enum { TENSOR_RANK_MAX = 8 };

/* One line without control characters, so that a hostile name cannot drive the terminal it is printed on. */
typedef struct tensor_error {
    char text[1024];
} tensor_error;

typedef struct stored_tensor {
    const char *name;       /* "" in an .npy file */
    const char *dtype_name; /* as safetensors calls it: "F32", "I64", ... */
    bool supported;         /* dtype_name is F32, F16 or BF16; otherwise `dtype` means nothing */
    skl_dtype dtype;
    int rank;
    int64_t shape[TENSOR_RANK_MAX]; /* no product of its dimensions overflows, not even beside a dimension of 0 */
    const unsigned char *bytes;     /* row-major, at any address: tensor_file_data() gives an aligned one */
    size_t size;                    /* in bytes */
} stored_tensor;

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

const char *tensor_dtype_name(skl_dtype dtype); /* "F32", "F16", "BF16" */
size_t tensor_dtype_size(skl_dtype dtype);      /* bytes of an element */

#endif
