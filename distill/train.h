/* One step of training: a mini-batch of sequences, their KL, one update of the student. */
#ifndef STREAMKL_DISTILL_TRAIN_H
#define STREAMKL_DISTILL_TRAIN_H

#include "distill/adam.h"
#include "distill/lesson.h"

typedef struct training {
    const layer *teacher;
    const sequence_source *source;
    int64_t steps, batch;
    float rate; /* the highest learning rate */
} training;

/* Takes the student's next step; *loss is the mean KL over rows, heads and sequences before it. `gradient` is scratch
 * of the student's shape. When `stop` is set in the middle of a batch nothing is updated and student->step stays. */
skl_status train_step(learner *student, const training *plan, lesson *work, layer *gradient, double *loss,
                      const volatile int *stop);

#endif
