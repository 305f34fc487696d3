/* A query tile that goes over its keys: buffers, masks and logits.
 *
 * One lane of a vector is one query row, so row states are vectors too, and no sum crosses lanes. A panel is PANEL
 * queries; the logits of a panel are stored as [key][lane]. */
#ifndef SKL_CPU_BODY_TILE_H
#define SKL_CPU_BODY_TILE_H

#include "cpu/body/matrix.h"
#include "cpu/kernel.h"
#include "cpu/row_sums.h"

enum {
    PANEL = SKL_LANES * MICRO_VECS,
    TILE_K = 96,           /* keys per tile: a multiple of MICRO_ROWS for every instruction set */
    TILE_Q = 192,          /* queries per tile; half of it if the heads of one side would fill the cache */
    KEY_BLOCK = 4 * TILE_K /* keys that backward_keys keeps while it goes over the queries */
};

_Static_assert(TILE_K % MICRO_ROWS == 0 && TILE_Q / 2 % MICRO_ROWS == 0, "tiles are multiples of the micro-kernel");
_Static_assert(TILE_Q / 2 % PANEL == 0, "tiles are multiples of a panel");
_Static_assert(TILE_K % MATRIX_ROWS == 0 && TILE_K % MATRIX_DEPTH == 0 && PANEL % MATRIX_DEPTH == 0,
               "tiles and panels are multiples of the matrix unit's blocks");

/* Keys of one step of a pass. */
typedef struct key_tile {
    int64_t index; /* first key / TILE_K */
    int64_t first;
    int64_t count;
} key_tile;

typedef struct tile {
    const skl_task *task;
    skl_side teacher, student;
    skl_sequence sequence;
    int64_t group_size; /* teacher heads per student head */
    int64_t head;       /* student head */
    int64_t first;      /* query */
    int64_t count;      /* queries */
    int64_t height;     /* queries of a tile that is not the last */
    bool reverse;

    skl_range
        *visible;    /* [height]; rows from `count` on repeat the last one; with a pooled teacher, blocks of keys */
    skl_range *seen; /* [height]: keys of the teacher */
    float *shifts;   /* m_a, m_b: [2][height] */
    double *sums;    /* l_a, l_b, w: [3][height] */
    float *lse_t, *lse_s; /* [group_size][height], [height] */
    float *grad, *kl;
    float *dot_t;     /* [group_size][height] */
    double *dot_sum;  /* [group_size][height]: sum_j P_hj (phi_j - mean): see skl_dot_rule */
    double *head_sum; /* [group_size][height]: sum_j P_hj */
    float *zero;      /* [height] of 0: the LSE of logits that are already normalized */

    float *qT_t, *qT_s; /* transposed queries: [group_size][panel][dim][PANEL], [panel][dim][PANEL] */
    float *q_t, *q_s;   /* queries as rows: [group_size][height][padded] (teacher gradients), [height][padded] */
    float *k_t, *k_s;   /* keys as rows: [TILE_K][padded] or [KEY_BLOCK][padded] */
    float *x, *y;       /* logits: [panel][TILE_K][PANEL] */
    float *key_x;       /* logits of the teacher's keys, same shape as x */
    float *block_sum;   /* pooled teacher: sums over the keys of a block, same shape as x */
    float *sum;         /* teacher group: sums of its probabilities, same shape as x */
    float *g_t, *g_s;   /* logit gradients: [TILE_K][height] */
    uint16_t *g_rows;   /* matrix unit: logit gradients of one side, rounded to bf16, [TILE_K][height] */
    uint16_t
        *g_interleaved; /* g_rows interleaved along keys, [TILE_K / MATRIX_INTERLEAVE][height][MATRIX_INTERLEAVE] */
    float *dq_t, *dq_s; /* sums: [group_size][height][padded], [height][padded]; on a matrix unit [dim][height] */
    float *dk_t, *dk_s; /* gradients of one key tile, or sums of a key block */
    float *v, *dv;      /* skl_attention_backward: values of a key tile or a key block, like k_s, and their sums */
    float *o, *d_o;     /* output and its upstream gradient, as rows like q_s */
    float *doT, *d;     /* the latter transposed like qT_s, and <do, o>: [height] */
    float *s;           /* probabilities of the student, same shape as g_s */
    float *rest;        /* last rows of dk, which do not fill a micro-kernel: [MICRO_ROWS][padded] */
} tile;

