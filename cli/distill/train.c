/* The training loop: steps, evaluations, and a line of progress. */
#include "cli/common/cli.h"
#include "cli/distill/distill.h"
#include "device/device.h"
#include "cli/term/term.h"

#include <assert.h>
#include <inttypes.h>
#include <math.h>
#include <unistd.h>

volatile int distill_stop;

enum { EVALUATIONS = 6 }; /* during training, in addition to the first and the last */

/* ---- Progress ----------------------------------------------------------------------------------------------- */

static double tokens_per_second(const distill_history *history)
{
    return history->seconds > 0 ? history->tokens / history->seconds : 0;
}

static void print_heading(const distill_run *run)
{
    if (run->request->json)
        return;
    printf("  %9s %10s %12s %9s %11s %12s\n", "step", "loss", "held-out KL", "hits", "tokens/s", "peak memory");
}

static void print_row(const distill_run *run, double loss, double kl, double hits)
{
    if (run->request->json)
        return;
    char hit_text[16] = "-", loss_text[16] = "-", speed_text[16] = "-";
    if (!isnan(hits))
        snprintf(hit_text, sizeof hit_text, "%.1f %%", 100 * hits);
    if (!isnan(loss))
        snprintf(loss_text, sizeof loss_text, "%.4g", loss);
    if (run->history.seconds > 0)
        snprintf(speed_text, sizeof speed_text, "%.0f", tokens_per_second(&run->history));
    printf("  %4" PRId64 "/%-4" PRId64 " %10s %12.4g %9s %11s %12s\n", run->student.step,
           run->request->settings.steps, loss_text, kl, hit_text, speed_text,
           cli_bytes_text((double)resident_peak()).text);
    fflush(stdout);
}

/* The current state, on a terminal only; cleared before the next row of the table. */
static void print_live(const distill_run *run, double loss)
{
    const int64_t steps = run->request->settings.steps, done = run->student.step;
    const distill_history *const history = &run->history;
    if (run->request->json || !isatty(STDERR_FILENO))
        return;
    const double left = history->seconds / (double)done * (double)(steps - done);
    fprintf(stderr, "\r  step %" PRId64 "/%" PRId64 "  loss %.4g  %.0f tokens/s  %.0f s left \033[K", done, steps,
            loss, tokens_per_second(history), left);
    fflush(stderr);
}

static void clear_live(const distill_run *run)
{
    if (!run->request->json && isatty(STDERR_FILENO))
        fputs("\r\033[K", stderr);
}

/* ---- Evaluation --------------------------------------------------------------------------------------------- */

static int64_t evaluation_interval(int64_t steps)
{
    return steps > EVALUATIONS ? steps / EVALUATIONS : 1;
}

static bool evaluation_is_due(const distill_run *run)
{
    const int64_t step = run->student.step;
    const int64_t steps = run->request->settings.steps;
    return step % evaluation_interval(steps) == 0 || step == steps;
}

static void record_evaluation(distill_run *run)
{
    distill_history *const history = &run->history;
    evaluation now;
    cli_check(evaluate(&now, &run->pair, &run->source->task.teacher, &run->student.weights, &run->source->sequences,
                       run->request->settings.held_out, &distill_stop));
    if (distill_stop)
        return;
    const int64_t step = run->student.step;
    const double hits = evaluate_hit_rate_s(&now.all);
    assert(history->evaluation_count <= run->request->settings.steps); /* one per step, and one before the first */
    history->evaluation_step[history->evaluation_count] = (float)step;
    history->evaluation_kl[history->evaluation_count] = (float)now.kl;
    history->evaluation_count++;
    clear_live(run);
    print_row(run, step > 0 ? (double)history->loss[step - 1] : NAN, now.kl, hits);
}

/* ---- The loop ----------------------------------------------------------------------------------------------- */

static void take_step(distill_run *run, const training_config *config)
{
    const int64_t step = run->student.step;
    double loss;
    const double began = clock_seconds();
    cli_check(train_step(&run->student, config, &run->pair, &loss, &distill_stop));
    if (run->student.step == step)
        return; /* stopped within the batch */
    run->history.seconds += clock_seconds() - began;
    run->history.tokens += (double)(config->batch * run->pair.problem.len_q);
    run->history.loss[step] = (float)loss;
    if (!isfinite(loss))
        cli_fail(CLI_BAD_INPUT, "--rate=%g: the loss of step %" PRId64 " is %g; a smaller rate may help",
                 (double)config->rate, step, loss);
    print_live(run, loss);
}

void distill_train(distill_run *run)
{
    const distill_settings *const settings = &run->request->settings;
    const training_config config = {&run->source->task.teacher, &run->source->sequences, settings->steps,
                                    settings->batch, settings->rate};
    print_heading(run);
    while (!distill_stop) {
        if (evaluation_is_due(run))
            record_evaluation(run);
        if (distill_stop || run->student.step == settings->steps)
            break;
        take_step(run, &config);
    }
    clear_live(run);
}
