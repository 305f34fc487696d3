/* What a problem amounts to: the numbers that are shown beside a measurement. */
#ifndef STREAMKL_CLI_COMMON_WORKLOAD_H
#define STREAMKL_CLI_COMMON_WORKLOAD_H

#include "streamkl.h"

/* Doubles, because none of them need fit 64 bits and all are only for show. */
typedef struct workload {
    double pairs;             /* visible (query, key) pairs of one head, over all sequences */
    double forward_flop;      /* useful ones: both logits of every pair */
    double backward_flop;     /* the logits again, and a multiply-add a pair for every gradient asked for */
    double materialised_size; /* bytes of the N_q x N_k matrices that are not stored: P and S, and for every model
                               * whose gradients are asked for, those of its logits */
} workload;

workload workload_of(const skl_problem *problem, const skl_inputs *inputs);

#endif
