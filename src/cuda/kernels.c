/* The kernel list, best first. Each row stands with its kernel, in cuda/units; the general kernel's are here.
 *
 * Kernels of sm90 run on Hopper alone: a build for other GPUs leaves them out (cmake/cuda.cmake). */
#include "cuda/kernels.h"

#ifndef SKL_WITHOUT_SM90
#define HOPPER_KERNELS(X)                                                                                            \
    X(sm90_bf16_64)                                                                                                  \
    X(sm90_bf16_128_64)                                                                                              \
    X(sm90_bf16_96_96)                                                                                               \
    X(sm90_bf16_128)                                                                                                 \
    X(sm90_bf16_256_64)                                                                                              \
    X(sm90_bf16_192_128)                                                                                             \
    X(sm90_bf16_256_128)                                                                                             \
    X(sm90_bf16_192)                                                                                                 \
    X(sm90_bf16_256)                                                                                                 \
    X(sm90_f16_64)                                                                                                   \
    X(sm90_f16_128)                                                                                                  \
    X(sm90_f16_256)                                                                                                  \
    X(sm90_bf16_attention)                                                                                           \
    X(sm90_f16_attention)                                                                                            \
    X(sm90_bf16_joint)                                                                                               \
    X(sm90_bf16_groups)                                                                                              \
    X(sm90_f16_groups)                                                                                               \
    X(sm90_bf16_strips)                                                                                              \
    X(sm90_bf16_sparse)                                                                                              \
    X(sm90_f16_sparse)                                                                                               \
    X(sm90_bf16_stats)                                                                                               \
    X(sm90_f16_stats)
#define HOPPER_F32_KERNELS(X) X(sm90_f32_64) X(sm90_f32_128)
#else
#define HOPPER_KERNELS(X)
#define HOPPER_F32_KERNELS(X)
#endif

#define SHARED_KERNELS(X)                                                                                            \
    X(sm80_bf16_64)                                                                                                  \
    X(sm80_bf16_128)                                                                                                 \
    X(sm80_bf16_256)                                                                                                 \
    X(sm80_f16_64)                                                                                                   \
    X(sm80_f16_128)                                                                                                  \
    X(sm80_f16_256)                                                                                                  \
    X(sm80_bf16_group_tiles)                                                                                         \
    X(sm80_f16_group_tiles)                                                                                          \
    X(sm80_bf16_strips)                                                                                              \
    X(sm80_f16_strips)                                                                                               \
    X(sm80_bf16_sparse)                                                                                              \
    X(sm80_f16_sparse)                                                                                               \
    X(sm80_bf16_groups)                                                                                              \
    X(sm80_f16_groups)                                                                                               \
    X(sm80_bf16_stats)                                                                                               \
    X(sm80_f16_stats)

#define DECLARE(name) extern const skl_cuda_kernel skl_cuda_##name;
HOPPER_KERNELS(DECLARE)
SHARED_KERNELS(DECLARE)
HOPPER_F32_KERNELS(DECLARE)

#define GENERAL(...)                                                                                                 \
    {                                                                                                                \
        .name = "cuda_general", .detail = "any type, size and stride: f32 arithmetic without tensor cores",          \
        .capability = SKL_CAPABILITY_sm80, .capability_end = SKL_CAPABILITY_END_sm80, .general = true,               \
        .softcap = true, .linear_link = true, .reverse = true, __VA_ARGS__                                           \
    }

static const skl_cuda_kernel general_dense = GENERAL(.does = SKL_DOES_DENSE, .forward = skl_cuda_general_dense_rows,
                                                     .gradients = skl_cuda_general_dense_gradients);
static const skl_cuda_kernel general_sparse =
    GENERAL(.does = SKL_DOES_SPARSE, .forward = skl_cuda_general_sparse_rows,
            .gradients = skl_cuda_general_sparse_gradients);
static const skl_cuda_kernel general_stats = GENERAL(.does = SKL_DOES_STATS, .forward = skl_cuda_general_stats);
const skl_cuda_kernel skl_cuda_general =
    GENERAL(.does = SKL_DOES_ATTENTION | SKL_DOES_GROUPS | SKL_DOES_TEACHER, .forward = skl_cuda_general_forward,
            .dq = skl_cuda_general_dq, .dk = skl_cuda_general_dk);

#define ADDRESS(name) &skl_cuda_##name,
static const skl_cuda_kernel *const kernels[] = {
    HOPPER_KERNELS(ADDRESS) SHARED_KERNELS(ADDRESS) HOPPER_F32_KERNELS(ADDRESS) & general_dense, &general_sparse,
    &general_stats, &skl_cuda_general};

const skl_cuda_kernel *skl_cuda_kernel_at(int32_t index)
{
    return (size_t)index < sizeof kernels / sizeof kernels[0] ? kernels[index] : NULL;
}

bool skl_cuda_has_plans(const skl_cuda_kernel *kernel)
{
    const bool is_other_row_of_general = kernel->general && kernel != &skl_cuda_general;
    return (kernel->does & (SKL_DOES_CARRIED | SKL_DOES_JOINT | SKL_DOES_STATS)) == 0 && !is_other_row_of_general;
}
