/* Hopper: bf16 heads of up to 64 and 96 dimensions, and pairs of 128 and 64. */
#include "cuda/sm90/attention/rows.cuh"

SKL_SM90_FUSED(bf16, 64, plain)
SKL_SM90_PAIR(bf16, 128, 64)
SKL_SM90_PAIR(bf16, 96, 96)
