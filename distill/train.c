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

skl_status trainee_allocate(trainee *pupil, const layer *first_weights)
{
    *pupil = (trainee){.student = {.step = 0}};
    skl_status status = learner_allocate(&pupil->student, first_weights->shape);
    if (status == SKL_OK)
        status = layer_allocate(&pupil->gradient, first_weights->shape);
    if (status == SKL_OK)
        layer_copy(&pupil->student.weights, first_weights);
    return status;
}

void trainee_free(trainee *pupil)
{
    learner_free(&pupil->student);
    layer_free(&pupil->gradient);
}

/* The sequence of which the lesson has the teacher's projections, once more, without guidance. */
static void learn_alone(trainee *alone, const training *plan, lesson *work, unguided *outputs, const sequence *text,
                        uint64_t index)
{
    enum { STREAM_QUERIES = 401 };
    const float share = 1 / (float)(outputs->rows * work->problem.heads_s * plan->batch);
    lesson_project_student(work, &alone->student.weights, text);
    unguided_gradient(outputs, work, text, random_stream(plan->seed, STREAM_QUERIES, index), share, &alone->gradient);
}

skl_status train_step(trainee *guided, trainee *alone, const training *plan, lesson *work, unguided *outputs,
                      double *loss, const volatile int *stop)
{
    const int64_t rows = work->problem.heads_s * work->problem.len_q, step = guided->student.step;
    const double share = 1 / (double)(rows * plan->batch);
    clear(&guided->gradient);
    if (alone)
        clear(&alone->gradient);
    *loss = 0;
    for (int64_t b = 0; b < plan->batch; b++) {
        const uint64_t index = (uint64_t)(step * plan->batch + b);
        const sequence text = plan->source->at(plan->source->state, SPLIT_TRAINING, index);
        lesson_project_teacher(work, plan->teacher, &text);
        lesson_project_student(work, &guided->student.weights, &text);
        skl_status status = lesson_forward(work);
        if (status == SKL_OK)
            status = lesson_backward(work, (float)share, &text, &guided->gradient);
        if (status == SKL_OK && alone)
            learn_alone(alone, plan, work, outputs, &text, index);
        if (status != SKL_OK || *stop)
            return status;
        *loss += share * sum_of(work->kl, rows);
    }
    const float rate = adam_rate(plan->rate, step, plan->steps);
    adam_step(&guided->student, &guided->gradient, rate);
    if (alone)
        adam_step(&alone->student, &alone->gradient, rate);
    return SKL_OK;
}
