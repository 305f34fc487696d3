/* report.html: the result of a run on one self-contained page. */
#include "device/machine.h"
#include "cli/common/cli.h"
#include "cli/distill/distill.h"
#include "cli/distill/timing.h"
#include "cli/common/options.h"
#include "cli/common/resident.h"
#include "cli/io/file_write.h"
#include "view/attention_map.h"
#include "view/chart.h"
#include "view/page.h"
#include "cli/common/workload.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

enum { MAP_BUCKETS = 64, MAP_HEADS_MAX = 8 };

/* ---- Key figures -------------------------------------------------------------------------------------------- */

static void add_figures(bytes *page, const distill_run *run)
{
    const skl_inputs inputs = attention_pair_inputs(&run->pair);
    const double materialised = workload_of(&run->pair.problem, &inputs).materialised_size;
    char value[96], detail[160];
    bytes_print(page, "<div class=\"figures\">");
    snprintf(value, sizeof value, "%.3g &rarr; %.2g", run->before.kl, run->after.kl);
    snprintf(detail, sizeof detail, "%.0f times smaller; mean over rows and heads", distill_kl_ratio(run));
    page_figure(page, value, "held-out attention KL", detail);
    if (run->source->retrieves) {
        snprintf(value, sizeof value, "%.1f %%", 100 * evaluate_hit_rate_s(&run->after.all));
        const int length =
            snprintf(detail, sizeof detail, "teacher %.0f %%, before training %.0f %%",
                     100 * evaluate_hit_rate_t(&run->after.all), 100 * evaluate_hit_rate_s(&run->before.all));
        if (run->request->settings.control_queries)
            snprintf(detail + length, sizeof detail - (size_t)length, ", control %.0f %%",
                     100 * evaluate_hit_rate_s(&run->after_control.all));
        page_figure(page, value, "definitions found", detail);
    }
    snprintf(detail, sizeof detail, "materialised, the matrices of a step would take %s",
             cli_bytes_text(materialised).text);
    page_figure(page, cli_bytes_text((double)run->peak).text, "peak memory of the process", detail);
    snprintf(value, sizeof value, "%.0f s", run->history.seconds);
    snprintf(detail, sizeof detail, "%" PRId64 " steps of %" PRId64 " tokens", run->student.step,
             run->request->settings.batch * run->request->settings.context);
    page_figure(page, value, "of training", detail);
    bytes_print(page, "</div>\n");
}

/* ---- Curves ------------------------------------------------------------------------------------------------- */

enum { CURVE_POINTS = 300 };

static void add_loss(bytes *page, const distill_run *run)
{
    const distill_history *const history = &run->history;
    const int64_t steps = run->student.step, points = steps < CURVE_POINTS ? steps : CURVE_POINTS;
    double x[CURVE_POINTS], y[CURVE_POINTS];
    for (int64_t p = 0; p < points; p++) {
        const int64_t begin = steps * p / points, end = steps * (p + 1) / points;
        double sum = 0;
        for (int64_t step = begin; step < end; step++)
            sum += (double)history->loss[step];
        x[p] = (double)begin;
        y[p] = sum / (double)(end - begin);
    }
    double *const held_out = malloc(((size_t)history->evaluation_count * 2 + 1) * sizeof *held_out);
    page->failed |= held_out == NULL;
    for (int64_t e = 0; held_out && e < history->evaluation_count; e++) {
        held_out[e] = (double)history->evaluation_step[e];
        held_out[history->evaluation_count + e] = (double)history->evaluation_kl[e];
    }
    const chart curves = {
        .description = "Attention KL by training step, on a logarithmic scale",
        .x_label = "step",
        .log_y = true,
        .x_max = (double)run->request->settings.steps,
        .series_count = held_out ? 2 : 1,
        .series = {{"training", "loss", x, y, points, false},
                   {"held out", "after", held_out, held_out + (held_out ? history->evaluation_count : 0),
                    history->evaluation_count, true}},
    };
    page_section_begin(
        page, "Training",
        "Attention KL in nats, mean over rows and heads. The student is never trained on held-out sequences; each "
        "sequence has different definitions.");
    bytes_print(page, "<div class=\"pair\"><div class=\"card\"><h3>KL by step</h3>");
    chart_lines(page, &curves);
    bytes_print(page, "</div>");
    free(held_out);
}

