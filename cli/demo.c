/* streamkl demo: time and memory of a long context on this machine, compared with materializing. */
#include "cli/common/cli.h"
#include "cli/kl/kl.h"
#include "oracle.h"
#include "cli/term/term.h"
#include "cli/common/random.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

static const char doc[] =
    "Generate a synthetic teacher and student at a long context, compute their attention KL and the student's "
    "gradients by streaming, and compare the memory with that of the N x N matrices."
    "\vExamples:\n"
    "  streamkl demo\n"
    "  streamkl demo --context 65536           16 times the work, equal memory\n"
    "  streamkl demo --heads 4 --dim 128 --threads 1\n"
    "  streamkl demo --device cuda             on a GPU";

typedef struct demo_request {
    int64_t context, heads, dim, seed;
    skl_options options;
} demo_request;

static const cli_option demo_options[] = {
    {"context", "N", parse_count, offsetof(demo_request, context), "Queries and keys", .initial = 16384},
    {"heads", "N", parse_count, offsetof(demo_request, heads), "Heads", .initial = 1},
    {"dim", "N", parse_count, offsetof(demo_request, dim), "Size of a head", .initial = 64},
    {"seed", "N", parse_int64, offsetof(demo_request, seed), "Seed of the random tensors", .initial = 1},
    {0},
};

static const option_group groups[] = {
    {NULL, demo_options, 0},
    {NULL, engine_options, offsetof(demo_request, options)},
    {0},
};

/* The student is the teacher plus an error that grows along the context, like a student trained on short ones. */
static void fill_tensors(float *const tensors[ROLE_REQUIRED_COUNT], const skl_problem *problem, uint64_t seed)
{
    const float error_at_start = 0.1F, error_at_end = 0.8F;
    uint64_t state = seed;
    for (int64_t row = 0; row < problem->heads_s * problem->len_q; row++) {
        const float progress = (float)(row % problem->len_q) / (float)problem->len_q;
        const float error = error_at_start + progress * (error_at_end - error_at_start);
        for (int64_t at = row * problem->dim_s; at < (row + 1) * problem->dim_s; at++) {
            tensors[ROLE_Q_T][at] = random_normal(&state);
            tensors[ROLE_K_T][at] = random_normal(&state);
            tensors[ROLE_Q_S][at] = tensors[ROLE_Q_T][at] + error * random_normal(&state);
            tensors[ROLE_K_S][at] = tensors[ROLE_K_T][at] + error * random_normal(&state);
        }
    }
}

/* Inputs as `streamkl kl` reads them from files; the caller frees *block, which owns the tensors. */
static void make_inputs(kl_inputs *inputs, stored_tensor stored[ROLE_REQUIRED_COUNT], float **block,
                        const demo_request *request)
{
    const int64_t heads = request->heads, length = request->context, dim = request->dim;
    skl_problem problem = skl_problem_default();
    problem.causal = 1;
    problem.len_q = problem.len_k = length;
    problem.heads_t = problem.heads_s = heads;
    problem.dim_t = problem.dim_s = dim;
    size_t size;
    if (__builtin_mul_overflow((size_t)heads * (size_t)length, (size_t)dim * sizeof(float), &size) ||
        size > SIZE_MAX / ROLE_REQUIRED_COUNT)
        cli_fail(CLI_NO_MEMORY, "out of memory: the tensors need more than 64 bits can count");
    *block = cli_allocate(ROLE_REQUIRED_COUNT * size, "the block of tensors");
    float *tensors[ROLE_REQUIRED_COUNT];
    skl_input *const views[ROLE_REQUIRED_COUNT] = {&inputs->tensors.q_t, &inputs->tensors.k_t, &inputs->tensors.q_s,
                                                   &inputs->tensors.k_s};
    *inputs = (kl_inputs){.problem = problem, .tensors = {.struct_size = sizeof inputs->tensors}};
    for (kl_role role = 0; role < ROLE_REQUIRED_COUNT; role++) {
        tensors[role] = *block + role * (size / sizeof(float));
        stored[role] = (stored_tensor){.dtype = SKL_F32, .rank = 3, .shape = {heads, length, dim}, .size = size};
        *views[role] = skl_input_contiguous(tensors[role], heads, length, dim);
        inputs->views[role] = (kl_view){.stored = &stored[role], .input = *views[role]};
    }
    fill_tensors(tensors, &problem, (uint64_t)request->seed);
}