/* ---- Buffers ------------------------------------------------------------------------------------------------ */

static int64_t tile_height(const skl_problem *p)
{
    const int64_t floats = skl_max(skl_group_size(p) * p->dim_t, p->index_heads * p->dim_s) * TILE_Q;
    return floats > (int64_t)1 << 17 ? TILE_Q / 2 : TILE_Q;
}

/* Takes a buffer from the scratch memory, rounded up to cache lines. */
static float *cut(float **scratch, int64_t floats)
{
    float *const buffer = *scratch;
    *scratch += (floats + 15) / 16 * 16;
    return buffer;
}

static double *cut_doubles(float **scratch, int64_t count)
{
    return (double *)(void *)cut(scratch, count * (int64_t)(sizeof(double) / sizeof(float)));
}

/* Places all buffers in `scratch` and returns the end. */
static float *lay_out(tile *t, const skl_problem *p, float *scratch)
{
    const int64_t group_size = skl_group_size(p);
    const int64_t height = tile_height(p);
    const int64_t width_t = padded(p->dim_t);
    const int64_t width_s = padded(p->dim_s);
    t->height = height;
    t->visible = (skl_range *)(void *)cut(&scratch, height * (int64_t)(sizeof(skl_range) / sizeof(float)));
    const int64_t pooled = skl_is_pooled(p) ? 1 : 0;
    skl_range *const seen =
        (skl_range *)(void *)cut(&scratch, pooled * height * (int64_t)(sizeof(skl_range) / sizeof(float)));
    t->seen = pooled ? seen : t->visible;
    t->shifts = cut(&scratch, 2 * height);
    t->sums = cut_doubles(&scratch, 3 * height);
    t->lse_t = cut(&scratch, group_size * height);
    t->dot_t = cut(&scratch, group_size * height);
    t->dot_sum = cut_doubles(&scratch, group_size * height);
    t->head_sum = cut_doubles(&scratch, group_size * height);
    t->lse_s = cut(&scratch, height);
    t->grad = cut(&scratch, height);
    t->kl = cut(&scratch, height);
    t->zero = cut(&scratch, height);
    t->qT_t = cut(&scratch, group_size * height * query_width(p->dim_t));
    t->qT_s = cut(&scratch, height * query_width(p->dim_s));
    t->q_t = cut(&scratch, (p->gradients & SKL_DK_T ? group_size : 1) * height * width_t);
    t->q_s = cut(&scratch, height * width_s);
    t->k_t = cut(&scratch, KEY_BLOCK * width_t);
    t->k_s = cut(&scratch, KEY_BLOCK * width_s);
    t->x = cut(&scratch, height * TILE_K);
    t->y = cut(&scratch, height * TILE_K);
    float *const key_x = cut(&scratch, pooled * height * TILE_K);
    t->key_x = pooled ? key_x : t->x;
    t->block_sum = cut(&scratch, pooled * height * TILE_K);
    t->sum = cut(&scratch, skl_has_teacher_groups(p) ? height * TILE_K : 0);
    t->g_t = cut(&scratch, height * TILE_K);
    t->g_s = cut(&scratch, height * TILE_K);
    t->g_rows = halves(cut(&scratch, HAS_MATRIX * height * TILE_K / 2));
    t->g_interleaved = halves(cut(&scratch, HAS_MATRIX * height * TILE_K / 2));
    t->dq_t = cut(&scratch, p->gradients & SKL_DQ_T ? group_size * height * width_t : 0);
    t->dq_s = cut(&scratch, p->gradients & SKL_DQ_S ? height * width_s : 0);
    t->dk_t = cut(&scratch, p->gradients & SKL_DK_T ? TILE_K * width_t : 0);
    t->dk_s = cut(&scratch, p->gradients & SKL_DK_S ? TILE_K * width_s : 0);
    const int64_t attends = p->gradients & SKL_DV_S ? 1 : 0;
    t->v = cut(&scratch, attends * TILE_K * width_s);
    t->dv = cut(&scratch, attends * TILE_K * width_s);
    t->o = cut(&scratch, attends * height * width_s);
    t->d_o = cut(&scratch, attends * height * width_s);
    t->doT = cut(&scratch, attends * height * query_width(p->dim_s));
    t->d = cut(&scratch, attends * height);
    t->s = cut(&scratch, attends * height * TILE_K);
    t->rest = cut(&scratch, skl_max(MICRO_ROWS, MATRIX_ROWS) * (width_t > width_s ? width_t : width_s));
    return scratch;
}

