/* Softcaps of f16, which no published model has, run on sm80. */
#include "cuda/common/kernel_row.cuh"
#include "cuda/sm90/attention/stats.cuh"
#include "cuda/sm90/attention/stats_top.cuh"

#define STATS(type, cap)                                                                                             \
    SKL_KERNEL(sm90, type, stats, "dim <= 256, statistics" SKL_DETAIL_##cap, .does = SKL_DOES_STATS,                 \
               .dim_max = SKL_STATS_DIM_MAX, .softcap = SKL_SOFTCAP_##cap, .reverse = true,                          \
               .forward = SKL_LAUNCHER(sm90, type, stats, sm90::launch_stats<SKL_ELEMENT(type), SKL_SOFTCAP_##cap>), \
               .top = SKL_LAUNCHER(sm90, type, stats, sm90::launch_top<SKL_ELEMENT(type)>))

STATS(bf16, softcap)
STATS(f16, plain)
