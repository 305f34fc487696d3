/* Compiled once per instruction set; ROW_KERNELS names the instance. The compiler vectorizes the loops; clang reports
 * an error for a loop that it cannot vectorize. */
#include "bench/cpu/row_kernels.h"

#include <float.h>
#include <math.h>
#include <string.h>

static inline float bits_as_float(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t float_as_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* e^z for z <= 0, to about one unit in the last place: z = n ln 2 + r with n an integer, e^z = 2^n e^r, and
 * e^r by the polynomial of Cephes' expf. Below LOWEST, where 2^n would be subnormal, the result stays at e^LOWEST. */
static inline float exp_of_negative(float z)
{
    const float LOWEST = -87.0F;
    const float LOG2_E = 1.44269504F;
    const float LN2_HIGH = 0.693359375F; /* nine bits, so that n LN2_HIGH is exact */
    const float LN2_LOW = -2.12194440e-4F;
    const float ROUND = 0x1.8p23F; /* added to a number, leaves it rounded in the low bits of the mantissa */
    const uint32_t ONE_BITS = 0x3f800000;

    z = z < LOWEST ? LOWEST : z;
    const float n_in_low_bits = z * LOG2_E + ROUND;
    const float n = n_in_low_bits - ROUND;
    const float r = (z - n * LN2_HIGH) - n * LN2_LOW;
    float tail = 1.9875691500e-4F;
    tail = tail * r + 1.3981999507e-3F;
    tail = tail * r + 8.3334519073e-3F;
    tail = tail * r + 4.1665795894e-2F;
    tail = tail * r + 1.6666665459e-1F;
    tail = tail * r + 5.0000001201e-1F;
    const float two_to_n = bits_as_float((float_as_bits(n_in_low_bits) << 23) + ONE_BITS);
    return two_to_n * (tail * (r * r) + r + 1.0F);
}

/* A row of both matrices is read from memory once; the second and third loop read it from the cache.
 * KL = sum_j P_j ((x_j - max_x) - (y_j - max_y)) - log sum_x + log sum_y */
static float softmax_kl(const float *x, const float *y, float *p, float *s, int64_t visible, int64_t count)
{
    float max_x = -FLT_MAX, max_y = -FLT_MAX;
#pragma omp simd reduction(max : max_x, max_y)
    for (int64_t j = 0; j < visible; j++) {
        max_x = x[j] > max_x ? x[j] : max_x;
        max_y = y[j] > max_y ? y[j] : max_y;
    }

    float sum_x = 0, sum_y = 0, weighted = 0;
#pragma omp simd reduction(+ : sum_x, sum_y, weighted)
    for (int64_t j = 0; j < visible; j++) {
        const float from_max_x = x[j] - max_x;
        const float from_max_y = y[j] - max_y;
        p[j] = exp_of_negative(from_max_x);
        s[j] = exp_of_negative(from_max_y);
        sum_x += p[j];
        sum_y += s[j];
        weighted += p[j] * (from_max_x - from_max_y);
    }

    const float scale_p = 1 / sum_x, scale_s = 1 / sum_y;
#pragma omp simd
    for (int64_t j = 0; j < visible; j++) {
        p[j] *= scale_p;
        s[j] *= scale_s;
    }

    const size_t masked_size = (size_t)(count - visible) * sizeof(float);
    memset(p + visible, 0, masked_size);
    memset(s + visible, 0, masked_size);
    return weighted * scale_p - logf(sum_x) + logf(sum_y);
}

static void gradient(float g, const float *p, const float *s, float *dy, int64_t count)
{
#pragma omp simd
    for (int64_t j = 0; j < count; j++)
        dy[j] = g * (s[j] - p[j]);
}

const row_kernels ROW_KERNELS = {softmax_kl, gradient};
