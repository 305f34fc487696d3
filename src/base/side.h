/* One side of a call, for code that serves both teacher and student, and access to rows of tensors. */
#ifndef SKL_BASE_SIDE_H
#define SKL_BASE_SIDE_H

#include <stdbool.h>

#include "base/backend.h"

/* Offset of a row in a tensor, in elements. */
#define SKL_ROW(tensor, batch, head, row)                                                                            \
    ((batch) * (tensor).stride_batch + (head) * (tensor).stride_head + (row) * (tensor).stride_row)

/* Shape that all heads of a tensor share; packed tensors are one long sequence. */
typedef struct skl_tensor_rows {
    int64_t rows, batch;
} skl_tensor_rows;

SKL_HOST_DEVICE skl_tensor_rows skl_query_rows(const skl_problem *p)
{
    const skl_tensor_rows shape = {p->packed ? p->total_q : p->len_q, p->packed ? 1 : p->batch};
    return shape;
}

SKL_HOST_DEVICE skl_tensor_rows skl_key_rows(const skl_problem *p)
{
    const skl_tensor_rows shape = {p->packed ? p->total_k : p->len_k, p->packed ? 1 : p->batch};
    return shape;
}

/* Rows of k_s and dk_s: with a pooled teacher, blocks of keys. */
SKL_HOST_DEVICE skl_tensor_rows skl_student_key_rows(const skl_problem *p)
{
    const skl_tensor_rows keys = skl_key_rows(p), shape = {skl_student_keys(p, keys.rows), keys.batch};
    return shape;
}

/* Rows of all sequences together. */
SKL_HOST_DEVICE int64_t skl_all_rows(skl_tensor_rows shape)
{
    return shape.rows * shape.batch;
}

typedef struct skl_side {
    const skl_input *q, *k;
    const skl_output *dq, *dk;
    skl_dtype dtype, grad_dtype;
    int64_t heads, key_heads, dim;
    float scale, softcap;
    bool linear;    /* SKL_LINK_LINEAR */
    bool on_matrix; /* a CPU kernel multiplies its 16-bit numbers on a matrix unit */
} skl_side;

SKL_HOST_DEVICE skl_side skl_teacher_of(const skl_problem *p, const skl_call *call)
{
    const skl_side teacher = {&call->inputs.q_t,
                              &call->inputs.k_t,
                              &call->gradients.dq_t,
                              &call->gradients.dk_t,
                              p->dtype_t,
                              skl_grad_dtype(p, p->dtype_t),
                              p->heads_t,
                              p->key_heads_t,
                              p->dim_t,
                              p->scale_t,
                              p->softcap_t,
                              false,
                              false};
    return teacher;
}

SKL_HOST_DEVICE skl_side skl_student_of(const skl_problem *p, const skl_call *call)
{
    const skl_side student = {&call->inputs.q_s,
                              &call->inputs.k_s,
                              &call->gradients.dq_s,
                              &call->gradients.dk_s,
                              p->dtype_s,
                              skl_grad_dtype(p, p->dtype_s),
                              p->heads_s,
                              p->key_heads_s,
                              p->dim_s,
                              p->scale_s,
                              p->softcap_s,
                              p->link_s == SKL_LINK_LINEAR,
                              false};
    return student;
}

/* Whether a softcap changes logits on a GPU. A cap of 2^100 changes no logit that kernels can use, but the
 * numbers made of it leave the range of floats. */
SKL_HOST_DEVICE int skl_caps_logits(float softcap)
{
    return softcap > 0.0F && softcap < 0x1p100F;
}

SKL_HOST_DEVICE int64_t skl_key_head(const skl_side *side, int64_t head)
{
    return head / (side->heads / side->key_heads);
}

SKL_HOST_DEVICE const float *skl_row_at(const skl_input *rows, const skl_sequence *s, int64_t head, int64_t i)
{
    return (const float *)rows->data + SKL_ROW(*rows, s->batch, head, s->query_begin + i);
}

SKL_HOST_DEVICE float skl_row_value(const skl_input *rows, const skl_sequence *s, int64_t head, int64_t i)
{
    return *skl_row_at(rows, s, head, i);
}

SKL_HOST_DEVICE void skl_row_set(const skl_output *rows, const skl_sequence *s, int64_t head, int64_t i, float value)
{
    if (rows->data != NULL)
        ((float *)rows->data)[SKL_ROW(*rows, s->batch, head, s->query_begin + i)] = value;
}

/* Index of a row in a contiguous state array. */
SKL_HOST_DEVICE int64_t skl_state_index(const skl_problem *p, const skl_sequence *s, int64_t head, int64_t i)
{
    const int64_t rows = p->packed ? p->total_q : p->len_q;
    return (s->batch * p->heads_s + head) * rows + s->query_begin + i;
}

/* An output as the input of a later launch. */
SKL_HOST_DEVICE skl_input skl_input_of(const skl_output *out)
{
    const skl_input input = {out->data, out->stride_batch, out->stride_head, out->stride_row};
    return input;
}

/* kl or dot_t for a backward: the caller's, or the result of an earlier launch of the same call. */
SKL_HOST_DEVICE skl_input skl_known_rows(int rows_known, const skl_input *given, const skl_output *stored)
{
    return rows_known ? skl_input_of(stored) : *given;
}

/* ---- Halves of a call ---------------------------------------------------------------------------------------- */

/* A pooled target is divided by a sum over its whole row. So a one-pass call is a forward, and a backward that reads
 * the row results of the forward. Kernels that keep the targets of some rows do both for these rows. */
SKL_HOST_DEVICE bool skl_op_has_halves(const skl_problem *p, skl_op op)
{
    return op == SKL_OP_FORWARD_BACKWARD && skl_is_pooled(p);
}

/* The half with this operation: SKL_OP_FORWARD or SKL_OP_BACKWARD. */
static inline skl_call skl_call_half(const skl_call *call, skl_op op)
{
    static const skl_gradients no_gradients = {sizeof(skl_gradients)};
    static const skl_rows no_rows = {sizeof(skl_rows)};
    skl_call half = *call;
    half.op = op;
    if (op == SKL_OP_FORWARD) {
        half.gradients = no_gradients;
        return half;
    }
    half.inputs.lse_t = skl_input_of(&call->rows.lse_t);
    half.inputs.lse_s = skl_input_of(&call->rows.lse_s);
    half.inputs.kl = skl_input_of(&call->rows.kl);
    half.rows = no_rows;
    return half;
}

#endif
