/* Attention without tensor cores. */
#include "cuda/general/attention/forward.cu"
#include "cuda/general/attention/backward.cu"
#include "cuda/general/attention/stats.cu"
