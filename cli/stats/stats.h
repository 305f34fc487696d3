/* streamkl stats: request (command line) -> inputs (the readers of streamkl kl) -> results -> file and report. */
#ifndef STREAMKL_CLI_STATS_STATS_H
#define STREAMKL_CLI_STATS_STATS_H

#include "cli/kl/kl.h"

typedef struct stats_request {
    kl_request input;
    int64_t rows[2];   /* the rows of the sums, as in skl_stats */
    int64_t top_count; /* keys with the largest sums that are listed */
    int32_t per_key_head, json;
    const char *out_path;
} stats_request;

/* Results, contiguous: the shapes of skl_stats. */
typedef struct stats_results {
    plan_runner runner;
    double seconds;
    int64_t sum_heads; /* heads of key_sum and key_max */
    int32_t buckets;   /* number of distances in distance_mass: as many as the keys need */
    float *key_sum, *key_max;
    float *lse, *entropy, *max_logit, *expected_distance;
    float *head_max_logit, *distance_mass;
} stats_results;

void stats_compute(stats_results *results, const kl_inputs *inputs, const stats_request *request);
void stats_results_free(stats_results *results);
void stats_write(const stats_results *results, const skl_problem *problem, const stats_request *request);
void stats_report(const stats_results *results, const skl_problem *problem, const stats_request *request);

#endif
