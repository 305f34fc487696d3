/* The oracle of skl_attention_stats: naive, in double, from the whole matrix of probabilities. It shares no code with
 * src/ and checks no argument. */
#ifndef SKL_ORACLE_STATS_H
#define SKL_ORACLE_STATS_H

#include "oracle.h"

/* Results, and their condition numbers: see oracle_result. */
typedef struct oracle_array {
    double *value, *rounding;
    int64_t count;
} oracle_array;

/* Contiguous, with the shapes of skl_stats. Rows and keys after the last packed sequence are those of no sequence:
 * LSE and maximum -inf, 0 elsewhere. */
typedef struct oracle_stats {
    oracle_array key_sum, key_max;
    oracle_array lse, entropy, max_logit, expected_distance;
    oracle_array head_max_logit, distance_mass;
    oracle_array range_mass, range_sum;
    oracle_array top_p;
    oracle_array p; /* all probabilities: [batch, heads_s, len_q, len_k] of every sequence, 0 for masked keys */
} oracle_stats;

/* Reads q_s, k_s, lse_s, sink_s and the arrays of `inputs`, and the numbers and arrays of `stats`, whose results it
 * does not write. Aborts when memory runs out. */
oracle_stats oracle_stats_run(const skl_problem *problem, const skl_inputs *inputs, const skl_stats *stats);

/* Runs the code of oracle_stats compiled in float. */
oracle_stats oracle_stats_run_f32(const skl_problem *problem, const skl_inputs *inputs, const skl_stats *stats);

void oracle_stats_free(oracle_stats *stats);

#endif
