/* Tensors in safetensors and .npy files, which are mapped read-only. Headers are validated before they are used.
 *
 *     tensor_file file;
 *     tensor_file_open(&file, "qk.safetensors");
 *     const stored_tensor *q_t = tensor_file_find(&file, "q_t");
 *     const void *data = tensor_file_data(&file, q_t);
 *     tensor_file_close(&file);
 *
 * A call that cannot succeed fails by cli_fail(), with a message that names the file, the field, its value and the
 * accepted values. */
#ifndef STREAMKL_CLI_IO_TENSOR_FILE_H
#define STREAMKL_CLI_IO_TENSOR_FILE_H

#include "cli/io/mapped_file.h"
#include "streamkl.h"

enum { TENSOR_RANK_MAX = 8 };

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

typedef struct tensor_file {
    const char *path; /* messages name it */
    const unsigned char *bytes;
    size_t size;
    struct json_t *header;  /* safetensors only: owns the names */
    stored_tensor *tensors; /* in the order of their data */
    size_t tensor_count;
    mapped_file mapping;         /* without a file if the bytes belong to the caller */
    struct aligned_copy *copies; /* tensors that were copied to an aligned address */
} tensor_file;

/* The file is mapped: see mapped_file_check(). `path` must outlive it. */
void tensor_file_open(tensor_file *file, const char *path);

/* A file in memory, which must outlive the result. */
void tensor_file_parse(tensor_file *file, const void *bytes, size_t size, const char *path);

void tensor_file_close(tensor_file *file);

/* The tensor of that name, of any dtype; NULL: there is none. */
const stored_tensor *tensor_file_find(const tensor_file *file, const char *name);

/* "\"k_s\", \"k_t\", ...": as many names as fit, to reveal a misspelling. */
typedef struct tensor_names {
    char text[300];
} tensor_names;
tensor_names tensor_file_names(const tensor_file *file);

/* The elements of a tensor, aligned to their size: a misaligned tensor is copied once. Refuses an unsupported dtype.
 * Valid until the file is closed. */
const void *tensor_file_data(tensor_file *file, const stored_tensor *tensor);

/* Element `index` of aligned data. */
float tensor_number_at(const void *data, skl_dtype dtype, int64_t index);

/* ---- Types, shapes and messages ------------------------------------------------------------------------------ */

const char *tensor_dtype_name(skl_dtype dtype); /* "F32", "F16", "BF16" */
size_t tensor_dtype_size(skl_dtype dtype);      /* bytes of an element */

/* Bytes of a tensor; false if they, or any product of the dimensions that are not 0, overflow 64 bits. */
bool shape_size(const int64_t *shape, int rank, size_t item_size, size_t *size);

/* "[2, 3]" */
typedef struct shape_text {
    char text[TENSOR_RANK_MAX * 22];
} shape_text;
shape_text shape_print(const int64_t *shape, int rank);

/* How a message about one tensor starts. A name may be as long as the header: leave room for the rest. */
#define TENSOR_PREFIX "tensor \"%.100s\": "

/* ---- The formats --------------------------------------------------------------------------------------------- */

/* Set the members from `header` on. tensor_file_close() frees them, even after a failure. */
bool npy_recognize(const tensor_file *file);
void npy_parse(tensor_file *file);
void safetensors_parse(tensor_file *file);

/* The largest header that safetensors allow, in bytes. */
enum { SAFETENSORS_HEADER_SIZE_MAX = 100000000 };

#endif
