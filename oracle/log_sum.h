/* Logarithms of sums of exponentials, for logits of any size, and which of them f32 determines. Included by oracle.c
 * for both precisions. */
#ifndef SKL_ORACLE_LOG_SUM_H
#define SKL_ORACLE_LOG_SUM_H

/* A number with this many roundings, which is an f32 number of 2^20, does not determine its exponential: it is known
 * to a factor of e^(1/16) at best. */
#define COARSE ((real)(0x1p-4 / ORACLE_ROUNDING))

/* An exponential of this much less than the largest underflows. */
#define NEGLIGIBLE ((real)88)

/* The rounding of an exponential below the normal numbers of f32: it may be 0. */
#define UNDERFLOW ((real)(0x1p-126 / ORACLE_ROUNDING))

static real value_of(struct log_sum lse)
{
    return lse.largest + lse.rest;
}

/* The naive implementation, in float, has an LSE as one number, as a kernel has it between two passes. */
static struct log_sum as_stored(struct log_sum lse)
{
    return sizeof(real) == sizeof(float) ? (struct log_sum){value_of(lse), 0} : lse;
}

static int64_t find_largest(const real *values, int64_t count, int64_t stride)
{
    int64_t largest = 0;
    for (int64_t n = 1; n < count; n++)
        largest = values[n * stride] > values[largest * stride] ? n : largest;
    return largest;
}

/* log sum_n exp(values[n * stride]) */
static struct log_sum log_sum_exp(const real *values, int64_t count, int64_t stride)
{
    const real largest = values[find_largest(values, count, stride) * stride];
    real sum = 0;
    for (int64_t n = 0; n < count; n++)
        sum += exp(values[n * stride] - largest);
    return as_stored((struct log_sum){largest, log(sum)});
}

static real minus_lse(real value, struct log_sum lse)
{
    return value - lse.largest - lse.rest;
}

/* A logit that differs from the largest by no more than the roundings of the two can be the largest in f32. If they
 * are coarse, such rows are undetermined: these logits get an infinite rounding. Logits of equal keys are equal in
 * f32 too; those that are both 0 after a ReLU need not be. */
static void mark_undetermined(const real *logits, real *roundings, int64_t count, int64_t stride)
{
    const int64_t largest = find_largest(logits, count, stride) * stride;
    const real largest_rounding = roundings[largest];
    for (int64_t n = 0; n < count; n++) {
        const real gap = logits[largest] - logits[n * stride];
        const real both = roundings[n * stride] + largest_rounding;
        const int same = gap == 0 && roundings[n * stride] == largest_rounding;
        if (!same && both >= COARSE && gap <= (real)ORACLE_ROUNDING * both + NEGLIGIBLE)
            roundings[n * stride] = roundings[largest] = INFINITY;
    }
}

/* The rounding of an LSE in a log-probability. From one that is given, log z is subtracted afterwards: these are two
 * numbers. A coarse one determines probabilities only if it comes from the same logits, rounded in the same way. */
static real lse_rounding(struct log_sum lse, int given)
{
    const real size = given ? fabs(lse.largest) + fabs(lse.rest) : fabs(value_of(lse));
    return given && size >= COARSE ? (real)INFINITY : size;
}

/* What a coarse LSE loses as a float: of equal logits it has only their value. */
static real lost_part(struct log_sum lse)
{
    return fabs(value_of(lse)) >= COARSE ? fabs(lse.rest) : 0;
}

#endif
