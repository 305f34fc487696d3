/* streamkl stats: request (command line) -> inputs (the readers of streamkl kl) -> results -> file and report. */
#include "cli/common/cli.h"
#include "cli/kl/kl.h"
#include "cli/term/term.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

static const char doc[] =
    "Statistics of one attention: which keys it attends to, how much, and how far away. Memory grows linearly with "
    "the context: the N x N matrix of probabilities is never stored."
    "\vThe queries q_s [B, H, N, D] and keys k_s are found by name in all files; tensors named q and k are taken "
    "if there is no q_s or k_s. Optional tensors are used if present, as in streamkl kl: key_lengths, cu_seqlens_q "
    "and cu_seqlens_k, key_begin and key_end, sink_s. For the teacher of a pair, pass --q-s q_t --k-s k_t.\n"
    "\n"
    "Entropy and distance are means over rows (a row is one query of one head), the largest logit is that of a "
    "head. The sum of a key is the attention that it gets from all rows. Distances are differences of positions "
    "in buckets of powers of 2: 0, 1, 2-3, 4-7, ...\n"
    "\n"
    "Examples:\n"
    "  streamkl stats layer.safetensors --causal\n"
    "  streamkl stats pair.safetensors --causal --q-s q_t --k-s k_t --json\n"
    "  streamkl stats layer.safetensors --causal --rows=-64,0 --top 32\n"
    "  streamkl stats layer.safetensors --causal --per-key-head --out stats.safetensors";

typedef struct stats_request {
    kl_request input;
    int64_t rows[2];   /* the rows of the sums, as in skl_stats */
    int64_t top_count; /* keys with the largest sums that are listed */
    int32_t per_key_head, json;
    const char *out_path;
} stats_request;

/* "BEGIN,END" into two int64_t. */
static const char *parse_rows(const char *text, void *value)
{
    int64_t *const rows = value;
    return pair_from_text(text, INT64_MIN, &rows[0], &rows[1])
               ? NULL
               : "BEGIN,END, two integers; negative ones count from the end, and an END of 0 is the end";
}

#define NAME(role) offsetof(stats_request, input.names[role])

static const cli_option stats_options[] = {
    {"rows", "BEGIN,END", parse_rows, offsetof(stats_request, rows),
     "Rows that sums and maxima are made of, by number in their sequence; --rows=-64,0 are the last 64; default all"},
    {"top", "N", parse_count, offsetof(stats_request, top_count), "Keys with the largest sums to list", .initial = 8},
    {"per-key-head", NULL, parse_flag, offsetof(stats_request, per_key_head),
     "Sum keys over the query heads that share a key head"},
    {"out", "FILE", parse_string, offsetof(stats_request, out_path),
     "Write key_sum, key_max, lse, entropy, max_logit, expected_distance, head_max_logit and distance_mass as "
     "safetensors"},
    {"json", NULL, parse_flag, offsetof(stats_request, json), "Print one JSON object instead of the table"},
    {0},
};

static const cli_option input_options[] = {
    {"q-s", "NAME", parse_string, NAME(ROLE_Q_S), "Name of the queries in the files; default q_s, else q"},
    {"k-s", "NAME", parse_string, NAME(ROLE_K_S), "Name of the keys; default k_s, else k"},
    {"sink-s", "LIST|NAME", parse_string, NAME(ROLE_SINK_S),
     "Logits of the sinks: one number per head, separated by commas, or a tensor; default sink_s, if present"},
    {"scale", "X", parse_float, offsetof(stats_request, input.problem.scale_s), "Logit scale; default 1/sqrt(D)"},
    {"softcap", "X", parse_float, offsetof(stats_request, input.problem.softcap_s),
     "Logits become X tanh(logit / X); default none"},
    {0},
};

static const option_group groups[] = {
    {"Statistics:", stats_options, 0},
    {"Input:", input_options, 0},
    {"Layout and sequences:", kl_sequence_options, offsetof(stats_request, input)},
    {"Masks:", mask_options, offsetof(stats_request, input.problem)},
    {"Engine:", engine_options, offsetof(stats_request, input.options)},
    {0},
};

/* ---- Results ------------------------------------------------------------------------------------------------ */

/* Contiguous, with the shapes of skl_stats. */
typedef struct stats_results {
    plan_runner runner;
    double seconds;
    int64_t sum_heads; /* heads of key_sum and key_max */
    int32_t buckets;   /* number of distances in distance_mass: as many as the keys need */
    float *key_sum, *key_max;
    float *lse, *entropy, *max_logit, *expected_distance;
    float *head_max_logit, *distance_mass;
} stats_results;

