#include "distill/train.h"

static double sum_of(const float *values, int64_t count)
{
    double sum = 0;
    for (int64_t i = 0; i < count; i++)
        sum += (double)values[i];
    return sum;
}

static void clear(layer *gradient)
{
    memset(gradient->w_q, 0, (size_t)layer_q_count(&gradient->shape) * sizeof *gradient->w_q);
    memset(gradient->w_k, 0, (size_t)layer_k_count(&gradient->shape) * sizeof *gradient->w_k);
}

skl_status train_step(learner *student, const training *plan, lesson *work, layer *gradient, double *loss,
                      const volatile int *stop)
{
    const int64_t rows = work->problem.heads_s * work->problem.len_q;
    const double share = 1 / (double)(rows * plan->batch);
    clear(gradient);
    *loss = 0;
    for (int64_t b = 0; b < plan->batch; b++) {
        const uint64_t index = (uint64_t)(student->step * plan->batch + b);
        const sequence text = plan->source->at(plan->source->state, SPLIT_TRAINING, index);
        lesson_project_teacher(work, plan->teacher, &text);
        lesson_project_student(work, &student->weights, &text);
        skl_status status = lesson_forward(work);
        if (status == SKL_OK)
            status = lesson_backward(work, (float)share, &text, gradient);
        if (status != SKL_OK || *stop)
            return status;
        *loss += share * sum_of(work->kl, rows);
    }
    adam_step(student, gradient, adam_rate(plan->rate, student->step, plan->steps));
    return SKL_OK;
}