/* Compares the last queries with the float64 oracle: a smaller causal problem, bottom-right aligned. */
static double worst_difference(const kl_inputs *of, const float *kl, int64_t checked)
{
    const skl_problem *const problem = &of->problem;
    const int64_t first = problem->len_q - checked;
    skl_problem last = *problem;
    last.len_q = checked;
    last.gradients = 0;
    skl_inputs inputs = of->tensors;
    inputs.q_t.data = (const float *)inputs.q_t.data + first * problem->dim_t;
    inputs.q_s.data = (const float *)inputs.q_s.data + first * problem->dim_s;
    oracle_result exact = oracle_run(&last, &inputs);
    double worst = 0;
    for (int64_t head = 0; head < problem->heads_s; head++) {
        for (int64_t i = 0; i < checked; i++) {
            const double streamed = (double)kl[head * problem->len_q + first + i];
            const double difference = fabs(streamed - exact.kl[head * checked + i]);
            if (!isnan(worst) && !(difference <= worst)) /* not fmax: GCC 12 for 64-bit Arm fails on that reduction */
                worst = difference;
        }
    }
    oracle_free(&exact);
    return worst;
}

static void print_timing(const char *label, const char *what, double seconds, double flop)
{
    printf("  %-14s %10s %8.1f GFLOP/s   %s\n", label, cli_seconds_text(seconds).text, 1e-9 * flop / seconds, what);
}

static void print_costs(const plan_runner *runner, const kl_inputs *inputs)
{
    const term_style style = term_style_for(stdout);
    const workload work = workload_of(&inputs->problem, &inputs->tensors);
    printf("%sTime%s, kernel %s %s\n", style.bold, style.plain, skl_plan_kernel(runner->plan),
           runner_location_of(runner).text);
    print_timing("forward", "KL of every query", runner->forward_seconds, work.forward_flop);
    print_timing("backward", "gradients of the student's queries and keys", runner->backward_seconds,
                 work.backward_flop);
    const bool measured = runner->peak_growth >= 0;
    const double streamed = measured ? (double)runner->peak_growth : (double)runner->workspace_size;
    printf("\n%sMemory%s in addition to the tensors\n", style.bold, style.plain);
    printf("  %-14s %s%10s%s   %s\n", "streamed", style.good, cli_bytes_text(streamed).text, style.plain,
           measured ? "measured: growth of the process" : "workspace");
    printf("  %-14s %10s   P, S and the gradient of S, N x N in f32\n", "materialized",
           cli_bytes_text(work.materialized_size).text);
}

static void print_demo(const kl_results *results, const kl_inputs *inputs)
{
    enum { MOST_CHECKED = 32, CHECKED_PAIRS = 1 << 20 };
    const term_style style = term_style_for(stdout);
    const skl_problem *const problem = &inputs->problem;
    printf("%sAttention KL at a context of %" PRId64 "%s: synthetic teacher and student, %" PRId64
           " head%s of size %" PRId64 ", causal\n\n",
           style.bold, problem->len_q, style.plain, problem->heads_s, cli_plural(problem->heads_s), problem->dim_s);
    printf("  KL(teacher || student) by query, mean %s%.6g%s\n", style.bold,
           results->sum / (double)results->valid_rows, style.plain);
    term_position_chart(stdout, results->kl, results->lse_s, problem->heads_s, problem->len_q);
    printf("\n");
    print_costs(&results->runner, inputs);

    const int64_t affordable = CHECKED_PAIRS / problem->len_k + 1;
    const int64_t most = problem->len_q < MOST_CHECKED ? problem->len_q : MOST_CHECKED;
    const int64_t checked = affordable < most ? affordable : most;
    printf("\n%sAccuracy%s compared with float64, for the last %" PRId64 " quer%s: KL differs by at most %.1e\n",
           style.bold, style.plain, checked, checked == 1 ? "y" : "ies",
           worst_difference(inputs, results->kl, checked));
    printf("\n%sTry next%s\n", style.bold, style.plain);
    printf("  streamkl demo --context %-8" PRId64 " 4 times the context, equal memory\n", 4 * problem->len_q);
    printf("  streamkl kl --help               KL of your own tensors\n");
    printf("  streamkl bench                   comparison with a baseline that stores the matrices\n");
}

int cmd_demo(int argc, char **argv)
{
    static const command_line command = {doc, groups, NULL};
    demo_request request = {.options = options_watched()};
    options_parse(&command, argc, argv, &request);
    kl_inputs inputs;
    stored_tensor stored[ROLE_REQUIRED_COUNT];
    float *block;
    make_inputs(&inputs, stored, &block, &request);
    kl_results results = {.kl = NULL};
    kl_compute(&results, &inputs, &(kl_request){.problem = inputs.problem, .options = request.options});
    print_demo(&results, &inputs);
    kl_results_free(&results);
    free(block);
    return CLI_OK;
}