static void allocate_results(stats_results *results, const skl_problem *p)
{
    const size_t rows = (size_t)kl_row_count(p, p->heads_s) * sizeof(float);
    const size_t keys = (size_t)(kl_row_batches(p) * results->sum_heads * kl_key_length(p)) * sizeof(float);
    const size_t heads = (size_t)(p->batch * p->heads_s) * sizeof(float);
    results->key_sum = kl_allocate_output(keys, "key_sum");
    results->key_max = kl_allocate_output(keys, "key_max");
    results->lse = kl_allocate_output(rows, "lse");
    results->entropy = kl_allocate_output(rows, "entropy");
    results->max_logit = kl_allocate_output(rows, "max_logit");
    results->expected_distance = kl_allocate_output(rows, "expected_distance");
    results->head_max_logit = kl_allocate_output(heads, "head_max_logit");
    results->distance_mass = kl_allocate_output(heads * (size_t)results->buckets, "distance_mass");
}

static void compute(stats_results *results, const kl_inputs *inputs, const stats_request *request)
{
    const skl_problem *const p = &inputs->problem;
    results->sum_heads = request->per_key_head ? p->key_heads_s : p->heads_s;
    results->buckets = runner_distance_buckets(p);
    runner_open(&results->runner, p, &request->input.options);
    allocate_results(results, p);
    const int64_t rows = kl_row_length(p);
    const skl_stats stats = {
        .struct_size = sizeof stats,
        .row_begin = request->rows[0],
        .row_end = request->rows[1],
        .per_key_head = request->per_key_head,
        .key_sum = skl_output_contiguous(results->key_sum, results->sum_heads, kl_key_length(p), 1),
        .key_max = skl_output_contiguous(results->key_max, results->sum_heads, kl_key_length(p), 1),
        .lse = skl_output_contiguous(results->lse, p->heads_s, rows, 1),
        .entropy = skl_output_contiguous(results->entropy, p->heads_s, rows, 1),
        .max_logit = skl_output_contiguous(results->max_logit, p->heads_s, rows, 1),
        .expected_distance = skl_output_contiguous(results->expected_distance, p->heads_s, rows, 1),
        .head_max_logit = results->head_max_logit,
        .distance_mass = results->distance_mass,
        .distance_count = results->buckets,
    };
    results->seconds = runner_stats(&results->runner, &inputs->tensors, &stats);
}

static void free_results(stats_results *results)
{
    float *const all[] = {results->key_sum,        results->key_max,      results->lse,
                          results->entropy,        results->max_logit,    results->expected_distance,
                          results->head_max_logit, results->distance_mass};
    for (size_t n = 0; n < sizeof all / sizeof all[0]; n++)
        free(all[n]);
    runner_close(&results->runner);
}

/* ---- Numbers of a head -------------------------------------------------------------------------------------- */

typedef struct head_summary {
    double entropy, distance; /* means over the rows that attend to any key */
    double max_logit;
} head_summary;

static head_summary summary_of(const stats_results *r, const skl_problem *p, int64_t head)
{
    const int64_t rows = kl_row_length(p);
    head_summary summary = {0, 0, -INFINITY};
    int64_t count = 0;
    for (int64_t b = 0; b < kl_row_batches(p); b++)
        for (int64_t i = (b * p->heads_s + head) * rows, end = i + rows; i < end; i++) {
            count += r->lse[i] != -INFINITY;
            summary.entropy += (double)r->entropy[i]; /* 0 for other rows */
            summary.distance += (double)r->expected_distance[i];
        }
    for (int64_t b = 0; b < p->batch; b++)
        summary.max_logit = fmax(summary.max_logit, (double)r->head_max_logit[b * p->heads_s + head]);
    summary.entropy /= count > 0 ? (double)count : 1;
    summary.distance /= count > 0 ? (double)count : 1;
    return summary;
}

/* Shares of the attention to keys by distance, of one head or, for -1, of all. */
static void distance_shares(const stats_results *r, const skl_problem *p, int64_t head, double *shares)
{
    double total = 0;
    for (int32_t n = 0; n < r->buckets; n++) {
        shares[n] = 0;
        for (int64_t at = 0; at < p->batch * p->heads_s; at++)
            if (head < 0 || at % p->heads_s == head)
                shares[n] += (double)r->distance_mass[at * r->buckets + n];
        total += shares[n];
    }
    for (int32_t n = 0; n < r->buckets; n++)
        shares[n] /= total != 0 ? total : 1; /* NaN stays NaN: a part of it is no share */
}

