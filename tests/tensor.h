/* Test tensors of any type and layout, in memory whose gaps are poisoned and checked. */
#ifndef SKL_TESTS_TENSOR_H
#define SKL_TESTS_TENSOR_H

#include "case_support.h"

/* Memory layout of [batch, heads, length, dim]. */
typedef enum test_layout {
    LAYOUT_CONTIGUOUS,     /* [batch, heads, length, dim] */
    LAYOUT_LENGTH_FIRST,   /* [batch, length, heads, dim]: the output of a projection */
    LAYOUT_SEQUENCE_FIRST, /* [length, batch, heads, dim] */
    LAYOUT_HEADS_FIRST,    /* [heads, batch, length, dim] */
    LAYOUT_GAPS,           /* contiguous, but with gaps after rows, heads and batches */
    LAYOUT_MISALIGNED,     /* contiguous, starting at an odd element, close to the end of the page */
    LAYOUT_FREE_STRIDES,   /* contiguous, but dimensions of extent 1 have a stride that no address space has */
    LAYOUT_EXPANDED,       /* one batch and one head for all: inputs only */
    LAYOUT_REPEATED,       /* one row for all: inputs only */
    LAYOUT_COUNT
} test_layout;

/* Elements of different rows, heads or batches share an address. */
int layout_shares(test_layout layout);

typedef struct test_tensor {
    skl_dtype dtype;
    test_layout layout;
    int64_t batch, heads, length, dim;
    int64_t stride_batch, stride_head, stride_row;
    test_memory memory;
    void *data; /* element 0, 0, 0, 0 */
} test_tensor;

test_tensor tensor_create(skl_dtype dtype, int64_t batch, int64_t heads, int64_t length, int64_t dim,
                          test_layout layout);
void tensor_destroy(test_tensor *tensor);

/* Arguments of a call. A tensor that was never created counts as not given. */
skl_input tensor_input(const test_tensor *tensor);
skl_output tensor_output(const test_tensor *tensor);

/* Elements are numbered as in a contiguous tensor, regardless of the layout. */
int64_t tensor_count(const test_tensor *tensor);
int64_t tensor_index(const test_tensor *tensor, int64_t b, int64_t h, int64_t i); /* of the first element of a row */
double tensor_get(const test_tensor *tensor, int64_t n);
void tensor_set(const test_tensor *tensor, int64_t n, double value);
void tensor_fill(const test_tensor *tensor, test_random *random, double low, double high);
void tensor_set_all(const test_tensor *tensor, double value);
void tensor_scale(const test_tensor *tensor, double factor);
void tensor_add(const test_tensor *to, const test_tensor *from);  /* same shape; types may differ */
void tensor_copy(const test_tensor *to, const test_tensor *from); /* same shape; types may differ */

/* Number of bytes written outside of elements. */
int64_t tensor_stray_writes(const test_tensor *tensor);

/* All elements have the same bits. */
int tensor_equal(const test_tensor *a, const test_tensor *b);

size_t dtype_size(skl_dtype dtype);

/* Half the distance between `value` and the next value of the type. */
double dtype_half_ulp(skl_dtype dtype, double value);

#endif
