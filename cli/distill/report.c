/* report.html: what a run did, on one page that needs nothing but itself. */
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

/* ---- The figures on top ------------------------------------------------------------------------------------- */

static void add_figures(bytes *page, const distill_run *run)
{
    const skl_inputs inputs = lesson_inputs(&run->work);
    const double materialised = workload_of(&run->work.problem, &inputs).materialised_size;
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
        if (run->request->settings.unguided)
            snprintf(detail + length, sizeof detail - (size_t)length, ", without guidance %.0f %%",
                     100 * evaluate_hit_rate_s(&run->without.all));
        page_figure(page, value, "definitions found", detail);
    }
    snprintf(detail, sizeof detail, "materialised, the matrices of a step take %s",
             cli_bytes_text(materialised).text);
    page_figure(page, cli_bytes_text((double)run->peak).text, "peak memory of the process", detail);
    snprintf(value, sizeof value, "%.0f s", run->history.seconds);
    snprintf(detail, sizeof detail, "%" PRId64 " steps of %" PRId64 " tokens", run->guided.student.step,
             run->request->settings.batch * run->request->settings.context);
    page_figure(page, value, "of training", detail);
    bytes_print(page, "</div>\n");
}

/* ---- Curves ------------------------------------------------------------------------------------------------- */

enum { CURVE_POINTS = 300 };

static void add_loss(bytes *page, const distill_run *run)
{
    const distill_history *const history = &run->history;
    const int64_t steps = run->guided.student.step, points = steps < CURVE_POINTS ? steps : CURVE_POINTS;
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
        .description = "Attention KL over the steps of training, on a logarithmic scale",
        .x_label = "step",
        .log_y = true,
        .x_max = (double)run->request->settings.steps,
        .series_count = held_out ? 2 : 1,
        .series = {{"training", "loss", x, y, points, false},
                   {"held out", "after", held_out, held_out + (held_out ? history->evaluation_count : 0),
                    history->evaluation_count, true}},
    };
    page_section_begin(
        page, "Learning",
        "Attention KL in nats, mean over rows and heads. Held-out sequences are never trained on; each "
        "has definitions of its own.");
    bytes_print(page, "<div class=\"pair\"><div class=\"card\"><h3>KL by step</h3>");
    chart_lines(page, &curves);
    bytes_print(page, "</div>");
    free(held_out);
}

static void add_positions(bytes *page, const distill_run *run)
{
    double x[EVALUATE_POSITIONS];
    for (int b = 0; b < EVALUATE_POSITIONS; b++)
        x[b] = (b + 0.5) * (double)run->work.problem.len_q / EVALUATE_POSITIONS;
    const int64_t count = run->work.problem.len_q < EVALUATE_POSITIONS ? 0 : EVALUATE_POSITIONS;
    const chart curves = {
        .description = "Attention KL by the position of the query, before and after training",
        .x_label = "position of the query",
        .log_y = true,
        .x_max = (double)run->work.problem.len_q,
        .series_count = 2,
        .series = {{"before", "before", x, run->before.kl_position, count, false},
                   {"after", "after", x, run->after.kl_position, count, false}},
    };
    bytes_print(page, "<div class=\"card\"><h3>KL by position</h3>");
    chart_lines(page, &curves);
    bytes_print(page,
                "</div></div>\n<h3>KL by head</h3><div class=\"card scroll\"><table><tr><th>head</th><th>learns the "
                "mean of</th><th>before</th><th>after</th><th>times smaller</th></tr>");
    const int64_t heads = run->work.problem.heads_s, group = run->work.problem.heads_t / heads;
    for (int64_t head = 0; head < heads && head < EVALUATE_HEADS_MAX; head++) {
        const double before = run->before.kl_head[head], after = run->after.kl_head[head];
        bytes_print(page,
                    "<tr><td>%" PRId64 "%s</td><td>teacher heads %" PRId64 "..%" PRId64
                    "</td><td>%.3g</td><td>%.3g</td><td>%.0f</td></tr>",
                    head,
                    !run->source->retrieves     ? ""
                    : task_head_retrieves(head) ? ", retrieval"
                                                : ", topic",
                    head * group, (head + 1) * group - 1, before, after, before / after);
    }
    bytes_print(page, "</table></div>");
    page_section_end(page);
}

