/* The launchers of one line of instances.def. */
#include "cuda/common/instance.cuh"
#include "cuda/sm80/strips/launch.cuh"

#define GROUP_STRIPS(arch, dtype, name)                                                                              \
    SKL_LAUNCHER(arch, dtype, name, rows, sm80::launch_ratio_rows<SKL_ELEMENT(dtype)>)                               \
    SKL_LAUNCHER(arch, dtype, name, gradients, sm80::launch_ratio_gradients<SKL_ELEMENT(dtype)>)
