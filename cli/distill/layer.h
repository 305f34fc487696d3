/* The half of an attention layer that determines the attention distribution, W_q and W_k; and a student in training,
 * by Adam (Kingma and Ba, 2015) with warm-up and cosine decay of the learning rate. */
#ifndef STREAMKL_CLI_DISTILL_LAYER_H
#define STREAMKL_CLI_DISTILL_LAYER_H

#include <stdint.h>

/* An operand of a product: element (i, k) is data[i * row_stride + k * column_stride]. */
typedef struct matrix {
    const float *data;
    int64_t row_stride, column_stride;
} matrix;

/* c[rows, columns] += a[rows, inner] b[inner, columns]; rows of b and c are contiguous, `columns` apart. Every sum
 * runs over the inner index in order, so that the result is bitwise equal for any number of threads. */
void matmul_add(float *c, matrix a, const float *b, int64_t rows, int64_t columns, int64_t inner, int threads);

typedef struct layer_shape {
    int64_t width; /* a hidden state has this many numbers */
    int64_t heads, dim;
} layer_shape;

typedef struct layer {
    layer_shape shape;
    float *w_q; /* [width, heads * dim]: q = hidden w_q. Owns the block that also contains w_k. */
    float *w_k; /* [width, heads * dim], after w_q */
} layer;

int64_t layer_count(const layer_shape *shape); /* elements of w_q and w_k together */

layer layer_zeros(layer_shape shape); /* the caller frees w_q */

/* Variance 1 / width: hidden states of variance 1 then have q and k of variance 1. */
void layer_randomize(layer *weights, uint64_t seed);

/* q, k [context, heads * dim] of hidden states [context, width]. */
void layer_project(const layer *weights, const float *hidden, int64_t context, float *q, float *k, int threads);

/* gradient += hidden^T dq, hidden^T dk */
void layer_gradient_add(layer *gradient, const float *hidden, int64_t context, const float *dq, const float *dk,
                        int threads);

/* ---- A student in training ---------------------------------------------------------------------------------- */

/* Everything that one step hands to the next. */
typedef struct student_model {
    layer weights;
    layer gradient;                    /* the current batch gives it */
    layer first_moment, second_moment; /* Adam keeps running means of the gradient and its square */
    int64_t step;                      /* number of steps taken */
} student_model;

student_model student_of(const layer *initial_weights); /* copies them */
void student_free(student_model *student);

/* The learning rate of step number `step`, counted from 0, out of `steps`. */
float adam_rate(float peak, int64_t step, int64_t steps);

/* Updates the weights from student->gradient. */
void adam_step(student_model *student, float rate);

#endif
