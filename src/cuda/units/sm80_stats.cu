#include "cuda/common/kernel_row.cuh"
#include "cuda/sm80/attention/stats.cuh"

#define STATS(type)                                                                                                  \
    SKL_KERNEL(sm80, type, stats, "dim <= 256, statistics", .does = SKL_DOES_STATS, .dim_max = SKL_STATS_DIM_MAX,    \
               .softcap = true, .reverse = true,                                                                     \
               .forward = SKL_LAUNCHER(sm80, type, stats, sm80::launch_stats<SKL_ELEMENT(type)>))

STATS(bf16)
STATS(f16)
