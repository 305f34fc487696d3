#include "bench/cpu/measure.h"
#include "device/device.h"
#include "bench/cpu/materialized.h"
#include "bench/cpu/tensors.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum {
    SGEMM = BENCH_METHOD_COUNT, /* sampled like a method, with one pass */
    SAMPLED_COUNT,
    SGEMM_SIDE = 2048,
};

struct bench_session;

/* A method with a thread count. Its passes run in order, each timed separately: a backward follows its forward. */
typedef struct sampled_method {
    skl_status (*run)(const struct bench_session *session, const struct sampled_method *method, bench_pass pass);
    int pass_count; /* 0: it does not run */
    int threads;
    materialized *baseline;
    skl_plan *plan; /* streaming runs it */
    void *workspace;
    size_t workspace_size;
    int sample_count;
    double seconds[BENCH_PASS_COUNT][SAMPLER_SAMPLES_MAX];
} sampled_method;

/* Too large for the stack. All thread counts share the tensors, the matrices of the baselines and those of sgemm. */
typedef struct bench_session {
    bench_tensors tensors;
    const blas *library;
    materialized *baselines[BENCH_METHOD_COUNT]; /* NULL if it does not run */
    float *squares;                              /* [3, SGEMM_SIDE, SGEMM_SIDE] */
    sampled_method methods[BENCH_LIST_MAX][SAMPLED_COUNT];
} bench_session;

/* ---- Methods ------------------------------------------------------------------------------------------------ */

/* Backward and one-pass use the LSEs of the last forward. */
static skl_status run_streaming(const bench_session *session, const sampled_method *method, bench_pass pass)
{
    const bench_tensors *const tensors = &session->tensors;
    const int64_t heads = tensors->heads, length = tensors->length, dim = tensors->dim;
    skl_inputs inputs = {
        .struct_size = sizeof inputs,
        .q_t = skl_input_contiguous(tensors->q_t, heads, length, dim),
        .k_t = skl_input_contiguous(tensors->k_t, heads, length, dim),
        .q_s = skl_input_contiguous(tensors->q_s, heads, length, dim),
        .k_s = skl_input_contiguous(tensors->k_s, heads, length, dim),
    };
    skl_rows rows = {
        .struct_size = sizeof rows,
        .kl = skl_output_contiguous(tensors->kl, heads, length, 1),
    };
    if (pass == BENCH_FORWARD) {
        rows.lse_t = skl_output_contiguous(tensors->lse_t, heads, length, 1);
        rows.lse_s = skl_output_contiguous(tensors->lse_s, heads, length, 1);
        return skl_forward(method->plan, &inputs, &rows, method->workspace, method->workspace_size, NULL);
    }
    inputs.lse_t = skl_input_contiguous(tensors->lse_t, heads, length, 1);
    inputs.lse_s = skl_input_contiguous(tensors->lse_s, heads, length, 1);
    inputs.grad_kl = skl_input_contiguous(tensors->grad_kl, heads, length, 1);
    const skl_gradients gradients = {
        .struct_size = sizeof gradients,
        .dq_s = skl_output_contiguous(tensors->dq_s, heads, length, dim),
        .dk_s = skl_output_contiguous(tensors->dk_s, heads, length, dim),
    };
    if (pass == BENCH_BACKWARD)
        return skl_backward(method->plan, &inputs, &gradients, method->workspace, method->workspace_size, NULL);
    return skl_forward_backward(method->plan, &inputs, &rows, &gradients, method->workspace, method->workspace_size,
                                NULL);
}

static skl_status run_baseline(const bench_session *session, const sampled_method *method, bench_pass pass)
{
    (void)session;
    const bool done = pass == BENCH_FORWARD ? materialized_forward(method->baseline, method->threads)
                                            : materialized_backward(method->baseline, method->threads);
    return done ? SKL_OK : SKL_ERROR_MEMORY;
}

static skl_status run_sgemm(const bench_session *session, const sampled_method *method, bench_pass pass)
{
    (void)pass;
    const int64_t side = SGEMM_SIDE, count = side * side;
    const blas_operand a = {session->squares, side, false}, b = {session->squares + count, side, false};
    blas_set_threads(session->library, method->threads);
    blas_multiply(session->library, 1, a, b, session->squares + 2 * count, side, side, side);
    return SKL_OK;
}

/* ---- Setup -------------------------------------------------------------------------------------------------- */

static materialized_memory memory_of(bench_method method)
{
    return method == BENCH_FRAMEWORK ? MATERIALIZED_FRAMEWORK : MATERIALIZED_IN_PLACE;
}

static skl_status create_plan(skl_plan **plan, const bench_config *config, int64_t length, int64_t dim,
                              int thread_index)
{
    const skl_problem problem = bench_problem(config, length, dim);
    skl_options options = config->engine;
    options.threads = (int32_t)config->threads.values[thread_index];
    return skl_plan_create(plan, &problem, &options);
}

