/* What a layer is taught on: hidden states of one sequence, and where they come from. */
#ifndef STREAMKL_DISTILL_SEQUENCE_H
#define STREAMKL_DISTILL_SEQUENCE_H

#include "distill/layer.h"

/* A query that should look at one key. */
typedef struct reference {
    int64_t query, key;
} reference;

typedef struct sequence {
    const float *hidden_t, *hidden_s; /* [context, width] of the teacher and of the student; they may be the same */
    const reference *references;      /* NULL: not known */
    int64_t reference_count;
} sequence;

typedef enum sequence_split { SPLIT_TRAINING = 0, SPLIT_HELD_OUT = 1 } sequence_split;

/* A source of sequences, made up or from files. What a call returns is good until the next one. */
typedef struct sequence_source {
    void *state;
    sequence (*at)(void *state, sequence_split split, uint64_t index);
} sequence_source;

#endif
