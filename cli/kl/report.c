/* The output of `streamkl kl`: text, or one JSON object. */
#include "cli/common/cli.h"
#include "cli/kl/kl.h"
#include "cli/common/options.h"
#include "cli/term/term.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>

static double reduced(const kl_results *results, kl_reduction reduction)
{
    const bool mean = reduction != REDUCTION_SUM;
    return mean && results->valid_rows > 0 ? results->sum / (double)results->valid_rows : results->sum;
}

/* Mean over the rows that attend to any key. */
static double mean_of(const float *rows, const kl_results *results, const skl_problem *problem)
{
    double sum = 0;
    for (int64_t i = 0; i < kl_row_count(problem, problem->heads_s); i++)
        sum += (double)rows[i]; /* 0 for other rows */
    return results->valid_rows > 0 ? sum / (double)results->valid_rows : 0;
}

/* ---- JSON --------------------------------------------------------------------------------------------------- */

/* [batch][heads][length], packed [heads][total], like --out. */
static json_t *rows_json(const float *rows, const skl_problem *problem)
{
    const int64_t shape[] = {problem->batch, problem->heads_s, kl_row_length(problem)};
    return cli_json_array(rows, sizeof *rows, problem->packed ? 2 : 3, problem->packed ? shape + 1 : shape);
}

/* Exact if it fits into a JSON integer. */
static json_t *count_json(double count)
{
    return count < 0x1p63 ? json_integer((json_int_t)count) : json_real(count);
}

static json_t *shapes_json(const kl_inputs *inputs)
{
    json_t *const shapes = json_object();
    for (kl_role role = 0; role < ROLE_REQUIRED_COUNT; role++) {
        const stored_tensor *const tensor = inputs->views[role].stored;
        json_t *const shape = json_array();
        for (int d = 0; d < tensor->rank; d++)
            cli_json_append(shape, json_integer(tensor->shape[d]));
        cli_json_set(shapes, kl_role_names[role], shape);
    }
    return shapes;
}

/* The operations that ran. */
static json_t *explanations_json(const plan_runner *runner)
{
    json_t *const object = json_object();
    for (int op = 0; op < SKL_OP_PARTIAL; op++)
        if (runner->explanations[op])
            explain_add_json(object, (skl_op)op, runner->explanations[op]);
    return object;
}

static void print_json(const kl_results *results, const kl_inputs *inputs, const kl_request *request)
{
    const skl_problem *const problem = &inputs->problem;
    const plan_runner *const runner = &results->runner;
    const int64_t rows = kl_row_count(problem, problem->heads_s);
    const workload work = workload_of(problem, &inputs->tensors);
    const bool every_row = request->reduction == REDUCTION_NONE;
    const struct {
        const char *key;
        json_t *value;
    } members[] = {
        {"kl", every_row ? rows_json(results->kl, problem) : cli_json_number(reduced(results, request->reduction))},
        {"reduction", json_string(kl_reduction_names[request->reduction])},
        {"direction", json_string(direction_names[problem->direction])},
        {"rows", json_integer(results->valid_rows)},
        {"masked_rows", json_integer(rows - results->valid_rows)},
        {"nonfinite_rows", json_integer(results->nonfinite_rows)},
        {"device", json_string(device_names[request->options.device])},
        {"kernel", json_string(skl_plan_kernel(runner->plan))},
        {"threads", json_integer(skl_plan_threads(runner->plan))},
        {"seconds", json_real(runner->forward_seconds + runner->backward_seconds)},
        {"forward_seconds", json_real(runner->forward_seconds)},
        {"backward_seconds", json_real(runner->backward_seconds)},
        {"pairs", count_json(work.pairs)},
        {"extra_bytes", json_integer((json_int_t)runner->workspace_size)},
        {"peak_growth_bytes", runner->peak_growth < 0 ? json_null() : json_integer(runner->peak_growth)},
        {"materialized_bytes", count_json(work.materialized_size)},
        {"shapes", shapes_json(inputs)},
        {"layout", json_string(kl_layout_names[request->layout])},
        {"row_bounds", json_boolean(problem->row_bounds)},
        {"sinks", json_boolean(problem->sinks)},
    };
    json_t *const object = json_object();
    for (size_t m = 0; m < sizeof members / sizeof members[0]; m++)
        cli_json_set(object, members[m].key, members[m].value);
    if (kl_is_indexer(problem)) {
        cli_json_set(object, "cross_entropy", cli_json_number(mean_of(results->cross_entropy, results, problem)));
        cli_json_set(object, "entropy", cli_json_number(mean_of(results->entropy, results, problem)));
        cli_json_set(object, "mass", cli_json_number(mean_of(results->mass, results, problem)));
    }
    if (request->explain)
        cli_json_set(object, "explain", explanations_json(runner));
    cli_print_json(object);
}

