#include "distill/output_loss.h"
#include "device/device.h"
#include "distill/matmul.h"
#include "distill/random.h"

#include <math.h>

enum { BLOCK = 128 }; /* queries */

skl_status output_loss_open(output_loss *loss, const attention_pair *pair, int64_t rows, int64_t width)
{
    const skl_problem *const p = &pair->problem;
    const int64_t context = p->len_q, dim = p->dim_s > p->dim_t ? p->dim_s : p->dim_t;
    *loss = (output_loss){.rows = rows, .width = width};
    const struct {
        float **tensor;
        int64_t count;
    } all[] = {
        {&loss->p, context * BLOCK},        {&loss->s, context * BLOCK},
        {&loss->logit, context * BLOCK},    {&loss->q, BLOCK * dim},
        {&loss->dq, BLOCK * dim},           {&loss->k, context * dim},
        {&loss->dk, context * dim},         {&loss->transposed, BLOCK * (dim > width ? dim : width)},
        {&loss->difference, BLOCK * width},
    };
    enum { TENSOR_COUNT = sizeof all / sizeof all[0] };
    int64_t count = 0;
    for (int t = 0; t < TENSOR_COUNT; t++)
        count += all[t].count;
    const skl_status status =
        device_allocate(SKL_CPU, (size_t)count * sizeof(float), "the output loss", (void **)&loss->block);
    float *next = loss->block;
    for (int t = 0; t < TENSOR_COUNT && status == SKL_OK; t++) {
        *all[t].tensor = next;
        next += all[t].count;
    }
    return status;
}

void output_loss_close(output_loss *loss)
{
    device_free(SKL_CPU, loss->block);
    loss->block = NULL;
}

/* ---- Columns: [keys, BLOCK], one per query ------------------------------------------------------------------ */

static void clear(float *values, int64_t count)
{
    memset(values, 0, (size_t)count * sizeof *values);
}

static void transpose(float *to, const float *from, int64_t rows, int64_t columns)
{
    for (int64_t i = 0; i < rows; i++)
        for (int64_t c = 0; c < columns; c++)
            to[c * rows + i] = from[i * columns + c];
}

/* Softmax of scale * column over the keys that are visible to its query; 0 for the others. */
static void softmax_columns(float *columns, const int64_t *queries, int64_t keys, float scale)
{
    float row_max[BLOCK], sum[BLOCK];
    for (int q = 0; q < BLOCK; q++) {
        row_max[q] = -INFINITY;
        sum[q] = 0;
    }
    for (int64_t j = 0; j < keys; j++)
        for (int q = 0; q < BLOCK; q++)
            if (j <= queries[q])
                row_max[q] = fmaxf(row_max[q], columns[j * BLOCK + q]);
    for (int64_t j = 0; j < keys; j++)
        for (int q = 0; q < BLOCK; q++) {
            float *const cell = &columns[j * BLOCK + q];
            *cell = j <= queries[q] ? expf(scale * (*cell - row_max[q])) : 0.0F;
            sum[q] += *cell;
        }
    for (int64_t j = 0; j < keys; j++)
        for (int q = 0; q < BLOCK; q++)
            columns[j * BLOCK + q] /= sum[q];
}

/* One head of the teacher or the student. */
typedef struct head_view {
    const float *q, *k;         /* of query 0 and key 0 */
    int64_t q_stride, k_stride; /* from one token to the next */
    int64_t dim;
} head_view;

/* Softmax of the logits of a block of queries and all keys that any of them attends to. */
static void attend(output_loss *loss, float *columns, head_view head, const int64_t *queries, int64_t keys,
                   int threads)
{
    for (int q = 0; q < BLOCK; q++)
        memcpy(loss->q + q * head.dim, head.q + queries[q] * head.q_stride, (size_t)head.dim * sizeof(float));
    transpose(loss->transposed, loss->q, BLOCK, head.dim);
    clear(columns, keys * BLOCK);
    matmul_add(columns, (matrix){head.k, head.k_stride, 1}, loss->transposed, keys, BLOCK, head.dim, threads);
    softmax_columns(columns, queries, keys, 1 / sqrtf((float)head.dim));
}

static head_view teacher_head(const attention_pair *pair, int64_t head)
{
    const skl_problem *const p = &pair->problem;
    const int64_t key_head = head / (p->heads_t / p->key_heads_t);
    return (head_view){pair->q_t + head * p->dim_t, pair->k_t + key_head * p->dim_t, p->heads_t * p->dim_t,
                       p->key_heads_t * p->dim_t, p->dim_t};
}

static head_view student_head(const attention_pair *pair, int64_t head)
{
    const skl_problem *const p = &pair->problem;
    const int64_t key_head = head / (p->heads_s / p->key_heads_s);
    return (head_view){pair->q_s + head * p->dim_s, pair->k_s + key_head * p->dim_s, p->heads_s * p->dim_s,
                       p->key_heads_s * p->dim_s, p->dim_s};
}

static void attend_both(output_loss *loss, const attention_pair *pair, int64_t head, const int64_t *queries,
                        int64_t keys)
{
    const int64_t group_size = pair->problem.heads_t / pair->problem.heads_s;
    clear(loss->p, keys * BLOCK);
    for (int64_t member = 0; member < group_size; member++) {
        attend(loss, loss->logit, teacher_head(pair, head * group_size + member), queries, keys, pair->threads);
        for (int64_t i = 0; i < keys * BLOCK; i++)
            loss->p[i] += loss->logit[i] / (float)group_size;
    }
    attend(loss, loss->s, student_head(pair, head), queries, keys, pair->threads);
}

