/* Facts about GPUs, and about the tensors of a call. */
#include <string.h>

#include "base/needs.h"
#include "base/side.h"
#include "cuda/select.h"

/* ---- GPUs ------------------------------------------------------------------------------------------------------ */

/* CUDA's figures for the GPUs that skl_plan_explain can be asked about. */
static const skl_cuda_device devices[] = {
    {"a100", 80, 108, 163 << 10, 164 << 10}, {"b200", 100, 148, 227 << 10, 228 << 10},
    {"h100", 90, 132, 227 << 10, 228 << 10}, {"h200", 90, 132, 227 << 10, 228 << 10},
    {"l40s", 89, 142, 99 << 10, 100 << 10},  {"rtx5090", 120, 170, 99 << 10, 100 << 10}};

const skl_cuda_device *skl_cuda_device_named(const char *name)
{
    for (size_t i = 0; i < sizeof devices / sizeof devices[0]; i++)
        if (strcmp(devices[i].name, name) == 0)
            return &devices[i];
    return NULL;
}

const char *skl_cuda_device_names(void)
{
    return "a100, b200, h100, h200, l40s or rtx5090";
}

/* ---- Tensors --------------------------------------------------------------------------------------------------- */

const skl_cuda_layout skl_cuda_aligned = {~0U, ~0U, ~0U, ~0U};

/* Every row begins at a multiple of `bytes`. */
static bool has_rows_at(uintptr_t bytes, const void *data, size_t size, const int64_t (*strides)[3])
{
    const uint64_t offsets = (uint64_t)(*strides)[0] | (uint64_t)(*strides)[1] | (uint64_t)(*strides)[2];
    return ((uintptr_t)data | (uintptr_t)(offsets * size)) % bytes == 0;
}

bool skl_cuda_tma_addresses(skl_dtype dtype, const skl_input *tensor, int64_t dim, int64_t heads,
                            skl_tensor_rows shape)
{
    const int64_t size = (int64_t)skl_dtype_size(dtype), count_max = (int64_t)1 << 32, stride_end = (int64_t)1 << 40;
    const int64_t counts[] = {dim, shape.rows, heads, shape.batch};
    const int64_t strides[] = {tensor->stride_row, tensor->stride_head,
                               shape.batch > 1 ? tensor->stride_batch : tensor->stride_head};
    bool fits = (uintptr_t)tensor->data % 16 == 0;
    for (int n = 0; n < 4; n++)
        fits = fits && counts[n] > 0 && counts[n] <= count_max;
    for (int n = 0; n < 3; n++)
        fits = fits && strides[n] >= 0 && strides[n] < stride_end / size && strides[n] * size % 16 == 0;
    return fits;
}

typedef struct tensor_facts {
    const skl_input *tensor;
    uint32_t bit;
    skl_dtype dtype;
    int64_t dim, heads;
    bool of_keys;
} tensor_facts;

static void look_at_input(skl_cuda_layout *layout, const skl_problem *p, const tensor_facts *t)
{
    const int64_t strides[3] = {t->tensor->stride_batch, t->tensor->stride_head, t->tensor->stride_row};
    if (!has_rows_at(16, t->tensor->data, skl_dtype_size(t->dtype), &strides))
        layout->copied &= ~t->bit;
    if (!skl_cuda_tma_addresses(t->dtype, t->tensor, t->dim, t->heads,
                                t->of_keys ? skl_key_rows(p) : skl_query_rows(p)))
        layout->addressed &= ~t->bit;
}

static void look_at_gradient(skl_cuda_layout *layout, const skl_problem *p, const skl_output *gradient, uint32_t bit,
                             skl_dtype dtype, int64_t dim, int64_t key_heads)
{
    const skl_dtype type = skl_grad_dtype(p, dtype);
    const size_t size = skl_dtype_size(type);
    const int64_t strides[3] = {gradient->stride_batch, gradient->stride_head, gradient->stride_row};
    const skl_input sums = {gradient->data, strides[0], strides[1], strides[2]};
    if (gradient->data == NULL)
        return;
    if (!has_rows_at(2 * size, gradient->data, size, &strides))
        layout->paired &= ~bit;
    if (type == SKL_F32 && !skl_cuda_tma_addresses(SKL_F32, &sums, dim, key_heads, skl_key_rows(p)))
        layout->summed &= ~bit;
}

