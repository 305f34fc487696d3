#include "bench/cpu/tensors.h"

#include <math.h>
#include <stdlib.h>

/* ---- 16-bit types ------------------------------------------------------------------------------------------- */

static uint32_t float_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static float bits_float(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Finite values only, here and below. */
static uint16_t bf16_from_float(float value)
{
    const uint32_t bits = float_bits(value);
    const uint32_t half_to_even = 0x7fff + (bits >> 16 & 1);
    return (uint16_t)((bits + half_to_even) >> 16);
}

static float float_from_bf16(uint16_t value)
{
    return bits_float((uint32_t)value << 16);
}

/* The mantissa is value / ulp, rounded; adding it to the biased exponent handles the carry. */
static uint16_t f16_from_float(float value)
{
    const uint16_t sign = (uint16_t)(float_bits(value) >> 16 & 0x8000);
    const float size = fabsf(value);
    int exponent = ilogbf(size);
    if (size == 0 || exponent < -14)
        exponent = -14; /* subnormals have the ulp of the smallest normal number */
    const int mantissa = (int)rintf(ldexpf(size, 10 - exponent));
    const int biased = (exponent + 14) * 1024 + mantissa; /* a normal mantissa includes the implicit 1024 */
    return (uint16_t)(sign | biased);
}

static float float_from_f16(uint16_t value)
{
    const int exponent = value >> 10 & 31, fraction = value & 1023;
    const float size = exponent ? ldexpf((float)(1024 + fraction), exponent - 25) : ldexpf((float)fraction, -24);
    return value & 0x8000 ? -size : size;
}

static void store_element(void *tensor, skl_dtype type, int64_t index, float value)
{
    if (type == SKL_F32)
        ((float *)tensor)[index] = value;
    else
        ((uint16_t *)tensor)[index] = type == SKL_F16 ? f16_from_float(value) : bf16_from_float(value);
}

static float element(const void *tensor, skl_dtype type, int64_t index)
{
    if (type == SKL_F32)
        return ((const float *)tensor)[index];
    const uint16_t bits = ((const uint16_t *)tensor)[index];
    return type == SKL_F16 ? float_from_f16(bits) : float_from_bf16(bits);
}

/* ---- Random inputs ------------------------------------------------------------------------------------------ */

/* splitmix64: equal inputs on every machine. */
static uint64_t random_bits(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
}

/* Variance 1, nearly normal: the sum of four uniform numbers. */
static float random_value(uint64_t *state)
{
    const uint64_t bits = random_bits(state);
    const double sum = (double)(bits & 0xffff) + (double)(bits >> 16 & 0xffff) + (double)(bits >> 32 & 0xffff) +
                       (double)(bits >> 48 & 0xffff);
    const double uniform_sum = sum / 65536 - 2;
    return (float)(uniform_sum * sqrt(3));
}

static void fill(const bench_tensors *tensors, void *tensor, float *tensor_f32, int64_t count, float deviation,
                 uint64_t *state)
{
    for (int64_t i = 0; i < count; i++) {
        store_element(tensor, tensors->type, i, deviation * random_value(state));
        tensor_f32[i] = element(tensor, tensors->type, i);
    }
}

/* ---- Memory ------------------------------------------------------------------------------------------------- */

/* Zeroed, so that no page fault happens during a measurement. */
static void *allocate(int64_t count, size_t element_size)
{
    enum { ALIGNMENT = 64 };
    const size_t size = ((size_t)count * element_size + ALIGNMENT) / ALIGNMENT * ALIGNMENT;
    void *const memory = aligned_alloc(ALIGNMENT, size);
    return memory ? memset(memory, 0, size) : NULL;
}

static size_t type_size(skl_dtype type)
{
    return type == SKL_F32 ? sizeof(float) : sizeof(uint16_t);
}

/* The f32 copy of an f32 input is the input itself. */
static bool allocate_input(const bench_tensors *tensors, void **tensor, float **tensor_f32, int64_t count)
{
    *tensor = allocate(count, type_size(tensors->type));
    *tensor_f32 = tensors->type == SKL_F32 ? *tensor : allocate(count, sizeof(float));
    return *tensor && *tensor_f32;
}

static bool allocate_floats(float **floats, int64_t count)
{
    *floats = allocate(count, sizeof(float));
    return *floats != NULL;
}

static bool allocate_gradient(const bench_tensors *tensors, void **streaming, float **baseline, int64_t count)
{
    *streaming = allocate(count, type_size(tensors->gradient_type));
    return *streaming && allocate_floats(baseline, count);
}

bool bench_tensors_create(bench_tensors *tensors, const skl_problem *problem)
{
    *tensors = (bench_tensors){
        .row_count = problem->heads_s * problem->len_q,
        .element_count = problem->heads_s * problem->len_q * problem->dim_s,
        .type = problem->dtype_s,
        .gradient_type = problem->grad_f32 ? SKL_F32 : problem->dtype_s,
    };
    const int64_t row_count = tensors->row_count, count = tensors->element_count;
    const bool complete = allocate_input(tensors, &tensors->q_t, &tensors->q_t_f32, count) &&
                          allocate_input(tensors, &tensors->k_t, &tensors->k_t_f32, count) &&
                          allocate_input(tensors, &tensors->q_s, &tensors->q_s_f32, count) &&
                          allocate_input(tensors, &tensors->k_s, &tensors->k_s_f32, count) &&
                          allocate_floats(&tensors->grad_kl, row_count) && allocate_floats(&tensors->kl, row_count) &&
                          allocate_floats(&tensors->lse_t, row_count) &&
                          allocate_floats(&tensors->lse_s, row_count) &&
                          allocate_floats(&tensors->baseline_kl, row_count) &&
                          allocate_gradient(tensors, &tensors->dq_s, &tensors->baseline_dq_s, count) &&
                          allocate_gradient(tensors, &tensors->dk_s, &tensors->baseline_dk_s, count);
    if (!complete) {
        bench_tensors_destroy(tensors);
        return false;
    }
    /* Logits with a standard deviation of 2: attention that is neither uniform nor one-hot. */
    uint64_t state = 1;
    fill(tensors, tensors->q_t, tensors->q_t_f32, count, 2, &state);
    fill(tensors, tensors->k_t, tensors->k_t_f32, count, 1, &state);
    fill(tensors, tensors->q_s, tensors->q_s_f32, count, 2, &state);
    fill(tensors, tensors->k_s, tensors->k_s_f32, count, 1, &state);
    for (int64_t i = 0; i < row_count; i++)
        tensors->grad_kl[i] = 1;
    return true;
}

void bench_tensors_destroy(bench_tensors *tensors)
{
    if (tensors->type != SKL_F32) {
        free(tensors->q_t_f32);
        free(tensors->k_t_f32);
        free(tensors->q_s_f32);
        free(tensors->k_s_f32);
    }
    void *const owned[] = {tensors->q_t,          tensors->k_t,  tensors->q_s,         tensors->k_s,
                           tensors->grad_kl,      tensors->kl,   tensors->lse_t,       tensors->lse_s,
                           tensors->dq_s,         tensors->dk_s, tensors->baseline_kl, tensors->baseline_dq_s,
                           tensors->baseline_dk_s};
    for (size_t i = 0; i < sizeof owned / sizeof owned[0]; i++)
        free(owned[i]);
    *tensors = (bench_tensors){0};
}

/* ---- Agreement ---------------------------------------------------------------------------------------------- */

/* Unlike fmax(), keeps NaN. */
static double larger(double largest, double value)
{
    return value > largest || isnan(value) ? value : largest;
}

double bench_tensors_kl_difference(const bench_tensors *tensors)
{
    double largest = 0;
    for (int64_t i = 0; i < tensors->row_count; i++)
        largest = larger(largest, fabs((double)tensors->kl[i] - (double)tensors->baseline_kl[i]));
    return largest;
}

static double gradient_difference(const bench_tensors *tensors, const void *streaming, const float *baseline,
                                  int64_t count)
{
    double largest_difference = 0, largest_element = 0;
    for (int64_t i = 0; i < count; i++) {
        const double ours = element(streaming, tensors->gradient_type, i);
        largest_difference = larger(largest_difference, fabs(ours - (double)baseline[i]));
        largest_element = larger(largest_element, fabs((double)baseline[i]));
    }
    return largest_element > 0 ? largest_difference / largest_element : largest_difference;
}

double bench_tensors_gradient_difference(const bench_tensors *tensors)
{
    return larger(gradient_difference(tensors, tensors->dq_s, tensors->baseline_dq_s, tensors->element_count),
                  gradient_difference(tensors, tensors->dk_s, tensors->baseline_dk_s, tensors->element_count));
}
