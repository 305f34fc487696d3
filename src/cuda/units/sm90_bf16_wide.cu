/* Hopper: bf16 heads of up to 192 and 256 dimensions. */
#include "cuda/sm90/attention/rows.cuh"

SKL_SM90_WIDE(bf16, 192, plain)
SKL_SM90_WIDE(bf16, 256, softcap)
