/* Dot products of the oracle and of the naive implementation. Both precisions include it. */
#ifndef SKL_ORACLE_DOT_H
#define SKL_ORACLE_DOT_H

/* <q, k>, and the sum of the magnitudes of its products. */
struct dot {
    real sum, products;
};

/* The largest error of few results in float is a matter of luck. More orders of the same sums make 16 results of each
 * tensor (docs/design/maths.md, "Few rows"). */
static int64_t orders_for(int64_t rows)
{
    const int64_t results = 16, orders_max = 8;
    const int64_t orders = rows > 0 ? (results + rows - 1) / rows : 1;
    return sizeof(real) == sizeof(double) ? 1 : orders < orders_max ? orders : orders_max;
}

/* <q, k>, added up in `orders` orders: the sum with the largest error. */
static real worst_dot(const real *q, const real *k, int64_t dim, int64_t orders)
{
    double exact = 0;
    for (int64_t d = 0; d < dim; d++)
        exact += (double)q[d] * (double)k[d];
    real worst = 0;
    for (int64_t order = 0; order < orders; order++) {
        const int64_t first = order * dim / orders;
        real dot = 0;
        for (int64_t d = first; d < first + dim; d++)
            dot += q[d % dim] * k[d % dim];
        if (order == 0 || fabs((double)dot - exact) > fabs((double)worst - exact))
            worst = dot;
    }
    return worst;
}

static struct dot dot_of(const real *q, const real *k, int64_t dim, int64_t orders)
{
    struct dot dot = {0, 0};
    for (int64_t d = 0; d < dim; d++) {
        dot.sum += q[d] * k[d];
        dot.products += fabs(q[d] * k[d]);
    }
    if (orders > 1)
        dot.sum = worst_dot(q, k, dim, orders);
    return dot;
}

#endif