/* ---- Table -------------------------------------------------------------------------------------------------- */

static void print_headline(const kl_results *results, const skl_problem *problem, kl_reduction reduction)
{
    const term_style style = term_style_for(stdout);
    printf("KL(%s)  %s%.9g%s  %s of %" PRId64 " row%s\n", direction_formula(problem->direction), style.bold,
           reduced(results, reduction), style.plain, reduction == REDUCTION_SUM ? "sum" : "mean", results->valid_rows,
           cli_plural(results->valid_rows));
    if (results->nonfinite_rows > 0)
        printf("%s  %" PRId64 " row%s not finite: visible elements of q or k are NaN or infinite%s\n", style.bad,
               results->nonfinite_rows, results->nonfinite_rows == 1 ? " is" : "s are", style.plain);
}

static void print_side(const char *side, const kl_view *q, const kl_view *k)
{
    printf("  %-8s %" PRId64 " head%s, %" PRId64 " key head%s, size %" PRId64 ", %s\n", side, q->extent[AXIS_HEADS],
           cli_plural(q->extent[AXIS_HEADS]), k->extent[AXIS_HEADS], cli_plural(k->extent[AXIS_HEADS]),
           q->extent[AXIS_DIM], dtype_names[q->stored->dtype]);
}

static void print_shapes(const kl_inputs *inputs, kl_layout layout)
{
    const skl_problem *const problem = &inputs->problem;
    const bool packed = problem->packed;
    printf("  %-8s %" PRId64 " x %" PRId64 " queries x %" PRId64 " keys%s\n", packed ? "packed" : "batch",
           problem->batch, problem->len_q, problem->len_k, packed ? ", at most" : "");
    print_side("teacher", &inputs->views[ROLE_Q_T], &inputs->views[ROLE_K_T]);
    print_side("student", &inputs->views[ROLE_Q_S], &inputs->views[ROLE_K_S]);
    printf("  %-8s %s%s\n", "layout", kl_layout_names[layout], layout == LAYOUT_DEFAULT ? ", the default" : "");
}

/* What limits keys or adds an outcome without being an option: files may contain it. */
static void print_bounds_and_sinks(const kl_inputs *inputs)
{
    if (inputs->problem.row_bounds)
        printf("  %-8s %s%s%s of every query\n", "bounds", inputs->key_begin ? "key_begin" : "",
               inputs->key_begin && inputs->key_end ? " and " : "", inputs->key_end ? "key_end" : "");
    if (inputs->problem.sinks)
        printf("  %-8s sink_t and sink_s of every head\n", "sinks");
}

static void print_indexer(const kl_results *results, const skl_problem *problem)
{
    printf("  %-8s %" PRId64 " student head%s with %" PRId64 " index head%s", "indexer", problem->heads_s,
           cli_plural(problem->heads_s), problem->index_heads, cli_plural(problem->index_heads));
    if (problem->top_k > 0)
        printf(", top-k %" PRId64, problem->top_k);
    printf("\n  %-8s cross-entropy %.6g, entropy %.6g, mass %.6g\n", "mean",
           mean_of(results->cross_entropy, results, problem), mean_of(results->entropy, results, problem),
           mean_of(results->mass, results, problem));
}

typedef struct head_summary {
    double sum, largest;
    int64_t rows, largest_row;
} head_summary;

static head_summary summarize_head(const kl_results *results, const skl_problem *problem, int64_t head)
{
    head_summary summary = {0, 0, 0, -1};
    const int64_t length = kl_row_length(problem);
    for (int64_t b = 0; b < kl_row_batches(problem); b++) {
        const int64_t first = (b * problem->heads_s + head) * length;
        for (int64_t i = 0; i < length; i++) {
            if (!row_attends(results->lse_s[first + i], results->kl[first + i]))
                continue;
            const double kl = (double)results->kl[first + i];
            summary.sum += kl;
            summary.rows++;
            if (summary.largest_row < 0 || kl > summary.largest) {
                summary.largest = kl;
                summary.largest_row = i;
            }
        }
    }
    return summary;
}

