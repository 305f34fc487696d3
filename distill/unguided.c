#include "distill/unguided.h"
#include "device/device.h"
#include "distill/matmul.h"
#include "distill/random.h"

#include <math.h>

enum { BLOCK = 128 }; /* queries */

skl_status unguided_open(unguided *outputs, const lesson *work, int64_t rows, int64_t width)
{
    const skl_problem *const p = &work->problem;
    const int64_t context = p->len_q, dim = p->dim_s > p->dim_t ? p->dim_s : p->dim_t;
    *outputs = (unguided){.rows = rows, .width = width};
    const struct {
        float **tensor;
        int64_t count;
    } all[] = {
        {&outputs->p, context * BLOCK},        {&outputs->s, context * BLOCK},
        {&outputs->work, context * BLOCK},     {&outputs->q, BLOCK * dim},
        {&outputs->dq, BLOCK * dim},           {&outputs->k, context * dim},
        {&outputs->dk, context * dim},         {&outputs->turned, BLOCK * (dim > width ? dim : width)},
        {&outputs->difference, BLOCK * width},
    };
    enum { TENSOR_COUNT = sizeof all / sizeof all[0] };
    int64_t count = 0;
    for (int t = 0; t < TENSOR_COUNT; t++)
        count += all[t].count;
    const skl_status status = device_allocate(SKL_CPU, (size_t)count * sizeof(float), "the student without guidance",
                                              (void **)&outputs->block);
    float *next = outputs->block;
    for (int t = 0; t < TENSOR_COUNT && status == SKL_OK; t++) {
        *all[t].tensor = next;
        next += all[t].count;
    }
    return status;
}

void unguided_close(unguided *outputs)
{
    device_free(SKL_CPU, outputs->block);
    outputs->block = NULL;
}

/* ---- Whole columns: [keys, BLOCK], a query each ------------------------------------------------------------- */

static void clear(float *values, int64_t count)
{
    memset(values, 0, (size_t)count * sizeof *values);
}

static void turn(float *to, const float *from, int64_t rows, int64_t columns)
{
    for (int64_t i = 0; i < rows; i++)
        for (int64_t c = 0; c < columns; c++)
            to[c * rows + i] = from[i * columns + c];
}

/* Softmax of scale * column over the keys that its query sees; 0 for the others. */
static void softmax_columns(float *columns, const int64_t *queries, int64_t keys, float scale)
{
    float top[BLOCK], sum[BLOCK];
    for (int q = 0; q < BLOCK; q++) {
        top[q] = -INFINITY;
        sum[q] = 0;
    }
    for (int64_t j = 0; j < keys; j++)
        for (int q = 0; q < BLOCK; q++)
            if (j <= queries[q])
                top[q] = fmaxf(top[q], columns[j * BLOCK + q]);
    for (int64_t j = 0; j < keys; j++)
        for (int q = 0; q < BLOCK; q++) {
            float *const cell = &columns[j * BLOCK + q];
            *cell = j <= queries[q] ? expf(scale * (*cell - top[q])) : 0.0F;
            sum[q] += *cell;
        }
    for (int64_t j = 0; j < keys; j++)
        for (int q = 0; q < BLOCK; q++)
            columns[j * BLOCK + q] /= sum[q];
}

/* One head of one side: logits of the queries of a block against all keys up to the last of them, then the softmax.
 */
typedef struct head_view {
    const float *q, *k;         /* of query 0 and key 0 */
    int64_t q_stride, k_stride; /* from one token to the next */
    int64_t dim;
} head_view;

static void attend(unguided *outputs, float *columns, head_view head, const int64_t *queries, int64_t keys,
                   int threads)
{
    for (int q = 0; q < BLOCK; q++)
        memcpy(outputs->q + q * head.dim, head.q + queries[q] * head.q_stride, (size_t)head.dim * sizeof(float));
    turn(outputs->turned, outputs->q, BLOCK, head.dim);
    clear(columns, keys * BLOCK);
    matmul_add(columns, (matrix){head.k, head.k_stride, 1}, outputs->turned, keys, BLOCK, head.dim, threads);
    softmax_columns(columns, queries, keys, 1 / sqrtf((float)head.dim));
}

static head_view teacher_head(const lesson *work, int64_t head)
{
    const skl_problem *const p = &work->problem;
    const int64_t key_head = head / (p->heads_t / p->key_heads_t);
    return (head_view){work->q_t + head * p->dim_t, work->k_t + key_head * p->dim_t, p->heads_t * p->dim_t,
                       p->key_heads_t * p->dim_t, p->dim_t};
}

static head_view student_head(const lesson *work, int64_t head)
{
    const skl_problem *const p = &work->problem;
    const int64_t key_head = head / (p->heads_s / p->key_heads_s);
    return (head_view){work->q_s + head * p->dim_s, work->k_s + key_head * p->dim_s, p->heads_s * p->dim_s,
                       p->key_heads_s * p->dim_s, p->dim_s};
}

static void attend_both(unguided *outputs, const lesson *work, int64_t head, const int64_t *queries, int64_t keys)
{
    const int64_t group = work->problem.heads_t / work->problem.heads_s;
    clear(outputs->p, keys * BLOCK);
    for (int64_t member = 0; member < group; member++) {
        attend(outputs, outputs->work, teacher_head(work, head * group + member), queries, keys, work->threads);
        for (int64_t i = 0; i < keys * BLOCK; i++)
            outputs->p[i] += outputs->work[i] / (float)group;
    }
    attend(outputs, outputs->s, student_head(work, head), queries, keys, work->threads);
}

