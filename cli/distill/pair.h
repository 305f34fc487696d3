/* The attention of teacher and student on one sequence: projections, KL of every row, gradients of the student's
 * weights; and the scores of a student on held-out sequences.
 *
 * Projections run on the CPU, the attention KL and its gradients on the device of the options. */
#ifndef STREAMKL_CLI_DISTILL_PAIR_H
#define STREAMKL_CLI_DISTILL_PAIR_H

#include "cli/common/runner.h"
#include "cli/distill/task.h"

typedef struct attention_pair {
    skl_problem problem;
    plan_runner runner;
    int threads;                  /* CPU threads for projections */
    float *block;                 /* owns the tensors below */
    float *q_t, *k_t, *q_s, *k_s; /* [context, heads * dim] */
    float *dq_s, *dk_s;
    float *kl, *lse_t, *lse_s; /* [heads, context] */
} attention_pair;

/* `threads` is the number of CPU threads for projections if the plan has none, as on a GPU. */
void attention_pair_open(attention_pair *pair, const task_shape *task, layer_shape student, skl_direction direction,
                         const skl_options *options, int threads);
void attention_pair_close(attention_pair *pair);

/* q and k of both models on a sequence. */
void attention_pair_project(attention_pair *pair, const layer *teacher, const layer *student, const sequence *tokens);

/* kl, lse_t and lse_s of every row. */
void attention_pair_forward(attention_pair *pair);

/* gradient += the gradient of grad_kl * sum of KL; after attention_pair_forward(). */
void attention_pair_backward(attention_pair *pair, float grad_kl, const sequence *tokens, layer *gradient);

/* Views of the tensors. */
skl_inputs attention_pair_inputs(const attention_pair *pair);

/* P (the mean over the teacher heads of a student head) and S of one query and key; after attention_pair_forward().
 */
double attention_pair_p(const attention_pair *pair, int64_t head_s, reference at);
double attention_pair_s(const attention_pair *pair, int64_t head_s, reference at);

/* ---- Evaluation: KL by head and by position, and the references that find their definition, by its depth ----- */

enum { EVALUATE_DEPTHS = 8, EVALUATE_POSITIONS = 64, EVALUATE_HEADS_MAX = 64 };

/* References to definitions at one depth, over the retrieval heads. A hit is a reference that gives its definition
 * more than half of the attention, so that no other key gets more. */
typedef struct depth_score {
    int64_t references;
    int64_t hits_t, hits_s;
    double kl; /* sum over the references */
} depth_score;

typedef struct evaluation {
    double kl;                              /* mean over rows and heads */
    double kl_head[EVALUATE_HEADS_MAX];     /* mean over rows, of the first heads */
    double kl_position[EVALUATE_POSITIONS]; /* mean over heads and the rows of a bucket */
    depth_score depths[EVALUATE_DEPTHS];    /* by eighth of the context that holds the definition */
    depth_score all;
} evaluation;

/* On the first `count` held-out sequences. */
evaluation evaluate(attention_pair *pair, retrieval_task *task, const layer *student, int64_t count);

/* Adds the references of the sequence that attention_pair_forward() had last. */
void evaluate_references(evaluation *result, const attention_pair *pair, const sequence *tokens);

double evaluate_hit_rate_s(const depth_score *score); /* 0..1; NaN without references */
double evaluate_hit_rate_t(const depth_score *score);

#endif
