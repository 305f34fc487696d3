/* A synthetic retrieval task over a long context (needles in a haystack), and a teacher that solves it.
 *
 * Hidden states are sums of components along random orthogonal directions:
 *
 *     definition    the code of a needle; a few of them, spread over the context
 *     distractor    a definition whose code is similar to that of a needle
 *     reference     the code of a needle that was defined before, up to thousands of tokens ago
 *     filler        neither
 *
 * In addition every token has the code of the topic of its segment, and noise. Codes are drawn for each sequence, so
 * they cannot be memorized: the student can only learn where to attend. The teacher has heads of two kinds. Retrieval
 * heads attend from a reference to its definition, and from every other token to the first token, the sink. Topic
 * heads attend to all tokens of the same topic. */
#ifndef STREAMKL_CLI_DISTILL_TASK_H
#define STREAMKL_CLI_DISTILL_TASK_H

#include "cli/distill/layer.h"

/* A query that should attend to one key. */
typedef struct reference {
    int64_t query, key;
} reference;

/* Valid until the next sequence of its task. */
typedef struct sequence {
    const float *hidden; /* [context, width], of teacher and student */
    const reference *references;
    int64_t reference_count;
} sequence;

typedef enum sequence_split { SPLIT_TRAINING = 0, SPLIT_HELD_OUT = 1 } sequence_split;

typedef struct task_shape {
    int64_t context;
    int64_t needles; /* definitions per sequence */
    layer_shape teacher;
    int64_t group_size; /* teacher heads per student head */
    uint64_t seed;
} task_shape;

typedef struct retrieval_task {
    task_shape shape;
    int threads;
    float *directions; /* [width, width]: row c is the direction of component c */
    layer teacher;
    float *parts, *hidden; /* [context, width] of the current sequence */
    reference *references;
} retrieval_task;

/* Limits of the shapes. */
enum { TASK_WIDTH_MIN = 48, TASK_DIM_MIN = 17, TASK_CONTEXT_MIN = 64, TASK_NEEDLES_MAX = 256 };

/* Teacher heads of even student heads are retrieval heads, those of odd ones topic heads. */
void task_create(retrieval_task *task, const task_shape *shape, int threads);
void task_free(retrieval_task *task);

/* Is this student head a retrieval head? */
int task_head_retrieves(int64_t head_s);

/* Draws a sequence into the buffers of the task: a function of (seed, split, index). */
sequence task_sequence(retrieval_task *task, sequence_split split, uint64_t index);

#endif
