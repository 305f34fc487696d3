/* streamkl map: pooled attention maps of the tensors in files. */
#include "cli/common/cli.h"
#include "cli/kl/kl.h"
#include "device/device.h"
#include "cli/term/term.h"
#include "cli/map/attention_map.h"
#include "view/view.h"

#include <inttypes.h>
#include <limits.h>
#include <stdlib.h>

static const char doc[] =
    "Attention maps of a teacher (q_t, k_t) and a student (q_s, k_s), and a map of the contributions to their "
    "KL, over buckets of queries and keys, streamed at any context length. Files and tensors are those of "
    "streamkl kl."
    "\vA row of P or S is the mean attention of the queries of a bucket to each bucket of keys: it sums to 1. A "
    "row of KL sums to the mean KL of its queries; a cell is negative if the student attends more than the "
    "teacher. Brightness is the square root of the value, so that faint keys stay visible next to bright ones; P "
    "and S share one scale. Queries that attend to no key are excluded.\n"
    "\n"
    "Examples:\n"
    "  streamkl map pair.safetensors --causal\n"
    "  streamkl map pair.safetensors --causal --buckets 128 --png map\n"
    "  streamkl map pair.safetensors --causal --head all --out maps.safetensors\n"
    "  streamkl map pair.safetensors --causal --device cuda --json";

enum { HEAD_MEAN = -1, HEAD_ALL = -2 };

typedef struct map_request {
    kl_request input;
    int64_t buckets;
    int64_t head; /* of the student, or HEAD_MEAN or HEAD_ALL */
    const char *png_prefix, *out_path;
    int32_t json;
} map_request;

static const char *parse_head(const char *text, void *value)
{
    int64_t *const head = value;
    *head = strcmp(text, "all") == 0 ? HEAD_ALL : HEAD_MEAN;
    if (*head == HEAD_ALL || strcmp(text, "mean") == 0)
        return NULL;
    return parse_int64(text, value) || *head < 0 ? "mean, all or the number of a head" : NULL;
}

static const cli_option map_options[] = {
    {"buckets", "N", parse_count, offsetof(map_request, buckets),
     "Number of query buckets and of key buckets, 1 to 4096", .initial = 64, .least = 1, .most = 4096},
    {"head", "N|mean|all", parse_head, offsetof(map_request, head),
     "A student head, the mean of all heads, or all heads; default mean"},
    {"png", "PREFIX", parse_string, offsetof(map_request, png_prefix),
     "Write PREFIX-p.png, PREFIX-s.png and PREFIX-kl.png; with --head all PREFIX-h0-p.png ..."},
    {"out", "FILE", parse_string, offsetof(map_request, out_path),
     "Write p, s, kl [heads, buckets, buckets] of every head as safetensors"},
    {"json", NULL, parse_flag, offsetof(map_request, json), "Print one JSON object instead of the maps"},
    {0},
};

static const option_group groups[] = {
    {"Map:", map_options, 0},
    {"Input:", kl_pair_options, offsetof(map_request, input)},
    {"Layout and sequences:", kl_sequence_options, offsetof(map_request, input)},
    {"Masks:", mask_options, offsetof(map_request, input.problem)},
    {"Scales and direction:", logit_options, offsetof(map_request, input.problem)},
    {"Engine:", engine_options, offsetof(map_request, input.options)},
    {0},
};

/* ---- Output ------------------------------------------------------------------------------------------------- */

typedef struct map_picture {
    const char *name, *title;
    palette_kind palette;
    size_t offset; /* of its values in an attention_map */
} map_picture;

static const map_picture pictures[] = {
    {"p", "P, the teacher", PALETTE_SHARE, offsetof(attention_map, p)},
    {"s", "S, the student", PALETTE_SHARE, offsetof(attention_map, s)},
    {"kl", "contributions to the KL", PALETTE_SIGNED, offsetof(attention_map, kl)},
};
enum { PICTURE_COUNT = sizeof pictures / sizeof pictures[0] };

static const double *values_of(const attention_map *map, const map_picture *picture)
{
    return *(double *const *)((const char *)map + picture->offset);
}

static int64_t cells_of(const attention_map *map)
{
    return map->rows * map->columns;
}

/* The scale of a picture, as in the report of `streamkl distill`: a few bright cells do not darken the rest. P and S
 * share one, so that equal colors mean equal attention. */
