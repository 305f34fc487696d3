/* A sparse indexer as the student: each row has its own top-k keys in `indices`.
 *
 * Rows have different keys, so one lane is one key here. The keys of a row are gathered into dense blocks. All heads
 * that share keys take part in one matrix product with one lane per head; its result is then transposed, so that
 * means and sums over heads stay within lanes. Sums over the keys of a block cross lanes in a fixed order. */
#ifndef SKL_CPU_BODY_SPARSE_H
#define SKL_CPU_BODY_SPARSE_H

#include "base/indices.h"
#include "cpu/body/indexer.h"

enum { INDEX_BLOCK = TILE_K }; /* keys per block */

_Static_assert(INDEX_BLOCK % PANEL == 0, "blocks are multiples of a panel");

/* The current row. Matrices of heads have room for a micro-kernel after the last head. */
typedef struct sparse_row {
    const skl_task *task;
    skl_side teacher, student;
    skl_sequence sequence;
    int64_t group_size, heads; /* teacher heads, index heads */
    int64_t head, i;           /* student head, query */
    bool relu, reverse;
    skl_range seen;            /* keys of the teacher */
    skl_range visible, active; /* keys or blocks; `active`: all visible ones, or those in a key block */
    const int32_t *indices;
    int64_t next;          /* entry of `indices` */
    int64_t count;         /* keys in the block */
    float grad, kl, lse_s; /* inputs of a backward */
    row_sums sums, entropy_sums;

    int32_t *keys;          /* [INDEX_BLOCK] */
    float *lse_t;           /* [group_size] */
    row_sums *head_sums;    /* [group_size] */
    float *q_t, *q_s;       /* queries as rows: [group_size][padded], [G][padded] */
    float *w, *dw;          /* [G] */
    float *k;               /* gathered keys: [INDEX_BLOCK][padded] */
    float *qT_t, *qT_s;     /* transposed queries of heads that share keys: [panel][dim][PANEL] */
    int64_t qT_first;       /* first teacher head of the group in qT_t; -1: none yet */
    float *transposed_dots; /* dots of a panel of heads: [INDEX_BLOCK][PANEL] */
    float *z, *dots;        /* logits of the heads: [group_size][INDEX_BLOCK], [G][INDEX_BLOCK] */
    float *x, *y, *dy;      /* [INDEX_BLOCK] */
    int32_t *part_keys;     /* pooled teacher: [INDEX_BLOCK], keys of one block, ... */
    float *part_x;          /* ... and their logits */
    float *dq;              /* [G][padded] */
    float *dk_block, *dk;   /* [INDEX_BLOCK][padded], [KEY_BLOCK][padded] */
} sparse_row;

/* ---- Buffers ------------------------------------------------------------------------------------------------ */

static float *sparse_lay_out(sparse_row *r, const skl_problem *p, float *scratch)
{
    const int64_t group_size = skl_group_size(p) + MICRO_ROWS, heads = p->index_heads + MICRO_ROWS;
    const int64_t width_t = padded(p->dim_t), width_s = padded(p->dim_s);
    const int64_t width = skl_max(width_t, width_s);
    r->keys = (int32_t *)(void *)cut(&scratch, INDEX_BLOCK);
    r->lse_t = cut(&scratch, group_size);
    r->head_sums = (row_sums *)(void *)cut(&scratch, group_size * (int64_t)(sizeof(row_sums) / sizeof(float)));
    r->q_t = cut(&scratch, group_size * width_t);
    r->q_s = cut(&scratch, heads * width_s);
    r->w = cut(&scratch, heads);
    r->dw = cut(&scratch, heads);
    r->k = cut(&scratch, INDEX_BLOCK * width);
    r->qT_t = cut(&scratch, (skl_group_size(p) + PANEL) * query_width(p->dim_t));
    r->qT_s = cut(&scratch, (p->index_heads + PANEL) * query_width(p->dim_s));
    r->transposed_dots = cut(&scratch, INDEX_BLOCK * PANEL);
    r->z = cut(&scratch, group_size * INDEX_BLOCK);
    r->dots = cut(&scratch, heads * INDEX_BLOCK);
    r->x = cut(&scratch, INDEX_BLOCK);
    r->y = cut(&scratch, INDEX_BLOCK);
    r->part_keys = (int32_t *)(void *)cut(&scratch, INDEX_BLOCK);
    r->part_x = cut(&scratch, INDEX_BLOCK);
    r->dy = cut(&scratch, INDEX_BLOCK);
    r->dq = cut(&scratch, heads * width_s);
    r->dk_block = cut(&scratch, INDEX_BLOCK * width_s);
    r->dk = cut(&scratch, KEY_BLOCK * width_s);
    return scratch;
}

