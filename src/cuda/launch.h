/* The interface between the backend (C) and its kernels (CUDA C): plain structs, by value, and one launcher each. */
#ifndef SKL_CUDA_LAUNCH_H
#define SKL_CUDA_LAUNCH_H

#include <cuda_runtime_api.h>

#include "base/kl_math.h"
#include "base/side.h"
#include "cuda/common/indexer/row_chunks.h"
#include "cuda/common/indexer/sparse_layout.h"
#include "cuda/common/strips/layout.h"

#ifdef __cplusplus
extern "C" {
#endif

/* One argument of the KL. */
typedef struct skl_cuda_argument {
    skl_input q, k;
    int32_t heads_per_key; /* query heads that share a key head */
    int32_t dim;
    int32_t capped;  /* the logit is not a multiple of the product: a softcap, or a linear link */
    int32_t linear;  /* the logit is the logarithm of the product: SKL_LINK_LINEAR */
    float scale;     /* turns a product into a logit in base 2; with a softcap into the argument of tanh */
    float softcap_2; /* softcap in base 2, and its inverse */
    float inverse_softcap_2;
    float tanh_scale, tanh_factor, product_max; /* sm90/attention/softcap.cuh */
    skl_input q_factors, k_factors;             /* factors of two-term rows: common/two_term_rows.cu */
} skl_cuda_argument;

/* Parameters of every kernel. A kernel family extends the struct by its own members (common/params.cuh). */
typedef struct skl_cuda_params {
    skl_problem problem;
    skl_call call;
    skl_cuda_argument a, b; /* teacher and student; the other way round when the KL is reversed */
    int32_t *key_bounds;    /* row bounds from the keys' side, for kernels that stream queries: the first query that
                             * attends to each key [batch, len_k], packed [total_k], then the one after the last.
                             * NULL without row bounds. Pooled teachers in strips: see block_params_of */
} skl_cuda_params;

/* A launch of attention statistics: its results, and its part of the workspace. */
typedef struct skl_stats_layout {
    uint32_t results;                     /* SKL_STATS_* */
    int32_t chunks;                       /* parts of the query tiles of a head and sequence; a block processes one */
    int32_t slots;                        /* slots of key sums of a head: one for each adder of a chunk */
    int32_t blocks;                       /* blocks that share the chunks */
    int64_t slot_stride;                  /* keys of a slot: all keys, and a stage */
    size_t keys_at, heads_at, scratch_at; /* offsets of key sums, sums of heads and scratch, bytes */
} skl_stats_layout;

/* ---- Launches ----------------------------------------------------------------------------------------------- */

typedef struct skl_cuda_launch skl_cuda_launch;
typedef cudaError_t skl_cuda_launch_function(const skl_cuda_params *params, const skl_cuda_launch *launch);
typedef skl_cuda_launch_function *skl_cuda_launcher;

/* One launch as cuda/select chose it: numbers, no addresses. A launcher obeys: it neither chooses again nor falls
 * back to another kernel. params.call.workspace is the launch's part of the workspace. */
struct skl_cuda_launch {
    const char *step;    /* "forward", "dq_s and dk_s", ... */
    const char *kernel;  /* name in the kernel list */
    const char *variant; /* one of SKL_VARIANT_* */
    const char *reason;  /* why it is this kernel */
    skl_cuda_launcher launcher;
    skl_op op;                /* the call's, or the half of the call that the launch runs: see skl_call_half */
    size_t workspace_at;      /* bytes from the start of the caller's workspace to the launch's part */
    size_t workspace_size;    /* bytes of that part */
    int32_t keeps_workspace;  /* later launches read the part; otherwise they use the same bytes for theirs */
    int32_t sm_count;         /* SMs of the device */
    int32_t smem_per_block;   /* bytes of shared memory per block, at most */
    int32_t smem_per_sm;      /* bytes of shared memory per SM */
    int32_t persistent;       /* forward: resident blocks take one tile after another */
    int32_t paired;           /* forward: two blocks of smaller tiles per SM */
    int32_t num_splits;       /* forward: splits of the keys of a query tile, merged by a second kernel */
    int32_t head_group;       /* heads whose tiles run together so that their keys stay in the L2 cache */
    int32_t tall_tiles;       /* fused backward: tiles of SKL_SM90_TALL_ROWS queries */
    int32_t teacher_side;     /* 1: gradients of q_t and k_t; 0: of q_s and k_s */
    int32_t kl_in_backward;   /* the kernel that computes the gradients also stores rows.kl */
    int32_t rows_known;       /* an earlier launch of the same call stored kl and dot_t */
    int32_t sums_dk;          /* a fused backward adds up dk in f32: in dk itself, or at the start of its workspace */
    size_t sums_t_at;         /* joint backward: offset of the sums of dk_t, bytes */
    int32_t streams_queries;  /* the tiles are keys: with row bounds the kernel reads params.key_bounds */
    int32_t halves;           /* a forward whose arguments are the halves of a side's heads; it gives their LSEs */
    int32_t lse_computed;     /* teacher groups: an earlier launch of the call computed inputs.lse_t */
    skl_strip_layout strips;  /* dense indexers and teacher groups in strips */
    skl_dense_chunk dense;    /* dense indexers on the general kernel */
    size_t pooled_at;         /* indexers on the general kernel: scratch of a pooled teacher in the launch's part */
    skl_sparse_layout sparse; /* sparse indexers */
    skl_stats_layout stats;   /* attention statistics */
};

/* Variants. cuda/select chooses by these names, and launchers report them. */
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
#define SKL_VARIANT_BLOCKS               "blocks of rows"
#define SKL_VARIANT_STREAMED             "rows, streamed queries"
#define SKL_VARIANT_TWO_TERM             "two-term rows"
#define SKL_VARIANT_CARRYING_FORWARD     "attention forward with KL"
#define SKL_VARIANT_CARRYING             "attention backward with KL"
#define SKL_VARIANT_STATS                "statistics"
#define SKL_VARIANT_STATS_COLUMNS        "statistics, queries as columns"
#define SKL_VARIANT_STATS_TOP            "top keys"
#define SKL_VARIANT_STATS_CLEAR          "clear statistics"
#define SKL_VARIANT_STATS_SUMS           "sums of statistics"
#define SKL_VARIANT_STATS_WEIGHTS        "weights of rows"
#define SKL_VARIANT_SINK_GRADIENTS       "sink gradients"

/* Every launcher reports its kernel, variant and number of splits here. Tests compare the reports with what
 * cuda/select chose; elsewhere the hook is NULL. */
typedef void (*skl_launch_hook)(const char *kernel, const char *variant, int32_t num_splits);
extern skl_launch_hook skl_cuda_launch_hook;

/* ---- Geometry that the choice depends on; the kernels assert it ---------------------------------------------- */

enum {
    SKL_GENERAL_BLOCKS_PER_SM = 2,
    SKL_SM80_TILE_MIN = 64,           /* smallest number of rows per block */
    SKL_SM90_STAGE_KEYS = 64,         /* keys per pipeline stage */
    SKL_SM90_NARROW_DIMS_MAX = 256,   /* sum of both head sizes; the wide forward has the larger ones */
    SKL_SM90_WIDE_ROWS = 128,         /* queries per tile of the wide forward */
    SKL_SM90_PAIRED_ROWS = 128,       /* queries per tile of the narrow forward with two blocks per SM */
    SKL_SM90_FUSED_DIM_MAX = 128,     /* largest head size of the gradients of a fused backward */
    SKL_SM90_BACKWARD_ROWS = 128,     /* queries per tile of the fused backward */
    SKL_SM90_TALL_ROWS = 192,         /* queries per tall tile of the fused backward */
    SKL_SM90_TALL_DIM = 64,           /* tall tiles: largest head size of the argument with gradients */
    SKL_SM90_TALL_OTHER_DIM = 128,    /* tall tiles: largest head size of the other argument */
    SKL_SM90_UNBOUNDED_F16_DIM = 256, /* head size of the f16 kernels whose gradients know no row bounds */
    SKL_HEAD_GROUP_MAX = 16,          /* heads whose tiles run together, at most */
    SKL_GROUP_DIM_MAX = 128,          /* largest head size with kernels for teacher groups: padded to 64 or 128 */
    SKL_GROUP_DIMS_MAX = 512,         /* Hopper: sum of a group's head sizes whose queries fit into shared memory */
    SKL_CARRYING_DIM_MAX = 128,       /* largest head size of the attention backward that carries the KL */
    SKL_CARRYING_KEYS = 128,          /* keys per tile of the attention backward with KL */
    SKL_CARRYING_ROWS = 128,          /* queries per tile of the attention forward that carries the KL */
    SKL_CARRYING_ROW_SIZE = 16,       /* attention backward with KL: bytes of row statistics per query */
    SKL_CARRYING_LARGEST_SIZE = 16,   /* bytes per call: maxima over all rows */
    SKL_GROUP_TILES_SIZE_MAX = 8,     /* largest teacher group in tiles; strips have the larger ones */
    SKL_GROUP_TILES_ROWS = 64,        /* queries or keys per block of group tiles */
    SKL_GROUP_TILES_BLOCKS = 2,       /* blocks per SM of group tiles */
    SKL_GROUP_TILE = 128,             /* queries per tile of a Hopper kernel for teacher groups */
    SKL_SM90_INDEX_HEADS_MAX = 64,    /* sparse indexers on Hopper: most index heads of a student head */
    SKL_SM90_INDEX_DIM_MAX = 128,     /* sparse indexers on Hopper: largest head size */
    SKL_STATS_DIM_MAX = 256,          /* largest head size with statistics */
    SKL_STATS_STAGE_KEYS = 64,        /* statistics: keys per stage */
    SKL_STATS_SUMS = 64,              /* statistics: most distances, and most ranges, of a head's sums */
    SKL_STATS_TOP_CANDIDATES = 192,   /* top keys: candidates of a row */
    SKL_STATS_SCRATCH_SIZE = 2 * 4 * SKL_STATS_SUMS + 8 * SKL_STATS_TOP_CANDIDATES, /* bytes per query of a block */
    SKL_STATS_TILE_BLOCKS = 2,    /* blocks per SM of the statistics that go through shared memory */
    SKL_SM90_STATS_ROWS = 192,    /* queries per tile of the statistics with queries as columns */
    SKL_SM90_STATS_TOP_LIST = 64, /* top keys: candidates of a lane and row, a power of two */
    SKL_SM90_STATS_TOP_ROW = 4 * 8 * SKL_SM90_STATS_TOP_LIST, /* bytes per row of a block, and their alignment */
    SKL_SM90_STATS_ADDERS = 3 /* warpgroups of a block, each with its slot of key sums */
};

/* Tensor-core kernels count rows in 32 bits. */
#define SKL_ROWS_MAX ((int64_t)1 << 30)

/* Queries per tile of the statistics that go through shared memory. */
#define SKL_STATS_ROWS(general) ((general) ? SKL_GENERAL_TILE : 64)

/* Queries per tile of a forward. `dims` is the sum of both head sizes. */
#define SKL_SM80_FORWARD_ROWS(dim)  ((dim) <= 128 ? 128 : 64)
#define SKL_SM90_FORWARD_ROWS(dims) ((dims) <= SKL_SM90_NARROW_DIMS_MAX ? 256 : SKL_SM90_WIDE_ROWS)

/* Blocks per SM that the registers of the mma.sync forward allow, and its bytes of shared memory: two stages of keys
 * and the visible range of each row. */
#define SKL_SM80_FORWARD_BLOCKS(dim, capability) ((dim) <= 64 && (capability) < 120 ? 3 : 2)
#define SKL_SM80_FORWARD_SMEM(dim)                                                                                   \
    (2 * ((dim) > 128 ? 32 : 64) * 2 * (dim)*2 + SKL_SM80_FORWARD_ROWS(dim) * 2 * (int)sizeof(int32_t))

/* Keys, at most, of a narrow forward with two blocks per SM. */
#define SKL_SM90_PAIRED_KEYS_MAX(dims) ((dims) <= 128 ? SKL_ROWS_MAX : (int64_t)2048)

/* Keys, at most, of the persistent forward with two blocks per SM. */
#define SKL_SM90_SHORT_KEYS_MAX(dims) ((dims) <= 128 ? 1024 : 2048)

/* Largest argument of the polynomial for tanh. */
#define SKL_TANH_MAX 0.75F

/* Pipeline stages of the narrow forward, at most. */
#define SKL_SM90_FORWARD_STAGES(dims) ((dims) <= 128 ? 8 : (dims) <= 192 ? 6 : 4)

/* ---- Launchers ---------------------------------------------------------------------------------------------- */

/* The general kernel: every type, size, stride and option, f32 arithmetic without tensor cores. Rows of the kernel
 * list (cuda/units) hold the launchers of the others. */
skl_cuda_launch_function skl_cuda_general_forward, skl_cuda_general_dq, skl_cuda_general_dk;
skl_cuda_launch_function skl_cuda_general_dense_rows, skl_cuda_general_dense_gradients;
skl_cuda_launch_function skl_cuda_general_sparse_rows, skl_cuda_general_sparse_gradients;

/* Attention statistics. */
skl_cuda_launch_function skl_cuda_general_stats;
skl_cuda_launch_function skl_cuda_stats_clear;   /* clears outputs and slots that other launches add to */
skl_cuda_launch_function skl_cuda_stats_sums;    /* adds the slots of keys and the sums of chunks */
skl_cuda_launch_function skl_cuda_stats_weights; /* all weights of chosen rows */

skl_cuda_launch_function skl_cuda_clear_tails;      /* clears rows and gradients after the last packed sequence */
skl_cuda_launch_function skl_cuda_bounds_by_key;    /* fills params->key_bounds */
skl_cuda_launch_function skl_cuda_bounds_of_blocks; /* fills params->key_bounds with the tables of block_params_of */
skl_cuda_launch_function skl_cuda_two_term_rows;    /* makes two-term rows: q and k of params->a and params->b */

/* Steps over rows. Merging reads the states at `argument`; the other steps read nothing there. */
typedef cudaError_t skl_cuda_row_step(const skl_cuda_params *params, const void *argument);
skl_cuda_row_step skl_cuda_states_merge, skl_cuda_states_finish, skl_cuda_sink_gradients;

/* Lets the blocks of a kernel have `memory` bytes of dynamic shared memory on the current device. */
cudaError_t skl_cuda_allow_memory(const void *kernel, size_t memory);

#ifdef __cplusplus
}
#endif

#endif