static void add_positions(bytes *page, const distill_run *run)
{
    double x[EVALUATE_POSITIONS];
    for (int b = 0; b < EVALUATE_POSITIONS; b++)
        x[b] = (b + 0.5) * (double)run->pair.problem.len_q / EVALUATE_POSITIONS;
    const int64_t count = run->pair.problem.len_q < EVALUATE_POSITIONS ? 0 : EVALUATE_POSITIONS;
    const chart curves = {
        .description = "Attention KL by the position of the query, before and after training",
        .x_label = "position of the query",
        .log_y = true,
        .x_max = (double)run->pair.problem.len_q,
        .series_count = 2,
        .series = {{"before", "before", x, run->before.kl_position, count, false},
                   {"after", "after", x, run->after.kl_position, count, false}},
    };
    bytes_print(page, "<div class=\"card\"><h3>KL by position</h3>");
    chart_lines(page, &curves);
    bytes_print(page,
                "</div></div>\n<h3>KL by head</h3><div class=\"card scroll\"><table><tr><th>head</th><th>learns the "
                "mean of</th><th>before</th><th>after</th><th>times smaller</th></tr>");
    const int64_t heads = run->pair.problem.heads_s, group_size = run->pair.problem.heads_t / heads;
    for (int64_t head = 0; head < heads && head < EVALUATE_HEADS_MAX; head++) {
        const double before = run->before.kl_head[head], after = run->after.kl_head[head];
        bytes_print(page,
                    "<tr><td>%" PRId64 "%s</td><td>teacher heads %" PRId64 "..%" PRId64
                    "</td><td>%.3g</td><td>%.3g</td><td>%.0f</td></tr>",
                    head,
                    !run->source->retrieves     ? ""
                    : task_head_retrieves(head) ? ", retrieval"
                                                : ", topic",
                    head * group_size, (head + 1) * group_size - 1, before, after, before / after);
    }
    bytes_print(page, "</table></div>");
    page_section_end(page);
}

/* ---- Depths ------------------------------------------------------------------------------------------------- */

static void add_depths(bytes *page, const distill_run *run)
{
    static const char *const names[EVALUATE_DEPTHS] = {"0", "12", "25", "37", "50", "62", "75", "87"};
    double teacher[EVALUATE_DEPTHS], before[EVALUATE_DEPTHS], after[EVALUATE_DEPTHS], control[EVALUATE_DEPTHS];
    for (int d = 0; d < EVALUATE_DEPTHS; d++) {
        teacher[d] = evaluate_hit_rate_t(&run->after.depths[d]);
        before[d] = evaluate_hit_rate_s(&run->before.depths[d]);
        after[d] = evaluate_hit_rate_s(&run->after.depths[d]);
        control[d] = evaluate_hit_rate_s(&run->after_control.depths[d]);
    }
    const chart bars = {
        .description = "Share of references that find their definition, by depth of the definition in the context",
        .x_label = "depth of the definition, % of the context",
        .series_count = run->request->settings.control_queries ? 4 : 3,
        .series = {{"teacher", "teacher", NULL, teacher, 0, false},
                   {"before", "before", NULL, before, 0, false},
                   {"after", "after", NULL, after, 0, false},
                   {"control", "control", NULL, control, 0, false}},
    };
    page_section_begin(
        page, "Does the student use the whole context?",
        "A reference needs one definition before it. It counts as found if a retrieval head gives the definition "
        "more than half of its attention, despite distractors all over the context.");
    if (run->request->settings.control_queries)
        bytes_print(page,
                    "<p class=\"lead\">The control starts with the same weights and takes the same steps on the same "
                    "sequences. It learns from the outputs of attention instead of the attention KL, with %" PRId64
                    " queries per sequence.</p>",
                    run->request->settings.control_queries);
    bytes_print(page, "<div class=\"pair\"><div class=\"card\"><h3>Definitions found, by depth</h3>");
    chart_bars(page, &bars, names, EVALUATE_DEPTHS);
    bytes_print(
        page,
        "</div><div class=\"card scroll\"><h3>KL of the references</h3><table><tr><th>depth</th><th>references</th>"
        "<th>KL before</th><th>KL after</th></tr>");
    for (int d = 0; d < EVALUATE_DEPTHS; d++) {
        const depth_score *const first = &run->before.depths[d], *const last = &run->after.depths[d];
        if (last->references)
            bytes_print(page, "<tr><td>%d..%d %%</td><td>%" PRId64 "</td><td>%.3g</td><td>%.3g</td></tr>",
                        100 * d / EVALUATE_DEPTHS, 100 * (d + 1) / EVALUATE_DEPTHS, last->references,
                        first->kl / (double)first->references, last->kl / (double)last->references);
    }
    bytes_print(page, "</table></div></div>");
    page_section_end(page);
}

/* ---- Maps --------------------------------------------------------------------------------------------------- */

typedef struct report_maps {
    attention_map before, after, control; /* `control` is empty if there is none */
} report_maps;

