#include "device/mirror.h"

#include <assert.h>

mirror mirror_of(const skl_problem *problem, skl_device device)
{
    mirror tensors = {.problem = *problem, .device = device};
    skl_problem *const p = &tensors.problem;
    p->key_heads_t = p->key_heads_t ? p->key_heads_t : p->heads_t;
    p->key_heads_s = p->key_heads_s ? p->key_heads_s : p->heads_s;
    return tensors;
}

void mirror_destroy(mirror *tensors)
{
    for (int e = 0; e < tensors->count; e++)
        device_free(tensors->device, tensors->entries[e].data);
    tensors->count = 0;
}

/* ---- One tensor --------------------------------------------------------------------------------------------- */

typedef struct tensor_shape {
    const char *name;
    int64_t heads, rows, dim;
    size_t element_size;
} tensor_shape;

/* Bytes from the first element to the last. */
static size_t span_of(const skl_problem *p, const tensor_shape *shape, const skl_input *tensor)
{
    const int64_t batch = p->packed ? 1 : p->batch;
    if (batch == 0 || shape->rows == 0)
        return 0;
    const int64_t last = (batch - 1) * tensor->stride_batch + (shape->heads - 1) * tensor->stride_head +
                         (shape->rows - 1) * tensor->stride_row + shape->dim - 1;
    return (size_t)(last + 1) * shape->element_size;
}

static mirror_entry *find_entry(mirror *tensors, const void *host, size_t size)
{
    for (int e = 0; e < tensors->count; e++)
        if (tensors->entries[e].host == host && tensors->entries[e].size >= size)
            return &tensors->entries[e];
    return NULL;
}

/* Replaces a host address, which may be NULL, by the address on the device. */
static skl_status map_tensor(mirror *tensors, const char *name, void **address, size_t size, bool written)
{
    if (tensors->device == SKL_CPU || *address == NULL)
        return SKL_OK;
    mirror_entry *entry = find_entry(tensors, *address, size);
    const bool is_new = entry == NULL;
    skl_status status = SKL_OK;
    if (is_new) {
        assert(tensors->count < MIRROR_TENSORS_MAX);
        entry = &tensors->entries[tensors->count];
        *entry = (mirror_entry){.host = *address, .size = size};
        status = device_allocate(tensors->device, size, name, &entry->data);
        tensors->count += status == SKL_OK;
    }
    if (status == SKL_OK && (is_new || written))
        status = device_copy(tensors->device, entry->data, entry->host, size);
    if (status != SKL_OK)
        return status;
    entry->to_fetch = entry->to_fetch || written;
    *address = entry->data;
    return SKL_OK;
}

static skl_status map_input(mirror *tensors, skl_input *tensor, tensor_shape shape)
{
    void *address = (void *)(uintptr_t)tensor->data; /* never written: `written` is false */
    const skl_status status =
        map_tensor(tensors, shape.name, &address, span_of(&tensors->problem, &shape, tensor), false);
    tensor->data = address;
    return status;
}

static skl_status map_output(mirror *tensors, skl_output *tensor, tensor_shape shape)
{
    const skl_input same = {tensor->data, tensor->stride_batch, tensor->stride_head, tensor->stride_row};
    return map_tensor(tensors, shape.name, &tensor->data, span_of(&tensors->problem, &shape, &same), true);
}

static skl_status map_lengths(mirror *tensors, const char *name, const int32_t **lengths, int64_t count)
{
    void *address = (void *)(uintptr_t)*lengths;
    const skl_status status = map_tensor(tensors, name, &address, (size_t)count * sizeof **lengths, false);
    *lengths = address;
    return status;
}

static skl_status map_sinks(mirror *tensors, const char *name, const float **sinks, int64_t heads)
{
    void *address = (void *)(uintptr_t)*sinks;
    const skl_status status = map_tensor(tensors, name, &address, (size_t)heads * sizeof **sinks, false);
    *sinks = address;
    return status;
}

static skl_status map_sink_gradients(mirror *tensors, const char *name, float **gradients, int64_t heads)
{
    void *address = *gradients;
    const skl_status status = map_tensor(tensors, name, &address, (size_t)heads * sizeof **gradients, true);
    *gradients = address;
    return status;
}

