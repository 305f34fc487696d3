/* AVX-512. */
#include "cpu/avx512_vector.h"

#include "cpu/body/work.h"
#include "cpu/features.h"

const skl_cpu_kernel skl_cpu_avx512 = {
    .name = "cpu_avx512",
    .detail = "AVX-512, 192 x 96 tiles, 12 x 32 micro-kernel",
    .usable = skl_cpu_has_avx512,
    .works = &works,
};