/* The map of a student on the first held-out sequence. */
static skl_status map_student(attention_map *map, distill_run *run, const layer *student)
{
    const sequence_source *const source = &run->source->sequences;
    const sequence tokens = source->at(source->state, SPLIT_HELD_OUT, 0);
    attention_pair_project_teacher(&run->pair, run->source->teacher, &tokens);
    attention_pair_project_student(&run->pair, student, &tokens);
    const skl_inputs inputs = attention_pair_inputs(&run->pair);
    skl_problem problem = run->pair.problem;
    problem.gradients = 0;
    return attention_map_compute(map, MAP_BUCKETS, MAP_BUCKETS, &problem, &inputs, &run->request->options);
}

static void add_head_maps(bytes *page, const report_maps *maps, int64_t head)
{
    const attention_map *const before = &maps->before, *const after = &maps->after;
    const int64_t cells = after->rows * after->columns, at = head * cells;
    const double top = picture_bright(after->p + at, cells);
    const double kl_top = picture_bright(before->kl + at, cells);
    bytes_print(page, "<h3>Head %" PRId64 "</h3><div class=\"maps\">", head);
    page_map(page, PALETTE_SHARE, after->p + at, after->rows, after->columns, top, "teacher");
    page_map(page, PALETTE_SHARE, before->s + at, after->rows, after->columns, top, "student before");
    page_map(page, PALETTE_SHARE, after->s + at, after->rows, after->columns, top, "student after");
    page_map(page, PALETTE_SIGNED, before->kl + at, after->rows, after->columns, kl_top,
             "contributions to the KL, before");
    if (maps->control.s)
        page_map(page, PALETTE_SHARE, maps->control.s + at, after->rows, after->columns, top, "control");
    else
        page_map(page, PALETTE_SIGNED, after->kl + at, after->rows, after->columns, kl_top,
                 "contributions to the KL, after, same scale");
    bytes_print(page, "</div>\n");
}

static int compute_maps(report_maps *maps, distill_run *run)
{
    skl_status status = map_student(&maps->before, run, &run->source->initial_student);
    if (status == SKL_OK)
        status = map_student(&maps->after, run, &run->student.weights);
    if (status == SKL_OK && run->request->settings.control_queries)
        status = map_student(&maps->control, run, &run->control.weights);
    return status == SKL_OK ? CLI_OK : cli_fail_status(status);
}

static void add_maps(bytes *page, const report_maps *maps)
{
    page_section_begin(
        page, "Attention maps",
        "Attention on one held-out sequence, pooled into 64 x 64 buckets: queries from top to bottom, keys from left "
        "to right. Brightness is the square root of the attention, with one scale per head, clipped at the 99th "
        "percentile of the teacher. In the KL, orange marks attention that the student misses, blue attention that "
        "it "
        "gives in excess.");
    for (int64_t head = 0; head < maps->after.heads && head < MAP_HEADS_MAX; head++)
        add_head_maps(page, maps, head);
    page_section_end(page);
}

/* ---- Costs -------------------------------------------------------------------------------------------------- */

static void add_costs(bytes *page, const distill_run *run)
{
    const skl_inputs inputs = attention_pair_inputs(&run->pair);
    const double matrices = workload_of(&run->pair.problem, &inputs).materialised_size;
    page_section_begin(
        page, "Compared with materialising",
        "Attention KL is usually computed from whole matrices: P of every teacher head, S and its gradient of every "
        "student head, in f32.");
    bytes_print(
        page,
        "<div class=\"pair\"><div class=\"card scroll\"><h3>Memory</h3><table><tr><th>context</th><th>matrices</th>"
        "<th>this library</th></tr>");
    for (int64_t factor = 1; factor <= 64; factor *= 4) {
        bytes_print(page, "<tr><td>%" PRId64 "</td><td>%s</td><td>%s</td></tr>", run->pair.problem.len_q * factor,
                    cli_bytes_text((double)(factor * factor) * matrices).text,
                    cli_bytes_text((double)run->pair.workspace_size).text);
    }
    bytes_print(page,
                "</table><p class=\"lead\"><small>The workspace does not grow with the context. The peak of the "
                "whole process, "
                "including data and weights, was %s.</small></p></div><div class=\"card scroll\"><h3>Time</h3>",
                cli_bytes_text((double)run->peak).text);
    if (run->request->no_baseline)
        bytes_print(page, "<p>Not measured: --no-baseline.</p>");
    else
        distill_timing_add(page, run);
    bytes_print(page, "</div></div>");
    page_section_end(page);
}

/* ---- Settings ----------------------------------------------------------------------------------------------- */

static void add_setting(bytes *page, const char *name, const char *value)
{
    bytes_print(page, "<tr><td>%s</td><td>", name);
    bytes_add_escaped(page, value);
    bytes_print(page, "</td></tr>");
}

