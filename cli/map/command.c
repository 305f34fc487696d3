/* streamkl map: pooled attention maps of the tensors in files. */
#include "cli/common/cli.h"
#include "cli/kl/kl.h"
#include "cli/map/print.h"
#include "cli/common/options.h"
#include "cli/common/resident.h"
#include "cli/io/tensor_write.h"
#include "cli/io/file_write.h"
#include "view/attention_map.h"
#include "view/figure.h"

#include <inttypes.h>
#include <limits.h>
#include <stdlib.h>

static const char doc[] =
    "Attention maps of a teacher (q_t, k_t) and a student (q_s, k_s), and a map of the contributions to their KL, "
    "over "
    "buckets of queries and keys, streamed at any context length. Files and tensors are those of streamkl kl."
    "\vA row of P or S is the mean attention of the queries of a bucket to each bucket of keys: it sums to 1. A row "
    "of "
    "KL sums to the mean KL of its queries; a cell is negative if the student attends more than the teacher. "
    "Brightness "
    "is the square root of the value, so that faint keys stay visible next to bright ones; P and S share one scale. "
    "Queries that attend to no key are excluded.\n"
    "\n"
    "Examples:\n"
    "  streamkl map pair.safetensors --causal\n"
    "  streamkl map pair.safetensors --causal --buckets 128 --png map\n"
    "  streamkl map pair.safetensors --causal --head all --out maps.safetensors\n"
    "  streamkl map pair.safetensors --causal --device cuda --json";

/* ---- The command line --------------------------------------------------------------------------------------- */

enum { HEAD_MEAN = -1, HEAD_ALL = -2 };

typedef struct map_request {
    kl_request input;
    int64_t buckets;
    int64_t head; /* of the student, or HEAD_MEAN or HEAD_ALL */
    const char *png_prefix, *out_path;
    int32_t json;
} map_request;

enum { KEY_BUCKETS = OPTIONS_COMMAND_KEYS, KEY_HEAD, KEY_PNG, KEY_OUT, KEY_JSON };
enum { GROUP_MAP = 1, GROUP_INPUT, GROUP_PROBLEM, GROUP_ENGINE };
enum { BUCKETS_DEFAULT = 64, BUCKETS_MAX = 4096 };

static const struct argp_option options[] = {
    {NULL, 0, NULL, 0, "Map:", GROUP_MAP},
    {"buckets", KEY_BUCKETS, "N", 0, "Number of query buckets and of key buckets, 1 to 4096; default 64", 0},
    {"head", KEY_HEAD, "N|mean|all", 0, "A student head, the mean of all heads, or all heads; default mean", 0},
    {"png", KEY_PNG, "PREFIX", 0,
     "Write PREFIX-p.png, PREFIX-s.png and PREFIX-kl.png; with --head all PREFIX-h0-p.png ...", 0},
    {"out", KEY_OUT, "FILE", 0, "Write p, s, kl [heads, buckets, buckets] of every head as safetensors", 0},
    {"json", KEY_JSON, NULL, 0, "Print one JSON object instead of the maps", 0},
    {0},
};

static const char *parse_buckets(const char *text, void *value)
{
    const char *const refused = parse_count(text, value);
    return refused || *(int64_t *)value > BUCKETS_MAX ? "an integer, 1 to 4096" : NULL;
}

static const char *parse_head(const char *text, void *value)
{
    int64_t *const head = value;
    *head = strcmp(text, "all") == 0 ? HEAD_ALL : HEAD_MEAN;
    if (*head == HEAD_ALL || strcmp(text, "mean") == 0)
        return NULL;
    return parse_int64(text, value) || *head < 0 ? "mean, all or the number of a head" : NULL;
}

static const option_field fields[] = {
    {KEY_BUCKETS, parse_buckets, offsetof(map_request, buckets)},
    {KEY_HEAD, parse_head, offsetof(map_request, head)},
    {KEY_PNG, parse_string, offsetof(map_request, png_prefix)},
    {KEY_OUT, parse_string, offsetof(map_request, out_path)},
    {KEY_JSON, parse_flag, offsetof(map_request, json)},
    {0, NULL, 0},
};

static error_t parse_option(int key, char *text, struct argp_state *state)
{
    map_request *const request = state->input;
    if (key == ARGP_KEY_INIT) {
        state->child_inputs[0] = &request->input;
        state->child_inputs[1] = &request->input.problem;
        state->child_inputs[2] = &request->input.options;
        return 0;
    }
    return options_store(fields, options, key, text, request);
}

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
 * share one, so that equal colours mean equal attention. */
static double top_of(const attention_map *shown, const map_picture *picture)
{
    const double *const values = picture->palette == PALETTE_SIGNED ? values_of(shown, picture) : shown->p;
    return picture_bright(values, shown->heads * cells_of(shown));
}

