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

skl_status train_step(student_model *student, const training_config *config, attention_pair *pair, double *mean_kl,
                      const volatile int *stop)
{
    const int64_t rows = pair->problem.heads_s * pair->problem.len_q, step = student->step;
    const double scale = 1 / (double)(rows * config->batch);
    clear(&student->gradient);
    *mean_kl = 0;
    for (int64_t b = 0; b < config->batch; b++) {
        const uint64_t index = (uint64_t)(step * config->batch + b);
        const sequence tokens = config->source->at(config->source->state, SPLIT_TRAINING, index);
        attention_pair_project_teacher(pair, config->teacher, &tokens);
        attention_pair_project_student(pair, &student->weights, &tokens);
        skl_status status = attention_pair_forward(pair);
        if (status == SKL_OK)
            status = attention_pair_backward(pair, (float)scale, &tokens, &student->gradient);
        if (status != SKL_OK || *stop)
            return status;
        *mean_kl += scale * sum_of(pair->kl, rows);
    }
    adam_step(student, adam_rate(config->rate, step, config->steps));
    return SKL_OK;
}
