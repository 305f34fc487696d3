/* The amount of work and memory of a problem, to put measurements into perspective. */
#ifndef STREAMKL_CLI_COMMON_WORKLOAD_H
#define STREAMKL_CLI_COMMON_WORKLOAD_H

#include "streamkl.h"

/* Doubles, because they may exceed 64 bits. */
typedef struct workload {
    double pairs;             /* visible (query, key) pairs of one head, over all sequences */
    double forward_flop;      /* both logits of every pair */
    double backward_flop;     /* the logits again, and the products for every requested gradient */
    double materialized_size; /* bytes of the N_q x N_k matrices that streaming avoids: P and S, and the logit
                               * gradients of each model whose gradients are requested */
} workload;

workload workload_of(const skl_problem *problem, const skl_inputs *inputs);

#endif
