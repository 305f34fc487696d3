/* The attention of teacher and student on one sequence: projections, KL of every row, gradients of the student's
 * weights.
 *
 * Projections run on the CPU, the attention KL and its gradients on the device of the options. */
#ifndef STREAMKL_DISTILL_ATTENTION_PAIR_H
#define STREAMKL_DISTILL_ATTENTION_PAIR_H

#include "distill/sequence.h"

typedef struct attention_pair {
    skl_problem problem;
    skl_options options;
    skl_plan *plan;
    void *workspace;
    size_t workspace_size;
    int threads;                  /* CPU threads for projections */
    float *block;                 /* owns the tensors below */
    float *q_t, *k_t, *q_s, *k_s; /* [context, heads * dim] */
    float *dq_s, *dk_s;
    float *kl, *lse_t, *lse_s; /* [heads, context] */
} attention_pair;

typedef struct attention_pair_shape {
    int64_t context;
    layer_shape teacher, student;
    skl_direction direction;
} attention_pair_shape;

/* `threads` is the number of CPU threads for projections if the plan has none, as on a GPU. On failure device_error()
 * or, if that is empty, skl_last_error() says why. Call attention_pair_close() in any case. */
skl_status attention_pair_open(attention_pair *pair, const attention_pair_shape *shape, const skl_options *options,
                               int threads);
void attention_pair_close(attention_pair *pair);

/* q and k of each model. Those of the teacher depend on the sequence only. */
void attention_pair_project_teacher(attention_pair *pair, const layer *teacher, const sequence *tokens);
void attention_pair_project_student(attention_pair *pair, const layer *student, const sequence *tokens);

/* kl, lse_t and lse_s of every row. */
skl_status attention_pair_forward(attention_pair *pair);

/* gradient += the gradient of grad_kl * sum of KL; after attention_pair_forward(). */
skl_status attention_pair_backward(attention_pair *pair, float grad_kl, const sequence *tokens, layer *gradient);

/* Views of the tensors, for maps. */
skl_inputs attention_pair_inputs(const attention_pair *pair);

/* P (the mean over the teacher heads of a student head) and S of one query and key; after attention_pair_forward().
 */
double attention_pair_p(const attention_pair *pair, int64_t head_s, int64_t query, int64_t key);
double attention_pair_s(const attention_pair *pair, int64_t head_s, int64_t query, int64_t key);

#endif
