/* A tensor in a file: its type, its shape and the message that says what is wrong with it. */
#ifndef STREAMKL_CLI_IO_TENSOR_H
#define STREAMKL_CLI_IO_TENSOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "streamkl.h"

enum { TENSOR_RANK_MAX = 8 };

/* One line without control characters, so that a hostile name cannot drive the terminal that shows it. */
typedef struct tensor_error {
    char text[1024];
} tensor_error;

typedef struct stored_tensor {
    const char *name;       /* "" in an .npy file */
    const char *dtype_name; /* in the spelling of safetensors: "F32", "I64", ... */
    bool supported;         /* dtype_name is F32, F16 or BF16; otherwise `dtype` is meaningless */
    skl_dtype dtype;
    int rank;
    int64_t shape[TENSOR_RANK_MAX]; /* no product of its dimensions overflows, even next to a dimension of 0 */
    const unsigned char *bytes;     /* row-major, at any address: tensor_file_data() returns an aligned one */
    size_t size;                    /* in bytes */
} stored_tensor;

/* What a file contains. The parsers read `bytes` and fill in the members after it. */
typedef struct tensor_contents {
    const char *path; /* for messages */
    const unsigned char *bytes;
    size_t size;
    struct json_t *header;  /* safetensors only: owns the names */
    stored_tensor *tensors; /* in the order of their data */
    size_t tensor_count;
} tensor_contents;

const char *tensor_dtype_name(skl_dtype dtype); /* "F32", "F16", "BF16" */
size_t tensor_dtype_size(skl_dtype dtype);      /* bytes of an element */

/* Element `index` of aligned data. */
float tensor_number_at(const void *data, skl_dtype dtype, int64_t index);

/* Sets "path: message" and returns false, for the caller to return. `error` may be NULL. */
bool tensor_refuse(tensor_error *error, const char *path, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* How a message about one tensor starts. A name may be as long as the header: leave room for the rest. */
#define TENSOR_PREFIX "tensor \"%.100s\": "

/* Bytes of a tensor; false if they, or any product of the dimensions that are not 0, overflow 64 bits. */
bool shape_size(const int64_t *shape, int rank, size_t item_size, size_t *size);

/* "[2, 3]" */
typedef struct shape_text {
    char text[TENSOR_RANK_MAX * 22];
} shape_text;
shape_text shape_print(const int64_t *shape, int rank);

#endif
