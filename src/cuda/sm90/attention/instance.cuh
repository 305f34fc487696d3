/* The launchers of a line of instances.def. */
#include "cuda/common/instance.cuh"
#include "cuda/sm90/attention/backward_wide.cuh"
#include "cuda/sm90/attention/dk.cuh"
#include "cuda/sm90/attention/forward.cuh"
#include "cuda/sm90/attention/fused_backward.cuh"

typedef sm90::two_term_f32 skl_element_f32;

/* Shared memory leaves room for one block per SM. */
#define SKL_ONE_BLOCK_PER_SM(arch, dtype, dim)                                                                       \
    extern "C" int skl_cuda_##arch##_##dtype##_##dim##_blocks_per_sm(void)                                           \
    {                                                                                                                \
        return 1;                                                                                                    \
    }

#define ATTENTION_FUSED(arch, dtype, dim, cap)                                                                       \
    SKL_LAUNCHER(arch, dtype, dim, forward, sm90::launch_forward<SKL_ELEMENT(dtype), dim, SKL_SOFTCAP_##cap>)        \
    SKL_LAUNCHER(arch, dtype, dim, fused, sm90::launch_fused_backward<SKL_ELEMENT(dtype), dim, SKL_SOFTCAP_##cap>)   \
    SKL_LAUNCHER(arch, dtype, dim, dk, sm90::launch_dk<SKL_ELEMENT(dtype), dim, SKL_SOFTCAP_##cap>)                  \
    SKL_ONE_BLOCK_PER_SM(arch, dtype, dim)

#define ATTENTION_PAIR(arch, dtype, large, small)                                                                    \
    SKL_LAUNCHER(arch, dtype, large##_##small, forward, sm90::launch_forward_pair<SKL_ELEMENT(dtype), large, small>) \
    SKL_LAUNCHER(arch, dtype, large##_##small, fused, sm90::launch_fused_pair<SKL_ELEMENT(dtype), large, small>)

#define ATTENTION_UNFUSED(arch, dtype, dim, cap)                                                                     \
    SKL_LAUNCHER(arch, dtype, dim, forward, sm90::launch_forward<SKL_ELEMENT(dtype), dim, SKL_SOFTCAP_##cap>)        \
    SKL_LAUNCHER(arch, dtype, dim, dq, sm90::launch_wide<SKL_ELEMENT(dtype), dim, false, SKL_SOFTCAP_##cap>)         \
    SKL_LAUNCHER(arch, dtype, dim, dk, sm90::launch_wide<SKL_ELEMENT(dtype), dim, true, SKL_SOFTCAP_##cap>)          \
    SKL_ONE_BLOCK_PER_SM(arch, dtype, dim)
