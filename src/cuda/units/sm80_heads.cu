/* Attention by mma.sync, and teacher groups in strips with softcaps, both directions and both sides. */
#include "cuda/common/kernel_row.cuh"
#include "cuda/sm80/attention/backward.cuh"
#include "cuda/sm80/attention/forward.cuh"
#include "cuda/sm80/strips/launch.cuh"

namespace sm80
{

/* 16 M rows per warp: as many as registers hold. The unit of f16 gradients takes some. */
template <int DIM> constexpr int FORWARD_M = SKL_SM80_FORWARD_ROWS(DIM) / 64;
template <typename ELEMENT, int DIM> constexpr int GRADIENT_M = DIM <= 64 && !gradient_unit<ELEMENT>::MOVES ? 2 : 1;

template <typename ELEMENT, int DIM, bool DK>
cudaError_t launch_gradient_of(const char *kernel, const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    return launch_gradient<ELEMENT, DIM, GRADIENT_M<ELEMENT, DIM>, DK>(kernel, params, launch);
}

} // namespace sm80

#define SKL_SM80_ATTENTION(type, dim)                                                                                \
    SKL_KERNEL(sm80, type, dim, "dim <= " #dim, .does = SKL_DOES_ATTENTION, .dim_max = dim, .small_dim_max = dim,    \
               .softcap = true, .linear_link = true, .reverse = true,                                                \
               .forward = SKL_LAUNCHER(sm80, type, dim,                                                              \
                                       sm80::forward_launch<SKL_ELEMENT(type), dim, sm80::FORWARD_M<dim>>::run),     \
               .dq = SKL_LAUNCHER(sm80, type, dim, sm80::launch_gradient_of<SKL_ELEMENT(type), dim, false>),         \
               .dk = SKL_LAUNCHER(sm80, type, dim, sm80::launch_gradient_of<SKL_ELEMENT(type), dim, true>))

#define SKL_SM80_GROUPS(type)                                                                                        \
    SKL_KERNEL(sm80, type, groups, "teacher groups, dim <= 128", .does = SKL_DOES_GROUPS | SKL_DOES_TEACHER,         \
               .dim_max = SKL_GROUP_DIM_MAX, .softcap = true, .reverse = true,                                       \
               .forward = SKL_LAUNCHER(sm80, type, groups, sm80::launch_ratio_rows<SKL_ELEMENT(type)>),              \
               .gradients = SKL_LAUNCHER(sm80, type, groups, sm80::launch_ratio_gradients<SKL_ELEMENT(type)>))

SKL_SM80_ATTENTION(bf16, 64)
SKL_SM80_ATTENTION(bf16, 128)
SKL_SM80_ATTENTION(bf16, 256)
SKL_SM80_ATTENTION(f16, 64)
SKL_SM80_ATTENTION(f16, 128)
SKL_SM80_ATTENTION(f16, 256)
SKL_SM80_GROUPS(bf16)
SKL_SM80_GROUPS(f16)
