/* What every CPU kernel provides: the work on one tile of queries or keys. The backend shares tiles out to threads.
 */
#ifndef SKL_CPU_KERNEL_H
#define SKL_CPU_KERNEL_H

#include <stdbool.h>

#include "base/backend.h"
#include "base/convert.h"
#include "cpu/turn.h"

typedef struct skl_tiles {
    int64_t queries, keys; /* shape of a tile of the logits */
} skl_tiles;

/* One tile of work. */
typedef struct skl_task {
    const skl_problem *problem;
    const skl_call *call;
    skl_tiles tiles;
    int64_t item;   /* position in the order of all items */
    int64_t before; /* the item before it in its chain, or -1 */
    int64_t batch, head, tile;
    float *scratch; /* this worker's own, 64-byte aligned */
    skl_turns turns;
    bool fused;        /* backward_queries also adds to the f32 key gradients, in chain order */
    bool rows_known;   /* SKL_OP_FORWARD_BACKWARD: kl and dot_t were stored by an earlier stage */
    bool teacher_side; /* backward_keys: dk_t, not dk_s */
} skl_task;

typedef struct skl_cpu_kernel {
    const char *name;
    const char *detail;
    bool fuses; /* backward_queries can add to dk, and give the KL of SKL_OP_FORWARD_BACKWARD, in its one sweep */
    bool (*usable)(void);
    skl_tiles (*tiles)(const skl_problem *problem);
    size_t (*scratch_size)(const skl_problem *problem); /* bytes a worker */
    void (*forward)(const skl_task *task);              /* rows or states of a query tile */
    void (*backward_queries)(const skl_task *task);     /* dq of a query tile; fused: its share of dk; one pass: KL */
    void (*backward_keys)(const skl_task *task);        /* dk of a key tile; `head` is a key head */
} skl_cpu_kernel;

extern const skl_cpu_kernel skl_cpu_reference;
extern const skl_cpu_kernel skl_cpu_portable;
extern const skl_cpu_kernel skl_cpu_avx2;
extern const skl_cpu_kernel skl_cpu_avx512;

/* Offset of a row in a tensor, in elements. */
#define SKL_ROW(tensor, batch, head, row)                                                                            \
    ((batch) * (tensor).stride_batch + (head) * (tensor).stride_head + (row) * (tensor).stride_row)

static inline float skl_row_value(const skl_input *rows, const skl_sequence *s, int64_t head, int64_t i)
{
    return ((const float *)rows->data)[SKL_ROW(*rows, s->batch, head, s->query_begin + i)];
}

static inline void skl_row_set(const skl_output *rows, const skl_sequence *s, int64_t head, int64_t i, float value)
{
    if (rows->data != NULL)
        ((float *)rows->data)[SKL_ROW(*rows, s->batch, head, s->query_begin + i)] = value;
}

/* Index of a row in a contiguous state array. */
static inline int64_t skl_state_index(const skl_problem *p, const skl_sequence *s, int64_t head, int64_t i)
{
    const int64_t rows = p->packed ? p->total_q : p->len_q;
    return (s->batch * p->heads_s + head) * rows + s->query_begin + i;
}

/* kl or dot_t for a backward: the caller's, or what an earlier stage of the same call stored. */
static inline skl_input skl_known_rows(const skl_task *t, const skl_input *given, const skl_output *stored)
{
    const skl_input own = {stored->data, stored->stride_batch, stored->stride_head, stored->stride_row};
    return t->rows_known ? own : *given;
}

/* One side of the problem, so that teacher and student share their code. */
typedef struct skl_side {
    const skl_input *q, *k;
    const skl_output *dq, *dk;
    skl_dtype dtype, grad_dtype;
    int64_t heads, key_heads, dim;
    float scale, softcap;
} skl_side;

static inline skl_side skl_teacher_of(const skl_task *t)
{
    const skl_problem *const p = t->problem;
    const skl_side teacher = {&t->call->inputs.q_t,
                              &t->call->inputs.k_t,
                              &t->call->gradients.dq_t,
                              &t->call->gradients.dk_t,
                              p->dtype_t,
                              skl_grad_dtype(p, p->dtype_t),
                              p->heads_t,
                              p->key_heads_t,
                              p->dim_t,
                              p->scale_t,
                              p->softcap_t};
    return teacher;
}

static inline skl_side skl_student_of(const skl_task *t)
{
    const skl_problem *const p = t->problem;
    const skl_side student = {&t->call->inputs.q_s,
                              &t->call->inputs.k_s,
                              &t->call->gradients.dq_s,
                              &t->call->gradients.dk_s,
                              p->dtype_s,
                              skl_grad_dtype(p, p->dtype_s),
                              p->heads_s,
                              p->key_heads_s,
                              p->dim_s,
                              p->scale_s,
                              p->softcap_s};
    return student;
}

static inline int64_t skl_key_head(const skl_side *side, int64_t head)
{
    return head / (side->heads / side->key_heads);
}

#endif
