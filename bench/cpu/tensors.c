#include "bench/cpu/tensors.h"

#include <math.h>
#include <stdlib.h>

/* ---- Elements ----------------------------------------------------------------------------------------------- */

/* Exact for the values of random_value(): no more than eight significant bits, and none is subnormal in 16 bits. */
static void store_element(void *tensor, skl_dtype type, int64_t index, float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    const uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff, bias = (127 - 15) << 23;
    if (type == SKL_F32)
        ((float *)tensor)[index] = value;
    else if (type == SKL_BF16)
        ((uint16_t *)tensor)[index] = (uint16_t)(bits >> 16);
    else
        ((uint16_t *)tensor)[index] = (uint16_t)(sign | (size ? (size - bias) >> 13 : 0));
}

static double element(const void *tensor, skl_dtype type, int64_t index)
{
    if (type == SKL_F32)
        return (double)((const float *)tensor)[index];
    const uint16_t half = ((const uint16_t *)tensor)[index];
    if (type == SKL_F16) {
        const int exponent = half >> 10 & 31, fraction = half & 1023;
        const double size = exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24);
        return half & 0x8000 ? -size : size;
    }
    const uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return (double)value;
}

/* Nearly normal, with the given standard deviation of at most 2: the sum of four uniform numbers from splitmix64,
 * rounded to a multiple of 1/32. Equal on every machine. */
static float random_value(uint64_t *state, float deviation)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    z ^= z >> 31;
    const uint64_t sum = (z & 0xffff) + (z >> 16 & 0xffff) + (z >> 32 & 0xffff) + (z >> 48);
    const float sqrt_3 = 1.7320508F; /* the sum of four uniform numbers has variance 1/3 */
    return rintf(32 * deviation * sqrt_3 * ((float)sum / 65536 - 2)) / 32;
}

/* ---- Memory ------------------------------------------------------------------------------------------------- */

enum { ALIGNMENT = 64, ELEMENT_TENSORS = 12, ROW_TENSORS = 5 };

/* Bytes of a tensor whose elements have at most four bytes. */
static size_t tensor_size(int64_t count)
{
    return ((size_t)count * sizeof(float) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

/* The next tensor of the memory. */
static void *take(char **free_memory, int64_t count)
{
    void *const tensor = *free_memory;
    *free_memory += tensor_size(count);
    return tensor;
}

/* The f32 copy of an f32 input is the input itself. */
static void *take_input(const bench_tensors *tensors, char **free_memory, float **f32, float deviation,
                        uint64_t *state)
{
    const int64_t count = tensors->heads * tensors->length * tensors->dim;
    *f32 = take(free_memory, count);
    void *const input = tensors->type == SKL_F32 ? *f32 : take(free_memory, count);
    for (int64_t i = 0; i < count; i++) {
        (*f32)[i] = random_value(state, deviation);
        store_element(input, tensors->type, i, (*f32)[i]);
    }
    return input;
}

bool bench_tensors_create(bench_tensors *tensors, const skl_problem *problem)
{
    *tensors = (bench_tensors){
        .heads = problem->heads_s,
        .length = problem->len_q,
        .dim = problem->dim_s,
        .scale = (float)(1 / sqrt((double)problem->dim_s)),
        .causal = problem->causal,
        .type = problem->dtype_s,
        .gradient_type = problem->grad_f32 ? SKL_F32 : problem->dtype_s,
    };
    const int64_t rows = tensors->heads * tensors->length, count = rows * tensors->dim;
    const size_t size = ELEMENT_TENSORS * tensor_size(count) + ROW_TENSORS * tensor_size(rows);
    char *free_memory = tensors->memory = aligned_alloc(ALIGNMENT, size);
    if (tensors->memory == NULL)
        return false;
    memset(tensors->memory, 0, size); /* no page fault happens during a measurement */
    /* Logits with a standard deviation of 2: attention that is neither uniform nor one-hot. */
    uint64_t state = 1;
    tensors->q_t = take_input(tensors, &free_memory, &tensors->q_t_f32, 2, &state);
    tensors->k_t = take_input(tensors, &free_memory, &tensors->k_t_f32, 1, &state);
    tensors->q_s = take_input(tensors, &free_memory, &tensors->q_s_f32, 2, &state);
    tensors->k_s = take_input(tensors, &free_memory, &tensors->k_s_f32, 1, &state);
    tensors->dq_s = take(&free_memory, count);
    tensors->dk_s = take(&free_memory, count);
    tensors->baseline_dq_s = take(&free_memory, count);
    tensors->baseline_dk_s = take(&free_memory, count);
    tensors->kl = take(&free_memory, rows);
    tensors->lse_t = take(&free_memory, rows);
    tensors->lse_s = take(&free_memory, rows);
    tensors->baseline_kl = take(&free_memory, rows);
    tensors->grad_kl = take(&free_memory, rows);
    for (int64_t i = 0; i < rows; i++)
        tensors->grad_kl[i] = 1;
    return true;
}

void bench_tensors_destroy(bench_tensors *tensors)
{
    free(tensors->memory);
    *tensors = (bench_tensors){0};
}

/* ---- Agreement ---------------------------------------------------------------------------------------------- */

/* Unlike fmax(), keeps NaN. */
static double larger(double largest, double value)
{
    return value > largest || isnan(value) ? value : largest;
}

static double difference(const void *ours, skl_dtype type, const float *baseline, int64_t count, bool relative)
{
    double largest_difference = 0, largest_element = 0;
    for (int64_t i = 0; i < count; i++) {
        largest_difference = larger(largest_difference, fabs(element(ours, type, i) - (double)baseline[i]));
        largest_element = larger(largest_element, fabs((double)baseline[i]));
    }
    return relative && largest_element > 0 ? largest_difference / largest_element : largest_difference;
}

void bench_tensors_compare(const bench_tensors *tensors, double *kl_difference, double *gradient_difference)
{
    const int64_t rows = tensors->heads * tensors->length, count = rows * tensors->dim;
    const skl_dtype type = tensors->gradient_type;
    *kl_difference = difference(tensors->kl, SKL_F32, tensors->baseline_kl, rows, false);
    *gradient_difference = larger(difference(tensors->dq_s, type, tensors->baseline_dq_s, count, true),
                                  difference(tensors->dk_s, type, tensors->baseline_dk_s, count, true));
}
