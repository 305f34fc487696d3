/* AVX2 and FMA: 16 registers of 8 floats hold 6 x 2 vectors of C. */
#include <immintrin.h>

#define SKL_LANES      8
#define SKL_MICRO_ROWS 6
#define SKL_MICRO_VECS 2
#define SKL_OWN_FMA

#include "cpu/body/vector.h"

SKL_INLINE vec vec_fma(vec a, vec b, vec c)
{
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}

#include "cpu/body/selected_backward.h"
#include "cpu/features.h"

static const skl_cpu_kernel indexer = {
    .name = "cpu_avx2",
    .detail = "AVX2 and FMA, 192 x 96 tiles, 6 x 16 micro-kernel",
    .fuses = true,
    .usable = skl_cpu_has_avx2,
    .tiles = tiles,
    .scratch_size = index_scratch_size,
    .forward = index_forward,
    .backward_queries = index_backward_queries,
    .backward_keys = index_backward_keys,
};

static const skl_cpu_kernel sparse_indexer = {
    .name = "cpu_avx2",
    .detail = "AVX2 and FMA, 192 x 96 tiles, 6 x 16 micro-kernel",
    .fuses = true,
    .usable = skl_cpu_has_avx2,
    .tiles = list_tiles,
    .scratch_size = list_scratch_size,
    .forward = list_forward,
    .backward_queries = list_backward_queries,
    .backward_keys = list_backward_keys,
};

const skl_cpu_kernel skl_cpu_avx2 = {
    .name = "cpu_avx2",
    .detail = "AVX2 and FMA, 192 x 96 tiles, 6 x 16 micro-kernel",
    .fuses = true,
    .usable = skl_cpu_has_avx2,
    .tiles = tiles,
    .scratch_size = scratch_size,
    .forward = forward,
    .backward_queries = backward_queries,
    .backward_keys = backward_keys,
    .indexer = &indexer,
    .sparse_indexer = &sparse_indexer,
};