/* The requested heads: a view of `map`, or the mean over heads, which `mean` owns. */
static int choose_heads(attention_map *shown, attention_map *mean, const attention_map *map, int64_t head)
{
    *shown = *map;
    if (head == HEAD_ALL)
        return CLI_OK;
    if (head >= map->heads)
        return cli_fail(CLI_BAD_INPUT, "--head=%" PRId64 ": must be 0..%" PRId64 ", mean or all", head,
                        map->heads - 1);
    shown->heads = 1;
    if (head != HEAD_MEAN) {
        shown->p += head * cells_of(map);
        shown->s += head * cells_of(map);
        shown->kl += head * cells_of(map);
        return CLI_OK;
    }
    const size_t size = ((size_t)cells_of(map) + 1) * sizeof(double);
    *mean = (attention_map){1, map->rows, map->columns, malloc(size), malloc(size), malloc(size)};
    if (mean->p == NULL || mean->s == NULL || mean->kl == NULL)
        return cli_fail(CLI_NO_MEMORY, "out of memory: the mean of %" PRId64 " heads", map->heads);
    attention_map_mean(map, map->p, mean->p);
    attention_map_mean(map, map->s, mean->s);
    attention_map_mean(map, map->kl, mean->kl);
    *shown = *mean;
    return CLI_OK;
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
            printf("; colours up to %.3g\n", top);
            map_print(stdout, pictures[p].palette, values_of(shown, &pictures[p]) + head * cells_of(shown),
                      shown->rows, shown->columns, top);
        }
    }
}

static json_t *json_cube(const attention_map *map, const double *values)
{
    json_t *heads = json_array();
    for (int64_t head = 0; head < map->heads; head++) {
        json_t *rows = json_array();
        for (int64_t row = 0; row < map->rows; row++) {
            json_t *line = json_array();
            for (int64_t column = 0; column < map->columns; column++)
                cli_json_append(&line, cli_json_number(*values++));
            cli_json_append(&rows, line);
        }
        cli_json_append(&heads, rows);
    }
    return heads;
}

