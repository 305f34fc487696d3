/* report.html: the result of a run on one self-contained page. */
#include "cli/common/cli.h"
#include "cli/distill/distill.h"
#include "cli/io/file_write.h"
#include "device/device.h"
#include "view/view.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

enum { MAP_HEADS_MAX = 8 };

/* ---- Parts of the document, as JSON: view/report.html says what they consist of ------------------------------ */

static json_t *numbers_of(const double *values, int64_t count)
{
    return cli_json_array(values, sizeof *values, 1, &count);
}

/* A curve of a chart. `style` is a class of the page: teacher, before, after or loss. */
static json_t *curve(const char *name, const char *style, bool dots, const double *x, const double *y, int64_t count)
{
    return json_pack("{ss ss sb so so}", "name", name, "style", style, "dots", dots, "x", numbers_of(x, count), "y",
                     numbers_of(y, count));
}

/* A chart of curves. The axis of y is logarithmic. */
static json_t *lines(const char *title, const char *x_label, double x_max, json_t *first, json_t *second)
{
    return json_pack("{ss ss ss sf sb s[oo]}", "kind", "lines", "title", title, "x_label", x_label, "x_max", x_max,
                     "log_y", 1, "series", first, second);
}

/* Shares, 0..1, of teacher and student before and after training: a bar of each for every group. The axis ends at the
 * next step above `top`. */
static json_t *bars(const char *title, const char *x_label, double top, json_t *groups, const double *teacher,
                    const double *before, const double *after)
{
    const char *const names[] = {"teacher", "before", "after"};
    const double *const values[] = {teacher, before, after};
    json_t *const series = json_array();
    for (int s = 0; s < 3; s++)
        cli_json_append(series, json_pack("{ss ss so}", "name", names[s], "style", names[s], "y",
                                          numbers_of(values[s], (int64_t)json_array_size(groups))));
    return json_pack("{ss ss ss sf so so}", "kind", "bars", "title", title, "x_label", x_label, "top", top, "groups",
                     groups, "series", series);
}

static json_t *key_figure(json_t *value, const char *label, json_t *detail)
{
    return json_pack("{so ss so}", "value", value, "label", label, "detail", detail);
}

static json_t *section(const char *title, const char *lead, json_t *blocks)
{
    return json_pack("{ss ss so}", "title", title, "lead", lead, "blocks", blocks);
}

/* ---- Key figures -------------------------------------------------------------------------------------------- */

static json_t *figures(const distill_run *run)
{
    const skl_inputs inputs = attention_pair_inputs(&run->pair);
    const double materialized = workload_of(&run->pair.problem, &inputs).materialized_size;
    return json_pack(
        "[oooo]",
        key_figure(json_sprintf("%.3g → %.2g", run->before.kl, run->after.kl), "held-out attention KL",
                   json_sprintf("%.0f times smaller; mean over rows and heads", run->before.kl / run->after.kl)),
        key_figure(json_sprintf("%.1f %%", 100 * evaluate_hit_rate_s(&run->after.all)), "definitions found",
                   json_sprintf("teacher %.0f %%, before training %.0f %%; %" PRId64 " references",
                                100 * evaluate_hit_rate_t(&run->after.all),
                                100 * evaluate_hit_rate_s(&run->before.all), run->after.all.references)),
        key_figure(
            json_string(cli_bytes_text((double)run->peak).text), "peak memory of the process",
            json_sprintf("materialized, the matrices of a step would take %s", cli_bytes_text(materialized).text)),
        key_figure(json_sprintf("%.0f s", run->history.seconds), "of training",
                   json_sprintf("%" PRId64 " steps of %" PRId64 " tokens", run->student.step,
                                run->request->settings.batch * run->request->settings.context)));
}

/* ---- Curves ------------------------------------------------------------------------------------------------- */

enum { CURVE_POINTS = 300 };

static json_t *kl_by_step(const distill_run *run)
{
    const distill_history *const history = &run->history;
    const int64_t steps = run->student.step, points = steps < CURVE_POINTS ? steps : CURVE_POINTS;
    double x[CURVE_POINTS], y[CURVE_POINTS];
    for (int64_t p = 0; p < points; p++) {
        const int64_t begin = steps * p / points, end = steps * (p + 1) / points;
        double sum = 0;
        for (int64_t step = begin; step < end; step++)
            sum += history->loss[step];
        x[p] = (double)begin;
        y[p] = sum / (double)(end - begin);
    }
    return lines("KL by step", "step", (double)run->request->settings.steps,
                 curve("training", "loss", false, x, y, points),
                 curve("held out", "after", true, history->evaluation_step, history->evaluation_kl,
                       history->evaluation_count));
}