SCRATCH_SIZE(sparse_scratch_size, sparse_row, sparse_lay_out)

static skl_tiles sparse_tiles(const skl_problem *p)
{
    (void)p;
    const skl_tiles shape = {16, KEY_BLOCK};
    return shape;
}

static void sparse_begin(sparse_row *r, const skl_task *task)
{
    const skl_problem *const p = task->problem;
    (void)sparse_lay_out(r, p, task->scratch);
    r->task = task;
    r->teacher = skl_teacher_of(p, task->call);
    r->student = skl_student_of(p, task->call);
    r->sequence = skl_sequence_at(p, &task->call->inputs, task->call->keys, task->batch);
    r->group_size = skl_group_size(p);
    r->heads = p->index_heads;
    r->relu = !p->index_linear;
    r->reverse = p->direction == SKL_KL_REVERSE;
}

/* Starts a row. Of its indices, keys outside [begin, end) are ignored. */
static void sparse_row_begin(sparse_row *r, int64_t head, int64_t i, int64_t begin, int64_t end)
{
    r->seen = skl_visible(r->task->problem, &r->sequence, i);
    r->visible = skl_pooled_range(r->task->problem, r->seen);
    r->head = head;
    r->i = i;
    r->active.begin = skl_max(r->visible.begin, begin);
    r->active.end = skl_min(r->visible.end, end);
    r->indices = skl_row_indices(&r->task->call->inputs, &r->sequence, head, i);
    r->next = 0;
    r->sums = r->entropy_sums = row_sums_empty();
}

/* Collects the next block of keys from `indices`; false if there is none. */
static bool next_block(sparse_row *r)
{
    const int64_t top_k = r->task->problem->top_k;
    for (r->count = 0; r->next < top_k && r->count < INDEX_BLOCK; r->next++)
        if (skl_index_is_visible(r->indices[r->next], r->active))
            r->keys[r->count++] = r->indices[r->next];
    return r->count > 0;
}

/* Loads queries and weights of the row. */
static void sparse_load_row(sparse_row *r)
{
    const skl_side *const t = &r->teacher, *const s = &r->student;
    const skl_input *const w = &r->task->call->inputs.w_s;
    const int64_t query = r->sequence.query_begin + r->i;
    const int64_t weights = SKL_ROW(*w, r->sequence.batch, r->head, query);
    load_rows(r->q_t, t->q->data, t->dtype, SKL_ROW(*t->q, r->sequence.batch, r->head * r->group_size, query),
              t->q->stride_head, r->group_size, t->dim);
    load_rows(r->q_s, s->q->data, s->dtype, SKL_ROW(*s->q, r->sequence.batch, r->head * r->heads, query),
              s->q->stride_head, r->heads, s->dim);
    transpose_to_panels(r->qT_s, r->q_s, r->heads, s->dim, PANEL);
    r->qT_first = -1;
    load_row(r->w, w->data, r->task->problem->dtype_w, weights, r->heads);
}

/* ---- Logits ------------------------------------------------------------------------------------------------- */

