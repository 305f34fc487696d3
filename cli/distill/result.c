/* The result of a run: the student's weights; KL and hit rates before and after training, as text and as JSON. */
#include "cli/common/cli.h"
#include "cli/distill/distill.h"
#include "cli/term/term.h"
#include "cli/io/file_write.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

distill_path distill_path_of(const distill_request *request, const char *name)
{
    distill_path path;
    snprintf(path.text, sizeof path.text, "%s/%s", request->folder, name);
    return path;
}

/* [width, heads * dim] to [heads, dim, width], the layout of linear layers. */
static float *transposed(const float *weights, int64_t width, int64_t columns)
{
    float *const out = cli_allocate((size_t)(width * columns) * sizeof *out, "the student's weights");
    for (int64_t i = 0; i < width; i++)
        for (int64_t c = 0; c < columns; c++)
            out[c * width + i] = weights[i * columns + c];
    return out;
}

void distill_student_save(const distill_run *run)
{
    const layer *const weights = &run->student.weights;
    const layer_shape *const shape = &weights->shape;
    float *const w_q = transposed(weights->w_q, shape->width, shape->heads * shape->dim);
    float *const w_k = transposed(weights->w_k, shape->width, shape->heads * shape->dim);
    const output_tensor output[] = {
        {"w_q", SKL_F32, 3, {shape->heads, shape->dim, shape->width}, w_q},
        {"w_k", SKL_F32, 3, {shape->heads, shape->dim, shape->width}, w_k},
    };
    file_write_tensors(distill_path_of(run->request, "student.safetensors").text, output, 2, NULL, 0);
    free(w_q);
    free(w_k);
}

static double mean_kl(const depth_score *score)
{
    return score->references ? score->kl / (double)score->references : NAN;
}

static void print_depths(const distill_run *run)
{
    const term_style style = term_style_for(stdout);
    printf("\n%sHits and KL by depth%s of the definition in the context; 0 %% is the beginning\n", style.bold,
           style.plain);
    printf("  %12s %11s %9s %9s %9s %11s %11s\n", "depth", "references", "teacher", "before", "after", "KL before",
           "KL after");
    for (int d = 0; d < EVALUATE_DEPTHS; d++) {
        const depth_score *const before = &run->before.depths[d], *const after = &run->after.depths[d];
        if (after->references == 0)
            continue;
        const bool as_good = evaluate_hit_rate_s(after) >= 0.95 * evaluate_hit_rate_t(after);
        printf("  %4d .. %2d %% %11" PRId64 " %7.1f %% %7.1f %% %s%7.1f %%%s %11.3g %11.3g\n",
               100 * d / EVALUATE_DEPTHS, 100 * (d + 1) / EVALUATE_DEPTHS, after->references,
               100 * evaluate_hit_rate_t(after), 100 * evaluate_hit_rate_s(before), as_good ? style.good : "",
               100 * evaluate_hit_rate_s(after), as_good ? style.plain : "", mean_kl(before), mean_kl(after));
    }
}

void distill_print_result(const distill_run *run)
{
    const term_style style = term_style_for(stdout);
    const distill_settings *const settings = &run->request->settings;
    const skl_inputs inputs = attention_pair_inputs(&run->pair);
    const workload work = workload_of(&run->pair.problem, &inputs);
    print_depths(run);
    printf("\n%sHeld-out KL%s %.4g before, %.4g after: %s%.0f times%s smaller, on %" PRId64 " sequences of %" PRId64
           " tokens\n",
           style.bold, style.plain, run->before.kl, run->after.kl, style.good, run->before.kl / run->after.kl,
           style.plain, settings->held_out, settings->context);
    printf("%sPeak memory%s %s for the whole process; materialized, the matrices of a step would take %s\n",
           style.bold, style.plain, cli_bytes_text((double)run->peak).text,
           cli_bytes_text(work.materialized_size).text);
    printf("%sTraining%s %s, kernel %s\n", style.bold, style.plain, cli_seconds_text(run->history.seconds).text,
           skl_plan_kernel(run->pair.runner.plan));
}

static json_t *depths_json(const distill_run *run)
{
    json_t *const depths = json_array();
    for (int d = 0; d < EVALUATE_DEPTHS; d++) {
        const depth_score *const before = &run->before.depths[d], *const after = &run->after.depths[d];
        cli_json_append(depths,
                        json_pack("{sI so so so so so}", "references", (json_int_t)after->references, "teacher",
                                  cli_json_number(evaluate_hit_rate_t(after)), "before",
                                  cli_json_number(evaluate_hit_rate_s(before)), "after",
                                  cli_json_number(evaluate_hit_rate_s(after)), "kl_before",
                                  cli_json_number(mean_kl(before)), "kl_after", cli_json_number(mean_kl(after))));
    }
    return depths;
}

static json_t *heads_json(const distill_run *run, const evaluation *result)
{
    const int64_t heads = run->pair.problem.heads_s, most = EVALUATE_HEADS_MAX;
    return cli_json_array(result->kl_head, sizeof(double), 1, (const int64_t[]){heads < most ? heads : most});
}

void distill_print_json(const distill_run *run)
{
    const skl_inputs inputs = attention_pair_inputs(&run->pair);
    cli_print_json(json_pack("{sI sI so so so so so sI so so so}", "step", (json_int_t)run->student.step, "steps",
                             (json_int_t)run->request->settings.steps, "kl_before", cli_json_number(run->before.kl),
                             "kl_after", cli_json_number(run->after.kl), "kl_head_before",
                             heads_json(run, &run->before), "kl_head_after", heads_json(run, &run->after), "depths",
                             depths_json(run), "peak_bytes", (json_int_t)run->peak, "materialized_bytes",
                             cli_json_number(workload_of(&run->pair.problem, &inputs).materialized_size), "report",
                             cli_json_path(distill_path_of(run->request, "report.html").text), "student",
                             cli_json_path(distill_path_of(run->request, "student.safetensors").text)));
}
