#include "bench/cpu/measure.h"
#include "device/device.h"
#include "bench/cpu/materialized.h"
#include "bench/cpu/sgemm.h"
#include "bench/cpu/streaming.h"
#include "bench/cpu/tensors.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* ---- Methods ------------------------------------------------------------------------------------------------ */

typedef struct baseline_entry {
    materialized *run;
    int threads;
} baseline_entry;

typedef struct sgemm_entry {
    const sgemm_cube *cube;
    int threads;
} sgemm_entry;

/* The methods for one thread count. Those that do not run are NULL. */
typedef struct thread_entry {
    streaming streaming;
    baseline_entry baselines[BENCH_METHOD_COUNT];
    sgemm_entry sgemm;
    sampled_method *methods[BENCH_METHOD_COUNT], *sgemm_method;
} thread_entry;

/* Too large for the stack. All thread counts share the matrices of the baseline. */
typedef struct bench_session {
    bench_tensors tensors;
    materialized *baselines[BENCH_METHOD_COUNT]; /* NULL if it does not run */
    sgemm_cube *cube;
    thread_entry entries[BENCH_LIST_MAX];
    int sampled_count;
    sampled_method sampled[BENCH_LIST_MAX * (BENCH_METHOD_COUNT + 1)];
} bench_session;

static skl_status run_streaming(void *context, int pass)
{
    return streaming_run(context, (bench_pass)pass);
}

static skl_status run_baseline(void *context, int pass)
{
    const baseline_entry *const baseline = context;
    const bool done = pass == BENCH_FORWARD ? materialized_forward(baseline->run, baseline->threads)
                                            : materialized_backward(baseline->run, baseline->threads);
    return done ? SKL_OK : SKL_ERROR_MEMORY;
}

static skl_status run_sgemm(void *context, int pass)
{
    (void)pass;
    const sgemm_entry *const sgemm = context;
    sgemm_cube_run(sgemm->cube, sgemm->threads);
    return SKL_OK;
}

static sampled_method *add_method(bench_session *session, sampler_call *run, void *context, int pass_count)
{
    sampled_method *const added = &session->sampled[session->sampled_count++];
    added->run = run;
    added->context = context;
    added->pass_count = pass_count;
    return added;
}

static void add_sgemm(bench_session *session, thread_entry *entry, int threads)
{
    entry->sgemm = (sgemm_entry){session->cube, threads};
    entry->sgemm_method = add_method(session, run_sgemm, &entry->sgemm, 1);
}

/* ---- Setup -------------------------------------------------------------------------------------------------- */

static materialized_memory memory_of(bench_method method)
{
    return method == BENCH_FRAMEWORK ? MATERIALIZED_FRAMEWORK : MATERIALIZED_IN_PLACE;
}

static skl_options options_of(const bench_config *config, int thread_index)
{
    skl_options options = config->engine;
    options.threads = (int32_t)config->threads.values[thread_index];
    return options;
}

static skl_status open_baselines(bench_session *session, const bench_config *config, const blas *library,
                                 int64_t length, int64_t dim)
{
    const bench_tensors *const tensors = &session->tensors;
    for (int method = BENCH_IN_PLACE; method < BENCH_METHOD_COUNT; method++) {
        const materialized_memory memory = memory_of((bench_method)method);
        if (materialized_size(memory, config->heads, length) > (size_t)config->max_memory)
            continue;
        const materialized_problem problem = {
            .memory = memory,
            .heads = config->heads,
            .length = length,
            .dim = dim,
            .scale = (float)(1 / sqrt((double)dim)),
            .causal = config->causal,
            .q_t = tensors->q_t_f32,
            .k_t = tensors->k_t_f32,
            .q_s = tensors->q_s_f32,
            .k_s = tensors->k_s_f32,
            .grad_kl = tensors->grad_kl,
            .kl = tensors->baseline_kl,
            .dq_s = tensors->baseline_dq_s,
            .dk_s = tensors->baseline_dk_s,
        };
        session->baselines[method] = materialized_create(&problem, library);
        if (session->baselines[method] == NULL)
            return SKL_ERROR_MEMORY;
    }
    return SKL_OK;
}

static skl_status open_entry(bench_session *session, thread_entry *entry, const skl_problem *problem,
                             const skl_options *options)
{
    skl_status status = streaming_open(&entry->streaming, problem, options, &session->tensors);
    if (status != SKL_OK)
        return status;
    entry->methods[BENCH_STREAMING] = add_method(session, run_streaming, &entry->streaming, BENCH_PASS_COUNT);
    for (int method = BENCH_IN_PLACE; method < BENCH_METHOD_COUNT; method++) {
        if (session->baselines[method] == NULL)
            continue;
        entry->baselines[method] = (baseline_entry){session->baselines[method], options->threads};
        entry->methods[method] =
            add_method(session, run_baseline, &entry->baselines[method], bench_pass_count((bench_method)method));
    }
    if (session->cube)
        add_sgemm(session, entry, options->threads);
    return SKL_OK;
}

