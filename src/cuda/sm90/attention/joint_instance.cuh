/* The launcher of one line of instances.def. */
#include "cuda/common/instance.cuh"
#include "cuda/sm90/attention/joint_backward.cuh"

#define JOINT_KERNEL(arch, dtype, name)                                                                              \
    SKL_LAUNCHER(arch, dtype, name, joint, sm90::launch_joint_backward<SKL_ELEMENT(dtype)>)
