/* Element types, sequences and masks: the parts of the oracle that do not depend on its precision. */
#include "oracle_stats.h"

#include <math.h>
#include <stdlib.h>

static double read_f16(uint16_t bits)
{
    const double sign = bits & 0x8000 ? -1 : 1;
    const int exponent = bits >> 10 & 31;
    const int fraction = bits & 1023;

    if (exponent == 31)
        return fraction ? (double)NAN : sign * (double)INFINITY;
    if (exponent == 0)
        return sign * ldexp(fraction, -24);
    return sign * ldexp(1024 + fraction, exponent - 25);
}

static double read_bf16(uint16_t bits)
{
    const uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return (double)value;
}

double oracle_read(skl_dtype dtype, const void *data, int64_t index)
{
    if (dtype == SKL_F32)
        return (double)((const float *)data)[index];
    const uint16_t bits = ((const uint16_t *)data)[index];
    return dtype == SKL_F16 ? read_f16(bits) : read_bf16(bits);
}

oracle_sequence oracle_sequence_at(const skl_problem *problem, const skl_inputs *inputs, int64_t b)
{
    if (!problem->packed)
        return (oracle_sequence){b, 0, 0, problem->len_q, problem->len_k};
    const int32_t *const cu_q = inputs->cu_seqlens_q;
    const int32_t *const cu_k = inputs->cu_seqlens_k;
    return (oracle_sequence){0, cu_q[b], cu_k[b], cu_q[b + 1] - cu_q[b], cu_k[b + 1] - cu_k[b]};
}

oracle_keys oracle_visible_keys(const skl_problem *problem, const skl_inputs *inputs, int64_t b, int64_t i)
{
    const oracle_sequence sequence = oracle_sequence_at(problem, inputs, b);
    const int64_t diagonal = problem->positions == SKL_POSITIONS_OFFSET ? problem->offset_q - problem->offset_k
                                                                        : sequence.len_k - sequence.len_q;
    const int64_t position = i + diagonal; /* of the query, counted in keys of the sequence */
    const int64_t right = problem->causal ? 0 : problem->window_right;
    oracle_keys keys = {0, sequence.len_k};

    if (!problem->packed && inputs->key_lengths)
        keys.end = inputs->key_lengths[b];
    if (right >= 0 && position + right + 1 < keys.end)
        keys.end = position + right + 1;
    if (problem->window_left >= 0 && position - problem->window_left > keys.begin)
        keys.begin = position - problem->window_left;
    const int64_t bounds = sequence.batch * problem->len_q + sequence.first_q + i; /* packed: batch is 0 */
    if (problem->row_bounds && inputs->key_begin && inputs->key_begin[bounds] > keys.begin)
        keys.begin = inputs->key_begin[bounds];
    if (problem->row_bounds && inputs->key_end && inputs->key_end[bounds] < keys.end)
        keys.end = inputs->key_end[bounds];
    if (keys.end <= keys.begin)
        return (oracle_keys){0, 0};
    return keys;
}

int64_t oracle_student_keys(const skl_problem *problem, int64_t keys)
{
    if (problem->pool == SKL_POOL_NONE)
        return keys;
    const int64_t incomplete = keys % problem->pool_size > 0 && problem->pool_blocks != SKL_POOL_COMPLETE;
    return keys / problem->pool_size + incomplete;
}

int64_t oracle_block_keys(const skl_problem *problem)
{
    return problem->pool == SKL_POOL_NONE        ? 1
           : problem->pool_size < problem->len_k ? problem->pool_size
                                                 : problem->len_k;
}

/* Whether a row attends to a key or, with a pooled teacher, to a block. */
static int attends_to(const skl_problem *problem, oracle_keys visible, int64_t key)
{
    if (problem->pool == SKL_POOL_NONE)
        return visible.begin <= key && key < visible.end;
    const int64_t first = key * problem->pool_size, last = first + problem->pool_size - 1;
    const int sees_first = visible.begin <= first && first < visible.end, sees_last = last < visible.end;
    const int has_newest = first <= visible.end - 1 && visible.end - 1 <= last;
    return key >= 0 && sees_first && (sees_last || problem->pool_blocks == SKL_POOL_VISIBLE) &&
           !(has_newest && problem->pool_blocks == SKL_POOL_EARLIER);
}

