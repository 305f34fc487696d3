/* The student's own attention: its output, and the gradients that its upstream gradient adds to those of the KL.
 * Included by oracle.c for both precisions. */
#ifndef SKL_ORACLE_ATTENTION_H
#define SKL_ORACLE_ATTENTION_H

/* <u, v>, and the sum of the magnitudes of its terms. */
struct product {
    real value, terms;
};

static struct product product_of(const real *u, const real *v, int64_t dim)
{
    struct product p = {0, 0};
    for (int64_t d = 0; d < dim; d++) {
        p.value += u[d] * v[d];
        p.terms += fabs(u[d] * v[d]);
    }
    return p;
}

/* o = S v of one row. Roundings: S, the products and their sum. */
static void attention_output(const struct run *run, const struct row *row)
{
    const int64_t dim = run->student.dim;
    const struct offsets at = find_offsets(run, row, &run->student, row->h_s);
    const int lost = lost_part(run->lses[run->group_size]) > 0;
    for (int64_t j = 0; j < row->key_count; j++) {
        const real s = exp(run->log_s[j]);
        const real s_rounding = s * (1 + run->log_s_rounding[j]) + UNDERFLOW;
        for (int64_t d = 0; d < dim; d++) {
            const real v = run->v[at.k + row->keys[j] * dim + d];
            run->output[at.q + d] += s * v;
            run->output_rounding[at.q + d] += lost ? (real)INFINITY : (s_rounding + s * run->key_sum) * fabs(v);
            run->output_terms[at.q + d] += fabs(s * v);
        }
    }
}

/* Adds S (dP - D) to the gradients of the logits, and S do to dv. `parts` gets the sum of the magnitudes of the two
 * parts of each gradient: a kernel may round them apart. D is that of the given output. Roundings: the terms of both
 * products, once as products and once in their sums, S, and the result. Where a row sees one key, o = v: there the
 * naive implementation, which adds dP and D in the same order, has no error at all. */
static void add_attention_gradients(const struct run *run, const struct row *row, real *parts)
{
    const int64_t dim = run->student.dim;
    const struct offsets at = find_offsets(run, row, &run->student, row->h_s);
    const real *const d_o = run->d_o + at.q;
    const struct product dot = product_of(d_o, run->o + at.q, dim);
    const int lost =
        lost_part(run->lses[run->group_size]) > 0; /* see lost_parts(), which marks the other gradients */
    for (int64_t j = 0; j < row->key_count; j++) {
        const int64_t at_v = at.k + row->keys[j] * dim;
        const struct product dp = product_of(d_o, run->v + at_v, dim);
        const real s = exp(run->log_s[j]), excess = dp.value - dot.value;
        const real s_rounding = s * (1 + run->log_s_rounding[j]) + UNDERFLOW;
        parts[j] = fabs(run->gradient[j]) + fabs(s * excess);
        run->gradient[j] += s * excess;
        run->gradient_rounding[j] += s_rounding * fabs(excess) + s * (2 * dp.terms + 2 * dot.terms + fabs(excess));
        for (int64_t d = 0; d < dim; d++) {
            run->dv[at_v + d] += s * d_o[d];
            run->dv_rounding[at_v + d] += lost ? (real)INFINITY : (s_rounding + s * run->query_sum) * fabs(d_o[d]);
            run->dv_terms[at_v + d] += fabs(s * d_o[d]);
        }
    }
}

#endif