static json_t *kl_by_position(const distill_run *run)
{
    double x[EVALUATE_POSITIONS];
    for (int b = 0; b < EVALUATE_POSITIONS; b++)
        x[b] = (b + 0.5) * (double)run->pair.problem.len_q / EVALUATE_POSITIONS;
    const int64_t count = run->pair.problem.len_q < EVALUATE_POSITIONS ? 0 : EVALUATE_POSITIONS;
    return lines("KL by position", "position of the query", (double)run->pair.problem.len_q,
                 curve("before", "before", false, x, run->before.kl_position, count),
                 curve("after", "after", false, x, run->after.kl_position, count));
}

typedef struct heads_text {
    char text[64];
} heads_text;

/* The teacher heads that a student head learns from, in words. */
static heads_text teacher_heads(const skl_problem *problem, int64_t head)
{
    const int64_t group_size = problem->heads_t / problem->heads_s;
    heads_text heads;
    if (group_size == 1)
        snprintf(heads.text, sizeof heads.text, "teacher head %" PRId64, head);
    else
        snprintf(heads.text, sizeof heads.text, "the mean of teacher heads %" PRId64 "..%" PRId64, head * group_size,
                 (head + 1) * group_size - 1);
    return heads;
}

static json_t *kl_by_head(const distill_run *run)
{
    const int64_t heads = run->pair.problem.heads_s;
    json_t *const rows = json_array();
    for (int64_t head = 0; head < heads && head < EVALUATE_HEADS_MAX; head++) {
        const double before = run->before.kl_head[head], after = run->after.kl_head[head];
        const char *const kind = task_head_retrieves(head) ? "retrieval" : "topic";
        cli_json_append(rows,
                        json_pack("[oooo o]", json_sprintf("%" PRId64 ", %s", head, kind),
                                  json_string(teacher_heads(&run->pair.problem, head).text), cli_json_number(before),
                                  cli_json_number(after), json_sprintf("%.0f", before / after)));
    }
    return json_pack("{ss ss s[sssss] so}", "kind", "table", "title", "KL by head", "header", "head", "learns from",
                     "before", "after", "times smaller", "rows", rows);
}

static json_t *training_section(const distill_run *run)
{
    return section(
        "Training",
        "Attention KL in nats, mean over rows and heads. The student is never trained on held-out sequences; each "
        "sequence has different definitions.",
        json_pack("[ooo]", kl_by_step(run), kl_by_position(run), kl_by_head(run)));
}

/* ---- Depths ------------------------------------------------------------------------------------------------- */

static json_t *found_by_depth(const distill_run *run)
{
    double teacher[EVALUATE_DEPTHS], before[EVALUATE_DEPTHS], after[EVALUATE_DEPTHS];
    json_t *const groups = json_array();
    for (int d = 0; d < EVALUATE_DEPTHS; d++) {
        teacher[d] = evaluate_hit_rate_t(&run->after.depths[d]);
        before[d] = evaluate_hit_rate_s(&run->before.depths[d]);
        after[d] = evaluate_hit_rate_s(&run->after.depths[d]);
        cli_json_append(groups, json_sprintf("%d", 100 * d / EVALUATE_DEPTHS));
    }
    return bars("Definitions found, by depth", "depth of the definition, % of the context", 1, groups, teacher,
                before, after);
}

static json_t *kl_by_depth(const distill_run *run)
{
    json_t *const rows = json_array();
    for (int d = 0; d < EVALUATE_DEPTHS; d++) {
        const depth_score *const first = &run->before.depths[d], *const last = &run->after.depths[d];
        if (last->references)
            cli_json_append(
                rows, json_pack("[oIoo]",
                                json_sprintf("%d..%d %%", 100 * d / EVALUATE_DEPTHS, 100 * (d + 1) / EVALUATE_DEPTHS),
                                (json_int_t)last->references, cli_json_number(first->kl / (double)first->references),
                                cli_json_number(last->kl / (double)last->references)));
    }
    return json_pack("{ss ss s[ssss] so}", "kind", "table", "title", "KL of the references", "header", "depth",
                     "references", "KL before", "KL after", "rows", rows);
}

static json_t *depths_section(const distill_run *run)
{
    return section("Does the student use the whole context?",
                   "A reference needs one definition before it. It counts as found if a retrieval head "
                   "gives the definition more "
                   "than half of its attention, despite distractors all over the context.",
                   json_pack("[oo]", found_by_depth(run), kl_by_depth(run)));
}

