/* What a student has learnt, on sequences that it was not taught: KL by head and position, and whether it finds what
 * references ask for, by how deep that lies in the context. */
#ifndef STREAMKL_DISTILL_EVALUATE_H
#define STREAMKL_DISTILL_EVALUATE_H

#include "distill/lesson.h"

enum { EVALUATE_DEPTHS = 8, EVALUATE_POSITIONS = 64, EVALUATE_HEADS_MAX = 64 };

/* References to definitions at one depth, over the heads that retrieve. A hit gives its definition more than half of
 * the attention: then no other key has more. */
typedef struct depth_score {
    int64_t references;
    int64_t hits_t, hits_s;
    double kl; /* sum over the references */
} depth_score;

typedef struct evaluation {
    double kl;                              /* mean over rows and heads */
    double kl_head[EVALUATE_HEADS_MAX];     /* mean over rows; of the first heads */
    double kl_position[EVALUATE_POSITIONS]; /* mean over heads and the rows of a bucket */
    depth_score depths[EVALUATE_DEPTHS]; /* by where the definition stands: the first eighth of the context first */
    depth_score all;
} evaluation;

/* The first `count` sequences that are held out. `stop` is looked at between them; when it is set the result is not
 * complete. */
skl_status evaluate(evaluation *result, lesson *work, const layer *teacher, const layer *student,
                    const sequence_source *source, int64_t count, const volatile int *stop);

double evaluate_hit_rate_s(const depth_score *score); /* 0..1; NaN without references */
double evaluate_hit_rate_t(const depth_score *score);

#endif