/* Defines NAME(problem): the bytes of scratch memory that PLACE takes for BUFFERS. */
#define SCRATCH_SIZE(name, buffers, place)                                                                           \
    static size_t name(const skl_problem *p)                                                                         \
    {                                                                                                                \
        buffers placed;                                                                                              \
        float *const base = (float *)(uintptr_t)64; /* any aligned address: no memory is accessed */                 \
        return (size_t)((const char *)place(&placed, p, base) - (const char *)base);                                 \
    }

SCRATCH_SIZE(scratch_size, tile, lay_out)

static skl_tiles tiles(const skl_problem *p)
{
    const skl_tiles shape = {tile_height(p), KEY_BLOCK};
    return shape;
}

/* ---- Queries and masks -------------------------------------------------------------------------------------- */

/* Queries of a side on the matrix unit, interleaved: they follow its rows. */
static uint16_t *interleaved_queries(const tile *t, const skl_side *side, const float *rows)
{
    return halves(rows) + t->height * padded(side->dim);
}

/* Loads rows of a tensor like q, as rows and transposed; if `of_dk`, also as an operand of key gradients. */
static void load_query_rows(const tile *t, const skl_side *side, const skl_input *from, int64_t head, bool of_dk,
                            float *rows, float *transposed)
{
    const int64_t offset = SKL_ROW(*from, t->sequence.batch, head, t->sequence.query_begin + t->first);
    if (!side->on_matrix) {
        load_rows(rows, from->data, side->dtype, offset, from->stride_row, t->count, side->dim);
        transpose_to_panels(transposed, rows, t->count, side->dim, PANEL);
        return;
    }
    const int64_t width = padded(side->dim), columns = round_up(side->dim, MATRIX_DEPTH) / MATRIX_INTERLEAVE;
    copy_halves(halves(rows), (const uint16_t *)from->data + offset, from->stride_row, t->count, t->height,
                side->dim);
    for (int64_t first = 0; first < t->count; first += PANEL)
        transpose_interleaved(halves(transposed + first * query_width(side->dim)), PANEL * MATRIX_INTERLEAVE,
                              halves(rows) + first * width, width, PANEL, columns);
    if (of_dk)
        interleave_rows(interleaved_queries(t, side, rows), width, halves(rows), width, t->height, width);
}

static void load_queries(const tile *t, const skl_side *side, int64_t head, float *rows, float *transposed)
{
    load_query_rows(t, side, side->q, head, side->dk->data != NULL, rows, transposed);
}

/* Prepares queries [first, first + height) of a student head. */
static void tile_begin(tile *t, const skl_task *task, int64_t head, int64_t first)
{
    const skl_problem *const p = task->problem;
    (void)lay_out(t, p, task->scratch);
    t->task = task;
    t->teacher = skl_teacher_of(task->problem, task->call);
    t->student = skl_student_of(task->problem, task->call);
    t->teacher.on_matrix = HAS_MATRIX && t->teacher.dtype == SKL_BF16;
    t->student.on_matrix = HAS_MATRIX && t->student.dtype == SKL_BF16;
    t->sequence = skl_sequence_at(p, &task->call->inputs, task->call->keys, task->batch);
    t->group_size = skl_group_size(p);
    t->head = head;
    t->first = first;
    t->count = skl_max(0, skl_min(t->height, t->sequence.query_count - first));
    t->reverse = p->direction == SKL_KL_REVERSE;
    for (int64_t i = 0; i < t->height; i++) {
        t->seen[i] = i < t->count || i == 0 ? skl_visible(p, &t->sequence, first + i) : t->seen[i - 1];
        t->visible[i] = skl_pooled_range(p, t->seen[i]);
        t->zero[i] = 0.0F;
    }
    t->sequence.key_count = skl_student_keys(p, t->sequence.key_count);
}

static void load_teacher_queries(const tile *t)
{
    const int64_t transposed = t->height * query_width(t->teacher.dim);
    const int64_t rows = t->task->problem->gradients & SKL_DK_T ? t->height * padded(t->teacher.dim) : 0;
    for (int64_t h = 0; h < t->group_size; h++)
        load_queries(t, &t->teacher, t->head * t->group_size + h, t->q_t + h * rows, t->qT_t + h * transposed);
}

