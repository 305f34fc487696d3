/* What the reader, its two formats and the writer share; nobody else includes this. */
#ifndef STREAMKL_CLI_TENSOR_COMMON_H
#define STREAMKL_CLI_TENSOR_COMMON_H

#include "tensor_file.h"

/* A tensor that was copied to an aligned address. */
typedef struct aligned_copy {
    struct aligned_copy *next;
    max_align_t data[];
} aligned_copy;

struct tensor_file {
    const unsigned char *bytes; /* the whole file */
    size_t size;
    bool mapped;            /* by us, so that closing unmaps it */
    struct json_t *header;  /* safetensors only: owns the names */
    stored_tensor *tensors; /* in the order of their data */
    size_t tensor_count;
    aligned_copy *copies;
    char path[]; /* for messages */
};

/* Both fill in `tensors`, `tensor_count` and `header`. What they set before they fail, tensor_file_close() frees. */
bool safetensors_parse(tensor_file *file, tensor_error *error);
bool npy_parse(tensor_file *file, tensor_error *error);
bool npy_recognise(const unsigned char *bytes, size_t size);

/* The most that the safetensors format allows. */
enum { SAFETENSORS_HEADER_SIZE_MAX = 100000000 };

/* Sets "path: message" and returns false, to be returned in turn. Does nothing else when `error` is NULL. */
bool refuse(tensor_error *error, const char *path, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* How a message about one tensor starts. A name may be as long as the header: leave room for the rest. */
#define TENSOR_PREFIX "tensor \"%.100s\": "

/* Bytes of a tensor; false if they, or any product of the dimensions that are not 0, are too many to count. */
bool shape_size(const int64_t *shape, int rank, size_t item_size, size_t *size);

/* "[2, 3]" */
typedef struct shape_text {
    char text[TENSOR_RANK_MAX * 22];
} shape_text;
shape_text shape_print(const int64_t *shape, int rank);

#endif
