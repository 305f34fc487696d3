/* Hopper: f16 heads. */
#include "cuda/sm90/attention/rows.cuh"

SKL_SM90_FUSED(f16, 64, linear)
SKL_SM90_FUSED(f16, 128, linear)
SKL_SM90_WIDE(f16, 256, linear)