static void add_command(bytes *page, const distill_settings *settings)
{
    bytes_print(page, "<pre>streamkl distill");
    if (settings->teacher_path) {
        bytes_print(page, " --teacher ");
        bytes_add_escaped(page, settings->teacher_path);
        bytes_print(page, " --student ");
        bytes_add_escaped(page, settings->student_path);
    }
    for (size_t c = 0; c < distill_counts_size; c++) {
        const int64_t value = *(const int64_t *)((const char *)settings + distill_counts[c].offset);
        if (!settings->teacher_path || distill_counts[c].offset >= offsetof(distill_settings, steps))
            bytes_print(page, " --%s %" PRId64, distill_counts[c].name, value);
    }
    bytes_print(page, " --rate %g --direction %s</pre>", (double)settings->rate, direction_name(settings->direction));
}

static void add_settings(bytes *page, const distill_run *run)
{
    const distill_settings *const settings = &run->request->settings;
    char text[160];
    page_section_begin(page, "Reproducing this run",
                       "The same command on the same machine gives bitwise equal weights.");
    add_command(page, settings);
    bytes_print(page, "<div class=\"card\"><table class=\"plain\">");
    for (size_t c = 0; c < distill_counts_size; c++) {
        snprintf(text, sizeof text, "%" PRId64,
                 *(const int64_t *)((const char *)settings + distill_counts[c].offset));
        add_setting(page, distill_counts[c].name, text);
    }
    snprintf(text, sizeof text, "%g, warm-up over 5 %% of the steps, then cosine decay", (double)settings->rate);
    add_setting(page, "rate", text);
    add_setting(page, "direction", direction_name(settings->direction));
    if (settings->teacher_path) {
        add_setting(page, "teacher", settings->teacher_path);
        add_setting(page, "student", settings->student_path);
    }
    snprintf(text, sizeof text, "%" PRId64 " of %" PRId64, run->student.step, settings->steps);
    add_setting(page, "steps done", text);
    add_setting(page, "kernel", skl_plan_kernel(run->pair.plan));
    machine_cpu_model(text, sizeof text);
    add_setting(page, "CPU", text);
    snprintf(text, sizeof text, "%d", run->pair.threads);
    add_setting(page, "threads", text);
    machine_date(text, sizeof text);
    add_setting(page, "date", text);
    add_setting(page, "library", skl_build_info());
    bytes_print(page, "</table></div>");
    page_section_end(page);
}

/* ---- The page ----------------------------------------------------------------------------------------------- */

static void add_title(bytes *page, const distill_run *run)
{
    const distill_settings *const s = &run->request->settings;
    bytes_print(page, "<h1>Attention distillation</h1><p class=\"lead\">");
    bytes_print(
        page,
        "%" PRId64 " student heads of size %" PRId64 " learned the attention of %" PRId64
        " teacher heads of size %" PRId64 " at a context of %" PRId64
        " tokens. W_q and W_k were trained on KL(%s). The KL was streamed: no N&nbsp;&times;&nbsp;N matrix was "
        "stored.",
        s->heads_s, s->dim_s, s->heads_t, s->dim_t, s->context,
        s->direction == SKL_KL_FORWARD ? "teacher&nbsp;||&nbsp;student" : "student&nbsp;||&nbsp;teacher");
    if (run->student.step < s->steps)
        bytes_print(page, " <b>The run was stopped at step %" PRId64 " of %" PRId64 ".</b>", run->student.step,
                    s->steps);
    bytes_print(page, "</p>");
}

static void fill_page(bytes *page, const distill_run *run, const report_maps *maps)
{
    page_begin(page, "StreamKL: attention distillation");
    add_title(page, run);
    add_figures(page, run);
    if (run->source->retrieves)
        add_depths(page, run);
    add_maps(page, maps);
    add_loss(page, run);
    add_positions(page, run);
    add_costs(page, run);
    add_settings(page, run);
    bytes_print(page, "<footer>StreamKL %s</footer>", skl_version());
    page_end(page);
}

int distill_report_write(file_set *set, distill_run *run)
{
    report_maps maps = {.before = {0}};
    bytes page = {0};
    int exit_code = compute_maps(&maps, run);
    run->peak = resident_peak(); /* before the baseline allocates its matrices */
    if (exit_code == CLI_OK) {
        fill_page(&page, run, &maps);
        exit_code = file_write_into(set, distill_path_of(run->request, "report.html").text, &page);
    }
    attention_map_free(&maps.before);
    attention_map_free(&maps.after);
    attention_map_free(&maps.control);
    bytes_free(&page);
    return exit_code;
}