static int print_json(const attention_map *shown, const skl_problem *problem)
{
    return cli_print_json(json_pack("{sI sI sI sI so so so}", "peak_bytes", (json_int_t)resident_peak(), "batch",
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

static int write_pngs(file_set *set, const map_request *request, const attention_map *shown,
                      const skl_problem *problem)
{
    int exit_code = CLI_OK;
    for (int64_t head = 0; head < shown->heads; head++) {
        for (int p = 0; p < PICTURE_COUNT && exit_code == CLI_OK; p++) {
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
            bytes file = {0};
            figure_png(&file, &drawn);
            exit_code = file_write_into(set, path_of_png(request, head, &pictures[p]).text, &file);
            bytes_free(&file);
        }
    }
    return exit_code;
}

static int write_tensors(file_set *set, const char *path, const attention_map *map)
{
    const int64_t count = map->heads * cells_of(map);
    float *const values = malloc(((size_t)count * PICTURE_COUNT + 1) * sizeof *values);
    if (values == NULL)
        return cli_fail(CLI_NO_MEMORY, "out of memory: %s needs %" PRId64 " numbers", path, count * PICTURE_COUNT);
    output_tensor tensors[PICTURE_COUNT];
    for (int p = 0; p < PICTURE_COUNT; p++) {
        const double *const from = values_of(map, &pictures[p]);
        for (int64_t i = 0; i < count; i++)
            values[p * count + i] = (float)from[i];
        tensors[p] =
            (output_tensor){pictures[p].name, SKL_F32, 3, {map->heads, map->rows, map->columns}, values + p * count};
    }
    tensor_error error;
    const bool written = tensor_write_into(set, path, tensors, PICTURE_COUNT, NULL, 0, &error);
    free(values);
    return written ? CLI_OK : cli_fail(CLI_WRITE_FAILED, "%s", error.text);
}

static int show(const map_request *request, const attention_map *map, const skl_problem *problem)
{
    attention_map shown, mean = {0};
    if (request->png_prefix && cells_of(map) == 0)
        return cli_fail(CLI_BAD_INPUT, "--png=%s: no queries or no keys: a picture needs at least one of each",
                        request->png_prefix);
    int exit_code = choose_heads(&shown, &mean, map, request->head);
    file_set set = {NULL, NULL};
    if (exit_code == CLI_OK && request->out_path)
        exit_code = write_tensors(&set, request->out_path, map);
    if (exit_code == CLI_OK && request->png_prefix)
        exit_code = write_pngs(&set, request, &shown, problem);
    exit_code = file_write_commit(&set, exit_code);
    if (exit_code == CLI_OK && request->json)
        exit_code = print_json(&shown, problem);
    else if (exit_code == CLI_OK)
        print_maps(request, map, &shown, problem);
    free(mean.p);
    free(mean.s);
    free(mean.kl);
    return exit_code;
}

/* ---- The command -------------------------------------------------------------------------------------------- */

static int compute(attention_map *map, const map_request *request, const kl_inputs *inputs)
{
    term_progress progress;
    skl_options watched = request->input.options;
    watched.progress = term_progress_update;
    watched.progress_user = &progress;
    term_progress_begin(&progress, "map");
    const skl_status status =
        attention_map_compute(map, request->buckets, request->buckets, &inputs->problem, &inputs->tensors, &watched);
    term_progress_end(&progress);
    if (status == SKL_OK)
        return CLI_OK;
    return device_error()[0] ? cli_fail_status(status) : fail_plan(status, &request->input.options);
}

/* The map reads lengths itself, so they are checked before. It shows attention to keys, and a sink is none. */
static int check_inputs(const map_request *request, const kl_inputs *inputs)
{
    if (inputs->problem.sinks)
        return cli_fail(CLI_BAD_INPUT,
                        "sink_t, sink_s: streamkl map has no place for sinks; name the files as q_t=FILE k_t=FILE "
                        "q_s=FILE k_s=FILE for a map of the distributions on the keys alone");
    skl_plan *plan = NULL;
    const skl_status status = skl_plan_create(&plan, &inputs->problem, &request->input.options);
    const int exit_code =
        status == SKL_OK ? kl_inputs_check(inputs, plan) : fail_plan(status, &request->input.options);
    skl_plan_destroy(plan);
    return exit_code;
}

/* The files to write; the caller frees *outputs and *paths, to which the pictures' names belong. */
static int list_outputs(const map_request *request, int64_t heads, output_file **outputs, png_path **paths)
{
    const int64_t shown = request->png_prefix == NULL ? 0 : request->head == HEAD_ALL ? heads : 1;
    int count = 0;
    *outputs = calloc((size_t)shown * PICTURE_COUNT + 1, sizeof **outputs);
    *paths = calloc((size_t)shown * PICTURE_COUNT + 1, sizeof **paths);
    if (*outputs == NULL || *paths == NULL)
        return -1;
    for (int64_t head = 0; head < shown; head++) {
        for (int p = 0; p < PICTURE_COUNT; p++, count++) {
            (*paths)[count] = path_of_png(request, head, &pictures[p]);
            (*outputs)[count] = (output_file){"--png", (*paths)[count].text};
        }
    }
    if (request->out_path)
        (*outputs)[count++] = (output_file){"--out", request->out_path};
    return count;
}

static int check_outputs(const map_request *request, int64_t heads)
{
    if (request->png_prefix && strlen(request->png_prefix) + sizeof "-h9223372036854775807-kl.png" > PATH_MAX)
        return cli_fail(CLI_BAD_INPUT, "--png=%.60s...: must be shorter", request->png_prefix);
    output_file *outputs;
    png_path *paths;
    const int count = list_outputs(request, heads, &outputs, &paths);
    int exit_code = count < 0 ? cli_fail(CLI_NO_MEMORY, "out of memory for the names of the pictures")
                              : kl_outputs_compare(&request->input, outputs, (size_t)count);
    for (int o = 0; o < count && exit_code == CLI_OK; o++)
        exit_code = file_write_check(outputs[o].path);
    free(outputs);
    free(paths);
    return exit_code;
}

int cmd_map(int argc, char **argv)
{
    static const struct argp_child children[] = {
        {&kl_input_argp, 0, "Input:", GROUP_INPUT},
        {&problem_argp, 0, "Masks, scales and direction:", GROUP_PROBLEM},
        {&engine_argp, 0, "Engine:", GROUP_ENGINE},
        {0},
    };
    static const struct argp argp = {
        .options = options, .parser = parse_option, .args_doc = "FILE...", .doc = doc, .children = children};
    map_request request = {.buckets = BUCKETS_DEFAULT, .head = HEAD_MEAN};
    request.input.problem = skl_problem_default();
    request.input.problem.gradients = 0;
    request.input.options = skl_options_default();
    const int refused = options_parse(&argp, argc, argv, 0, &request);
    if (refused)
        return refused;
    kl_inputs inputs = {.files = {NULL, 0}};
    attention_map map = {0};
    int exit_code = kl_inputs_load(&inputs, &request.input);
    if (exit_code == CLI_OK)
        exit_code = check_outputs(&request, inputs.problem.heads_s);
    if (exit_code == CLI_OK)
        exit_code = check_inputs(&request, &inputs);
    if (exit_code == CLI_OK)
        exit_code = compute(&map, &request, &inputs);
    if (exit_code == CLI_OK)
        exit_code = kl_files_unchanged(&inputs.files);
    if (exit_code == CLI_OK)
        exit_code = show(&request, &map, &inputs.problem);
    attention_map_free(&map);
    kl_inputs_free(&inputs);
    return exit_code;
}
