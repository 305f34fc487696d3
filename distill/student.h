/* A student in training, and Adam (Kingma and Ba, 2015) with warm-up and cosine decay of the learning rate. */
#ifndef STREAMKL_DISTILL_STUDENT_H
#define STREAMKL_DISTILL_STUDENT_H

#include "distill/layer.h"

/* Everything that one step hands to the next. */
typedef struct student_model {
    layer weights;
    layer gradient;                    /* of the current batch */
    layer first_moment, second_moment; /* of Adam: running means of the gradient and of its square */
    int64_t step;                      /* number of steps taken */
} student_model;

/* Starts with these weights. On failure device_error() says why; call student_free() in any case. */
skl_status student_allocate(student_model *student, const layer *initial_weights);
void student_free(student_model *student);

/* The learning rate of step number `step`, counted from 0, out of `steps`. */
float adam_rate(float peak, int64_t step, int64_t steps);

/* Updates the weights from student->gradient. */
void adam_step(student_model *student, float rate);

#endif
