#include "device/device.h"

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

/* ---- The tensors of a call ---------------------------------------------------------------------------------- */

/* A tensor of heads, or an array without strides, which has no heads. */
typedef struct call_tensor {
    void *address; /* an skl_input, an skl_output or a pointer to elements: all begin with that pointer */
    const char *name;
    int64_t heads, rows, dim;
    size_t element_size;
} call_tensor;

static_assert(sizeof(skl_input) == sizeof(skl_output), "one function maps both");

/* Bytes from the first element to the last. */
static size_t span_of(const skl_problem *p, const call_tensor *tensor)
{
    const int64_t batch = p->packed ? 1 : p->batch;
    if (tensor->heads == 0)
        return (size_t)tensor->dim * tensor->element_size;
    if (batch == 0 || tensor->rows == 0)
        return 0;
    skl_output view;
    memcpy(&view, tensor->address, sizeof view);
    const int64_t last = (batch - 1) * view.stride_batch + (tensor->heads - 1) * view.stride_head +
                         (tensor->rows - 1) * view.stride_row + tensor->dim - 1;
    return (size_t)(last + 1) * tensor->element_size;
}

static skl_status map_all(mirror *tensors, const call_tensor *all, size_t count, bool written)
{
    skl_status status = SKL_OK;
    for (size_t t = 0; t < count && status == SKL_OK; t++) {
        void *elements;
        memcpy(&elements, all[t].address, sizeof elements);
        status = map_tensor(tensors, all[t].name, &elements, span_of(&tensors->problem, &all[t]), written);
        memcpy(all[t].address, &elements, sizeof elements);
    }
    return status;
}

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

static call_tensor row_vector(const mirror *tensors, void *address, const char *name, int64_t heads)
{
    return (call_tensor){address, name, heads, rows_q(&tensors->problem), 1, sizeof(float)};
}

/* `count` elements of f32 or int32_t. */
static call_tensor array_of(void *address, const char *name, int64_t count)
{
    return (call_tensor){address, name, 0, 0, count, sizeof(float)};
}

#define COUNT_OF(array) (sizeof(array) / sizeof *(array))

static skl_status map_inputs(mirror *tensors, skl_inputs *inputs)
{
    const skl_problem *const p = &tensors->problem;
    const size_t teacher_size = size_of(p->dtype_t), student_size = size_of(p->dtype_s);
    const int64_t bounds = (p->packed ? 1 : p->batch) * rows_q(p);
    const call_tensor all[] = {
        {&inputs->q_t, "q_t", p->heads_t, rows_q(p), p->dim_t, teacher_size},
        {&inputs->k_t, "k_t", p->key_heads_t, rows_k(p), p->dim_t, teacher_size},
        {&inputs->q_s, "q_s", query_heads_s(p), rows_q(p), p->dim_s, student_size},
        {&inputs->k_s, "k_s", p->key_heads_s, rows_k(p), p->dim_s, student_size},
        {&inputs->w_s, "w_s", p->heads_s, rows_q(p), p->index_heads, size_of(p->dtype_w)},
        {&inputs->indices, "indices", p->heads_s, rows_q(p), p->top_k, sizeof(int32_t)},
        row_vector(tensors, &inputs->lse_t, "lse_t", p->heads_t),
        row_vector(tensors, &inputs->lse_s, "lse_s", p->heads_s),
        row_vector(tensors, &inputs->kl, "kl", p->heads_s),
        row_vector(tensors, &inputs->dot_t, "dot_t", p->heads_t),
        row_vector(tensors, &inputs->grad_kl, "grad_kl", p->heads_s),
        array_of(&inputs->cu_seqlens_q, "cu_seqlens_q", p->batch + 1),
        array_of(&inputs->cu_seqlens_k, "cu_seqlens_k", p->batch + 1),
        array_of(&inputs->key_lengths, "key_lengths", p->batch),
        array_of(&inputs->key_begin, "key_begin", bounds),
        array_of(&inputs->key_end, "key_end", bounds),
        array_of(&inputs->sink_t, "sink_t", p->heads_t),
        array_of(&inputs->sink_s, "sink_s", p->heads_s),
    };
    return map_all(tensors, all, COUNT_OF(all), false);
}

static skl_status map_rows(mirror *tensors, skl_rows *rows)
{
    const skl_problem *const p = &tensors->problem;
    const call_tensor all[] = {
        row_vector(tensors, &rows->kl, "kl", p->heads_s),
        row_vector(tensors, &rows->lse_t, "lse_t", p->heads_t),
        row_vector(tensors, &rows->lse_s, "lse_s", p->heads_s),
        row_vector(tensors, &rows->dot_t, "dot_t", p->heads_t),
        row_vector(tensors, &rows->cross_entropy, "cross_entropy", p->heads_s),
        row_vector(tensors, &rows->entropy, "entropy", p->heads_s),
        row_vector(tensors, &rows->mass, "mass", p->heads_s),
    };
    return map_all(tensors, all, COUNT_OF(all), true);
}

static skl_status map_gradients(mirror *tensors, skl_gradients *gradients)
{
    const skl_problem *const p = &tensors->problem;
    const size_t teacher_size = p->grad_f32 ? sizeof(float) : size_of(p->dtype_t);
    const size_t student_size = p->grad_f32 ? sizeof(float) : size_of(p->dtype_s);
    const size_t weight_size = p->grad_f32 ? sizeof(float) : size_of(p->dtype_w);
    const call_tensor all[] = {
        {&gradients->dq_t, "dq_t", p->heads_t, rows_q(p), p->dim_t, teacher_size},
        {&gradients->dk_t, "dk_t", p->key_heads_t, rows_k(p), p->dim_t, teacher_size},
        {&gradients->dq_s, "dq_s", query_heads_s(p), rows_q(p), p->dim_s, student_size},
        {&gradients->dk_s, "dk_s", p->key_heads_s, rows_k(p), p->dim_s, student_size},
        {&gradients->dw_s, "dw_s", p->heads_s, rows_q(p), p->index_heads, weight_size},
        array_of(&gradients->dsink_t, "dsink_t", p->heads_t),
        array_of(&gradients->dsink_s, "dsink_s", p->heads_s),
    };
    return map_all(tensors, all, COUNT_OF(all), true);
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

skl_status mirror_stats(mirror *tensors, skl_inputs *inputs, skl_stats *stats)
{
    const skl_problem *const p = &tensors->problem;
    const int64_t sum_heads = stats->per_key_head ? p->key_heads_s : p->heads_s;
    const call_tensor all[] = {
        {&stats->key_sum, "key_sum", sum_heads, rows_k(p), 1, sizeof(float)},
        {&stats->key_max, "key_max", sum_heads, rows_k(p), 1, sizeof(float)},
        row_vector(tensors, &stats->lse, "lse", p->heads_s),
        row_vector(tensors, &stats->entropy, "entropy", p->heads_s),
        row_vector(tensors, &stats->max_logit, "max_logit", p->heads_s),
        row_vector(tensors, &stats->expected_distance, "expected_distance", p->heads_s),
        array_of(&stats->head_max_logit, "head_max_logit", p->batch * p->heads_s),
        array_of(&stats->distance_mass, "distance_mass", p->batch * p->heads_s * stats->distance_count),
    };
    const skl_status status = map_inputs(tensors, inputs);
    return status == SKL_OK ? map_all(tensors, all, COUNT_OF(all), true) : status;
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