static double top_of(const attention_map *shown, const map_picture *picture)
{
    const double *const values = picture->palette == PALETTE_SIGNED ? values_of(shown, picture) : shown->p;
    return picture_bright(values, shown->heads * cells_of(shown));
}

/* The requested heads, a view of `map`. Their mean replaces the first head of `map`. */
static attention_map choose_heads(const attention_map *map, int64_t head)
{
    attention_map shown = *map;
    if (head == HEAD_ALL)
        return shown;
    if (head >= map->heads)
        cli_fail(CLI_BAD_INPUT, "--head=%" PRId64 ": must be 0..%" PRId64 ", mean or all", head, map->heads - 1);
    double **const each[] = {&shown.p, &shown.s, &shown.kl};
    for (int p = 0; p < PICTURE_COUNT; p++) {
        if (head == HEAD_MEAN)
            attention_map_mean(map, *each[p]);
        else
            *each[p] += head * cells_of(map);
    }
    shown.heads = 1;
    return shown;
}

static void print_head(const map_request *request, const attention_map *map, int64_t shown_head)
{
    if (request->head == HEAD_MEAN && map->heads > 1)
        printf(", mean of %" PRId64 " heads", map->heads);
    else
        printf(", head %" PRId64, request->head >= 0 ? request->head : shown_head);
}

static void print_maps(const map_request *request, const attention_map *map, const attention_map *shown,
                       const skl_problem *problem)
{
    const term_style style = term_style_for(stdout);
    printf("%sAttention map%s  %" PRId64 " queries x %" PRId64 " keys in %" PRId64 " x %" PRId64 " buckets%s\n",
           style.bold, style.plain, problem->len_q, problem->len_k, shown->rows, shown->columns,
           problem->batch > 1 ? ", mean over the batch" : "");
    for (int64_t head = 0; head < shown->heads; head++) {
        for (int p = 0; p < PICTURE_COUNT; p++) {
            const double top = top_of(shown, &pictures[p]);
            printf("\n  %s%s%s", style.bold, pictures[p].title, style.plain);
            print_head(request, map, head);
            printf("; colors up to %.3g\n", top);
            map_print(stdout, pictures[p].palette, values_of(shown, &pictures[p]) + head * cells_of(shown),
                      shown->rows, shown->columns, top);
        }
    }
}

static json_t *json_cube(const attention_map *map, const double *values)
{
    return cli_json_array(values, sizeof *values, 3, (const int64_t[]){map->heads, map->rows, map->columns});
}

static void print_json(const attention_map *shown, const skl_problem *problem)
{
    cli_print_json(json_pack("{sI sI sI sI so so so}", "peak_bytes", (json_int_t)resident_peak(), "batch",
                             (json_int_t)problem->batch, "len_q", (json_int_t)problem->len_q, "len_k",
                             (json_int_t)problem->len_k, "p", json_cube(shown, shown->p), "s",
                             json_cube(shown, shown->s), "kl", json_cube(shown, shown->kl)));
}

/* ---- Files -------------------------------------------------------------------------------------------------- */

typedef struct png_path {
    char text[PATH_MAX];
} png_path;

static png_path path_of_png(const map_request *request, int64_t head, const map_picture *picture)
{
    png_path path;
    char which[32] = "";
    if (request->head == HEAD_ALL)
        snprintf(which, sizeof which, "h%" PRId64 "-", head);
    snprintf(path.text, sizeof path.text, "%s-%s%s.png", request->png_prefix, which, picture->name);
    return path;
}

static void write_pngs(const map_request *request, const attention_map *shown, const skl_problem *problem)
{
    for (int64_t head = 0; head < shown->heads; head++) {
        for (int p = 0; p < PICTURE_COUNT; p++) {
            const figure drawn = {
                .title = pictures[p].title,
                .palette = pictures[p].palette,
                .values = values_of(shown, &pictures[p]) + head * cells_of(shown),
                .rows = shown->rows,
                .columns = shown->columns,
                .top = top_of(shown, &pictures[p]),
                .len_q = problem->len_q,
                .len_k = problem->len_k,
            };
            const png_path path = path_of_png(request, head, &pictures[p]);
            FILE *const file = file_write_begin();
            if (!figure_png(file, &drawn))
                cli_fail(CLI_NO_MEMORY, "%s: out of memory for its contents", path.text);
            file_write_end(file, path.text);
        }
    }
}