static skl_status open_streaming(sampled_method *method)
{
    static const skl_op ops[] = {SKL_OP_FORWARD, SKL_OP_BACKWARD, SKL_OP_FORWARD_BACKWARD};
    for (size_t i = 0; i < sizeof ops / sizeof ops[0]; i++) {
        const size_t size = skl_plan_workspace_size(method->plan, ops[i]);
        method->workspace_size = size > method->workspace_size ? size : method->workspace_size;
    }
    method->workspace = aligned_alloc(64, (method->workspace_size + 63) / 64 * 64);
    return method->workspace || method->workspace_size == 0 ? SKL_OK : SKL_ERROR_MEMORY;
}

static skl_status open_baselines(bench_session *session, const bench_config *config)
{
    for (int method = BENCH_IN_PLACE; method < BENCH_METHOD_COUNT; method++) {
        const materialized_memory memory = memory_of((bench_method)method);
        if (materialized_size(memory, config->heads, session->tensors.length) > (size_t)config->max_memory)
            continue;
        session->baselines[method] = materialized_create(&session->tensors, memory, session->library);
        if (session->baselines[method] == NULL)
            return SKL_ERROR_MEMORY;
    }
    return SKL_OK;
}

/* Small integers: no subnormal results, and equal results in all libraries. */
static skl_status open_sgemm(bench_session *session)
{
    const size_t count = (size_t)3 * SGEMM_SIDE * SGEMM_SIDE;
    session->squares = malloc(count * sizeof *session->squares);
    for (size_t i = 0; session->squares && i < count; i++)
        session->squares[i] = (float)((int)(i % 7) - 3);
    return session->squares ? SKL_OK : SKL_ERROR_MEMORY;
}

static skl_status open_methods(bench_session *session, const bench_config *config, int thread_index)
{
    sampled_method *const methods = session->methods[thread_index], *const streaming = &methods[BENCH_STREAMING];
    const bench_tensors *const tensors = &session->tensors;
    const int threads = (int)config->threads.values[thread_index];
    const skl_status status = create_plan(&streaming->plan, config, tensors->length, tensors->dim, thread_index);
    if (status != SKL_OK)
        return status;
    streaming->run = run_streaming;
    streaming->pass_count = BENCH_PASS_COUNT;
    for (int method = BENCH_IN_PLACE; method < BENCH_METHOD_COUNT; method++) {
        if (session->baselines[method])
            methods[method] = (sampled_method){.run = run_baseline,
                                               .pass_count = bench_pass_count((bench_method)method),
                                               .threads = threads,
                                               .baseline = session->baselines[method]};
    }
    if (session->library)
        methods[SGEMM] = (sampled_method){.run = run_sgemm, .pass_count = 1, .threads = threads};
    return open_streaming(streaming);
}

static skl_status open_session(bench_session *session, const bench_config *config, int64_t length, int64_t dim)
{
    const skl_problem problem = bench_problem(config, length, dim);
    if (!bench_tensors_create(&session->tensors, &problem))
        return SKL_ERROR_MEMORY;
    skl_status status = session->library ? open_sgemm(session) : SKL_OK;
    if (status == SKL_OK && session->library && !config->no_baseline)
        status = open_baselines(session, config);
    for (int i = 0; status == SKL_OK && i < config->threads.count; i++)
        status = open_methods(session, config, i);
    return status;
}

static void close_session(bench_session *session)
{
    for (int i = 0; i < BENCH_LIST_MAX; i++) {
        skl_plan_destroy(session->methods[i][BENCH_STREAMING].plan);
        free(session->methods[i][BENCH_STREAMING].workspace);
    }
    for (int method = 0; method < BENCH_METHOD_COUNT; method++)
        materialized_destroy(session->baselines[method]);
    free(session->squares);
    bench_tensors_destroy(&session->tensors);
    free(session);
}

/* ---- Sampling ----------------------------------------------------------------------------------------------- */

/* The threads of OpenBLAS spin for 2^26 clock ticks after a call, about 30 ms, and would slow down the next method.
 */
static void wait_for_idle_threads(void)
{
    const struct timespec pause = {.tv_nsec = 50 * 1000 * 1000};
    nanosleep(&pause, NULL);
}

static skl_status run_once(const bench_session *session, sampled_method *method)
{
    for (int pass = 0; pass < method->pass_count; pass++) {
        const double begin = clock_seconds();
        const skl_status status = method->run(session, method, (bench_pass)pass);
        if (status != SKL_OK)
            return status;
        method->seconds[pass][method->sample_count] = clock_seconds() - begin;
    }
    method->sample_count++;
    return SKL_OK;
}

/* One sample at least, and for 0.2 s. samples_end leaves room for the samples of later rounds. */
static skl_status run_slice(const bench_session *session, sampled_method *method, int samples_end)
{
    const double slice_seconds = 0.2, begin = clock_seconds();
    skl_status status = SKL_OK;
    do
        status = run_once(session, method);
    while (status == SKL_OK && method->sample_count < samples_end && clock_seconds() - begin < slice_seconds);
    return status;
}

