/* Teacher groups of up to 8 heads by mma.sync, in tiles. */
#define SKL_SIGNED_THREAD_INDEX /* see thread_index */

#include "cuda/common/kernel_row.cuh"
#include "cuda/sm80/attention/group_tiles.cuh"

#define SKL_SM80_GROUP_TILES(type)                                                                                   \
    SKL_KERNEL(                                                                                                      \
        sm80, type, group_tiles, "teacher groups of up to 8 heads, dim <= 128" SKL_DETAIL_plain,                     \
        .does = SKL_DOES_GROUPS, .dim_max = SKL_GROUP_DIM_MAX, .group_max = SKL_GROUP_TILES_SIZE_MAX,                \
        .forward = SKL_LAUNCHER(sm80, type, group_tiles, sm80::launch_group_tile_rows<SKL_ELEMENT(type)>),           \
        .dq = SKL_LAUNCHER(sm80, type, group_tiles, sm80::launch_group_tile_gradients<SKL_ELEMENT(type), false>),    \
        .dk = SKL_LAUNCHER(sm80, type, group_tiles, sm80::launch_group_tile_gradients<SKL_ELEMENT(type), true>))

SKL_SM80_GROUP_TILES(bf16)
SKL_SM80_GROUP_TILES(f16)
