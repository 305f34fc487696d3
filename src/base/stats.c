#include "base/stats.h"

#include <inttypes.h>
#include <stdbool.h>

#include "base/status.h"

int skl_has_statistics(const skl_problem *problem)
{
    return !skl_is_indexer(problem) && problem->link_s == SKL_LINK_SOFTMAX;
}

uint32_t skl_stats_bits(const skl_stats *stats)
{
    const struct {
        const void *data;
        uint32_t bit;
    } all[] = {{stats->key_sum.data, SKL_STATS_KEY_SUM},
               {stats->key_max.data, SKL_STATS_KEY_MAX},
               {stats->lse.data, SKL_STATS_LSE},
               {stats->entropy.data, SKL_STATS_ENTROPY},
               {stats->max_logit.data, SKL_STATS_MAX_LOGIT},
               {stats->expected_distance.data, SKL_STATS_EXPECTED_DISTANCE},
               {stats->head_max_logit, SKL_STATS_HEAD_MAX_LOGIT},
               {stats->distance_mass, SKL_STATS_DISTANCE_MASS},
               {stats->range_mass.data, SKL_STATS_RANGE_MASS},
               {stats->range_sum, SKL_STATS_RANGE_SUM},
               {stats->top_keys.data, SKL_STATS_TOP},
               {stats->top_p.data, SKL_STATS_TOP},
               {stats->weights, SKL_STATS_WEIGHTS}};
    uint32_t bits = 0;
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        bits |= all[i].data != NULL ? all[i].bit : 0;
    return bits;
}

/* ---- Numbers --------------------------------------------------------------------------------------------------- */

skl_status skl_stats_check(const skl_stats *stats)
{
    const uint32_t bits = skl_stats_bits(stats);
    const struct {
        const char *name;
        int64_t value, lowest, highest;
    } rules[] = {
        {"row_begin", stats->row_begin, -SKL_LENGTH_MAX, SKL_LENGTH_MAX},
        {"row_end", stats->row_end, -SKL_LENGTH_MAX, SKL_LENGTH_MAX},
        {"per_key_head", stats->per_key_head, 0, 1},
        {"distance_count", stats->distance_count, bits & SKL_STATS_DISTANCE_MASS ? 1 : 0, SKL_STATS_BUCKETS_MAX},
        {"range_count", stats->range_count, bits & SKL_STATS_RANGES ? 1 : 0, SKL_STATS_RANGES_MAX},
        {"top_k", stats->top_k, bits & SKL_STATS_TOP ? 1 : 0, SKL_STATS_TOP_MAX},
        {"chosen_count", stats->chosen_count, bits & SKL_STATS_WEIGHTS ? 1 : 0, INT32_MAX},
    };
    for (size_t i = 0; i < sizeof rules / sizeof rules[0]; i++)
        if (rules[i].value < rules[i].lowest || rules[i].value > rules[i].highest)
            return skl_fail(SKL_ERROR_ARGUMENT, "stats.%s=%" PRId64 ": must be %" PRId64 "..%" PRId64, rules[i].name,
                            rules[i].value, rules[i].lowest, rules[i].highest);
    return SKL_OK;
}

/* ---- Values ------------------------------------------------------------------------------------------------- */

static skl_status check_ranges(const skl_stats *stats, int64_t b, int64_t key_count)
{
    for (int64_t n = b * stats->range_count; n < (b + 1) * stats->range_count; n++) {
        const int32_t begin = stats->key_ranges[2 * n], end = stats->key_ranges[2 * n + 1];
        if (begin < 0 || begin > end || end > key_count)
            return skl_fail(SKL_ERROR_ARGUMENT,
                            "stats.key_ranges[%" PRId64 ", %" PRId64 "]=%" PRId32 "..%" PRId32
                            ": must be 0 <= begin <= end <= %" PRId64 ", the keys of the sequence",
                            b, n % stats->range_count, begin, end, key_count);
    }
    return SKL_OK;
}

static skl_status check_chosen(const skl_stats *stats, int64_t b, int64_t row_count)
{
    for (int64_t n = 0; n < stats->chosen_count; n++) {
        const int32_t row = stats->chosen_rows[b * stats->chosen_count + n];
        if (row < -1 || row >= row_count)
            return skl_fail(SKL_ERROR_ARGUMENT,
                            "stats.chosen_rows[%" PRId64 ", %" PRId64 "]=%" PRId32
                            ": must be -1 (none) or a row of the sequence, 0..%" PRId64,
                            b, n, row, row_count - 1);
    }
    return SKL_OK;
}

skl_status skl_stats_check_values(const skl_problem *p, const skl_inputs *inputs, const skl_stats *stats)
{
    for (int64_t b = 0; b < p->batch; b++) {
        const int64_t keys = p->packed ? inputs->cu_seqlens_k[b + 1] - inputs->cu_seqlens_k[b] : p->len_k;
        const int64_t rows = p->packed ? inputs->cu_seqlens_q[b + 1] - inputs->cu_seqlens_q[b] : p->len_q;
        if (stats->key_ranges != NULL)
            SKL_TRY(check_ranges(stats, b, keys));
        if (stats->chosen_rows != NULL)
            SKL_TRY(check_chosen(stats, b, rows));
    }
    return SKL_OK;
}
