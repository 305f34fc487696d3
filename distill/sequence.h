/* Training data: the hidden states of one sequence, and their source. */
#ifndef STREAMKL_DISTILL_SEQUENCE_H
#define STREAMKL_DISTILL_SEQUENCE_H

#include "distill/layer.h"

/* A query that should attend to one key. */
typedef struct reference {
    int64_t query, key;
} reference;

typedef struct sequence {
    const float *hidden; /* [context, width], of teacher and student */
    const reference *references;
    int64_t reference_count;
} sequence;

typedef enum sequence_split { SPLIT_TRAINING = 0, SPLIT_HELD_OUT = 1 } sequence_split;

/* A source of sequences. The result of a call is valid until the next call. */
typedef struct sequence_source {
    void *state;
    sequence (*at)(void *state, sequence_split split, uint64_t index);
} sequence_source;

#endif
