/* streamkl demo: time and memory of a long context on this machine, compared with materialising. */
#include "cli/common/cli.h"
#include "cli/common/options.h"
#include "oracle.h"
#include "cli/term/term.h"
#include "distill/random.h"
#include "cli/common/resident.h"
#include "cli/common/runner.h"
#include "cli/common/workload.h"

#include <errno.h>
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

/* ---- The command line --------------------------------------------------------------------------------------- */

typedef struct demo_request {
    int64_t context, heads, dim, seed;
    skl_options options;
} demo_request;

static const cli_option demo_options[] = {
    {"context", "N", parse_count, offsetof(demo_request, context), "Queries and keys; default 16384"},
    {"heads", "N", parse_count, offsetof(demo_request, heads), "Heads; default 1"},
    {"dim", "N", parse_count, offsetof(demo_request, dim), "Size of a head; default 64"},
    {"seed", "N", parse_int64, offsetof(demo_request, seed), "Seed of the random tensors; default 1"},
    {0},
};

static const option_group groups[] = {
    {NULL, demo_options, 0},
    {NULL, engine_options, offsetof(demo_request, options)},
    {0},
};

/* ---- A teacher and a student -------------------------------------------------------------------------------- */

typedef struct demo_state {
    skl_problem problem;
    skl_inputs inputs;
    plan_runner runner;
    float *block;                 /* owns the tensors below */
    float *q_t, *k_t, *q_s, *k_s; /* [heads, context, dim] */
    float *dq_s, *dk_s;
    float *kl, *lse_t, *lse_s; /* [heads, context] */
} demo_state;

static skl_problem describe_problem(const demo_request *request)
{
    skl_problem problem = skl_problem_default();
    problem.causal = 1;
    problem.len_q = problem.len_k = request->context;
    problem.heads_t = problem.heads_s = request->heads;
    problem.dim_t = problem.dim_s = request->dim;
    return problem;
}

/* One allocation for all tensors, resident before memory is measured. */
static void allocate_tensors(demo_state *demo)
{
    float **const matrices[] = {&demo->q_t, &demo->k_t, &demo->q_s, &demo->k_s, &demo->dq_s, &demo->dk_s};
    float **const vectors[] = {&demo->kl, &demo->lse_t, &demo->lse_s};
    enum { MATRIX_COUNT = sizeof matrices / sizeof matrices[0], VECTOR_COUNT = sizeof vectors / sizeof vectors[0] };
    const size_t rows = (size_t)(demo->problem.heads_s * demo->problem.len_q);
    const size_t dim = (size_t)demo->problem.dim_s;
    size_t size;
    if (__builtin_mul_overflow(rows, (MATRIX_COUNT * dim + VECTOR_COUNT) * sizeof(float), &size))
        cli_fail(CLI_NO_MEMORY, "out of memory: %zu rows need more than 64 bits can count", rows);
    demo->block = resident_allocate(size);
    if (demo->block == NULL)
        cli_fail(CLI_NO_MEMORY, "out of memory: the tensors need %s", cli_bytes_text((double)size).text);
    float *next = demo->block;
    for (size_t m = 0; m < MATRIX_COUNT; m++, next += rows * dim)
        *matrices[m] = next;
    for (size_t v = 0; v < VECTOR_COUNT; v++, next += rows)
        *vectors[v] = next;
}

/* The student is the teacher plus an error that grows along the context, like a student trained on short ones. */
static void fill_tensors(demo_state *demo, uint64_t seed)
{
    const float error_at_start = 0.1F, error_at_end = 0.8F;
    const skl_problem *const problem = &demo->problem;
    uint64_t state = seed;
    for (int64_t row = 0; row < problem->heads_s * problem->len_q; row++) {
        const float progress = (float)(row % problem->len_q) / (float)problem->len_q;
        const float error = error_at_start + progress * (error_at_end - error_at_start);
        for (int64_t at = row * problem->dim_s; at < (row + 1) * problem->dim_s; at++) {
            demo->q_t[at] = random_normal(&state);
            demo->k_t[at] = random_normal(&state);
            demo->q_s[at] = demo->q_t[at] + error * random_normal(&state);
            demo->k_s[at] = demo->k_t[at] + error * random_normal(&state);
        }
    }
}

/* ---- Computation -------------------------------------------------------------------------------------------- */

static void connect_inputs(demo_state *demo)
{
    const skl_problem *const problem = &demo->problem;
    const int64_t heads = problem->heads_s, length = problem->len_q, dim = problem->dim_s;
    demo->inputs = (skl_inputs){
        .struct_size = sizeof demo->inputs,
        .q_t = skl_input_contiguous(demo->q_t, heads, length, dim),
        .k_t = skl_input_contiguous(demo->k_t, heads, length, dim),
        .q_s = skl_input_contiguous(demo->q_s, heads, length, dim),
        .k_s = skl_input_contiguous(demo->k_s, heads, length, dim),
    };
}

