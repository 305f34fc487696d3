/* Facts about GPUs, and about the tensors of a call. */
#include <string.h>

#include "base/side.h"
#include "base/stats.h"
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

const skl_cuda_layout skl_cuda_aligned = {~0U, ~0U};

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

/* Clears the bits of accesses that the address and strides of a tensor of this type and shape do not allow. */
static void look_at(skl_cuda_layout *layout, uint32_t bit, skl_input tensor, skl_dtype dtype, int64_t dim,
                    int64_t heads, skl_tensor_rows shape)
{
    const bool is_input = (bit & SKL_TENSOR_INPUTS) != 0, is_sum = (bit & (SKL_DK_T | SKL_DK_S)) && dtype == SKL_F32;
    const uint64_t size = skl_dtype_size(dtype), unit = is_input ? 16 : 2 * size;
    const uint64_t offsets =
        (uint64_t)tensor.stride_batch | (uint64_t)tensor.stride_head | (uint64_t)tensor.stride_row;
    if (!is_input && tensor.data == NULL)
        return; /* a gradient that is not requested */
    if (((uintptr_t)tensor.data | offsets * size) % unit != 0)
        layout->aligned &= ~bit;
    if ((is_input || is_sum) && !skl_cuda_tma_addresses(dtype, &tensor, dim, heads, shape))
        layout->tma &= ~bit;
}

skl_cuda_layout skl_cuda_layout_of(const skl_problem *p, const skl_call *call)
{
    const skl_inputs *const in = &call->inputs;
    const skl_gradients *const out = &call->gradients;
    const skl_attention *const of_s = call->attention;
    const skl_tensor_rows queries = skl_query_rows(p), keys = skl_key_rows(p), keys_s = skl_student_key_rows(p);
    const skl_dtype type_t = skl_grad_dtype(p, p->dtype_t), type_s = skl_grad_dtype(p, p->dtype_s);
    skl_cuda_layout layout = skl_cuda_aligned;
    if (call->op != SKL_OP_ATTENTION_STATS) {
        look_at(&layout, SKL_TENSOR_Q_T, in->q_t, p->dtype_t, p->dim_t, p->heads_t, queries);
        look_at(&layout, SKL_TENSOR_K_T, in->k_t, p->dtype_t, p->dim_t, p->key_heads_t, keys);
    }
    look_at(&layout, SKL_TENSOR_Q_S, in->q_s, p->dtype_s, p->dim_s, skl_query_heads_s(p), queries);
    look_at(&layout, SKL_TENSOR_K_S, in->k_s, p->dtype_s, p->dim_s, p->key_heads_s, keys_s);
    look_at(&layout, SKL_DQ_T, skl_input_of(&out->dq_t), type_t, p->dim_t, p->heads_t, queries);
    look_at(&layout, SKL_DK_T, skl_input_of(&out->dk_t), type_t, p->dim_t, p->key_heads_t, keys);
    look_at(&layout, SKL_DQ_S, skl_input_of(&out->dq_s), type_s, p->dim_s, skl_query_heads_s(p), queries);
    look_at(&layout, SKL_DK_S, skl_input_of(&out->dk_s), type_s, p->dim_s, p->key_heads_s, keys_s);
    if (of_s == NULL)
        return layout;
    const bool forward = call->op == SKL_OP_ATTENTION_FORWARD;
    const skl_input o_s = forward ? skl_input_of(&call->o_s) : of_s->o_s;
    look_at(&layout, SKL_TENSOR_V_S, of_s->v_s, p->dtype_s, p->dim_s, p->key_heads_s, keys);
    look_at(&layout, SKL_TENSOR_O_S, o_s, p->dtype_s, p->dim_s, p->heads_s, queries);
    if (!forward)
        look_at(&layout, SKL_TENSOR_DO_S, of_s->do_s, p->dtype_s, p->dim_s, p->heads_s, queries);
    look_at(&layout, SKL_DV_S, skl_input_of(&of_s->dv_s), type_s, p->dim_s, p->key_heads_s, keys);
    return layout;
}

/* ---- The call -------------------------------------------------------------------------------------------------- */

skl_cuda_request skl_cuda_request_of(const skl_problem *p, const skl_call *call)
{
    const bool of_stats = call->op == SKL_OP_ATTENTION_STATS;
    const bool dv = call->attention != NULL && call->attention->dv_s.data != NULL;
    const skl_cuda_request request = {.op = call->op,
                                      .rows = skl_row_bits(&call->rows),
                                      .gradients = skl_gradient_bits(&call->gradients) | (dv ? SKL_DV_S : 0U),
                                      .stats = of_stats ? skl_stats_bits(call->stats) : 0U,
                                      .lse_given =
                                          (of_stats ? call->inputs.lse_s.data : call->inputs.lse_t.data) != NULL,
                                      .key_lengths = call->inputs.key_lengths != NULL,
                                      .keys = skl_min(p->len_k, call->keys.end) - skl_max(0, call->keys.begin)};
    return request;
}

skl_cuda_request skl_cuda_normal_request(const skl_problem *p, skl_cuda_request request)
{
    if (skl_has_teacher_groups(p) || request.op == SKL_OP_ATTENTION_STATS)
        return request;
    request.lse_given = 0;
    request.rows = request.op == SKL_OP_BACKWARD    ? 0
                   : skl_op_is_one_pass(request.op) ? request.rows & SKL_ROW_KL
                                                    : SKL_ROW_KL;
    return request;
}