/* ---- Depths ------------------------------------------------------------------------------------------------- */

static void add_depths(bytes *page, const distill_run *run)
{
    static const char *const names[EVALUATE_DEPTHS] = {"0", "12", "25", "37", "50", "62", "75", "87"};
    double teacher[EVALUATE_DEPTHS], before[EVALUATE_DEPTHS], after[EVALUATE_DEPTHS], without[EVALUATE_DEPTHS];
    for (int d = 0; d < EVALUATE_DEPTHS; d++) {
        teacher[d] = evaluate_hit_rate_t(&run->after.depths[d]);
        before[d] = evaluate_hit_rate_s(&run->before.depths[d]);
        after[d] = evaluate_hit_rate_s(&run->after.depths[d]);
        without[d] = evaluate_hit_rate_s(&run->without.depths[d]);
    }
    const chart bars = {
        .description = "Share of references that find their definition, by depth of the definition in the context",
        .x_label = "depth of the definition, % of the context from",
        .series_count = run->request->settings.unguided ? 4 : 3,
        .series = {{"teacher", "teacher", NULL, teacher, 0, false},
                   {"before", "before", NULL, before, 0, false},
                   {"after", "after", NULL, after, 0, false},
                   {"without guidance", "without", NULL, without, 0, false}},
    };
    page_section_begin(
        page, "Does it use the far end of its context?",
        "A reference asks for a definition somewhere before it. It is found when the definition gets more "
        "than half of the attention of a retrieval head, among look-alikes all over the context.");
    if (run->request->settings.unguided)
        bytes_print(page,
                    "<p class=\"lead\">The student without guidance began with the same weights and took the same "
                    "steps on the "
                    "same sequences, with %" PRId64
                    " queries of each. It was taught by what attention returns, not by where it "
                    "looks.</p>",
                    run->request->settings.unguided);
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
    attention_map before, after, without; /* `without` is empty where there was no such student */
} report_maps;

/* The map of a student on the first held-out sequence. */
static skl_status map_student(attention_map *map, distill_run *run, const layer *student)
{
    const sequence_source *const source = &run->source->sequences;
    const sequence text = source->at(source->state, SPLIT_HELD_OUT, 0);
    lesson_project_teacher(&run->work, run->source->teacher, &text);
    lesson_project_student(&run->work, student, &text);
    const skl_inputs inputs = lesson_inputs(&run->work);
    skl_problem problem = run->work.problem;
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
             "where the KL came from, before");
    if (maps->without.s)
        page_map(page, PALETTE_SHARE, maps->without.s + at, after->rows, after->columns, top, "without guidance");
    else
        page_map(page, PALETTE_SIGNED, after->kl + at, after->rows, after->columns, kl_top,
                 "and after, on the same scale");
    bytes_print(page, "</div>\n");
}

static int compute_maps(report_maps *maps, distill_run *run)
{
    skl_status status = map_student(&maps->before, run, &run->source->first_student);
    if (status == SKL_OK)
        status = map_student(&maps->after, run, &run->guided.student.weights);
    if (status == SKL_OK && run->request->settings.unguided)
        status = map_student(&maps->without, run, &run->alone.student.weights);
    return status == SKL_OK ? CLI_OK : cli_fail_status(status);
}

static void add_maps(bytes *page, const report_maps *maps)
{
    page_section_begin(
        page, "Where they look",
        "Attention on one held-out sequence, pooled by streaming: queries from top to bottom, keys from left "
        "to right, 64 buckets each. Brighter is more attention, on one scale a head, its square root, cut off where "
        "one cell of the teacher in a hundred is brighter. In the KL, orange is what "
        "the student misses and blue what it gives too much.");
    for (int64_t head = 0; head < maps->after.heads && head < MAP_HEADS_MAX; head++)
        add_head_maps(page, maps, head);
    page_section_end(page);
}

/* ---- Costs -------------------------------------------------------------------------------------------------- */

