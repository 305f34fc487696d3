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

/* ---- One tensor --------------------------------------------------------------------------------------------- */

typedef struct tensor_shape {
    const char *name;
    int64_t heads, rows, dim;
    size_t element_size;
} tensor_shape;

/* Bytes from the first element to the last. */
static size_t span_of(const skl_problem *p, const tensor_shape *shape, const skl_output *tensor)
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

/* ---- The tensors of a call ---------------------------------------------------------------------------------- */

/* A tensor of heads: an skl_input or an skl_output, which have the same layout. */
typedef struct head_tensor {
    void *tensor;
    tensor_shape shape;
} head_tensor;

/* A contiguous array without strides. */
typedef struct flat_array {
    void *address; /* of the pointer to its elements */
    const char *name;
    int64_t count;
} flat_array;

static_assert(sizeof(skl_input) == sizeof(skl_output), "one function maps both");
static_assert(sizeof(int32_t) == sizeof(float), "the elements of a flat_array");

static skl_status map_heads(mirror *tensors, const head_tensor *all, size_t count, bool written)
{
    skl_status status = SKL_OK;
    for (size_t t = 0; t < count && status == SKL_OK; t++) {
        skl_output view;
        memcpy(&view, all[t].tensor, sizeof view);
        const size_t size = span_of(&tensors->problem, &all[t].shape, &view);
        status = map_tensor(tensors, all[t].shape.name, &view.data, size, written);
        memcpy(all[t].tensor, &view, sizeof view);
    }
    return status;
}

