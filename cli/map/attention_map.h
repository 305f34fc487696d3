/* Attention maps at any context length: the attention of P and S to each bucket of keys, and its contribution to the
 * KL.
 *
 * A cell belongs to a bucket of queries and a bucket of keys. It is the fraction of attention that the keys get, as a
 * mean over the sequences of a batch and over the queries that attend to any key. A row of `p` or `s` sums to 1, a
 * row of `kl` to the mean KL of its queries. A cell divided by the number of keys in its bucket is the mean of the
 * full matrix over the cell.
 *
 * The map is computed from partial states over ranges of keys, a block of queries at a time (docs/design/maths.md,
 * section 11): memory grows with the number of buckets, not with the context. */
#ifndef STREAMKL_CLI_MAP_ATTENTION_MAP_H
#define STREAMKL_CLI_MAP_ATTENTION_MAP_H

#include "streamkl.h"
#include "view/view.h"

#include <stdio.h>

typedef struct attention_map {
    int64_t heads;         /* of the student */
    int64_t rows, columns; /* buckets of queries and of keys */
    double *p, *s, *kl;    /* [heads, rows, columns]; a row is 0 if none of its queries attends to a key */
} attention_map;

/* Tensors are in host memory; their lengths have been checked. options->progress counts blocks of queries. There are
 * at most as many buckets as queries and keys. */
attention_map attention_map_of(const skl_problem *problem, const skl_inputs *inputs, int64_t buckets,
                               const skl_options *options);
void attention_map_free(attention_map *map);

/* Replaces the first head of p, s or kl by the mean over heads. */
void attention_map_mean(const attention_map *map, double *picture);

/* Maps on a terminal: colored half blocks if the terminal supports them, otherwise a ramp of characters. */
void map_print(FILE *stream, palette_kind kind, const double *values, int64_t rows, int64_t columns, double top);

#endif
