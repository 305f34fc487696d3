/* report.html: the result of a run on one self-contained page. */
#include "device/device.h"
#include "cli/common/cli.h"
#include "cli/distill/distill.h"
#include "cli/distill/document.h"
#include "cli/distill/views.h"
#include "cli/common/options.h"
#include "cli/common/workload.h"
#include "cli/io/file_write.h"
#include "view/page.h"
#include "view/picture.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

enum { MAP_HEADS_MAX = 8 };

/* ---- Key figures -------------------------------------------------------------------------------------------- */

static json_t *figures(const distill_run *run)
{
    const skl_inputs inputs = attention_pair_inputs(&run->pair);
    const double materialized = workload_of(&run->pair.problem, &inputs).materialized_size;
    json_t *const all = json_array();
    cli_json_append(
        all, document_figure(json_sprintf("%.3g → %.2g", run->before.kl, run->after.kl), "held-out attention KL",
                             json_sprintf("%.0f times smaller; mean over rows and heads", distill_kl_ratio(run))));
    cli_json_append(
        all, document_figure(json_sprintf("%.1f %%", 100 * evaluate_hit_rate_s(&run->after.all)), "definitions found",
                             json_sprintf("teacher %.0f %%, before training %.0f %%; %" PRId64 " references",
                                          100 * evaluate_hit_rate_t(&run->after.all),
                                          100 * evaluate_hit_rate_s(&run->before.all), run->after.all.references)));
    cli_json_append(all,
                    document_figure(json_string(cli_bytes_text((double)run->peak).text), "peak memory of the process",
                                    json_sprintf("materialized, the matrices of a step would take %s",
                                                 cli_bytes_text(materialized).text)));
    cli_json_append(all,
                    document_figure(json_sprintf("%.0f s", run->history.seconds), "of training",
                                    json_sprintf("%" PRId64 " steps of %" PRId64 " tokens", run->student.step,
                                                 run->request->settings.batch * run->request->settings.context)));
    return all;
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
            sum += (double)history->loss[step];
        x[p] = (double)begin;
        y[p] = sum / (double)(end - begin);
    }
    json_t *const held_out_x = json_array(), *const held_out_y = json_array();
    for (int64_t e = 0; e < history->evaluation_count; e++) {
        cli_json_append(held_out_x, json_integer((json_int_t)history->evaluation_step[e]));
        cli_json_append(held_out_y, cli_json_number((double)history->evaluation_kl[e]));
    }
    json_t *const held_out = json_pack("{ss ss so so sb}", "name", "held out", "style", "after", "x", held_out_x, "y",
                                       held_out_y, "dots", 1);
    return document_lines("KL by step", "step", (double)run->request->settings.steps,
                          json_pack("[oo]", document_series("training", "loss", x, y, points), held_out));
}

static json_t *kl_by_position(const distill_run *run)
{
    double x[EVALUATE_POSITIONS];
    for (int b = 0; b < EVALUATE_POSITIONS; b++)
        x[b] = (b + 0.5) * (double)run->pair.problem.len_q / EVALUATE_POSITIONS;
    const int64_t count = run->pair.problem.len_q < EVALUATE_POSITIONS ? 0 : EVALUATE_POSITIONS;
    return document_lines("KL by position", "position of the query", (double)run->pair.problem.len_q,
                          json_pack("[oo]", document_series("before", "before", x, run->before.kl_position, count),
                                    document_series("after", "after", x, run->after.kl_position, count)));
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
    static const char *const header[] = {"head", "learns from", "before", "after", "times smaller", NULL};
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
    return document_table("KL by head", header, rows, json_null());
}