/* ---- Distances ---------------------------------------------------------------------------------------------- */

static json_t *attention_by_distance(const distill_views *views)
{
    const look *const teacher = &views->teacher, *const before = &views->before, *const after = &views->after;
    const int32_t count = teacher->buckets;
    json_t *const groups = json_array();
    double top = 0;
    for (int32_t n = 0; n < count; n++) {
        const int64_t begin = n == 0 ? 0 : (int64_t)1 << (n - 1);
        cli_json_append(
            groups, json_sprintf(begin < 1024 ? "%" PRId64 : "%" PRId64 "K", begin < 1024 ? begin : begin / 1024));
        top = fmax(top, fmax(teacher->share[n], fmax(before->share[n], after->share[n])));
    }
    return bars("Attention by distance", "tokens between query and key, from", top, groups, teacher->share,
                before->share, after->share);
}

static json_t *entropy_by_head(const distill_run *run, const distill_views *views)
{
    json_t *const rows = json_array();
    for (int64_t head = 0; head < run->pair.problem.heads_s && head < EVALUATE_HEADS_MAX; head++)
        cli_json_append(rows, json_pack("[oooo]", json_sprintf("%" PRId64, head),
                                        cli_json_number(views->teacher.entropy[head]),
                                        cli_json_number(views->before.entropy[head]),
                                        cli_json_number(views->after.entropy[head])));
    return json_pack("{ss ss s[ssss] so ss}", "kind", "table", "title", "Entropy by head, nats", "header", "head",
                     "teacher", "before", "after", "rows", rows, "note",
                     "Mean over rows; that of the teacher also over the heads of a group.");
}

static json_t *distances_section(const distill_run *run, const distill_views *views)
{
    return section("How far do they look?",
                   "The attention of teacher and student to keys on one held-out sequence, by how many tokens "
                   "they are apart: mean over heads and rows.",
                   json_pack("[oo]", attention_by_distance(views), entropy_by_head(run, views)));
}

/* ---- Maps --------------------------------------------------------------------------------------------------- */

static json_t *drawn_map(const char *caption, const char *palette, const attention_map *map, const double *values,
                         double top)
{
    return json_pack("{ss ss sf so}", "caption", caption, "palette", palette, "top", top, "values",
                     cli_json_array(values, sizeof *values, 2, (const int64_t[]){map->rows, map->columns}));
}

static json_t *head_maps(const distill_run *run, const distill_views *views, int64_t head)
{
    const attention_map *const before = &views->map_before, *const after = &views->map_after;
    const skl_problem *const p = &run->pair.problem;
    const int64_t cells = after->rows * after->columns, at = head * cells;
    const double top = picture_bright(after->p + at, cells), kl_top = picture_bright(before->kl + at, cells);
    json_t *const drawn =
        json_pack("[ooooo]", drawn_map("teacher", "share", after, after->p + at, top),
                  drawn_map("student before", "share", before, before->s + at, top),
                  drawn_map("student after", "share", after, after->s + at, top),
                  drawn_map("contributions to the KL, before", "signed", before, before->kl + at, kl_top),
                  drawn_map("contributions to the KL, after", "signed", after, after->kl + at, kl_top));
    return json_pack("{ss so so s[II] so}", "kind", "maps", "title", json_sprintf("Head %" PRId64, head), "note",
                     json_sprintf("learns from %s", teacher_heads(p, head).text), "tokens", (json_int_t)p->len_q,
                     (json_int_t)p->len_k, "maps", drawn);
}

static json_t *maps_section(const distill_run *run, const distill_views *views)
{
    json_t *const blocks = json_array();
    for (int64_t head = 0; head < views->map_after.heads && head < MAP_HEADS_MAX; head++)
        cli_json_append(blocks, head_maps(run, views, head));
    return section(
        "Attention maps",
        "Attention on one held-out sequence, pooled into buckets: queries from top to bottom, keys from left to "
        "right, numbered by token. Brightness is the square root of the attention, with one scale per head, clipped "
        "at the 99th percentile of the teacher. In the KL, orange marks attention that the student misses, blue "
        "attention that it gives in excess.",
        blocks);
}

/* ---- Settings ----------------------------------------------------------------------------------------------- */