/* ---- Backward ----------------------------------------------------------------------------------------------- */

/* e = sum_j (S_j - P_j) h_j;   dS_j = 2 <e, h_j>;   dy_j = S_j (dS_j - sum_k S_k dS_k): into `logit` */
static void logit_gradients(output_loss *loss, const attention_pair *pair, const float *hidden, int64_t keys,
                            float scale)
{
    const int64_t width = loss->width;
    for (int64_t i = 0; i < keys * BLOCK; i++)
        loss->logit[i] = loss->s[i] - loss->p[i];
    clear(loss->difference, BLOCK * width);
    matmul_add(loss->difference, (matrix){loss->logit, 1, BLOCK}, hidden, BLOCK, width, keys, pair->threads);
    transpose(loss->transposed, loss->difference, BLOCK, width);
    clear(loss->logit, keys * BLOCK);
    matmul_add(loss->logit, (matrix){hidden, width, 1}, loss->transposed, keys, BLOCK, width, pair->threads);
    float mean[BLOCK] = {0};
    for (int64_t j = 0; j < keys; j++)
        for (int q = 0; q < BLOCK; q++)
            mean[q] += loss->s[j * BLOCK + q] * loss->logit[j * BLOCK + q];
    for (int64_t j = 0; j < keys; j++)
        for (int q = 0; q < BLOCK; q++) {
            const int64_t at = j * BLOCK + q;
            loss->logit[at] = 2 * scale * loss->s[at] * (loss->logit[at] - mean[q]);
        }
}

/* dq_i = scale sum_j dy_ij k_j for the queries of the block;   dk_j += scale sum_i dy_ij q_i */
static void add_gradients(output_loss *loss, attention_pair *pair, int64_t head, const int64_t *queries,
                          int64_t count, int64_t keys)
{
    const head_view view = student_head(pair, head);
    const float scale = 1 / sqrtf((float)view.dim);
    clear(loss->dq, BLOCK * view.dim);
    matmul_add(loss->dq, (matrix){loss->logit, 1, BLOCK}, loss->k, BLOCK, view.dim, keys, pair->threads);
    for (int64_t q = 0; q < count; q++)
        for (int64_t d = 0; d < view.dim; d++) {
            pair->dq_s[queries[q] * view.q_stride + head * view.dim + d] += scale * loss->dq[q * view.dim + d];
            loss->q[q * view.dim + d] *= scale;
        }
    matmul_add(loss->dk, (matrix){loss->logit, BLOCK, 1}, loss->q, keys, view.dim, BLOCK, pair->threads);
}

/* One query from each of `rows` equal ranges of the context, in order, so that a block needs no key after its last
 * query. */
static void draw_queries(const output_loss *loss, int64_t context, int64_t first, int64_t count, uint64_t seed,
                         int64_t queries[BLOCK])
{
    for (int64_t q = 0; q < BLOCK; q++) {
        const int64_t range = first + (q < count ? q : count - 1);
        const int64_t begin = context * range / loss->rows, end = context * (range + 1) / loss->rows;
        uint64_t state = random_stream(seed, 0, (uint64_t)range);
        queries[q] = begin + random_below(&state, end - begin);
    }
}

/* The last block is padded with copies of its last query, which must not contribute to dk. */
static void clear_padding(output_loss *loss, int64_t count, int64_t keys)
{
    for (int64_t j = 0; j < keys && count < BLOCK; j++)
        clear(loss->logit + j * BLOCK + count, BLOCK - count);
}

static void head_gradient(output_loss *loss, attention_pair *pair, const sequence *tokens, int64_t head,
                          uint64_t seed, float scale)
{
    const head_view view = student_head(pair, head);
    const int64_t context = pair->problem.len_q;
    for (int64_t j = 0; j < context; j++)
        memcpy(loss->k + j * view.dim, view.k + j * view.k_stride, (size_t)view.dim * sizeof(float));
    clear(loss->dk, context * view.dim);
    for (int64_t first = 0; first < loss->rows; first += BLOCK) {
        const int64_t left = loss->rows - first, count = left < BLOCK ? left : BLOCK;
        int64_t queries[BLOCK];
        draw_queries(loss, context, first, count, seed, queries);
        const int64_t keys = queries[BLOCK - 1] + 1;
        attend_both(loss, pair, head, queries, keys);
        logit_gradients(loss, pair, tokens->hidden_t, keys, scale);
        clear_padding(loss, count, keys);
        add_gradients(loss, pair, head, queries, count, keys);
    }
    float *const dk = pair->dk_s + (view.k - pair->k_s);
    for (int64_t j = 0; j < context; j++)
        for (int64_t d = 0; d < view.dim; d++)
            dk[j * view.k_stride + d] += loss->dk[j * view.dim + d];
}

void output_loss_backward(output_loss *loss, attention_pair *pair, const sequence *tokens, uint64_t seed, float scale,
                          layer *gradient)
{
    const skl_problem *const p = &pair->problem;
    clear(pair->dq_s, p->len_q * p->heads_s * p->dim_s);
    clear(pair->dk_s, p->len_k * p->key_heads_s * p->dim_s);
    for (int64_t head = 0; head < p->heads_s; head++)
        head_gradient(loss, pair, tokens, head, seed, scale);
    layer_gradient_add(gradient, tokens->hidden_s, p->len_q, pair->dq_s, pair->dk_s, pair->threads);
}
