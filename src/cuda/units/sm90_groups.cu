/* Hopper: teacher groups, whose queries stay in shared memory. */
#include "cuda/common/kernel_row.cuh"
#include "cuda/sm90/attention/groups.cuh"

#define SKL_SM90_GROUPS(type, cap)                                                                                   \
    SKL_KERNEL(                                                                                                      \
        sm90, type, groups, "teacher groups, dim <= 128" SKL_DETAIL_##cap, .does = SKL_DOES_GROUPS,                  \
        .dim_max = SKL_GROUP_DIM_MAX, .softcap = SKL_SOFTCAP_##cap,                                                  \
        .forward = SKL_LAUNCHER(sm90, type, groups, sm90::launch_group_rows<SKL_ELEMENT(type), SKL_SOFTCAP_##cap>),  \
        .fused = SKL_LAUNCHER(sm90, type, groups, sm90::launch_group_fused<SKL_ELEMENT(type), SKL_SOFTCAP_##cap>))

SKL_SM90_GROUPS(bf16, softcap)
SKL_SM90_GROUPS(f16, plain)
