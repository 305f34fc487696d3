/* Retrieval over a long context, made up, and a teacher that solves it.
 *
 * Hidden states are sums of parts in directions that a rotation hides:
 *
 *     definition    "x is ...": the code of a needle. A few of them, spread over the context
 *     look-alike    a definition whose code is near that of a needle: what a careless reader falls for
 *     reference     "x?": the code of a needle that was defined before, perhaps thousands of tokens ago
 *     filler        nothing to define, nothing to ask
 *
 * and every token has the code of the topic of its segment, and noise. Codes are drawn anew for every sequence: there
 * is nothing to learn by heart, only where to look. The teacher's heads are of two kinds. Retrieval heads look from a
 * reference to its definition, and from everything else to the first token, the sink. Topic heads look at all tokens
 * of the same topic, wherever they are. */
#ifndef STREAMKL_DISTILL_TASK_H
#define STREAMKL_DISTILL_TASK_H

#include "distill/sequence.h"

typedef struct task_shape {
    int64_t context;
    int64_t needles; /* definitions in a sequence */
    layer_shape teacher;
    int64_t group; /* teacher heads for each head of the student */
} task_shape;

typedef struct task {
    int64_t context, needles, group;
    layer_shape teacher_shape;
    uint64_t seed;
    int threads;
    float *directions; /* [width, width]: row c is where part c lies in a hidden state */
    layer teacher;
    float *parts, *hidden; /* [context, width] of the sequence at hand */
    reference *references;
    int64_t reference_count;
} task;

/* What shapes it can be made for. */
enum { TASK_WIDTH_MIN = 48, TASK_DIM_MIN = 17, TASK_CONTEXT_MIN = 64, TASK_NEEDLES_MAX = 256 };

/* The teacher's heads of even student heads retrieve, those of odd ones follow topics. On failure device_error() says
 * why; task_free() is right then, too. */
skl_status task_create(task *work, const task_shape *shape, uint64_t seed, int threads);
void task_free(task *work);

/* Does a head of the student retrieve? */
int task_head_retrieves(int64_t head_s);

/* Fills hidden states and references with a sequence: the same for the same (seed, stream, index). */
sequence task_sequence(task *work, uint64_t stream, uint64_t index);

#endif
