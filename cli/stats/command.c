/* streamkl stats: the command line and the order of the steps. */
#include "cli/common/cli.h"
#include "cli/stats/stats.h"

#include <errno.h>
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

/* "BEGIN,END" into two int64_t. */
static const char *parse_rows(const char *text, void *value)
{
    int64_t *const rows = value;
    char *end = NULL;
    errno = 0;
    const long long begin = strtoll(text, &end, 10);
    if (end == text || *end != ',' || errno || parse_int64(end + 1, &rows[1]))
        return "BEGIN,END, two integers; negative ones count from the end, and an END of 0 is the end";
    rows[0] = begin;
    return NULL;
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

int cmd_stats(int argc, char **argv)
{
    static const command_line command = {doc, groups, "FILE..."};
    stats_request request = {0};
    request.input = (kl_request){
        .problem = skl_problem_default(), .options = options_watched(), .layout = LAYOUT_DEFAULT, .one_model = 1};
    request.input.problem.gradients = 0;
    request.input.file_count = (size_t)options_parse(&command, argc, argv, &request);
    request.input.files = argv + argc - request.input.file_count;
    const output_file output = {"--out", request.out_path};
    kl_outputs_check(&request.input, &output, request.out_path != NULL);
    kl_inputs inputs = {.files = {NULL, 0}};
    stats_results results = {.seconds = 0};
    kl_inputs_load(&inputs, &request.input);
    stats_compute(&results, &inputs, &request);
    kl_files_unchanged(&inputs.files);
    stats_write(&results, &inputs.problem, &request);
    stats_report(&results, &inputs.problem, &request);
    stats_results_free(&results);
    kl_inputs_free(&inputs);
    return CLI_OK;
}
