/* Attention maps at any length: what P and S give to each bucket of keys, and where the KL comes from.
 *
 * A cell is for the queries of one bucket and the keys of another, in a mean over the queries that see a key, and
 * over the sequences of a batch: the share of their attention that these keys get. So a row of `p` or `s` sums to 1,
 * and a row of `kl` to the mean KL of its queries. Divided by the number of keys of a bucket, a cell is the mean of
 * the full matrix over it.
 *
 * One sweep of partial states over ranges of keys, a few hundred queries at a time (docs/maths.md, section 11):
 * memory grows with the number of buckets, not with the context. */
#ifndef STREAMKL_VIEW_ATTENTION_MAP_H
#define STREAMKL_VIEW_ATTENTION_MAP_H

#include "streamkl.h"

typedef struct attention_map {
    int64_t heads;         /* of the student */
    int64_t rows, columns; /* buckets of queries and of keys */
    double *p, *s, *kl;    /* [heads, rows, columns]; a row of buckets whose queries see no key is 0 */
} attention_map;

/* Tensors are those of the host; a call of the library has checked their lengths. options->progress counts blocks of
 * queries. There are never more buckets than queries or keys. On failure the map is empty, and device_error() or
 * skl_last_error() says why. */
skl_status attention_map_compute(attention_map *map, int64_t rows, int64_t columns, const skl_problem *problem,
                                 const skl_inputs *inputs, const skl_options *options);
void attention_map_free(attention_map *map);

/* Where bucket b of `count` begins among `length` queries or keys; it ends where b + 1 begins. */
int64_t attention_map_edge(int64_t bucket, int64_t count, int64_t length);

/* The mean over heads of one of its three pictures: [rows, columns] into `mean`. */
void attention_map_mean(const attention_map *map, const double *picture, double *mean);

#endif