/* One line per head, for the first heads. */
static void print_heads(const kl_results *results, const skl_problem *problem)
{
    enum { MOST_LINES = 32 };
    const term_style style = term_style_for(stdout);
    const int64_t lines = problem->heads_s < MOST_LINES ? problem->heads_s : MOST_LINES;
    printf("\n%s  %8s %14s %14s %12s%s\n", style.dim, "head", "mean", "max", "at query", style.plain);
    for (int64_t head = 0; head < lines; head++) {
        const head_summary summary = summarize_head(results, problem, head);
        if (summary.rows == 0) {
            printf("  %8" PRId64 " %14s\n", head, "no visible key");
            continue;
        }
        printf("  %8" PRId64 " %14.6g %14.6g %12" PRId64 "\n", head, summary.sum / (double)summary.rows,
               summary.largest, summary.largest_row);
    }
    if (lines < problem->heads_s)
        printf("  %8s %14s\n", "...", "--out FILE writes all rows");
}

static void print_timing(const char *label, double seconds, double flop)
{
    printf("  %-8s %10s %10.1f GFLOP/s\n", label, cli_seconds_text(seconds).text,
           seconds > 0 ? 1e-9 * flop / seconds : 0);
}

static void print_costs(const kl_results *results, const kl_inputs *inputs)
{
    const plan_runner *const runner = &results->runner;
    const workload work = workload_of(&inputs->problem, &inputs->tensors);
    printf("\n");
    print_timing("forward", runner->forward_seconds, work.forward_flop);
    if (inputs->problem.gradients)
        print_timing("backward", runner->backward_seconds, work.backward_flop);
    printf("  %-8s %10s of workspace; materialized, %s\n", "memory",
           cli_bytes_text((double)runner->workspace_size).text, cli_bytes_text(work.materialized_size).text);
    printf("  %-8s %10s %s\n", "kernel", skl_plan_kernel(runner->plan), runner_location_of(runner).text);
}

static void print_explanations(const plan_runner *runner)
{
    printf("\n");
    for (int op = 0; op < SKL_OP_PARTIAL; op++)
        if (runner->explanations[op])
            explain_print(stdout, (skl_op)op, runner->explanations[op]);
}

static void print_written(const char *path, const char *contents)
{
    if (path)
        printf("  %-8s %s (%s)\n", "wrote", printable_of(path).text, contents);
}

static void print_table(const kl_results *results, const kl_inputs *inputs, const kl_request *request)
{
    enum { SHORTEST_CHART = 16 };
    const skl_problem *const problem = &inputs->problem;
    print_headline(results, problem, request->reduction);
    print_shapes(inputs, request->layout);
    print_bounds_and_sinks(inputs);
    if (kl_is_indexer(problem))
        print_indexer(results, problem);
    print_heads(results, problem);
    if (!problem->packed && problem->len_q >= SHORTEST_CHART && results->valid_rows > 0) {
        printf("\n");
        term_position_chart(stdout, results->kl, results->lse_s, problem->batch * problem->heads_s, problem->len_q);
    }
    print_costs(results, inputs);
    if (request->explain)
        print_explanations(&results->runner);
    const bool indexer = kl_is_indexer(problem);
    print_written(request->out_path, indexer ? "kl, lse_t, lse_s, cross_entropy, entropy, mass" : "kl, lse_t, lse_s");
    char gradients[64];
    snprintf(gradients, sizeof gradients, "dq_s, dk_s%s%s%s%s", request->grad_teacher ? ", dq_t, dk_t" : "",
             indexer ? ", dw_s" : "", results->gradients[ROLE_SINK_S] ? ", dsink_s" : "",
             results->gradients[ROLE_SINK_T] ? ", dsink_t" : "");
    print_written(request->grad_path, gradients);
}

void kl_report(const kl_results *results, const kl_inputs *inputs, const kl_request *request)
{
    (request->json ? print_json : print_table)(results, inputs, request);
}