static void write_tensors(const char *path, const attention_map *map)
{
    const int64_t count = map->heads * cells_of(map);
    float *const values = cli_allocate((size_t)count * PICTURE_COUNT * sizeof *values, path);
    output_tensor tensors[PICTURE_COUNT];
    for (int p = 0; p < PICTURE_COUNT; p++) {
        const double *const from = values_of(map, &pictures[p]);
        for (int64_t i = 0; i < count; i++)
            values[p * count + i] = (float)from[i];
        tensors[p] =
            (output_tensor){pictures[p].name, SKL_F32, 3, {map->heads, map->rows, map->columns}, values + p * count};
    }
    file_write_tensors(path, tensors, PICTURE_COUNT, NULL, 0);
    free(values);
}

static void show(const map_request *request, const attention_map *map, const skl_problem *problem)
{
    if (request->png_prefix && cells_of(map) == 0)
        cli_fail(CLI_BAD_INPUT, "--png=%s: no queries or no keys: a picture needs at least one of each",
                 request->png_prefix);
    if (request->out_path)
        write_tensors(request->out_path, map);
    const attention_map shown = choose_heads(map, request->head);
    if (request->png_prefix)
        write_pngs(request, &shown, problem);
    file_write_commit();
    if (request->json)
        print_json(&shown, problem);
    else
        print_maps(request, map, &shown, problem);
}

/* ---- The command -------------------------------------------------------------------------------------------- */

/* The map reads lengths itself, so they are checked before. It shows attention to keys, and a sink is none. */
static void check_inputs(const map_request *request, const kl_inputs *inputs)
{
    if (inputs->problem.sinks)
        cli_fail(CLI_BAD_INPUT,
                 "sink_t, sink_s: streamkl map has no place for sinks; name the files as q_t=FILE k_t=FILE q_s=FILE "
                 "k_s=FILE for a map of the distributions on the keys alone");
    skl_plan *const plan = plan_create(&inputs->problem, &request->input.options);
    cli_check(skl_inputs_check(plan, &inputs->tensors));
    skl_plan_destroy(plan);
}

static void check_outputs(const map_request *request, int64_t heads)
{
    if (request->png_prefix && strlen(request->png_prefix) + sizeof "-h9223372036854775807-kl.png" > PATH_MAX)
        cli_fail(CLI_BAD_INPUT, "--png=%.60s...: must be shorter", request->png_prefix);
    const int64_t shown = request->png_prefix == NULL ? 0 : request->head == HEAD_ALL ? heads : 1;
    const size_t most = (size_t)shown * PICTURE_COUNT + 1;
    output_file *const outputs = cli_allocate_zeros(most, sizeof *outputs, "the names of the pictures");
    png_path *const paths = cli_allocate_zeros(most, sizeof *paths, "the names of the pictures");
    size_t count = 0;
    for (int64_t head = 0; head < shown; head++) {
        for (int p = 0; p < PICTURE_COUNT; p++, count++) {
            paths[count] = path_of_png(request, head, &pictures[p]);
            outputs[count] = (output_file){"--png", paths[count].text};
        }
    }
    if (request->out_path)
        outputs[count++] = (output_file){"--out", request->out_path};
    kl_outputs_check(&request->input, outputs, count);
    free(outputs);
    free(paths);
}

int cmd_map(int argc, char **argv)
{
    static const command_line command = {doc, groups, "FILE..."};
    map_request request = {.head = HEAD_MEAN};
    kl_request_parse(&request.input, &command, argc, argv, &request);
    kl_inputs inputs = {.files = {NULL, 0}};
    kl_inputs_load(&inputs, &request.input);
    check_outputs(&request, inputs.problem.heads_s);
    check_inputs(&request, &inputs);
    term_progress_begin("map");
    attention_map map = attention_map_of(&inputs.problem, &inputs.tensors, request.buckets, &request.input.options);
    term_progress_end();
    kl_files_unchanged(&inputs.files);
    show(&request, &map, &inputs.problem);
    attention_map_free(&map);
    kl_inputs_free(&inputs);
    return CLI_OK;
}
