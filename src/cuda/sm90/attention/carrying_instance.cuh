/* The launcher of one line of instances.def. */
#include "cuda/common/instance.cuh"
#include "cuda/sm90/attention/attention_backward.cuh"

#define CARRYING_KERNEL(arch, dtype, name)                                                                           \
    SKL_LAUNCHER(arch, dtype, name, carrying, sm90::launch_attention_backward<SKL_ELEMENT(dtype)>)
