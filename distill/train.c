#include "distill/train.h"
#include "distill/random.h"

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

/* Adds the control's gradient on the sequence whose teacher projections `pair` holds. */
static void add_control_gradient(student_model *control, const training_config *config, attention_pair *pair,
                                 output_loss *control_loss, const sequence *tokens, uint64_t index)
{
    enum { STREAM_QUERIES = 401 };
    const float scale = 1 / (float)(control_loss->rows * pair->problem.heads_s * config->batch);
    attention_pair_project_student(pair, &control->weights, tokens);
    output_loss_backward(control_loss, pair, tokens, random_stream(config->seed, STREAM_QUERIES, index), scale,
                         &control->gradient);
}

skl_status train_step(student_model *student, student_model *control, const training_config *config,
                      attention_pair *pair, output_loss *control_loss, double *mean_kl, const volatile int *stop)
{
    const int64_t rows = pair->problem.heads_s * pair->problem.len_q, step = student->step;
    const double scale = 1 / (double)(rows * config->batch);
    clear(&student->gradient);
    if (control)
        clear(&control->gradient);
    *mean_kl = 0;
    for (int64_t b = 0; b < config->batch; b++) {
        const uint64_t index = (uint64_t)(step * config->batch + b);
        const sequence tokens = config->source->at(config->source->state, SPLIT_TRAINING, index);
        attention_pair_project_teacher(pair, config->teacher, &tokens);
        attention_pair_project_student(pair, &student->weights, &tokens);
        skl_status status = attention_pair_forward(pair);
        if (status == SKL_OK)
            status = attention_pair_backward(pair, (float)scale, &tokens, &student->gradient);
        if (status == SKL_OK && control)
            add_control_gradient(control, config, pair, control_loss, &tokens, index);
        if (status != SKL_OK || *stop)
            return status;
        *mean_kl += scale * sum_of(pair->kl, rows);
    }
    const float rate = adam_rate(config->rate, step, config->steps);
    adam_step(student, rate);
    if (control)
        adam_step(control, rate);
    return SKL_OK;
}