static skl_status map_flat(mirror *tensors, const flat_array *all, size_t count, bool written)
{
    skl_status status = SKL_OK;
    for (size_t a = 0; a < count && status == SKL_OK; a++) {
        void *elements;
        memcpy(&elements, all[a].address, sizeof elements);
        status = map_tensor(tensors, all[a].name, &elements, (size_t)all[a].count * sizeof(float), written);
        memcpy(all[a].address, &elements, sizeof elements);
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

static tensor_shape row_vector(const mirror *tensors, const char *name, int64_t heads)
{
    return (tensor_shape){name, heads, rows_q(&tensors->problem), 1, sizeof(float)};
}

#define COUNT_OF(array) (sizeof(array) / sizeof *(array))

static skl_status map_inputs(mirror *tensors, skl_inputs *inputs)
{
    const skl_problem *const p = &tensors->problem;
    const size_t teacher_size = size_of(p->dtype_t), student_size = size_of(p->dtype_s);
    const head_tensor heads[] = {
        {&inputs->q_t, {"q_t", p->heads_t, rows_q(p), p->dim_t, teacher_size}},
        {&inputs->k_t, {"k_t", p->key_heads_t, rows_k(p), p->dim_t, teacher_size}},
        {&inputs->q_s, {"q_s", query_heads_s(p), rows_q(p), p->dim_s, student_size}},
        {&inputs->k_s, {"k_s", p->key_heads_s, rows_k(p), p->dim_s, student_size}},
        {&inputs->w_s, {"w_s", p->heads_s, rows_q(p), p->index_heads, size_of(p->dtype_w)}},
        {&inputs->indices, {"indices", p->heads_s, rows_q(p), p->top_k, sizeof(int32_t)}},
        {&inputs->lse_t, row_vector(tensors, "lse_t", p->heads_t)},
        {&inputs->lse_s, row_vector(tensors, "lse_s", p->heads_s)},
        {&inputs->kl, row_vector(tensors, "kl", p->heads_s)},
        {&inputs->dot_t, row_vector(tensors, "dot_t", p->heads_t)},
        {&inputs->grad_kl, row_vector(tensors, "grad_kl", p->heads_s)},
    };
    const int64_t bounds = (p->packed ? 1 : p->batch) * rows_q(p);
    const flat_array flat[] = {
        {&inputs->cu_seqlens_q, "cu_seqlens_q", p->batch + 1},
        {&inputs->cu_seqlens_k, "cu_seqlens_k", p->batch + 1},
        {&inputs->key_lengths, "key_lengths", p->batch},
        {&inputs->key_begin, "key_begin", bounds},
        {&inputs->key_end, "key_end", bounds},
        {&inputs->sink_t, "sink_t", p->heads_t},
        {&inputs->sink_s, "sink_s", p->heads_s},
    };
    const skl_status status = map_heads(tensors, heads, COUNT_OF(heads), false);
    return status == SKL_OK ? map_flat(tensors, flat, COUNT_OF(flat), false) : status;
}

static skl_status map_rows(mirror *tensors, skl_rows *rows)
{
    const skl_problem *const p = &tensors->problem;
    const head_tensor heads[] = {
        {&rows->kl, row_vector(tensors, "kl", p->heads_s)},
        {&rows->lse_t, row_vector(tensors, "lse_t", p->heads_t)},
        {&rows->lse_s, row_vector(tensors, "lse_s", p->heads_s)},
        {&rows->dot_t, row_vector(tensors, "dot_t", p->heads_t)},
        {&rows->cross_entropy, row_vector(tensors, "cross_entropy", p->heads_s)},
        {&rows->entropy, row_vector(tensors, "entropy", p->heads_s)},
        {&rows->mass, row_vector(tensors, "mass", p->heads_s)},
    };
    return map_heads(tensors, heads, COUNT_OF(heads), true);
}

static skl_status map_gradients(mirror *tensors, skl_gradients *gradients)
{
    const skl_problem *const p = &tensors->problem;
    const size_t teacher_size = p->grad_f32 ? sizeof(float) : size_of(p->dtype_t);
    const size_t student_size = p->grad_f32 ? sizeof(float) : size_of(p->dtype_s);
    const size_t weight_size = p->grad_f32 ? sizeof(float) : size_of(p->dtype_w);
    const head_tensor heads[] = {
        {&gradients->dq_t, {"dq_t", p->heads_t, rows_q(p), p->dim_t, teacher_size}},
        {&gradients->dk_t, {"dk_t", p->key_heads_t, rows_k(p), p->dim_t, teacher_size}},
        {&gradients->dq_s, {"dq_s", query_heads_s(p), rows_q(p), p->dim_s, student_size}},
        {&gradients->dk_s, {"dk_s", p->key_heads_s, rows_k(p), p->dim_s, student_size}},
        {&gradients->dw_s, {"dw_s", p->heads_s, rows_q(p), p->index_heads, weight_size}},
    };
    const flat_array flat[] = {
        {&gradients->dsink_t, "dsink_t", p->heads_t},
        {&gradients->dsink_s, "dsink_s", p->heads_s},
    };
    const skl_status status = map_heads(tensors, heads, COUNT_OF(heads), true);
    return status == SKL_OK ? map_flat(tensors, flat, COUNT_OF(flat), true) : status;
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
    const tensor_shape of_keys = {"key_sum", sum_heads, rows_k(p), 1, sizeof(float)};
    const head_tensor heads[] = {
        {&stats->key_sum, of_keys},
        {&stats->key_max, of_keys},
        {&stats->lse, row_vector(tensors, "lse", p->heads_s)},
        {&stats->entropy, row_vector(tensors, "entropy", p->heads_s)},
        {&stats->max_logit, row_vector(tensors, "max_logit", p->heads_s)},
        {&stats->expected_distance, row_vector(tensors, "expected_distance", p->heads_s)},
    };
    const flat_array flat[] = {
        {&stats->head_max_logit, "head_max_logit", p->batch * p->heads_s},
        {&stats->distance_mass, "distance_mass", p->batch * p->heads_s * stats->distance_count},
    };
    skl_status status = map_inputs(tensors, inputs);
    if (status == SKL_OK)
        status = map_heads(tensors, heads, COUNT_OF(heads), true);
    return status == SKL_OK ? map_flat(tensors, flat, COUNT_OF(flat), true) : status;
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
