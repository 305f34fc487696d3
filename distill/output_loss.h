/* The loss of the control student: the squared difference of the attention outputs, which is what a student learns
 * from without the attention KL.
 *
 *     loss_i = |sum_j S_ij h_j - sum_j P_ij h_j|^2
 *
 * The values are the teacher's hidden states h. The loss covers a sample of the queries and stores whole columns of P
 * and S: it exists for comparison, so nothing is streamed. */
#ifndef STREAMKL_DISTILL_OUTPUT_LOSS_H
#define STREAMKL_DISTILL_OUTPUT_LOSS_H

#include "distill/attention_pair.h"

typedef struct output_loss {
    int64_t rows;         /* sampled queries per sequence */
    int64_t width;        /* of the teacher's hidden states */
    float *block;         /* owns the buffers below, for B queries at a time */
    float *p, *s, *logit; /* [context, B]: P, S, and logits or their gradients */
    float *q, *dq;        /* [B, dim] of one head */
    float *k, *dk;        /* [context, dim] */
    float *transposed;    /* [dim or width, B] */
    float *difference;    /* [B, width] */
} output_loss;

skl_status output_loss_open(output_loss *loss, const attention_pair *pair, int64_t rows, int64_t width);
void output_loss_close(output_loss *loss);

/* Adds the gradient of scale * sum of losses to `gradient`. `pair` holds both projections of the sequence; its dq_s
 * and dk_s are overwritten. `seed` selects the queries. */
void output_loss_backward(output_loss *loss, attention_pair *pair, const sequence *tokens, uint64_t seed, float scale,
                          layer *gradient);

#endif
