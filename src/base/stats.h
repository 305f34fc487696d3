/* Statistics of one attention: what a call requests, and the rules that both backends share. */
#ifndef SKL_BASE_STATS_H
#define SKL_BASE_STATS_H

#include "base/visible.h"

enum { SKL_STATS_BUCKETS_MAX = 64, SKL_STATS_RANGES_MAX = 64, SKL_STATS_TOP_MAX = 64 };

/* Results as bits. */
enum {
    SKL_STATS_KEY_SUM = 1,
    SKL_STATS_KEY_MAX = 2,
    SKL_STATS_LSE = 4,
    SKL_STATS_ENTROPY = 8,
    SKL_STATS_MAX_LOGIT = 16,
    SKL_STATS_EXPECTED_DISTANCE = 32,
    SKL_STATS_HEAD_MAX_LOGIT = 64,
    SKL_STATS_DISTANCE_MASS = 128,
    SKL_STATS_RANGE_MASS = 256,
    SKL_STATS_RANGE_SUM = 512,
    SKL_STATS_TOP = 1024, /* top_keys or top_p */
    SKL_STATS_WEIGHTS = 2048,
    SKL_STATS_ALL = 4095,
    SKL_STATS_OF_KEYS = SKL_STATS_KEY_SUM | SKL_STATS_KEY_MAX,
    SKL_STATS_OF_ROWS = SKL_STATS_ALL & ~SKL_STATS_OF_KEYS,
    /* Results of every row, whatever its weight. */
    SKL_STATS_OF_EVERY_ROW = SKL_STATS_LSE | SKL_STATS_ENTROPY | SKL_STATS_MAX_LOGIT | SKL_STATS_EXPECTED_DISTANCE |
                             SKL_STATS_RANGE_MASS | SKL_STATS_TOP | SKL_STATS_WEIGHTS,
    SKL_STATS_OF_ONE_PASS = SKL_STATS_ENTROPY | SKL_STATS_MAX_LOGIT | SKL_STATS_EXPECTED_DISTANCE |
                            SKL_STATS_HEAD_MAX_LOGIT, /* each is a number per row or head */
    SKL_STATS_RANGES = SKL_STATS_RANGE_MASS | SKL_STATS_RANGE_SUM
};

/* Whether a problem's student has statistics: softmax attention has. */
int skl_has_statistics(const skl_problem *problem);

/* The results that have a buffer. */
uint32_t skl_stats_bits(const skl_stats *stats);

/* Checks the numbers of `stats`. Reads no array. */
skl_status skl_stats_check(const skl_stats *stats);

/* Checks key_ranges and chosen_rows, which are in host memory, after the arrays of `inputs`. */
skl_status skl_stats_check_values(const skl_problem *problem, const skl_inputs *inputs, const skl_stats *stats);

/* Rows [begin, end) of a sequence of `count` rows that sums and maxima over rows are made of. */
SKL_HOST_DEVICE skl_range skl_stats_rows(const skl_stats *stats, int64_t count)
{
    const int64_t begin = stats->row_begin < 0 ? count + stats->row_begin : stats->row_begin;
    const int64_t end = stats->row_end <= 0 ? count + stats->row_end : stats->row_end;
    const int64_t last = skl_max(0, skl_min(count, end));
    const skl_range rows = {skl_max(0, skl_min(last, begin)), last};
    return rows;
}

/* |position of query i - position of key j|. */
SKL_HOST_DEVICE int64_t skl_stats_distance(const skl_sequence *s, int64_t i, int64_t j)
{
    const int64_t difference = i + s->diagonal - j;
    return difference < 0 ? -difference : difference;
}

/* The bucket of a distance: 0 for 0, n for 2^(n-1) <= distance < 2^n, at most the last. */
SKL_HOST_DEVICE int32_t skl_stats_bucket(int64_t distance, int32_t count)
{
    int32_t bucket = 0;
    while (bucket < count - 1 && distance >> bucket != 0)
        bucket++;
    return bucket;
}

#endif
