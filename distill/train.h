/* One step of training: a batch of sequences, the KL on each, one update of the weights. */
#ifndef STREAMKL_DISTILL_TRAIN_H
#define STREAMKL_DISTILL_TRAIN_H

#include "distill/attention_pair.h"
#include "distill/student.h"

typedef struct training_config {
    const layer *teacher;
    const sequence_source *source;
    int64_t steps, batch;
    float rate; /* peak learning rate */
} training_config;

/* Takes the next step of `student` on the attention KL; *mean_kl is its mean over rows, heads and sequences before
 * the update. If `stop` is set in the middle of a batch, the student is not updated. */
skl_status train_step(student_model *student, const training_config *config, attention_pair *pair, double *mean_kl,
                      const volatile int *stop);

#endif