/* ---- Keys with the largest sums ----------------------------------------------------------------------------- */

typedef struct heavy_key {
    int64_t batch, key; /* packed: batch 0, key of the buffer */
    double share;       /* its part of the sum of all keys, 0 to 1 */
} heavy_key;

static int by_share(const void *a, const void *b)
{
    const heavy_key *const left = a, *const right = b;
    if (left->share < right->share || left->share > right->share)
        return left->share < right->share ? 1 : -1;
    if (left->batch != right->batch)
        return left->batch < right->batch ? -1 : 1;
    return left->key < right->key ? -1 : left->key > right->key;
}

/* All keys with their share of the sums over heads, largest first. The caller frees them. */
static heavy_key *heavy_keys(const stats_results *r, const skl_problem *p, int64_t *count)
{
    const int64_t length = kl_key_length(p);
    *count = kl_row_batches(p) * length;
    heavy_key *const keys = cli_allocate_zeros((size_t)*count + 1, sizeof *keys, "the keys with the largest sums");
    double total = 0;
    for (int64_t n = 0; n < *count; n++) {
        keys[n] = (heavy_key){n / length, n % length, 0};
        for (int64_t h = 0; h < r->sum_heads; h++)
            keys[n].share += (double)r->key_sum[(n / length * r->sum_heads + h) * length + n % length];
        total += keys[n].share;
    }
    for (int64_t n = 0; n < *count; n++)
        keys[n].share /= total != 0 ? total : 1; /* NaN stays NaN, and all shares are equal then */
    qsort(keys, (size_t)*count, sizeof *keys, by_share);
    return keys;
}

/* ---- JSON --------------------------------------------------------------------------------------------------- */

static json_t *shares_json(const double *shares, int32_t count)
{
    return cli_json_array(shares, sizeof *shares, 1, (const int64_t[]){count});
}

static json_t *heads_json(const stats_results *r, const skl_problem *p, double *shares)
{
    json_t *const heads = json_array();
    for (int64_t h = 0; h < p->heads_s; h++) {
        const head_summary summary = summary_of(r, p, h);
        distance_shares(r, p, h, shares);
        cli_json_append(heads,
                        json_pack("{so so so so}", "entropy", cli_json_number(summary.entropy), "expected_distance",
                                  cli_json_number(summary.distance), "max_logit", cli_json_number(summary.max_logit),
                                  "distance_share", shares_json(shares, r->buckets)));
    }
    return heads;
}

static void print_json(const stats_results *r, const skl_problem *p, const heavy_key *keys, int64_t listed,
                       double *shares)
{
    json_t *const top = json_array();
    for (int64_t n = 0; n < listed; n++)
        cli_json_append(top, json_pack("{sI sI so}", "batch", (json_int_t)keys[n].batch, "key",
                                       (json_int_t)keys[n].key, "share", cli_json_number(keys[n].share)));
    json_t *const heads = heads_json(r, p, shares);
    distance_shares(r, p, -1, shares);
    cli_print_json(json_pack("{sI sI sI sI sI so so so so}", "batch", (json_int_t)p->batch, "len_q",
                             (json_int_t)p->len_q, "len_k", (json_int_t)p->len_k, "heads", (json_int_t)p->heads_s,
                             "key_heads", (json_int_t)p->key_heads_s, "seconds", cli_json_number(r->seconds),
                             "distance_share", shares_json(shares, r->buckets), "top_keys", top, "by_head", heads));
}

/* ---- Text --------------------------------------------------------------------------------------------------- */

static void print_distances(const stats_results *r, const double *shares)
{
    printf("\n  attention by distance, all heads\n");
    term_chart(stdout, shares, r->buckets, 8);
    for (int32_t n = 0; n < r->buckets; n++) {
        const int64_t begin = n == 0 ? 0 : (int64_t)1 << (n - 1), end = n == 0 ? 1 : (int64_t)1 << n;
        if (shares[n] < 0.001)
            continue;
        if (end - begin == 1)
            printf("    %17" PRId64 "  %5.1f %%\n", begin, 100 * shares[n]);
        else
            printf("    %8" PRId64 "-%8" PRId64 "  %5.1f %%\n", begin, end - 1, 100 * shares[n]);
    }
}

