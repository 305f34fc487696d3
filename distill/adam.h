/* Adam (Kingma and Ba, 2015) with warm-up and cosine decay of the learning rate. */
#ifndef STREAMKL_DISTILL_ADAM_H
#define STREAMKL_DISTILL_ADAM_H

#include "distill/student.h"

/* The learning rate of step number `step`, counted from 0, out of `steps`. */
float adam_rate(float peak, int64_t step, int64_t steps);

/* Updates the weights from student->gradient. */
void adam_step(student_model *student, float rate);

#endif