static skl_status open_cube(bench_session *session, const blas *library)
{
    session->cube = sgemm_cube_create(library);
    return session->cube ? SKL_OK : SKL_ERROR_MEMORY;
}

static skl_status open_session(bench_session *session, const bench_config *config, const blas *library,
                               int64_t length, int64_t dim)
{
    const skl_problem problem = bench_problem(config, length, dim);
    if (!bench_tensors_create(&session->tensors, &problem))
        return SKL_ERROR_MEMORY;
    skl_status status = library ? open_cube(session, library) : SKL_OK;
    if (status == SKL_OK && library && !config->no_baseline)
        status = open_baselines(session, config, library, length, dim);
    for (int i = 0; status == SKL_OK && i < config->threads.count; i++) {
        const skl_options options = options_of(config, i);
        status = open_entry(session, &session->entries[i], &problem, &options);
    }
    return status;
}

static void close_session(bench_session *session)
{
    for (int i = 0; i < BENCH_LIST_MAX; i++)
        streaming_close(&session->entries[i].streaming);
    for (int method = 0; method < BENCH_METHOD_COUNT; method++)
        materialized_destroy(session->baselines[method]);
    sgemm_cube_destroy(session->cube);
    bench_tensors_destroy(&session->tensors);
    free(session);
}

/* ---- Results ------------------------------------------------------------------------------------------------ */

static bench_method_result result_of(const thread_entry *entry, const bench_config *config, bench_method method,
                                     int64_t length)
{
    bench_method_result result = {.ran = entry->methods[method] != NULL};
    if (method == BENCH_STREAMING)
        result.memory_size = entry->streaming.workspace_size;
    else
        result.memory_size = materialized_size(memory_of(method), config->heads, length);
    for (int pass = 0; result.ran && pass < bench_pass_count(method); pass++)
        result.passes[pass] = sampler_timing(entry->methods[method], pass);
    return result;
}

static double sgemm_flops(const thread_entry *entry)
{
    return entry->sgemm_method ? sgemm_cube_flop() / sampler_timing(entry->sgemm_method, 0).median : 0;
}

static void append_points(bench_report *report, const bench_session *session, int64_t length, int64_t dim,
                          double waiting_share)
{
    const bench_config *const config = &report->config;
    const bool compared = session->baselines[BENCH_IN_PLACE] || session->baselines[BENCH_FRAMEWORK];
    const double kl_difference = compared ? bench_tensors_kl_difference(&session->tensors) : NAN;
    const double gradient_difference = compared ? bench_tensors_gradient_difference(&session->tensors) : NAN;
    for (int i = 0; i < config->threads.count; i++) {
        const thread_entry *const entry = &session->entries[i];
        bench_point *const point = &report->points[report->point_count++];
        *point = (bench_point){
            .length = length,
            .dim = dim,
            .threads = skl_plan_threads(entry->streaming.plan),
            .sgemm_flops = sgemm_flops(entry),
            .waiting_share = waiting_share,
            .kl_difference = kl_difference,
            .gradient_difference = gradient_difference,
        };
        snprintf(point->kernel, sizeof point->kernel, "%s", skl_plan_kernel(entry->streaming.plan));
        for (int method = 0; method < BENCH_METHOD_COUNT; method++)
            point->methods[method] = result_of(entry, config, (bench_method)method, length);
    }
}

/* ---- Entry points ------------------------------------------------------------------------------------------- */

skl_status bench_check(const bench_config *config)
{
    const bench_list *const lengths = &config->lengths, *const dims = &config->dims;
    for (int d = 0; d < dims->count; d++) {
        for (int t = 0; t < config->threads.count; t++) {
            const skl_problem problem = bench_problem(config, lengths->values[lengths->count - 1], dims->values[d]);
            const skl_options options = options_of(config, t);
            skl_plan *plan = NULL;
            const skl_status status = skl_plan_create(&plan, &problem, &options);
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
    skl_status status = open_session(session, config, library, length, dim);
    const double begin = clock_seconds(), waiting_begin = machine_waiting_seconds();
    if (status == SKL_OK)
        status = sampler_run(session->sampled, session->sampled_count, (int)config->rounds, progress);
    const double waited = machine_waiting_seconds() - waiting_begin;
    if (status == SKL_OK)
        append_points(report, session, length, dim, waited / (clock_seconds() - begin));
    close_session(session);
    return status;
}

skl_status bench_measure_sgemm(const bench_config *config, const blas *library, double *flops, skl_progress progress)
{
    bench_session *const session = calloc(1, sizeof *session);
    if (session == NULL)
        return SKL_ERROR_MEMORY;
    skl_status status = open_cube(session, library);
    for (int i = 0; status == SKL_OK && i < config->threads.count; i++)
        add_sgemm(session, &session->entries[i], (int)config->threads.values[i]);
    if (status == SKL_OK)
        status = sampler_run(session->sampled, session->sampled_count, (int)config->rounds, progress);
    for (int i = 0; status == SKL_OK && i < config->threads.count; i++)
        flops[i] = sgemm_flops(&session->entries[i]);
    close_session(session);
    return status;
}
