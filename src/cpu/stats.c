#include "cpu/stats.h"

#include <math.h>
#include <string.h>

/* ---- Memory: LSEs of all rows, then the sums of all query tiles ------------------------------------------------ */

static int64_t tiles_of(const skl_plan *plan)
{
    const skl_cpu_work *const work = plan->kernel;
    return skl_ceil_div(plan->problem.len_q, work->tiles(&plan->problem).queries);
}

/* Bytes of the LSEs, rounded up so that doubles may follow. */
static size_t lse_size(const skl_problem *p)
{
    return ((size_t)skl_state_count(p) * sizeof(float) + SKL_WORKSPACE_ALIGNMENT - 1) / SKL_WORKSPACE_ALIGNMENT *
           SKL_WORKSPACE_ALIGNMENT;
}

size_t skl_cpu_stats_size(const skl_plan *plan)
{
    const skl_problem *const p = &plan->problem;
    size_t size = (size_t)(p->batch * p->heads_s);
    const bool overflow = __builtin_mul_overflow(size, (size_t)tiles_of(plan), &size) ||
                          __builtin_mul_overflow(size, sizeof(skl_tile_sums), &size) ||
                          __builtin_add_overflow(size, lse_size(p), &size);
    return overflow || size > SIZE_MAX / 2 ? SIZE_MAX / 2 : size;
}

skl_stats_memory skl_cpu_stats_memory(const skl_plan *plan, const skl_call *call, void *begin)
{
    const skl_problem *const p = &plan->problem;
    const skl_output in_workspace = skl_output_contiguous(begin, p->heads_s, skl_query_rows(p).rows, 1);
    const skl_stats_memory memory = {call->stats->lse.data != NULL ? call->stats->lse : in_workspace,
                                     (skl_tile_sums *)(void *)((char *)begin + lse_size(p)), tiles_of(plan)};
    return memory;
}

/* ---- Results that no tile writes --------------------------------------------------------------------------------
 */

void skl_cpu_fill_rows(const skl_output *to, int64_t heads, int64_t row_begin, int64_t row_end, int64_t dim,
                       float value)
{
    for (int64_t h = 0; to->data != NULL && h < heads; h++)
        for (int64_t i = row_begin; i < row_end; i++)
            for (int64_t n = 0; n < dim; n++)
                ((float *)to->data)[SKL_ROW(*to, 0, h, i) + n] = value;
}

static void fill_keys(const skl_output *to, int64_t heads, int64_t row_begin, int64_t row_end, int64_t dim)
{
    for (int64_t h = 0; to->data != NULL && h < heads; h++)
        for (int64_t i = row_begin; i < row_end; i++)
            for (int64_t n = 0; n < dim; n++)
                ((int32_t *)to->data)[SKL_ROW(*to, 0, h, i) + n] = -1;
}

void skl_cpu_stats_clear(const skl_problem *p, const skl_call *call)
{
    const skl_stats *const stats = call->stats;
    if (stats->weights != NULL)
        memset(stats->weights, 0, (size_t)(p->batch * p->heads_s * stats->chosen_count * p->len_k) * sizeof(float));
    if (!p->packed)
        return;
    const int64_t begin = call->inputs.cu_seqlens_q[p->batch], end = p->total_q, heads = p->heads_s;
    skl_cpu_fill_rows(&stats->lse, heads, begin, end, 1, -INFINITY);
    skl_cpu_fill_rows(&stats->max_logit, heads, begin, end, 1, -INFINITY);
    skl_cpu_fill_rows(&stats->entropy, heads, begin, end, 1, 0.0F);
    skl_cpu_fill_rows(&stats->expected_distance, heads, begin, end, 1, 0.0F);
    skl_cpu_fill_rows(&stats->range_mass, heads, begin, end, stats->range_count, 0.0F);
    skl_cpu_fill_rows(&stats->top_p, heads, begin, end, stats->top_k, 0.0F);
    fill_keys(&stats->top_keys, heads, begin, end, stats->top_k);
    const int64_t sum_heads = stats->per_key_head ? p->key_heads_s : heads;
    skl_cpu_fill_rows(&stats->key_sum, sum_heads, call->inputs.cu_seqlens_k[p->batch], p->total_k, 1, 0.0F);
    skl_cpu_fill_rows(&stats->key_max, sum_heads, call->inputs.cu_seqlens_k[p->batch], p->total_k, 1, 0.0F);
}

/* ---- Heads ------------------------------------------------------------------------------------------------------
 */

static void add_tile(skl_tile_sums *to, const skl_tile_sums *tile)
{
    for (int n = 0; n < SKL_STATS_BUCKETS_MAX; n++)
        to->bucket[n] += tile->bucket[n];
    for (int n = 0; n < SKL_STATS_RANGES_MAX; n++)
        to->range[n] += tile->range[n];
    to->max_logit = fmaxf(to->max_logit, tile->max_logit);
}

void skl_cpu_stats_finish(const skl_problem *p, const skl_call *call, const skl_stats_memory *memory)
{
    const skl_stats *const stats = call->stats;
    if (stats->head_max_logit == NULL && stats->distance_mass == NULL && stats->range_sum == NULL)
        return;
    for (int64_t head = 0; head < p->batch * p->heads_s; head++) {
        skl_tile_sums sums = {.max_logit = -INFINITY};
        for (int64_t tile = 0; tile < memory->tiles; tile++)
            add_tile(&sums, &memory->sums[head * memory->tiles + tile]);
        if (stats->head_max_logit != NULL)
            stats->head_max_logit[head] = sums.max_logit;
        for (int32_t n = 0; stats->distance_mass != NULL && n < stats->distance_count; n++)
            stats->distance_mass[head * stats->distance_count + n] = (float)sums.bucket[n];
        for (int32_t n = 0; stats->range_sum != NULL && n < stats->range_count; n++)
            stats->range_sum[head * stats->range_count + n] = (float)sums.range[n];
    }
}