/* ---- The tensors of a call ---------------------------------------------------------------------------------- */

static size_t size_of(skl_dtype dtype)
{
    return dtype == SKL_F32 ? sizeof(float) : sizeof(uint16_t);
}

static int64_t rows_q(const skl_problem *p)
{
    return p->packed ? p->total_q : p->len_q;
}

static int64_t rows_k(const skl_problem *p)
{
    return p->packed ? p->total_k : p->len_k;
}

static int64_t query_heads_s(const skl_problem *p)
{
    return p->heads_s * (p->student == SKL_STUDENT_INDEXER ? p->index_heads : 1);
}

static tensor_shape row_vector(const mirror *tensors, const char *name, int64_t heads)
{
    return (tensor_shape){name, heads, rows_q(&tensors->problem), 1, sizeof(float)};
}

static skl_status map_inputs(mirror *tensors, skl_inputs *inputs)
{
    const skl_problem *const p = &tensors->problem;
    const size_t teacher_size = size_of(p->dtype_t), student_size = size_of(p->dtype_s);
    const size_t weight_size = size_of(p->dtype_w);
    const struct {
        skl_input *tensor;
        tensor_shape shape;
    } all[] = {
        {&inputs->q_t, {"q_t", p->heads_t, rows_q(p), p->dim_t, teacher_size}},
        {&inputs->k_t, {"k_t", p->key_heads_t, rows_k(p), p->dim_t, teacher_size}},
        {&inputs->q_s, {"q_s", query_heads_s(p), rows_q(p), p->dim_s, student_size}},
        {&inputs->k_s, {"k_s", p->key_heads_s, rows_k(p), p->dim_s, student_size}},
        {&inputs->w_s, {"w_s", p->heads_s, rows_q(p), p->index_heads, weight_size}},
        {&inputs->indices, {"indices", p->heads_s, rows_q(p), p->top_k, sizeof(int32_t)}},
        {&inputs->lse_t, row_vector(tensors, "lse_t", p->heads_t)},
        {&inputs->lse_s, row_vector(tensors, "lse_s", p->heads_s)},
        {&inputs->kl, row_vector(tensors, "kl", p->heads_s)},
        {&inputs->dot_t, row_vector(tensors, "dot_t", p->heads_t)},
        {&inputs->grad_kl, row_vector(tensors, "grad_kl", p->heads_s)},
    };
    skl_status status = SKL_OK;
    for (size_t t = 0; t < sizeof all / sizeof all[0] && status == SKL_OK; t++)
        status = map_input(tensors, all[t].tensor, all[t].shape);
    const int64_t bounds = (p->packed ? 1 : p->batch) * rows_q(p);
    const struct {
        const char *name;
        const int32_t **lengths;
        int64_t count;
    } integers[] = {
        {"cu_seqlens_q", &inputs->cu_seqlens_q, p->batch + 1},
        {"cu_seqlens_k", &inputs->cu_seqlens_k, p->batch + 1},
        {"key_lengths", &inputs->key_lengths, p->batch},
        {"key_begin", &inputs->key_begin, bounds},
        {"key_end", &inputs->key_end, bounds},
    };
    for (size_t n = 0; n < sizeof integers / sizeof integers[0] && status == SKL_OK; n++)
        status = map_lengths(tensors, integers[n].name, integers[n].lengths, integers[n].count);
    if (status == SKL_OK)
        status = map_sinks(tensors, "sink_t", &inputs->sink_t, p->heads_t);
    if (status == SKL_OK)
        status = map_sinks(tensors, "sink_s", &inputs->sink_s, p->heads_s);
    return status;
}

static skl_status map_rows(mirror *tensors, skl_rows *rows)
{
    const skl_problem *const p = &tensors->problem;
    const struct {
        skl_output *tensor;
        tensor_shape shape;
    } all[] = {
        {&rows->kl, row_vector(tensors, "kl", p->heads_s)},
        {&rows->lse_t, row_vector(tensors, "lse_t", p->heads_t)},
        {&rows->lse_s, row_vector(tensors, "lse_s", p->heads_s)},
        {&rows->dot_t, row_vector(tensors, "dot_t", p->heads_t)},
        {&rows->cross_entropy, row_vector(tensors, "cross_entropy", p->heads_s)},
        {&rows->entropy, row_vector(tensors, "entropy", p->heads_s)},
        {&rows->mass, row_vector(tensors, "mass", p->heads_s)},
    };
    skl_status status = SKL_OK;
    for (size_t t = 0; t < sizeof all / sizeof all[0] && status == SKL_OK; t++)
        status = map_output(tensors, all[t].tensor, all[t].shape);
    return status;
}