/* Runs every method once to warm up, then a slice of each per round. Stops at the first failure. */
static skl_status sample_all(bench_session *session, int thread_counts, int rounds, skl_progress progress)
{
    assert(rounds >= 1 && rounds <= SAMPLER_SAMPLES_MAX);
    sampled_method *const methods = session->methods[0];
    const int count = thread_counts * SAMPLED_COUNT;
    skl_status status = SKL_OK;
    for (int i = 0; status == SKL_OK && i < count; i++) {
        status = run_once(session, &methods[i]);
        methods[i].sample_count = 0;
    }
    for (int round = 0; status == SKL_OK && round < rounds; round++) {
        progress(NULL, round, rounds);
        for (int i = 0; status == SKL_OK && i < count; i++) {
            if (methods[i].pass_count == 0)
                continue;
            wait_for_idle_threads();
            status = run_slice(session, &methods[i], SAMPLER_SAMPLES_MAX / rounds * (round + 1));
        }
    }
    progress(NULL, rounds, rounds);
    return status;
}

/* ---- Results ------------------------------------------------------------------------------------------------ */

static int compare_doubles(const void *left, const void *right)
{
    const double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

/* Sorts the samples. */
static timing timing_of(sampled_method *finished, int pass)
{
    double *const seconds = finished->seconds[pass];
    const int count = finished->sample_count;
    qsort(seconds, (size_t)count, sizeof *seconds, compare_doubles);
    return (timing){count, (seconds[(count - 1) / 2] + seconds[count / 2]) / 2, seconds[0], seconds[count - 1]};
}

static bench_method_result result_of(bench_session *session, int thread_index, bench_method method)
{
    sampled_method *const finished = &session->methods[thread_index][method];
    const bench_tensors *const tensors = &session->tensors;
    bench_method_result result = {.ran = finished->pass_count > 0, .memory_size = finished->workspace_size};
    if (method != BENCH_STREAMING)
        result.memory_size = materialized_size(memory_of(method), tensors->heads, tensors->length);
    for (int pass = 0; pass < finished->pass_count; pass++)
        result.passes[pass] = timing_of(finished, pass);
    return result;
}

static void append_points(bench_report *report, bench_session *session, double waiting_share)
{
    const bench_tensors *const tensors = &session->tensors;
    double kl_difference = NAN, gradient_difference = NAN;
    if (session->baselines[BENCH_IN_PLACE] || session->baselines[BENCH_FRAMEWORK])
        bench_tensors_compare(tensors, &kl_difference, &gradient_difference);
    const double sgemm_flop = 2.0 * SGEMM_SIDE * SGEMM_SIDE * SGEMM_SIDE;
    for (int i = 0; i < report->config.threads.count; i++) {
        const skl_plan *const plan = session->methods[i][BENCH_STREAMING].plan;
        bench_point *const point = &report->points[report->point_count++];
        *point = (bench_point){
            .length = tensors->length,
            .dim = tensors->dim,
            .threads = skl_plan_threads(plan),
            .sgemm_flops = session->library ? sgemm_flop / timing_of(&session->methods[i][SGEMM], 0).median : 0,
            .waiting_share = waiting_share,
            .kl_difference = kl_difference,
            .gradient_difference = gradient_difference,
        };
        snprintf(point->kernel, sizeof point->kernel, "%s", skl_plan_kernel(plan));
        for (int method = 0; method < BENCH_METHOD_COUNT; method++)
            point->methods[method] = result_of(session, i, (bench_method)method);
    }
}

/* ---- Entry points ------------------------------------------------------------------------------------------- */

skl_status bench_check(const bench_config *config)
{
    const int64_t longest = config->lengths.values[config->lengths.count - 1];
    for (int d = 0; d < config->dims.count; d++) {
        for (int t = 0; t < config->threads.count; t++) {
            skl_plan *plan = NULL;
            const skl_status status = create_plan(&plan, config, longest, config->dims.values[d], t);
            skl_plan_destroy(plan);
            if (status != SKL_OK)
                return status;
        }
    }
    return SKL_OK;
}

skl_status bench_measure(bench_report *report, const blas *library, int64_t length, int64_t dim,
                         skl_progress progress)
{
    bench_session *const session = calloc(1, sizeof *session);
    if (session == NULL)
        return SKL_ERROR_MEMORY;
    const bench_config *const config = &report->config;
    session->library = library;
    skl_status status = open_session(session, config, length, dim);
    const double begin = clock_seconds(), waiting_begin = machine_waiting_seconds();
    if (status == SKL_OK)
        status = sample_all(session, config->threads.count, (int)config->rounds, progress);
    const double waited = machine_waiting_seconds() - waiting_begin;
    if (status == SKL_OK)
        append_points(report, session, waited / (clock_seconds() - begin));
    close_session(session);
    return status;
}
