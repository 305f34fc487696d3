/* One step of training: a batch of sequences, the loss on each, one update of the weights. Optionally a control takes
 * the same step: a second student that starts with the same weights and learns from another loss. */
#ifndef STREAMKL_DISTILL_TRAIN_H
#define STREAMKL_DISTILL_TRAIN_H

#include "distill/adam.h"
#include "distill/output_loss.h"

typedef struct training_config {
    const layer *teacher;
    const sequence_source *source;
    int64_t steps, batch;
    float rate; /* peak learning rate */
    uint64_t seed;
} training_config;

/* Takes the next step of `student` on the attention KL; *mean_kl is its mean over rows, heads and sequences before
 * the update. If `control` is not NULL it takes a step on the output loss. If `stop` is set in the middle of a batch,
 * neither is updated. */
skl_status train_step(student_model *student, student_model *control, const training_config *config,
                      attention_pair *pair, output_loss *control_loss, double *mean_kl, const volatile int *stop);

#endif
