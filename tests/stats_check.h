/* skl_attention_stats on a fixture: options, poisoned results, and the comparison with the oracle. */
#ifndef SKL_TESTS_STATS_CHECK_H
#define SKL_TESTS_STATS_CHECK_H

#include "fixture.h"
#include "oracle_stats.h"

/* Numbers and arrays of a call; fixed for its life, since the oracle solves them. */
typedef struct stats_setup {
    const fixture *f;
    skl_inputs inputs; /* without the teacher; with lse_s if it is given */
    skl_stats options; /* without results */
    test_tensor weights, lse;
    test_memory ranges, rows;
    oracle_stats exact, naive;
} stats_setup;

/* The options of a setup. */
typedef enum stats_kind {
    STATS_PLAIN,    /* all rows of weight 1, the LSE computed */
    STATS_WEIGHTED, /* random weights, some of them 0, a range of rows, key heads, a wider LSE given */
    STATS_RANDOM,   /* anything; results are a random subset */
    STATS_KINDS
} stats_kind;

stats_setup stats_setup_create(const fixture *f, stats_kind kind);
void stats_setup_destroy(stats_setup *setup);

/* In the order of stats_results. */
enum {
    KEY_SUM,
    KEY_MAX,
    LSE,
    ENTROPY,
    MAX_LOGIT,
    EXPECTED_DISTANCE,
    HEAD_MAX_LOGIT,
    DISTANCE_MASS,
    RANGE_MASS,
    RANGE_SUM,
    TOP_KEYS,
    TOP_P,
    WEIGHTS,
    STATS_RESULTS
};

enum { ALL_STATS = (1 << STATS_RESULTS) - 1 };

/* Poisoned buffers for all results: contiguous ones where a result has no strides. */
typedef struct stats_results {
    test_tensor tensors[STATS_RESULTS];
} stats_results;

stats_results stats_results_create(const stats_setup *setup);
void stats_results_destroy(stats_results *results);

/* The options with the results of these bits. */
skl_stats stats_of(const stats_setup *setup, const stats_results *results, uint32_t bits);

/* Results that a call of this kind requests. */
uint32_t stats_requested(const stats_setup *setup, stats_kind kind);

/* Runs the call in a poisoned workspace. Returns 0 if the backend has no kernel for it. */
int stats_run(const skl_plan *plan, const stats_setup *setup, const skl_stats *stats);

/* Prints each wrong result, and returns their number. */
int stats_mismatch(const stats_setup *setup, const stats_results *results, uint32_t bits, const char *label);

/* Name of the first result whose bits differ; NULL if there is none. */
const char *stats_difference(const stats_results *a, const stats_results *b);

#endif
