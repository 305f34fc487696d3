#include "cli/stats/stats.h"

#include <stdlib.h>

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

void stats_compute(stats_results *results, const kl_inputs *inputs, const stats_request *request)
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

void stats_results_free(stats_results *results)
{
    float *const all[] = {results->key_sum,        results->key_max,      results->lse,
                          results->entropy,        results->max_logit,    results->expected_distance,
                          results->head_max_logit, results->distance_mass};
    for (size_t n = 0; n < sizeof all / sizeof all[0]; n++)
        free(all[n]);
    runner_close(&results->runner);
}
