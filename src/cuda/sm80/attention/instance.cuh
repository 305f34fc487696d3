/* The launchers of a line of instances.def. */
#include "cuda/common/instance.cuh"
#include "cuda/sm80/attention/backward.cuh"
#include "cuda/sm80/attention/forward.cuh"

namespace sm80
{

/* 16 M rows per warp: as many as registers hold. The unit of f16 gradients takes some. */
template <int DIM> constexpr int FORWARD_M = SKL_SM80_FORWARD_ROWS(DIM) / 64;
template <typename ELEMENT, int DIM> constexpr int GRADIENT_M = DIM <= 64 && !gradient_unit<ELEMENT>::MOVES ? 2 : 1;

} // namespace sm80

/* A softcap is a branch of these kernels: every instance has it. */
#define ATTENTION_UNFUSED(arch, dtype, dim, cap)                                                                     \
    SKL_LAUNCHER(arch, dtype, dim, forward,                                                                          \
                 sm80::forward_launch<SKL_ELEMENT(dtype), dim, sm80::FORWARD_M<dim>>::run)                           \
    SKL_LAUNCHER(arch, dtype, dim, dq,                                                                               \
                 sm80::launch_gradient<SKL_ELEMENT(dtype), dim, sm80::GRADIENT_M<SKL_ELEMENT(dtype), dim>, false>)   \
    SKL_LAUNCHER(arch, dtype, dim, dk,                                                                               \
                 sm80::launch_gradient<SKL_ELEMENT(dtype), dim, sm80::GRADIENT_M<SKL_ELEMENT(dtype), dim>, true>)    \
    extern "C" int skl_cuda_##arch##_##dtype##_##dim##_blocks_per_sm(void)                                           \
    {                                                                                                                \
        return sm80::forward_launch<SKL_ELEMENT(dtype), dim, sm80::FORWARD_M<dim>>::blocks_per_sm();                 \
    }
