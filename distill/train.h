/* One step of training: a mini-batch of sequences, their KL, one update of the student; and beside it one of a
 * student without guidance, on the same sequences. */
#ifndef STREAMKL_DISTILL_TRAIN_H
#define STREAMKL_DISTILL_TRAIN_H

#include "distill/adam.h"
#include "distill/unguided.h"

typedef struct training {
    const layer *teacher;
    const sequence_source *source;
    int64_t steps, batch;
    float rate; /* the highest learning rate */
    uint64_t seed;
} training;

/* A student and the gradient of the batch at hand. */
typedef struct trainee {
    learner student;
    layer gradient;
} trainee;

skl_status trainee_allocate(trainee *pupil, const layer *first_weights);
void trainee_free(trainee *pupil);

/* Takes the next step of `guided`; *loss is its mean KL over rows, heads and sequences before it. `alone`, if it is
 * not NULL, takes one too, on what `outputs` looks at. When `stop` is set in the middle of a batch nothing is updated
 * and both steps stay what they were. */
skl_status train_step(trainee *guided, trainee *alone, const training *plan, lesson *work, unguided *outputs,
                      double *loss, const volatile int *stop);

#endif