/* r->k = keys of the block, of one key head */
static void gather_keys(const sparse_row *r, const skl_side *side, int64_t key_head)
{
    const int64_t first = SKL_ROW(*side->k, r->sequence.batch, key_head, r->sequence.key_begin);
    for (int64_t n = 0; n < r->count; n++)
        load_rows(r->k + n * padded(side->dim), side->k->data, side->dtype, first + r->keys[n] * side->k->stride_row,
                  0, 1, side->dim);
}

/* c[h][key] = <q[h], k[key]> for `heads` heads */
static void head_dots(const sparse_row *r, const skl_side *side, float *c, const float *qT, int64_t heads)
{
    for (int64_t first = 0; first < heads; first += PANEL) {
        const int64_t columns = skl_min(PANEL, heads - first);
        gemm(r->transposed_dots, PANEL, r->k, padded(side->dim), qT + first * query_width(side->dim), PANEL, r->count,
             columns, side->dim);
        for (int64_t h = 0; h < columns; h++)
            for (int64_t key = 0; key < r->count; key++)
                c[(first + h) * INDEX_BLOCK + key] = r->transposed_dots[key * PANEL + h];
    }
}

/* r->z = logits of all teacher heads, minus their LSEs if those are known. */
static void teacher_block(sparse_row *r, bool minus_lse)
{
    const skl_side *const t = &r->teacher;
    for (int64_t h = 0, end; h < r->group_size; h = end) {
        const int64_t key_head = skl_key_head(t, r->head * r->group_size + h);
        for (end = h + 1; end < r->group_size && skl_key_head(t, r->head * r->group_size + end) == key_head;)
            end++;
        gather_keys(r, t, key_head);
        if (r->qT_first != h)
            transpose_to_panels(r->qT_t, r->q_t + h * padded(t->dim), end - h, t->dim, PANEL);
        r->qT_first = h;
        head_dots(r, t, r->z + h * INDEX_BLOCK, r->qT_t, end - h);
    }
    for (int64_t h = 0; h < r->group_size; h++) {
        const vec lse = vec_of(minus_lse ? r->lse_t[h] : 0.0F);
        for (int64_t key = 0; key < r->count; key += SKL_LANES) {
            float *const z = r->z + h * INDEX_BLOCK + key;
            if (t->softcap > 0.0F)
                vec_store(z, softcap_vec(vec_load(z) * t->scale, t->softcap));
            vec_store(z, vec_load(z) * logit_scale(t) - lse);
        }
    }
}

/* r->x = log mean_h e^z_h, or max_h z_h */
static void combine_heads(const sparse_row *r)
{
    for (int64_t key = 0; key < r->count; key += SKL_LANES) {
        vec m = vec_load(r->z + key);
        for (int64_t h = 1; h < r->group_size; h++)
            m = larger_or_nan(m, vec_load(r->z + h * INDEX_BLOCK + key));
        vec_store(r->x + key, m);
        if (r->task->problem->pool_heads == SKL_POOL_HEADS_MAX)
            continue;
        vec sum = {0};
        for (int64_t h = 0; h < r->group_size; h++)
            sum += exp_vec(vec_load(r->z + h * INDEX_BLOCK + key) - finite_shift(m));
        vec_store(r->x + key, m + log_vec(sum / (float)r->group_size));
    }
}

/* r->y = logits of the student. Keeps r->dots and the keys in r->k. */
static void student_block(const sparse_row *r)
{
    const skl_side *const s = &r->student;
    gather_keys(r, s, skl_key_head(s, r->head));
    head_dots(r, s, r->dots, r->qT_s, r->heads);
    for (int64_t key = 0; key < r->count; key += SKL_LANES) {
        vec sum = {0};
        for (int64_t g = 0; g < r->heads; g++) {
            const vec dots = vec_load(r->dots + g * INDEX_BLOCK + key);
            sum = vec_fma(vec_of(r->w[g]), (vec)((ivec)dots & dots_pass(r->relu, dots)), sum);
        }
        vec_store(r->y + key, sum * s->scale);
    }
}

/* ---- Row states --------------------------------------------------------------------------------------------- */