static void tile_load_queries(const tile *t)
{
    load_teacher_queries(t);
    load_queries(t, &t->student, t->head, t->q_s, t->qT_s);
}

/* Keys that are visible to at least one query of the tile. */
static skl_range tile_keys(const tile *t)
{
    const skl_range keys = {t->visible[0].begin, t->visible[t->height - 1].end};
    return keys;
}

/* Key tile number `index`, without the keys after the last visible one. */
static key_tile key_tile_at(const tile *t, int64_t index)
{
    const int64_t first = index * TILE_K;
    const key_tile keys = {index, first, skl_min(TILE_K, tile_keys(t).end - first)};
    return keys;
}

static int64_t panel_count(const tile *t)
{
    return skl_ceil_div(t->count, PANEL);
}

/* Columns of a panel that hold queries, rounded up to full vectors. */
static int64_t panel_columns(const tile *t, int64_t panel)
{
    const int64_t queries = skl_min(PANEL, t->count - panel * PANEL);
    return (queries + SKL_LANES - 1) / SKL_LANES * SKL_LANES;
}

/* No pair of a tile is visible, some are, or all are. */
typedef enum visibility { HIDDEN, MASKED, FULL } visibility;

/* How much of a key tile is visible to a panel. From row to row, begin and end of a visible range never decrease. */
static visibility panel_visibility(const tile *t, int64_t panel, const key_tile *keys)
{
    const skl_range first = t->visible[panel * PANEL];
    const skl_range last = t->visible[panel * PANEL + PANEL - 1];
    const int64_t end = keys->first + keys->count;
    if (keys->count == 0)
        return HIDDEN;
    if (last.begin <= keys->first && first.end >= end)
        return FULL;
    return first.begin < end && last.end > keys->first ? MASKED : HIDDEN;
}

/* A key tile without the keys after the last one that a panel sees. */
static key_tile panel_keys(const tile *t, int64_t panel, const key_tile *keys)
{
    const int64_t end = t->visible[panel * PANEL + PANEL - 1].end;
    const key_tile seen = {keys->index, keys->first, skl_max(0, skl_min(keys->count, end - keys->first))};
    return seen;
}

/* Keys [begin, end) of a tile that are visible to each lane, relative to the first key of the tile. */
typedef struct lane_range {
    ivec begin, end;
} lane_range;

static lane_range lanes_visible(const tile *t, int64_t row, const key_tile *keys)
{
    lane_range lanes;
    for (int lane = 0; lane < SKL_LANES; lane++) {
        const skl_range visible = t->visible[row + lane];
        lanes.begin[lane] = (int32_t)skl_max(0, skl_min(TILE_K, visible.begin - keys->first));
        lanes.end[lane] = (int32_t)skl_max(0, skl_min(TILE_K, visible.end - keys->first));
    }
    return lanes;
}

SKL_INLINE ivec lane_mask(const lane_range *lanes, int32_t key)
{
    return (ivec)(lanes->begin <= key) & (ivec)(lanes->end > key);
}

/* ---- Logits ------------------------------------------------------------------------------------------------- */

/* Keys of a tile, transposed, on a side on the matrix unit: [dim][TILE_K]. They follow its rows, of which there may
 * be KEY_BLOCK. */
static uint16_t *transposed_keys(const skl_side *side, const float *rows)
{
    return halves(rows) + KEY_BLOCK * padded(side->dim);
}

static void transpose_keys(const skl_side *side, const float *rows, int64_t count)
{
    const int64_t width = padded(side->dim);
    uint16_t *const to = transposed_keys(side, rows), *const interleaved = to + width * TILE_K;
    interleave_rows(interleaved, width, halves(rows), width, count, width);
    transpose_interleaved(to, TILE_K, interleaved, width * MATRIX_INTERLEAVE, count / MATRIX_INTERLEAVE, side->dim);
}

static void load_keys(const tile *t, const skl_side *side, int64_t key_head, int64_t first, int64_t count,
                      float *rows)
{
    const int64_t offset = SKL_ROW(*side->k, t->sequence.batch, key_head, t->sequence.key_begin + first);
    if (!side->on_matrix) {
        load_rows(rows, side->k->data, side->dtype, offset, side->k->stride_row, count, side->dim);
        return;
    }
    const int64_t capacity = round_up(count, MATRIX_DEPTH);
    copy_halves(halves(rows), (const uint16_t *)side->k->data + offset, side->k->stride_row, count, capacity,
                side->dim);
    if (side->dq->data != NULL && count <= TILE_K)
        transpose_keys(side, rows, capacity);
}