static skl_status map_gradients(mirror *tensors, skl_gradients *gradients)
{
    const skl_problem *const p = &tensors->problem;
    const size_t teacher_size = p->grad_f32 ? sizeof(float) : size_of(p->dtype_t);
    const size_t student_size = p->grad_f32 ? sizeof(float) : size_of(p->dtype_s);
    const size_t weight_size = p->grad_f32 ? sizeof(float) : size_of(p->dtype_w);
    const struct {
        skl_output *tensor;
        tensor_shape shape;
    } all[] = {
        {&gradients->dq_t, {"dq_t", p->heads_t, rows_q(p), p->dim_t, teacher_size}},
        {&gradients->dk_t, {"dk_t", p->key_heads_t, rows_k(p), p->dim_t, teacher_size}},
        {&gradients->dq_s, {"dq_s", query_heads_s(p), rows_q(p), p->dim_s, student_size}},
        {&gradients->dk_s, {"dk_s", p->key_heads_s, rows_k(p), p->dim_s, student_size}},
        {&gradients->dw_s, {"dw_s", p->heads_s, rows_q(p), p->index_heads, weight_size}},
    };
    skl_status status = SKL_OK;
    for (size_t t = 0; t < sizeof all / sizeof all[0] && status == SKL_OK; t++)
        status = map_output(tensors, all[t].tensor, all[t].shape);
    if (status == SKL_OK)
        status = map_sink_gradients(tensors, "dsink_t", &gradients->dsink_t, p->heads_t);
    if (status == SKL_OK)
        status = map_sink_gradients(tensors, "dsink_s", &gradients->dsink_s, p->heads_s);
    return status;
}

skl_status mirror_call(mirror *tensors, skl_inputs *inputs, skl_rows *rows, skl_gradients *gradients)
{
    skl_status status = inputs ? map_inputs(tensors, inputs) : SKL_OK;
    if (status == SKL_OK && rows)
        status = map_rows(tensors, rows);
    if (status == SKL_OK && gradients)
        status = map_gradients(tensors, gradients);
    return status;
}

skl_status mirror_attention(mirror *tensors, skl_attention *attention)
{
    const skl_problem *const p = &tensors->problem;
    const size_t size = size_of(p->dtype_s), gradient_size = p->grad_f32 ? sizeof(float) : size;
    skl_status status =
        map_input(tensors, &attention->v_s, (tensor_shape){"v_s", p->key_heads_s, rows_k(p), p->dim_s, size});
    if (status == SKL_OK)
        status = map_input(tensors, &attention->o_s, (tensor_shape){"o_s", p->heads_s, rows_q(p), p->dim_s, size});
    if (status == SKL_OK)
        status = map_input(tensors, &attention->do_s, (tensor_shape){"do_s", p->heads_s, rows_q(p), p->dim_s, size});
    if (status == SKL_OK)
        status = map_output(tensors, &attention->dv_s,
                            (tensor_shape){"dv_s", p->key_heads_s, rows_k(p), p->dim_s, gradient_size});
    return status;
}

skl_status mirror_states(mirror *tensors, skl_row_state **states)
{
    const skl_problem *const p = &tensors->problem;
    const int64_t count = p->heads_s * (p->packed ? p->total_q : p->batch * p->len_q);
    void *address = *states;
    const skl_status status = map_tensor(tensors, "states", &address, (size_t)count * sizeof **states, true);
    *states = address;
    return status;
}

skl_status mirror_fetch(mirror *tensors)
{
    skl_status status = SKL_OK;
    for (int e = 0; e < tensors->count && status == SKL_OK; e++) {
        mirror_entry *const entry = &tensors->entries[e];
        if (entry->to_fetch)
            status = device_copy(tensors->device, entry->host, entry->data, entry->size);
        entry->to_fetch = false;
    }
    return status;
}
