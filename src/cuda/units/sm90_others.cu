/* Hopper: the attention that carries the KL, the joint backward, strips. */
#include "cuda/common/attention_rows.cu"
#include "cuda/common/kernel_row.cuh"
#include "cuda/sm90/attention/attention_backward.cuh"
#include "cuda/sm90/attention/attention_forward.cuh"
#include "cuda/sm90/attention/joint_backward.cuh"
#include "cuda/sm90/strips/launch.cuh"

#define SKL_SM90_ATTENTION(type)                                                                                     \
    SKL_KERNEL(sm90, type, attention, "attention with KL, dim <= 128", .does = SKL_DOES_CARRIED,                     \
               .dim_max = SKL_CARRYING_DIM_MAX,                                                                      \
               .forward = SKL_LAUNCHER(sm90, type, attention, sm90::launch_attention_forward<SKL_ELEMENT(type)>),    \
               .fused = SKL_LAUNCHER(sm90, type, attention, sm90::launch_attention_backward<SKL_ELEMENT(type)>))

SKL_SM90_ATTENTION(bf16)
SKL_SM90_ATTENTION(f16)

SKL_KERNEL(sm90, bf16, joint, "gradients of both sides, dim <= 128", .does = SKL_DOES_JOINT, .dim_max = 128,
           .reverse = true, .fused = SKL_LAUNCHER(sm90, bf16, joint, sm90::launch_joint_backward<skl_bf16>))

SKL_KERNEL(sm90, bf16, strips, "dense indexers, large teacher groups", .does = SKL_DOES_DENSE | SKL_DOES_GROUPS,
           .dim_max = SKL_STRIP_DIM_MAX, .pool_dim_max = SKL_POOL_DIM_MAX,
           .forward = SKL_LAUNCHER(sm90, bf16, strips,
                                   tensor_core::launch_differences<sm90::difference_kernels, false>),
           .gradients = SKL_LAUNCHER(sm90, bf16, strips,
                                     tensor_core::launch_differences<sm90::difference_kernels, true>))
