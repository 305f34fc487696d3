/* The kernel list, which follows from instances.def. */
#include "cuda/kernels.h"

#include <string.h>

/* First compute capability beyond those that the code of an architecture runs on. */
enum { CAPABILITY_END_sm80 = 1000, CAPABILITY_END_sm90 = 91 };

#define DTYPE_bf16 SKL_BF16
#define DTYPE_f16  SKL_F16
#define DTYPE_f32  SKL_F32

#define TYPES_bf16 "bf16"
#define TYPES_f16  "f16"
#define TYPES_f32  "f32 and mixed types"

#define PRODUCTS_sm80 "mma.sync"
#define PRODUCTS_sm90 "wgmma and TMA"

#define INDEXER_DETAIL_dense  "dense indexer, teacher groups"
#define INDEXER_DETAIL_sparse "sparse indexer"

#define DETAIL_softcap ""
#define DETAIL_linear  ", no softcap"

#define ENTRY(arch, type, size, text)                                                                                \
    .name = "cuda_" #arch "_" #type "_" #size, .detail = TYPES_##type ", " text ": " PRODUCTS_##arch,                \
    .capability = SKL_CAPABILITY_##arch, .capability_end = CAPABILITY_END_##arch, .dtype = DTYPE_##type
#define ATTENTION(arch, type, dim, cap)                                                                              \
    ENTRY(arch, type, dim, "dim <= " #dim DETAIL_##cap),                                                             \
        .dim_max = dim, .small_dim_max = dim, .softcap = SKL_SOFTCAP_##cap,                                          \
        .forward = skl_cuda_##arch##_##type##_##dim##_forward, .dk = skl_cuda_##arch##_##type##_##dim##_dk,          \
        .blocks_per_sm = skl_cuda_##arch##_##type##_##dim##_blocks_per_sm
#define ATTENTION_FUSED(arch, type, dim, cap)                                                                        \
    {ATTENTION(arch, type, dim, cap), .fused_dim_max = dim, .fused = skl_cuda_##arch##_##type##_##dim##_fused},
#define ATTENTION_PAIR(arch, type, large, small)                                                                     \
    {ENTRY(arch, type, large##_##small, "dim <= " #large " and <= " #small ", no softcap"),                          \
     .dim_max = large,                                                                                               \
     .small_dim_max = small,                                                                                         \
     .fused_dim_max = (large) <= SKL_SM90_FUSED_DIM_MAX ? (large) : (small),                                         \
     .forward = skl_cuda_##arch##_##type##_##large##_##small##_forward,                                              \
     .fused = skl_cuda_##arch##_##type##_##large##_##small##_fused},
#define ATTENTION_UNFUSED(arch, type, dim, cap)                                                                      \
    {ATTENTION(arch, type, dim, cap), .dq = skl_cuda_##arch##_##type##_##dim##_dq},
#define GROUP_KERNELS(arch, type, name, cap)                                                                         \
    {ENTRY(arch, type, name, "teacher groups, dim <= 128" DETAIL_##cap), .dim_max = SKL_GROUP_DIM_MAX,               \
     .softcap = SKL_SOFTCAP_##cap, .group_rows = skl_cuda_##arch##_##type##_##name##_rows,                           \
     .group_fused = skl_cuda_##arch##_##type##_##name##_fused},
#define GROUP_TILES(arch, type, name)                                                                                \
    {ENTRY(arch, type, name, "teacher groups in tiles, dim <= 128" DETAIL_linear), .dim_max = SKL_GROUP_DIM_MAX,     \
     .group_rows = skl_cuda_##arch##_##type##_##name##_rows, .group_dq = skl_cuda_##arch##_##type##_##name##_dq,     \
     .group_dk = skl_cuda_##arch##_##type##_##name##_dk},
#define GROUP_STRIPS(arch, type, name)                                                                               \
    {ENTRY(arch, type, name, "teacher groups in strips, dim <= 128"), .dim_max = SKL_GROUP_DIM_MAX,                  \
     .strip_rows = skl_cuda_##arch##_##type##_##name##_rows,                                                         \
     .strip_gradients = skl_cuda_##arch##_##type##_##name##_gradients},
#define CARRYING_KERNEL(arch, type, name)                                                                            \
    {ENTRY(arch, type, name, "attention backward with KL, dim <= 128"), .dim_max = SKL_CARRYING_DIM_MAX,             \
     .carrying = skl_cuda_##arch##_##type##_##name##_carrying},
#define JOINT_KERNEL(arch, type, name)                                                                               \
    {ENTRY(arch, type, name, "gradients of both sides, dim <= 128"), .dim_max = SKL_SM90_JOINT_DIM_MAX,              \
     .joint = skl_cuda_##arch##_##type##_##name##_joint},
#define INDEXER_KERNELS(arch, type, kind)                                                                            \
    {ENTRY(arch, type, kind, INDEXER_DETAIL_##kind), .dim_max = SKL_INDEX_DIM_MAX,                                   \
     .kind##_rows = skl_cuda_##arch##_##type##_##kind##_rows,                                                        \
     .kind##_gradients = skl_cuda_##arch##_##type##_##kind##_gradients},

static const skl_cuda_kernel kernels[] = {
#include "cuda/instances.def"
    {.name = "cuda_general",
     .detail = "any type, size and stride: f32 arithmetic without tensor cores",
     .capability = SKL_CAPABILITY_sm80,
     .capability_end = CAPABILITY_END_sm80,
     .forward = skl_cuda_general_forward,
     .dq = skl_cuda_general_dq,
     .dk = skl_cuda_general_dk,
     .dense_rows = skl_cuda_general_dense_rows,
     .dense_gradients = skl_cuda_general_dense_gradients,
     .sparse_rows = skl_cuda_general_sparse_rows,
     .sparse_gradients = skl_cuda_general_sparse_gradients},
};

enum { KERNEL_COUNT = sizeof kernels / sizeof kernels[0] };

const skl_cuda_kernel *const skl_cuda_general = &kernels[KERNEL_COUNT - 1];

const skl_cuda_kernel *skl_cuda_kernel_at(int32_t index)
{
    return index < KERNEL_COUNT ? &kernels[index] : NULL;
}

/* Names of release 0.1.0, accepted until the next one. */
static const struct {
    const char *old_name, *name;
} aliases[] = {
    {"cuda_sm90_bf16_indexer", "cuda_sm90_bf16_dense"}, {"cuda_sm90_bf16_indexer", "cuda_sm80_bf16_sparse"},
    {"cuda_sm80_bf16_indexer", "cuda_sm80_bf16_dense"}, {"cuda_sm80_bf16_indexer", "cuda_sm80_bf16_sparse"},
    {"cuda_sm80_f16_indexer", "cuda_sm80_f16_dense"},   {"cuda_sm80_f16_indexer", "cuda_sm80_f16_sparse"},
};

bool skl_cuda_has_name(const skl_cuda_kernel *kernel, const char *name)
{
    if (strcmp(kernel->name, name) == 0)
        return true;
    for (size_t i = 0; i < sizeof aliases / sizeof aliases[0]; i++)
        if (strcmp(aliases[i].old_name, name) == 0 && strcmp(aliases[i].name, kernel->name) == 0)
            return true;
    return false;
}
