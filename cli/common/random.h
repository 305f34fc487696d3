/* Random numbers for data, initial weights and checks: the same on every machine for the same seed. */
#ifndef STREAMKL_CLI_COMMON_RANDOM_H
#define STREAMKL_CLI_COMMON_RANDOM_H

#include <stdint.h>

/* splitmix64 (Steele, Lea, Flood 2014): any state is a good one. */
static inline uint64_t random_bits(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
}

/* Mean 0, variance 1, nearly normal: the sum of four uniform 16-bit numbers. */
static inline float random_normal(uint64_t *state)
{
    const uint64_t bits = random_bits(state);
    const uint64_t sum = (bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) + (bits >> 48);
    const float sqrt_3 = 1.7320508F; /* a sum of four uniforms has variance 1/3 */
    return sqrt_3 * ((float)sum / 65536 - 2);
}

/* In [0, count); the bias of the remainder is below count / 2^64. */
static inline int64_t random_below(uint64_t *state, int64_t count)
{
    return (int64_t)(random_bits(state) % (uint64_t)count);
}

/* The state of an independent stream for every (seed, stream, index). */
static inline uint64_t random_stream(uint64_t seed, uint64_t stream, uint64_t index)
{
    uint64_t state = seed;
    state = random_bits(&state) ^ stream;
    state = random_bits(&state) ^ index;
    return random_bits(&state);
}

#endif
