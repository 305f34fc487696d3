/* Evaluates a student on held-out sequences: KL by head and by position, and the share of references that find their
 * definition, by the depth of the definition in the context. */
#ifndef STREAMKL_DISTILL_EVALUATE_H
#define STREAMKL_DISTILL_EVALUATE_H

#include "distill/attention_pair.h"

enum { EVALUATE_DEPTHS = 8, EVALUATE_POSITIONS = 64, EVALUATE_HEADS_MAX = 64 };

/* References to definitions at one depth, over the retrieval heads. A hit is a reference that gives its definition
 * more than half of the attention, so that no other key gets more. */
typedef struct depth_score {
    int64_t references;
    int64_t hits_t, hits_s;
    double kl; /* sum over the references */
} depth_score;

typedef struct evaluation {
    double kl;                              /* mean over rows and heads */
    double kl_head[EVALUATE_HEADS_MAX];     /* mean over rows, of the first heads */
    double kl_position[EVALUATE_POSITIONS]; /* mean over heads and the rows of a bucket */
    depth_score depths[EVALUATE_DEPTHS];    /* by eighth of the context that holds the definition */
    depth_score all;
} evaluation;

/* On the first `count` held-out sequences. `stop` is read between them; if it is set, the result is incomplete. */
skl_status evaluate(evaluation *result, attention_pair *pair, const layer *teacher, const layer *student,
                    const sequence_source *source, int64_t count, const volatile int *stop);

double evaluate_hit_rate_s(const depth_score *score); /* 0..1; NaN without references */
double evaluate_hit_rate_t(const depth_score *score);

#endif
