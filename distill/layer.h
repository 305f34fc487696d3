/* The half of an attention layer that determines the attention distribution: W_q and W_k. */
#ifndef STREAMKL_DISTILL_LAYER_H
#define STREAMKL_DISTILL_LAYER_H

#include "streamkl.h"

typedef struct layer_shape {
    int64_t width; /* of a hidden state */
    int64_t heads, key_heads, dim;
} layer_shape;

typedef struct layer {
    layer_shape shape;
    float *w_q; /* [width, heads * dim]: q = hidden w_q */
    float *w_k; /* [width, key_heads * dim] */
} layer;

/* All weights are 0. On failure device_error() says why; call layer_free() in any case. */
skl_status layer_allocate(layer *weights, layer_shape shape);
void layer_free(layer *weights);

int64_t layer_q_count(const layer_shape *shape); /* elements of w_q */
int64_t layer_k_count(const layer_shape *shape); /* elements of w_k */

/* Variance 1 / width: hidden states of variance 1 then have q and k of variance 1. */
void layer_randomise(layer *weights, uint64_t seed);
void layer_copy(layer *to, const layer *from); /* of equal shapes */

/* q [context, heads * dim] and k of hidden states [context, width]. */
void layer_project(const layer *weights, const float *hidden, int64_t context, float *q, float *k, int threads);

/* gradient += hidden^T dq, hidden^T dk */
void layer_gradient_add(layer *gradient, const float *hidden, int64_t context, const float *dq, const float *dk,
                        int threads);

#endif