static void compute(demo_state *demo)
{
    const skl_problem *const problem = &demo->problem;
    const int64_t heads = problem->heads_s, length = problem->len_q, dim = problem->dim_s;
    const skl_rows rows = {
        .struct_size = sizeof rows,
        .kl = skl_output_contiguous(demo->kl, heads, length, 1),
        .lse_t = skl_output_contiguous(demo->lse_t, heads, length, 1),
        .lse_s = skl_output_contiguous(demo->lse_s, heads, length, 1),
    };
    const skl_gradients gradients = {
        .struct_size = sizeof gradients,
        .dq_s = skl_output_contiguous(demo->dq_s, heads, length, dim),
        .dk_s = skl_output_contiguous(demo->dk_s, heads, length, dim),
    };
    runner_forward(&demo->runner, &demo->inputs, &rows);
    demo->inputs.lse_t = skl_input_contiguous(demo->lse_t, heads, length, 1);
    demo->inputs.lse_s = skl_input_contiguous(demo->lse_s, heads, length, 1);
    runner_backward(&demo->runner, &demo->inputs, &gradients);
}

/* Compares the last queries with the float64 oracle: a smaller causal problem, bottom-right aligned. */
static double worst_difference(const demo_state *demo, int64_t checked)
{
    const skl_problem *const problem = &demo->problem;
    const int64_t first = problem->len_q - checked;
    skl_problem last = *problem;
    last.len_q = checked;
    last.gradients = 0;
    skl_inputs inputs = demo->inputs;
    inputs.q_t.data = demo->q_t + first * problem->dim_t;
    inputs.q_s.data = demo->q_s + first * problem->dim_s;
    oracle_result exact = oracle_run(&last, &inputs);
    double worst = 0;
    for (int64_t head = 0; head < problem->heads_s; head++) {
        for (int64_t i = 0; i < checked; i++) {
            const double streamed = (double)demo->kl[head * problem->len_q + first + i];
            const double difference = fabs(streamed - exact.kl[head * checked + i]);
            if (difference > worst) /* not fmax: GCC 12 for 64-bit Arm fails on that reduction */
                worst = difference;
        }
    }
    oracle_free(&exact);
    return worst;
}

/* ---- Output ------------------------------------------------------------------------------------------------- */

static double mean_kl(const demo_state *demo)
{
    const int64_t rows = demo->problem.heads_s * demo->problem.len_q;
    double sum = 0;
    for (int64_t row = 0; row < rows; row++)
        sum += (double)demo->kl[row];
    return sum / (double)rows;
}

static void print_timing(const char *label, const char *what, double seconds, double flop)
{
    printf("  %-14s %10s %8.1f GFLOP/s   %s\n", label, cli_seconds_text(seconds).text, 1e-9 * flop / seconds, what);
}

static void print_costs(const demo_state *demo)
{
    const term_style style = term_style_for(stdout);
    const plan_runner *const runner = &demo->runner;
    const workload work = workload_of(&demo->problem, &demo->inputs);
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
    printf("  %-14s %10s   P, S and the gradient of S, N x N in f32\n", "materialised",
           cli_bytes_text(work.materialised_size).text);
}

static void print_demo(const demo_state *demo)
{
    enum { MOST_CHECKED = 32, CHECKED_PAIRS = 1 << 20 };
    const term_style style = term_style_for(stdout);
    const skl_problem *const problem = &demo->problem;
    printf("%sAttention KL at a context of %" PRId64 "%s: synthetic teacher and student, %" PRId64
           " head%s of size %" PRId64 ", causal\n\n",
           style.bold, problem->len_q, style.plain, problem->heads_s, cli_plural(problem->heads_s), problem->dim_s);
    printf("  KL(teacher || student) by query, mean %s%.6g%s\n", style.bold, mean_kl(demo), style.plain);
    term_position_chart(stdout, demo->kl, demo->lse_s, problem->heads_s, problem->len_q);
    printf("\n");
    print_costs(demo);

    const int64_t affordable = CHECKED_PAIRS / problem->len_k + 1;
    const int64_t most = problem->len_q < MOST_CHECKED ? problem->len_q : MOST_CHECKED;
    const int64_t checked = affordable < most ? affordable : most;
    printf("\n%sAccuracy%s compared with float64, for the last %" PRId64 " quer%s: KL differs by at most %.1e\n",
           style.bold, style.plain, checked, checked == 1 ? "y" : "ies", worst_difference(demo, checked));
    printf("\n%sTry next%s\n", style.bold, style.plain);
    printf("  streamkl demo --context %-8" PRId64 " 4 times the context, equal memory\n", 4 * problem->len_q);
    printf("  streamkl kl --help               KL of your own tensors\n");
    printf("  streamkl bench                   comparison with a baseline that stores the matrices\n");
}

int cmd_demo(int argc, char **argv)
{
    static const command_line command = {doc, groups, NULL};
    demo_request request = {.context = 16384, .heads = 1, .dim = 64, .seed = 1, .options = skl_options_default()};
    options_parse(&command, argc, argv, &request);
    demo_state demo = {.problem = describe_problem(&request)};
    runner_open(&demo.runner, &demo.problem, &request.options);
    allocate_tensors(&demo);
    fill_tensors(&demo, (uint64_t)request.seed);
    connect_inputs(&demo);
    compute(&demo);
    print_demo(&demo);
    runner_close(&demo.runner);
    free(demo.block);
    return CLI_OK;
}