/* Lanes that hold a key, for the vector that starts at `key`. */
SKL_INLINE ivec lanes_active(const sparse_row *r, int64_t key)
{
    ivec lane;
    for (int n = 0; n < SKL_LANES; n++)
        lane[n] = n;
    return (ivec)(lane < (int32_t)(r->count - key));
}

SKL_INLINE float lane_sum(vec v)
{
    float sum = 0.0F;
    for (int n = 0; n < SKL_LANES; n++)
        sum += v[n];
    return sum;
}

static float highest_of(const sparse_row *r, const float *a)
{
    float m = -FLT_MAX; /* a block has a key: see row_sums.h */
    for (int64_t key = 0; key < r->count; key++)
        m = a[key] > m ? a[key] : m;
    return m;
}

/* Sums over the keys of a block. b == NULL stands for zeros. */
static row_sums block_sums(const sparse_row *r, const float *a, const float *b)
{
    const float m_a = highest_of(r, a);
    const float m_b = b != NULL ? highest_of(r, b) : 0.0F;
    key_sums sums = {{0}, {0}, {0}};
    for (int64_t key = 0; key < r->count; key += SKL_LANES)
        add_key(&sums, vec_load(a + key) - m_a, b != NULL ? vec_load(b + key) - m_b : vec_of(0.0F),
                lanes_active(r, key), true);
    const row_sums total = {(double)m_a, (double)lane_sum(sums.l_a), (double)m_b, (double)lane_sum(sums.l_b),
                            (double)lane_sum(sums.w)};
    return total;
}

/* Adds the block to the sums of the row. */
static void reduce_block(sparse_row *r)
{
    const float *const a = r->reverse ? r->y : r->x;
    r->sums = row_sums_merge(r->sums, block_sums(r, a, r->reverse ? r->x : r->y));
    if (entropy_wanted(r->task->call))
        r->entropy_sums = row_sums_merge(r->entropy_sums, block_sums(r, a, NULL));
}

/* Adds the logits of the keys of `part` to the sums of the teacher heads. */
static void add_head_sums(const sparse_row *part)
{
    for (int64_t h = 0; h < part->group_size; h++)
        part->head_sums[h] = row_sums_merge(part->head_sums[h], block_sums(part, part->z + h * INDEX_BLOCK, NULL));
}

/* log max_j e^x_j or log sum_j e^x_j of the keys of `part` and, if there are some, of those before. */
static row_sums pool_part(const sparse_row *part, row_sums before)
{
    if (part->task->problem->pool == SKL_POOL_SUM)
        return row_sums_merge(before, block_sums(part, part->x, NULL));
    row_sums largest = {before.m_a, 1.0, 0.0, 0.0, 0.0};
    for (int64_t key = 0; key < part->count; key++)
        if (!isnan(largest.m_a) && !((double)part->x[key] <= largest.m_a))
            largest.m_a = (double)part->x[key];
    return largest;
}

/* Visits the keys of the blocks of a pooled teacher. With known LSEs r->x = log M_b; else adds to the head sums. */
static void visit_blocks(sparse_row *r, bool lse_known)
{
    const int64_t size = r->task->problem->pool_size;
    sparse_row part = *r;
    part.keys = r->part_keys;
    part.x = r->part_x;
    for (int64_t n = 0; n < r->count; n++) {
        const int64_t begin = r->keys[n] * size, end = skl_min(begin + size, r->seen.end);
        row_sums pooled = row_sums_empty();
        for (int64_t first = begin; first < end; first += INDEX_BLOCK) {
            part.count = skl_min(INDEX_BLOCK, end - first);
            for (int64_t key = 0; key < part.count; key++)
                part.keys[key] = (int32_t)(first + key);
            teacher_block(&part, lse_known);
            if (!lse_known) {
                add_head_sums(&part);
                continue;
            }
            combine_heads(&part);
            pooled = pool_part(&part, pooled);
        }
        r->x[n] = row_lse(pooled.m_a, pooled.l_a);
    }
    r->qT_first = part.qT_first;
}

