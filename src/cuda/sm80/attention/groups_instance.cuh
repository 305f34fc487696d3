/* The launchers of one line of instances.def. */
#include "cuda/common/instance.cuh"
#include "cuda/sm80/strips/ratio_launch.cuh"

#define GROUP_STRIPS(arch, dtype, name)                                                                              \
    SKL_LAUNCHER(arch, dtype, name, rows, sm80::launch_group_rows<SKL_ELEMENT(dtype)>)                               \
    SKL_LAUNCHER(arch, dtype, name, gradients, sm80::launch_group_gradients<SKL_ELEMENT(dtype)>)
