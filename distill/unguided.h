/* A student that is not told where to look: the same layer, taught by what attention returns.
 *
 *     o_i = sum_j S_ij h_j   against   sum_j P_ij h_j        loss = |difference|^2
 *
 * with the teacher's hidden states h as values. It is there to be compared with, on a sample of the queries, in
 * blocks of whole columns: nothing here is streamed. */
#ifndef STREAMKL_DISTILL_UNGUIDED_H
#define STREAMKL_DISTILL_UNGUIDED_H

#include "distill/lesson.h"

typedef struct unguided {
    int64_t rows;        /* queries of a sequence that are looked at */
    int64_t width;       /* of the teacher's hidden states */
    float *block;        /* owns what follows; B queries are in work at a time */
    float *p, *s, *work; /* [context, B]: P, S, and logits or their gradients */
    float *q, *dq;       /* [B, dim] of one head */
    float *k, *dk;       /* [context, dim] */
    float *turned;       /* [dim or width, B] */
    float *difference;   /* [B, width] */
} unguided;

skl_status unguided_open(unguided *outputs, const lesson *work, int64_t rows, int64_t width);
void unguided_close(unguided *outputs);

/* Adds the gradient of share * sum of losses to `gradient`. The lesson has both projections of the sequence; its dq_s
 * and dk_s are used up. `draw` decides which queries are looked at. */
void unguided_gradient(unguided *outputs, lesson *work, const sequence *text, uint64_t draw, float share,
                       layer *gradient);

#endif