/* Adds the options whose values are integers to a command line. */
static void add_counts(char *line, size_t size, const cli_option *options, const distill_settings *settings)
{
    for (; options->name; options++)
        if (options->parse == parse_count || options->parse == parse_int64)
            snprintf(line + strlen(line), size - strlen(line), " --%s %" PRId64, options->name,
                     *(const int64_t *)((const char *)settings + options->offset));
}

static json_t *command_block(const distill_settings *settings)
{
    char counts[640] = "";
    add_counts(counts, sizeof counts, distill_task_options, settings);
    add_counts(counts, sizeof counts, distill_training_options, settings);
    return json_pack("{ss so}", "kind", "command", "text",
                     json_sprintf("streamkl distill%s --rate %g --direction %s", counts, (double)settings->rate,
                                  direction_names[settings->direction]));
}

static void add_setting(json_t *rows, const char *name, json_t *value)
{
    cli_json_append(rows, json_pack("[so]", name, value));
}

static json_t *settings_section(const distill_run *run)
{
    const distill_settings *const settings = &run->request->settings;
    char text[160];
    json_t *const rows = json_array();
    add_setting(rows, "steps done", json_sprintf("%" PRId64 " of %" PRId64, run->student.step, settings->steps));
    add_setting(rows, "kernel", json_string(skl_plan_kernel(run->pair.runner.plan)));
    machine_cpu_model(text, sizeof text);
    add_setting(rows, "CPU", cli_json_path(text));
    add_setting(rows, "threads", json_sprintf("%d", run->pair.threads));
    machine_date(text, sizeof text);
    add_setting(rows, "date", cli_json_path(text));
    add_setting(rows, "library", json_string(skl_build_info()));
    json_t *const table = json_pack("{ss so sb}", "kind", "table", "rows", rows, "plain", 1);
    return section("Reproducing this run", "The same command on the same machine gives bitwise equal weights.",
                   json_pack("[oo]", command_block(settings), table));
}

/* ---- The page ----------------------------------------------------------------------------------------------- */

static json_t *lead(const distill_run *run)
{
    const distill_settings *const s = &run->request->settings;
    char stopped[96] = "";
    if (run->student.step < s->steps)
        snprintf(stopped, sizeof stopped, " The run was stopped at step %" PRId64 " of %" PRId64 ".",
                 run->student.step, s->steps);
    return json_sprintf(
        "%" PRId64 " student heads of size %" PRId64 " learned the attention of %" PRId64
        " teacher heads of size %" PRId64 " at a context of %" PRId64
        " tokens. W_q and W_k were trained on KL(%s). The KL was streamed: no N × N matrix was stored.%s",
        s->heads_s, s->dim_s, s->heads_t, s->dim_t, s->context, direction_formula(s->direction), stopped);
}

/* One line: what training has changed. */
static json_t *verdict(const distill_run *run)
{
    const double before = run->before.kl, after = run->after.kl;
    if (!(after < before))
        return json_sprintf("The attention KL did not fall: %.3g nats before training, %.3g after.", before, after);
    return json_sprintf(
        "The student finds %.0f %% of the definitions (teacher %.0f %%, before training %.0f %%): its "
        "attention KL fell from %.3g to %.3g nats.",
        100 * evaluate_hit_rate_s(&run->after.all), 100 * evaluate_hit_rate_t(&run->after.all),
        100 * evaluate_hit_rate_s(&run->before.all), before, after);
}

static json_t *document_of(const distill_run *run, const distill_views *views)
{
    json_t *const sections = json_array();
    cli_json_append(sections, depths_section(run));
    cli_json_append(sections, distances_section(run, views));
    cli_json_append(sections, maps_section(run, views));
    cli_json_append(sections, training_section(run));
    cli_json_append(sections, settings_section(run));
    return json_pack("{ss so so so so so}", "title", "Attention distillation", "verdict", verdict(run), "lead",
                     lead(run), "figures", figures(run), "sections", sections, "footer",
                     json_sprintf("StreamKL %s", skl_version()));
}

void distill_report_write(distill_run *run)
{
    enum { DIGITS = 5 }; /* a report is looked at */
    distill_views views;
    distill_views_compute(&views, run);
    run->peak = resident_peak();
    json_t *const document = document_of(run, &views);
    char *const json = document ? json_dumps(document, JSON_COMPACT | JSON_REAL_PRECISION(DIGITS)) : NULL;
    if (json == NULL)
        cli_fail(CLI_NO_MEMORY, "out of memory for the report");
    FILE *const page = file_write_begin();
    page_print(page, json);
    file_write_end(page, distill_path_of(run->request, "report.html").text);
    free(json);
    json_decref(document);
    distill_views_free(&views);
}
