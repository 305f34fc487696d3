/* Hopper: pairs of bf16 head sizes, one of them above 128. */
#include "cuda/sm90/attention/rows.cuh"

SKL_SM90_PAIR(bf16, 256, 64)
SKL_SM90_PAIR(bf16, 192, 128)
SKL_SM90_PAIR(bf16, 256, 128)