skl_cuda_layout skl_cuda_layout_of(const skl_problem *p, const skl_call *call)
{
    const skl_inputs *const in = &call->inputs;
    const skl_gradients *const out = &call->gradients;
    const skl_attention *const attention = call->attention;
    const tensor_facts tensors[] = {{&in->q_t, SKL_TENSOR_Q_T, p->dtype_t, p->dim_t, p->heads_t, false},
                                    {&in->k_t, SKL_TENSOR_K_T, p->dtype_t, p->dim_t, p->key_heads_t, true},
                                    {&in->q_s, SKL_TENSOR_Q_S, p->dtype_s, p->dim_s, skl_query_heads_s(p), false},
                                    {&in->k_s, SKL_TENSOR_K_S, p->dtype_s, p->dim_s, p->key_heads_s, true}};
    skl_cuda_layout layout = skl_cuda_aligned;
    for (size_t i = 0; i < sizeof tensors / sizeof tensors[0]; i++)
        look_at_input(&layout, p, &tensors[i]);
    look_at_gradient(&layout, p, &out->dq_t, SKL_DQ_T, p->dtype_t, p->dim_t, p->key_heads_t);
    look_at_gradient(&layout, p, &out->dk_t, SKL_DK_T, p->dtype_t, p->dim_t, p->key_heads_t);
    look_at_gradient(&layout, p, &out->dq_s, SKL_DQ_S, p->dtype_s, p->dim_s, p->key_heads_s);
    look_at_gradient(&layout, p, &out->dk_s, SKL_DK_S, p->dtype_s, p->dim_s, p->key_heads_s);
    if (attention == NULL)
        return layout;
    const bool forward = call->op == SKL_OP_ATTENTION_FORWARD;
    const skl_output *const o_s = &call->o_s;
    const skl_input made = {o_s->data, o_s->stride_batch, o_s->stride_head, o_s->stride_row};
    const tensor_facts values[] = {
        {&attention->v_s, SKL_TENSOR_V_S, p->dtype_s, p->dim_s, p->key_heads_s, true},
        {forward ? &made : &attention->o_s, SKL_TENSOR_O_S, p->dtype_s, p->dim_s, p->heads_s, false},
        {&attention->do_s, SKL_TENSOR_DO_S, p->dtype_s, p->dim_s, p->heads_s, false}};
    for (size_t i = 0; i < (forward ? 2 : 3); i++)
        look_at_input(&layout, p, &values[i]);
    look_at_gradient(&layout, p, &attention->dv_s, SKL_DV_S, p->dtype_s, p->dim_s, p->key_heads_s);
    return layout;
}

/* ---- The call -------------------------------------------------------------------------------------------------- */

skl_cuda_request skl_cuda_request_of(const skl_problem *p, const skl_call *call)
{
    const skl_rows *const rows = &call->rows;
    const bool dv = call->attention != NULL && call->attention->dv_s.data != NULL;
    const skl_cuda_request request = {
        .op = call->op,
        .rows = (rows->kl.data != NULL ? SKL_ROW_KL : 0U) | (rows->lse_t.data != NULL ? SKL_ROW_LSE_T : 0U) |
                (rows->lse_s.data != NULL ? SKL_ROW_LSE_S : 0U) | (rows->dot_t.data != NULL ? SKL_ROW_DOT_T : 0U) |
                (rows->cross_entropy.data != NULL || rows->entropy.data != NULL ? SKL_ROW_ENTROPIES : 0U) |
                (rows->mass.data != NULL ? SKL_ROW_MASS : 0U),
        .gradients = skl_gradient_bits(&call->gradients) | (dv ? SKL_DV_S : 0U),
        .lse_given = call->inputs.lse_t.data != NULL,
        .key_lengths = call->inputs.key_lengths != NULL,
        .keys = skl_min(p->len_k, call->keys.end) - skl_max(0, call->keys.begin)};
    return request;
}

skl_cuda_request skl_cuda_normal_request(const skl_problem *p, skl_cuda_request request)
{
    if (skl_has_teacher_groups(p))
        return request;
    request.lse_given = 0;
    request.rows = request.op == SKL_OP_BACKWARD    ? 0
                   : skl_op_is_one_pass(request.op) ? request.rows & SKL_ROW_KL
                                                    : SKL_ROW_KL;
    return request;
}