/* r->x = logarithms of the teacher's target for the keys, or blocks, in r->keys. */
static void sparse_teacher(sparse_row *r)
{
    if (skl_is_pooled(r->task->problem)) {
        visit_blocks(r, true);
        return;
    }
    teacher_block(r, true);
    combine_heads(r);
}

/* LSEs of the teacher heads: the caller's if given, else computed over the keys in `indices`. */
static void sparse_lse(sparse_row *r)
{
    const skl_input *const given = &r->task->call->inputs.lse_t;
    for (int64_t h = 0; h < r->group_size; h++) {
        r->head_sums[h] = row_sums_empty();
        if (given->data != NULL)
            r->lse_t[h] = skl_row_value(given, &r->sequence, r->head * r->group_size + h, r->i);
    }
    if (given->data != NULL)
        return;
    while (next_block(r)) {
        if (skl_is_pooled(r->task->problem)) {
            visit_blocks(r, false);
            continue;
        }
        teacher_block(r, false);
        add_head_sums(r);
    }
    r->next = 0;
    for (int64_t h = 0; h < r->group_size; h++)
        r->lse_t[h] = row_lse(r->head_sums[h].m_a, r->head_sums[h].l_a);
}

/* ---- Forward ------------------------------------------------------------------------------------------------ */

static void set_kl_and_entropy(const sparse_row *r)
{
    const skl_rows *const rows = &r->task->call->rows;
    const float kl = row_kl(&r->sums);
    const float entropy = row_entropy(&r->entropy_sums);
    skl_row_set(&rows->kl, &r->sequence, r->head, r->i, skl_kl_report(kl));
    skl_row_set(&rows->entropy, &r->sequence, r->head, r->i, entropy);
    skl_row_set(&rows->cross_entropy, &r->sequence, r->head, r->i, entropy + kl);
}

static void set_rows(const sparse_row *r)
{
    const skl_call *const call = r->task->call;
    const float lse_a = row_lse(r->sums.m_a, r->sums.l_a);
    const float lse_b = row_lse(r->sums.m_b, r->sums.l_b);
    const float lse_t = r->reverse ? lse_b : lse_a;
    const bool lse_given = call->inputs.lse_t.data != NULL || skl_is_pooled(r->task->problem);
    set_kl_and_entropy(r);
    skl_row_set(&call->rows.lse_s, &r->sequence, r->head, r->i, r->reverse ? lse_a : lse_b);
    skl_row_set(&call->rows.mass, &r->sequence, r->head, r->i, skl_mass(lse_t, lse_given));
    for (int64_t h = 0; h < r->group_size; h++)
        skl_row_set(&call->rows.lse_t, &r->sequence, r->head * r->group_size + h, r->i,
                    lse_t == -INFINITY ? lse_t : r->lse_t[h] + lse_t);
}

static void sparse_forward(const skl_task *task)
{
    sparse_row r;
    sparse_begin(&r, task);
    const int64_t begin = task->tile * task->tiles.queries;
    const int64_t end = skl_min(begin + task->tiles.queries, r.sequence.query_count);
    const bool with_teacher = !skl_only_lse_s(task->call);
    for (int64_t i = begin; i < end; i++) {
        sparse_row_begin(&r, task->head, i, 0, INT64_MAX);
        sparse_load_row(&r);
        if (with_teacher)
            sparse_lse(&r);
        while (next_block(&r)) {
            if (with_teacher)
                sparse_teacher(&r);
            student_block(&r);
            if (!with_teacher)
                memcpy(r.x, r.y, INDEX_BLOCK * sizeof *r.x); /* without the teacher, the student takes both places */
            reduce_block(&r);
        }
        if (task->call->op == SKL_OP_PARTIAL)
            task->call->states[skl_state_index(task->problem, &r.sequence, r.head, i)] = row_state_of(&r.sums);
        else
            set_rows(&r);
    }
}

#endif