static json_t *training_section(const distill_run *run)
{
    return document_section(
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
    const document_shares shares = {teacher, before, after, 1};
    return document_bars("Definitions found, by depth", "depth of the definition, % of the context", groups, &shares);
}

static json_t *kl_by_depth(const distill_run *run)
{
    static const char *const header[] = {"depth", "references", "KL before", "KL after", NULL};
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
    return document_table("KL of the references", header, rows, json_null());
}

static json_t *depths_section(const distill_run *run)
{
    return document_section("Does the student use the whole context?",
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
    const document_shares shares = {teacher->share, before->share, after->share, top};
    return document_bars("Attention by distance", "tokens between query and key, from", groups, &shares);
}

static json_t *entropy_by_head(const distill_run *run, const distill_views *views)
{
    static const char *const header[] = {"head", "teacher", "before", "after", NULL};
    json_t *const rows = json_array();
    for (int64_t head = 0; head < run->pair.problem.heads_s && head < EVALUATE_HEADS_MAX; head++)
        cli_json_append(rows, json_pack("[oooo]", json_sprintf("%" PRId64, head),
                                        cli_json_number(views->teacher.entropy[head]),
                                        cli_json_number(views->before.entropy[head]),
                                        cli_json_number(views->after.entropy[head])));
    return document_table("Entropy by head, nats", header, rows,
                          json_string("Mean over rows; that of the teacher also over the heads of a group."));
}

static json_t *distances_section(const distill_run *run, const distill_views *views)
{
    return document_section(
        "How far do they look?",
        "The attention of teacher and student to keys on one held-out sequence, by how many tokens "
        "they are apart: mean over heads and rows.",
        json_pack("[oo]", attention_by_distance(views), entropy_by_head(run, views)));
}

/* ---- Maps --------------------------------------------------------------------------------------------------- */

static json_t *drawn_map(const char *caption, const char *palette, const attention_map *map, const double *values,
                         double top)
{
    return json_pack("{ss ss sf so}", "caption", caption, "palette", palette, "top", top, "values",
                     document_matrix(values, map->rows, map->columns));
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
    return document_section(
        "Attention maps",
        "Attention on one held-out sequence, pooled into buckets: queries from top to bottom, keys from left to "
        "right, numbered by token. Brightness is the square root of the attention, with one scale per head, clipped "
        "at the 99th percentile of the teacher. In the KL, orange marks attention that the student misses, blue "
        "attention that it gives in excess.",
        blocks);
}

/* ---- Settings ----------------------------------------------------------------------------------------------- */

/* The settings that are counts, by the name of their option. */
static const struct {
    const char *name;
    size_t offset;
} counts[] = {
    {"context", offsetof(distill_settings, context)}, {"needles", offsetof(distill_settings, needles)},
    {"hidden", offsetof(distill_settings, hidden)},   {"heads-t", offsetof(distill_settings, heads_t)},
    {"dim-t", offsetof(distill_settings, dim_t)},     {"heads-s", offsetof(distill_settings, heads_s)},
    {"dim-s", offsetof(distill_settings, dim_s)},     {"steps", offsetof(distill_settings, steps)},
    {"batch", offsetof(distill_settings, batch)},     {"held-out", offsetof(distill_settings, held_out)},
    {"seed", offsetof(distill_settings, seed)},
};
enum { COUNTS = sizeof counts / sizeof counts[0] };

static int64_t count_of(const distill_settings *settings, size_t index)
{
    return *(const int64_t *)((const char *)settings + counts[index].offset);
}

static json_t *command_block(const distill_settings *settings)
{
    char *text = NULL;
    size_t size;
    FILE *const stream = open_memstream(&text, &size);
    if (stream == NULL)
        return NULL;
    fprintf(stream, "streamkl distill");
    for (size_t c = 0; c < COUNTS; c++)
        fprintf(stream, " --%s %" PRId64, counts[c].name, count_of(settings, c));
    fprintf(stream, " --rate %g --direction %s", (double)settings->rate, direction_name(settings->direction));
    const bool complete = !ferror(stream);
    json_t *const block =
        json_pack("{ss so}", "kind", "command", "text", fclose(stream) == 0 && complete ? cli_json_path(text) : NULL);
    free(text);
    return block;
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
    add_setting(rows, "kernel", json_string(skl_plan_kernel(run->pair.plan)));
    machine_cpu_model(text, sizeof text);
    add_setting(rows, "CPU", cli_json_path(text));
    add_setting(rows, "threads", json_sprintf("%d", run->pair.threads));
    machine_date(text, sizeof text);
    add_setting(rows, "date", cli_json_path(text));
    add_setting(rows, "library", json_string(skl_build_info()));
    json_t *const table = json_pack("{ss so sb}", "kind", "table", "rows", rows, "plain", 1);
    return document_section("Reproducing this run",
                            "The same command on the same machine gives bitwise equal weights.",
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
    const int64_t peak_of_training = resident_peak(); /* statistics begin a new measurement */
    distill_views_compute(&views, run);
    run->peak = resident_peak() > peak_of_training ? resident_peak() : peak_of_training;
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
