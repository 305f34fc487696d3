#include "distill/adam.h"

#include <math.h>

skl_status learner_allocate(learner *student, layer_shape shape)
{
    *student = (learner){.step = 0};
    skl_status status = layer_allocate(&student->weights, shape);
    if (status == SKL_OK)
        status = layer_allocate(&student->mean, shape);
    return status == SKL_OK ? layer_allocate(&student->square, shape) : status;
}

void learner_free(learner *student)
{
    layer_free(&student->weights);
    layer_free(&student->mean);
    layer_free(&student->square);
}

float adam_rate(float peak, int64_t step, int64_t steps)
{
    static const double warm_up = 0.05, floor_share = 0.02, pi = 3.14159265358979323846;
    const double progress = ((double)step + 0.5) / (double)steps;
    if (progress < warm_up)
        return (float)((double)peak * progress / warm_up);
    const double fall = 0.5 + 0.5 * cos(pi * (progress - warm_up) / (1 - warm_up));
    return (float)((double)peak * (floor_share + (1 - floor_share) * fall));
}

/* mean = b1 mean + (1 - b1) g        square = b2 square + (1 - b2) g^2
 * weights -= rate mean' / (sqrt(square') + tiny), where ' divides out that both began at 0 */
static void update(float *weights, float *mean, float *square, const float *gradient, int64_t count, float rate,
                   int64_t step)
{
    static const float b1 = 0.9F, b2 = 0.95F, tiny = 1e-9F;
    const float correct_mean = (float)(1 / (1 - pow((double)b1, (double)step)));
    const float correct_square = (float)(1 / (1 - pow((double)b2, (double)step)));
    for (int64_t i = 0; i < count; i++) {
        mean[i] = b1 * mean[i] + (1 - b1) * gradient[i];
        square[i] = b2 * square[i] + (1 - b2) * gradient[i] * gradient[i];
        weights[i] -= rate * correct_mean * mean[i] / (sqrtf(correct_square * square[i]) + tiny);
    }
}

void adam_step(learner *student, const layer *gradient, float rate)
{
    const layer_shape *const shape = &student->weights.shape;
    student->step++;
    update(student->weights.w_q, student->mean.w_q, student->square.w_q, gradient->w_q, layer_q_count(shape), rate,
           student->step);
    update(student->weights.w_k, student->mean.w_k, student->square.w_k, gradient->w_k, layer_k_count(shape), rate,
           student->step);
}
