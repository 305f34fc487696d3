#include "distill/layer.h"
#include "device/device.h"
#include "distill/matmul.h"
#include "distill/random.h"

#include <math.h>

int64_t layer_q_count(const layer_shape *shape)
{
    return shape->width * shape->heads * shape->dim;
}

int64_t layer_k_count(const layer_shape *shape)
{
    return shape->width * shape->key_heads * shape->dim;
}

static skl_status allocate_weights(float **weights, int64_t count)
{
    const size_t size = (size_t)count * sizeof **weights;
    const skl_status status = device_allocate(SKL_CPU, size, "the weights of a layer", (void **)weights);
    if (status == SKL_OK)
        memset(*weights, 0, size);
    return status;
}

skl_status layer_allocate(layer *weights, layer_shape shape)
{
    *weights = (layer){.shape = shape};
    const skl_status status = allocate_weights(&weights->w_q, layer_q_count(&shape));
    return status == SKL_OK ? allocate_weights(&weights->w_k, layer_k_count(&shape)) : status;
}

void layer_free(layer *weights)
{
    device_free(SKL_CPU, weights->w_q);
    device_free(SKL_CPU, weights->w_k);
    weights->w_q = weights->w_k = NULL;
}

void layer_randomise(layer *weights, uint64_t seed)
{
    const float spread = 1 / sqrtf((float)weights->shape.width);
    uint64_t state = seed;
    for (int64_t i = 0; i < layer_q_count(&weights->shape); i++)
        weights->w_q[i] = spread * random_normal(&state);
    for (int64_t i = 0; i < layer_k_count(&weights->shape); i++)
        weights->w_k[i] = spread * random_normal(&state);
}

void layer_copy(layer *to, const layer *from)
{
    memcpy(to->w_q, from->w_q, (size_t)layer_q_count(&from->shape) * sizeof *from->w_q);
    memcpy(to->w_k, from->w_k, (size_t)layer_k_count(&from->shape) * sizeof *from->w_k);
}

static void project(float *out, const float *hidden, const float *weights, int64_t context, int64_t width,
                    int64_t columns, int threads)
{
    memset(out, 0, (size_t)(context * columns) * sizeof *out);
    matmul_add(out, (matrix){hidden, width, 1}, weights, context, columns, width, threads);
}

void layer_project(const layer *weights, const float *hidden, int64_t context, float *q, float *k, int threads)
{
    const layer_shape *const shape = &weights->shape;
    project(q, hidden, weights->w_q, context, shape->width, shape->heads * shape->dim, threads);
    project(k, hidden, weights->w_k, context, shape->width, shape->key_heads * shape->dim, threads);
}

void layer_gradient_add(layer *gradient, const float *hidden, int64_t context, const float *dq, const float *dk,
                        int threads)
{
    const layer_shape *const shape = &gradient->shape;
    const matrix transposed = {hidden, 1, shape->width};
    matmul_add(gradient->w_q, transposed, dq, shape->width, shape->heads * shape->dim, context, threads);
    matmul_add(gradient->w_k, transposed, dk, shape->width, shape->key_heads * shape->dim, context, threads);
}
