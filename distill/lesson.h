/* Teacher and student on one sequence: projections, KL of every row, gradients of the student's weights.
 *
 * Projections run on the CPU, the attention KL and its gradients on the device of the options. */
#ifndef STREAMKL_DISTILL_LESSON_H
#define STREAMKL_DISTILL_LESSON_H

#include "distill/sequence.h"

typedef struct lesson {
    skl_problem problem;
    skl_options options;
    skl_plan *plan;
    void *workspace;
    size_t workspace_size;
    int threads;                  /* CPU threads for projections */
    float *block;                 /* owns what follows */
    float *q_t, *k_t, *q_s, *k_s; /* [context, heads * dim] */
    float *dq_s, *dk_s;
    float *kl, *lse_t, *lse_s; /* [heads, context] */
} lesson;

typedef struct lesson_shape {
    int64_t context;
    layer_shape teacher, student;
    skl_direction direction;
} lesson_shape;

/* `threads` are for projections where the plan has none of its own, as on a GPU. On failure device_error(), or else
 * skl_last_error(), says why. lesson_close() is right after any of these. */
skl_status lesson_open(lesson *work, const lesson_shape *shape, const skl_options *options, int threads);
void lesson_close(lesson *work);

/* q and k of both. The teacher's stay what they are while the sequence does. */
void lesson_project_teacher(lesson *work, const layer *teacher, const sequence *text);
void lesson_project_student(lesson *work, const layer *student, const sequence *text);

/* kl, lse_t and lse_s of every row. */
skl_status lesson_forward(lesson *work);

/* gradient += the gradient of grad_kl * sum of KL; after lesson_forward(). */
skl_status lesson_backward(lesson *work, float grad_kl, const sequence *text, layer *gradient);

/* Views of the tensors, for maps. */
skl_inputs lesson_inputs(const lesson *work);

/* What a query gives to one key: P, the mean over the teacher heads of a student head, and S. After
 * lesson_forward(). */
double lesson_teacher_share(const lesson *work, int64_t head_s, int64_t query, int64_t key);
double lesson_student_share(const lesson *work, int64_t head_s, int64_t query, int64_t key);

#endif
