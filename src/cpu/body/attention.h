/* The student's own attention o = S v in a backward that carries the KL. With dP = do v^T and D = <do, o>:
 *
 *     g_s += scale S (dP - D)        dv = S^T do
 *
 * One more panel of products next to the logits, and S itself for the product with do. */
#ifndef SKL_CPU_BODY_ATTENTION_H
#define SKL_CPU_BODY_ATTENTION_H

#include "cpu/body/forward.h"

/* Whether the call also computes the gradients of the student's attention. */
static bool attends(const tile *t)
{
    return t->task->call->op == SKL_OP_ATTENTION_BACKWARD;
}

/* D, and do as rows and transposed. */
static void load_outputs(const tile *t)
{
    const skl_attention *const of = t->task->call->attention;
    const int64_t dim = t->student.dim, width = padded(dim), row = t->sequence.query_begin + t->first;
    const int64_t at_o = SKL_ROW(of->o_s, t->sequence.batch, t->head, row);
    const int64_t at_do = SKL_ROW(of->do_s, t->sequence.batch, t->head, row);
    load_rows(t->o, of->o_s.data, t->student.dtype, at_o, of->o_s.stride_row, t->count, dim);
    load_rows(t->d_o, of->do_s.data, t->student.dtype, at_do, of->do_s.stride_row, t->count, dim);
    for (int64_t i = 0; i < t->height; i++) {
        double dot = 0.0;
        for (int64_t c = 0; i < t->count && c < dim; c++)
            dot += (double)t->o[i * width + c] * (double)t->d_o[i * width + c];
        t->d[i] = (float)dot;
    }
    load_query_rows(t, &t->student, &of->do_s, t->head, of->dv_s.data != NULL, t->d_o, t->doT);
}

static void load_values(const tile *t, int64_t key_head, int64_t first, int64_t count)
{
    const skl_output none = {NULL, 0, 0, 0}; /* values have no dq */
    skl_side side = t->student;
    side.k = &t->task->call->attention->v_s;
    side.dq = &none;
    load_keys(t, &side, key_head, first, count, t->v);
}

/* s = S, and g, if it is wanted, += scale S (dP - D), of a panel whose logits are y. `dp` has room for a panel. */
static void attention_panel(const tile *t, int64_t panel, const float *y, float *dp, const key_tile *keys, float *g)
{
    const skl_side *const side = &t->student;
    const int64_t columns = panel_columns(t, panel);
    const float scale = logit_scale(side);
    const logit_link link = link_of(side);
    panel_dots(dp, side, loaded_keys(side, t->v), panel_queries(t->doT, side, panel), columns, keys->count);
    for (int64_t column = 0; column < columns; column += SKL_LANES) {
        const int64_t row = panel * PANEL + column;
        const lane_range lanes = lanes_visible(t, row, keys);
        const vec lse = vec_load(t->lse_s + row), d = vec_load(t->d + row);
        for (int32_t key = 0; key < keys->count; key++) {
            const ivec seen = lane_mask(&lanes, key);
            const vec logit = vec_load(y + key * PANEL + column) * scale;
            const vec s = (vec)((ivec)exp_vec(logit - lse) & seen);
            vec_store(t->s + key * t->height + row, s);
            if (g == NULL)
                continue;
            const vec ds = s * (vec_load(dp + key * PANEL + column) - d) * slope_of(logit, link) * side->scale;
            float *const at = g + key * t->height + row;
            vec_store(at, vec_load(at) + (vec)((ivec)ds & seen));
        }
    }
}

#endif
