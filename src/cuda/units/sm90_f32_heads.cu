/* Hopper: f32 and mixed types, as two-term rows. */
#include "cuda/sm90/attention/rows.cuh"

SKL_SM90_WIDE(f32, 64, plain)
SKL_SM90_WIDE(f32, 128, softcap)
