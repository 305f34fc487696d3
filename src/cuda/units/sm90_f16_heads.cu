/* Hopper: f16 heads. */
#include "cuda/sm90/attention/rows.cuh"

SKL_SM90_FUSED(f16, 64, plain)
SKL_SM90_FUSED(f16, 128, plain)
SKL_SM90_WIDE(f16, 256, plain)
