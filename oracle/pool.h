/* A teacher that is pooled over blocks of keys. Included by oracle.c for both precisions. */
#ifndef SKL_ORACLE_POOL_H
#define SKL_ORACLE_POOL_H

/* The largest value; NaN if one is. Its rounding is how far it can move if each value moves by its own. */
static real largest_of(const real *values, const real *roundings, int64_t count, int64_t stride, real *rounding)
{
    real largest = values[0], low = -(real)INFINITY, high = -(real)INFINITY;
    for (int64_t n = 0; n < count; n++) {
        const real value = values[n * stride], error = (real)ORACLE_ROUNDING * roundings[n * stride];
        largest = value > largest || isnan(value) ? value : largest;
        low = value - error > low ? value - error : low;
        high = value + error > high ? value + error : high;
        if (isnan(largest))
            break;
    }
    *rounding = (high - largest > largest - low ? high - largest : largest - low) / (real)ORACLE_ROUNDING;
    return largest;
}

/* log M_b of every block, from log P of its keys, which follow each other in run->seen. A sum has the roundings of
 * its terms, weighted by their shares, those of the exponentials, and its own. */
static void pool_keys(const struct run *run, const struct row *row)
{
    for (int64_t first = 0, end = 0; first < row->seen_count; first = end) {
        const int64_t block = run->outcomes[first];
        while (end < row->seen_count && run->outcomes[end] == block)
            end++;
        if (block < 0)
            continue;
        const real *const log_p = run->log_p_key + first, *const roundings = run->log_p_key_rounding + first;
        real *const rounding = run->log_p_rounding + block;
        if (run->problem->pool == SKL_POOL_MAX) {
            run->log_p[block] = largest_of(log_p, roundings, end - first, 1, rounding);
            continue;
        }
        const struct log_sum sum = log_sum_exp(log_p, end - first, 1);
        run->log_p[block] = value_of(sum);
        *rounding = (real)oracle_exponential_roundings() + run->key_sum;
        for (int64_t j = 0; j < end - first; j++)
            *rounding += exp(minus_lse(log_p[j], sum)) * roundings[j];
    }
}

#endif
