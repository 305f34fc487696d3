/* The launchers of one line of instances.def. */
#include "cuda/common/instance.cuh"
#include "cuda/sm90/attention/groups.cuh"

#define GROUP_KERNELS(arch, dtype, name, cap)                                                                        \
    SKL_LAUNCHER(arch, dtype, name, rows, sm90::launch_group_rows<SKL_ELEMENT(dtype), SKL_SOFTCAP_##cap>)            \
    SKL_LAUNCHER(arch, dtype, name, fused, sm90::launch_group_fused<SKL_ELEMENT(dtype), SKL_SOFTCAP_##cap>)