static void print_text(const stats_results *r, const skl_problem *p, const heavy_key *keys, int64_t listed,
                       double *shares)
{
    const term_style style = term_style_for(stdout);
    printf("%sAttention statistics%s  %" PRId64 " queries x %" PRId64 " keys, %" PRId64 " head%s, %s %s\n",
           style.bold, style.plain, p->len_q, p->len_k, p->heads_s, cli_plural(p->heads_s),
           cli_seconds_text(r->seconds).text, runner_location_of(&r->runner).text);
    printf("\n  head   entropy  distance  max logit\n");
    for (int64_t h = 0; h < p->heads_s; h++) {
        const head_summary summary = summary_of(r, p, h);
        printf("  %4" PRId64 "  %8.4f  %8.1f  %9.3f\n", h, summary.entropy, summary.distance, summary.max_logit);
    }
    distance_shares(r, p, -1, shares);
    print_distances(r, shares);
    printf("\n  keys with most attention, all heads\n");
    for (int64_t n = 0; n < listed; n++) {
        if (kl_row_batches(p) > 1)
            printf("    batch %-4" PRId64, keys[n].batch);
        printf("    key %-8" PRId64 "  %5.1f %%\n", keys[n].key, 100 * keys[n].share);
    }
}

static void report(const stats_results *results, const skl_problem *problem, const stats_request *request)
{
    int64_t count = 0;
    heavy_key *const keys = heavy_keys(results, problem, &count);
    double *const shares = cli_allocate((size_t)results->buckets * sizeof *shares, "the distances");
    const int64_t listed = request->top_count < count ? request->top_count : count;
    (request->json ? print_json : print_text)(results, problem, keys, listed, shares);
    free(shares);
    free(keys);
}

/* ---- --out -------------------------------------------------------------------------------------------------- */

enum { ABSENT = -1 };

/* [batch, heads, last], without the dimensions that are ABSENT. */
static output_tensor tensor_of(const char *name, const float *data, int64_t batch, int64_t heads, int64_t last)
{
    output_tensor tensor = {.name = name, .dtype = SKL_F32, .data = data};
    const int64_t sizes[] = {batch, heads, last};
    for (int n = 0; n < 3; n++)
        if (sizes[n] != ABSENT)
            tensor.shape[tensor.rank++] = sizes[n];
    return tensor;
}

static void write_file(const stats_results *r, const skl_problem *p, const stats_request *request)
{
    if (request->out_path == NULL)
        return;
    const int64_t batch = p->packed ? ABSENT : p->batch, rows = kl_row_length(p), keys = kl_key_length(p);
    const output_tensor tensors[] = {
        tensor_of("key_sum", r->key_sum, batch, r->sum_heads, keys),
        tensor_of("key_max", r->key_max, batch, r->sum_heads, keys),
        tensor_of("lse", r->lse, batch, p->heads_s, rows),
        tensor_of("entropy", r->entropy, batch, p->heads_s, rows),
        tensor_of("max_logit", r->max_logit, batch, p->heads_s, rows),
        tensor_of("expected_distance", r->expected_distance, batch, p->heads_s, rows),
        tensor_of("head_max_logit", r->head_max_logit, p->batch, p->heads_s, ABSENT),
        tensor_of("distance_mass", r->distance_mass, p->batch, p->heads_s, r->buckets),
    };
    file_write_tensors(request->out_path, tensors, sizeof tensors / sizeof tensors[0], NULL, 0);
    file_write_commit();
}

int cmd_stats(int argc, char **argv)
{
    static const command_line command = {doc, groups, "FILE..."};
    stats_request request = {.input = {.one_model = 1}};
    kl_request_parse(&request.input, &command, argc, argv, &request);
    const output_file output = {"--out", request.out_path};
    kl_outputs_check(&request.input, &output, request.out_path != NULL);
    kl_inputs inputs = {.files = {NULL, 0}};
    stats_results results = {.seconds = 0};
    kl_inputs_load(&inputs, &request.input);
    compute(&results, &inputs, &request);
    kl_files_unchanged(&inputs.files);
    write_file(&results, &inputs.problem, &request);
    report(&results, &inputs.problem, &request);
    free_results(&results);
    kl_inputs_free(&inputs);
    return CLI_OK;
}
