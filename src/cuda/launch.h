/* What the backend (C) hands to a kernel (CUDA C): plain structs, by value, and one launcher per kernel. */
#ifndef SKL_CUDA_LAUNCH_H
#define SKL_CUDA_LAUNCH_H

#include <cuda_runtime_api.h>

#include "base/kl_math.h"
#include "base/side.h"
#include "cuda/common/indexer/row_chunks.h"
#include "cuda/common/indexer/strip_layout.h"

#ifdef __cplusplus
extern "C" {
#endif

/* One argument of the KL. */
typedef struct skl_cuda_argument {
    skl_input q, k;
    int32_t heads_per_key; /* query heads that share a key head */
    int32_t dim;
    int32_t capped;
    float scale;     /* turns a product into a logit in base 2; with a softcap into the argument of tanh */
    float softcap_2; /* softcap in base 2, and its inverse */
    float inverse_softcap_2;
    float tanh_scale, tanh_factor, product_max; /* sm90/attention/softcap.cuh */
    skl_input q_factors, k_factors;             /* of two-term rows (common/two_term_rows.cu), if q and k have such */
} skl_cuda_argument;

/* Common to all kernels; each kernel family extends it by its own members (common/params.cuh). */
typedef struct skl_cuda_params {
    skl_problem problem;
    skl_call call;
    skl_cuda_argument a, b; /* teacher and student; the other way round when the KL is reversed */
    int32_t *key_bounds;    /* row bounds from the keys' side, for kernels that stream queries: the first query that
                             * attends to each key [batch, len_k], packed [total_k], and then the one after the last;
                             * NULL: none */
} skl_cuda_params;

/* ---- Launches ----------------------------------------------------------------------------------------------- */

typedef struct skl_cuda_launch skl_cuda_launch;
typedef cudaError_t (*skl_cuda_launcher)(const skl_cuda_params *params, const skl_cuda_launch *launch);

/* One launch as cuda/select chose it. A launcher obeys: it neither chooses again nor falls back to another kernel. */
struct skl_cuda_launch {
    const char *step;    /* "forward", "dq_s and dk_s", ... */
    const char *kernel;  /* its name in the kernel list */
    const char *variant; /* of the kernel */
    skl_cuda_launcher launcher;
    int32_t sm_count;
    int32_t smem_per_block;  /* bytes, at most */
    int32_t smem_per_sm;     /* the same */
    int32_t persistent;      /* forward: resident blocks take one tile after another */
    int32_t paired;          /* forward: two blocks of smaller tiles per SM */
    int32_t num_splits;      /* forward: splits of the keys of a query tile, merged by a second kernel */
    int32_t head_group;      /* heads whose tiles run together so that their keys stay in the L2 cache */
    int32_t tall_tiles;      /* fused backward: tiles of SKL_SM90_TALL_ROWS queries */
    int32_t teacher_side;    /* gradients of q_t or k_t, not of q_s or k_s */
    int32_t kl_in_backward;  /* rows.kl comes out of the kernel that computes the gradients */
    int32_t rows_known;      /* an earlier launch of the same call stored kl and dot_t */
    skl_output dk_sums;      /* where a fused backward adds up dk in f32: dk itself or workspace; no data: no dk */
    skl_output dk_sums_t;    /* joint backward: those of dk_t; dk_sums are those of dk_s */
    int32_t streams_queries; /* a gradient whose tiles are keys: with row bounds it reads params.key_bounds */
    int32_t halves;          /* a forward whose arguments are the halves of a side's heads: gives their LSEs */
    skl_output lse;          /* teacher groups: where a launch writes LSEs, and a forward finds the computed ones */
    skl_index_layout strips; /* of a dense indexer or of teacher groups on tensor cores */
    skl_dense_chunk dense;   /* of an indexer without them, dense */
    skl_sparse_layout sparse;
    skl_output gradient;      /* backward of the student's attention: what a launch computes, and its type */
    skl_dtype gradient_dtype; /* and the f32 gradient of the KL that it adds, which may be the same */
    skl_output added;
    float *output_dots;   /* <do, o> of each row, in the workspace */
    skl_output dq_sums;   /* attention backward with KL: where it adds up dq in f32, in the workspace */
    void *attention_rows; /* and what it reads per row, in the workspace */
    size_t states_at;     /* forward: offset of split states in the workspace */
    size_t workspace_size;
    const char *reason; /* why this kernel and not another */
};

/* Variants, as cuda/select and the launchers name them. */
#define SKL_VARIANT_PERSISTENT           "persistent"
#define SKL_VARIANT_TILES                "one tile per block"
#define SKL_VARIANT_PAIRED               "one tile per block, two blocks per SM"
#define SKL_VARIANT_SHORT                "persistent, two blocks per SM"
#define SKL_VARIANT_SOFTCAP              "softcap, one tile per block"
#define SKL_VARIANT_FUSED                "fused backward"
#define SKL_VARIANT_FUSED_TALL           "fused backward, 192 queries per tile"
#define SKL_VARIANT_FUSED_SOFTCAP        "fused backward, softcap"
#define SKL_VARIANT_JOINT                "joint backward"
#define SKL_VARIANT_DQ                   "dq"
#define SKL_VARIANT_DQ_SOFTCAP           "dq, softcap"
#define SKL_VARIANT_DK                   "dk"
#define SKL_VARIANT_DK_SOFTCAP           "dk, softcap"
#define SKL_VARIANT_GROUPS               "teacher groups"
#define SKL_VARIANT_FUSED_GROUPS         "fused backward, teacher groups"
#define SKL_VARIANT_GROUPS_SOFTCAP       "teacher groups, softcap"
#define SKL_VARIANT_FUSED_GROUPS_SOFTCAP "fused backward, teacher groups, softcap"
#define SKL_VARIANT_DQ_GROUPS            "dq, teacher groups"
#define SKL_VARIANT_DK_GROUPS            "dk, teacher groups"
#define SKL_VARIANT_ROWS                 "rows"
#define SKL_VARIANT_GRADIENTS            "gradients"
#define SKL_VARIANT_RESIDENT             "rows, queries in shared memory"
#define SKL_VARIANT_GRID_STRIDE          "grid stride"
#define SKL_VARIANT_CLEAR                "clear"
#define SKL_VARIANT_BOUNDS               "row bounds by key"
#define SKL_VARIANT_STREAMED             "rows, streamed queries"
#define SKL_VARIANT_TWO_TERM             "two-term rows"
#define SKL_VARIANT_CARRYING             "attention backward with KL"
#define SKL_VARIANT_DOTS                 "output dots"
#define SKL_VARIANT_OUTPUT_DQ            "attention backward, dq"
#define SKL_VARIANT_OUTPUT_DK            "attention backward, dk"
#define SKL_VARIANT_OUTPUT_DV            "attention backward, dv"

/* The name of the kernel, its variant and the number of splits, as every launcher reports them when it launches. NULL
 * outside of tests, which compare them with what cuda/select chose. */
typedef void (*skl_launch_hook)(const char *kernel, const char *variant, int32_t num_splits);
extern skl_launch_hook skl_cuda_launch_hook;

/* ---- Geometry that the choice depends on; the kernels assert it ---------------------------------------------- */

enum {
    SKL_GENERAL_BLOCKS_PER_SM = 2,
    SKL_SM80_TILE_MIN = 64,         /* rows per block, at least */
    SKL_SM80_BLOCKS_PER_SM_MAX = 3, /* that splits are made for */
    SKL_SPLIT_ROWS_MAX = 512,       /* rows of split states per SM: bounds the workspace */
    SKL_SM90_STAGE_KEYS = 64,
    SKL_SM90_NARROW_DIMS_MAX = 256,   /* of both arguments: larger ones have the wide forward */
    SKL_TWO_TERM_DIM_MAX = 128,       /* head sizes with kernels for two-term rows */
    SKL_SM90_WIDE_ROWS = 128,         /* queries per tile of the wide forward */
    SKL_SM90_PAIRED_ROWS = 128,       /* queries per tile of the narrow forward with two blocks per SM */
    SKL_SM90_FUSED_DIM_MAX = 128,     /* of the gradients of a fused backward */
    SKL_SM90_BACKWARD_ROWS = 128,     /* queries per tile of the fused backward */
    SKL_SM90_TALL_ROWS = 192,         /* with tall tiles */
    SKL_SM90_TALL_DIM = 64,           /* largest head size of the argument with gradients then, and ... */
    SKL_SM90_TALL_OTHER_DIM = 128,    /* ... of the other one */
    SKL_SM90_UNBOUNDED_F16_DIM = 256, /* f16 kernels whose gradients have no row bounds */
    SKL_SM90_JOINT_DIM_MAX = 128,     /* head sizes with a joint backward */
    SKL_HEAD_GROUP_MAX = 16,
    SKL_GROUP_DIM_MAX = 128,        /* head sizes with kernels for teacher groups, which are padded to 64 or 128 */
    SKL_GROUP_DIMS_MAX = 512,       /* of all teacher heads of a group: their queries stay in shared memory */
    SKL_CARRYING_DIM_MAX = 128,     /* head sizes with an attention backward that carries the KL */
    SKL_CARRYING_KEYS = 128,        /* per tile of such a backward */
    SKL_CARRYING_ROW_SIZE = 16,     /* bytes that it reads per query */
    SKL_CARRYING_LARGEST_SIZE = 16, /* and about all of them */
    SKL_GROUP_TILES_SIZE_MAX = 8,   /* teacher heads of a group in tiles; larger ones are in strips */
    SKL_GROUP_TILES_ROWS = 64,      /* queries or keys of a block there */
    SKL_GROUP_TILES_BLOCKS = 2,     /* per SM */
    SKL_GROUP_TILE = 128            /* queries of a tile on Hopper */
};

/* Tensor-core kernels count rows in 32 bits. */
#define SKL_ROWS_MAX ((int64_t)1 << 30)

/* Queries per tile of a forward. */
#define SKL_SM80_FORWARD_ROWS(dim) ((dim) <= 128 ? 128 : 64)
#define SKL_SM90_FORWARD_ROWS(dims)                                                                                  \
    ((dims) <= SKL_SM90_NARROW_DIMS_MAX ? 256 : SKL_SM90_WIDE_ROWS) /* of both arguments */

/* Keys, at most, of a narrow forward with two blocks per SM. */
#define SKL_SM90_PAIRED_KEYS_MAX(dims) ((dims) <= 128 ? SKL_ROWS_MAX : (int64_t)2048)

/* Keys, at most, of the persistent forward with two blocks per SM. */
#define SKL_SM90_SHORT_KEYS_MAX(dims) ((dims) <= 128 ? 1024 : 2048)

/* What instances.def says of softcaps. */
#define SKL_SOFTCAP_softcap true
#define SKL_SOFTCAP_linear  false

/* Largest argument of the polynomial for tanh. */
#define SKL_TANH_MAX 0.75F

/* Pipeline stages of the narrow forward, at most. */
#define SKL_SM90_FORWARD_STAGES(dims) ((dims) <= 128 ? 8 : (dims) <= 192 ? 6 : 4)

/* ---- Launchers ---------------------------------------------------------------------------------------------- */

#define SKL_DECLARE_LAUNCHER(name) cudaError_t name(const skl_cuda_params *params, const skl_cuda_launch *launch);

/* Every type, size, stride and option, f32 arithmetic without tensor cores. */
SKL_DECLARE_LAUNCHER(skl_cuda_general_forward)
SKL_DECLARE_LAUNCHER(skl_cuda_general_dq)
SKL_DECLARE_LAUNCHER(skl_cuda_general_dk)
SKL_DECLARE_LAUNCHER(skl_cuda_general_output_dots)
SKL_DECLARE_LAUNCHER(skl_cuda_general_output_dq)
SKL_DECLARE_LAUNCHER(skl_cuda_general_output_dk)
SKL_DECLARE_LAUNCHER(skl_cuda_general_output_dv)
SKL_DECLARE_LAUNCHER(skl_cuda_general_dense_rows)
SKL_DECLARE_LAUNCHER(skl_cuda_general_dense_gradients)
SKL_DECLARE_LAUNCHER(skl_cuda_general_sparse_rows)
SKL_DECLARE_LAUNCHER(skl_cuda_general_sparse_gradients)

/* Tensor cores. Blocks of a forward that an SM holds at once are asked for apart: splits depend on it. */
#define ATTENTION_UNFUSED(arch, dtype, dim, cap)                                                                     \
    SKL_DECLARE_LAUNCHER(skl_cuda_##arch##_##dtype##_##dim##_forward)                                                \
    SKL_DECLARE_LAUNCHER(skl_cuda_##arch##_##dtype##_##dim##_dq)                                                     \
    SKL_DECLARE_LAUNCHER(skl_cuda_##arch##_##dtype##_##dim##_dk)                                                     \
    int skl_cuda_##arch##_##dtype##_##dim##_blocks_per_sm(void);
#define ATTENTION_FUSED(arch, dtype, dim, cap)                                                                       \
    SKL_DECLARE_LAUNCHER(skl_cuda_##arch##_##dtype##_##dim##_forward)                                                \
    SKL_DECLARE_LAUNCHER(skl_cuda_##arch##_##dtype##_##dim##_fused)                                                  \
    SKL_DECLARE_LAUNCHER(skl_cuda_##arch##_##dtype##_##dim##_dk)                                                     \
    int skl_cuda_##arch##_##dtype##_##dim##_blocks_per_sm(void);
#define ATTENTION_PAIR(arch, dtype, large, small)                                                                    \
    SKL_DECLARE_LAUNCHER(skl_cuda_##arch##_##dtype##_##large##_##small##_forward)                                    \
    SKL_DECLARE_LAUNCHER(skl_cuda_##arch##_##dtype##_##large##_##small##_fused)
#define GROUP_KERNELS(arch, dtype, name, cap)                                                                        \
    SKL_DECLARE_LAUNCHER(skl_cuda_##arch##_##dtype##_##name##_rows)                                                  \
    SKL_DECLARE_LAUNCHER(skl_cuda_##arch##_##dtype##_##name##_fused)
#define GROUP_TILES(arch, dtype, name)                                                                               \
    SKL_DECLARE_LAUNCHER(skl_cuda_##arch##_##dtype##_##name##_rows)                                                  \
    SKL_DECLARE_LAUNCHER(skl_cuda_##arch##_##dtype##_##name##_dq)                                                    \
    SKL_DECLARE_LAUNCHER(skl_cuda_##arch##_##dtype##_##name##_dk)
#define GROUP_STRIPS(arch, dtype, name)                                                                              \
    SKL_DECLARE_LAUNCHER(skl_cuda_##arch##_##dtype##_##name##_rows)                                                  \
    SKL_DECLARE_LAUNCHER(skl_cuda_##arch##_##dtype##_##name##_gradients)
#define CARRYING_KERNEL(arch, dtype, name) SKL_DECLARE_LAUNCHER(skl_cuda_##arch##_##dtype##_##name##_carrying)
#define JOINT_KERNEL(arch, dtype, name)    SKL_DECLARE_LAUNCHER(skl_cuda_##arch##_##dtype##_##name##_joint)
#define INDEXER_KERNELS(arch, dtype, stage)                                                                          \
    SKL_DECLARE_LAUNCHER(skl_cuda_##arch##_##dtype##_##stage##_rows)                                                 \
    SKL_DECLARE_LAUNCHER(skl_cuda_##arch##_##dtype##_##stage##_gradients)
#include "cuda/instances.def"
#undef INDEXER_KERNELS
#undef JOINT_KERNEL
#undef CARRYING_KERNEL
#undef GROUP_STRIPS
#undef GROUP_TILES
#undef GROUP_KERNELS
#undef ATTENTION_PAIR
#undef ATTENTION_FUSED
#undef ATTENTION_UNFUSED
#undef SKL_DECLARE_LAUNCHER

/* Clears the rows and gradients after the last packed sequence. */
cudaError_t skl_cuda_clear_tails(const skl_cuda_params *params, const skl_cuda_launch *launch);

/* Fills params->key_bounds. */
cudaError_t skl_cuda_bounds_by_key(const skl_cuda_params *params, const skl_cuda_launch *launch);

/* Makes two-term rows of all rows: q and k of params->a and params->b. */
cudaError_t skl_cuda_two_term_rows(const skl_cuda_params *params, const skl_cuda_launch *launch);

cudaError_t skl_cuda_states_merge(int64_t count, skl_row_state *into, const skl_row_state *from, cudaStream_t stream);
cudaError_t skl_cuda_states_finish(const skl_cuda_params *params);

cudaError_t skl_cuda_sink_rows(const skl_cuda_params *params, const skl_sink_rows *rows);
cudaError_t skl_cuda_sink_gradients(const skl_cuda_params *params, const skl_input *kl);

#ifdef __cplusplus
}
#endif

#endif