/* ---- Backward ----------------------------------------------------------------------------------------------- */

/* e = sum_j (S_j - P_j) h_j;   dS_j = 2 <e, h_j>;   dy_j = S_j (dS_j - sum_k S_k dS_k): into `work` */
static void logit_gradients(unguided *outputs, const lesson *work, const float *hidden, int64_t keys, float share)
{
    const int64_t width = outputs->width;
    for (int64_t i = 0; i < keys * BLOCK; i++)
        outputs->work[i] = outputs->s[i] - outputs->p[i];
    clear(outputs->difference, BLOCK * width);
    matmul_add(outputs->difference, (matrix){outputs->work, 1, BLOCK}, hidden, BLOCK, width, keys, work->threads);
    turn(outputs->turned, outputs->difference, BLOCK, width);
    clear(outputs->work, keys * BLOCK);
    matmul_add(outputs->work, (matrix){hidden, width, 1}, outputs->turned, keys, BLOCK, width, work->threads);
    float mean[BLOCK] = {0};
    for (int64_t j = 0; j < keys; j++)
        for (int q = 0; q < BLOCK; q++)
            mean[q] += outputs->s[j * BLOCK + q] * outputs->work[j * BLOCK + q];
    for (int64_t j = 0; j < keys; j++)
        for (int q = 0; q < BLOCK; q++) {
            const int64_t at = j * BLOCK + q;
            outputs->work[at] = 2 * share * outputs->s[at] * (outputs->work[at] - mean[q]);
        }
}

/* dq_i = scale sum_j dy_ij k_j for the queries of the block;   dk_j += scale sum_i dy_ij q_i */
static void add_gradients(unguided *outputs, lesson *work, int64_t head, const int64_t *queries, int64_t count,
                          int64_t keys)
{
    const head_view view = student_head(work, head);
    const float scale = 1 / sqrtf((float)view.dim);
    clear(outputs->dq, BLOCK * view.dim);
    matmul_add(outputs->dq, (matrix){outputs->work, 1, BLOCK}, outputs->k, BLOCK, view.dim, keys, work->threads);
    for (int64_t q = 0; q < count; q++)
        for (int64_t d = 0; d < view.dim; d++) {
            work->dq_s[queries[q] * view.q_stride + head * view.dim + d] += scale * outputs->dq[q * view.dim + d];
            outputs->q[q * view.dim + d] *= scale;
        }
    matmul_add(outputs->dk, (matrix){outputs->work, BLOCK, 1}, outputs->q, keys, view.dim, BLOCK, work->threads);
}

/* One query in every stretch of the context, in order, so that a block needs no keys behind it. */
static void draw_queries(const unguided *outputs, int64_t context, int64_t first, int64_t count, uint64_t draw,
                         int64_t queries[BLOCK])
{
    for (int64_t q = 0; q < BLOCK; q++) {
        const int64_t stretch = first + (q < count ? q : count - 1);
        const int64_t begin = context * stretch / outputs->rows, end = context * (stretch + 1) / outputs->rows;
        uint64_t state = random_stream(draw, 0, (uint64_t)stretch);
        queries[q] = begin + random_below(&state, end - begin);
    }
}

/* Queries that fill the last block are copies of its last one, and count for nothing. */
static void forget_copies(unguided *outputs, int64_t count, int64_t keys)
{
    for (int64_t j = 0; j < keys && count < BLOCK; j++)
        clear(outputs->work + j * BLOCK + count, BLOCK - count);
}

static void head_gradient(unguided *outputs, lesson *work, const sequence *text, int64_t head, uint64_t draw,
                          float share)
{
    const head_view view = student_head(work, head);
    const int64_t context = work->problem.len_q;
    for (int64_t j = 0; j < context; j++)
        memcpy(outputs->k + j * view.dim, view.k + j * view.k_stride, (size_t)view.dim * sizeof(float));
    clear(outputs->dk, context * view.dim);
    for (int64_t first = 0; first < outputs->rows; first += BLOCK) {
        const int64_t left = outputs->rows - first, count = left < BLOCK ? left : BLOCK;
        int64_t queries[BLOCK];
        draw_queries(outputs, context, first, count, draw, queries);
        const int64_t keys = queries[BLOCK - 1] + 1;
        attend_both(outputs, work, head, queries, keys);
        logit_gradients(outputs, work, text->hidden_t, keys, share);
        forget_copies(outputs, count, keys);
        add_gradients(outputs, work, head, queries, count, keys);
    }
    float *const dk = work->dk_s + (view.k - work->k_s);
    for (int64_t j = 0; j < context; j++)
        for (int64_t d = 0; d < view.dim; d++)
            dk[j * view.k_stride + d] += outputs->dk[j * view.dim + d];
}

void unguided_gradient(unguided *outputs, lesson *work, const sequence *text, uint64_t draw, float share,
                       layer *gradient)
{
    const skl_problem *const p = &work->problem;
    clear(work->dq_s, p->len_q * p->heads_s * p->dim_s);
    clear(work->dk_s, p->len_k * p->key_heads_s * p->dim_s);
    for (int64_t head = 0; head < p->heads_s; head++)
        head_gradient(outputs, work, text, head, draw, share);
    layer_gradient_add(gradient, text->hidden_s, p->len_q, work->dq_s, work->dk_s, work->threads);
}
