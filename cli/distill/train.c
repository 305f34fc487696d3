/* The training loop: steps, evaluations, and a line of progress. */
#include "cli/common/cli.h"
#include "cli/distill/distill.h"
#include "cli/term/term.h"
#include "device/device.h"

#include <assert.h>
#include <inttypes.h>
#include <math.h>

volatile int distill_stop;

enum { EVALUATIONS = 6 }; /* during training, in addition to the first and the last */

static void print_row(const distill_run *run, double loss, double kl, double hits)
{
    const distill_history *const history = &run->history;
    char hit_text[16] = "-", loss_text[16] = "-", speed_text[16] = "-";
    if (!isnan(hits))
        snprintf(hit_text, sizeof hit_text, "%.1f %%", 100 * hits);
    if (!isnan(loss))
        snprintf(loss_text, sizeof loss_text, "%.4g", loss);
    if (history->seconds > 0)
        snprintf(speed_text, sizeof speed_text, "%.0f", history->tokens / history->seconds);
    printf("  %4" PRId64 "/%-4" PRId64 " %10s %12.4g %9s %11s %12s\n", run->student.step,
           run->request->settings.steps, loss_text, kl, hit_text, speed_text,
           cli_bytes_text((double)resident_peak()).text);
    fflush(stdout);
}

static bool evaluation_is_due(const distill_run *run)
{
    const int64_t step = run->student.step, steps = run->request->settings.steps;
    const int64_t interval = steps > EVALUATIONS ? steps / EVALUATIONS : 1;
    return step % interval == 0 || step == steps;
}

static void record_evaluation(distill_run *run)
{
    distill_history *const history = &run->history;
    const evaluation now = evaluate(&run->pair, &run->task, &run->student.weights, run->request->settings.held_out);
    const int64_t step = run->student.step, count = history->evaluation_count++;
    assert(count <= run->request->settings.steps); /* one per step, and one before the first */
    history->evaluation_step[count] = (double)step;
    history->evaluation_kl[count] = now.kl;
    term_progress_end();
    if (!run->request->json)
        print_row(run, step > 0 ? history->loss[step - 1] : NAN, now.kl, evaluate_hit_rate_s(&now.all));
}

bool distill_step(distill_run *run, double *mean_kl)
{
    const distill_settings *const settings = &run->request->settings;
    student_model *const student = &run->student;
    attention_pair *const pair = &run->pair;
    const int64_t rows = pair->problem.heads_s * pair->problem.len_q;
    const double scale = 1 / (double)(rows * settings->batch);
    memset(student->gradient.w_q, 0, (size_t)layer_count(&student->gradient.shape) * sizeof(float));
    *mean_kl = 0;
    for (int64_t b = 0; b < settings->batch; b++) {
        const uint64_t index = (uint64_t)(student->step * settings->batch + b);
        const sequence tokens = task_sequence(&run->task, SPLIT_TRAINING, index);
        attention_pair_project(pair, &run->task.teacher, &student->weights, &tokens);
        attention_pair_forward(pair);
        attention_pair_backward(pair, (float)scale, &tokens, &student->gradient);
        if (distill_stop)
            return false;
        double sum = 0;
        for (int64_t row = 0; row < rows; row++)
            sum += (double)pair->kl[row];
        *mean_kl += scale * sum;
    }
    adam_step(student, adam_rate(settings->rate, student->step, settings->steps));
    return true;
}

static void take_step(distill_run *run)
{
    const distill_settings *const settings = &run->request->settings;
    const int64_t step = run->student.step;
    double loss;
    const double began = clock_seconds();
    if (!distill_step(run, &loss))
        return;
    run->history.seconds += clock_seconds() - began;
    run->history.tokens += (double)(settings->batch * settings->context);
    run->history.loss[step] = loss;
    if (!isfinite(loss))
        cli_fail(CLI_BAD_INPUT, "--rate=%g: the loss of step %" PRId64 " is %g; a smaller rate may help",
                 (double)settings->rate, step, loss);
    term_progress_update(NULL, step + 1, settings->steps);
}

void distill_train(distill_run *run)
{
    if (!run->request->json)
        printf("  %9s %10s %12s %9s %11s %12s\n", "step", "loss", "held-out KL", "hits", "tokens/s", "peak memory");
    term_progress_begin("training");
    while (!distill_stop) {
        if (evaluation_is_due(run))
            record_evaluation(run);
        if (distill_stop || run->student.step == run->request->settings.steps)
            break;
        take_step(run);
    }
    term_progress_end();
}
