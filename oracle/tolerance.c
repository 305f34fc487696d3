/* How far a result may be from the exact one: docs/design/maths.md derives the rule. */
#include "oracle.h"

#include <float.h>
#include <math.h>
#include <stdbool.h>

static double exponential_roundings = 1;

void oracle_compare_gpu(int is_gpu)
{
    exponential_roundings = is_gpu ? 4 : 1;
}

double oracle_exponential_roundings(void)
{
    return exponential_roundings;
}

double oracle_type_rounding(skl_dtype dtype)
{
    return dtype == SKL_F32 ? ORACLE_ROUNDING : dtype == SKL_F16 ? 0x1p-11 : 0x1p-8;
}

double oracle_base_2_roundings(void)
{
    return exponential_roundings > 1 ? 1 : 0;
}

/* Dense indexers and teacher groups: kernels that go by strips store S - P as f16. */
static bool has_strips(const skl_problem *problem)
{
    return (problem->student == SKL_STUDENT_INDEXER && problem->top_k == 0) || problem->heads_t > problem->heads_s;
}

double oracle_product_rounding(const skl_problem *problem, skl_dtype dtype)
{
    const bool twice = has_strips(problem) && dtype == SKL_BF16; /* stored as f16, multiplied as bf16 */
    return oracle_type_rounding(dtype) + (twice ? oracle_type_rounding(SKL_F16) : 0);
}

double oracle_smallest_gradient(const skl_problem *problem, skl_dtype dtype)
{
    const double of_strips = has_strips(problem) && dtype != SKL_F32 ? 0x1p-40 : 0;
    const double of_f16 = dtype == SKL_F16 ? 0x1p-36 : 0;
    return (of_strips + of_f16) / oracle_product_rounding(problem, dtype);
}

/* Half the spacing of a 16-bit type at `value`. Below the smallest normal number the spacing is constant. */
static double half_step(skl_dtype dtype, double value)
{
    const int exponent = value == 0 ? -1000 : ilogb(value);
    const int lowest = dtype == SKL_F16 ? -14 : -126;
    return ldexp(oracle_type_rounding(dtype), exponent > lowest ? exponent : lowest);
}

oracle_error oracle_naive_error(const oracle_expectation *expected)
{
    oracle_error largest = {0, 0};
    if (expected->rows)
        largest = oracle_naive_error(expected->rows);
    for (int64_t n = 0; n < expected->count; n++)
        if (isfinite(expected->exact[n]) && isfinite(expected->naive[n]) && isfinite(expected->rounding[n])) {
            const double error = fabs(expected->naive[n] - expected->exact[n]);
            largest.absolute = fmax(largest.absolute, error);
            largest.in_roundings = fmax(largest.in_roundings, error > 0 ? error / expected->rounding[n] : 0);
        }
    return largest;
}

/* The largest finite value of a type. */
static double largest_of(skl_dtype dtype)
{
    return dtype == SKL_F32 ? (double)FLT_MAX : dtype == SKL_F16 ? 65504 : 0x1.FEp127;
}

double oracle_excess(const oracle_expectation *expected, oracle_error naive, int64_t n, double computed)
{
    const double exact = expected->exact[n];
    if (computed == exact || (isnan(computed) && isnan(exact)))
        return 0;
    if (!isfinite(expected->rounding[n])) /* undetermined */
        return 0;
    if (!isfinite(exact))
        return INFINITY;
    const double terms = expected->terms && expected->product_rounding > 0 ? expected->terms[n] : 0;
    const double product = expected->product_rounding * terms + fmin(terms, 0x1p-126 * (double)expected->products);
    const double merged = expected->merged_sums * (exponential_roundings + 2); /* a product and an addition each */
    const double roundings = expected->roundings * (expected->rounding[n] + merged);
    const double naive_error = fmin(naive.absolute, naive.in_roundings * expected->rounding[n]);
    const double allowed = 2 * naive_error + ORACLE_ROUNDING * roundings + product;
    if (!isfinite(computed)) {
        const bool overflows = isinf(computed) && fabs(exact) + allowed > largest_of(expected->dtype);
        return overflows || !isfinite(expected->naive[n]) ? 0 : (double)INFINITY;
    }
    /* The stored value may have been rounded up into the next binade, where the spacing is twice as large. */
    const double larger = fmax(fabs(exact), fabs(computed));
    const double stored = expected->dtype == SKL_F32 ? 0 : half_step(expected->dtype, larger);
    return fmax(0, fabs(computed - exact) - stored) / allowed;
}
