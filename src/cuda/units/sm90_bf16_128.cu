/* Hopper: bf16 heads of up to 128 dimensions. */
#include "cuda/sm90/attention/rows.cuh"

SKL_SM90_FUSED(bf16, 128, softcap)
