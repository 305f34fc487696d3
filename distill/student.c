#include "distill/student.h"

#include <math.h>

skl_status student_allocate(student_model *student, const layer *initial_weights)
{
    *student = (student_model){.step = 0};
    layer *const layers[] = {&student->weights, &student->gradient, &student->first_moment, &student->second_moment};
    skl_status status = SKL_OK;
    for (size_t l = 0; l < sizeof layers / sizeof layers[0] && status == SKL_OK; l++)
        status = layer_allocate(layers[l], initial_weights->shape);
    if (status == SKL_OK)
        layer_copy(&student->weights, initial_weights);
    return status;
}

void student_free(student_model *student)
{
    layer_free(&student->weights);
    layer_free(&student->gradient);
    layer_free(&student->first_moment);
    layer_free(&student->second_moment);
}

/* ---- Adam --------------------------------------------------------------------------------------------------- */

float adam_rate(float peak, int64_t step, int64_t steps)
{
    static const double warm_up = 0.05, floor_share = 0.02, pi = 3.14159265358979323846;
    const double progress = ((double)step + 0.5) / (double)steps;
    if (progress < warm_up)
        return (float)((double)peak * progress / warm_up);
    const double decay = 0.5 + 0.5 * cos(pi * (progress - warm_up) / (1 - warm_up));
    return (float)((double)peak * (floor_share + (1 - floor_share) * decay));
}

/* m = b1 m + (1 - b1) g        v = b2 v + (1 - b2) g^2
 * weights -= rate m' / (sqrt(v') + epsilon), where ' corrects the bias of moments that start at 0 */
static void update(float *weights, float *m, float *v, const float *gradient, int64_t count, float rate, int64_t step)
{
    static const float b1 = 0.9F, b2 = 0.95F, epsilon = 1e-9F;
    const float correct_m = (float)(1 / (1 - pow((double)b1, (double)step)));
    const float correct_v = (float)(1 / (1 - pow((double)b2, (double)step)));
    for (int64_t i = 0; i < count; i++) {
        m[i] = b1 * m[i] + (1 - b1) * gradient[i];
        v[i] = b2 * v[i] + (1 - b2) * gradient[i] * gradient[i];
        weights[i] -= rate * correct_m * m[i] / (sqrtf(correct_v * v[i]) + epsilon);
    }
}

void adam_step(student_model *student, float rate)
{
    const layer_shape *const shape = &student->weights.shape;
    student->step++;
    update(student->weights.w_q, student->first_moment.w_q, student->second_moment.w_q, student->gradient.w_q,
           layer_q_count(shape), rate, student->step);
    update(student->weights.w_k, student->first_moment.w_k, student->second_moment.w_k, student->gradient.w_k,
           layer_k_count(shape), rate, student->step);
}
