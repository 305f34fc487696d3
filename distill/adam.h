/* Adam (Kingma and Ba, 2015) with a learning rate that warms up and then falls along a cosine. */
#ifndef STREAMKL_DISTILL_ADAM_H
#define STREAMKL_DISTILL_ADAM_H

#include "distill/layer.h"

/* A student in training: everything that one step hands to the next. */
typedef struct learner {
    layer weights;
    layer mean, square; /* running means of the gradient and of its square */
    int64_t step;       /* done so far */
} learner;

skl_status learner_allocate(learner *student, layer_shape shape);
void learner_free(learner *student);

/* The rate of the step after `step` others, of `steps` in all. */
float adam_rate(float peak, int64_t step, int64_t steps);

void adam_step(learner *student, const layer *gradient, float rate);

#endif