int64_t oracle_row_seen(const skl_problem *problem, const skl_inputs *inputs, int64_t b, int64_t i,
                        const int64_t *keys, int64_t count, int64_t *seen, int64_t *outcomes)
{
    const oracle_keys visible = oracle_visible_keys(problem, inputs, b, i);
    int64_t seen_count = 0;
    if (problem->pool == SKL_POOL_NONE)
        for (int64_t n = 0; n < count; n++)
            seen[n] = keys[n], outcomes[n] = n;
    if (problem->pool == SKL_POOL_NONE)
        return count;
    for (int64_t n = 0; n < (problem->top_k > 0 ? count : 1); n++)
        for (int64_t key = visible.begin; key < visible.end; key++) {
            const int64_t block = key / problem->pool_size;
            const int64_t outcome = problem->top_k > 0 ? n : block - (count > 0 ? keys[0] : 0);
            const int is_outcome = outcome >= 0 && outcome < count && keys[outcome] == block;
            if (problem->top_k > 0 && !is_outcome)
                continue;
            seen[seen_count] = key;
            outcomes[seen_count++] = is_outcome ? outcome : -1;
        }
    return seen_count;
}

int64_t oracle_row_keys(const skl_problem *problem, const skl_inputs *inputs, int64_t b, int64_t h, int64_t i,
                        int64_t *keys)
{
    const oracle_keys visible = oracle_visible_keys(problem, inputs, b, i);
    const oracle_sequence sequence = oracle_sequence_at(problem, inputs, b);
    const skl_input *const indices = &inputs->indices;
    const int64_t at = sequence.batch * indices->stride_batch + h * indices->stride_head +
                       (sequence.first_q + i) * indices->stride_row;
    const int64_t all = oracle_student_keys(problem, sequence.len_k);
    int64_t count = 0;
    for (int64_t n = 0; n < (problem->top_k > 0 ? problem->top_k : all); n++) {
        const int64_t key = problem->top_k > 0 ? ((const int32_t *)indices->data)[at + n] : n;
        if (attends_to(problem, visible, key))
            keys[count++] = key;
    }
    return count;
}

void oracle_free(oracle_result *result)
{
    double *const arrays[] = {result->kl,
                              result->lse_t,
                              result->lse_s,
                              result->dot_t,
                              result->cross_entropy,
                              result->entropy,
                              result->mass,
                              result->dq_t,
                              result->dk_t,
                              result->dq_s,
                              result->dk_s,
                              result->dw_s,
                              result->dsink_t,
                              result->dsink_s,
                              result->o_s,
                              result->rounding.o_s,
                              result->terms.o_s,
                              result->dv_s,
                              result->rounding.dv_s,
                              result->terms.dv_s,
                              result->rounding.dsink_t,
                              result->rounding.dsink_s,
                              result->rounding.kl,
                              result->rounding.lse_t,
                              result->rounding.lse_s,
                              result->rounding.dot_t,
                              result->rounding.cross_entropy,
                              result->rounding.entropy,
                              result->rounding.mass,
                              result->rounding.dq_t,
                              result->rounding.dk_t,
                              result->rounding.dq_s,
                              result->rounding.dk_s,
                              result->rounding.dw_s,
                              result->terms.dq_t,
                              result->terms.dk_t,
                              result->terms.dq_s,
                              result->terms.dk_s,
                              result->terms.dw_s};
    for (size_t a = 0; a < sizeof arrays / sizeof *arrays; a++)
        free(arrays[a]);
    *result = (oracle_result){0};
}

void oracle_stats_free(oracle_stats *stats)
{
    const oracle_array *const arrays[] = {&stats->key_sum,        &stats->key_max,       &stats->lse,
                                          &stats->entropy,        &stats->max_logit,     &stats->expected_distance,
                                          &stats->head_max_logit, &stats->distance_mass, &stats->range_mass,
                                          &stats->range_sum,      &stats->top_p,         &stats->p};
    for (size_t n = 0; n < sizeof arrays / sizeof *arrays; n++) {
        free(arrays[n]->value);
        free(arrays[n]->rounding);
    }
}
