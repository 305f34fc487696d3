/* The indexer student, y_j = scale sum_g w_g relu(a_gj) with a_gj = <q_g, k_j>, and its gradients. Included by
 * oracle.c for both precisions. */
#ifndef SKL_ORACLE_INDEXER_H
#define SKL_ORACLE_INDEXER_H

/* One index head of a row and one key. */
struct index_pair {
    real dot, products;    /* a_gj, and the sum of the magnitudes of its products */
    int passes, uncertain; /* whether the ReLU passes the dot; whether rounding errors can change that */
};

/* In any order, a sum of n products has an error of at most n roundings of the sum of their magnitudes. */
static struct index_pair index_pair_of(const struct run *run, const real *q, const real *k)
{
    const int64_t dim = run->student.dim;
    const int relu = !run->problem->index_linear;
    const struct dot dot = dot_of(q, k, run->student.dim, run->student.orders);
    struct index_pair pair = {dot.sum, dot.products, 1, 0};
    pair.passes = !relu || !(pair.dot <= 0); /* NaN passes */
    pair.uncertain = relu && fabs(pair.dot) <= (real)dim * (real)ORACLE_ROUNDING * pair.products && pair.products > 0;
    return pair;
}

/* Offsets of the query of index head g and of the first key of the buffer. */
static struct offsets find_index_offsets(const struct run *run, const struct row *row, int64_t g)
{
    const struct model *const s = &run->student;
    const int64_t head = row->h_s * s->index_heads + g;
    const int64_t line_q = (row->batch * s->heads * s->index_heads + head) * run->length_q + row->row_q;
    return (struct offsets){line_q * s->dim, find_offsets(run, row, s, row->h_s).k, row->h_s};
}

/* Roundings: the dot as a logit, its product with the weight, the sum. */
static void compute_index_logits(const struct run *run, const struct row *row)
{
    const struct model *const s = &run->student;
    const real *const w = s->w + row->at_s * s->index_heads;
    for (int64_t j = 0; j < row->key_count; j++) {
        real sum = 0, rounding = 0;
        for (int64_t g = 0; g < s->index_heads; g++) {
            const struct offsets at = find_index_offsets(run, row, g);
            const struct index_pair pair = index_pair_of(run, s->q + at.q, s->k + at.k + row->keys[j] * s->dim);
            if (pair.passes)
                sum += w[g] * pair.dot;
            if (pair.passes || pair.uncertain)
                rounding += fabs(w[g]) * (pair.products + 2 * fabs(pair.dot));
        }
        run->y[j] = s->scale * sum;
        run->y_rounding[j] = fabs(s->scale) * rounding + fabs(run->y[j]);
    }
}

/* Adds weight * row[d] to a gradient, where the weight has the error `rounding`. If rounding can change what the ReLU
 * does, the whole term counts as an error. */
static void add_index_term(real *gradient, real *gradient_rounding, real *terms, const real *row, int64_t dim,
                           const struct index_pair *pair, real weight, real rounding)
{
    for (int64_t d = 0; d < dim; d++) {
        if (pair->passes) {
            gradient[d] += weight * row[d];
            terms[d] += fabs(weight * row[d]);
        }
        gradient_rounding[d] += rounding * fabs(row[d]);
        if (pair->uncertain)
            gradient_rounding[d] += fabs(weight * row[d]) / (real)ORACLE_ROUNDING;
    }
}

/* The largest magnitude of a weight of the row. */
static real largest_weight(const struct run *run, const struct row *row)
{
    const struct model *const s = &run->student;
    real largest = 0;
    for (int64_t g = 0; g < s->index_heads; g++)
        largest = fmax(largest, fabs(s->w[row->at_s * s->index_heads + g]));
    return largest;
}

/* dw_g += scale dy_j relu(a_gj);  dq_g += scale dy_j w_g [a_gj > 0] k_j;  dk_j += scale dy_j w_g [a_gj > 0] q_g */
static void add_index_gradients(const struct run *run, const struct row *row)
{
    const struct model *const s = &run->student;
    const int64_t at_w = row->at_s * s->index_heads;
    for (int64_t g = 0; g < s->index_heads; g++) {
        const struct offsets at = find_index_offsets(run, row, g);
        const real w = s->w[at_w + g];
        for (int64_t j = 0; j < row->key_count; j++) {
            const int64_t at_k = at.k + row->keys[j] * s->dim;
            const struct index_pair pair = index_pair_of(run, s->q + at.q, s->k + at_k);
            if (!pair.passes && !pair.uncertain)
                continue;
            const real dy = s->scale * run->gradient[j];
            const real dy_rounding = fabs(s->scale) * run->gradient_rounding[j] + fabs(dy);
            if (pair.passes) {
                s->dw[at_w + g] += dy * pair.dot;
                s->dw_terms[at_w + g] += fabs(dy * pair.dot);
            }
            s->dw_rounding[at_w + g] += dy_rounding * fabs(pair.dot) + fabs(dy) * (pair.products + fabs(pair.dot));
            if (s->smallest > 0) {
                s->dw_factors[at_w + g] += fabs(s->scale) * pair.products;
                add_magnitudes(s->dq_factors + at.q, s->k + at_k, fabs(s->scale), s->dim);
                add_magnitudes(s->dk_factors + at_k, s->q + at.q, fabs(s->scale), s->dim);
            }
            note_size(s, fabs(run->gradient[j]), w);
            const real rounding = fabs(w) * dy_rounding;
            add_index_term(s->dq + at.q, s->dq_rounding + at.q, s->dq_terms + at.q, s->k + at_k, s->dim, &pair,
                           dy * w, rounding + run->key_sum * fabs(dy * w));
            add_index_term(s->dk + at_k, s->dk_rounding + at_k, s->dk_terms + at_k, s->q + at.q, s->dim, &pair,
                           dy * w, rounding + run->query_sum * fabs(dy * w));
        }
    }
}

#endif