/* Rows of keys, in a tile buffer or in the caller's tensor. */
typedef struct key_view {
    const float *data;
    int64_t stride;
} key_view;

static key_view loaded_keys(const skl_side *side, const float *buffer)
{
    const key_view rows = {buffer, padded(side->dim)};
    return rows;
}

/* Rows of a block of loaded keys, from number `key` on. */
static float *key_rows(const skl_side *side, float *rows, int64_t key)
{
    return rows + key * padded(side->dim) / (side->on_matrix ? 2 : 1);
}

/* Keys that only the logits need. Dense f32 rows are read in place, unless the product would round their number up.
 * Rows far apart are copied, since they could map to the same cache sets. */
static key_view keys_for_logits(const tile *t, const skl_side *side, const key_tile *keys, float *buffer)
{
    const int64_t key_head = skl_key_head(side, t->head);
    const bool close = side->k->stride_row < 2 * side->dim;
    if (side->dtype == SKL_F32 && close && keys->count % MICRO_ROWS == 0) {
        const int64_t offset = SKL_ROW(*side->k, t->sequence.batch, key_head, t->sequence.key_begin + keys->first);
        const key_view in_place = {(const float *)side->k->data + offset, side->k->stride_row};
        return in_place;
    }
    load_keys(t, side, key_head, keys->first, keys->count, buffer);
    return loaded_keys(side, buffer);
}

/* Factor from a stored number to a logit. Logits that are not a multiple of the product are stored with factor 1. */
static float logit_scale(const skl_side *side)
{
    return side->softcap > 0.0F || side->linear ? 1.0F : side->scale;
}

/* x[key][lane] = <k, q> of one panel. */
static void panel_dots(float *x, const skl_side *side, key_view k, const float *qT, int64_t columns,
                       int64_t key_count)
{
    if (!side->on_matrix) {
        gemm(x, PANEL, k.data, k.stride, qT, PANEL, key_count, columns, side->dim);
        return;
    }
    const matrix_operands operands = {x,     PANEL,     halves(k.data), k.stride, halves(qT),
                                      PANEL, key_count, columns,        side->dim};
    matrix_product(&operands, false);
}

/* x[key][lane] = logits of one panel: products, capped logits with a softcap, logarithms with a linear link. */
static void panel_logits(float *x, const skl_side *side, key_view k, const float *qT, int64_t columns,
                         int64_t key_count)
{
    panel_dots(x, side, k, qT, columns, key_count);
    if (side->softcap == 0.0F && !side->linear)
        return;
    for (int64_t at = 0; at < key_count * PANEL; at += SKL_LANES)
        if (at % PANEL < columns) {
            const vec product = vec_load(x + at);
            vec_store(x + at, side->linear ? log_of_any(product) : softcap_vec(product * side->scale, side->softcap));
        }
}

/* How the logits of a side depend on its products. */
typedef struct logit_link {
    float inverse_cap; /* 1 / softcap; 0: none */
    bool linear;
} logit_link;

static const logit_link PLAIN_LINK = {0.0F, false};

static logit_link link_of(const skl_side *side)
{
    const logit_link link = {side->softcap > 0.0F ? 1.0F / side->softcap : 0.0F, side->linear};
    return link;
}

/* The logit of softmax attention without a softcap is a multiple of the product. */
static bool is_plain(logit_link link)
{
    return link.inverse_cap == 0.0F && !link.linear;
}

/* Derivative of a logit that is not a multiple of the product: 1 - (logit / cap)^2, or 1 / a = e^-logit. It is finite
 * for a = 0, so that a pair without mass on either side has gradient 0. */
SKL_INLINE vec slope_of(vec logit, logit_link link)
{
    if (link.linear)
        return vec_at_most(vec_of(FLT_MAX), exp_vec(-logit));
    const vec ratio =
        link.inverse_cap == 0.0F ? vec_of(0.0F) : logit * link.inverse_cap; /* an infinite logit has no cap */
    return vec_fma(-ratio, ratio, vec_of(1.0F));
}

static const float *panel_queries(const float *qT, const skl_side *side, int64_t panel)
{
    return qT + panel * PANEL * query_width(side->dim);
}

#endif