static void add_costs(bytes *page, const distill_run *run)
{
    const skl_inputs inputs = lesson_inputs(&run->work);
    const double matrices = workload_of(&run->work.problem, &inputs).materialised_size;
    page_section_begin(
        page, "Beside materialising",
        "Attention KL is usually computed from whole matrices. Their memory follows from the shapes: P of "
        "every teacher head, S and its gradient of every student head, in f32.");
    bytes_print(
        page,
        "<div class=\"pair\"><div class=\"card scroll\"><h3>Memory</h3><table><tr><th>context</th><th>matrices</th>"
        "<th>this library</th></tr>");
    for (int64_t factor = 1; factor <= 64; factor *= 4) {
        bytes_print(page, "<tr><td>%" PRId64 "</td><td>%s</td><td>%s</td></tr>", run->work.problem.len_q * factor,
                    cli_bytes_text((double)(factor * factor) * matrices).text,
                    cli_bytes_text((double)run->work.workspace_size).text);
    }
    bytes_print(
        page,
        "</table><p class=\"lead\"><small>The workspace does not grow with the context. The whole process, data "
        "and weights included, peaked at %s.</small></p></div><div class=\"card scroll\"><h3>Time</h3>",
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
    for (size_t c = 0; c < distill_count_of_counts; c++) {
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
    page_section_begin(page, "To reproduce it",
                       "The same command on the same machine gives the same weights, bit for bit.");
    add_command(page, settings);
    bytes_print(page, "<div class=\"card\"><table class=\"plain\">");
    for (size_t c = 0; c < distill_count_of_counts; c++) {
        snprintf(text, sizeof text, "%" PRId64,
                 *(const int64_t *)((const char *)settings + distill_counts[c].offset));
        add_setting(page, distill_counts[c].name, text);
    }
    snprintf(text, sizeof text, "%g, warm-up over 5 %% of the steps, then a cosine", (double)settings->rate);
    add_setting(page, "rate", text);
    add_setting(page, "direction", direction_name(settings->direction));
    if (settings->teacher_path) {
        add_setting(page, "teacher", settings->teacher_path);
        add_setting(page, "student", settings->student_path);
    }
    snprintf(text, sizeof text, "%" PRId64 " of %" PRId64, run->guided.student.step, settings->steps);
    add_setting(page, "steps done", text);
    add_setting(page, "kernel", skl_plan_kernel(run->work.plan));
    machine_cpu_model(text, sizeof text);
    add_setting(page, "CPU", text);
    snprintf(text, sizeof text, "%d", run->work.threads);
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
    bytes_print(page, "<h1>A student learns where to look</h1><p class=\"lead\">");
    bytes_print(page,
                "%" PRId64 " student heads of size %" PRId64 " were taught the attention of %" PRId64
                " teacher heads of size %" PRId64 " at a context of %" PRId64
                " tokens. Only W_q and W_k were trained, on KL(%s), computed by streaming: no N&nbsp;&times;&nbsp;N "
                "matrix was ever stored.",
                s->heads_s, s->dim_s, s->heads_t, s->dim_t, s->context,
                s->direction == SKL_KL_FORWARD ? "teacher&nbsp;||&nbsp;student" : "student&nbsp;||&nbsp;teacher");
    if (run->guided.student.step < s->steps)
        bytes_print(page, " <b>The run was stopped at step %" PRId64 " of %" PRId64 ".</b>", run->guided.student.step,
                    s->steps);
    bytes_print(page, "</p>");
}

static void fill_page(bytes *page, const distill_run *run, const report_maps *maps)
{
    page_begin(page, "StreamKL: a student learns where to look");
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

int distill_report_write(distill_run *run)
{
    report_maps maps = {.before = {0}};
    bytes page = {0};
    int exit_code = compute_maps(&maps, run);
    run->peak = resident_peak(); /* before the baseline, whose matrices are not ours */
    if (exit_code == CLI_OK) {
        fill_page(&page, run, &maps);
        exit_code = file_write(distill_path_of(run->request, "report.html").text, &page);
    }
    attention_map_free(&maps.before);
    attention_map_free(&maps.after);
    attention_map_free(&maps.without);
    bytes_free(&page);
    return exit_code;
}
